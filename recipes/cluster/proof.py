"""What a run's folder says was proved before its first step (run.prove_first). Imports no torch."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.files.atomic import utc_now, write_whole
from recipes.files.layout import PROOF
from recipes.files.reading import fault, names_in, read_text
from recipes.files.version import hash_of_sources, of_package


class Proof:
    """Whether `train.py RECIPE --prove` has succeeded with this code and recipe on the nodes of a run."""

    def __init__(self, folder: Path, recipe: str) -> None:
        """folder: of the run. recipe: the resolved one."""
        self._folder, versions = folder, {name: of_package(name) for name in ("torch", "triton", "torchao")}
        self._facts: dict[str, Any] = {"sources": hash_of_sources(), "versions": versions}
        self._facts["recipe"] = hashlib.sha256(recipe.encode()).hexdigest()[:8]

    def is_missing(self, nodes: Sequence[str], *, per_node: str) -> bool:
        """Whether the folder knows no proof by so many processes on each of these nodes. Raises UserError."""
        self._facts |= {"processes_per_node": per_node, "nodes": sorted(nodes)}
        return self._facts not in self._known().values()

    def note(self) -> None:
        """Note the proof that was missing. Raises UserError."""
        proofs = [*self._known().items(), (utc_now(), self._facts)][-20:]  # a job may return to nodes that it had
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / PROOF, json.dumps(dict(proofs), indent=1))
        except OSError as error:
            raise fault(f"{self._folder / PROOF} cannot be written", error) from None

    def _known(self) -> dict[str, Any]:
        """Time -> what was proved then. Empty if the file was changed: that costs only another proof."""
        try:
            return dict(json.loads(read_text(self._folder / PROOF)) if PROOF in names_in(self._folder) else {})
        except (ValueError, TypeError, RecursionError):
            return {}
