"""One run that goes on from mesh to mesh: the losses, gradients, texts and exports of one process."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.dist import start, stop
from parallel.fsdp import plain_name
from recipes.files.layout import EXPORT
from recipes.recipe.schema import Recipe
from recipes.weights.convert import export_checkpoint
from tests.meshes import mesh_config, on_each_mesh
from tests.processes import run_processes
from tests.training import change, rows, training
from tests.whole import whole

pytestmark = pytest.mark.slow

ONE = "1.1.1.1"
CHAINS = {
    "of shards": (("1.2.1.2", 4), ("2.1.2.1", 8), ("1.1.2.2", 12)),
    "of stages": (("2.1.1.1.1", 3), (ONE, 5), ("4.1.1.1.1", 7), ("2.1.2.1.1", 10), ("2.1.1.1.2", 12)),
}
"""The meshes that a run goes through, and the last step on each."""
STEPS = 12
INTERLEAVED = "2.1.2.1.1"


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
    return found


def take_to(recipe: Recipe, steps: int, mesh: str, world: Any) -> Seen:
    axes, schedule = vars(mesh_config(mesh)), "interleaved" if mesh == INTERLEAVED else "1f1b"
    recipe = change(recipe, pipeline={"schedule": schedule, "stages_per_rank": 2 if mesh == INTERLEAVED else 1})
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


@dataclass(frozen=True)
class Chain:
    """A run that went from mesh to mesh, and what one process did."""

    recipe: Recipe
    links: tuple[tuple[str, int], ...]
    seen: list[Seen]
    """What each link showed."""
    alone: list[Seen]
    """What one process showed in a run of its own, and from each link's end: there, and in one step more."""


@pytest.fixture(scope="module", params=CHAINS)
def chain(request: pytest.FixtureRequest, small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    recipe = change(
        small,
        run={"output": str(tmp_path_factory.mktemp("chain"))},
        model={"key_value_heads": 4, "vocabulary": 512, "layers": 4 if request.param == "of stages" else 2},
        batch={"micro_batch_size": 2},
        checkpoint={"every": 100, "keep": 100, "export_hf": True},
        validation={"every": 100, "batches": 2, "sample_tokens": 8},
    )
    of_links, again = [], []
    for mesh, until in CHAINS[request.param]:
        run, copy = named(recipe, "chain"), named(recipe, f"from-{until}")
        of_ranks = [seen for [seen] in on_each_mesh([mesh], go_on, [(run, until)])[mesh]]
        for seen in of_ranks:  # each has those of its stages
            of_ranks[0].gradients = seen.gradients | of_ranks[0].gradients
        of_links.append(of_ranks[0])
        shutil.copytree(run.run.folder, copy.run.folder)
        shutil.copytree(run.run.folder / EXPORT, Path(recipe.run.output) / f"export-{until}")
        again += [(copy, until), (copy, until + 1)]
    [alone] = run_processes(1, go_on, ONE, [(named(recipe, "whole"), STEPS), *again])
    return Chain(recipe, CHAINS[request.param], of_links, alone)


def test_a_chain_of_meshes_follows_the_curve_of_one_process(chain: Chain) -> None:
    found, expected = ([row for row in rows(named(chain.recipe, name)) if "loss" in row] for name in ("chain", "whole"))
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, STEPS + 1))
    losses = [[row["loss"] for row in one] for one in (found, expected)]
    assert losses[1][-1] < losses[1][0] - 0.3  # it learns
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(*([row["grad_norm"] for row in one] for one in (found, expected)), rtol=1e-4)


def test_each_link_begins_with_the_gradients_of_one_process_from_the_same_checkpoint(chain: Chain) -> None:
    same = [chain.alone[0], *chain.alone[2::2]]  # the first step of all, and the one after each link's end
    for (mesh, _), link, one in zip(chain.links, chain.seen, same, strict=False):
        assert link.gradients.keys() == one.gradients.keys() and link.gradients
        for name, gradient in one.gradients.items():
            error = np.linalg.norm(link.gradients[name] - gradient) / np.linalg.norm(gradient)
            assert error < 1e-5, (mesh, name, error)


def test_each_mesh_validates_and_continues_a_text_as_one_process_at_the_same_step(chain: Chain) -> None:
    assert len({str(link.sample) for link in chain.seen}) > 1  # the text depends on the weights
    for (mesh, _), link, one in zip(chain.links, chain.seen, chain.alone[1::2], strict=True):
        assert not one.gradients  # it has taken no step
        assert link.validation_loss == pytest.approx(one.validation_loss, abs=1e-5), mesh
        assert link.sample == one.sample and all(link.sample), mesh


def test_the_export_of_each_mesh_is_that_of_its_checkpoint(chain: Chain, tmp_path: Path) -> None:
    recipe = chain.recipe  # the model card prints the run's recipe.toml, which every link writes anew
    for mesh, until in chain.links:
        step = named(recipe, "chain").run.folder / "checkpoints" / f"step-{until:08d}"
        export_checkpoint(step, tmp_path / str(until))
        ours, theirs = (
            {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}
            for folder in (tmp_path / str(until), Path(recipe.run.output) / f"export-{until}")
        )
        assert ours == theirs, mesh
