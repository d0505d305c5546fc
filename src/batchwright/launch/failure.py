"""Why a launch failed: the rank that failed first, how, its last lines; after out-of-memory, splits that need less."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from itertools import islice

from batchwright.core.nodes.policies import Stage
from batchwright.processes.endings import from_exit

from .engine import Poll, RankLog
from .records import Failure, RunPlan

LINES = 12
REFUSED = 2  # the loop's exit code for a request that it refuses: a retry would be refused, too
# The innermost frame of a healthy rank that waits for another one.
_WAITING = re.compile(r"/torch/(distributed|autograd)/|/torch/_tensor\.py|/multiprocessing/|/threading\.py")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def hopeless(failure: Failure, before: Failure | None) -> bool:
    """Whether a retry would fail again; `before` is the failure of the launch before, if both made no progress."""
    same = before is not None and before.kind == failure.kind
    return failure.kind == "overshot" or (failure.kind in ("oom", "nonfinite", "refused") and same)


def died(code: int | None) -> str:
    """An exit code as text.

    >>> died(-9), died(137), died(1)
    ('was killed by SIGKILL', 'was killed by SIGKILL', 'exited with 1')
    """
    if code is None:
        return "ended with an unknown exit code"
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        return f"was killed by {signal.Signals(number).name}" if number else f"exited with {code}"
    except ValueError:
        return f"exited with {code}"


def last_lines(text: str, most: int = LINES) -> tuple[str, ...]:
    """The last lines that are not empty."""
    return tuple(line[:400] for line in text.splitlines() if line.strip())[-most:]


def _out_of_memory(rank: RankLog) -> bool:
    """As for the trials of a probe, but without signals: here anyone may have sent SIGKILL."""
    return from_exit(1, rank.tail).status == "oom"


def explain(poll: Poll, ranks: Sequence[RankLog], launcher: str, who: str = "torchrun") -> Failure:
    """The failure of an ended launch: of the rank that failed first, else of the launcher."""
    failed = sorted((r for r in ranks if r.code not in (None, 0)), key=lambda r: r.ended or 0.0)
    if failed:
        # A rank that lost its connection to another one is not the cause: a rank that a signal ended failed first.
        first = next((r for r in failed if r.code is not None and r.code < 0 and -r.code != signal.SIGTERM), failed[0])
        out = next((r for r in failed if _out_of_memory(r)), None)
        cause, kind = out or first, "oom" if out else "crash"
        # The traceback of the user's code: a launcher among the processes (torchrun as a command) writes its own after it.
        text = cause.tail
        ending = from_exit(1, text)
        lines = last_lines(ending.traceback or text)
        known = ending.traceback is not None or ending.kind != "crash"
        reason = f"rank {cause.rank} {died(cause.code)}" + (f": {ending.reason}" if known else "")
        kind = "refused" if kind == "crash" and who != "the command" and cause.code == REFUSED else kind
        return Failure(reason, cause.rank, cause.code, lines, kind)
    if any(r.code == 0 for r in ranks) or poll.code == 0:
        early = who if poll.code == 0 else "a rank"
        return Failure(f"{early} exited with code 0 before end_sample", None, poll.code, _last_output(ranks, launcher))
    return Failure(f"{who} {died(poll.code)}, and its ranks with it", None, poll.code, _last_output(ranks, launcher))


def _last_output(ranks: Sequence[RankLog], launcher: str) -> tuple[str, ...]:
    return last_lines(launcher) or next((lines for r in ranks if (lines := last_lines(r.tail))), ())


def stopped(ranks: Sequence[RankLog], what: str) -> Failure | None:
    """`what` happened, and the rank that all wait for, if it is a stopped process; asked before ranks write their stacks."""
    one = next((r for r in ranks if r.state in ("T", "t")), None)
    if one is None:
        return None
    reason = f"{what}: rank {one.rank} (process {one.pid}) is stopped"
    return Failure(reason, one.rank, None, last_lines(one.tail, 4), "stalled")


def stuck(ranks: Sequence[RankLog], what: str) -> Failure:
    """`what` happened, and the rank that the others waited for: the one whose last stack is not in a collective."""
    places = {r.rank: _place(r.tail) for r in ranks}
    busy = [rank for rank, place in places.items() if place and not _WAITING.search(place)]
    if busy and len(busy) < max(2, len(ranks)):
        rank = busy[0]
        others = {1: "", 2: "; the other waits for it"}.get(len(ranks), f"; {len(ranks) - 1} others wait for it")
        reason = f"{what}: rank {rank} is stuck at {places[rank]}{others}"
        return Failure(reason, rank, None, (), "stalled")
    where = tuple(f"rank {rank}: {place or 'no stack'}" for rank, place in islice(places.items(), LINES))
    if (more := len(places) - len(where)) > 0:
        where = (*where, f"and {more:,} more ranks: their stacks are in their logs")
    return Failure(f"{what}, and no single rank is the cause", None, None, where, "stalled")


def _place(text: str) -> str | None:
    """The innermost Python frame of the main thread in the trace that faulthandler writes on SIGABRT."""
    start = text.rfind("Fatal Python error: Aborted")
    if start < 0:
        return None
    current = text.find("Current thread", start)
    found = _FRAME.search(text, current if current >= 0 else start)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else None


def memory_advice(plan: RunPlan, stage: Stage, directory: str) -> str:
    """Splits of the same global batch that need less memory per rank, as `--max-micro-batch-size` would make them."""
    # The flag applies to every stage, so a limit that another stage does not allow is left out.
    least = max(plan.smaller(other)[-1].micro_batch_size for other in plan.stages[stage.index :])
    smaller = [made for made in plan.smaller(stage)[1:] if made.micro_batch_size >= least][:2]
    batch = (
        f"micro_batch_size {stage.micro_batch_size} × accumulation_steps {stage.accumulation_steps} × "
        f"data_parallel_size {stage.data_parallel_size}"
    )
    if not smaller:
        return (
            f"{batch} is out of memory at the smallest valid micro batch: shorten sequences, recompute activations, "
            "or shard the model (--strategy fsdp2)."
        )
    options = " or ".join(f"{s.micro_batch_size} × {s.accumulation_steps} × {s.data_parallel_size}" for s in smaller)
    return (
        f"{batch} does not fit in memory. The same global batch of {stage.global_batch_size} with less memory: {options} (not "
        f"measured; batchwright probe measures). Continue: batchwright run --resume {directory} "
        f"--max-micro-batch-size {smaller[0].micro_batch_size}"
    )
