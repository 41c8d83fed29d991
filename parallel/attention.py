"""The choice of attention kernels."""

import torch

from parallel.config import AttentionConfig
from parallel.errors import UserError


def choose_attention(config: AttentionConfig, *, device_type: str) -> list[str]:
    """Restrict scaled_dot_product_attention in this process to one backend. Returns lines for the log.

    If that backend cannot compute what the model needs, torch raises "No available kernel" instead of using another.
    Raises UserError for a backend that the device does not have.
    """
    backend = config.backend
    if device_type != "cuda" and backend == "cudnn":
        raise UserError(f'attention.backend = "{backend}" needs a CUDA device; write "auto", "flash" or "math"')
    # Set all four each time: they are process-wide, and an earlier run in this process may have changed them.
    torch.backends.cuda.enable_flash_sdp(backend in ("auto", "flash"))
    # Not offered as a choice: up to torch 2.13 it does not support grouped queries, which SmolLM3 and Llama 3 use.
    torch.backends.cuda.enable_mem_efficient_sdp(backend == "auto")
    torch.backends.cuda.enable_cudnn_sdp(backend in ("auto", "cudnn"))
    torch.backends.cuda.enable_math_sdp(backend in ("auto", "math"))
    return [] if backend == "auto" else [f"attention: {backend} kernels only"]
