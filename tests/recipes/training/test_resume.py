"""Whole runs that stop and resume: on another mesh, from a damaged checkpoint, after a full disk."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.recipe.schema import Recipe
from tests.full_disk import files_of_at_most
from tests.processes import run_processes
from tests.training import change, curve, largest_gap, rows, run_all, train, training

pytestmark = pytest.mark.slow

HALF, STEPS = 4, 8
RESHARDING_TOLERANCE = 1e-6
"""Relative, in float32: sums over another number of processes are rounded differently."""
GATHERED_FLOAT8: dict[str, Any] = {
    "float8": {"recipe": "tensorwise", "emulate": True, "all_gather": True},
    "fsdp": {"param_dtype": "bfloat16"},
}


def folder_of(recipe: Recipe, name: str) -> Path:
    return Path(recipe.run.output) / name


def run_and_copy(first: list[Recipe], copies: list[tuple[Path, Path]], then: list[Recipe]) -> list[int]:
    """Run `first`, copy their folders, then run `then`, which go on in the copies; exit codes."""
    import torch.distributed as dist

    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    codes = []
    for recipe in [*first, None, *then]:
        if recipe is None:
            if world.is_main:
                for source, target in copies:
                    shutil.copytree(source, target)
            dist.barrier()
            continue
        codes.append(train(recipe, world))
    stop()
    return codes


ON = {4: ("same", "ZeRO-2"), 3: ("three",), 2: ("two",), 1: ("one", "float8")}
"""How many processes continue which copy of the run of 2 x 2."""


@pytest.fixture(scope="module")
def continued(small: Recipe) -> dict[str, Recipe]:
    """A "whole" run on 2 x 2 processes, and copies of its first half that went on in the ways of `ON`."""
    # Three processes can share 12 sequences, too.
    small = change(small, model={"vocabulary": 512}, batch={"global_batch_size": 12})
    saving = change(small, mesh={"replicate": 2, "shard": 2})
    variants = {
        "same": saving,
        "ZeRO-2": change(small, fsdp={"reshard_after_forward": False}),
        "three": small,
        "two": small,
        "one": change(small, activation_checkpointing={"mode": "full", "blocks": 1}, batch={"micro_batch_size": 2}),
        "float8": change(small, float8={"recipe": "tensorwise", "emulate": True, "exclude": ("lm_head",)}),
    }
    variants = {name: change(recipe, run={"name": name}) for name, recipe in variants.items()}
    whole, half = (change(saving, run={"name": n, "steps": steps}) for n, steps in (("whole", STEPS), ("half", HALF)))
    copies = [(folder_of(small, "half"), folder_of(small, name)) for name in variants]
    assert run_processes(4, run_and_copy, [whole, half], copies, [variants[name] for name in ON[4]]) == [[0] * 4] * 4
    for processes in (3, 2, 1):
        codes = run_processes(processes, run_all, [variants[name] for name in ON[processes]])
        assert codes == [[0] * len(ON[processes])] * processes
    return variants | {"whole": whole}


def test_a_run_continued_on_the_same_mesh_is_bit_equal(continued: dict[str, Recipe]) -> None:
    assert curve(continued["same"]) == curve(continued["whole"])
    for shard in ("shard-00000-of-00004.safetensors", "shard-00003-of-00004.safetensors"):
        same, whole = (
            (continued[name].run.folder / "checkpoints" / f"step-{STEPS:08d}" / shard).read_bytes()
            for name in ("same", "whole")
        )
        assert same == whole


@pytest.mark.parametrize("name", [name for names in ON.values() for name in names])
def test_a_run_continued_on_any_mesh_repeats_the_rest_of_the_curve(name: str, continued: dict[str, Recipe]) -> None:
    expected, found = curve(continued["whole"]), curve(continued[name])
    assert [row["step"] for row in rows(continued[name])] == list(range(1, STEPS + 1))
    assert len(expected) == STEPS
    assert found[:HALF] == expected[:HALF]
    assert largest_gap(found, expected) < (1e-2 if name == "float8" else RESHARDING_TOLERANCE)


def fill_the_disk(recipe: Recipe, reference: Recipe) -> list[str]:
    """Train; go on with a disk that is full; with space again; and with the newest checkpoint damaged."""
    from parallel.dist import start, stop

    world = start("cpu", seed=0)

    def run(steps: int, recipe: Recipe = recipe) -> str:
        try:
            return str(train(change(recipe, run={"steps": steps}), world, silent=False))
        except UserError as error:
            return str(error)

    answers = [run(STEPS, reference), run(2)]
    with files_of_at_most(200_000):
        answers.append(run(6))
    answers.append(run(6))
    newest = Path(recipe.run.output) / recipe.run.name / "checkpoints" / "step-00000006"
    shard = next(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    answers.append(run(STEPS))
    stop()
    return answers


def test_training_survives_a_full_disk_and_a_damaged_checkpoint(small: Recipe) -> None:
    recipe, reference = (change(small, run={"name": name}) for name in ("full", "reference"))
    [answers] = run_processes(1, fill_the_disk, recipe, reference)
    assert answers == ["0", "0", "74", "0", "0"]
    log = (folder_of(small, "full") / "log.txt").read_text()
    assert log.count("all steps are done, but the last checkpoint is not saved; the same command tries again\n") == 1
    for step in (4, 6):
        assert re.search(f"step {step:>6}  NOT SAVED: File too large .*; older checkpoints are unchanged\n", log)
    assert [line.rpartition("/")[2] for line in log.splitlines() if "resumed from" in line] == [
        "step-00000002",  # on the full disk
        "step-00000002",  # and with space again
        "step-00000004",
    ]
    assert "which belong to" in log and "set aside as damaged-step-00000006" in log
    assert curve(recipe) == curve(reference)
    names = sorted(path.name for path in (folder_of(small, "full") / "checkpoints").iterdir())
    assert names == ["damaged-step-00000006", "step-00000006", "step-00000008"]


def interrupt_every_step(recipe: Recipe) -> dict[str, list[str]]:
    """A whole run, and one that stops inside the gradient accumulation of every step and resumes from disk each time.

    Returns the checksum of the newest checkpoint's shards, by run.
    """
    import xxhash

    from parallel.dist import start, stop

    class Interrupted(Exception):
        pass

    def interrupt(*_: object, countdown: list[int]) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:  # the third micro-batch of a step
            raise Interrupted

    world = start("cpu", seed=0)
    assert train(change(recipe, run={"name": "uninterrupted"}), world) == 0
    interrupted = change(recipe, run={"name": "interrupted"})
    for step in range(1, recipe.run.steps + 1):
        with training(interrupted, world) as trainer:
            assert trainer.step == max(0, step - 2)  # the step before is repeated and saved; then the run stops
            trainer.built.model.register_forward_pre_hook(
                partial(interrupt, countdown=[8 // world.size * (step - 1 - trainer.step) + 3])
            )
            with pytest.raises(Interrupted):
                trainer.run()
            trainer.checkpoints.finish()
    assert train(interrupted, world) == 0
    stop()
    last = f"checkpoints/step-{recipe.run.steps:08d}/shard-*"
    shards = {name: sorted(folder_of(recipe, name).glob(last)) for name in ("uninterrupted", "interrupted")}
    assert {len(files) for files in shards.values()} == {world.size}
    return {name: [xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files] for name, files in shards.items()}


@pytest.mark.parametrize(("processes", "sections"), [(1, {}), (2, GATHERED_FLOAT8)], ids=["one", "gathered float8"])
def test_a_run_interrupted_in_every_step_is_bit_equal(
    processes: int, sections: dict[str, Any], small: Recipe, tmp_path: Path
) -> None:
    recipe = change(small, run={"steps": 4, "output": str(tmp_path)}, checkpoint={"every": 1, "keep": 2})
    recipe = change(recipe, schedule={"kind": "cosine"}, **sections)
    found, *_ = run_processes(processes, interrupt_every_step, recipe)
    assert found["uninterrupted"] == found["interrupted"]
    assert curve(change(recipe, run={"name": "uninterrupted"})) == curve(change(recipe, run={"name": "interrupted"}))
