"""JSON files of run folders and of prepared data that are nested deeply or hold something else."""

import json
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.cluster.restarts import History
from recipes.data.tokens.parts import read_cuts
from recipes.data.tokens.shards import read_index, read_shard
from recipes.plan.calibration import _environment
from recipes.recipe.schema import Recipe, RunConfig
from recipes.training.fork import find_trunk
from recipes.training.same_run import read_data_state
from recipes.weights.description import read_description

DEEP = "[" * 9999
STRANGE = [DEEP, "[]", "null", "5", '"x"', '{"a": 1}', "", "\0", '{"step": {}}']


@pytest.mark.parametrize(
    "text", [*STRANGE, *(json.dumps({"continue_from": "", "checkpoint": path}) for path in (5, "a\0b", "/etc", ""))]
)
def test_a_strange_origin_is_refused_with_what_to_do(text: str, tmp_path: Path) -> None:
    recipe = Recipe(run=RunConfig(name="fork", output=str(tmp_path)))
    recipe.run.folder.mkdir()
    (recipe.run.folder / "origin.json").write_text(text)
    with pytest.raises(UserError, match=r"origin\.json is damaged .*; remove it, or write another run.name"):
        find_trunk(recipe, log=print)


@pytest.mark.parametrize("text", STRANGE)
def test_other_strange_files_are_refused_or_count_as_missing(text: str, tmp_path: Path) -> None:
    for name in ("data.json", "model.json", "environment.json", "parts.json", "index.json", "00000.json", "attempts"):
        (tmp_path / name).write_text(text)
    for read in (read_data_state, read_description, _environment, read_cuts):
        with pytest.raises(UserError):
            read(tmp_path)  # type: ignore[operator]
    assert read_index(tmp_path) is None and read_shard(tmp_path, 0) is None
    said: list[str] = []
    assert History(tmp_path / "attempts", log=said.append).attempts == [] and (len(said) == 1 or text == "[]")


@pytest.mark.parametrize("value", ["many", -1, 1.5, None, [1]])
def test_a_shard_whose_numbers_are_none_does_not_exist(value: object, tmp_path: Path) -> None:
    names = ("train", "validation", "documents", "held_out", "empty", "bad")
    checksums = {"train": "", "validation": "", "documents": ""}
    content = dict.fromkeys(names, 1) | {"lowest": 0.0, "highest": 1.0, "cursor": {}, "last": True}
    for changed, there in ((content, True), (content | {"documents": value}, False)):
        (tmp_path / "00000.json").write_text(json.dumps(changed | {"checksums": checksums}))
        assert (read_shard(tmp_path, 0) is not None) is there
