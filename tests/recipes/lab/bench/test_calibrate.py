"""What is made of the chain: predictions before runs, and how good they were."""

import json
from pathlib import Path

import pytest

from recipes.lab.bench import calibrate
from recipes.lab.bench.calibrate import VARIANTS, Compared, main, misordered, predicted_seconds, table
from tests.host_record import record

pytestmark = pytest.mark.slow


def test_ten_runs_cover_every_number_of_processes_and_every_kind_of_step(tmp_path: Path) -> None:
    rows = [calibrate._row(name, tmp_path, steps=9) for name in VARIANTS]
    assert len(rows) == 10 and {row.processes for row in rows} == {1, 2, 4}
    assert {row.recipe.activation_checkpointing.mode for row in rows} == {"none", "selective", "full"}
    assert {row.recipe.compile.enabled for row in rows} == {row.recipe.fsdp.reshard_after_forward for row in rows}
    assert {row.recipe.model.name for row in rows} == {"smollm3_debug", "llama3_debug"}


def test_recomputing_and_less_compiling_are_predicted_to_take_longer(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(record()))
    names = ("smollm3_wide_2_compiled_zero2", "smollm3_wide_2_selective")
    fast, slow = (predicted_seconds(calibrate._row(name, tmp_path, 9).recipe, 2, file) for name in names)
    assert fast < slow


def test_table_says_the_median_error_and_names_pairs_in_the_wrong_order() -> None:
    names = ("smollm3", "llama3_wide", "llama3_2")
    found = [
        Compared(name, *seconds) for name, seconds in zip(names, ((1.0, 1.1), (1.3, 1.0), (2.0, 2.0)), strict=True)
    ]
    assert misordered(found) == ([], 2)  # 1.1 and 1.0 differ by no more than 10%
    assert misordered([Compared("a", 1.0, 1.2), Compared("b", 1.3, 1.0)]) == ([("a", "b")], 1)
    lines = list(table(found))
    assert lines[2].startswith("| smollm3 | 1 | 1.000 | 1.100 | -9.1% |")
    assert any("absolute errors 9.1%" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--processes", "0"], "--processes 0: must be whole numbers"),
        (["--processes", "1,x"], "--processes 1,x: must be whole numbers"),
        (["--processes", "1", "--chain"], "the chain also needs 2, 4"),
        (["--chain", "--steps", "3"], "--steps 3: must be 7 or more"),
        (["--write", "/nowhere/cpu.json"], "--write /nowhere/cpu.json: cannot be written"),
    ],
)
def test_bad_option_is_refused_before_anything_is_measured(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--write", str(tmp_path / "cpu.json"), *words]) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
