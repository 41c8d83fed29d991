"""Malicious checkpoints: none of their code runs, nothing outside of the folder is touched, one clear error follows.

Each manifest has a valid checksum, because an attacker can compute one.
"""

import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from torch import nn
from torch.optim import Optimizer

import recipes.checkpoint.version1  # noqa: F401  not imported while the hook listens
from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.checkpoint import look, manifest
from recipes.checkpoint.files import read_manifest, verify
from recipes.checkpoint.manifest import MANIFEST, encode
from recipes.checkpoint.parameters import StoredParameters
from tests.recipes.checkpoint.golden import GOLDEN
from tests.recipes.checkpoint.small import SMALL, build, checkpoints_in, names

SHARD = "shard-00000-of-00004.safetensors"
STEP = "step-00000002"
EMBEDDING = "model.embedding.weight"
HEAD = b'{"format":"shardwright checkpoint","version":2,'

Run = tuple[nn.Module, Optimizer]


class Bomb:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


# An audit hook cannot be removed: there is one, which listens while a test wants it to.
_heard: list[str] = []
_allowed: list[Path] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event in ("exec", "compile", "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        _heard.append(f"{event} {arguments!r:.200}")
    elif event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.link", "os.symlink"):
        path = arguments[0]
        if isinstance(path, str | bytes | os.PathLike):
            real = Path(os.fsdecode(path)).absolute()
            if not real.is_relative_to(_allowed[0]) or ".." in real.parts:
                _heard.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_listen)


@contextmanager
def silent(folder: Path) -> Iterator[None]:
    """Fail if anything is executed or unpickled, or anything outside of the folder is opened."""
    _heard.clear()
    _allowed.append(folder)
    try:
        yield
    finally:
        _allowed.clear()
    assert _heard == []


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and give it a valid checksum."""
    content = json.loads((path / MANIFEST).read_text())
    del content["checksum"]
    change(content)
    seal(path, json.dumps(content, separators=(",", ":")).encode()[:-1])


def seal(path: Path, body: bytes) -> None:
    tail = f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'
    (path / MANIFEST).write_bytes(body + tail.encode())


def link_shard(path: Path) -> None:
    (path / SHARD).rename(path.parent.parent / "outside")
    (path / SHARD).symlink_to(path.parent.parent / "outside")


def fifo(path: Path) -> None:
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)


def huge_sparse(path: Path) -> None:
    with (path / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)


def editing(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change)


def whole(**changes: Any) -> Callable[[Path], None]:
    return editing(lambda content: content.update(changes))


def tensor(**changes: Any) -> Callable[[Path], None]:
    return editing(lambda content: content["tensors"][EMBEDDING].update(changes))


def row(**changes: Any) -> Callable[[Path], None]:
    """Changes the one row of the embedding: boxes (10, 16) at (0, 0) and (10, 0) in shards 2 and 3."""
    return editing(lambda content: content["tensors"][EMBEDDING]["boxes"][0].update(changes))


def file(**changes: Any) -> Callable[[Path], None]:
    return editing(lambda content: content["files"][SHARD].update(changes))


def renamed(name: str) -> Callable[[Path], None]:
    return editing(lambda content: content["files"].update({name: content["files"].pop(SHARD)}))


def of_version_1(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Puts a checkpoint of version 1 there, and changes it."""

    def put(path: Path) -> None:
        shutil.rmtree(path)
        shutil.copytree(GOLDEN / "sharded" / STEP, path)
        rewrite(path, change)

    return put


def line(**changes: Any) -> Callable[[Path], None]:
    """Changes the first line of the embedding in a checkpoint of version 1."""
    return of_version_1(lambda content: content["tensors"][EMBEDDING]["chunks"][0].update(changes))


BOX = {"file": 0, "start": [0, 0], "shape": [20, 16]}
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle as manifest": (lambda path: (path / MANIFEST).write_bytes(pickle.dumps(Bomb())), "not a manifest"),
    "a pickle under a right checksum": (lambda path: seal(path, pickle.dumps(Bomb())), "does not describe"),
    "a pickle as shard": (lambda path: (path / SHARD).write_bytes(pickle.dumps(Bomb())), "is cut off"),
    "a pickle beside a missing manifest": (
        lambda path: [(path / MANIFEST).unlink(), (path / ".metadata").write_bytes(pickle.dumps(Bomb()))],
        "manifest.json is missing",
    ),
    "a newer version": (whole(version=3), "use a newer one"),
    "another format": (whole(format="x" * 9), "its format is 'xxxxxxxxx'"),
    "no such step": (whole(step=7), "another step: 7"),
    "a path upwards": (renamed(f"../{SHARD}"), "should match pattern"),
    "an absolute path": (renamed("/etc/passwd"), "should match pattern"),
    "a folder upwards": (renamed(f"shards-00000/../{SHARD}"), "should match pattern"),
    "a zero byte": (renamed("a\0b"), "should match pattern"),
    "a link as shard": (link_shard, "is a symbolic link"),
    "a link as manifest": (
        lambda path: [(path / MANIFEST).rename(path / "m"), (path / MANIFEST).symlink_to(path / "m")],
        "is a symbolic link",
    ),
    "a pipe": (fifo, "is not a regular file"),
    "a folder as shard": (lambda path: [(path / SHARD).unlink(), (path / SHARD).mkdir()], "is not a regular file"),
    "a manifest of a terabyte": (huge_sparse, "1099511627776 bytes, more than a manifest can have"),
    "deep JSON": (lambda path: seal(path, HEAD + b'"state":' * 9 + b'{"state":' * 100_000), "does not describe"),
    "a list": (lambda path: seal(path, b"[1]"), "does not describe"),
    "a number of a million digits": (lambda path: seal(path, HEAD + b'"step":' + b"9" * 10**6), "does not describe"),
    "a terminal escape sequence": (
        editing(lambda content: content["tensors"].update({"\x1b[2J": content["tensors"].pop(EMBEDDING)})),
        "a tensor called '\\x1b[2J'",
    ),
    "a header of gigabytes": (file(header_bytes=1 << 33), "less than or equal to"),
    "another size": (file(bytes=10168), "its tensors end at 10160"),
    "blocks of a prime": (whole(block_bytes=1009), "multiple of 16"),
    "other blocks": (whole(block_bytes=64), "its tensors end at"),
    "other checksums": (file(sums_checksum="0" * 16), "the checksums of its tensors"),
    "a shard of another name": (renamed("weights"), "that is not there"),
    "a shard of a far number": (row(file=2**61), "that is not there"),
    "a negative shard": (row(file=-1), "greater than or equal to 0"),
    "a billion boxes": (row(count=2**30), "outside of its shape"),
    "a billion boxes in one shard": (row(count=2**30, stride=0), "overlap or share a file"),
    "boxes that overlap": (row(step=[9, 0]), "overlap or share a file"),
    "a step of another number of dimensions": (row(step=[10]), "another number of dimensions"),
    "a float": (row(count=2.0), "valid integer"),
    "no boxes": (tensor(boxes=[]), "do not make up the shape"),
    "all of it twice": (tensor(boxes=[BOX, BOX]), "do not make up the shape"),
    "an absurd shape": (tensor(shape=[2**40, 2**40]), "do not make up the shape"),
    "no such type": (tensor(dtype="object"), "elements of type 'object'"),
    "contents of its own": (whole(explicit={SHARD: 1}), "does not describe"),
    "rows in version 1": (whole(version=1), "does not describe"),
    "a path upwards in version 1": (
        of_version_1(lambda content: content["files"].update({"../outside": content["files"].pop("note.txt")})),
        "should match pattern",
    ),
    "no such file in version 1": (line(file="other"), "does not describe"),
    "a part outside in version 1": (line(start=[2**40, 0]), "outside of its shape"),
    "no checksums in version 1": (line(blocks=[]), "is damaged: bytes"),
}
UNSEEN = ("other checksums", "no checksums in version 1")
"""Found only when the tensors are read."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one checkpoint, below the current folder."""
    (tmp_path / "run").mkdir()
    shutil.copytree(GOLDEN / "version2" / STEP, tmp_path / "run" / STEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A model and its optimizer, which no test needs in a certain state: all of their loads are refused."""
    start("cpu", seed=0)
    run = build(seed=0)
    checkpoints_in(GOLDEN / "version2", keep=1).load(*run, step=2)  # torch reads some of its own sources the first time
    yield run
    stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_ends_with_one_clear_error_and_no_side_effect(name: str, place: Path, run: Run) -> None:
    spoil, said = HOSTILE[name]
    path = place / STEP
    spoil(path)
    (place.parent / "bystander").write_text("safe")
    checkpoints = checkpoints_in(place, keep=1)
    refusals = []
    uses: list[Callable[[Path], Any]] = [verify, read_manifest, lambda path: StoredParameters(path, SMALL)]
    for use in (*uses, load := lambda _: checkpoints.load(*run, step=2)):
        with silent(place):
            try:
                use(path)
            except UserError as error:
                refusals.append(str(error))
                continue
        assert use is not load
    for refusal in refusals:
        assert said in refusal and len(refusal) < 1500, refusal
    with silent(place):
        lines = list(look.table([path], thorough=False))
    assert (lines[1][1] == 0) is (name in UNSEEN)
    assert not (place.parent / "exploded").exists() and (place.parent / "bystander").read_text() == "safe"


def test_any_change_of_a_manifest_is_refused_by_name_or_harmless(place: Path) -> None:
    """Numbers, names and lists are changed at random, and the checksum is made right."""
    draw = random.Random(0)
    path = place / STEP
    original = (path / MANIFEST).read_bytes()
    values = [0, 1, -1, 2, 3, 8, 17, 2**31, 2**62, 2**63, 1.5, True, None, "", "x", [], [0], [1, 2, 3], {}]

    def change(content: dict[str, Any]) -> None:
        inside: Any = content
        while True:
            key = draw.choice(list(inside)) if isinstance(inside, dict) else draw.randrange(len(inside))
            if isinstance(inside[key], dict | list) and inside[key] and draw.random() < 0.9:
                inside = inside[key]
                continue
            inside[key] = draw.choice(values)
            return

    refused = 0
    for number in range(600):
        (path / MANIFEST).write_bytes(original)
        rewrite(path, change)
        try:
            read_manifest(path) if number % 10 else verify(path)
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 400


def refuse_state(place: Path, run: Run, change: Callable[[dict[str, Any]], Any]) -> None:
    rewrite(place / STEP, lambda content: change(content["state"]))
    checkpoints = checkpoints_in(place, keep=1)
    with silent(place), pytest.raises(UserError, match=r"the state in the manifest is not valid|different optimizer"):
        checkpoints.load(*run, step=2)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"progress": [], "optimizer": []},
        {"progress": {}, "optimizer": 3},
        {"progress": {}, "optimizer": [{"params": 7}]},
        {"progress": {}, "optimizer": [{"params": [["a"]]}]},
        {"progress": {}, "optimizer": []},
    ],
    ids=str,
)
def test_state_of_another_shape_is_refused(state: dict[str, Any], place: Path, run: Run) -> None:
    def replace(present: dict[str, Any]) -> None:
        present.clear()
        present.update(state)

    refuse_state(place, run, replace)


@pytest.mark.parametrize(
    "progress",
    [
        {"skipped_in_a_row": "many"},
        {"skipped_in_a_row": -1},
        {"loss_window": [1.0] * 1000},
        {"loss_window": ["1"]},
        {"loss_window": 1.0},
        {"wandb_id": ["x"]},
        {"trained_on": {"text": 1}},
        {"tokens": 1.5},
        {"sequences": None},
    ],
    ids=lambda progress: str(progress)[:40],
)
def test_progress_of_another_type_is_refused(progress: dict[str, Any], place: Path, run: Run) -> None:
    refuse_state(place, run, lambda state: state["progress"].update(progress))


def test_manifest_that_would_be_too_large_to_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = read_manifest(GOLDEN / "version2" / STEP)
    size = (GOLDEN / "version2" / STEP / MANIFEST).stat().st_size
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", size)
    assert len(encode(stored)) == size
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(UserError, match="more than the format allows"):
        encode(stored)


def test_symbolic_link_is_refused_as_checkpoint_and_deleted_without_its_target(place: Path, run: Run) -> None:
    (place / STEP).rename(place.parent / "elsewhere")
    (place / STEP).symlink_to(place.parent / "elsewhere")
    before = names(place.parent / "elsewhere")
    checkpoints = checkpoints_in(place, keep=1)
    with pytest.raises(UserError, match="is a symbolic link, which a checkpoint must not be"):
        checkpoints.load(*run, step=2)
    checkpoints.save(*run, step=3)
    assert names(place) == ["step-00000003"] and names(place.parent / "elsewhere") == before


def test_audit_hook_works() -> None:
    with pytest.raises(AssertionError), silent(Path("/nowhere")):
        pickle.loads(pickle.dumps(Path("x")))
    with pytest.raises(AssertionError), silent(Path("/nowhere")):
        Path(__file__).read_bytes()
