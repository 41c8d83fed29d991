"""Parameters and matrix products of a model of transformers, counted on a model without values.

S tokens of a prompt, which an encoder reads; T tokens of a decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import AttentionFlops, ModelConfig
from models.decoder import build_model
from models.encoder_decoder import EncoderDecoderInputs

STEP = 8
"""Tokens between the lengths at which products are counted; no model's longest text is shorter than three of them."""
TRAINING = 3
"""FLOPs of a training step over those of its forward pass: the backward pass has two products for each one."""


@dataclass(frozen=True)
class Lengths:
    """Sums over the texts of a batch."""

    decoder: float
    """Sum of T, the decoder's tokens."""
    decoder_squared: float
    """Sum of T x T, what the decoder's self-attention multiplies."""
    encoder: float = 0
    """Sum of S, the encoder's tokens."""
    encoder_squared: float = 0
    """Sum of S x S, what the encoder's self-attention multiplies."""
    crossed: float = 0
    """Sum of S x T, what cross-attention multiplies."""

    def __truediv__(self, batches: float) -> "Lengths":
        """The mean of so many batches."""
        return Lengths(*(amount / batches for amount in vars(self).values()))


@cache
def parameters(config: ModelConfig) -> int:
    """Number of parameters; a tied weight counts once. Raises ValueError for a model that transformers cannot build."""
    return sum(parameter.numel() for parameter in _model(config).parameters())


def step_flops(config: ModelConfig, lengths: Lengths, attention: AttentionFlops) -> float:
    """FLOPs of a training step on texts of these lengths, without recomputation. Raises ValueError as forward_flops().

    "causal" halves the attention of the decoder to itself; that of an encoder, and to it, has no causal mask. A layer
    that attends within a window counts as if it attended to the whole text.
    """
    each = forward_flops(config)
    found = sum(getattr(each, name) * amount for name, amount in vars(lengths).items())
    if attention == "causal":
        found -= each.decoder_squared * lengths.decoder_squared / 2
    return TRAINING * found


@cache
def forward_flops(config: ModelConfig) -> Lengths:
    """FLOPs of the forward pass with full attention, for each of these sums.

    Raises ValueError for a model that transformers cannot build, and for one whose products do not follow from lengths
    as those of linears and of attention do.
    """
    model = _model(config)
    # Attention looks at the values of masks unless tensors are fake ones. Its two products, not one kernel, count.
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.to_empty(device="cpu").eval()

        def flops(encoder: int, decoder: int) -> int:
            with FlopCounterMode(display=False) as counter:
                model(_inputs(encoder, decoder))
            return int(counter.get_total_flops())

        found = _solved(flops, is_encoder_decoder=config.is_encoder_decoder)
    if found is None:
        raise ValueError(
            f'the FLOPs of a "{config.settings.get("model_type")}" are not those of linears and of attention to whole'
            " texts; models with sparse or local attention cannot be trained"
        )
    return found


def _model(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return build_model(config)


def _inputs(encoder: int, decoder: int) -> Tensor | EncoderDecoderInputs:
    """One text, or one pair where there is a prompt."""
    tokens = torch.zeros(1, decoder, dtype=torch.int64)
    if not encoder:
        return tokens
    prompt = torch.zeros(1, encoder, dtype=torch.int64)
    return EncoderDecoderInputs(prompt, torch.ones_like(prompt, dtype=torch.bool), tokens)


def _solved(flops: Callable[[int, int], int], *, is_encoder_decoder: bool) -> Lengths | None:
    """The factors of S, S x S, T, T x T and S x T in flops(S, T); None if it is not a sum of these."""
    first = STEP if is_encoder_decoder else 0
    start, longer, longest = (flops(first, count * STEP) for count in (1, 2, 3))
    decoder_squared = (longest - 2 * longer + start) / (2 * STEP**2)
    encoder = encoder_squared = crossed = 0.0
    if is_encoder_decoder:
        more, most = (flops(count * STEP, STEP) for count in (2, 3))
        encoder_squared = (most - 2 * more + start) / (2 * STEP**2)
        crossed = (flops(2 * STEP, 2 * STEP) - longer - more + start) / STEP**2
        encoder = (more - start) / STEP - 3 * STEP * encoder_squared - STEP * crossed
    decoder = (longer - start) / STEP - 3 * STEP * decoder_squared - first * crossed
    constant = start - STEP * (decoder + encoder) - STEP**2 * (decoder_squared + encoder_squared + crossed)
    return None if constant else Lengths(decoder, decoder_squared, encoder, encoder_squared, crossed)
