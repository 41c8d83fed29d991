#!/usr/bin/env bash
# Trains a recipe on this machine, or on this node of several.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/run.sh RECIPE [--section.field value ...]   train
       scripts/run.sh RECIPE --check                       print the resolved recipe, or everything wrong with it
       scripts/run.sh RECIPE --prove                       compare these processes with one process
       scripts/run.sh RECIPE --plan                        predict memory, time and cost on any number of GPUs
       scripts/run.sh RECIPE --help                        list every field

RECIPE is searched for in the current directory, then in the checkout; the first one to try is configs/smollm3_debug.toml,
on a GPU configs/smollm3_debug_gpu.toml. Environment variables:
  NPROC            processes on this node (default: one per GPU; 2 on a machine without GPUs)
  PYTHON           interpreter to use, with its packages as they are, instead of .venv
  OMP_NUM_THREADS, TORCHINDUCTOR_COMPILE_THREADS   threads and compiling processes of each (default: cores / NPROC)
  HOSTFILE         for several nodes, with the same command on each: a file with one node's name or address per line,
                   the same on all nodes; or, instead of it,
  NNODES, NODE_RANK, MASTER_ADDR   the number of nodes, the index of this one (from 0), and the address of node 0
  MASTER_PORT      a free port on node 0 (default 29500)
                   In a PyTorchJob, these and NPROC default to the pod's PET_ variables.
  RESTARTS         how many times to restart from the newest checkpoint after a crash or a hang (default 0); on all nodes
--check checks the recipe for these processes; without NPROC, one that names its hardware for any number of them. Under
SLURM, use scripts/slurm.sbatch.
END
}

installed=${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}
case "$#${1-}" in
    1-h) usage && exit ;;
    1--help) command -v "$installed" >/dev/null || { usage && exit; } ;; # which installs nothing
esac

# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" || exit

# The current directory stays the caller's, so that a relative --run.output is relative to it.
if [ "$#" -gt 0 ] && [ ! -e "$1" ] && [ -e "$ROOT/$1" ]; then
    set -- "$ROOT/$1" "${@:2}"
fi

check=
case " $* " in
    "  " | *" --help "* | *" -h "* | *" --plan "* | *" --show "*) exec "$PYTHON" "$ROOT/train.py" "$@" ;;
    *" --check "*) check=1 ;;
esac

# Sets NNODES, NODE_RANK and MASTER_ADDR from HOSTFILE.
read_hosts() {
    local hosts own host rank=0 words
    hosts=$(sed 's/#.*//' "$HOSTFILE" | awk 'NF { print $1 }') || return
    own=" localhost 127.0.0.1 $(hostname) $(hostname -s 2>/dev/null) $(hostname -f 2>/dev/null) $(hostname -I 2>/dev/null) "
    words=$(echo "$hosts" | tr '\n' ' ')
    [ -n "$hosts" ] || { echo "HOSTFILE=$HOSTFILE does not name a node" >&2; return 2; }
    NNODES=$(echo "$hosts" | wc -l)
    MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}
    [ -z "${NODE_RANK:-}" ] || return 0
    for host in $hosts; do
        case $own in *" $host "*) NODE_RANK=$rank && return 0 ;; esac
        rank=$((rank + 1))
    done
    echo "HOSTFILE=$HOSTFILE names ${words}but not this node:$own" >&2
    echo "add one of this node's names to it, or set NODE_RANK on each node" >&2
    return 2
}
if [ -n "${HOSTFILE:-}" ]; then
    read_hosts || exit 2
fi
# A PyTorchJob of Kubernetes says it in torchrun's own variables, which would override what torchrun is told here.
NNODES=${NNODES:-${PET_NNODES:-}}
NODE_RANK=${NODE_RANK:-${PET_NODE_RANK:-}}
MASTER_ADDR=${MASTER_ADDR:-${PET_MASTER_ADDR:-}}
MASTER_PORT=${MASTER_PORT:-${PET_MASTER_PORT:-}}
[ -n "${NPROC:-}" ] || ! [ "${PET_NPROC_PER_NODE:-}" -gt 0 ] 2>/dev/null || NPROC=$PET_NPROC_PER_NODE
unset "${!PET_@}"
if [ -z "$NNODES" ]; then
    NNODES=1
    if [ "${WORLD_SIZE:-1}" != 1 ]; then
        echo "WORLD_SIZE=$WORLD_SIZE is set, but not NNODES: set NNODES, NODE_RANK and MASTER_ADDR, or NNODES=1" >&2
        exit 2
    fi
fi
if ! [ "$NNODES" -gt 0 ] 2>/dev/null; then
    echo "NNODES=$NNODES: must be a number of nodes, 1 or more (where NNODES is not set, PET_NNODES says it)" >&2
    exit 2
fi
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
    if [ -n "$check" ] && [ "$NNODES" -eq 1 ]; then
        PROCESSES_HERE=$NPROC exec "$PYTHON" "$ROOT/train.py" "$@"
    fi
fi
if ! [ "$NPROC" -gt 0 ] 2>/dev/null; then
    echo "NPROC=$NPROC: must be a number of processes, 1 or more" >&2
    exit 2
fi
NPROC=$((10#${NPROC#+})) # 08 is no octal number

cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
share=$((cores > NPROC ? cores / NPROC : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$share}
# Else torch starts up to 32 processes that compile for every GPU, each with memory of its own.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$((share < 32 ? share : 32))}

# A bad recipe fails here, once and within a second, instead of in every process after torch is loaded.
checked() {
    case "$check $* " in " "*" --prove "*) return ;; esac # needs neither the mesh's processes nor the text
    "$PYTHON" "$ROOT/train.py" "$@" --check --processes "$((NPROC * NNODES))" --nodes "$NNODES"
}
if [ -n "$check" ]; then
    case " $* " in
        *" --processes"[\ =]*) exec "$PYTHON" "$ROOT/train.py" "$@" ;;
    esac
    checked "$@"
    exit
fi
resolved=$(checked "$@") || {
    code=$?
    # After a fault that may pass, the supervisor tries again.
    [ "$code" = 71 ] && [ "${RESTARTS:-0}" != 0 ] || exit "$code"
}

# The processes, and their restarts, must agree on a name that was free when there was none of them.
case "${SLURM_JOB_ID:+job} $* " in
    " "*" --run.name"[\ =]"auto "*)
        [ "$NNODES" -eq 1 ] || { echo "--run.name auto: several nodes need a name; write one" >&2 && exit 2; }
        name=$(sed -n '/^name = "/{s///;s/"$//p;q}' <<<"$resolved") words=() before=
        for word; do
            [ "$before$word" != --run.nameauto ] || word=${name:-auto} # --prove needs no name
            words+=("${word/#--run.name=auto/--run.name=${name:-auto}}") before=$word
        done
        [ -z "$name" ] || echo "run: --run.name $name; that resumes it" >&2
        set -- "${words[@]}"
        ;;
esac

nodes=(--standalone) # on the loopback network only, see recipes/cluster/store.py
if [ "$NNODES" -gt 1 ]; then
    for name in NODE_RANK MASTER_ADDR; do
        if [ -z "${!name:-}" ]; then
            echo "NNODES=$NNODES: set NODE_RANK (0 to NNODES - 1) and MASTER_ADDR (the address of node 0), too" >&2
            exit 2
        fi
    done
    if ! [ "$NODE_RANK" -ge 0 ] 2>/dev/null || [ "$NODE_RANK" -ge "$NNODES" ]; then
        echo "NODE_RANK=$NODE_RANK: must be a number from 0 to $((NNODES - 1)), as NNODES=$NNODES" >&2
        exit 2
    fi
    # With numbers, so that ranks follow the scheduler's order of the nodes. torchrun's c10d rendezvous would sort them
    # by host name, "node10" before "node9".
    nodes=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi

launch=("$PYTHON" "$ROOT/scripts/launch.py" "${nodes[@]}" --nproc-per-node="$NPROC" "$ROOT/train.py" "$@")
case "${RESTARTS:-0} $* " in
    "0 "* | *" --prove "*) exec "${launch[@]}" ;;
esac
exec "$PYTHON" "$ROOT/scripts/supervise.py" "${launch[@]}"
