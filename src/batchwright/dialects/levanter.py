"""Levanter: `trainer.train_batch_size` is a number, or a list of {start: step, value: batch}."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from batchwright.core.errors import PlanError
from batchwright.core.fields import switch
from batchwright.core.numbers import count

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, error

_BATCH, _MICRO = "trainer.train_batch_size", "trainer.per_device_parallelism"
_RAGGED = "trainer.allow_nondivisible_batch_size"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    found: Fields = {}
    given = special.get(_BATCH)
    if given and isinstance(given.value, list):
        pairs = sorted(_pairs(given.value))
        found["thresholds_steps"] = Given(" ".join(f"{at}:{size}" for at, size in pairs), given.origin, given.level)
        if any(b < a for (_, a), (_, b) in pairwise(pairs)):
            found["allow_falling"] = Given(True, given.origin, given.level)
    elif given and str(given.value) != "-1":
        found["global_batch_size"] = given
    micro = special.get(_MICRO)
    if micro and str(micro.value) != "-1":
        found["micro_batch_size"] = micro
    if _RAGGED in special and switch(special[_RAGGED].value, _RAGGED):
        found["allow_ragged"] = Given(True, special[_RAGGED].origin, special[_RAGGED].level)
    return found, []


def _pairs(phases: list[Any]) -> list[tuple[int, int]]:
    """(step, batch) of every phase."""
    found: list[tuple[int, int]] = []
    for phase in phases:
        if isinstance(phase, dict) and {"start", "value"} <= set(phase):
            at, size = phase["start"], phase["value"]
        elif isinstance(phase, list) and len(phase) == 2:
            at, size = phase
        else:
            raise PlanError(f"{_BATCH}: {str(phase)[:60]} is not {{start: STEP, value: BATCH}}.", field=_BATCH)
        found.append((count(at, f"{_BATCH}.start", least=0), count(size, f"{_BATCH}.value")))
    return found


def _check(reading: Reading) -> list[Finding]:
    if str(reading.value(_BATCH, 512)) == "-1" and str(reading.value(_MICRO, -1)) == "-1":
        return [error("missing-key", f"{_BATCH} and {_MICRO} are both -1: Levanter needs one of them.", _BATCH)]
    return []


def _write(job: Job, version: Version) -> dict[str, Any]:
    from .ramps import by_step, micro_of_all_stages

    batch: Any = job.need("global_batch_size", "Levanter counts the batch of all devices")
    if job.schedule is not None and len(job.schedule.segments) > 1:
        batch = [{"start": at, "value": size} for at, size in by_step(job)]
    micro = micro_of_all_stages(job)
    return {
        _BATCH: batch,
        **({} if micro is None else {_MICRO: micro}),
        **job.named(
            {
                "trainer.model_axis_size": "tensor_parallel",
                "model.seq_len": "sequence_length",
            }
        ),
    }


DIALECTS = (
    Dialect(
        name="levanter",
        title="Levanter",
        keys={
            "trainer.model_axis_size": "tensor_parallel",
            "model.seq_len": "sequence_length",
        },
        special=frozenset({_BATCH, _MICRO, _RAGGED}),
        resolve=_resolve,
        signs=("trainer.tracker.", "trainer.mp", "trainer.model_axis_size", "trainer.num_train_steps"),
        programs=("levanter",),
        steps={"trainer.num_train_steps": "budget", "trainer.steps_per_eval": "eval"},
        defaults={_BATCH: 512},
        check=_check,
        write=_write,
        source="levanter 1.2.dev1644: trainer.py, schedule.py",
    ),
)
