#!/bin/sh
# The tables of docs/benchmarks.md, "Convolutions": run on one NVIDIA GPU, with the native extension.
#   sh benchmarks/convolutions.sh rows.jsonl layers.jsonl [alexnet seven stem 3d vgg16 vgg16bf16 ...]
# TIMING=60 bounds the seconds in which cuDNN's plans are timed, for each entry; PROFILE=40 times the
# models' other steps, too, for as long; SECONDS_EACH=200 ends a model's rows by then.
set -e
TIMING=${TIMING:-240} PROFILE=${PROFILE:-0}
cd "$(dirname "$0")/.."
out=$1 layers=$2
shift 2
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
commit() { echo ${COMMIT:+--commit="$COMMIT"}; }
layer() {
  # shellcheck disable=SC2046  # options are words
  python3 benchmarks/convolutions.py --layers="$1" --batch="$2" --limits="$3" --dtype="$4" \
    --seconds="$TIMING" --out="$layers" $(commit)
}
model() {
  # shellcheck disable=SC2046
  python3 benchmarks/run.py --model="$1" --batch="$2" --dtype="$3" --precision="$4" --budgets="$5" \
    --policies=auto:recompute,auto:recompute+workspace --nocheckpoint --noexact --conv="$TIMING" \
    --profile="$PROFILE" --seconds="${SECONDS_EACH:-0}" --rounds=5 --out="$out" $(commit) \
    ${LOCK:+--lock="$LOCK"}
}
for each in ${*:-alexnet seven stem 3d vgg16 vgg16bf16 resnet18 resnet50}; do
  case $each in
    alexnet) layer alexnet 256 64MiB,512MiB,none float32 ;;
    seven) layer seven 256 512MiB,none float32 ;;
    stem) layer stem 256 20MiB,none float32; layer stem 256 20MiB,none bfloat16 ;;
    3d) layer 3d 16 64MiB,none float32 ;;
    vgg16) model vgg16 256 float32 highest 0.5,0.4,12GiB ;;
    vgg16bf16) model vgg16 256 bfloat16 "" 0.5,0.3 ;;
    resnet18) model resnet18 128 float32 highest 0.5 ;;
    resnet50) model resnet50 64 float32 highest 0.5 ;;
    vgg16tf32) model vgg16 256 float32 "" 0.5 ;;
    resnet50tf32) model resnet50 64 float32 "" 0.5 ;;
    resnet50bf16) model resnet50 256 bfloat16 "" 0.5,0.35 ;;
    resnet152bf16) model resnet152 128 bfloat16 "" 0.35,0.25 ;;
    googlenetbf16) model googlenet 128 bfloat16 "" 0.35 ;;
    alexnetbf16) model alexnet 256 bfloat16 "" 0.6 ;;
    *) echo "no table row for $each" >&2; exit 2 ;;
  esac
done
