"""Loss on the answers of pairs, each by itself. B pairs, S tokens of the longest prompt, T of the longest answer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import nn

from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.data.batches import MicroBatch
from recipes.data.pair_sequences import Pairing
from recipes.data.text.pair_format import ID, LEARNED, PairEncoder, shortened
from recipes.data.text.row import Row
from recipes.data.text.tokenizer import Tokenizer, parallel_tokenizers
from recipes.evaluation.evaluate import Evaluation
from recipes.evaluation.losses import finite_loss

ENCODED_TOGETHER = 256
MICRO_BATCHES_SORTED = 32
"""Pairs of so many micro-batches are sorted by length, so that little is padded."""
ALONE = Row("", 0, 0, "")


@dataclass(frozen=True)
class Pair:
    """The tokens of a pair, (n,) uint32 as stored; how many of them the encoder reads, which is 0 in a causal model."""

    tokens: np.ndarray
    prompt: int

    @property
    def size(self) -> int:
        return len(self.tokens)


class PairReader:
    """The pairs of a source that are not too long. `left_out` counts the others, `unusable` what makes no pair."""

    def __init__(self, texts: Iterable[str], *, tokenizer: Tokenizer, pairing: Pairing, length: int, long: str) -> None:
        """texts: pairs as JSON. length: tokens of a prompt for an encoder, of a whole pair otherwise. long: as
        data.long_pairs. Raises UserError for a chat template that cannot be compiled."""
        self._texts, self._pairing, self._length, self._long = texts, pairing, length, long
        self._encoder = PairEncoder(pairing.format, tokenizer)
        self.pairs = self.left_out = self.unusable = 0

    def __iter__(self) -> Iterator[Pair]:
        texts = iter(self._texts)
        with parallel_tokenizers():
            while together := list(islice(texts, ENCODED_TOGETHER)):
                rows, stored = self._encoder.encode([ALONE._replace(text=text) for text in together])
                self.unusable += sum(bool(row.problem) for row in rows)
                for tokens in stored:
                    pair = self._fitting(tokens)
                    self.left_out += pair is None
                    if pair is not None:
                        self.pairs += 1
                        yield pair

    def _fitting(self, tokens: np.ndarray) -> Pair | None:
        """The pair, cut as a run would cut it; None where it is left out."""
        first = int(np.flatnonzero(tokens & LEARNED)[0])
        reads = self._pairing.format.encoder_decoder
        over = (first if reads else len(tokens) - 1) - self._length
        if over > 0:
            if self._long == "leave_out" or over >= first:
                return None
            tokens, first = shortened(tokens, over, long=self._long, keeps_end=reads), first - over
        return Pair(tokens, first if reads else 0)


def evaluate_pairs(
    model: nn.Module,
    reader: PairReader,
    *,
    pairing: Pairing,
    micro_batch_size: int,
    mesh: Mesh,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a (sharded) model on the answers of pairs. Every answer's token is a target once.

    All processes encode all pairs, which costs little beside the model, and compute their share of them. Raises
    UserError for a source without a usable pair, and for a loss that is NaN or infinite.

    Args:
        reader: the pairs.
        pairing: how they were made.
        micro_batch_size: pairs per forward pass of a process.
        mesh: the mesh that the model is sharded over.
        on_progress: receives the numbers of tokens of answers and of pairs so far, before each forward pass.
    """
    done = [0, 0]
    together = mesh.data_ranks * micro_batch_size

    def micro_batches() -> Iterator[MicroBatch]:
        pairs = iter(reader)
        while window := list(islice(pairs, MICRO_BATCHES_SORTED * together)):
            window.sort(key=lambda pair: pair.size, reverse=True)
            for begin in range(0, len(window), together):
                group = window[begin : begin + together]
                if on_progress is not None:
                    on_progress(*done)
                    done[0] += sum(int(np.count_nonzero(pair.tokens & LEARNED)) for pair in group)
                    done[1] += len(group)
                yield padded(group[mesh.data_rank :: mesh.data_ranks], pairing)

    nats, targets = finite_loss(model, micro_batches(), mesh=mesh)
    if targets == 0:
        raise UserError(
            f"no pair can be evaluated: {reader.left_out} are too long, {reader.unusable} hold no answer; raise"
            " --sequence-length, or write --long-pairs cut_prompt_end"
        )
    return Evaluation(nats, targets, 0, reader.pairs)


def padded(pairs: list[Pair], pairing: Pairing) -> MicroBatch:
    """A micro-batch of pairs; of none, one token without target: the process still has to run the model.

    Attention is causal, so a causal model's tokens do not see the padding behind them.
    """
    pairs = pairs or [Pair(np.zeros(2, dtype=np.uint32), int(pairing.format.encoder_decoder))]
    ids = [torch.from_numpy((pair.tokens & ID).astype(np.int64)) for pair in pairs]
    shape = len(pairs), max(pair.size - (pair.prompt or 1) for pair in pairs)
    inputs = torch.full(shape, pairing.padding or 0, dtype=torch.int64)  # (B, T)
    targets = torch.full_like(inputs, IGNORED)
    prompts = torch.full((len(pairs), max(1, *(pair.prompt for pair in pairs), 1)), pairing.padding or 0)  # (B, S)
    mask = torch.zeros_like(prompts, dtype=torch.bool)
    for row, (pair, tokens) in enumerate(zip(pairs, ids, strict=True)):
        learned = torch.from_numpy((pair.tokens & LEARNED) != 0)
        if pair.prompt:
            prompts[row, : pair.prompt], mask[row, : pair.prompt] = tokens[: pair.prompt], True
            tokens, learned = (
                torch.cat([tokens.new_tensor([pairing.decoder_start]), tokens[pair.prompt :]]),
                torch.cat([learned.new_tensor([False]), learned[pair.prompt :]]),
            )
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = torch.where(learned[1:], tokens[1:], IGNORED)
    if not pairing.format.encoder_decoder:
        return inputs, targets, None
    return EncoderDecoderInputs(prompts, mask, inputs), targets, None
