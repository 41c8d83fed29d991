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
from recipes.checkpoint.boxes import Hull, overlap
from recipes.checkpoint.files import read_manifest, verify
from recipes.checkpoint.manifest import MANIFEST, encode
from recipes.checkpoint.parameters import StoredParameters
from tests.recipes.checkpoint.golden import GOLDEN
from tests.recipes.checkpoint.small import SMALL, build, checkpoints_in, names

SHARDED = GOLDEN / "sharded"
SHARD = "shard-00000-of-00002.safetensors"
STEP = "step-00000002"

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


def chunk(content: dict[str, Any], tensor: str = "model.embedding.weight", number: int = 0) -> dict[str, Any]:
    return content["tensors"][tensor]["chunks"][number]


def rename_shard(content: dict[str, Any], name: str) -> None:
    content["files"][name] = content["files"].pop(SHARD)
    for tensor in content["tensors"].values():
        for part in tensor["chunks"]:
            if part["file"] == SHARD:
                part["file"] = name


def link_shard(path: Path) -> None:
    (path / SHARD).rename(path.parent.parent / "outside")
    (path / SHARD).symlink_to(path.parent.parent / "outside")


def fifo(path: Path) -> None:
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)


def huge_sparse(path: Path) -> None:
    with (path / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)


def huge_header(path: Path) -> None:
    """The file really has a header of that size, as a hole."""
    with (path / SHARD).open("r+b") as file:
        file.truncate(1 << 43)

    def change(content: dict[str, Any]) -> None:
        content["files"] = {SHARD: content["files"][SHARD] | {"bytes": 1 << 43, "header_bytes": 1 << 43}}
        content["tensors"] = {}

    rewrite(path, change)


def editing(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change)


def swap_offsets(content: dict[str, Any]) -> None:
    one, other = chunk(content), chunk(content, "model.lm_head.weight")
    one["offset"], other["offset"] = other["offset"], one["offset"]


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle as manifest": (lambda path: (path / MANIFEST).write_bytes(pickle.dumps(Bomb())), "not a manifest"),
    "a pickle under a right checksum": (lambda path: seal(path, pickle.dumps(Bomb())), "does not describe"),
    "a pickle as shard": (lambda path: (path / SHARD).write_bytes(pickle.dumps(Bomb())), "is cut off"),
    "a pickle beside a missing manifest": (
        lambda path: [(path / MANIFEST).unlink(), (path / ".metadata").write_bytes(pickle.dumps(Bomb()))],
        "manifest.json is missing",
    ),
    "a newer version": (editing(lambda content: content.update(version=3)), "use a newer one"),
    "another format": (editing(lambda content: content.update(format="x" * 9)), "its format is 'xxxxxxxxx'"),
    "a path upwards": (editing(lambda content: rename_shard(content, "../outside")), "a file called '../outside'"),
    "an absolute path": (editing(lambda content: rename_shard(content, "/etc/passwd")), "a file called '/etc/passwd'"),
    "a folder": (editing(lambda content: rename_shard(content, "..")), "a file called '..'"),
    "a zero byte": (editing(lambda content: rename_shard(content, "a\0b")), "a file called 'a\\x00b'"),
    "a long name": (editing(lambda content: rename_shard(content, "x" * 5000)), "a file called 'xxxx"),
    "the manifest as a shard": (editing(lambda content: rename_shard(content, MANIFEST)), "a file called 'manifest"),
    "a link as shard": (link_shard, "is a symbolic link"),
    "a link as manifest": (
        lambda path: [(path / MANIFEST).rename(path / "m"), (path / MANIFEST).symlink_to(path / "m")],
        "is a symbolic link",
    ),
    "a pipe": (fifo, "is not a regular file"),
    "a folder as shard": (lambda path: [(path / SHARD).unlink(), (path / SHARD).mkdir()], "is not a regular file"),
    "a manifest of a terabyte": (huge_sparse, "1099511627776 bytes, more than a manifest can have"),
    "deep JSON": (lambda path: seal(path, b'{"state":' * 100_000 + b"{}" + b"}" * 99_999), "does not describe"),
    "a list": (lambda path: seal(path, b"[1]"), "does not describe"),
    "a number of a million digits": (lambda path: seal(path, b'{"step":' + b"9" * 1_000_000), "does not describe"),
    "a million empty values": (
        editing(lambda content: content["state"].update(a=[{}] * 1_000_000)),
        "too many values",
    ),
    "a header of terabytes": (huge_header, f"{SHARD} has a header of 8796093022208 bytes"),
    "NaN as a size": (lambda path: seal(path, b'{"version":NaN'), "does not describe"),
    "a negative offset": (editing(lambda content: chunk(content).update(offset=-8)), "greater than or equal to 0"),
    "an offset beyond the file": (editing(lambda content: chunk(content).update(offset=2**40)), "a part begins at"),
    "an offset of 300 bits": (editing(lambda content: chunk(content).update(offset=2**300)), "does not describe"),
    "parts of a file swapped": (editing(swap_offsets), "which belong to model."),
    "a float as offset": (editing(lambda content: chunk(content).update(offset=8.0)), "valid integer"),
    "true as offset": (editing(lambda content: chunk(content).update(offset=True)), "valid integer"),
    "a length of nothing": (editing(lambda content: chunk(content).update(bytes=0)), "0 bytes for a part"),
    "an absurd shape": (
        editing(lambda content: content["tensors"]["model.embedding.weight"].update(shape=[2**40, 2**40])),
        "has the shape",
    ),
    "a thousand dimensions": (
        editing(lambda content: content["tensors"]["model.embedding.weight"].update(shape=[1] * 1000)),
        "at most 16",
    ),
    "a missing part": (
        editing(lambda content: content["tensors"]["model.embedding.weight"]["chunks"].pop()),
        "do not make up the shape",
    ),
    "overlapping parts": (
        editing(lambda content: chunk(content, number=1).update(start=[5, 0])),
        "do not make up the shape",
    ),
    "a part outside": (editing(lambda content: chunk(content).update(start=[2**40, 0])), "outside of its shape"),
    "another number of dimensions": (editing(lambda content: chunk(content).update(start=[0])), "dimensions"),
    "no such file": (editing(lambda content: chunk(content).update(file="other")), "not a shard"),
    "a small file as shard": (editing(lambda content: chunk(content).update(file="note.txt")), "not a shard"),
    "no such type": (
        editing(lambda content: content["tensors"]["model.embedding.weight"].update(dtype="object")),
        "elements of type 'object'",
    ),
    "no checksums": (editing(lambda content: chunk(content).update(blocks=[])), "0 checksums"),
    "blocks of a prime": (editing(lambda content: content.update(block_bytes=1009)), "cut elements"),
    "blocks of a gigabyte": (editing(lambda content: content.update(block_bytes=1 << 30)), "less than or equal to"),
    "blocks of nothing": (editing(lambda content: content.update(block_bytes=0)), "does not describe"),
    "a header larger than the file": (
        editing(lambda content: content["files"][SHARD].update(header_bytes=2**50)),
        "a header larger",
    ),
    "a file size beyond all": (
        editing(lambda content: content["files"]["note.txt"].update(bytes=2**50)),
        "note.txt is cut off: 14 bytes instead of 1125899906842624",
    ),
    "a terminal escape sequence": (
        editing(lambda content: content["tensors"].update({"\x1b[2J": content["tensors"].pop("model.norm.weight")})),
        "a tensor called '\\x1b[2J'",
    ),
    "no such step": (editing(lambda content: content.update(step=7)), "another step: 7"),
}
UNSEEN = "parts of a file swapped"
"""Found only when the tensors are read."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one checkpoint, below the current folder."""
    (tmp_path / "run").mkdir()
    shutil.copytree(SHARDED / STEP, tmp_path / "run" / STEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A model and its optimizer, which no test needs in a certain state: all of their loads are refused."""
    start("cpu", seed=0)
    run = build(seed=0)
    checkpoints_in(SHARDED, keep=1).load(*run, step=2)  # torch reads some of its own sources the first time
    yield run
    stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_ends_with_one_clear_error_and_no_side_effect(name: str, place: Path) -> None:
    spoil, said = HOSTILE[name]
    path = place / STEP
    spoil(path)
    (place.parent / "bystander").write_text("safe")
    refusals = []
    for use in (verify, look.read_manifest, lambda path: StoredParameters(path, SMALL)):
        with silent(place):
            try:
                use(path)
            except UserError as error:
                refusals.append(str(error))
    assert refusals or name == "no such step"
    for refusal in refusals:
        assert said in refusal and len(refusal) < 1500, refusal
    with silent(place):
        lines = list(look.table([path], thorough=False))
    assert lines[1][1] is (name == UNSEEN)
    assert not (place.parent / "exploded").exists() and (place.parent / "bystander").read_text() == "safe"


@pytest.mark.parametrize("name", HOSTILE)
def test_run_does_not_resume_from_it(name: str, place: Path, run: Run) -> None:
    spoil, said = HOSTILE[name]
    spoil(place / STEP)
    checkpoints = checkpoints_in(place, keep=1)
    with silent(place), pytest.raises(UserError) as refused:
        checkpoints.load(*run, step=2)
    assert said in str(refused.value)


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


@pytest.mark.parametrize("hyperparameters", [{"lr": "__import__('os')"}, {"betas": [0.9]}], ids=str)
def test_hyperparameters_of_another_type_are_refused(hyperparameters: dict[str, Any], place: Path, run: Run) -> None:
    refuse_state(place, run, lambda state: state["optimizer"][0].update(hyperparameters))


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


def test_overlaps_of_very_many_boxes_are_found_quickly() -> None:
    """There are too many to compare them pairwise."""
    count = 100_000
    columns = [Hull((0, number), (1, 1)) for number in range(count)]
    assert not overlap(columns)
    assert overlap([*columns, Hull((0, 5), (1, 1))])
    assert overlap([Hull((0, 0), (1, 1))] * count)


def test_overlapping_boxes_are_found() -> None:
    """The boxes come from random straight cuts."""
    draw = random.Random(0)

    def cut(start: tuple[int, ...], shape: tuple[int, ...], depth: int) -> list[Hull]:
        axis = draw.randrange(len(shape))
        if depth == 0 or shape[axis] < 2:
            return [Hull(start, shape)]
        at = draw.randrange(1, shape[axis])
        low, high, rest = list(shape), list(start), list(shape)
        low[axis], high[axis], rest[axis] = at, start[axis] + at, shape[axis] - at
        return cut(start, tuple(low), depth - 1) + cut(tuple(high), tuple(rest), depth - 1)

    for shape in ((60,), (40, 50), (9, 8, 7)) * 20:
        boxes = cut((0,) * len(shape), shape, draw.randrange(6))
        draw.shuffle(boxes)
        assert not overlap(boxes)
        wrong = draw.choice(boxes)
        assert overlap([*boxes, Hull(wrong.start, (1,) * len(shape))])


def test_boxes_that_no_straight_cut_separates_are_compared() -> None:
    pinwheel = [
        Hull((0, 0), (1, 2)),
        Hull((0, 2), (2, 1)),
        Hull((2, 1), (1, 2)),
        Hull((1, 0), (2, 1)),
        Hull((1, 1), (1, 1)),
    ]
    assert not overlap(pinwheel)
    assert overlap([*pinwheel, Hull((1, 1), (1, 1))])


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
