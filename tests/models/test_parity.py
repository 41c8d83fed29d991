"""Our decoder against transformers' own SmolLM3 and Llama: equal weights give equal logits, losses and gradients.

The shapes are deliberately awkward. Differences of logits are absolute, with logits of standard deviation about 1; the
difference of a gradient is relative to the largest magnitude in the same tensor (single entries may be close to zero).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.attention import rope_tables
from models.config import ModelConfig, TextFacts
from models.decoder import Decoder
from models.documents import Documents
from models.hf import config_to_hf, hf_name
from models.hf_reading import config_from_hf
from models.loss import IGNORED
from models.sizes import SIZES
from parallel.config import Float8Config, FSDPConfig
from parallel.dist import start, stop
from parallel.fsdp import plain_name
from tests.build import build_model

TOLERANCE = 1e-5
LENGTH = 96  # tokens: beyond the original lengths of the scaled rotary embeddings below
END = 0  # ends a document, where documents are masked


def llama3_rope(*, theta: float, factor: float, original_length: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_length,
    }


SHARED = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # the usual 0.02 makes logits so small that all models are close
    # transformers never gives the row of a padding token a gradient.
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# These two represent the families in the slower tests.
SMOLLM3, LLAMA = "SmolLM3, irregular pattern", "Llama 3.1, scaled RoPE"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM3, no RoPE on every 4th layer": ("smollm3", {"num_hidden_layers": 8}),
    SMOLLM3: (
        "smollm3",
        {"num_hidden_layers": 5, "no_rope_layers": [0, 1, 1, 0, 0], "rms_norm_eps": 1e-5},
    ),
    "SmolLM3, head_dim not width / heads, untied, odd vocabulary": (
        "smollm3",
        {"head_dim": 24, "tie_word_embeddings": False, "vocab_size": 101},
    ),
    "SmolLM3, one key/value head, no RoPE at all": ("smollm3", {"num_key_value_heads": 1, "no_rope_layers": [0] * 4}),
    "SmolLM3, scaled RoPE, 6 heads in a width of 64": (
        "smollm3",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 18,
            "no_rope_layers": [0, 1, 1, 0],
            "rope_parameters": llama3_rope(theta=2e6, factor=4.0, original_length=24),
        },
    ),
    "Llama 2, all key/value heads, odd vocabulary": (
        "llama",
        {"num_key_value_heads": 4, "vocab_size": 257, "rms_norm_eps": 1e-5},
    ),
    "Llama, one key/value head, tied, wide heads": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 40, "tie_word_embeddings": True},
    ),
    LLAMA: (
        "llama",
        {"head_dim": 64, "rope_parameters": llama3_rope(theta=5e5, factor=8.0, original_length=32)},
    ),
    "Llama 3.2, scaled RoPE, tied": (
        "llama",
        {
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": llama3_rope(theta=5e5, factor=32.0, original_length=16),
        },
    ),
    "Llama, odd widths, 3 queries to a key, large epsilon": (
        "llama",
        {"hidden_size": 63, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10, "rms_norm_eps": 1e-2}
        | {"intermediate_size": 51},
    ),
}


class Results(NamedTuple):
    """What a forward and a backward pass gave."""

    logits: Tensor
    """(B, T, V)."""
    loss: Tensor
    """Mean over the targets."""
    gradients: dict[str, Tensor]
    """By transformers' names."""


def new_reference(case: str, *, attention: str = "sdpa") -> Any:
    """transformers' model of a case with random weights, float32; always the same ones."""
    family, shape = CASES[case]
    config_class, model_class = {
        "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHARED, **shape}, attn_implementation=attention))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norm weights start as ones, which would hide mix-ups
                parameter += 0.2 * torch.randn_like(parameter)
    return model


@cache
def reference(case: str, *, attention: str = "sdpa") -> Any:
    """The same, shared by tests, which must not change it."""
    return new_reference(case, attention=attention)


@cache
def reference_results(case: str, *, attention: str = "sdpa", masked: bool = False) -> Results:
    """The float32 results of transformers' model."""
    return their_results(reference(case, attention=attention), masked=masked)


def shape_of(theirs: Any) -> ModelConfig:
    return config_from_hf(theirs.config.to_dict())


def with_weights(model: Decoder, theirs: Any) -> Decoder:
    """Copies transformers' weights into `model`, plain or parallelized on a group of one; returns it."""
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            getattr(parameter, "_local_tensor", parameter).copy_(weights.pop(hf_name(plain_name(name))))
    assert not weights
    return model


def text(theirs: Any) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), and labels: the tokens with some of them ignored."""
    tokens = torch.randint(theirs.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 10:30] = labels[1, -7:] = IGNORED
    return tokens, labels


def packed_text(theirs: Any) -> tuple[Tensor, Tensor]:
    """The same, divided into documents of 1 to 60 tokens."""
    tokens, labels = text(theirs)
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    ends[0, [11, 12, 13, 73]] = ends[1, [0, 40, LENGTH - 1]] = True
    return tokens.clamp(min=END + 1).masked_fill(ends, END), labels.masked_fill(ends, END)


def in_documents(tokens: Tensor) -> dict[str, Tensor]:
    """Arguments that keep transformers inside documents: positions (B, T) and an additive mask (B, 1, T, T)."""
    ends = (tokens == END).long()
    document = ends.cumsum(1) - ends  # (B, T)
    sees = (document[:, :, None] == document[:, None]).tril()  # (B, T, T)
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    return {"position_ids": sees.sum(-1) - 1, "attention_mask": mask[:, None]}


def their_results(theirs: Any, *, masked: bool = False) -> Results:
    """The results of transformers' model, which shifts the labels itself."""
    tokens, labels = packed_text(theirs) if masked else text(theirs)
    theirs.zero_grad()
    out = theirs(tokens, labels=labels, use_cache=False, **(in_documents(tokens) if masked else {}))
    out.loss.backward()
    gradients = {name: parameter.grad.float() for name, parameter in theirs.named_parameters()}
    return Results(out.logits.detach().float(), out.loss.detach().float(), gradients)


def our_results(model: Decoder, theirs: Any, *, masked: bool = False) -> Results:
    """The results of our model on the same text."""
    tokens, labels = packed_text(theirs) if masked else text(theirs)
    documents = Documents.of(tokens, end_of_document=END) if masked else None
    targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
    model.zero_grad()
    logits = model(tokens, documents=documents).detach()
    loss = model(tokens, targets, documents=documents) / (targets != IGNORED).sum()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[hf_name(plain_name(name))] = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return Results(logits.float(), loss.detach(), gradients)


def differences(ours: Results, theirs: Results) -> dict[str, float]:
    """The largest difference of logits (absolute), loss (relative) and gradients (relative to each one's largest)."""
    assert theirs.logits.std() > 0.5
    assert ours.gradients.keys() == theirs.gradients.keys()
    return {
        "logits": (ours.logits - theirs.logits).abs().max().item(),
        "loss": ((ours.loss - theirs.loss).abs() / theirs.loss).item(),
        "gradients": max(
            ((ours.gradients[name] - gradient).abs().max() / gradient.abs().max()).item()
            for name, gradient in theirs.gradients.items()
        ),
    }


@cache
def plain_results(case: str, *, masked: bool = False) -> Results:
    """The float32 results of our model, neither sharded nor compiled."""
    theirs = reference(case)
    return our_results(with_weights(Decoder(shape_of(theirs)), theirs), theirs, masked=masked)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_float32_equals_transformers(case: str, attention: str) -> None:
    found = differences(plain_results(case), reference_results(case, attention=attention))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_packed_documents_equal_transformers_with_a_document_mask(case: str, attention: str) -> None:
    """transformers gets positions that restart in each document, and a block-diagonal causal mask."""
    theirs = reference_results(case, attention=attention, masked=True)
    found = differences(plain_results(case, masked=True), theirs)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (LLAMA, {"rope_scaling": "none"}),
        (LLAMA, {"rope_factor": 7.0}),
        (LLAMA, {"rope_original_length": 48}),
        (LLAMA, {"rope_theta": 4e5}),
        (SMOLLM3, {"no_rope_layers": (0, 3)}),
        (SMOLLM3, {"norm_eps": 1e-6}),
    ],
    ids=str,
)
def test_a_small_mistake_exceeds_the_tolerance(case: str, change: dict[str, Any]) -> None:
    theirs = reference(case)
    ours = our_results(with_weights(Decoder(replace(shape_of(theirs), **change)), theirs), theirs)
    assert max(differences(ours, reference_results(case)).values()) > 10 * TOLERANCE


@pytest.mark.parametrize("size", ["smollm3_3b", "llama2_7b", "llama3_8b", "llama3_3b", "llama3_405b"])
def test_rotary_angles_of_real_sizes_equal_transformers_bit_for_bit_at_every_position(size: str) -> None:
    """A wrong last bit in a frequency changes angles at far positions by hundredths; short texts would not show it."""
    ours = SIZES[size]
    config = LlamaConfig(**config_to_hf(ours, TextFacts(context_length=131072)) | {"model_type": "llama"})
    positions = torch.arange(0, 131072, 7)
    their_cos, their_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])  # (1, T, H), two equal halves
    for table, theirs in zip(rope_tables(ours, positions), (their_cos, their_sin), strict=True):
        assert torch.equal(torch.cat((table, table), dim=-1), theirs[0])


# Parallelized by parallel/order.py, in a process group of one


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one, with nothing compiled before."""
    torch.compiler.reset()
    start("cpu", seed=0)
    yield
    stop()


class Float8Product(torch.autograd.Function):
    """x weight^T in float32 with every operand rounded to 8 bits, from the description of torchao's recipes.

    "tensorwise": one scale per tensor, gradients in e5m2. "rowwise": a scale that is a power of 2 for each row or
    column that is summed over, all in e4m3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return rounded(x, recipe, sum_over=-1) @ rounded(weight, recipe, sum_over=-1).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        rows, x_rows = gradient.flatten(0, -2), x.flatten(0, -2)
        dtype = torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
        x_gradient = rounded(rows, recipe, sum_over=-1, dtype=dtype) @ rounded(weight, recipe, sum_over=0)
        weight_gradient = rounded(rows, recipe, sum_over=0, dtype=dtype).T @ rounded(x_rows, recipe, sum_over=0)
        return x_gradient.reshape(x.shape), weight_gradient, None


def rounded(values: Tensor, recipe: str, *, sum_over: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    largest = values.abs().max() if recipe == "tensorwise" else values.abs().amax(sum_over, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double().clamp(min=1e-12)  # gradients of ignored tokens are 0
    if recipe == "rowwise":
        scale = 2 ** scale.log2().floor()
    scale = scale.float()
    return (values * scale).to(dtype).float() / scale


@cache
def float8_reference_results(case: str, recipe: str, *, masked: bool) -> Results:
    """The results of transformers' model with every linear except the output projection in emulated float8."""
    theirs = new_reference(case)
    for name, linear in theirs.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            linear.forward = partial(lambda linear, x: Float8Product.apply(x, linear.weight, recipe), linear)
    return their_results(theirs, masked=masked)


def float8_results(case: str, recipe: Any, *, masked: bool) -> Results:
    """The results of our model in emulated float8, not compiled."""
    theirs = reference(case)
    model, report = build_model(shape_of(theirs), float8=Float8Config(recipe=recipe, emulate=True))
    assert "linears converted, emulated" in report[0]
    return our_results(with_weights(model, theirs), theirs, masked=masked)


@pytest.mark.parametrize(("recipe", "masked"), [("tensorwise", False), ("rowwise", False), ("rowwise", True)], ids=str)
@pytest.mark.parametrize("case", [SMOLLM3, LLAMA])
def test_float8_equals_transformers_in_float8(case: str, recipe: Any, masked: bool, alone: None) -> None:
    """In float32 around the float8 products, so that hardly any value is rounded to a different float8 number."""
    found = differences(
        float8_results(case, recipe, masked=masked), float8_reference_results(case, recipe, masked=masked)
    )
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("masked", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("case", [SMOLLM3, LLAMA])
def test_float8_changes_the_logits_far_beyond_the_tolerance(case: str, recipe: str, masked: bool) -> None:
    in_float8 = float8_reference_results(case, recipe, masked=masked)
    assert relative_norm(in_float8.logits, reference_results(case, masked=masked).logits) > 0.05


@pytest.mark.slow
def test_compiled_float8_equals_transformers_in_float8(alone: None) -> None:
    """On documents; with rowwise, whose scales are powers of 2: compiled kernels may round sums, but not scales.

    A value between two float8 numbers may still be rounded to the other one; the tolerance allows a few such values.
    On the machine this was written on, no bit differs. Without float8 the logits differ by 0.1.
    """
    theirs = float8_reference_results(LLAMA, "rowwise", masked=True)
    model, report = build_model(
        shape_of(reference(LLAMA)),
        float8=Float8Config(recipe="rowwise", emulate=True),
        mode="selective",
        compiled=True,
    )
    assert not any(line.endswith(": off") for line in report)
    ours = our_results(with_weights(model, reference(LLAMA)), reference(LLAMA), masked=True)
    assert relative_norm(ours.logits, theirs.logits) < 0.01
    assert abs(ours.loss - theirs.loss) / theirs.loss < 1e-4
    assert worst_gradient(ours, theirs) < 0.1


@pytest.mark.slow
def test_compiled_and_checkpointed_equals_transformers(alone: None) -> None:
    theirs = reference(SMOLLM3)
    model, report = build_model(shape_of(theirs), mode="full", compiled=True)
    assert not any(line.endswith(": off") for line in report[1:])
    ours = our_results(with_weights(model, theirs), theirs)
    assert max(differences(ours, reference_results(SMOLLM3)).values()) < TOLERANCE


@pytest.mark.parametrize("case", [SMOLLM3, LLAMA])
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(case: str, alone: None) -> None:
    """The error of the logits and of the worst gradient is at most 1.2 times theirs; the loss is within 1e-3."""
    exact = reference_results(case)
    model, _ = build_model(shape_of(reference(case)), fsdp=FSDPConfig(param_dtype="bfloat16"))
    ours = our_results(with_weights(model, reference(case)), reference(case))
    theirs = their_results(new_reference(case).bfloat16())
    assert 0 < relative_norm(ours.logits, exact.logits) < 1.2 * relative_norm(theirs.logits, exact.logits)
    assert abs(ours.loss - exact.loss) / exact.loss < 1e-3
    assert worst_gradient(ours, exact) < 1.2 * worst_gradient(theirs, exact)


def relative_norm(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of the expected values."""
    return ((values - expected).norm() / expected.norm()).item()


def worst_gradient(found: Results, expected: Results) -> float:
    """The largest relative norm over all gradients."""
    return max(relative_norm(found.gradients[name], gradient) for name, gradient in expected.gradients.items())
