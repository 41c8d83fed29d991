"""Runs that continue from a checkpoint of another run, which is only read."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.checkpoint.files import read_manifest
from recipes.data.history import Segment, consumed_tokens, from_json
from recipes.files.layout import step_folder
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe
from recipes.training.check import check
from recipes.training.fork import find_trunk, taken_over
from tests.processes import run_processes
from tests.training import change, curve, largest_gap, rows, run_all, take_step, train, training

pytestmark = pytest.mark.slow

STEPS = 8


def checkpoint(recipe: Recipe, step: int) -> Path:
    return step_folder(recipe.run.folder / "checkpoints", step)


def history_at(recipe: Recipe, step: int) -> tuple[Segment, ...]:
    return from_json(read_manifest(checkpoint(recipe, step)).state["progress"]["history"])


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes and the time of every file below a folder."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def run_forks(trunk: Recipe, forks: list[Recipe], abandoned: Recipe) -> list[int]:
    """Train the trunk; then, with a trunk that may not be written, the forks. `abandoned` ends without a checkpoint
    first, and the trunk goes on before it starts again."""
    world = start("cpu", seed=0)
    codes = [train(trunk, world)]
    before = contents(trunk.run.folder)
    for place, _, names in os.walk(trunk.run.folder):
        for name in (*names, "."):
            os.chmod(Path(place, name), 0o555 if name == "." else 0o444)
    codes += [train(fork, world, silent=False) for fork in forks]
    assert contents(trunk.run.folder) == before
    for place, _, _ in os.walk(trunk.run.folder):
        os.chmod(place, 0o755)
    with training(abandoned, world) as trainer:
        found = take_step(trainer)
        trainer.clock.count_step()
        trainer.recorder.log_step(9, found, learning_rate=0.1)
        trainer.loader.close()
        trainer.recorder.close()
        trainer.interruption.end()
    (abandoned.run.folder / ".lock").unlink(missing_ok=True)
    assert [row["step"] for row in rows(abandoned)] == [9]
    shutil.copytree(checkpoint(trunk, 8), checkpoint(trunk, 9))
    codes.append(train(abandoned, world))
    dist.barrier()
    stop()
    return codes


@pytest.fixture(scope="module")
def forks(small: Recipe, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """A trunk, and runs that continue from it: from step 4 unless their name says otherwise."""
    other = tmp_path_factory.mktemp("other") / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"Line {n} is not like {n * n}. " * 20}) + "\n" for n in range(300)))
    trunk = change(small, run={"name": "trunk", "steps": STEPS}, checkpoint={"keep": 1, "keep_every": 4})
    at_4 = change(trunk, run={"continue_from": f"{trunk.run.folder}@4"})
    wsd = {"kind": "wsd", "decay_steps": 3}
    from_text = {"source": "python-stdlib", "mixture": {str(corpus): 1.0, str(other): 1.0}}
    found = {
        "same": at_4,
        "cool_4": change(at_4, run={"steps": 7}, schedule=wsd),
        "cool_8": change(trunk, run={"continue_from": str(trunk.run.folder), "steps": 11}, schedule=wsd),
        "mixture": change(at_4, data=from_text),
        "batch": change(at_4, batch={"global_batch_size": 4}, optimizer={"lr": 1e-3, "betas": (0.8, 0.9)}),
        "long": change(at_4, batch={"sequence_length": 48}, optimizer={"state_dtype": "bfloat16"}),
        "whole": change(at_4, batch={"sequence_length": 48}),
        "of_long": change(at_4, run={"steps": 10}),
        "stopped": change(at_4, batch={"sequence_length": 48}, run={"steps": 6}),
    }
    found = {name: change(recipe, run={"name": name}) for name, recipe in found.items()}
    found["of_long"] = change(found["of_long"], run={"continue_from": f"{found['long'].run.folder}@8"})
    resumed = change(found["stopped"], run={"steps": STEPS})
    again = change(trunk, run={"name": "again", "continue_from": str(trunk.run.folder), "steps": 10})
    [codes] = run_processes(1, run_forks, trunk, [*found.values(), resumed], again)
    assert codes == [0] * (len(found) + 3)
    shutil.rmtree(checkpoint(trunk, 9))
    on_two = change(at_4, run={"name": "on_two"})
    assert run_processes(2, run_all, [on_two]) == [[0], [0]]
    return found | {"trunk": trunk, "again": again, "resumed": resumed, "on_two": on_two}


def test_a_fork_with_the_same_recipe_follows_the_trunk_to_the_bit(forks: dict[str, Recipe]) -> None:
    assert curve(forks["same"]) == curve(forks["trunk"])[4:]
    assert [row["step"] for row in rows(forks["same"])] == [5, 6, 7, 8]
    assert [row["tokens"] for row in rows(forks["same"])] == [row["tokens"] for row in rows(forks["trunk"])[4:]]
    for file in checkpoint(forks["trunk"], 8).glob("*.safetensors"):
        assert file.read_bytes() == (checkpoint(forks["same"], 8) / file.name).read_bytes()


def test_a_fork_on_another_number_of_processes_follows_the_trunk(forks: dict[str, Recipe]) -> None:
    assert largest_gap(curve(forks["on_two"]), curve(forks["trunk"])[4:]) < 1e-5


@pytest.mark.parametrize("step", [4, 8])
def test_cool_downs_decay_from_any_kept_checkpoint(step: int, forks: dict[str, Recipe]) -> None:
    fork, peak = forks[f"cool_{step}"], forks["trunk"].optimizer.lr
    assert [row["step"] for row in rows(fork)] == [step + 1, step + 2, step + 3]
    assert [row["lr"] for row in rows(fork)] == pytest.approx([peak, peak * 2 / 3, peak / 3])


def test_a_fork_with_another_mixture_goes_on_in_the_source_it_shares(forks: dict[str, Recipe]) -> None:
    old, new = history_at(forks["mixture"], 8)
    assert (old.sequences, new.sequences) == (32, 32)
    shared = next(iter(old.sources))
    assert consumed_tokens((old, new)) == {shared: 48 * 32, next(name for name in new.sources if name != shared): 512}
    assert "step      4  read of " in (forks["mixture"].run.folder / "log.txt").read_text()


def test_a_fork_with_another_batch_and_learning_rate_takes_them(forks: dict[str, Recipe]) -> None:
    fork = forks["batch"]
    assert [segment.sequences for segment in history_at(fork, 8)] == [32 + 16]
    assert {row["lr"] for row in rows(fork)} == {1e-3}
    assert [row["tokens"] for row in rows(fork)] == [32 * 32 + n * 4 * 32 for n in (1, 2, 3, 4)]
    numbers = read_manifest(checkpoint(fork, 8)).state["optimizer"]
    assert {tuple(group["betas"]) for group in numbers} == {(0.8, 0.9)}


def test_a_fork_with_another_length_counts_tokens_on(forks: dict[str, Recipe]) -> None:
    assert [(one.sequence_length, one.sequences) for one in history_at(forks["long"], 8)] == [(32, 32), (48, 32)]
    assert rows(forks["long"])[-1]["tokens"] == 32 * 32 + 32 * 48
    dtypes = {
        tensor.dtype for name, tensor in read_manifest(checkpoint(forks["long"], 8)).tensors.items() if "exp" in name
    }
    assert len(dtypes) == 1 and dtypes != {"F32"}


def test_a_stopped_fork_resumes_to_the_bit(forks: dict[str, Recipe]) -> None:
    assert curve(forks["resumed"]) == curve(forks["whole"])
    assert history_at(forks["resumed"], 8) == history_at(forks["whole"], 8)


def test_a_fork_of_a_fork_goes_on_at_the_length_before(forks: dict[str, Recipe]) -> None:
    history = history_at(forks["of_long"], 10)
    assert [(one.sequence_length, one.sequences) for one in history] == [(32, 32), (48, 32), (32, 16)]
    origin = json.loads((forks["of_long"].run.folder / "origin.json").read_text())
    assert (origin["run_folder"], origin["step"]) == (str(forks["long"].run.folder.resolve()), 8)


def test_a_fork_killed_before_its_first_checkpoint_begins_from_the_same_one(forks: dict[str, Recipe]) -> None:
    assert [row["step"] for row in rows(forks["again"])] == [9, 10]
    origin = json.loads((forks["again"].run.folder / "origin.json").read_text())
    assert origin["step"] == 8  # though the trunk had a newer one by then


def test_a_checkpoint_of_an_older_version_has_one_segment(forks: dict[str, Recipe]) -> None:
    path, trunk = checkpoint(forks["trunk"], 8), forks["trunk"]
    progress = read_manifest(path).state["progress"]
    assert from_json(progress["history"]) == from_json(taken_over({"step": 8, "sequences": 64}, path)["history"])
    (segment,) = history_at(trunk, 8)
    assert (segment.sequences, segment.sequence_length) == (64, 32)


# ---------------------------------------------------------------------------------------------------------- bad input


def refusal(recipe: Recipe, **changes: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        find_trunk(change(recipe, **changes), log=lambda line: None)
    return str(caught.value)


@pytest.fixture
def fork(forks: dict[str, Recipe]) -> Recipe:
    """A fork that has not begun."""
    return change(forks["same"], run={"name": "new"})


@pytest.fixture
def copy(forks: dict[str, Recipe], tmp_path: Path) -> Iterator[Path]:
    """A copy of the trunk."""
    shutil.copytree(forks["trunk"].run.folder, tmp_path / "copy")
    yield tmp_path / "copy"


def test_missing_trunks_are_named(fork: Recipe, copy: Path, tmp_path: Path) -> None:
    assert "nowhere does not exist" in refusal(fork, run={"continue_from": str(tmp_path / "nowhere")})
    assert "is an address; write a path on this disk" in refusal(
        fork, run={"continue_from": "s3://bucket/runs/trunk@40"}
    )
    message = refusal(fork, run={"continue_from": f"{copy}@5"})
    assert "no checkpoint of step 5; it has those of 4, 8 (checkpoint.keep_every keeps more)" in message
    for step in (4, 8):
        (copy / "checkpoints" / f"step-{step:08d}").rename(copy / "checkpoints" / f".partial-{step:08d}")
    message = refusal(fork, run={"continue_from": str(copy)})
    assert "holds no complete checkpoint; .partial-00000004 is still being written" in message


def test_a_run_does_not_continue_from_itself(fork: Recipe, forks: dict[str, Recipe]) -> None:
    for place in (forks["trunk"].run.folder, checkpoint(forks["trunk"], 4)):
        message = refusal(forks["trunk"], run={"continue_from": str(place)})
        assert "belongs to this run itself; give the fork another name" in message


def test_a_damaged_checkpoint_is_refused_and_a_newer_damaged_one_passed_over(fork: Recipe, copy: Path) -> None:
    (copy / "checkpoints" / "step-00000008" / "data.json").write_text("{}")
    assert "name another one with @STEP" in refusal(fork, run={"continue_from": f"{copy}@8"})
    said: list[str] = []
    trunk = find_trunk(change(fork, run={"continue_from": str(copy)}), log=said.append)
    assert trunk.name == "step-00000004" and said[0].endswith("; an older one is used")
    assert (copy / "checkpoints" / "step-00000008").exists()  # setting it aside is for the trunk to do


def test_a_checkpoint_of_its_own_folder_can_be_named(fork: Recipe, copy: Path) -> None:
    for name in (copy / "checkpoints" / "step-00000004", f"{copy / 'checkpoints'}@4", f"{copy}@4"):
        assert find_trunk(change(fork, run={"continue_from": str(name)}), log=print).name == "step-00000004"


def test_every_difference_that_a_fork_must_not_have_is_listed(fork: Recipe) -> None:
    message = refusal(
        fork, run={"seed": 1, "steps": 4}, model={"layers": 1, "rope_theta": 1e6}, optimizer={"name": "muon"}
    )
    assert "run.seed: 0 in the trunk, 1 now; the data order follows it, so write 0" in message
    assert "model.layers: 2 in the trunk, 1 now; the weights are of that model, so write 2" in message
    assert 'optimizer.name: "adamw" in the trunk, "muon" now' in message and "model.weights = " in message
    assert "run.steps: 4 now, but the trunk's 4 steps count; write more than 4" in message
    message += refusal(fork, data={"validation_fraction": 0.5})
    assert "data.validation_fraction: 0.02 in the trunk, 0.5 now; a source that goes on would be other text" in message
    assert "rope_theta" not in message  # a longer context may have another


def test_a_trunk_without_its_recipe_is_refused(fork: Recipe, copy: Path) -> None:
    (copy / "recipe.toml").unlink()
    assert "cannot be read" in refusal(fork, run={"continue_from": str(copy)})


def test_a_fork_whose_checkpoint_is_gone_does_not_begin_from_another(fork: Recipe, copy: Path, tmp_path: Path) -> None:
    fork = change(fork, run={"output": str(tmp_path / "runs"), "continue_from": str(copy)})
    fork.run.folder.mkdir(parents=True)
    gone = copy / "checkpoints" / "step-00000006"
    (fork.run.folder / "origin.json").write_text(json.dumps({"continue_from": str(copy), "checkpoint": str(gone)}))
    assert f"began from {gone}, which is gone; bring it back, or write another run.name" in refusal(fork)


def test_check_says_what_a_fork_continues_from(
    fork: Recipe, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_fork(**run: Any) -> None:
        (tmp_path / "fork.toml").write_text(to_toml(change(fork, run=run)))
        check(str(tmp_path / "fork.toml"), [], processes=None, nodes=None)

    check_fork(continue_from=f"{copy}@8", steps=9)
    assert f"# continues from {copy / 'checkpoints' / 'step-00000008'}, after 8 of the steps" in capsys.readouterr().out
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        check_fork(continue_from=f"{copy}@7")


def test_damaged_bytes_of_a_tensor_stop_a_fork_before_it_writes_anything(fork: Recipe, copy: Path) -> None:
    (shard,) = (copy / "checkpoints" / "step-00000004").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    damaged = change(fork, run={"name": "damaged", "continue_from": f"{copy}@4"})
    [(kind, message)] = run_processes(1, refused, damaged)
    assert kind == "UserError" and message.startswith("run.continue_from: ") and "@STEP" in message
    assert not (damaged.run.folder / "recipe.toml").exists()
    assert shard.read_bytes() == bytes(content)


def refused(recipe: Recipe) -> tuple[str, str]:
    """The error with which a run does not start."""
    world = start("cpu", seed=0)
    try:
        train(recipe, world)
    except UserError as error:
        return type(error).__name__, str(error)
    finally:
        stop()
    return "", ""
