"""How many bytes per token a block keeps for its backward pass, and how many more that pass needs.

Each term is a tensor: 2 x stream is one in bfloat16, as wide as the residual stream. Imports no torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

from models.config import ModelConfig
from models.registry import PLACES

Mode = Literal["none", "selective", "full"]
"""The values of activation_checkpointing.mode."""


@dataclass(frozen=True)
class Widths:
    """Elements per token that one process holds."""

    stream: float
    """Width of the residual stream, D."""
    read: float
    """Width of what a block's two parts read: D too, unless the process has a part of the tokens but reads all."""
    query: float
    key: float
    seen: float
    """Width of the keys that attention reads: more than `key` where processes share sequences."""
    inner: float
    """Inner width of the feed-forward."""
    heads: float
    normed: float = 0.0
    """Width of what norms of queries and keys, and those after parts beside those before them, read. They keep it, but
    not with "selective"."""
    scales: float = 0.0
    """How many numbers these norms multiply by, which are kept anyway."""
    norms: Literal["before", "after", "both"] = "before"
    whole: bool = False
    """Whether a norm is of all heads together, of which a tensor group has a part each."""
    own: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Width of what registered parts keep more than ours: with "selective", eagerly, compiled."""

    @classmethod
    def of(cls, model: ModelConfig) -> "Widths":
        """The widths on a process that holds the model whole."""
        query, key = model.heads * model.head_width, model.key_value_heads * model.head_width
        normed = (query + key) * (model.qk_norm != "none") + 2 * model.width * (model.norms == "both")
        scales = {"none": 0, "head": model.heads + model.key_value_heads, "all": 2}[model.qk_norm]
        scales += 2 * (model.norms == "both")
        latents = model.latent_width, model.query_latent_width
        normed, scales = normed + sum(latents), scales + sum(width > 0 for width in latents)
        costs = [costs for place in PLACES if (costs := model.part(place).costs)]
        own = tuple(sum(one.kept(model, how) for one in costs) for how in ("selective", "eager", "compiled"))
        inner, further = model.feed_forward_width, (normed, scales, model.norms, model.qk_norm == "all")
        return cls(model.width, model.width, query, key, key, inner, model.heads, *further, own)

    def cut(self, degree: int) -> "Widths":
        """The widths on a process with 1 / degree of each matrix, and of the stream's tokens."""
        names = ("stream", "query", "key", "seen", "inner", "heads", "normed", "scales")
        own = tuple(width / degree for width in self.own)
        return replace(self, own=own, **{name: getattr(self, name) / degree for name in names})


@dataclass(frozen=True)
class Kept:
    """What determines a block's activations besides its widths."""

    mode: Mode = "none"
    float8: bool = False
    compiled: bool = True
    exchanged: bool = False
    """Whether attention's output is kept twice: as its kernel wrote it, and as the tokens of this process."""
    element: int = 2
    """Bytes: 2 for bfloat16, 4 for float32."""
    fused_norms: bool = False
    """Whether a norm that is not compiled is one kernel, as on GPUs; on a CPU, it is several operators."""


def saved_per_token(widths: Widths, kept: Kept) -> float:
    """Bytes that a block keeps for each token until its backward pass, without weights."""
    if kept.mode == "full":
        return kept.element * widths.stream
    if kept.mode == "selective":
        return kept.element * _products(widths, kept) + 4 * (widths.heads + widths.scales) + 2 * _scale(widths)
    more = kept.element * widths.own[2 if kept.compiled else 1]
    more += 4 * widths.scales + (kept.element * widths.query if kept.exchanged else 0)
    more += widths.normed * (kept.element if kept.compiled or kept.fused_norms else 2 * 4)
    if kept.compiled and widths.whole and widths.read > widths.stream:  # a sum over processes splits the norm
        more += 4 * widths.normed
    return more + (_compiled(widths, kept) if kept.compiled else _eager(widths, kept))


def norm_per_token(widths: Widths, kept: Kept) -> float:
    """Bytes that a norm which is not compiled, such as the one before the head, keeps for each token.

    Its input, what is read of it, and the scale; as several operators, its input and normalized input in float32.
    """
    inputs = kept.element * widths.stream if kept.fused_norms else 2 * 4 * widths.stream
    return inputs + kept.element * widths.read + _scale(widths)


def at_swiglu_per_token(widths: Widths, kept: Kept) -> float:
    """Bytes beyond the saved ones where the backward pass of a block holds most: at the derivative of SwiGLU.

    SwiGLU's product is gone; its gradient, those of both factors and that of the block's output are there.
    Whatever was not saved has been computed again; what no gradient needs is only released later.
    """
    element = kept.element
    whole = saved_per_token(widths, replace(kept, mode="none"))
    product = 0 if kept.compiled and kept.float8 else element * widths.inner
    inside = whole - product + 3 * element * widths.inner + element * widths.stream
    if widths.read > widths.stream:  # or before it, with the gathered gradient of the block's output
        inside = max(inside, whole + element * (widths.inner + widths.read + widths.stream))
    # As several operators and in bfloat16, a norm keeps a float32 copy, not the block's input itself.
    own = element * widths.stream if not kept.compiled and not kept.fused_norms and element == 2 else 0
    if kept.mode == "full":
        inside += own
    if kept.mode == "selective":
        inside += own + element * widths.stream  # and what attention adds to it
    return inside - saved_per_token(widths, kept)


def _products(widths: Widths, kept: Kept) -> float:
    """Elements: the block's input, the results of its products and of attention."""
    # Of the feed-forward: only torch.compile sees that nothing reads it, unless a norm does.
    last = 0 if kept.compiled and widths.norms == "before" else widths.stream
    return 2 * widths.stream + last + 2 * widths.query + 2 * widths.key + 2 * widths.inner + widths.own[0]


def _scale(widths: Widths) -> float:
    """Bytes of what a norm multiplies each token by, in float32."""
    return 4 * widths.stream / widths.read


def _compiled(widths: Widths, kept: Kept) -> float:
    """Counted in generated code for sm_90 (tests/generated_code.csv)."""
    # Before attention and before the feed-forward; with norms in both places, the second one is computed again.
    residual = 2 * (1 if widths.norms == "both" else 2) * widths.stream
    attention = 2 * (2 * widths.query + 2 * widths.seen) + 4 * widths.heads  # queries, keys, values, output, logsumexp
    inner = 2 * 2 * widths.inner  # gate and up
    total = residual + attention + inner + 2 * _scale(widths)
    if kept.float8:  # casts are computed again, from what is read by a norm or SwiGLU anyway
        return total
    return total + 2 * 2 * widths.read + 2 * widths.inner  # both norms' outputs; SwiGLU's product


def _eager(widths: Widths, kept: Kept) -> float:
    """Counted operator by operator; float8 products keep their inputs as they were before the casts."""
    element = kept.element
    norms = 2 * norm_per_token(widths, kept)
    attention = element * (2 * widths.query + 2 * widths.seen) + 4 * widths.heads  # as compiled
    return norms + attention + 4 * element * widths.inner  # gate, its silu, up, product
