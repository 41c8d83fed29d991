"""Loading a recipe: layers, precedence, and the message for every kind of mistake."""

import dataclasses
import os
import re
import time
from pathlib import Path

import pytest

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.data.config import DataConfig
from recipes.recipe import command_line
from recipes.recipe.fields import describe, field_docs, field_types, sections
from recipes.recipe.load import CONFIGS, load, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.synonyms import FIELDS, GONE, SECTIONS

MODEL = '[model]\nname = "smollm3_debug"\n'
FULL = ("--activation_checkpointing.mode", "full")


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


def test_defaults_come_from_the_schema_and_the_model_size() -> None:
    assert recipe_of(MODEL) == Recipe(model=SIZES["smollm3_debug"])


def test_a_file_overrides_its_bases_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    Path("far.toml").write_text('[model]\nname = "llama3_8b"\n[run]\nsteps = 1\nseed = 1\nname = "far"\n')
    Path("sub/middle.toml").write_text('base = "../far.toml"\n[run]\nsteps = 2\nseed = 2\n')
    recipe = recipe_of('base = "sub/middle.toml"\n[run]\nsteps = 3\n')
    assert (recipe.run.steps, recipe.run.seed, recipe.run.name) == (3, 2, "far")
    assert recipe.model == SIZES["llama3_8b"]


def test_a_model_field_in_a_base_overrides_the_size_named_in_the_file() -> None:
    Path("far.toml").write_text('[model]\nname = "smollm3_3b"\nlayers = 5\n')
    assert recipe_of('base = "far.toml"\n[model]\nname = "llama3_8b"\n').model == dataclasses.replace(
        SIZES["llama3_8b"], layers=5
    )


def test_the_command_line_overrides_the_file_and_its_last_flag_wins() -> None:
    recipe = recipe_of(MODEL + "[run]\nsteps = 3\n", "--run.steps", "4", "--run.seed=9", "--run.steps=5")
    assert (recipe.run.steps, recipe.run.seed) == (5, 9)


def test_the_command_line_can_choose_the_model_size() -> None:
    assert recipe_of("", "--model.name", "llama3_8b").model == SIZES["llama3_8b"]
    assert recipe_of(MODEL, "--model.name=llama3_70b").model == SIZES["llama3_70b"]


def test_an_override_equal_to_the_default_counts_as_given() -> None:
    layers = SIZES["smollm3_debug"].layers
    model = recipe_of(MODEL, "--model.layers", str(layers), "--model.name", "llama3_8b").model
    assert model == dataclasses.replace(SIZES["llama3_8b"], layers=layers)


IN_FLOAT8 = ["--float8.recipe=tensorwise", "--float8.emulate=true"]


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--optimizer.betas", "0.8", "0.9"], "optimizer.betas", (0.8, 0.9)),
        (["--optimizer.betas=0.8", "0.9"], "optimizer.betas", (0.8, 0.9)),
        ([*IN_FLOAT8, "--float8.exclude"], "float8.exclude", ()),
        ([*IN_FLOAT8, "--float8.exclude", "lm_head", "o_proj"], "float8.exclude", ("lm_head", "o_proj")),
        (["--compile.enabled", "True"], "compile.enabled", True),
        (["--compile.enabled"], "compile.enabled", True),
        (["--compile.enabled", "--run.steps", "7"], "compile.enabled", True),
        (["--compile.enabled=true"], "compile.enabled", True),
        (["--fsdp.reshard-after-forward", "false"], "fsdp.reshard_after_forward", False),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--schedule.warmup_steps", "0.1"], "schedule.warmup_steps", 0.1),
        (["--schedule.warmup_steps", "15"], "schedule.warmup_steps", 15),
        (["--mesh.shard", "-1"], "mesh.shard", -1),
        (["--mesh.shard", "4"], "mesh.shard", 4),
        (["--mesh.shard", "node"], "mesh.shard", "node"),
        ([*FULL, "--activation_checkpointing.blocks", "1"], "activation_checkpointing.blocks", 1),
        ([*FULL, "--activation_checkpointing.blocks", "1.0"], "activation_checkpointing.blocks", 1.0),
        ([*FULL, "--activation_checkpointing.blocks", "0.5"], "activation_checkpointing.blocks", 0.5),
        ([*FULL, "--activation_checkpointing.blocks", "all"], "activation_checkpointing.blocks", "all"),
        (["--run.name=-x=y"], "run.name", "-x=y"),
        (["--run.name", "two words"], "run.name", "two words"),
    ],
)
def test_an_override_is_read_in_every_spelling(arguments: list[str], key: str, value: object) -> None:
    section, name = key.split(".")
    found = getattr(getattr(recipe_of(MODEL, *arguments), section), name)
    assert found == value and type(found) is type(value)


def test_a_whole_number_is_accepted_as_a_float() -> None:
    lr = recipe_of(MODEL + "[optimizer]\nlr = 1\n").optimizer.lr
    assert lr == 1.0 and type(lr) is float


def test_lists_are_stored_as_tuples() -> None:
    recipe = recipe_of(MODEL + "no_rope_layers = [0, 2]\n[optimizer]\nbetas = [0, 0.5]\n")
    assert recipe.model.no_rope_layers == (0, 2) and recipe.optimizer.betas == (0.0, 0.5)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    Path("w.toml").write_bytes(b"\xef\xbb\xbf" + MODEL.replace("\n", "\r\n").encode())
    assert load("w.toml").model == SIZES["smollm3_debug"]


def test_a_resolved_recipe_loads_back_to_the_same_recipe() -> None:
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
BLOCKS = '[activation_checkpointing]\nmode = "full"\nblocks = {}\n'


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
        (SHARD.format("true"), 'must be an integer >= -1 or "node", and true is a boolean'),
        (LR.format("true"), "must be a number > 0, and true is a boolean"),
        (LR.format("0"), "optimizer.lr = 0 (x.toml) must be a number > 0; write for example lr = 0.0003"),
        (LR.format("nan"), "optimizer.lr = nan (x.toml) must be a finite number > 0; write"),
        (LR.format("inf"), "optimizer.lr = inf (x.toml) must be a finite number > 0; write"),
        (LR.format("2024-01-01"), "and 2024-01-01 is a date; write for example lr = 0.0003"),
        (
            STEPS.format("1e3"),
            "run.steps = 1000.0 (x.toml) must be an integer >= 1, and 1000.0 is a float; write steps = 1000",
        ),
        (STEPS.format("1.5"), "must be an integer >= 1, and 1.5 is a float; write for example steps = 100"),
        (STEPS.format("true"), "run.steps = true (x.toml) must be an integer >= 1, and true is a boolean"),
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
        ("[compile]\nenabled = 1\n", "must be true or false, and 1 is an integer; write enabled = true"),
        ('[schedule]\nkind = "WSD"\n', 'must be one of "wsd", "cosine", "linear", "constant"; write kind = "wsd"'),
        ('[schedule]\nkind = "exponential"\n', 'must be one of "wsd", "cosine", "linear", "constant"'),
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
            "must be a number >= 0 and < 1; write for example validation_fraction = 0.01",
        ),
        ("[mesh]\nshard = -2\n", "must be an integer >= -1"),
        (BLOCKS.format("0"), 'must be an integer >= 1 or a number > 0 and <= 1 or "all"; write for example blocks ='),
        (BLOCKS.format("nan"), 'an integer >= 1 or a finite number > 0 and <= 1 or "all"; write for example blocks ='),
        (BLOCKS.format("1.5"), 'must be an integer >= 1 or a number > 0 and <= 1 or "all"; write for example blocks ='),
        (BLOCKS.format('"0.5"'), 'and "0.5" is a string; write blocks = 0.5'),
        (BLOCKS.format("true"), "and true is a boolean"),
    ],
)
def test_a_wrong_value_is_refused_with_a_valid_one(text: str, expected: str) -> None:
    message = refused(MODEL + text)
    assert expected in message
    assert message.startswith("1 problem in x.toml")


@pytest.mark.parametrize("key", list(field_types()))
def test_every_field_refuses_a_value_of_the_wrong_type(key: str) -> None:
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
        ("[optimizer]\nsteps = 1\n", "unknown key; did you mean run.steps or schedule.steps?"),
        ("[run]\nkind = 1\n", "did you mean schedule.kind?"),
        ("[float8]\nevery = 1\n", "did you mean checkpoint.every, metrics.every or validation.every?"),
        ("[batch]\nMicro-Batch-Size = 1\n", "did you mean batch.micro_batch_size?"),
        (
            "[optimizer]\nlearning_rate = 3\n",
            "unknown key; did you mean optimizer.lr?",
        ),
        ("[optimizer]\nzzzzz = 3\n", "unknown key; [optimizer] has name, lr, matrix_lr, lr_adjust, "),
        ("[optimizer.nested]\nlr = 3\n", "optimizer.nested = {lr = 3} (x.toml) unknown key"),
        ("[optimiser]\nlr = 3\n", "[optimiser] (x.toml) unknown section; did you mean [optimizer]?"),
        ("[network]\nlr = 3\n", "[network] (x.toml) unknown section; the sections are run, model, data,"),
        (
            '[run]\nbase = "x"\n',
            'run.base = "x" (x.toml) unknown key; base = "other.toml" belongs in a file, above its first',
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_likeliest_ones(text: str, expected: str) -> None:
    assert expected in refused(MODEL + text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("steps = 5", "steps = 5 (x.toml) unknown key; did you mean run.steps or schedule.steps?"),
        ("batch_size = 5", "did you mean batch.global_batch_size or batch.micro_batch_size?"),
        ("zzz = 5", "unknown key; every key belongs to a section: run, model,"),
        ("run = 5", "run = 5 (x.toml) is a section; write [run] on a separate line"),
        ("run = [{steps = 5}]", "run = [{steps = 5}] (x.toml) is a section"),
    ],
)
def test_a_key_outside_of_sections_is_refused(line: str, expected: str) -> None:
    assert expected in refused(f"{line}\n{MODEL}")


def test_a_recipe_must_name_its_model_size() -> None:
    message = refused("[model]\nlayers = 3\n")
    assert 'model.name is missing; write name = "smollm3_debug" below [model]; the sizes in models/sizes.py' in message
    assert all(size in message for size in SIZES)


def test_an_empty_recipe_must_name_its_model_size() -> None:
    assert "model.name is missing" in refused("")


def test_a_misspelled_size_is_refused_with_the_likeliest_one() -> None:
    message = refused('[model]\nname = "llama3_8B"\n')
    assert 'model.name = "llama3_8B" (x.toml) unknown size; did you mean "llama3_8b"?' in message


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[mesh]\ntensor_parallel_degree = 2\n", "mesh.tensor"),
        ("[mesh]\ntp = 2\n", "mesh.tensor"),
        ("[mesh]\ncontext_parallel = 2\n", "mesh.context"),
        ("[mesh]\npp = 2\n", "mesh.pipeline"),
        ("[mesh]\npipeline_parallel_degree = 2\n", "mesh.pipeline"),
        ("[mesh]\nsequence_parallel = true\n", "mesh.tensor, which includes it, or mesh.context"),
        ("[tensor_parallel]\nsize = 2\n", "mesh.tensor"),
    ],
)
def test_names_that_other_programs_give_an_axis_lead_to_its_field(text: str, field: str) -> None:
    assert f"did you mean {field}?" in refused(MODEL + text)


def test_an_unknown_size_is_refused_with_all_sizes() -> None:
    assert "(command line) unknown size; the sizes" in refused(MODEL, "--model.name", "gpt-5")


# Several problems, and where they come from


def test_all_problems_are_reported_at_once_each_with_its_origin() -> None:
    Path("far.toml").write_text('[optimizer]\nlr = "x"\n[data]\nsource = "nowhere.txt"\n')
    message = refused(
        'base = "far.toml"\n[run]\nsteps = 0\n[modell]\n',
        *("--run.seed=-1", "--batch.micro_batch_size", "5", "--batch.global_batch_size", "16", "--fsdp.x", "1"),
    )
    assert message.startswith("8 problems in x.toml")
    for part in (
        "data.source = \"nowhere.txt\" (far.toml) 'nowhere.txt' does not exist",
        'optimizer.lr = "x" (far.toml)',
        "run.steps = 0 (x.toml)",
        "[modell] (x.toml) unknown section; did you mean [model]?",
        "run.seed = -1 (command line)",
        "fsdp.x = 1 (command line)",
        "model.name is missing",
        "batch.global_batch_size = 16 (command line) must be a multiple of micro_batch_size = 5",
    ):
        assert part in message


def test_rules_skip_sections_with_wrong_values() -> None:
    message = refused(MODEL + '[run]\nsteps = "x"\n[schedule]\nwarmup_steps = 101\n[batch]\nmicro_batch_size = 3\n')
    assert "schedule" not in message
    assert "batch.global_batch_size = 16 (default) must be a multiple" in message


def test_a_broken_rule_names_where_the_value_comes_from() -> None:
    assert "model.key_value_heads = 2 (size smollm3_debug)" in refused(MODEL + "heads = 3\n")
    assert "model.key_value_heads = 3 (x.toml)" in refused(MODEL + "key_value_heads = 3\n")
    Path("far.toml").write_text(MODEL + "[mesh]\nreplicate = 2\n")
    with pytest.raises(UserError, match=r"mesh   \(far.toml, command line\)"):
        Path("x.toml").write_text('base = "far.toml"\n')
        load("x.toml", ["--mesh.shard", "2"], processes=3)


def test_loading_without_rules_does_not_look_at_the_data() -> None:
    Path("x.toml").write_text(MODEL + '[data]\nsource = "nowhere.txt"\n')
    assert load("x.toml", rules=False).data.source == "nowhere.txt"


def test_a_recipe_for_another_machine_is_checked_without_its_data_and_weights() -> None:
    Path("x.toml").write_text(MODEL + "[batch]\nglobal_batch_size = 16\nmicro_batch_size = 2\n")
    away = ["--data.source", "nowhere.txt", "--model.weights", "nowhere"]
    assert load("x.toml", away, elsewhere=True, processes=8).data.source == "nowhere.txt"
    with pytest.raises(UserError, match="must be a multiple of micro_batch_size 2 x 3 data-parallel processes"):
        load("x.toml", away, elsewhere=True, processes=3)


# Command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run.stepz", "100"], "run.stepz = 100 (command line) unknown key; did you mean run.steps?"),
        (["--steps=100"], "steps = 100 (command line) unknown key; did you mean run.steps or schedule.steps?"),
        (["--float8", "1"], "is a section; its keys are float8.recipe, float8.all_gather"),
        (["--chek"], "chek (command line) unknown; did you mean --check?"),
        (["--base", "y.toml"], "belongs in a file, above its first [section]"),
        (
            ["foo", "--run.steps", "1"],
            "foo (command line) unexpected; after the recipe, write --section.field value or --check",
        ),
        (["--run.steps", "1e3"], "run.steps = 1e3 (command line) must be an integer >= 1; write --run.steps 1000"),
        (["--run.steps"], "run.steps (command line) must be an integer >= 1; write for example --run.steps 100"),
        (["--run.steps", "1", "2"], "run.steps = 1 2 (command line) must be an integer >= 1"),
        (
            ["--run.steps=-5"],
            "run.steps = -5 (command line) must be an integer >= 1; write for example --run.steps 100",
        ),
        (["--run.name", "my", "run"], "run.name = my run (command line) takes one value; put a value with spaces in"),
        (["--run.name", ""], "must be a non-empty string; write for example --run.name unnamed"),
        (["--optimizer.lr", "nan"], "must be a finite number > 0"),
        (
            ["--optimizer.betas", "0.9"],
            "must be a list of 2, each a number >= 0 and < 1; write for example --optimizer.betas 0.9 0.95",
        ),
        (["--optimizer.betas", "0.9", "2"], "optimizer.betas = [0.9, 2.0] (command line) must be a list of 2"),
        (["--compile.enabled", "yes"], "compile.enabled = yes (command line) must be true or false"),
        (["--schedule.kind", "wds"], "write --schedule.kind wsd"),
    ],
)
def test_a_wrong_override_is_refused_in_our_words(
    arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    message = refused(MODEL, *arguments)
    assert expected in message
    assert message.startswith("1 problem in x.toml")
    assert capfd.readouterr() == ("", "")  # tyro's own message is dropped


def test_help_documents_every_field_with_its_value_in_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command_line.print_help(recipe_of(MODEL, "--run.steps", "12345"), usage="usage: as shown")
    text = " ".join(re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().out).split())
    assert text.endswith("usage: as shown") and "(default: 12345)" in text
    for key in field_types():
        assert f"--{key} " in text
    for section, cls in sections().items():
        assert f"{section} options" in text.replace("-", "_")
        docs = field_docs(cls)
        assert list(docs) == [field.name for field in dataclasses.fields(cls)]
        assert all(doc in text for doc in docs.values())


# Files


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("smollm3_min.toml", r"^smollm3_min.toml does not exist; did you mean smollm3_mine.toml"),
        ("nosuch/smollm3_debg.toml", r"^nosuch/smollm3_debg.toml does not exist; did you mean .*smollm3_debug.toml"),
        ("smollm3_debug", r"^smollm3_debug does not exist; did you mean .*configs/smollm3_debug.toml"),
        ("zzzz", r"^zzzz does not exist; recipes are in .*configs: gpt2_124m_8xh100, "),
        ("configs/llama3_8b_8xh100.toml", r"did you mean .*configs/benchmarks/llama3_8b_8xh100.toml\?"),
    ],
)
def test_a_missing_recipe_is_refused_with_similar_names(path: str, expected: str) -> None:
    Path("smollm3_mine.toml").write_text(MODEL)
    with pytest.raises(UserError, match=expected):
        load(path)


def test_an_empty_folder_is_refused_as_a_recipe() -> None:
    Path("folder").mkdir()
    with pytest.raises(UserError, match=r"^folder is a folder, not a recipe; it contains no .toml file"):
        load("folder")


def test_a_folder_is_refused_with_the_recipes_in_it() -> None:
    Path("folder").mkdir()
    Path("folder/a.toml").touch()
    with pytest.raises(UserError, match=r"^folder is a folder, not a recipe; it contains a.toml"):
        load("folder")


def test_an_empty_name_is_refused_as_the_current_folder() -> None:
    with pytest.raises(UserError, match="is a folder"):
        load("")


def test_a_file_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UserError, match=r"has a name of 300 bytes in it, more than 255"):
        load("x" * 300)


def test_text_that_is_not_utf8_is_refused_with_its_line() -> None:
    Path("x.toml").write_bytes(MODEL.encode() + b'# caf\xe9\nx = "\xff"')
    with pytest.raises(UserError, match=r"^x.toml is not UTF-8 text \(line 3, byte 36\); save it as UTF-8$"):
        load("x.toml")


def test_a_syntax_error_is_shown_with_its_position() -> None:
    with pytest.raises(UserError) as refusal:
        recipe_of("[run]\nname = smollm3\nsteps = 3\n")
    assert str(refusal.value) == (
        'x.toml is not TOML: line 2, column 8: Invalid value; strings need "quotes", booleans are true and false\n'
        "  name = smollm3\n"
        "         ^"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\nsteps = 1\nsteps = 2\n", "line 3, column 10: Cannot overwrite a value"),
        ("[run", "x.toml is not TOML: line"),
        ("a = [1,\n\n", "x.toml is not TOML: line"),
    ],
)
def test_every_syntax_error_names_the_file_and_the_line(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_an_absurd_value_is_refused_without_a_traceback() -> None:
    assert refused(f"x = 1{'0' * 5000}\n").startswith("x.toml cannot be read: ")


# Bases


def test_a_missing_base_is_refused_naming_both_files() -> None:
    Path("near.toml").write_text(MODEL)
    message = refused('base = "nearr.toml"\n')
    assert message == "nearr.toml (base of x.toml) does not exist; did you mean near.toml?"


def test_a_syntax_error_in_a_base_names_both_files() -> None:
    Path("far.toml").write_text("= 3")
    assert refused('base = "far.toml"\n').startswith("far.toml (base of x.toml) is not TOML: line 1, column 1")


def test_base_must_be_a_single_file_name() -> None:
    assert refused("base = 3\n") == 'base = 3 in x.toml: must be a file name; write base = "other.toml"'
    assert "must be a file name" in refused('base = ["a", "b"]\n')


def test_bases_in_a_circle_are_refused_with_the_chain(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    Path("b.toml").write_text('base = "sub/c.toml"\n')
    Path("sub/c.toml").write_text('base = "../b.toml"\n')
    assert "form a circle: x.toml -> b.toml -> sub/c.toml -> b.toml; remove one" in refused('base = "b.toml"\n')
    assert "circle: x.toml -> x.toml" in refused('base = "./x.toml"\n')


def test_a_thousand_bases_are_read_in_seconds() -> None:
    for number in range(999):
        Path(f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    Path("999.toml").write_text(MODEL)
    began = time.process_time()
    recipe_of('base = "0.toml"\n')
    assert time.process_time() - began < 3


@pytest.mark.parametrize("value", ["0x" + "f" * 20_000, "[" * 5000 + "]" * 5000])
@pytest.mark.parametrize("key", ["[run]\nsteps", "[run]\nname", "[extra]\na", "[data]\nmixture"])
def test_values_that_no_message_can_show_are_refused(key: str, value: str) -> None:
    assert "x.toml cannot be read: " in refused(f"{key} = {value}\n")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    """Two text files, and recipes: "mixed" reads both, its child the second, the grandchild the first."""
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("some other text")
    a, b = f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"
    Path("mixed.toml").write_text(f'{MODEL}[data.mixture]\n"{a}" = 1\n"{b}" = 2\n')
    Path("child.toml").write_text(f'base = "mixed.toml"\n[data]\nsource = "{b}"\n')
    Path("grandchild.toml").write_text(f'base = "child.toml"\n[data]\nmixture = {{"{a}" = 1}}\n')
    return a, b


def test_a_file_overrides_the_source_or_mixture_of_its_base(texts: tuple[str, str]) -> None:
    a, b = texts
    assert load("mixed.toml").data.sources == {a: 1, b: 2}
    assert load("child.toml").data.sources == {b: 1.0}
    assert load("grandchild.toml").data.sources == {a: 1}


def test_a_mixture_resets_the_source_to_its_default(texts: tuple[str, str]) -> None:
    assert load("grandchild.toml").data.source == DataConfig().source  # or a resumed run would differ


def test_the_command_line_overrides_source_or_mixture(texts: tuple[str, str]) -> None:
    a, b = texts
    assert load("mixed.toml", ["--data.source", b]).data.sources == {b: 1.0}
    assert load("child.toml", ["--data.mixture", a, "0.5", b, "0.5"]).data.sources == {a: 0.5, b: 0.5}


@pytest.mark.parametrize("name", ["mixed", "child"])
def test_a_resolved_source_or_mixture_loads_back(name: str, texts: tuple[str, str]) -> None:
    recipe = load(f"{name}.toml")
    Path("resolved.toml").write_text(to_toml(recipe))
    assert load("resolved.toml") == recipe


def test_source_and_mixture_in_one_file_are_refused(texts: tuple[str, str]) -> None:
    said = refused(f'{MODEL}[data]\nsource = "{texts[0]}"\nmixture = {{"{texts[1]}" = 1}}\n')
    assert "data.mixture (x.toml) cannot be given together with data.source in the same place" in said


def test_a_wrong_mixture_is_refused_with_a_valid_one() -> None:
    said = refused(MODEL, "--data.mixture", "a.txt", "many")
    assert "write for example --data.mixture web.jsonl 0.7 code.jsonl 0.3" in said


def test_tables_of_paths_are_repeated_as_they_were_written() -> None:
    said = refused(MODEL, "--validation.sources", "{web = '/Data/Web.jsonl'}")
    assert "write --validation.sources web /Data/Web.jsonl" in said


def test_a_mixture_that_names_a_source_twice_is_refused(texts: tuple[str, str], tmp_path: Path) -> None:
    said = refused(MODEL, "--data.mixture", texts[0], "1", f"{tmp_path}/./a.txt", "1")
    assert "names the same source twice" in said


def test_a_wrong_type_does_not_hide_the_rules_about_other_fields_of_its_section(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[batch]\nglobal_batch_size = 7\nmicro_batch_size = 2\nloss_chunks = "4"\n')
    with pytest.raises(UserError) as raised:
        load(recipe)
    assert "batch.loss_chunks" in str(raised.value) and "batch.global_batch_size" in str(raised.value)


# Bounds


def test_a_file_that_is_no_recipe_is_refused_by_its_size() -> None:
    assert refused("#" * 1_000_001) == "x.toml cannot be read: it has more than 1,000,000 bytes"


def test_a_refusal_names_the_first_hundred_of_many_problems() -> None:
    message = refused(MODEL + "".join(f"[s{number}]\n" for number in range(150)))
    assert message.startswith("150 problems in x.toml") and message.endswith("and 50 more")


@pytest.mark.parametrize(
    "text",
    [
        "[run]\nsteps = " + "9" * 4_000,
        "[run]\nsteps = " + "9" * 40_000,
        f'[run]\nsteps = "{"9" * 300_000}"',
        f'[run]\nname = "{"n" * 300_000}"',
        f'[model]\nname = "{"n" * 300_000}"',
        f'[data]\ntext_documents = "{"n" * 300_000}"\nsource = "{"n" * 300_000}"',
        f'[run]\n"{"k" * 300_000}" = 1',
        f'"{"k" * 300_000}" = 1',
        f'["{"k" * 300_000}"]',
        f"x = [{'1, ' * 100_000}",
        f"x = {'1, ' * 100_000}",
        f'base = "{"n" * 300_000}"',
    ],
    ids=lambda text: text[:30],
)
def test_a_refusal_shows_little_of_an_endless_line(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        recipe_of((MODEL if "[model]" not in text else "") + text if text.startswith("[") else text)
    assert max(map(len, str(refusal.value).splitlines())) < 300


# Paths


@pytest.mark.parametrize("key", ["run.name", "run.output", "data.cache", "data.source", "data.tokenizer", "base"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~nouser/x", "begins with ~nouser, but that home folder is not known; set HOME, or write the whole path"),
        ("x" * 256, "has a name of 256 bytes in it, more than 255; write a shorter one"),
        ("é" * 200, "has a name of 400 bytes in it, more than 255"),
        ("xx/" * 1500, "has 4,4"),
        (r"a\u0000b", "has a NUL character in it, which no path can have; remove it"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(key: str, path: str, expected: str) -> None:
    if key == "run.name" and "/" in path:
        expected = 'is the name of the run folder inside run.output; write a name without "/"'
    section, _, name = key.rpartition(".")
    message = refused(f'[{section}]\n{name} = "{path}"\n{MODEL}' if section else f'{name} = "{path}"\n{MODEL}')
    assert expected in message
    assert len(message) < 400


def test_a_cache_without_a_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a name and HOME
    assert "data.cache" in refused(MODEL)


@pytest.mark.parametrize("far", ["recipes", "checkout"])
def test_a_relative_path_is_looked_for_here_then_beside_the_recipe_then_in_the_checkout(
    far: str, tmp_path: Path
) -> None:
    Path("elsewhere").mkdir()
    if far == "recipes":
        Path("elsewhere/corpus").mkdir()
        Path("elsewhere/corpus/a.txt").write_text("far")
    source = "corpus/*.txt" if far == "recipes" else "docs/*.md"
    source = source if far == "recipes" else "configs/models/t5_debug_pairs.jsonl"
    field = 'text_field = "question"\n' if far == "checkout" else ""
    Path("elsewhere/x.toml").write_text(f'{MODEL}[data]\nsource = "{source}"\n{field}')
    found = load("elsewhere/x.toml").data.source
    if far == "recipes":
        assert found == "elsewhere/corpus/*.txt"
        Path("corpus").mkdir()
        Path("corpus/b.txt").write_text("near")
    else:
        assert found == str(CONFIGS / "models/t5_debug_pairs.jsonl")
        Path("configs/models").mkdir(parents=True)
        Path(source).write_text('{"question": "near"}\n')
    assert load("elsewhere/x.toml").data.source == source  # as it was before there was another place


def test_every_field_with_a_path_is_looked_for_beside_its_own_file() -> None:
    Path("far/sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "c.txt", "tokenizer.json", "chat.jinja", "task.yaml", "run"):
        Path("far/sub", name).write_text("x")
    Path("far/base.toml").write_text(
        f'{MODEL}weights = "sub/run"\nconfig = "sub/run"\n[run]\ncontinue_from = "sub/run@12"\n[data]\n'
        'mixture = {"sub/a.txt" = 1.0, "sub/b.txt" = 2.0}\ntokenizer = "sub/tokenizer.json"\n'
        'chat_template = "sub/chat.jinja"\n[validation]\nsources = {c = "sub/c.txt"}\n'
        'tasks = ["sub/task.yaml", "arc_easy"]\n'
    )
    Path("x.toml").write_text(
        'base = "far/base.toml"\n[run]\nsteps = 9\n[[stages]]\nname = "one"\nuntil = 3\n'
        '[[stages]]\nname = "two"\nvalidation.sources = {c = "far/sub/c.txt"}\n'
    )
    recipe = load("x.toml", ["--stages.two.data.source", "far/sub/c.txt"], rules=False)
    assert (recipe.model.weights, recipe.model.config) == ("far/sub/run", "far/sub/run")
    assert recipe.run.continue_from == "sub/run@12"  # a run is in the current folder
    assert recipe.data.mixture == {"far/sub/a.txt": 1.0, "far/sub/b.txt": 2.0}
    assert (recipe.data.tokenizer, recipe.data.chat_template) == ("far/sub/tokenizer.json", "far/sub/chat.jinja")
    assert recipe.validation.sources == {"c": "far/sub/c.txt"}
    assert recipe.validation.tasks == ("far/sub/task.yaml", "arc_easy")


@pytest.mark.parametrize("name", ["[D] x", ".hidden", "a?b", "sub/../sub"])
@pytest.mark.parametrize("end", ["", "/", "/a.txt"])
def test_folders_of_any_name_are_found_beside_the_recipe(name: str, end: str) -> None:
    os.makedirs(Path("far", name), exist_ok=True)
    Path("far", name, "a.txt").write_text("words")
    Path("far/x.toml").write_text(f'{MODEL}[data]\nsource = "{name}{end}"\n')
    assert Path(load("far/x.toml").data.source) == Path(os.path.normpath(Path("far", name + end)))


def test_a_glob_is_looked_for_where_it_matches() -> None:
    Path("far").mkdir()
    Path("far/a.txt").write_text("words")
    Path("far/x.toml").write_text(f'{MODEL}[data]\nsource = "*.txt"\n')
    assert load("far/x.toml").data.source == "far/*.txt"
    Path("here.txt").write_text("words")
    assert load("far/x.toml").data.source == "*.txt"


def test_a_refusal_does_not_change_the_screen() -> None:
    assert r"model.\x1b[2J = 1" in refused(MODEL + '"\\u001b[2J" = 1\n')


# Words of other programs


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("run.device", "gpu", "write --run.device cuda"),
        ("compile.enabled", "yes", "write --compile.enabled true"),
        ("compile.enabled", "off", "write --compile.enabled false"),
        ("float8.recipe", "fp8", "write --float8.recipe tensorwise"),
        ("float8.recipe", "on", "write --float8.recipe tensorwise"),
        ("fsdp.param_dtype", "bf16", "write --fsdp.param_dtype bfloat16"),
        ("checkpoint.every", "off", "write --checkpoint.every 0"),
        ("attention.backend", "sdpa", "write --attention.backend auto"),
        ("optimizer.learning_rate", "1", "did you mean optimizer.lr?"),
        ("batch.seq_len", "1", "did you mean batch.sequence_length?"),
        ("max_steps", "1", "did you mean run.steps?"),
        ("dp", "1", "did you mean mesh.shard?"),
        ("cp_size", "1", "did you mean mesh.context?"),
        ("gpus", "1", "did you mean the environment variable NPROC"),
    ],
)
def test_words_of_other_programs_are_understood(key: str, value: str, expected: str) -> None:
    assert expected in refused(MODEL, f"--{key}", value)
    if "." in key and value != "1":
        section, name = key.split(".")
        assert expected.partition(f"--{key} ")[2] in refused(MODEL + f'[{section}]\n{name} = "{value}"\n')


def test_a_default_is_no_answer_to_a_wish() -> None:
    assert "write" not in refused(MODEL, "--validation.every", "yes")
    assert "write" not in refused(MODEL + '[optimizer]\nname = "sgd"\n')


def test_words_of_other_programs_are_none_of_ours_and_lead_to_fields() -> None:
    assert not FIELDS.keys() & {key.partition(".")[2] for key in field_types()}
    assert {field for field in FIELDS.values() if " " not in field} <= field_types().keys()
    assert set(SECTIONS.values()) <= sections().keys()
    assert not SECTIONS.keys() & sections().keys()


# A size of one's own

OWN = """[model]
name = "custom"
layers = 2
width = 64
feed_forward_width = 96
heads = 4
key_value_heads = 2
head_width = 16
vocabulary = 512
tied_embeddings = true
norm_eps = 1e-5
rope_theta = 10000.0
"""


def test_a_custom_model_takes_what_it_omits_from_the_defaults_and_not_from_a_size() -> None:
    model = recipe_of(OWN, "--data.tokenizer", "train:512").model
    assert (model.layers, model.width, model.no_rope_every, model.rope_scaling) == (2, 64, 0, "none")
    Path("resolved.toml").write_text(to_toml(recipe_of(OWN, "--data.tokenizer", "train:512")))
    assert load("resolved.toml").model == model


def test_a_custom_model_without_its_whole_shape_is_refused_with_every_missing_field() -> None:
    message = refused('[model]\nname = "custom"\nlayers = 2\n')
    assert message.startswith("9 problems in x.toml")
    assert "model.rope_theta (x.toml) is missing" in message


def test_the_page_about_models_shows_a_custom_one_that_loads() -> None:
    page = (CONFIGS.parent / "docs" / "models.md").read_text()
    shown = page.partition("    [model]\n")[2].partition("\n\n")[0]
    recipe = recipe_of("[model]\n" + shown.replace("    ", "") + '\n[data]\ntokenizer = "train:32000"\n')
    assert recipe.model.num_params() > 1e8


@pytest.mark.parametrize("key", GONE)
def test_a_field_that_is_gone_is_refused_but_in_the_recipe_of_a_run(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    recipe = Recipe(model=SIZES["smollm3_debug"])
    of_run = to_toml(recipe).replace(f"[{section}]\n", f'[{section}]\n{name} = "x"\n')
    (tmp_path / "recipe.toml").write_text(of_run)
    assert load(tmp_path / "recipe.toml", rules=False) == recipe
    (tmp_path / "own.toml").write_text(f'{MODEL}[{section}]\n{name} = "x"\n')
    with pytest.raises(UserError, match=rf"{key} = \"x\".*\n *is gone; "):
        load(tmp_path / "own.toml", rules=False)
