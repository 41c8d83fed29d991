"""Loss on text, and on the answers of pairs, each by itself, of finished weights; a sampled continuation.

B batch or pairs, T tokens, S sequence length, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn

from models.config import ModelConfig
from models.documents import Documents
from models.loss import IGNORED
from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.data.batches import MicroBatch
from recipes.data.config import BatchConfig
from recipes.data.loader import DataLoader
from recipes.data.pair_batches import packed, padded
from recipes.data.pair_sequences import Limits, Pairing, Pairs, fitting
from recipes.data.text.pair_format import ID, LEARNED, PairEncoder, shortened
from recipes.data.text.row import LONGEST_ROW, Row
from recipes.data.text.tokenizer import Tokenizer, batches_of, parallel_tokenizers
from recipes.evaluation.losses import finite_loss, without_dropout
from recipes.evaluation.opened import Sampling, next_token
from recipes.files.border import ForeignError
from recipes.files.reading import shorten

if TYPE_CHECKING:
    from models.encoder_decoder import EncoderDecoderInputs

ENCODED_TOGETHER = 256
MICRO_BATCHES_SORTED = 32
"""Pairs of so many micro-batches are sorted by length, so that little is padded."""
ALONE = Row("", 0, 0, "")

Pair = tuple[np.ndarray, int]
"""The tokens of a pair, (n,) uint32 as stored; how many of them the encoder reads, which is 0 in a causal model."""


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    nats: float
    """Summed loss over all target tokens, the end-of-document tokens among them."""
    tokens: int
    """Target tokens: all but the first of the text, or of each document where border targets are left out."""
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
    shape: tuple[int, int],
    document_mask: bool = False,
    border_targets: bool = True,
    mesh: Mesh,
    on_progress: Callable[[int, int], object] = lambda tokens, documents: None,
) -> Evaluation:
    """Evaluate a (sharded) model on documents, each ended by the end-of-document token, cut into whole sequences.

    Each sequence is computed by one data rank. All processes tokenize the whole text, which costs little beside the
    model, and so agree on it. Every token but the first, or those that document_mask and border_targets leave out, is a
    target once, whatever the number of processes.
    Raises UserError for a text of fewer than two tokens, and for a loss that is NaN or infinite.

    Args:
        model: on the devices of the mesh.
        documents: the text.
        tokenizer: the one the model was trained with.
        shape: sequences per forward pass of a process, and tokens per sequence.
        document_mask, border_targets: as in the [data] of a recipe.
        mesh: the mesh that the model is sharded over.
        on_progress: receives the numbers of tokens and of whole documents so far, before each forward pass.
    """
    rows, length = shape
    counted = {"bytes": 0, "documents": 0}
    done = [0, 0]  # tokens, documents

    def tokens() -> Iterator[list[int]]:
        with parallel_tokenizers():
            for texts in batches_of(documents, size=len):
                encoded = _encoded(texts, tokenizer, first=counted["documents"] + 1)
                counted["bytes"] += sum(len(text.encode()) for text in texts)
                counted["documents"] += len(texts)
                for ids in encoded:
                    yield [*ids, tokenizer.end_of_document]

    def micro_batches() -> Iterator[MicroBatch]:
        sequences = _sequences(tokens(), length)
        while together := list(islice(sequences, mesh.data_ranks * rows)):
            on_progress(*done)
            done[0] += sum(len(sequence) - 1 for sequence in together)
            done[1] += sum(sequence[1:].count(tokenizer.end_of_document) for sequence in together)
            inputs, targets = _padded(together[mesh.data_rank * rows :][:rows])
            inside = Documents.of(inputs, end_of_document=tokenizer.end_of_document) if document_mask else None
            if document_mask and not border_targets:
                targets.masked_fill_(inputs == tokenizer.end_of_document, IGNORED)
            yield inputs, targets, inside

    nats, targets = finite_loss(model, micro_batches(), mesh=mesh)
    if targets == 0:
        raise UserError("the text has fewer than two tokens, so there is nothing to predict")
    return Evaluation(nats, targets, counted["bytes"], counted["documents"])


def _encoded(texts: list[str], tokenizer: Tokenizer, *, first: int) -> Iterator[list[int]]:
    """The tokens of each text. first: number of the first document. Raises UserError for one that has none."""
    try:
        return tokenizer.encode_batch(texts)
    except ForeignError:  # the library does not say for which text
        for number, text in enumerate(texts, first):
            try:
                tokenizer.ids(text)
            except ForeignError as error:
                raise UserError(f"document {number:,}, '{shorten(text)}': {error}; or leave it out") from None
        raise


def _padded(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of sequences; of none, one token without target: the process still has to run the model."""
    longest = max((len(sequence) - 1 for sequence in sequences), default=1)  # the last of a text may be short
    inputs = torch.zeros(max(1, len(sequences)), longest, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, sequence in enumerate(sequences):
        inputs[row, : len(sequence) - 1] = torch.tensor(sequence[:-1])
        targets[row, : len(sequence) - 1] = torch.tensor(sequence[1:])
    return inputs, targets


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
    sampling: Sampling,
    *,
    shape: tuple[int, int],
    device: torch.device,
    end_of_document: int | None = None,
    ends: Collection[int] = (),
) -> list[int]:
    """Sample tokens after `prompt`, the same on every process. Ends early where the model diverged (NaN, infinity).

    Args:
        prompt: token ids.
        sampling: how many tokens to sample, and how.
        shape: the (B, T) of a training micro-batch. Each window has it, so that compiled blocks are not compiled again.
        device: where the model computes.
        end_of_document: this token's id, for a model whose attention stays inside documents.
        ends: ids of tokens of which each ends the text.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    for _ in range(sampling.max_tokens):
        window = text[-shape[1] :]
        batch = torch.zeros(shape, dtype=torch.int64)  # attention is causal: what follows the window does not matter
        batch[:, : len(window)] = torch.tensor(window)
        inside = None if end_of_document is None else Documents.of(batch, end_of_document=end_of_document).to(device)
        logits = model(batch.to(device), documents=inside)[0, len(window) - 1]  # (V,)
        if not logits.isfinite().all():
            break
        if (token := next_token(logits, sampling, generator=generator)) in ends:
            break
        text.append(token)
    return text[len(prompt) :]


@torch.no_grad()
def answer_of(
    model: nn.Module, prompt: list[int], *, tokens: int, start: int, end: int, device: torch.device
) -> list[int]:
    """The likeliest tokens that a decoder writes about what its encoder reads, the same on every process.

    Args:
        prompt: token ids for the encoder.
        tokens: how many to write at most.
        start: the token that a decoder begins with.
        end: the token that ends an answer.
        device: where the model computes.
    """
    from models.encoder_decoder import EncoderDecoderInputs
    from recipes.data.pair_sequences import PADDED_TO

    # Lengths that training has, so that compiled blocks are not compiled again.
    length, room = (-(-count // PADDED_TO) * PADDED_TO for count in (len(prompt), tokens))
    read = torch.tensor([prompt + [end] * (length - len(prompt))], device=device)  # (1, S)
    mask = torch.arange(length, device=device)[None] < len(prompt)
    answer: list[int] = []
    while len(answer) < tokens:
        written = torch.full((1, room), end, dtype=torch.int64)
        written[0, : len(answer) + 1] = torch.tensor([start, *answer])
        logits = model(EncoderDecoderInputs(read, mask, written.to(device)))[0, len(answer)]  # (V,)
        token = int(logits.argmax())
        if token == end or not logits.isfinite().all():
            break
        answer.append(token)
    return answer


def show_sample(
    model: nn.Module,
    loader: DataLoader,
    batch: BatchConfig,
    tokens: int,
    *,
    device: torch.device,
    seed: int,
    log: Callable[..., None],
) -> None:
    """Let the model continue the beginning of a held-out document, or answer a held-out prompt, and log both."""
    tokenizer, config = loader.tokenizer, cast(ModelConfig, model.config)
    pairs = loader.pairing is not None
    length = batch.sequence_length
    if not config.is_encoder_decoder:
        length = length - 1 if pairs else min(32, length // 2)
    first = next(iter(loader.validation.values())).sequences  # of pairs, it begins with the end of a prompt
    prompt, end = first.beginning(length), tokenizer.end_of_document
    with without_dropout(model):
        if config.is_encoder_decoder:
            held_out, *_ = loader.validation_batches(1).values()
            start = int(cast("EncoderDecoderInputs", next(held_out)[0]).decoder_tokens[0, 0])
            answer = answer_of(model, prompt, tokens=tokens, start=start, end=end, device=device)
        else:
            answer = continuation(
                model,
                prompt,
                Sampling(tokens, temperature=0.8, seed=seed),
                shape=(batch.micro_batch_size, batch.sequence_length),
                device=device,
                end_of_document=loader.document_boundary,
                ends=[end, *_ends_of_chats(loader)] if pairs else (),
            )
    found = (
        "a held-out prompt, and how the model answers it:" if pairs else "a held-out text, and how the model goes on:"
    )
    log(found, style="bold")
    log(tokenizer.decode(prompt), style="dim")
    log(tokenizer.decode(answer))


def _ends_of_chats(loader: DataLoader) -> Collection[int]:
    """The tokens that end the answers of chats, where the run trains on them."""
    if loader.pairing is None or not loader.pairing.format.template:
        return ()
    from recipes.data.text.chat import ends_of_answers
    from recipes.data.text.pair_format import template_of

    return ends_of_answers(template_of(loader.pairing.format, loader.tokenizer), loader.tokenizer)[0]


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
