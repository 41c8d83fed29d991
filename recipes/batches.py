"""From rows of tokens to the micro-batches that a model takes.

B sequences of a micro-batch, T tokens.
"""

import torch
from torch import Tensor

from models.documents import Documents
from models.loss import IGNORED

MicroBatch = tuple[Tensor, Tensor, Documents | None]
"""Inputs and targets, (B, T) each, and the documents of the inputs, unless a row is one text to the model."""


def micro_batches(
    rows: Tensor, *, size: int, valid: int, end_of_document: int | None, device: torch.device
) -> list[MicroBatch]:
    """All rows in micro-batches of `size`, on the device; the host does not wait for a GPU.

    rows: (count, T + 1) on the host. valid: the rows whose targets count, from the first. end_of_document: this token's
    id, to keep attention inside documents.
    """
    documents: list[Documents | None] = [None] * len(rows.split(size))
    if end_of_document is not None:
        parts = rows[:, :-1].split(size)
        documents = [Documents.of(part, end_of_document=end_of_document).to(device) for part in parts]
    if device.type == "cuda":
        rows = rows.pin_memory()
    rows = rows.to(device, non_blocking=True)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if valid < len(rows):
        targets = targets.clone()
        targets[valid:] = IGNORED
    return list(zip(inputs.split(size), targets.split(size), documents, strict=True))
