"""The speed of each axis of a mesh between real processes, and of products."""

import math
from typing import Any

import pytest

from parallel.config import MeshDegrees
from parallel.dist import start, stop
from parallel.mesh import build_mesh
from recipes.cluster.links import SIZES, measure_axes, slow_products, summary
from tests.processes import run_processes


def measured() -> tuple[dict[str, Any], list[str]]:
    """What one of four processes measured, and what it logs."""
    world = start("cpu", seed=0)
    found = measure_axes(world, build_mesh(MeshDegrees(replicate=1, shard=2, context=1, tensor=2), device_type="cpu"))
    lines = list(summary(found, world))
    stop()
    return found, lines


@pytest.mark.slow
def test_axes_of_several_processes_are_measured_at_two_sizes_alike_on_all_ranks() -> None:
    answers = run_processes(4, measured)
    assert all(found["links"] == answers[0][0]["links"] for found, _ in answers)
    found, lines = answers[0]
    assert [(link["axis"], link["processes"], link["stride"]) for link in found["links"]] == [
        ("shard", 2, 2),
        ("tensor", 2, 1),
    ]
    for link in found["links"]:
        for name in ("all_gather", "reduce_scatter"):
            assert [amount for amount, _ in link[name]] == list(SIZES["cpu"])
            assert all(seconds > 0 and math.isfinite(seconds) for _, seconds in link[name])
    assert len(found["products"]["seconds"]) == 4
    assert lines[0].startswith("pre-flight: shard axis of 2: all-gather ") and len(lines) == 2


def test_gpu_that_multiplies_slowly_is_named_and_equal_ones_are_not() -> None:
    [line] = slow_products([1e-3, 1e-3, 1.3e-3, 1e-3], 7e11)
    assert line.startswith("  rank 2 multiplies matrices at 538 TFLOP/s, the median is 700")
    assert not list(slow_products([1e-3, 1.05e-3, 1e-3, 1e-3], 7e11))
