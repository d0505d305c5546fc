"""Is a configuration right? What its batch is, which rules of its framework it breaks, and what it ignores."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import isfinite
from types import NoneType
from typing import Any, cast

from batchwright.core.errors import ConfigError, PlanError, Violation

from .reading import RAMP, job, steps_of
from .record import Finding, Job, Reading, error, note, version_text

# The causes that a configuration can have, besides those of the equation (`batch`, `stage`).
CAUSES = (
    "accumulates-twice", "batch", "changes-the-batch", "counts-micro-steps", "counts-responses", "counts-steps",
    "deprecated-key", "eval-batch", "excluded-key", "float-boundary", "grows-by-epoch", "ignored-key", "mean-of-means",
    "misspelt-key", "missing-key", "not-changed-with-the-batch", "one-generation", "padded-batch", "ramp-with-accumulation",
    "ramp-with-pipeline", "rows-of-a-micro-batch", "splits-a-group", "stage", "steps-of-the-first-batch", "unknown-key",
    "value",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What `check` says about a configuration."""

    reading: Reading
    job: Job | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        reading = self.reading
        keys = {key: given.value for key, given in reading.given.items()}
        return {
            "ok": self.ok,
            "framework": reading.dialect.name,
            "framework_version": version_text(reading.version) or None,
            "detected_by": list(reading.detected_by),
            "equation": None if self.job is None else equation(self.job),
            "numbers": {} if self.job is None else {k: _plain(v) for k, v in self.job.numbers.items()},
            "keys": {key: _plain(value) for key, value in keys.items()},
            "findings": [
                {
                    "cause": f.cause,
                    "severity": f.severity,
                    "message": f.message,
                    "key": f.key,
                    "nearest": [_plain(n) for n in f.nearest],
                }
                for f in self.findings
            ],
            "passed_over": len(reading.passed_over),
            "passed_over_keys": list(reading.passed_over),
            "notes": list(reading.notes),
        }


def _plain(value: Any) -> Any:
    """A value as JSON has it; nan, infinity and others as text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in cast("list[Any]", value)]
    plain = isinstance(value, (int, str, NoneType)) or (isinstance(value, float) and isfinite(value))
    return value if plain else str(value)


def check(reading: Reading, against: Reading | None = None, allow: Collection[str] = ()) -> Report:
    """Every finding about a configuration; compared with an earlier one, also what did not change with the batch."""
    found = [*reading.findings, *_of_other_versions(reading)]
    made: Job | None = None
    broken = any(finding.cause == "value" for finding in found)
    if not broken:
        try:
            made = job(reading)
        except PlanError as wrong:
            cause = "value" if isinstance(wrong, ConfigError) else "batch"
            found += [_finding(cause, v) for v in wrong.violations]
    if made is not None and made.schedule is not None:
        found += _stages(reading, made)
    if reading.dialect.check is not None and not broken:
        try:
            found += reading.dialect.check(reading)
        except PlanError as wrong:  # a value that cannot be read: also what the batch fails with
            found += [_finding("value", v) for v in wrong.violations]
    if made is not None:
        found += _counted_in_steps(reading, made)
        if against is not None:
            found += _not_changed(reading, made, against)
    causes = set(allow)
    found = [replace(f, severity="note") if f.cause in causes else f for f in dict.fromkeys(found)]
    return Report(reading, made, tuple(sorted(found, key=lambda f: f.severity != "error")))


def _of_other_versions(reading: Reading) -> list[Finding]:
    """Keys that this version of the framework does not have: it was named, or other keys show which it is."""
    dialect, version, found = reading.dialect, reading.version, list[Finding]()
    for key, given in reading.given.items():
        since, until = dialect.since.get(key), dialect.until.get(key)
        if since and version < since:
            which, others = (
                f"it came with {version_text(since)}",
                [k for k, end in dialect.until.items() if end <= since],
            )
        elif until and version >= until:
            which, others = (
                f"versions before {version_text(until)} had it",
                [k for k, n in dialect.since.items() if n >= until],
            )
        else:
            continue
        by, other = version_text(version) or "of today", reading.first(*others)
        mixed = f" {other} is a key of other versions: give the keys of one." if other else ""
        text = f"{key}={given.value}: {dialect.title} {by} does not have this key, {which}.{mixed}"
        found.append(error("unknown-key", text, key))
    return found


def _finding(cause: str, wrong: Violation) -> Finding:
    return error(cause, wrong.message, wrong.field, wrong.nearest)


def _stages(reading: Reading, made: Job) -> list[Finding]:
    """Every stage of a ramp on the devices of the job: frameworks check only the current one, when it starts."""
    from batchwright.core.batch.request import READERS, read_request
    from batchwright.core.ramp.ramp import ramp
    from batchwright.core.ramp.request import read_ramp

    if "devices" not in made.numbers:
        return []
    values = {name: given.value for name, given in reading.fields.items()}
    request = read_request({name: value for name, value in values.items() if name in READERS})
    wanted = {name: values[name] for name in RAMP if name in values}
    try:
        ramp(request, read_ramp(wanted | {"node_policy": "constant"}))
    except PlanError as wrong:
        return [_finding("stage", v) for v in wrong.violations]
    return []


def _counted_in_steps(reading: Reading, made: Job) -> list[Finding]:
    """Keys that count optimizer steps: in samples they depend on the batch."""
    counted, step, schedule = steps_of(reading), _step(reading, made), made.schedule
    if not counted or step is None:
        return []
    if schedule is not None and len(schedule.segments) > 1:
        shown = [
            f"{key}={reading.value(key)} ends at sample {schedule.at_step(n).start_sample:,}"
            for key, n in counted.items()
        ]
        text = f"These keys count optimizer steps, and the first steps are smaller: {'; '.join(shown)}."
        return [note("counts-steps", text, next(iter(counted)))]
    each, unit, steps = step
    shown = [f"{key}={reading.value(key)} ({n * each:,} {unit})" for key, n in counted.items()]
    text = f"These keys count {steps} of {each:,} {unit}: {', '.join(shown)}. Change them when the batch changes."
    return [note("counts-steps", text, next(iter(counted)))]


def _step(reading: Reading, made: Job) -> tuple[int, str, str] | None:
    """What the framework counts as a step: how many, of what, and its name; None if the batch is not known."""
    if made.kind == "train":
        batch = made.get("global_batch_size")
        return None if batch is None else (batch, "samples", "optimizer steps")
    responses = made.get("prompts") * made.get("generations")
    if reading.dialect.counts_rounds:
        return responses, "responses", "rounds"
    return responses // made.get("updates", 1), "responses", "optimizer steps"


def _not_changed(reading: Reading, made: Job, earlier: Reading) -> list[Finding]:
    """Keys in steps that are the same although the batch is another."""
    try:
        before = _step(earlier, job(earlier))
    except PlanError as wrong:
        return [note("batch", f"The earlier configuration has no valid batch: {wrong}")]
    after, unchanged = _step(reading, made), steps_of(earlier).items() & steps_of(reading).items()
    if before is None or after is None or before[0] == after[0]:
        return []
    (old, *_), (new, unit, _) = before, after
    found: list[Finding] = []
    for key, role in reading.dialect.steps.items():
        n = dict(unchanged).get(key)
        if n is None or role == "log":
            continue
        near, ending = max(1, round(n * old / new)), reading.dialect.steps_unit
        found.append(
            error(
                "not-changed-with-the-batch",
                f"{key}={reading.value(key)} is as before, and the batch was {old:,} and is {new:,}: {n * old:,} {unit} became "
                f"{n * new:,}. Nearest: {near}{ending} ({near * new:,} {unit}).",
                key,
                (f"{near}{ending}" if ending else near,),
            )
        )
    return found


def equation(made: Job) -> str:
    """The batch in one line, as far as it is known.

    >>> equation(Job("train", {"micro_batch_size": 8, "accumulation_steps": 4}))
    'global batch = 8 micro × 4 accumulation × data-parallel; the number of devices is not given'
    """
    if made.kind == "rl":
        prompts, group, updates = made.get("prompts"), made.get("generations"), made.get("updates", 1)
        part = prompts // updates
        numbers = {"prompt": prompts, "update": made.updates_of_a_round, "rank": made.get("data_parallel_size", 1)}
        whole, passes, ranks = (f"{n} {word}{'s' * (n != 1)}" for word, n in numbers.items())
        micro, split = made.get("train_micro_responses"), ""
        if micro is not None:
            steps = part * group // (micro * numbers["rank"])
            split = f"{micro} micro × {steps} accumulation × {numbers['rank']} data-parallel = "
        return (
            f"{part * group} responses per update = {split}{part} prompt{'s' * (part != 1)} × {group} "
            f"generation{'s' * (group != 1)}; a round has {whole} and {passes}, on {ranks}"
        )
    names = {"micro_batch_size": "micro", "accumulation_steps": "accumulation", "data_parallel_size": "data-parallel"}
    parts = [f"{made.get(name)} {word}" if name in made.numbers else word for name, word in names.items()]
    text = f"{made.get('global_batch_size', 'global batch')} = {' × '.join(parts)}"
    if made.schedule is not None and len(made.schedule.segments) > 1:
        text += f", grown from {made.schedule.segments[0].global_batch_size} in {len(made.schedule.segments)} stages"
    if "data_parallel_size" not in made.numbers:
        text += "; the number of devices is not given"
    return text
