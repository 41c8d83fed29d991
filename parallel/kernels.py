"""The choice of kernels: the attention backend, and torch.compile block by block and for the loss."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ModelConfig
from models.interface import blocks_of, interface_of
from models.loss import Kernels, overwrite_by_exponentials, sum_exponentials
from parallel.config import AttentionConfig, CompileConfig
from parallel.errors import UserError

UNTIMED: dict[str, Any] = {"triton.autotune_pointwise": False}
"""Options of torch.compile: take the first configuration of a kernel without reductions."""


def choose_attention(
    config: AttentionConfig, *, device_type: str, dtype: torch.dtype = torch.bfloat16, masked: bool = False
) -> list[str]:
    """Restrict attention in this process to one backend. Returns lines for the log. masked: as of kernel_of_auto().

    If that backend cannot compute what the model needs, torch raises "No available kernel" instead of using another.
    Raises UserError for a backend that the device or the installation does not have, or has not for this dtype.
    """
    backend = config.backend
    if device_type == "cuda" and backend in ("flash", "cudnn") and dtype == torch.float32:
        raise UserError(
            f'attention.backend = "{backend}" computes in 16 bits on a GPU; write fsdp.param_dtype = "bfloat16", or'
            ' backend = "auto"'
        )
    if device_type != "cuda" and backend in ("cudnn", "flash3"):
        raise UserError(f'attention.backend = "{backend}" needs a CUDA device; write "auto", "flash" or "math"')
    # Set all five each time: they are process-wide, and an earlier run in this process may have changed them.
    _use_flash3(backend == "flash3")
    torch.backends.cuda.enable_flash_sdp(backend in ("auto", "flash", "flash3"))
    # Not offered as a choice: up to torch 2.13 it does not support grouped queries, which SmolLM3 and Llama 3 use.
    torch.backends.cuda.enable_mem_efficient_sdp(backend == "auto")
    # cuDNN's backward pass is not deterministic, which attention by lengths does not ask. For rows of several lengths,
    # which torch 2.15 gives it on SM90 and SM100, one user of a GH200 has 60 k tokens/s instead of 280 k (pytorch
    # #187770): flash, as before, until that is measured here.
    by_choice = not masked and not torch.are_deterministic_algorithms_enabled()
    torch.backends.cuda.enable_cudnn_sdp(backend == "cudnn" or (backend == "auto" and by_choice))
    torch.backends.cuda.enable_math_sdp(backend in ("auto", "math"))
    return [] if backend == "auto" else [f"attention: {backend} kernels only"]


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, attention that torch chooses is not cuDNN's, which plans anew for every length (pytorch #155958).

    For texts that grow token by token. Process-wide; what attention.backend = "cudnn" asks for stays.
    """
    cuda = torch.backends.cuda
    plans = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(plans and not cuda.flash_sdp_enabled())
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(plans)


def kernel_of_auto(
    config: ModelConfig, *, dtype: torch.dtype, tokens: tuple[int, int], masked: bool, device: torch.device
) -> tuple[str, str]:
    """What torch says it chooses on this device for attention.backend = "auto", and a line for the log.

    tokens: those of a micro-batch, (B, T). masked: whether attention stays inside documents, or is of parts of rows.
    """
    rows, length = tokens
    few = min(length, 128)  # enough to decide
    query, key = (
        torch.empty(1, heads, few, config.head_width, dtype=dtype, device=device, requires_grad=True)
        for heads in (config.heads, config.key_value_heads)
    )
    whole = (one[:, :, :1].expand(-1, -1, length, -1) for one in (query, key))  # without memory of its own
    if (masked or config.attention_sinks) and (kernel := _kernel_for_lengths(*whole)):
        return kernel, f"attention: {kernel} kernels for rows of several lengths"
    mask = torch.ones(few, few, dtype=torch.bool, device=device) if masked else None
    grouped = config.heads != config.key_value_heads
    kernel = _name_of(
        torch._fused_sdp_choice(query, key, key, attn_mask=mask, is_causal=not masked, enable_gqa=grouped)
    )
    if kernel != "math" and not config.attention_sinks:
        windows = ", flash kernels in windows" if config.window and dtype != torch.float32 else ""
        return kernel, f"attention: {kernel} kernels, as torch chooses{windows}"
    scores = rows * config.heads * length**2 * dtype.itemsize
    return "math", (
        f"attention: WARNING: torch has only math kernels for {str(dtype).removeprefix('torch.')} and these heads,"
        f" which write all scores: {scores / 1e9:.3g} GB in each block, several times; bfloat16 has others"
    )


def _name_of(backend: int) -> str:
    return torch.nn.attention.SDPBackend(backend).name.removesuffix("_ATTENTION").lower()


def _kernel_for_lengths(query: Tensor, key: Tensor) -> str:
    """The name of the kernel; empty where the device has none."""
    from models.documents import Lengths, has_kernel_for_lengths

    if not has_kernel_for_lengths(query):
        return ""
    from models.varlen import attention_by_lengths

    lengths = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
    with _NotComputed() as attention:
        attention_by_lengths(query, key, key, Lengths(lengths))
    return attention.kernel


class _NotComputed(TorchDispatchMode):
    """Inside, attention by lengths only says which kernel it would take."""

    kernel = "flash"
    """The only one for causal attention up to torch 2.14, whose operator is not told."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.torch_attn._varlen_attn.default:
            return function(*args, **(kwargs or {}))
        told = dict(zip((one.name for one in function._schema.arguments), args, strict=False))  # without defaults
        self.kernel = _name_of(told["backend"]) if "backend" in told else "flash"
        return args[0].new_empty(1).expand_as(args[0]), args[0].new_empty(1), args[0].new_empty(1)


def _use_flash3(asked: bool) -> None:
    """Let torch's flash operators, the one for document masks included, run FlashAttention 3, or torch's own kernels.

    Raises UserError where torch cannot, on GPUs other than Hopper or without a package that fits this torch.
    """
    if torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()
    if not asked:
        return
    if (capability := torch.cuda.get_device_capability())[0] != 9:
        found = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
        raise UserError(f'attention.backend = "flash3" needs a Hopper GPU (9.0), and {found}; write "auto"')
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # missing, or built for another torch
        raise UserError(
            f'attention.backend = "flash3" needs the package flash-attn-3, which torch {torch.__version__} cannot use:'
            f' {error}; install the one that PyTorch builds, or write "auto"'
        ) from error


def compile_blocks(
    model: nn.Module, config: CompileConfig, *, device_type: str, overlapped: ProcessGroup | None = None
) -> str:
    """Compile every block and the loss in place. Returns a line for the log.

    fullgraph=True: a graph break is an error, not a quiet loss of speed. `overlapped`: the tensor group whose messages
    are to be exchanged during products. Raises UserError where the CPU backend would find no C++ compiler, and for
    overlap without CUDA.
    """
    if overlapped is not None and not (config.enabled and device_type == "cuda"):
        found = f"the device is a {device_type}" if config.enabled else "compile.enabled = false"
        raise UserError(
            f"mesh.overlap_tensor needs CUDA and compile.enabled = true, but {found}; write overlap_tensor = false"
        )
    if not config.enabled:
        return "compile: off"
    if device_type == "cpu":
        _require_a_compiler()
    # a * b + c is rounded once, as in every number measured here; Triton 3.10 will round twice unless it is told.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    blocks = blocks_of(model)
    if len(interface_of(model).stacks) > 1:
        # Blocks of encoder and decoder, and T5's first of each, share a forward() that is compiled for every kind of
        # them, with and without gradients, and again for other lengths. torch's limit is 8.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    from parallel.graphs import graph_passes

    options = graph_passes() | _options_of_mode(config)
    if overlapped is not None:  # instead of the pass after all others: a product with messages reads an operand once
        options |= _overlap_options(overlapped)
    for block in blocks:
        block.compile(fullgraph=True, options=options)
    loss: Any = model.get_submodule(interface_of(model).loss)
    # Without autotune, Inductor would still time the kernel that overwrites logits, on copies of them.
    loss.kernels = compiled_loss_kernels(options=_options_of_mode(config) or UNTIMED)
    how = "autotuned during the first step" if config.autotune else "during the first step"
    overlap = "" if overlapped is None else ", tensor-parallel messages during products"
    return f"compile: {len(blocks)} blocks and the loss in place, {how}{overlap}"


def _require_a_compiler() -> None:
    """Raise UserError without a C++ compiler that Inductor takes, and if torch 2.13 would cut a path in two, because it
    does not quote those in its command line."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if not any(map(shutil.which, names)):
        raise UserError(
            f"compile.enabled = true needs a C++ compiler on a CPU ({' or '.join(names)} not found)"
            "; install one or write compile.enabled = false"
        )
    paths = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), "TMPDIR": tempfile.gettempdir()}
    for name, path in paths.items():
        if set(path) & set(" \t\n'\"\\"):
            raise UserError(
                f"compile.enabled = true: torch does not quote {path!r} for the C++ compiler; set {name} to a path"
                " without blanks and quotes, or write compile.enabled = false"
            )


def compiled_loss_kernels(**options: Any) -> Kernels:
    """What the loss runs over the logits of a chunk, compiled once for chunks of any size. options: torch.compile's."""

    def for_any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, fullgraph=True, **options)

        def call(*arguments: Tensor | float) -> Any:
            for argument in arguments:
                if isinstance(argument, Tensor):
                    torch._dynamo.maybe_mark_dynamic(argument, 0)
            return compiled(*arguments)

        return call

    return Kernels(for_any_rows(sum_exponentials), for_any_rows(overwrite_by_exponentials))


def _options_of_mode(config: CompileConfig) -> dict[str, Any]:
    """What torch.compile's mode sets; it refuses a mode beside options."""
    import torch._inductor

    # Autotuned with CUDA graphs it would be "max-autotune"; docs/benchmarks/README.md says why not.
    return torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if config.autotune else {}


def _overlap_options(group: ProcessGroup) -> dict[str, Any]:
    """Options of torch.compile that fuse the group's gathers and scatters with the products beside them.

    Such a product starts with the part that is here, and reads the others from the memory of their GPUs.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    from parallel.graphs import BringMessagesToProducts, RequireFusedMessages

    with warnings.catch_warnings():
        # torch 2.13 calls it deprecated and unnecessary, but fuses nothing in a group without it.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    return {
        "_micro_pipeline_tp": True,
        "post_grad_custom_pre_pass": BringMessagesToProducts(),
        "post_grad_custom_post_pass": RequireFusedMessages(),
    }
