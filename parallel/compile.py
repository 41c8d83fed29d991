"""torch.compile, block by block."""

import os
import shutil

from torch import nn

from models.interface import blocks_of
from parallel.config import CompileConfig
from parallel.errors import UserError


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
