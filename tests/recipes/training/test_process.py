"""What environment.json records."""

import json
import sys

import pytest
import torch

from recipes.training.process import PACKAGES, environment

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_environment_names_the_commit_the_packages_and_the_machine() -> None:
    found = environment(world_size=3, device=CPU)
    assert list(found) == [
        "git_commit",
        "git_uncommitted_changes",
        "python",
        "packages",
        "cuda",
        "device",
        "host",
        "world_size",
        "deterministic",
        "allocator",
        "communication",
    ]
    assert list(found["packages"]) == list(PACKAGES)
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["wandb"]
    assert (found["device"], found["world_size"]) == ("cpu", 3)
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert json.loads(json.dumps(found)) == found
