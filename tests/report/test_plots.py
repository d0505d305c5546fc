"""Terminal plots: levels, ticks and labels are where the numbers are; without colour the output is plain text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.launch.directory import RunDirectory
from batchwright.launch.history import history
from batchwright.report.plots import Series, lines, round_numbers, staircase
from batchwright.report.text_charts import text_charts
from tests.report import material


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
    wide = staircase([0, 1, 2], {"global batch": [1, 2048], "nodes": [4, 8]}, xlabel="samples", color=False)
    assert len({line.index("┌") for line in wide.splitlines() if "┌" in line}) == 1, "the panels are below each other"


def test_colour_only_when_asked():
    drawn = staircase([0, 1, 2], {"x": [1, 2]}, xlabel="samples", color=True)
    assert "\x1b[38;" in drawn and "\x1b[48;" not in drawn, "the background stays that of the terminal"


def test_many_levels_do_not_overflow_the_axis():
    text = staircase(
        list(range(118)), {"global batch": [192 + 16 * i for i in range(117)]}, xlabel="samples", color=False
    )
    assert text.count("┤") <= 14


def test_sizes_are_on_a_logarithmic_axis_with_labels_that_do_not_touch():
    speed = Series("samples/s", [(8, 10.0), (16, 18.0), (64, 30.0)], "points")
    more = {"x": (7, 70), "y": (0, 40), "xlabel": "size", "sizes": [8, 16, 64, 65]}
    made = lines([speed], **more, marks=[(16, 18.0, "knee 16")], borders=[(65, "65 fails")], width=76)
    text = "\n".join(made)
    assert "\x1b" not in text and max(map(len, made)) <= 76
    assert "◆ knee 16" in text and "65 fails" in text and text.count("•") == 2, "one is below its mark"
    assert made[-2].split() == ["8", "16", "65"], "64 is too close to 65 for a label"
    border = next(line.index("┊") for line in made if "┊" in line)
    eighth, sixteenth = (made[-2].index(size) for size in (" 8 ", " 16 "))
    assert border - sixteenth == pytest.approx(2 * (sixteenth - eighth), abs=4), "two doublings are twice as far as one"


def test_lines_have_a_legend_borders_and_round_numbers():
    rising = Series("used", [(0, 0.0), (50, 1.0), (100, 2.0)])
    made = lines(
        [rising, Series("planned", [(0, 0.0), (100, 1.5)], "dots")],
        x=(0, 100), y=(0, 2), xlabel="samples", width=60, borders=[(50, "16")],
    )  # fmt: skip
    assert made[:2] == ["  ⠒ used", "  o planned"] and made[-1].strip() == "samples" and max(map(len, made)) <= 60
    assert "16" in "\n".join(made) and made[-2].split() == ["0", "50", "100"]
    border = next(line.index("┊") for line in made if "┊" in line)
    assert abs(border - 30) <= 2, "the border is in the middle"
    assert lines([rising], x=(0, 100), y=(0, 2), xlabel="samples", width=60)[0].strip()[0] == "┌", "one line: no legend"


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    decades = [1, 10, 100, 1000, 10_000]
    made = lines([Series("x", [(0, 10.0), (1, 1000.0)])], x=(0, 1), y=(10, 1000), xlabel="", width=50, decades=decades)
    at = {
        label: next(i for i, line in enumerate(made) if line.startswith(f"{label}┤")) for label in (" 10", "100", " 1K")
    }
    assert abs((at[" 10"] - at["100"]) - (at["100"] - at[" 1K"])) <= 1


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e12), st.integers(2, 9))
def test_round_numbers_are_inside_few_and_evenly_spaced(low, span, most):
    high = low + span
    found = round_numbers(low, high, most)
    assert 1 <= len(found) <= most
    assert all(low - 1e-6 * span <= v <= high + 1e-6 * span for v in found)
    gaps = [b - a for a, b in pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


@pytest.mark.parametrize("width", [30, 40, 100])
def test_a_run_an_estimate_and_a_probe_are_drawn_with_the_numbers_of_their_charts(tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    run = history(RunDirectory(material.run_directory(tmp_path / "run", losses={20: "nan", 150: 9.5})))
    documents = material.documents()
    text = {kind: text_charts(kind, document) for kind, document in {**documents, "run": run}.items() if kind in TEXTS}
    for kind, names in TEXTS.items():
        joined = " ".join(" ".join(text[kind]).split())
        assert all(name in joined for name in names), (kind, joined)
    # The name of the axis of time is not broken.
    assert max(len(line) for part in text.values() for line in part) <= max(width, 40)


TEXTS = {
    "run": (
        "global batch, samples per step", "· planned", "⠒ trained", "× launch failed", "trained up to sample 4800",
        "Loss against samples", "Loss against time", "× not finite: 1 step", "largest 9.5", "Throughput by stage",
        "stage 2, batch 16, 2 nodes", "160 (160 to 160), planned 160", "Gradient noise scale", "o 95% interval", "Node-hours",
        "planned for the whole run",
    ),
    "estimate": ("Memory, predicted", "█ parameters", "┆ usable", "5.001, measured 5.25", "◆ measured"),
    "probe": (
        "1,524 samples/s at micro batch 32", "⠒ 95% interval", "· predicted by the fit", "33 fails", "recommended: 32",
        "─ limit: 8.00 GiB", "o predicted", "× failed", "up: peak memory, GiB", "Time of a step",
        "█ input 18", "▒ compute 30", "▓ synchronisation 12",
    ),
}  # fmt: skip


def test_the_text_of_a_long_run_shows_its_extremes(tmp_path):
    root = material.run_directory(tmp_path / "run", steps=400, losses={150: 9.5})
    drawn = text_charts("run", history(RunDirectory(root)))
    assert "  · smallest and largest" in drawn
    top = drawn.index(next(line for line in drawn if line.startswith("8┤")))
    assert any("·" in line for line in drawn[top - 2 : top]), "the mean of two steps is below 8"


def test_a_run_without_steps_is_drawn_without_plots(tmp_path):
    root = material.run_directory(tmp_path / "run")
    for file in (root / "events").iterdir():
        file.unlink()
    drawn = "\n".join(text_charts("run", history(RunDirectory(root))))
    assert "Loss" not in drawn and "Node-hours" in drawn


def test_the_staircase_of_a_run_shows_what_was_trained_and_what_was_only_planned(tmp_path, monkeypatch):
    """Trained up to sample 1600 of 4800: the line ends with the first stage, and the second is dots."""
    monkeypatch.setenv("COLUMNS", "90")
    run = history(RunDirectory(material.run_directory(tmp_path / "run")))
    drawn = text_charts("run", {**run, "consumed_samples": 1600, "state": "stopped"})
    first = drawn.index("  global batch, samples per step")
    rows = {level: next(line for line in drawn[first:] if line.startswith(f"{level}┤")) for level in (" 8", "16")}
    assert "·" in rows["16"] and not set(rows["16"]) & BRAILLE and set(rows[" 8"]) & BRAILLE and "·" not in rows[" 8"]
    ends = max(i for line in drawn[first : first + 12] for i, c in enumerate(line) if c in BRAILLE)
    assert ends == pytest.approx(3 + 86 / 3, abs=3)


BRAILLE = {chr(c) for c in range(0x2801, 0x2900)}


def test_the_throughput_of_a_probe_in_a_terminal_is_that_of_its_chart():
    """The comparison at the recommended size measured 20% more; both show the first measurement."""
    document = material.documents()["probe"]
    document["trials"][-1]["samples_per_second"] *= 1.2
    drawn = "\n".join(text_charts("probe", document))
    assert "1,524 samples/s at micro batch 32" in drawn and "1,829" not in drawn
    few = {**document, "trials": document["trials"][:5], "memory_bytes": None}
    assert not text_charts("probe", few), "one size, no limit and no comparison: nothing to draw"


@pytest.mark.parametrize("kind", ["plan", "ramp", "pipeline", "rl"])
def test_a_document_whose_verb_draws_no_chart_has_no_text(kind):
    assert text_charts(kind, {**material.documents(), "rl": material.rounds()}[kind]) == []
