"""Loss on text: during a run, and of finished weights on any text; and a sampled continuation.

B batch, T tokens, S sequence length.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from models.loss import IGNORED
from parallel.dist import World
from parallel.errors import UserError
from parallel.reduce import sum_over_processes
from recipes.data.tokens import text_batches
from recipes.sampling import next_token
from recipes.tokenizer import Tokenizer, parallel_tokenizers


@torch.no_grad()
def summed_loss(
    model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]], *, device: torch.device
) -> tuple[float, int]:
    """(summed loss in nats, target tokens) over the micro-batches of all processes, each (inputs, targets) (B, T).

    Every process must bring equally many micro-batches: sharded layers gather their weights together.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in micro_batches:
        totals[0] += model(inputs, targets)
        totals[1] += (targets != IGNORED).sum()
    loss, tokens = sum_over_processes(totals).tolist()
    return loss, int(tokens)


def mean_loss(model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]], *, device: torch.device) -> float:
    """Mean loss per target token, in nats; arguments as in summed_loss()."""
    loss, tokens = summed_loss(model, micro_batches, device=device)
    return loss / tokens


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    nats: float
    """Summed loss over all target tokens, the end-of-document tokens among them."""
    tokens: int
    """Target tokens: all but the first of the text."""
    text_bytes: int
    """UTF-8 bytes of the text."""
    documents: int

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float | None:
        """None where it is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return None

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, as loss and perplexity are not."""
        return self.nats / math.log(2) / self.text_bytes


def evaluate_text(
    model: nn.Module,
    documents: Iterable[str],
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
    micro_batch_size: int,
    world: World,
) -> Evaluation:
    """Evaluate a (sharded) model on documents, each ended by the end-of-document token, cut into whole sequences.

    Sequence i is the business of one process; all of them tokenize the whole text, which costs little beside the
    model, and so agree on it. Every token but the first is a target once, whatever the number of processes.
    """
    counted = {"bytes": 0, "documents": 0}

    def tokens() -> Iterator[list[int]]:
        with parallel_tokenizers():
            for texts in text_batches(documents):
                counted["bytes"] += sum(len(text.encode()) for text in texts)
                counted["documents"] += len(texts)
                for ids in tokenizer.encode_batch(texts):
                    yield [*ids, tokenizer.end_of_document]

    def micro_batches() -> Iterator[tuple[Tensor, Tensor]]:
        sequences = _sequences(tokens(), sequence_length)
        while together := list(islice(sequences, world.size * micro_batch_size)):
            own = together[world.rank * micro_batch_size :][:micro_batch_size]
            # The last sequence of the text may be short, and a process may have none left: it computes all the same.
            longest = max((len(sequence) - 1 for sequence in own), default=1)
            inputs = torch.zeros(max(1, len(own)), longest, dtype=torch.int64)
            targets = torch.full_like(inputs, IGNORED)
            for row, sequence in enumerate(own):
                inputs[row, : len(sequence) - 1] = torch.tensor(sequence[:-1])
                targets[row, : len(sequence) - 1] = torch.tensor(sequence[1:])
            yield inputs.to(world.device), targets.to(world.device)

    nats, targets = summed_loss(model, micro_batches(), device=world.device)
    if targets == 0:
        raise UserError("the text has no two tokens, so there is nothing to predict")
    if not math.isfinite(nats):
        raise UserError(f"the loss is {nats}: the model's weights are spoiled, or do not fit --dtype")
    return Evaluation(nats, targets, counted["bytes"], counted["documents"])


def _sequences(documents: Iterable[list[int]], sequence_length: int) -> Iterator[list[int]]:
    """S + 1 tokens at a time, the last of one being the first of the next; the last sequence may be shorter."""
    waiting: list[int] = []
    for ids in documents:
        waiting += ids
        start = 0
        while len(waiting) - start > sequence_length:
            yield waiting[start : start + sequence_length + 1]
            start += sequence_length
        waiting = waiting[start:]
    if len(waiting) > 1:
        yield waiting


@torch.no_grad()
def continuation(
    model: nn.Module,
    prompt: list[int],
    *,
    tokens: int,
    shape: tuple[int, int],
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
) -> list[int]:
    """Sample `tokens` tokens after `prompt`. Every process calls it with the same arguments and gets the same answer.

    shape: the (B, T) of a training micro-batch. The window has that shape at every step, so that compiled blocks see
    no new one; causality makes what lies right of the last token harmless. Ends early at a logit that is no number, as
    those of a diverged model are. Meant for a short look at a model.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(tokens):
        window = text[-shape[1] :]
        batch = torch.zeros(shape, dtype=torch.int64)
        batch[:, : len(window)] = torch.tensor(window)
        logits = model(batch.to(device))[0, len(window) - 1]  # (V,)
        if not logits.isfinite().all():
            break
        text.append(next_token(logits, temperature=temperature, generator=generator))
    return text[len(prompt) :]
