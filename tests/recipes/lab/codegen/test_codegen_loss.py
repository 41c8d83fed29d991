"""The count of the loss's generated code for an H100, and its budget."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.lab.codegen.machine import missing_tools
from tests.processes import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
needs_tools = pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())
# Pretending an H100 changes a process for good, so counts come from a process of their own.
COUNT = """
import json, warnings
from dataclasses import asdict, replace
warnings.filterwarnings("ignore")
import parallel.kernels
from recipes.lab.codegen import loss, machine
from recipes.recipe.load import load
machine.pretend_h100()
recipe = load("configs/benchmarks/smollm3_3b_h100.toml", [], rules=False)
logits = recipe.batch.micro_batch_size * recipe.batch.sequence_length * recipe.model.vocabulary
found = {}

def count(name, recipe):
    counted = loss.compiled_loss(recipe, with_ptxas=True)
    found[name] = asdict(counted) | {"bytes_per_logit": counted.bytes / logits}

count("as it is", recipe)
count("uneven chunks", replace(recipe, batch=replace(recipe.batch, loss_chunks=3)))
without_copy = parallel.kernels.overwrite_by_exponentials

def with_copy(logits, largest, factors):
    without_copy(logits, largest, factors)
    logits.scatter_(-1, largest[:, None].to(int), factors[:, None].to(logits.dtype))

parallel.kernels.overwrite_by_exponentials = with_copy
count("with a scatter inside", recipe)
found["eager"] = loss.eager_bytes(recipe) / logits
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SmolLM3-3B's loss in bf16."""
    folder = tmp_path_factory.mktemp("codegen")
    caches = {name: str(folder / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    environment = {**os.environ, **caches, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", COUNT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


BUDGET = pytest.approx(6, abs=0.01)
"""Bytes per bfloat16 logit: read forward, read and written backward."""


@needs_tools
@pytest.mark.parametrize("chunks", ["as it is", "uneven chunks"])
def test_the_compiled_loss_reads_each_logit_twice_and_writes_it_once(chunks: str, counted: dict[str, Any]) -> None:
    assert counted[chunks]["bytes_per_logit"] == BUDGET
    assert counted[chunks]["kernels"] == 2


@needs_tools
def test_the_eager_loss_moves_many_times_as_much(counted: dict[str, Any]) -> None:
    assert counted["eager"] > 40


@needs_tools
def test_ptxas_accepts_the_kernels_of_the_loss(counted: dict[str, Any]) -> None:
    assert list(counted["as it is"]["verdicts"].values()) == ["", ""]


@needs_tools
def test_a_copy_of_the_logits_breaks_the_budget_of_the_loss(counted: dict[str, Any]) -> None:
    assert counted["with a scatter inside"]["bytes_per_logit"] > 7
    assert counted["with a scatter inside"]["kernels"] > 2
