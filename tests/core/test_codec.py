"""Records to JSON text and back."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright.core
from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.codec import decode, encode, read
from batchwright.core.errors import Violation
from batchwright.core.nodes.throughput import StageSeconds, Throughput
from batchwright.core.ramp.learning_rate import SampleSchedule
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.recipes import Recipe
from batchwright.core.ramp.rules import Doubling
from batchwright.core.ramp.schedule import Rule, Schedule
from tests.examples import many


@dataclass(frozen=True)
class Leaf:
    """A small record."""

    share: Fraction
    name: str | None = None


@dataclass(frozen=True)
class Tree:
    """A record with every kind of field that the codec supports."""

    leaves: tuple[Leaf, ...]
    by_name: Mapping[str, int]
    rows: int | tuple[int, ...]
    maybe: Leaf | None
    speed: float | None
    flag: bool = False


leaves = st.builds(Leaf, st.fractions(), st.none() | st.text())
trees = st.builds(
    Tree,
    st.lists(leaves, max_size=3).map(tuple),
    st.dictionaries(st.text(), st.integers()),
    st.integers() | st.lists(st.integers()).map(tuple),
    st.none() | leaves,
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)


@given(trees)
def test_any_record_survives_json(tree):
    assert decode(Tree, json.loads(json.dumps(encode(tree), allow_nan=False))) == tree


GOOD = {"leaves": [{"share": "1/8"}], "by_name": {"a": 1}, "rows": [1, 2], "maybe": None, "speed": 1, "flag": True}


def test_a_sound_file_is_read_as_it_is_decoded():
    assert read(Tree, GOOD) == decode(Tree, GOOD)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("leaves", "text", "'text' must be a JSON list"),
        ("leaves", [3], "'3' must be a JSON object"),
        ("leaves", [{}], "missing 1 required"),
        ("leaves", [{"share": "1/0"}], "Fraction"),
        ("leaves", [{"share": "1", "name": 5}], r"leaves\[0\].name is '5', not str | None"),
        ("by_name", [], r"'\[\]' must be a JSON object"),
        ("by_name", {"a": "1"}, r"by_name\['a'\] is '1', not int"),
        ("rows", "12", "rows is '12'"),
        ("rows", [True], r"rows\[0\] is 'True', not int"),
        ("rows", 10**30, "rows is not a finite number, or a whole number of more than 64 bits"),
        ("rows", 10**400, "more than 64 bits"),
        ("speed", math.inf, "speed is not a finite number"),
        ("speed", math.nan, "speed is not a finite number"),
        ("speed", False, "speed is 'False'"),
        ("flag", 1, "flag is '1', not bool"),
    ],
)
def test_a_value_of_another_type_is_named(key, value, message):
    with pytest.raises(ValueError, match=message):
        read(Tree, {**GOOD, key: value})


def test_unknown_keys_are_left_out_and_missing_ones_take_their_default():
    assert decode(Leaf, {"schema": 1, "share": "1/8"}) == Leaf(Fraction(1, 8))


# Not stored: rules (a schedule is stored instead), what holds a rule, and Violation, whose `given` is any value.
NOT_STORED = (Ramp, Recipe, Rule, Violation)
positive = st.floats(1e-6, 1e6)
# Records that check their values: most random ones would be refused.
VALID = {
    Schedule: st.builds(
        lambda unit, every, samples: Doubling(8, 64, every, unit, 128).compile().until(samples),
        st.sampled_from(("samples", "tokens", "steps")),
        st.integers(1024, 10**6),
        st.integers(1, 10**9),
    ),
    PipelineRule: st.builds(PipelineRule, st.just("interleaved"), st.integers(2, 9), st.integers(2, 9), st.just(9)),
    Throughput: st.one_of(
        st.builds(Throughput, positive, positive, sync_seconds=positive),
        st.builds(lambda seconds: Throughput(measured=((1, seconds), (4, 2 * seconds))), positive),
    ),
    StageSeconds: st.lists(positive, min_size=1).map(lambda seconds: StageSeconds(tuple(seconds))),
    SampleSchedule: st.builds(
        SampleSchedule, positive, st.integers(100), st.integers(0, 100), st.sampled_from(("cosine", "linear"))
    ),
}


def records():
    """Every public record of the core that may be stored."""
    for module in pkgutil.walk_packages(batchwright.core.__path__, "batchwright.core."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            own = isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.name
            if own and not name.startswith("_") and not issubclass(kind, NOT_STORED):
                yield kind


def values(hint):
    """A strategy for the values of a field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in VALID:
        return VALID[hint]
    if is_dataclass(hint):
        return st.builds(hint, **{name: values(kind) for name, kind in typing.get_type_hints(hint).items()})
    if hint is type(None):
        return st.none()
    if hint is typing.Any:
        return st.integers() | st.text()
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values, args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return (
            st.lists(values(args[0]), max_size=3).map(tuple) if args[-1] is Ellipsis else st.tuples(*map(values, args))
        )
    if origin is frozenset:
        return st.frozensets(values(args[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    return {
        int: st.integers(1, 10**15),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(max_size=9),
        Fraction: st.fractions(),
    }[hint]


@pytest.mark.parametrize("kind", [*records()], ids=lambda kind: kind.__name__)
def test_every_record_of_the_core_survives_json(kind):
    @settings(max_examples=many(30), deadline=None)
    @given(values(kind))
    def survives(record):
        assert decode(kind, json.loads(json.dumps(encode(record), allow_nan=False))) == record

    survives()


def test_the_items_of_a_set_are_checked():
    assert read(frozenset[str], ["a", "b"]) == {"a", "b"}
    for wrong in (["a", False], ["a", None], [["a"]]):
        with pytest.raises(ValueError):
            read(frozenset[str], wrong)
