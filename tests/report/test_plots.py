"""Terminal plots: the stairs are where the numbers are, and nothing but text comes out without colour."""

from __future__ import annotations

from batchwright.report.plots import staircase


def test_a_staircase_shows_every_level_from_zero_and_the_positions():
    text = staircase([0, 10, 30, 100], {"global batch": [256, 512, 1024]}, xlabel="samples", color=False)
    assert "\x1b" not in text
    for mark in ("global batch", "256┤", "512┤", "1024┤", "0┤", "samples", "100"):
        assert mark in text
    rows = {
        level: next(line for line in text.splitlines() if line.strip().startswith(f"{level}┤")) for level in (256, 1024)
    }
    assert len(rows[256].rstrip("│ ")) < len(rows[1024].rstrip("│ ")), "the first stage is left of the last"


def test_two_series_get_two_panels_and_nothing_is_left_behind():
    both = staircase([0, 1, 2], {"global batch": [1, 2], "nodes": [4, 8]}, xlabel="samples", color=False)
    again = staircase([0, 1, 2], {"global batch": [1, 2], "nodes": [4, 8]}, xlabel="samples", color=False)
    assert both == again and both.count("┌") == 2


def test_colour_only_when_asked():
    assert "\x1b" in staircase([0, 1, 2], {"x": [1, 2]}, xlabel="samples", color=True)


def test_many_levels_do_not_overflow_the_axis():
    text = staircase(
        list(range(118)), {"global batch": [192 + 16 * i for i in range(117)]}, xlabel="samples", color=False
    )
    assert text.count("┤") <= 14
