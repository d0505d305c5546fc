"""Keys of other frameworks, converted to batchwright's fields: one small file per framework.

A key with the meaning of a field is renamed (`keys`); others are derived from several keys (`special`, `resolve`). Each
value keeps its origin, and a higher level (file < override < flag) takes precedence. Several frameworks share keys: the
framework that the keys belong to (`detect`) says what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import unknown_key

from .record import PARALLEL_FIELDS, WORLD_FIELDS, Dialect, Fields, Given

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
    ranked: list[tuple[int, Dialect, list[str]]] = []
    for dialect in frameworks(kind):
        programs = [word for word in words if any(_starts_program(word, program) for program in dialect.programs)]
        signs = [sign for sign in dialect.signs if sign in found or (sign.endswith(".") and _starts(sign, found))]
        own = [key for key in found if dialect.knows(key)]
        rare = [key for key in own if key not in dialect.common]
        together = dialect.together if found >= dialect.together else frozenset[str]()
        # A program of this name without any key of the framework may be another one.
        shown = 100 * bool(together) + (100 if own or signs else 1) * bool(programs)
        points = shown + 10 * len(signs) + 3 * len(rare) + len(own)
        if programs or signs or rare:
            ranked.append((points, dialect, sorted({*programs, *signs, *rare, *together})))
    if not ranked:
        return None, []
    best = max(ranked, key=lambda one: one[0])
    # A configuration beside another framework's, such as DeepSpeed's, may have more keys than that one.
    hosts = [
        one
        for one in ranked
        if best[1].name in one[1].beside
        and any(one[1].reads(k) and not best[1].knows(k) for k in found - one[1].common)
    ]
    return max(hosts or [best], key=lambda one: one[0])[1:]


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
) -> Resolved:
    """Fields from keys in any spelling: `own` are batchwright's names; `lenient` ignores unknown keys.

    >>> resolve([("data.micro_batch_size", Given(4))]).fields["micro_batch_size"].value
    4
    """
    wrong: list[Violation] = []
    fields: Fields = {}
    specials: dict[str, Fields] = {}
    ignored: list[str] = []
    entries = list(entries)
    names = [key for key, _ in entries]
    main = framework or detect(names, kind=kind)[0]
    known = dialects(kind)
    if main is not None:
        known = (main, *(d for d in known if d is not main))
    used: list[str] = []
    candidates = _candidates(own, names, main, kind)
    later: dict[str, str] = {}
    for key, given in entries:
        # A key of the detected framework has its meaning there, whatever it means in others.
        readers = (main,) if main is not None and main.reads(key) else known
        dialect = next((d for d in readers if key in d.special and (d is main or key not in d.common)), None)
        if _is_later(key, given, next((d.keys[key] for d in readers if key in d.keys), key)):
            later[key] = f"{key}={given.value} is known only when the job runs: it counts as not given."
            continue
        if dialect is not None:
            _put(specials.setdefault(dialect.name, {}), key, given, wrong)
            continue
        dialect = next((d for d in readers if key in d.keys and (d is main or key not in d.common)), None)
        if key in own:
            _put(fields, key, given, wrong)
        elif dialect is not None:
            used.append(dialect.name)
            _put(fields, dialect.keys[key], given, wrong)
        else:
            if lenient and (any(d.knows(key) for d in known) or not is_misspelt(key, candidates)):
                ignored.append(key)
            else:
                wrong.append(unknown_key(key, given.value, candidates))
    raise_violations(ConfigError, wrong)
    notes = list(later.values())
    if kind == "rl" and not later and (ranks := ranks_of(fields)):
        fields["data_parallel_size"] = ranks
    for dialect in known:
        if later and dialect is known[-1]:
            continue  # a number of nodes that is known later is not the launcher's default
        if dialect.resolve and (dialect is framework or dialect.name in specials or dialect.name in used):
            derived, more = dialect.resolve(specials.get(dialect.name, {}), fields)
            notes.extend(more)
            for name, given in derived.items():
                _put(fields, name, given, wrong)
    raise_violations(ConfigError, wrong)
    return Resolved(fields, tuple(notes), tuple(ignored))


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
    from batchwright.core.batch.request import read_request, resolve_ranks

    values = {name: given.value for name, given in world.items()}
    if "devices_per_node" in values and not {"nodes", "devices"} & set(values):
        values["nodes"] = 1
    ranks = resolve_ranks(read_request(values))
    if ranks is None:
        return None
    shown = " and ".join(given.origin for given in world.values() if given.origin)
    return Given(ranks, shown, max(given.level for given in world.values()))


def is_about_a_batch(key: str) -> bool:
    """Whether an unknown key or flag may concern the training batch.

    >>> [is_about_a_batch(key) for key in ("train_batch_size", "--grad-accum", "per_device_eval_batch_size", "lr")]
    [True, True, False, False]
    """
    name = key.lower().replace("-", "_")
    if any(word in name for word in ("eval", "valid", "test", "infer", "decod", "norm", "fusion", "reduce")):
        return False
    return "batch" in name or "accum" in name or name.endswith(("parallelism", "parallel_size", "parallel_degree"))


def misspelt_flags(
    flags: Iterable[str], own: Collection[str], used: Collection[str] = (), kind: str = "train"
) -> list[Violation]:
    """Violations for ignored flags of a pasted line that look like a misspelt key about the batch; `used` are its keys."""
    found: list[Violation] = []
    known = _candidates(own, used, detect(used, kind=kind)[0], kind)
    for flag in flags:
        key = flag.partition("=")[0].lstrip("-").replace("-", "_")
        other = any(key.endswith(f"_{k}") or k.endswith(f".{key}") for k in known)  # a longer name that exists
        if flag.startswith("--") and not other and is_about_a_batch(key) and is_misspelt(key, known):
            found.append(unknown_key(key, "", known))
    return found


def _candidates(own: Collection[str], used: Collection[str], main: Dialect | None, kind: str) -> list[str]:
    """The keys that a misspelt key may stand for: batchwright's, and those of the framework whose keys are also used.

    A key close to one of another framework is not misspelt: `model.name` in a file for NeMo is not MaxText's `model_name`.
    """
    launchers = _launchers()  # they start programs of any framework
    chosen = [main] if main is not None else frameworks(kind)
    return [*own, *launchers.keys, *(k for d in chosen for k in (*d.keys, *d.special))]


def is_misspelt(key: str, candidates: Iterable[str]) -> bool:
    """Whether a key is one or two letters from a known one, in a section of the same name or a misspelt one.

    >>> is_misspelt("data.micro_batch_sise", ["data.micro_batch_size"]), is_misspelt("save_steps", ["save_steps_ratio"])
    (True, False)
    """
    section, _, last = key.rpartition(".")
    for name in candidates:
        other, _, known = name.rpartition(".")
        if section == other and min(len(last), len(known)) > 5 and _letters_apart(last, known):
            return True
        if last == known and len(section) > 3 and _letters_apart(section, other):
            return True
    return False


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
    elif there.level == given.level and str(there.value) != str(given.value):
        both = [str(g.value)[:40] for g in (there, given)]
        where = [g.origin[-80:] or "as a value" for g in (there, given)]  # a long path ends with the key
        wrong.append(
            Violation(
                f"{name} has two different values: {both[0]} ({where[0]}) and {both[1]} ({where[1]}). Give one.",
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
