"""model.weights: what a recipe can start from, its error messages, and runs that start from weights."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.hf import parameter_shapes
from parallel.errors import UserError
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.manifest import MANIFEST, encode
from recipes.recipe.load import LoadedRecipe, load, load_run, to_toml
from recipes.recipe.schema import Recipe
from recipes.training.same_run import identity_differences
from recipes.weights.convert import export_checkpoint, import_folder
from recipes.weights.locate import find_weights, initial_weights
from tests.recipes.weights.test_hf_folder import SMALL, edit_config, files, truncate, write_random
from tests.training import DEBUG, change, run_all

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder "hf" in the current one."""
    monkeypatch.chdir(tmp_path)
    return write_random(tmp_path / "hf")


def recipe_of(*overrides: str, text: str = '[model]\nname = "from_weights"\nweights = "hf"\n') -> Recipe:
    Path("r.toml").write_text(text + '[data]\ntokenizer = "hf"\n')
    return load("r.toml", overrides)


def refused(*overrides: str, **text: str) -> str:
    with pytest.raises(UserError) as error:
        recipe_of(*overrides, **text)
    return " ".join(str(error.value).split())


def test_from_weights_takes_the_shape_of_the_weights(folder: Path) -> None:
    import_folder(folder, folder.parent / "checkpoint")
    for source in ("hf", "checkpoint"):
        recipe = recipe_of("--model.weights", source)
        assert recipe.model == replace(SMALL, name="from_weights", weights=source)
        Path("resolved.toml").write_text(to_toml(recipe))
        assert load("resolved.toml") == recipe
    shutil.rmtree(folder)
    assert load("resolved.toml", rules=False) == recipe  # it has every field


def test_a_size_with_weights_must_be_their_shape(folder: Path) -> None:
    said = refused(text='[model]\nname = "llama3_debug"\nlayers = 2\nweights = "hf"\n')
    for field in ("width", "feed_forward_width", "heads", "key_value_heads", "head_width", "vocabulary"):
        assert f"model.{field} = " in said and f"is {getattr(SMALL, field)} in the weights of hf" in said
    assert "model.layers" not in said and "model.rope_theta" not in said
    assert "is 2 in the weights of hf" in refused("--model.layers", "3")
    assert recipe_of("--model.init_std", "0.5").model.init_std == 0.5


def test_a_larger_rope_theta_extends_the_context_of_weights_if_it_is_written(folder: Path) -> None:
    larger, smaller = str(2 * SMALL.rope_theta), str(SMALL.rope_theta / 2)
    assert recipe_of("--model.rope_theta", larger).model == replace(
        SMALL, name="from_weights", weights="hf", rope_theta=2 * SMALL.rope_theta
    )
    assert "or a larger value to extend the context" in refused("--model.rope_theta", smaller)
    size = '[model]\nname = "smollm3_debug"\nweights = "hf"\n'  # of a larger rope_theta, which nobody asked for
    assert "model.rope_theta = 2000000.0 (size smollm3_debug)" in refused(text=size)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("", 'model.weights (command line) is missing; name = "from_weights" takes its model'),
        ("elsewhere", "elsewhere does not exist"),
        ("r.toml", "r.toml is not a folder"),
        ("hf/empty", "holds no weights"),
    ],
)
def test_weights_that_cannot_be_found_are_refused(weights: str, message: str, folder: Path) -> None:
    (folder / "empty").mkdir()
    assert message in refused("--model.weights", weights)


def test_missing_weights_are_reported_with_all_other_problems(folder: Path) -> None:
    assert refused("--model.weights", "elsewhere", "--run.steps", "0").startswith("2 problems")


def test_damaged_weights_are_refused_in_one_problem(folder: Path) -> None:
    truncate(files(folder)[0])
    files(folder)[1].unlink()
    said = refused()
    assert "1 problem in" in said and "but its header says" in said and "is missing; download it again" in said


def test_unsupported_weights_are_refused_with_every_key(folder: Path) -> None:
    edit_config(folder, quantization_config={"bits": 4}, auto_map={"AutoModel": "code.Model"})
    said = refused()
    assert "quantized weights, which cannot be trained" in said and "auto_map" in said


def test_a_misspelled_from_weights_is_recognised(folder: Path) -> None:
    assert 'did you mean "from_weights"?' in refused(text='[model]\nname = "from_weight"\n')


def test_the_tokenizer_must_be_that_of_the_weights(folder: Path) -> None:
    said = refused("--data.tokenizer", "train:300")
    assert "1 problem" in said and "which have their own" in said and 'write tokenizer = "from_weights"' in said
    assert recipe_of("--data.tokenizer", "from_weights").data.tokenizer == "from_weights"


def test_a_tokenizer_from_weights_must_exist(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "data.tokenizer" in refused("--data.tokenizer", "from_weights")
    alone = '[model]\nname = "smollm3_debug"\n'
    assert "needs model.weights or a checkpoint of this run" in refused("--data.tokenizer", "from_weights", text=alone)


def test_a_run_with_a_checkpoint_no_longer_needs_its_weights(folder: Path) -> None:
    options = ("--data.tokenizer", "from_weights", "--run.name", "r")
    recipe = recipe_of(*options)
    checkpoint = Path("runs/r/checkpoints/step-00000004")
    import_folder(folder, checkpoint)
    (checkpoint / MANIFEST).write_bytes(encode(replace(read_manifest(checkpoint), step=4)))  # as a run writes it
    folder.rename("elsewhere")
    assert recipe_of(*options) == recipe
    assert "hf does not exist" in refused(*options, "--run.name", "another")
    moved = recipe_of(*options, "--model.weights", "elsewhere")
    assert identity_differences(recipe, moved) == []


def test_an_export_at_the_end_needs_checkpoints(folder: Path) -> None:
    assert "write every = run.steps" in refused("--checkpoint.export_hf", "True")
    assert recipe_of("--checkpoint.export_hf", "True", "--checkpoint.every", "100").checkpoint.export_hf


@pytest.mark.slow
def test_loading_weights_into_a_recipe_does_not_import_torch(folder: Path) -> None:
    recipe_of()
    code = "import sys, recipes.recipe.load; recipes.recipe.load.load('r.toml'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def opened_by(*overrides: str) -> tuple[LoadedRecipe, Counter[str]]:
    """What load_run of r.toml returns, and how often it opened each file by name."""
    opened: Counter[str] = Counter()
    watching = True

    def count(event: str, about: tuple[Any, ...]) -> None:
        if watching and event == "open":
            opened[Path(str(about[0])).name] += 1

    sys.addaudithook(count)  # which cannot be removed
    loaded = load_run("r.toml", overrides)
    watching = False
    return loaded, opened


def test_loading_opens_each_file_of_the_weights_once(folder: Path) -> None:
    recipe_of()
    loaded, opened = opened_by("--data.tokenizer", "from_weights")
    assert loaded.weights is not None and loaded.weights.path == Path("hf")
    names = ["config.json", "tokenizer.json", *(file.name for file in files(folder))]
    assert len(names) > 3 and {name: opened[name] for name in names} == dict.fromkeys(names, 1)


def test_weights_that_were_loaded_with_the_recipe_are_not_read_again(folder: Path) -> None:
    recipe_of()
    weights = load_run("r.toml", ["--data.tokenizer", "from_weights"]).weights
    assert weights is not None
    shutil.rmtree(folder)
    assert weights.tokenizer.vocabulary == 4 and weights.description.model == weights.model
    assert len(weights.stored_tensors) == len(list(parameter_shapes(SMALL)))


@pytest.mark.slow
def test_a_recipe_without_weights_imports_nothing_that_reads_them(folder: Path) -> None:
    Path("plain.toml").write_text('[model]\nname = "smollm3_debug"\n')
    code = "import sys, recipes.recipe.load; recipes.recipe.load.load('plain.toml'); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    modules = set(found.stdout.split())
    assert "recipes.recipe.load" in modules, found.stderr
    assert not modules & {"models.hf", "recipes.weights.locate", "recipes.weights.hf_folder", "safetensors", "torch"}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that start from random weights ("first"), from a run, and from its exported folder."""
    output = tmp_path_factory.mktemp("runs")
    first = change(
        load(DEBUG),
        run={"name": "first", "steps": 3, "output": str(output)},
        model={"layers": 2, "width": 32, "feed_forward_width": 48, "vocabulary": 512},
        data={"source": str(corpus), "cache": str(output / "cache"), "tokenizer": "train:512"},
        batch={"sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 1},
        schedule={"kind": "constant", "warmup_steps": 0, "decay_steps": 0},
        checkpoint={"every": 3, "export_hf": True},
        metrics={"every": 1},
        optimizer={"lr": 3e-2},
        validation={"every": 0, "sample_tokens": 0},
    )

    def from_weights(name: str, weights: Path, steps: int = 2) -> Recipe:
        found = change(first, run={"name": name, "steps": steps}, batch={"sequence_length": 16})
        found = change(found, data={"tokenizer": str(output / "first" / "hf")}, checkpoint={"every": 2})
        return change(found, model={"weights": str(weights)})

    from_run = from_weights("from-run", output / "first")
    from_folder = from_weights("from-folder", output / "first" / "hf")
    extended = from_weights("from-folder", output / "first" / "hf", steps=4)
    whole = change(extended, run={"name": "whole"}, checkpoint={"every": 4})
    assert run_all([first, from_run, from_folder, extended, whole]) == [0] * 5
    return output


@pytest.mark.slow
def test_a_run_from_a_run_equals_one_from_its_export(runs: Path) -> None:
    assert losses(runs / "from-run") == losses(runs / "from-folder")[:2]


@pytest.mark.slow
def test_a_run_resumes_from_its_checkpoint_instead_of_its_weights(runs: Path) -> None:
    assert losses(runs / "whole") == losses(runs / "from-folder")


@pytest.mark.slow
def test_a_run_keeps_the_context_length_of_the_weights_it_started_from(runs: Path) -> None:
    weights = find_weights(runs / "first")
    assert weights.path.name == "step-00000003" and weights.facts.context_length == 32
    assert find_weights(runs / "from-run").facts.context_length == 32  # though it trains on sequences of 16
    assert find_weights(runs / "from-run").model == weights.model


@pytest.mark.slow
def test_damaged_checkpoints_are_skipped_until_the_weights_themselves(runs: Path, tmp_path: Path) -> None:
    run, hf = shutil.copytree(runs / "from-folder", tmp_path / "from-folder"), str(runs / "first" / "hf")
    for newest, expected in (("step-00000004", "checkpoints/step-00000002"), ("step-00000002", "hf")):
        assert initial_weights(hf, run).path.name == newest
        description = run / "checkpoints" / newest / "model.json"
        description.write_text(description.read_text().replace('"layers": 2', '"layers": 3'))
        found = initial_weights(hf, run)
        assert str(found.path).endswith(expected) and found.model.layers == 2
    with pytest.raises(UserError, match=r"step-00000004/model\.json"):
        initial_weights("", run)


@pytest.mark.slow
def test_an_export_at_the_end_equals_one_of_the_checkpoint(runs: Path, tmp_path: Path) -> None:
    export_checkpoint(runs / "first", tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (runs / "first" / "hf" / file.name).read_bytes(), file.name
