"""Trials of a task: write the specification, start the worker, read the ranks' results, conclude how the trial ended."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import ConfigError, EnvironmentFault, MissingExtraError
from batchwright.processes.endings import ExitCause, error_from_record, from_exit
from batchwright.processes.memory import physical_memory
from batchwright.processes.start import Exit, GuardedProcess, torchrun

from .machine import UNLOADED, trial_environment
from .records import ProbeRequest, Trial
from .server import TrialServer
from .speed import Timing

_LIMIT_STEPS = 2  # in the second step the optimizer's state exists
# Micro steps of the last step, if the job accumulates: in the second one the gradients exist, as in any further one.
_MICRO_STEPS = 2
# What a worker does before it uses the batch, as it writes it (nothing before it has started): a smaller size hangs as well.
_BEFORE = {"starting": "libraries were imported", "building the task": "the task was built"}


@dataclass
class TaskRunner:
    """Makes trials of `FILE.py:function`; identity and longest sample are found by the first and used by the others."""

    request: ProbeRequest
    scratch: Path
    identity: Mapping[str, Any] = field(default_factory=dict[str, Any])
    longest_index: int | None = None
    room: Any = None
    """What the limit depends on, apart from the request, as the last trial saw it."""
    # By whether trials are timed: those have the user's own allocator, which a process gets when it starts.
    _servers: dict[bool, TrialServer] = field(
        default_factory=dict[bool, TrialServer], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.request.worker and find_spec("torch") is None:
            raise MissingExtraError(
                "probing a task needs torch, which is not installed: pip install 'batchwright[torch]'. A command "
                "(batchwright probe -- COMMAND) does not.",
                field="task",
                nearest=("batchwright[torch]",),
            )

    @property
    def _micro_steps(self) -> int:
        return min(_MICRO_STEPS, self.request.accumulation_steps)

    def conditions(self, purpose: str) -> dict[str, Any]:
        """What the verdict depends on, apart from the task."""
        r = self.request
        own = {"seconds": r.seconds} if purpose == "throughput" else {"steps": _LIMIT_STEPS}
        same = {name: getattr(r, name) for name in ("memory", "margin", "ranks", "longest", "workers")}
        return {
            **same,
            "device": r.on,
            "room": self.room,
            "micro_steps": 1 if purpose == "evaluation" else self._micro_steps,
            **own,
        }

    def describe(self) -> Mapping[str, Any]:
        """The identity, from a process that builds the task and runs nothing; empty if it cannot be built."""
        trial = self._run(1, "describe", "limit")
        return {} if trial.status != "fits" else self.identity

    def limit(self, size: int) -> Trial:
        """Whether a size runs."""
        return self._run(size, "limit", "limit")

    def evaluation(self, size: int) -> Trial:
        """Whether an evaluation batch runs during training."""
        return self._run(size, "evaluation", "evaluation")

    def throughput(self, size: int, contrasts: bool = False) -> Trial:
        """How fast a size is."""
        return self._run(size, "throughput", "throughput", contrasts)

    def _run(self, size: int, mode: str, purpose: str, contrasts: bool = False) -> Trial:
        r = self.request
        for old in self.scratch.glob("result*"):
            old.unlink()
        given = ("target", "args", "ranks", "memory", "margin", "on", "longest", "workers", "seconds")
        spec = {name: getattr(r, name) for name in given} | {
            "micro_batch_size": size,
            "mode": mode,
            "limited": mode in ("limit", "evaluation"),
            "host_memory": physical_memory() // 2 // r.ranks,
            "steps": _LIMIT_STEPS,
            "micro_steps": self._micro_steps,
            "longest_index": self.longest_index,
            "contrasts": contrasts,
            "result": str(self.scratch / "result"),
        }
        path = self.scratch / "spec.json"
        path.write_text(json.dumps(codec.encode(spec)), encoding="utf-8")
        done = self._start(path, timed=mode == "throughput")
        results = {rank: self._result(rank) for rank in range(r.ranks)}
        for result in results.values():
            self._learn(result)
        return self._trial(size, purpose, done, results)

    def prepare(self) -> None:
        """Let the servers import torch while the task is estimated."""
        if self._forks:
            for timed in (False, True) if self.request.throughput else (False,):
                self._server(timed)

    @property
    def _forks(self) -> bool:
        r = self.request
        return r.ranks == 1 and not r.worker and sys.platform == "linux"

    def _server(self, timed: bool) -> TrialServer:
        server = self._servers.get(timed)
        if server is None or not server.alive:
            if server is not None:
                server.end()
            server = self._servers[timed] = TrialServer(trial_environment(limited=not timed), self.scratch)
        return server

    def _start(self, spec: Path, timed: bool) -> Exit:
        r = self.request
        if self._forks:
            return self._server(timed).run(spec, timeout=r.timeout)
        command = [*r.worker, str(spec)]
        if not r.worker:
            command = [sys.executable, "-P", "-m", "batchwright.probe.worker", str(spec)]
            if r.ranks > 1:
                logs = self.scratch / "torchrun"
                command = [
                    *torchrun(sys.executable, "--standalone", ranks=r.ranks, log_dir=logs, shutdown_seconds=5),
                    *command,
                ]
        env = trial_environment(limited=not timed, ranks=r.ranks)
        with GuardedProcess(command, env, scratch=str(self.scratch)) as child:
            return child.watch(r.timeout)

    def close(self) -> None:
        """End the servers that wait for further trials."""
        while self._servers:
            self._servers.popitem()[1].end()

    def _result(self, rank: int) -> dict[str, Any]:
        """The last result that a rank wrote; empty if it cannot be read."""
        try:
            found = json.loads((self.scratch / f"result.{rank}").read_text(encoding="utf-8"))
            return found if isinstance(found, dict) and "status" in found else {}
        except (OSError, ValueError):
            return {}

    def _written(self, rank: int) -> int:
        """When a rank wrote its result."""
        return (self.scratch / f"result.{rank}").stat().st_mtime_ns

    def _learn(self, result: Mapping[str, Any]) -> None:
        if result.get("status") == "invalid":
            error = error_from_record(result["error"])
            raise error if isinstance(error, EnvironmentFault) else ConfigError(violations=error.violations)
        if isinstance(result.get("identity"), dict):
            self.identity = result["identity"]
            self.room = result.get("room")
        if result.get("longest_index") is not None:
            self.longest_index = result["longest_index"]

    def _trial(self, size: int, purpose: str, done: Exit, results: Mapping[int, dict[str, Any]]) -> Trial:
        causes = {rank: found for rank, result in results.items() if (found := _cause(result)) is not None}
        common = {
            "micro_batch_size": size,
            "purpose": purpose,
            "seconds": done.seconds,
            "limit_bytes": min((r["limit_bytes"] for r in results.values() if r.get("limit_bytes")), default=None),
            "outside_bytes": max(
                (r["outside_bytes"] for r in results.values() if r.get("outside_bytes")), default=None
            ),
            "tokens_per_sample": next(
                (r["tokens_per_sample"] for r in results.values() if r.get("tokens_per_sample")), None
            ),
        }
        if not causes and all(result.get("status") == "done" for result in results.values()):
            return _fitting(common, results, self.request.ranks)
        if causes:
            # If one rank is out of memory, the trial is. Else the first: the others lose their connection to it.
            rank, cause = min(causes.items(), key=lambda item: (item[1].status != "oom", self._written(item[0])))
        else:
            rank, cause = self._without_result(done, results)
        several = self.request.ranks > 1
        return Trial(
            **common,
            status=cause.status,
            cause=cause.kind,
            reason=f"rank {rank}: {cause.reason}" if several else cause.reason,
            traceback=cause.traceback,
            rank=rank if several else None,
        )

    def _without_result(self, done: Exit, results: Mapping[int, dict[str, Any]]) -> tuple[int, ExitCause]:
        """Why a trial ended in which no rank wrote a cause: a timeout, a signal, or nothing at all."""
        unfinished = {rank: r for rank, r in results.items() if r.get("status") != "done"}
        # The other ranks wait for the one that is the least far.
        rank = min(unfinished, key=lambda k: (unfinished[k].get("stage", -1), k))
        doing = unfinished[rank].get("doing", "starting")
        if done.returncode is None and doing in _BEFORE:
            reason = f"hung while {_BEFORE[doing]}: no end within {self.request.timeout:g} s (--timeout)"
            return rank, ExitCause("crash", reason)
        if done.returncode is None:
            who = f"rank {rank} of {len(results)} hung" if len(results) > 1 else "no end"
            return rank, ExitCause("hang", f"{who} within {self.request.timeout:g} s; last seen {doing}")
        if done.returncode == 0:
            reason = f"the process ended with exit status 0 but no result; last seen {doing}"
            return rank, ExitCause("crash", reason, done.output[-2000:].strip() or None)
        if UNLOADED in done.output:
            raise EnvironmentFault(
                f"torch cannot be loaded: ulimit -v allows {resource.getrlimit(resource.RLIMIT_AS)[0]:,} bytes. Run: "
                "ulimit -v unlimited.",
                field="memory",
            )
        cause = from_exit(done.returncode, done.output)
        return rank, ExitCause(cause.kind, f"{cause.reason.rstrip('.')}; last seen {doing}", cause.traceback)


def _cause(result: Mapping[str, Any]) -> ExitCause | None:
    if result.get("status") != "failed":
        return None
    return ExitCause(result["kind"], result["reason"], result.get("traceback"))


def _fitting(common: dict[str, Any], results: Mapping[int, Mapping[str, Any]], ranks: int) -> Trial:
    """A trial that ran on every rank: the largest peak, the times of the slowest rank, the throughput of all."""
    peak = max((r["peak_memory_bytes"] for r in results.values() if r.get("peak_memory_bytes")), default=None)
    slowest = max(results.values(), key=lambda r: (r.get("timing") or {}).get("seconds", 0.0))
    timing = codec.decode(Timing, slowest["timing"]) if slowest.get("timing") else None
    contrasts = slowest.get("contrasts")
    return Trial(
        **common,
        status="fits",
        peak_memory_bytes=peak,
        step_seconds=timing.seconds if timing else None,
        samples_per_second=common["micro_batch_size"] * ranks / timing.seconds if timing else None,
        timing=timing,
        contrasts={name: codec.decode(Timing, value) for name, value in contrasts.items()} if contrasts else None,
        flops=slowest.get("flops"),
        flops_type=slowest.get("flops_type"),
        allocator_retries=max((r.get("allocator_retries") or 0 for r in results.values()), default=None),
        reserved_bytes=max((r.get("reserved_bytes") or 0 for r in results.values()), default=0) or None,
    )
