"""Validation loss and a sampled continuation."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.loss import IGNORED
from parallel.reduce import sum_over_processes


@torch.no_grad()
def mean_loss(model: nn.Module, micro_batches: Iterable[tuple[Tensor, Tensor]], *, device: torch.device) -> float:
    """Mean loss per target token, in nats, over the micro-batches of all processes, each (inputs, targets) (B, T).

    Every process must bring equally many micro-batches: sharded layers gather their weights together.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, target tokens
    for inputs, targets in micro_batches:
        totals[0] += model(inputs, targets)
        totals[1] += (targets != IGNORED).sum()
    loss, tokens = sum_over_processes(totals).tolist()
    return loss / tokens


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
        logits = model(batch.to(device))[0, len(window) - 1].float().cpu()  # (V,)
        if not logits.isfinite().all():
            break
        probabilities = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return text[len(prompt) :]
