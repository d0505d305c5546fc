"""Trials of a task: write what to run, start it, read the ranks' results, and say what became of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import ConfigError, MissingExtraError
from batchwright.processes.endings import ExitCause, from_exit

from . import process
from .records import Trial
from .request import Request
from .timing import Timing
from .zygote import Zygote

_LIMIT_STEPS = 2  # the second has the optimizer's state beside it
_MICRO_STEPS = 2  # of the last, where the job accumulates; the second has the gradients beside it, as any more have
_BUILDING = "building the task"  # the worker's word


@dataclass
class TaskRunner:
    """Makes trials of `FILE.py:function`; what the first one finds out (identity, longest sample) serves the others."""

    request: Request
    scratch: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    longest_index: int | None = None
    _zygote: Zygote | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def _micro_steps(self) -> int:
        return min(_MICRO_STEPS, self.request.accumulation_steps)

    def conditions(self, purpose: str) -> dict[str, Any]:
        """What a trial's verdict depends on beside the task itself."""
        r = self.request
        own = {"seconds": r.seconds} if purpose == "throughput" else {"steps": _LIMIT_STEPS}
        return {
            "memory": r.memory, "margin": r.margin, "ranks": r.ranks, "longest": r.longest, "device": r.device,
            "workers": r.workers, "micro_steps": self._micro_steps if purpose == "limit" else 1, **own,
        }  # fmt: skip

    def describe(self) -> Mapping[str, Any]:
        """The identity, from a process that builds the task and runs nothing."""
        trial = self._run(1, "describe", "limit")
        return {} if trial.status != "fits" else self.identity

    def limit(self, size: int) -> Trial:
        """Whether a size runs."""
        return self._run(size, "limit", "limit")

    def evaluation(self, size: int) -> Trial:
        """Whether an evaluation batch runs amid training."""
        return self._run(size, "evaluation", "evaluation")

    def throughput(self, size: int, contrasts: bool = False) -> Trial:
        """How fast a size is."""
        return self._run(size, "throughput", "throughput", contrasts)

    def _run(self, size: int, mode: str, purpose: str, contrasts: bool = False) -> Trial:
        r = self.request
        limited = mode in ("limit", "evaluation")
        for old in self.scratch.glob("result*"):
            old.unlink()
        spec = {
            "target": r.target, "args": dict(r.args), "micro_batch_size": size, "mode": mode, "ranks": r.ranks,
            "memory": r.memory, "margin": r.margin, "limited": limited,
            "host_memory": process.physical_memory() // 2 // r.ranks, "device": r.device, "steps": _LIMIT_STEPS,
            "micro_steps": self._micro_steps, "longest": r.longest,
            "longest_index": self.longest_index, "workers": r.workers, "seconds": r.seconds,
            "contrasts": contrasts, "result": str(self.scratch / "result"),
        }  # fmt: skip
        path = self.scratch / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        done = self._start(path, timed=mode == "throughput")
        results = {rank: self._result(rank) for rank in range(r.ranks)}
        for result in results.values():
            self._learn(result)
        return self._trial(size, purpose, done, results)

    def _start(self, spec: Path, timed: bool) -> process.Exit:
        r = self.request
        env = process.environment(limited=not timed, ranks=r.ranks)
        if r.ranks == 1 and not r.worker and not timed and sys.platform == "linux":
            if self._zygote is None or not self._zygote.alive:
                self.close()
                self._zygote = Zygote(env, self.scratch)
            return process.run_forked(self._zygote, spec, timeout=r.timeout)
        command = [*r.worker, str(spec)]
        if not r.worker:
            command = [sys.executable, "-P", "-m"]
            if r.ranks > 1:
                command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(r.ranks), "-m"]
            command += ["batchwright.probe.worker", str(spec)]
        return process.run(command, env, timeout=r.timeout, scratch=self.scratch)

    def close(self) -> None:
        """End what stands by for further trials."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _result(self, rank: int) -> dict[str, Any]:
        """A rank's last word; what cannot be read counts as none."""
        try:
            found = json.loads((self.scratch / f"result.{rank}").read_text(encoding="utf-8"))
            return found if isinstance(found, dict) and "status" in found else {}
        except (OSError, ValueError):
            return {}

    def _learn(self, result: Mapping[str, Any]) -> None:
        if result.get("status") == "invalid":
            error = result["error"]
            raise ConfigError(error["message"], field=error["field"], given=error["given"], nearest=error["nearest"])
        if isinstance(result.get("identity"), dict):
            self.identity = result["identity"]
        if result.get("longest_index") is not None:
            self.longest_index = result["longest_index"]

    def _trial(self, size: int, purpose: str, done: process.Exit, results: Mapping[int, dict[str, Any]]) -> Trial:
        deaths = {rank: d for rank, result in results.items() if (d := _cause(result)) is not None}
        common = {
            "micro_batch_size": size,
            "purpose": purpose,
            "seconds": done.seconds,
            "limit_bytes": _least(results, "limit_bytes"),
            "tokens_per_sample": next(
                (r["tokens_per_sample"] for r in results.values() if r.get("tokens_per_sample")), None
            ),
        }
        if not deaths and all(result.get("status") == "done" for result in results.values()):
            return _fitting(common, results, self.request.ranks)
        if deaths:  # the smallest verdict wins: out of memory on one rank is out of memory
            rank, death = min(deaths.items(), key=lambda item: (item[1].status != "oom", item[0]))
        else:
            rank, death = self._silent(done, results)
        several = self.request.ranks > 1
        reason = f"rank {rank}: {death.reason}" if several else death.reason
        return Trial(
            **common, status=death.status, death=death.kind, reason=reason, traceback=death.traceback,
            rank=rank if several else None,
        )  # fmt: skip

    def _silent(self, done: process.Exit, results: Mapping[int, dict[str, Any]]) -> tuple[int, ExitCause]:
        """The death of a trial in which no rank said why: a timeout, a signal, or nothing at all."""
        unfinished = {rank: r for rank, r in results.items() if r.get("status") != "done"}
        # The rank that came least far is the one the others wait for.
        rank = min(unfinished, key=lambda k: (unfinished[k].get("stage", -1), k))
        doing = unfinished[rank].get("doing", "starting")
        if done.returncode is None and doing == _BUILDING:  # no smaller size will help
            return rank, ExitCause("crash", f"hung while the task was built: no end within {self.request.timeout:g} s")
        if done.returncode is None:
            who = f"rank {rank} of {len(results)} hung" if len(results) > 1 else "no end"
            return rank, ExitCause("hang", f"{who} within {self.request.timeout:g} s; last seen {doing}")
        if done.returncode == 0:
            return rank, ExitCause("crash", f"the process ended with exit status 0 but no result; last seen {doing}",
                               done.output[-2000:].strip() or None)  # fmt: skip
        if "No module named 'torch'" in done.output:
            raise MissingExtraError("probing a task needs torch. Install it with: pip install 'batchwright[torch]'.")
        death = from_exit(done.returncode, done.output)
        return rank, ExitCause(death.kind, f"{death.reason}; last seen {doing}", death.traceback)


def _cause(result: Mapping[str, Any]) -> ExitCause | None:
    if result.get("status") != "death":
        return None
    return ExitCause(result["kind"], result["reason"], result.get("traceback"))


def _least(results: Mapping[int, Mapping[str, Any]], key: str) -> int | None:
    return min((r[key] for r in results.values() if r.get(key)), default=None)


def _fitting(common: dict[str, Any], results: Mapping[int, Mapping[str, Any]], ranks: int) -> Trial:
    """A trial that ran on every rank: the largest peak, the slowest rank's times, the job's throughput."""
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
        allocator_retries=max((r.get("allocator_retries") or 0 for r in results.values()), default=None),
        reserved_bytes=max((r.get("reserved_bytes") or 0 for r in results.values()), default=0) or None,
    )
