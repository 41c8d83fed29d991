"""Where each document packed into a batch begins, for attention and positions. B batch, T tokens, N documents."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_LENGTHS = 16
"""Number of documents in the shortest list of cumulative lengths; longer lists are padded to a power of two."""


class Mask(NamedTuple):
    """A mask for scaled_dot_product_attention, which computes every pair of tokens and then drops the masked ones."""

    sees: Tensor
    """(B, 1, T, T) bool: whether a token (row) attends to another (column)."""


class Lengths(NamedTuple):
    """Lengths for kernels that treat the batch as one row of documents and compute only the pairs inside each."""

    cumulative: Tensor
    """(N + 1,) int32: 0, the length of the first document, of the first two, ...; padded with empty documents."""
    of_keys: Tensor | None = None
    """The same for the keys, where they begin before the queries; None if they are of the same tokens."""


Restriction = Mask | Lengths
"""What keeps attention inside documents, in the form that a kernel takes."""


def has_kernel_for_lengths(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether activations on the tensor's device, of this type or the tensor's, have a kernel that takes Lengths."""
    return tensor.device.type == "cuda" and (dtype or tensor.dtype) in (torch.bfloat16, torch.float16)


def whole_rows(query: Tensor, key: Tensor) -> Lengths:
    """Every row as one document, of which query, (B, N, T, H), has the last T tokens, and key, (B, K, S, H), all."""
    rows = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    return Lengths(rows * query.shape[2], rows * key.shape[2])


def of_chunk(documents: Restriction, chunk: slice, *, length: int) -> Restriction:
    """What restricts the queries of one chunk of every row of `length` tokens to the keys up to the chunk's end."""
    if isinstance(documents, Mask):
        return Mask(documents.sees[:, :, chunk, : chunk.stop])
    # Where each document begins: its row, and its place there. Those before the chunk get keys but no queries, those
    # behind it neither, so that every key is of some document and gets a gradient.
    row, place = documents.cumulative // length, documents.cumulative % length
    size = chunk.stop - chunk.start
    queries = row * size + (place - chunk.start).clamp(0, size)
    return Lengths(queries, row * chunk.stop + place.clamp(max=chunk.stop))


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of packed tokens (B, T)."""

    positions: Tensor
    """(B, T) int64: each token's distance from the first token of its document in its row."""
    cumulative_lengths: Tensor
    """(N + 1,) int32, as Lengths.cumulative, over the batch row by row; the end of a row ends a document."""
    squared_lengths: int
    """Sum of the squared lengths of all documents, in tokens; the cost of attention is proportional to it."""

    @classmethod
    def of(cls, tokens: Tensor, *, end_of_document: int) -> "Documents":
        """Find the documents in tokens (B, T), which must be on the host so that nothing waits for a device.

        One starts at the first token of a row and after every end-of-document token, which ends the one before.
        """
        starts = torch.ones_like(tokens, dtype=torch.bool)  # (B, T)
        starts[:, 1:] = tokens[:, :-1] == end_of_document
        return cls.from_starts(starts)

    @classmethod
    def from_starts(cls, starts: Tensor) -> "Documents":
        """The documents that begin where `starts`, (B, T) bool on the host, is True; it is at the start of each row."""
        index = torch.arange(starts.shape[1])  # (T,)
        positions = index - torch.where(starts, index, 0).cummax(dim=1).values  # (B, T)

        first_tokens = starts.flatten().nonzero().flatten()  # (N,)
        # Few different sizes, so that compiled blocks are not recompiled for every number of documents.
        size = max(SMALLEST_LENGTHS, 1 << (len(first_tokens) - 1).bit_length())
        cumulative = torch.full((size + 1,), starts.numel(), dtype=torch.int32)
        cumulative[: len(first_tokens)] = first_tokens
        return cls(positions, cumulative, int(cumulative.long().diff().square().sum()))

    def to(self, device: torch.device) -> "Documents":
        """A copy on the device. From pinned memory, the host does not wait for the copy to a GPU."""
        positions, cumulative = (
            tensor.to(device, non_blocking=True) for tensor in (self.positions, self.cumulative_lengths)
        )
        return Documents(positions, cumulative, self.squared_lengths)

    def pin_memory(self) -> "Documents":
        """A copy in pinned memory, which a GPU can read asynchronously."""
        return Documents(self.positions.pin_memory(), self.cumulative_lengths.pin_memory(), self.squared_lengths)

    def for_attention_in(self, dtype: torch.dtype) -> Restriction:
        """The mask or lengths for attention over activations of this type, on the documents' device.

        CUDA has variable-length kernels for 16-bit types. The CPU, and float32 on any device, use a mask.
        """
        if has_kernel_for_lengths(self.positions, dtype):
            return Lengths(self.cumulative_lengths)
        index = torch.arange(self.positions.shape[1], device=self.positions.device)  # (T,)
        first = index - self.positions  # (B, T): the index in its row where a token's document begins
        return Mask(((index <= index[:, None]) & (index >= first[:, :, None]))[:, None])
