"""The comparison of families with plain transformers, and its lists in docs/models.md."""

import re

import pytest

from recipes.files.markdown import between
from tests.models.family_configs import FAMILIES, REFUSED, SUPPORTED
from tests.models.family_table import BEGIN, END, PAGE, REFUSALS, lists, measure


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma 2", "BART"])
def test_a_family_trains_as_in_transformers(family: str) -> None:
    row = measure(family, compiles=False)
    assert row["folder"] == "same bytes"
    assert 0 < row["gradients"] < 1e-4
    assert all(row[column] < 1e-5 for column in ("losses", "selective", "full"))
    assert row["documents"] == "padded" or row["documents"] < 1e-6


@pytest.mark.parametrize(
    ("family", "message"),
    [("Switch Transformers", "mixtures of experts"), ("Mamba", "recurrent state"), ("BERT", "see later tokens")],
)
def test_a_family_that_breaks_an_assumption_is_refused_with_the_reason(family: str, message: str) -> None:
    assert message in measure(family, compiles=False)["refused"]


def test_the_page_has_every_family_and_no_defect() -> None:
    part = " ".join(PAGE.read_text().partition(BEGIN)[2].partition(END)[0].split())
    trained, refused = part.split(REFUSALS)
    names = {
        name for line in re.findall(r"- (?:Dec|Enc|By)[^:]*: ([^:]*?)(?= -|$)", trained) for name in line.split("; ")
    }
    assert names == {*SUPPORTED}
    assert {name for line in re.findall(r"- ([^:]*):", refused) for name in line.split("; ")} == {*REFUSED}
    assert "differ:" not in trained and not re.search(r"e-0[1-5]\b|e\+", trained)


@pytest.mark.exhaustive
def test_every_family_is_as_expected_and_the_page_is_written() -> None:
    rows = {family: measure(family, compiles=True) for family in FAMILIES}
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), BEGIN, END, lists(rows)), encoding="utf-8")
    assert [family for family, row in rows.items() if "refused" not in row] == [*SUPPORTED]


def test_the_lists_have_the_largest_difference_and_every_reason() -> None:
    rows = {
        "A": {"losses": 1.2e-7, "documents": 0.0, "folder": "same bytes"},
        "B": {"losses": 3e-7, "documents": "refused", "folder": "differs"},
        "Llama": {"path": "ours"},
        "C": {"refused": "experts = 4: why"},
        "D": {"refused": "experts = 8: why"},
    }
    text = lists(rows)
    assert "`data.document_mask`: A\n" in text and "without it: B\n" in text and "decoder.py`: Llama\n" in text
    assert "10 losses 3e-07" in text and "folders that differ: B\n" in text and "\n- C; D: why\n" in text
    assert SUPPORTED.keys() | REFUSED.keys() == FAMILIES.keys()
