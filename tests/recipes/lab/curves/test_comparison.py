"""The table of several runs: their last numbers, and what differs between their recipes."""

from pathlib import Path
from typing import Any

from recipes.lab.curves.reading import read_runs
from recipes.lab.curves.report import aligned, comparison
from recipes.lab.curves.style import shortened
from tests.recipes.lab.curves.runs import row, run_folder

SAME: dict[str, Any] = {"model": {"name": "llama3_debug"}, "optimizer": {"lr": 0.003}}


def rows(*folders: Path) -> dict[str, list[str]]:
    return {title: cells for title, *cells in comparison(read_runs(list(folders)))}


def test_last_numbers_and_nothing_but_differing_values_are_compared(tmp_path: Path) -> None:
    first = run_folder(
        tmp_path / "a",
        *(row(step, goodput=0.5) for step in range(1, 101)),
        {"step": 100, "validation_loss/web": 2.0},
        recipe={**SAME, "run": {"name": "a", "output": "x", "seed": 1}, "data": {"source": "web"}},
    )
    second = run_folder(
        tmp_path / "b",
        *(row(step, loss=3.0, tokens_per_second=20.0 * step) for step in range(1, 12)),
        recipe={**SAME, "run": {"name": "b", "output": "y", "seed": 1}, "data": {"source": "books"}},
    )
    found = rows(first, second)
    assert found[""] == ["a", "b"] and found["steps"] == ["100", "11"] and found["tokens"] == ["100,000", "11,000"]
    late = [8.0 / (1 + step / 50) for step in range(91, 101)]
    assert found["loss, last tenth"] == [f"{sum(late) / 10:.4f}", "3.0000"]
    assert found["validation loss/web"] == ["2.0000", "-"]
    assert found["tokens/s"] == ["500", "120"]
    assert found["goodput"] == ["50.0%", "-"]
    assert found["data.source"] == ['"web"', '"books"']
    assert not {"run.name", "run.output", "run.seed", "model.name", "MFU"} & set(found)


def test_what_an_older_version_did_not_write_has_its_default(tmp_path: Path) -> None:
    old = run_folder(tmp_path / "old", row(1), recipe=SAME)
    new = run_folder(tmp_path / "new", row(1), recipe={**SAME, "fsdp": {"reduce_dtype": "float32"}, "own": {"x": 1}})
    other = run_folder(tmp_path / "other", row(1), recipe={**SAME, "fsdp": {"reduce_dtype": "bfloat16"}})
    found = rows(old, new, other, run_folder(tmp_path / "none", row(1)))
    assert found["fsdp.reduce_dtype"] == ['"float32"', '"float32"', '"bfloat16"', "-"]
    assert "optimizer.lr" not in found


def test_values_that_one_run_alone_has_differ_and_stages_do_by_their_number(tmp_path: Path) -> None:
    one, other, none = (
        run_folder(tmp_path / name, row(1), recipe={"own": {name: 1}} | ({"stages": stages} if stages else {}))
        for name, stages in (
            ("a", [{"name": "s", "until": 5}, {"name": "t", "optimizer": {"lr": 0.1}}]),
            ("b", [{"name": "s", "until": 5}, {"name": "t", "optimizer": {"lr": 0.2}}]),
            ("c", None),
        )
    )
    found = rows(one, other)
    assert found["stages.2.optimizer.lr"] == ["0.1", "0.2"] and "stages.1.until" not in found
    found = rows(one, none)
    assert found["stages.1.until"] == ["5", "-"] and found["stages.2.optimizer.lr"] == ["0.1", "-"]
    assert found["own.a"] == ["1", "-"] and found["own.c"] == ["-", "1"]


def test_many_runs_have_a_line_each(tmp_path: Path) -> None:
    table = comparison(read_runs([run_folder(tmp_path / name, row(1)) for name in "abcdefgh"]))
    assert [line[0] for line in table] == ["", *"abcdefgh"] and table[0][1] == "steps"


def test_the_cells_of_a_table_stand_below_each_other() -> None:
    assert aligned([["", "one"], ["steps", "2"]]) == "       one\nsteps  2"
    assert (
        shortened("a" * 30 + "b" * 30, 11) == "aaaaa\N{HORIZONTAL ELLIPSIS}bbbbb" and shortened("short", 5) == "short"
    )
