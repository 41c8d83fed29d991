"""Fixtures for all tests, and the order of test files."""

import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.quick import may_be_slow, only_quick_work

if TYPE_CHECKING:
    from parallel.dist import World
    from recipes.recipe.schema import Recipe

# Before torch is imported: pytest's workers and the processes they start share the cores, and OpenMP's threads would
# wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Whatever the shell, a launcher or a scheduler left behind would reach the commands that tests start.
LEFT_BEHIND = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|ROLE_)?WORLD_SIZE|NNODES|NPROC|RESTARTS|HOSTFILE|COLUMNS|LINES"
    r"|NO_COLOR|FORCE_COLOR|PYTHONWARNINGS|PYTHONDONTWRITEBYTECODE|CUDA_VISIBLE_DEVICES"
    r"|(MASTER|PET|TORCH|TORCHELASTIC|TORCHINDUCTOR|NCCL|GLOO|SLURM|HF|WANDB|AWS)_.*)"
)
for variable in filter(LEFT_BEHIND.fullmatch, list(os.environ)):
    if variable != "CUDA_VISIBLE_DEVICES" or not Path("/dev/nvidiactl").exists():
        del os.environ[variable]
# Compile in the process that asks: a worker is a new interpreter, and every process of a test would start its own.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# nohup and a shell's `&` leave these ignored, which the processes that tests start would inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SECONDS = "shardwright/seconds"
"""In pytest's cache: test -> how long it took when it last ran."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed",
        metavar="COMMIT",
        help="of the slow tests, run those that the changes since COMMIT can reach; '' = of the newest change",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find what the change can reach, once: the workers get a copy of these options."""
    commit = config.getoption("--changed")
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Durations())
    if commit is None:
        return
    from tests.changes import changed_since, distances, newest_change

    try:
        commit = commit or newest_change()
        changed = changed_since(commit)
    except ValueError as error:
        raise pytest.UsageError(f"--changed {commit}: {error}") from None
    config.option.reached = distances(changed)
    print(f"changed since {commit}: {', '.join(changed) or 'nothing'}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`, one worker more than cores: many tests wait, for processes, time-outs and schedulers."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return 1 + (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests that a change cannot reach, and put the longest files first.

    The order within a file stays. scripts/test.sh hands out whole files, so no worker is left alone with a long one at
    the end. A file that has never run counts as long as it has slow tests.
    """
    for item in items:
        if any(item.get_closest_marker(mark) for mark in ("gpu", "slurm", "exhaustive")):
            item.add_marker("slow")
    slow = [item for item in items if item.get_closest_marker("slow")]
    reached: dict[str, int] | None = getattr(config.option, "reached", None)
    if reached is not None:
        out_of_reach = {item for item in slow if file_of(item) not in reached}
        config.hook.pytest_deselected(items=[item for item in items if item in out_of_reach])
        items[:] = [item for item in items if item not in out_of_reach]
    last = cache.get(SECONDS, {}) if (cache := getattr(config, "cache", None)) else {}
    seconds: dict[str, float] = {}
    for item in items:
        guess = 10.0 if item in slow else 0.1
        seconds[file_of(item)] = seconds.get(file_of(item), 0.0) + last.get(item.nodeid, guess)
    items.sort(key=lambda item: ((reached or {}).get(file_of(item), 0), -seconds[file_of(item)], file_of(item)))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Durations:
    """Keeps how long every test took, for the order of the next run, and names failures as they come: pytest itself
    does so at its end, which a run that takes too long does not reach."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = round(self.seconds.get(report.nodeid, 0.0) + report.duration, 2)
        if report.failed:
            print(f"\nfailed after {report.duration:.0f} s: {report.nodeid}", flush=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (cache := getattr(session.config, "cache", None)) is not None:
            cache.set(SECONDS, cache.get(SECONDS, {}) | self.seconds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that hangs, with its stack, whatever it waits for."""
    from tests.processes import PATIENCE

    def give_up(*_: object) -> None:
        pytest.fail(f"not at its end within {2 * PATIENCE:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 2 * PATIENCE)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with nullcontext() if may_be_slow(item) else only_quick_work():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with nullcontext() if may_be_slow(item) else only_quick_work():
        return (yield)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Give every test the same random numbers, whatever ran before it."""
    import torch

    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def broken_pipes_raise() -> Iterator[None]:
    """Undo what --help and --check do in this process: a later test's broken pipe would end all tests."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts


@pytest.fixture(scope="module", autouse=True)
def nobody_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test file that leaves processes running. (Reads /proc, so it finds none on macOS.)"""
    from tests.processes import PATIENCE

    yield
    folder = str(tmp_path_factory.getbasetemp())
    end = time.monotonic() + PATIENCE / 10
    while (left := processes_in(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, left


def processes_in(folder: str) -> dict[int, str]:
    """Processes that run in this folder or name a path in it in their command: process id -> command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
            if command and (folder in command or str((process / "cwd").readlink()).startswith(folder)):
                found[int(process.name)] = command
    return found


@pytest.fixture
def alone() -> Iterator["World"]:
    """A process group of this process alone."""
    from parallel.dist import start, stop

    yield start("cpu", seed=0)
    stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real text in one file: some sources of the standard library."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    names = ["argparse.py", "ast.py", "inspect.py", "pathlib.py", "typing.py", "dataclasses.py", "enum.py"]
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(
        "\n\n".join((stdlib / name).read_text(encoding="utf-8") for name in names if (stdlib / name).exists())
    )
    return path


@pytest.fixture(scope="module")
def small(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> "Recipe":
    """The small recipe (tests/training.py) on the corpus; the runs of one test file go to one folder."""
    from tests.training import small_recipe

    return small_recipe(corpus, tmp_path_factory.mktemp("small"))
