"""OLMo-core counts tokens, and its batch grows by whole factors: it waits until the batches so far are a multiple of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from batchwright.core.errors import ConfigError, PlanError, Violation, either, raise_violations
from batchwright.core.fields import switch
from batchwright.core.numbers import count, nearest_multiples

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, note, origins

_GLOBAL, _MICRO = "data_loader.global_batch_size", "train_module.rank_microbatch_size"
_LENGTHS = ("train_module.max_sequence_length", "dataset.sequence_length")
_RAMP = "trainer.callbacks.batch_size_scheduler"
_SIZES, _AT, _ON = f"{_RAMP}.batch_sizes", f"{_RAMP}.schedule", f"{_RAMP}.enabled"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    found: Fields = {}
    if not {_GLOBAL, _MICRO, _SIZES} & set(special):
        return found, []
    length = fields.get("sequence_length")
    if length is None:
        raise ConfigError(f"OLMo-core counts tokens and needs {_LENGTHS[0]} to count samples.", field="sequence_length")
    tokens = count(length.value, "sequence_length")
    if _MICRO in special:
        size = _whole(special[_MICRO].value, _MICRO, tokens)
        found["micro_batch_size"] = Given(size, special[_MICRO].origin, special[_MICRO].level)
    on = _ON not in special or switch(special[_ON].value, _ON)
    if _SIZES in special and on:
        sizes = special[_SIZES]
        ramp = schedule(sizes.value, special[_AT].value if _AT in special else [], tokens)
        whole = special.get(_GLOBAL)
        first = whole if whole and isinstance(sizes.value, list) and str(whole.value) == str(sizes.value[0]) else None
        origin = origins(sizes, special.get(_AT), special.get(_ON), first)
        found["thresholds_steps"] = Given(" ".join(f"{at}:{size}" for at, size in ramp), origin, sizes.level)
        if any(b < a for (_, a), (_, b) in pairwise(ramp)):
            found["allow_falling"] = Given(True, sizes.origin, sizes.level)
    elif _GLOBAL in special:
        found["global_batch_size_tokens"] = special[_GLOBAL]
    return found, []


def _whole(value: Any, key: str, length: int) -> int:
    tokens = count(value, key)
    if tokens % length:
        near = nearest_multiples(length, tokens)
        raise PlanError(
            f"{key}={tokens} must be a multiple of the sequence length {length}: {tokens} / {length} = {tokens / length:.2f} "
            f"samples. Nearest: {either(near)}.",
            field=key,
            given=tokens,
            nearest=near,
        )
    return tokens // length


def schedule(sizes: Any, starts: Any, length: int) -> list[tuple[int, int]]:
    """(step, samples) where OLMo-core changes the batch.

    An increase by a factor waits for a step at which the number of batches of the present size is a multiple of it. If
    the next size becomes due in the meantime, that one is waited for.

    >>> schedule([1024, 2048], [{"value": 0, "unit": "steps"}, {"value": 11, "unit": "steps"}], 1024)
    [(0, 1), (12, 2)]
    """
    events = _events(sizes, starts)
    found = [(0, _whole(events[0][1], _SIZES, length))]
    step = tokens = done = 0  # `done` are the batches so far, counted in the present size
    size = events[0][1]
    for index, (at, target, unit) in enumerate(events[1:], 1):
        due = max(step, at if unit == "steps" else step + -(-max(0, at - tokens) // size))
        switch_at = due
        ratio = target // size if target > size else 1
        switch_at += -(done + due - step) % ratio
        if index + 1 < len(events):
            later, _, unit = events[index + 1]
            next_due = later if unit == "steps" else step + -(-max(0, later - tokens) // size)
            if next_due <= switch_at:
                if target > size and events[index + 1][1] % size and size % events[index + 1][1]:
                    raise PlanError(
                        f"{_SIZES}: {size} cannot change to {events[index + 1][1]}, which becomes due before {target} begins.",
                        field=_SIZES,
                    )
                continue
        tokens += (switch_at - step) * size
        done += switch_at - step
        done = done // ratio if target > size else done * (size // target)
        step, size = switch_at, target
        found.append((step, _whole(size, _SIZES, length)))
    return found


def _events(sizes: Any, starts: Any) -> list[tuple[int, int, str]]:
    """(start, tokens, unit), checked as OLMo-core does."""
    if not isinstance(sizes, list) or not isinstance(starts, list) or len(sizes) != len(starts) or not sizes:
        raise PlanError(f"{_SIZES} and {_AT} must be two lists with the same number of items.", field=_SIZES)
    wrong: list[Violation] = []
    found: list[tuple[int, int, str]] = []
    for size, start in zip(sizes, starts, strict=True):
        value, unit = (start.get("value", ""), start.get("unit")) if isinstance(start, dict) else (start, "steps")
        found.append((count(value, _AT, least=0), count(size, _SIZES), str(unit).rpartition(".")[2]))
    units = {unit for _, _, unit in found}
    if len(units) > 1 or not units <= {"steps", "tokens"}:
        said = (
            "must have one unit"
            if len(units) > 1
            else "counts epochs, which need the size of the dataset: give steps or tokens"
        )
        raise PlanError(f"{_AT} {said}.", field=_AT)
    if found[0][0]:
        wrong.append(
            Violation(f"{_AT} starts at {found[0][0]}: it must start at 0. Nearest: 0.", _AT, found[0][0], (0,))
        )
    for (at, size, _), (after, larger, _) in pairwise(found):
        if after <= at:
            wrong.append(Violation(f"{_AT}: {after} must be above {at}, the one before it.", _AT, after, (at + 1,)))
        low, high = sorted((size, larger))
        if low == high or high % low:
            near = [n for n in nearest_multiples(size, larger) if n != size] or [2 * size]
            wrong.append(
                Violation(
                    f"{_SIZES}: {size} can only change by a whole factor, and {larger} / {size} = {larger / size:.2f}. "
                    f"Nearest: {either(near)}.",
                    _SIZES,
                    larger,
                    tuple(near),
                )
            )
    raise_violations(PlanError, wrong)
    return found


def _check(reading: Reading) -> list[Finding]:
    if _SIZES not in reading.given:
        return []
    return [
        note(
            "changes-the-batch",
            "OLMo-core multiplies the learning rate by the square root of the factor at every change of the batch.",
            _SIZES,
        )
    ]


def _write(job: Job, version: Version) -> dict[str, Any]:
    from .ramps import by_step

    length = job.need("sequence_length", "OLMo-core counts tokens")
    micro = job.need("micro_batch_size", "OLMo-core counts the micro batch of a rank")
    batch = job.need("global_batch_size", "OLMo-core counts the global batch over all devices")
    ramp = by_step(job) if job.schedule is not None else []
    if len(ramp) > 1 and all(max(a, b) % min(a, b) == 0 for (_, a), (_, b) in pairwise(ramp)):
        batch = ramp[0][1]
        grown: dict[str, Any] = {
            _SIZES: [size * length for _, size in ramp],
            _AT: [{"value": at, "unit": "steps"} for at, _ in ramp],
        }
    else:
        grown = {}
    return {
        _GLOBAL: batch * length,
        _MICRO: micro * length,
        _LENGTHS[0]: length,
        **job.named(
            {
                "train_module.tp_config.degree": "tensor_parallel",
                "train_module.pp_config.degree": "pipeline_parallel",
                "train_module.cp_config.degree": "context_parallel",
            }
        ),
        **grown,
    }


DIALECTS = (
    Dialect(
        name="olmo-core",
        title="OLMo-core",
        aliases=("olmo",),
        keys={
            **dict.fromkeys(_LENGTHS, "sequence_length"),
            "train_module.tp_config.degree": "tensor_parallel",
            "train_module.pp_config.degree": "pipeline_parallel",
            "train_module.cp_config.degree": "context_parallel",
        },
        special=frozenset({_GLOBAL, _MICRO, _SIZES, _AT, _ON}),
        resolve=_resolve,
        signs=("train_module.", "data_loader."),
        programs=("olmo_core",),
        steps={"trainer.callbacks.checkpointer.save_interval": "save", "train_module.scheduler.warmup_steps": "warmup"},
        check=_check,
        write=_write,
        unit="tokens",
        source="ai2-olmo-core 3.0.0: data/data_loader.py, train/callbacks/batch_size_scheduler.py",
    ),
)
