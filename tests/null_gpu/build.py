"""Build the null GPU for a Python environment that has a CUDA build of torch. Imports no torch."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError

SOURCE = Path(__file__).with_name("stub.cpp")
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_python", "caffe2_nvrtc", "torch_cuda_linalg")
OURS = re.compile(r"(cuda|cu[A-Z]|nccl|cublas|__cuda)(?!File)")
"""Begin the names of functions that are replaced; cuDNN's own code runs."""
HANDLES = (
    *("cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority", "cudaEventCreate"),
    *("cudaEventCreateWithFlags", "cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleGetFunction"),
    *("cublasCreate_v2", "cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate", "cublasLtMatmulPreferenceCreate"),
    "ncclCommRegister",
)
"""Functions whose first argument says where to write a new handle; only whether it is 0 matters."""
LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "__cudaLaunchKernel"),
    *("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"),
)
WAITS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
)
SUCCEED = (
    *("cuInit", "cuCtxSetCurrent", "cuMemMap", "cuMemSetAccess", "cuModuleUnload", "cuFuncSetAttribute"),
    *("cuFuncSetCacheConfig", "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuMemsetD32Async"),
    *("cuLinkCreate_v2", "cuLinkAddData_v2", "cuLinkComplete", "cuStreamWriteValue32", "cuPointerGetAttributes"),
    *("cuCtxSetLimit", "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetComputeRunningProcesses"),
)
"""What Triton and torch look up by name."""
UNSUPPORTED = (
    *("nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetGpuFabricInfoV"),
    "nvmlSystemGetCudaDriverVersion_v2",
)
"""Functions of the NVML that torch 2.13 wants to exist; they return NVML_ERROR_NOT_SUPPORTED."""
ASK = """
import importlib.util, runpy
folder = importlib.util.find_spec("torch").submodule_search_locations[0]
version = runpy.run_path(folder + "/version.py")
print(version["__version__"], version["cuda"], folder, sep="\\n")
"""
"""A Python program that says which torch it has without the seconds in which that is imported."""


@dataclass(frozen=True)
class NullGpu:
    """A stub that is built, and the Python that it was built for."""

    python: Path
    torch: str
    """The version of torch."""
    folder: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment variables of a process on the null GPU, with further ones."""
        paths = dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), str(self.folder))
        paths |= dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
        return {**os.environ, **paths, "LD_PRELOAD": f"{self.folder}/libcuda.so.1", **variables}


def build(python: Path, folder: Path) -> NullGpu:
    """Compile the stub for this Python's torch into a folder, in a few seconds. Raises UserError if that cannot be."""
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise UserError(f"null GPU: {tool} is missing; install g++ and binutils")
    try:
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "").strip().splitlines()[-1:] or [str(error)]
        raise UserError(f"--python {python} has no torch ({reason[0]})") from error
    version, cuda, torch = asked[0], asked[1], Path(asked[2])
    if cuda == "None":
        raise UserError(
            f"--python {python} has torch {version}, which is not a CUDA build; name an environment"
            " with one (on Linux, pip install torch gives it)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    headers = [*(torch.parent / "nvidia").glob("*/include"), torch.parent / "triton/backends/nvidia/include"]
    stub, rest, library = folder / "stub.o", folder / "rest.cpp", folder / "libcuda.so.1"
    nccl = (torch.parent / "nvidia/nccl/include/nccl.h").read_text(encoding="utf-8")
    version_of_nccl = nccl.partition("#define NCCL_VERSION_CODE ")[2].split()[0]
    options = ("-O1", "-fPIC", "-std=c++17", "-w", f"-DNCCL_VERSION={version_of_nccl}")
    _run("g++", *options, *(f"-I{path}" for path in headers), "-c", str(SOURCE), "-o", str(stub))
    names = _functions(*(torch / "lib" / f"lib{name}.so" for name in LIBRARIES))
    names |= {*HANDLES, *LAUNCHES, *WAITS, *SUCCEED, *UNSUPPORTED}
    rest.write_text(_rest(names - _functions(stub, defined=True)), encoding="utf-8")
    _run("g++", *options, "-shared", str(rest), str(stub), "-o", str(library))
    management = folder / "libnvidia-ml.so.1"
    management.unlink(missing_ok=True)
    management.symlink_to(library.name)
    return NullGpu(python, version, folder)


def _functions(*files: Path, defined: bool = False) -> set[str]:
    """Names of functions of CUDA and NCCL that these files define, or that they want from others."""
    which = ["--defined-only"] if defined else ["-D", "--undefined-only"]
    lines = _run("nm", *which, *map(str, files)).splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines if len(line.split()) > 1}
    return {name for name in names if OURS.match(name)}


def _rest(names: set[str]) -> str:
    """C++ of these functions."""
    counters = "extern std::atomic<long> null_gpu_launches, null_gpu_waits;"
    lines = ["#include <atomic>", 'extern "C" {', counters, "static std::atomic<long> handles{0x1000000};"]
    for name in sorted(names):
        if name in HANDLES:
            lines.append(f"int {name}(long* out) {{ *out = handles++ << 4; return 0; }}")
        else:
            counted = "null_gpu_launches++; " * (name in LAUNCHES) + "null_gpu_waits++; " * (name in WAITS)
            lines.append(f"int {name}() {{ {counted}return {3 if name in UNSUPPORTED else 0}; }}")
    return "\n".join([*lines, "}", ""])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"null GPU: {command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout
