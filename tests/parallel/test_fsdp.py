"""What FSDP casts and copies, counted in real steps, and that the numbers do not depend on it."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.decoder import Decoder
from models.sizes import SIZES
from parallel import fsdp
from parallel.config import Float8Config, FSDPConfig, MeshConfig, MeshDegrees
from parallel.dist import start, stop
from parallel.float8 import precompute_scales
from parallel.fsdp import units_of, without_idle_resharding
from parallel.materialize import materialize, whole
from parallel.mesh import build_mesh
from tests.build import NO_FLOAT8, build_model
from tests.processes import run_processes

DEBUG = SIZES["llama3_debug"]
TOKENS = 7
"""All sizes of activations are multiples of it, and no size of a parameter or of a block is."""
MESHES = {"shards": MeshConfig(), "replicas": MeshConfig(replicate=2, shard=1)}
TENSORWISE = Float8Config(recipe="tensorwise", all_gather=True, emulate=True)


class Written(TorchDispatchMode):
    """Counts what a step writes of the size of parameters: elements by operator and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = operator(*args, **(kwargs or {})), operator.overloadpacket.__name__
        written = (kwargs or {}).get("out") if name == "chunk_cat" else result
        if name == "_foreach_copy_":
            self.elements[f"{name} {str(args[0][0].dtype).removeprefix('torch.')}"] += sum(map(Tensor.numel, args[0]))
        moves = name in ("_to_copy", "chunk_cat", "div", "add_") or (name == "copy_" and args[0] is not args[1])
        if moves and not isinstance(written, DTensor) and written.numel() % TOKENS and written.dim():
            self.elements[f"{name} {str(written.dtype).removeprefix('torch.')}"] += written.numel()
        return result


def micro_batches(count: int, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(DEBUG.vocabulary, (1, TOKENS), generator=generator) for _ in range(count)]


def train(model: Any, batch: list[Tensor], *, zero2: bool) -> list[Tensor]:
    """The losses of the micro-batches, accumulated as in train_step(). Leaves the gradients of their sum."""
    losses = []
    for index, tokens in enumerate(batch):
        last = index == len(batch) - 1
        model.set_requires_gradient_sync(last)
        if zero2:
            model.set_reshard_after_backward(last)
        loss = model(tokens, tokens)
        loss.backward()
        losses.append(loss.detach())
    return losses


def written(batch: list[Tensor], *, zero2: bool, dtype: str, float8: Float8Config = NO_FLOAT8) -> dict[str, int]:
    """Elements that the step after the first optimizer step writes, by operator and dtype."""
    model, _ = build_model(DEBUG, fsdp=FSDPConfig(param_dtype=dtype, reshard_after_forward=not zero2), float8=float8)
    train(model, batch, zero2=zero2)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    model.zero_grad()
    if float8.all_gather:
        precompute_scales(model)
    with Written() as counted:
        train(model, batch, zero2=zero2)
    return {name: elements for name, elements in counted.elements.items() if elements > 10_000}  # not norms


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Numbers of parameters of the debug model: of all, in the blocks, and in the matrices of the blocks."""
    with torch.device("meta"):
        model = Decoder(DEBUG)
    in_blocks = list(model.blocks.parameters())
    return {
        "all": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": sum(parameter.numel() for parameter in in_blocks),
        "matrices": sum(parameter.numel() for parameter in in_blocks if parameter.dim() == 2),
    }


# Copies on one process


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero2", [False, True])
def test_one_process_computes_with_its_float32_weights_themselves(zero2: bool, sizes: dict[str, int]) -> None:
    found = written(micro_batches(1), zero2=zero2, dtype="float32")
    assert found == {}  # and no gradient is copied


@pytest.mark.usefixtures("alone")
def test_zero2_casts_each_weight_once_a_step(sizes: dict[str, int]) -> None:
    """The optimizer has changed the weights, so the first forward pass must cast them, and nothing else may."""
    for count in (1, 3):
        found = written(micro_batches(count), zero2=True, dtype="bfloat16")
        assert found.pop("copy_ bfloat16") == sizes["all"]
        # What is left is the accumulation in float32.
        assert found.pop("_to_copy float32") == sizes["all"]
        assert found == ({"add_ float32": 2 * sizes["all"]} if count == 3 else {})


@pytest.mark.usefixtures("alone")
def test_zero3_casts_blocks_twice_and_everything_else_once_a_micro_batch(sizes: dict[str, int]) -> None:
    found = written(micro_batches(3), zero2=False, dtype="bfloat16")
    assert found["copy_ bfloat16"] == 3 * (sizes["all"] + sizes["blocks"])


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_zero2_casts_each_weight_to_float8_once_a_step(sizes: dict[str, int]) -> None:
    for zero2, casts in ((True, 1), (False, 6)):
        found = written(micro_batches(3), zero2=zero2, dtype="bfloat16", float8=TENSORWISE)
        assert found["_to_copy float8_e4m3fn"] == casts * sizes["matrices"]


def written_by_replicas(together: int) -> tuple[dict[str, int], int]:
    """(as of written(), messages of gradients) of a step of two replicas that sum so many bytes in one message."""
    fsdp.SUMMED_TOGETHER = together
    start("cpu", seed=0)
    config = FSDPConfig(reshard_after_forward=False, param_dtype="float32")
    model, _ = build_model(DEBUG, mesh=MESHES["replicas"], fsdp=config)
    messages, all_reduce = 0, dist.all_reduce

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal messages
        messages += 1
        return all_reduce(*args, **options)

    dist.all_reduce = counting
    for counted in (Written(), Written()):  # FSDP sets itself up in the first
        messages = 0
        with counted:
            train(model, micro_batches(1), zero2=True)
        model.zero_grad()
    stop()
    return {name: elements for name, elements in counted.elements.items() if elements > 10_000}, messages


@pytest.mark.slow
def test_replicas_copy_small_gradients_into_one_message(sizes: dict[str, int]) -> None:
    assert run_processes(2, written_by_replicas, 2**30) == [({"_foreach_copy_ float32": sizes["all"]}, 1)] * 2


@pytest.mark.slow
def test_replicas_sum_large_gradients_where_they_are() -> None:
    matrices = 7 * DEBUG.layers + 2
    assert run_processes(2, written_by_replicas, 2**15) == [({}, matrices + 1)] * 2  # and all norms together


# Numbers


def gradients(model: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def plain(dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """(the debug model without FSDP, the same in the dtype that computes)."""
    models = []
    for _ in range(2):
        with torch.device("meta"):
            model = Decoder(DEBUG)
        materialize(model, device=torch.device("cpu"), seed=0)
        models.append(model)
    return models[0], models[1].to(dtype)


def two_plain_steps(batch: list[Tensor], dtype: torch.dtype) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """(losses, gradients) of two steps of a loop without FSDP that casts weights once and accumulates in float32."""
    model, low = plain(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    pairs = list(zip(model.parameters(), low.parameters(), strict=True))
    found = []
    for _ in range(2):
        losses = []
        for tokens in batch:
            loss = low(tokens, tokens)
            loss.backward()
            losses.append(loss.detach())
            for parameter, used in pairs:
                assert used.grad is not None
                parameter.grad = used.grad.float() if parameter.grad is None else parameter.grad + used.grad
                used.grad = None
        found.append((losses, gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, used in pairs:
                used.copy_(parameter)
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero2", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_repeats_a_loop_without_fsdp_to_the_bit(dtype: str, zero2: bool) -> None:
    batch = micro_batches(3)
    model, _ = build_model(DEBUG, fsdp=FSDPConfig(param_dtype=dtype, reshard_after_forward=not zero2))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for losses, expected in two_plain_steps(batch, getattr(torch, dtype)):
        assert train(model, batch, zero2=zero2) == losses
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[name].to_local(), gradient), name
        optimizer.step()
        optimizer.zero_grad()


def different_sums(zero2: bool, together: int) -> dict[str, list[str]]:
    """By mesh, the gradients that are not the sum of those of all processes, each of which has its own micro-batch."""
    fsdp.SUMMED_TOGETHER = together
    world = start("cpu", seed=0)
    reference, _ = plain(torch.float32)
    for rank in range(world.size):
        [tokens] = micro_batches(1, seed=rank)
        reference(tokens, tokens).backward()
    expected, found = gradients(reference), {}
    for name, mesh in MESHES.items():
        model, _ = build_model(
            DEBUG, mesh=mesh, fsdp=FSDPConfig(param_dtype="float32", reshard_after_forward=not zero2)
        )
        train(model, micro_batches(1, seed=world.rank), zero2=zero2)
        sums = {key: whole(gradient) for key, gradient in gradients(model).items()}
        assert sums.keys() == expected.keys()
        found[name] = [key for key, gradient in expected.items() if not torch.equal(sums[key], gradient)]
    stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("zero2", "together"), [(False, 2**30), (True, 2**30), (True, 2**15)])
def test_two_processes_sum_gradients_to_the_bit(zero2: bool, together: int) -> None:
    """Replicas in one message for all parameters, or each matrix where it is."""
    assert run_processes(2, different_sums, zero2, together) == [{"shards": [], "replicas": []}] * 2


def unlike_those_of_fsdp(processes: int, zero2: bool, together: int) -> list[str]:
    """Gradients of whole parameters that are not what FSDP's own reduction returns."""
    fsdp.SUMMED_TOGETHER = together
    start("cpu", seed=0)
    different = []
    for computed, reduced in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        found = []
        for own in (False, True):
            config = FSDPConfig(reshard_after_forward=not zero2, param_dtype=computed, reduce_dtype=reduced)  # type: ignore[arg-type]
            model, _ = build_model(DEBUG, mesh=MeshConfig(replicate=processes, shard=1), fsdp=config)
            for unit in units_of(model) if own else ():
                group = unit._get_fsdp_state()._fsdp_param_group
                del group.pre_backward, group.post_backward
                unit.set_force_sum_reduction_for_comms(True)
                unit.set_gradient_divide_factor(1.0)
            train(model, micro_batches(3), zero2=zero2)
            found.append(gradients(model))
        ours, theirs = found
        assert ours.keys() == theirs.keys()
        for name, one in ours.items():
            other = theirs[name]
            assert one.dtype == other.dtype == torch.float32
            assert one.placements == other.placements and one.device_mesh == other.device_mesh
            if not torch.equal(one.to_local(), other.to_local()):
                different.append(f"{name}, {computed}, reduced in {reduced}")
    stop()
    return different


@pytest.mark.slow
@pytest.mark.parametrize(("zero2", "together"), [(False, 2**30), (True, 2**30), (True, 2**15)])
@pytest.mark.parametrize("processes", [1, 2])
def test_whole_gradients_are_those_that_fsdps_own_reduction_returns(processes: int, zero2: bool, together: int) -> None:
    assert run_processes(processes, unlike_those_of_fsdp, processes, zero2, together) == [[]] * processes


def with_gradients(processes: int) -> list[list[str]]:
    """By dtype, the parameters that have a gradient although they are frozen, or have none although they are not."""
    start("cpu", seed=0)
    found = []
    for dtype in ("float32", "bfloat16"):
        config = FSDPConfig(reshard_after_forward=False, param_dtype=dtype)  # type: ignore[arg-type]
        model, _ = build_model(DEBUG, mesh=MeshConfig(replicate=processes, shard=1), fsdp=config)
        frozen = model.blocks[0].attention.q_proj.weight.requires_grad_(False)
        train(model, micro_batches(2), zero2=True)
        found.append([key for key, one in model.named_parameters() if (one.grad is None) != (one is frozen)])
    stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_frozen_parameter_has_no_gradient(processes: int) -> None:
    assert run_processes(processes, with_gradients, processes) == [[[], []]] * processes


def unlike_a_sum(processes: int) -> list[str]:
    """Gradients that are not twice those of one backward pass after two."""
    start("cpu", seed=0)
    model, _ = build_model(DEBUG, mesh=MeshConfig(replicate=processes, shard=1))
    [tokens] = micro_batches(1)
    found = []
    for passes in (1, 2):
        for _ in range(passes):
            model(tokens, tokens).backward()
        found.append({name: gradient.to_local().clone() for name, gradient in gradients(model).items()})
        model.zero_grad()
    stop()
    return [name for name, gradient in found[0].items() if not torch.equal(2 * gradient, found[1][name])]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_several_backward_passes_sum_whole_gradients(processes: int) -> None:
    assert run_processes(processes, unlike_a_sum, processes) == [[]] * processes


def gradients_after_a_failed_pass(at: str) -> list[int]:
    """How many parameters have a gradient after each of two backward passes that follow one that raised."""
    fsdp.SUMMED_TOGETHER = 2**15
    start("cpu", seed=0)
    model, _ = build_model(DEBUG, mesh=MESHES["replicas"])
    [tokens] = micro_batches(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of the backward pass")

    of_block = at == "a block"
    failing: Any = (
        model.blocks[0].register_full_backward_pre_hook(fail) if of_block else patch.object(fsdp, "wait_for", fail)
    )
    with failing, pytest.raises(RuntimeError, match="in the middle") as kept:  # with the frames that it was raised in
        model(tokens, tokens).backward()
    model.reset_iter_state()
    model.zero_grad()
    found = []
    for _ in range(2):
        model(tokens, tokens).backward()
        found.append(sum(gradient is not None for gradient in gradients(model).values()))
        model.zero_grad()
    stop()
    assert kept.value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("at", ["a block", "the sums"])
@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on after a failed pass")
def test_replicas_sum_gradients_again_after_a_failed_backward_pass(at: str) -> None:
    [one, other] = run_processes(2, gradients_after_a_failed_pass, at)
    assert one == other == [len(list(Decoder(DEBUG).parameters()))] * 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("dtype", "zero2", "float8", "units"),
    [
        ("float32", True, NO_FLOAT8, 1),
        ("float32", False, NO_FLOAT8, 3 + DEBUG.layers),
        ("bfloat16", True, NO_FLOAT8, 1),
        ("bfloat16", False, NO_FLOAT8, 3 + DEBUG.layers),
        ("bfloat16", True, TENSORWISE, 3 + DEBUG.layers),
    ],
)
def test_parts_are_units_only_where_they_are_gathered_or_freed(
    dtype: str, zero2: bool, float8: Float8Config, units: int
) -> None:
    config = FSDPConfig(param_dtype=dtype, reshard_after_forward=not zero2)  # type: ignore[arg-type]
    model, _ = build_model(DEBUG, fsdp=config, float8=float8)
    assert len(units_of(model)) == units


@pytest.mark.usefixtures("alone")
def test_nothing_is_resharded_where_that_would_free_nothing() -> None:
    mesh = build_mesh(MeshDegrees(1, 1), device_type="cpu")
    for dtype, offloads, float8_gathers, reshards in (
        ("float32", False, False, False),
        ("bfloat16", False, False, True),  # the casts
        ("float32", True, False, True),  # copies on the device
        ("float32", False, True, True),  # float8 copies
    ):
        config = FSDPConfig(param_dtype=dtype, cpu_offload=offloads)  # type: ignore[arg-type]
        assert without_idle_resharding(mesh, config, float8_gathers=float8_gathers).reshard_after_forward == reshards
