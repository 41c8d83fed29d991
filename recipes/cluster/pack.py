"""The environment and the checkout as two files, which each node unpacks on its own disk.

    environment-KEY.tar   venv/     the packages, with their bytecode
                          python/   the Python that the virtual environment starts, unless it is the system's
    checkout-KEY.tar      checkout/ code and recipes, with their bytecode; pack.json: the commit

scripts/unpack.sh unpacks them. They are made again when a file of theirs changes.
Imports no torch.
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from pathlib import Path

from parallel.errors import UserError
from recipes.files.units import size
from recipes.files.version import PACKED, commit

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
CACHE = ".pack"
"""The folder of packs in the checkout."""
CHECKOUT = ("configs", "models", "parallel", "recipes", "scripts", "train.py", "pyproject.toml", "requirements.lock")
"""What a run reads of its checkout."""
SYSTEM = Path("/usr")
"""A Python below this belongs to each node's system: its packages travel, it does not."""
LEFT_OUT = ("lib/python3*/test", "lib/python3*/idlelib", "lib/python3*/turtledemo", "lib/python3*/config-*", "lib/*.a")
"""Parts of a Python that no run imports, a third of it."""
UNUSED_SECONDS = 7 * 24 * 3600
"""Age of a pack's last use at which it is deleted."""
HERE = "@HERE@"
"""Stands in pyvenv.cfg for the folder of the node; scripts/unpack.sh writes it there."""


@dataclass(frozen=True)
class PackedFile:
    """A file, or a link (target), of a pack."""

    name: str
    path: str
    bytes: int
    changed: int
    """Time of the last change, in nanoseconds."""
    target: str | None = None


@dataclass(frozen=True)
class Pack:
    """Two files on the disk that all nodes share."""

    environment: Path
    checkout: Path
    python: str
    """The interpreter, below the folder into which they are unpacked."""
    bytes: int
    """Bytes of both, packed; unpacked they are about as many, because nothing is compressed."""

    @property
    def key(self) -> str:
        return f"{self.environment.stem}_{self.checkout.stem}"


def pack(root: Path, cache: Path) -> tuple[Pack, list[str]]:
    """The packs of the running interpreter's environment and of this checkout, made where they do not exist yet, and
    lines on what was done. Raises UserError."""
    notes: list[str] = []
    inside_venv = sys.prefix != sys.base_prefix
    listings: dict[str, Callable[[], Iterator[PackedFile]]] = {
        "environment": environment_entries,
        "checkout": partial(checkout_entries, root),
    }
    changes = {"checkout": {f"checkout/{PACKED}": json.dumps(commit(root))}}
    if inside_venv:
        changes["environment"] = {"venv/pyvenv.cfg": _venv_config()}
    files = {}
    try:
        cache.mkdir(exist_ok=True)
        for kind, listing in listings.items():
            entries = list(listing())
            key = _key(entries, changes.get(kind, {}))
            files[kind] = cache / f"{kind}-{key}.tar"
            if files[kind].exists():
                os.utime(files[kind])  # in use
                continue
            started = time.monotonic()
            sources = [entry for entry in entries if entry.name.endswith(".py")]
            folders = {entry.path.removesuffix("/".join(entry.name.split("/")[2:])) for entry in sources}
            subprocess.run([sys.executable, "-W", "ignore", "-m", "compileall", "-qq", "-j0", *folders])
            with _new(files[kind]) as new:
                _write(new, list(listing()), changes.get(kind, {}))
                if _key(listing(), changes.get(kind, {})) != key:
                    raise UserError(
                        f"the {kind} changed while it was packed; start the job again when nobody writes to it"
                    )
            seconds = time.monotonic() - started
            notes.append(f"packed the {kind}: {size(files[kind].stat().st_size)} in {seconds:.0f} s, {files[kind]}")
        _delete_unused(cache)
        total = sum(file.stat().st_size for file in files.values())
    except OSError as error:
        raise UserError(
            f"the pack cannot be written: {error.strerror}: {error.filename or cache}; free space there, or unset PACK"
        ) from None
    return Pack(**files, python=f"{'venv' if inside_venv else 'python'}/bin/{VERSION}", bytes=total), notes


def environment_entries() -> Iterator[PackedFile]:
    """What travels of the running interpreter's environment. Raises UserError."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    base_stays = base.is_relative_to(SYSTEM)
    if prefix == base and base_stays:
        raise UserError(f"PACK packs a virtual environment, and {sys.executable} is the system's Python; use .venv")
    if prefix != base:
        yield from _listed(prefix / "lib", "venv/lib")
        # Python finds its virtual environment beside this link.
        link = f"{base}/bin/{VERSION}" if base_stays else f"../../python/bin/{VERSION}"
        for name in (VERSION, "python"):
            yield PackedFile(f"venv/bin/{name}", "", 0, 0, link if name == VERSION else VERSION)
    if base_stays:
        return
    shared = "include-system-site-packages = true" in _read_venv_config().lower()
    left_out = LEFT_OUT if prefix == base or shared else (*LEFT_OUT, "lib/python3*/site-packages")
    for part in ("lib", f"include/{VERSION}"):  # torch.compile compiles with these headers
        if (base / part).is_dir():
            yield from _listed(base / part, f"python/{part}", left_out=[f"python/{pattern}" for pattern in left_out])
    yield _entry(f"python/bin/{VERSION}", base / "bin" / VERSION)


def checkout_entries(root: Path) -> Iterator[PackedFile]:
    for part in CHECKOUT:
        if (root / part).is_dir():
            yield from _listed(root / part, f"checkout/{part}")
        else:
            yield _entry(f"checkout/{part}", root / part)


def _listed(folder: Path, name: str, *, left_out: Sequence[str] = ()) -> Iterator[PackedFile]:
    """All files below a folder. A link that leads out of the folder is followed: its target may be on no node."""
    own = f".{sys.implementation.cache_tag}.pyc"
    with os.scandir(folder) as inside:
        items = sorted(inside, key=lambda item: item.name)
    for item in items:
        inner = f"{name}/{item.name}"
        if any(fnmatch(inner, pattern) for pattern in left_out):
            continue
        if item.is_symlink():
            target = os.readlink(item.path)
            if not os.path.isabs(target) and ".." not in Path(target).parts:
                yield PackedFile(inner, item.path, 0, 0, target)
                continue
        if item.is_dir():
            yield from _listed(Path(item.path), inner, left_out=left_out)
        elif item.is_file() and (item.name.endswith(own) or folder.name != "__pycache__"):
            yield _entry(inner, item)


def _entry(name: str, item: "Path | os.DirEntry[str]") -> PackedFile:
    about = item.stat()
    return PackedFile(name, os.fspath(item), about.st_size, about.st_mtime_ns)


def _key(entries: Iterable[PackedFile], changes: dict[str, str]) -> str:
    digest = sha256(repr(sorted(changes.items())).encode())
    for entry in entries:
        # Bytecode follows from its source.
        if not entry.name.endswith(".pyc"):
            digest.update(f"{entry.name}\0{entry.bytes}\0{entry.changed}\0{entry.target}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def _new(file: Path) -> Iterator[Path]:
    """The path to write a file to that is to be there whole or, after an error, not at all."""
    partial_file = file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        yield partial_file
        os.replace(partial_file, file)
    finally:
        partial_file.unlink(missing_ok=True)


def _write(file: Path, entries: Sequence[PackedFile], changes: dict[str, str]) -> None:
    # GNU's format keeps whole seconds, as bytecode does, which names the time of its source.
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries:
            if entry.name in changes:
                continue
            if entry.target is None:
                archive.add(os.path.realpath(entry.path), entry.name, recursive=False)
            else:
                link = tarfile.TarInfo(entry.name)
                link.type, link.linkname = tarfile.SYMTYPE, entry.target
                archive.addfile(link)
        for name, text in changes.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(text.encode()), 0o644, int(time.time())
            archive.addfile(info, io.BytesIO(text.encode()))


def _read_venv_config() -> str:
    file = Path(sys.prefix, "pyvenv.cfg")
    return file.read_text() if file.exists() else ""


def _venv_config() -> str:
    base = Path(sys.base_prefix)
    home = f"{base}/bin" if base.is_relative_to(SYSTEM) else f"{HERE}/python/bin"
    return re.sub(r"(?m)^home\s*=.*$", f"home = {home}", _read_venv_config())


def _delete_unused(cache: Path) -> None:
    for file in [*cache.glob("*.tar"), *cache.glob(".*.tar.*")]:
        with suppress(FileNotFoundError):  # another job was faster
            if time.time() - file.stat().st_mtime > UNUSED_SECONDS:
                file.unlink()
