"""loss/NAME and tokens/NAME of a mixture: on any mesh those of one process; together, the columns that they divide."""

from pathlib import Path
from typing import Any

import pytest

from recipes.data.history import epoch_lines
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.check import _epochs
from tests.processes import run_processes
from tests.recipes.data.texts import shards_in, work_on, write_rows
from tests.training import DEBUG, change, rows, run_all

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"pipeline": {"pipeline": 2}, "gather": {"context": 2, "context_by": "gather"}},
    4: {"tensor": {"shard": 2, "tensor": 2}, "context": {"replicate": 2, "context": 2}},
}
STEPS = 3


@pytest.fixture(scope="module")
def found(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Mesh -> its rows with a loss; "" is one process, "chunks" and "micro" are other ways to compute the same."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("web", "code"):
        write_rows(folder / f"{name}.jsonl", 60, name=name)
    recipe = change(
        small,
        run={"steps": STEPS},
        data={
            "mixture": {str(folder / "web.jsonl"): 0.7, str(folder / "code.jsonl"): 0.3},
            "source": "python-stdlib",
            "tokenizer": "train:300",
            "document_mask": True,
            "validation_fraction": 0.05,
        },
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        checkpoint={"every": 0},
    )
    alone = {"": {}, "chunks": {"batch": {"loss_chunks": 3}}, "off": {"metrics": {"by_source": False}}}
    recipes = {name: change(recipe, run={"name": f"sources {name}"}, **changes) for name, changes in alone.items()}
    assert run_all([*recipes.values()]) == [0] * 3
    for processes, meshes in MESHES.items():
        mine = {name: change(recipe, run={"name": f"sources {name}"}, mesh=mesh) for name, mesh in meshes.items()}
        assert run_processes(processes, run_all, [*mine.values()]) == [[0] * len(mine)] * processes
        recipes |= mine
    return {name: [row for row in rows(one) if "loss" in row] for name, one in recipes.items()}


def of_sources(row: dict[str, Any], kind: str) -> dict[str, Any]:
    return {Path(key).stem: value for key, value in row.items() if key.startswith(f"{kind}/")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks", *(name for meshes in MESHES.values() for name in meshes)])
def test_a_mesh_writes_the_losses_of_sources_of_one_process(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    assert len(found[name]) == STEPS
    for row, alone in zip(found[name], found[""], strict=True):
        assert of_sources(alone, "loss").keys() == {"web", "code"}
        assert of_sources(row, "loss") == pytest.approx(of_sources(alone, "loss"), rel=1e-5)
        assert of_sources(row, "tokens") == of_sources(alone, "tokens")
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.slow
def test_sources_add_up_to_the_columns_that_they_divide(found: dict[str, list[dict[str, Any]]]) -> None:
    for row in found[""]:
        assert sum(of_sources(row, "tokens").values()) == row["tokens"]
        losses = of_sources(row, "loss").values()
        assert min(losses) < row["loss"] < max(losses)


@pytest.mark.slow
def test_without_the_field_there_are_no_columns_and_the_same_losses(found: dict[str, list[dict[str, Any]]]) -> None:
    assert not any(key.startswith(("loss/", "tokens/")) for row in found["off"] for key in row)
    assert [row["loss"] for row in found["off"]] == [row["loss"] for row in found[""]]


def test_a_source_that_is_read_more_than_four_times_is_warned_of() -> None:
    lines = [*epoch_lines({"web": 0.42, "code": 4.2, "later": None}, by="step 9")]
    assert lines[0] == "reads 'web' 0.4 times and 'code' 4.2 times by step 9"
    assert len(lines) == 2 and lines[1].startswith("WARNING: 'code' is read 4.2 times")
    assert [*epoch_lines({"later": None}, by="step 9")] == []


def test_a_check_says_how_often_prepared_sources_are_read_over_all_stages(tmp_path: Path) -> None:
    write_rows(tmp_path / "web.jsonl", 100)
    work = work_on(tmp_path / "web.jsonl")
    tokens = sum(shard.train for shard in shards_in(tmp_path / "web", work))
    text = f"""base = "{DEBUG}"
batch = {{ sequence_length = 32, global_batch_size = 4, micro_batch_size = 1 }}
data.mixture = {{ "{tmp_path / "web"}" = 3, "python-stdlib/json" = 1 }}
[[stages]]
name = "a"
until = 40
[[stages]]
name = "b"
until = 50
batch.global_batch_size = 8
"""
    (tmp_path / "recipe.toml").write_text(text)
    line, *_ = _epochs(load(tmp_path / "recipe.toml", ["--run.steps", "50"], rules=False))
    times = (40 * 4 + 10 * 8) * 32 * 0.75 / tokens
    assert line == f"reads '{tmp_path / 'web'}' {times:.1f} times by step 50"
