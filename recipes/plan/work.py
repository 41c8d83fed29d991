"""One training step in neutral numbers: what is computed, moved and sent, whoever wrote the program.

A recipe is one way to state a step; a published measurement of another program is another (tests/published/rows.py).
Imports no torch.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import add
from typing import Literal, NamedTuple

from models.config import LINEARS, ModelConfig
from parallel.config import MeshDegrees
from recipes.plan.parts import of_parts
from recipes.recipe.schema import Recipe

Kernel = Literal["flash", "flash3", "cudnn", "triton", "math"]
Recompute = Literal["none", "selective", "full", "every second product"]
"""The values of activation_checkpointing.mode; the last one is torchtitan's "selective"."""

Casts = Literal["torchao", "te, each", "te, delayed", "te, current"]
"""torchao, in eager operators or in generated code; or Transformer Engine: each linear by itself, or fused with the
kernels before it, with scales from steps before (delayed) or from a look at the tensor (current)."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer."""

    count: int
    chosen: int
    """Experts of a token."""
    width: int
    """The inner width of each."""
    share: float
    """Share of the layers that have them."""
    degree: int
    """Processes that they are divided over."""
    assumed: frozenset[str] = frozenset()
    """What another program does with all-to-all: the words of routing.py."""


@dataclass(frozen=True)
class Work:
    """A step of one process. Widths are of the whole model."""

    layers: int
    width: int
    query: int
    """Heads times their width."""
    key: int
    inner: int
    """Inner width of what computes every token, on average over the layers."""
    head_width: int
    vocabulary: int
    tied: bool
    replicate: int
    shard: int
    sequence: int
    micro_batch: int
    micro_batches: int
    """Micro-batches of one step, on each process."""
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Stages that each process of a pipeline has."""
    stages: tuple[int, int] | None = None
    """Most layers of a process without the output projection, and those of the one with it; None: equal ones."""
    attended: float = 1.0
    """Share of a causal text's pairs of tokens that windows leave, the mean of all layers."""
    windowed: float = 0.0
    """The part of this share in layers with windows."""
    bubble: float = 1.0
    """Share of a pipeline's bubble that gradients of weights do not fill."""
    gated: bool = True
    """SwiGLU with RMSNorm and rotary embeddings, three matrices; else GELU with LayerNorm, two."""
    context_by: Literal["heads", "gather", "ring"] = "heads"
    """The value of mesh.context_by; "ring" = keys and values come part by part, whose results are merged."""
    element: int = 2
    """Bytes of an element of activations."""
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    plain_linears: frozenset[str] = frozenset()
    """Names in LINEARS of the linears that are not in float8 all the same."""
    float8_head: bool = False
    float8_weights: bool = False
    """Whether weights are gathered in float8."""
    float8_activations: bool = False
    """Whether tensor-parallel activations are gathered in float8."""
    reduced: int = 4
    """Bytes of an element of gradients that are reduced."""
    moments: int = 8
    """Bytes of all moments of an element that is in no matrix of Muon's."""
    compiled_update: bool = False
    """Whether AdamW's kernels are compiled, and read and write each state once; else torch's fused kernel updates."""
    newton_schulz: int = 0
    """Steps of Muon for the blocks' matrices; 0 = AdamW for these too."""
    clipping: int = 12
    """Bytes that the gradient norm and clipping move per parameter: 4 to read gradients, 8 to scale them in a pass."""
    recompute: Recompute = "none"
    recomputed: float = 0.0
    """Share of the layers that recompute."""
    compiled: bool = True
    compiled_loss: bool = True
    chunked_loss: bool = False
    """Whether a loss that is not compiled goes chunk by chunk, by this program's own operators."""
    kernel: Kernel = "flash"
    reshard: bool = True
    """ZeRO-3; else weights are gathered once per step."""
    reduces_each: bool = False
    """Whether gradients are reduced with every micro-batch."""
    overlap_tensor: bool = False
    scatters: int = 2
    """Sums of gradients in a tensor group, backward in a block: of what attention and feed-forward have read."""
    copies_tokens: bool = True
    """Whether what a tensor group gathers is copied, because sequences are not a tensor's first dimension."""
    whole_loss: bool = False
    """Whether each process of a tensor group gathers all logits and computes the loss of all of them."""
    casts: Casts = "torchao"
    """The code that casts tensors to float8."""
    fused_accumulation: bool = False
    """Whether products add gradients of weights up in float32 (Megatron)."""
    per_node: int = 8
    """Processes of a node."""
    experts: Experts | None = None
    parts: tuple[tuple[str, tuple[int, int]], ...] = ()
    """(such as "attention.gate_proj", whole outputs and inputs) of each matrix, where not all parts are ours."""
    rows: frozenset[str] = frozenset({"o_proj", "down_proj"})
    """The linears that tensor groups cut by inputs."""
    moved: float = 0.0
    """Bytes that kernels of registered parts, of sinks and of biases of experts move per token, in bfloat16, more than
    those of ours."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one process, before tensor parallelism shares their computation."""
        return self.micro_batch * self.sequence // self.context

    @property
    def own_tokens(self) -> float:
        """Tokens of a micro-batch that a process has between the parts of a block."""
        return self.tokens / self.tensor

    @property
    def attended_by(self) -> dict[Kernel, float]:
        """Kernel -> the part of `attended` that it computes. cuDNN has no kernel for windows."""
        if self.kernel != "cudnn":
            return {self.kernel: self.attended}
        return {"cudnn": self.attended - self.windowed, "flash": self.windowed}

    @property
    def gathered(self) -> float:
        """Bytes of an element of a block's gathered weights, on average."""
        if not self.float8_weights:
            return self.element
        plain = sum(prod(shape) for name, shape in self.linears.items() if name in self.plain_linears)
        return 1 + (self.element - 1) * plain / self.block_params

    @property
    def expert_params(self) -> float:
        """Parameters of experts that a process of a mesh without FSDP has, in a layer on average."""
        if (experts := self.experts) is None:
            return 0
        return 3 * self.width * experts.width * experts.count * experts.share / experts.degree

    def expert_rows(self, imbalance: float = 1.0) -> float:
        """Rows that this process's experts compute in a micro-batch; its own tokens alone, if it has all experts."""
        assert self.experts is not None
        return self.own_tokens * self.experts.chosen * (imbalance if self.experts.degree > 1 else 1.0)

    @property
    def per_layer(self) -> int:
        """Processes that have the parts of one copy of a layer."""
        return self.shard * self.context * self.tensor

    @property
    def expert_shards(self) -> int:
        """Processes that FSDP deals experts out to."""
        return self.per_layer // (self.experts.degree if self.experts else 1)

    @property
    def own_layers(self) -> float:
        """Layers of a process, on average."""
        return self.layers / self.pipeline

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> whole (outputs, inputs) of each linear of one layer, without experts."""
        width, query, key, inner = self.width, self.query, self.key, self.inner
        query_shape, key_shape, up = (query, width), (key, width), (inner, width)
        shapes = query_shape, key_shape, key_shape, query_shape[::-1], up, up, up[::-1]
        ours = {
            name: shape
            for name, shape in zip(LINEARS, shapes, strict=True)
            if prod(shape) and (self.gated or name != "gate_proj")
        }
        return dict(self.parts) or ours

    @property
    def block_params(self) -> int:
        """Matrix parameters of one layer, whole, without experts."""
        return sum(map(prod, self.linears.values()))


def work_of(recipe: Recipe, degrees: MeshDegrees, *, per_node: int = 8, auto: Kernel = "cudnn") -> Work:
    """A step of the recipe on a mesh of these degrees.

    auto: what torch chooses on the device for plain attention in bfloat16.
    """
    model, batch, fsdp, checkpointing = recipe.model, recipe.batch, recipe.fsdp, recipe.activation_checkpointing
    optimizer = recipe.optimizer
    attended = model.attention_share(batch.sequence_length)
    without_windows = sum(not model.window_of(layer) for layer in range(model.layers)) / model.layers
    found = Work(
        layers=model.layers,
        width=model.width,
        query=model.heads * model.head_width,
        key=model.key_value_heads * model.head_width,
        inner=_inner(model) if model.experts else model.feed_forward_width,
        head_width=model.head_width,
        vocabulary=model.vocabulary,
        tied=model.tied_embeddings,
        replicate=degrees.replicate,
        shard=degrees.shard,
        context=degrees.context,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        virtual=recipe.pipeline.runs if degrees.pipeline > 1 else 1,
        stages=_stages(recipe, degrees) if degrees.pipeline > 1 else None,
        bubble=1 / 3 if recipe.pipeline.splits_backward else 1.0,
        sequence=batch.sequence_length,
        attended=attended,
        windowed=attended - without_windows if 0 < model.window < batch.sequence_length else 0.0,
        micro_batch=batch.micro_batch_size,
        micro_batches=max(1, batch.micro_batches(degrees)),
        context_by=recipe.mesh.context_by,
        element=2 if fsdp.param_dtype == "bfloat16" else 4,
        float8="none" if recipe.float8.emulate else recipe.float8.recipe,
        plain_linears=recipe.float8.plain_linears,
        float8_head=not model.tied_embeddings and "lm_head" not in recipe.float8.exclude,
        float8_weights=recipe.float8.all_gather,
        float8_activations=recipe.float8.gather_activations,
        reduced=2 if fsdp.reduce_dtype == "bfloat16" else 4,
        moments=optimizer.state_bytes(1, 0),
        compiled_update=recipe.compiles_updates or not optimizer.facts.skips,  # of one of your own, the least there is
        newton_schulz=optimizer.ns_steps if optimizer.facts.orthogonalizes else 0,
        clipping=4 + (_scaling_bytes(recipe) if optimizer.grad_clip else 0),
        recompute=checkpointing.mode,
        recomputed=len(checkpointing.recomputed(model.layers)) / model.layers,
        compiled=recipe.compile.enabled,
        compiled_loss=recipe.compile.enabled,
        chunked_loss=batch.loss_chunks > 1,
        kernel=_chosen(recipe, auto) if recipe.attention.backend == "auto" else recipe.attention.backend,
        reshard=fsdp.reshard_after_forward,
        overlap_tensor=recipe.mesh.overlap_tensor,
        per_node=per_node,
        experts=_experts(model, degrees) if model.experts else None,
        moved=_moved_for_parts(model),
    )
    return replace(found, **of_parts(model, recipe.float8, inner=found.inner))


def _experts(model: ModelConfig, degrees: MeshDegrees) -> Experts:
    share = 1 - len(model.dense) / model.layers
    return Experts(model.experts, model.experts_per_token, model.expert_width, share, degrees.expert)


def _moved_for_parts(model: ModelConfig) -> float:
    """As Work.moved, of ours, counted by hand: attention's output is scaled for sinks, 4 bytes an element, and summed
    with its gradient, 8; biases of experts are copied for each row, read and added, 8, and summed, 2."""
    sinks = 12 * model.heads * model.head_width * model.attention_sinks
    outputs = model.experts_per_token * (2 * model.expert_width + model.width)
    return sinks + 10 * outputs * model.biases * sum(map(model.is_sparse, range(model.layers))) / model.layers


def _inner(model: ModelConfig) -> int:
    """As in Work."""
    dense = len(model.dense)
    shared = (model.layers - dense) * model.shared_experts * model.expert_width
    return round((dense * model.feed_forward_width + shared) / model.layers)


def _stages(recipe: Recipe, degrees: MeshDegrees) -> tuple[int, int]:
    """As in Work."""
    stages = recipe.pipeline_stages(degrees.pipeline)
    layers = [len(stages.layers_of(rank)) for rank in range(degrees.pipeline)]
    return max(layers[: stages.ends[1]] + layers[stages.ends[1] + 1 :]), layers[stages.ends[1]]


def _chosen(recipe: Recipe, auto: Kernel) -> Kernel:
    """What torch chooses: asked of 2.11 to 2.13 on a GPU that computes nothing, by kernel_of_auto()."""
    model = recipe.model
    if recipe.fsdp.param_dtype == "float32" and auto == "cudnn":
        # Its like, of memory-efficient attention, which has no sinks.
        return "math" if model.heads != model.key_value_heads or model.attention_sinks else "flash"
    masked = model.attention_sinks or recipe.data.document_mask or recipe.data.has_pairs or recipe.mesh.gathers_tokens
    # A deterministic run has no cuDNN, whose gradients are added up as they come.
    return "flash" if masked or model.is_encoder_decoder or recipe.run.deterministic else auto


def _scaling_bytes(recipe: Recipe) -> int:
    """Bytes per parameter of clipping: most take a pass, and torch's AdamW kernel writes what it divides."""
    facts = recipe.optimizer.facts
    if facts.orthogonalizes or not facts.skips:
        return 8
    return 0 if recipe.compiles_updates else 4


class Moved(NamedTuple):
    """Bytes that the kernels of a block move besides products and attention, forward and backward."""

    stream: float
    """Bytes per token and element of the residual stream, half of which go with the width of the queries."""
    key: float
    inner: float
    weights: float
    """Bytes per matrix parameter, in each micro-batch."""
    kernels: int
    """Kernels launched, with those of products and attention."""
    wide: float = 0.0
    """Further bytes per element of the stream where a row is longer than WIDE: its norm reads it again."""


WIDE = 4096
COMPILED = {
    ("none", "none"): Moved(45.3, 8.2, 16.5, 0.2, 36, 12.4),
    ("none", "selective"): Moved(52.3, 12.2, 18.7, 0.3, 38, 11.8),
    ("none", "full"): Moved(73.9, 12.3, 18.7, 0.3, 48, -2.4),
    ("tensorwise", "none"): Moved(75.4, 18.2, 26.5, 8.2, 91, 8.4),
    ("tensorwise", "selective"): Moved(78.3, 22.2, 26.7, 8.3, 93, 7.8),
    ("tensorwise", "full"): Moved(110.3, 24.3, 26.4, 11.2, 125, -2.0),
    ("gathered", "none"): Moved(75.5, 18.1, 26.5, 2.2, 77, 8.5),
    ("gathered", "selective"): Moved(78.0, 22.2, 26.7, 2.3, 79, 7.6),
    ("gathered", "full"): Moved(109.1, 22.2, 26.7, 2.3, 101, -2.3),
    ("rowwise", "none"): Moved(96.2, 23.3, 28.4, 11.2, 98, 1.3),
    ("rowwise", "selective"): Moved(99.0, 27.4, 28.7, 11.3, 100, 0.6),
    ("rowwise", "full"): Moved(118.3, 27.3, 28.4, 12.9, 118, -0.5),
}
"""Least squares over the rows of tests/generated_code.csv, which it repeats within 1.5% (a test)."""
EAGER = Moved(252, 60, 28, 0, 120)
"""Operator by operator: norms in float32 (36 bytes forward each), residual sums, rotations, SwiGLU; backward twice.
In float32 norms need no casts (28 bytes each, and 24 for both sums), the others move twice as much."""
EAGER_GELU = Moved(64, 12, 10, 0, 70)
"""LayerNorm is one operator, so is GELU; nothing is rotated."""
ENGINE = {
    "te, each": Moved(24, 8, 8, 4, 30),
    "te, delayed": Moved(16, 8, 0, 0, 15),
    "te, current": Moved(28, 12, 6, 0, 30),
}
"""What Transformer Engine's casts add: an element is read once, 2 bytes, and written twice, straight and transposed.
Fused with norms and SwiGLU, only the outputs of attention and products remain; a look for the scale reads 2 more."""
UNGATED = 6.5
"""Fewer bytes per element of the inner width without a gate: an activation reads 2 and writes 2, then 4 and 2."""
EAGER_CASTS = 21
"""Bytes per element to cast to float8 without torch.compile: scale 8, clamp 8, cast 5 (torchao 0.18)."""
AGAIN = 1 / 3
"""Share of the forward pass in the bytes of eager code."""


def moved_by(work: Work, recompute: Recompute) -> Moved:
    """What a block that recomputes like this moves."""
    if work.compiled:
        kind: str = "rowwise" if work.float8.startswith("rowwise") else work.float8
        if work.casts != "torchao":
            kind = "none"
        if kind == "tensorwise" and work.float8_weights:
            kind = "gathered"
        moved = COMPILED[kind, "selective" if recompute == "every second product" else recompute]
        moved = moved if work.gated else moved._replace(inner=moved.inner - UNGATED)
        return _with_casts(work, moved)
    moved = _with_casts(work, EAGER if work.gated else EAGER_GELU)
    casts = 3 * EAGER_CASTS if work.float8 != "none" and work.casts == "torchao" else 0.0
    again, wider = 1.0 if recompute == "none" else 1 + AGAIN, work.element / 2
    norms = 1.0 if work.gated else wider
    return Moved(
        again * norms * moved.stream + 3 * casts,
        again * wider * moved.key + 2 * casts,
        again * wider * moved.inner + 3 * casts,
        moved.weights + casts,
        round(again * moved.kernels) + (60 if casts else 0),
    )


def _with_casts(work: Work, found: Moved) -> Moved:
    """What a block moves with the casts of Transformer Engine, if that casts."""
    if work.float8 == "none" or work.casts == "torchao":
        return found
    return Moved(*map(add, found, ENGINE[work.casts]))


def moved_bytes(work: Work, recompute: Recompute) -> tuple[float, int]:
    """Bytes that a block moves for one micro-batch on one process, and the kernels that it launches."""
    moved, tensor = moved_by(work, recompute), work.tensor
    stream = moved.stream + (moved.wide if work.width > WIDE and work.compiled else 0)
    elements = stream * (work.width + work.query) / 2 + moved.key * work.key + moved.inner * work.inner
    wider = work.element / 2 if work.compiled else 1.0
    return wider * (work.tokens * (elements + work.moved) + moved.weights * work.block_params) / tensor, moved.kernels
