"""One run that goes on from mesh to mesh: the losses, gradients, texts and exports of one process."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.dist import start, stop
from parallel.fsdp import plain_name, whole
from recipes.files.layout import EXPORT
from recipes.recipe.schema import Recipe
from recipes.weights.convert import export_checkpoint
from tests.meshes import degrees, on_each_mesh
from tests.processes import run_processes
from tests.training import change, rows, training

pytestmark = pytest.mark.slow

LINKS = (("1.2.1.2", 4), ("2.1.2.1", 8), ("1.1.2.2", 12))
"""The meshes that the run goes through, and the last step on each."""
STEPS = LINKS[-1][1]
ONE = "1.1.1.1"


@dataclass
class Seen:
    """What one start of a run has shown, on rank 0."""

    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first step, by name."""
    validation_loss: float = 0.0
    sample: list[str] = field(default_factory=list)


def go_on(mesh: str, runs: list[tuple[Recipe, int]]) -> list[Seen]:
    """Take each of these runs to a step, one after the other."""
    world = start("cpu", seed=0)
    found = [take_to(recipe, steps, mesh, world) for recipe, steps in runs]
    stop()
    return found if world.is_main else []


def take_to(recipe: Recipe, steps: int, mesh: str, world: Any) -> Seen:
    axes = dict(zip(("replicate", "shard", "context", "tensor"), degrees(mesh), strict=True))
    lines: list[str] = []
    seen = Seen()
    with training(change(recipe, mesh=axes, run={"steps": steps}), world) as trainer:

        def keep(*_: Any) -> None:
            if not seen.gradients:
                parameters = trainer.built.model.named_parameters()
                seen.gradients = {
                    plain_name(name): whole(parameter.grad).numpy().copy() for name, parameter in parameters
                }

        trainer.built.optimizer.register_step_pre_hook(keep)
        trainer.console.log = lambda line, **_: lines.append(line)
        assert trainer.run() == 0
    seen.validation_loss = trainer.validation_loss[""]
    place = next(number for number, line in enumerate(lines) if "how the model goes on" in line)
    seen.sample = lines[place + 1 : place + 3]
    return seen


def named(recipe: Recipe, name: str) -> Recipe:
    return change(recipe, run={"name": name})


@pytest.fixture(scope="module")
def chain(small: Recipe) -> tuple[Recipe, list[Seen], list[Seen]]:
    """The recipe, what each link showed, and what one process showed at each link's end and in one step more."""
    recipe = change(
        small,
        model={"key_value_heads": 4, "vocabulary": 512},
        batch={"micro_batch_size": 2},
        checkpoint={"every": 100, "keep": 100, "export_hf": True},
        validation={"every": 100, "batches": 2, "sample_tokens": 8},
    )
    of_links, again = [], []
    for mesh, until in LINKS:
        run, copy = named(recipe, "chain"), named(recipe, f"from-{until}")
        of_links += on_each_mesh([mesh], go_on, [(run, until)])[mesh][0]
        shutil.copytree(run.run.folder, copy.run.folder)
        shutil.copytree(run.run.folder / EXPORT, Path(recipe.run.output) / f"export-{until}")
        again += [(copy, until), (copy, until + 1)]
    [alone] = run_processes(1, go_on, ONE, [(named(recipe, "whole"), STEPS), *again])
    return recipe, of_links, alone


def test_a_chain_of_meshes_follows_the_curve_of_one_process(chain: Any) -> None:
    found, expected = ([row for row in rows(named(chain[0], name)) if "loss" in row] for name in ("chain", "whole"))
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, STEPS + 1))
    losses = [[row["loss"] for row in one] for one in (found, expected)]
    assert losses[1][-1] < losses[1][0] - 0.3  # it learns
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(*([row["grad_norm"] for row in one] for one in (found, expected)), rtol=1e-4)


def test_each_link_begins_with_the_gradients_of_one_process_from_the_same_checkpoint(chain: Any) -> None:
    _, links, alone = chain
    same = [alone[0], *alone[2::2]]  # the first step of all, and the one after each link's end
    for (mesh, _), link, one in zip(LINKS, links, same, strict=False):
        assert link.gradients.keys() == one.gradients.keys() and link.gradients
        for name, gradient in one.gradients.items():
            error = np.linalg.norm(link.gradients[name] - gradient) / np.linalg.norm(gradient)
            assert error < 1e-5, (mesh, name, error)


def test_each_mesh_validates_and_continues_a_text_as_one_process_at_the_same_step(chain: Any) -> None:
    _, links, alone = chain
    assert len({str(link.sample) for link in links}) > 1  # the text depends on the weights
    for (mesh, _), link, one in zip(LINKS, links, alone[1::2], strict=True):
        assert not one.gradients  # it has taken no step
        assert link.validation_loss == pytest.approx(one.validation_loss, abs=1e-5), mesh
        assert link.sample == one.sample and all(link.sample), mesh


def test_the_export_of_each_mesh_is_that_of_its_checkpoint(chain: Any, tmp_path: Path) -> None:
    recipe = chain[0]  # the model card prints the run's recipe.toml, which every link writes anew
    for mesh, until in LINKS:
        step = named(recipe, "chain").run.folder / "checkpoints" / f"step-{until:08d}"
        export_checkpoint(step, tmp_path / str(until))
        ours, theirs = (
            {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}
            for folder in (tmp_path / str(until), Path(recipe.run.output) / f"export-{until}")
        )
        assert ours == theirs, mesh
