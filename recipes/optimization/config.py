"""The [optimizer], [experts] and [schedule] sections. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval

from parallel.errors import UserError


@dataclass(frozen=True)
class OptimizerFacts:
    """What others know of an optimizer without building it. A run first tries it on a few numbers (optimizer.py)."""

    builder: str | Callable[..., Any]
    """What makes it, or its "MODULE:FUNCTION", of parameter groups, the section and what build_optimizer() names."""
    reads: tuple[str, ...]
    """The fields of [optimizer] that it reads itself, beside lr and weight_decay."""
    moments: int
    """Tensors that it keeps of each parameter, as large as it: in state_dtype, or float32 if it does not read that."""
    counts_steps: bool = False
    """Whether it keeps a float32 number of each parameter besides."""
    skips: bool = False
    """Whether step() reads found_inf and grad_scale, as torch's fused ones do; else the host waits in each step."""
    place: str = "recipes/optimization/config.py"
    """Where this is written, for messages."""
    matrix_moments: int | None = None
    """Moments of the blocks' matrices, without a count, if it orthogonalizes these: whole on an owner, which multiplies
    them on its GPU (parallel/owners.py). None: they are stepped as all others."""

    @property
    def orthogonalizes(self) -> bool:
        return self.matrix_moments is not None


OF_ADAMW = ("betas", "eps", "state_dtype")
OPTIMIZERS = {
    "adamw": OptimizerFacts(
        "recipes.optimization.adamw:ShardedAdamW", OF_ADAMW, moments=2, counts_steps=True, skips=True
    ),
    "muon": OptimizerFacts(
        "recipes.optimization.muon:Muon",
        (*OF_ADAMW, "matrix_lr", "lr_adjust", "momentum", "nesterov", "ns_steps"),
        moments=2,
        counts_steps=True,
        skips=True,
        matrix_moments=1,
    ),
}
"""The values of optimizer.name, beside those of plug-ins."""
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[tuple(OPTIMIZERS)]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, without weight decay on norms and, unless asked for, embeddings; or Muon for matrices of the blocks."""

    table: ClassVar[Mapping[str, OptimizerFacts]] = OPTIMIZERS
    name: Name = "adamw"
    """"muon" orthogonalizes the momentum of the blocks' matrices; embeddings, head, norms and biases keep AdamW."""
    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate."""
    matrix_lr: Annotated[float, Ge(0)] = 0.0
    """Muon: peak learning rate of the blocks' matrices; 0 = lr."""
    lr_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: times matrix_lr: 0.2 sqrt(max(rows, columns)), for rates like AdamW's, or sqrt(max(1, rows / columns))."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """Muon: decay rate of the momentum."""
    nesterov: bool = True
    """Muon: mix the gradient into the momentum once more before it is orthogonalized."""
    ns_steps: Annotated[int, Interval(ge=1, lt=100)] = 5
    """Muon: Newton-Schulz iterations, each of three matrix products."""
    betas: tuple[Annotated[float, Interval(ge=0, lt=1)], Annotated[float, Interval(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW: decay rates of the first and second moments."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """AdamW: added to the denominator of the update."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay of the weight matrices."""
    decay_embeddings: bool = False
    """Weight decay of embeddings as well, with what is tied to them."""
    decay_norms: bool = False
    """Weight decay of norms and biases as well (OLMo 2)."""
    z_loss: Annotated[float, Ge(0)] = 0.0
    """Add this x log(Z)^2 of every token to the loss that is trained on (PaLM: 1e-4); 0 = off."""
    grad_clip: Annotated[float, Ge(0)] = 1.0
    """Clip gradients to this global norm; 0 = off."""
    qk_clip: Annotated[float, Ge(0)] = 0.0
    """After a step, scale down queries and keys of heads whose largest logit exceeds this (Kimi K2: 100); 0 = off."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage precision of all moments; "bfloat16" halves their memory, with updates still computed in float32."""

    @property
    def facts(self) -> OptimizerFacts:
        return self.table[self.name]

    @property
    def matrix_share(self) -> float:
        """The learning rate of the matrices that are orthogonalized, as a share of lr; 0 if none are."""
        return (self.matrix_lr / self.lr if self.matrix_lr else 1.0) if self.facts.orthogonalizes else 0.0

    def state_bytes(self, elements: int, tensors: int, *, matrices: tuple[int, int] = (0, 0)) -> int:
        """Bytes that the optimizer keeps of so many elements, in so many tensors.

        matrices: the elements and tensors among them that are matrices of the blocks.
        """
        facts, (of_matrices, count) = self.facts, matrices
        alike = facts.moments * elements
        if facts.matrix_moments is not None:
            alike += (facts.matrix_moments - facts.moments) * of_matrices
            tensors -= count
        return (4 if self.state_dtype == "float32" else 2) * alike + 4 * facts.counts_steps * tensors


@dataclass(frozen=True)
class ExpertsConfig:
    """What keeps the loads of routed experts equal; a model without experts does not read it."""

    balance: Literal["none", "loss", "bias", "bias_and_loss"] = "none"
    """"loss" adds one of each sparse layer; "bias" moves a bias of each expert, for the choice only (DeepSeek-V3)."""
    loss_weight: Annotated[float, Ge(0)] = 0.001
    """Weight of the balance loss, a sum over layers, each 1 where loads are equal (DeepSeek-V3, with biases: 1e-4)."""
    loss_over: Literal["row", "batch"] = "row"
    """The loss counts loads in each "row" by itself, or in the step's micro-batches of all processes so far (Qwen3)."""
    bias_rate: Annotated[float, Gt(0)] = 0.001
    """By how much each step moves a bias, up where the load is below the mean, else down."""
    z_loss: Annotated[float, Ge(0)] = 0.0
    """Add this x log(Z)^2 of every token's routers, summed over layers, to the loss (ST-MoE: 1e-3); 0 = off."""

    @property
    def adds_loss(self) -> bool:
        return "loss" in self.balance

    @property
    def moves_biases(self) -> bool:
        return "bias" in self.balance


Phase = Annotated[int, Ge(0)] | Annotated[float, Interval(gt=0, lt=1)]
"""Steps, or a share of the schedule."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run, relative to optimizer.lr."""

    # The kinds of plug-ins: the share of the way from min_lr_ratio to the peak, of steps after the warm-up.
    table: ClassVar[Mapping[str, Callable[..., float]]] = {}
    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """After warm-up: "wsd" holds, then decays over decay_steps; "cosine" and "linear" decay throughout."""
    decay: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """wsd: the shape of the final decay; "1-sqrt" falls by the root of its share (Hägele et al., 2024)."""
    steps: Annotated[int, Ge(0)] = 0
    """Steps that the schedule is made for; more than the run has, and it ends early. 0 = run.steps, or the stage's."""
    warmup_steps: Phase = 0
    """Steps of linear warm-up from 0; a number below 1 is a share of the schedule, rounded, but at least one step."""
    decay_steps: Phase = 0
    """wsd: steps of the final decay, or their share of the schedule."""
    min_lr_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Final learning rate of the decay, as a fraction of optimizer.lr."""

    def phases(self, steps: int) -> tuple[int, int]:
        """The steps of warm-up and decay of a run of so many steps."""
        written = self.warmup_steps, self.decay_steps
        warmup, decay = (max(1, round(x * steps)) if isinstance(x, float) else x for x in written)
        asked = sum(x * steps if isinstance(x, float) else x for x in written)
        over = warmup + decay - steps if asked <= steps + 1e-6 else 0
        if over > 0:  # only because shares were rounded up
            return (warmup, decay - over) if isinstance(written[1], float) else (warmup - over, decay)
        return warmup, decay

    def learning_rate(self, step: int, *, peak: float, steps: int, fields: Any = None) -> float:
        """The learning rate of optimizer step `step` (from 0) out of `steps`. fields: the section of a plug-in's kind.

        Warm-up rises linearly and reaches `peak` at its last step. A decay would reach min_lr_ratio x peak at step
        `steps`, one past the last, so that no step is wasted at a rate of zero.
        """
        warmup, decay = self.phases(steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        if self.kind == "constant":
            return peak
        if self.kind in self.table:
            own = {"fields": fields} if fields is not None else {}
            given = self.table[self.kind](step - warmup, steps - warmup, **own)
            if isinstance(given, str) or not 0 <= (share := float(given)) < math.inf:
                raise UserError(f'schedule.kind = "{self.kind}" gives {given!r} after step {step}; give a number >= 0')
            return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)
        start = steps - decay if self.kind == "wsd" else warmup
        progress = max(0, step - start) / max(1, steps - start)  # 0 at the start of the decay, 1 at `steps`
        shape = self.decay if self.kind == "wsd" else self.kind
        share = 1 - math.sqrt(progress) if shape == "1-sqrt" else 1 - progress
        if shape == "cosine":
            share = (1 + math.cos(math.pi * progress)) / 2
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)
