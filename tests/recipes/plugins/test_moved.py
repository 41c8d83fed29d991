"""Plug-ins that are elsewhere now, have other content, or come from an installed package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models import registry
from models.config import TextFacts
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.lab.sweep.grid import read_sweep
from recipes.plugins import loading
from recipes.plugins.loading import activate, load_plugins
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.training.fork import trunk_recipe
from recipes.training.same_run import data_of_run
from recipes.weights.description import Description, checkpoint_files, read_description
from recipes.weights.locate import Weights
from tests.sources import ROOT

PAGE = ROOT / "docs" / "extending.md"
DEBUG = ROOT / "configs" / "smollm3_debug.toml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The code of the page, as the current folder."""
    for name, code in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE.read_text(), flags=re.S):
        (tmp_path / name).write_text(code)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "numbers.json").write_text(json.dumps(["one is followed by two. " * 60] * 40))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    activate(())


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forgets what this process has loaded."""

    def forget() -> None:
        monkeypatch.setattr(loading, "_IMPORTED", {})
        ours = {key: part for key, part in registry._parts.items() if key[1] == registry.OURS}
        monkeypatch.setattr(registry, "_parts", ours)

    forget()
    return forget


def written(recipe: Recipe, folder: Path) -> Path:
    """A checkpoint of the run, without its tensors, in a folder that has recipe.toml."""
    about = {"modules": recipe.loads, "versions": recipe.versions}
    about |= {"build_models": bool(registry.parts_not_ours(recipe.model))}
    checkpoint = folder / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (folder / "run" / "recipe.toml").write_text(to_toml(recipe))
    for name, text in checkpoint_files(Description(recipe.model, TextFacts(64, None, 1), "{}", plugins=about)).items():
        (checkpoint / name).write_text(text)
    return checkpoint


def moved(folder: Path, *names: str) -> Path:
    (folder / "there").mkdir(exist_ok=True)
    for name in names:
        (folder / name).rename(folder / "there" / name)
    return folder / "there"


def test_a_moved_part_is_named_with_what_to_write_and_is_found_there(
    folder: Path, another_process: Any, capsys: Any
) -> None:
    checkpoint = written(load("gated.toml"), folder)
    another_process()
    there = moved(folder, "gated_attention.py") / "gated_attention.py"
    with pytest.raises(UserError) as raised:
        read_description(checkpoint)
    said = str(raised.value)
    assert str(folder / "gated_attention.py") in said and "--plugins.modules there/gated_attention.py" in said
    load_plugins([str(there)])
    assert read_description(checkpoint)[0].attention == "gated" and capsys.readouterr().err == ""
    another_process()
    there.write_text(there.read_text() + "VERSION = 2\n")
    load_plugins([str(there)])
    assert read_description(checkpoint)[0].attention == "gated"
    assert "its plug-in gated_attention was" in capsys.readouterr().err


def test_what_a_recipe_has_loaded_is_not_replaced_by_what_its_weights_were_trained_with(
    folder: Path, another_process: Any
) -> None:
    checkpoint = written(load("gated.toml"), folder)
    another_process()
    (folder / "new").mkdir()
    new = folder / "new" / "gated_attention.py"
    new.write_text((folder / "gated_attention.py").read_text() + "VERSION = 2\n")
    [plugin] = load_plugins([str(new)])
    read_description(checkpoint)
    assert registry.find("attention", "gated") is plugin.entries[0].value


def test_a_model_without_a_part_is_read_without_its_plugins(folder: Path, another_process: Any) -> None:
    text = (folder / "mine.toml").read_text() + '[checkpoint]\nevery = 3\n[[stages]]\nname = "a"\nuntil = 6\n'
    (folder / "mine.toml").write_text(
        text + '[[stages]]\nname = "b"\nuntil = 12\nlion.beta1 = 0.5\ndata.source = "x"\n'
    )
    checkpoint = written(load("mine.toml", rules=False), folder)
    another_process()
    moved(folder, "lion.py", "parts.py")
    model, facts = read_description(checkpoint)
    assert model == SIZES["smollm3_debug"]
    data = data_of_run(Weights(checkpoint, model, facts, is_checkpoint=True))
    assert data is not None and data.source == "books://"
    late = Weights(checkpoint.with_name("step-00000012"), model, facts, is_checkpoint=True)
    assert (data_of_run(late) or data).source == "x"


def test_a_family_is_read_without_its_module(folder: Path, another_process: Any) -> None:
    code = "from models.sizes import SIZES\nfrom recipes.plugins.register import family\n"
    (folder / "sizes.py").write_text(code + "family('mine_debug', SIZES['smollm3_debug'])\n")
    recipe = load(DEBUG, ["--plugins.modules", str(folder / "sizes.py"), "--model.name", "mine_debug"])
    checkpoint = written(recipe, folder)
    another_process()
    registry.FAMILIES.pop("mine_debug")
    moved(folder, "sizes.py")
    model, facts = read_description(checkpoint)
    assert model.name == "mine_debug"
    assert data_of_run(Weights(checkpoint, model, facts, is_checkpoint=True)) == recipe.data


def test_only_the_module_of_the_part_must_be_found(folder: Path, another_process: Any) -> None:
    both = ["--plugins.modules", "lion.py", "gated_attention.py", "--optimizer.name", "lion", "--optimizer.lr", "1e-4"]
    checkpoint = written(load("gated.toml", both), folder)
    another_process()
    there = moved(folder, "lion.py", "gated_attention.py")
    with pytest.raises(UserError, match=r"(?s)plug-in lion: .*plug-in gated_attention: "):
        read_description(checkpoint)
    load_plugins([str(there / "gated_attention.py")])
    assert read_description(checkpoint)[0].attention == "gated"


def test_trunk_is_read_with_the_plugins_of_its_fork(folder: Path, another_process: Any) -> None:
    checkpoint = written(load("mine.toml"), folder)
    another_process()
    there = moved(folder, "lion.py", "parts.py", "mine.toml", "books")
    fork = load(there / "mine.toml")
    assert trunk_recipe(checkpoint, type(fork)).optimizer.name == "lion"
    with pytest.raises(UserError, match=r"cannot be read: plugins.modules: .*lion.py cannot be read"):
        trunk_recipe(checkpoint)


def test_entry_point_keeps_its_name_and_the_version_of_its_distribution(
    folder: Path, another_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = folder / "site" / "some_ideas-1.5.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-ideas\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("[shardwright.plugins]\nlions = lions_of_mine\n")
    (folder / "site" / "lions_of_mine.py").write_text((folder / "lion.py").read_text())
    monkeypatch.syspath_prepend(folder / "site")
    recipe = load("mine.toml", ["--plugins.modules", "lions", "parts.py"])
    assert recipe.versions["lions"].startswith("1.5 ")
    (folder / "resolved.toml").write_text(to_toml(recipe))
    another_process()
    activate(recipe.loads, recipe.versions)  # as workers do
    assert to_toml(load("resolved.toml")) == to_toml(recipe)


def test_a_file_has_not_the_version_of_a_distribution_of_its_name(folder: Path, another_process: Any) -> None:
    (folder / "pytest.py").write_text((folder / "lion.py").read_text())
    [plugin] = load_plugins(["pytest.py"])
    assert re.fullmatch("[0-9a-f]{16}", plugin.version)


def test_sweep_varies_fields_of_plugins_and_names_wrong_ones(folder: Path) -> None:
    (folder / "sweep.toml").write_text('base = "mine.toml"\n[axes]\nlion.beta1 = [0.8, 0.9]\n')
    rows = read_sweep(Path("sweep.toml"), ["--run.steps=13"], output=folder / "out", processes=1).rows
    assert [row.recipe.fields_of("optimizer", "lion").beta1 for row in rows] == [0.8, 0.9]
    (folder / "sweep.toml").write_text('base = "mine.toml"\n[axes]\nlion.beta3 = [0.8, 0.9]\n')
    with pytest.raises(UserError, match=r"(?s)1 problem in sweep.toml.*lion.beta3.*unknown key"):
        read_sweep(Path("sweep.toml"), ["--run.steps=13"], output=folder / "out", processes=1)


@pytest.mark.slow
def test_commands_take_moved_plugins_and_a_fork_says_what_was_edited(folder: Path) -> None:
    environment = os.environ | {"NPROC": "1", "PYTHON": sys.executable}
    small = ["--run.device=cpu", "--data.tokenizer=train:300", "--batch.sequence_length=64", "--checkpoint.every=2"]
    small += [f"--run.output={folder / 'runs'}", f"--data.cache={folder / 'cache'}", "--validation.every=0"]
    small += [
        "--schedule.decay_steps=0",
        "--metrics.picture=false",
        "--validation.sample_tokens=0",
        "--data.source=t.txt",
    ]
    (folder / "t.txt").write_text("one is followed by two, and two by three. \n\n" * 2000)

    def command(*words: str, code: int = 0) -> str:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def script(name: str, *words: str, code: int = 0) -> str:
        return command(sys.executable, str(ROOT / "scripts" / name), *words, code=code)

    start = str(ROOT / "scripts" / "run.sh")
    both = ["--plugins.modules", "gated_attention.py", "lion.py"]
    command(start, "gated.toml", *small, *both, "--optimizer.name=lion", "--optimizer.lr=1e-4", "--run.steps=2")
    edited = folder / "lion.py"
    edited.write_text(edited.read_text() + "# edited\n")
    fork = ["--run.name=fork", "--run.continue_from=runs/gated", "--run.steps=4"]
    said = command(start, "gated.toml", *small, *both, "--optimizer.name=lion", "--optimizer.lr=1e-4", *fork)
    assert re.search(r"plug-in lion is \w+ from step 3 on; before, it was \w+", said)
    there = moved(folder, "gated_attention.py", "lion.py") / "gated_attention.py"
    for name, words in {"evaluate.py": ["t.txt", "--limit=2"], "generate.py": ["one", "--max-tokens=2"]}.items():
        said = script(name, "runs/gated", *words, code=2)
        assert "Traceback" not in said and "--plugins.modules there/gated_attention.py" in said
        script(name, "runs/gated", *words, "--plugins.modules", str(there))
    said = script("convert_hf.py", "export", "runs/gated", "out", "--plugins.modules", str(there), code=2)
    assert "attention = gated" in said
    tune = ["--run.name=tuned", "--model.weights=runs/gated", "--plugins.modules", str(there)]
    small = ["--data.tokenizer=from_weights" if word.startswith("--data.tokenizer") else word for word in small]
    assert "ok:" in command(sys.executable, str(ROOT / "train.py"), "gated.toml", *small, *tune, "--check")
