#!/usr/bin/env bash
# The main job, step by step, on this machine: no GPU, no network.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n\033[1m# %s\033[0m\n$ %s\n' "$1" "$2"; bash -c "$2"; }

say "1. plan: what is known in, the rest out" \
  "batchwright plan --global-batch-size 1024 --nodes 16 --devices-per-node 8 --tensor-parallel 2 --max-micro-batch-size 6"
say "2. the same from another framework's own words" \
  "batchwright plan nemo llm pretrain --factory llama3_8b data.micro_batch_size=4 data.global_batch_size=16 trainer.accumulate_grad_batches=1"
say "3. ramp: grow the batch, and the cluster with it" \
  "batchwright ramp --linear 256,256,10M --global-batch-size 2048 --micro-batch-size 4 --nodes 16 --devices-per-node 8 --samples 20M --plot"
say "4. reinforcement learning: prompts and responses kept apart" \
  "batchwright rl --prompts 32 --generations 8 --train-micro-prompts 4"
