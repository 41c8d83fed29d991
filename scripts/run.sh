#!/usr/bin/env bash
# Trains a recipe on this machine, or on this node of several.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/run.sh RECIPE [--section.field value ...]   train
       scripts/run.sh RECIPE --check                       print the resolved recipe, or everything wrong with it
       scripts/run.sh RECIPE --help                        list every field

RECIPE is looked for in the current directory, then in the checkout. Environment:
  NPROC            processes on this node (default: one per GPU; 2 on a CPU machine)
  PYTHON           use this interpreter as it is instead of .venv
  OMP_NUM_THREADS  threads per process (default: cores / NPROC)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several nodes: the same command on each, NODE_RANK from 0;
                   MASTER_ADDR is node 0's address, MASTER_PORT defaults to 29500
END
}

if [ "$#" -eq 1 ] && [ "$1" = -h ]; then
    usage
    exit 0
fi

# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" || exit

# The current directory stays the caller's: a relative --run.output means what it says there.
if [ "$#" -gt 0 ] && [ ! -e "$1" ] && [ -e "$ROOT/$1" ]; then
    set -- "$ROOT/$1" "${@:2}"
fi

case " $* " in
    "  " | *" --help "* | *" -h "* | *" --check "*) exec "$PYTHON" "$ROOT/train.py" "$@" ;;
esac

gpus() {
    case ${CUDA_VISIBLE_DEVICES-unset} in
        unset) nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true ;;
        "" | -1) echo 0 ;;
        *) echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c . ;;
    esac
}
if [ -z "${NPROC:-}" ]; then
    NPROC=$(gpus)
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
if ! [ "$NPROC" -gt 0 ] 2>/dev/null; then
    echo "NPROC=$NPROC: must be a number of processes, 1 or more" >&2
    exit 2
fi

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi
export OMP_NUM_THREADS

nodes=(--standalone)
if [ "${NNODES:-1}" -gt 1 ]; then
    : "${NODE_RANK:?several nodes need NODE_RANK, 0 to NNODES - 1}"
    : "${MASTER_ADDR:?several nodes need MASTER_ADDR, the address of node 0}"
    nodes=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi

# A bad recipe fails here, in a second and once, instead of in every process after torch is loaded.
"$PYTHON" "$ROOT/train.py" "$@" --check --processes "$((NPROC * ${NNODES:-1}))" >/dev/null

exec "$PYTHON" "$ROOT/scripts/launch.py" "${nodes[@]}" --nproc-per-node="$NPROC" "$ROOT/train.py" "$@"
