"""Opens the text of the [data] section as sequences that are ready to be read. Imports no torch."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.errors import UserError
from parallel.nodes import files_of_tokens
from recipes.data.config import HELD_OUT, BatchConfig, DataConfig
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Sequences, Source, require_documents, require_sequence
from recipes.data.text.sources import describe, fingerprint, is_prepared, is_token_files, notes, pinned
from recipes.data.text.tokenizer import Tokenizer, load_tokenizer
from recipes.data.tokens.shards import TRAIN, Shard, Shards, problem_path
from recipes.data.tokens.workspace import (
    USUAL,
    Pieces,
    Preparation,
    link_shards,
    preparation,
    whole_shards,
    would_read_itself,
)
from recipes.files.reading import cache_fault, user_path
from recipes.files.units import counted

if TYPE_CHECKING:
    from recipes.data.pair_sequences import Pairing, PairSequences
    from recipes.data.text.pair_format import PairFields
    from recipes.data.tokens.background import Background


@dataclass(frozen=True)
class DataSettings:
    """What a run reads: the recipe's sections, and what follows from others."""

    data: DataConfig
    batch: BatchConfig
    seed: int
    """Of the data order."""
    tokenizer: Callable[[], str | Tokenizer]
    """Returns data.tokenizer, or a tokenizer that is loaded already."""
    vocabulary: int | None = None
    """Entries in the model's embedding, if known."""
    validation: Mapping[str, str] = field(default_factory=lambda: {"": HELD_OUT})
    """Name -> source of each text to validate on; HELD_OUT = the held-out documents of all sources."""
    pairing: "Pairing | None" = None
    """How rows become pairs; None = they are text."""
    at_several_lengths: frozenset[str] = frozenset()
    """Names of the sources that the run reads at several sequence lengths."""

    @property
    def fields(self) -> "PairFields":
        """What is read of a row."""
        return self.data.text_field if self.pairing is None else self.pairing.format

    @property
    def cache(self) -> Path:
        """The folder of tokens in the cache."""
        return user_path(self.data.cache) / "tokens"


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


def open_data(settings: DataSettings, launch: Launch, *, resumed_data_state: Mapping[str, Any]) -> Data:
    """Open all sources, and wait until their first sequences are there. Raises UserError if a source, its text or the
    tokenizer is bad, or the hub does not answer.

    resumed_data_state: of the checkpoint to resume from, or {}; on processes that do not write, the data_state of the
    one that does, which those that do not look either take as it is. A dataset on the hub stays at the commit named
    there.
    """
    section, validation = settings.data, settings.validation
    resumed, resumed_validation = (resumed_data_state.get(part, {}) for part in ("sources", "validation"))
    texts = {name: resumed.get(name, {}).get("source") or pinned(name) for name in section.sources}
    raw = [text for name, text in texts.items() if not is_prepared(name)]
    others = [source for source in dict.fromkeys(validation.values()) if source != HELD_OUT]
    _look_at([*raw, *(source for source in others if not is_prepared(source))], settings, launch)
    opening = _Opening(settings, launch, _loaded_tokenizer(settings, raw or list(texts.values()), launch.log))
    training: list[Source] = []
    sources: dict[str, Any] = {}
    data_state: dict[str, Any] = {"tokenizer": opening.tokenizer.fingerprint, "sources": sources}
    weights, pairs, opened = list(section.sources.values()), settings.pairing is not None, {}
    fraction = section.validation_fraction
    with ExitStack() as undo:  # if the rest fails, nothing goes on tokenizing
        for name, text in texts.items():
            source, sources[name] = opening.source(
                name, text, resumed.get(name, {}), fraction=fraction, seed=settings.seed
            )
            undo.callback(source.stop)
            _wait_for_first_window(source, launch.log)
            require_documents(source, fraction=fraction, held_out=False)
            if not pairs:
                require_sequence(source, what="the training text", more="give more text")
            training.append(source)
        sources |= {name: entry for name, entry in resumed.items() if name not in texts}
        joined = opening.joined(training, weights)
        if HELD_OUT in validation.values():
            from recipes.data.validation import held_out

            held = held_out(training, fraction=fraction, pairs=pairs)
            opened[HELD_OUT] = opening.joined(held, weights)
        for name in others:
            opened[name], entry = opening.validation(name, resumed_validation.get(name, {}), sources)
            data_state.setdefault("validation", {})[name] = entry
        undo.pop_all()
    return Data(opening.tokenizer, joined, {name: opened[source] for name, source in validation.items()}, data_state)


def _loaded_tokenizer(settings: DataSettings, corpus: Sequence[str], log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer, trained on this corpus if it is to be, with the beginning of documents if the recipe asks."""
    section, tokenizer = settings.data, settings.tokenizer()
    if isinstance(tokenizer, str):
        reading: Any = {"text_field": settings.fields, "text_documents": section.text_documents}
        tokenizer = load_tokenizer(tokenizer, sources=corpus, **reading, cache=user_path(section.cache), log=log)
    if section.bos:
        from recipes.data.text.beginning import with_beginning

        tokenizer = with_beginning(tokenizer)
    return tokenizer if settings.vocabulary is None else tokenizer.with_rows(settings.vocabulary)


def _look_at(sources: Sequence[str], settings: DataSettings, launch: Launch) -> None:
    """Log which files of these sources are read, and what a document in them is. Raises UserError."""
    if not launch.looks:
        return
    if around := [source for source in sources if would_read_itself(source, settings.cache / "any")]:
        raise UserError(
            f"data.cache: '{settings.cache.parent}' lies inside the source {around[0]!r}, which would read its own"
            " tokens; give a cache elsewhere"
        )
    for source in sources if launch.writes else ():
        for note in notes(source, text_documents=settings.data.text_documents):
            launch.log(note)


@dataclass(frozen=True)
class _Opening:
    """Opens one source after the other."""

    settings: DataSettings
    launch: Launch
    tokenizer: Tokenizer

    def joined(self, sources: Sequence[Source], weights: Sequence[float]) -> "Sequences | PairSequences":
        """The sequences of these sources. Raises UserError for pairs that are too long."""
        if self.settings.pairing is None:
            return Sequences(sources, weights)
        from recipes.data.pair_sequences import pair_sequences

        run = self.settings.batch.global_batch_size
        return pair_sequences(sources, weights, self.settings.data, self.settings.pairing, run=run, log=self.launch.log)

    def validation(
        self, name: str, then: Mapping[str, Any], training: Mapping[str, Any]
    ) -> "tuple[Sequences | PairSequences, dict[str, Any]]":
        """The text of a validation source, and its entry in Data.data_state. All of its documents are read, up to the
        first data.shuffle_tokens of text that is not prepared. then: its entry in the data_state to resume from.
        training: the entries of the sources that the run trains on."""
        from recipes.data.validation import warn_of_overlap, whole_text

        text = then.get("source") or pinned(name)
        source, entry = self.source(name, text, then, fraction=0.0, seed=0, setting="validation.source")
        try:
            _wait_for_first_window(source, self.launch.log)
        finally:
            source.stop()
        if self.launch.writes:
            warn_of_overlap(name, entry, training, log=self.launch.log)
        return self.joined([whole_text(source, pairs=self.settings.pairing is not None)], [1.0]), entry

    def source(
        self,
        name: str,
        text: str,
        then: Mapping[str, Any],
        *,
        fraction: float,
        seed: int,
        setting: str = "data.source",
    ) -> tuple[Source, dict[str, Any]]:
        """A source, which may still be tokenized, and its entry in Data.data_state. Raises UserError if it is bad, or
        this process sees other text than the one that writes.

        name, setting: as the recipe writes them. text: the source, at a commit if it is on the hub. then: its entry in
        the data_state to resume from. fraction: of its documents that are held out. seed: of its order."""
        settings, launch, background, shards = self.settings, self.launch, None, None
        row: Shards | None = None
        prepared = is_prepared(name) if launch.looks else then["prepared"]
        maps = max(1, files_of_tokens() // len(settings.data.sources))
        if is_token_files(name):
            from recipes.data.tokens.token_files import TokenFiles

            files = TokenFiles(name, self.tokenizer, maps=maps, fingerprint="" if launch.looks else then["tokens"])
            if launch.writes:
                files.verify(document_mask=settings.data.document_mask, log=launch.log)
            folder, row, about = files.folder, files, f"{len(files.files):,} files with {files.tokens:,} tokens"
            entry = _entry(text, files.fingerprint, files.fingerprint, prepared=True, about=about)
        elif prepared:
            from recipes.data.prepared import prepared_folder, prepared_index

            folder = prepared_folder(name, Path(settings.data.cache), log=launch.log)
            entry = dict(then)
            if launch.looks:
                pairs = "" if settings.pairing is None else settings.pairing.format.summary
                match: dict[str, Any] = {"verify": launch.writes, "setting": setting, "pairs": pairs}
                index = prepared_index(folder, self.tokenizer, fraction, **match)
                shards, about = index.shards, f"{sum(shard.train for shard in index.shards):,} tokens"
                entry = _entry(text, index.fingerprint, index.source_fingerprint, prepared=True, about=about)
        elif launch.looks:
            folder, background, entry = self._cached(name, text, fraction, then)
        else:
            folder, entry = settings.cache / then["tokens"], dict(then)
        length, several = settings.batch.sequence_length, name in settings.at_several_lengths
        # What is read at several lengths has windows, too: then what a change of the length joins is at most one.
        windows = settings.pairing is None and (several or not prepared)
        window = max(1, settings.data.shuffle_tokens // length) if windows else None
        source = Source(
            name,
            row or Shards(folder, TRAIN, only=shards, maps=maps),
            SequenceOrder(length, seed, window, every_epoch=windows and several),
            bad_row_budget=settings.data.bad_row_budget,
            problem=problem_path(folder, launch.run),
            prepared=prepared,
            background=background,
        )
        return source, entry

    def _cached(
        self, name: str, text: str, fraction: float, then: Mapping[str, Any]
    ) -> "tuple[Path, Background | None, dict[str, Any]]":
        """The folder with the tokens of a source in the cache, what writes those that are missing, if this process
        does, and its entry. then: the entry that the run was trained on."""
        settings, launch, used = self.settings, self.launch, then.get("tokens", "")
        work = preparation(
            text,
            text_field=settings.fields,
            text_documents=settings.data.text_documents,
            tokenizer=self.tokenizer,
            validation_fraction=fraction,
            pieces=launch.pieces,
        )
        if settings.pairing and then.get("text", work.source_fingerprint) != work.source_fingerprint:
            older = replace(settings.pairing.format, rules=0)  # a run of an older version goes on
            if fingerprint(text, text_field=older, text_documents=work.text_documents) == then["text"]:
                work = replace(work, text_field=older, source_fingerprint=then["text"])
        background = None
        is_used = used.partition("-")[0] == work.fingerprint
        if launch.writes:
            folder, shards = _choose_folder(settings.cache, work, used=used if is_used else "")
            if shards and shards[-1].last:
                launch.log(f"tokens found in {folder}")
            else:
                from recipes.data.tokens.background import Background

                background = Background(folder, work, run=launch.run, log=launch.log)
        elif used and not is_used:
            raise UserError(
                f"data.source: {platform.node()} sees different text in {name!r}, or another tokenizer, than rank 0;"
                " all nodes need the same files and the same Python"
            )
        else:
            folder = settings.cache / (used or work.fingerprint)
        entry = _entry(text, folder.name, work.source_fingerprint, prepared=False, about=describe(text))
        return folder, background, entry


def _entry(source: str, tokens: str, text: str, *, prepared: bool, about: str) -> dict[str, Any]:
    """A source's entry in data.json. tokens, text: their fingerprints. prepared: because it changes the order."""
    return {"source": source, "tokens": tokens, "text": text, "prepared": prepared, "about": about}


def _choose_folder(cache: Path, work: Preparation, *, used: str) -> tuple[Path, list[Shard]]:
    """The folder for the tokens, and the shards that are in it.

    used: name of the one that the run was trained on, if it is for this work. Shards that lack a file which was
    unreadable are kept for the runs that were trained on them. Other runs get a folder of their own with the shards
    before those, and try the file again.
    """
    whole: tuple[Path, Sequence[Shard]] | None = None
    names = (f"{work.fingerprint}-{number}" if number else work.fingerprint for number in count())
    for name in (used,) if used else names:
        folder = cache / name
        try:
            if whole is not None and not folder.exists():
                link_shards(*whole, folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json)
            folder.mkdir(parents=True, exist_ok=True)
            shards = whole_shards(folder)
        except OSError as error:
            raise cache_fault(cache, error) from error
        if used or not any(shard.unread for shard in shards):
            break
        whole = folder, [*takewhile(lambda shard: not shard.unread, shards)]
    return folder, shards


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
