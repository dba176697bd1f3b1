#!/bin/sh
# The table of docs/benchmarks.md, "Transfers to host memory": run on one NVIDIA GPU, with the native extension.
#   sh benchmarks/transfers.sh rows.jsonl [model ...]
# Some fifteen minutes on an H200. Each model is one process; its steps are timed first, and its
# variants take turns.
# "compress" has plans that the link holds up, with and without the zeros of what they move.
# "transports" has both columns of `ffi` against `memory_kinds`: the same budgets, moved by either.
set -e
cd "$(dirname "$0")/.."
out=$1
shift
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
run() {
  model=$1 batch=$2 budgets=$3 policies=$4
  python3 benchmarks/run.py --model="$model" --batch="$batch" --budgets="$budgets" \
    --policies="$policies" --nocheckpoint --still --profile=80 --out="$out" \
    ${COMMIT:+--commit="$COMMIT"} ${LOCK:+--lock="$LOCK"}
}
for model in ${*:-vgg116 vgg16 resnet152 link compress transports cache}; do
  case $model in
    vgg116) run vgg116 32 0.33,0.2,0.15,0.1 auto,auto:recompute ;;
    vgg16) run vgg16 256 0.5,0.3 auto,auto:recompute ;;
    resnet152) run resnet152 128 0.35,0.25 auto,auto:recompute ;;
    link) run vgg116 32 0.2 auto:offload ;; # everything moves: as fast as the link
    compress) run vgg116 32 0.33,0.2 auto:offload,auto:offload+compress ;;
    transports)
      run vgg116 32 0.33,0.2 auto:offload:ffi,auto:offload:memory_kinds
      run vgg16 256 0.4 auto:offload:ffi,auto:offload:memory_kinds
      ;;
    cache) python3 benchmarks/cache.py --out="$out" ${COMMIT:+--commit="$COMMIT"} ${LOCK:+--lock="$LOCK"} ;;
    *) echo "no table row for $model" >&2; exit 2 ;;
  esac
done
