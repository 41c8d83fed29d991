"""Context parallelism: each process of a group has T / degree neighbouring tokens of the same rows.

Only attention looks at other tokens. By heads (DeepSpeed Ulysses, Jacobs et al. 2023), processes change there from
parts of the tokens to parts of the heads, so that every kernel and mask works unchanged on whole rows. By gathering,
each process gathers all keys and values, for heads that the degree does not divide.

B batch, T tokens of a row, P tokens of a part, N query heads, K key/value heads, H head width, R degree.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from models.documents import Mask, Restriction
from models.interface import blocks_of, interface_of


def split_over(model: nn.Module, axis: DeviceMesh, *, by: str) -> str:
    """Cut every row of tokens over the axis, in place. by: as mesh.context_by. Returns a line for the log."""
    group = axis.get_group()
    kind = {"heads": ByHeads, "gather": ByGathering}[by]
    name = interface_of(model).inside_block.inner_attention
    for block in blocks_of(model):
        block.set_submodule(name, kind(block.get_submodule(name), group))
    model.register_forward_pre_hook(_OwnPart(group), with_kwargs=True)
    how = {"heads": "tokens exchanged for heads", "gather": "keys and values gathered"}[by]
    return f"context parallelism: {group.size()} parts of every row, {how}"


class _OwnPart:
    """Cuts the arguments of the model's forward pass: tokens, targets and positions; documents stay whole."""

    def __init__(self, group: ProcessGroup) -> None:
        self._degree, self._rank = group.size(), group.rank()

    def __call__(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("cache") is not None:  # a text that grows token by token: every process computes all of it
            return None
        rows = arguments[0].shape[1]
        length = rows // self._degree
        assert length * self._degree == rows, "recipes/mesh_rules.py refuses such rows"
        own = slice(self._rank * length, (self._rank + 1) * length)
        documents = options.get("documents")
        positions = (
            torch.arange(own.start, own.stop, device=arguments[0].device)
            if documents is None
            else documents.positions[:, own]
        )
        tokens, targets = arguments  # without targets each process would return the logits of its part alone
        return (tokens[:, own], targets[:, own]), options | {"positions": positions}


class ByHeads(nn.Module):
    """Attention over whole rows with a part of the heads."""

    def __init__(self, inner: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group, self.degree = inner, group, group.size()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Restriction | None = None) -> Tensor:
        """query: (B, N, P, H); key, value: (B, K, P, H); documents: of whole rows. Returns (B, N, P, H)."""
        heads, shared = query.shape[1], key.shape[1]
        if shared % self.degree:  # copies of each head, so that every process has one
            copies = self.degree // shared if self.degree % shared == 0 else heads // shared
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        # One exchange for all three: heads side by side, in the order of the processes they go to.
        parts = [x.unflatten(1, (self.degree, -1)) for x in (query, key, value)]  # (B, R, heads / R, P, H)
        sizes = [part.shape[2] for part in parts]
        sent = torch.cat(parts, dim=2).movedim(1, 0).contiguous()  # (R, B, heads / R, P, H)
        got = _exchange(sent, self.group).movedim(0, 2).flatten(2, 3)  # (B, heads / R, R P = T, H)  # after movedim
        out = self.inner(*got.split(sizes, dim=1), documents)  # (B, N / R, T, H)
        back = out.unflatten(2, (self.degree, -1)).movedim(2, 0).contiguous()  # (R, B, N / R, P, H)
        return _exchange(back, self.group).movedim(0, 1).flatten(1, 2)  # (B, N, P, H)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """parts: (R, ...), one for each process of the group. Returns (R, ...), those that they have for this one."""
    got = funcol.all_to_all_single_autograd(parts.flatten(0, 1), None, None, group)
    return funcol.wait_tensor(got).view(parts.shape)


class ByGathering(nn.Module):
    """Attention of a part of the tokens over all keys and values."""

    def __init__(self, inner: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Restriction | None = None) -> Tensor:
        """query: (B, N, P, H); key, value: (B, K, P, H); documents: of whole rows. Returns (B, N, P, H)."""
        length = query.shape[2]
        first = self.group.rank() * length
        both = torch.stack((key, value)).movedim(3, 0).contiguous()  # (P, 2, B, K, H)
        key, value = _Gather.apply(both, self.group).movedim(0, 3)  # (B, K, T, H) each
        sees = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(first)  # (P, T)
        if documents is not None:
            sees = _mask(documents, rows=key.shape[0], length=key.shape[2])[:, :, first : first + length]
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, attn_mask=sees, enable_gqa=grouped)


def _mask(documents: Restriction, *, rows: int, length: int) -> Tensor:
    """(B, 1, T, T) bool: whether a token (row) attends to another (column)."""
    if isinstance(documents, Mask):
        return documents.sees
    index = torch.arange(rows * length, device=documents.cumulative.device, dtype=documents.cumulative.dtype)
    number = torch.searchsorted(documents.cumulative, index, right=True).view(rows, length)  # of each token's document
    return (number[:, :, None] == number[:, None, :]).tril()[:, None]


class _Gather(torch.autograd.Function):
    """Concatenates the parts of all processes; the gradient of a part is the sum of what all have for it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return funcol.wait_tensor(funcol.all_gather_tensor(part, 0, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(gradient.contiguous(), "sum", 0, ctx.group)), None
