import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from subprocess import run as run_command
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from parallel.errors import UserError
from recipes.files import remote
from recipes.files.exit_codes import CANNOT_WRITE, FINISHED, TEMPORARY
from recipes.recipe.load import LoadedRecipe, to_toml
from recipes.recipe.schema import Recipe
from recipes.training import run
from recipes.training.same_run import data_of_run
from recipes.weights.locate import find_weights
from tests.object_server import ObjectServer, object_server
from tests.processes import PATIENCE, ROOT, run_processes, untimed
from tests.training import change, curve, largest_gap, small_recipe

pytestmark = pytest.mark.slow

pytest.importorskip("moto.server", reason="the server that speaks S3 is in the test extra")
pytest.importorskip("s3fs", reason="the extra `remote` is not installed")

PLACE = "s3://bucket/runs"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def recipe(server: ObjectServer, tmp_path: Path) -> Iterator[Recipe]:
    """A run that is copied to a place of its own, after every second of eight steps."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("\n\n".join(f"Document {n} counts to {n * 7919 % 1000}." for n in range(3000)))
    recipe = small_recipe(corpus, tmp_path)
    small = change(recipe, model={"vocabulary": 512}, batch={"global_batch_size": 2})
    yield change(small, checkpoint={"remote": f"{PLACE}/{tmp_path.name}"})
    server.heal()


def train(
    recipe: Recipe, processes: int = 1, *, patience: float = PATIENCE, origins: dict[str, str] | None = None
) -> list[Any]:
    """The exit codes of a run, or its error. patience: seconds for which a request is sent again. origins: of fields
    that are written."""
    how = (recipe, patience, origins)
    return run_processes(processes, work, *how) if processes > 1 else [work(*how)]


def work(recipe: Recipe, patience: float, origins: dict[str, str] | None = None) -> int | str:
    with mock.patch.multiple(remote, PATIENCE=patience, LONGEST_PAUSE=0.8):
        try:
            return run.train(LoadedRecipe(recipe, origins=origins), began=0.0)
        except UserError as error:
            return f"{type(error).__name__}: {error}"


def steps_of(recipe: Recipe) -> dict[str, list[str]]:
    """Name of a checkpoint at the server -> its files."""
    found: dict[str, list[str]] = {}
    for file in remote.find(f"{recipe.checkpoint.remote}/{recipe.run.name}/checkpoints"):
        found.setdefault(file.parts[-2], []).append(file.name)
    return found


def lose_the_disk(recipe: Recipe) -> None:
    shutil.rmtree(recipe.run.output)


def log_of(recipe: Recipe) -> str:
    return untimed((recipe.run.folder / "log.txt").read_text())


def test_run_on_an_empty_disk_goes_on_from_the_copy_on_other_processes(recipe: Recipe) -> None:
    whole = change(recipe, run={"name": "whole"}, checkpoint={"remote": ""})
    assert train(whole) == [FINISHED]
    expected = curve(whole)
    assert train(change(recipe, run={"steps": 4}), 2) == [FINISHED] * 2
    assert sorted(steps_of(recipe)) == ["step-00000002", "step-00000004"]
    lose_the_disk(recipe)
    assert train(recipe) == [FINISHED]
    assert f"fetched {recipe.checkpoint.remote}/{recipe.run.name}/checkpoints/step-00000004" in log_of(recipe)
    assert sorted(steps_of(recipe)) == ["step-00000006", "step-00000008"]
    assert largest_gap(curve(recipe), expected) < 1e-5


def test_run_of_an_older_version_goes_on_with_its_targets_on_an_empty_disk(recipe: Recipe) -> None:
    whole = change(recipe, data={"document_mask": True, "border_targets": True}, run={"name": "whole"})
    whole = change(whole, checkpoint={"remote": ""})
    assert train(whole) == [FINISHED]
    expected, new = curve(whole), change(recipe, data={"document_mask": True})
    assert train(change(new, run={"steps": 4}, data={"border_targets": True})) == [FINISHED]
    place, unwritten = f"{recipe.checkpoint.remote}/{recipe.run.name}/recipe.toml", b"border_targets = true\n"
    text = remote.read(place) or b""
    assert unwritten in text
    remote.write(place, text.replace(unwritten, b""))
    lose_the_disk(recipe)
    assert (
        "data.border_targets: true in the folder's recipe.toml, false now"
        in train(new, origins={"data.border_targets": "command line"})[0]
    )
    assert train(new) == [FINISHED]
    assert curve(new) == expected
    assert unwritten.decode() in (recipe.run.folder / "recipe.toml").read_text()


def test_copy_is_equal_to_the_byte_and_its_manifest_was_sent_last(server: ObjectServer, recipe: Recipe) -> None:
    server.requests.clear()
    assert train(change(recipe, run={"steps": 2}), 2) == [FINISHED] * 2
    folder = recipe.run.folder / "checkpoints" / "step-00000002"
    place = f"{recipe.checkpoint.remote}/{recipe.run.name}/checkpoints/step-00000002"
    for file in folder.iterdir():
        assert remote.read(f"{place}/{file.name}") == file.read_bytes()
    sent = [request for request in server.requests if request.startswith("PUT") and "/step-" in request]
    assert len(sent) == len(list(folder.iterdir()))
    assert sent[-1].endswith("manifest.json")


def test_faults_on_the_way_delay_a_copy_only(server: ObjectServer, recipe: Recipe) -> None:
    server.faults.extend([("PUT", fault) for fault in ("reset", "503", "", "", "slow", "500", "", "reset")])
    assert train(change(recipe, run={"steps": 2})) == [FINISHED]
    assert not server.faults
    assert "copied to" in log_of(recipe)
    assert "manifest.json" in steps_of(recipe)["step-00000002"]


def test_half_a_copy_of_a_killed_run_is_passed_over_and_deleted(recipe: Recipe) -> None:
    assert train(change(recipe, run={"steps": 4})) == [FINISHED]
    place = f"{recipe.checkpoint.remote}/{recipe.run.name}/checkpoints"
    shard = "shard-00000-of-00001.safetensors"
    remote.write(f"{place}/step-00000006/{shard}", b"half of a shard")
    remote.write(f"{place}/step-00000099/{shard}", b"half of a shard")
    lose_the_disk(recipe)
    assert train(recipe) == [FINISHED]
    assert "/step-00000004\n" in log_of(recipe)
    assert sorted(steps_of(recipe)) == ["step-00000006", "step-00000008"]


def test_an_older_copy_from_before_the_run_went_back_is_replaced(recipe: Recipe) -> None:
    recipe = change(recipe, checkpoint={"keep": 10})
    assert train(change(recipe, run={"steps": 4})) == [FINISHED]
    address = f"{recipe.checkpoint.remote}/{recipe.run.name}/checkpoints/step-00000002/manifest.json"
    manifest = (recipe.run.folder / "checkpoints/step-00000002/manifest.json").read_bytes()
    remote.write(address, manifest + b" ")
    assert train(recipe) == [FINISHED]
    assert remote.read(address) == manifest


def test_copy_that_was_damaged_at_the_server_is_passed_over(recipe: Recipe) -> None:
    assert train(change(recipe, run={"steps": 4})) == [FINISHED]
    address = f"{recipe.checkpoint.remote}/{recipe.run.name}/checkpoints/step-00000004/shard-00000-of-00001.safetensors"
    content = bytearray(remote.read(address) or b"")
    content[-100] ^= 1
    remote.write(address, bytes(content))
    lose_the_disk(recipe)
    assert train(recipe) == [FINISHED]
    log = log_of(recipe)
    assert "is damaged" in log
    assert "step-00000002\n" in log
    assert len(curve(recipe)) == 8


def test_lost_server_stops_no_step_and_the_same_command_copies_later(recipe: Recipe) -> None:
    assert train(change(recipe, run={"steps": 2})) == [FINISHED]
    assert work_without_server(recipe) == CANNOT_WRITE
    assert "NOT COPIED" in log_of(recipe)
    assert (recipe.run.folder / "checkpoints" / "step-00000008" / "manifest.json").is_file()
    assert sorted(steps_of(recipe)) == ["step-00000002"]
    assert train(recipe) == [FINISHED]
    assert "step-00000008" in steps_of(recipe)


def work_without_server(recipe: Recipe) -> int | str:
    """A run whose server answers until the run is built, and never again."""
    build = run.build_run

    def build_run(*arguments: Any) -> Any:
        built = build(*arguments)
        patch.setattr(remote, "_system", mock.Mock(side_effect=ConnectionRefusedError(111, "Connection refused")))
        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "build_run", build_run)
        return work(recipe, patience=1.0)


def test_place_of_another_run_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    assert train(change(recipe, run={"steps": 2})) == [FINISHED]
    other = change(recipe, run={"output": str(tmp_path / "elsewhere"), "steps": 2})
    assert train(change(other, checkpoint={"remote": ""})) == [FINISHED]
    [error] = train(change(other, run={"steps": 4}))
    assert "holds the checkpoints of another run" in error
    [error] = train(change(recipe, run={"output": str(tmp_path / "empty")}, batch={"sequence_length": 16}))
    assert "belongs to a different recipe" in error
    assert "batch.sequence_length" in error
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("place", "fault", "message"),
    [
        ("s3://no-such-bucket/runs", "", "UserError: s3://no-such-bucket/runs"),
        (PLACE, "403", "may not be used with these credentials"),
        (PLACE, "reset", "TemporaryError: s3://bucket/runs"),
    ],
)
def test_server_that_cannot_be_written_is_noticed_at_the_start(
    server: ObjectServer, recipe: Recipe, place: str, fault: str, message: str
) -> None:
    server.always = fault
    [error] = train(change(recipe, checkpoint={"remote": place}), patience=1.0)
    assert message in error
    assert not recipe.run.folder.exists()


def test_copies_are_kept_and_pruned_as_checkpoints_are(recipe: Recipe) -> None:
    kept = change(recipe, checkpoint={"keep": 1, "keep_every": 4, "asynchronous": False})
    assert train(change(kept, run={"steps": 6})) == [FINISHED]
    assert sorted(steps_of(recipe)) == ["step-00000004", "step-00000006"]


def test_copy_serves_as_weights_and_a_damaged_one_does_not(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train(change(recipe, run={"steps": 2})) == [FINISHED]
    place = f"{recipe.checkpoint.remote}/{recipe.run.name}"
    weights = find_weights(place)
    assert weights.is_checkpoint
    assert weights.model == replace(recipe.model, weights="", config="")
    for inside in ("", "/", "/checkpoints/", "/checkpoints/step-00000002"):
        data = data_of_run(find_weights(f"{place}{inside}"))
        assert data is not None and data.sources == recipe.data.sources, inside
    shard = f"{place}/checkpoints/step-00000002/shard-00000-of-00001.safetensors"
    content = bytearray(remote.read(shard) or b"")
    content[-100] ^= 1
    remote.write(shard, bytes(content))
    with pytest.raises(UserError, match="is damaged"):
        find_weights(place)


def test_best_checkpoint_is_kept_at_the_server_after_its_machine_is_lost(recipe: Recipe) -> None:
    """The highest loss, which the first validation has. Step 4 is the best of those on the new machine's disk."""
    validation = {"every": 2, "batches": 1}
    kept = change(recipe, validation=validation, checkpoint={"keep": 1, "keep_best": "max:validation_loss"})
    assert train(change(kept, run={"steps": 4})) == [FINISHED]
    shutil.rmtree(recipe.run.folder)
    assert train(change(kept, run={"steps": 8})) == [FINISHED]
    assert sorted(steps_of(recipe)) == ["step-00000002", "step-00000004", "step-00000008"]


def test_checkpoints_of_the_best_average_are_kept_at_the_server_after_its_machine_is_lost(recipe: Recipe) -> None:
    validation = {"every": 2, "batches": 1, "average": 2}
    kept = change(recipe, validation=validation, checkpoint={"keep": 2, "keep_best": "max:validation_average_loss"})
    assert train(change(kept, run={"steps": 4})) == [FINISHED]
    shutil.rmtree(recipe.run.folder)
    assert train(change(kept, run={"steps": 10})) == [FINISHED]
    assert [int(step[-2:]) for step in sorted(steps_of(recipe))] == [2, 4, 8, 10]


@pytest.mark.parametrize("name", ["lr[3e-4]", "what?", "a*b", "[!x]", "50% #1 ü"])
def test_a_name_with_the_signs_of_a_pattern_is_copied_and_fetched(name: str, recipe: Recipe) -> None:
    recipe = change(recipe, run={"name": name, "steps": 4})
    assert train(recipe) == [FINISHED]
    assert sorted(steps_of(recipe)) == ["step-00000002", "step-00000004"]
    lose_the_disk(recipe)
    assert train(change(recipe, run={"steps": 6})) == [FINISHED]
    assert "/checkpoints/step-00000004\n" in log_of(recipe)
    assert curve(recipe)[5:] and len(curve(recipe)) == 6
    assert find_weights(f"{recipe.checkpoint.remote}/{name}").path.name


@pytest.mark.parametrize("name", ["..", ".hidden", ".lock", ".run-id", ".saved", "x" * 300, "a\tb"])
def test_a_strange_object_beside_the_small_files_is_left_alone(name: str, recipe: Recipe) -> None:
    assert train(change(recipe, run={"steps": 2})) == [FINISHED]
    address = f"{recipe.checkpoint.remote}/{recipe.run.name}/{name}"
    remote.write(address, b"strange")
    lose_the_disk(recipe)
    assert train(change(recipe, run={"steps": 4})) == [FINISHED]
    assert "/checkpoints/step-00000002\n" in log_of(recipe)
    assert remote.read(address) == b"strange"
    file = recipe.run.folder / name
    assert len(name) > 255 or not file.is_file() or file.read_bytes() != b"strange"


def test_damage_that_the_clients_checksum_finds_is_passed_over(server: ObjectServer, recipe: Recipe) -> None:
    """Of the shard or the manifest of the newest copy, and of a small file, which the run can do without."""
    for file in ("shard-00000", "manifest.json"):
        assert train(change(recipe, run={"steps": 4})) == [FINISHED]
        lose_the_disk(recipe)
        damaged = f"/step-00000004/{file}"
        server.rule = lambda request, damaged=damaged: (
            "flip" if request.startswith("GET") and (damaged in request or request.endswith("/log.txt")) else ""
        )
        assert train(recipe, patience=1.0) == [FINISHED]
        server.heal()
        log = log_of(recipe)
        assert "is damaged, at its server or on its way" in log and "log.txt is damaged" in log
        assert "step-00000002\n" in log
        lose_the_disk(recipe)
        remote.delete([file.address for file in remote.find(f"{recipe.checkpoint.remote}/{recipe.run.name}")])


def test_a_manifest_that_lists_hide_is_asked_for_and_nothing_is_sent_twice(
    server: ObjectServer, recipe: Recipe
) -> None:
    server.rule = lambda request: "hide" if "list-type=2" in request else ""
    server.requests.clear()
    assert train(change(recipe, run={"steps": 4})) == [FINISHED]
    sent = [request for request in server.requests if request.startswith("PUT") and "/step-" in request]
    assert len(sent) == len({*sent})
    assert not [request for request in server.requests if request.startswith("DELETE") and "/step-" in request]
    assert log_of(recipe).count("copied to") == 2
    lose_the_disk(recipe)
    assert train(change(recipe, run={"steps": 6})) == [FINISHED]
    assert "/checkpoints/step-00000004\n" in log_of(recipe)


def test_deletion_that_is_denied_is_said_and_fails_no_copy(server: ObjectServer, recipe: Recipe) -> None:
    place = f"{recipe.checkpoint.remote}/{recipe.run.name}/checkpoints"
    remote.write(f"{place}/step-00000099/shard-00000-of-00001.safetensors", b"half of a shard")
    server.rule = lambda request: "403 AccessDenied" if request.startswith("DELETE") and "/step-" in request else ""
    kept = change(recipe, checkpoint={"keep": 1, "asynchronous": False})
    for steps in (2, 6):
        assert train(change(kept, run={"steps": steps})) == [FINISHED]
    log = log_of(recipe)
    assert "older copies are NOT DELETED" in log and "s3:DeleteObject" in log
    assert "what a killed run left of step 99 cannot be deleted" in log
    assert "manifest.json" in steps_of(recipe)["step-00000006"]


def test_shards_that_have_arrived_are_not_sent_again_after_a_copy_that_failed(
    server: ObjectServer, recipe: Recipe
) -> None:
    """The manifest cannot be sent at first; the end of the run tries again."""
    refused: list[str] = []

    def refuse(request: str) -> str:
        if request.startswith("PUT") and "manifest.json" in request and len(refused) < 4:
            refused.append(request)
            return "503 SlowDown"
        return ""

    server.rule = refuse
    server.requests.clear()
    assert train(change(recipe, run={"steps": 2}), patience=0.1) == [FINISHED]
    assert "NOT COPIED" in log_of(recipe)
    assert sum(request.startswith("PUT") and "shard-" in request for request in server.requests) == 1
    assert "manifest.json" in steps_of(recipe)["step-00000002"]


EXHAUSTIVE = pytest.param(signal.SIGTERM, 1, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, 2), EXHAUSTIVE])
def test_one_signal_leaves_the_wait_for_the_last_copy(
    server: ObjectServer, recipe: Recipe, tmp_path: Path, number: int, processes: int
) -> None:
    server.rule = lambda request: "late 503" if request.startswith("PUT") and "/step-" in request else ""
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(change(recipe, run={"steps": 2})))
    command = ["bash", str(ROOT / "scripts/run.sh"), str(file)]
    about = os.environ | {"NPROC": str(processes), "PYTHON": sys.executable}
    with Popen(command, env=about, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True) as run:
        assert run.stdout
        for line in run.stdout:
            if "waiting up to 1500 s for copies to" in line:
                os.killpg(run.pid, number)
                asked = time.monotonic()
        assert run.wait() == CANNOT_WRITE
    assert time.monotonic() - asked < 60  # not 1500
    assert "when a signal came" in log_of(recipe)


def test_copies_are_listed_verified_and_shown_at_the_server(server: ObjectServer, recipe: Recipe) -> None:
    assert train(change(recipe, run={"steps": 4})) == [FINISHED]
    place = f"{recipe.checkpoint.remote}/{recipe.run.name}"
    here = {command: checkpoint(command, recipe.run.folder) for command in ("list", "verify")}
    for command, (code, said) in here.items():
        assert code == 0
        code, there = checkpoint(command, place)
        assert code == 0
        assert [line.split()[-5:] for line in there.splitlines()] == [line.split()[-5:] for line in said.splitlines()]
    assert checkpoint("show", place)[1].startswith(f"{place}/checkpoints/step-00000004: step 4")
    [shard] = [file for file in remote.find(f"{place}/checkpoints/step-00000002") if "shard" in file.name]
    content = bytearray(remote.read(shard.address) or b"")
    content[-100] ^= 1
    remote.write(shard.address, bytes(content))
    assert checkpoint("list", place)[0] == 0
    code, said = checkpoint("verify", f"{place}/checkpoints/step-00000002")
    assert code == 1 and f"{shard.address} is damaged: bytes" in said
    server.always = "503"
    assert checkpoint("list", place)[0] == TEMPORARY


def checkpoint(command: str, place: object) -> tuple[int, str]:
    """The exit code of scripts/checkpoint.py, and what it printed."""
    words = [sys.executable, str(ROOT / "scripts/checkpoint.py"), command, str(place)]
    done = run_command(words, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_weights_of_another_length_than_their_header_says_are_not_kept(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    remote.write("s3://bucket/cut/config.json", b"{}")
    remote.write("s3://bucket/cut/model.safetensors", (tmp_path / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(UserError, match=r"s3://bucket/cut: model\.safetensors has"):
        find_weights("s3://bucket/cut")
    assert not list((tmp_path / ".cache/shardwright/remote").glob("cut-*"))
