"""The largest logits of attention, which its kernels do not return: a further product of queries and keys.

B batch, T tokens with queries, S tokens with keys, of which the T are the last, K key/value heads, N query heads.
"""

from typing import Any

import torch
from torch import Tensor, library

SCORES = 2**24
"""Scores in memory at a time."""


def note(largest: Tensor, query: Tensor, key: Tensor, documents: Any, reach: dict[str, Any]) -> None:
    """Raise `largest`, (N,) float32, to the largest logit of each head. The others: as of models.attention.attend()."""
    sees, *lengths = (getattr(documents, one, None) for one in ("sees", "cumulative", "of_keys"))  # of Mask, or Lengths
    found = largest_products(query.detach(), key.detach(), sees, *lengths, reach["window"])
    largest.copy_(torch.maximum(largest, found * (reach["scale"] or query.shape[-1] ** -0.5)))


# An operator, so that torch.compile does not look into its loop, and selective checkpointing keeps what it returns.
@library.custom_op("shardwright::largest_products", mutates_args=())
def largest_products(
    query: Tensor, key: Tensor, sees: Tensor | None, of_queries: Tensor | None, of_keys: Tensor | None, window: int
) -> Tensor:
    """Of each head, (N,) float32, over query, (B, N, T, H), and key, (B, K, S, H), computed in their type. sees: of a
    Mask. of_queries, of_keys: of Lengths."""
    (batch, heads, new, _), (_, groups, seen, _), device = query.shape, key.shape, query.device
    largest = torch.full((heads,), -torch.inf, device=device)
    index, rows = torch.arange(seen, device=device), torch.arange(batch, device=device)[:, None]
    for own in torch.arange(new, device=device).split(max(1, SCORES // (batch * heads * seen))):  # (C,)
        place = own[:, None] + seen - new
        inside = ((index <= place) & (index > place - (window or seen)))[None, None]  # (B or 1, 1, C, S)
        if sees is not None:
            inside = inside & sees[:, :, own]
        if of_queries is not None:  # each token has the number of its document
            whose = torch.searchsorted(of_queries, rows * new + own, right=True)  # (B, C)
            of_key = torch.searchsorted(of_queries if of_keys is None else of_keys, rows * seen + index, right=True)
            inside = inside & (whose[:, None, :, None] == of_key[:, None, None])
        queries = query[:, :, own].unflatten(1, (groups, -1)).flatten(2, 3)  # (B, K, N / K x C, H)
        scores = (queries @ key.mT).view(batch, heads, -1, seen)  # (B, N, C, S)
        largest = torch.maximum(largest, scores.masked_fill(~inside, -torch.inf).amax((0, 2, 3)).float())
    return largest


largest_products.register_fake(lambda query, *_: query.new_empty(query.shape[1:2], dtype=torch.float32))
