#!/bin/sh
# The table of docs/benchmarks.md, "Sub-batches": run on one NVIDIA GPU, with the native extension.
#   sh benchmarks/sub_batches.sh rows.jsonl [model ...]
# Some ten minutes on an H200. Each model is one process; its steps are timed first, and its variants
# take turns.
set -e
cd "$(dirname "$0")/.."
out=$1
shift
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
run() {
  model=$1 batch=$2 budgets=$3 policies=$4
  shift 4
  python3 benchmarks/run.py --model="$model" --batch="$batch" --budgets="$budgets" \
    --policies="$policies" --nocheckpoint --noexact --profile="${TIMING:-80}" --rounds=5 \
    --out="$out" ${COMMIT:+--commit="$COMMIT"} ${LOCK:+--lock="$LOCK"} "$@"
}
split=auto:recompute+sub_batches
for model in ${*:-vgg16 vgg16fp32 vgg101 gpt}; do
  case $model in
    vgg16) run vgg16 256 0.2 auto,$split,auto:recompute ;;
    vgg16fp32) run vgg16 256 12GiB $split --dtype=float32 --precision=highest ;;
    vgg101) run vgg101 128 2GiB $split ;;
    gpt) run gpt12w768 32 0.25 auto,$split --optimizer=adamw ;;
    *) echo "no table row for $model" >&2; exit 2 ;;
  esac
done
