"""Random weights, and whole tensors of sharded ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.decoder import Decoder
from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.fsdp import materialize, plain_name
from tests.build import build_model
from tests.meshes import mesh_config, on_each_mesh
from tests.whole import whole

MESHES = ("1.1.1.1", "1.1.1.2", "1.1.2.1", "1.2.1.2", "2.1.1.2", "1.1.2.2")
# FSDP's parts of these sizes are unequal.
MODEL = replace(SIZES["llama3_debug"], layers=2, width=18, heads=4, key_value_heads=2, head_width=6)
MODEL = replace(MODEL, feed_forward_width=26, vocabulary=22)


def plain_weights(tied: bool) -> dict[str, Tensor]:
    """Of a model that is not parallelized."""
    with torch.device("meta"):
        model = Decoder(replace(MODEL, tied_embeddings=tied))
    materialize(model, device=torch.device("cpu"), seed=3)
    return dict(model.named_parameters())


def differing(mesh: str) -> list[str]:
    """Parameters that start with other values on this mesh."""
    start("cpu", seed=0)
    found = []
    for tied in (True, False):
        expected = plain_weights(tied)
        model, _ = build_model(replace(MODEL, tied_embeddings=tied), mesh=mesh_config(mesh), seed=3, mode="full")
        values = {plain_name(name): whole(value) for name, value in model.named_parameters()}
        assert values.keys() == expected.keys()
        found += [name for name, value in values.items() if not torch.equal(value, expected[name])]
    stop()
    return found


@pytest.mark.slow
def test_every_mesh_starts_with_the_same_weights() -> None:
    assert torch.unique(plain_weights(tied=False)["lm_head.weight"]).numel() > 300  # random, and no two alike
    for mesh, processes in on_each_mesh(MESHES, differing).items():
        assert processes == [[]] * len(processes), mesh


def test_random_weights_are_those_of_earlier_versions() -> None:
    values = plain_weights(tied=False)
    sums = [round(values[name].double().abs().sum().item(), 6) for name in ("embedding.weight", "lm_head.weight")]
    last = values["blocks.1.feed_forward.down_proj.weight"].flatten()[-1].item()
    assert (sums, last) == ([6.588547, 6.553492], 0.013371183536946774)
