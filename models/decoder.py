"""A decoder-only transformer: Llama, SmolLM, Mistral, Qwen3, OLMo 2 and 3, Gemma 3, GPT-OSS by configuration.

Plain single-device code. It is built on the meta device, knows nothing of meshes or ranks, and its fully qualified
names are the contract with everything that parallelizes, saves or converts it.

B batch, T tokens, D model width, F feed-forward width, N query heads, K key/value heads, H head width, V vocabulary.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, rms_norm, silu

from models.attention import InnerAttention, Sinks, attend, rope_tables, rotate
from models.config import Activation, ModelConfig
from models.hf import inside_block
from models.interface import BlockInterface, ModelInterface
from models.loss import SummedLoss

if TYPE_CHECKING:
    from models.cache import KeyValueCache, LayerCache
    from models.documents import Documents, Restriction
    from models.experts import Routed

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, with or without rotary embeddings, a window, and norms of queries
    and keys. One of your own may inherit it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.rope = config.uses_rope(layer)
        self.q_proj = nn.Linear(config.width, config.heads * config.head_width, bias=config.biases)
        self.k_proj = nn.Linear(config.width, config.key_value_heads * config.head_width, bias=config.biases)
        self.v_proj = nn.Linear(config.width, config.key_value_heads * config.head_width, bias=config.biases)
        self.o_proj = nn.Linear(config.heads * config.head_width, config.width, bias=config.biases)
        self.q_norm = _norm_of_heads(config, config.heads)
        self.k_norm = _norm_of_heads(config, config.key_value_heads)
        self.sinks = Sinks(config.heads) if config.attention_sinks else None
        scale = 1 / math.sqrt(config.attention_scale_width) if config.attention_scale_width else None
        self.inner = InnerAttention(window=config.window_of(layer), scale=scale)
        self.reach = self.inner.reach  # for attention to a cache, which no process shares

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: "LayerCache | None" = None,
        documents: "Restriction | None" = None,
    ) -> Tensor:
        """x: (B, T, D) -> (B, T, D). With a cache, x follows the tokens in there, and is added to them."""
        return self.o_proj(self.heads(x, cos, sin, cache, documents))

    def heads(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None", documents: "Restriction | None"
    ) -> Tensor:
        """What forward() takes -> what the heads have found, side by side (B, T, N H)."""
        # -1 infers the number of heads, so that a tensor-parallel rank needs no change here.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width))  # (B, T, N or K, H)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        sinks = [] if self.sinks is None else [self.sinks(query)]  # (N,)
        query, key = self.q_norm(query), self.k_norm(key)
        # Before the transposition, so that attention reads and writes memory in the order of the linears around it:
        # then its output, which its backward pass needs, is also the memory that o_proj reads.
        if self.rope:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # (B, N or K, T, H)
        if cache is not None:
            out = attend(query, *cache.append(key, value), None, *sinks, **self.reach)  # (B, N, T, H)
        else:
            out = self.inner(query, key, value, documents, *sinks)  # (B, N, T, H)
        return out.transpose(1, 2).flatten(-2)  # (B, T, N H)


class FeedForward(nn.Module):
    """A gated linear unit, with silu SwiGLU (Shazeer 2020): down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, inner: int = 0) -> None:
        """inner: F; 0 = feed_forward_width."""
        super().__init__()
        width, inner = config.width, inner or config.feed_forward_width
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, D) -> (B, T, D)."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))  # (B, T, F) inside


class Block(nn.Module):
    """One layer: attention, then feed-forward, each with a norm before it, after it or both, and each added to the
    residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, feed_forward: nn.Module | None = None) -> None:
        """feed_forward: None = a dense one."""
        super().__init__()
        before, after = (config.norms in (place, "both") for place in ("before", "after"))
        self.attention_norm = _norm(config, before)
        self.attention = config.part("attention").make(config, layer)
        self.attention_post_norm = _norm(config, after)
        self.feed_forward_norm = _norm(config, before)
        self.feed_forward = feed_forward or config.part("feed_forward").make(config, layer)
        self.feed_forward_post_norm = _norm(config, after)

    def attend(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: "LayerCache | None" = None,
        documents: "Restriction | None" = None,
    ) -> Tensor:
        """The first half of forward()."""
        return x + self.attention_post_norm(self.attention(self.attention_norm(x), cos, sin, cache, documents))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: "LayerCache | None" = None,
        documents: "Restriction | None" = None,
    ) -> Tensor:
        """x: (B, T, D); cos, sin from rope_tables -> (B, T, D)."""
        x = self.attend(x, cos, sin, cache, documents)
        return x + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x)))


class SparseBlock(Block):
    """A block whose feed-forward is of routed experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        from models.experts import SparseFeedForward  # most models have none

        shared = config.shared_experts * config.expert_width
        of_all_tokens = FeedForward(config, layer, inner=shared) if shared else None
        super().__init__(config, layer, feed_forward=SparseFeedForward(config, shared=of_all_tokens))

    def forward(self, *arguments: Any) -> "tuple[Tensor, Routed]":  # type: ignore[override]
        """What a Block takes, then weight and bias of its router. Returns (B, T, D), and what balancing reads."""
        *of_block, weight, bias = arguments
        x = self.attend(*of_block)
        out, routed = self.feed_forward(self.feed_forward_norm(x), weight, bias)
        return x + self.feed_forward_post_norm(out), routed


class OffsetNorm(nn.RMSNorm):
    """RMSNorm with weights that are stored minus one (Gemma), in float32: 1 + w has few digits of w in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., D) -> (..., D)."""
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class FeaturesNorm(nn.RMSNorm):
    """RMSNorm over all features of all heads (OLMo 2), of which a tensor-parallel process has some."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, N, H) -> (B, T, N, H)."""
        # Not by rms_norm, for which a process would have to gather all heads: the means of squares are enough.
        features = x.flatten(-2).float()  # (B, T, N H)
        scale = (features.square().mean(-1, keepdim=True) + cast(float, self.eps)).rsqrt()
        return (features * scale * self.weight).to(x.dtype).unflatten(-1, x.shape[-2:])


def _norm(config: ModelConfig, wanted: bool = True, width: int = 0) -> nn.Module:
    """The norm of so many features, of the residual stream's without a width; nothing where none is wanted."""
    return cast(nn.Module, config.part("norm").make(config, width or config.width) if wanted else nn.Identity())


def rms_norm_of(config: ModelConfig, width: int) -> nn.Module:
    """The norm of so many features, as most models have it."""
    return (OffsetNorm if config.norm_offset else nn.RMSNorm)(width, eps=config.norm_eps)


def _norm_of_heads(config: ModelConfig, heads: int) -> nn.Module:
    """The norm of queries or keys (B, T, N or K, H)."""
    if config.qk_norm == "all":
        return FeaturesNorm(heads * config.head_width, eps=config.norm_eps)
    return _norm(config, config.qk_norm == "head", config.head_width)


class Scale(nn.Module):
    """Multiplies embeddings by the square root of their width (Gemma), rounded to their type as transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, D) -> (B, T, D)."""
        return x * torch.tensor(math.sqrt(x.shape[-1]), dtype=x.dtype, device="cpu")


class TiedHead(nn.Module):
    """The output projection with a weight that belongs to the embedding. It has no parameters of its own."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: (B, T, D); weight: (V, D). Returns logits (B, T, V)."""
        return linear(x, weight)


class Decoder(nn.Module):
    """Embedding, blocks, final norm and output projection. A tied model has no `lm_head`: it uses the embedding.

    A part of a model has some of the blocks, under their names in the whole model. The part with the first block also
    has the embedding, and the part with the last block the norm and the output projection; a tied one needs the
    embedding, too.
    """

    def __init__(
        self, config: ModelConfig, *, layers: Collection[int] | None = None, loss_chunks: int = 1, z_loss: float = 0.0
    ) -> None:
        """layers: indexes of the blocks of a part of the model; None = all of it."""
        super().__init__()
        self.config = config
        self.layers = tuple(range(config.layers) if layers is None else sorted(layers))
        begins, ends, tied = 0 in self.layers, config.layers - 1 in self.layers, config.tied_embeddings
        self.embedding = nn.Embedding(config.vocabulary, config.width) if begins or (ends and tied) else None
        self.scale = Scale() if config.embedding_scale else nn.Identity()
        self.blocks = nn.ModuleList()
        sparse = [layer for layer in self.layers if config.is_sparse(layer)]
        self.routers = None
        if sparse:
            from models.experts import Routers

            self.routers = Routers(config, sparse)
        for layer in self.layers:
            self.blocks.add_module(str(layer), (SparseBlock if layer in sparse else Block)(config, layer))
        self.norm = _norm(config) if ends else None
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False) if ends and not tied else None
        self.tied_head = TiedHead() if ends and tied else None
        self.ropes = tuple(dict.fromkeys(map(config.rope_of, self.layers)))
        self.rope_of = {layer: self.ropes.index(config.rope_of(layer)) for layer in self.layers}
        self.loss = SummedLoss(loss_chunks, softcap=config.logit_softcap, z_loss=z_loss)

    @property
    def interface(self) -> ModelInterface:
        """What parallel/ may know of this model."""
        config, places = self.config, ("attention", "feed_forward")
        parts = {place: config.part(place) for place in ("attention", "feed_forward")}
        tensors = inside_block(config, self.layers[-1])  # a norm that has none needs no place

        def named(fact: str) -> tuple[str, ...]:
            return tuple(f"{place}.{name}" for place, part in parts.items() for name in getattr(part, fact) or ())

        norms, whole = (
            tuple(name for name in named(fact) if any(tensor.startswith(f"{name}.") for tensor in tensors))
            for fact in ("norms", "whole")
        )
        shared_experts = "feed_forward.shared_experts"
        row = (*named("row"), f"{shared_experts}.down_proj")
        inner, whole_norms = parts["attention"].inner, config.qk_norm == "all"
        return ModelInterface(
            stacks=(tuple(f"blocks.{layer}" for layer in self.layers),),
            embedding=None if self.embedding is None else "embedding",
            head=None if self.lm_head is None else "lm_head",
            head_norm=None if self.norm is None else "norm",
            tied_head=None if self.tied_head is None else "tied_head",
            loss="loss",
            inside_block=BlockInterface(
                norms=(*(f"{place}_norm" for place in places if config.norms != "after"), *whole),
                post_norms=tuple(f"{place}_post_norm" for place in places if config.norms != "before"),
                parts=tuple(dict.fromkeys(name.rpartition(".")[0] for name in row)),
                inner_attention=inner and f"attention.{inner}",
                column=(*named("column"), f"{shared_experts}.gate_proj", f"{shared_experts}.up_proj"),
                row=row,
                shared=named("shared"),
                experts="feed_forward.experts",
                exchange="feed_forward.exchange",
                inner_norms=() if whole_norms else norms,
                feature_norms=(*(norms if whole_norms else ()), *["attention.sinks"] * config.attention_sinks),
            ),
            layers=self.layers,
            all_layers=self.config.layers,
            routers=None if self.routers is None else "routers",
        )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: "KeyValueCache | None" = None,
        documents: "Documents | None" = None,
        positions: Tensor | None = None,
        layers: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """tokens: (B, T) integers. Returns logits (B, T, V), or, with targets (B, T), their summed loss, a scalar.

        The loss is taken inside so that the logits, the largest tensor of a step, never leave this function. With a
        cache, the tokens follow those that it has seen, and join them. With documents, no token sees another one, and
        positions start anew in each; else a row is one text. Raises ValueError for both: a cache has no documents.
        positions, (T,) or (B, T): of the tokens in their text, for tokens that are only a part of their rows. layers:
        neighbouring blocks of a part of the model; hidden, (B, T, D): what the block before them has returned. Returns
        what the last of them does, (B, T, D), unless it ends the model.
        """
        if cache is not None and documents is not None:
            raise ValueError("a cache holds one text a row, so it cannot go with documents")
        if positions is None and documents is not None:
            positions = documents.positions  # (B, T)
        elif positions is None:
            # The last layer that this part has is also the last one that these tokens reach.
            first = 0 if cache is None else cache.layers[self.layers[-1]].length
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)  # (T,)
        tables = [rope_tables(rope, positions) for rope in self.ropes]  # (T, H/2) or (B, T, H/2), two each
        x = self.scale(cast(nn.Embedding, self.embedding)(tokens)) if hidden is None else hidden  # (B, T, D)
        inside = None if documents is None else documents.for_attention_in(x.dtype)  # once for all layers
        layers = layers or range(self.config.layers)
        routers = {} if self.routers is None else self.routers()
        for layer, block in zip(self.layers, self.blocks, strict=True):
            if layer not in layers:
                continue
            seen = None if cache is None else cache.layers[layer]
            beside = (*tables[self.rope_of[layer]], seen, inside)  # without x, which would live until the loss
            if self.routers is not None and layer in routers:
                x = self.routers.noted(layer, *block(x, *beside, *routers[layer]))
            else:
                x = block(x, *beside)
        if layers.stop < self.config.layers:
            return x
        x = cast(nn.RMSNorm, self.norm)(x)
        if self.lm_head is None:
            logits = cast(TiedHead, self.tied_head)(x, cast(nn.Embedding, self.embedding).weight)  # (B, T, V)
        else:
            logits = self.lm_head(x)  # (B, T, V)
        return self.loss(logits, targets)

    def initial_values(
        self, shapes: Mapping[str, Sequence[int]], *, seed: int, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 tensor on the device) of each of these parameters, one after the other.

        Each has its own generator, seeded by `seed` and its name, so that values do not depend on the mesh.
        """
        for name, shape in shapes.items():
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
            values = torch.empty(tuple(shape), dtype=torch.float32, device=device)
            self.init_parameter(name, values, generator)
            yield name, values

    def init_parameter(self, name: str, values: Tensor, generator: torch.Generator) -> None:
        """Fill `values`, the whole parameter of this fully qualified name, with its initial values.

        Normal with `init_std`; the projections that add to the residual stream are scaled by 1 / sqrt(2 x layers), so
        that its variance does not grow with depth (GPT-2, section 2.3). Norms start as ones, which some store as 0;
        biases start at 0, and sinks as matrices, as in transformers.
        """
        place, inside = (re.findall(r"\.(attention|feed_forward)\.(.+)", name) or [("norm", name)])[0]
        part = self.config.part(place)
        if inside in part.initial:
            values.fill_(part.initial[inside])
            return
        if ".experts." in name and name.endswith("_bias"):
            values.zero_()
            return
        if values.dim() == 1 and not name.endswith(".sinks.weight"):
            is_zero = name.endswith("bias") or self.config.norm_offset
            values.fill_(0.0 if is_zero else 1.0)
            return
        rows = tuple(f"{row}.weight" for row in part.row)
        into_residual = inside in rows or name.endswith(("down_proj.weight", "down_proj"))
        scale = 1 / math.sqrt(2 * self.config.layers) if into_residual else 1.0
        values.normal_(0.0, self.config.init_std * scale, generator=generator)


def build_model(
    config: ModelConfig, *, layers: Collection[int] | None = None, loss_chunks: int = 1, z_loss: float = 0.0
) -> nn.Module:
    """The plain model on torch's current device (the meta device, where it is parallelized afterwards).

    layers: as of Decoder. Raises ValueError, with the reason, for a model of transformers that cannot be trained here.
    """
    if config.by_transformers:
        from models.transformers import TransformersModel

        return TransformersModel(config, loss_chunks=loss_chunks, z_loss=z_loss)
    return Decoder(config, layers=layers, loss_chunks=loss_chunks, z_loss=z_loss)
