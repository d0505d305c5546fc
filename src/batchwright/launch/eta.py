"""How long a run still takes: each remaining stage at its own speed, and what every boundary costs."""

from __future__ import annotations

from collections.abc import Mapping

from .records import RunPlan

ASSUMED_BOUNDARY_SECONDS = 15.0  # local torchrun, until one is measured; 6 to 11 s were seen


def remaining_seconds(
    plan: RunPlan, position: int, speeds: Mapping[int, float], boundary_seconds: float | None = None
) -> float | None:
    """Seconds to the end from `position`, given samples per second of stages that were measured; None without any.

    A stage that was not measured is taken to be as fast per rank as the nearest one that was.
    """
    if not speeds:
        return None
    total = 0.0
    for stage in plan.stages:
        left = (stage.end_sample or plan.total_samples) - max(position, stage.start_sample)
        if left <= 0:
            continue
        near = min(speeds, key=lambda index: (abs(index - stage.index), -index))
        each = speeds[near] / plan.stages[near].data_parallel_size
        total += left / (speeds[stage.index] if stage.index in speeds else each * stage.data_parallel_size)
    ahead = sum(launch.start_sample > position for launch in plan.launches)
    return total + ahead * (ASSUMED_BOUNDARY_SECONDS if boundary_seconds is None else boundary_seconds)


def duration(seconds: float) -> str:
    """Seconds as people read them.

    >>> duration(7), duration(433), duration(100_000)
    ('7 s', '7 min', '27 h 46 min')
    """
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Speeds:
    """Samples per second of each stage, from positions and the times they were seen; the start of a launch is left out."""

    def __init__(self) -> None:
        self.by_stage: dict[int, float] = {}
        self._anchor: tuple[int, int, float] | None = None

    def seen(self, stage: int, position: int, when: float, told: float | None = None) -> None:
        """A position inside a stage, and the speed where the launch tells it; else the first only starts the clock."""
        if told:
            self.by_stage[stage] = told + 0.8 * (self.by_stage.get(stage, told) - told)
            return
        if self._anchor is None or self._anchor[0] != stage or position < self._anchor[1]:
            self._anchor = (stage, position, when)
            return
        samples, seconds = position - self._anchor[1], when - self._anchor[2]
        if samples > 0 and seconds > 0:
            self.by_stage[stage] = samples / seconds

    def restart(self) -> None:
        """A new launch: what was before it says nothing about now."""
        self._anchor = None
