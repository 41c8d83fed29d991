"""Work on a checkpoint that all processes share, with one error for all if any of them fails."""

import os
from collections.abc import Callable
from functools import partial
from operator import add
from pathlib import Path
from typing import Any, TypeVar, cast

from parallel.dist import World, on_all, on_main
from parallel.errors import TemporaryError, UserError
from parallel.messages import Channel, Messages
from recipes.checkpoint.files import check_files
from recipes.checkpoint.folder import check, reason, require_shard
from recipes.checkpoint.manifest import MANIFEST, Damage, Manifest, Missing

KINDS = (UserError, TemporaryError, Damage)
"""What all processes raise: the first of the kinds that any of them has met."""

Result = TypeVar("Result")


class Together:
    """All processes, which call the same methods in the same order. What they send is merged on its way to rank 0."""

    def __init__(self, channel: Channel, *, parts: int = 1) -> None:
        """parts: of the model, which as many equal rows of neighbouring ranks hold."""
        self._messages = Messages(channel)
        self.rank, self.size = self._messages.rank, self._messages.size
        self.is_main = self.rank == 0
        of_part = self.size // parts
        first = self.rank // of_part * of_part
        self.speaks = self.rank == first
        """Whether this process tells the others of its part."""
        self.ranks = (first, first + of_part) if parts > 1 else None
        """The first rank of its part, and one past the last; None if there is one part."""

    def on_all(self, work: Callable[[], Result], *, merge: Callable[[Any, Any], Any] | None = None) -> Result:
        """Run this on every process; it must not communicate. Returns all results merged on rank 0, else this one's.

        If one process raises, all do. Damage, which an older checkpoint would avoid, only if there is no other error.
        merge: without it, rank 0 returns its own result.
        """
        result: Any = None
        mine = (len(KINDS), self.rank, "")
        cause: Exception | None = None
        try:
            result = work()
        except UserError as error:
            kind = next((index for index, kind in enumerate(KINDS) if index and isinstance(error, kind)), 0)
            mine = kind, self.rank, str(error)
        except Exception as error:  # a bug, or out of memory
            mine, cause = (0, self.rank, reason(error)), error
        merged = self._messages.reduce((mine, result if merge else None), partial(_merged, merge))
        kind, _, text = self.from_main(merged[0])
        if text:
            raise KINDS[kind](text) from cause
        return cast(Result, merged[1] if merge and self.is_main else result)

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Run this on rank 0. Returns its result on every process, or raises its error there."""
        return self.from_main(cast(Result, self.on_all(lambda: work() if self.is_main else None)))

    def of_parts(self, work: Callable[[], Result]) -> list[Result]:
        """What this returns for each part of the model, on every process: that of rank 0 first. It raises as on_all()
        does, and sends nothing if there is one part."""
        if self.ranks is None:
            return [work()]
        return self.from_main(self.on_all(lambda: [work()] if self.speaks else [], merge=add))

    def from_main(self, value: Result) -> Result:
        """The value that rank 0 has, on every process."""
        return self._messages.from_main(value)


def _merged(merge: Callable[[Any, Any], Any] | None, one: Any, other: Any) -> Any:
    """Two processes' (problem, result): the gravest problem, and both results where none has one."""
    problem = min(one[0], other[0])
    return problem, merge(one[1], other[1]) if merge and not problem[2] else None


def require_shards(path: Path, manifest: Manifest, processes: Together) -> None:
    """Check the sizes of all shards, each on one process. Raises Damage on all, or TemporaryError if process 0 does see
    what another does not."""

    def look() -> list[tuple[str, str]]:
        missing = []
        for name in list(manifest.shards.values())[processes.rank :: processes.size]:
            try:
                check_files(path, manifest, [name])
            except Missing as error:
                missing.append((name, str(unseen(str(error), processes.rank))))
        return missing[:1]

    def look_again() -> None:
        for name, problem in missing:
            check_files(path, manifest, [name])
            raise TemporaryError(problem)

    missing = processes.on_all(look, merge=lambda one, other: [*one, *other][:1])
    processes.on_main(look_again)


def wait_for_small_files(path: Path, world: World) -> None:
    """Check the small files of a checkpoint on process 0, then wait until every process sees them. Raises, on all,
    TemporaryError if one is damaged, or if a process does not see it in time."""

    def sizes() -> dict[str, int]:
        try:
            manifest = check(path.parent, int(path.name.removeprefix("step-")), most=0)
        except Damage as damage:
            raise TemporaryError(f"{damage}; the same command resumes from an older checkpoint") from None
        files = {name: file.bytes for name, file in manifest.files.items() if not file.header_bytes}
        return files | {MANIFEST: os.stat(path / MANIFEST).st_size}

    def wait() -> None:
        for name, size in expected.items():
            try:
                require_shard(path, name, size)
            except UserError:
                raise unseen(f"{path / name} is missing", world.rank) from None

    expected = on_main(world, sizes)
    on_all(world, wait)


def unseen(problem: str, rank: int) -> TemporaryError:
    """The error of a process that does not see a file that another one sees."""
    return TemporaryError(
        f"{problem} for process {rank}, while another one sees it whole: run.output must be a folder that all nodes"
        " share"
    )
