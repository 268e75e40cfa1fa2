#!/bin/bash
# OpenWebText, length 1024, batch 512: ADLM and every baseline of the paper, one job each, after the text is prepared.
# "262B" is 1M steps by the paper's count (half of steps x batch x length); AR and A2R train half as many.
#   bash examples/slurm/owt.sh prepared/owt runs
set -euo pipefail
prepared=${1:?the prepared folder}
runs=${2:?the folder of all runs}
here=$(dirname "$0")
nodes=${NODES:-1}
for method in adlm mdlm sedd d3pm ar a2r; do
  sbatch --nodes="$nodes" --job-name="owt-$method" "$here/train.sbatch" "owt/$method" "$prepared" "$runs/owt-$method" \
    train.micro_batch=32
done
# The two-stage network without anchors: the paper's ablation of gamma.
sbatch --nodes="$nodes" --job-name=owt-gamma0 "$here/train.sbatch" owt/adlm "$prepared" "$runs/owt-gamma0" \
  anchor.gamma=0 train.micro_batch=32
# "524B": twice the steps.
for method in adlm mdlm; do
  sbatch --nodes="$nodes" --job-name="owt-$method-2m" "$here/train.sbatch" "owt/$method" "$prepared" \
    "$runs/owt-$method-2m" train.steps=2000000 train.micro_batch=32
done
