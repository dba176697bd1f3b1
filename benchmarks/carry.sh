#!/bin/sh
# Convolutions that carry what stands around them, on one NVIDIA GPU: kernels of ResNet-50's 1×1 shapes,
# then its steps with and without the technique. In float16 cuDNN's convolutions are timed first. In
# bfloat16 then the steps of the other networks whose plans use it; AlexNet runs whole at 65 %.
#   sh benchmarks/carry.sh kernels.jsonl steps.jsonl [bfloat16 float16]
set -e
cd "$(dirname "$0")/.."
kernels=$1 steps=$2
shift 2
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
for dtype in ${*:-bfloat16 float16}; do
  python3 benchmarks/products.py --dtype="$dtype" --out="$kernels"
  conv=0
  [ "$dtype" = float16 ] && conv=150
  python3 benchmarks/run.py --model=resnet50 --batch=256 --dtype="$dtype" --budgets=1.0,0.5,0.33 \
    --policies=auto:order+recompute,auto:order+recompute+carry --conv=$conv --conv_sizes=undivided \
    --nocheckpoint --rounds=5 --out="$steps"
  [ "$dtype" = float16 ] && continue
  for each in googlenet:128:1.0,0.5 inception4:32:1.0,0.5 alexnet:256:0.65; do
    network=${each%%:*} rest=${each#*:}
    python3 benchmarks/run.py --model="$network" --batch="${rest%%:*}" --budgets="${rest#*:}" \
      --policies=auto:order+recompute,auto:order+recompute+carry --nocheckpoint --noexact \
      --rounds=7 --steps=12 --out="$steps"
  done
done
