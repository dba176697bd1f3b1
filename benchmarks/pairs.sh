#!/bin/sh
# Twelve training steps at five budgets each, and what may be picked instead of the plan: policies
# "exact" and "recompute", whole and in sub-batches. Run on one NVIDIA GPU.
#   sh benchmarks/pairs.sh rows.jsonl [program ...]
# Each program is one process, whose ways take turns. LOCK names a file by which several of these share
# a GPU, COMPILE the seconds after which no further way is compiled. HAND=no leaves out what may be
# picked instead.
set -e
cd "$(dirname "$0")/.."
out=$1
shift
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
# OPTIONS and five budgets, the largest first
run() {
  options=$1 b1=$2 b2=$3 b3=$4 b4=$5 b5=$6
  ways=plain,$b1,$b2,$b3,$b4,$b5
  if [ "${HAND:-yes}" = yes ]; then
    ways=$ways,exact,exact*2,exact*4,exact*8,recompute@$b2,recompute@$b3,recompute@$b4,recompute@$b5
    ways=$ways,recompute@$b3*2,recompute@$b4*2,recompute@$b5*2,recompute@$b4*4,recompute@$b5*4
  fi
  # shellcheck disable=SC2086
  python3 benchmarks/training_steps.py $options --ways="$ways" --steps=6 --rounds=4 --out="$out" \
    --lock="$LOCK" --seconds="${COMPILE:-0}"
}
unrolled="--scanned=false --stacked=false"
all="resnet50 convnext unet resnet vit gpt lora decoder decoder_unrolled vit_unrolled vit_dropout"
for program in ${*:-$all gpt_unrolled}; do
  case $program in
    # what the state of these takes leaves no room for the smaller shares
    decoder) run "--model=decoder" 1.0 0.5 0.4 0.33 0.25 ;;
    decoder_unrolled) run "--model=decoder $unrolled" 1.0 0.75 0.6 0.5 0.42 ;;
    lora) run "--model=lora" 1.0 0.5 0.33 0.25 0.2 ;;
    unet) run "--model=unet" 1.0 0.9 0.8 0.7 0.6 ;;
    gpt | resnet | resnet50 | convnext) run "--model=$program" 1.0 0.5 0.33 0.25 0.2 ;;
    gpt_unrolled) run "--model=gpt $unrolled" 1.0 0.5 0.33 0.25 0.2 ;;
    vit) run "--model=vit --batch=64" 1.0 0.5 0.33 0.25 0.2 ;;
    vit_unrolled) run "--model=vit --batch=64 $unrolled" 1.0 0.5 0.33 0.25 0.2 ;;
    vit_dropout) run "--model=vit_dropout $unrolled" 1.0 0.5 0.33 0.25 0.2 ;;
    *) echo "no program $program" >&2; exit 2 ;;
  esac
done
