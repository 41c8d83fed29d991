"""The text that a run validates on: the held-out documents of its training sources, or sources of their own.

It is read once, in an order with a fixed seed: a few batches are a fair sample, and every run has the same one.
Imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Source
from recipes.data.text.sources import find_files, is_hub, is_prepared
from recipes.data.tokens.shards import TRAIN, VALIDATION, Shards

OTHERWISE = (
    '; or validate on another text ([validation] source = "FILE"), or not at all (validation.every = 0 and'
    " validation.sample_tokens = 0)"
)

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
    shards = Shards(source.shards.folder, kind, only=source.first_shards, maps=FEW)
    return Source(source.name, shards, SequenceOrder(source.order.sequence_length, 0, None), read_once=True)


def also_trained_on(source: str, entry: Mapping[str, Any], training: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the validation source is the text of a training source, or shares a file with it, as far as names say.
    entry, training: their entries in Data.data_state."""

    def files(name: str) -> set[str]:
        if is_hub(name) or is_prepared(name):
            return {name}
        return {str(file.resolve() if isinstance(file, Path) else file) for file in find_files(name)}

    own = files(source)
    return any(entry["text"] == other["text"] or own & files(name) for name, other in training.items())


def require_documents(source: Source, *, fraction: float, held_out: bool, setting: str = "data.source") -> None:
    """Raises UserError if the first window has no document to read. fraction: data.validation_fraction. held_out:
    whether held-out documents are needed too. setting: names the source in the recipe."""
    shards = source.first_shards
    documents, held = sum(shard.documents for shard in shards), sum(shard.held_out for shard in shards)
    if documents + held == 0:
        raise UserError(f"{setting}: {source.name!r} holds no text: every document is empty; give another source")
    if documents and (held or not held_out):
        return
    lowest, highest = min(shard.lowest for shard in shards), max(shard.highest for shard in shards)
    problem = f"data.validation_fraction: of the {documents + held} documents of {source.name!r} "
    if not documents:
        bound = f"{int(highest * 1e4) / 1e4:.4f} or less" if lowest < highest else "0"
        raise UserError(f"{problem}all would be held out with {fraction}; {_write(source, bound)}, or give more text")
    if lowest == highest:
        problem += "no two are different, so none can be held out; give more text"
    else:
        bound = f"{int(lowest * 1e4 + 1) / 1e4:.4f} or more"
        problem += f"none would be held out with {fraction}; {_write(source, bound)}, or give more text"
    raise UserError(problem + OTHERWISE)


def _write(source: Source, bound: str) -> str:
    if source.prepared:
        return f"prepare it again, in another folder, with --validation-fraction {bound}, and write that"
    return f"write {bound}"


def require_sequence(source: Source, *, what: str, more: str) -> None:
    """Raises UserError if there is less than one sequence of text. what: it is called. more: how to get more of it."""
    if source.sequences < 1:
        length, tokens = source.order.sequence_length, source.shards.tokens
        raise UserError(
            f"batch.sequence_length: {what} of {source.name!r} has {tokens} tokens, but one sequence of {length} and"
            f" its last target need {length + 1}; write at most {max(tokens - 1, 1)}, or {more}"
        )
