"""Compiled code that is kept for later starts."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.config import CompileConfig, MeshDegrees
from recipes.metrics.clock import RunClock
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe
from recipes.training.build_run import observers_of
from recipes.training.kept_code import KeptCode
from tests.training import change, rows

ROOT = Path(__file__).resolve().parents[3]
CODE = {"aa/kernel.py": b"def call(): ...\n" * 99, "fxgraph/bb/graph": b"pickled", "cc/library.so": b"\x7fELF"}


class Machine:
    """A machine with a folder for Inductor of its own, on which a start of a recipe keeps or finds code."""

    def __init__(self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        self.recipe = replace(Recipe(), compile=CompileConfig(enabled=True, cache=str(cache)))
        self.lines: list[str] = []

    def start(self, recipe: Recipe | None = None, *, rank: int = 0, size: int = 1) -> KeptCode:
        """What a process has before its first step; its folder for Inductor is then that of the environment."""
        world = SimpleNamespace(device=torch.device("cpu"), rank=rank, size=size)
        console = SimpleNamespace(log=self.lines.append)
        process: Any = SimpleNamespace(world=world, console=console, clock=RunClock(world.device))
        mesh: Any = SimpleNamespace(degrees=MeshDegrees(replicate=1, shard=size), pipeline=None)
        return KeptCode(recipe or self.recipe, process, mesh)

    def compile(self, code: KeptCode, files: dict[str, bytes] = CODE) -> None:
        """Two steps, of which the first writes these files."""
        with code.step(1):
            for name, content in files.items():
                file = written() / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        with code.step(2):
            pass


def written() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def there() -> dict[str, bytes]:
    return {str(file.relative_to(written())): file.read_bytes() for file in written().rglob("*") if file.is_file()}


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "first", tmp_path / "cache", monkeypatch)
    unfinished = {"locks/kernel.lock": b"", "dd/half.tmp": b"half", "dd/.part-other-1-kernel.py": b"half"}
    machine.compile(machine.start(), CODE | unfinished)
    return machine


@pytest.fixture
def second(first: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "second", tmp_path / "cache", monkeypatch)


def archives(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*"))


def test_another_machine_finds_what_the_first_compiled_and_writes_nothing(second: Machine, tmp_path: Path) -> None:
    (archive,) = archives(tmp_path)
    before = archive.stat().st_mtime_ns
    code = second.start()
    assert there() == CODE
    second.compile(code, {})
    assert second.lines == [f"compiled code: 3 files of an earlier start, from {archive}"]
    assert archive.stat().st_mtime_ns == before


def test_code_that_an_archive_lacks_is_added(second: Machine, tmp_path: Path) -> None:
    second.compile(second.start(), {"ee/more.py": b"more"})
    (archive,) = archives(tmp_path)
    assert second.lines[1:] == [f"compiled code: 4 files kept in {archive} for the next start"]


@pytest.mark.parametrize("harm", ["a byte", "a size", "an end", "everything", "a key"])
def test_a_damaged_or_foreign_archive_is_ignored_in_one_line_and_replaced(
    second: Machine, tmp_path: Path, harm: str
) -> None:
    (archive,) = archives(tmp_path)
    whole = archive.read_bytes()
    content, size = bytearray(whole), bytearray(whole)
    content[content.index(b"library.so") + 12] ^= 255
    size[size.rindex(b"PK\x05\x06") + 14] ^= 1  # of the directory, which then begins before the file
    harmed = {"a byte": content, "a size": size, "an end": whole[:-9], "everything": b"", "a key": whole[:-1] + b"!"}
    archive.write_bytes(harmed[harm])
    code = second.start()
    (line,) = second.lines
    assert line.startswith(f"compiled code: {archive} is damaged or not ours and is ignored: ")
    assert not there()
    second.compile(code)
    assert second.lines[1:] == [f"compiled code: 3 files kept in {archive} for the next start"]
    second.lines.clear()
    second.start()
    assert second.lines == [f"compiled code: 3 files of an earlier start, from {archive}"]


def test_another_torch_device_source_or_model_has_an_archive_of_its_own_and_a_learning_rate_has_not(
    second: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second.start(change(second.recipe, optimizer={"lr": 1e-9}, run={"name": "other", "steps": 3}))
    assert len(second.lines) == 1
    second.start(change(second.recipe, batch={"micro_batch_size": 64}))
    second.start(size=2)
    for name, value in {
        "torch.__version__": "9.0",
        "recipes.training.kept_code._machine": lambda device: "another",
        "recipes.training.kept_code.ROOT": tmp_path,
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            second.start()
    assert len(second.lines) == 1, "no other start finds anything"
    assert len(archives(tmp_path)) == 1


def test_processes_that_start_and_keep_at_once_disturb_nobody(second: Machine, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: second.compile(second.start(), {f"ee/{index}.py": b"more" * 9999}), range(8)))
    second.lines.clear()
    second.start()
    (archive,) = archives(tmp_path)
    assert [line for line in second.lines if "earlier start, from" in line and str(archive) in line]


def test_only_the_first_process_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "inductor", tmp_path / "cache", monkeypatch)
    machine.compile(machine.start(rank=1, size=2))
    assert not machine.lines and not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    machine = Machine(tmp_path / "inductor", tmp_path / "cache", monkeypatch)
    machine.compile(machine.start())
    assert [line.partition(":")[0] for line in machine.lines] == ["compiled code"] * 2
    assert "cannot be written" in machine.lines[1]


def test_a_folder_that_another_process_removes_meanwhile_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "inductor", tmp_path / "cache", monkeypatch)
    code = machine.start()
    with code.step(1):
        monkeypatch.setattr(Path, "rglob", lambda *_: (_ for _ in ()).throw(FileNotFoundError("gone")))
    with code.step(2):
        pass
    (line,) = machine.lines
    assert "cannot be written: gone" in line


def test_without_cache_or_without_compilation_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    nothing: Any = None
    for config in (CompileConfig(enabled=True, cache=""), CompileConfig()):
        assert observers_of(replace(Recipe(), compile=config), nothing, nothing) == ()
    assert written() == tmp_path


def test_a_home_folder_that_is_not_known_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path / "inductor", Path("~nobody-here/code"), monkeypatch)
    machine.compile(machine.start())
    (line,) = machine.lines
    assert "home folder is not known; set HOME" in line and os.listdir(tmp_path) == ["inductor"]


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_trains_the_same_to_the_bit(small: Recipe, tmp_path: Path) -> None:
    said, found = {}, {}
    for name in ("cold", "warm"):
        compile = {"enabled": True, "cache": str(tmp_path / "cache")}
        run = {"name": name, "steps": 3, "output": str(tmp_path)}
        recipe = change(small, run=run, compile=compile, checkpoint={"every": 0})
        (tmp_path / "recipe.toml").write_text(to_toml(recipe))
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), str(tmp_path / "recipe.toml")],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"inductor-{name}")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said[name] = [line for line in done.stdout.splitlines() if line.startswith("compiled code")]
        found[name] = [(row["loss"], row["grad_norm"]) for row in rows(recipe)]
    (cold,), (warm,) = said["cold"], said["warm"]
    assert "kept in" in cold
    assert "of an earlier start" in warm  # and as no line follows, nothing was compiled again
    assert found["cold"] == found["warm"]
