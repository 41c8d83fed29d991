"""Progress of an evaluation where there is no terminal, and bad rows that are judged early."""

import io
import os
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.evaluation.text import JUDGED_ROWS, CountedDocuments, ProgressLine


def test_without_a_terminal_progress_is_a_plain_line_now_and_then() -> None:
    often, seldom = io.StringIO(), io.StringIO()
    for stream, every in ((often, 0.0), (seldom, 60.0)):
        line = ProgressLine(stream, every=every)
        line.show("1 document")
        line.show("2 documents")
        line.end()
    assert (often.getvalue(), seldom.getvalue()) == ("1 document\n2 documents\n", "")


def test_a_stream_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        line = ProgressLine(broken, every=0.0)
        line.show("1 document")
        line.end()
        with pytest.raises(BrokenPipeError):  # what it holds back is lost with it
            broken.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_a_bad_source_is_refused_before_it_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n' * 20 + "no JSON\n" * (5 * JUDGED_ROWS))
    documents = CountedDocuments(str(path), text_field="text")
    with pytest.raises(UserError, match="9,980 of the first 10,000 rows") as error:
        list(documents)
    assert documents.rows == JUDGED_ROWS and str(error.value).count("line") == 5
