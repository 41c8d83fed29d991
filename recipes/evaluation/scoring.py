"""What a model says about token ids: their log-likelihoods, and how it goes on; on any mesh, the same on every process.

Sharded layers gather their weights together, so all processes make the same number of forward passes. Those that have
nothing left to compute repeat some other text, whose result is dropped. B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.cache import KeyValueCache
from models.decoder import Decoder
from parallel.kernels import without_plans
from parallel.mesh import Mesh
from parallel.passes import sum_over_group
from recipes.evaluation.generate import PREFILL_TOKENS
from recipes.evaluation.losses import without_dropout
from recipes.evaluation.opened import Sampling, next_token

ROWS_IN_FLOAT32 = 256
"""Logits are copied in float32 for this many tokens at a time."""


@dataclass(frozen=True)
class Scored:
    """A (sharded) model, and how texts are put through it."""

    model: nn.Module
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    """The type that the model computes in."""
    max_length: int
    """Tokens that it can look at."""
    batch_tokens: int
    """Tokens of a forward pass of one process, padding included; a longer text is a batch of its own."""
    on_batch: Callable[[], object] = lambda: None
    """Called before each forward pass."""


@contextmanager
def as_it_is(model: nn.Module) -> Iterator[None]:
    """The model without gradients and dropout; compiled blocks run as written, or every new shape would be compiled.

    Nor does cuDNN plan for every one."""
    with without_dropout(model), torch.no_grad(), without_plans(), torch.compiler.set_stance("force_eager"):
        yield


def log_likelihoods(
    scored: Scored, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation after its context, and whether each of its tokens is the likeliest one.

    A context that is too long loses tokens at its start. Requests that differ in the last token alone, as choices of
    one letter, are one row. requests: (context, continuation), neither empty, no continuation above max_length.
    """
    rows: dict[tuple[int, ...], list[int]] = {}  # tokens that the model looks at -> numbers of requests
    for number, (context, continuation) in enumerate(requests):
        tokens = (*context, *continuation)[-(scored.max_length + 1) : -1]
        rows.setdefault(tokens, []).append(number)
    found = torch.zeros(len(requests), 2, dtype=torch.float64, device=scored.device)
    mesh = scored.mesh
    with as_it_is(scored.model):
        for group in _batches(scored, sorted(rows, key=lambda tokens: (-len(tokens), tokens))):
            own = group[mesh.data_rank :: mesh.data_ranks]
            scored.on_batch()
            logits = scored.model(_padded(scored, own or group[:1]))  # (B, T, V)
            for row, tokens in enumerate(own):
                for number in rows[tokens]:
                    continuation = requests[number][1]
                    found[number] = _score(logits[row, : len(tokens)][-len(continuation) :], continuation)
            del logits  # before the next ones
    return [(nats, bool(greedy)) for nats, greedy in sum_over_group(found, mesh.data_group).tolist()]


def _batches(scored: Scored, ordered: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """The rows that all data ranks compute together. ordered: the longest first."""
    begin = 0
    while begin < len(ordered):
        rows = max(1, scored.batch_tokens // _width(scored, len(ordered[begin]))) * scored.mesh.data_ranks
        yield ordered[begin : begin + rows]
        begin += rows


def _width(scored: Scored, length: int) -> int:
    """The length of a row that can be cut over the mesh."""
    degrees = scored.mesh.degrees
    return length + -length % (degrees.tensor * (1 if degrees.context == 1 else 2 * degrees.context))


def _padded(scored: Scored, rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, T), filled up on the right: attention is causal, so that no token sees the filling."""
    inputs = torch.zeros(len(rows), _width(scored, max(map(len, rows))), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
    return inputs.to(scored.device)


def _score(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """logits: (T, V), of T tokens. Returns (2,): their log-likelihood, and 1 if each is the likeliest one."""
    targets = torch.tensor(tokens, device=logits.device)
    nats, greedy = torch.zeros((), dtype=torch.float64, device=logits.device), targets.new_ones(())
    for part, own in zip(logits.split(ROWS_IN_FLOAT32), targets.split(ROWS_IN_FLOAT32), strict=True):
        values = part.float()
        nats += (values.gather(-1, own[:, None])[:, 0] - values.logsumexp(-1)).sum(dtype=torch.float64)
        greedy &= (values.argmax(-1) == own).all()
    return torch.stack([nats, greedy.double()])


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    tokens: Sequence[int]
    ends: Collection[int]
    """Tokens that end the text; they are not part of it."""
    stops: Callable[[Sequence[int]], bool]
    """Whether the text is complete with these new tokens."""
    sampling: Sampling


Pass = tuple[Tensor, KeyValueCache | None, int]
"""A forward pass: tokens (1, T), the cache that they join, and which row of logits is needed."""


def continuations(scored: Scored, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The new tokens after each prompt. Each data rank takes the next prompt when it is done with one."""
    mesh = scored.mesh
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].tokens))
    own = order[mesh.data_rank :: mesh.data_ranks]
    texts: dict[int, list[int]] = {}
    passes = _passes(scored, {number: prompts[number] for number in own}, texts)
    idle: Pass = _padded(scored, [[0]]), None, 0
    with as_it_is(scored.model):
        wanted = next(passes, None)
        while sum_over_group(torch.tensor(int(wanted is not None), device=scored.device), mesh.data_group):
            scored.on_batch()
            tokens, cache, row = wanted or idle
            options = {} if cache is None else {"cache": cache}
            logits = scored.model(tokens, **options)[0, row]  # (V,)
            if wanted is not None:
                try:
                    wanted = passes.send(logits)
                except StopIteration:
                    wanted = None
    longest = max((prompt.sampling.max_tokens for prompt in prompts), default=0)
    found = torch.zeros(len(prompts), longest + 1, dtype=torch.int64, device=scored.device)
    for number, text in texts.items():
        found[number, : len(text) + 1] = torch.tensor([len(text), *text])
    return [row[1 : row[0] + 1] for row in sum_over_group(found, mesh.data_group).tolist()]


def _passes(scored: Scored, prompts: dict[int, Prompt], texts: dict[int, list[int]]) -> Generator[Pass, Tensor, None]:
    """Asks for one forward pass after the other, is sent the logits (V,), and fills in the texts."""
    for number, prompt in prompts.items():
        text: list[int] = []
        generator = torch.Generator().manual_seed(prompt.sampling.seed)
        most = prompt.sampling.max_tokens
        new, cache = list(prompt.tokens), _cache(scored, len(prompt.tokens) + most)
        while len(text) < most:
            if cache is None:
                seen = [*prompt.tokens, *text]
                logits = yield _padded(scored, [seen]), None, len(seen) - 1
            else:
                for piece in torch.tensor([new], device=scored.device).split(PREFILL_TOKENS, dim=1):
                    logits = yield piece, cache, -1
            token = next_token(logits, prompt.sampling, generator=generator, seen=[*prompt.tokens, *text])
            if token in prompt.ends:
                break
            text.append(token)
            if prompt.stops(text):
                break
            new = [token]
        texts[number] = text


def _cache(scored: Scored, length: int) -> KeyValueCache | None:
    """What a text grows in; None where it cannot: with tensor parallelism a row of one token cannot be cut."""
    if not isinstance(scored.model, Decoder) or scored.mesh.tensor is not None:
        return None
    if not scored.model.config.part("attention").cache:
        return None
    return KeyValueCache(scored.model.config, batch=1, max_length=length, dtype=scored.dtype, device=scored.device)
