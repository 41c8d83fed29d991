"""The shape of a decoder, and numbers computed from it. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from models.registry import OURS, PLACES, Part, Place, find, problems_of_parts

AttentionFlops = Literal["causal", "full"]
Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
FROM_WEIGHTS = "from_weights"
"""The value of model.name for the model of model.weights, and of data.tokenizer for their tokenizer."""
FROM_CONFIG = "from_config"
"""The value of model.name for the model of model.config, with random weights."""
CUSTOM = "custom"
"""The value of model.name for a shape of one's own: the recipe writes every field without a default."""
SMALLEST, MOST = 1.18e-38, 3.4e38
"""The smallest and the largest normal number of float32."""
# Far beyond every published model. Without a limit, one wrong digit would list or allocate until the memory is full.
LARGEST = {
    "layers": 10_000,
    "width": 2**20,
    "feed_forward_width": 2**22,
    "heads": 2**16,
    "key_value_heads": 2**16,
    "head_width": 2**16,
    "vocabulary": 2**24,
    "experts": 2**14,
    "expert_width": 2**22,
    "shared_experts": 2**10,
    **dict.fromkeys(("latent_width", "query_latent_width", "rope_width", "value_width"), 2**16),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of a block, in their order."""
LINEARS_IN = {"blocks": LINEARS, "attention": LINEARS[:4], "feed_forward": LINEARS[4:]}
"""Part of a dotted name -> the linears of a block whose names have it."""
OF_EXPERTS = (
    *("expert", "shared_experts", "dense_layers", "sparse_every", "further_dense_layers"),
    *("router", "normalize_scores", "groups_per_token"),
)
"""Beginnings of the fields of a model that a dense one does not have."""
PATTERNS = {
    "uses_rope": ("no_rope_every", "no_rope_layers"),
    "window_of": ("window", "full_attention_every", "full_attention_layers"),
    "is_sparse": ("dense_layers", "sparse_every", "further_dense_layers"),
}
"""The method that says what a layer is -> the fields it follows from: an interval, and a list of single layers."""
LISTS = tuple(fields[-1] for fields in PATTERNS.values())
WINDOWS = {"full_attention_every": 0, "full_attention_layers": (), "rope_local_theta": 0, "rope_scaled_layers": "all"}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of the decoder. `name` selects values from models/sizes.py; every field can override one."""

    name: str
    """A size from models/sizes.py, "from_weights" or "from_config" for the shape of those, or "custom" for your own."""
    layers: Annotated[int, Ge(1)]
    """Number of blocks."""
    width: Annotated[int, Ge(1)]
    """Width of the residual stream (hidden size)."""
    feed_forward_width: Annotated[int, Ge(1)]
    """Inner width of the gated feed-forward."""
    heads: Annotated[int, Ge(1)]
    """Query heads per layer."""
    key_value_heads: Annotated[int, Ge(1)]
    """Key and value heads per layer; must divide `heads` (grouped-query attention)."""
    head_width: Annotated[int, Ge(2)]
    """Width of one head of queries and keys; even, because rotary embeddings rotate pairs."""
    vocabulary: Annotated[int, Ge(2)]
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    tied_embeddings: bool
    """Share the embedding matrix with the output projection."""
    norm_eps: Annotated[float, Gt(0)]
    """Epsilon of every RMSNorm."""
    rope_theta: Annotated[float, Gt(0)]
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "llama3", "linear", "yarn"] = "none"
    """Rescaling of the rotary frequencies: "llama3" (Llama 3.1, 3.2), "linear" (Gemma 3), "yarn" (OLMo 3)."""
    rope_factor: Annotated[float, Ge(1)] = 8.0
    """Scaling: factor by which low frequencies are divided; "linear": all."""
    rope_low_frequency_factor: Annotated[float, Gt(0)] = 1.0
    """llama3 scaling: wavelengths above original length / this are scaled fully."""
    rope_high_frequency_factor: Annotated[float, Gt(0)] = 4.0
    """llama3 scaling: wavelengths below original length / this are not scaled."""
    rope_original_length: Annotated[int, Ge(1)] = 8192
    """llama3 and yarn scaling: context length (tokens) before the extension."""
    rope_beta_fast: Annotated[float, Gt(0)] = 32.0
    """yarn scaling: pairs that turn more often within the original length are not scaled."""
    rope_beta_slow: Annotated[float, Gt(0)] = 1.0
    """yarn scaling: pairs that turn less often are scaled fully."""
    rope_attention_factor: Annotated[float, Ge(0)] = 0.0
    """yarn scaling: factor of queries and keys; 0 = 1 + ln(rope_factor) / 10."""
    rope_truncate: bool = True
    """yarn scaling: round the borders between kinds of pairs (not GPT-OSS)."""
    rope_scaled_layers: Literal["all", "full"] = "all"
    """Layers with scaled frequencies: "full" = only those without a window (Gemma 3, OLMo 3)."""
    rope_local_theta: Annotated[float, Ge(0)] = 0.0
    """Base of the rotary frequencies of layers with a window (Gemma 3); 0 = rope_theta."""
    no_rope_every: Annotated[int, Ge(0)] = 0
    """Every n-th layer has no rotary embedding (SmolLM3: 4, so layers 3, 7, 11, ...); 0 = all layers have one."""
    no_rope_layers: tuple[Annotated[int, Ge(0)], ...] = ()
    """Indices (from 0) of further layers without rotary embedding, for irregular patterns."""
    window: Annotated[int, Ge(0)] = 0
    """Tokens that a token of a sliding layer sees, itself included; 0 = all, in every layer."""
    full_attention_every: Annotated[int, Ge(0)] = 0
    """Every n-th layer has no window (Gemma 3: 6, OLMo 3: 4); 0 = all have it (Mistral)."""
    full_attention_layers: tuple[Annotated[int, Ge(0)], ...] = ()
    """Indices (from 0) of further layers without a window, for irregular patterns."""
    attention_scale_width: Annotated[int, Ge(0)] = 0
    """Scores are divided by the square root of this (Gemma 3's query_pre_attn_scalar); 0 = head_width."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: of each "head" (Qwen3, Gemma 3), or over "all" features (OLMo 2 and 3)."""
    attention_sinks: bool = False
    """A learned logit of each query head in the denominator of its softmax (GPT-OSS)."""
    biases: bool = False
    """Biases of attention's linears, routers' logits and experts (GPT-OSS)."""
    norms: Literal["before", "after", "both"] = "before"
    """Where attention and feed-forward have an RMSNorm: "before", "after" (OLMo 2 and 3), or "both" (Gemma 3)."""
    norm_offset: bool = False
    """Norms multiply by 1 + their weight (Gemma)."""
    embedding_scale: bool = False
    """Multiply embeddings by the square root of the width (Gemma)."""
    activation: Activation = "silu"
    """Of the feed-forward's gate: "silu" (SwiGLU), "gelu_tanh", GELU by tanh (Gemma), "swiglu_clamped" (GPT-OSS)."""
    logit_softcap: Annotated[float, Ge(0)] = 0.0
    """Cap logits to this x tanh(logits / this) (Gemma 2: 30); 0 = off. Of Hugging Face's formats, Gemma 3's has it."""
    init_std: Annotated[float, Gt(0)] = 0.02
    """Standard deviation of the initial weights; / sqrt(2 x layers) for projections into the residual stream."""
    weights: str = ""
    """Initial weights instead of random ones: a Hugging Face folder, a checkpoint, or a run folder."""
    config: str = ""
    """A config.json of Hugging Face, or a folder with one, whose model is trained from random weights."""
    dropout: bool = False
    """Apply the dropout that config.json asks for, in models of transformers; false = none."""
    upcycle: bool = False
    """Start each expert as the feed-forward of the dense model in `weights`, and routers at random."""
    experts: Annotated[int, Ge(0)] = 0
    """Routed experts of each feed-forward; 0 = dense ones."""
    experts_per_token: Annotated[int, Ge(1)] = 1
    """How many of them compute a token."""
    expert_width: Annotated[int, Ge(1)] = 1
    """Inner width of each expert."""
    shared_experts: Annotated[int, Ge(0)] = 0
    """Experts that compute every token, as one feed-forward of their summed width."""
    dense_layers: Annotated[int, Ge(0)] = 0
    """The first so many layers have a dense feed-forward."""
    sparse_every: Annotated[int, Ge(0)] = 0
    """Every n-th layer has experts, the others a dense feed-forward (Qwen3-MoE's decoder_sparse_step); 0 = all do."""
    further_dense_layers: tuple[Annotated[int, Ge(0)], ...] = ()
    """Indices (from 0) of further layers with a dense feed-forward, for irregular patterns."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: softmax (Qwen3), or sigmoid (DeepSeek-V3)."""
    router_bias: bool = False
    """A bias of each expert, for the choice only, which experts.balance = "bias" moves (DeepSeek-V3)."""
    normalize_scores: bool = True
    """Divide the scores of a token's experts by their sum."""
    router_scale: Annotated[float, Gt(0)] = 1.0
    """Factor of the scores."""
    expert_groups: Annotated[int, Ge(1)] = 1
    """Groups of neighbouring experts; those with the best two scores are chosen first (DeepSeek-V3)."""
    groups_per_token: Annotated[int, Ge(1)] = 1
    """How many groups a token's experts come from; expert_groups = any."""
    expert_groups_by: Literal["two", "one"] = "two"
    """Whether the best "two" scores of a group count, or the best "one" (DeepSeek-V2)."""
    attention: str = OURS
    """The attention: "default" = grouped queries, "latent" (DeepSeek-V2), or what plugins.modules register."""
    latent_width: Annotated[int, Ge(0)] = 0
    """attention = "latent": width of what keys and values are computed from (kv_lora_rank)."""
    query_latent_width: Annotated[int, Ge(0)] = 0
    """attention = "latent": the same of queries (q_lora_rank); 0 = the width of the model."""
    rope_width: Annotated[int, Ge(0)] = 0
    """attention = "latent": the part of head_width that is rotated, and of keys the same in all heads."""
    value_width: Annotated[int, Ge(0)] = 0
    """attention = "latent": width of one head of values."""
    rope_mscale: Annotated[float, Ge(0)] = 0.0
    """attention = "latent": scores are multiplied by (1 + this x ln(rope_factor) / 10)^2 (YaRN's mscale_all_dim)."""
    feed_forward: str = OURS
    """The dense feed-forward, likewise."""
    norm: str = OURS
    """The norm of tokens, and of heads with qk_norm = "head", likewise."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads a prompt, and a decoder writes an answer."""
        return False

    @property
    def by_transformers(self) -> bool:
        """Whether transformers computes this model, not our decoder."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """The config.json of a model of transformers; empty for our decoder."""
        return {}

    def part(self, place: Place) -> Part:
        """What is known of the part in this place. Raises ValueError for one that is not registered."""
        return find(place, getattr(self, place))

    def uncounted(self, *, by_plan: bool = False) -> str | None:
        """A part whose costs nobody knows, such as 'attention = "mine"'. by_plan: or one that plans do not count, as
        it differs between layers or computes more than products with its tensors."""
        for place in PLACES:
            part = self.part(place)
            shapes = [part.matrices(self, layer) for layer in range(self.layers)]
            if part.costs is None or (by_plan and (part.costs.flops or shapes != shapes[:1] * self.layers)):
                return f'{place} = "{getattr(self, place)}"'
        return None

    @property
    def computed_by(self) -> str:
        """The code that a run with this model goes through, and why."""
        return "our decoder, which supports all of its config.json"

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong and what to write instead) for every broken rule that spans several fields."""
        found = {
            field: f"is more than {most:,}, which no model has; write a smaller number"
            for field, most in LARGEST.items()
            if getattr(self, field) > most
        }
        for field, value in vars(self).items():
            least = 1.0 if field in ("rope_theta", "rope_local_theta") else SMALLEST
            if isinstance(value, float) and value and not least <= value <= MOST:
                found[field] = f"must be from {least:.3g} to {MOST:.3g}, for float32 to compute with it"
        found |= problems_of_parts(self)
        heads, low = self.heads, self.rope_low_frequency_factor
        if heads % self.key_value_heads:
            found["key_value_heads"] = f"must divide heads = {heads}; write one of its divisors, such as {heads}"
        if self.head_width % 2:
            found["head_width"] = f"must be even for rotary embeddings; write {self.head_width + 1}"
        for field in LISTS:
            if beyond := [layer for layer in getattr(self, field) if layer >= self.layers]:
                found[field] = f"names layers {beyond}, but the last layer is {self.layers - 1}"
        if self.experts and "layers" not in found:
            from models.expert_rules import problems_of_experts  # most models have none

            found |= problems_of_experts(self)
        if self.rope_scaling == "llama3" and self.rope_high_frequency_factor <= low:
            found["rope_high_frequency_factor"] = f"must exceed rope_low_frequency_factor = {low}"
        if self.rope_scaling == "yarn" and self.rope_beta_fast <= self.rope_beta_slow:
            found["rope_beta_fast"] = f"must exceed rope_beta_slow = {self.rope_beta_slow}"
        if self.full_attention_every == 1:
            found["full_attention_every"] = "leaves no layer a window; write 2 or more, or 0 for a window in all"
        elif self.window and not any(map(self.window_of, range(self.layers))):
            found["full_attention_layers"] = "leaves no layer a window; name fewer layers"
        for field, default in WINDOWS.items():
            if not self.window and getattr(self, field) != default:
                found[field] = f"has no effect without windows; write window = 4096 or so, or {default!r} here"
        if self.activation == "swiglu_clamped" and not self.experts:
            found["activation"] = 'is for experts; write "silu", or experts = 8 or so'
        if self.norm_offset and self.qk_norm == "all":
            found["norm_offset"] = 'is not for qk_norm = "all"; write false, or qk_norm = "head"'
        return list(found.items())

    def uneven_rows(self, dtype: str) -> list[tuple[str, str, int]]:
        """(field, what is wrong, the next width) of rows that torch's grouped products refuse, on any device."""
        unit = 8 if dtype == "bfloat16" else 4
        rule = f"experts need a multiple of {unit} in {dtype}, rows of 16 bytes each"
        widths = {"width": self.width, "expert_width": self.expert_width} if self.experts else {}
        return [(field, rule, width + -width % unit) for field, width in widths.items() if width % unit]

    def uses_rope(self, layer: int) -> bool:
        """Whether this layer (index from 0) applies rotary embeddings."""
        return not _is_at(self.no_rope_every, layer) and layer not in self.no_rope_layers

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer (index from 0) has routed experts."""
        is_dense = layer < self.dense_layers or layer in self.further_dense_layers
        return self.experts > 0 and not is_dense and (not self.sparse_every or _is_at(self.sparse_every, layer))

    @property
    def dense(self) -> tuple[int, ...]:
        """The layers of a model with experts that have none."""
        return tuple(layer for layer in range(self.layers) if self.experts and not self.is_sparse(layer))

    def shortened(self, layers: int) -> "ModelConfig":
        """The model with only so many layers, its first."""
        lists: Any = {field: tuple(n for n in getattr(self, field) if n < layers) for field in LISTS}
        return replace(self, layers=layers, **lists)

    def window_of(self, layer: int) -> int:
        """Tokens that a token of this layer (index from 0) sees; 0 = all."""
        is_full = _is_at(self.full_attention_every, layer) or layer in self.full_attention_layers
        return 0 if is_full else self.window

    def rope_of(self, layer: int) -> "ModelConfig":
        """A config with the rotary fields of this layer."""
        if self.rope_width:
            return replace(self, head_width=self.rope_width, rope_width=0)
        if not self.window_of(layer):
            return self
        scaling = self.rope_scaling if self.rope_scaled_layers == "all" else "none"
        return replace(self, rope_theta=self.rope_local_theta or self.rope_theta, rope_scaling=scaling)

    def attention_share(self, sequence_length: float) -> float:
        """Share of the pairs of tokens in causal attention that windows leave, the mean of all layers."""
        if not 0 < self.window < sequence_length:
            return 1.0
        seen = self.window / sequence_length
        windows = sum(self.window_of(layer) > 0 for layer in range(self.layers)) / self.layers
        return 1 - windows * (1 - seen) ** 2

    def matmul_params(self) -> int:
        """Parameters in matrix products of a token: linears of the blocks and output projection, not the embedding
        look-up; of routed experts those that compute the token."""
        return self._matmul_params(self.experts_per_token)

    def _matmul_params(self, experts: int) -> int:
        query_and_output = 2 * self.width * self.heads * self.head_width
        key_and_value = 2 * self.width * self.key_value_heads * self.head_width
        dense = 3 * self.width * self.feed_forward_width
        sparse = self.width * (3 * self.expert_width * (experts + self.shared_experts) + self.experts)
        attention = self._elements("attention", query_and_output + key_and_value, matrices=True)
        dense_layers = self._elements("feed_forward", dense, matrices=True)
        feed_forward = (sparse if self.is_sparse(layer) else own for layer, own in enumerate(dense_layers))
        return sum(attention) + sum(feed_forward) + self.vocabulary * self.width

    def _elements(self, place: Place, ours: int, *, matrices: bool) -> list[int]:
        """Those of each layer's part in its matrices, or in its other tensors. ours: where the part is ours."""
        found = [self.part(place).elements(self, layer, matrices=matrices) for layer in range(self.layers)]
        return [ours if count is None else count for count in found]

    def norm_params(self, features: int) -> int:
        """The parameters of a norm of so many features."""
        found = self.part("norm").elements(self, features, matrices=False)
        return features if found is None else found

    def num_params(self) -> int:
        """Total number of parameters; a tied embedding counts once."""
        return self._num_params(self.experts)

    @property
    def parameters(self) -> str:
        """Text such as "30,532,122,624 parameters, of which 3,353,032,704 compute a token"."""
        active = f", of which {self.active_params():,} compute a token" if self.experts else ""
        return f"{self.num_params():,} parameters{active}"

    def _num_params(self, experts: int) -> int:
        all_heads = (self.heads + self.key_value_heads) * self.head_width
        of_heads = {"none": 0, "head": 2 * self.norm_params(self.head_width), "all": all_heads}[self.qk_norm]
        of_heads += self.heads * self.attention_sinks
        of_heads += (all_heads + self.key_value_heads * self.head_width + self.width) * self.biases
        of_experts = (experts * (2 * self.expert_width + self.width) + self.experts) * self.biases
        norms = (1 + self.layers * (4 if self.norms == "both" else 2)) * self.norm_params(self.width)
        norms += sum(self._elements("attention", of_heads, matrices=False))
        norms += sum(self._elements("feed_forward", 0, matrices=False))
        norms += of_experts * sum(map(self.is_sparse, range(self.layers)))
        embedding = 0 if self.tied_embeddings else self.vocabulary * self.width
        return self._matmul_params(experts) + norms + embedding

    def active_params(self) -> int:
        """Those of num_params() that compute a token."""
        return self._num_params(self.experts_per_token) if self.experts else self.num_params()

    def non_embedding_params(self) -> int:
        """Those of active_params() outside of embedding and output projection."""
        return self.active_params() - self.vocabulary * self.width * (1 if self.tied_embeddings else 2)

    def flops_per_token(self, sequence_length: float, attention: AttentionFlops) -> int:
        """Floating-point operations per token of one training step, forward and backward, without recomputation.

        A matmul parameter costs 2 FLOPs per token forward (multiply, add) and 4 backward (gradients of input and
        weight): 6 in all. Attention multiplies every query with S keys and every probability row with S values: 2 x 2
        x heads x head_width x S forward and twice that backward, so 12 x heads x head_width x S per layer for "full"
        attention (the convention of PaLM, appendix B, and of most published MFU). A causal mask halves it ("causal").
        Grouped queries reduce the key and value projections, not these products. With attention restricted to
        documents, S is the mean length of the document that a token is in. A window of W tokens leaves W (1 - W / 2S)
        keys of a causal mask's S / 2, and of "full" attention the same share; with documents this is as if all were S
        long, which counts a little too much where their lengths differ. Narrower values count as narrow as they are.
        """
        if refused := self.uncounted():
            raise ValueError(f"model.{refused} does not say its costs, so its FLOPs are not known")
        share = self.attention_share(sequence_length)
        widths = self.heads * (self.head_width + (self.value_width or self.head_width))
        full_attention = round(6 * self.layers * widths * sequence_length * share)
        if (costs := self.part("attention").costs) and costs.flops:
            full_attention = round(3 * sum(costs.flops(self, layer, sequence_length) for layer in range(self.layers)))
        return 6 * self.matmul_params() + (full_attention if attention == "full" else full_attention // 2)


def _is_at(every: int, layer: int) -> bool:
    """Whether a layer (index from 0) is the last of so many; of 0, none is."""
    return every > 0 and (layer + 1) % every == 0


@dataclass(frozen=True)
class TextFacts:
    """What programs that generate text must know about a model besides its shape."""

    context_length: int
    """Longest sequence (tokens) the weights were made for."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
