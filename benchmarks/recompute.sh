#!/bin/sh
# The table of docs/benchmarks.md, "Recomputation": run on one NVIDIA GPU.
#   sh benchmarks/recompute.sh rows.jsonl [model ...]
# Some ten minutes on an H200. Each model is one process; its variants take turns in it.
set -e
cd "$(dirname "$0")/.."
out=$1
shift
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
run() {
  model=$1 batch=$2 budgets=$3
  python3 benchmarks/run.py --model="$model" --batch="$batch" --budgets="$budgets" --out="$out" \
    ${COMMIT:+--commit="$COMMIT"} ${LOCK:+--lock="$LOCK"}
}
for model in ${*:-vgg116 vgg16 resnet50 resnet152}; do
  case $model in
    vgg116) run vgg116 32 0.5,0.33,0.2 ;;
    vgg16) run vgg16 256 0.65,0.5,0.3 ;;
    resnet50) run resnet50 256 0.5,0.4 ;;
    resnet152) run resnet152 128 0.5,0.25 ;;
    *) echo "no table row for $model" >&2; exit 2 ;;
  esac
done
