"""Averages of the checkpoints of a real run, saved by two processes that divide its model."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.checkpoint.files import read_manifest, verify
from recipes.checkpoint.state import named_tensors
from recipes.checkpoint.storage import DTYPES, PARAMETERS, local, read_tensors
from recipes.files import remote
from recipes.files.layout import step_folder
from recipes.lab.average.average import average, shares_of, steps_of
from recipes.plan.tracked import LiveBytes
from recipes.recipe.schema import Recipe
from recipes.weights.convert import export_checkpoint
from tests.commands import run_command
from tests.object_server import object_server, upload_folder
from tests.processes import ROOT, run_processes
from tests.recipes.checkpoint.operations import Recorder, replay, torn
from tests.training import change, rows, run_all, take_step, training

pytestmark = pytest.mark.slow

STEPS = "2:8:2"
SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def run(small: Recipe) -> Recipe:
    """A run with checkpoints of steps 2, 4, 6 and 8, by two processes."""
    recipe = change(small, run={"name": "run"}, model={"vocabulary": 512}, checkpoint={"keep": 9, "keep_best": LOSS})
    recipe = change(recipe, validation={"every": 2, "batches": 1})
    assert run_processes(2, run_all, [recipe]) == [[0], [0]]
    return recipe


LOSS = "validation_loss"


@pytest.fixture(scope="module")
def out(run: Recipe) -> Path:
    """The average of its checkpoints, in equal shares."""
    folder = run.run.folder.with_name("average")
    code, screen, error = run_command("scripts/checkpoint.py", "average", run.run.folder, "--steps", STEPS, folder)
    assert (code, error) == (0, "")
    assert screen.splitlines() == [*(f"reading and verifying step {n}" for n in (2, 4, 6, 8)), f"writing {folder}"]
    return folder


@pytest.fixture
def copy(run: Recipe, tmp_path: Path) -> Path:
    """A copy of the run's folder, for a test to damage."""
    return shutil.copytree(run.run.folder, tmp_path / "run")


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[model\n", b"model = 3\n", b"a = 0x" + b"f" * 20_000])
def test_damaged_recipe_of_a_run_is_refused_by_name(damage: bytes, copy: Path, tmp_path: Path) -> None:
    """By what averages and exports, of which both read it after hours of other work otherwise."""
    (copy / "recipe.toml").write_bytes(damage)
    with pytest.raises(UserError, match=r"run/recipe\.toml (is damaged|is not UTF-8)"):
        export_checkpoint(step_folder(copy / "checkpoints", 8), tmp_path / "hf", dtype=None)
    if damage != b"model = 3\n":  # it is TOML
        with pytest.raises(UserError, match=r"recipe\.toml (is not|cannot be read)"):
            quietly(copy, STEPS, tmp_path / "average")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "average").exists()


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by its name."""
    path = step_folder(folder / "checkpoints", step)
    manifest = read_manifest(path)
    found = {name: torch.empty(one.shape, dtype=DTYPES[one.dtype]) for name, one in manifest.tensors.items()}
    read_tensors(path, manifest, found)
    return found


def by_hand(folder: Path, steps: list[int], shares: list[float]) -> dict[str, Tensor]:
    """The averaged parameters: the sum in float64, rounded once."""
    each = [tensors(folder, step) for step in steps]
    names = [name for name in each[0] if name.startswith(PARAMETERS)]
    return {
        name: cast(Tensor, sum(share * one[name].double() for share, one in zip(shares, each, strict=True))).float()
        for name in names
    }


def quietly(run: Path | str, steps: str, out: Path, weights: str = "equal") -> None:
    average([(str(run), step) for step in steps_of(steps)], out, weights=weights, log=lambda line: None)


def require_nothing_left(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_parameters_are_the_average_to_the_bit_and_the_rest_is_the_newest(run: Recipe, out: Path) -> None:
    expected, found = by_hand(run.run.folder, [2, 4, 6, 8], [0.25] * 4), tensors(out, 8)
    newest = tensors(run.run.folder, 8)
    assert found.keys() == newest.keys() and len(expected) == 20
    for name, value in found.items():
        assert torch.equal(value, expected.get(name, newest[name])), name
    assert not torch.equal(found["model.embedding.weight"], newest["model.embedding.weight"])


def test_decay_has_the_shares_of_a_decay_by_1_minus_the_root(run: Recipe, tmp_path: Path) -> None:
    shares = shares_of(3, "decay")
    assert [sum(shares[j:]) for j in range(3)] == pytest.approx([1, 1 - (1 / 3) ** 0.5, 1 - (2 / 3) ** 0.5])
    assert [sum(shares_of(4, "equal")[j:]) for j in range(4)] == [1, 0.75, 0.5, 0.25]
    quietly(run.run.folder / "checkpoints", "2,6,8", tmp_path / "deep" / "out", "decay")
    found = tensors(tmp_path / "deep" / "out", 8)
    for name, value in by_hand(run.run.folder, [2, 6, 8], shares).items():
        assert torch.equal(value, found[name]), name


def test_checkpoints_of_two_runs_are_averaged_by_their_weights_and_the_last_gives_the_rest(
    run: Recipe, copy: Path, tmp_path: Path
) -> None:
    names, out = [f"{run.run.folder}@4", f"{copy}@2"], tmp_path / "merged"
    code, _, error = run_command("scripts/checkpoint.py", "average", *names, "--weights", "3,1", out)
    assert (code, error) == (0, "")
    first, last, found = tensors(run.run.folder, 4), tensors(copy, 2), tensors(out, 2)
    for name, value in found.items():
        mean = (0.75 * first[name].double() + 0.25 * last[name].double()).float()
        assert torch.equal(value, mean if name.startswith(PARAMETERS) else last[name]), name
    progress = read_manifest(step_folder(out / "checkpoints", 2)).state["progress"]
    assert progress["average_of"] == {"checkpoints": names, "weights": "3,1"}


def test_one_checkpoint_under_two_names_is_refused(copy: Path) -> None:
    with pytest.raises(UserError, match="is named twice"):
        average([(str(copy), 2), (f"{copy}/", 2)], copy.with_name("out"), weights="equal", log=lambda line: None)


def test_runs_of_other_tokenizers_are_refused(run: Recipe, copy: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.lab.average.average.read_data_state", lambda path: {"tokenizer": str(path)})
        wanted = [(str(run.run.folder), 4), (str(copy), 2)]
        with pytest.raises(UserError, match=r"step-00000004 differs from .*step-00000002 in its tokenizer"):
            average(wanted, copy.with_name("out"), weights="equal", log=lambda line: None)
    require_nothing_left(copy.parent)


@pytest.mark.parametrize("weights", ["1", "1,0", "1,x", "1,2,3", "inf,1", "1e308,1e308", "decay"])
def test_weights_that_do_not_fit_two_runs_are_refused(weights: str, run: Recipe, copy: Path) -> None:
    wanted = [(str(run.run.folder), 4), (str(copy), 2)]
    with pytest.raises(UserError, match=f"--weights {weights}"):
        average(wanted, copy.with_name("out"), weights=weights, log=lambda line: None)
    require_nothing_left(copy.parent)


def test_a_decay_over_steps_that_do_not_ascend_is_refused(copy: Path) -> None:
    wanted = [(str(copy), 6), (str(copy), 2)]
    with pytest.raises(UserError, match="--weights decay is for ascending steps of one run"):
        average(wanted, copy.with_name("out"), weights="decay", log=lambda line: None)
    require_nothing_left(copy.parent)


def test_a_place_at_a_server_is_no_folder_to_write(copy: Path) -> None:
    out = "s3://bucket/runs/average"
    code, _, error = run_command(
        ROOT / "scripts/checkpoint.py", "average", copy, "--steps", "2,4", out, cwd=copy.parent
    )
    assert code == 2 and "'s3://bucket/runs/average' is an address; write a path on this disk" in error
    require_nothing_left(copy.parent)


def test_progress_says_what_was_averaged_and_has_no_validation_of_the_newest(run: Recipe, out: Path) -> None:
    theirs = read_manifest(step_folder(run.run.folder / "checkpoints", 8)).state
    ours = verify(step_folder(out / "checkpoints", 8)).state
    assert theirs["progress"].pop("validation")[LOSS] > 0
    assert ours["progress"].pop("average_of") == {
        "run": str(run.run.folder),
        "steps": [2, 4, 6, 8],
        "weights": "equal",
    }
    assert ours == theirs
    code, screen, _ = run_command("scripts/checkpoint.py", "list", out)
    assert code == 0 and screen.splitlines()[1].split()[0] == "8" and screen.rstrip().endswith("complete")


def test_export_is_the_average_in_transformers(run: Recipe, out: Path, tmp_path: Path) -> None:
    export_checkpoint(out, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", torch_dtype=torch.float32).state_dict()
    expected = by_hand(run.run.folder, [2, 4, 6, 8], [0.25] * 4)
    for mine, name in (("embedding", "embed_tokens"), ("blocks.1.feed_forward.down_proj", "layers.1.mlp.down_proj")):
        assert torch.equal(theirs[f"model.{name}.weight"], expected[f"model.{mine}.weight"])


def begin(recipe: Recipe, weights: dict[str, Any]) -> tuple[dict[str, Any], int, float]:
    """State and step of a run before its first step, and the loss of that, with these weights if there are any."""
    with training(recipe, start("cpu", seed=0)) as trainer:
        found, _ = named_tensors(trainer.built.model, trainer.built.optimizer)
        with torch.no_grad():
            for name, value in weights.items():
                local(found[name]).copy_(torch.from_numpy(value))
        state, first = {name: local(value).numpy(force=True).copy() for name, value in found.items()}, trainer.step
        loss = take_step(trainer).loss.item()
        trainer.loader.close()
        trainer.recorder.close()
        trainer.interruption.end()
    stop()
    return state, first, loss


def test_a_fork_begins_with_the_average_and_the_moments_of_the_newest(run: Recipe, out: Path) -> None:
    fork = change(run, run={"name": "fork", "continue_from": str(out), "steps": 10})
    of_newest = change(fork, run={"name": "of_newest", "continue_from": str(run.run.folder)})
    [(state, step, loss)] = run_processes(1, begin, fork, {})
    assert step == 8
    for name, value in tensors(out, 8).items():
        assert torch.equal(value, torch.from_numpy(state[name])), name
    averaged = {name: value.numpy() for name, value in by_hand(run.run.folder, [2, 4, 6, 8], [0.25] * 4).items()}
    [(_, _, expected)] = run_processes(1, begin, of_newest, averaged)
    [(_, _, other)] = run_processes(1, begin, change(of_newest, run={"name": "other"}), {})
    assert loss == expected != other


def test_a_fork_and_a_run_of_its_weights_train_on(run: Recipe, out: Path) -> None:
    fork = change(run, run={"name": "goes_on", "continue_from": str(out), "steps": 10})
    tuned = change(run, run={"name": "tuned", "steps": 2}, model={"weights": str(out)})
    assert run_processes(2, run_all, [fork, tuned]) == [[0, 0], [0, 0]]
    assert [row["step"] for row in rows(fork) if "loss" in row] == [9, 10]
    name = "model.norm.weight"
    assert (tensors(tuned.run.folder, 2)[name] - tensors(out, 8)[name]).abs().max() < 0.02


def test_the_average_is_read_from_a_server_and_its_copies_are_deleted(run: Recipe, out: Path, tmp_path: Path) -> None:
    pytest.importorskip("moto.server", reason="the server that speaks S3 is in the test extra")
    pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
    with object_server():
        upload_folder(run.run.folder, "s3://bucket/runs/run")
        quietly("s3://bucket/runs/run", STEPS, tmp_path / "out")
        with pytest.raises(
            UserError, match=r"^s3://bucket/runs/run/checkpoints/ has no checkpoint of step 10; it has 2, 4,"
        ):
            quietly("s3://bucket/runs/run/checkpoints/", "2:10:2", tmp_path / "other")
        damage(step_folder(run.run.folder / "checkpoints", 6) / SHARD, tmp_path / SHARD)
        remote.upload(tmp_path / SHARD, f"s3://bucket/runs/run/checkpoints/step-00000006/{SHARD}")
        with pytest.raises(UserError, match=r"step-00000006.*which belong to"):
            quietly("s3://bucket/runs/run", STEPS, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", SHARD]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoints", "recipe.toml"]
    for name in ("recipe.toml", "checkpoints/step-00000008/shard-00000-of-00001.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()


def damage(file: Path, target: Path) -> None:
    """Copy a file with one bit of its last tensor changed."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def test_memory_is_that_of_the_largest_tensor(run: Recipe, tmp_path: Path) -> None:
    """4 bytes for its average, 4 for that of a checkpoint, 8 for the sum and 8 for a summand, per element."""
    sizes = [value.nbytes for value in tensors(run.run.folder, 8).values()]
    with LiveBytes() as live:
        quietly(run.run.folder, STEPS, tmp_path / "out")
    assert max(sizes) <= live.peak <= 6.1 * max(sizes) < sum(sizes)


@pytest.mark.parametrize("step", [2, 8])
def test_a_damaged_checkpoint_is_refused_by_file_and_leaves_nothing(step: int, copy: Path) -> None:
    file = step_folder(copy / "checkpoints", step) / SHARD
    damage(file, file)
    with pytest.raises(UserError, match=rf"^{file} is damaged: bytes \d+ to \d+"):
        quietly(copy, STEPS, copy.with_name("out"))
    require_nothing_left(copy.parent)


def test_nan_in_a_checkpoint_is_refused_by_tensor(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("recipes.lab.average.average.shares_of", lambda count, weights: [torch.nan] * count)
        quietly(copy, STEPS, tmp_path / "nan")
    newest = step_folder(copy / "checkpoints", 8)
    shutil.rmtree(newest)
    shutil.move(step_folder(tmp_path / "nan/checkpoints", 8), newest)
    shutil.rmtree(tmp_path / "nan")
    with pytest.raises(UserError, match=r"step-00000008 is as it was written, but has NaN .* in model\."):
        quietly(copy, "6,8", copy.with_name("out"))
    require_nothing_left(copy.parent)


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_an_error_that_leaves_nothing(copy: Path) -> None:
    first, seen = step_folder(copy / "checkpoints", 2), []

    def delete_at_the_end(line: str) -> None:
        seen.append(line)
        if line.startswith("writing"):
            first.rename(first.with_name(".partial-00000002"))

    with pytest.raises(UserError, match=f"^{first / SHARD[:10]}.* is missing$"):
        wanted = [(str(copy), step) for step in steps_of(STEPS)]
        average(wanted, copy.with_name("out"), weights="equal", log=delete_at_the_end)
    assert len(seen) == 5
    require_nothing_left(copy.parent)


@pytest.mark.parametrize(
    ("section", "different"),
    [
        ({"feed_forward_width": 64}, r"model\.blocks\.0\.feed_forward\.down"),
        ({"rope_theta": 20_000.0}, r"model\.rope_theta"),  # tensors are alike, but their average would be of no model
    ],
)
def test_checkpoints_of_another_model_are_refused_by_name(
    section: dict[str, Any], different: str, run: Recipe, copy: Path
) -> None:
    other = change(run, run={"name": f"other_{next(iter(section))}", "steps": 10}, model=section)
    assert run_processes(1, run_all, [other]) == [[0]]
    shutil.copytree(step_folder(other.run.folder / "checkpoints", 10), step_folder(copy / "checkpoints", 10))
    with pytest.raises(UserError, match=rf"step-00000002 differs from step 10 in {different}"):
        quietly(copy, "2,10", copy.with_name("out"))
    require_nothing_left(copy.parent)


@pytest.mark.parametrize(
    ("inside", "moved", "steps", "message"),
    [
        ("", "step-00000003", "3,4", r"step-00000003 holds the checkpoint of another step: 2$"),
        ("", "damaged-step-00000002", "2:10:2", r"^.*/run has no checkpoint of step 2, 10; it has 4, 6, 8$"),
        ("checkpoints/step-00000004", "x", "2:4:2", r"4 is one checkpoint; write the folder of its run, .*/run$"),
    ],
)
def test_steps_that_are_not_there_are_refused(copy: Path, inside: str, moved: str, steps: str, message: str) -> None:
    step_folder(copy / "checkpoints", 2).rename(copy / "checkpoints" / moved)
    with pytest.raises(UserError, match=message):
        quietly(copy / inside, steps, copy.with_name("out"))
    require_nothing_left(copy.parent)


def test_a_folder_that_exists_or_is_among_the_checkpoints_is_refused(copy: Path) -> None:
    before = sorted(copy.rglob("*"))
    for out, message in ((copy, "already exists"), (copy / "checkpoints" / "x", "is among the checkpoints of the run")):
        with pytest.raises(UserError, match=message):
            quietly(copy, STEPS, out)
    assert sorted(copy.rglob("*")) == before
    require_nothing_left(copy.parent)


def test_a_disk_without_space_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(copy)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"out needs [\d.]+ MB, but its disk has 1 kB free; free some space$"):
        quietly(copy, STEPS, copy.with_name("out"))
    require_nothing_left(copy.parent)


@pytest.mark.parametrize("text", ["8", "", "8:8:1", "8:2:2", "2:9:2", "2:8:0", "2:8", "4,2", "2,2", "2,x", "-2,4"])
def test_steps_that_are_not_two_or_more_in_ascending_order_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"^--steps {text}: write FIRST:LAST:EVERY, which must end at LAST, or two or"):
        steps_of(text)


@pytest.mark.parametrize("arguments", [["average", "x"], ["average", "x", "y"], ["list", "x", "y"]])
def test_average_alone_takes_steps_and_a_folder_to_write(arguments: list[str]) -> None:
    code, screen, error = run_command("scripts/checkpoint.py", *arguments)
    assert (code, screen) == (2, "") and error.endswith(
        "average, and nothing else, needs OUT, and --steps or several RUN@STEP\n"
    )


@pytest.fixture
def operations(run: Recipe, tmp_path: Path) -> Iterator[list[Any]]:
    """What an average does to the disk."""
    (tmp_path / "recorded").mkdir()
    recorder = Recorder(tmp_path / "recorded")
    with recorder.recording():
        quietly(run.run.folder, STEPS, tmp_path / "recorded" / "out")
    yield recorder.operations


def test_a_kill_leaves_nothing_that_counts_and_the_next_call_deletes_it(
    run: Recipe, operations: list[Any], tmp_path: Path
) -> None:
    whole = 0
    for number, beginning in enumerate(torn(operations)):
        root = tmp_path / str(number)
        root.mkdir()
        replay(beginning, root, durable_only=False)
        visible = [path for path in root.iterdir() if not path.name.startswith(".")]
        if visible:
            assert visible == [root / "out"] and verify(step_folder(root / "out" / "checkpoints", 8)).step == 8
            whole += 1
        elif number % 40 == 0:
            quietly(run.run.folder, STEPS, root / "out")
            assert os.listdir(root) == ["out"]
        shutil.rmtree(root)
    assert 0 < whole < 5
