"""Keys of other frameworks, converted to batchwright's fields: one small file per framework.

A key with the meaning of a field is renamed (`keys`); others are derived from several keys (`special`, `resolve`). Each
value keeps its origin, and a higher level (file < override < flag) takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import unknown_key


@dataclass(frozen=True)
class Given:
    """A value, its origin as text, and its level: the higher level takes precedence."""

    value: Any
    origin: str = ""
    level: int = 0


Fields = dict[str, Given]


@dataclass(frozen=True)
class Dialect:
    """The keys of one framework.

    `resolve(special, fields)` gets the given special keys and all fields known so far; it returns derived fields and
    notes.
    """

    name: str
    title: str
    keys: Mapping[str, str]
    special: frozenset[str] = frozenset()
    resolve: Callable[[Fields, Fields], tuple[Fields, list[str]]] | None = None


@dataclass(frozen=True)
class Resolved:
    """Fields, notes on how they were read, and the ignored keys, which do not concern a batch."""

    fields: Fields
    notes: tuple[str, ...]
    ignored: tuple[str, ...]


def dialects() -> tuple[Dialect, ...]:
    """All dialects."""
    from . import huggingface, launchers, maxtext, megatron, nemo

    return (nemo.DIALECT, maxtext.DIALECT, huggingface.DIALECT, megatron.DIALECT, launchers.DIALECT)


def is_foreign(key: str) -> bool:
    """Whether a framework has this key."""
    return any(key in d.keys or key in d.special for d in dialects())


def resolve(entries: Iterable[tuple[str, Given]], *, own: Collection[str] = READERS, lenient: bool = False) -> Resolved:
    """Fields from keys in any spelling: `own` are batchwright's names; `lenient` ignores unknown keys.

    >>> resolve([("data.micro_batch_size", Given(4))]).fields["micro_batch_size"].value
    4
    """
    wrong: list[Violation] = []
    fields: Fields = {}
    specials: dict[str, Fields] = {}
    ignored: list[str] = []
    known = dialects()
    used: list[str] = []
    entries = list(entries)
    candidates = _candidates(own, [key for key, _ in entries])
    for key, given in entries:
        dialect = next((d for d in known if key in d.special), None)
        if dialect is not None:
            _put(specials.setdefault(dialect.name, {}), key, given, wrong)
            continue
        dialect = next((d for d in known if key in d.keys), None)
        if key in own:
            _put(fields, key, given, wrong)
        elif dialect is not None:
            used.append(dialect.title)
            _put(fields, dialect.keys[key], given, wrong)
        else:
            if lenient and not _is_misspelt(key, candidates):
                ignored.append(key)
            else:
                wrong.append(unknown_key(key, given.value, candidates))
    raise_violations(ConfigError, wrong)
    notes: list[str] = []
    for dialect in known:
        if dialect.resolve and (dialect.name in specials or dialect.title in used):
            derived, more = dialect.resolve(specials.get(dialect.name, {}), fields)
            notes.extend(more)
            for name, given in derived.items():
                _put(fields, name, given, wrong)
    raise_violations(ConfigError, wrong)
    return Resolved(fields, tuple(notes), tuple(ignored))


def is_about_a_batch(key: str) -> bool:
    """Whether an unknown key or flag may concern the training batch.

    >>> [is_about_a_batch(key) for key in ("train_batch_size", "--grad-accum", "per_device_eval_batch_size", "lr")]
    [True, True, False, False]
    """
    name = key.lower().replace("-", "_")
    if any(word in name for word in ("eval", "valid", "test", "infer", "decod", "norm", "fusion", "reduce")):
        return False
    return "batch" in name or "accum" in name or name.endswith(("parallelism", "parallel_size", "parallel_degree"))


def misspelt_flags(flags: Iterable[str], own: Collection[str], used: Collection[str] = ()) -> list[Violation]:
    """Violations for ignored flags of a pasted line that look like a misspelt key about the batch; `used` are its keys."""
    found: list[Violation] = []
    known = _candidates(own, used)
    for flag in flags:
        key = flag.partition("=")[0].lstrip("-").replace("-", "_")
        other = any(key.endswith(f"_{k}") or k.endswith(f".{key}") for k in known)  # a longer name that exists
        if flag.startswith("--") and not other and is_about_a_batch(key) and _is_misspelt(key, known):
            found.append(unknown_key(key, "", known))
    return found


def _candidates(own: Collection[str], used: Collection[str]) -> list[str]:
    """The keys that a misspelt key may stand for: batchwright's, and those of the frameworks whose keys are also used.

    A key close to one of another framework is not misspelt: `model.name` in a file for NeMo is not MaxText's `model_name`.
    """
    from . import launchers

    frameworks = [d for d in dialects() if d is not launchers.DIALECT]  # a launcher starts programs of any framework
    used_ones = [d for d in frameworks if any(key in d.keys or key in d.special for key in used)]
    return [*own, *launchers.DIALECT.keys, *(k for d in used_ones or frameworks for k in (*d.keys, *d.special))]


def _is_misspelt(key: str, candidates: list[str]) -> bool:
    """Whether a key is one or two letters from a known one in the same section."""
    from difflib import get_close_matches

    level = [name for name in candidates if name.count(".") == key.count(".")]
    return bool(get_close_matches(key, level, n=1, cutoff=0.9))


def _put(fields: Fields, name: str, given: Given, wrong: list[Violation]) -> None:
    there = fields.get(name)
    if there is None or there.level < given.level:
        fields[name] = given
    elif there.level == given.level and str(there.value) != str(given.value):
        both = [str(g.value)[:40] for g in (there, given)]
        where = [g.origin[:80] or "as a value" for g in (there, given)]
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
