"""What the server of tests/processes.py imports once, so that the processes it forks need not."""

import gc
from contextlib import suppress

import pytest  # noqa: F401
import tokenizers  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.flop_counter  # noqa: F401

import parallel.order  # noqa: F401
import recipes.checkpoint.checkpoints
import recipes.cluster.stragglers
import recipes.data.open_data
import recipes.lab.prove.prove
import recipes.recipe.command_line
import recipes.training.build_run
import recipes.training.run
import recipes.training.trainer  # noqa: F401

with suppress(ImportError):  # optional; two seconds in each process that asks for it
    pass

# Only imports: a thread or an operator that ran here would not survive the fork.
# Frozen objects are not looked at by a child's garbage collector, so the memory pages they are on stay shared.
gc.collect()
gc.freeze()
