"""A launch on fewer nodes than planned, if every global batch of it has a legal split; the next launch grows again.

The global batch never changes: fewer ranks take more accumulation steps each, and the gradient is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from batchwright.core.nodes.policies import Launch
from batchwright.launch.records import RunPlan

from . import commands as slurm
from .site import Site


def on_nodes(plan: RunPlan, launch: Launch, nodes: int) -> tuple[RunPlan, Launch] | None:
    """The plan with one launch on another number of nodes, or None if one of its stages has no legal split."""
    if nodes == launch.nodes:
        return plan, launch
    stages = list(plan.stages)
    for index in launch.stages:
        placed = plan.resplit(stages[index], nodes, stages[index].micro_batch_size)
        if placed is None:
            return None
        stages[index] = placed
    moved = replace(launch, nodes=nodes)
    launches = tuple(moved if one.index == launch.index else one for one in plan.launches)
    return replace(plan, stages=tuple(stages), launches=launches), moved


def legal_nodes(plan: RunPlan, launch: Launch) -> tuple[int, ...]:
    """The planned number of nodes and every smaller one with a legal split, largest first."""
    return tuple(n for n in range(launch.nodes, 0, -1) if on_nodes(plan, launch, n) is not None)


def choose(counts: Sequence[int], starts_in: Callable[[int], float | None], patience: float) -> int:
    """The most nodes that start within `patience` seconds; else the number that starts first; else the planned one.

    >>> choose((4, 2, 1), {4: None, 2: 30.0, 1: 0.0}.get, patience=60)
    2
    >>> choose((4, 2, 1), {4: None, 2: 900.0, 1: 300.0}.get, patience=60)
    1
    """
    waits: dict[int, float] = {}
    for nodes in counts:
        wait = starts_in(nodes)
        if wait is not None:
            if wait <= patience:
                return nodes
            waits[nodes] = wait
    return min(waits, key=lambda n: waits[n]) if waits else counts[0]


def affordable(plan: RunPlan, launch: Launch, site: Site, script: Path, freed: tuple[int, str] = (0, "")) -> int:
    """The nodes to ask for: those of the plan or, if the site is elastic, what the cluster can give soon.

    `freed` are the nodes of the job that submits the next one (how many, and which). They are free when it has ended, but
    Slurm does not know when that will be, so this asks Slurm about the other nodes only.
    """
    if not site.elastic:
        return launch.nodes
    own, taken = freed
    others = [f"--exclude={taken}"] if taken else []

    def starts_in(nodes: int) -> float | None:
        if nodes <= own:
            return 0.0
        try:
            when, _ = slurm.starts_at(script, f"--nodes={nodes - own}", *others)
        except slurm.Unreachable:
            return None
        return None if when is None else max(0.0, when - time.time())

    return choose(legal_nodes(plan, launch), starts_in, site.elastic_seconds)
