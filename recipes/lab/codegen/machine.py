"""Pretend that this process has an H100, so that torch.compile writes the code that it would write for one.

Nothing can run on the pretended GPU: tensors on it exist only as torch's fake tensors. An H200 has the same units and
gets the same code.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from parallel.errors import UserError
from parallel.kernels import cpp_compiler

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=85_520_809_984,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=52428800,
    is_integrated=False,
    gcnArchName="",
)
"""Properties that torch.cuda.get_device_properties() returns on an H100 SXM."""
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""
"""torch asks for the current device even where a tensor is fake; a build without CUDA has nobody to answer."""


def missing_tools() -> str:
    """What this machine lacks for reading the code for an H100, with the remedy; "" if nothing."""
    if find_spec("triton") is None:
        return "triton is not installed, whose compiler makes the kernels; pip install --no-deps triton==" + _triton()
    if not cpp_compiler():
        return "no C++ compiler (g++ or clang++) was found; install one, or name it in CXX"
    return ""


def pretend_h100() -> None:
    """Change this process for good: torch, Inductor and Triton see one H100. Raises UserError where a tool is missing,
    or where there is a GPU, whose real properties would get in the way."""
    if missing := missing_tools():
        raise UserError(missing)
    if torch.cuda.is_available():
        raise UserError('this machine has a GPU; hide it: CUDA_VISIBLE_DEVICES=""')
    _install_guard()
    for name, value in _answers_of_cuda().items():
        setattr(torch.cuda, name, value)
    for name in ("_cuda_getDevice", "_cuda_setDevice", "_cuda_init"):
        setattr(torch._C, name, lambda *_: 0)
    _install_triton_driver()


def _triton() -> str:
    """The Triton release that belongs to the installed torch."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return {"2.11": "3.6.0", "2.12": "3.7.0", "2.14": "3.8.0", "2.15": "3.9.0"}.get(minor, "3.7.1")


def _install_guard() -> None:
    """Compile the guard in a temporary folder and load it."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD, encoding="utf-8")
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        command = [str(cpp_compiler()), "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(library), *paths]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        ctypes.CDLL(str(library)).install()


def _answers_of_cuda() -> dict[str, Callable[..., Any]]:
    """Functions of torch.cuda, by name, as one H100 would answer."""
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "synchronize": lambda _=None: None,
        "current_stream": lambda _=None: stream,
        "_get_device_properties": lambda _: PROPERTIES,
        "get_arch_list": lambda: ["sm_90"],
        "get_rng_state": lambda _=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }


def _install_triton_driver() -> None:
    """Triton asks its driver for what to compile; this one answers without a GPU."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    limits = {
        "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
        "multiprocessor_count": PROPERTIES.multi_processor_count,
        "warpSize": PROPERTIES.warp_size,
    }

    class Driver:
        utils = SimpleNamespace(get_device_properties=lambda _: limits)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, PROPERTIES.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int | None = None) -> int:
            return 0

        def get_device_capability(self, _: int = 0) -> tuple[int, int]:
            return PROPERTIES.major, PROPERTIES.minor

        def get_device_interface(self) -> ModuleType:
            return torch.cuda

    triton.runtime.driver.set_active(Driver())
    setattr(triton_helpers, "set_driver_to_gpu", lambda: None)  # noqa: B010  it would look for a real driver again
