"""The comparison of families with plain transformers, and its table in docs/models.md."""

import re

import pytest

from recipes.lab.bench.marks import between
from tests.models.family_configs import FAMILIES, REFUSED, SUPPORTED
from tests.models.family_table import BEGIN, END, PAGE, measure, table


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mistral, sliding window", "BART"])
def test_a_family_trains_as_in_transformers(family: str) -> None:
    row = measure(family, compiles=False)
    assert row["folder"] == "same bytes"
    assert 0 < row["gradients"] < 1e-4
    assert all(row[column] < 1e-5 for column in ("losses", "selective", "full"))
    assert row["documents"] == "padded" or row["documents"] < 1e-6


@pytest.mark.parametrize(
    ("family", "message"),
    [("Mixtral", "mixtures of experts"), ("Mamba", "recurrent state"), ("BERT", "see later tokens")],
)
def test_a_family_that_breaks_an_assumption_is_refused_with_the_reason(family: str, message: str) -> None:
    assert message in measure(family, compiles=False)["refused"]


def test_the_page_has_a_row_for_every_family_and_no_defect() -> None:
    part = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    trained, refused = part.split("| refused | why |")
    assert set(re.findall(r"^\| ([^|]+) \|", trained, re.MULTILINE)) == {"family", *SUPPORTED}
    assert set(re.findall(r"^\| ([^|]+) \|", refused, re.MULTILINE)) == set(REFUSED)
    assert "differs" not in trained and not re.search(r"e-0[1-5]\b|e\+", trained)


@pytest.mark.exhaustive
def test_every_family_is_as_expected_and_the_page_is_written() -> None:
    rows = {family: measure(family, compiles=True) for family in FAMILIES}
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table(rows)), encoding="utf-8")
    assert [family for family, row in rows.items() if "refused" not in row] == [*SUPPORTED]


def test_a_table_says_what_is_refused_apart() -> None:
    rows = {"A": {"layers": "2", "losses": 1.2e-7}, "Llama": {"path": "ours"}, "B": {"refused": "why"}}
    text = table(rows)
    assert "| A | 2 |" in text and "| 1e-07 |" in text and "| ours |" in text
    assert text.rstrip().endswith("| B | why |")
    assert SUPPORTED.keys() | REFUSED.keys() == FAMILIES.keys()
