"""The record of the gpu suite: what is continued, what is refused, and the memory that kernels are measured in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from tests.gpu import kernels, suite

FACTS = {
    **{"device": "NVIDIA H200", "python": "3.12", "cuda": "13.0", "packages": {"torch": "2.11.0"}},
    **{"git_commit": "abc", "git_uncommitted_changes": False},
}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"environment": {}}', '{"environment": {}, "rows": 1}'])
def test_a_file_that_is_no_record_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(UserError, match="is not a record that can be continued; move it away, or write another"):
        suite.open_record(file, FACTS)
    assert file.read_text() == text


def test_a_record_of_other_code_or_versions_is_refused_by_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    old = suite.open_record(file, FACTS) | {"rows": {"loss": {"outcome": "done"}}}
    file.write_text(json.dumps(old))
    assert suite.open_record(file, FACTS | {"host": "another"}) == old | {"environment": FACTS | {"host": "another"}}
    file.write_text(json.dumps(old | {"code": "other"}))
    with pytest.raises(
        UserError, match=r"has 1 rows of another state; different: cuda \(13.0 there\), the code \(commit"
    ):
        suite.open_record(file, FACTS | {"cuda": "12.9"})


def test_a_write_that_fails_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpu.json"
    file.write_text("before")

    def full(*words: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left on device; free space, or"), suite._saved(file, {"rows": {}}):
        pass
    assert file.read_text() == "before"


def test_kernels_are_measured_with_the_memory_allocator_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "let_segments_grow", lambda: done.append("segments grow"))
    monkeypatch.setattr(kernels, "measurements", lambda group, at: iter([{"group": group, "done": list(done)}]))
    kernels.main(["--group", "products", "--out", str(tmp_path / "rows")])
    assert json.loads((tmp_path / "rows").read_text()) == {"group": "products", "done": ["segments grow"]}
