"""Compiled code for later starts: what Inductor wrote in the first step, in one archive for all that shapes code.

It is Inductor's folder and not torch.compiler.save_cache_artifacts(), which leaves out what the C++ compiler made: most
of the time on a CPU. Inductor decides by a graph's content what it takes, so a wrong archive only costs time. But it
holds pickles and libraries: whoever writes it can run code here.
"""

import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from shutil import copyfileobj
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import torch
import xxhash

from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.files import atomic
from recipes.files.reading import user_path
from recipes.metrics.clock import SAVE
from recipes.recipe.schema import Recipe
from recipes.training.process import Process

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("models", "parallel", "recipes/optimization")  # what is compiled
OURS = "shardwright-"  # begins the names of Inductor's folders on this machine, one for each archive
OF_CPU = ("model name", "flags", "CPU implementer", "CPU part", "Features")  # C++ is compiled for one model
UNFINISHED = (".lock", ".tmp", "/tmp.pid_", atomic.PART)  # in names of what no other start needs; the third is Triton's
UNREADABLE = (OSError, UserError, BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error)


class KeptCode:
    """The compiled code of a stage of a run; made before anything is compiled, it unpacks what there is."""

    def __init__(self, recipe: Recipe, process: Process, mesh: Mesh) -> None:
        world, self._clock, self._log = process.world, process.clock, process.console.log
        self._key = _key(recipe, mesh, world.device)
        # The first process of each part of a pipeline: all others of the part run the same code.
        self._keeps = world.rank % (world.size // mesh.degrees.pipeline) == 0
        folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"))
        folder = folder.parent if folder.name.startswith(OURS) else folder  # that of the stage before
        self._folder = folder / f"{OURS}{self._key}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder)  # torch reads it when it compiles
        self._archive = Path(recipe.compile.cache, f"{recipe.model.name}-{self._key}.zip")
        self._steps, self._unpacked = 0, set[str]()
        try:
            self._archive = user_path(self._archive)
            self._unpacked = self._unpack()
            self._log(f"compiled code: {len(self._unpacked)} files of an earlier start, from {self._archive}")
        except FileNotFoundError:
            pass
        except UNREADABLE as error:
            self._keeps &= not isinstance(error, UserError)  # whose home folder is not known
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
            if archive.comment != self._key.encode():
                raise BadZipFile("another key is written in it")
            files = {name: archive.read(name) for name in archive.namelist()}  # all of it, against its checksums
        for name, content in files.items():
            if not (file := self._folder / name).exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic.replace(file, partial(copyfileobj, BytesIO(content)), sync=False)
        return set(files)

    def _keep(self) -> None:
        try:  # from the first look: another process may remove a folder in between
            names = [str(path.relative_to(self._folder)) for path in self._folder.rglob("*") if path.is_file()]
            names = [name for name in names if not any(word in name for word in UNFINISHED)]
            if self._unpacked.issuperset(names):
                return
            with ZipFile(packed := BytesIO(), "w", ZIP_DEFLATED, compresslevel=1) as archive:
                archive.comment = self._key.encode()
                for name in names:
                    archive.write(self._folder / name, name)
            self._archive.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace(self._archive, lambda out: out.write(packed.getbuffer()), sync=True)
            self._log(f"compiled code: {len(names)} files kept in {self._archive} for the next start")
        except OSError as error:
            self._log(f"compiled code: {self._archive} cannot be written: {error}")


def _key(recipe: Recipe, mesh: Mesh, device: torch.device) -> str:
    batch, optimizer = recipe.batch, recipe.optimizer
    sources = [path.read_bytes() for folder in SOURCES for path in sorted((ROOT / folder).glob("*.py"))]
    facts = [
        *(torch.__version__, sys.version, torch.get_num_threads(), xxhash.xxh3_128_hexdigest(b"".join(sources))),
        *(_machine(device), mesh.degrees, mesh.pipeline.get_local_rank() if mesh.pipeline is not None else 0),
        *(replace(recipe.model, weights="", config=""), recipe.mesh, recipe.pipeline, recipe.experts, recipe.attention),
        *(recipe.float8, recipe.activation_checkpointing, replace(recipe.compile, cache=""), recipe.fsdp),
        *(batch.micro_batch_size, batch.sequence_length, batch.loss_chunks),
        *(recipe.data.document_mask, recipe.data.has_pairs, recipe.metrics.attention_logits),
        *(optimizer.name, optimizer.state_dtype, optimizer.z_loss, optimizer.qk_clip, recipe.plugins.versions),
    ]
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    lines = about.read_text().splitlines() if (about := Path("/proc/cpuinfo")).exists() else []
    return f"{os.uname().machine} {sorted({line for line in lines if line.startswith(OF_CPU)})}"
