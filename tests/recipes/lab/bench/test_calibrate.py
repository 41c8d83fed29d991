"""What of the calibration of a CPU is refused before anything is measured."""

from pathlib import Path

import pytest

from recipes.lab.bench.calibrate import main


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--processes", "0"], "--processes 0: must be whole numbers"),
        (["--processes", "1,x"], "--processes 1,x: must be whole numbers"),
        (["--write", "/nowhere/cpu.json"], "--write /nowhere/cpu.json: cannot be written"),
    ],
)
def test_bad_option_is_refused_before_anything_is_measured(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--write", str(tmp_path / "cpu.json"), *words]) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
