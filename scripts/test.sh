#!/bin/sh
# Sets up .venv-tests in this checkout and runs the tests, two at a time.
# Arguments go to pytest: sh scripts/test.sh tests/test_cli.py -k plan
# PYTHON chooses the Python, VENV the directory, REQUIREMENTS what else to install ("jax==0.11.2").
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
# shellcheck disable=SC2086  # requirements are words
make_environment "${VENV:-.venv-tests}" --editable ".[models]" --group tests ${REQUIREMENTS:-}
exec "${VENV:-.venv-tests}/bin/python" -m pytest -n 2 --dist worksteal "$@"
