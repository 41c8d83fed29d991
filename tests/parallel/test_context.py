"""Masks of context parallelism by gathering."""

import torch

from models.documents import Documents, Lengths, Mask
from parallel.context import _mask

END = 3


def test_lengths_of_documents_and_their_mask_restrict_attention_alike() -> None:
    tokens = torch.randint(4, 9, (3, 16), generator=torch.Generator().manual_seed(0))
    tokens[0, [0, 7, 8]] = tokens[1, 15] = tokens[2, 3] = END
    documents = Documents.of(tokens, end_of_document=END)
    by_mask = documents.for_attention_in(torch.float32)
    assert isinstance(by_mask, Mask)
    by_lengths = _mask(Lengths(documents.cumulative_lengths), rows=3, length=16)
    assert torch.equal(by_lengths, by_mask.sees)
    assert not torch.equal(by_lengths, torch.ones_like(by_lengths).tril())
