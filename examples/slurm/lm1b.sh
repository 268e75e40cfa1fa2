#!/bin/bash
# LM1B, length 128, batch 512: ADLM and every baseline of the paper, one job each, after the text is prepared.
# "33B" is 1M steps by the paper's count, "65B" 2M; AR and A2R train half as many.
#   bash examples/slurm/lm1b.sh prepared/lm1b runs
set -euo pipefail
prepared=${1:?the prepared folder}
runs=${2:?the folder of all runs}
here=$(dirname "$0")
for method in adlm mdlm sedd d3pm ar a2r; do
  sbatch --job-name="lm1b-$method" "$here/train.sbatch" "lm1b/$method" "$prepared" "$runs/lm1b-$method"
done
for method in adlm mdlm; do
  sbatch --job-name="lm1b-$method-2m" "$here/train.sbatch" "lm1b/$method" "$prepared" "$runs/lm1b-$method-2m" \
    train.steps=2000000
done
sbatch --job-name=lm1b-ar-1m "$here/train.sbatch" lm1b/ar "$prepared" "$runs/lm1b-ar-1m" train.steps=1000000
