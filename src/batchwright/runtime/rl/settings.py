"""The settings of `train_rl`: those of `train`, and where and how far ahead responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal

from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.runtime.loop.settings import Settings

Place = Literal["thread", "process", "ranks"]
PLACES: dict[Place, str] = {
    "thread": "a thread of the training process",
    "process": "worker processes of this machine, which share memory with the training process",
    "ranks": "the last ranks of a torchrun job, which get weights over torch.distributed",
}
Stale = Literal["wait", "drop"]
STALE: dict[Stale, str] = {
    "wait": "sampling waits for the policy that the planned lag allows",
    "drop": "workers without other work sample early; those groups are dropped and sampled again by a policy that is new enough",
}
_PIPELINE, _READERS, _EVALUATE = "a pipeline is not trained", "rollout_workers read the prompts", "evaluate in on_round"
# Settings of `train` that have no meaning here, and why.
_UNUSED = {
    "micro_batch_size": "the plan has train_micro_responses",
    "pipeline_parallel": _PIPELINE,
    "pipeline_schedule": _PIPELINE,
    "virtual_stages": _PIPELINE,
    "inner_microbatches": _PIPELINE,
    "allow_ragged": "groups are never split between updates",
    "num_workers": _READERS,
    "loading_hosts": _READERS,
    "ranks_per_host": _READERS,
    "read_timeout": f"{_READERS}, within rollout_timeout",
    "open_timeout": _READERS,
    "noise_every": "the noise scale is not measured",
    "peak_flops": "sampling has other FLOPs than training",
    "evaluate_every": _EVALUATE,
    "evaluation_samples": _EVALUATE,
    "evaluation_batch_size": _EVALUATE,
}
_DEFAULTS = {field.name: field.default for field in fields(Settings)}


@dataclass(frozen=True, kw_only=True)
class RLSettings(Settings):
    """`Settings`, counted in prompts where `train` counts samples and in rounds where it counts steps, and the rollout's.

    >>> RLSettings(directory="run", rollout="process", checkpoint_every=320).rollout_workers
    1
    """

    rollout: Place = "thread"
    """Where responses are sampled: a thread, worker processes, or the last ranks of torchrun's world."""
    rollout_workers: int = 1
    """Worker processes or rollout ranks."""
    rollout_threads: int | None = None
    """torch's threads in a rollout rank. A worker process has one: a forked process cannot have more."""
    overlap: bool = True
    """False: train only when the whole round is sampled. The updates are the same, and take longer."""
    stale: Stale = "wait"
    """What keeps the policy lag within the plan: `wait`, or `drop` and sample again."""
    queue: int | None = None
    """Rollout micro batches that are asked for or finished, and not trained yet, at most. By default those of rounds_ahead + 1
    rounds. What the present micro step needs is always asked for."""
    rollout_timeout: float = 1800.0
    """Seconds for one rollout micro batch, after which the worker counts as hanging."""
    rollout_restarts: int = 3
    """How often a worker process that died or hangs is replaced, without an answer in between, before the run fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        found: list[Violation] = []
        for name, known in (("rollout", PLACES), ("stale", STALE)):
            if (value := getattr(self, name)) not in known:
                message = f"{name}={value!r} is not known. One of: {', '.join(known)}."
                found.append(Violation(message, name, value, tuple(known)))
        for name, least in (("rollout_workers", 1), ("rollout_threads", 1), ("queue", 1), ("rollout_restarts", 0)):
            value = getattr(self, name)
            if value is None and name in ("rollout_threads", "queue"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                found.append(Violation(f"{name}={value!r}: must be at least {least}.", name, value, (least,)))
        timeout: object = self.rollout_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, Real) or not float(timeout) > 0:
            found.append(
                Violation(f"rollout_timeout={timeout!r}: must be above 0, in seconds.", "rollout_timeout", timeout)
            )
        if self.rollout == "thread" and self.rollout_workers > 1:
            message = f"rollout_workers={self.rollout_workers} needs rollout='process' or 'ranks': there is one thread."
            found.append(Violation(message, "rollout_workers", self.rollout_workers, (1,)))
        if self.rollout != "ranks" and self.rollout_threads not in (None, 1):
            message = (
                f"rollout_threads={self.rollout_threads!r} needs rollout='ranks': a worker process is forked, and torch hangs in "
                "one with several threads; a thread shares the number of the training process (threads). Nearest: 1."
            )
            found.append(Violation(message, "rollout_threads", self.rollout_threads, (1,)))
        if self.rollout != "ranks" and self.strategy == "fsdp2":
            message = (
                f"strategy='fsdp2' needs rollout='ranks': with rollout={self.rollout!r} one process trains, and there is nothing "
                "to shard. Nearest: strategy 'none'."
            )
            found.append(Violation(message, "strategy", "fsdp2", ("none",)))
        for name, why in _UNUSED.items():
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                message = f"{name}={value!r} has no meaning in train_rl: {why}."
                found.append(Violation(message, name, value, (_DEFAULTS[name],)))
        raise_violations(ConfigError, found)
