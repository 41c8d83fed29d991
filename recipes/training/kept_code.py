"""Compiled code that outlives its machine: what Inductor wrote in the first step of a start, for the starts after it.

One archive for each torch, device, code of ours and part of the recipe that shapes code. It holds Inductor's folder and
not torch.compiler.save_cache_artifacts(), which leaves out what the C++ compiler made: nearly all of the time on a CPU.
Inductor itself decides by the content of a graph what it takes from there, so a wrong archive costs time only. But it
holds pickles and libraries: whoever writes it can run code here.
"""

import os
import platform
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import torch
import xxhash

from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.files import atomic
from recipes.files.reading import user_path
from recipes.metrics.clock import SAVE
from recipes.recipe.schema import Recipe
from recipes.training.border import Process

ROOT = Path(__file__).resolve().parents[2]
OURS = "shardwright-"
"""Prefix of Inductor's folders on this machine, one for each archive."""
OF_MODEL = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""What lines of /proc/cpuinfo that tell models of CPUs apart begin with."""
UNFINISHED = (".lock", ".tmp", "/tmp.pid_")
"""In names of files that no other start needs; the last is Triton's."""


class KeptCode:
    """The compiled code of a stage of a run; made before anything is compiled, it unpacks what there is."""

    def __init__(self, recipe: Recipe, process: Process, mesh: Mesh) -> None:
        world, self._clock, self._log = process.world, process.clock, process.console.log
        key = _key(recipe, mesh, world.device)
        self._key = key.encode()
        # The first process of each part of a pipeline: all others of the part run the same code.
        self._keeps = world.rank % (world.size // mesh.degrees.pipeline) == 0
        self._archive = user_path(recipe.compile.cache) / f"{recipe.model.name}-{key}.zip"
        folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"))
        folder = folder.parent if folder.name.startswith(OURS) else folder  # that of the stage before
        self._folder = folder / f"{OURS}{key}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder)  # torch reads it when it compiles
        self._steps, self._unpacked = 0, set[str]()
        try:
            self._unpacked = self._unpack()
            self._log(f"compiled code: {len(self._unpacked)} files of an earlier start, from {self._archive}")
        except FileNotFoundError:
            pass
        except (OSError, BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
            self._log(f"compiled code: {self._archive} is damaged or not ours and is ignored: {error}")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context manager to wrap every step in. After the second one it keeps what is new: the losses of the first,
        which compiles, are then those of all processes, so none of this machine is in the midst of writing code."""
        yield
        self._steps += 1
        if self._keeps and self._steps == 2:
            with self._clock(SAVE):
                self._keep()

    def _unpack(self) -> set[str]:
        with ZipFile(self._archive) as archive:
            if archive.comment != self._key:
                raise BadZipFile("another key is written in it")
            files = {name: archive.read(name) for name in archive.namelist()}  # all of it, against its checksums
        for name, content in files.items():
            if not (file := self._folder / name).exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic.replace(file, lambda out, content=content: out.write(content), sync=False)
        return set(files)

    def _keep(self) -> None:
        try:
            paths = {str(path.relative_to(self._folder)): path for path in self._folder.rglob("*") if path.is_file()}
            paths = {name: path for name, path in paths.items() if not any(word in name for word in UNFINISHED)}
            if self._unpacked.issuperset(paths):
                return
            self._archive.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace(self._archive, lambda out: self._pack(out, paths), sync=True)
            self._log(f"compiled code: {len(paths)} files kept in {self._archive} for the next start")
        except OSError as error:
            self._log(f"compiled code: {self._archive} cannot be written: {error}")

    def _pack(self, out: BinaryIO, paths: Mapping[str, Path]) -> None:
        with ZipFile(out, "w", ZIP_DEFLATED, compresslevel=1) as archive:
            archive.comment = self._key
            for name, path in sorted(paths.items()):
                archive.writestr(name, path.read_bytes(), ZIP_DEFLATED, 1)


def kept_code(recipe: Recipe, process: Process, mesh: Mesh) -> KeptCode | None:
    """None, with a line in the log, where nothing can be kept: it would only save time."""
    try:
        return KeptCode(recipe, process, mesh)
    except UserError as error:
        process.console.log(f"compiled code: not kept: compile.cache = {error}")
        return None


def _key(recipe: Recipe, mesh: Mesh, device: torch.device) -> str:
    batch, optimizer = recipe.batch, recipe.optimizer
    facts = [
        *(torch.__version__, sys.version, torch.get_num_threads(), _machine(device), _sources(), mesh.degrees),
        mesh.pipeline.get_local_rank() if mesh.pipeline is not None else 0,
        *(replace(recipe.model, weights="", config=""), recipe.mesh, recipe.pipeline, recipe.experts, recipe.attention),
        *(recipe.float8, recipe.activation_checkpointing, replace(recipe.compile, cache=""), recipe.fsdp),
        *(batch.micro_batch_size, batch.sequence_length, batch.loss_chunks),
        *(recipe.data.document_mask, recipe.data.has_pairs),
        *(optimizer.name, optimizer.state_dtype, optimizer.z_loss),
    ]
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _machine(device: torch.device) -> str:
    """The kind of device; C++ is compiled for the very model of a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    with suppress(OSError):
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(OF_MODEL)}
        return "\n".join(sorted(lines))
    return f"{platform.machine()} {platform.processor()}"


def _sources() -> str:
    files = sorted(path for folder in ("models", "parallel") for path in (ROOT / folder).glob("*.py"))
    return xxhash.xxh3_128_hexdigest(b"".join(path.read_bytes() for path in files))
