"""What runs before any training code: the lock file, the environment, scripts/run.sh and the launcher."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipes.files.exit_codes import PREEMPTED

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==([\w.+!-]+)", LOCK, flags=re.MULTILINE)
}


@pytest.mark.slow
@pytest.mark.parametrize("script", [*sorted(ROOT.glob("scripts/*.sh")), ROOT / ".ci/run"], ids=lambda path: path.name)
def test_bash_parses_every_shell_script(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


# --- the lock file


def test_lock_pins_every_direct_dependency_within_its_range() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), line


def test_lock_pins_the_measured_torch_and_torchao() -> None:
    assert (PINS["torch"], PINS["torchao"]) == ("2.13.0", "0.18.0")


def test_lock_leaves_cuda_packages_to_torch() -> None:
    assert not [name for name in PINS if name.startswith(("nvidia-", "cuda-")) or name == "triton"]


def test_lock_contains_no_index_and_no_path() -> None:
    requirements = [line.split("#")[0] for line in LOCK.splitlines()]
    assert not [line for line in requirements if re.search(r"[/@]|^-", line)]
    assert "://" not in LOCK


# --- scripts/setup.sh, in a copy of the checkout so that the real .venv is not touched


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv looks up to date to setup.sh, which does not start Python to check."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    executable(tmp_path / ".venv/bin/python", "exit 1")
    (tmp_path / ".venv/setup.log").touch()
    checksum = subprocess.check_output(["cksum"], input=LOCK.encode()).decode()
    (tmp_path / ".venv/shardwright-stamp").write_text(f"gpu {checksum}")
    return tmp_path


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def source_setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "SETUP_EXTRAS")}
    return subprocess.run(
        ["bash", "-euc", '. scripts/setup.sh || exit; echo "$PYTHON"'],
        cwd=checkout,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_current_environment_is_used_as_it_is(checkout: Path) -> None:
    result = source_setup(checkout)
    assert (result.stdout, result.stderr) == (f"{checkout}/.venv/bin/python\n", "")


def no_python(folder: Path) -> str:
    """A PATH on which every Python that setup.sh tries is too old."""
    folder.mkdir()
    for name in ("python", "python3", *(f"python3.{minor}" for minor in range(11, 15))):
        executable(folder / name, "exit 1")
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["requirements.lock", ".venv/shardwright-stamp"])
def test_a_changed_lock_file_or_an_unfinished_environment_causes_a_new_set_up(file: str, checkout: Path) -> None:
    (checkout / file).write_text("torch==2.12.0\n")
    result = source_setup(checkout, PATH=no_python(checkout / "bin"))
    assert result.returncode != 0
    assert "no Python 3.11 to 3.14 found" in result.stderr


@pytest.mark.slow
def test_an_environment_that_setup_did_not_create_is_not_deleted(checkout: Path) -> None:
    for name in ("setup.log", "shardwright-stamp"):
        (checkout / ".venv" / name).unlink()
    result = source_setup(checkout)
    assert result.returncode != 0
    assert "was not made by scripts/setup.sh" in result.stderr
    assert (checkout / ".venv/bin/python").exists()


@pytest.mark.slow
def test_an_interpreter_that_lacks_packages_is_refused_with_their_names(checkout: Path) -> None:
    venv.create(checkout / "empty", with_pip=False)
    result = source_setup(checkout, PYTHON="empty/bin/python", SETUP_EXTRAS="dev")
    assert result.returncode != 0
    assert "torch>=2.11,<2.16, torchao" in result.stderr
    assert "pytest>=" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_interpreter_without_what_only_some_recipes_import_is_used_but_not_for_tests(checkout: Path) -> None:
    (checkout / "sitecustomize.py").write_text("""if True:
        import importlib.metadata as metadata
        known = metadata.version
        def version(name):
            if name in ("datasets", "wandb", "pyarrow", "torchao", "safetensors", "matplotlib"):
                raise metadata.PackageNotFoundError(name)
            return known(name)
        metadata.version = version
    """)
    python = executable(checkout / "bare", f'exec env PYTHONPATH={checkout} {sys.executable} "$@"')
    assert source_setup(checkout, PYTHON=str(python)).stdout == f"{python}\n"
    result = source_setup(checkout, PYTHON=str(python), SETUP_EXTRAS="dev")
    assert result.returncode != 0
    assert "datasets>=" in result.stderr and "wandb>=" in result.stderr


@pytest.mark.slow
def test_an_interpreter_with_all_packages_is_used(checkout: Path) -> None:
    assert source_setup(checkout, PYTHON=sys.executable).stdout == f"{sys.executable}\n"


# --- scripts/run.sh, with a substitute for Python that records how it was called


def run_sh(checkout: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run it from another folder. Returns the result and the calls, each with the two numbers of threads first."""
    calls = checkout / "calls"
    python = executable(
        checkout / "python",
        f'[ "$1" = - ] || echo "$OMP_NUM_THREADS" "$TORCHINDUCTOR_COMPILE_THREADS" "$@" $(env | grep ^PET_) >>{calls}\n'
        'case "$*" in *bad.toml*--check*) echo "1 problem" >&2; exit 2;; esac',
    )
    elsewhere = checkout / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    ours = ("NNODES", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    result = subprocess.run(
        ["bash", checkout / "scripts/run.sh", *arguments],
        cwd=elsewhere,
        env=inherited | {"PYTHON": str(python)} | environment,
        capture_output=True,
        text=True,
    )
    return result, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.slow
def test_run_checks_the_recipe_and_then_launches(checkout: Path) -> None:
    recipe = checkout / "pyproject.toml"
    result, calls = run_sh(checkout, "pyproject.toml", "--run.steps", "3", NPROC="1024")
    assert result.returncode == 0, result.stderr
    run = f"{checkout}/train.py {recipe} --run.steps 3"
    assert calls == [
        f"1 1 {run} --check --processes 1024 --nodes 1",
        f"1 1 {checkout}/scripts/launch.py --standalone --nproc-per-node=1024 {run}",
    ]


@pytest.mark.slow
def test_run_takes_a_number_of_processes_with_zeros_before_it(checkout: Path) -> None:
    result, calls = run_sh(checkout, "pyproject.toml", NPROC="008")
    assert result.returncode == 0 and "--processes 8 " in calls[0] and "--nproc-per-node=8 " in calls[1], result.stderr


@pytest.mark.slow
def test_a_node_finds_its_number_in_the_host_file(checkout: Path) -> None:
    (checkout / "hosts").write_text(f"127.9.9.9\n{socket.gethostname()}\n")
    _, calls = run_sh(checkout, "pyproject.toml", NPROC="4", HOSTFILE=str(checkout / "hosts"))
    assert "--check --processes 8 --nodes 2" in calls[0]
    assert "--nnodes=2 --node-rank=1 --master-addr=127.9.9.9 " in calls[1]


@pytest.mark.slow
def test_run_takes_the_nodes_of_a_pytorchjob_and_hides_its_variables_from_torchrun(checkout: Path) -> None:
    """Else PET_NNODES overrides --standalone, and torchrun waits for nodes that nobody starts."""
    record = checkout / "calls"
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "9"}
    job = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    _, calls = run_sh(checkout, "pyproject.toml", **pod, **job)
    assert "--nnodes=2 --node-rank=1 --master-addr=127.0.0.1 --master-port=23456 --nproc-per-node=4" in calls[1]
    assert "PET_" not in calls[1]
    record.unlink()
    _, calls = run_sh(checkout, "pyproject.toml", NNODES="1", NPROC="3", **pod, **job)
    assert "--standalone --nproc-per-node=3" in calls[1]
    result, _ = run_sh(checkout, "pyproject.toml", PET_NNODES="2", NPROC="2")
    assert (result.returncode, "NNODES=2: set NODE_RANK" in result.stderr) == (2, True)
    result, _ = run_sh(checkout, "pyproject.toml", PET_NNODES="1:2", NPROC="2")
    assert (result.returncode, "NNODES=1:2: must be a number" in result.stderr) == (2, True)
    record.unlink()
    result, calls = run_sh(checkout, "pyproject.toml", NPROC="2", **job)
    assert (result.returncode, calls) == (2, [])
    assert "WORLD_SIZE=8 is set, but not NNODES: set NNODES, NODE_RANK and MASTER_ADDR, or NNODES=1" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("python", ["/nowhere", "./nowhere", "/dev/null"])
def test_run_refuses_an_interpreter_that_is_not_there(checkout: Path, python: str) -> None:
    result, calls = run_sh(checkout, "pyproject.toml", PYTHON=python)
    assert (result.returncode, calls) == (2, [])
    assert "does not exist or cannot be executed" in result.stderr


@pytest.mark.slow
def test_run_does_not_launch_a_bad_recipe(checkout: Path) -> None:
    result, calls = run_sh(checkout, "bad.toml", NPROC="2")
    assert (result.returncode, result.stderr, len(calls)) == (2, "1 problem\n", 1)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["pyproject.toml", "--check"], ["--help"]], ids=str)
def test_run_passes_check_and_help_to_train_py_alone(checkout: Path, arguments: list[str]) -> None:
    _, calls = run_sh(checkout, *arguments)
    assert len(calls) == 1
    assert calls[0].split()[0] == f"{checkout}/train.py"


# --- scripts/launch.py, with real workers

WORKER = """
import os, signal, sys, time
rank, mode = os.environ["RANK"], sys.argv[1]
stops = []
signal.signal(signal.SIGINT, lambda number, frame: stops.append(number))
if mode == "save":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others as soon as one has ended
os.write(1, b"ready\\n")
while mode == "save" and not stops:
    time.sleep(0.02)
if mode == "save":
    time.sleep(1)  # the rest of a step, and a checkpoint
    os.write(1, b"saved after %d signals\\n" % len(stops))
    sys.exit(75)
if mode == "refuse":
    print("the recipe is bad", file=sys.stderr)
    sys.exit(2)
if rank == "1" and mode == "raise":
    raise ValueError("what happened")
if rank == "1" and mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if mode != "finish" else 0)
"""


@pytest.fixture
def launch(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    started = []

    def start(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, ROOT / "scripts/launch.py", "--standalone", "--nproc-per-node=2", worker, mode]
        environment = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
        environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output and errors. It returns when no process holds the pipes, which also proves that no worker is left."""
    return process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "last_line"),
    [
        ("finish", 0, ""),
        ("refuse", 2, "the recipe is bad"),
        ("raise", 1, "launch: rank 1 ended with exit code 1"),
        ("kill", 128 + signal.SIGKILL, "launch: rank 1 was killed by SIGKILL (often: out of memory)"),
    ],
)
def test_a_workers_exit_code_is_the_launchers(launch, mode: str, code: int, last_line: str) -> None:
    process = launch(mode)
    _, errors = finish(process)
    assert process.returncode == code, errors
    assert (errors.splitlines() or [""])[-1] == last_line
    assert "torch/distributed" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_and_its_echo_let_workers_save_once(launch, times: int) -> None:
    process = launch("save")
    wait_until_ready(process)
    process.send_signal(signal.SIGINT)
    if times == 2:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    output, errors = finish(process)
    assert process.returncode == PREEMPTED
    assert output.count("saved after 1 signals") == 2
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_an_interrupt_while_torch_is_imported_prints_nothing(
    launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = launch("save")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert (*finish(process), process.returncode) == ("", "", 130)


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.call("setpriv --pdeathsig TERM true", shell=True, stderr=subprocess.DEVNULL) != 0,
    reason="needs a setpriv that can set a parent-death signal",
)
def test_a_killed_launcher_leaves_no_worker_behind(launch) -> None:
    process = launch("sleep")
    wait_until_ready(process)
    process.kill()
    finish(process)
