"""What each process of a mesh holds: its share of parameters and moments, and of the logits."""

from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.dist import start, stop
from parallel.fsdp import plain_name
from parallel.mesh import build_mesh
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import change

pytestmark = pytest.mark.slow

MODEL = {"layers": 4, "width": 64, "feed_forward_width": 128, "heads": 8, "key_value_heads": 4, "head_width": 8}
ROWS, LENGTH, VOCABULARY = 4, 512, 232
"""No other tensor has a dimension as large as this vocabulary."""
UNTIED = {"model": {"tied_embeddings": False}}
CHUNKS = {"batch": {"loss_chunks": 3}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("4.1.1.1", {}),
    "tensor": ("2.1.1.2", {}),
    "context": ("2.1.2.1", {}),
    "both": ("1.1.2.2", {}),
    "shard, tensor": ("1.2.1.2", UNTIED | CHUNKS),
    "shard, context": ("1.2.2.1", UNTIED),
    "tensor of four": ("1.1.1.4", UNTIED),
    "gather": ("1.1.2.2", CHUNKS | {"mesh": {"context_by": "gather"}}),
}
"""Name -> mesh, and the fields of the recipe that differ."""


class Shapes(TorchDispatchMode):
    """Remembers the shapes of all tensors that an operator makes on this process."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call this mode again, with what they hold
        result = function(*arguments, **(options or {}))
        # Not fake ones, with which DTensor works out shapes.
        self.shapes |= {tuple(tensor.shape) for tensor in tree_leaves(result) if type(tensor) is torch.Tensor}
        return result


def shares_of(mesh: str, fields: dict[str, Any], recipe: Recipe, world: Any) -> dict[str, Any]:
    """What this process holds in a step on as many rows for every data rank as in any other case."""
    layout = build_mesh(mesh_degrees(mesh), device_type="cpu")
    built = build(change(recipe, **fields), world, mesh=layout)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with Shapes() as seen:
        built.model(tokens[:, :-1], tokens[:, 1:]).backward()
    built.optimizer.step()
    names = {plain_name(name): parameter for name, parameter in built.model.named_parameters()}
    state = built.optimizer.state
    return {
        "shapes": seen.shapes,
        "whole": {name: parameter.numel() for name, parameter in names.items()},
        "parameters": {name: parameter.to_local().numel() for name, parameter in names.items()},
        "moments": {
            kind: {name: state[parameter][kind].to_local().numel() for name, parameter in names.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }


def all_shares(recipe: Recipe) -> dict[str, dict[str, Any]]:
    world = start("cpu", seed=0)
    found = {name: shares_of(mesh, fields, recipe, world) for name, (mesh, fields) in CASES.items()}
    stop()
    return found


@pytest.fixture(scope="module")
def found(small: Recipe) -> list[dict[str, dict[str, Any]]]:
    """Rank -> name of a case -> what it holds."""
    return run_processes(4, all_shares, change(small, model=MODEL | {"vocabulary": VOCABULARY}))


@pytest.mark.parametrize("case", CASES)
def test_a_process_holds_its_share_of_parameters_and_moments(case: str, found: list[dict[str, Any]]) -> None:
    """1 / (shard x context x tensor) of each matrix. A tensor group holds norms whole: 1 / (shard x context)."""
    _, shard, context, tensor = map(int, CASES[case][0].split("."))
    for of_rank in found:
        held = of_rank[case]
        norms = {name for name in held["whole"] if "norm" in name}
        assert len(norms) == 2 * MODEL["layers"] + 1
        expected = {
            name: size // (shard * context * (1 if name in norms else tensor)) for name, size in held["whole"].items()
        }
        assert held["parameters"] == held["moments"]["exp_avg"] == held["moments"]["exp_avg_sq"] == expected


@pytest.mark.parametrize("case", CASES)
def test_no_process_of_a_tensor_group_holds_logits_of_the_whole_vocabulary(
    case: str, found: list[dict[str, Any]]
) -> None:
    tensor = int(CASES[case][0].split(".")[-1])
    for of_rank in found:
        wide = {shape for shape in of_rank[case]["shapes"] if VOCABULARY in shape and shape != (VOCABULARY, 64)}
        assert bool(wide) == (tensor == 1), wide  # without tensor parallelism, this test would see them
