"""From TOML and command line to a recipe: layers, precedence, and the message for every kind of mistake."""

import dataclasses
import re
from pathlib import Path

import pytest

from models.sizes import SIZES
from parallel.errors import UserError
from recipes import command_line
from recipes.data.config import DataConfig
from recipes.fields import describe, field_docs, field_types, sections
from recipes.load import load, to_toml
from recipes.schema import Recipe

MODEL = '[model]\nname = "smollm3_debug"\n'


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_of(text: str, *arguments: str) -> Recipe:
    Path("x.toml").write_text(text)
    return load("x.toml", arguments)


def refused(text: str, *arguments: str) -> str:
    """The message for this recipe, on one line."""
    with pytest.raises(UserError) as refusal:
        recipe_of(text, *arguments)
    return " ".join(str(refusal.value).split())


# Layers


def test_defaults_come_from_the_schema_and_the_size() -> None:
    assert recipe_of(MODEL) == Recipe(model=SIZES["smollm3_debug"])


def test_the_nearer_file_wins_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    Path("far.toml").write_text('[model]\nname = "llama3_8b"\n[run]\nsteps = 1\nseed = 1\nname = "far"\n')
    Path("sub/middle.toml").write_text('base = "../far.toml"\n[run]\nsteps = 2\nseed = 2\n')
    recipe = recipe_of('base = "sub/middle.toml"\n[run]\nsteps = 3\n')
    assert (recipe.run.steps, recipe.run.seed, recipe.run.name) == (3, 2, "far")
    assert recipe.model == SIZES["llama3_8b"]


def test_a_written_model_field_beats_the_size_wherever_its_name_comes_from() -> None:
    Path("far.toml").write_text('[model]\nname = "smollm3_3b"\nlayers = 5\n')
    assert recipe_of('base = "far.toml"\n[model]\nname = "llama3_8b"\n').model == dataclasses.replace(
        SIZES["llama3_8b"], layers=5
    )


def test_the_command_line_is_the_nearest_layer() -> None:
    recipe = recipe_of(MODEL + "[run]\nsteps = 3\n", "--run.steps", "4", "--run.seed=9", "--run.steps=5")
    assert (recipe.run.steps, recipe.run.seed) == (5, 9)


def test_the_command_line_may_choose_the_size() -> None:
    assert recipe_of("", "--model.name", "llama3_8b").model == SIZES["llama3_8b"]
    assert recipe_of(MODEL, "--model.name=llama3_70b").model == SIZES["llama3_70b"]


def test_an_override_equal_to_the_default_counts_as_given() -> None:
    layers = SIZES["smollm3_debug"].layers
    model = recipe_of(MODEL, "--model.layers", str(layers), "--model.name", "llama3_8b").model
    assert model == dataclasses.replace(SIZES["llama3_8b"], layers=layers)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--optimizer.betas", "0.8", "0.9"], "optimizer.betas", (0.8, 0.9)),
        (["--optimizer.betas=0.8", "0.9"], "optimizer.betas", (0.8, 0.9)),
        (["--float8.exclude"], "float8.exclude", ()),
        (["--float8.exclude", "lm_head", "o_proj"], "float8.exclude", ("lm_head", "o_proj")),
        (["--compile.enabled", "True"], "compile.enabled", True),
        (["--compile.enabled=true"], "compile.enabled", True),
        (["--fsdp.reshard-after-forward", "false"], "fsdp.reshard_after_forward", False),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--mesh.shard", "-1"], "mesh.shard", -1),
        (["--mesh.shard", "4"], "mesh.shard", 4),
        (["--mesh.shard", "node"], "mesh.shard", "node"),
        (["--run.name=-x=y"], "run.name", "-x=y"),
        (["--run.name", "two words"], "run.name", "two words"),
    ],
)
def test_spellings_of_overrides(arguments: list[str], key: str, value: object) -> None:
    section, name = key.split(".")
    found = getattr(getattr(recipe_of(MODEL, *arguments), section), name)
    assert found == value and type(found) is type(value)


def test_a_whole_number_is_a_fine_float() -> None:
    lr = recipe_of(MODEL + "[optimizer]\nlr = 1\n").optimizer.lr
    assert lr == 1.0 and type(lr) is float


def test_lists_become_tuples() -> None:
    recipe = recipe_of(MODEL + "no_rope_layers = [0, 2]\n[optimizer]\nbetas = [0, 0.5]\n")
    assert recipe.model.no_rope_layers == (0, 2) and recipe.optimizer.betas == (0.0, 0.5)


def test_a_byte_order_mark_and_windows_line_ends_are_fine() -> None:
    Path("w.toml").write_bytes(b"\xef\xbb\xbf" + MODEL.replace("\n", "\r\n").encode())
    assert load("w.toml").model == SIZES["smollm3_debug"]


def test_the_resolved_recipe_loads_back() -> None:
    recipe = recipe_of(
        MODEL + "no_rope_layers = [1]\nrope_theta = 1e30\n[optimizer]\neps = 1e-30\n"
        '[data]\ntext_field = "a \\"b\\"\\n\\u00e9"\n'
    )
    Path("resolved.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load("resolved.toml") == recipe
    assert to_toml(load("resolved.toml")) == to_toml(recipe)


# Values

SHARD = "[mesh]\nshard = {}\n"
LR, STEPS = "[optimizer]\nlr = {}\n", "[run]\nsteps = {}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            LR.format('"3e-4"'),
            'optimizer.lr = "3e-4" (x.toml) must be a number > 0, and "3e-4" is a string; write lr = 0.0003',
        ),
        (
            SHARD.format('"nodes"'),
            'mesh.shard = "nodes" (x.toml) must be an integer >= -1 or "node", and "nodes" is a string;'
            ' write shard = "node"',
        ),
        (SHARD.format('"4"'), 'must be an integer >= -1 or "node", and "4" is a string; write shard = 4'),
        (SHARD.format("-2"), 'must be an integer >= -1 or "node"; write for example shard = -1'),
        (SHARD.format("true"), "and true is a boolean; write for example shard = -1"),
        (LR.format("true"), "must be a number > 0, and true is a boolean; write for example lr = 0.0003"),
        (LR.format("0"), "optimizer.lr = 0 (x.toml) must be a number > 0; write for example lr = 0.0003"),
        (LR.format("nan"), "optimizer.lr = nan (x.toml) must be a finite number > 0; write"),
        (LR.format("inf"), "optimizer.lr = inf (x.toml) must be a finite number > 0; write"),
        (LR.format("2024-01-01"), "and 2024-01-01 is a date; write for example lr = 0.0003"),
        (
            STEPS.format("1e3"),
            "run.steps = 1000.0 (x.toml) must be an integer >= 1, and 1000.0 is a float; write steps = 1000",
        ),
        (STEPS.format("1.5"), "must be an integer >= 1, and 1.5 is a float; write for example steps = 100"),
        (STEPS.format("true"), "run.steps = true (x.toml) must be an integer >= 1, and true is a boolean; write for"),
        (STEPS.format('"7"'), 'and "7" is a string; write steps = 7'),
        (STEPS.format("-5"), "run.steps = -5 (x.toml) must be an integer >= 1; write for example steps = 100"),
        (STEPS.format("[7]"), "and [7] is a list; write steps = 7"),
        (
            STEPS.format("{a = 1}"),
            "run.steps = {a = 1} (x.toml) must be an integer >= 1, and {a = 1} is a table; write",
        ),
        ("[run.steps]\na = 1\n", "run.steps = {a = 1} (x.toml) must be an integer >= 1"),
        ("[run]\nname = 3\n", 'must be a non-empty string, and 3 is an integer; write name = "3"'),
        ('[run]\nname = ""\n', 'run.name = "" (x.toml) must be a non-empty string; write for example name = "unnamed"'),
        ('[compile]\nenabled = "True"\n', 'must be true or false, and "True" is a string; write enabled = true'),
        ("[compile]\nenabled = 1\n", "must be true or false, and 1 is an integer; write for example enabled = false"),
        ('[schedule]\nkind = "WSD"\n', 'must be one of "wsd", "cosine", "linear", "constant"; write kind = "wsd"'),
        ('[schedule]\nkind = "exponential"\n', 'write for example kind = "wsd"'),
        (
            '[float8]\nexclude = "lm_head"\n',
            'a list, each a string, and "lm_head" is a string; write exclude = ["lm_head"]',
        ),
        (
            "[optimizer]\nbetas = [0.9]\n",
            "must be a list of 2, each a number >= 0 and < 1; write for example betas = [0.9, 0.95]",
        ),
        ("[optimizer]\nbetas = [0.9, 1.0]\n", "optimizer.betas = [0.9, 1.0] (x.toml) must be a list of 2"),
        ('[optimizer]\nbetas = ["0.9", 0.95]\n', 'optimizer.betas = ["0.9", 0.95] (x.toml) must be a list of 2, each'),
        ("[optimizer]\nbetas = [0.9, nan]\n", "each a finite number"),
        (
            "[data]\nvalidation_fraction = 1\n",
            "must be a number > 0 and < 1; write for example validation_fraction = 0.01",
        ),
        ("[mesh]\nshard = -2\n", "must be an integer >= -1"),
    ],
)
def test_wrong_values(text: str, expected: str) -> None:
    message = refused(MODEL + text)
    assert expected in message
    assert message.startswith("1 problem in x.toml")


@pytest.mark.parametrize("key", list(field_types()))
def test_every_field_refuses_a_value_of_another_type(key: str) -> None:
    section, name = key.split(".")
    wrong = {"a list": "[[1]]", "a table": "[1]"}.get(describe(field_types()[key])[:7].strip(), "{a = 1}")
    message = refused(f"{MODEL if section != 'model' else ''}[{section}]\n{name} = {wrong}\n")
    assert f"{key} = {wrong} (x.toml) must be {describe(field_types()[key])}" in message


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\nstepz = 100\n", "run.stepz = 100 (x.toml) unknown key; did you mean run.steps?"),
        ("[run]\nlr = 1\n", "unknown key; did you mean optimizer.lr?"),
        ("[optimizer]\nsteps = 1\n", "unknown key; did you mean run.steps?"),
        ("[run]\nkind = 1\n", "did you mean schedule.kind?"),
        ("[float8]\nevery = 1\n", "did you mean checkpoint.every, metrics.every or validation.every?"),
        ("[batch]\nMicro-Batch-Size = 1\n", "did you mean batch.micro_batch_size?"),
        (
            "[optimizer]\nlearning_rate = 3\n",
            "unknown key; [optimizer] has lr, betas, eps, weight_decay, grad_clip and state_dtype",
        ),
        ("[optimizer.nested]\nlr = 3\n", "optimizer.nested = {lr = 3} (x.toml) unknown key"),
        ("[optimiser]\nlr = 3\n", "[optimiser] (x.toml) unknown section; did you mean [optimizer]?"),
        ("[network]\nlr = 3\n", "[network] (x.toml) unknown section; there are run, model, data,"),
        (
            '[run]\nbase = "x"\n',
            'run.base = "x" (x.toml) unknown key; base = "other.toml" stands in a file, above its first',
        ),
    ],
)
def test_unknown_names(text: str, expected: str) -> None:
    assert expected in refused(MODEL + text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("steps = 5", "steps = 5 (x.toml) unknown key; did you mean run.steps?"),
        ("batch_size = 5", "did you mean batch.global_batch_size or batch.micro_batch_size?"),
        ("zzz = 5", "unknown key; keys live in sections: run, model,"),
        ("run = 5", "run = 5 (x.toml) is a section; write [run] on a line of its own"),
        ("run = [{steps = 5}]", "run = [{steps = 5}] (x.toml) is a section"),
    ],
)
def test_keys_outside_sections(line: str, expected: str) -> None:
    assert expected in refused(f"{line}\n{MODEL}")


def test_a_recipe_must_name_its_size() -> None:
    message = refused("[model]\nlayers = 3\n")
    assert 'model.name is missing; write name = "smollm3_debug" below [model]; the sizes in models/sizes.py' in message
    assert all(size in message for size in SIZES)
    assert "model.name is missing" in refused("")


def test_an_unknown_size() -> None:
    message = refused('[model]\nname = "llama3_8B"\n')
    assert 'model.name = "llama3_8B" (x.toml) unknown size; did you mean "llama3_8b"?' in message
    assert "(command line) unknown size; the sizes" in refused(MODEL, "--model.name", "gpt-5")


# Many at once, and from where


def test_all_problems_at_once_each_with_its_origin() -> None:
    Path("far.toml").write_text('[optimizer]\nlr = "x"\n[data]\nsource = "nowhere.txt"\n')
    message = refused(
        'base = "far.toml"\n[run]\nsteps = 0\n[modell]\n',
        *("--run.seed=-1", "--batch.micro_batch_size", "5", "--batch.global_batch_size", "16", "--fsdp.x", "1"),
    )
    assert message.startswith("7 problems in x.toml")
    for part in (
        'optimizer.lr = "x" (far.toml)',
        "run.steps = 0 (x.toml)",
        "[modell] (x.toml) unknown section; did you mean [model]?",
        "run.seed = -1 (command line)",
        "fsdp.x = 1 (command line)",
        "model.name is missing",
        "batch.global_batch_size = 16 (command line) must be a multiple of micro_batch_size = 5",
    ):
        assert part in message


def test_rules_do_not_look_at_sections_with_wrong_values() -> None:
    message = refused(MODEL + '[run]\nsteps = "x"\n[schedule]\nwarmup_steps = 101\n[batch]\nmicro_batch_size = 3\n')
    assert "schedule" not in message
    assert "batch.global_batch_size = 16 (default) must be a multiple" in message


def test_broken_rules_name_where_the_value_comes_from() -> None:
    assert "model.key_value_heads = 2 (size smollm3_debug)" in refused(MODEL + "heads = 3\n")
    assert "model.key_value_heads = 3 (x.toml)" in refused(MODEL + "key_value_heads = 3\n")
    Path("far.toml").write_text(MODEL + "[mesh]\nreplicate = 2\n")
    with pytest.raises(UserError, match=r"mesh   \(far.toml, command line\)"):
        Path("x.toml").write_text('base = "far.toml"\n')
        load("x.toml", ["--mesh.shard", "2"], processes=3)


def test_rules_can_be_left_out() -> None:
    Path("x.toml").write_text(MODEL + '[data]\nsource = "nowhere.txt"\n')
    assert load("x.toml", rules=False).data.source == "nowhere.txt"


# Command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run.stepz", "100"], "run.stepz = 100 (command line) unknown key; did you mean run.steps?"),
        (["--steps=100"], "steps = 100 (command line) unknown key; did you mean run.steps?"),
        (["--float8", "1"], "is a section; its keys are float8.recipe, float8.all_gather"),
        (["--chek"], "chek (command line) unknown; did you mean --check?"),
        (["--base", "y.toml"], "stands in a file, above its first [section]"),
        (
            ["foo", "--run.steps", "1"],
            "foo (command line) unexpected; after the recipe come --section.field value, --check",
        ),
        (["--run.steps", "1e3"], "run.steps = 1e3 (command line) must be an integer >= 1; write --run.steps 1000"),
        (["--run.steps"], "run.steps (command line) must be an integer >= 1; write for example --run.steps 100"),
        (["--run.steps", "1", "2"], "run.steps = 1 2 (command line) must be an integer >= 1"),
        (
            ["--run.steps=-5"],
            "run.steps = -5 (command line) must be an integer >= 1; write for example --run.steps 100",
        ),
        (["--run.name", "my", "run"], "run.name = my run (command line) takes one value; put quotes around"),
        (["--run.name", ""], "must be a non-empty string; write for example --run.name unnamed"),
        (["--optimizer.lr", "nan"], "must be a finite number > 0"),
        (
            ["--optimizer.betas", "0.9"],
            "must be a list of 2, each a number >= 0 and < 1; write for example --optimizer.betas 0.9 0.95",
        ),
        (["--optimizer.betas", "0.9", "2"], "optimizer.betas = [0.9, 2.0] (command line) must be a list of 2"),
        (["--compile.enabled"], "must be true or false; write for example --compile.enabled False"),
        (["--compile.enabled", "yes"], "compile.enabled = yes (command line) must be true or false"),
        (["--schedule.kind", "wds"], "write --schedule.kind wsd"),
    ],
)
def test_wrong_overrides(arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(MODEL, *arguments)
    assert expected in message
    assert message.startswith("1 problem in x.toml")
    assert capfd.readouterr() == ("", "")  # tyro's own message gives way to ours


def test_help_documents_every_field_with_the_values_of_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command_line.print_help(recipe_of(MODEL, "--run.steps", "12345"), description="Described.")
    text = " ".join(re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().out).split())
    assert "Described." in text and "(default: 12345)" in text
    for key in field_types():
        assert f"--{key} " in text
    for section, cls in sections().items():
        assert f"{section} options" in text.replace("-", "_")
        docs = field_docs(cls)
        assert list(docs) == [field.name for field in dataclasses.fields(cls)]
        assert all(doc in text for doc in docs.values())


# Files


def test_a_missing_recipe_suggests_names() -> None:
    Path("smollm3_mine.toml").write_text(MODEL)
    with pytest.raises(UserError, match=r"^smollm3_min.toml does not exist; did you mean smollm3_mine.toml"):
        load("smollm3_min.toml")
    with pytest.raises(UserError, match=r"^nosuch/smollm3_debg.toml does not exist; did you mean .*smollm3_debug.toml"):
        load("nosuch/smollm3_debg.toml")
    with pytest.raises(UserError, match=r"^smollm3_debug does not exist; did you mean .*configs/smollm3_debug.toml"):
        load("smollm3_debug")
    with pytest.raises(UserError, match=r"^zzzz does not exist; recipes are in .*configs: llama2_7b_8xh100, "):
        load("zzzz")


def test_a_folder_is_no_recipe() -> None:
    Path("folder").mkdir()
    with pytest.raises(UserError, match=r"^folder is a folder, not a recipe; it has no .toml file"):
        load("folder")
    Path("folder/a.toml").touch()
    with pytest.raises(UserError, match=r"^folder is a folder, not a recipe; it has a.toml"):
        load("folder")
    with pytest.raises(UserError, match="is a folder"):
        load("")


def test_a_file_that_cannot_be_read() -> None:
    with pytest.raises(UserError, match=r"cannot be read: File name too long"):
        load("x" * 300)


def test_text_that_is_not_utf8() -> None:
    Path("x.toml").write_bytes(MODEL.encode() + b'# caf\xe9\nx = "\xff"')
    with pytest.raises(UserError, match=r"^x.toml is not UTF-8 text \(line 3, byte 36\); save it as UTF-8$"):
        load("x.toml")


def test_syntax_errors_show_their_place() -> None:
    with pytest.raises(UserError) as refusal:
        recipe_of("[run]\nname = smollm3\nsteps = 3\n")
    assert str(refusal.value) == (
        'x.toml is not TOML: line 2, column 8: Invalid value; strings stand in "quotes", booleans are true and false\n'
        "  name = smollm3\n"
        "         ^"
    )
    assert "line 3, column 10: Cannot overwrite a value" in refused("[run]\nsteps = 1\nsteps = 2\n")
    assert "x.toml is not TOML: line" in refused("[run")
    assert "x.toml is not TOML: line" in refused("a = [1,\n\n")


@pytest.mark.parametrize("value", ["1" + "0" * 5000, "[" * 5000])
def test_absurd_values(value: str) -> None:
    assert refused(f"x = {value}\n").startswith("x.toml cannot be read: ")


# Bases


def test_a_missing_base_names_both_files() -> None:
    Path("near.toml").write_text(MODEL)
    message = refused('base = "nearr.toml"\n')
    assert message == "nearr.toml (base of x.toml) does not exist; did you mean near.toml?"


def test_a_broken_base_is_named() -> None:
    Path("far.toml").write_text("= 3")
    assert refused('base = "far.toml"\n').startswith("far.toml (base of x.toml) is not TOML: line 1, column 1")


def test_base_must_be_one_name() -> None:
    assert refused("base = 3\n") == 'base = 3 in x.toml: must be one file name; write base = "other.toml"'
    assert "must be one file name" in refused('base = ["a", "b"]\n')


def test_bases_in_a_circle_show_the_chain(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    Path("b.toml").write_text('base = "sub/c.toml"\n')
    Path("sub/c.toml").write_text('base = "../b.toml"\n')
    assert "go in a circle: x.toml -> b.toml -> sub/c.toml -> b.toml; remove one" in refused('base = "b.toml"\n')
    assert "circle: x.toml -> x.toml" in refused('base = "./x.toml"\n')


def test_the_nearer_of_source_and_mixture_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("some other text")
    a, b = f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"
    (tmp_path / "mixed.toml").write_text(f'{MODEL}[data.mixture]\n"{a}" = 1\n"{b}" = 2\n')
    (tmp_path / "child.toml").write_text(f'base = "mixed.toml"\n[data]\nsource = "{b}"\n')
    (tmp_path / "grandchild.toml").write_text(f'base = "child.toml"\n[data]\nmixture = {{"{a}" = 1}}\n')
    assert load(tmp_path / "mixed.toml").data.sources == {a: 1, b: 2}
    assert load(tmp_path / "child.toml").data.sources == {b: 1.0}
    assert load(tmp_path / "grandchild.toml").data.sources == {a: 1}
    assert load(tmp_path / "grandchild.toml").data.source == DataConfig().source  # or a resumed run would differ
    assert load(tmp_path / "mixed.toml", ["--data.source", b]).data.sources == {b: 1.0}
    assert load(tmp_path / "child.toml", ["--data.mixture", a, "0.5", b, "0.5"]).data.sources == {a: 0.5, b: 0.5}
    for name in ("mixed", "child"):
        recipe = load(tmp_path / f"{name}.toml")
        (tmp_path / "resolved.toml").write_text(to_toml(recipe))
        assert load(tmp_path / "resolved.toml") == recipe
    (tmp_path / "both.toml").write_text(f'{MODEL}[data]\nsource = "{a}"\nmixture = {{"{b}" = 1}}\n')
    with pytest.raises(UserError, match=r"stands beside data\.source in the same place"):
        load(tmp_path / "both.toml")


def test_a_wrong_mixture_is_answered_with_a_right_one(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(MODEL)
    with pytest.raises(UserError) as caught:
        load(tmp_path / "x.toml", ["--data.mixture", "a.txt", "many"])
    assert "write for example --data.mixture web.jsonl 0.7 code.jsonl 0.3" in " ".join(str(caught.value).split())
    (tmp_path / "a.txt").write_text("some text")
    twice = ["--data.mixture", f"{tmp_path}/a.txt", "1", f"{tmp_path}/./a.txt", "1"]
    with pytest.raises(UserError, match="names the same place twice"):
        load(tmp_path / "x.toml", twice)
