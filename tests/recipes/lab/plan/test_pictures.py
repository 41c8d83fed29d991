"""What pictures of a plan show; tests/recipes/lab/plan/test_command.py draws them."""

import pytest

from recipes.lab.plan.pictures import forward
from recipes.lab.plan.plan import plan
from recipes.lab.plan.world import World
from recipes.plan.hardware import GPUS
from recipes.recipe.load import CONFIGS, load


@pytest.mark.parametrize("reshard", ["true", "false"])
@pytest.mark.parametrize("batch", [8, 128])
def test_forward_pass_fills_memory_up_to_the_loss(reshard: str, batch: int) -> None:
    changes = [f"--fsdp.reshard_after_forward={reshard}", f"--batch.global_batch_size={batch}"]
    recipe = load(CONFIGS / "smollm3_3b_8xh100.toml", changes, rules=False)
    found = plan(recipe, World(GPUS["H100"], 8))
    sums = [sum(pieces.values()) for pieces in forward(found).values()]
    assert len(sums) == recipe.model.layers
    assert sorted(sums[:-1]) == sums[:-1]  # the last block gathers none ahead
    at_the_loss = found.memory.moments["the loss"]
    last = [*forward(found).values()][-1]
    assert 0.99 * at_the_loss["activations"] < last["activations"] <= at_the_loss["activations"]
    assert max(sums) < found.memory.peak
