#!/bin/sh
# Whether `auto` chose what a sweep by hand finds fastest. Describes the ways of each step, which needs no
# GPU, then times those of `choices.py --time` on one NVIDIA GPU, with the plans of the first part.
#   sh benchmarks/choices.sh described.jsonl rows.jsonl [model ...]
# Some ten minutes a model to describe, on two cores, and two to time. DESCRIBE=1 does the first part alone.
set -e
cd "$(dirname "$0")/.."
described=$1 rows=$2
shift 2
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
plans=$described.plans
for model in ${*:-decoder gru lstm vit_dropout gpt lora segmenter mobilenet2 wavenet t5 googlenet unet}; do
  next() { JAX_PLATFORMS=cpu python3 benchmarks/choices.py --described="$described" --model="$model" "$@"; }
  while ways=$(next) && [ -n "$ways" ]; do
    JAX_PLATFORMS=cpu python3 benchmarks/training_steps.py --target="${CARD:-h200}" --model="$model" \
      --ways="$ways" --plans="$plans" --out="$described"
  done
  [ -n "$DESCRIBE" ] || python3 benchmarks/training_steps.py --model="$model" --ways="$(next --time)" \
    --plans="$plans" --out="$rows"
done
