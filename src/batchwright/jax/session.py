"""One process of a JAX run from start to end: set up, resume, record, save, stop. The steps in between are in loop.py."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from batchwright.core.codec import encode
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.ramp.schedule import Schedule
from batchwright.rundir.status import Status
from batchwright.runtime.data.hosts import Hosts
from batchwright.runtime.data.order import same_length
from batchwright.runtime.loop.base import LoopBase
from batchwright.runtime.loop.settings import Settings
from batchwright.runtime.loop.signals import StopSignals
from batchwright.runtime.ranks import Ranks
from batchwright.runtime.state.fingerprint import READING_DIGEST, dataset_digest, fingerprint, parameters_digest
from batchwright.runtime.state.saved import Saved

from .checkpoint import Checkpoints
from .process import from_all, from_first, maxima
from .task import JaxTask

# Settings that this loop does not have; it refuses other values than the default. `allow_ragged` is not one of them: `run`
# sets it for every kind of task, and here `JaxTask.blank` decides.
_NOT_HERE = (
    "strategy", "pipeline_parallel", "pipeline_schedule", "virtual_stages", "inner_microbatches", "device", "threads",
    "asynchronous", "evaluate_every", "evaluation_samples", "evaluation_batch_size", "accumulate_dtype", "grad_scaler",
    "noise_every", "num_workers", "read_ahead", "read_timeout", "peak_flops",
)  # fmt: skip


class Session(LoopBase):
    """The parameters, position and records of one launch in one process."""

    def __init__(
        self, task: JaxTask, schedule: Schedule, settings: Settings, ranks: Ranks, signals: StopSignals
    ) -> None:
        bare = ranks.local_size is None and ranks.size == 1
        super().__init__(schedule, settings, signals, rank=jax.process_index(), ranks=jax.process_count(), bare=bare)
        self.task = task
        self._set_order(same_length(from_all("len(dataset)", lambda: len(task.dataset)), "process"))

    def set_up(self) -> None:
        """Build the mesh and the parameters, load the newest checkpoint, open the ledger and the events."""
        settings, task = self.settings, self.task
        self.mesh = task.build_mesh()
        self.ranks = self.mesh.size  # a rank is a device, in the events, the status and the plan
        self.arrays = task.start(self.mesh, settings.seed)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.arrays["params"]))
        self.checkpoints = Checkpoints(
            settings.checkpoints, keep=settings.keep, may_save=lambda: self.may_save is not None and self.may_save()
        )
        self.facts = self._facts()
        self._check_resume(lambda: self.checkpoints.newest(verify=False))
        if self.rank == 0:
            self._claim()
        self._claimed(maxima(self.launch)[0])
        self.saved = self.checkpoints.newest()
        if self.saved is None:
            self._begin()
        else:
            self._resume(self.saved)
        self._open_ledger(self.rank, jax.process_count())
        self._open_events(ranks=self.ranks, strategy="jax", device=jax.default_backend(), parameters=self.parameters)

    def _facts(self) -> dict[str, Any]:
        settings = self.settings
        named = jax.tree_util.tree_flatten_with_path(self.arrays["params"])[0]
        digest = parameters_digest((jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in named)
        shape = {"shape": encode(settings.learning_rate), "lr_scaling": settings.lr_scaling}
        return fingerprint(
            self.order,
            self.schedule,
            digest,
            from_first(READING_DIGEST, self._digest, first=self._first_reader()),
            ranks=self.ranks,
            micro_batch_size=encode(settings.micro_batch_size),
            learning_rate=shape,
        )

    def _digest(self) -> str | None:
        return dataset_digest(self.task.dataset, self.order.size)

    def _first_reader(self) -> int:
        """The first process that reads."""
        given = self.settings.loading_hosts
        return 0 if given is None else Hosts.of(jax.process_count(), given).readers[0]

    def _resume(self, saved: Saved) -> None:
        found, before = self._changes(saved), time.time()
        self.arrays = self.checkpoints.load(saved, self.arrays)
        self.times["load_seconds"] = time.time() - before
        self._continue(saved, found)

    def _broken(self) -> bool:
        """Whether the last loss and the weights are not finite: that is not saved, unless the user has set no limit."""
        if not self.nonfinite_in_a_row or not self.settings.stop_after_nonfinite:
            return False
        finite = jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), self.arrays["params"])
        return not all(bool(one) for one in jax.tree.leaves(finite))

    def _save(self) -> None:
        """Save a checkpoint, unless there is one of this position."""
        self.emit("saving", now=True, step=self.step, samples=self.position)
        if self.saved is not None and self.saved.position == self.position:
            return
        assert self.ledger is not None
        before = time.time()
        self.ledger.close()
        saved = self.checkpoints.save(
            self.arrays, step=self.step, position=self.position, launch=self.launch, state=self._state()
        )
        seconds = time.time() - before
        self.times["save_seconds"] += seconds
        self._saved(saved, seconds)

    def _stop(self, reason: str) -> Status:
        ended, broken = time.time(), self._broken()
        if broken and reason != "signal":
            self._fail_nonfinite()
        if not broken:
            self._save()
        self.times["stop_seconds"] = time.time() - ended
        status = self._ended(reason)
        maxima(0)  # no process exits before the status is written
        return status


def refuse(settings: Settings) -> None:
    default = {field.name: field.default for field in fields(Settings)}
    given = [(name, getattr(settings, name)) for name in _NOT_HERE if getattr(settings, name) != default[name]]
    raise_violations(
        ConfigError,
        [
            Violation(f"{name}={value!r}: the loop for a JaxTask has no such setting.", name, value)
            for name, value in given
        ],
    )
