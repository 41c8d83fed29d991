"""The text that a run validates on: the held-out documents of its training sources, or sources of their own.

It is read once, in an order with a fixed seed: a few batches are a fair sample, and every run has the same one.
Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.data.order import SequenceOrder
from recipes.data.sequences import OTHERWISE, Source, require_documents, require_sequence
from recipes.data.text.sources import find_files, is_hub, is_prepared, is_token_files
from recipes.data.tokens.shards import TRAIN, VALIDATION, Shards

FEW = 8
"""Files of a source of held-out text that are mapped at a time."""


def held_out(training: Sequence[Source], *, fraction: float, pairs: bool = False) -> list[Source]:
    """The held-out text of the shards that the first window of each source needs: of all shards if it has no window.
    fraction: data.validation_fraction. pairs: a single one is enough. Raises UserError if a source has too little."""
    sources = []
    for source in training:
        require_documents(source, fraction=fraction, held_out=True)
        sources.append(_read_once(source, VALIDATION))
        more = "raise data.validation_fraction (prepared text: prepare it again with more)"
        if not pairs:
            require_sequence(sources[-1], what="the held-out text", more=more + OTHERWISE)
    return sources


def whole_text(source: Source, *, pairs: bool = False) -> Source:
    """All documents in the shards that the first window of a validation source needs. pairs: a single one is enough.
    Raises UserError if it has too little text."""
    require_documents(source, fraction=0, held_out=False, setting="validation.source")
    found = _read_once(source, TRAIN)
    if not pairs:
        require_sequence(found, what="the validation text", more="give more text")
    return found


def _read_once(source: Source, kind: str) -> Source:
    shards = source.shards
    if not is_token_files(source.name):
        shards = Shards(shards.folder, kind, only=source.first_shards, maps=FEW)
    return Source(source.name, shards, SequenceOrder(source.order.sequence_length, 0, None), read_once=True)


def warn_of_overlap(
    source: str, entry: Mapping[str, Any], training: Mapping[str, Mapping[str, Any]], *, log: Callable[[str], None]
) -> None:
    """Log a warning if the validation source is the text of a training source, or shares a file with it, as far as
    names say. entry, training: their entries in Data.data_state."""

    def files(name: str) -> set[str]:
        if is_hub(name) or is_prepared(name):
            return {name}
        return {str(file.resolve() if isinstance(file, Path) else file) for file in find_files(name)}

    own = files(source)
    if any(entry["text"] == other["text"] or own & files(name) for name, other in training.items()):
        log(f"WARNING: the run also trains on the validation source {source!r}; its loss says little")
