"""Documents packed into one batch: where each begins, so that attention stays inside it and positions start anew.

B batch, T tokens, N documents.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_LENGTHS = 16
"""Documents in the shortest list of cumulative lengths; a longer one has room for a power of two."""


class Mask(NamedTuple):
    """For scaled_dot_product_attention, which computes every pair and then drops those that the mask does not name."""

    sees: Tensor
    """(B, 1, T, T) bool: whether a token (row) sees another (column)."""


class Lengths(NamedTuple):
    """For kernels that take the batch as one row of documents and compute no pair beyond them."""

    cumulative: Tensor
    """(N + 1,) int32: 0, the length of the first document, of the first two, ...; empty documents at the end."""


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of packed tokens (B, T)."""

    positions: Tensor
    """(B, T) int64: each token's distance from the first token of its document in its row."""
    cumulative_lengths: Tensor
    """(N + 1,) int32, as Lengths.cumulative, over the batch row after row; the end of a row ends a document."""
    squared_lengths: int
    """Sum of the squared lengths of all documents, in tokens: what attention costs."""

    @classmethod
    def of(cls, tokens: Tensor, *, end_of_document: int) -> "Documents":
        """tokens: (B, T) on the host, where this is computed, so that no device is waited for.

        A document starts at the first token of a row and after every end-of-document token, which itself is the last
        token of the document that it ends.
        """
        length = tokens.shape[1]
        starts = torch.ones_like(tokens, dtype=torch.bool)  # (B, T)
        starts[:, 1:] = tokens[:, :-1] == end_of_document
        index = torch.arange(length)  # (T,)
        positions = index - torch.where(starts, index, 0).cummax(dim=1).values  # (B, T)

        first_tokens = starts.flatten().nonzero().flatten()  # (N,)
        # Few different sizes, so that compiled blocks are not compiled again for every number of documents.
        room = max(SMALLEST_LENGTHS, 1 << (len(first_tokens) - 1).bit_length())
        cumulative = torch.full((room + 1,), tokens.numel(), dtype=torch.int32)
        cumulative[: len(first_tokens)] = first_tokens
        return cls(positions, cumulative, int(cumulative.long().diff().square().sum()))

    @property
    def attention_length(self) -> float:
        """A token of a document of L tokens attends on average as in a sequence of L: the mean over all tokens."""
        return self.squared_lengths / self.positions.numel()

    def to(self, device: torch.device) -> "Documents":
        """A copy on the device; from pinned memory the host does not wait for a GPU."""
        positions, cumulative = (
            tensor.to(device, non_blocking=True) for tensor in (self.positions, self.cumulative_lengths)
        )
        return Documents(positions, cumulative, self.squared_lengths)

    def pin_memory(self) -> "Documents":
        """A copy in memory that a GPU reads by itself."""
        return Documents(self.positions.pin_memory(), self.cumulative_lengths.pin_memory(), self.squared_lengths)

    def for_attention_in(self, dtype: torch.dtype) -> Mask | Lengths:
        """What attention over activations of this type needs, on the device where the documents are.

        CUDA has kernels for lengths, in 16-bit types. The CPU, and float32 on any device, computes with a mask.
        """
        if self.positions.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
            return Lengths(self.cumulative_lengths)
        index = torch.arange(self.positions.shape[1], device=self.positions.device)  # (T,)
        first = index - self.positions  # (B, T): where in its row a token's document begins
        return Mask(((index <= index[:, None]) & (index >= first[:, :, None]))[:, None])
