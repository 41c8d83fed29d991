# shellcheck shell=bash
# Sourced by run.sh and test.sh: sets PYTHON to an interpreter that can run Shardwright, or returns non-zero.
#
#   PYTHON set by the caller   uses it as it is: no network, no installation
#   .venv up to date           uses .venv (takes milliseconds: Python is not started)
#   otherwise                  creates .venv from requirements.lock with pip, then writes the stamp
#
# SETUP_EXTRAS=dev also requires the test tools of the caller's PYTHON (.venv always has them).

[ "${BASH_SOURCE[0]}" != "$0" ] || { sed -n '/^# shellcheck/d; /^#/!q; s/^# \{0,1\}//p' "$0" && exit; }
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETUP_VENV=$ROOT/.venv
SETUP_STAMP=$SETUP_VENV/shardwright-stamp

setup_say() { echo "set-up: $*" >&2; }
setup_fail() { echo "set-up failed: $*" >&2; return 2; }

# The stamp is written last, so an interrupted set-up has none. It holds the torch build and the lock file's checksum.
# cksum is on every POSIX system, and enough to detect a stale environment.
setup_lock_sum() { cksum <"$ROOT/requirements.lock"; }

setup_has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

setup_is_current() {
    local build sum
    [ -x "$SETUP_VENV/bin/python" ] && read -r build sum 2>/dev/null <"$SETUP_STAMP" || return 1
    [ "$sum" = "$(setup_lock_sum)" ] || return 1
    # Machines may share a checkout: the GPU build also works without a GPU, but the CPU build is wrong where there is
    # one. nvidia-smi takes up to a second, so the device file is checked first.
    [ "$build" = gpu ] || ! [ -e /dev/nvidia0 ] || ! setup_has_gpu
}

# setup_check PYTHON [dev]: prints the packages that the interpreter lacks.
setup_check() {
    "$1" - "$ROOT/pyproject.toml" "${@:2}" <<'PYTHON_END'
import sys

if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer (this is {sys.version.split()[0]})")
import tomllib
from importlib.metadata import PackageNotFoundError, version
from re import match

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + [line for extra in sys.argv[2:] for line in project["optional-dependencies"][extra]]
# These are imported only where a recipe asks for them, and its check says so (rules_data.py). Tests ask for all.
later = () if sys.argv[2:] else ("torchao", "datasets", "matplotlib", "pyarrow", "safetensors", "wandb")
missing, found = [], {}
for line in wanted:
    try:
        found[line] = version(name := match(r"[\w.-]+", line)[0])
    except PackageNotFoundError:
        missing += [line] if name not in later else []
if not missing:  # "packaging" comes with the dependencies
    from packaging.requirements import Requirement

    missing = [f"{line} (has {has})" for line, has in found.items()
               if not Requirement(line).specifier.contains(has, prereleases=True)]
if missing:
    sys.exit(", ".join(missing))
PYTHON_END
}

setup_find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.14 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            if ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                setup_fail "$candidate cannot create virtual environments; on Debian or Ubuntu: apt-get install python3-venv"
                return 2
            fi
            echo "$candidate"
            return 0
        fi
    done
    setup_fail "no Python 3.11 to 3.14 found (tried python3, python3.11 to python3.14, python);" \
        "install one, or set PYTHON to an interpreter that has the packages of pyproject.toml"
}

# setup_phase "text" command...: prints one line; the command's output goes to the log.
setup_phase() {
    local text=$1 started=$SECONDS
    shift
    printf 'set-up: %s ...' "$text" >&2
    if ("$@") >>"$SETUP_VENV/setup.log" 2>&1; then # a subshell, so that the message of an interrupt is not redirected
        echo " $((SECONDS - started)) s" >&2
    else
        echo " failed" >&2
        return 1
    fi
}

setup_show_log() {
    tail -n 15 "$SETUP_VENV/setup.log" | sed 's/^/    /' >&2
    setup_fail "the full output is in .venv/setup.log; run the same command again to retry"
}

setup_pip() {
    # Wheels only: if there is none for this Python, pip fails at once instead of compiling Arrow for an hour.
    # pip compiles bytecode on one core; setup_compile uses all.
    "$SETUP_VENV/bin/python" -m pip install --no-input --disable-pip-version-check --no-compile \
        --only-binary=:all: --progress-bar=off "$@"
}

# Compiles bytecode now, or all processes of the first run would do it at once and print the packages' SyntaxWarnings.
# Files for other versions of Python do not compile, which is expected.
setup_compile() { "$SETUP_VENV/bin/python" -W ignore -m compileall -q -j 0 "$SETUP_VENV/lib" || true; }

# Prints pip's option for the PyTorch project's index of CPU wheels, if the index answers soon. The alarm also ends a
# DNS look-up that hangs.
setup_cpu_index() {
    local url=https://download.pytorch.org/whl/cpu
    if "$SETUP_VENV/bin/python" - "$url/torch/" 2>/dev/null <<'PYTHON_END'
import signal, sys, urllib.request

signal.alarm(4)
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=3)
PYTHON_END
    then
        echo "--extra-index-url=$url"
    fi
}

# Sets SETUP_BUILD to "gpu" or "cpu". --no-deps with a +cpu wheel: the lock file lists what it needs.
setup_install_torch() {
    local torch index
    torch=$(grep -o '^torch==[0-9.]*' "$ROOT/requirements.lock")
    SETUP_BUILD=cpu
    if setup_has_gpu; then
        SETUP_BUILD=gpu
        setup_phase "installing $torch with CUDA" setup_pip -c "$ROOT/requirements.lock" "$torch"
        return
    fi
    if [ "$(uname)" = Darwin ]; then
        setup_phase "installing $torch" setup_pip --no-deps "$torch"
        return
    fi
    index=$(setup_cpu_index)
    setup_phase "installing $torch+cpu" setup_pip --no-deps ${index:+"$index"} "$torch+cpu" && return
    grep -q 'No matching distribution found' "$SETUP_VENV/setup.log" || return 1
    setup_say "the CPU-only build of torch is not reachable; the default build installs several GB of CUDA libraries"
    setup_phase "installing $torch" setup_pip -c "$ROOT/requirements.lock" "$torch"
}

setup_verify() {
    local found
    if ! found=$("$SETUP_VENV/bin/python" -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())' \
        2>>"$SETUP_VENV/setup.log"); then
        setup_say "torch was installed but does not import:"
        setup_show_log
        return 1
    fi
    case "$SETUP_BUILD $found" in
        "cpu None False" | "gpu "*" True") ;;
        cpu*) setup_say "WARNING: torch is the CUDA ${found% *} build, but this machine has no NVIDIA GPU: it works, but it is large" ;;
        *) setup_say "WARNING: this machine has an NVIDIA GPU but torch cannot use it (CUDA ${found% *} build):" \
            "training will run on the CPU; is the driver recent enough?" ;;
    esac
}

setup_build() {
    local python started=$SECONDS
    if [ -e "$SETUP_VENV" ] && ! [ -e "$SETUP_VENV/setup.log" ]; then
        setup_fail "$SETUP_VENV exists but was not made by scripts/setup.sh;" \
            "remove it, or use it as it is by setting PYTHON=$SETUP_VENV/bin/python"
        return 2
    fi
    python=$(setup_find_python) || return
    setup_say "creating .venv from requirements.lock with $("$python" --version)"
    rm -rf "$SETUP_VENV" && mkdir "$SETUP_VENV" && : >"$SETUP_VENV/setup.log" || return 1
    if ! { setup_phase "creating the environment" "$python" -m venv "$SETUP_VENV" &&
        setup_install_torch &&
        setup_phase "installing the other packages" setup_pip --no-deps -r "$ROOT/requirements.lock" &&
        setup_phase "compiling them" setup_compile; }; then
        setup_show_log
        return 1
    fi
    setup_verify || return 1
    echo "$SETUP_BUILD $(setup_lock_sum)" >"$SETUP_STAMP"
    setup_say "ready after $((SECONDS - started)) s"
}

# Of two set-ups at once, the second waits and then finds the first one's stamp. macOS has no flock, so no such guard.
setup_build_once() (
    trap 'echo >&2; setup_say "interrupted; run the same command again"; exit 130' INT
    if command -v flock >/dev/null; then
        exec 9>"$ROOT/.venv.lock"
        flock -n 9 || { setup_say "waiting for another set-up of this checkout"; flock 9; }
        setup_is_current && exit 0
    fi
    setup_build
)

setup_main() {
    local missing extras=${SETUP_EXTRAS:-}
    if [ -n "${PYTHON:-}" ]; then
        case $PYTHON in
            /*) ;;
            */*) PYTHON=$PWD/$PYTHON ;; # it must survive a cd
        esac
        if ! command -v "$PYTHON" >/dev/null; then
            setup_fail "PYTHON=$PYTHON does not exist or cannot be executed"
        elif ! missing=$(setup_check "$PYTHON" ${extras:+"$extras"} 2>&1); then
            setup_fail "PYTHON=$PYTHON lacks: $missing. Install these there, or unset PYTHON to have .venv created."
        fi
        return
    fi
    setup_is_current || setup_build_once || return
    PYTHON=$SETUP_VENV/bin/python
}

setup_main
