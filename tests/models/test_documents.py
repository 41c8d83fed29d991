"""Packed documents: a packed batch gives the same results as each document alone, by mask and by lengths."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ModelConfig
from models.decoder import Decoder
from models.documents import SMALLEST_LENGTHS, Documents, Mask
from models.loss import IGNORED
from models.sizes import SIZES
from parallel.activation_checkpoint import checkpoint_blocks
from parallel.config import ActivationCheckpointingConfig
from tests.lengths_on_cpu import lengths_on_cpu
from tests.models.test_decoder import build

END = 96
VOCABULARY = 97
TOLERANCE = 1e-5  # of losses and gradients, relative (a gradient's to the largest magnitude in the same tensor)
SMOLLM3 = replace(SIZES["smollm3_debug"], vocabulary=VOCABULARY, init_std=0.2)
LLAMA = replace(
    SIZES["llama3_debug"],
    vocabulary=VOCABULARY,
    init_std=0.2,
    rope_scaling="llama3",
    rope_original_length=8,
    rope_low_frequency_factor=1.0,
    rope_high_frequency_factor=4.0,
)
MODELS = {"SmolLM3": SMOLLM3, "Llama, scaled RoPE": LLAMA}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def packed(*rows: list[int]) -> Tensor:
    """Tokens (B, T) of rows of documents of these lengths; each but the last in a row ends with END."""
    generator = torch.Generator().manual_seed(len(rows))
    tokens = torch.randint(END, (len(rows), sum(rows[0])), generator=generator)
    for row, lengths in zip(tokens, rows, strict=True):
        assert sum(lengths) == len(row)
        row[torch.tensor(lengths).cumsum(0)[:-1] - 1] = END
    return tokens


def documents_of(tokens: Tensor) -> Documents:
    return Documents.of(tokens, end_of_document=END)


BATCH = [
    [24],  # a row of one document
    [7, 12, 5],
    [1, 22, 1],  # END as the first and the last but one token; documents of one token
    [10, 1, 1, 1, 11],  # several consecutive END tokens
    [23, 1],
]


# Where documents are


@pytest.mark.parametrize("end_share", [0.0, 0.02, 0.2, 1.0])
def test_positions_lengths_and_mask_equal_those_found_token_by_token(end_share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(END, (5, 40), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < end_share] = END
    documents = documents_of(tokens)
    positions, lengths, sees = [], [], torch.zeros(5, 40, 40, dtype=torch.bool)
    for b, row in enumerate(tokens.tolist()):
        begin = 0
        for t in range(40):
            if t > 0 and row[t - 1] == END:
                begin = t
            if t == begin:
                lengths.append(0)
            lengths[-1] += 1
            positions.append(t - begin)
            sees[b, t, begin : t + 1] = True
    assert documents.positions.flatten().tolist() == positions
    sizes = documents.cumulative_lengths.diff()
    assert sizes[: len(lengths)].tolist() == lengths
    assert not sizes[len(lengths) :].any()
    assert len(sizes) >= SMALLEST_LENGTHS and len(sizes).bit_count() == 1  # padded to a power of two
    mask = documents.for_attention_in(torch.float32)
    assert isinstance(mask, Mask)
    assert torch.equal(mask.sees[:, 0], sees)
    # In a document of L tokens, a token attends to (L + 1) / 2 on average; FLOPs count L / 2, as for a sequence.
    assert (2 * sees.sum() - tokens.numel()).item() == documents.squared_lengths


def test_attention_flops_of_a_packed_batch_equal_those_of_its_documents() -> None:
    lengths = [7, 12, 5]
    mean_length = documents_of(packed(lengths)).squared_lengths / 24
    for convention in ("causal", "full"):
        alone = sum(length * SMOLLM3.flops_per_token(length, convention) for length in lengths)
        assert 24 * SMOLLM3.flops_per_token(mean_length, convention) == pytest.approx(alone, rel=1e-9)


def test_a_copy_on_a_device_is_equal() -> None:
    documents = documents_of(packed(*BATCH))
    copy = documents.to(torch.device("cpu"))
    assert torch.equal(copy.positions, documents.positions)
    assert torch.equal(copy.cumulative_lengths, documents.cumulative_lengths)
    assert copy.squared_lengths == documents.squared_lengths


# The model


def results(model: Decoder, tokens: Tensor, targets: Tensor, documents: Documents | None) -> tuple[Tensor, Any]:
    """Summed loss, and gradients by name."""
    model.zero_grad()
    loss = model(tokens, targets, documents=documents)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def one_by_one(model: Decoder, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    """The same from each document alone, without passing documents to the model."""
    model.zero_grad()
    total = torch.zeros(())
    for row, row_targets, positions in zip(tokens, targets, documents_of(tokens).positions, strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(row)], strict=True):
            loss = model(row[None, start:end], row_targets[None, start:end])
            loss.backward()
            total += loss.detach()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    tokens = packed(*BATCH)
    targets = tokens.roll(-1, 1)
    targets[1, 3:9] = IGNORED
    return tokens, targets


def assert_close(found: tuple[Tensor, Any], expected: tuple[Tensor, Any], tolerance: float = TOLERANCE) -> None:
    assert abs(found[0] - expected[0]) < tolerance * abs(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() < tolerance * gradient.abs().max(), name


@every_model
def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents(config: ModelConfig) -> None:
    model, (tokens, targets) = build(config), batch()
    expected = one_by_one(model, tokens, targets)
    assert_close(results(model, tokens, targets, documents_of(tokens)), expected)
    without = results(model, tokens, targets, None)
    assert abs(without[0] - expected[0]) > 1e-3 * abs(expected[0])  # without the mask the loss differs


@every_model
def test_changing_one_document_changes_no_bit_of_the_others(config: ModelConfig) -> None:
    """Masked tokens have a weight of exactly 0."""
    model, tokens = build(config), packed(*BATCH)
    documents = documents_of(tokens)
    changed = tokens.clone()
    changed[1, 7:18] = (changed[1, 7:18] + 1) % END  # the second of three documents, except its END
    changed[4, :22] = (changed[4, :22] + 1) % END
    assert torch.equal(documents_of(changed).positions, documents.positions)
    with torch.no_grad():
        before, after = model(tokens, documents=documents), model(changed, documents=documents)
    same = torch.ones(tokens.shape, dtype=torch.bool)
    same[1, 7:19] = same[4, :23] = False
    assert torch.equal(before[same], after[same])
    assert (before[~same] != after[~same]).any(-1).all()


def test_a_cache_together_with_documents_is_refused() -> None:
    from models.cache import KeyValueCache

    model, tokens = build(SMOLLM3), packed([24])
    cache = KeyValueCache(SMOLLM3, batch=1, max_length=24, dtype=torch.float32, device=tokens.device)
    with pytest.raises(ValueError, match="cannot go with documents"):
        model(tokens, cache=cache, documents=documents_of(tokens))


# By lengths: everything around the kernel, which exists only on GPUs. tests/gpu tests the kernel itself.


@pytest.fixture
def by_lengths() -> Iterator[None]:
    with lengths_on_cpu():
        yield


@every_model
@pytest.mark.parametrize("asks", [True, False], ids=["with enable_gqa", "as torch 2.11, without"])
def test_attention_by_lengths_takes_grouped_heads_as_they_are_and_equals_the_documents_one_by_one(
    config: ModelConfig, asks: bool, by_lengths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import varlen

    kernel, heads = varlen.varlen_attn, set()
    has_option = varlen.ASKS_FOR_GROUPED_QUERIES

    def noted(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
        heads.add((query.shape[1], key.shape[1], value.shape[1]))
        assert asks or set(options) == {"window_size"}
        return kernel(query, key, value, *others, **options | ({"enable_gqa": True} if has_option else {}))

    if asks and not has_option:
        pytest.skip("this torch does not have enable_gqa")
    monkeypatch.setattr(varlen, "ASKS_FOR_GROUPED_QUERIES", asks)
    monkeypatch.setattr(varlen, "varlen_attn", noted)
    model, (tokens, targets) = build(config), batch()
    assert_close(results(model, tokens, targets, documents_of(tokens)), one_by_one(model, tokens, targets))
    assert heads == {(config.heads, config.key_value_heads, config.key_value_heads)}


@pytest.mark.parametrize("every", [0, 2])
def test_windows_and_scales_by_lengths_are_those_of_a_mask(every: int) -> None:
    config = replace(SMOLLM3, window=5, full_attention_every=every, attention_scale_width=3, init_std=0.05)
    model, (tokens, targets) = build(config), batch()
    expected = results(model, tokens, targets, documents_of(tokens))
    assert not torch.equal(results(build(SMOLLM3), tokens, targets, documents_of(tokens))[0], expected[0])
    with lengths_on_cpu():
        assert_close(results(model, tokens, targets, documents_of(tokens)), expected)


class AttentionCalls(TorchDispatchMode):
    """Counts forward calls of the kernel."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += operator is torch.ops.torch_attn._varlen_attn.default
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "calls"), [("none", 4), ("selective", 4), ("full", 8)])
def test_only_full_checkpointing_computes_attention_twice(mode: Any, calls: int, by_lengths: None) -> None:
    model, (tokens, targets) = build(SMOLLM3), batch()
    expected = one_by_one(model, tokens, targets)
    checkpoint_blocks(model, ActivationCheckpointingConfig(mode))
    with AttentionCalls() as attention:
        loss, gradients = results(model, tokens, targets, documents_of(tokens))
    assert attention.count == calls
    plain = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in gradients.items()}
    assert_close((loss, plain), expected)


def compilations() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["mask", "lengths"])
def test_other_documents_do_not_recompile_blocks(path: str, request: pytest.FixtureRequest) -> None:
    """Compiles once with and once without rotary embeddings, and again when the padded lengths first grow."""
    if path == "lengths":
        request.getfixturevalue("by_lengths")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    config = replace(SMOLLM3, layers=2, no_rope_every=2)
    model, plain = build(config), build(config)
    checkpoint_blocks(model, ActivationCheckpointingConfig("selective"))
    for block in model.blocks:
        # Not Inductor, which is slow: it compiles a mask in tests/models/test_parity.py and lengths in tests/gpu.
        block.compile(fullgraph=True, backend="aot_eager")
    shorter = [[[24], [7, 17]], [[12, 12], [1, 1, 22]], [[3] * 8, [24]], [[1] * 13 + [11], [23, 1]]]
    longer = [[[1] * 23 + [1], [24]], [[1] * 24, [1] * 24], [[2] * 12, [2] * 12]]
    for rows in shorter + longer:
        tokens = packed(*rows)
        loss, gradients = results(model, tokens, tokens.roll(-1, 1), documents_of(tokens))
        names = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in gradients.items()}
        assert_close((loss, names), results(plain, tokens, tokens.roll(-1, 1), documents_of(tokens)))
        assert compilations() == (4 if path == "lengths" and rows in longer else 2), rows
