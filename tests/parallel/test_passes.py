"""Gradient norm, clipping and agreement over real processes."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from models.sizes import SIZES
from parallel.config import MeshConfig
from parallel.dist import SILENT, World, on_all, on_main, on_main_first, start, stop
from parallel.errors import TemporaryError, UserError
from parallel.passes import (
    clipping_divisor,
    gradient_norm,
    largest_in_groups,
    share_gradients_of_copies,
    sum_over_group,
)
from recipes.training.interruption import Agreement
from tests.build import build_model
from tests.meshes import mesh_config
from tests.processes import run_processes

pytestmark = pytest.mark.slow


def all_norms(meshes: list[MeshConfig]) -> list[dict]:
    world = start("cpu", seed=0)
    answers = [norms(world, mesh) for mesh in meshes]
    stop()
    return answers


def norms(world: World, mesh: MeshConfig) -> dict:
    model, _ = build_model(SIZES["llama3_debug"], mesh=mesh)
    # Different tokens on every rank; the sum over ranks is the gradient.
    x = torch.randint(0, 4096, (4, 17), generator=torch.Generator().manual_seed(0))
    x = x.chunk(world.size)[world.rank]
    model(x[:, :-1], x[:, 1:]).backward()
    parameters = list(model.parameters())
    whole = [parameter.grad.full_tensor().clone() for parameter in parameters]
    calls = []
    original = dist.all_reduce

    def counted(tensor, *args, group=None, **kwargs):
        calls.append((tensor.numel(), dist.get_world_size(group)))
        return original(tensor, *args, group=group, **kwargs)

    dist.all_reduce = counted
    with CommDebugMode() as hidden:
        norm = gradient_norm(parameters)
    dist.all_reduce = original
    return {
        "norm": norm.item(),
        "expected": math.sqrt(sum(gradient.double().square().sum().item() for gradient in whole)),
        "first": whole[1].flatten()[:5].tolist(),
        "calls": calls,
        "functional": hidden.get_total_counts(),
    }


@pytest.fixture(scope="module")
def alone() -> dict:
    [[found]] = run_processes(1, all_norms, [MeshConfig()])
    return found


# Each mesh, and the all-reduces of a norm on it: one scalar within the shard group and nothing across replicas.
MESHES = {MeshConfig(1, 4): [(1, 4)], MeshConfig(2, 2): [(1, 2)], MeshConfig(4, 1): []}


@pytest.fixture(scope="module")
def on_meshes() -> list[tuple[dict, list[tuple[int, int]]]]:
    """(what a rank found, the all-reduces expected) for each of 4 ranks on each mesh."""
    answers = run_processes(4, all_norms, list(MESHES))
    return [pair for answer in answers for pair in zip(answer, MESHES.values(), strict=True)]


def test_the_norm_takes_one_scalar_all_reduce_over_the_shard_group(alone: dict, on_meshes: list[tuple]) -> None:
    assert alone["calls"] == []
    for answer, calls in on_meshes:
        assert answer["calls"] == calls
        assert answer["functional"] <= len(calls)  # nothing more hidden in DTensor


def test_the_norm_is_that_of_the_whole_gradient_on_every_mesh(alone: dict, on_meshes: list[tuple]) -> None:
    for answer in (alone, *(answer for answer, _ in on_meshes)):
        assert math.isclose(answer["norm"], answer["expected"], rel_tol=1e-6)  # torch's norm alone: 1e-5
        assert math.isclose(answer["norm"], alone["norm"], rel_tol=2e-6)
        assert torch.allclose(torch.tensor(answer["first"]), torch.tensor(alone["first"]), rtol=1e-4, atol=1e-6)


def test_clipping_divides_down_to_the_largest_norm_and_never_up() -> None:
    assert math.isclose(3.0 / clipping_divisor(torch.tensor(3.0), max_norm=0.5).item(), 0.5, rel_tol=1e-5)
    assert clipping_divisor(torch.tensor(0.49), max_norm=0.5).item() == 1.0
    assert clipping_divisor(torch.tensor(0.0), max_norm=0.5).item() == 1.0


def fail(kind: type[UserError]) -> None:
    if dist.get_rank() == 0:
        raise kind("the disk")


def talk() -> dict:
    world = start("cpu", seed=0)
    agreement = Agreement()
    heard = [agreement.largest(7 if world.rank == 1 and step == 2 else 0) for step in range(5)]
    work_done = []

    def work() -> int:
        work_done.append(dist.get_rank())
        return 7

    def refuse() -> None:
        raise UserError("the corpus is empty")

    value = on_main_first(world, work)
    try:
        on_main_first(world, refuse)
        refused = "nothing"
    except UserError as error:
        refused = "silently" if str(error) == SILENT else str(error)
    kinds = []
    for fault in (TemporaryError, UserError):
        for share in (on_main, on_all):
            try:
                share(world, partial(fail, fault))
            except UserError as error:
                kinds.append(type(error).__name__)
    told = on_main(world, lambda: f"by {dist.get_rank()}")

    def refuse_on_1() -> None:
        if world.rank == 1:
            raise UserError("the disk of rank 1 is damaged")

    try:
        on_all(world, refuse_on_1)
        refused_by_one = "nothing"
    except UserError as error:
        refused_by_one = str(error)
    total = sum_over_group(torch.tensor(float(world.rank + 1)), dist.group.WORLD).item()
    done_by_all = on_all(world, lambda: world.rank)
    stop()
    return {"heard": heard, "value": value, "work": work_done, "refused": refused, "total": total} | {
        "told": told,
        "refused_by_one": refused_by_one,
        "kinds": kinds,
        "done_by_all": done_by_all,
    }


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    """What each of 3 ranks got from the functions by which ranks agree."""
    return run_processes(3, talk)


def test_a_vote_reaches_all_ranks_one_call_later(answers: list[dict]) -> None:
    assert [answer["heard"] for answer in answers] == [[0, 0, 0, 7, 0]] * 3


def test_work_on_main_first_is_done_by_all_ranks(answers: list[dict]) -> None:
    assert [(answer["value"], answer["work"]) for answer in answers] == [(7, [0]), (7, [1]), (7, [2])]


def test_an_error_of_rank_0_is_raised_on_all_ranks_and_told_by_rank_0_alone(answers: list[dict]) -> None:
    assert [answer["refused"] for answer in answers] == ["the corpus is empty", "silently", "silently"]


def test_the_result_of_rank_0_reaches_all_ranks(answers: list[dict]) -> None:
    assert [answer["told"] for answer in answers] == ["by 0"] * 3


def test_an_error_of_any_rank_is_raised_on_all_ranks(answers: list[dict]) -> None:
    assert [answer["refused_by_one"] for answer in answers] == ["the disk of rank 1 is damaged"] * 3


def test_other_ranks_raise_the_kind_of_error_that_one_rank_raised(answers: list[dict]) -> None:
    assert [answer["kinds"] for answer in answers] == [["TemporaryError"] * 2 + ["UserError"] * 2] * 3


def test_work_on_all_returns_the_own_result_of_each_rank(answers: list[dict]) -> None:
    assert [answer["done_by_all"] for answer in answers] == [0, 1, 2]


def test_a_sum_over_processes_is_the_same_on_all_ranks(answers: list[dict]) -> None:
    assert [answer["total"] for answer in answers] == [6.0] * 3


def round_differently(meshes: list[str]) -> list[list[dict[str, list[float]]]]:
    """By mesh: this rank's gradients, and the same after rank 3 has rounded those of norms and all have shared them."""
    world, found = start("cpu", seed=0), []
    tokens = torch.randint(0, 4096, (2, 17), generator=torch.Generator().manual_seed(0))
    for mesh in meshes:
        model, _ = build_model(SIZES["llama3_debug"], mesh=mesh_config(mesh))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients = {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}
        before = {name: gradient.tolist() for name, gradient in gradients.items()}
        if world.rank == 3:
            torch._foreach_mul_([gradient for name, gradient in gradients.items() if "norm" in name], 1 + 1e-6)
        share_gradients_of_copies(model.parameters(), model.norm.weight.device_mesh["tensor"])
        found.append([before, {name: gradient.tolist() for name, gradient in gradients.items()}])
    stop()
    return found


def test_what_a_tensor_group_holds_alike_gets_equal_gradients_however_they_were_rounded() -> None:
    meshes = ["1.2.1.2", "2.1.1.2", "1.1.2.2"]
    answers = run_processes(4, round_differently, meshes)
    for mesh, of_mesh in zip(meshes, zip(*answers, strict=True), strict=True):
        for rank, (before, after) in enumerate(of_mesh):
            assert after == before, (mesh, rank)
        for one, other in (of_mesh[:2], of_mesh[2:]):  # the tensor groups
            alike = [name for name in one[0] if one[0][name] == other[0][name]]
            assert {name for name in one[0] if "norm" in name} == set(alike), mesh


def agree_on_largest(values: list[list[float]]) -> list[float]:
    """What a rank of 2 x 2 has of each list, after the rows and then the columns have agreed."""
    world = start("cpu", seed=0)
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    groups = [devices.get_group(axis) for axis in ("replicate", "tensor")]
    found = [largest_in_groups(torch.tensor(one[world.rank]), groups).item() for one in values]
    stop()
    return found


def test_the_largest_value_is_that_of_all_groups_and_infinite_beside_nan() -> None:
    values = [[1.0, 1.0, 1.0, 1.1], [0.1] * 4, [1.0, 1.0, math.nan, 1.0], [1.0, -math.inf, 1.0, 1.0]]
    largest = [torch.tensor(1.1).item(), torch.tensor(0.1).item(), math.inf, math.inf]
    assert run_processes(4, agree_on_largest, values) == [largest] * 4
