"""A run with divided experts validates, answers tasks, samples and is exported; its model generates text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.decoder import Decoder
from recipes.evaluation.generate import generate, open_model
from recipes.evaluation.opened import Sampling
from recipes.files.exit_codes import FINISHED, REFUSED
from recipes.recipe.schema import Recipe
from tests.commands import run_command
from tests.processes import ROOT, run_processes
from tests.recipes.weights.test_experts import QWEN, write_folder
from tests.tasks import write_tasks
from tests.training import change, rows, run_all

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: pip install -e '.[evaluation]'")

SPARSE: dict[str, Any] = {"qk_norm": "head", "no_rope_every": 0, "experts": 4, "experts_per_token": 2}
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def runs(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Recipe]:
    """Number of processes, which divide the experts -> its run."""
    folder = tmp_path_factory.mktemp("runs")
    tasks = write_tasks(folder / "tasks")
    recipe = change(
        small,
        run={"output": str(folder), "steps": 4},
        model=SPARSE | {"expert_width": 32},
        batch={"sequence_length": 64},
        validation={"every": 2, "batches": 1, "sample_tokens": 12, "task_limit": 3, "tasks": (str(tasks),)},
        checkpoint={"every": 2, "export_hf": True},
    )
    found = {count: change(recipe, run={"name": str(count)}, mesh={"expert": count}) for count in (1, 2)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (OFFLINE | {"HF_HOME": str(folder / "home")}).items():
            patch.setenv(name, value)
        for count, one in found.items():
            assert run_processes(count, run_all, [one], False) == [[FINISHED]] * count
    return found


def test_divided_experts_have_the_validation_and_the_scores_of_one_process(runs: dict[int, Recipe]) -> None:
    one, two = (
        [{key: value for key, value in row.items() if key.startswith("validation")} for row in rows(runs[count])]
        for count in (1, 2)
    )
    assert {key for row in two for key in row} > {"validation_loss", "validation_task/choices/acc"}
    for mine, theirs in zip(two, one, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    logs = [(runs[count].run.folder / "log.txt").read_text() for count in (1, 2)]
    samples = [log.rpartition("how the model goes on:")[2].partition(" done: ")[0] for log in logs]
    alone, both = ({line.partition("Z ")[2] for line in sample.splitlines()[1:-1]} for sample in samples)
    assert len(alone) > 1 and alone == {line for line in both if "how the model goes on" not in line}


def test_an_export_of_divided_experts_has_the_logits_of_transformers(runs: dict[int, Recipe]) -> None:
    folder = runs[2].run.folder
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf")
    ours = open_model(folder, dtype=torch.float32, device=torch.device("cpu")).model
    tokens = torch.randint(500, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generated_text_is_that_of_the_whole_sequence_without_a_cache(dtype: str, runs: dict[int, Recipe]) -> None:
    opened = open_model(runs[2].run.folder / "hf", dtype=getattr(torch, dtype), device=torch.device("cpu"))
    model = opened.model
    assert isinstance(model, Decoder) and model.routers is not None
    assert {parameter.dtype for parameter in model.routers.parameters()} == {torch.float32}
    prompt = opened.tokenizer.ids("def f(x):")
    text = [*prompt, *generate(model, prompt, Sampling(max_tokens=12, temperature=0.0))]
    with torch.no_grad():
        best = model(torch.tensor([text])).argmax(-1)[0].tolist()
    assert dtype == "bfloat16" or best[len(prompt) - 1 : -1] == text[len(prompt) :]
    assert len(text) == len(prompt) + 12


def test_a_model_with_experts_is_evaluated_on_any_number_of_processes(runs: dict[int, Recipe], tmp_path: Path) -> None:
    text, found = tmp_path / "text.txt", []
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    for processes in (1, 2):
        launch = ["scripts/launch.py", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
        evaluated = [ROOT / "scripts/evaluate.py", runs[2].run.folder, text, "--sequence-length", 32, "--device", "cpu"]
        code, out, err = run_command(*launch, *evaluated)
        assert code == 0, err
        found.append(json.loads(out))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_experts_of_uneven_rows_are_refused_in_bfloat16_with_the_type_that_computes_them(tmp_path: Path) -> None:
    uneven, text = write_folder(tmp_path, replace(QWEN, vocabulary=512, expert_width=12)), tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 10)
    programs = {"generate": ["ab", "--max-tokens", 2], "evaluate": [text, "--sequence-length", 16]}
    for name, arguments in programs.items():
        command = [ROOT / f"scripts/{name}.py", uneven, *arguments, "--device", "cpu", "--dtype"]
        code, _, err = run_command(*command, "bfloat16")
        assert code == REFUSED and err.count("\n") == 1, err
        assert "expert_width = 12: experts need a multiple of 8 in bfloat16, rows of 16 bytes each" in err
        assert err.endswith("; write --dtype float32\n")
        code, _, err = run_command(*command, "float32")
        assert code == 0, err
