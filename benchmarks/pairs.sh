#!/bin/sh
# Thirteen training steps at five budgets each, and what may be picked instead of the plan: policies
# "exact" and "recompute", whole and in sub-batches. Run on one NVIDIA GPU.
#   sh benchmarks/pairs.sh rows.jsonl [program ...]
# Each program is one process, whose ways take turns. LOCK names a file by which several of these share
# a GPU, COMPILE the seconds after which no further way is compiled. HAND=no leaves out what may be
# picked instead, HAND=parts all but policy "exact" in sub-batches, HAND=only the five budgets.
set -e
cd "$(dirname "$0")/.."
out=$1
shift
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
# HAND OPTIONS and five budgets, the largest first
run() {
  hand=$1 options=$2 b1=$3 b2=$4 b3=$5 b4=$6 b5=$7
  ways=plain,$b1,$b2,$b3,$b4,$b5
  parts=exact*2,exact*4,exact*8
  again=recompute@$b2,recompute@$b3,recompute@$b4,recompute@$b5
  both=recompute@$b3*2,recompute@$b4*2,recompute@$b5*2,recompute@$b5*4
  case ${HAND:-$hand} in
    all) ways=$ways,exact,$again,$parts,$both ;;
    parts) ways=$ways,exact,$parts ;;
    whole) ways=$ways,exact,$again ;;
    exact) ways=$ways,exact ;;
    only) ways=plain,exact,$parts,$again,$both ;;
  esac
  # shellcheck disable=SC2086
  python3 benchmarks/training_steps.py $options --ways="$ways" --steps=6 --rounds=4 --out="$out" \
    --lock="$LOCK" --seconds="${COMPILE:-0}"
}
unrolled="--scanned=false --stacked=false"
all="resnet50 convnext unet resnet vit gpt lora decoder decoder_unrolled vit_unrolled vit_dropout vit_flax"
for program in ${*:-$all gpt_unrolled}; do
  case $program in
    # what a loop stacks is not policy "recompute"'s to choose; batch norms need the whole batch.
    # What the state of some takes leaves no room for the smaller shares.
    decoder) run parts "--model=decoder" 1.0 0.5 0.4 0.33 0.25 ;;
    lora) run parts "--model=lora" 1.0 0.5 0.33 0.25 0.2 ;;
    gpt) run parts "--model=gpt" 1.0 0.5 0.33 0.25 0.2 ;;
    vit) run parts "--model=vit --batch=64" 1.0 0.5 0.33 0.25 0.2 ;;
    resnet) run exact "--model=resnet" 1.0 0.5 0.33 0.25 0.2 ;;
    resnet50) run whole "--model=resnet50" 1.0 0.5 0.33 0.25 0.2 ;;
    convnext) run all "--model=convnext" 1.0 0.5 0.33 0.25 0.2 ;;
    unet) run all "--model=unet" 1.0 0.9 0.8 0.7 0.6 ;;
    decoder_unrolled) run all "--model=decoder $unrolled" 1.0 0.75 0.6 0.5 0.42 ;;
    gpt_unrolled) run all "--model=gpt $unrolled" 1.0 0.5 0.33 0.25 0.2 ;;
    vit_unrolled) run all "--model=vit --batch=64 $unrolled" 1.0 0.5 0.33 0.25 0.2 ;;
    vit_dropout) run all "--model=vit_dropout $unrolled" 1.0 0.5 0.33 0.25 0.2 ;;
    vit_flax) run all "--model=vit_flax" 1.0 0.5 0.33 0.25 0.2 ;;
    *) echo "no program $program" >&2; exit 2 ;;
  esac
done
