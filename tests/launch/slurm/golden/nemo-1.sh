#!/bin/bash
# batchwright: launch 1 of 5, 8 nodes × 8 ranks, samples 0 to 5,714,944
#SBATCH --job-name="gpt3 5b"
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --comment=batchwright:dry-run:chain:0
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --qos=high
#SBATCH --time=24:00:00
#SBATCH --gres=gpu:8
#SBATCH --constraint=a100|h100
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue
#SBATCH --output=/dev/null
#SBATCH --chdir=/

bw_log='/runs/gpt3 5b/logs/launch-1.log'
mkdir -p -- "${bw_log%/*}" && exec >>"$bw_log" 2>&1 </dev/null || exit 4
cd -- '/data/my code' || exit 4
bw_job=(PYTHON -P -m batchwright.launch.slurm.job '/runs/gpt3 5b' chain 0)

bw_failed() { export BATCHWRIGHT_PROLOGUE_FAILED="$1 $2"; exec "${bw_job[@]}"; }
module load cuda  # the site's
bw_code=$?; [ "$bw_code" = 0 ] || bw_failed 1 "$bw_code"
export NCCL_DEBUG="WARN"
bw_code=$?; [ "$bw_code" = 0 ] || bw_failed 2 "$bw_code"

# runs: PYTHON -P -m batchwright.launch.rank '/runs/gpt3 5b/launches/0001' 0 python train.py --until 5714944
exec "${bw_job[@]}"
