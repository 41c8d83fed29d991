#!/usr/bin/env bash
# What must pass before a change lands. Further arguments go to pytest, for example: scripts/test.sh -k decoder
#
#   scripts/test.sh                      lint, format, types, and every test that starts, compiles and trains nothing
#   scripts/test.sh --changed [COMMIT]   and the slow tests that the changes since COMMIT can reach, nearest first
#                                        (default: what is not committed, or else the last commit)
#   scripts/test.sh --all                and all other tests
set -uo pipefail
case ${1-} in -h | --help) sed -n '/^#!/d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

SETUP_EXTRAS=dev
# shellcheck source=scripts/setup.sh
. scripts/setup.sh || exit

tier=(-m "not slow and not exhaustive")
case ${1-} in
    --all) tier=() && shift ;;
    --changed)
        tier=(--changed=) && shift
        if git rev-parse --verify --quiet "${1:-/}^{commit}" >/dev/null; then
            tier=(--changed="$1") && shift
        fi
        ;;
esac

unset PYTHONDONTWRITEBYTECODE # every process that a test starts would compile all modules again

failed=()
phase() {
    printf '\n== %s\n' "$1"
    "$PYTHON" -m "${@:2}" || failed+=("$1")
}

phase "lint (ruff check)" ruff check .
phase "format (ruff format --check)" ruff format --check .
types=$(mktemp) && trap 'rm -f "$types"' EXIT
"$PYTHON" -m mypy >"$types" 2>&1 & # beside the tests, which mostly wait for the disk while they are collected
# By file, because tests of one file share runs; tests/conftest.py puts the long files first.
phase "tests (pytest)" pytest -n auto --dist loadfile --no-loadscope-reorder ${tier+"${tier[@]}"} "$@"
printf '\n== types (mypy)\n'
wait $! || failed+=("types (mypy)")
cat "$types"

# Tests start many real processes, which other work on a server that tests changes can starve. There, a few that failed
# run once more, alone, and are named; whatever fails again has failed.
repeat_at_most=3 unstable=()
if [ -n "${CI:-}" ] && [[ ${failed[*]-} == *"tests (pytest)"* ]]; then
    # Nothing where pytest itself broke down: an empty name would mean all tests.
    mapfile -t again < <("$PYTHON" -c 'import json
for test in json.load(open(".pytest_cache/v/cache/lastfailed")): print(test)')
    if [ "${#again[@]}" -ge 1 ] && [ "${#again[@]}" -le "$repeat_at_most" ]; then
        printf '\n== once more, alone: %s that failed\n' "${#again[@]}"
        if "$PYTHON" -m pytest -v "${again[@]}"; then
            unstable=("${again[@]}")
            mapfile -t failed < <(printf '%s\n' "${failed[@]}" | grep -v pytest)
        fi
    fi
fi

[ "${#unstable[@]}" -eq 0 ] || printf '\nUNSTABLE: failed, and passed alone: %s\n' "${unstable[@]}" >&2
if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nFAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nPASSED in %s s\n' "$SECONDS"
