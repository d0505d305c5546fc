"""Requests that make sense, for fuzzed command lines: a batch that divides, a ramp on nodes, a probe's output, a cluster."""

from __future__ import annotations

from random import Random
from typing import Any

from batchwright.core.nodes.policies import POLICIES
from batchwright.core.numbers import divisors
from batchwright.core.ramp.recipes import RECIPES
from batchwright.launch.slurm.site import _READERS as SITE
from tests.cli.words import OPTIONS, SETTINGS, VALUES, junk, maybe, value_of


def world(random: Random) -> dict[str, Any]:
    """Nodes and devices that hold a whole number of replicas, and `_ranks`, which is not a field."""
    ranks = random.choice((1, 2, 3, 4, 6, 8, 16, 64, 96))
    split = {
        name: random.choice((1, 1, 1, 2, 4)) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")
    }
    devices = ranks * split["tensor_parallel"] * split["pipeline_parallel"] * split["context_parallel"]
    made: dict[str, Any] = {name: size for name, size in split.items() if size > 1 or maybe(random, 0.1)}
    kind = random.randrange(4)
    if kind < 2:
        made["devices_per_node"] = random.choice([d for d in divisors(devices) if d <= 16])
        made["nodes"] = devices // made["devices_per_node"]
    elif kind == 2:
        made["devices"] = devices
    else:
        made["data_parallel_size"] = ranks
    return {**made, "_ranks": ranks}


def batch(random: Random) -> dict[str, Any]:
    """A plan: a world and a batch that divides, sometimes with a pipeline's or a loader's options."""
    made = world(random)
    ranks, micro, steps = made.pop("_ranks"), random.choice((1, 2, 3, 4, 8)), random.choice((1, 2, 4, 8, 12))
    whole, length = micro * steps * ranks, random.choice((128, 2048, 4096))
    made |= random.choice(
        (
            {"global_batch_size": whole},
            {"global_batch_size": whole, "micro_batch_size": micro},
            {"global_batch_size": whole, "max_micro_batch_size": micro},
            {"micro_batch_size": micro, "accumulation_steps": steps},
            {"global_batch_size_tokens": whole * length, "sequence_length": length},
            {"global_batch_size": whole + 1, "round": random.choice(("up", "down"))},
            {"global_batch_size": whole + 1, "micro_batch_size": micro, "allow_ragged": True},
        )
    )
    for name in ("samples_per_second", "step_seconds", "hosts", "loading_hosts", "stored_hosts", "expansion_factor"):
        if maybe(random, 0.06):
            made[name] = value_of(random, name)
    if made.get("pipeline_parallel", 1) > 1 and maybe(random, 0.4):
        name = random.choice(
            ("pipeline_schedule", "pipeline_style", "pipeline_microbatches", "virtual_stages", "pipeline_group")
        )
        made[name] = value_of(random, name, OPTIONS["plan"].get(f"--{name.replace('_', '-')}"))
    return made


def growing(random: Random, *, ends: bool = False, probe: bool = False) -> dict[str, Any]:
    """A ramp: a rule, a world on which its stages divide, a budget, a policy, times (unless a probe has them)."""
    made = world(random)
    ranks, micro = made.pop("_ranks"), random.choice((1, 1, 2, 4))
    replica = made.get("pipeline_parallel", 1)  # a stage has at least as many micro batches as the pipeline has stages
    unit, length = ranks * micro * replica * random.choice((1, 1, 2)), random.choice((128, 2048))
    start, stages = unit * random.choice((1, 2, 4)), random.randrange(1, 5)
    sizes = [start * 2**i for i in range(stages)]
    at = [0, *sorted(random.sample(range(1, 40), stages - 1))]
    budget = {"samples": random.choice(("1M", 50_000_000, 10**7))} if maybe(random, 0.8) else {"tokens": "50G"}
    made |= random.choice(({}, {"micro_batch_size": micro}, {"max_micro_batch_size": micro}))
    kind = random.randrange(9)
    if kind == 0:
        samples, stages = random.choice((1000, 5000, "1M")), stages + 1
        made |= {"linear": f"{start},{unit},{samples}", "global_batch_size": start + unit * (stages - 1)}
    elif kind == 1:
        every = random.choice((1000, "10,steps", "2M,tokens", 5000))
        made |= {"doubling": f"{start},{every}", "global_batch_size": sizes[-1]}
    elif kind == 2:
        made = {"recipe": random.choice(RECIPES).name}
        made |= random.choice(({}, {"nodes": 288, "devices_per_node": 8}, {"nodes": 4, "devices_per_node": 8}))
        budget, stages = {} if maybe(random) else budget, 0
    elif kind == 3:
        made = {
            "per_device": random.choice(VALUES["--per-device"]),
            "nodes": random.choice((1, 4)),
            "devices_per_node": 4,
        }
        stages = 0
    elif kind == 4:
        made, stages = {**made, "global_batch_size": start}, 1
    else:
        name, scale = random.choice((("thresholds", 1000), ("thresholds_steps", 10), ("thresholds_tokens", 10**6)))
        made |= {name: " ".join(f"{a * scale * start}:{size}" for a, size in zip(at, sizes, strict=True))}
        if maybe(random, 0.3):
            made["sequence_lengths"] = ",".join(str(length * 2 ** (i // 2)) for i in range(stages))
    if "recipe" not in made and ("tokens" in f"{made} {budget}" or maybe(random, 0.2)):
        made.setdefault("sequence_length", length)
    if ends or maybe(random, 0.7):
        made |= budget
    timed = probe or maybe(random)
    if timed and not probe:
        made["micro_step_seconds"] = random.choice(("0.02,0.01", "0,0.5"))
        made |= {"sync_seconds": "0.001,0.1"} if maybe(random, 0.2) else {}
    elif not probe and stages and maybe(random, 0.2):
        made["stage_seconds"] = ",".join("0.5" for _ in range(stages))
    if "nodes" in made and maybe(random, 0.6):
        able = [p for p in POLICIES if (timed and ("samples" in made or "tokens" in made)) or not p.startswith("min-")]
        made["node_policy"] = random.choice([p for p in able if p != "launcher" or "micro_batch_size" in made])
        limit = {"min-node-hours": "deadline_hours", "min-time": "node_hours_budget"}.get(made["node_policy"])
        made |= {limit: "1e6"} if limit and maybe(random) else {}
    for name in ("restart_seconds", "last_step", "stop_every_stage", "allow_ragged"):
        if maybe(random, 0.1):
            switch = OPTIONS["ramp"][f"--{name.replace('_', '-')}"]
            made[name] = True if switch.is_flag else value_of(random, name, switch)
    return made


def rates(random: Random) -> dict[str, Any]:
    made = {"lr": "3e-4", "lr_scaling": random.choice(("none", "sqrt", "linear"))}
    return made | random.choice(
        ({}, {}, {}, {"optimizer": "adam"}, {"lr_horizon_steps": 1000}, {"lr_horizon_samples": 10**7})
    )


def probed(random: Random) -> dict[str, Any]:
    """The output of `probe --json`, as far as other verbs read it."""
    largest = random.choice((1, 4, 8, 37))
    trials = [
        {
            "micro_batch_size": size,
            "status": "fits",
            "purpose": random.choice(("limit", "throughput")),
            "step_seconds": 0.1 + 0.05 * size,
        }
        for size in range(1, largest + 1, random.choice((1, 3)))
    ]
    trials.append({"micro_batch_size": largest + 1, "status": "oom", "purpose": "limit"})
    made = {"schema": 1, "trials": trials, "max_micro_batch_size": largest, "ranks": random.choice((1, 2))}
    return made | random.choice(({}, {"identity": {"sequence_length": 128}}, {"bottleneck": "too-noisy"}))


def site(random: Random) -> dict[str, Any]:
    """Settings of a cluster."""
    return {name: value_of(random, f"launch.slurm.{name}") for name in random.sample(sorted(SITE), random.randrange(5))}


def loop_settings(random: Random, wrong: bool) -> dict[str, Any]:
    """Some settings of the loop; their names are those of the record."""
    names = random.sample(sorted(SETTINGS), random.randrange(3))
    if not wrong:
        return {name: SETTINGS[name] for name in names if SETTINGS[name] is not None}
    return {
        name: random.choice((junk(random), 5, -1, 10**400, [], {"peak_lr": 1, "end_sample": 9}, True)) for name in names
    }
