"""The record of a framework: which keys it has, how they are read and written, and what can be wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchwright.core.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.core.ramp.schedule import Rule, Schedule

# The fields of `rl`, the devices of a job, and how a replica is split over them.
RL_FIELDS = (
    "prompts", "generations", "train_micro_prompts", "train_micro_responses", "rollout_micro_prompts", "updates",
    "iterations", "rounds_ahead", "data_parallel_size", "micro_batch_size", "micro_batch_unit",
)  # fmt: skip
WORLD_FIELDS = ("data_parallel_size", "devices", "nodes", "devices_per_node")
PARALLEL_FIELDS = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)
RULES = ("linear", "per_device", "thresholds", "thresholds_tokens", "thresholds_steps", "doubling")  # of a ramp
AUTO = "auto"  # a value that another program fills in
DEFAULT = -2  # the level of a framework's default

Version = tuple[int, ...]
NEWEST: Version = (10**9,)


@dataclass(frozen=True)
class Given:
    """A value, its origin as text, and its level: the higher level takes precedence.

    `section` is the framework of a configuration that another one names or contains: `deepspeed`.
    """

    value: Any
    origin: str = ""
    level: int = 0
    section: str = ""


Fields = dict[str, Given]


def by_default(value: Any, title: str) -> Given:
    """A value that a framework has where none is given.

    >>> by_default(8, "TRL").origin
    "TRL's default"
    """
    return Given(value, f"{title}'s default", DEFAULT)


@dataclass(frozen=True)
class Finding:
    """Something that `check` found in a configuration: an error, or a note."""

    cause: str
    severity: str
    message: str
    key: str | None = None
    nearest: tuple[Any, ...] = ()


def error(cause: str, message: str, key: str | None = None, nearest: Collection[Any] = ()) -> Finding:
    """A finding that makes a configuration wrong.

    >>> error("ignored-key", "x is ignored.").severity
    'error'
    """
    return Finding(cause, "error", message, key, tuple(nearest))


def note(cause: str, message: str, key: str | None = None) -> Finding:
    """A finding that the user should know."""
    return Finding(cause, "note", message, key)


@dataclass(frozen=True)
class Job:
    """The batch of a configuration in batchwright's words, as far as it is known: what a dialect writes.

    `numbers` has the fields of a batch and its world, or those of `rl`. A ramp has its rule and its schedule. `steps` are
    numbers of optimizer steps by their role: warmup, save, eval, log, decay, budget.
    """

    kind: str
    numbers: Mapping[str, Any]
    rule: Rule | None = None
    schedule: Schedule | None = None
    steps: Mapping[str, int] = field(default_factory=dict[str, int])

    def get(self, name: str, default: Any = None) -> Any:
        """A number, or the default if it is not known."""
        return self.numbers.get(name, default)

    def need(self, name: str, why: str) -> Any:
        """A number that the framework cannot do without."""
        if name not in self.numbers:
            needs = "sequence_length" if name == "sequence_length" else "devices, or nodes and devices_per_node"
            raise ConfigError(f"{why}, and {name} is not known. Give {needs}.", field=needs.split(",")[0])
        return self.numbers[name]

    def placed(self) -> dict[str, int]:
        """Nodes and devices per node; devices without nodes are one node.

        >>> Job("train", {"devices": 8}).placed()
        {'nodes': 1, 'devices_per_node': 8}
        """
        if "nodes" in self.numbers and "devices_per_node" in self.numbers:
            return {name: self.numbers[name] for name in ("nodes", "devices_per_node")}
        devices = self.numbers.get("devices") or self.numbers.get("data_parallel_size")
        return {} if devices is None else {"nodes": 1, "devices_per_node": devices}

    def named(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """The numbers that are known, under the framework's keys (key -> field).

        >>> Job("train", {"micro_batch_size": 4}).named({"mbs": "micro_batch_size", "gbs": "global_batch_size"})
        {'mbs': 4}
        """
        return {key: self.numbers[name] for key, name in keys.items() if name in self.numbers}

    @property
    def updates_of_a_round(self) -> int:
        """The optimizer steps of a round.

        >>> Job("rl", {"updates": 4, "iterations": 2}).updates_of_a_round
        8
        """
        return self.get("updates", 1) * self.get("iterations", 1)


@dataclass(frozen=True, repr=False, eq=False)
class Dialect:
    """The keys of one framework.

    `keys` have the meaning of a field. `special` keys need a calculation: `resolve(special, fields)` gets those that are
    given and all fields known so far, and returns derived fields and notes. `checked` keys do not change the batch;
    `check` looks at them. `steps` count optimizer steps, or rounds with `counts_rounds`, by role, with `steps_unit` after
    the number; some have an effect only beside another key, which they need (`needs`). Keys `in_samples` have the same
    roles. Keys that other frameworks have, too, are `common`: they do not say which framework it is. `signs` do (a sign
    that ends with a dot is the beginning of keys), and so do `programs` in a command line, and keys that only this
    framework has `together`. `defaults` are the framework's own values of keys that are not given. A framework that
    `has_world` configures its devices; others leave that to a launcher. One that `accumulates_once` has one micro batch
    per step where neither a batch nor the accumulation is given; one of `rl` that trains `all_at_once` has one micro batch
    where none is given. Its job may also have a configuration of the frameworks `beside` it, with the same values; but a
    configuration that this one names decides the fields that it `yields` (with the value that they have if it does not say
    it). Some keys exist only `since` a
    version, or `until` the one that no longer has them. Versions from `ignores_triple` on accept [start, increment,
    samples] and keep the batch constant. Keys in `gradient` change what the gradient is a mean of; each has the version
    since which it is on by default, or None.
    """

    name: str
    title: str
    keys: Mapping[str, str]
    special: frozenset[str] = frozenset()
    resolve: Callable[[Fields, Fields], tuple[Fields, list[str]]] | None = None
    kind: str = "train"
    aliases: tuple[str, ...] = ()
    common: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    together: frozenset[str] = frozenset()
    checked: frozenset[str] = frozenset()
    steps: Mapping[str, str] = field(default_factory=dict[str, str])
    steps_unit: str = ""
    counts_rounds: bool = False
    needs: Mapping[str, str] = field(default_factory=dict[str, str])
    in_samples: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    versions: tuple[str, ...] = ()
    since: Mapping[str, Version] = field(default_factory=dict[str, "Version"])
    until: Mapping[str, Version] = field(default_factory=dict[str, "Version"])
    ignores_triple: Version | None = None
    gradient: Mapping[str, Version | None] = field(default_factory=dict[str, "Version | None"])
    version_of: Callable[[Collection[str]], Version] | None = None
    check: Callable[[Reading], list[Finding]] | None = None
    write: Callable[[Job, Version], dict[str, Any]] | None = None
    form: str = "yaml"
    has_world: bool = False
    accumulates_once: bool = False
    all_at_once: bool = False
    beside: tuple[str, ...] = ()
    yields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unit: str = "samples"
    source: str = ""

    def __repr__(self) -> str:
        return f"Dialect({self.name})"

    @cached_property
    def known(self) -> frozenset[str]:
        """The framework's keys, as far as they concern the batch."""
        return frozenset().union(self.keys, self.special, self.checked, self.steps, self.in_samples)

    def reads(self, key: str) -> bool:
        """Whether this key gives a field."""
        return key in self.keys or key in self.special

    def is_on(self, key: str, version: Version) -> bool:
        """Whether a key of `gradient` is on by default in this version."""
        since = self.gradient[key]
        return since is not None and version >= since


@dataclass(frozen=True)
class Reading:
    """A configuration as a framework reads it.

    `given` are the framework's keys that were found, `fields` what they mean, `passed_over` the other keys, `filled_in` those
    whose value is auto: another program gives it. `beside` are keys of the frameworks beside it.
    """

    dialect: Dialect
    version: Version
    detected_by: tuple[str, ...]
    given: Mapping[str, Given]
    fields: Fields
    notes: tuple[str, ...]
    passed_over: tuple[str, ...]
    findings: tuple[Finding, ...]
    filled_in: tuple[str, ...] = ()
    beside: Mapping[str, Given] = field(default_factory=dict[str, Given])

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        return self.given[key].value if key in self.given else default

    def first(self, *keys: str) -> str | None:
        """The first of these keys that is given."""
        return next((key for key in keys if key in self.given), None)

    def on(self, key: str, default: bool = False) -> bool:
        """Whether a switch is on; a value that is neither true nor false counts as given, so on."""
        if key not in self.given:
            return default
        return str(self.given[key].value).strip().lower() not in ("false", "no", "0", "off", "none", "null", "")


def origins(*given: Given | None) -> str:
    """Where several values come from, each place once.

    >>> origins(Given(4, "a=4"), None, Given(8, "b=8"), Given(4, "a=4"))
    'a=4 and b=8'
    """
    return " and ".join(dict.fromkeys(one.origin for one in given if one is not None and one.origin))


def count_ranks(fields: Fields) -> int | None:
    """The ranks that train, from the devices and how a replica is split; None if they are unknown."""
    from batchwright.core.batch.request import read_request, resolve_ranks

    values = {name: fields[name].value for name in (*WORLD_FIELDS, *PARALLEL_FIELDS) if name in fields}
    if "devices_per_node" in values and not {"nodes", "devices", "data_parallel_size"} & set(values):
        values["nodes"] = 1
    return resolve_ranks(read_request(values))


def parse_version(text: str) -> Version:
    """A version as numbers.

    >>> parse_version("0.18.0rc1"), parse_version("2026-08-20"), parse_version("v1")
    ((0, 18, 0), (2026, 8, 20), (1,))
    """
    import re

    numbers = [re.match(r"\d{1,9}", part) for part in re.split(r"[.\-_]", text.strip().removeprefix("v"))]
    found = tuple(int(number[0]) for number in numbers if number)
    if not found or numbers[0] is None:
        raise ConfigError(f"{text[:40]!r} is not a version, such as 0.18.", field="version", given=text[:40])
    return found


def version_text(version: Version) -> str:
    """A version as text; the newest has none.

    >>> version_text((0, 17)), version_text(NEWEST)
    ('0.17', '')
    """
    return "" if version == NEWEST else ".".join(map(str, version))
