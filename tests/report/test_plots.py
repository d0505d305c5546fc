"""Terminal plots: levels, ticks and labels are where the numbers are; without colour the output is plain text."""

from __future__ import annotations

from batchwright.report.plots import curve, staircase


def test_a_staircase_shows_every_level_from_zero_and_the_positions():
    text = staircase([0, 10, 30, 100], {"global batch": [256, 512, 1024]}, xlabel="samples", color=False)
    assert "\x1b" not in text
    for mark in ("global batch", "256┤", "512┤", "1024┤", "0┤", "samples", "100"):
        assert mark in text
    rows = {
        level: next(line for line in text.splitlines() if line.strip().startswith(f"{level}┤")) for level in (256, 1024)
    }
    assert len(rows[256].rstrip("│ ")) < len(rows[1024].rstrip("│ ")), "the first stage is left of the last"


def test_two_series_get_two_panels_and_the_figure_is_cleared():
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


def test_a_curve_shows_its_sizes_and_labels_its_points():
    speed = {8: 10.0, 16: 18.0, 64: 30.0}
    lines = curve("samples/s", speed, [(16, 18.0, "knee 16", "◆"), (65, 30.0, "fails 65", "×")], width=76)
    text = "\n".join(lines)
    assert "\x1b" not in text and max(map(len, lines)) <= 76
    for mark in ("samples/s", "knee 16", "fails 65", "◆", "×"):
        assert mark in text
    ticks = lines[-1].split()
    assert ticks == ["8", "16", "64"], "65 is too close to 64 for a label"
    assert curve("samples/s", speed, [], width=76) == curve("samples/s", speed, [], width=76)
