"""What `ramp` and `run` both take: the rule of a schedule, and how its stages get their nodes."""

from __future__ import annotations

import click

from batchwright.core.nodes.policies import POLICIES

from .options import number, stack

rule_options = stack(
    number(
        "--linear", "Grow by INCREMENT in equal parts of SAMPLES, from START to the global batch.", "START,INC,SAMPLES"
    ),
    number(
        "--per-device", "MaxText's rule: sizes per device, each stage counts its own share.", "START,INC,END,SAMPLES"
    ),
    number("--thresholds", 'From each position in samples on, a size: "0:768 60M:1536".', '"AT:SIZE ..."'),
    number("--thresholds-tokens", 'The same in tokens: "0:768 250B:1536".', '"AT:SIZE ..."'),
    number("--thresholds-steps", "The same in steps.", '"AT:SIZE ..."'),
    number(
        "--doubling",
        "Twice the batch every so many samples (tokens, steps), up to the global batch.",
        "START,EVERY[,UNIT]",
    ),
    number("--recipe", "A published schedule; see batchwright ramp --list-recipes.", "NAME"),
    click.option("--allow-falling", is_flag=True, help="Accept a batch that falls."),
    number("--samples", "The budget in samples."),
    number("--tokens", "The budget in tokens."),
    number(
        "--last-step", "shorten | drop | overshoot: the step in which the budget ends.  [default: shorten]", "POLICY"
    ),
)

node_options = stack(
    number("--node-policy", f"{' | '.join(POLICIES)}.", "NAME"),
    number("--micro-step-seconds", "Time of a micro step: A + B × micro batch.", "A,B"),
    number(
        "--sync-seconds",
        "Gradient synchronisation between nodes: per tree level, and of all gradients once.",
        "LATENCY,ALL",
    ),
    number("--stage-seconds", "Measured step time of each stage.", "S,S,..."),
    number("--from-probe", "A probe's result: its measured times, and the most that fits.", "FILE.json"),
    number("--restart-seconds", "From stopping to training again.  [default: 300]", "S"),
    number("--deadline-hours", "min-node-hours: not longer than this.", "H"),
    number("--node-hours-budget", "min-time: not more than this.", "NH"),
    click.option("--stop-every-stage", is_flag=True, help="A launch of its own for every stage, as NeMo does."),
    click.option("--allow-ragged", is_flag=True, help="Accept stages that do not divide: shares differ by one sample."),
)
