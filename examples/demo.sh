#!/usr/bin/env bash
# The main job, step by step, on this machine's CPU: check, probe, plan, ramp, train, audit, report. No GPU, no network.
# `make gpu` sets DEMO_DEVICE and runs it on an accelerator, as many processes as there are devices, at most two.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d "${TMPDIR:-/tmp}/batchwright-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT

task=(examples/bytegpt/bytegpt.py:task --arg size=tiny --arg sequence_length=128)
device=${DEMO_DEVICE:-cpu} memory=${DEMO_MEMORY:-256MiB}
world=(--nodes "${DEMO_NODES:-2}" --devices-per-node 1)
ramp=(--thresholds "0:16 1K:32 2K:64" --samples 5K --node-policy constant-work)

title() { printf '\n# %s\n' "$1"; }
show() { printf '$ batchwright'; printf ' %s' "$@" | sed "s|$work|DEMO|g"; printf '\n'; }
run() { show "$@"; batchwright "$@"; }

title "1. check: is the gradient the whole batch's, however it is split?"
run check "${task[@]}" --global-batch-size 16

title "2. probe: what fits in $memory, what is fast, and why?"
budget=(--on "$device" --memory "$memory" --max 128 --seconds 1)
show probe "${task[@]}" "${budget[@]}" --json ">" DEMO/probe.json
batchwright probe "${task[@]}" "${budget[@]}" --dir "$work/probe" --json > "$work/probe.json"
python - "$work/probe.json" <<'PY'
import json, sys

probe = json.load(open(sys.argv[1]))
for trial in probe["trials"]:
    speed = trial.get("samples_per_second")
    print(f"  {trial['micro_batch_size']:>4}  {trial['status']:<8}{trial['purpose']:<12}{f'{speed:,.0f} samples/s' if speed else ''}")
for name in ("max_micro_batch_size", "saturating_micro_batch_size", "recommended_micro_batch_size", "bottleneck"):
    print(f"  {name}: {probe[name]}")
PY

title "3. plan: a global batch of 64 on all processes, from what the probe measured"
run plan --global-batch-size 64 "${world[@]}" --from-probe "$work/probe.json"

# The ramp starts with 16 samples on one process: the micro batch is the plan's, as far as that allows.
micro=$(batchwright plan --global-batch-size 16 --devices 1 --from-probe "$work/probe.json" --max-micro-batch-size 8 --json |
  python -c 'import json, sys; print(json.load(sys.stdin)["micro_batch_size"])')

title "4. ramp: 16, 32, 64, on one process and then on all"
run ramp "${ramp[@]}" --micro-batch-size "$micro" "${world[@]}" --plot

title "5. run: through the stages, one launch after the other"
run run "${task[@]}" "${ramp[@]}" --micro-batch-size "$micro" "${world[@]}" --dir "$work/run" "task.settings.device=$device"

title "6. audit: every sample once"
run check --ledger "$work/run"

title "7. report: look at it"
show report DEMO/run DEMO/probe.json -o report.html
batchwright report "$work/run" "$work/probe.json" -o report.html

printf '\nNext: open report.html in a browser; batchwright check YOUR_FILE.py:task, then docs/run.md.\n'
