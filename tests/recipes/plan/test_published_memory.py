"""The predicted memory of other programs' runs, beside what they published."""

from tests.published.errors import PAGE
from tests.published.memory import GOAL, memory_table, peak_of, rows_with_memory
from tests.published.rows import read_published

PUBLISHED = read_published()
ROWS, PIPELINES = rows_with_memory(PUBLISHED)


def test_every_row_without_pipeline_stages_is_stated() -> None:
    assert (len(ROWS), PIPELINES) == (22, 6)


def test_compiled_rows_of_fsdp_alone_with_a_known_loss_are_within_the_goal() -> None:
    found = {row.name: row.error for row in ROWS if row.counts and row.degrees.tensor == 1}
    assert len(found) == 7 and not {name: error for name, error in found.items() if abs(error) > GOAL}


def test_half_of_all_rows_are_within_a_fiftieth() -> None:
    assert 2 * sum(abs(row.error) <= 0.02 for row in ROWS) >= len(ROWS)


def test_a_plan_for_more_gpus_needs_less() -> None:
    rows = [row for row in ROWS if row.name.startswith("KempnerForge: llama3_8b") and row.degrees.tensor == 4]
    peaks = [peak_of(row) for row in sorted(rows, key=lambda row: row.degrees.shard)[1:]]
    assert len(peaks) == 3 and peaks == sorted(peaks, reverse=True)


def test_the_table_of_the_page_is_up_to_date() -> None:
    lines = memory_table(PUBLISHED, least=GOAL)
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "run python -m tests.published.errors --write"
