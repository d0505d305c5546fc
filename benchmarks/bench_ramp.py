"""The cost of a schedule: lookups compared with replaying the steps, and node policies at full size. CPU time, interleaved."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from batchwright.core.batch.world import World
from batchwright.core.nodes.policies import place
from batchwright.core.nodes.throughput import Throughput
from batchwright.core.ramp.rules import Linear, Thresholds

ROUNDS = 9


def cpu(call: Callable[[], object], times: int = 1) -> float:
    start = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - start) / times


def replay(start: int, increment: int, samples: int, target: int, until_step: int) -> int:
    """The position of a run, found by taking every step: how MaxText resumes."""
    n = (target - start) // increment
    consumed = 0
    for _ in range(until_step):
        consumed += start + increment * min(n, consumed * n // samples)
    return consumed


def main() -> None:
    broken = []
    ramp = Linear(256, 256, 10_000_000, target=2048)
    schedule = ramp.compile()
    step = 20_000
    assert schedule.at_step(step).start_sample == replay(256, 256, 10_000_000, 2048, step)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(cpu(lambda: schedule.at_step(step), 2000))
        theirs.append(cpu(lambda: replay(256, 256, 10_000_000, 2048, step)))
    ratio = [b / a for a, b in zip(ours, theirs, strict=True)]
    print("| lookup | µs | ratio (median, range) |\n|---|---|---|")
    print(f"| `at_step(20,000)` | {1e6 * statistics.median(ours):.1f} | 1 |")
    middle, low, high = statistics.median(ratio), min(ratio), max(ratio)
    print(
        f"| replaying 20,000 steps | {1e6 * statistics.median(theirs):.0f} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |"
    )

    many = Thresholds(tuple((i * 10**8, 1000 + i) for i in range(10_000)))
    compiled = many.compile()
    far = compiled.at_sample(10**12)
    for name, seconds in {
        "compile 10,000 stages": cpu(many.compile),
        "`at_sample(10^12)` in 10,000 stages": statistics.median(
            cpu(lambda: compiled.at_sample(10**12), 1000) for _ in range(ROUNDS)
        ),
        "`at_step` of the same": statistics.median(
            cpu(lambda: compiled.at_step(far.step), 1000) for _ in range(ROUNDS)
        ),
    }.items():
        print(f"| {name} | {1e6 * seconds:,.1f} | |")

    world = World(1, devices_per_node=8)
    stages = Linear(32_768, 32_768, 10**10, target=3_276_800).compile().until(3 * 10**10).segments
    times = Throughput(0.05, 0.1, sync_latency_seconds=0.002, sync_seconds=0.2)
    common = {"nodes": 4096, "micro_batch_size": 1, "throughput": times}
    fast, cheap = (place(stages, world, policy=policy, **common) for policy in ("min-time", "min-node-hours"))
    hours, node_hours = cheap.hours - fast.hours, fast.node_hours - cheap.node_hours
    cases: dict[str, tuple[dict[str, object], float | None]] = {  # and the bound, in seconds
        **{policy: ({"policy": policy}, 0.1) for policy in ("launcher", "constant-work", "min-node-hours", "min-time")},
    }
    for share in (0.02, 0.2, 0.7):
        deadline = {"policy": "min-node-hours", "deadline_hours": fast.hours + share * hours}
        budget = {"policy": "min-time", "node_hours_budget": cheap.node_hours + share * node_hours}
        cases[f"min-node-hours, deadline at {share:.0%}"] = (deadline, 0.1)
        cases[f"min-time, budget at {share:.0%}"] = (budget, 0.1)
        cases[f"the same, restarts of 5 s: deadline at {share:.0%}"] = (deadline | {"restart_seconds": 5}, None)
        cases[f"the same, restarts of 5 s: budget at {share:.0%}"] = (budget | {"restart_seconds": 5}, None)
    for policy in ("min-node-hours", "min-time"):
        cases[f"{policy}, ragged"] = ({"policy": policy, "allow_ragged": True}, None)
    print(f"\n| {len(stages)} stages × 4,096 nodes | ms (median) |\n|---|---|")
    for name, (options, bound) in cases.items():
        rounds = ROUNDS if bound else 3
        taken = statistics.median(
            cpu(lambda options=options: place(stages, world, **common | options)) for _ in range(rounds)
        )
        print(f"| {name} | {1000 * taken:.0f} |")
        if bound and taken > bound:
            broken.append(f"{name}: {1000 * taken:.0f} ms, bound {1000 * bound:.0f}")
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
