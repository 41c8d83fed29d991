"""What is written to a screen that may be gone or full."""

import pytest

from recipes.files import screen


def test_only_the_first_line_that_cannot_be_written_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def put(number: int, content: bytes, *, patience: float) -> OSError:
        waits.append(patience)
        return OSError("full")

    monkeypatch.setattr(screen, "put", put)
    output = screen.Output()
    for line in (b"one\n", b"two\n", b"three\n"):
        output.put(1, line)
    assert waits == [screen.PATIENCE, 0, 0]
