"""Which GPU a plan is made for, and how many of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.lab.plan.plan import Asked, World, known, world_of
from recipes.plan.hardware import GPUS, Gpu
from recipes.plan.rates import RATES, Rates
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe

CARD = ("NVIDIA H200", 143_771 * 2**20)


def recipe_of(file: str, *changes: str) -> Recipe:
    return load(CONFIGS / file, changes, rules=False)


def told(world: World) -> tuple[str, int, int, int]:
    return world.gpu.name, world.processes, world.nodes, world.gpu.per_node


NAME = "from the recipe's name"
EIGHT = "smollm3_3b_8xh100"


@pytest.mark.parametrize(
    ("name", "changes", "asked", "number", "expected"),
    [
        ("llama3_405b_128x8h100", (), Asked(""), {}, ("H100", 1024, 128, 8, NAME, NAME)),
        (EIGHT, ("--run.name", "trial"), Asked(EIGHT), {}, ("H100", 8, 1, 8, NAME, NAME)),  # that of the file
        ("smollm3_3b_48x8h100", (), Asked("", gpu="h200"), {}, ("H200", 384, 48, 8, "--gpu", NAME)),
        (EIGHT, (), Asked(""), {"nodes": 4}, ("H100", 32, 4, 8, NAME, "--nodes, 8 in each")),  # full nodes
        (EIGHT, (), Asked(""), {"processes": 16, "nodes": 4}, ("H100", 16, 4, 4, NAME, "--processes")),
    ],
)
def test_the_name_of_a_recipe_holds_kind_and_number(
    name: str, changes: Sequence[str], asked: Asked, number: dict[str, int], expected: tuple[object, ...]
) -> None:
    world = world_of(recipe_of(f"{name}.toml", *changes), asked, **number)
    assert (*told(world), world.kind_from, world.number_from) == expected


def test_a_recipe_without_hardware_is_planned_for_the_fewest_h100_of_its_mesh() -> None:
    world = world_of(recipe_of("smollm3_debug_every_axis.toml"), Asked("smollm3_debug_every_axis"))
    assert told(world) == ("H100", 8, 1, 8)
    assert "assumed" in world.kind_from and "fewest" in world.number_from


def test_the_gpu_of_this_machine_comes_before_the_assumed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.lab.plan.plan.devices", lambda: (CARD, CARD))
    assert world_of(recipe_of("smollm3_debug.toml"), Asked("")).gpu == GPUS["H200"]
    assert world_of(recipe_of("smollm3_3b_8xh100.toml"), Asked("")).gpu.name == "H100"


def test_an_unknown_gpu_of_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.lab.plan.plan.devices", lambda: (("NVIDIA GeForce RTX 4090", 24_564 * 2**20),))
    world = world_of(recipe_of("smollm3_debug.toml"), Asked(""))
    assert (world.gpu.name, world.kind_from) == ("H100", "assumed: this machine's NVIDIA GeForce RTX 4090 is unknown")


@pytest.mark.parametrize(
    ("device", "mebibytes", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81_559, "H100"),
        ("NVIDIA H100", 97_871, "H100-500W"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "A100"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40"),
        ("NVIDIA B200", 183_359, "B200"),
        ("NVIDIA H100 PCIe", 81_559, None),
        ("NVIDIA H100 NVL", 95_830, None),
        ("NVIDIA A100-PCIE-40GB", 40_960, None),
        ("NVIDIA GB200", 189_471, None),
        ("NVIDIA GH200 480GB", 97_871, None),
        ("Tesla V100-SXM2-32GB", 32_768, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_memory(device: str, mebibytes: int, name: str | None) -> None:
    found = known(device, mebibytes * 2**20)
    assert (found.name if found else None) == name


def test_processes_that_nodes_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match="--processes 16: cannot be divided equally among 3 nodes; write a multiple of"):
        world_of(recipe_of("smollm3_3b_8xh100.toml"), Asked(""), processes=16, nodes=3)


def test_a_measurement_is_of_its_own_device_and_of_so_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []

    def calibrated(path: Path, gpu: Gpu | None, *, processes: int) -> tuple[Gpu, Rates]:
        asked_for.append((path.name, gpu, processes))
        return GPUS["A100"], replace(RATES, calibrated="by a test")

    monkeypatch.setattr("recipes.plan.calibration.calibrated", calibrated)
    asked = Asked("", calibrated_by=Path("folder/record.json"))
    world = world_of(recipe_of("smollm3_3b_8xh100.toml"), asked, processes=4)
    assert (world.gpu.name, world.rates.calibrated, world.kind_from) == ("A100", "by a test", "measured: record.json")
    world_of(recipe_of("smollm3_3b_8xh100.toml"), replace(asked, gpu="h200"))
    assert asked_for == [("record.json", None, 4), ("record.json", GPUS["H200"], 8)]
