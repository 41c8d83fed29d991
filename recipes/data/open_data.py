"""Opens the text of the [data] section as sequences that are ready to be read. Imports no torch."""

import errno
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from parallel.errors import TemporaryError, UserError
from parallel.nodes import files_of_tokens
from recipes.data.config import HELD_OUT, DataConfig
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Sequences, Source, require_documents, require_sequence
from recipes.data.text.sources import describe, is_prepared, notes, pinned
from recipes.data.text.tokenizer import Tokenizer
from recipes.data.text.tokenizer_loading import load_tokenizer
from recipes.data.tokens.shards import (
    ARRAYS,
    TRAIN,
    Shard,
    Shards,
    array_path,
    bad_rows_path,
    problem_path,
    shard_path,
)
from recipes.data.tokens.workspace import (
    USUAL,
    Pieces,
    Preparation,
    claimed,
    preparation,
    prepared_folder,
    whole_shards,
    would_read_itself,
)
from recipes.files.reading import may_pass, user_path
from recipes.files.units import counted

if TYPE_CHECKING:
    from recipes.data.pair_sequences import Pairing, PairSequences
    from recipes.data.text.pair_format import PairFields
    from recipes.data.tokens.background import Background

NO_LINKS = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without hard links; there the text is tokenized again."""


@dataclass(frozen=True)
class Launch:
    """One process of one start of a run."""

    run: str
    """An id of this start of the run, the same on all its processes."""
    writes: bool
    """Whether this process tokenizes what is missing. Exactly one process does, and it must call open_data() first."""
    log: Callable[[str], None]
    """Receives one line of text per message."""
    looks: bool = True
    """Whether this process looks for other text than the one that writes; otherwise another one of its node does."""
    pieces: Pieces = USUAL
    pairing: "Pairing | None" = None
    """How rows become pairs; None = they are text."""
    vocabulary: int | None = None  # entries in the model's embedding, if known
    at_several_lengths: frozenset[str] = frozenset()
    """Names of the sources that the run reads at several sequence lengths."""

    def fields(self, section: DataConfig) -> "PairFields":
        """What is read of a row."""
        return section.text_field if self.pairing is None else self.pairing.format


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    tokenizer: Tokenizer
    training: "Sequences | PairSequences"
    validation: "Mapping[str, Sequences | PairSequences]"
    """Name -> text to validate on; "" is the name of a single text."""
    data_state: dict[str, Any]
    """What the order of the tokens depends on, as in data.json: fingerprints of the tokenizer and of each source. A run
    that resumes may change those of validation sources."""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one source; some may still be missing."""

    folder: Path
    entry: dict[str, Any]
    """The source's entry in Data.data_state."""
    background: "Background | None" = None
    """Writes the missing tokens, if this process started it."""
    shards: tuple[Shard, ...] | None = None
    """All of them, if their index has been read."""


def open_data(
    section: DataConfig,
    launch: Launch,
    *,
    tokenizer: str | Tokenizer,
    sequence_length: int,
    seed: int,
    resumed_data_state: Mapping[str, Any],
    validation: Mapping[str, str] = MappingProxyType({"": HELD_OUT}),
) -> Data:
    """Open all sources, and wait until their first sequences are there.

    Args:
        section: of the recipe.
        launch: the process that calls this.
        tokenizer: data.tokenizer, or a tokenizer that is loaded already.
        sequence_length: inputs per sequence.
        seed: of the data order.
        resumed_data_state: of the checkpoint to resume from, or {}; on processes that do not write, the data_state of
            the one that does, which those that do not look either take as it is. A dataset on the hub stays at the
            commit named there.
        validation: name -> source of each text to validate on; HELD_OUT = the held-out documents of all sources.

    Raises:
        UserError: if a source, its text or the tokenizer is bad, or the hub does not answer.
    """
    resumed, resumed_validation = (resumed_data_state.get(part, {}) for part in ("sources", "validation"))
    texts = {name: resumed.get(name, {}).get("source") or pinned(name) for name in section.sources}
    cache = user_path(section.cache)
    raw = [text for name, text in texts.items() if not is_prepared(name)]
    others = [source for source in dict.fromkeys(validation.values()) if source != HELD_OUT]
    _look_at([*raw, *(source for source in others if not is_prepared(source))], section, cache, launch)
    tokenizer = _loaded(tokenizer, raw or list(texts.values()), section, cache, launch)
    training: list[Source] = []
    sources: dict[str, Any] = {}
    data_state: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "sources": sources}
    weights, fraction, opened = list(section.sources.values()), section.validation_fraction, {}
    with ExitStack() as undo:  # if the rest fails, nothing goes on tokenizing
        for name, text in texts.items():
            tokens = _tokens(name, text, section, tokenizer, resumed.get(name, {}), launch)
            training.append(_source(name, tokens, SequenceOrder(sequence_length, seed, None), section, launch))
            undo.callback(training[-1].stop)
            _require_training_text(training[-1], launch, fraction=fraction)
            sources[name] = tokens.entry
        sources |= {name: entry for name, entry in resumed.items() if name not in texts}
        joined = _joined(training, weights, section, launch)
        if HELD_OUT in validation.values():
            from recipes.data.validation import held_out

            held = held_out(training, fraction=fraction, pairs=launch.pairing is not None)
            opened[HELD_OUT] = _joined(held, weights, section, launch)
        for name in others:
            then = resumed_validation.get(name, {})
            opened[name], entry = _open_validation(name, section, tokenizer, sequence_length, then, launch, sources)
            data_state.setdefault("validation", {})[name] = entry
        undo.pop_all()
    texts_read = {name: opened[source] for name, source in validation.items()}
    return Data(tokenizer, joined, texts_read, data_state)


def _loaded(
    tokenizer: str | Tokenizer, corpus: Sequence[str], section: DataConfig, cache: Path, launch: Launch
) -> Tokenizer:
    """The tokenizer, trained on this corpus if it is to be, with the beginning of documents if the recipe asks."""
    if isinstance(tokenizer, str):
        reading: Any = {"text_field": launch.fields(section), "text_documents": section.text_documents}
        tokenizer = load_tokenizer(tokenizer, sources=corpus, **reading, cache=cache, log=launch.log)
    if section.bos:
        from recipes.data.text.beginning import with_beginning

        tokenizer = with_beginning(tokenizer)
    return tokenizer if launch.vocabulary is None else tokenizer.with_rows(launch.vocabulary)


def _require_training_text(source: Source, launch: Launch, *, fraction: float) -> None:
    _wait_for_first_window(source, launch.log)
    require_documents(source, fraction=fraction, held_out=False)
    if launch.pairing is None:
        require_sequence(source, what="the training text", more="give more text")


def _joined(
    sources: Sequence[Source], weights: Sequence[float], section: DataConfig, launch: Launch
) -> "Sequences | PairSequences":
    """The sequences of these sources. Raises UserError for pairs that are too long."""
    if launch.pairing is None:
        return Sequences(sources, weights)
    from recipes.data.pair_sequences import pair_sequences

    return pair_sequences(sources, weights, section, launch.pairing, log=launch.log)


def _look_at(sources: Sequence[str], section: DataConfig, cache: Path, launch: Launch) -> None:
    """Log which files of these sources are read, and what a document in them is. Raises UserError."""
    if not launch.looks:
        return
    if around := [source for source in sources if would_read_itself(source, cache / "tokens" / "any")]:
        raise UserError(
            f"data.cache: '{cache}' lies inside the source {around[0]!r}, which would read its own tokens; give a cache"
            " elsewhere"
        )
    for source in sources if launch.writes else ():
        for note in notes(source, text_documents=section.text_documents):
            launch.log(note)


def _open_validation(
    name: str,
    section: DataConfig,
    tokenizer: Tokenizer,
    sequence_length: int,
    then: Mapping[str, Any],
    launch: Launch,
    training: Mapping[str, Any],
) -> "tuple[Sequences | PairSequences, dict[str, Any]]":
    """The text of a validation source, and its entry in Data.data_state. All of its documents are read, up to the first
    data.shuffle_tokens of text that is not prepared. then: its entry in the data_state to resume from. training: the
    entries of the sources that the run trains on."""
    from recipes.data.validation import warn_of_overlap, whole_text

    whole = replace(section, validation_fraction=0.0)
    text = then.get("source") or pinned(name)
    tokens = _tokens(name, text, whole, tokenizer, then, launch, setting="validation.source")
    source = _source(name, tokens, SequenceOrder(sequence_length, 0, None), section, launch)
    try:
        _wait_for_first_window(source, launch.log)
    finally:
        source.stop()
    if launch.writes:
        warn_of_overlap(name, tokens.entry, training, log=launch.log)
    return _joined([whole_text(source, pairs=launch.pairing is not None)], [1.0], section, launch), tokens.entry


def _tokens(
    name: str,
    text: str,
    section: DataConfig,
    tokenizer: Tokenizer,
    resumed: Mapping[str, Any],
    launch: Launch,
    *,
    setting: str = "data.source",
) -> _Tokens:
    """The tokens of a source. resumed: its entry in the data_state to resume from. setting: names it in the recipe."""
    if not launch.looks:
        if resumed["prepared"]:
            return _Tokens(prepared_folder(name, Path(section.cache), log=launch.log), dict(resumed))
        return _Tokens(user_path(section.cache) / "tokens" / resumed["tokens"], dict(resumed))
    if is_prepared(name):
        return _prepared_tokens(name, text, section, tokenizer, launch, setting=setting)
    return _cached_tokens(name, text, section, tokenizer, used=resumed.get("tokens", ""), launch=launch)


def _prepared_tokens(
    name: str, text: str, section: DataConfig, tokenizer: Tokenizer, launch: Launch, *, setting: str
) -> _Tokens:
    """The tokens in a prepared folder; the process that writes compares them with their checksums. setting: as in
    _tokens()."""
    from recipes.data.prepared import matching_index

    folder = prepared_folder(name, Path(section.cache), log=launch.log)
    index = matching_index(folder, tokenizer, section.validation_fraction, verify=launch.writes, setting=setting)
    expected = "" if launch.pairing is None else launch.pairing.format.summary
    if index.pairs != expected:
        from recipes.data.text.pair_format import prepared_otherwise

        raise UserError(f"{setting}: '{folder}' {prepared_otherwise(index.pairs, expected)}")
    about = f"{sum(shard.train for shard in index.shards):,} tokens"
    entry = _entry(text, index.fingerprint, index.source_fingerprint, prepared=True, about=about)
    return _Tokens(folder, entry, shards=index.shards)


def _cached_tokens(
    name: str, text: str, section: DataConfig, tokenizer: Tokenizer, *, used: str, launch: Launch
) -> _Tokens:
    """The tokens of a source in the cache; the process that writes starts to tokenize if some are missing.

    name: of the source, as the recipe writes it. text: the source, at a commit if it is on the hub. used: as in
    _choose_folder(). Raises UserError if this process sees other text than the one that writes.
    """
    work = preparation(
        text,
        text_field=launch.fields(section),
        text_documents=section.text_documents,
        tokenizer=tokenizer,
        validation_fraction=section.validation_fraction,
        pieces=launch.pieces,
    )
    cache = user_path(section.cache) / "tokens"
    background = None
    if not launch.writes:
        folder = cache / (used or work.fingerprint)
        if not _is_of(folder, work):
            raise UserError(
                f"data.source: {platform.node()} sees different text in {name!r}, or another tokenizer, than rank 0;"
                " all nodes need the same files and the same Python"
            )
    else:
        folder, shards = _choose_folder(cache, work, used=used)
        if shards and shards[-1].last:
            launch.log(f"tokens found in {folder}")
        else:
            from recipes.data.tokens.background import Background

            background = Background(folder, work, run=launch.run, log=launch.log)
    entry = _entry(text, folder.name, work.source_fingerprint, prepared=False, about=describe(text))
    return _Tokens(folder, entry, background)


def _entry(source: str, tokens: str, text: str, *, prepared: bool, about: str) -> dict[str, Any]:
    """A source's entry in data.json. tokens, text: their fingerprints. prepared: because it changes the order."""
    return {"source": source, "tokens": tokens, "text": text, "prepared": prepared, "about": about}


def _source(name: str, tokens: _Tokens, order: SequenceOrder, section: DataConfig, launch: Launch) -> Source:
    """A source that may still be tokenized. order: without its window, which text that is not prepared has, and what is
    read at several lengths: then what a change of the length joins is at most a window."""
    several = name in launch.at_several_lengths
    if launch.pairing is None and (several or not tokens.entry["prepared"]):
        window = max(1, section.shuffle_tokens // order.sequence_length)
        order = replace(order, window=window, every_epoch=several)
    shards = Shards(tokens.folder, TRAIN, only=tokens.shards, maps=max(1, files_of_tokens() // len(section.sources)))
    problem = problem_path(tokens.folder, launch.run)
    budget, prepared = section.bad_row_budget, tokens.entry["prepared"]
    source = Source(name, shards, order, bad_row_budget=budget, problem=problem, prepared=prepared)
    source.background = tokens.background
    return source


def _choose_folder(cache: Path, work: Preparation, *, used: str) -> tuple[Path, list[Shard]]:
    """The folder for the tokens, and the shards that are in it.

    used: name of the folder that the run was trained on. Shards that lack a file which was unreadable are kept for the
    runs that were trained on them. Other runs get a folder of their own with the shards before those, and try the file
    again.
    """
    if _is_of(cache / used, work):
        return cache / used, _shards_in(cache / used)
    previous: tuple[Path, list[Shard]] | None = None
    for number in count():
        folder = cache / (f"{work.fingerprint}-{number}" if number else work.fingerprint)
        if previous is not None and not folder.exists():
            _link(*previous, folder, work)
        shards = _shards_in(folder)
        if not any(shard.unread for shard in shards):
            break
        previous = folder, list(takewhile(lambda shard: not shard.unread, shards))
    return folder, shards


def _is_of(folder: Path, work: Preparation) -> bool:
    """Whether the folder's name is one that _choose_folder() returns for this work."""
    return folder.name.partition("-")[0] == work.fingerprint


def _shards_in(folder: Path) -> list[Shard]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return whole_shards(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _link(old: Path, shards: Sequence[Shard], new: Path, work: Preparation) -> None:
    """Start a folder with hard links to these shards of another one: files of shards are replaced, never changed."""
    try:
        with claimed(new, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json):
            for number, shard in enumerate(shards):
                paths = [array_path(old, number, kind) for kind in ARRAYS]
                paths += [bad_rows_path(old, number)] if shard.bad else []
                for path in (*paths, shard_path(old, number)):
                    with suppress(FileExistsError):  # another run links it too
                        os.link(path, new / path.name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise _cannot_write(new, error) from error


def _cannot_write(folder: Path, error: OSError) -> UserError:
    message = f"data.cache: cannot write below '{folder.parent}': {error}"
    return TemporaryError(message) if may_pass(error) else UserError(f"{message}; give another folder")


def _wait_for_first_window(source: Source, log: Callable[[str], None]) -> None:
    """Wait until the first window is tokenized, and log how fast that was."""
    started = time.perf_counter()
    source.require(0)
    if source.background is not None:
        tokens = sum(shard.validation for shard in source.shards.shards)
        more = f", {counted(tokens)} more held out" if tokens else ""
        rest = "" if source.shards.complete else "; the rest follows while the model trains"
        log(
            f"tokenized {source.name}: {counted(source.shards.tokens)} tokens"
            f" in {time.perf_counter() - started:.1f} s{more}{rest}"
        )
