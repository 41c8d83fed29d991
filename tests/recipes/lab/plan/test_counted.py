"""--plan and --check for models of transformers."""

import json
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.lab.plan.command import answer
from recipes.lab.plan.screen import COLUMNS, LINES
from recipes.plan.memory import predict
from recipes.recipe.load import load
from recipes.recipe.stages import stages_of
from recipes.training.check import _parts, _steps, check

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
GPT2, T5 = (str(ROOT / "configs" / f"{family}_debug.toml") for family in ("gpt2", "t5"))


def test_the_plan_of_a_causal_model_shows_memory_and_flops(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer([GPT2, "--run.device=cuda", "--plan", "--processes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    shown = " ".join(" ".join(lines).split())
    recipe = load(GPT2, ["--run.device=cuda"], processes=4)
    memory, length = predict(recipe, recipe.mesh.fit(4)), recipe.batch.sequence_length
    assert "model transformers, not our decoder: model_type = 'gpt2'" in shown
    assert f"memory {memory.peak / 1e9:.1f} of 85.5 GB, fits" in shown
    flops = recipe.model.flops_per_token(length, "causal") * length * recipe.batch.global_batch_size
    assert f"flops {flops / 1e12:.3g} TFLOP per step (causal attention)" in shown
    assert "time is not predicted for models of transformers" in shown


def test_the_plan_of_an_encoder_decoder_counts_both_texts_of_its_longest_pairs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer([T5, "--plan", "--json", "--fsdp.param_dtype=bfloat16"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    equal = load(T5, []).model.flops_per_token(32, "full") * 2 * 32
    assert numbers["flops_per_step_full"] > numbers["global_batch_size"] * equal  # answers are longer than prompts
    assert numbers["least_step_seconds"] > 0 and numbers["step_seconds"] is None
    [pieces] = numbers["memory_gib"].values()
    assert sum(pieces.values()) == pytest.approx(numbers["peak_memory_gib"])


@pytest.mark.parametrize(
    "options",
    [["--search"], ["--processes", "2,4"], ["--price", "2"], ["--tokens", "1B"]],
    ids=lambda options: options[0],
)
def test_what_needs_a_time_is_refused_by_name(options: list[str]) -> None:
    with pytest.raises(UserError, match=rf"^{options[0]}\b.* not predicted for models of transformers"):
        answer([GPT2, "--plan", *options])


def test_check_warns_of_a_model_of_transformers_that_needs_more_than_its_gpu_has(
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe = ROOT / "configs/gpt2_124m_8xh100.toml"
    more = ["--batch.micro_batch_size=128", "--batch.global_batch_size=1024", "--compile.enabled=false"]
    check(str(recipe), more, processes=None, nodes=None)
    said = capfd.readouterr()
    assert " of 85.5 GB (predicted), fullest at " in said.out
    assert "of memory are predicted, more than 94% of the 85.5 GB of an H100" in said.err


def test_check_describes_the_pairs_of_an_encoder_decoder() -> None:
    recipe = load(T5, [])
    assert "of 16 pairs, at most 32 tokens of a prompt and 128 of an answer; learning rate" in _steps(
        stages_of(recipe)[0]
    )
    assert any(line.endswith("attention inside pairs") for line in _parts(recipe))
