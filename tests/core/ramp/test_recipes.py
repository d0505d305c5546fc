"""Published ramps: complete, with sources, compiled, and with notes on what is not published."""

from __future__ import annotations

import pytest

from batchwright.core.codec import decode, encode
from batchwright.core.errors import ScheduleError
from batchwright.core.ramp.recipes import RECIPES, Recipe, recipe
from batchwright.core.ramp.schedule import Schedule

each_recipe = pytest.mark.parametrize("published", RECIPES, ids=[r.name for r in RECIPES])


def test_names_are_unique_and_plain():
    names = [r.name for r in RECIPES]
    assert len(set(names)) == len(names) == 7
    assert all(name == name.lower() and " " not in name for name in names)


@each_recipe
def test_recipe_is_sourced_and_compiles(published: Recipe):
    assert published.title and any(character.isdigit() for character in published.source)
    schedule = published.schedule()
    assert set(published.notes) <= set(schedule.notes)
    assert all(s.sequence_length for s in schedule.segments) and schedule.segments[-1].start_token is not None
    assert decode(Schedule, encode(schedule)) == schedule
    assert recipe(published.name) is published


@each_recipe
def test_budget_is_kept_where_one_is_published(published: Recipe):
    schedule = published.schedule()
    if published.samples is None and published.tokens is None:
        assert schedule.total_steps is None
    elif published.samples is not None:
        assert schedule.total_samples == published.samples
    else:
        assert isinstance(published.sequence_length, int)
        assert schedule.total_samples == published.tokens // published.sequence_length
        assert 0 <= published.tokens - schedule.total_tokens < published.sequence_length


def test_palm_tokens_are_the_published_780_billion_within_its_rounding():
    assert recipe("palm-540b").schedule().total_tokens == 775_946_240_000


def test_llama_sequence_length_doubles_at_252_million_tokens():
    first, second, third = recipe("llama-3-405b").schedule().segments
    assert (first.sequence_length, second.sequence_length) == (4096, 8192)
    assert 0 <= second.start_token - 252_000_000 < 977 * 4096
    assert 0 <= third.start_token - 2_870_000_000_000 < 977 * 8192


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ScheduleError) as caught:
        recipe("Llama3")
    assert "llama-3-405b" in caught.value.nearest and "palm-540b" in str(caught.value)
    with pytest.raises(ScheduleError) as caught:
        recipe("zzzz")
    assert set(caught.value.nearest) == {r.name for r in RECIPES}
