"""The best checkpoint so far, by a value of its validation that every checkpoint records.

Nothing else remembers it: it is never deleted, so the best of the checkpoints on the disk is the best so far,
whatever was killed, damaged or removed in the meantime. Imports no torch.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.errors import TemporaryError, UserError, listed
from recipes.checkpoint.config import AVERAGE_LOSS, AVERAGED, KEEP_BEST, VALIDATION, Best
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.manifest import Manifest


class BestOf:
    """Finds the best of some checkpoints. Each manifest is read once."""

    def __init__(self, keep_best: str, manifest_of: Callable[[int], Manifest]) -> None:
        """keep_best: a value of checkpoint.keep_best. manifest_of: reads the manifest of a step."""
        self._best, self._manifest_of = Best.named(keep_best), manifest_of
        self._values: dict[int, tuple[float | None, list[int]]] = {}

    def kept(self, steps: Iterable[int]) -> set[int]:
        """The best of these steps, oldest first, and those it is the average of; a damaged one has no value.

        Raises TemporaryError if a manifest cannot be read now: any step may be the best one then.
        """
        steps = list(steps)
        for step in steps:
            if step not in self._values:
                self._values[step] = self._value(step)
        best = self._best.of((step, value) for step in steps if (value := self._values[step][0]) is not None)
        return {best[0], *self._values[best[0]][1]} if best else set()

    def _value(self, step: int) -> tuple[float | None, list[int]]:
        try:
            manifest = self._manifest_of(step)
        except TemporaryError:
            raise
        except UserError:  # damaged
            return None, []
        return _validated(manifest).get(self._best.row), _averaged(manifest, self._best.row)


def best_among(paths: Sequence[Path]) -> tuple[Path, str] | None:
    """The best of these checkpoints, oldest first, by what the run of the newest one keeps, and a remark on it."""
    manifests: dict[Path, Manifest] = {}
    for path in paths:
        with suppress(UserError, OSError):
            manifests[path] = read_manifest(path)
    kept = _progress([*manifests.values()][-1]).get(KEEP_BEST) if manifests else None
    if not isinstance(kept, str):
        return None
    best, values = Best.named(kept), {path: _validated(manifest) for path, manifest in manifests.items()}
    first = best.of((number, row[best.row]) for number, row in enumerate(values.values()) if best.row in row)
    if first is None:
        return None
    path, value = list(manifests)[first[0]], f"best {best.row}: {first[1]:.6g}"
    steps = _averaged(manifests[path], best.row)
    return path, f"{value} of steps {listed(steps)}" if steps else value


def _averaged(manifest: Manifest, row: str) -> list[int]:
    """The steps whose average has the value of this row; none if it is a row of the weights themselves."""
    return _progress(manifest).get(AVERAGED, []) if row.startswith(AVERAGE_LOSS) else []


def _validated(manifest: Manifest) -> dict[str, float]:
    values = _progress(manifest).get(VALIDATION)
    return values if isinstance(values, dict) else {}


def _progress(manifest: Manifest) -> dict[str, Any]:
    progress = manifest.state.get("progress")
    return progress if isinstance(progress, dict) else {}
