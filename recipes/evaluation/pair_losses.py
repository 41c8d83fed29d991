"""Loss on the answers of pairs, each by itself. B pairs, S tokens of the longest prompt, T of the longest answer."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
from torch import nn

from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.data.batches import MicroBatch
from recipes.data.pair_batches import packed, padded
from recipes.data.pair_sequences import Limits, Pairing, Pairs, fitting
from recipes.data.text.pair_format import ID, LEARNED, PairEncoder, shortened
from recipes.data.text.row import LONGEST_ROW, Row
from recipes.data.text.tokenizer import Tokenizer, parallel_tokenizers
from recipes.evaluation.evaluate import Evaluation
from recipes.evaluation.losses import finite_loss

ENCODED_TOGETHER = 256
MICRO_BATCHES_SORTED = 32
"""Pairs of so many micro-batches are sorted by length, so that little is padded."""
ALONE = Row("", 0, 0, "")


Pair = tuple[np.ndarray, int]
"""The tokens of a pair, (n,) uint32 as stored; how many of them the encoder reads, which is 0 in a causal model."""


class PairReader:
    """The pairs of a source that are not too long. `left_out` counts the others, `unusable` what makes no pair."""

    def __init__(self, texts: Iterable[str], *, tokenizer: Tokenizer, pairing: Pairing, length: int, long: str) -> None:
        """texts: pairs as JSON. length: tokens of a prompt for an encoder, of a whole pair otherwise. long: as
        data.long_pairs. Raises UserError for a chat template that cannot be compiled."""
        self._texts, self._reads_prompts = texts, pairing.format.encoder_decoder
        self._limits = Limits(length, LONGEST_ROW if self._reads_prompts else None, long)
        self._encoder = PairEncoder(pairing.format, tokenizer)
        self.pairs = self.left_out = self.unusable = 0

    def __iter__(self) -> Iterator[Pair]:
        texts = iter(self._texts)
        with parallel_tokenizers():
            while together := list(islice(texts, ENCODED_TOGETHER)):
                rows, stored = self._encoder.encode([ALONE._replace(text=text) for text in together])
                self.unusable += sum(bool(row.problem) for row in rows)
                first = np.array([np.flatnonzero(tokens & LEARNED)[0] for tokens in stored], dtype=np.int64)
                lengths, index = np.array([*map(len, stored)], dtype=np.int64), np.arange(len(stored))
                pairs, left_out = fitting(Pairs(index, lengths, first, np.zeros_like(index)), self._limits)
                self.left_out += int(left_out.sum())
                self.pairs += len(pairs)
                for number, prompt, cut in zip(pairs.starts, pairs.prompts, pairs.cut, strict=True):
                    tokens = shortened(stored[number], int(cut), long=self._limits.long, keeps_end=self._reads_prompts)
                    yield tokens, int(prompt - cut) if self._reads_prompts else 0


def evaluate_pairs(
    model: nn.Module,
    reader: PairReader,
    *,
    pairing: Pairing,
    micro_batch_size: int,
    mesh: Mesh,
    on_progress: Callable[[int, int], object] = lambda tokens, pairs: None,
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
            window.sort(key=lambda pair: len(pair[0]), reverse=True)
            for begin in range(0, len(window), together):
                group = window[begin : begin + together]
                on_progress(*done)
                done[0] += sum(int(np.count_nonzero(tokens & LEARNED)) for tokens, _ in group)
                done[1] += len(group)
                yield micro_batch(group[mesh.data_rank :: mesh.data_ranks], pairing)

    nats, targets = finite_loss(model, micro_batches(), mesh=mesh)
    if targets == 0:
        raise UserError(
            f"no pair can be evaluated: {reader.left_out} are too long, {reader.unusable} hold no answer; raise"
            " --sequence-length, or write --long-pairs cut_prompt_end"
        )
    return Evaluation(nats, targets, 0, reader.pairs)


def micro_batch(pairs: list[Pair], pairing: Pairing) -> MicroBatch:
    """A micro-batch of pairs; of none, one token without target: the process still has to run the model.

    Attention is causal, so a causal model's tokens do not see the padding behind them.
    """
    padding = pairing.padding or 0
    if not pairing.format.encoder_decoder:
        length = max((len(tokens) - 1 for tokens, _ in pairs), default=1)
        inputs, targets, _ = packed([[tokens] for tokens, _ in pairs] or [[]], length=length, padding=padding)
        return inputs, targets, None
    ids = [((tokens & ID).astype(np.int64), prompt) for tokens, prompt in pairs]
    texts = [(tokens[:prompt], tokens[prompt:], True) for tokens, prompt in ids]
    texts = texts or [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), False)]
    shape = max(len(prompt) for prompt, _, _ in texts), max(len(answer) for _, answer, _ in texts)
    return *padded(texts, shape=shape, start=pairing.decoder_start, padding=padding), None
