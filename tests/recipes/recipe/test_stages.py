"""The [[stages]] of a recipe: what they change, what is refused, and what a started run may still change."""

from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.recipe.fields import field_types
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stage_tables import FIELDS, REASONS, SECTIONS
from recipes.recipe.stages import stage_of, stages_of, tokens_of
from recipes.training.same_run import identity_differences

DEBUG = Path(__file__).parents[3] / "configs" / "smollm3_debug.toml"
THREE = """
[[stages]]
name = "first"
until = 0.5
[[stages]]
name = "long"
until = 120
data.document_mask = true
[stages.batch]
sequence_length = 512
global_batch_size = 8
[[stages]]
name = "last"
schedule = { kind = "linear", decay_steps = 0, warmup_steps = 10 }
optimizer.lr = 1e-3
"""


def test_the_page_names_every_section_that_a_stage_may_change() -> None:
    page = (DEBUG.parents[1] / "docs/stages.md").read_text()
    said = page.partition("A stage may change every field of")[2].partition("Exceptions")[0]
    assert [name for name in SECTIONS if f"`[{name}]`" not in said] == []


def written(folder: Path, stages: str, head: str = "") -> Path:
    file = folder / "recipe.toml"
    file.write_text(f'base = "{DEBUG}"\n{head}\n{stages}')
    return file


@pytest.fixture
def three(tmp_path: Path) -> Recipe:
    return load(written(tmp_path, THREE))


def refused(folder: Path, stages: str, *arguments: str, head: str = "") -> str:
    with pytest.raises(UserError) as error:
        load(written(folder, stages, head), arguments)
    return " ".join(str(error.value).split())


def test_stages_share_the_steps_of_the_run(three: Recipe) -> None:
    assert [(stage.name, stage.first, stage.last) for stage in stages_of(three)] == [
        ("first", 0, 75),
        ("long", 75, 120),
        ("last", 120, 150),
    ]
    assert [stage_of(three, step).name for step in (0, 74, 75, 149, 150)] == ["first", "first", "long", "last", "last"]


def test_a_stage_changes_its_own_fields_and_nothing_else(three: Recipe) -> None:
    first, long, last = (stage.recipe for stage in stages_of(three))
    assert (long.batch.sequence_length, long.batch.global_batch_size, long.data.document_mask) == (512, 8, True)
    assert long.batch.micro_batch_size == first.batch.micro_batch_size
    assert last.batch == first.batch and last.data == first.data and last.run == three.run


def test_schedule_is_over_the_run_unless_a_stage_writes_its_own(three: Recipe) -> None:
    first, long, last = stages_of(three)
    assert long.learning_rate(100) == first.recipe.schedule.learning_rate(100, peak=3e-3, steps=150)
    assert last.learning_rate(120) == pytest.approx(1e-4)  # the first of 10 steps of its own warm-up
    assert last.learning_rate(129) == pytest.approx(1e-3)
    assert last.learning_rate(149) == pytest.approx(1e-3 / 20)


def test_recipe_with_stages_loads_back_from_its_toml(three: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "resolved.toml"
    file.write_text(to_toml(three))
    assert load(file) == three
    assert stages_of(load(file, ["--run.steps", "200"]))[-1].last == 200


def test_command_line_changes_the_recipe_or_one_stage(tmp_path: Path) -> None:
    words = "--optimizer.lr 5e-3 --stages.long.batch.global_batch_size=4 --stages.long.until 100 --run.steps 140"
    recipe = load(written(tmp_path, THREE), words.split())
    assert [stage.recipe.optimizer.lr for stage in stages_of(recipe)] == [5e-3, 5e-3, 1e-3]
    assert [stage.last for stage in stages_of(recipe)] == [70, 100, 140]
    assert stages_of(recipe)[1].recipe.batch.global_batch_size == 4


def test_a_childs_stages_replace_those_of_its_base(tmp_path: Path) -> None:
    base = written(tmp_path, THREE)
    child = tmp_path / "child.toml"
    child.write_text(f'base = "{base}"\n[[stages]]\nname = "only"\n')
    assert [stage.name for stage in load(child).stages] == ["only"]


def test_one_source_replaces_the_mixture_of_the_recipe(tmp_path: Path) -> None:
    head = '[data]\nmixture = { "python-stdlib/json" = 0.5, "python-stdlib/email" = 0.5 }\nvalidation_fraction = 0.1'
    stages = '[[stages]]\nname = "a"\nuntil = 10\n[[stages]]\nname = "b"\ndata.source = "python-stdlib/email"\n'
    recipe = load(written(tmp_path, stages, head))
    assert [list(stage.recipe.data.sources) for stage in stages_of(recipe)] == [
        ["python-stdlib/json", "python-stdlib/email"],
        ["python-stdlib/email"],
    ]


def test_last_stage_says_how_many_steps_there_are(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[model]\nname = "smollm3_debug"\n[checkpoint]\nevery = 5\n[[stages]]\nname = "a"\nuntil = 40\n')
    assert load(file).run.steps == 40


def test_every_field_that_stages_name_exists() -> None:
    keys = set(field_types())
    assert set(FIELDS) <= keys
    assert set(REASONS) - {"data.bos", "metrics.tensorboard"} <= keys
    assert set(SECTIONS) <= {key.partition(".")[0] for key in keys}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ('name = "a"\nuntil = 200', "stages.a.until = 200"),
        (
            'name = "a"\nuntil = 50\n[[stages]]\nname = "b"\nuntil = 40\n[[stages]]\nname = "c"',
            "leaves the stage no step",
        ),
        ('name = "a"\nuntil = 50\n[[stages]]\nname = "a"', "stages.a (recipe.toml) is there twice"),
        ('name = "a b"', "must be letters, digits and _"),
        ('until = 50\n[[stages]]\nname = "b"', "name of stage 1"),
        ('name = "a"\n[[stages]]\nname = "b"', "only the last stage may omit it"),
        ('name = "a"\nuntil = "half"', "must be a step (an integer >= 1) or a share"),
        ('name = "a"\nuntil = 150\n[[stages]]\nname = "b"', "must be below run.steps = 150"),
        ('name = "a"\nrun.seed = 3', "stages.a.run.seed = 3 (recipe.toml) cannot change in a stage"),
        ('name = "a"\nmodel.width = 64', "cannot change in a stage"),
        ('name = "a"\ndata.tokenizer = "train:300"', "the model knows the tokens of one tokenizer"),
        ('name = "a"\noptimizer.name = "muon"', "a stage begins with the moments of the one before it"),
        ('name = "a"\nbatch.sequence_lenght = 3', "did you mean batch.sequence_length?"),
        ('name = "a"\nbatch.sequence_length = "64"', "write sequence_length = 64"),
        ('name = "a"\nbatch = 3', "is not a table of fields"),
        ('name = "a"\ndata.source = "missing.txt"', 'stages.a.data.source = "missing.txt"'),
        ('name = "a"\nschedule.warmup_steps = 300', "must not exceed"),
        ('name = "a"\ncheckpoint.every = 0', "a stage begins from the checkpoint at the end of the one before it"),
    ],
)
def test_bad_stage_is_refused_with_its_name_and_file(
    stages: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(tmp_path, f"[[stages]]\n{stages}\n")


def test_unknown_stage_on_the_command_line_is_refused(tmp_path: Path) -> None:
    assert "unknown stage; did you mean long?" in refused(tmp_path, THREE, "--stages.lang.until", "3")
    assert "the recipe has none" in refused(tmp_path, "", "--stages.long.until", "3")


def test_message_that_all_stages_share_comes_once(tmp_path: Path) -> None:
    text = refused(tmp_path, THREE, head='[data]\nsource = "missing.txt"\n')
    assert text.count("does not exist") == 1 and "stages." not in text


def test_pairs_refuse_stages_that_change_their_batch(tmp_path: Path) -> None:
    head = '[data]\nprompt_field = "q"\nanswer_field = "a"\n'
    assert "pairs cannot change data or batch, as stage long does" in refused(tmp_path, THREE, head=head)


@pytest.mark.slow
def test_started_run_may_change_only_stages_to_come(three: Recipe, tmp_path: Path) -> None:
    output = ["--run.output", str(tmp_path / "runs")]
    (tmp_path / "runs" / three.run.name / "checkpoints" / "step-00000080").mkdir(parents=True)
    file = written(tmp_path, THREE)
    old = load(file, output)
    later = load(file, [*output, "--stages.last.optimizer.lr", "1e-4", "--stages.long.until", "90"])
    assert identity_differences(old, later) == []
    longer = load(file, [*output, "--run.steps", "300", "--stages.first.until", "75", "--schedule.decay_steps", "30"])
    assert not [line for line in identity_differences(old, longer) if "steps 76" not in line and "schedule" not in line]
    (line,) = identity_differences(old, load(file, [*output, "--stages.long.batch.sequence_length", "256"]))
    assert line.startswith("steps 76 to 80, done already: batch.sequence_length: 512")
    assert identity_differences(old, load(file, [*output, "--stages.first.until", "78"]))


BY_TOKENS = """
[[stages]]
name = "small"
until = "40_960 tokens"
batch.global_batch_size = 4
[[stages]]
name = "middle"
until = "2.048e5 tokens"
[[stages]]
name = "large"
until = "1_024_000 tokens"
batch = { global_batch_size = 32, sequence_length = 256 }
"""


def test_stages_that_end_with_tokens_end_at_the_nearest_step(tmp_path: Path) -> None:
    head = "[batch]\nsequence_length = 128\nglobal_batch_size = 16\n"
    recipe = load(written(tmp_path, BY_TOKENS, head=head), ["--run.steps", "260"])
    ends = [(stage.last, stage.recipe.batch.global_batch_size) for stage in stages_of(recipe)]
    # 80 steps of 512 tokens, 80 of 2,048, 100 of 8,192
    assert ends == [(80, 4), (160, 16), (260, 32)]
    assert sum(map(tokens_of, stages_of(recipe))) == 1_024_000
    words = ["--run.steps", "220", "--stages.small.until", "20480 tokens", "--stages.large.until", "9.4208e5 tokens"]
    assert [stage.until for stage in load(written(tmp_path, BY_TOKENS, head=head), words).stages] == [40, 130, 220]


def test_the_last_stage_may_say_in_tokens_how_long_the_run_is(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[model]\nname = "smollm3_debug"\n[checkpoint]\nevery = 5\n[batch]\nsequence_length = 128\n' + BY_TOKENS
    )
    assert load(file).run.steps == 260
    text = file.read_text().replace('"40_960 tokens"', "0.5")
    file.write_text(text)
    with pytest.raises(UserError, match=r"stages.middle.until = \"2.048e5 tokens\" .*\n.*counts tokens after a stage"):
        load(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('until = "9 TOKENS"', 'or tokens of the run; write for example until = 1000, until = 0.8 or until = "2.5e9'),
        ('until = "-5 tokens"', "or tokens of the run"),
        ('until = "1 tokens"', "leaves the stage no step"),
        ('until = "1e9 tokens"', "must be below run.steps = 150"),
    ],
)
def test_stages_that_end_with_wrong_tokens_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, f'[[stages]]\nname = "a"\n{text}\n[[stages]]\nname = "z"\n')


def test_the_stage_whose_tokens_are_too_few_is_named_and_not_the_one_after_it(tmp_path: Path) -> None:
    """Its end counted below 0 then, which stood for an end that nobody knows."""
    tables = '[[stages]]\nname = "a"\nuntil = 50\n[[stages]]\nname = "b"\n{}[[stages]]\nname = "c"\n{}'
    last = 'until = "1e9 tokens"\n[[stages]]\nname = "z"\n'
    said = refused(tmp_path, tables.format('until = "1 tokens"\n', last))
    assert 'stages.b.until = "1 tokens"' in said and "those before it have" in said and "stages.c" not in said
    said = refused(tmp_path, tables.format("", last))
    assert "stages.b.until" in said and "is missing" in said and "stages.c" not in said


def test_a_schedule_may_be_longer_than_the_run(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "",
        head='[run]\nsteps = 50\n[schedule]\nkind = "cosine"\nwarmup_steps = 0.1\ndecay_steps = 0\nsteps = 100\n',
    )
    (short,), (long,) = stages_of(load(file)), stages_of(load(file, ["--run.steps", "100"]))
    assert [short.learning_rate(step) for step in range(50)] == [long.learning_rate(step) for step in range(50)]
    assert short.learning_rate(49) > 0.5 * short.recipe.optimizer.lr
    assert identity_differences(short.recipe, long.recipe) == []  # extending the run changes no rate
    text = refused(tmp_path, "", "--run.steps", "101", head="[schedule]\nsteps = 100\n")
    assert "is less than the 101 steps that are trained by it" in text


def test_a_stage_with_a_schedule_of_its_own_may_end_before_it(tmp_path: Path) -> None:
    schedule = 'schedule = { kind = "linear", decay_steps = 0, steps = 80 }'
    ends = f'[[stages]]\nname = "a"\nuntil = 40\n{schedule}\n[[stages]]\nname = "b"\n'
    first, _ = stages_of(load(written(tmp_path, ends), ["--run.steps", "50"]))
    assert first.schedule_span == (0, 80) and first.learning_rate(39) > 0.5 * first.recipe.optimizer.lr
    assert "is less than the 40 steps" in refused(
        tmp_path, ends, "--run.steps", "50", "--stages.a.schedule.steps", "39"
    )


def test_a_schedule_of_a_stage_is_not_as_long_as_that_of_the_run(tmp_path: Path) -> None:
    head = '[schedule]\nkind = "wsd"\ndecay_steps = 0\nsteps = 1000\n'
    ends = '[[stages]]\nname = "a"\nuntil = 40\n[[stages]]\nname = "b"\nschedule.decay_steps = 10\n'
    first, last = stages_of(load(written(tmp_path, ends, head=head), ["--run.steps", "60"]))
    assert (first.schedule_span, last.schedule_span) == ((0, 1000), (40, 20))
    assert last.learning_rate(59) < 0.2 * last.recipe.optimizer.lr
