"""The host never waits for the device between two logged steps, so that it stays ahead of a GPU.

Shown on the CPU: what would wait for a GPU raises instead. Compiled code is watched from Python only, and a copy
between host and device looks like none here. cpu_offload is left out: with it the host takes the step itself, and
waits.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.documents import Documents
from parallel import passes
from parallel.dist import World, start, stop
from parallel.mesh import build_mesh
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.schema import Recipe
from recipes.training import step as steps
from recipes.training.build import build
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import SMALL_MODEL, change, training

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
METHODS = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "unique", "masked_select", "equal", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
)
OPERATORS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    "lift_fresh",  # torch.tensor(): numbers of the host, whose copy to a device is waited for
}
INDEXING = {"index", "index_put", "index_put_"}
# DTensor's embedding of a vocabulary in parts, on the way in and out.
FILLS = "one number of the host wherever a mask is true: on CUDA masked_fill, which does not ask where that is"
RANKS = "looks for a rank in a mesh, whose numbers are the host's: torch 2.11 makes meshes of some axes in a step"
ALLOWED = {
    ("torch/distributed/tensor/placement_types.py", "_mask_tensor"): FILLS,
    ("torch/distributed/tensor/_ops/_mask_buffer.py", "apply_mask"): FILLS,
    ("torch/distributed/device_mesh.py", "__init__"): RANKS,
    ("torch/distributed/device_mesh.py", "_get_mesh_tensor_from_full_mesh"): RANKS,
}
"""(file, function) that may call what is refused elsewhere -> why."""


class HostWaits(AssertionError):
    """Something would wait for a GPU."""


def refuse(what: str) -> None:
    """Raise HostWaits with the place, unless a function of ALLOWED is on the stack."""
    frame, places = sys._getframe(1), []
    while frame := frame.f_back:
        name = frame.f_code.co_filename.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        places.append((name, frame.f_code.co_name))
    if not ALLOWED.keys() & {*places}:
        ours = next(place for place in places if not place[0].startswith("torch/"))
        raise HostWaits(f"{what} in {ours[0]}, {ours[1]}()")


class NoOperatorWaits(TorchDispatchMode):
    """Raises HostWaits for operators whose result decides the size of a tensor, or goes to the host."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls this mode again, with the part that it holds
        name = operator.overloadpacket.__name__
        by_mask = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in arguments[1])
        if name in OPERATORS or by_mask:
            refuse(f"{name}{' with a mask' * by_mask}")
        return operator(*arguments, **(options or {}))


@contextmanager
def no_waiting(*, compiled: bool = False) -> Iterator[None]:
    """Raise HostWaits where this thread calls what waits for a GPU. compiled: torch.compile skips code under modes."""
    thread = threading.get_ident()

    def refused(method: str) -> Callable[..., Any]:
        original = getattr(Tensor, method)

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == thread:
                refuse(f"Tensor.{method}")
            return original(*arguments, **options)

        return call

    with ExitStack() as stack:
        for method in METHODS:
            stack.enter_context(mock.patch.object(Tensor, method, refused(method)))
        stack.enter_context(nullcontext() if compiled else NoOperatorWaits())
        yield


# The trap itself


ONE = torch.ones((), dtype=torch.int64)
WAITING: dict[str, Callable[[], Any]] = {
    "item": lambda: ONE.item(),
    "tolist": lambda: ONE.tolist(),
    "cpu": lambda: ONE.cpu(),
    "numpy": lambda: ONE.numpy(),
    "nonzero": lambda: ONE.nonzero(),
    "bool": lambda: "one" if ONE else "none",
    "int": lambda: int(ONE),
    "float": lambda: float(ONE),
    "index": lambda: "ab"[ONE],
    "equal": lambda: torch.equal(ONE, ONE),
    "a function of torch": lambda: torch.nonzero(ONE),
    "reading with a mask": lambda: ONE[None][ONE[None] > 0],
    "writing with a mask": lambda: ONE.clone()[None].index_put_((ONE[None] > 0,), ONE),
    "numbers of the host": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize("call", WAITING)
def test_what_would_wait_for_a_gpu_raises(call: str) -> None:
    with no_waiting(), pytest.raises(HostWaits):
        WAITING[call]()
    WAITING[call]()


def test_the_error_names_the_place() -> None:
    here = r"in tests/recipes/training/test_host_syncs\.py, test_the_error_names_the_place\(\)"
    with no_waiting(compiled=True), pytest.raises(HostWaits, match=r"Tensor\.item " + here):
        ONE.item()
    with no_waiting(), pytest.raises(HostWaits, match="nonzero " + here):
        torch.nonzero(ONE)


# Each option of a step


SMALL = SMALL_MODEL | {"feed_forward_width": 128, "vocabulary": 512}
BFLOAT16 = {"fsdp": {"param_dtype": "bfloat16"}}
TENSORWISE = {"recipe": "tensorwise", "emulate": True}
ALONE: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "options": {
        "activation_checkpointing": {"mode": "selective"},
        "batch": {"loss_chunks": 3},
        "data": {"document_mask": True},
        "model": {"tied_embeddings": False, "logit_softcap": 30.0},
        "optimizer": {"z_loss": 1e-4, "state_dtype": "bfloat16"},
        "run": {"loss_spike_z": 5.0},
    },
    "other options": {
        "activation_checkpointing": {"mode": "full"},
        "fsdp": {"param_dtype": "bfloat16", "reshard_after_forward": False},
        "optimizer": {"grad_clip": 0.0},
    },
    "tensorwise, gathered as float8": BFLOAT16 | {"float8": TENSORWISE | {"all_gather": True}},
    "rowwise": BFLOAT16 | {"float8": TENSORWISE | {"recipe": "rowwise"}},
    "rowwise_with_gw_hp": BFLOAT16 | {"float8": TENSORWISE | {"recipe": "rowwise_with_gw_hp"}},
    "a skipped step": {},
}
COMPILED = BFLOAT16 | {"compile": {"enabled": True}, "data": {"document_mask": True}}
BESIDE_ANOTHER = {
    "shards": ("1.2.1.1", BFLOAT16),
    "shards, ZeRO-2": ("1.2.1.1", {"fsdp": {"reshard_after_forward": False}}),
    "shards gathered as float8": ("1.2.1.1", BFLOAT16 | {"float8": TENSORWISE | {"all_gather": True}}),
    "replicas": ("2.1.1.1", {"run": {"loss_spike_z": 5.0}}),
    "context by heads": ("1.1.2.1", {"data": {"document_mask": True}}),
    "context by gather": ("1.1.2.1", {"mesh": {"context_by": "gather"}}),
    "tensor": ("1.1.1.2", {"run": {"loss_spike_z": 5.0}, "batch": {"loss_chunks": 3}}),
    "tensor, gathered as float8": ("1.1.1.2", BFLOAT16 | {"float8": TENSORWISE | {"gather_activations": True}}),
}


def waits_in_a_step(name: str, mesh: str, fields: dict[str, dict[str, Any]], recipe: Recipe, world: World) -> str:
    """What the host would wait for in the second step, of two micro-batches; "" if nothing."""
    recipe = change(recipe, **fields | {"model": SMALL | fields.get("model", {})})
    built = build(recipe, world, mesh=build_mesh(mesh_degrees(mesh), device_type="cpu"))
    clock = RunClock(world.device)
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=2, loss_spike_z=recipe.run.loss_spike_z)
    tokens = torch.randint(0, recipe.model.vocabulary, (2, 2, 33), generator=torch.Generator().manual_seed(1))
    documents = [
        Documents.of(rows[:, :-1], end_of_document=3) if recipe.data.document_mask else None for rows in tokens
    ]
    batches = [(rows[:, :-1], rows[:, 1:], of_rows) for rows, of_rows in zip(tokens, documents, strict=True)]
    take = partial(steps.train_step, built, batches, learning_rate=1e-3, guard=guard, clock=clock)
    take(step=1)
    if name == "a skipped step":
        with torch.no_grad():
            built.parameters[0].fill_(torch.nan)
    try:
        with no_waiting(compiled=recipe.compile.enabled):
            take(step=2)
    except HostWaits as error:
        return str(error)
    assert [step for step, _ in guard.skipped()] == ([2] if name == "a skipped step" else [])
    return ""


def waits_with_an_item(recipe: Recipe, world: World) -> str:
    """The same for a step that reads the gradient norm."""

    def norm_that_is_read(parameters: Any, original: Any = passes.gradient_norm) -> Tensor:
        norm: Tensor = original(parameters)
        norm.item()
        return norm

    with mock.patch.object(passes, "gradient_norm", norm_that_is_read):
        return waits_in_a_step("", "1.1.1.1", {}, recipe, world)


def waits_between_logged_steps(recipe: Recipe, world: World) -> str:
    """What the host would wait for in a run's loop after the first logged step, before the last one."""
    recipe = change(recipe, metrics={"every": 100}, checkpoint={"every": 0})
    watched = ExitStack()
    with training(recipe, world) as trainer:
        log_step = trainer.recorder.log_step

        def log_and_watch(step: int, *arguments: Any, **options: Any) -> None:
            watched.close()
            assert not gc.isenabled()
            log_step(step, *arguments, **options)
            if step < recipe.run.steps:
                watched.enter_context(no_waiting())

        try:
            with mock.patch.object(trainer.recorder, "log_step", log_and_watch), watched:
                assert trainer.run() == 0
        except HostWaits as error:
            return str(error)
    return ""


def waits_alone(recipe: Recipe) -> dict[str, str]:
    world = start("cpu", seed=0)
    found = {name: waits_in_a_step(name, "1.1.1.1", fields, recipe, world) for name, fields in ALONE.items()}
    found["with an item"] = waits_with_an_item(recipe, world)
    found["the loop"] = waits_between_logged_steps(change(recipe, data={"document_mask": True}), world)
    stop()
    return found


def waits_beside_another(recipe: Recipe) -> dict[str, str]:
    world = start("cpu", seed=0)
    found = {name: waits_in_a_step(name, *case, recipe, world) for name, case in BESIDE_ANOTHER.items()}
    checked = change(recipe, run={"name": "replicas", "check_replicas_every": 100}, mesh={"replicate": 2, "shard": 1})
    found["the loop"] = waits_between_logged_steps(checked, world)
    stop()
    return found


def waits_if_compiled(recipe: Recipe) -> str:
    world = start("cpu", seed=0)
    found = waits_in_a_step("compiled", "1.1.1.1", COMPILED, recipe, world)
    stop()
    return found


@pytest.fixture(scope="module")
def alone_waits(small: Recipe) -> dict[str, str]:
    [found] = run_processes(1, waits_alone, small)
    return found


@pytest.fixture(scope="module")
def beside_another(small: Recipe) -> list[dict[str, str]]:
    return run_processes(2, waits_beside_another, small)


@pytest.mark.parametrize("case", ALONE)
def test_a_step_of_one_process_does_not_wait(case: str, alone_waits: dict[str, str]) -> None:
    assert alone_waits[case] == ""


@pytest.mark.exhaustive
def test_a_compiled_step_does_not_wait(small: Recipe) -> None:
    assert run_processes(1, waits_if_compiled, small) == [""]


@pytest.mark.parametrize("case", BESIDE_ANOTHER)
def test_a_step_of_two_processes_does_not_wait(case: str, beside_another: list[dict[str, str]]) -> None:
    assert [found[case] for found in beside_another] == ["", ""]


def test_a_step_that_reads_a_number_is_found(alone_waits: dict[str, str]) -> None:
    found = alone_waits["with an item"]
    assert found == "Tensor.item in tests/recipes/training/test_host_syncs.py, norm_that_is_read()"


def test_the_loop_does_not_wait_between_logged_steps(
    alone_waits: dict[str, str], beside_another: list[dict[str, str]]
) -> None:
    """Nor do reading a batch, counting its documents, and the vote on signals; nor replicas until they are checked."""
    assert [found["the loop"] for found in (alone_waits, *beside_another)] == ["", "", ""]
