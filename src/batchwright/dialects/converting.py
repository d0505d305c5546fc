"""The same batch for another framework: its keys, written, read back and compared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from batchwright.core.errors import ConfigError, PlanError, Violation, raise_violations

from .checking import check
from .reading import job, read, steps_of
from .record import NEWEST, PARALLEL_FIELDS, RL_FIELDS, Dialect, Fields, Finding, Given, Job, Reading, Version

if TYPE_CHECKING:
    from batchwright.core.ramp.schedule import Schedule

EXACT, DIFFERS, NOT_EXPRESSIBLE = "exact", "differs", "not expressible"


@dataclass(frozen=True)
class Difference:
    """Something that is another in the converted configuration, or that it cannot say."""

    what: str
    status: str
    message: str


@dataclass(frozen=True)
class Conversion:
    """The keys of another framework, whether they mean the same batch, and what they leave out."""

    reading: Reading
    job: Job
    target: Dialect
    version: Version
    keys: Mapping[str, Any]
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def status(self) -> str:
        """exact, differs or not expressible: the worst of all differences."""
        found = {difference.status for difference in self.differences}
        return NOT_EXPRESSIBLE if NOT_EXPRESSIBLE in found else DIFFERS if found else EXACT


def convert(
    reading: Reading, target: Dialect, version: Version = NEWEST, present: Mapping[str, Any] | None = None
) -> Conversion:
    """The batch of a configuration in the keys of another framework; `present` are those that its file already has.

    The keys are read back as the other framework reads them, and what they mean is compared with the source.
    """
    wrong = [Violation(f.message, f.key, nearest=f.nearest) for f in reading.findings if f.cause == "misspelt-key"]
    raise_violations(ConfigError, wrong)
    made, present = job(reading), present or {}
    if made.kind == "train" and not {"global_batch_size", "micro_batch_size"} & set(made.numbers):
        raise ConfigError(
            f"The configuration says nothing about the batch: {reading.dialect.title} has neither a micro nor a global one here.",
            field="micro_batch_size",
        )
    if target.write is None or made.kind != target.kind:
        kinds = {"train": "trains on samples", "rl": "trains on the responses to prompts"}
        message = f"{reading.dialect.title} {kinds[made.kind]}, and {target.title} {kinds.get(target.kind, '')}."
        return _nothing(reading, made, target, version, Difference("batch", NOT_EXPRESSIBLE, message))
    try:
        keys = target.write(made, version)
    except ConfigError as wrong:
        if wrong.field in ("devices", "sequence_length"):
            raise  # it can be written when they are given
        return _nothing(reading, made, target, version, Difference(wrong.field or "batch", NOT_EXPRESSIBLE, str(wrong)))
    placed = _placed(made, target, keys, present)
    left_out, rounded = _steps(made, target, keys, present)
    rounded += _gradient(reading, target, version, keys)
    back = read_back(keys, target, version, made)
    try:
        again = job(back)
    except PlanError as wrong:
        # It cannot say how a replica is split, and its devices then make another number of ranks.
        again = Job(made.kind, {name: given.value for name, given in back.fields.items() if name in PARALLEL_FIELDS})
        lost = _lost(made, again, target) if back.fields else []  # without fields, a rule refused the keys
        differences = (*lost, Difference("batch", NOT_EXPRESSIBLE, str(wrong)))
        return Conversion(reading, made, target, version, keys, differences, tuple(left_out + _unread(reading)), ())
    before, after = check(reading).findings, check(back).findings
    differences = (*compare(made, again, target), *_filled(reading, made, again, target))
    differences += (*_refused(before), *_wrong(after), *_doubtful(before, after), *rounded)
    left_out += _beside(made, again, target)
    left_out += _unread(reading)
    notes = [*reading.notes, *placed]
    notes += [f.message for f in before if f.severity == "error" and f.cause == "ignored-key"]
    notes += [f.message for f in after if f.severity == "note" and f.cause == "mean-of-means"]
    if not target.has_world and "devices" in made.numbers:
        notes.insert(0, f"{target.title} gets its devices from the launcher: {_devices(made)}.")
    return Conversion(reading, made, target, version, keys, differences, tuple(left_out), tuple(notes))


def _placed(made: Job, target: Dialect, keys: dict[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Keep the file's nodes and devices if their product is the job's devices and the job gives no nodes; else return a note."""
    written = _world(target, keys)
    placing = {given.origin: keys[given.origin] for given in written.values() if given.origin in keys}
    there = {key: present[key] for key in placing if key in present}
    if {"nodes", "devices_per_node"} <= set(made.numbers) or not there or there.items() <= keys.items():
        return []
    if _product(written) == _product(_world(target, placing | there)) is not None:
        keys |= there
        return []
    changed = ", ".join(f"{key} was {_shown(value)} and is {keys[key]}" for key, value in there.items())
    return [f"The number of nodes is not given: {changed}. Give nodes and devices_per_node."]


def _world(target: Dialect, keys: Mapping[str, Any]) -> Fields:
    """The nodes and the devices of each, as the target reads them, with their keys as origins."""
    fields = _read([(key, Given(value, key)) for key, value in keys.items()], target.name, {}).fields
    return {name: fields[name] for name in ("nodes", "devices_per_node") if name in fields}


def _product(world: Fields) -> int | None:
    """The devices of all nodes, or None where the number is not known before the job runs."""
    numbers = [str(given.value) for given in world.values()]
    return prod(map(int, numbers)) if len(world) == 2 and all(map(str.isdecimal, numbers)) else None


def _nothing(reading: Reading, made: Job, target: Dialect, version: Version, why: Difference) -> Conversion:
    return Conversion(reading, made, target, version, {}, (why,), tuple(_unread(reading)), ())


def _devices(made: Job) -> str:
    nodes, each = made.get("nodes"), made.get("devices_per_node")
    devices = f"{made.get('devices')} device{'s' * (made.get('devices') > 1)}"
    return f"{devices} ({nodes} node{'s' * (nodes > 1)} × {each})" if nodes and each else devices


def read_back(keys: Mapping[str, Any], target: Dialect, version: Version, made: Job) -> Reading:
    """The written keys as the target reads them, on the devices of the job."""
    from .record import version_text

    name = f"{target.name}@{version_text(version)}" if version != NEWEST else target.name
    entries = [(key, Given(value, f"written: {key}", 0)) for key, value in keys.items()]
    world = (
        {}
        if target.has_world
        else {n: made.get(n) for n in ("devices", "nodes", "devices_per_node") if n in made.numbers}
    )
    back = _read(entries, name, world)
    lost = [n for n in PARALLEL_FIELDS if made.get(n, 1) != 1 and n not in back.fields]
    if (lost or not world) and not target.has_world and "data_parallel_size" in made.numbers:
        # Its replicas are split over devices in a way that the target cannot say: the ranks stay.
        back = _read(entries, name, {"data_parallel_size": made.get("data_parallel_size")})
    return back


def _read(entries: list[tuple[str, Given]], name: str, world: Mapping[str, Any]) -> Reading:
    return read(
        entries, name=name, world={key: Given(value, f"--{key.replace('_', '-')}", 2) for key, value in world.items()}
    )


def _refused(before: Iterable[Finding]) -> list[Difference]:
    """Rules of the source that its own keys break: what it trains with is not known. An ignored key is a note."""
    passed = ("ignored-key", "counts-responses", "ramp-with-accumulation")
    errors = [f for f in before if f.severity == "error" and f.cause not in passed]
    stages = [f for f in errors if f.cause == "stage"]
    found = [Difference(f.key or f.cause, DIFFERS, f.message) for f in errors if f.cause != "stage"]
    if stages:
        more = f" Stages that break it: {len(stages)}." if len(stages) > 1 else ""
        found.append(Difference("stage", DIFFERS, f"The source breaks a rule itself: {stages[0].message}{more}"))
    return found


def _filled(reading: Reading, made: Job, again: Job, target: Dialect) -> list[Difference]:
    """Micro batches that the source does not count in responses, in a framework that does, or that fills them by its own keys."""
    name = "train_micro_responses"
    if made.kind != "rl" or name in made.numbers:
        return []
    what = f"{reading.dialect.title}'s micro batch has no number of responses here"
    if name in again.numbers:
        return [Difference(name, DIFFERS, f"{what}; in {target.title} it is {again.get(name)} responses.")]
    if target is reading.dialect:
        return []
    message = f"{what}. {target.title} fills its own up to a number of tokens, too, and that number is not converted."
    return [Difference(name, DIFFERS, message)]


def _wrong(after: Iterable[Finding]) -> list[Difference]:
    """Rules of the target that the written keys break."""
    return [Difference(f.key or f.cause, NOT_EXPRESSIBLE, f.message) for f in after if f.severity == "error"]


def _doubtful(before: Iterable[Finding], after: Iterable[Finding]) -> list[Difference]:
    """What is read in one way and may run in another: responses as samples, ramps with accumulation, and late stages."""
    found = [
        Difference(f.cause, NOT_EXPRESSIBLE, f"{f.message} The keys here count samples.")
        for f in before
        if f.cause == "counts-responses"
    ]
    ramps = [f for f in (*before, *after) if f.cause == "ramp-with-accumulation"]
    late = [{f for f in one if f.cause == "float-boundary"} for one in (before, after)]
    ramps += [f for f in (*before, *after) if f.message in {g.message for g in late[0]} ^ {g.message for g in late[1]}]
    return found + [Difference(f.cause, DIFFERS, f.message) for f in dict.fromkeys(ramps)]


def _gradient(reading: Reading, target: Dialect, version: Version, keys: dict[str, Any]) -> list[Difference]:
    """Add the keys that change what the gradient is a mean of; a difference where the target does not have them."""
    found: list[Difference] = []
    for key in reading.dialect.gradient:
        default = reading.dialect.is_on(key, reading.version)
        on = reading.on(key, default)
        same = next((one for one in target.gradient if one.split(".")[-1] == key.split(".")[-1]), None)
        if same is not None and on != target.is_on(same, version):
            keys[same] = on
        if same is not None or on == default:
            continue
        message = f"{key}={str(on).lower()} changes what the gradient is a mean of, and {target.title} has no such key."
        found.append(Difference(key, DIFFERS, message))
    return found


_RL = (
    "prompts_per_round", "generations_per_prompt", "updates_per_pass", "iterations", "data_parallel_size",
    "train_micro_responses", "rollout_micro_prompts", "rounds_ahead",
)  # fmt: skip


def compare(made: Job, again: Job, target: Dialect) -> list[Difference]:
    """What differs between a job and what was read back."""
    if made.kind == "rl":
        return _compare_rounds(made, again, target)
    found = _lost(made, again, target)
    for name in ("global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size"):
        value, other = made.get(name), again.get(name)
        if value is not None and other != value:
            message = f"{name} is {value}, and {other if other is not None else 'unknown'} in {target.title}."
            found.append(Difference(name, DIFFERS if other is not None else NOT_EXPRESSIBLE, message))
    if made.schedule is not None and len(made.schedule.segments) > 1:
        found += _compare_ramps(made.schedule, again.schedule, target)
    elif again.schedule is not None and len(again.schedule.segments) > 1:
        found.append(Difference("ramp", DIFFERS, "the batch is constant, and grows in the converted configuration."))
    return found


def _lost(made: Job, again: Job, target: Dialect) -> list[Difference]:
    """How a replica is split over devices, where the target has no key for it. Experts do not change the batch."""
    return [
        Difference(name, NOT_EXPRESSIBLE, f"{target.title} has no key for {name}={made.get(name)}.")
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")
        if made.get(name, 1) not in (1, again.get(name))
    ]


def _compare_ramps(first: Schedule, second: Schedule | None, target: Dialect) -> list[Difference]:
    last = first.segments[-1].global_batch_size
    if second is None or len(second.segments) < 2:
        start = first.segments[0].global_batch_size
        message = f"{target.title} has no ramp that grows like this: the batch would be {last} from the first step, not {start}."
        return [Difference("ramp", NOT_EXPRESSIBLE, message)]
    shape = [[(s.first_step, s.start_sample, s.global_batch_size) for s in one.segments] for one in (first, second)]
    if shape[0] == shape[1]:
        return []
    ours, theirs = next(
        ((a, b) for a, b in zip(shape[0], shape[1], strict=False) if a != b), (shape[0][-1], shape[1][-1])
    )
    step, steps = min(ours[0], theirs[0]), (first.ramp_steps, second.ramp_steps)
    samples = second.segments[-1].start_sample - first.segments[-1].start_sample
    message = (
        f"the batches differ from step {step:,} on; the last stage starts at step {steps[0]:,}, and at {steps[1]:,} in "
        f"{target.title}: {abs(steps[1] - steps[0]):,} step{'s' * (abs(steps[1] - steps[0]) != 1)} "
        f"{'later' if steps[1] >= steps[0] else 'earlier'}, after {abs(samples):,} {'more' if samples >= 0 else 'fewer'} samples."
    )
    if second.segments[-1].global_batch_size != last:
        message += f" It ends at {second.segments[-1].global_batch_size}, not at {last}."
    return [Difference("ramp", DIFFERS, message)]


def _compare_rounds(made: Job, again: Job, target: Dialect) -> list[Difference]:
    from batchwright.core.rl import rl

    def numbers(one: Job) -> Any:
        return rl(**{name: value for name, value in one.numbers.items() if name in RL_FIELDS})

    first, second = numbers(made), numbers(again)
    micro, found = "train_micro_responses", list[Difference]()
    if micro in made.numbers and micro not in again.numbers:
        message = f"{micro} is {made.get(micro)}, and not a number of responses in {target.title}."
        found.append(Difference(micro, DIFFERS, message))
    for name in _RL:
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs and (name != micro or {micro} <= set(made.numbers) & set(again.numbers)):
            lost = name in ("rollout_micro_prompts", "rounds_ahead", "iterations")
            status = NOT_EXPRESSIBLE if lost else DIFFERS
            found.append(Difference(name, status, f"{name} is {ours}, and {theirs} in {target.title}."))
    return found


def _steps(
    made: Job, target: Dialect, keys: dict[str, Any], present: Collection[str]
) -> tuple[list[str], list[Difference]]:
    """Add the keys that count optimizer steps: a step has the same samples. Returns those that the target lacks.

    Where the target counts rounds, a number of steps may be no whole number of them: a difference.
    """
    missing: list[str] = []
    rounded: list[Difference] = []
    each = made.updates_of_a_round if target.counts_rounds else 1
    for role, number in made.steps.items():
        if any(role in (target.steps.get(key), target.in_samples.get(key)) for key in keys):
            continue
        fits = (
            key for key, one in target.steps.items() if one == role and target.needs.get(key, key) in {key, *present}
        )
        key = next(fits, None)
        if key is None:
            needed = [
                f"{k} needs {target.needs[k]}" for k, one in target.steps.items() if one == role and k in target.needs
            ]
            why = f" ({needed[0]}, which is not there)" if needed else ""
            every = role in ("save", "eval", "log")
            missing.append(f"{role} {'every' if every else 'of'} {number} steps{why}")
        else:
            if number % each:
                near = max(1, round(number / each))
                message = (
                    f"{role} of {number} updates is {number / each:.2f} rounds of {each} updates, and {target.title} counts "
                    f"rounds: {key}={near} is {near * each} updates."
                )
                rounded.append(Difference(key, DIFFERS, message))
                number = near * each
            number //= each
            keys[key] = f"{number}{target.steps_unit}" if target.steps_unit else number
    return missing, rounded


def _beside(made: Job, again: Job, target: Dialect) -> list[str]:
    """Numbers that do not change the batch and have no key in the target."""
    found: list[str] = []
    skipped = ("global_batch_size", "micro_batch_size", "accumulation_steps", "pipeline_passes", *_PLACED)
    for name, value in made.numbers.items():
        if name in skipped or name in RL_FIELDS or again.get(name) == value or value in (None, 1):
            continue
        if name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
            continue  # a difference
        extra = ""
        if name == "samples" and made.schedule is None and "global_batch_size" in made.numbers:
            extra = f" ({value / made.get('global_batch_size'):g} steps)"
        found.append(f"{name}={value}{extra}")
    return found


_PLACED = ("data_parallel_size", "devices", "nodes", "devices_per_node")


def _unread(reading: Reading) -> list[str]:
    """Keys of the source that led to no number: what they say is in no key of the target."""
    used = {word for name, given in reading.fields.items() if name not in _UNSAID for word in _words(given.origin)}
    first: dict[str, int] = {}  # by role: a second key that counts other steps is not converted
    counted = steps_of(reading).items()
    used |= {key for key, n in counted if first.setdefault(reading.dialect.steps[key], n) == n}
    neutral = ("", "1", "1.0", "-1", "-1.0", "0", "false", "none", "null")
    return [
        f"{key}={_shown(given.value)}"
        for key, given in reading.given.items()
        if reading.dialect.keys.get(key) not in reading.fields
        and key not in used
        and key not in reading.dialect.gradient
        and str(given.value).strip().lower() not in neutral
    ]


_UNSAID = ("round", "allow_ragged")  # how the reader chose the numbers


def _words(origin: str) -> list[str]:
    return origin.replace("=", " ").replace(": ", " ").split()


def _shown(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= 60 else shown[:59] + "…"
