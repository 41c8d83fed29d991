#!/usr/bin/env bash
# The environment and the checkout on a node's own disk. scripts/slurm.py sends this text to all nodes of a job; by hand,
# with the files that `scripts/slurm.py --pack` has made:
#   scripts/unpack.sh unpack FOLDER KEY environment-KEY.tar checkout-KEY.tar && . FOLDER/env.sh
# unpack makes FOLDER, or leaves it as it is if it already has KEY; prepare sees whether there is room for it, remove
# deletes it. Only what is needed before there is Python: it runs on 2,048 nodes at once, and reads no shared file but
# the two of the pack.
set -euo pipefail
case ${1-} in -h | --help) sed -n '/^#!/d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "$0" && exit ;; esac

node=${SLURMD_NODENAME:-$(hostname)}
# To recipes/cluster/slurm.py, which counts the nodes.
state() { [ -z "${SLURM_JOB_ID:-}" ] || echo "slurm-state: $node $1" >&2; }
say() {
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        echo "slurm-refusal: $node $*" >&2
    else
        echo "unpack: $*" >&2
    fi
}
refuse() {
    say "$@"
    state 2
    exit 2
}
has() { [ "$(cat "$1/KEY" 2>/dev/null)" = "$2" ]; }

# prepare FOLDER KEY BYTES JOBS: BYTES are needed; JOBS are the user's, with a comma around each.
prepare() {
    local folder=$1 key=$2 bytes=$3 jobs=$4 above name other free
    above=$(dirname "$folder")
    [ -d "$above" ] || refuse "PACK=$above is not a folder there; name one on its own disk"
    [ -w "$above" ] || refuse "PACK=$above cannot be written there; name a folder of yours on its own disk"
    # What a node left that lost power, or was killed while it deleted. A job younger than an hour may not be in JOBS.
    if [ -n "$jobs" ]; then
        for other in "$above"/shardwright-job-*; do
            name=${other##*-}
            case $name$jobs in *[!0-9,]* | *",$name,"*) continue ;; esac
            [ -O "$other" ] && [ -n "$(find "$other" -maxdepth 0 -mmin +60)" ] || continue
            say "deletes $other, which an ended job has left"
            rm -rf "$other"
        done
    fi
    if has "$folder" "$key"; then
        state packed
        return
    fi
    rm -rf "$folder"
    free=$(df -Pk "$above" | awk 'NR == 2 { print $4 }')
    if [ "$free" -lt "$((bytes / 1024))" ]; then
        refuse "PACK=$above has $((free / 1024)) MB free, and $((bytes / 1024 / 1024)) MB are needed; free some, or" \
            "exclude the node"
    fi
    (umask 077 && mkdir -p "$folder") || refuse "$folder cannot be made"
    : >"$folder/node-$node"
    state ready
}

# alone FOLDER: whether no other node has it.
alone() {
    local other
    for other in "$1"/node-*; do
        [ ! -e "$other" ] || [ "$other" = "$1/node-$node" ] ||
            refuse "PACK=$(dirname "$1") is one folder on several nodes; name one on each node's own disk"
    done
    state ready
}

# unpack FOLDER KEY FILE...: the files are deleted afterwards if they are in FOLDER.
unpack() {
    local folder=$1 key=$2 file config lib python
    shift 2
    if has "$folder" "$key"; then
        state packed
        return
    fi
    trap 'rm -rf "$folder"; state 143; exit 143' TERM
    trap 'rm -rf "$folder"; state 138; exit 138' USR1
    mkdir -p "$folder"
    alone "$folder"
    for file in "$@"; do
        if ! tar -x -C "$folder" -f "$file"; then
            rm -rf "$folder"
            refuse "$file could not be unpacked into $folder, see the line above"
        fi
        [ "${file%/*}" != "$folder" ] || rm "$file"
    done
    if [ -e "$folder/venv/pyvenv.cfg" ]; then
        config=$(<"$folder/venv/pyvenv.cfg")
        printf '%s\n' "${config//@HERE@/$folder}" >"$folder/venv/pyvenv.cfg"
        python=$folder/venv/bin/python
    else
        python=$(echo "$folder"/python/bin/python3*)
    fi
    # Some interpreters name the folder of their own library, which is on the shared disk.
    mkdir "$folder/library"
    for lib in "$folder"/python/lib/libpython3*.so*; do
        [ ! -e "$lib" ] || ln -s "../python/lib/${lib##*/}" "$folder/library/"
    done
    # shellcheck disable=SC2016
    printf 'export PYTHON=%q LD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\n' "$python" "$folder/library" \
        >"$folder/env.sh"
    # shellcheck disable=SC1091
    if ! (. "$folder/env.sh" && "$PYTHON" -c 'import sys; sys.exit(not sys.prefix.startswith(sys.argv[1]))' "$folder"); then
        rm -rf "$folder"
        refuse "the Python unpacked into $folder does not start, see the line above; is it mounted noexec?"
    fi
    echo "$key" >"$folder/KEY" # last: what is unpacked in part has none
    state packed
}

# remove FOLDER
remove() { rm -rf "$1"; }

"$@"
