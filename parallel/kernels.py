"""The choice of kernels: the attention backend, and torch.compile block by block."""

import os
import shutil

import torch
from torch import nn

from models.interface import blocks_of
from parallel.config import AttentionConfig, CompileConfig
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


def compile_blocks(model: nn.Module, config: CompileConfig, *, device_type: str) -> str:
    """Compile every block in place. Returns a line for the log.

    fullgraph=True: a graph break is an error, not a quiet loss of speed. Raises UserError where the CPU backend would
    find no C++ compiler.
    """
    if not config.enabled:
        return "compile: off"
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if device_type == "cpu" and not any(shutil.which(compiler) for compiler in compilers):
        raise UserError(
            f"compile.enabled = true needs a C++ compiler on a CPU ({' or '.join(compilers)} not found)"
            "; install one or write compile.enabled = false"
        )
    blocks = blocks_of(model)
    # Autotuned with CUDA graphs it would be "max-autotune"; docs/benchmarks/step.md says why not.
    mode = "max-autotune-no-cudagraphs" if config.autotune else None
    for block in blocks:
        block.compile(fullgraph=True, mode=mode)
    return f"compile: {len(blocks)} blocks in place, {'autotuned ' if config.autotune else ''}during the first step"
