#!/usr/bin/env bash
# The main job, step by step, on this machine's CPU: probe, plan, ramp, train, audit. No GPU, no network.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d "${TMPDIR:-/tmp}/batchwright-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT

task="examples/bytegpt/bytegpt.py:task"
arguments="--arg size=tiny --arg sequence_length=128"

say() { printf '\n# %s\n$ %s\n' "$1" "${2//$work/DEMO}"; bash -c "$2" | sed "s|$work|DEMO|g"; }

say "1. check: is the gradient the whole batch's, however it is split?" \
  "batchwright check $task $arguments --global-batch-size 16"
say "2. probe: what fits in 256 MiB, what is fast, and why?" \
  "batchwright probe $task $arguments --memory 256MiB --max 256 --seconds 1 --dir $work/probe --json > $work/probe.json; python -c 'import json; p = json.load(open(\"$work/probe.json\")); print(*[(t[\"micro_batch_size\"], t[\"status\"], t[\"purpose\"]) for t in p[\"trials\"]], sep=\"\\n\"); print({k: p[k] for k in (\"max_micro_batch_size\", \"saturating_micro_batch_size\", \"recommended_micro_batch_size\", \"bottleneck\")})'"
say "3. plan: a global batch of 64 on two processes, from what the probe measured" \
  "batchwright plan --global-batch-size 64 --nodes 2 --devices-per-node 1 --from-probe $work/probe.json"
say "4. ramp: 16, 32, 64, on one process and then on two" \
  "batchwright ramp --thresholds '0:16 1K:32 2K:64' --samples 5K --micro-batch-size 8 --nodes 2 --devices-per-node 1 --node-policy constant-work --plot"
say "5. run: through the stages, one launch after the other" \
  "batchwright run $task $arguments --thresholds '0:16 1K:32 2K:64' --samples 5K --micro-batch-size 8 --nodes 2 --devices-per-node 1 --node-policy constant-work --dir $work/run"
say "6. audit: every sample once" \
  "batchwright check --ledger $work/run"
printf '\nWhat to try next: batchwright run --help, docs/run.md; your own task with batchwright check FILE.py:task\n'
