"""The order in which torch's schedules compute, and when, without ranks.

    python tests/runtime/step/pipeline_orders.py

writes the orders that docs/pictures.py draws.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining.schedules import Schedule1F1B, get_schedule_class

from batchwright.core.batch.pipeline import RUN_BY_TORCH
from batchwright.runtime.step.pipeline import TORCH_NAMES, stage_indices

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures" / "pipeline.json"
DRAWN = (("1f1b", 4, 8), ("zero-bubble", 4, 8))
SECONDS = {"F": 1, "I": 1, "W": 1, "B": 2}


class Stage:
    """What a schedule asks of a stage to be made, and a record of what it does with it."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, rank, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = torch.nn.Identity()
        self.has_backward = True
        self.actions: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> None:
        self.actions.append(("F", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, **_: Any) -> None:
        self.actions.append(("B", self.stage_index, chunk))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []


def made(schedule: str, p: int, v: int, m: int, rank: int = 0) -> Any:
    kind = get_schedule_class(TORCH_NAMES[schedule])
    stages = [Stage(i, p * v, rank, p) for i in stage_indices(schedule, rank, p, v)]
    one = schedule in ("gpipe", "torch-1f1b")
    return kind(stages[0] if one else stages, m), stages


def order(schedule: str, p: int, v: int, m: int) -> list[list[tuple[str, int, int]]]:
    """(what, stage, microbatch) of each rank, in the order in which torch computes them.

    The order that torch lists for 1F1B begins the last rank at microbatch 1; what it runs is recorded instead.
    """
    if schedule == "torch-1f1b":
        ranks = []
        for rank in range(p):
            schedule_, (stage,) = made(schedule, p, v, m, rank)
            assert isinstance(schedule_, Schedule1F1B)
            schedule_._initialize_stage = lambda *_: None
            schedule_._step_microbatches([()] * m, [{}] * m, None)
            ranks.append(stage.actions)
        return ranks
    listed = made(schedule, p, v, m)[0].pipeline_order
    ranks = []
    for rank in range(p):
        actions = [part for a in listed[rank] if a is not None for part in (a.sub_actions or (a,))]
        kept = [a for a in actions if a.computation_type.value in SECONDS]
        ranks.append([(a.computation_type.value, a.stage_index, a.microbatch_index) for a in kept])
    return ranks


def simulated(ranks: list[list[tuple[str, int, int]]], stages: int) -> list[tuple[int, str, int, int, int]]:
    """(rank, what, microbatch, start, end) of each action, if each rank does its own in order as soon as their inputs are
    there."""
    ended: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * len(ranks), [0] * len(ranks)
    done: list[tuple[int, str, int, int, int]] = []
    while any(place < len(actions) for place, actions in zip(at, ranks, strict=True)):
        moved = False
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions):
                what, stage, m = actions[at[rank]]
                needs = [("W", stage, m)] if what == "W" else []
                if what == "F" and stage:
                    needs = [("F", stage - 1, m)]
                if what in "BI":
                    needs = [("F", stage, m)] + [("W", stage + 1, m)] * (stage < stages - 1)
                if any(need not in ended for need in needs):
                    break
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = start + SECONDS[what]
                done.append((rank, what, m, start, clock[rank]))
                # A backward for inputs, alone or with that for weights, is what others wait for.
                if what != "W":
                    ended["F" if what == "F" else "W", stage, m] = clock[rank]
                at[rank], moved = at[rank] + 1, True
        assert moved, "the schedule is stuck"
    return done


def idle_share(ranks: list[list[tuple[str, int, int]]], stages: int) -> Fraction:
    """The share of a step in which a rank is idle."""
    length = max(end for *_, end in simulated(ranks, stages))
    return Fraction(length - sum(SECONDS[what] for what, _, _ in ranks[0]), length)


def drawn() -> dict[str, dict[str, Any]]:
    """The content of docs/pictures/pipeline.json."""
    found: dict[str, dict[str, Any]] = {}
    for name, p, m in DRAWN:
        ranks = order(RUN_BY_TORCH[name], p, 1, m)
        actions = [list(action) for action in simulated(ranks, p)]
        about = {"schedule": name, "stages": p, "microbatches": m, "idle_share": float(idle_share(ranks, p))}
        found[name] = {**about, "actions": actions}
    return found


if __name__ == "__main__":
    PICTURES.write_text(json.dumps(drawn()) + "\n")
