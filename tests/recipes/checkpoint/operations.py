"""Records what a save does to the file system, and replays any number of the first operations elsewhere."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
Operation = tuple[str, str, Any]
"""Kind, path, and the bytes written or the new name."""


@dataclass
class Recorder:
    """Records the program's calls of the operating system; may refuse all from the n-th on."""

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
            if operation and len(self.operations) == self.refuse_at:  # this one and all that follow
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
        """The operation, if it changes anything."""
        if name == "close" or (name == "open" and not arguments[0] & os.O_CREAT):
            return None
        detail: Any = None
        if name == "write":
            detail = bytes(arguments[0])
        elif name == "rename":
            detail = os.path.relpath(arguments[0], self.root)
        return "create" if name == "open" else name, path, detail


def replay(operations: list[Operation], root: Path, *, durable_only: bool) -> None:
    """Replay operations below an empty root.

    durable_only: as if the power failed then, and the disk kept every name, but only the contents that were synced.
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


@dataclass
class Names:
    """What a disk may keep after a power cut: the contents that were synced, and at least the names that were synced.

    Every creation, renaming and deletion is pending until its folder is synced. Before that it may reach the disk or
    not, independently of those before and after it. (Renaming from one folder into another would be two changes; no
    save does that.)
    """

    changes: list[tuple[int, dict[str, int | None]]] = field(default_factory=list)
    """Changes not yet synced: a folder, and name -> number of what the name means afterwards."""
    _folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    """As programs see them. Every file and folder has a number; the root has 0."""
    _durable: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    _contents: dict[int, bytes] = field(default_factory=dict)
    _durable_contents: dict[int, bytes] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        """Replay the next operation."""
        kind, path, detail = operation
        if kind == "fsync" and (number := self._find(path)) in self._folders:
            for folder, change in self.changes:
                if folder == number:
                    _change(self._durable[number], change)
            self.changes = [change for change in self.changes if change[0] != number]
        elif kind == "fsync":
            self._durable_contents[number] = self._contents[number]
        elif kind == "write":
            self._contents[self._find(path)] += detail
        else:
            parent, name = self._find(os.path.dirname(path)), os.path.basename(path)
            change: dict[str, int | None] = {name: None}
            if kind == "rename":
                assert os.path.dirname(path) == os.path.dirname(detail)
                change[os.path.basename(detail)] = self._find(path)
            elif kind in ("create", "mkdir"):
                change[name] = number = len(self._folders) + len(self._contents)
                if kind == "mkdir":
                    self._folders[number], self._durable[number] = {}, {}
                else:
                    self._contents[number] = self._durable_contents[number] = b""
            _change(self._folders[parent], change)
            self.changes.append((parent, change))

    def write(self, root: Path, kept: set[int]) -> None:
        """Write what the disk has if these pending changes, by index, reached it."""
        folders = {number: dict(names) for number, names in self._durable.items()}
        for place in sorted(kept):
            folder, change = self.changes[place]
            _change(folders[folder], change)

        def make(number: int, path: Path) -> None:
            if number in folders:
                path.mkdir()
                for name, inside in folders[number].items():
                    make(inside, path / name)
            else:
                path.write_bytes(self._durable_contents[number])

        make(0, root)

    def _find(self, path: str) -> int:
        number = 0
        for name in Path(path).parts:
            number = self._folders[number][name]
        return number


def _change(folder: dict[str, int], change: dict[str, int | None]) -> None:
    for name, number in change.items():
        folder.pop(name, None)
        if number is not None:
            folder[name] = number


def _flush(place: Path, pieces: list[bytes]) -> None:
    with place.open("ab") as file:
        file.writelines(pieces)


def torn(operations: list[Operation]) -> Iterator[list[Operation]]:
    """Every prefix of these operations; after a prefix that ends before a write, also one with half of that write."""
    for end in range(len(operations) + 1):
        yield operations[:end]
        if end < len(operations) and operations[end][0] == "write":
            kind, path, data = operations[end]
            yield [*operations[:end], (kind, path, data[: len(data) // 2])]
