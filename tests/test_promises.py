"""Checks tests/README.md: its tests exist, its promises are those of docs/reliability.md, and no file is left out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"


def rows_by_section(page: Path) -> dict[str, list[list[str]]]:
    """Heading of a section -> the cells of each row of its tables, without their heads."""
    sections: dict[str, list[list[str]]] = {}
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            rows = sections.setdefault(line.removeprefix("## "), [])
        elif line.startswith("| ") and not line.startswith("| promise |"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return sections


TABLE = rows_by_section(TESTS / "README.md")


def named_tests() -> dict[str, set[str]]:
    """File, relative to tests/ -> the tests of it that the table names."""
    named: dict[str, set[str]] = {}
    for _, tests in (row for rows in TABLE.values() for row in rows):
        file = ""
        for test in tests.split(", "):
            parts = re.fullmatch(r"`([\w/]+\.py)?::(test_\w+)`", test)
            assert parts, f"{test}: write `FILE::NAME`, or `::NAME` for another test of the same file"
            file = parts[1] or file
            assert file, f"{test}: the first test of a row names its file"
            named.setdefault(file, set()).add(parts[2])
    return named


def functions_of(file: Path) -> set[str]:
    """The names of the test functions at module level and in classes."""
    body = ast.parse(file.read_text()).body
    inside = [node for found in body if isinstance(found, ast.ClassDef) for node in found.body]
    return {node.name for node in (*body, *inside) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_table_names_exists() -> None:
    missing = []
    for file, names in named_tests().items():
        path = TESTS / file
        missing += [f"{file}::{name}" for name in sorted(names - (functions_of(path) if path.is_file() else set()))]
    assert not missing


def promises() -> dict[str, list[str]]:
    """Section of docs/reliability.md -> the promises of its table, in their order."""
    page = rows_by_section(ROOT / "docs/reliability.md")
    return {section: [row[0] for row in rows if row[0]] for section, rows in page.items()}


@pytest.mark.parametrize("section", promises())
def test_the_table_has_every_promise_of_the_page_about_reliability(section: str) -> None:
    expected = promises()[section]
    assert expected
    assert [promise for promise, _ in TABLE.get(section, []) if promise] == expected


def test_every_file_of_tests_holds_a_promise() -> None:
    files = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")} - {Path(__file__).name}
    assert sorted(files - named_tests().keys()) == []
