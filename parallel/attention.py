"""Which kernels attention may run on."""

import torch

from parallel.config import AttentionConfig
from parallel.errors import UserError


def choose_attention(config: AttentionConfig, *, device_type: str) -> list[str]:
    """Let scaled_dot_product_attention use the backend asked for and no other, in this process; lines for the log.

    Where that one cannot compute what the model asks for, torch raises "No available kernel" and takes no other.
    Raises UserError for a backend that the device does not have.
    """
    backend = config.backend
    if device_type != "cuda" and backend == "cudnn":
        raise UserError(f'attention.backend = "{backend}" is a kernel of CUDA devices; write "auto", "flash" or "math"')
    # All four each time: they belong to the process, and an earlier run in it may have set them.
    torch.backends.cuda.enable_flash_sdp(backend in ("auto", "flash"))
    # No choice of its own: in torch up to 2.13 it takes no grouped queries, which SmolLM3 and Llama-3 have.
    torch.backends.cuda.enable_mem_efficient_sdp(backend == "auto")
    torch.backends.cuda.enable_cudnn_sdp(backend in ("auto", "cudnn"))
    torch.backends.cuda.enable_math_sdp(backend in ("auto", "math"))
    return [] if backend == "auto" else [f"attention: {backend} kernels only"]
