#!/usr/bin/env bash
# Everything that must pass before a change lands; arguments go to pytest, for example: scripts/test.sh -k decoder
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

SETUP_EXTRAS=dev
# shellcheck source=scripts/setup.sh
. scripts/setup.sh || exit

failed=()
phase() {
    printf '\n== %s\n' "$1"
    "$PYTHON" -m "${@:2}" || failed+=("$1")
}

phase "lint (ruff check)" ruff check .
phase "format (ruff format --check)" ruff format --check .
phase "types (mypy)" mypy
# Last, because it takes longest and its closing line is the one to read.
# By file, because tests of one file share runs; in the order of tests/conftest.py, which puts the slow files first.
phase "tests (pytest)" pytest -n auto --dist loadfile --no-loadscope-reorder "$@"

# Tests start many real processes, which other work on a server that tests changes can starve. There, a few that failed
# run once more, alone, and are named; whatever fails again has failed.
repeat_at_most=3
if [ -n "${CI:-}" ] && [[ ${failed[*]-} == *"tests (pytest)" ]]; then
    count=$("$PYTHON" -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))') || count=0
    if [ "$count" -ge 1 ] && [ "$count" -le "$repeat_at_most" ]; then
        printf '\n== once more, alone: %s that failed\n' "$count"
        if "$PYTHON" -m pytest -v --last-failed --last-failed-no-failures none "$@"; then
            printf '\nUNSTABLE: the tests above failed, and passed alone\n' >&2
            failed=("${failed[@]:0:${#failed[@]}-1}")
        fi
    fi
fi

if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nFAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
