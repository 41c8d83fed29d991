"""Values that nothing reads: refused where a recipe sets them, and left alone where a base or a run's copy has them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.recipe.conflicts import NEEDS
from recipes.recipe.fields import field_types, sections, value_of
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from tests.training import DEBUG

UNREAD = """
[pipeline]
schedule = "gpipe"

[experts]
loss_weight = 0.5
z_loss = 0.001

[mesh]
context_by = "gather"

[checkpoint]
every = 0
keep = 7
"""
KEYS = {"pipeline.schedule", "experts.loss_weight", "experts.z_loss", "mesh.context_by", "checkpoint.keep"}


def refused(*arguments: str, file: Path, **options: Any) -> set[str]:
    """The fields that are refused as unread."""
    try:
        load(file, arguments, **options)
    except UserError as error:
        pairs = pairwise(str(error).splitlines())
        return {line.split()[0] for line, below in pairs if "has no effect without" in below}
    return set()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A recipe that sets what it does not read."""
    (tmp_path / "own.toml").write_text(f'base = "{DEBUG}"\n{UNREAD}')
    return tmp_path / "own.toml"


def test_what_a_recipe_sets_and_does_not_read_is_refused_at_once(file: Path) -> None:
    assert refused(file=file) == KEYS
    flags = "--pipeline.schedule=gpipe", "--profile.after=7"
    assert refused(*flags, file=DEBUG) == {"pipeline.schedule", "profile.after"}


def test_steps_of_a_constant_schedule_are_read_by_a_share_of_warm_up() -> None:
    flags = ["--schedule.kind=constant", "--schedule.decay_steps=0", "--schedule.steps=400"]
    assert refused(*flags, "--schedule.warmup_steps=10", file=DEBUG) == {"schedule.steps"}
    assert load(DEBUG, [*flags, "--schedule.warmup_steps=0.1"]).schedule.phases(400) == (40, 0)


def test_what_its_base_sets_is_not(file: Path) -> None:
    above = file.with_name("above.toml")
    above.write_text('base = "own.toml"\n[run]\nsteps = 7\n')
    assert refused(file=above) == set()
    assert refused("--mesh.context_by=gather", file=above) == {"mesh.context_by"}


def test_a_flag_that_leaves_values_of_the_file_unread_is_like_a_file_above_it(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f'base = "{DEBUG}"\n[compile]\nenabled = true\nautotune = true\n')
    assert refused("--compile.enabled=false", file=file) == set()
    assert refused("--compile.enabled=false", "--compile.autotune=true", file=file) == {"compile.autotune"}


def test_a_flag_gives_a_value_of_the_file_its_reader(file: Path) -> None:
    read = {"mesh.context_by", "checkpoint.keep"}
    assert refused("--mesh.context=2", "--checkpoint.every=5", file=file) == KEYS - read


def test_the_copy_in_a_run_folder_loads_and_so_does_an_older_ones(file: Path) -> None:
    above, copy = file.with_name("above.toml"), file.with_name("recipe.toml")
    above.write_text('base = "own.toml"\n')
    recipe = load(above)
    copy.write_text(to_toml(recipe))
    assert load(copy) == recipe
    later = "picture", "calibrated", "ladder", "average"  # fields that an older version did not have
    older = [line for line in to_toml(recipe).splitlines() if not line.startswith(later)]
    copy.write_text("\n".join(older))
    assert load(copy) == recipe


def test_a_value_that_one_stage_reads_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    stages = '[[stages]]\nname = "a"\nuntil = 2\n[[stages]]\nname = "b"\n"data.document_mask" = true\n'
    file.write_text(f'base = "{DEBUG}"\n[float8]\nexclude = ["lm_head", "o_proj"]\n{stages}')
    assert refused(file=file) == {"float8.exclude"}
    file.write_text(file.read_text() + '"float8.recipe" = "tensorwise"\n"float8.emulate" = true\n')
    assert refused(file=file) == set()


def test_layers_of_a_sweep_may_leave_values_unread(file: Path) -> None:
    assert refused(file=file, over=[("a sweep", {"pipeline": {"schedule": "zbv"}})]) == set()


def test_every_field_that_needs_others_exists_and_is_not_read_by_the_defaults_alone() -> None:
    for names, _, wanted in NEEDS:
        assert {*names.split()} <= field_types().keys() and wanted
        for key in names.split():
            if not key.startswith("model."):
                section, _, name = key.partition(".")
                assert getattr(sections()[section], name, {}) == value_of(Recipe(), key)
