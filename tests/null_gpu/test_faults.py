"""The null GPU finds a fault of each kind. SHARDWRIGHT_NULL_GPU_PYTHON names a Python with a CUDA build of torch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.recipe.load import CONFIGS
from tests.null_gpu.build import NullGpu, build
from tests.null_gpu.suite import DEBUG, SHORT, step, whole

PYTHON = os.environ.get("SHARDWRIGHT_NULL_GPU_PYTHON")
on_null_gpu = [
    pytest.mark.null_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SHARDWRIGHT_NULL_GPU_PYTHON names no Python with a CUDA build of torch"),
]
RECIPE = CONFIGS / "benchmarks" / "smollm3_3b_8xh100.toml"
FAULTY = """
import sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
import {module} as under_test
import {stepping} as stepping

whole, held = stepping.train_step, []

def train_step(built, micro_batches, *, step, **named):
    {fault}
    return whole(built, micro_batches, step=step, **named)

stepping.train_step = train_step
if __name__ == "__main__":
    raise SystemExit(under_test.main(sys.argv[1:]))
"""


def faulty_script(folder: Path, fault: str, *, on_all_ranks: bool) -> Path:
    """step.py, or drive.py, whose every step begins with this line."""
    module = "tests.null_gpu.step" if not on_all_ranks else "tests.null_gpu.drive"
    stepping = module if not on_all_ranks else "recipes.training.trainer"
    file = folder / "faulty.py"
    root = str(CONFIGS.parent)
    file.write_text(FAULTY.format(root=root, module=module, stepping=stepping, fault=fault), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    assert PYTHON is not None
    yield build(Path(PYTHON), tmp_path_factory.mktemp("stub"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo no module named torch >&2; exit 1", "has no torch"),
        ("printf '2.13.0+cpu\\nNone\\n/torch\\n'", r"has torch 2\.13\.0\+cpu, which is not a CUDA build; name an env"),
    ],
)
def test_a_python_without_a_cuda_build_of_torch_is_refused(answer: str, message: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(UserError, match=message):
        build(python, tmp_path / "stub")


class TestOnNullGpu:
    pytestmark = on_null_gpu
    EAGER = ("--compile.enabled", "false", "--model.layers", "2")

    def test_sound_step_waits_for_nothing_and_keeps_nothing(self, gpu: NullGpu, tmp_path: Path) -> None:
        seen = step(gpu, RECIPE, self.EAGER, tmp_path / "step")
        assert (seen["waits"], seen["copies"], seen["places"]) == (0, 0, {})
        assert seen["grown"] < 10_000
        assert seen["allocated"] > 1e9

    def test_item_in_a_step_is_found_and_its_place_named(self, gpu: NullGpu, tmp_path: Path) -> None:
        script = faulty_script(tmp_path, "torch.ones(1, device='cuda').item()", on_all_ranks=False)
        seen = step(gpu, RECIPE, self.EAGER, tmp_path / "step", script=script)
        assert (seen["waits"], seen["copies"]) == (1, 1)
        assert len(seen["places"]) == 1

    def test_an_empty_record_of_collectives_is_an_error(
        self, gpu: NullGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
        seen = step(gpu, RECIPE, self.EAGER, tmp_path / "step")
        assert "torch has recorded none of the collectives so far" in seen["error"]

    def test_documents_are_attended_to_by_flash_kernels(self, gpu: NullGpu, tmp_path: Path) -> None:
        options = (*self.EAGER, "--data.document_mask", "true", "--attention.backend", "auto")
        seen = step(gpu, RECIPE, options, tmp_path / "step")
        assert seen["attention"] == "flash"

    def test_leak_is_found(self, gpu: NullGpu, tmp_path: Path) -> None:
        script = faulty_script(tmp_path, "held.append(torch.zeros(2**20, device='cuda'))", on_all_ranks=False)
        seen = step(gpu, RECIPE, self.EAGER, tmp_path / "step", script=script)
        assert 4 * 2**20 <= seen["grown"] < 4 * 2**20 + 10_000

    def test_collective_in_another_order_on_one_rank_is_found(self, gpu: NullGpu, tmp_path: Path) -> None:
        fault = "dist.get_rank() == 1 and dist.all_reduce(torch.zeros(3, device='cuda'))"
        script = faulty_script(tmp_path, fault, on_all_ranks=True)
        run = whole(gpu, 2, DEBUG, SHORT, tmp_path / "run", script=script)
        assert "error" not in run and len(run["disorders"]) == 1
        assert "rank 1 all_reduce of 3 f32" in run["disorders"][0]

    def test_exception_on_one_rank_ends_the_run_with_its_text(self, gpu: NullGpu, tmp_path: Path) -> None:
        fault = "exec('if dist.get_rank() == 1 and step == 3: raise RuntimeError(\"planted\")')"
        script = faulty_script(tmp_path, fault, on_all_ranks=True)
        run = whole(gpu, 2, DEBUG, [*SHORT, "--run.hang_timeout", "60"], tmp_path / "run", script=script)
        assert run["error"].startswith("crashed: ")
        assert "RuntimeError: planted" in (tmp_path / "run/run/log.txt").read_text(encoding="utf-8")
