"""run.deterministic on a GPU: the same recipe gives the same bits, twice and through a kill."""

import random
from pathlib import Path

import pytest
import torch

from parallel.determinism import repeat_bits
from recipes.cluster.stragglers import Comparison
from tests.chaos import Run, torment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("changes", ["", "--compile.enabled true --data.document_mask true"])
def test_two_runs_and_a_killed_one_end_with_the_same_bits(changes: str, corpus: Path, tmp_path: Path) -> None:
    words = ["--data.source", str(corpus), "--run.deterministic", "true", "--fsdp.param_dtype", "bfloat16"]
    results = []
    for name, kills in (("one", 0), ("two", 0), ("killed", 1)):
        run = Run(tmp_path, name, processes=1, steps=20, changes=[*words, *changes.split()])
        assert torment(run, kills=kills, pause=0.5, draw=random.Random(3)) == kills
        results.append(run.result())
    (losses, files), *others = results
    assert len(losses) == 20
    assert [other[0] for other in others] == [losses] * 2
    assert [other[1] for other in others] == [files] * 2


def test_processes_are_compared_without_an_operator_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only runs of several processes compare them, and only once their windows are full."""
    rows = torch.zeros(4, 3, dtype=torch.float64, device="cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    repeat_bits(True)
    try:
        for stages in (1, 2):
            Comparison(str, stages=stages).summary(rows)
    finally:
        repeat_bits(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = False
