"""The chain as it would be submitted, on paper: scripts, and what `sbatch --test-only` says to them where there is one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.launch.directory import RunDirectory
from batchwright.launch.records import RunPlan
from batchwright.launch.work import dry_run as local_dry_run
from batchwright.launch.work import work

from . import commands as slurm
from . import sbatch
from .chain import link_script
from .engine import write_script
from .site import Site, SlurmRun, read_site
from .step import StepEngine

TOKEN = "dry-run"


def scripts(directory: RunDirectory, plan: RunPlan, site: Site) -> list[str]:
    """The text of every launch's script."""
    run = SlurmRun(site, TOKEN, detached=True)
    return [sbatch.render(link_script(directory, plan, run, launch), site) for launch in plan.launches]


def dry_run(directory: RunDirectory, plan: RunPlan, site: Site) -> list[dict[str, Any]]:
    """Write the scripts into RUN/dry-run, try each, and say what it would run; nothing is submitted."""
    doing, found = work(directory, plan), list[dict[str, Any]]()
    for launch, text in zip(plan.launches, scripts(directory, plan, site), strict=True):
        path = directory.path / "dry-run" / f"launch-{launch.index + 1}.sh"
        write_script(path, text)
        job = doing.job(launch, launch.index + 1, launch.start_sample)
        found.append(
            {
                "script": str(path),
                "command": list(StepEngine(site).command(job)),
                "environment": dict(job.environment),
                **_tried(path),
            }
        )
    return found


def dry_records(directory: RunDirectory, plan: RunPlan) -> list[dict[str, Any]]:
    """Every launch of a dry run, for any engine: that of `launch.work`, with scripts for Slurm."""
    if plan.options.engine == "local":
        return local_dry_run(directory, plan)
    made = dry_run(directory, plan, read_site(plan.options.slurm))
    known = {"working_directory": plan.working_directory}
    return [
        {**codec.encode(launch), "ranks": plan.ranks(launch), **known, **record}
        for launch, record in zip(plan.launches, made, strict=True)
    ]


def _tried(path: Path) -> dict[str, Any]:
    """What the cluster says to a script: `starts_in` seconds, or None with its words in `test`."""
    if not slurm.installed():
        return {"test": "sbatch is not installed here: not tried", "starts_in": None}
    try:
        when, said = slurm.starts_at(path)
    except slurm.Unreachable as error:
        return {"test": f"not tried: {error}", "starts_in": None}
    return {"test": said, "starts_in": None if when is None else max(0.0, round(when - time.time(), 1))}
