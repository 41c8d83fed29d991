"""What the nodes of a job start from: made once, made again after a change, whole or not at all."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.cluster import pack as module
from recipes.cluster.pack import CHECKOUT, UNUSED_SECONDS, PackedFile, pack
from tests.processes import wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of few files. What it has for an environment is one package, so that packing takes no time."""
    copy = tmp_path / "checkout"
    for part in CHECKOUT:
        if (ROOT / part).is_file():
            (copy / part).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / part, copy / part)
        else:
            (copy / part).mkdir(parents=True)
            (copy / part / "code.py").write_text("value = 1\n")

    def small() -> Iterator[PackedFile]:
        return (entry for entry in module.checkout_entries(copy) if entry.name.endswith("lock"))

    monkeypatch.setattr(module, "environment_entries", small)
    return copy


def made(checkout: Path) -> list[str]:
    return [note.split(":")[0] for note in pack(checkout, checkout / ".pack")[1]]


def test_pack_is_made_once_and_again_after_a_change(checkout: Path) -> None:
    assert made(checkout) == ["packed the environment", "packed the checkout"]
    assert made(checkout) == []
    (checkout / "recipes" / "code.py").write_text("value = 22\n")
    assert made(checkout) == ["packed the checkout"]
    (checkout / "requirements.lock").write_text("")
    assert made(checkout) == ["packed the environment", "packed the checkout"]


def test_unpacked_code_starts_from_current_bytecode(checkout: Path, tmp_path: Path) -> None:
    stale = checkout / "models" / "code.py"
    subprocess.run([sys.executable, "-m", "compileall", "-q", checkout / "models"], check=True)
    stale.write_text("value = 'new'\n")
    os.utime(stale, (time.time() + 9,) * 2)  # bytecode knows seconds
    with tarfile.open(pack(checkout, checkout / ".pack")[0].checkout) as archive:
        archive.extractall(tmp_path / "node", filter="tar")
    folder = tmp_path / "node" / "checkout"
    for part in ("models", "parallel"):
        show = "import code; print(code.value)"
        command = [sys.executable, "-v", "-B", "-c", f"import sys; sys.path.insert(0, {str(folder / part)!r}); {show}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == {"models": "new\n", "parallel": "1\n"}[part]
        assert f"code object from '{folder}/{part}/__pycache__/code." in done.stderr


def test_change_while_packing_is_refused_and_leaves_no_pack(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = module._write

    def edit(file: Path, *arguments: object) -> None:
        write(file, *arguments)  # type: ignore[arg-type]
        (checkout / "scripts" / "code.py").write_text("value = 333\n")

    monkeypatch.setattr(module, "_write", edit)
    with pytest.raises(UserError, match=r"^the checkout changed while it was packed; start the job again"):
        made(checkout)
    assert [file.name.partition("-")[0] for file in (checkout / ".pack").iterdir()] == ["environment"]


def test_full_disk_is_refused_and_leaves_no_pack(checkout: Path) -> None:
    (checkout / ".pack").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", checkout / ".pack"]
    if error := subprocess.run(mount, capture_output=True, text=True).stderr:
        pytest.skip(f"mounting a tmpfs is not allowed here: {error.strip()}")
    try:
        with pytest.raises(UserError, match=r"the pack cannot be written: No space left on device: .*; free space"):
            made(checkout)
        assert not list((checkout / ".pack").iterdir())
    finally:
        subprocess.run(["umount", "-l", checkout / ".pack"], check=True)


def test_packs_without_use_for_a_week_are_deleted(checkout: Path) -> None:
    cache = checkout / ".pack"
    cache.mkdir()
    for name, age in (("environment-1.tar", UNUSED_SECONDS + 60), ("checkout-1.tar", 60), (".checkout-2.tar.n-1", 1e9)):
        (cache / name).touch()
        os.utime(cache / name, (time.time() - age,) * 2)
    made(checkout)
    names = {file.name for file in cache.iterdir()}
    assert "checkout-1.tar" in names and len(names) == 3


def unpack(*words: object) -> "subprocess.Popen[str]":
    """scripts/unpack.sh as on a node of a job, in a process group of its own."""
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "unpack.sh", *map(str, words)],
        env=os.environ | {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node0"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_node_without_room_refuses_before_anything_is_sent(tmp_path: Path) -> None:
    node = unpack("prepare", tmp_path / "shardwright-job-7", "KEY", 10**18, "")
    said = node.communicate()[1]
    assert node.returncode == 2
    assert (
        f"slurm-refusal: node0 PACK={tmp_path} has " in said
        and " MB are needed; free some, or exclude the node" in said
    )
    assert said.endswith("slurm-state: node0 2\n")
    assert not list(tmp_path.iterdir())


def test_only_folders_of_ended_jobs_are_deleted(tmp_path: Path) -> None:
    names = ["shardwright-job-5", "shardwright-job-6", "shardwright-job-data", "other", "shardwright-job-8"]
    for name in names:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0) if name != "shardwright-job-8" else None)
    node = unpack("prepare", tmp_path / "shardwright-job-7", "KEY", 1, ",6,,7,")
    assert "slurm-state: node0 ready\n" in node.communicate()[1]
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], "shardwright-job-7"}


def test_stop_signal_while_unpacking_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.tar")  # tar waits for it
    node = unpack("unpack", tmp_path / "shardwright-job-7", "KEY", tmp_path / "file.tar")
    wait_for("the folder", (tmp_path / "shardwright-job-7").exists)
    time.sleep(0.5)  # until tar has started
    os.killpg(node.pid, signal.SIGTERM)
    assert "slurm-state: node0 143\n" in node.communicate()[1]
    assert node.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["file.tar"]
