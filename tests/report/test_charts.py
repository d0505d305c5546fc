"""Charts as data: what was measured is where the numbers are, what was not says so, and nothing to draw is no chart."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import ConfigError
from batchwright.launch.directory import RunDirectory
from batchwright.launch.history import history
from batchwright.report.charts import (
    CHARTS,
    chart_of,
    charts_of,
    loss,
    memory,
    node_hours,
    noise_scale,
    reward,
    round_times,
    split,
    stage_throughput,
    staircase,
    step_time,
    throughput,
)
from batchwright.report.charts.pipeline import timeline
from batchwright.report.charts.spec import BUCKETS, sizes_axis, thinned
from batchwright.report.charts.theme import COLORS, THEMES, colors
from batchwright.report.text_charts import text_charts
from tests.report import material


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = material.run_directory(tmp_path_factory.mktemp("run") / "run", losses={20: "nan", 30: "inf", 150: 9.5})
    return history(RunDirectory(root))


def views(spec):
    """Every view of a specification that draws something."""
    if "mark" in spec:
        yield spec
    for part in (*spec.get("layer", ()), *spec.get("vconcat", ())):
        yield from views(part)


def rows(spec, mark):
    """The rows that marks of a type draw."""
    found = []
    for view in views(spec):
        if view["mark"]["type"] == mark:
            found += view.get("data", spec.get("data"))["values"]
    return found


def trained(panel):
    """The rows of the line that is solid."""
    return rows({"layer": [view for view in views(panel) if "strokeDash" not in view["mark"]]}, "line")


def legend(spec):
    """All names in the legends of a specification."""
    found = set()
    for view in [spec, *spec.get("vconcat", ()), *views(spec)]:
        for channel in ("color", "shape", "fill", "stroke"):
            encoding = view.get("encoding", {}).get(channel, {})
            if encoding.get("legend", True) is not None:
                found |= set(encoding.get("scale", {}).get("domain", ()))
    return found


def test_the_staircase_of_gpt3_5b_has_the_documented_batches_and_nodes():
    spec = staircase(material.gpt3_5b().to_json())
    batch, nodes = spec["vconcat"]
    corners = [row["value"] for row in rows({"layer": batch["layer"][:1]}, "area")]
    assert corners == [256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2048]
    steps = rows(nodes, "rect")
    assert [row["value"] for row in steps] == [8, 10, 12, 14, 16], "neighbours with equal nodes are one step"
    assert steps[0] == {"samples": 0, "value": 8, "until": 5_714_944}
    assert batch["encoding"]["x"]["scale"]["domain"] == [0, 20_000_000]
    assert "256 to 2,048" in spec["description"] and "8 to 16 nodes" in spec["description"]


def test_a_long_ramp_has_few_labels_and_few_points():
    import batchwright

    made = batchwright.ramp(linear="192,16,9765625", global_batch_size=2048)
    spec = staircase(made.to_json())
    assert "vconcat" not in spec, "without nodes there is one panel"
    assert len(rows(spec, "text")) == 2
    assert "open end" in spec["description"]
    stages = [
        {"index": i, "global_batch_size": i + 1, "start_sample": 10 * i, "end_sample": 10 * i + 10, "nodes": None}
        for i in range(100_000)
    ]
    assert len(json.dumps(staircase({"stages": stages}))) < 300_000


def test_planned_and_trained_are_told_apart(run):
    spec = staircase(run["plan"], run)
    assert legend(spec) == {"planned", "trained", "launch failed"}
    batch, nodes = spec["vconcat"]
    assert [(row["samples"], row["value"]) for row in trained(batch)] == [(0, 8), (1600, 8), (1600, 16), (4800, 16)]
    assert [(row["samples"], row["value"]) for row in trained(nodes)] == [
        (0, 1),
        (800, 1),
        (800, 1),
        (1600, 1),
        (1600, 2),
        (4800, 2),
    ]
    assert rows(nodes, "point") == [{"samples": 800, "value": 1, "reason": "rank 0 exited with code 1"}]
    assert legend(staircase(run["plan"])) == {"planned"}


def test_what_is_predicted_or_planned_is_dashed_or_hollow_and_what_is_measured_is_not(run):
    """The footer of a report promises it."""
    found = 0
    for kind, document in {**material.documents(), "run": run, "rl": material.rounds()}.items():
        for name, spec in charts_of(kind, document).items():
            said = {label for label in legend(spec) if "predicted" in label or "planned" in label}
            drawn = [view for view in views(spec) if view["mark"]["type"] in ("line", "point", "bar", "tick", "area")]
            for label in said:
                assert any(dashed_or_hollow(view, label, spec) for view in drawn), (kind, name, label)
            if "predicted" in spec["title"]["text"]:
                bars = [view for view in drawn if view["mark"]["type"] == "bar"]
                edges = [view["data"] for view in bars if "strokeDash" in view["mark"]]
                assert edges and all(view["data"] in edges for view in bars), (kind, name)
            found += len(said) + ("predicted" in spec["title"]["text"])
    assert found >= 7
    looks = [view["encoding"] for view in views(noise_scale(run)) if view["mark"]["type"] == "line"]
    assert looks and not any("strokeDash" in encoding for encoding in looks), "noise scale and batch are measured"


def dashed_or_hollow(view, label, spec):
    """Whether a view draws a series so."""
    scale = {**spec.get("encoding", {}), **view.get("encoding", {})}.get("strokeDash", {}).get("scale")
    if scale:
        return label in scale["domain"] and scale["range"][scale["domain"].index(label)] != [1, 0]
    values = view.get("data", spec.get("data"))["values"]
    named = any(row.get("series") == label for row in values) or label == "planned"
    return named and "strokeDash" in view["mark"]


def columns(run, *rows):
    """The record of a run with these steps: (step, samples, batch, launch)."""
    names = ("step", "samples", "global_batch_size", "launch")
    known = {name: [float(row[i]) for row in rows] for i, name in enumerate(names)}
    rest = {name: [math.nan] * len(rows) for name in run["steps"] if name not in known}
    return {**run, "steps": {**rest, **known, "loss": [2.0] * len(rows)}}


def corners(spec):
    return [(row["samples"], row["value"], row["part"]) for row in trained(spec["vconcat"][0])]


def test_trained_ends_at_the_newest_checkpoint_unless_the_run_is_running(run):
    stopped = {**columns(run, *((i, 8 * i + 8, 8, 1) for i in range(100))), "consumed_samples": 400, "state": "stopped"}
    spec = staircase(run["plan"], stopped)
    assert corners(spec) == [(0, 8, 0), (400, 8, 0)] and "trained up to sample 400" in spec["description"]
    assert trained(spec["vconcat"][1])[-1]["samples"] == 400
    running = staircase(run["plan"], {**stopped, "state": "running"})
    assert corners(running)[-1] == (800, 8, 0) and "trained up to sample 800" in running["description"]


def test_steps_between_recorded_ones_were_trained_and_missing_ones_are_a_gap(run):
    """Every tenth step is recorded; two records of the second case are lost."""
    every = [(i, 8 * i + 8, 8, 1) for i in range(0, 100, 10)]
    logged = {**columns(run, *every), "consumed_samples": 800, "state": "stopped"}
    spec = staircase(run["plan"], logged)
    assert corners(spec) == [(0, 8, 0), (800, 8, 0)] and "trained up to sample 800" in spec["description"]
    assert "10 recorded steps" in loss(logged)["description"]
    lost = {**logged, "steps": columns(run, *every[:4], *every[6:])["steps"]}
    assert corners(staircase(run["plan"], lost)) == [(0, 8, 0), (248, 8, 0), (480, 8, 1), (800, 8, 1)]


def test_a_long_staircase_of_trained_steps_keeps_its_end(run):
    many = columns(run, *((i, 12 * (i + 1), 8 + 8 * (i % 2), 1) for i in range(10_001)))
    assert corners(staircase(run["plan"], {**many, "consumed_samples": 10**6}))[-1][0] == 12 * 10_001


def test_the_rest_of_a_ramp_says_where_it_begins():
    import batchwright

    made = batchwright.ramp(thresholds="0:8 1600:16", samples=4800, start_sample=1600).to_json()
    spec = staircase(made)
    assert "in 1 stage, over 3200 samples from sample 1600 on" in spec["description"]
    assert spec["encoding"]["x"]["scale"]["domain"] == [1600, 4800]


def test_throughput_has_intervals_a_fit_that_says_so_the_knee_and_the_first_failure():
    spec = throughput(material.documents()["probe"])
    points = rows(spec, "point")
    assert [row["size"] for row in points] == [1, 4, 16, 32], "one point for each size, as in the fit"
    assert all(row["low"] < row["rate"] < row["high"] for row in points)
    assert points[0]["rate"] == pytest.approx(2 / 0.011, rel=1e-4) and points[0]["high"] == pytest.approx(
        2 / (0.011 * 0.97), rel=1e-4
    )
    fit = next(view for view in views(spec) if view["mark"]["type"] == "line")
    assert all("predicted" in row["series"] for row in fit["data"]["values"]) and "strokeDash" in fit["encoding"]
    assert max(row["size"] for row in rows(spec, "line")) <= 32, "the fit is not drawn beyond what was measured"
    texts = {row["text"] for row in rows(spec, "text")}
    assert (
        "33 fails" in texts and any("knee" in text for text in texts) and any("recommended" in text for text in texts)
    )
    assert any("predicted" in name for name in legend(spec)) and any("measured" in name for name in legend(spec))


def test_throughput_of_one_size_has_no_fit_and_of_failed_trials_there_is_no_chart():
    probe = material.documents()["probe"]
    one = {**probe, "trials": [t for t in probe["trials"] if t["purpose"] == "throughput"][:1]}
    assert not rows(throughput(one), "line") and len(rows(throughput(one), "point")) == 1
    failed = {**probe, "trials": [{**t, "status": "oom", "samples_per_second": None} for t in probe["trials"]]}
    assert throughput(failed) is memory(failed) is None
    assert throughput({}) is memory({}) is step_time({}) is None


def test_measured_memory_is_solid_predicted_memory_is_dashed_and_hollow():
    spec = memory(material.documents()["probe"])
    lines, points = rows(spec, "line"), rows(spec, "point")
    assert [row for row in points if row["series"] == "measured"] == [
        row for row in lines if row["series"] == "measured"
    ]
    assert [row["series"] for row in points] == ["predicted"] * 4 + ["measured"] * 3 + ["failed"], (
        "what was measured is on top"
    )
    assert {row["size"]: row["memory"] for row in lines if row["series"] == "measured"} == {1: 2.0, 16: 4.0, 32: 6.0}
    assert {row["size"] for row in lines if row["series"] == "predicted"} == {1, 16, 32, 33}
    assert legend(spec) == {"measured", "predicted", "failed"}
    fills = [view["encoding"]["fill"]["scale"] for view in views(spec) if "fill" in view["encoding"]]
    known = colors("light")
    assert len(fills) == 3, "the points of every series, so that the legend has their fills"
    for scale in fills:
        assert dict(zip(scale["domain"], scale["range"], strict=True)) == {
            "measured": known["blue"], "predicted": known["background"], "failed": known["red"],
        }  # fmt: skip
    solid, dashed = (view["mark"]["strokeDash"] for view in views(spec) if view["mark"]["type"] == "line")
    assert solid == [1, 0] != dashed
    crosses = [row for row in points if row["series"] == "failed"]
    assert [(row["size"], row["memory"]) for row in crosses] == [(33, 8.0)]
    assert any("limit: 8.00 GiB" in row.get("text", "") for row in rows(spec, "text"))


def test_without_predictions_a_failure_is_a_red_cross():
    probe = material.documents()["probe"]
    trials = [{**t, "predicted_peak_memory_bytes": None} for t in probe["trials"]]
    spec = memory({**probe, "trials": trials})
    points = next(view for view in views(spec) if view["mark"].get("angle"))["encoding"]
    assert points["shape"]["scale"] == {"domain": ["measured", "failed"], "range": ["circle", "cross"]}
    assert (
        points["color"]["scale"]["range"]
        == points["fill"]["scale"]["range"]
        == [colors("light")[c] for c in ("blue", "red")]
    )


def test_sizes_that_are_close_to_each_other_are_labelled_if_there_is_room():
    assert sizes_axis([107, 128])["axis"]["values"] == [107, 128]
    assert sizes_axis([1, 2, 4, 8, 16, 32, 33])["axis"]["values"] == [1, 2, 4, 8, 16, 33], "the largest one counts"


def test_the_parts_of_the_stack_have_the_opacity_that_tells_them_apart_in_grey():
    """A scale without a type is a line between the first and the last opacity."""
    pytest.importorskip("vl_convert")
    from batchwright.report.render import svg

    drawn = re.findall(
        r'aria-roledescription="bar"[^>]* opacity="([0-9.]+)"', svg(memory(material.documents()["estimate"]))
    )
    assert {"0.9", "0.2", "0.95"} <= set(drawn)


def test_a_probe_is_drawn_in_the_stack_of_the_estimate_of_the_same_task():
    documents = material.documents()
    spec = memory(documents["estimate"], documents["probe"])
    measured = [row for row in rows(spec, "point") if row["series"] == "measured by the probe"]
    assert [(row["size"], row["to"]) for row in measured] == [("1", 2.0), ("16", 4.0), ("32", 6.0)]
    assert spec["encoding"]["x"]["sort"] == ["1", "8", "16", "31", "32"], "sizes of both, in their order"
    assert (
        spec["title"]["text"] == "Memory, predicted and measured" and "measured 6.00 GiB at 32" in spec["description"]
    )
    assert [row["size"] for row in rows(spec, "bar")] == [
        row["size"] for row in rows(memory(documents["estimate"]), "bar")
    ]
    several = [{**p, "sequence_length": length} for p in documents["estimate"]["points"] for length in (64, 128)]
    assert "probe" not in str(legend(memory({**documents["estimate"], "points": several}, documents["probe"])))


def test_a_size_that_timed_out_did_not_run_out_of_memory():
    probe = material.documents()["probe"]
    trials = [{**t, "status": "timeout", "cause": "hang"} if t["status"] == "oom" else t for t in probe["trials"]]
    assert "33 does not fit" in throughput(probe)["description"]
    assert "33 failed (timeout)" in throughput({**probe, "trials": trials})["description"]
    spec = memory({**probe, "trials": trials})
    assert "smallest that failed: 33 (timeout)" in spec["description"]
    assert "failed" not in legend(spec) and not [row for row in rows(spec, "point") if row["series"] == "failed"]


def test_the_stack_of_an_estimate_adds_up_to_its_peak():
    document = material.documents()["estimate"]
    spec = memory(document)
    bars = rows(spec, "bar")
    for point in document["points"]:
        tops = [row["to"] for row in bars if row["size"] == str(point["micro_batch_size"])]
        assert max(tops) * 2**30 == pytest.approx(point["peak_memory_bytes"], rel=1e-3)
    assert {"parameters", "gradients", "optimizer", "activations", "measured on this CPU"} <= legend(spec)
    assert "bars: predicted" in json.dumps(spec["layer"][0])
    texts = [row["text"] for row in rows(spec, "text")]
    assert "memory: 8.00 GiB" in texts and "usable: 7.00 GiB" in texts
    assert "predicted" in spec["title"]["text"]
    assert "(predicted)" in json.dumps(memory({**document, "calibration": None})["layer"][0])
    far = memory({**document, "memory_bytes": 2**45, "usable_bytes": 2**45})
    assert not rows(far, "rule"), "a limit far above would flatten all bars"


def test_the_parts_of_a_step_are_what_the_comparisons_differ_by():
    spec = step_time(material.documents()["probe"])
    shares = {row["part"]: row["share"] for row in rows(spec, "bar")}
    assert shares == {"input": 0.3, "compute": 0.5, "synchronisation": 0.2}
    one = step_time({**material.documents()["probe"], "ranks": 1})
    assert {row["part"] for row in rows(one, "bar")} == {"input", "compute"}, "one rank synchronises with nobody"


def test_a_plan_is_drawn_as_its_equation():
    plan = material.documents()["plan"]
    spec = split(plan)
    cells = rows(spec, "rect") or spec["data"]["values"]
    assert "1,024 = 4 micro × 2 accumulation × 128 data-parallel" in spec["description"]
    assert {cell["rank"] for cell in cells} >= {"1", "…", "128"} and {cell["step"] for cell in cells} == {"1", "2"}
    assert split({"global_batch_size": 8}) is None


@pytest.mark.parametrize("against", ["samples", "time"])
def test_the_loss_has_every_step_its_extremes_and_its_boundaries(run, against):
    spec = loss(run, against=against)
    lines = [row for row in rows(spec, "line") if row["series"] == "training loss"]
    assert len(lines) == 398 and max(row["loss"] for row in lines) == 9.5, "400 steps, of which 2 are not finite"
    bad = [row for row in rows(spec, "point") if "not finite" in row["series"]]
    assert sum(row["steps"] for row in bad) == 2
    assert "not finite in 2" in spec["description"] and "largest 9.5" in spec["description"]
    assert [row["text"] for row in rows(spec, "rule")] == ["16"]
    assert [row["loss"] for row in rows(spec, "point") if row["series"] == "evaluation loss"] == [2.5, 2.5]


def test_the_loss_of_a_long_run_keeps_its_extremes(run):
    count = 50_000
    columns = {name: [math.nan] * count for name in run["steps"]}
    columns |= {"samples": list(range(1, count + 1)), "time": [float(i) for i in range(count)], "launch": [1] * count}
    columns["loss"] = [2.0 + (i % 7) / 10 for i in range(count)]
    columns["loss"][31_234], columns["loss"][17] = 77.5, -3.25
    for against in ("samples", "time"):
        spec = loss({**run, "steps": columns}, against=against)
        assert len(json.dumps(spec)) < 200_000
        bands = rows(spec, "area")
        assert len(bands) <= BUCKETS
        assert max(row["high"] for row in bands) == 77.5 and min(row["low"] for row in bands) == -3.25
        low, high = spec["encoding"]["y"]["scale"]["domain"]
        assert low < -3.25 and high > 77.5
        assert "smallest to largest" in legend(spec)
        assert "training loss, mean of up to 84 steps" in legend(spec), "50,000 steps in 600 parts"


def test_evaluations_are_inside_the_chart_of_the_loss(run):
    after = max(run["steps"]["time"]) + 100
    late = {"kind": "evaluation", "samples": 9000, "time": after, "loss": 50.0}
    for against in ("samples", "time"):
        spec = loss({**run, "evaluations": [late]}, against=against)
        (point,) = [row for row in rows(spec, "point") if row["series"] == "evaluation loss"]
        x, y = spec["encoding"]["x"], spec["encoding"]["y"]["scale"]["domain"]
        assert point[x["field"]] <= x["scale"]["domain"][1] and y[0] < 50 < y[1]
        assert "largest 9.5" in spec["description"], "the text is about the training loss"


def test_boundaries_against_time_are_where_the_stage_begins_and_above_40_there_are_none(run):
    steps = columns(run, *((i, 8 * i + 8, 8, 1) for i in range(1000)))
    steps["steps"]["time"] = [1000.0 + i for i in range(1000)]

    def lines(count):
        stages = [{"global_batch_size": 8 + i, "start_sample": 16 * i} for i in range(count + 1)]
        return rows(loss({**steps, "plan": {**run["plan"], "stages": stages}, "history": []}, against="time"), "rule")

    scale = 60
    assert [row["at"] for row in lines(3)] == pytest.approx([2 / scale, 4 / scale, 6 / scale], rel=1e-4)
    assert len(lines(40)) == 40 and not lines(41)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 40))
def test_fewer_points_keep_the_extremes_the_count_and_the_mean(points, buckets):
    xs, ys = zip(*points, strict=True)
    made = thinned(xs, ys, buckets)
    assert len(made) <= buckets and sum(count for *_, count in made) == len(points)
    assert min(low for _, low, _, _, _ in made) == min(ys) and max(high for _, _, _, high, _ in made) == max(ys)
    total = sum(mean * count for _, _, mean, _, count in made)
    assert total == pytest.approx(math.fsum(ys), rel=1e-9, abs=1e-3)
    assert all(low <= mean + 1e-6 and mean - 1e-6 <= high for _, low, mean, high, _ in made)


def test_throughput_by_stage_is_the_median_beside_the_plan(run):
    spec = stage_throughput(run)
    assert [(row["rate"], row["steps"]) for row in rows(spec, "bar")] == [(80.0, 198), (160.0, 199)], (
        "the first step of a launch is warm-up"
    )
    planned = [row for row in rows(spec, "tick")]
    assert [row["rate"] for row in planned] == [80.0, 160.0] and legend(spec) == {
        "measured: median and quartiles",
        "planned",
    }


@pytest.mark.parametrize("count", [13, 117, 1000])
def test_throughput_of_many_stages_has_no_numbers_above_its_bars(run, count):
    made = columns(run, *((i, 8 * i + 8, 8, 1) for i in range(3 * count)))
    made["steps"]["stage"] = [float(i // 3) for i in range(3 * count)]
    made["steps"]["samples_per_second"] = [100.0 + i // 3 for i in range(3 * count)]
    stages = [
        {"index": i, "global_batch_size": 8, "nodes": 1, "start_sample": 24 * i, "end_sample": 24 * i + 24}
        for i in range(count)
    ]
    made["plan"] = {**run["plan"], "stages": stages}
    spec = stage_throughput(made)
    bars = rows(spec, "bar")
    assert len(bars) == len(spec["encoding"]["x"]["sort"]) == min(count, 200) and not rows(spec, "text")
    assert (
        bars[0]["rate"] == 100
        and f"100 to {bars[-1]['rate']:,.0f} samples/s in {len(bars)} stages" in spec["description"]
    )
    drawn = text_charts("run", {**made, "history": [], "evaluations": []})
    listed = [line for line in drawn if line.startswith("  stage ")]
    assert len(listed) == min(count, 20) and (f"  … {len(bars) - 20} more" in drawn) == (len(bars) > 20)


def test_texts_of_boundaries_are_apart(run):
    steps = columns(run, *((i, 8 * i + 8, 8, 1) for i in range(100)))
    stages = [
        {"global_batch_size": 8 + i, "start_sample": at, "end_sample": 800}
        for i, at in enumerate((0, 8, 16, 400, 440, 480))
    ]
    spec = loss({**steps, "plan": {**run["plan"], "stages": stages}})
    assert [row["samples"] for row in rows(spec, "rule")] == [8, 16, 400, 440, 480]
    assert [row["samples"] for row in rows(spec, "text")] == [8, 400, 480]
    drawn = text_charts("run", {**steps, "plan": {**run["plan"], "stages": stages}, "history": [], "evaluations": []})
    below = drawn[drawn.index("Loss against samples") :]
    top = below[next(i for i, line in enumerate(below) if "┌" in line) + 1]
    assert re.findall("[0-9]+", top) == ["9", "11", "13"]


def test_the_noise_scale_has_its_interval(run):
    spec = noise_scale(run)
    band = rows(spec, "area")
    assert len(band) == 40 and all(row["low"] < row["value"] < row["high"] for row in band)
    assert {"noise scale", "95% interval"} <= legend(spec)


def noisy(run, count, **changes):
    """A run with an estimate at every step; `changes` by column and index."""
    made = columns(run, *((i, 8 * i + 8, 8, 1) for i in range(count)))
    usual = {"noise_scale": 900.0, "noise_low": 700.0, "noise_high": 1300.0}
    for name, value in usual.items():
        made["steps"][name] = [changes.get(name, {}).get(i, value) for i in range(count)]
    return made


def test_the_noise_scale_of_a_long_run_keeps_its_extremes_and_its_last_value(run):
    changes = {"noise_scale": {4999: 2000.0, 17: 5000.0}, "noise_high": {4999: 3000.0, 17: 90_000.0}}
    spec = noise_scale(noisy(run, 5000, **changes))
    band = rows(spec, "area")
    assert len(band) <= BUCKETS and max(row["high"] for row in band) == 90_000
    assert "2,000 at sample 40,000 (95% interval 700 to 3,000)" in spec["description"]


def test_missing_estimates_of_the_noise_scale_are_a_gap_and_an_interval_below_zero_reaches_the_bottom(run):
    missing = {name: dict.fromkeys((4, 5), math.nan) for name in ("noise_scale", "noise_low", "noise_high")}
    missing["noise_low"][8] = -50.0
    spec = noise_scale(noisy(run, 10, **missing))
    (line,) = [view for view in views(spec) if "tooltip" in view["encoding"]]
    assert [row["part"] for row in line["data"]["values"]] == [0] * 4 + [1] * 4
    area = next(view for view in views(spec) if view["mark"]["type"] == "area")
    assert line["encoding"]["detail"] == area["encoding"]["detail"] == {"field": "part"}
    band = area["data"]["values"]
    assert len(band) == 8 and band[6]["low"] == area["encoding"]["y"]["scale"]["domain"][0] > 0


def test_node_hours_count_every_launch_also_those_that_failed(run):
    spec = node_hours(run)
    used = [row for row in spec["data"]["values"] if row["series"] == "used"]
    hours = sum(start["nodes"] * start["seconds"] for start in run["history"]) / 60
    assert used[-1]["hours"] == pytest.approx(hours, rel=1e-4) and used[-1]["samples"] == 4800
    planned = [row for row in spec["data"]["values"] if row["series"] == "planned"]
    assert planned[-1]["hours"] == pytest.approx((200 * 0.1 * 1 + 200 * 0.1 * 2) / 60, rel=1e-4)
    assert "without restarts" in spec["description"]
    assert [row["order"] for row in spec["data"]["values"]] == list(range(len(spec["data"]["values"])))
    assert spec["encoding"]["order"]["field"] == "order", "a launch that starts again goes back"
    stages = [{**run["plan"]["stages"][0], "node_hours": None}, *run["plan"]["stages"][1:]]
    changed = {**run, "plan": {**run["plan"], "stages": stages}, "replanned": [{"position": 1600}]}
    assert "the plan was changed during the run" in node_hours(changed)["description"]
    assert not legend(node_hours(changed)), "one line needs no legend"


def test_planned_node_hours_begin_where_the_run_begins(run):
    """Of 200 steps of 0.1 s on one node and 200 on two, another program has trained three quarters of the first."""
    launches = [{**run["plan"]["launches"][0], "start_sample": 1200}, *run["plan"]["launches"][1:]]
    spec = node_hours({**run, "plan": {**run["plan"], "launches": launches}})
    planned = [(row["samples"], row["hours"]) for row in spec["data"]["values"] if row["series"] == "planned"]
    assert planned[0] == (1200, 0) and [at for at, _ in planned] == [1200, 1600, 4800]
    assert planned[-1][1] == pytest.approx((50 * 0.1 * 1 + 200 * 0.1 * 2) / 60, rel=1e-4)
    assert "planned from sample 1,200 on, without restarts" in spec["description"]
    later = [{**launches[0], "start_sample": 1600}]
    spec = node_hours({**run, "plan": {**run["plan"], "launches": later}})
    planned = [row for row in spec["data"]["values"] if row["series"] == "planned"]
    assert [row["samples"] for row in planned] == [1600, 4800]


@pytest.mark.parametrize("count", [2, 2000])
def test_losses_near_the_limit_of_a_float_are_drawn(run, count):
    made = columns(run, *((i, 8 * i + 8, 8, 1) for i in range(count)))
    made["steps"]["loss"] = [sys.float_info.max * (-1) ** (i // 2) for i in range(count)]
    json.dumps(loss(made), allow_nan=False)
    rewards = {"rounds": {**made["steps"], "reward": made["steps"]["loss"]}}
    json.dumps(reward(rewards), allow_nan=False)


def test_a_run_without_steps_or_launches_has_only_its_plan(run):
    empty = {
        **run,
        "steps": {name: [] for name in run["steps"]},
        "history": [],
        "evaluations": [],
        "consumed_samples": 0,
    }
    assert list(charts_of("run", empty)) == ["staircase"]
    one = {name: list(column[:1]) for name, column in run["steps"].items()}
    assert {"loss", "loss-by-time"} <= set(charts_of("run", {**run, "steps": one}))


@pytest.mark.parametrize("kind", CHARTS)
def test_a_theme_changes_colours_only(kind, run):
    document = {**material.documents(), "run": run, "rl": material.rounds()}[kind]
    for name, light in charts_of(kind, document, "light").items():
        dark, page = (charts_of(kind, document, theme)[name] for theme in ("dark", "css"))
        text = json.dumps(light, ensure_ascii=False)
        assert '"@' not in text, "every role has a colour"
        for role in COLORS:
            text = text.replace(colors("light")[role], f"<{role}>")
        other = json.dumps(dark, ensure_ascii=False)
        for role in COLORS:
            other = other.replace(colors("dark")[role], f"<{role}>")
        assert text == other and "var(--" in json.dumps(page)
        assert light["description"] and light["title"]["text"] and light["title"]["subtitle"]


def test_the_colours_of_a_theme_differ_from_each_other_and_from_its_background():
    for theme in THEMES:
        known = colors(theme)
        assert len(set(known.values())) == len(known)
        for role in set(known) - {"background", "grid"}:
            assert contrast(known[role], known["background"]) >= (4.5 if role in ("text", "muted", "red") else 2.0), (
                theme,
                role,
            )


def contrast(one, two):
    """The ratio of WCAG 2."""
    return ratio(luminance(parts(one)), luminance(parts(two)))


def parts(color):
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(color):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one, two):
    low, high = sorted((one, two))
    return (high + 0.05) / (low + 0.05)


def greys(color, opacity, background):
    """A colour on the background as a grey, in the two usual ways: by luminance, and by the weights of television."""
    mixed = [opacity * c + (1 - opacity) * b for c, b in zip(parts(color), parts(background), strict=True)]
    return luminance(mixed), luminance([0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2]] * 3)


# Two greys of one legend: the contrast that they have at least.
GREY = 1.2


@pytest.mark.parametrize("theme", THEMES)
def test_what_only_a_colour_tells_apart_differs_in_grey(theme, run):
    """Every legend without shapes or dashes: any two of its colours, and each of them and the background."""
    rl = material.rounds()
    rl["last"]["spans"].append(["trainer 0", "publish", 2.95, 3.0])
    specs = {
        f"{kind} {name}": spec
        for kind, document in {**material.documents(), "run": run, "rl": rl}.items()
        for name, spec in charts_of(kind, document, theme).items()
    }
    for kinds in ("FB", "FIW"):
        actions = [(0, kind, 0, at, at + 1) for at, kind in enumerate(kinds)]
        schedule = {"schedule": "x", "stages": 1, "microbatches": 1, "idle_share": 0.0, "actions": actions}
        specs[f"timeline {kinds}"] = timeline(schedule, theme=theme)
    background, seen = colors(theme)["background"], []
    for name, spec in specs.items():
        channels = [view.get("encoding", {}) for view in (spec, *spec.get("vconcat", ()), *views(spec))]
        domains = {
            channel: [
                encoding[channel]["scale"]["domain"] for encoding in channels if "scale" in encoding.get(channel, {})
            ]
            for channel in ("shape", "strokeDash")
        }
        for encoding in channels:
            scale = encoding.get("color", {}).get("scale")
            if not scale or len(scale["domain"]) < 2 or any(scale["domain"] in known for known in domains.values()):
                continue
            opacities = encoding.get("opacity", {}).get("scale", {}).get("range", [1.0] * len(scale["range"]))
            drawn = [greys(*look, background) for look in zip(scale["range"], opacities, strict=True)]
            for one, two in combinations([*drawn, greys(background, 1.0, background)], 2):
                assert min(map(ratio, one, two)) >= GREY, (name, scale["domain"], drawn)
            seen.append(name)
    assert {"estimate memory", "probe step-time", "rl round", "timeline FB", "timeline FIW"} <= set(seen)


def test_the_text_on_a_part_of_a_step_can_be_read():
    for theme in THEMES:
        spec = step_time(material.documents()["probe"], theme=theme)
        bar, words = (view["encoding"] for view in spec["layer"])
        ink, known = words["color"], colors(theme)
        assert ink["condition"]["test"] == "datum.part == 'compute'"
        looks = zip(
            *(bar["color"]["scale"][key] for key in ("domain", "range")), bar["opacity"]["scale"]["range"], strict=True
        )
        for name, color, opacity in looks:
            below = greys(color, opacity, known["background"])[0]
            above = ink["condition"]["value"] if name == "compute" else ink["value"]
            assert ratio(below, luminance(parts(above))) >= 4.5, (theme, name)


def test_chart_of_gives_one_or_all_and_names_the_known_ones():
    probe = material.documents()["probe"]
    assert chart_of("probe", probe, "memory") == memory(probe)
    assert len(chart_of("probe", probe)["vconcat"]) == 3
    assert chart_of("ramp", material.documents()["ramp"]) == staircase(material.documents()["ramp"])
    with pytest.raises(ConfigError, match="Known: throughput, memory, step-time"):
        chart_of("probe", probe, "losses")
    with pytest.raises(ConfigError, match="It has none: its numbers are a table"):
        chart_of("pipeline", material.documents()["pipeline"], "x")


def test_a_probe_without_a_limit_or_timings_is_drawn():
    made = replace(material.probe(), memory_bytes=None, curve=None, diagnosis=None, first_failing_micro_batch_size=None)
    trials = tuple(replace(t, timing=None, contrasts=None) for t in made.trials)
    found = charts_of("probe", replace(made, trials=trials).to_json())
    assert set(found) == {"throughput", "memory"}


def test_a_round_is_drawn_process_by_process():
    spec = round_times(material.rounds())
    rows = spec["data"]["values"]
    assert {(row["process"], row["kind"]) for row in rows} == {
        ("trainer 0", "wait"), ("trainer 0", "train"), ("trainer 0", "update"), ("rollout 0", "rollout")
    }  # fmt: skip
    assert min(row["begin"] for row in rows) == 0 and max(row["end"] for row in rows) == 3
    assert spec["encoding"]["y"]["sort"] == ["rollout 0", "trainer 0"]
    assert "rollout 2 s, train 1.8 s, update 0.1 s, wait 1 s" in spec["title"]["subtitle"]
    assert round_times({"last": {}}) is None
