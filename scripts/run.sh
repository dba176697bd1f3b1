#!/bin/sh
# Sets up .venv in this checkout and trains a ResNet in half of the memory that plain JAX needs.
# Arguments go to `vmem-jax train`: sh scripts/run.sh --model resnet18 --optimizer sgd --steps 10
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
# Without an NVIDIA driver the handlers for CPUs are enough, which take half of the time to build.
command -v nvidia-smi >/dev/null || export VMEM_JAX_CUDA="${VMEM_JAX_CUDA:-OFF}"
make_environment "${VENV:-.venv}" --editable ".[models]"
exec "${VENV:-.venv}/bin/vmem-jax" train "$@"
