"""`train.py RECIPE --plan`: what it prints, and what it refuses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.lab.plan import command
from recipes.lab.plan.plan import World, plan
from recipes.lab.plan.screen import Money, costs
from recipes.plan.hardware import GPUS
from recipes.plan.memory import predict
from recipes.plan.time import step_time
from recipes.recipe.load import CONFIGS, load
from tests import write_docs
from tests.recipes.lab.plan.asked import numbers, printed, refused

ROOT = CONFIGS.parent
RECIPES = sorted(
    path
    for folder in (CONFIGS, CONFIGS / "benchmarks")
    for path in folder.glob("*.toml")
    if path.stem.startswith(tuple(SIZES))
)
DEBUG = str(CONFIGS / "smollm3_debug.toml")
NODE = str(CONFIGS / "smollm3_3b_8xh100.toml")
LARGE = str(CONFIGS / "llama3_405b_128x8h100.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--price", "2.5"],
        ["--processes", "8,64"],
        ["--search", "--write", "plan.toml"],
    ],
)
def test_plan_is_one_screen_on_standard_output_without_torch(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    found = subprocess.run(
        [sys.executable, ROOT / "train.py", NODE, "--plan", *options],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    said = "searching; many GPUs take a minute\n" if "--search" in options else ""  # if it takes a second
    assert found.returncode == 0 and found.stderr in ("", said)
    lines = found.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= (110 if "--search" in options else 100)
    written = [option for option in options if option.startswith("plan.")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*written, "torch"])


def test_a_search_says_after_a_moment_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command, "SILENT", 0.01)
    assert command.answer([NODE, "--search"]) == 0
    assert capsys.readouterr().err == "searching; many GPUs take a minute\n"


@pytest.mark.slow
def test_examples_of_the_page_are_what_the_command_prints() -> None:
    text = write_docs.PLAN.read_text()
    assert text == write_docs.with_plans(text), "run python -m tests.write_docs"


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_has_a_plan_that_fits_the_screen(file: Path) -> None:
    size = max((size for size in SIZES if file.stem.startswith(size)), key=len)
    changes = [f"--model.name={size}", "--model.weights=", "--model.upcycle=false", "--data.tokenizer=train:4096"]
    lines = printed(str(file), "--price", "2.5", *(changes if "weights" in file.read_text() else [])).splitlines()
    assert len(lines) <= 40 + 5 * file.read_text().count("[[stages]]") and max(map(len, lines)) <= 100


def test_numbers_are_those_of_memory_and_time() -> None:
    recipe = load(NODE)
    degrees = recipe.mesh.fit(8)
    found = numbers(NODE, "--tokens", "2M", "--price", "3")
    assert found["peak_memory_gib"] * 2**30 == predict(recipe, degrees).peak
    time = step_time(recipe, degrees, gpu=GPUS["H100"])
    assert found["step_seconds"] == time.step_seconds
    assert found["tokens_per_second_per_device"] == time.tokens_per_second
    assert found["tokens_per_second"] == 8 * time.tokens_per_second
    assert found["mfu"] == time.tokens_per_second * recipe.model.flops_per_token(8192, "causal") / 989.4e12
    assert found["mfu_full"] == time.tokens_per_second * recipe.model.flops_per_token(8192, "full") / 989.4e12
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])
    least, most = found["step_seconds_range"]
    assert least < found["step_seconds"] < most
    cost = found["cost"]
    assert cost["days"] * 86_400 == pytest.approx(2e6 / found["tokens_per_second"])
    assert cost["money"] == pytest.approx(3 * cost["gpu_hours"]) == pytest.approx(3 * 8 * 24 * cost["days"])


def test_cost_is_that_of_the_steps_of_the_recipe_unless_tokens_are_named() -> None:
    found = numbers(NODE)
    assert found["cost"]["tokens"] == 10_000 * 128 * 8192
    assert found["cost"]["money"] is None


def test_scaling_prints_one_line_for_each_number_of_gpus_up_to_16384() -> None:
    lines = printed(LARGE, "--processes", "1024,4096,16384,1024", "--price", "2.5").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if line.startswith(" ")][1:]
    assert [row[:3] for row in rows] == [["1,024", "1,024", "8"], ["4,096", "1,024", "2*"], ["16,384", "2,048*", "1*"]]
    assert any(line.startswith("*: the recipe's 1,024 in micro-batches of 8 ") for line in lines)


def test_every_size_trains_on_the_same_tokens_also_with_another_batch() -> None:
    found = numbers(LARGE, "--processes", "1024,16384")["plans"]
    assert [plan["global_batch_size"] for plan in found] == [1024, 2048]
    assert [plan["cost"]["tokens"] for plan in found] == [1_200_000 * 1024 * 8192] * 2
    assert found[1]["cost"]["days"] * 86_400 == pytest.approx(
        found[1]["cost"]["tokens"] / found[1]["tokens_per_second"], rel=1e-6
    )


def test_a_size_that_does_not_fit_is_marked() -> None:
    out = printed(LARGE, "--processes", "64,1024")
    small, large = [line for line in out.splitlines() if line.startswith(" ")][1:]
    assert "! " in small and "!" not in large and "\n!: does not fit" in out


def test_numbers_of_several_sizes_are_those_of_each_alone() -> None:
    alone = numbers(NODE, "--processes", "64")
    several = numbers(NODE, "--processes", "8,64")["plans"]
    assert [plan["processes"] for plan in several] == [8, 64]
    assert several[1] == alone


def test_a_recipe_is_planned_where_its_data_and_weights_are_not() -> None:
    elsewhere = ["--data.source", "/not/here/tokens", "--data.tokenizer", "/not/here/tokenizer.json"]
    assert numbers(NODE, *elsewhere, "--model.weights", "/not/here") == numbers(NODE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gpu", "H300"], "--gpu H300: unknown; write H100, "),
        (["--processes", "0"], "--processes 0: must be whole numbers from 1 "),
        (["--processes", "8,,16"], "--processes 8,,16: must be whole numbers"),
        (["--processes", "9"], "--processes 9: cannot be divided equally among 2 nodes; "),
        (
            ["--mesh.tensor", "3"],
            "8 H100: mesh: replicate 1 x shard -1 x context 1 x tensor 3 does not fit 8 processes",
        ),
        (["--mesh.shard", "0"], "8 H100: mesh.shard = 0: a degree must be at least 1"),
        (["--processes", "8,12", "--mesh.shard", "8"], "12 H100: mesh: replicate 1 x shard 8 x "),
        (["--nodes", "0"], "--nodes 0: must be a whole number"),
        (["--nodes", "2", "--processes", "8,16"], "--nodes: goes with one number of processes"),
        (["--tokens", "many"], "--tokens many: must be a number from 1 to 1,000,000T; write as in "),
        (["--tokens", "nan"], "--tokens nan: must be a number"),
        (["--price"], "--price: expected one argument; "),
        (["--price", "$3"], "--price $3: must be a number, what one GPU costs for an hour"),
        (["--price", "-1"], "--price -1: must be a number"),
        (["--search", "--write", "/not/here/plan.toml"], "--write /not/here/plan.toml: there is no folder /not/here"),
        (["--check"], "--check and --plan: write one of them"),
        (["--search", "--processes", "8,16"], "--search: goes with one number of processes"),
        (["--write", "new.toml"], "--write: needs --search"),
        (["--search", "--write", "new.txt"], "--write new.txt: must end in .toml"),
        (["--search", "--write", NODE], f"--write {NODE}: exists; write another name, or remove it"),
    ],
)
def test_a_mistake_gets_one_line(arguments: list[str], expected: str) -> None:
    message = refused(NODE, *arguments)
    assert message.startswith(expected) and "\n" not in message


def test_a_batch_that_does_not_divide_is_refused_as_check_does() -> None:
    with pytest.raises(UserError) as checked:
        load(NODE, processes=12, nodes=2)
    assert refused(NODE, "--processes", "12") == str(checked.value)


def test_an_option_of_plan_needs_plan() -> None:
    with pytest.raises(UserError, match="needs --plan"):
        load(NODE, ["--calibrated-by", "record.json"])
    with pytest.raises(UserError, match="did you mean --price"):
        load(NODE, ["--prize", "3"])


@pytest.mark.slow
def test_search_says_what_is_faster_what_it_costs_and_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "faster.toml"
    out = printed(NODE, "--search", "--batch.micro_batch_size", "1", "--price", "2", "--write", str(file))
    assert out.endswith(f"\n\nwrote {file}\n")
    written = load(file, processes=8, nodes=1, elsewhere=True)
    assert written.batch == load(NODE).batch  # what the command line gives is kept
    assert f"\n{costs(plan(written, World(GPUS['H100'], 8)), Money(price=2))[0]}\n" in out


def test_numbers_of_a_search_hold_whole_plans() -> None:
    found = numbers(NODE, "--search", "--processes", "2", "--model.layers", "8")
    assert found["best"]["fits"] and found["best"]["processes"] == 2
    assert found["best"]["tokens_per_second_per_device"] >= found["original"]["tokens_per_second_per_device"]
    assert max(point["tokens_per_second_per_device"] for point in found["front"]) == pytest.approx(
        found["best"]["tokens_per_second_per_device"]
    )


@pytest.mark.slow
def test_a_search_in_which_nothing_fits_says_so_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    arguments = [
        LARGE,
        "--plan",
        "--search",
        "--model.layers",
        "20",
        "--processes",
        "2",
        "--write",
        str(tmp_path / "none.toml"),
    ]
    assert command.answer(arguments) == 2
    assert "Nothing fits" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_numbers_that_cannot_be_printed_are_an_error() -> None:
    with open("/dev/full", "w") as full:
        command_line = [sys.executable, ROOT / "train.py", NODE, "--plan", "--json"]
        found = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (
        2,
        "standard output cannot be written: No space left on device; free some space\n",
    )
