"""Plug-ins: what docs/extending.md shows, from a folder outside the checkout, and what is refused."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from models.decoder import build_model
from parallel.errors import UserError
from recipes.data.text.rows import open_rows
from recipes.data.text.sources import fingerprint, source_problem
from recipes.files.added import FORMATS, SOURCES
from recipes.metrics.config import COLUMNS
from recipes.plugins.loading import activate, load_plugins
from recipes.recipe.fields import field_types, sections
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of, stages_of
from recipes.training.same_run import identity_differences, plugin_notes, require_resumes
from tests.sources import ROOT

PAGE = ROOT / "docs" / "extending.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The code of the page in a folder of its own, as the current folder; later recipes load none of it."""
    for name, code in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE.read_text(), flags=re.S):
        (tmp_path / name).write_text(code)
    (tmp_path / "books").mkdir()
    texts = [{"text": f"{number} is followed by {number + 1}. " * 60} for number in range(40)]
    (tmp_path / "books" / "numbers.json").write_text(json.dumps(texts))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    activate(())


def test_page_has_the_files_that_its_recipe_names(folder: Path) -> None:
    assert {"mine.toml", "lion.py", "parts.py"} <= {path.name for path in folder.iterdir()}


def test_a_recipe_with_plugins_loads_with_their_fields_and_names(folder: Path) -> None:
    recipe = load("mine.toml")
    assert recipe.fields_of("optimizer", "lion").beta1 == 0.95 and recipe.optimizer.facts.moments == 1
    assert sections(type(recipe))["lion"] is type(recipe.fields_of("optimizer", "lion"))
    assert {"lion.beta1", "lion.beta2"} <= field_types(type(recipe)).keys()
    assert recipe.versions.keys() == {"lion", "parts"} and recipe.plugins.versions == recipe.versions
    assert type(load("mine.toml")) is type(recipe)  # the same module asked for twice


def test_the_resolved_copy_loads_to_an_equal_recipe_from_elsewhere(folder: Path, tmp_path_factory: Any) -> None:
    recipe, elsewhere = load("mine.toml"), tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "recipe.toml").write_text(to_toml(recipe))
    os.chdir(elsewhere)
    assert load("recipe.toml") == recipe


def test_a_part_of_the_decoder_is_chosen_by_name_and_kept_by_checkpoints(folder: Path) -> None:
    recipe = load("gated.toml")
    assert recipe.model.attention == "gated" and "part" in type(recipe).added
    with torch.device("meta"):
        names = {name for name, _ in build_model(recipe.model).named_parameters()}
    assert "blocks.0.attention.gate_proj.weight" in names
    (folder / "gated_attention.py").write_text((folder / "gated_attention.py").read_text() + "VERSION = 2\n")
    assert load("gated.toml").versions != recipe.versions
    with pytest.raises(UserError, match=r'did you mean "gated"'):
        load("gated.toml", ["--model.attention", "gatd"])


def test_a_model_of_a_part_must_name_its_module(folder: Path) -> None:
    load("gated.toml")  # which registers the part for the process
    with pytest.raises(UserError, match=r"must name the module that registers model.attention"):
        load(ROOT / "configs" / "smollm3_debug.toml", ["--model.attention", "gated"])


def test_plugins_that_have_changed_are_refused_in_another_process(folder: Path) -> None:
    recipe = load("mine.toml")
    (folder / "parts.py").write_text((folder / "parts.py").read_text() + "\n")
    with pytest.raises(UserError, match="plug-ins have changed since the run began"):
        activate(recipe.loads, recipe.versions)


def test_a_rule_that_fails_is_named(folder: Path) -> None:
    (folder / "bad.py").write_text("from recipes.plugins.register import rule\nrule(lambda recipe: None)\n")
    with pytest.raises(UserError, match=r"bad.py:2: this rule fails: TypeError"):
        load(ROOT / "configs" / "smollm3_debug.toml", ["--plugins.modules", str(folder / "bad.py")])


def test_names_of_plugins_are_unknown_to_other_recipes_of_the_process(folder: Path) -> None:
    load("mine.toml")
    (folder / "plain.toml").write_text(f'base = "{ROOT}/configs/smollm3_debug.toml"\n[lion]\nbeta1 = 0.9\n')
    with pytest.raises(UserError, match="unknown section"):
        load("plain.toml")
    with pytest.raises(UserError, match=r'one of "adamw", "muon"'):
        load(ROOT / "configs" / "smollm3_debug.toml", ["--optimizer.name", "lion"])
    load(ROOT / "configs" / "smollm3_debug.toml")
    assert not FORMATS and not SOURCES and "lion" not in sections()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lion.beta3", "1"], "unknown key; did you mean lion.beta"),
        (["--lion.beta1", "2"], "must be a number >= 0 and < 1"),
        (["--optimizer.name", "lyon"], "write --optimizer.name lion"),
        (["--optimizer.lr", "0.1"], "is too large for updates of sign alone"),
        (["--optimizer.name", "adamw", "--lion.beta2", "0.5"], 'has no effect without optimizer.name = "lion"'),
        (["--plugins.modules", "nowhere.py"], "cannot be read"),
        (["--plugins.modules", "no_such_module"], "is no installed module, and no entry point"),
        (["--metrics.trackers", "wandbb"], '"wandb", "tensorboard", "csv"'),
    ],
)
def test_fields_of_plugins_are_as_strict_as_ours(folder: Path, flags: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load("mine.toml", flags)
    assert said in re.sub(r"\s+", " ", str(raised.value))


def test_a_stage_may_change_fields_of_a_plugin(folder: Path) -> None:
    text = (folder / "mine.toml").read_text()
    for_two = '[checkpoint]\nevery = 3\n[[stages]]\nname = "a"\nuntil = 6\n[[stages]]\nname = "b"\nuntil = 12\n'
    (folder / "two.toml").write_text(text + for_two + "lion.beta1 = 0.5\n")
    recipe = load("two.toml")
    assert [stage.recipe.fields_of("optimizer", "lion").beta1 for stage in stages_of(recipe)] == [0.95, 0.5]


def test_schedule_of_a_plugin_decays_after_the_warm_up_and_refuses_nonsense(folder: Path) -> None:
    recipe = load("mine.toml", ["--schedule.warmup_steps", "4", "--schedule.decay_steps", "0"])
    rates = [stage_of(recipe, step).learning_rate(step) / recipe.optimizer.lr for step in range(12)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, *(1 - (step / 8) ** 0.5 for step in range(8))])
    (folder / "bad.py").write_text(
        "from recipes.plugins.register import schedule\nschedule('bad', lambda step, steps: -1)\n"
    )
    flags = ["--plugins.modules", "lion.py", "parts.py", "bad.py", "--schedule.kind", "bad"]
    wrong = load("mine.toml", flags, rules=False)
    with pytest.raises(UserError, match=r"gives -1 after step"):
        stage_of(wrong, 11).learning_rate(11)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("lambda step, steps: float('nan')", "gives nan after step"),
        ("lambda step, steps: -1", "gives -1 after step"),
        ("lambda step, steps: '0.5'", "gives '0.5' after step"),
        ("lambda step, steps: None", "bad.py:6: this schedule fails: TypeError"),
        ("lambda step, steps: 1 / (steps - 1 - step)", "bad.py:6: this schedule fails: ZeroDivisionError"),
        ("lambda step, steps: 1 / step", "bad.py:6: this schedule fails: ZeroDivisionError"),
        ("lambda step, steps: 1 / (step != steps // 2)", "bad.py:6: this schedule fails: ZeroDivisionError"),
        ("lambda: 1", "bad.py:6: this schedule fails: TypeError"),
        ("lambda step, steps: __import__('sys').exit(3)", "bad.py:6: this schedule fails: it calls sys.exit(3)"),
    ],
)
def test_schedule_of_a_plugin_is_tried_before_the_run(folder: Path, code: str, said: str) -> None:
    (folder / "bad.py").write_text(f"from recipes.plugins.register import schedule\n\n\n\n\nschedule('bad', {code})\n")
    flags = ["--plugins.modules", "lion.py", "parts.py", "bad.py", "--schedule.kind", "bad", "--run.steps", "20"]
    with pytest.raises(UserError) as raised:
        load("mine.toml", [*flags, "--schedule.warmup_steps", "4"])
    assert said in str(raised.value)
    load("mine.toml", [*flags, "--schedule.warmup_steps", "4", "--schedule.kind", "one_minus_sqrt"])


def test_schedule_of_a_plugin_is_not_tried_with_fields_that_are_wrong(folder: Path) -> None:
    (folder / "power.py").write_text(
        CLASSES + "from recipes.plugins import register as R\nR.schedule('power', f, fields=D)"
    )
    text = (
        (folder / "power.py").read_text().replace("R.schedule", "f = lambda step, steps, fields: fields.a\nR.schedule")
    )
    (folder / "power.py").write_text(text)
    flags = ["--plugins.modules", "lion.py", "parts.py", "power.py", "--schedule.kind", "power"]
    with pytest.raises(UserError, match=r"1 problem in .*\n.*power.a"):
        load("mine.toml", [*flags, "--power.a", "x"])
    load("mine.toml", flags)


@pytest.mark.parametrize("shapes", ["config.widht", "{'w': 5}", "{'w': ('a',)}", "None", "1 / 0"])
def test_part_whose_tensors_fail_is_named(folder: Path, shapes: str) -> None:
    text = (folder / "gated_attention.py").read_text()
    broken = text.replace("    return {**own,", f"    return {shapes}\n    return {{**own,")
    (folder / "gated_attention.py").write_text(broken)
    with pytest.raises(
        UserError, match=r'^model.attention = "gated": its tensors fail: (Attribute|Type|Value|ZeroDivision)Error: '
    ):
        load("gated.toml").model.num_params()


def test_columns_of_ours_are_those_of_the_page() -> None:
    table = (ROOT / "docs" / "metrics.md").read_text().partition("| column | meaning |\n")[2].partition("\n\n")[0]
    cells = [name.strip() for line in table.splitlines()[1:] for name in line.split("|")[1].split(",")]
    missing = {name for name in cells if re.fullmatch("[a-z_]+", name)} - {*COLUMNS.split()}
    assert not {name for name in missing if not name.startswith(("ladder", "decoder"))}


def test_source_and_format_of_a_plugin_give_rows_that_resume(folder: Path) -> None:
    load("mine.toml")
    assert source_problem("books://") is None
    rows = open_rows("books://", text_field="text")
    first = [next(rows) for _ in range(7)]
    rest = [row.text for row in open_rows("books://", text_field="text", cursor=rows.cursor)]
    assert first[0].text.startswith("0 is followed by 1.") and rest[0].startswith("7 is followed") and len(rest) == 33
    (folder / "books" / "numbers.json").write_text("[")
    with pytest.raises(UserError, match=r"numbers.json', row 1: plug-in parts \w+: JSONDecodeError|plug-in parts"):
        next(open_rows("books://", text_field="text"))


def test_fingerprint_of_text_changes_with_the_plugin_that_reads_it(folder: Path) -> None:
    load("mine.toml")
    before = fingerprint("books://", text_field="text")
    (folder / "parts.py").write_text((folder / "parts.py").read_text() + "# changed\n")
    load("mine.toml")
    assert fingerprint("books://", text_field="text") != before


BROKEN = {
    "raises": ("\n1 / 0\n", "broken.py:2: plug-in broken: ZeroDivisionError"),
    "syntax": ("x = 1\ndef\n", "broken.py:2: plug-in broken: SyntaxError"),
    "leaves": ("import sys\nsys.exit(3)\n", "broken.py:2: plug-in broken: it calls sys.exit(3)"),
    "ours": ("R.optimizer('muon', R.OptimizerFacts(print, (), 1))\n", "broken.py:2: optimizer 'muon' is ours"),
    "twice": ("R.metric('a', print)\nR.metric('a', print)\n", "broken.py:3: metric 'a' exists already"),
    "builder": ("R.optimizer('x', R.OptimizerFacts('no.such:f', (), 1))\n", "broken.py:2: 'no.such:f' is no function"),
    "section": ("R.metric('data', print, fields=D)\n", "there is a section [data] already"),
    "default": ("R.metric('x', print, fields=NoDefault)\n", "fields=NoDefault.a"),
    "text": ("R.metric('x', print, fields=NoText)\n", "fields=NoText.a: AssertionError: no text below it"),
    "range": ("R.metric('x', print, fields=Wrong)\n", "fields=Wrong.a: ValidationError"),
    "type": ("R.metric('x', print, fields=BadType)\n", "fields=BadType.a"),
    "none": ("R.metric('x', print, fields=int)\n", "fields=int"),
    "spaces": ("R.metric('a b', print, fields=D)\n", "metric 'a b' is ours, or no name"),
    "comma": ("R.metric('a,b', print)\n", "broken.py:2: metric 'a,b' is ours, or no name"),
    "column": ("R.metric('loss', print)\n", "broken.py:2: metric 'loss' is ours"),
    "later column": ("R.metric('time', print)\n", "broken.py:2: metric 'time' is ours"),
    "nothing": ("R.optimizer\n", "broken.py: plug-in broken: AssertionError: it registers nothing"),
    "facts": ("R.optimizer('x', print)\n", "broken.py:2: plug-in broken: AttributeError: "),
    "number": ("R.schedule(3, print)\n", "broken.py:2: schedule 3 is no name"),
    "end": ("R.file_format(None, print)\n", "broken.py:2: plug-in broken: AttributeError: "),
    "keyword": ("R.metric('class', print, fields=D)\n", "there is a section [class] already"),
    "attribute": ("R.metric('added', print, fields=D)\n", "there is a section [added] already"),
    "method": ("R.tracker('fields_of', print, fields=D)\n", "there is a section [fields_of] already"),
    "null byte": ("R.metric('a', print)\n\0", "broken.py: plug-in broken: SyntaxError: "),
    "no tensors": ("R.part('norm', 'x', print)\n", "broken.py:2: plug-in broken: TypeError: part() missing"),
    "suffix": ("R.file_format('.my.jsonl', print)\n", "'.my.jsonl': write the end of names"),
    "scheme": ("R.source('s3://', print)\n", "'s3://': sources of a plug-in"),
}
CLASSES = """
from dataclasses import dataclass
@dataclass(frozen=True)
class D:
    a: int = 1
    'Text.'
@dataclass(frozen=True)
class NoDefault:
    a: int
    'Text.'
@dataclass(frozen=True)
class NoText:
    a: int = 1
@dataclass(frozen=True)
class Wrong:
    a: int = 'x'
    'Text.'
@dataclass(frozen=True)
class BadType:
    a: object = None
    'Text.'
"""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_one_error_with_its_file_and_line(folder: Path, name: str) -> None:
    code, said = BROKEN[name]
    needs = "from recipes.plugins import register as R\n" if "R." in code else ""
    classes = CLASSES if "fields=" in code else ""
    (folder / "broken.py").write_text(needs + classes + code)
    with pytest.raises(UserError) as raised:
        load("mine.toml", ["--plugins.modules", "lion.py", "parts.py", "broken.py"])
    assert said in str(raised.value) and re.search(r"broken\.py:", str(raised.value))


@pytest.mark.parametrize("module", ["", "sys", "json.nope", "~nobody_of_this_name/x.py", '["lion.py"]'])
def test_modules_that_are_none_are_one_error(folder: Path, module: str) -> None:
    with pytest.raises(UserError):
        load("mine.toml", ["--plugins.modules", module])


def test_what_a_plugin_prints_is_not_in_the_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "loud.py").write_text("print('loud')\n" + (folder / "lion.py").read_text())
    load_plugins(["loud.py"])
    assert capsys.readouterr() == ("", "loud\n")


def test_resuming_without_a_plugin_is_refused_and_with_other_content_is_said(folder: Path) -> None:
    recipe = load("mine.toml")
    (folder / "recipe.toml").write_text(to_toml(recipe))
    plain = load(ROOT / "configs" / "smollm3_debug.toml")
    with pytest.raises(UserError, match=r"was trained with lion \(\w+\), parts|was trained with lion"):
        require_resumes(plain, folder / "recipe.toml", where="runs/mine")
    require_resumes(recipe, folder / "recipe.toml", where="runs/mine")
    (folder / "lion.py").write_text((folder / "lion.py").read_text() + "# changed\n")
    now = load("mine.toml")
    require_resumes(now, folder / "recipe.toml", where="runs/mine")
    [note] = plugin_notes(folder / "recipe.toml", now, 5)
    assert note == f"plug-in lion is {now.versions['lion']} from step 6 on; before, it was {recipe.versions['lion']}"
    with pytest.raises(UserError, match="does not have the content that is here"):  # it states what it was
        load("recipe.toml")


def test_fields_of_a_plugin_must_not_change_on_resume(folder: Path) -> None:
    [line] = identity_differences(load("mine.toml"), load("mine.toml", ["--lion.beta1", "0.5"]))
    assert line == "lion.beta1: 0.95 in the folder's recipe.toml, 0.5 now"


def test_moved_plugin_of_the_same_content_resumes(folder: Path) -> None:
    (folder / "recipe.toml").write_text(to_toml(load("mine.toml")))
    (folder / "moved").mkdir()
    for name in ("lion.py", "parts.py", "mine.toml", "books"):
        (folder / name).rename(folder / "moved" / name)
    os.chdir(folder / "moved")
    recipe = load("mine.toml")
    require_resumes(recipe, folder / "recipe.toml", where="runs/mine")


def test_recipes_without_plugins_are_of_the_plain_class() -> None:
    recipe = load(ROOT / "configs" / "smollm3_debug.toml")
    assert type(recipe) is Recipe and "[plugins]" not in to_toml(recipe)
    assert {field.name for field in fields(recipe.plugins)} == {"modules", "versions"}


@pytest.mark.slow
def test_the_page_trains_resumes_and_is_read_again_on_two_processes(folder: Path, tmp_path_factory: Any) -> None:
    environment = os.environ | {"NPROC": "2", "PYTHON": sys.executable}
    here = tmp_path_factory.mktemp("here")  # the plug-ins stand beside the recipe, not here
    small = ["--run.device=cpu", "--data.tokenizer=train:300", "--batch.sequence_length=64", "--checkpoint.every=6"]
    small += [f"--data.cache={folder / 'cache'}", f"--run.output={folder / 'runs'}", "--validation.every=0"]
    small += ["--validation.sample_tokens=0", "--schedule.decay_steps=0", "--metrics.picture=false"]

    def run(*words: str) -> str:
        command = [str(ROOT / "scripts" / "run.sh"), str(folder / "mine.toml"), *small, *words]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("--run.steps=6")
    assert "resumed from" in run()
    rows = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "bits" in row] == [*range(1, 13)]
    assert all(row["bits"] == pytest.approx(row["loss"] / 0.6931471805599453) for row in rows if "bits" in row)
    written = (folder / "runs/mine/losses.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in written] == [str(n) for n in range(1, 13)]
    assert all(line.partition(",")[2] for line in written)
    of_ours = {*rows[-1]} - {"bits"}
    assert {name for name in of_ours if not name.endswith(("_rank", "_most", "_least"))} <= {*COLUMNS.split()}
    about = json.loads((folder / "runs/mine/checkpoints/step-00000012/model.json").read_text())["plugins"]
    assert about["versions"].keys() == {"lion", "parts"} and not about["build_models"]
    assert json.loads((folder / "runs/mine/environment.json").read_text())["plugins"] == about["versions"]
