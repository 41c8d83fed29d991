"""What an encoder-decoder model reads. B pairs, S tokens of the longest prompt, T of the longest answer."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EncoderDecoderInputs:
    """The inputs of a batch of pairs; the targets, (B, T) with IGNORED where an answer has ended, come beside it."""

    encoder_tokens: Tensor
    """(B, S) int64: each prompt, then padding."""
    encoder_mask: Tensor
    """(B, S) bool: False at padding."""
    decoder_tokens: Tensor
    """(B, T) int64: the model's start token, then the answer as far as there is room, then padding."""

    @property
    def shape(self) -> torch.Size:
        """(B, T), as of the targets."""
        return self.decoder_tokens.shape

    def to(self, device: torch.device, *, non_blocking: bool = True) -> "EncoderDecoderInputs":
        """A copy on the device. From pinned memory, the host does not wait for the copy to a GPU."""
        return EncoderDecoderInputs(*(one.to(device, non_blocking=non_blocking) for one in vars(self).values()))

    def pin_memory(self) -> "EncoderDecoderInputs":
        """A copy in pinned memory, which a GPU can read asynchronously."""
        return EncoderDecoderInputs(*(tensor.pin_memory() for tensor in vars(self).values()))
