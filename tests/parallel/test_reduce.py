"""Gradient norm, clipping and agreement over real processes."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from models.sizes import SIZES
from parallel.config import MeshConfig
from parallel.dist import SilentUserError, World, on_all, on_main, on_main_first, start, stop
from parallel.errors import UserError
from parallel.reduce import clip_gradients, gradient_norm, sum_over_group
from recipes.training.interruption import Agreement
from tests.build import build_model
from tests.processes import run_processes


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
    clip_gradients(parameters, norm=norm, max_norm=0.5)
    clipped = gradient_norm(parameters).item()
    clip_gradients(parameters, norm=gradient_norm(parameters), max_norm=1e6)
    return {
        "norm": norm.item(),
        "expected": math.sqrt(sum(gradient.double().square().sum().item() for gradient in whole)),
        "first": whole[1].flatten()[:5].tolist(),
        "calls": calls,
        "functional": hidden.get_total_counts(),
        "clipped": clipped,
        "left_alone": gradient_norm(parameters).item(),
    }


def test_norm_and_clip_on_every_mesh() -> None:
    [[alone]] = run_processes(1, all_norms, [MeshConfig()])
    assert alone["calls"] == []
    meshes = [MeshConfig(1, 4), MeshConfig(2, 2), MeshConfig(4, 1)]
    # One scalar within the shard group and nothing across replicas.
    expected_calls = [[(1, 4)], [(1, 2)], []]
    for answers in run_processes(4, all_norms, meshes):
        for answer, calls in zip(answers, expected_calls, strict=True):
            assert answer["calls"] == calls
            assert answer["functional"] <= len(calls)  # nothing more hidden in DTensor
            assert math.isclose(answer["norm"], answer["expected"], rel_tol=2e-5)
            assert math.isclose(answer["norm"], alone["norm"], rel_tol=2e-5)
            assert torch.allclose(torch.tensor(answer["first"]), torch.tensor(alone["first"]), rtol=1e-4, atol=1e-6)
            assert math.isclose(answer["clipped"], 0.5, rel_tol=1e-4)
            assert math.isclose(answer["left_alone"], answer["clipped"], rel_tol=1e-6)


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
    except SilentUserError:
        refused = "silently"
    except UserError as error:
        refused = str(error)
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
    stop()
    return {"heard": heard, "value": value, "work": work_done, "refused": refused, "total": total} | {
        "told": told,
        "refused_by_one": refused_by_one,
        "done_by_all": on_all(world, lambda: world.rank),
    }


def test_ranks_agree_and_rank_0_speaks() -> None:
    answers = run_processes(3, talk)
    for rank, answer in enumerate(answers):
        assert answer["heard"] == [0, 0, 0, 7, 0]  # one call late, the same on all
        assert answer["value"] == 7
        assert answer["work"] == [rank]
        assert answer["refused"] == ("the corpus is empty" if rank == 0 else "silently")
        assert answer["told"] == "by 0"
        assert answer["refused_by_one"] == "the disk of rank 1 is damaged"
        assert answer["done_by_all"] == rank
        assert answer["total"] == 6.0
