#!/usr/bin/env bash
# Everything a change must pass: format, lint, types, import rules, shell syntax, tests.
#
#   bash scripts/test.sh [pytest arguments]
#
# Runs every check even after one has failed, names the failed ones at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --dev || exit 1
export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

failed=""
check() {
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed="$failed${failed:+, }$name"
    printf '== %s: %d s\n' "$name" $((SECONDS - started))
}

shell_syntax() {
    local file status=0
    for file in scripts/*.sh scripts/*/*.sh .ci/run; do bash -n "$file" || status=1; done
    return "$status"
}

check "format (ruff format)" ruff format --check .
check "lint (ruff check)" ruff check .
check "types (mypy)" mypy
check "import rules (import-linter)" lint-imports
check "shell syntax (bash -n)" shell_syntax
check "tests (pytest)" python -m pytest --cov --cov-report=term --durations=20 \
    --numprocesses=2 --dist=loadfile "$@"

if [ -n "$failed" ]; then
    printf '\nFAILED: %s\n' "$failed"
    exit 1
fi
printf '\nAll checks passed in %d s\n' "$SECONDS"
