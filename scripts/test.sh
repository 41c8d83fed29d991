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

if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nFAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
