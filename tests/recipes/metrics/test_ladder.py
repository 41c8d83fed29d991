"""ladder.json as runs and plans read it."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.metrics.ladder import LARGEST, read_ladder
from recipes.recipe.load import CONFIGS, load
from tests.ladders import LAW, write_ladder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(write_ladder(tmp_path / "ladder.json", load(CONFIGS / "smollm3_debug.toml"), {0.5: LAW, 1.0: LAW}))


def edited(file: Path, **changes: Any) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def test_a_prediction_between_two_shares_is_interpolated_and_before_them_none(file: Path) -> None:
    ladder = read_ladder(file)
    found = [ladder.predict(1e6, 1e7, share=share) for share in (0.4, 0.5, 0.75, 1.0)]
    assert found[0] is None and found[1] == found[2] == found[3]


@pytest.mark.parametrize(("key", "value"), [("parameters", 0), ("tokens", -1), ("fits", []), ("recipe", None)])
def test_a_file_with_an_impossible_value_is_refused_by_its_name(file: Path, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"is not a ladder.json of scripts/ladder.py \({key}: "):
        read_ladder(edited(file, **{key: value}))


def test_a_truncated_file_is_refused(file: Path) -> None:
    file.write_text(file.read_text()[:100])
    with pytest.raises(UserError, match=r"is not a ladder.json of scripts/ladder.py \(all of it: Invalid JSON"):
        read_ladder(file)


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=r"ladder.json is not UTF-8 text \(byte 0\); bring it back"):
        read_ladder(file)


def test_fits_out_of_order_or_without_the_end_are_refused(file: Path) -> None:
    fits = json.loads(file.read_text())["fits"]
    for wrong in (fits[::-1], fits[:1]):
        with pytest.raises(UserError, match="has no fits of ascending shares up to 1; write it anew"):
            read_ladder(edited(file, fits=wrong))


def test_a_file_that_is_too_large_or_has_too_many_numbers_is_refused(file: Path) -> None:
    fits = json.loads(file.read_text())["fits"]
    fits[0][1]["residuals"] = [0.01] * 10_001
    with pytest.raises(UserError, match=r"fits.0.1.residuals: Tuple should have at most 10000 items"):
        read_ladder(edited(file, fits=fits))
    with file.open("ab") as more:
        more.truncate(LARGEST + 1)  # a sparse file
    with pytest.raises(UserError, match="cannot be read: it has more than 50,000,000 bytes"):
        read_ladder(file)
