"""The training and held-out batches of a run: this process's share of each, read ahead of the step that needs it.

b sequences of this process in a step, B of a micro-batch, T sequence length.
"""

import platform
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parallel.dist import World, on_all, on_main
from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.data.batches import Batches, MicroBatch
from recipes.data.history import History, consumed_tokens, to_json
from recipes.data.open_data import Data, DataSettings, Launch, open_data
from recipes.data.sequences import Quarantine, Source
from recipes.files.layout import QUARANTINE
from recipes.files.units import counted


class DataLoader:
    """Training and held-out batches, their tokenizer, and the list of bad rows."""

    def __init__(
        self,
        settings: DataSettings,
        world: World,
        mesh: Mesh,
        *,
        resumed_data_state: Callable[[], Mapping[str, Any]],
        log: Callable[[str], None],
    ) -> None:
        """Open all sources on every process, which maps their tokens itself; one of each node compares the text and the
        tokenizer with rank 0's. Raises UserError if a source, its text or the tokenizer is bad, or if they differ.

        Args:
            settings: what is read.
            world: all processes; rank 0 tokenizes, and the others read the folders that it chose.
            mesh: says which of how many equal shares of the global batch this process reads.
            resumed_data_state: called on rank 0; returns the data_state of the checkpoint to resume from, or {}.
            log: receives one line of text per message.
        """
        batch, self.pairing = settings.batch, settings.pairing
        self._looks = world.leads_node
        launch = Launch(run="", writes=world.is_main, log=log, looks=self._looks)
        opened = _open_on_all(world, settings, launch, resumed_data_state=resumed_data_state)
        self.tokenizer, self.data_state = opened.tokenizer, opened.data_state
        end, masked = self.tokenizer.end_of_document, settings.data.document_mask and self.pairing is None
        self.document_boundary = end if masked else None
        """The token that attention does not look past, if the recipe asks for that."""
        boundary, borders = self.document_boundary, settings.data.border_targets
        reader: Callable[..., Batches] = partial(Batches, end_of_document=boundary, border_targets=borders)
        if self.pairing is not None:
            from recipes.data.pair_batches import PairBatches

            reader = partial(PairBatches, end_of_document=end, pairing=self.pairing)
        batches = partial(
            reader,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            data_rank=mesh.data_rank,
            data_ranks=mesh.data_ranks,
            device=world.device,
            require_rows=self.tokenizer.require_rows,
        )
        self.training = batches(opened.training)
        self.validation = {name: batches(sequences) for name, sequences in opened.validation.items()}
        """Name -> batches of a text to validate on; "" is the name of a single text."""
        self._global_batch_size = batch.global_batch_size
        self._world, self._log = world, log
        self._trained_on: Mapping[str, str] = {}
        self._quarantine: Quarantine | None = None
        self._bad_rows = 0

    def continue_after(self, history: History, *, first_batch: int) -> bool:
        """Go on after these segments, with batch number `first_batch`, which is the first that may be asked for from
        now on. Returns whether the last of them goes on. Raises UserError for pairs that have another order now."""
        first = self.training.sequences.continue_after(history)
        if self.pairing is not None and first != first_batch * self._global_batch_size:
            raise UserError(
                "batch.global_batch_size: pairs cannot go on in batches of another size, because the order of pairs"
                " follows it; keep it, or start another run from the weights (model.weights)"
            )
        self.training.begin(first_batch, first)
        return not history or self.history(first_batch + 1)[-1].continues(history[-1])

    def progress(self, batches: int) -> dict[str, Any]:
        """What a checkpoint keeps of the first `batches` global batches, as plain JSON. Waits until their tokens are
        known."""
        history = self.history(batches)
        return {
            "sequences": sum(segment.sequences for segment in history),
            "tokens": self.tokens(batches),
            "history": to_json(history),
            "trained_on": self.checksums(batches) if self._world.is_main else {},  # rank 0's is stored
        }

    def history(self, batches: int) -> History:
        """What the first `batches` global batches consist of."""
        return self.training.sequences.history(self.training.first_of(batches))

    def batch(self, batch: int) -> list[MicroBatch]:
        """This process's share of global batch number `batch`, on the device. Raises UserError if there is none."""
        try:
            return self.training.take(batch)
        except UserError:
            self.note_bad_rows()  # there may be too many
            raise

    def validation_batches(self, batches: int) -> dict[str, Iterator[MicroBatch]]:
        """This process's share of the first `batches` global batches of each validation text, or of all if there are
        fewer, by the text's name."""
        return {name: self._validation_batches(text, batches) for name, text in self.validation.items()}

    def _validation_batches(self, text: "Batches", batches: int) -> Iterator[MicroBatch]:
        available = -(-text.sequences.available // self._global_batch_size)  # the last may be incomplete
        for batch in range(min(batches, available)):
            yield from text.take_once(batch)

    def tokens(self, batches: int) -> int:
        """Input tokens in the first `batches` global batches, without padding."""
        return sum(self.training.sequences.tokens(self.training.first_of(batches)))

    def documents(self, batch: int) -> dict[str, list[list[int]]]:
        """The contents of global batch number `batch`, on rank 0: source -> [file, row, first token, last + 1] of each
        piece. Every process must call this: it looks up its own share, which may lie in as many files as it has
        sequences."""
        share = self.training.share_of(batch)
        pieces = [piece for number in share for piece in self.training.sequences.pieces(number)]
        # A share that several processes read is looked up in one node, most likely, and leaves it once.
        shares = self._world.messages.reduce({share.start: pieces}, lambda some, others: some | others)
        by_source: dict[str, list[list[int]]] = {}
        for first in sorted(shares):
            for piece in shares[first]:
                by_source.setdefault(piece.source, []).append([piece.file, piece.row, piece.begin, piece.end])
        return by_source

    def epochs(self, batches: int) -> dict[str, float | None]:
        """How often each source is read in so many batches; None while its length is unknown."""
        epochs = self.training.sequences.epochs(self.training.first_of(batches))
        return {name: None if times is None else round(times, 4) for name, times in epochs.items()}

    def consumed(self, batches: int) -> Iterator[str]:
        """What the first `batches` global batches consumed of each source that was ever read, one line each."""
        epochs = self.epochs(batches)
        for name, tokens in consumed_tokens(self.history(batches)).items():
            times = f", {epochs[name]:g} epochs" if epochs.get(name) is not None else ""
            yield f"step {batches:>6}  read of {name}: {counted(tokens)} tokens{times}"

    def checksums(self, batches: int) -> dict[str, str]:
        """Source -> a checksum of the tokens that the first `batches` global batches come from; for a source that is
        not read any more, the one in the checkpoint."""
        return {**self._trained_on, **self.training.sequences.checksums(self.training.first_of(batches))}

    def require_trained_on(self, checksums: Mapping[str, str], *, batches: int) -> None:
        """Raises UserError if the first `batches` global batches come from other tokens than the run was trained on.

        The data state identifies the given text, the checksums what was read of it. Every process must call this; one
        of each node compares, which reads a part of a shard.
        """

        self._trained_on = dict(checksums)

        def compare() -> None:
            now = self.checksums(batches)
            for source in self.training.sequences.sources:
                if source.name in checksums and checksums[source.name] != now.get(source.name):  # old ones lack it
                    raise UserError(
                        f"data: the {batches} global batches that this run was trained on have changed:"
                        f" {source.name!r} gives different tokens, though its files look the same."
                        f" {_remedy(source)}; or start another run (--run.name OTHER)"
                    )

        on_all(self._world, compare if self._looks else lambda: None)

    def list_bad_rows_in(self, folder: Path) -> None:
        """List bad rows in this run folder from now on."""
        self._quarantine = Quarantine(folder / QUARANTINE, log=self._log)
        self.note_bad_rows()

    def note_bad_rows(self) -> None:
        """List the bad rows of the text used since the last call, and log how many there are."""
        if not self._world.is_main or self._quarantine is None:
            return
        if (rows := self._quarantine.note(self.training.sequences.sources)) > self._bad_rows:
            self._log(f"bad rows skipped so far: {rows}, listed in {self._quarantine.file}")
            self._bad_rows = rows

    def close(self) -> None:
        """Stop reading and tokenizing."""
        for text in (self.training, *self.validation.values()):
            text.close()


def _open_on_all(
    world: World, settings: DataSettings, launch: Launch, *, resumed_data_state: Callable[[], Mapping[str, Any]]
) -> Data:
    """Open the data on rank 0, then on the other processes from what it has opened. Raises UserError if they differ.

    launch: without the id of this start.
    """
    # The id is for this start of the run: processes that tokenize for other runs may share the cache.
    resumed, run = on_main(world, lambda: (resumed_data_state(), uuid.uuid4().hex))
    launch = replace(launch, run=run)
    on_rank_0: list[Data] = []

    def open_first() -> dict[str, Any]:
        on_rank_0.append(open_data(settings, launch, resumed_data_state=resumed))
        return on_rank_0[0].data_state

    data_state = on_main(world, open_first)
    opened = on_rank_0[0] if world.is_main else open_data(settings, launch, resumed_data_state=data_state)
    if opened.data_state != data_state:
        raise UserError(
            f"data: {platform.node()} sees different text or another tokenizer than rank 0 ({opened.data_state} and"
            f" {data_state}); all nodes need the same files and the same Python"
        )
    return opened


def _remedy(source: Source) -> str:
    """What to do about a source that gives other tokens than before."""
    folder = source.shards.folder
    if source.prepared:
        return f"Prepare '{folder}' again from its original files"
    if any(shard.unread for shard in source.shards.shards):
        return f"A file cannot be read now: repair it, remove '{folder}' and run the same command again"
    return "A file could not be read then, or the tokenizers package was another version: restore the old data.cache"
