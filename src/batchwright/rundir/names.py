"""The names in a run directory.

RUN/plan.json                   what to run, and how (owner only: it holds environment values)
RUN/lock                        held by the supervisor (flock), with its process and host
RUN/launch.json                 the fence: the launch number that may write
RUN/stop.json                   exists after a request to stop
RUN/outcome.json                how the last supervisor ended
RUN/status.json, status/        why and where a launch ended
RUN/events/                     supervisor.jsonl (launches, boundaries), launch-00003.jsonl (steps, saves)
RUN/launches/0003/              manifest.json, spec.json, ending.json, job.json, ranks/, logs/
RUN/checkpoints/, RUN/ledger/   one folder per checkpoint; one file per launch and rank
RUN/rollouts/launch-00003/      finished responses that no checkpoint has yet (reinforcement learning)
RUN/trackers/wandb.json         the id of this run in a tracker
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PLAN, LOCK, FENCE, STOP, OUTCOME = "plan.json", "lock", "launch.json", "stop.json", "outcome.json"
STATUS, CHECKPOINTS, LEDGER, EVENTS, LAUNCHES = "status.json", "checkpoints", "ledger", "events", "launches"
TRACKERS, ROLLOUTS, UPDATES = "trackers", "rollouts", "updates"
SUPERVISOR_EVENTS = "supervisor.jsonl"

_CHECKPOINT = re.compile(r"step-(\d{12})-launch-(\d{5,})")
_LEDGER = re.compile(r"launch-(\d{5,})-rank-(\d{5,})\.jsonl")
_UPDATES = re.compile(r"updates-launch-(\d{5,})-rank-(\d{5,})\.jsonl")
_EVENTS = re.compile(r"launch-(\d{5,})\.jsonl")


def checkpoint(step: int, launch: int) -> str:
    """The folder of one checkpoint.

    >>> checkpoint(120, 3), read_checkpoint("step-000000000120-launch-00003"), read_checkpoint("notes")
    ('step-000000000120-launch-00003', (120, 3), None)
    """
    return f"step-{step:012d}-launch-{launch:05d}"


def read_checkpoint(name: str) -> tuple[int, int] | None:
    """The (step, launch) of a checkpoint's folder; None for any other name."""
    return _numbers(_CHECKPOINT, name)


def ledger(launch: int, rank: int) -> str:
    """The ledger of one rank of a launch.

    >>> ledger(3, 1), read_ledger("launch-00003-rank-00001.jsonl")
    ('launch-00003-rank-00001.jsonl', (3, 1))
    """
    return f"launch-{launch:05d}-rank-{rank:05d}.jsonl"


def read_ledger(name: str) -> tuple[int, int] | None:
    """The (launch, rank) of a ledger file; None for any other name."""
    return _numbers(_LEDGER, name)


def updates(launch: int, rank: int) -> str:
    """Which responses entered which update, on one rank of a launch; beside the ledger.

    >>> updates(3, 1), read_updates("updates-launch-00003-rank-00001.jsonl")
    ('updates-launch-00003-rank-00001.jsonl', (3, 1))
    """
    return f"updates-launch-{launch:05d}-rank-{rank:05d}.jsonl"


def read_updates(name: str) -> tuple[int, int] | None:
    """The (launch, rank) of such a file; None for any other name."""
    return _numbers(_UPDATES, name)


def events(launch: int) -> str:
    """The events of one launch.

    >>> events(3), read_events("launch-00003.jsonl"), read_events("supervisor.jsonl")
    ('launch-00003.jsonl', 3, None)
    """
    return f"launch-{launch:05d}.jsonl"


def read_events(name: str) -> int | None:
    """The launch of an events file; None for any other name."""
    found = _EVENTS.fullmatch(name)
    return int(found[1]) if found else None


def status(launch: int, rank: int | None = None) -> str:
    """The status of one launch, which no later launch replaces; with `rank`, that of a rank that failed.

    >>> status(3), status(3, rank=1)
    ('status/launch-00003.json', 'status/launch-00003-rank-00001.json')
    """
    return f"status/launch-{launch:05d}.json" if rank is None else f"status/launch-{launch:05d}-rank-{rank:05d}.json"


def launch(number: int) -> str:
    """The folder of one launch.

    >>> launch(3)
    'launches/0003'
    """
    return f"{LAUNCHES}/{number:04d}"


def listed(folder: Path) -> list[str]:
    """The names in a folder; an empty list if it does not exist."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbers(pattern: re.Pattern[str], name: str) -> tuple[int, int] | None:
    found = pattern.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
