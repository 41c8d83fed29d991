"""Records what a save does to the file system, and does any beginning of it again elsewhere."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
Operation = tuple[str, str, Any]
"""Kind, path, and the bytes written, or the new name."""


@dataclass
class Recorder:
    """Stands between the program and the operating system while it records; may refuse them from the n-th on."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    refuse_at: int | None = None
    error: OSError | None = None
    _paths: dict[int, str] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in NAMES:
                patch.setattr(os, name, self._stand_in(name, getattr(os, name)))
            yield

    def _stand_in(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, dir_fd: int | None = None, **others: Any) -> Any:
            path = self._paths.get(target, "") if isinstance(target, int) else os.fspath(target)
            if dir_fd is not None:
                path = os.path.join(self._paths[dir_fd], path)
                others["dir_fd"] = dir_fd
            path = os.path.relpath(path, self.root) if path else ""
            operation = self._operation(name, path, arguments) if path and not path.startswith("..") else None
            if operation and len(self.operations) == self.refuse_at:  # and so are all that follow
                assert self.error is not None
                raise self.error
            result = original(target, *arguments, **others)
            if operation:
                self.operations.append(operation)
            if name == "open":
                self._paths[result] = os.path.join(self.root, path)
            elif name == "close":
                self._paths.pop(target, None)
            return result

        return call

    def _operation(self, name: str, path: str, arguments: tuple[Any, ...]) -> Operation | None:
        """The operation, if it is one that changes anything."""
        if name == "close" or (name == "open" and not arguments[0] & os.O_CREAT):
            return None
        detail: Any = None
        if name == "write":
            detail = bytes(arguments[0])
        elif name == "rename":
            detail = os.path.relpath(arguments[0], self.root)
        return "create" if name == "open" else name, path, detail


def replay(operations: list[Operation], root: Path, *, durable_only: bool) -> None:
    """Do them again below an empty root.

    durable_only: as if the power failed then, and the disk had every name, but of contents only what was synced.
    """
    waiting: dict[str, list[bytes]] = {}
    for kind, path, detail in operations:
        place = root / path
        if kind == "create":
            assert not place.exists()
            place.touch()
        elif kind == "mkdir":
            place.mkdir()
        elif kind == "write":
            waiting.setdefault(path, []).append(detail)
            if not durable_only:
                _flush(place, waiting.pop(path))
        elif kind == "fsync" and place.is_file():
            _flush(place, waiting.pop(path, []))
        elif kind == "rename":
            place.rename(root / detail)
        elif kind == "unlink":
            place.unlink()
        elif kind == "rmdir":
            place.rmdir()


def _flush(place: Path, pieces: list[bytes]) -> None:
    with place.open("ab") as file:
        file.writelines(pieces)


def torn(operations: list[Operation]) -> Iterator[list[Operation]]:
    """Every beginning of these operations; of a write also its first half alone."""
    for end in range(len(operations) + 1):
        yield operations[:end]
        if end < len(operations) and operations[end][0] == "write":
            kind, path, data = operations[end]
            yield [*operations[:end], (kind, path, data[: len(data) // 2])]
