"""The answer of an encoder-decoder model to a held-out prompt. S tokens of the prompt, V vocabulary."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from models.encoder_decoder import EncoderDecoderInputs
from recipes.data.config import BatchConfig
from recipes.data.loader import DataLoader
from recipes.data.pair_sequences import PADDED_TO
from recipes.evaluation.losses import without_dropout


def show_answer(
    model: nn.Module,
    loader: DataLoader,
    batch: BatchConfig,
    tokens: int,
    *,
    device: torch.device,
    log: Callable[..., None],
) -> None:
    """Let the model answer the first held-out prompt, in at most this many tokens, and log both."""
    tokenizer, prompt = loader.tokenizer, loader.held_out_tokens(batch.sequence_length)
    held_out, *_ = loader.validation_batches(1).values()
    inputs = cast(EncoderDecoderInputs, next(held_out)[0])
    start, end = int(inputs.decoder_tokens[0, 0]), tokenizer.end_of_document
    with without_dropout(model):
        answer = answer_of(model, prompt, tokens=tokens, start=start, end=end, device=device)
    log("a held-out prompt, and how the model answers it:", style="bold")
    log(tokenizer.decode(prompt), style="dim")
    log(tokenizer.decode(answer))


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
