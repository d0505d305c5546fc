#!/bin/bash
# batchwright: launch 1 of 1, 2 nodes × 4 ranks, samples 0 to 640
#SBATCH --job-name="batchwright task"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --comment=batchwright:dry-run:chain:0
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue
#SBATCH --output=/dev/null
#SBATCH --chdir=/

bw_log=/runs/task/logs/launch-1.log
mkdir -p -- "${bw_log%/*}" && exec >>"$bw_log" 2>&1 </dev/null || exit 4
cd -- /data || exit 4
bw_job=(PYTHON -P -m batchwright.launch.slurm.job /runs/task chain 0)

# runs: srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --input=none --output=none --error=none --distribution=block --export=ALL --container-image=image.sqsh --container-mounts=/data:/data bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' torchrun PYTHON -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --max-restarts=0 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=60 --log-dir=/runs/task/launches/0001/torchrun --no-python PYTHON -P -m batchwright.launch.rank /runs/task/launches/0001 RANK PYTHON -m batchwright.runtime.loop /runs/task/launches/0001/spec.json
exec "${bw_job[@]}"
