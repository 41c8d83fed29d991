"""How real processes join the group."""

import os
import platform
import re
import resource
import socket
import statistics
import subprocess
import sys
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from parallel.config import MeshDegrees
from parallel.dist import ALLOCATOR_VARIABLES, LAUNCHED, TASKS, allocator_settings, let_segments_grow, start, stop
from parallel.errors import UserError
from parallel.mesh import build_mesh
from tests.processes import ROOT, free_ports, run_processes

pytestmark = pytest.mark.slow

NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def networks_after_start(variables: dict[str, str]) -> list[str | None]:
    os.environ.update(variables)
    start("cpu", seed=0)
    stop()
    return [os.environ.get(name) for name in NETWORKS]


def test_processes_of_one_node_meet_on_its_loopback_network() -> None:
    loopback = socket.if_indextoname(1)
    assert run_processes(2, networks_after_start, {}) == [[loopback, f"={loopback}"]] * 2


def test_networks_that_the_user_chose_for_one_node_stay() -> None:
    loopback = socket.if_indextoname(1)
    chosen = dict(zip(NETWORKS, (f"{loopback},{loopback}", "ib0"), strict=True))
    assert run_processes(1, networks_after_start, chosen) == [list(chosen.values())]


def test_processes_of_several_nodes_choose_their_networks_as_torch_does() -> None:
    assert run_processes(2, networks_after_start, {"LOCAL_WORLD_SIZE": "1"}) == [[None, None]] * 2


def refusal_with_lazy_init(value: str) -> str:
    os.environ["TORCH_GLOO_LAZY_INIT"] = value
    os.environ["LOCAL_RANK"] = "0"  # the others leave it time to speak
    with pytest.raises(UserError) as raised:
        start("cpu", seed=0)
    assert not dist.is_initialized()
    return str(raised.value)


@pytest.mark.parametrize("value", ["0", "False", "often"])
def test_a_variable_that_connects_all_processes_to_all_is_refused_before_any_connects(value: str) -> None:
    found = run_processes(2, refusal_with_lazy_init, value)
    said = f"TORCH_GLOO_LAZY_INIT={value} makes every process connect to all others; unset it, or write "
    assert found == [f"{said}TORCH_GLOO_LAZY_INIT=1"] * 2


HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
JOB = {"RANK": "0", "WORLD_SIZE": "2", **HERE}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (JOB, "RANK=0, LOCAL_RANK=, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT=29500: not what torchrun sets; "),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR=, MASTER_PORT=: not what torchrun sets"),
        ({"RANK": "", "WORLD_SIZE": "8"}, "RANK=, LOCAL_RANK=, WORLD_SIZE=8, MASTER_ADDR=, MASTER_PORT=: not what"),
        (JOB | {"LOCAL_RANK": "0", "RANK": "2"}, "RANK=2, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER"),
        (
            JOB | {"LOCAL_RANK": "one"},
            "RANK=0, LOCAL_RANK=one, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT=29500:",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4: each of these processes would do the same; scripts/"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2: each of these processes would do the same"),
        ({"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "1", **HERE}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1", **HERE}, ""),  # a PyTorchJob of one pod
    ],
)
def test_variables_of_other_launchers_are_refused_in_a_sentence(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*LAUNCHED, *TASKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(message)) if message else nullcontext():
        start("cpu", seed=0)
        stop()


def test_a_process_says_whom_it_waits_for_if_something_else_than_torchrun_starts_the_others() -> None:
    [port] = free_ports(1)
    code = 'from parallel.dist import start; start("cpu", seed=0)'
    given = JOB | {"LOCAL_RANK": "0", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    process = subprocess.Popen([sys.executable, "-c", code], env=given, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
    finally:
        process.kill()
        process.communicate()
    assert line == (
        f"RANK=0 WORLD_SIZE=2: waiting at 127.0.0.1:{port} for the other processes, which something else must start\n"
    )


def timeouts_without_a_launcher(timeout: timedelta) -> set[timedelta]:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    start("cpu", seed=0, timeout=timeout)
    mesh = build_mesh(MeshDegrees(replicate=1, shard=1), device_type="cpu")
    groups = (dist.distributed_c10d._get_default_group(), mesh.data_group, mesh.loss_group)
    found = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    stop()
    return found


def test_a_process_without_a_launcher_has_the_timeout_of_the_run() -> None:
    timeout = timedelta(hours=1, minutes=20)
    assert run_processes(1, timeouts_without_a_launcher, timeout) == [{timeout}]


def allocator_after(variables: dict[str, str]) -> tuple[str, dict[str, str]]:
    """What torch's allocator is set to, and the variables that other processes inherit."""
    for name in ALLOCATOR_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    let_segments_grow()
    return allocator_settings(), {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}


def allocator_when_cuda_is_first_touched(device: str) -> tuple[str, str | None]:
    """What torch's allocator is set to when start() has begun to use a GPU, and the variable."""
    for name in ALLOCATOR_VARIABLES:
        os.environ.pop(name, None)
    seen = []
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _: seen.append((allocator_settings(), os.environ.get("PYTORCH_ALLOC_CONF")))
    with suppress(ValueError, RuntimeError):  # here is no GPU
        start(device, seed=0)
        stop()
    return seen[0] if seen else (allocator_settings(), os.environ.get("PYTORCH_ALLOC_CONF"))


def test_segments_of_gpu_memory_grow_by_default() -> None:
    grows = "expandable_segments:True"
    assert run_processes(1, allocator_when_cuda_is_first_touched, "cuda") == [(grows, grows)]
    assert run_processes(1, allocator_when_cuda_is_first_touched, "cpu") == [("", None)]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_own_settings_of_the_allocator_stay(name: str) -> None:
    [(settings, variables)] = run_processes(1, allocator_after, {name: "max_split_size_mb:512"})
    assert (settings, variables) == ("max_split_size_mb:512", {name: "max_split_size_mb:512"})


def test_empty_settings_of_the_allocator_leave_torchs_own() -> None:
    assert run_processes(1, allocator_after, {"PYTORCH_ALLOC_CONF": ""}) == [("", {"PYTORCH_ALLOC_CONF": ""})]


def refusal_of_settings(value: str, getter: bool) -> str:
    if not getter and hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        del torch._C._accelerator_getAllocatorSettings
    with pytest.raises(UserError) as refused:
        allocator_after({"PYTORCH_ALLOC_CONF": value})
    return str(refused.value)


@pytest.mark.parametrize("getter", [True, False])  # torch 2.11 has none
def test_settings_of_the_allocator_that_torch_cannot_read_are_refused(getter: bool) -> None:
    for value in ("expandable_segments:yes", "expandable_segments"):
        [message] = run_processes(1, refusal_of_settings, value, getter)
        assert message.startswith(f'PYTORCH_ALLOC_CONF="{value}" does not say how to allocate GPU memory (')
        assert message.endswith('; unset it, or write "expandable_segments:True"')


def pages_cleared_for_a_tensor(variables: dict[str, str]) -> float:
    """How many of 100 pages the system clears for a large tensor after larger ones were freed; the median.

    Of one size, glibc 2.36 asks for a little more than it has kept, because of the alignment.
    """
    os.environ.update(variables)
    start("cpu", seed=0)
    elements = 1 << 25

    def faults(fewer: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(elements - fewer * resource.getpagesize())
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    found = [faults(fewer) for fewer in range(12)][5:]
    stop()
    return statistics.median(found) / (elements * 4 / resource.getpagesize()) * 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's malloc")
def test_memory_of_freed_tensors_is_kept_for_the_next_ones_on_a_cpu() -> None:
    assert run_processes(1, pages_cleared_for_a_tensor, {})[0] < 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's malloc")
@pytest.mark.parametrize("name", ["MALLOC_TOP_PAD_", "GLIBC_TUNABLES"])
def test_own_settings_of_malloc_stay(name: str) -> None:
    value = {"MALLOC_TOP_PAD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}[name]
    assert run_processes(1, pages_cleared_for_a_tensor, {name: value})[0] > 90


def settings_without_a_getter() -> str:
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        del torch._C._accelerator_getAllocatorSettings
    return allocator_after({})[0]


def test_settings_of_the_allocator_are_known_without_torchs_getter() -> None:
    """torch 2.11 has none."""
    assert run_processes(1, settings_without_a_getter) == ["expandable_segments:True"]
