"""Other people's spellings, read into ours: one small file per framework.

A key is renamed where its meaning is ours (`keys`), or worked out from several (`special`, `resolve`). Values keep
where they were given, and a later level (file < override < flag) wins over an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import unknown_key


@dataclass(frozen=True)
class Given:
    """A value, where it was given (for people to read), and how strongly: the higher level wins."""

    value: Any
    origin: str = ""
    level: int = 0


Fields = dict[str, Given]


@dataclass(frozen=True)
class Dialect:
    """How one framework spells a batch.

    `resolve(special, fields)` gets the special keys that were used and all fields known so far; it returns the fields
    that follow, and notes.
    """

    name: str
    title: str
    keys: Mapping[str, str]
    special: frozenset[str] = frozenset()
    resolve: Callable[[Fields, Fields], tuple[Fields, list[str]]] | None = None


@dataclass(frozen=True)
class Resolved:
    """Our fields, notes on how they were read, and the keys that have nothing to do with a batch."""

    fields: Fields
    notes: tuple[str, ...]
    ignored: tuple[str, ...]


def dialects() -> tuple[Dialect, ...]:
    """All dialects that are read."""
    from . import huggingface, launchers, maxtext, megatron, nemo

    return (nemo.DIALECT, maxtext.DIALECT, huggingface.DIALECT, megatron.DIALECT, launchers.DIALECT)


def is_foreign(key: str) -> bool:
    """Whether some framework spells a batch with this key."""
    return any(key in d.keys or key in d.special for d in dialects())


def resolve(entries: Iterable[tuple[str, Given]], *, own: Collection[str] = READERS, lenient: bool = False) -> Resolved:
    """Our fields from keys in any spelling: `own` are ours; `lenient` leaves out keys nobody knows.

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
            if lenient and not _is_a_slip(key, candidates):
                ignored.append(key)
            else:
                wrong.append(unknown_key(key, given.value, candidates))
    raise_violations(ConfigError, wrong)
    notes: list[str] = []
    for dialect in known:
        if dialect.resolve and (dialect.name in specials or dialect.title in used):
            derived, said = dialect.resolve(specials.get(dialect.name, {}), fields)
            notes.extend(said)
            for name, given in derived.items():
                _put(fields, name, given, wrong)
    raise_violations(ConfigError, wrong)
    return Resolved(fields, tuple(notes), tuple(ignored))


def is_about_a_batch(key: str) -> bool:
    """Whether a key or a flag that nobody knows may still be about the batch of training.

    >>> [is_about_a_batch(key) for key in ("train_batch_size", "--grad-accum", "per_device_eval_batch_size", "lr")]
    [True, True, False, False]
    """
    name = key.lower().replace("-", "_")
    if any(word in name for word in ("eval", "valid", "test", "infer", "decod", "norm", "fusion", "reduce")):
        return False
    return "batch" in name or "accum" in name or name.endswith(("parallelism", "parallel_size", "parallel_degree"))


def slips(flags: Iterable[str], own: Collection[str], used: Collection[str] = ()) -> list[Violation]:
    """Flags of a pasted line that were left out, and are a letter from one about the batch; `used` are the line's keys."""
    found: list[Violation] = []
    known = _candidates(own, used)
    for flag in flags:
        key = flag.partition("=")[0].lstrip("-").replace("-", "_")
        other = any(key.endswith(f"_{k}") or k.endswith(f".{key}") for k in known)  # a name of its own
        if flag.startswith("--") and not other and is_about_a_batch(key) and _is_a_slip(key, known):
            found.append(unknown_key(key, "", known))
    return found


def _candidates(own: Collection[str], used: Collection[str]) -> list[str]:
    """What a misspelt key may have been meant to be: ours, or one of the frameworks whose keys are used beside it.

    Another framework's key is no misspelling, however close: `model.name` in a file for NeMo is not MaxText's `model_name`.
    """
    from . import launchers

    frameworks = [d for d in dialects() if d is not launchers.DIALECT]  # a launcher starts any framework's program
    used_ones = [d for d in frameworks if any(key in d.keys or key in d.special for key in used)]
    return [*own, *launchers.DIALECT.keys, *(k for d in used_ones or frameworks for k in (*d.keys, *d.special))]


def _is_a_slip(key: str, candidates: list[str]) -> bool:
    """A key a letter or two from one that we know, in the same section, was meant to be it."""
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
                f"{name} is given twice and differently: {both[0]} ({where[0]}) and {both[1]} ({where[1]}). Leave one out.",
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
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
