"""Records behave as the frozen dataclasses they stand for."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.record import record


@record
class Ours:
    """A record."""

    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a is below zero")


@dataclass(frozen=True)
class Theirs:
    """The same, as a dataclass."""

    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a is below zero")


class Child(Ours):
    """A subclass that adds no field."""


names = st.sampled_from(["a", "b", "c", "d"])


@given(
    st.lists(st.integers(-1, 3), max_size=4),
    st.dictionaries(names, st.integers(-1, 3), max_size=4),
)
def test_whatever_a_dataclass_accepts_or_refuses_a_record_does(args, kwargs):
    def outcome(kind):
        try:
            return [getattr(kind(*args, **kwargs), name) for name in "abc"]
        except (TypeError, ValueError) as error:
            return type(error)

    assert outcome(Ours) == outcome(Theirs) == outcome(Child)


def test_equal_hash_repr_replace_and_fields():
    one = Ours(1, c=[2])
    assert one == Ours(1, "b", [2]) and one != Ours(2) and one != Theirs(1, c=[2]) and one != Child(1, c=[2])
    assert repr(one) == repr(Theirs(1, c=[2])).replace("Theirs", "Ours")
    assert hash(Ours(1, c=())) == hash(Ours(1, c=())) and len({Ours(1, c=()), Ours(1, c=()), Ours(2, c=())}) == 2
    with pytest.raises(TypeError):
        hash(one)  # as its list
    assert is_dataclass(one) and [f.name for f in fields(one)] == ["a", "b", "c"]
    assert replace(one, a=5) == Ours(5, c=[2])
    assert Ours(1).c is not Ours(1).c
    match one:
        case Ours(a, b):
            assert (a, b) == (1, "b")


def test_frozen_but_copied_and_pickled():
    one = Ours(1)
    with pytest.raises(FrozenInstanceError):
        one.a = 2
    with pytest.raises(FrozenInstanceError):
        del one.a
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(TypeError, match=r"Ours takes a, b, c: not 0 values and \['d'\]"):
        Ours(d=1)
