"""Records to JSON text and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.batch.loading import Loading, loading
from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.batch.world import World
from batchwright.core.codec import decode, encode
from batchwright.core.rl import RLPlan, rl


@dataclass(frozen=True)
class Leaf:
    """A small record."""

    share: Fraction
    name: str | None = None


@dataclass(frozen=True)
class Tree:
    """A record of everything the codec knows."""

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


def test_unknown_keys_are_left_out_and_missing_ones_take_their_default():
    assert decode(Leaf, {"schema": 1, "share": "1/8"}) == Leaf(Fraction(1, 8))


def test_records_of_the_core_survive_json():
    for kind, record in (
        (World, World(4, 8, 2, expert_parallel=2)),
        (Loading, loading(10, hosts=4)),
        (Loading, loading(10, hosts=4, expansion_factor=Fraction(1, 3))),
        (PipelineRule, PipelineRule("interleaved", 4, 2, 4)),
        (RLPlan, rl(prompts=32, generations=8, updates=2)),
    ):
        assert decode(kind, json.loads(json.dumps(encode(record)))) == record
