"""All that a run reads, opened on every process alike."""

import platform
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel.dist import World, on_all, on_main
from parallel.errors import UserError
from recipes.data.batches import Batches, MicroBatch
from recipes.data.config import BatchConfig, DataConfig
from recipes.data.open_data import Data, open_data, pinned_sources
from recipes.data.sequences import Quarantine, Sequences, Source
from recipes.data.text.tokenizer import Tokenizer
from recipes.files.layout import QUARANTINE


class DataLoader:
    """Training and held-out batches, the tokenizer behind them, and the list of what was left out."""

    def __init__(
        self,
        data: DataConfig,
        batch: BatchConfig,
        *,
        world: World,
        data_rank: int,
        data_ranks: int,
        seed: int,
        vocabulary: int,
        tokenizer: Callable[[], str | Tokenizer],
        resumed_data_state: Callable[[], Mapping[str, Any]],
        log: Callable[[str], None],
    ) -> None:
        """Open all sources on every process.

        Args:
            data, batch: the recipe's sections.
            world: all processes; rank 0 tokenizes, and the others read the folders that it chose.
            data_rank, data_ranks: which of how many equal shares of the global batch this process reads.
            seed: of the data order.
            vocabulary: entries in the model's embedding.
            tokenizer: returns data.tokenizer, or one that is loaded already.
            resumed_data_state: called on rank 0; returns the data_state of the checkpoint to resume from, or {}.
            log: receives one line of text per message.

        Raises:
            UserError: for whatever is wrong with the sources, their text or the tokenizer.
        """
        # The id of this start of the run: a process that tokenizes for another run may share the cache.
        resumed, run = on_main(world, lambda: (resumed_data_state(), uuid.uuid4().hex))
        pinned = on_main(world, lambda: pinned_sources(data.sources, resumed))

        def opening(resumed_data_state: Mapping[str, Any]) -> Data:
            return open_data(
                data,
                pinned=pinned,
                tokenizer=tokenizer(),
                sequence_length=batch.sequence_length,
                seed=seed,
                resumed_data_state=resumed_data_state,
                run=run,
                writes=world.is_main,
                log=log,
            )

        held: list[Data] = []

        def first() -> dict[str, Any]:
            held.append(opening(resumed))
            return held[0].data_state

        data_state = on_main(world, first)  # the other processes read the folders that rank 0 chose
        opened = held[0] if world.is_main else opening(data_state)
        self.tokenizer, self.data_state = opened.tokenizer, opened.data_state
        if data_state != self.data_state:
            raise UserError(
                f"data: {platform.node()} sees another text or tokenizer than rank 0 ({self.data_state} and"
                f" {data_state}); all nodes need the same files and the same Python"
            )
        if (entries := self.tokenizer.vocabulary) > vocabulary:
            raise UserError(
                f"data.tokenizer has {entries} entries, more than model.vocabulary = {vocabulary}"
                f"; write model.vocabulary = {entries} or another tokenizer"
            )
        self.document_boundary = self.tokenizer.end_of_document if data.document_mask else None
        """The token behind which attention does not look, if the recipe says so."""

        def batches(sequences: Sequences) -> Batches:
            return Batches(
                sequences,
                global_batch_size=batch.global_batch_size,
                micro_batch_size=batch.micro_batch_size,
                data_rank=data_rank,
                data_ranks=data_ranks,
                end_of_document=self.document_boundary,
                device=world.device,
            )

        self.training, self.validation = batches(opened.training), batches(opened.validation)
        self._global_batch_size = batch.global_batch_size
        self._world, self._log = world, log
        self._quarantine: Quarantine | None = None
        self._bad_rows = 0

    def validation_batches(self, batches: int) -> Iterator[MicroBatch]:
        """This process's share of the first global batches of held-out text, or of all there are."""
        whole = -(-self.validation.sequences.available // self._global_batch_size)  # the last may be filled up
        for batch in range(min(batches, whole)):
            yield from self.validation.take_once(batch)

    def opening(self, tokens: int) -> list[int]:
        """The first tokens of the held-out text."""
        return self.validation.sequences.rows(0, 1)[0, :tokens].tolist()

    def documents(self, batch: int) -> dict[str, list[list[int]]]:
        """What global batch number `batch` is made of: source -> [file, row, first token, last + 1] of each piece."""
        found: dict[str, list[list[int]]] = {}
        for number in range(batch * self._global_batch_size, (batch + 1) * self._global_batch_size):
            for piece in self.training.sequences.pieces(number):
                found.setdefault(piece.source, []).append([piece.file, piece.row, piece.begin, piece.end])
        return found

    def batch(self, batch: int) -> list[MicroBatch]:
        """This process's share of global batch number `batch`, on the device. Raises UserError where there is none."""
        try:
            return self.training.take(batch)
        except UserError:
            self.note_bad_rows()  # there may be too many
            raise

    def epochs(self, batches: int) -> dict[str, float | None]:
        """How often each source was read in so many batches; None while its length is not known."""
        found = self.training.sequences.epochs(batches * self._global_batch_size)
        return {name: None if times is None else round(times, 4) for name, times in found.items()}

    def checksums(self, batches: int) -> dict[str, str]:
        """Of each source's tokens that so many global batches come from: what a run was trained on."""
        return self.training.sequences.checksums(batches * self._global_batch_size, log=self._log)

    def require_trained_on(self, checksums: Mapping[str, str], *, batches: int) -> None:
        """Raises UserError where so many global batches come from other tokens than those a run was trained on.

        The facts tell which text was given; this, what was read of it. Every process must call it.
        """

        def look() -> None:
            now = self.checksums(batches)
            for source in self.training.sequences.sources:
                if source.name in checksums and checksums[source.name] != now.get(source.name):  # older ones have none
                    raise UserError(
                        f"data: this run was trained on {batches} global batches that are others now: {source.name!r}"
                        f" gives other tokens, though its files look the same. {_way_back(source)}; or start another"
                        " run (--run.name OTHER)"
                    )

        on_all(self._world, look)

    def list_bad_rows_in(self, folder: Path) -> None:
        """From now on, note bad rows in this folder of a run."""
        self._quarantine = Quarantine(folder / QUARANTINE, log=self._log)
        self.note_bad_rows()

    def note_bad_rows(self) -> None:
        """List the bad rows of what was used since the last call, and say how many there are."""
        if not self._world.is_main or self._quarantine is None:
            return
        if (rows := self._quarantine.note(self.training.sequences.sources)) > self._bad_rows:
            self._log(f"bad rows left out so far: {rows}, listed in {self._quarantine.file}")
            self._bad_rows = rows

    def close(self) -> None:
        """Stop reading, and what tokenizes."""
        self.training.close()
        self.validation.close()


def _way_back(source: Source) -> str:
    """What to do about a source that gives other tokens than before."""
    folder = source.shards.folder
    if source.order.window is None:
        return f"Prepare '{folder}' again from what it was made of"
    if any(shard.unread for shard in source.shards.shards):
        return f"One of them cannot be read now: mend that, remove '{folder}' and give the same command"
    return "One of them could not be read then, or the tokenizers package was another: put the data.cache of then back"
