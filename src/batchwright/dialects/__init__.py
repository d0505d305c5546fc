"""Keys of other frameworks, converted to batchwright's fields: one small file per framework.

A key with the meaning of a field is renamed (`keys`); others are derived from several keys (`special`, `resolve`). Each
value keeps its origin, and a higher level (file < override < flag) takes precedence. Several frameworks share keys: the
framework that the keys belong to (`detect`) says what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import unknown_key

from .record import (
    AUTO,
    DEFAULT,
    PARALLEL_FIELDS,
    RL_FIELDS,
    RULES,
    WORLD_FIELDS,
    Dialect,
    Fields,
    Given,
    by_default,
    count_ranks,
    origins,
)

# One module per framework, with one record or several. Where keys fit several frameworks, the first is chosen.
MODULES = (
    "nemo", "maxtext", "huggingface", "megatron", "megatron_bridge", "deepspeed", "lightning", "trl", "verl", "accelerate",
    "torchtitan", "olmo_core", "levanter", "axolotl", "llama_factory", "nanotron", "gpt_neox", "composer", "openrlhf",
    "nemo_rl",
)  # fmt: skip


@dataclass(frozen=True)
class Resolved:
    """Fields, notes on how they were read, and the ignored keys, which do not concern a batch."""

    fields: Fields
    notes: tuple[str, ...]
    ignored: tuple[str, ...]


@cache
def dialects(kind: str | None = None) -> tuple[Dialect, ...]:
    """All dialects, or those of training (`train`) or reinforcement learning (`rl`); launchers start both."""
    from importlib import import_module

    found = [one for name in MODULES for one in import_module(f".{name}", __name__).DIALECTS]
    return (*(d for d in found if kind in (None, d.kind)), _launchers())


def _launchers() -> Dialect:
    from . import launchers

    return launchers.DIALECT


def frameworks(kind: str | None = None) -> tuple[Dialect, ...]:
    """The dialects of frameworks: all but the launchers."""
    return dialects(kind)[:-1]


def framework(name: str) -> Dialect:
    """The dialect with this name or alias.

    >>> framework("megatron").title
    'Megatron-LM'
    """
    wanted = name.strip().lower().replace("_", "-")
    for dialect in frameworks():
        if wanted in (dialect.name, *dialect.aliases):
            return dialect
    names = [d.name for d in frameworks()]
    raise ConfigError(
        f"{name[:40]!r} is not a framework that batchwright reads. They are: {', '.join(names)}.",
        field="framework",
        given=name[:40],
        nearest=names,
    )


def is_foreign(key: str, kind: str | None = "train") -> bool:
    """Whether a key belongs to frameworks only: no key of batchwright, and no word that any program may use."""
    return any(d.reads(key) and key not in d.common for d in dialects(kind))


def detect(
    keys: Collection[str], words: Collection[str] = (), kind: str | None = None
) -> tuple[Dialect | None, list[str]]:
    """The framework that these keys and the words of a command line belong to, and what shows it.

    >>> detect(["train_micro_batch_size_per_gpu", "zero_optimization.stage"])[0].name
    'deepspeed'
    """
    found = set(keys)
    every = tuple(program for dialect in frameworks(kind) for program in dialect.programs)
    words = [word for word in words if word.rsplit("/", 1)[-1].startswith(every)]  # of thousands, a few
    ranked: list[tuple[int, Dialect, list[str]]] = []
    for dialect in frameworks(kind):
        programs = [word for word in words if any(_starts_program(word, program) for program in dialect.programs)]
        signs = [sign for sign in dialect.signs if sign in found or (sign.endswith(".") and _starts(sign, found))]
        own = found & dialect.known
        rare = [key for key in own if key not in dialect.common]
        together = dialect.together if found >= dialect.together else frozenset[str]()
        # A program of this name without any key of the framework may be another one, and so may one whose keys others read.
        counts = (own or signs) and not (programs and _has_rivals(dialect, found, kind))
        shown = 100 * bool(together) + (100 if counts else 1) * bool(programs)
        points = shown + 10 * len(signs) + 3 * len(rare) + len(own)
        if programs or signs or rare or together:
            ranked.append((points, dialect, sorted({*programs, *signs, *rare, *together})))
    if not ranked:
        return None, []
    best = max(ranked, key=lambda one: one[0])
    # A configuration beside another framework's, such as DeepSpeed's, may have more keys than that one.
    hosts = [one for one in ranked if best[1].name in one[1].beside and _is_host(one[1], best[1], found)]
    return max(hosts or [best], key=lambda one: one[0])[1:]


def _is_host(dialect: Dialect, other: Dialect, found: set[str]) -> bool:
    """Whether some keys are those of this framework only: it reads them, or they are its signs."""
    own = found - other.known
    return any(dialect.reads(key) for key in own - dialect.common) or not own.isdisjoint(dialect.signs)


def _has_rivals(dialect: Dialect, found: Collection[str], kind: str | None) -> bool:
    """Whether another framework reads keys that only it has, and that this one does not read."""
    others = [one for one in frameworks(kind) if one is not dialect and one.name not in dialect.beside]
    return any(not dialect.reads(k) and one.reads(k) and k not in one.common for one in others for k in found)


def _starts_program(word: str, program: str) -> bool:
    """Whether a word of a command line is this program, or a module or script whose name begins with it.

    >>> _starts_program("/opt/trl/bin/python", "trl"), _starts_program("verl.trainer.main_ppo", "verl")
    (False, True)
    """
    name = word.rsplit("/", 1)[-1]
    return name == program or name.startswith((f"{program}.", f"{program}_", f"{program}-"))


def _starts(section: str, keys: Iterable[str]) -> bool:
    return any(key.startswith(section) for key in keys)


def resolve(
    entries: Iterable[tuple[str, Given]],
    *,
    own: Collection[str] = READERS,
    lenient: bool = False,
    kind: str = "train",
    framework: Dialect | None = None,
    defaults: bool = True,
) -> Resolved:
    """Fields from keys in any spelling: `own` are batchwright's names; `lenient` ignores unknown keys.

    What the framework's keys do not say has its default there; without `defaults`, or where a batch is asked for by
    batchwright's own names, it is left to be derived.

    >>> resolve([("data.micro_batch_size", Given(4))]).fields["micro_batch_size"].value
    4
    """
    wrong: list[Violation] = []
    fields: Fields = {}
    specials: dict[str, Fields] = {}
    ignored: list[str] = []
    entries = list(entries)
    main = framework or detect([key for key, given in entries if given.value != AUTO], kind=kind)[0]
    named = [one for one in entries if main is not None and one[1].section in main.beside]
    entries = [one for one in entries if main is None or one[1].section not in main.beside]
    later_filled = {key for key, given in entries if given.value == AUTO}
    entries = [(key, given) for key, given in entries if given.value != AUTO]
    names = [key for key, _ in entries]
    ours: set[str] = set()  # keys of batchwright that are none of the framework's
    known = dialects(kind)
    inside = known  # the frameworks whose keys count in a file: its own, those beside it, and launchers
    if main is not None:
        known = (main, *(d for d in known if d is not main))
        ours = {k for k, given in entries if k in own and not main.reads(k) and not (lenient and given.level == 0)}
        defaults = defaults and not ours & _BATCH
        beside = [d for d in known if d.name in main.beside]
        inside = (main, *beside, known[-1])
        entries = [(key, _as_strong(key, given, entries, main, beside)) for key, given in entries]
        entries += _defaults(main, names, batch=defaults, world=not ours & set(WORLD_FIELDS))
    used: list[str] = []
    candidates = _candidates(own, main, kind)
    later: dict[str, str] = {}
    for key, given in entries:
        # A key of the detected framework has its meaning there, whatever it means in others.
        passed = main is not None and lenient and given.level == 0 and not any(d.reads(key) for d in inside)
        readers = () if passed else (main,) if main is not None and main.reads(key) else known
        dialect = next((d for d in readers if key in d.special and (d is main or key not in d.common)), None)
        if _is_later(key, given, next((d.keys[key] for d in readers if key in d.keys), key)):
            later[key] = f"{key}={given.value} is known only when the job runs: it counts as not given."
            continue
        if dialect is not None:
            _put(specials.setdefault(dialect.name, {}), key, given, wrong)
            continue
        dialect = next((d for d in readers if key in d.keys and (d is main or key not in d.common)), None)
        if key in own and not passed:
            _put(fields, key, given, wrong)
        elif dialect is not None:
            used.append(dialect.name)
            _put(fields, dialect.keys[key], given, wrong)
        else:
            if lenient and (any(key in d.known for d in known) or not candidates.is_misspelt(key)):
                ignored.append(key)
            else:
                wrong.append(unknown_key(key, given.value, candidates.keys))
    raise_violations(ConfigError, wrong)
    notes = list(later.values())
    if kind == "rl" and not later and (ranks := ranks_of(fields)):
        fields["data_parallel_size"] = ranks
    if main is not None and named:
        notes += _yielded(main, named, fields, ours)
    for dialect in known:
        if later and dialect is known[-1]:
            continue  # a number of nodes that is known later is not the launcher's default
        if dialect.resolve and (dialect is main or dialect.name in specials or dialect.name in used):
            derived, more = dialect.resolve(specials.get(dialect.name, {}), fields)
            notes.extend(more)
            for name, given in derived.items():
                if defaults or given.level != DEFAULT or name not in _BATCH:
                    _put(fields, name, given, wrong)
    for key, given in named:
        field = _field_of(key, given)
        if field is None:
            ignored.append(key)
        elif given.value != AUTO:
            _put(fields, field, _equal(given, field, fields, ours), wrong)
    raise_violations(ConfigError, wrong)
    if "nodes" in fields and fields["nodes"].level == DEFAULT and not {"devices", "devices_per_node"} & set(fields):
        del fields["nodes"]  # a default of one node says nothing about the devices
    counted = {*fields, *(main.keys.get(key, "") for key in later_filled)} if main is not None else set[str]()
    if main is not None and defaults and main.accumulates_once and not _COUNTED & counted:
        fields["accumulation_steps"] = by_default(1, main.title)
    return Resolved(fields, tuple(notes), tuple(ignored))


# Any of these says how many micro batches a step has.
_COUNTED = {"global_batch_size", "global_batch_size_tokens", "accumulation_steps", *RULES}
# Asked for by batchwright's names, these leave the rest of the batch to be derived.
_BATCH = {*_COUNTED, "micro_batch_size", "max_micro_batch_size", "recipe", *RL_FIELDS} - set(WORLD_FIELDS)


def _defaults(main: Dialect, given: Collection[str], *, batch: bool, world: bool) -> list[tuple[str, Given]]:
    """The framework's own values of keys that are not given: those about the batch, and those about the devices."""
    return [
        (key, by_default(value, main.title))
        for key, value in main.defaults.items()
        if key not in given and (world if main.keys.get(key) in WORLD_FIELDS else batch)
    ]


def _as_strong(
    key: str, value: Given, entries: Iterable[tuple[str, Given]], main: Dialect, beside: Iterable[Dialect]
) -> Given:
    """A value of a framework beside this one, as strong as this one's: the two must agree, wherever they are given."""
    field = next((d.keys[key] for d in beside if key in d.keys), None)
    if main.reads(key) or field is None:
        return value
    return replace(value, level=max([g.level for k, g in entries if main.keys.get(k) == field], default=value.level))


def _field_of(key: str, given: Given) -> str | None:
    """The field of a key in a configuration that another one names."""
    return framework(given.section).keys.get(key)


def _equal(given: Given, field: str, fields: Fields, ours: Collection[str]) -> Given:
    """A value of a configuration that another one names, at the level of the other's value: the two must agree."""
    there = fields.get(field)
    return given if there is None or there.level > 1 or field in ours else replace(given, level=there.level)


def _yielded(main: Dialect, named: Sequence[tuple[str, Given]], fields: Fields, ours: Collection[str]) -> list[str]:
    """Put what the named configuration decides in place of the framework's own values; returns notes about these."""
    notes: list[str] = []
    other = framework(named[0][1].section)
    for field, value in main.yields.items():
        theirs = [given for key, given in named if _field_of(key, given) == field]
        given, there = theirs[-1] if theirs else Given(value, f"{other.title}'s default"), fields.get(field)
        if given.value == AUTO or (there is not None and (there.level > 1 or field in ours)):
            continue
        fields[field] = given if there is None else replace(given, level=there.level)
        if there is not None and there.level != DEFAULT and str(there.value) != str(given.value):
            notes.append(f"{main.title} takes {given.value} ({given.origin}), not {there.value} ({there.origin}).")
    return notes


def _is_later(key: str, given: Given, field: str) -> bool:
    """Whether a number of devices is known only when the job runs: $VAR, ${...}, gpu, auto, -1, or a range N:M."""
    text = str(given.value).strip()
    if given.level > 1 or not (field in WORLD_FIELDS or key.endswith(".devices")):
        return False
    return text.startswith("$") or (key not in WORLD_FIELDS and field in WORLD_FIELDS and _LATER(text) is not None)


_LATER = re.compile(r"[cgx]pu|auto|-1|\d+:\d+").fullmatch


def ranks_of(fields: Fields) -> Given | None:
    """The ranks that train, from the devices and how a replica is split; None if they are given or unknown."""
    world = {name: fields[name] for name in (*WORLD_FIELDS, *PARALLEL_FIELDS) if name in fields}
    if "data_parallel_size" in world or not world:
        return None
    ranks = count_ranks(fields)
    if ranks is None:
        return None
    return Given(ranks, origins(*world.values()), max(given.level for given in world.values()))


def is_about_a_batch(key: str) -> bool:
    """Whether an unknown key or flag may concern the training batch.

    >>> [is_about_a_batch(key) for key in ("train_batch_size", "--grad-accum", "limit_val_batches", "lr")]
    [True, True, False, False]
    """
    name = key.lower().replace("-", "_")
    others = ("eval", "valid", "val_", "test", "infer", "decod", "norm", "fusion", "reduce", "fp32")
    if any(word in name for word in others):
        return False
    return "batch" in name or "accum" in name or name.endswith(("parallelism", "parallel_size", "parallel_degree"))


def misspelt_flags(
    keys: Iterable[str], own: Collection[str], used: Collection[str] = (), kind: str = "train"
) -> list[Violation]:
    """Violations for ignored flags of a pasted line that look like a misspelt key about the batch; `used` are its keys."""
    known = _candidates(own, detect(used, kind=kind)[0], kind)
    return [
        unknown_key(key, "", known.keys)
        for key in keys
        if is_about_a_batch(key)
        and known.is_misspelt(key)
        and not any(key.endswith(f"_{k}") or k.endswith(f".{key}") for k in known.keys)  # a longer name that exists
    ]


def _candidates(own: Collection[str], main: Dialect | None, kind: str) -> Candidates:
    """The keys that a misspelt key may stand for: batchwright's, and those of the framework whose keys are also used.

    A key close to one of another framework is not misspelt: `model.name` in a file for NeMo is not MaxText's `model_name`.
    """
    launchers = _launchers()  # they start programs of any framework
    chosen = [main] if main is not None else frameworks(kind)
    return Candidates([*own, *launchers.keys, *(k for d in chosen for k in (*d.keys, *d.special))])


class Candidates:
    """Keys that a misspelt one may stand for."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(dict.fromkeys(keys))
        self._inside: dict[str, list[str]] = {}  # the last parts by section
        self._sections: dict[str, list[str]] = {}  # the sections by last part
        for section, _, last in (key.rpartition(".") for key in self.keys):
            self._inside.setdefault(section, []).append(last)
            self._sections.setdefault(last, []).append(section)

    def is_misspelt(self, key: str) -> bool:
        """Whether a key is one or two letters from one of these, in a section of the same name or a misspelt one.

        >>> Candidates(["data.micro_batch_size"]).is_misspelt("data.micro_batch_sise")
        True
        >>> Candidates(["save_steps_ratio"]).is_misspelt("save_steps")
        False
        """
        section, _, last = key.rpartition(".")
        near = (name for name in self._inside.get(section, ()) if min(len(last), len(name)) > 5)
        if any(_letters_apart(last, name) for name in near):
            return True
        return len(section) > 3 and any(_letters_apart(section, name) for name in self._sections.get(last, ()))


def _letters_apart(a: str, b: str) -> bool:
    """Whether two words differ, by one or two letters that are wrong, missing, extra or exchanged."""
    if a == b or abs(len(a) - len(b)) > 2 or len(set(a) ^ set(b)) > 4:
        return False
    start = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    end = next((n for n, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[: len(a) - end], b[: len(b) - end]  # what is left between the equal beginning and the equal end
    if max(len(a), len(b)) <= 2:
        return True
    # Two places: each letter of the longer one that is not in the shorter one, in order.
    row = list(range(len(b) + 1))
    for n, x in enumerate(a, 1):
        row, above = [n], row
        for m, y in enumerate(b, 1):
            row.append(min(above[m] + 1, row[-1] + 1, above[m - 1] + (x != y)))
    return row[-1] <= 2


def _put(fields: Fields, name: str, given: Given, wrong: list[Violation]) -> None:
    there = fields.get(name)
    if there is None or there.level < given.level:
        fields[name] = given
    elif there.level == given.level and name in PARALLEL_FIELDS and "1" in (str(there.value), str(given.value)):
        # Two keys for one way to split a replica, such as an old and a new one: 1 says that this one is not used.
        fields[name] = given if str(there.value) == "1" else there
    elif there.level == given.level and str(there.value) != str(given.value):
        both = [str(g.value)[:40] for g in (there, given)]
        # A long path ends with the key.
        where = [" and ".join(p[-80:] for p in g.origin.split(" and ")) or "as a value" for g in (there, given)]
        wrong.append(
            Violation(
                f"{name} has two different values: {both[0]} ({where[0]}) and {both[1]} ({where[1]}). Give "
                + ("the same in both, or auto in the second." if given.section else "one."),
                name,
                both[1],
                tuple(both),
            )
        )


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys.

    >>> flatten({"data": {"micro_batch_size": 4}})
    {'data.micro_batch_size': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(cast("Mapping[Any, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
