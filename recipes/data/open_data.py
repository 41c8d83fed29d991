"""From the [data] section to sequences that are ready to be read. Imports no torch."""

import errno
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.data.config import DataConfig
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Sequences, Source
from recipes.data.text import hub
from recipes.data.text.sources import describe, is_prepared
from recipes.data.text.tokenizer import Tokenizer, load_tokenizer
from recipes.data.tokens.background import Background
from recipes.data.tokens.prepare import (
    VERIFY_UP_TO_BYTES,
    Pieces,
    Preparation,
    preparation,
    whole_shards,
    would_read_itself,
)
from recipes.data.tokens.shards import (
    ARRAYS,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    Index,
    Shard,
    Shards,
    array_path,
    bad_rows_path,
    damage,
    open_index,
    problem_path,
    shard_path,
)
from recipes.data.tokens.workspace import claimed

USUAL = Pieces()
NO_LINKS = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that makes no hard links: there the text is tokenized again."""


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    tokenizer: Tokenizer
    training: Sequences
    validation: Sequences
    data_state: dict[str, Any]
    """What the order of the tokens depends on, as in data.json: fingerprints of the tokenizer and of each source."""


def pinned_sources(sources: Mapping[str, float], resumed_data_state: Mapping[str, Any]) -> dict[str, str]:
    """Recipe's name -> the source to read: of datasets on the hub always the commit that a run began with.

    resumed_data_state: of the checkpoint to resume from, or {}. Raises UserError when the hub must be asked and does
    not answer.
    """
    resumed = resumed_data_state.get("sources", {})
    return {name: resumed.get(name, {}).get("source") or hub.pinned(name) for name in sources}


def open_data(
    section: DataConfig,
    *,
    pinned: Mapping[str, str],
    tokenizer: str | Tokenizer,
    sequence_length: int,
    seed: int,
    resumed_data_state: Mapping[str, Any],
    run: str,
    writes: bool,
    log: Callable[[str], None],
    pieces: Pieces = USUAL,
) -> Data:
    """Open all sources, and wait until the first sequences are there.

    pinned: of pinned_sources(). tokenizer: that of the section, or one that is there already.
    resumed_data_state: of the checkpoint to resume from, or {}; for processes that do not write, the data_state of the
    one that does. run: names this start of the run, on all its processes.
    writes: whether this process tokenizes what is not there yet (one of all must, and be
    called first). `log` gets one line of text for each thing done. Raises UserError for whatever is wrong
    with the fields.
    """
    cache, fraction = Path(section.cache).expanduser(), section.validation_fraction
    for text in pinned.values():
        if not is_prepared(text) and would_read_itself(text, cache / "tokens" / "any"):
            raise UserError(
                f"data.cache: '{cache}' lies inside of the source {text!r}, which would read its own tokens; give a"
                " cache elsewhere"
            )
    if isinstance(tokenizer, str):
        raw = [pinned[source] for source in section.sources if not is_prepared(source)] or list(pinned.values())
        tokenizer = load_tokenizer(tokenizer, sources=raw, text_field=section.text_field, cache=cache, log=log)
    training, validation = [], []
    data_state: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "sources": {}}
    for name in section.sources:
        background = None
        if is_prepared(name):
            folder = Path(name).expanduser()
            index = _matching_index(folder, tokenizer, fraction, verify=writes)
            fingerprint, text, window = index.fingerprint, index.source_fingerprint, None
            about = f"{sum(shard.train for shard in index.shards):,} tokens"
        else:
            work = preparation(
                pinned[name],
                text_field=section.text_field,
                tokenizer=tokenizer,
                validation_fraction=fraction,
                pieces=pieces,
            )
            used = resumed_data_state.get("sources", {}).get(name, {}).get("tokens", "")
            if writes:
                folder, background = _tokenize(cache / "tokens", work, used=used, run=run, log=log)
            else:
                folder = _rank_0_tokenizes(cache / "tokens" / (used or work.fingerprint), work, name=name)
            fingerprint, text = folder.name, work.source_fingerprint
            window = max(1, section.shuffle_tokens // sequence_length)
            about = describe(pinned[name])
        order = SequenceOrder(sequence_length, seed, window)
        source = Source(
            name, Shards(folder, TRAIN), order, bad_row_budget=section.bad_row_budget, problem=problem_path(folder, run)
        )
        source.background = background
        try:
            _wait_for_the_first(source, log)
            training.append(source)
            validation.append(_held_out(source))
            _require_enough(source, validation[-1], validation_fraction=fraction)
        except BaseException:
            if background is not None:
                background.stop()
            raise
        prepared = window is None  # which is shuffled otherwise
        data_state["sources"][name] = {
            "source": pinned[name],
            "tokens": fingerprint,
            "text": text,
            "prepared": prepared,
            "about": about,
        }
    weights = list(section.sources.values())
    return Data(tokenizer, Sequences(training, weights), Sequences(validation, weights), data_state)


def _tokenize(
    cache: Path, work: Preparation, *, used: str, run: str, log: Callable[[str], None]
) -> tuple[Path, Background | None]:
    """The folder of the tokens, and what makes those that are not there. used: as in _folder()."""
    folder, there = _folder(cache, work, used=used)
    if there and there[-1].last:
        log(f"tokens found in {folder}")
        return folder, None
    return folder, Background(folder, work, run=run)


def _rank_0_tokenizes(folder: Path, work: Preparation, *, name: str) -> Path:
    """The folder, in which this process finds the same text as rank 0. name: of the source, as the recipe has it."""
    if not _is_of(folder, work):
        raise UserError(
            f"data.source: {platform.node()} sees another text behind {name!r}, or another tokenizer, than rank 0; all"
            " nodes need the same files and the same Python"
        )
    return folder


def _folder(cache: Path, work: Preparation, *, used: str) -> tuple[Path, list[Shard]]:
    """Where the tokens go, and what is there already.

    used: name of the folder that the run was trained on. Where a file could not be read for a while, those shards are
    kept for the runs that were trained on them; other runs get a folder of their own, which has all that did not miss
    it, and try the file again.
    """
    if _is_of(cache / used, work):
        return cache / used, _there(cache / used)
    before: tuple[Path, list[Shard]] | None = None
    for number in count():
        folder = cache / (f"{work.fingerprint}-{number}" if number else work.fingerprint)
        if before is not None and not folder.exists():
            _link(*before, folder, work)
        there = _there(folder)
        if not any(shard.unread for shard in there):
            break
        before = folder, list(takewhile(lambda shard: not shard.unread, there))
    return folder, there


def _is_of(folder: Path, work: Preparation) -> bool:
    """Whether its name is one of those that _folder() gives."""
    return folder.name.partition("-")[0] == work.fingerprint


def _there(folder: Path) -> list[Shard]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return whole_shards(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _link(old: Path, shards: Sequence[Shard], new: Path, work: Preparation) -> None:
    """Begin a folder with these shards of another one. Files of shards are replaced, never changed."""
    try:
        with claimed(new, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json):
            for number, shard in enumerate(shards):
                paths = [array_path(old, number, kind) for kind in ARRAYS]
                paths += [bad_rows_path(old, number)] if shard.bad else []
                for path in (*paths, shard_path(old, number)):
                    with suppress(FileExistsError):  # another run does the same
                        os.link(path, new / path.name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise _cannot_write(new, error) from error


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(f"data.cache: cannot write below '{folder.parent}': {error}; give another folder")


def _matching_index(folder: Path, tokenizer: Tokenizer, validation_fraction: float, *, verify: bool) -> Index:
    """The index of prepared shards, if they are what the recipe asks for."""
    index = open_index(str(folder))
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer: '{folder}' holds tokens of another tokenizer; write tokenizer = \"{folder / TOKENIZER}\""
        )
    if index.validation_fraction != validation_fraction:
        raise UserError(
            f"data.validation_fraction: '{folder}' was prepared with {index.validation_fraction}; write that, or"
            " prepare it again"
        )
    size = 0
    for number, shard in enumerate(index.shards if verify else ()):
        size += array_path(folder, number, TRAIN).stat().st_size if array_path(folder, number, TRAIN).is_file() else 0
        if size <= VERIFY_UP_TO_BYTES and (problem := damage(folder, number, shard)):
            raise UserError(f"data.source: '{folder}' is damaged: {problem}; prepare it again")
    return index


def _wait_for_the_first(source: Source, log: Callable[[str], None]) -> None:
    """Until the first window is there; says how fast it comes."""
    started = time.perf_counter()
    source.require(0, waiting=source.progress(log))
    if source.background is not None:
        held_out = sum(shard.validation for shard in source.shards.shards)
        rest = "" if source.shards.complete else "; the rest follows while the model trains"
        log(
            f"tokenized {source.name}: {source.shards.tokens / 1e6:.1f} M tokens"
            f" in {time.perf_counter() - started:.1f} s, {held_out / 1e6:.3f} M more held out{rest}"
        )


def _held_out(source: Source) -> Source:
    """The held-out text beside the first window of training text, or beside all of it where that is there at once."""
    shards = Shards(source.shards.folder, VALIDATION, only=source.shards.shards[: source.used(0)])
    # Shuffled too, so that a few batches are a fair sample; whatever the seed of the run, always the same one.
    return Source(source.name, shards, SequenceOrder(source.order.sequence_length, 0, None))


def _require_enough(training: Source, validation: Source, *, validation_fraction: float) -> None:
    """Raises UserError where there is less than one sequence of either."""
    shards = validation.shards.shards
    documents, held_out = sum(shard.documents for shard in shards), sum(shard.held_out for shard in shards)
    message = f"data.validation_fraction: of the {documents + held_out} documents of {training.name!r} "
    if documents + held_out == 0:
        raise UserError(f"data.source: {training.name!r} holds no text: every document is empty; give another source")
    lowest, highest = min(shard.lowest for shard in shards), max(shard.highest for shard in shards)
    if not documents or not held_out:
        if lowest == highest:
            raise UserError(message + "no two differ, so none can be held out; give more text")
        if not held_out:
            needed = int(lowest * 1e4 + 1) / 1e4
            raise UserError(
                message
                + f"none would be held out with {validation_fraction}; write {needed:.4f} or more, or give more text"
            )
        allowed = int(highest * 1e4) / 1e4
        raise UserError(
            message
            + f"all would be held out with {validation_fraction}; write {allowed:.4f} or less, or give more text"
        )
    for source, what, more in (
        (training, "training", "give more text"),
        (validation, "held-out", "raise data.validation_fraction"),
    ):
        if source.sequences < 1:
            length, tokens = source.order.sequence_length, source.shards.tokens
            raise UserError(
                f"batch.sequence_length: the {what} text of {source.name!r} has {tokens} tokens, a single sequence"
                f" of {length} and its last target need {length + 1}; write at most {max(tokens - 1, 1)}, or {more}"
            )
