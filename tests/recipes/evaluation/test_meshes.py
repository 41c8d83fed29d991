"""Validation and sampled text on every mesh are those of one process."""

from dataclasses import replace

import pytest
import torch

from models.documents import Documents
from models.loss import IGNORED
from models.sizes import SIZES
from parallel.dist import start, stop
from recipes.data.batches import MicroBatch
from recipes.evaluation.evaluate import continuation
from recipes.evaluation.losses import mean_loss
from recipes.evaluation.opened import Sampling
from tests.build import build_model, cpu_mesh
from tests.meshes import mesh_config, on_each_mesh

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MODEL = replace(
    SIZES["smollm3_debug"], layers=2, width=32, no_rope_every=2, feed_forward_width=48, vocabulary=64, init_std=0.3
)
ROWS, LENGTH, END = 8, 16, 63
MESHES = (
    ("1.1.1.2", "heads"),
    ("1.1.2.2", "heads"),
    ("1.2.2.1", "gather"),
)


def validation_share(rank: int, ranks: int, *, masked: bool) -> list[MicroBatch]:
    """This share of ROWS rows, two at a time. The last row only fills up, and row r has r + 1 targets."""
    tokens = torch.randint(MODEL.vocabulary, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens[:, [5, 8]] = END
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, row + 1 if row < ROWS - 1 else 0 :] = IGNORED
    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return [
        (i, t, Documents.of(i, end_of_document=END) if masked else None)
        for i, t in zip(inputs[own].split(2), targets[own].split(2), strict=True)
    ]


def losses_and_texts(mesh: str, context_by: str) -> tuple[list[float], list[list[int]]]:
    """With documents and without."""
    start("cpu", seed=0)
    config = replace(mesh_config(mesh), context_by=context_by)
    losses, texts = [], []
    for end in (None, END):
        model, _ = build_model(replace(MODEL, tied_embeddings=end is None), mesh=config)
        own = cpu_mesh(config)
        share = validation_share(own.data_rank, own.data_ranks, masked=end is not None)
        losses.append(mean_loss(model, share, mesh=own))
        for prompt in ([3, 1, 4], [*range(1, 30), END, 5, 6]):
            options = {"shape": (2, LENGTH), "device": CPU, "end_of_document": end}
            texts.append(continuation(model, prompt, Sampling(6, temperature=0.8), **options))
    stop()
    return losses, texts


def test_validation_and_sampled_texts_on_every_mesh_are_those_of_one_process() -> None:
    [(losses, texts)] = on_each_mesh(["1.1.1.1"], losses_and_texts, "heads")["1.1.1.1"]
    assert len({*losses}) == 2 and len({*map(tuple, texts)}) == 4
    for mesh, context_by in MESHES:
        for found in on_each_mesh([mesh], losses_and_texts, context_by)[mesh]:
            assert found[0] == pytest.approx(losses, abs=1e-5), (mesh, context_by)
            assert found[1] == texts, (mesh, context_by)
