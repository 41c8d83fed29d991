"""Validation loss against a plain sum, and sampling against direct calls of the model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.decoder import Decoder
from models.loss import IGNORED
from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.fsdp import materialize
from recipes.evaluation.evaluate import Evaluation, continuation, evaluate_text
from recipes.evaluation.losses import mean_loss
from recipes.evaluation.opened import Sampling
from tests.build import cpu_mesh
from tests.processes import run_processes

CPU = torch.device("cpu")
SMALL = replace(SIZES["smollm3_debug"], layers=4, width=32, feed_forward_width=48, vocabulary=64, init_std=0.3)
ROWS, LENGTH = 12, 16


def build() -> Decoder:
    """A small model whose predictions are far from uniform."""
    with torch.device("meta"):
        model = Decoder(SMALL)
    materialize(model, device=CPU, seed=0)
    return model


# Validation loss


def validation_batches() -> tuple[Tensor, Tensor]:
    """Inputs and targets, (ROWS, LENGTH) each; row r has r + 1 targets, so that a mean of row means would differ."""
    tokens = torch.randint(SMALL.vocabulary, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, row + 1 :] = IGNORED
    return inputs, targets


def micro_batches(inputs: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor, None]]:
    return [(*pair, None) for pair in zip(inputs.split(size), targets.split(size), strict=True)]


def loss_of_rows(first: int, last: int, *, micro_batch: int) -> float:
    inputs, targets = validation_batches()
    inputs, targets = inputs[first:last], targets[first:last]
    return mean_loss(build(), micro_batches(inputs, targets, micro_batch), mesh=cpu_mesh())


def test_every_target_token_has_the_same_weight(alone: None) -> None:
    inputs, targets = validation_batches()
    with torch.no_grad():
        logits = build()(inputs).double()
    losses = [
        cross_entropy(logits[row, position], targets[row, position]).item()
        for row in range(ROWS)
        for position in range(row + 1)
    ]
    expected = sum(losses) / len(losses)
    means_of_rows = [cross_entropy(logits[row, : row + 1], targets[row, : row + 1]).item() for row in range(ROWS)]
    assert abs(sum(means_of_rows) / ROWS - expected) > 0.01  # the mistake that this test would find
    for micro_batch in (1, 2, 5, 12):
        assert loss_of_rows(0, ROWS, micro_batch=micro_batch) == pytest.approx(expected, rel=1e-6)


def share_of_the_loss() -> float:
    """The mean loss to which each process brings its share of the rows."""
    world = start("cpu", seed=0)
    share = ROWS // world.size
    loss = loss_of_rows(world.rank * share, (world.rank + 1) * share, micro_batch=3)
    stop()
    return loss


@pytest.mark.slow
def test_the_mean_over_processes_weighs_tokens_and_not_processes(alone: None) -> None:
    whole = loss_of_rows(0, ROWS, micro_batch=3)
    halves = [loss_of_rows(0, ROWS // 2, micro_batch=3), loss_of_rows(ROWS // 2, ROWS, micro_batch=3)]
    assert abs(sum(halves) / 2 - whole) > 0.01  # the mean of the processes' means would be wrong
    found = run_processes(2, share_of_the_loss)
    assert found[0] == found[1] == pytest.approx(whole, rel=1e-9)


def test_evaluation_leaves_no_gradients(alone: None) -> None:
    model = build()
    inputs, targets = validation_batches()
    mean_loss(model, [(inputs, targets, None)], mesh=cpu_mesh())
    continuation(model, [1], Sampling(1), shape=(1, LENGTH), device=CPU)
    assert all(parameter.grad is None for parameter in model.parameters())


class Seen(Decoder):
    """Records the shapes it is called with."""

    shapes: list[tuple[int, ...]]

    def forward(self, tokens: Tensor, *others: Any, **options: Any) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        return super().forward(tokens, *others, **options)


def on_text(characters: int, *, length: int, spoil: bool = False) -> list[tuple[int, ...]]:
    """Shapes of the forward passes over one document of one token per character and one for its end."""
    start("cpu", seed=0)
    try:
        model = Seen(SMALL)
        model.shapes = []
        with torch.no_grad():
            model.norm.weight.fill_(float("nan") if spoil else 1.0)
        tokenizer = SimpleNamespace(encode_batch=lambda texts: [[1] * len(text) for text in texts], end_of_document=0)
        found = evaluate_text(
            model,
            ["a" * characters],
            tokenizer=tokenizer,
            shape=(2, length),
            mesh=cpu_mesh(),
        )
        assert found.tokens == characters
        return model.shapes
    finally:
        stop()


def test_a_nan_loss_is_an_error() -> None:
    with pytest.raises(UserError, match="the loss is nan"):
        on_text(5, length=8, spoil=True)


def test_a_perplexity_that_overflows_is_none() -> None:
    assert Evaluation(nats=1e4, tokens=10, text_bytes=10, documents=1).perplexity is None


# Sampling


def sample(
    prompt: list[int], *, tokens: int = 20, rows: int = 2, end: int | None = None, **options: float
) -> list[int]:
    sampling = Sampling(**{"max_tokens": tokens, "temperature": 0.8} | options)
    return continuation(build(), prompt, sampling, shape=(rows, LENGTH), device=CPU, ends=() if end is None else [end])


def test_a_continuation_depends_only_on_model_prompt_and_seed() -> None:
    prompt = [3, 1, 4]
    found = sample(prompt)
    assert prompt == [3, 1, 4]
    assert len(found) == 20 and all(0 <= token < SMALL.vocabulary for token in found)
    torch.manual_seed(99)
    assert sample(prompt) == found
    assert sample(prompt, rows=1) == found
    assert sample(prompt, tokens=7) == found[:7]
    assert sample(prompt, seed=1) != found
    assert sample([3, 1, 5]) != found
    assert sample(prompt, tokens=0) == []


def test_a_continuation_at_low_temperature_takes_the_likeliest_tokens() -> None:
    """Beyond the window too: neither the padding on its right nor the tokens that fell out on its left change it."""
    model, text = build(), [5, 6]
    for _ in range(LENGTH + 6):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[-LENGTH:]]))[0, -1].argmax()))
    assert len(set(text)) > 3  # not the same token again and again
    assert sample([5, 6], tokens=LENGTH + 6, temperature=1e-4) == text[2:]


def test_a_continuation_sees_only_the_last_window_of_a_long_prompt() -> None:
    prompt = torch.randint(SMALL.vocabulary, (3 * LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    found = sample(prompt)
    assert len(found) == 20
    assert found == sample(prompt[-LENGTH:])
    assert found != sample(prompt[:LENGTH])


def test_a_diverged_model_continues_nothing() -> None:
    model = build()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    assert continuation(model, [1], Sampling(5), shape=(1, LENGTH), device=CPU) == []


def test_a_continuation_ends_before_the_token_that_ends_an_answer() -> None:
    whole = sample([5, 6])
    assert sample([5, 6], end=whole[4]) == whole[: whole.index(whole[4])]


def test_a_continuation_ignores_what_precedes_its_document() -> None:
    arguments: dict[str, Any] = {"sampling": Sampling(6, temperature=0.8), "shape": (1, LENGTH), "device": CPU}
    alone = continuation(build(), [5, 6], **arguments)
    assert continuation(build(), [9, 7, 63, 5, 6], end_of_document=63, **arguments) == alone
    assert continuation(build(), [9, 7, 63, 5, 6], **arguments) != alone
