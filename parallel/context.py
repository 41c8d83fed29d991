"""Context parallelism: each process of a group has 1 / degree of the tokens of the same rows.

Only attention looks at other tokens. By heads (DeepSpeed Ulysses, Jacobs et al. 2023), processes exchange parts of the
tokens for parts of the heads there, so that every kernel and mask works unchanged on whole rows. By gathering, each
process gathers all keys and values, for heads that the degree does not divide. It then has two chunks of each row,
one as far from the start as the other is from the end, because a token costs as much as there are tokens before it
(Llama 3, section 3.3.2).

B batch, T tokens of a row, P tokens of a part, C = P / 2 of a chunk, N query heads, K key/value heads, H head width,
R degree.
"""

from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from models.documents import Restriction, has_kernel_for_lengths, of_chunk, whole_rows
from models.interface import blocks_of, interface_of
from parallel.errors import UserError

# Newer versions of torch have these names, and warn of the old ones.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def cut_rows(model: nn.Module, axis: DeviceMesh, *, by: str) -> str:
    """Cut every row of tokens over the axis, in place. by: as mesh.context_by. Returns a line for the log."""
    group = axis.get_group()
    inside = interface_of(model).inside_block
    if inside is None or inside.inner_attention is None:
        raise UserError("mesh.context: this model does not say where its tokens see each other; write context = 1")
    name = inside.inner_attention
    for block in blocks_of(model):
        block.set_submodule(name, (ByHeads if by == "heads" else ByGathering)(block.get_submodule(name), group))
    model.register_forward_pre_hook(partial(_own_part, group=group, by=by), with_kwargs=True)
    model.register_forward_hook(partial(_whole_logits, group=group, by=by), with_kwargs=True)
    how = {"heads": "tokens exchanged for heads", "gather": "keys and values gathered"}[by]
    return f"context parallelism: {group.size()} parts of every row, {how}"


def own_chunks(length: int, group: ProcessGroup, *, by: str) -> list[slice]:
    """The tokens of a row of this length that the process has, in their order."""
    rank, degree = group.rank(), group.size()
    count = degree if by == "heads" else 2 * degree
    size = length // count
    assert size * count == length, "recipes/recipe/rules_mesh.py refuses such rows"
    own = (rank,) if by == "heads" else (rank, count - 1 - rank)
    return [slice(index * size, (index + 1) * size) for index in own]


def _own_part(
    model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], *, group: ProcessGroup, by: str
) -> Any:
    """Cuts the arguments of the model's forward pass: tokens, targets and positions; documents stay whole."""
    if options.get("cache") is not None:  # a text that grows token by token: every process computes all of it
        return None
    tokens, documents = arguments[0], options.get("documents")
    whole = torch.arange(tokens.shape[1], device=tokens.device) if documents is None else documents.positions
    own = own_chunks(tokens.shape[1], group, by=by)
    # Parts of tokens, of targets if there are any (B, T), and of positions, (T,) without documents.
    *parts, positions = (torch.cat([x[..., part] for part in own], -1) for x in (*arguments, whole))
    return tuple(parts), options | {"positions": positions}


def _whole_logits(
    model: nn.Module, arguments: Any, options: dict[str, Any], output: Tensor, *, group: ProcessGroup, by: str
) -> Any:
    """Makes every process return the logits of all tokens, as a model that is not cut does without targets.

    output: (B, P, V), or losses, () or (2,), or what a stage of a pipeline returns. Returns (B, T, V), or the others.
    """
    if output.dim() < 3 or options.get("cache") is not None or options.get("layers") is not None:
        return None
    length = output.shape[1] * group.size()
    whole = output.new_zeros(output.shape[0], length, output.shape[2])
    parts = own_chunks(length, group, by=by)
    for part, logits in zip(parts, output.chunk(len(parts), dim=1), strict=True):
        whole[:, part] = logits
    dist.all_reduce(whole, group=group)  # the others add zeros
    return whole


class ByHeads(nn.Module):
    """Attention over whole rows with a part of the heads."""

    def __init__(self, inner: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group, self.degree = inner, group, group.size()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Restriction | None = None, *sinks: Tensor
    ) -> Tensor:
        """query: (B, N, P, H); key, value: (B, K, P, H); documents: of whole rows; sinks: (N,), if any. Returns
        (B, N, P, H)."""
        copies = self.degree // gcd(self.degree, key.shape[1])  # of each head, so that every process has one
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        # One exchange for all three: heads side by side, in the order of the processes they go to. Tokens come before
        # heads, as in the memory of linears and kernels: with one row, what is received and sent back is not copied.
        parts = [x.transpose(1, 2).unflatten(2, (self.degree, -1)).movedim(2, 0) for x in (query, key, value)]
        sent = torch.cat([part.flatten(3) for part in parts], dim=3).contiguous()  # (R, B, P, heads / R x H)
        got = _exchange(sent, self.group).movedim(0, 1).flatten(1, 2)  # (B, R P = T, heads / R x H)
        each = got.split([part.shape[3] * part.shape[4] for part in parts], dim=-1)
        heads = [x.unflatten(2, (-1, part.shape[4])).transpose(1, 2) for x, part in zip(each, parts, strict=True)]
        own = [one.unflatten(0, (self.degree, -1))[self.group.rank()] for one in sinks]  # (N / R,)
        out = self.inner(*heads, documents, *own)  # (B, N / R, T, H)
        back = out.transpose(1, 2).unflatten(1, (self.degree, -1)).movedim(1, 0).contiguous()  # (R, B, P, N / R, H)
        return _exchange(back, self.group).movedim(0, 2).flatten(2, 3).transpose(1, 2)  # (B, N, P, H)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """parts: (R, ...), one for each process of the group. Returns (R, ...), those that they have for this one."""
    got = funcol.all_to_all_single_autograd(parts.flatten(0, 1), None, None, group)
    return funcol.wait_tensor(got).view(parts.shape)


class ByGathering(nn.Module):
    """Attention of two chunks of the tokens over the keys and values up to their ends."""

    def __init__(self, inner: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group
        self.flash = torch.backends.cuda.flash_sdp_enabled()  # attention.backend; a compiled block cannot ask

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Restriction | None = None, *sinks: Tensor
    ) -> Tensor:
        """query: (B, N, P, H); key, value: (B, K, P, H); documents: of whole rows; sinks: (N,), if any. Returns
        (B, N, P, H)."""
        part = torch.cat((key, value), dim=-1).transpose(1, 2)  # (B, P, K, 2 H)
        widths = key.shape[-1], value.shape[-1]
        key, value = _Gather.apply(part, self.group).transpose(1, 2).split(widths, dim=-1)  # (B, K, T, H) each
        length = key.shape[2]
        # Otherwise attention needs a mask (C, T).
        if documents is None and self.flash and has_kernel_for_lengths(query):
            documents = whole_rows(key, key)
        out = []  # of each chunk: (B, C, N, H), tokens before heads as the linear after it has them
        for own, queries in zip(own_chunks(length, self.group, by="gather"), query.chunk(2, dim=2), strict=True):
            seen = key[:, :, : own.stop], value[:, :, : own.stop]  # (B, K, end of the chunk, H)
            inside = None if documents is None else of_chunk(documents, own, length=length)
            out.append(self.inner(queries, *seen, inside, *sinks).transpose(1, 2))
        return torch.cat(out, dim=1).transpose(1, 2)


class _Gather(torch.autograd.Function):
    """All tokens of all rows, in their order; the gradient of a part is the sum of what all processes have for it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        """part: (B, P, K, 2 H). Returns (B, T, K, 2 H)."""
        ctx.group = group
        parts = funcol.wait_tensor(_all_gather(part.contiguous(), 0, group))  # (R B, P, K, 2 H)
        chunks = parts.unflatten(1, (2, -1)).unflatten(0, (-1, len(part))).movedim(0, 1)  # (B, R, 2, C, K, 2 H)
        first, last = chunks.unbind(2)
        return torch.cat((first, last.flip(1)), dim=1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """gradient: (B, T, K, 2 H). Returns (B, P, K, 2 H)."""
        first, last = gradient.unflatten(1, (2 * ctx.group.size(), -1)).chunk(2, dim=1)  # (B, R, C, K, 2 H) each
        parts = torch.stack((first, last.flip(1)), dim=2).movedim(1, 0).flatten(2, 3).flatten(0, 1).contiguous()
        return funcol.wait_tensor(_reduce_scatter(parts, "sum", 0, ctx.group)), None
