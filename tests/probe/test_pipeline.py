"""`probe --pipeline-microbatches`: what is refused, the fit, and a pipeline of two real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli import main
from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.errors import PlanError
from batchwright.probe.pipeline import probe_pipeline

TASK = str(Path(__file__).with_name("piped.py"))


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out + err


@given(
    st.sampled_from(["1f1b", "zero-bubble", "interleaved"]),
    st.integers(2, 8),
    st.integers(0, 4096),
    st.floats(1e-3, 1e3),
)
def test_the_fit_finds_the_constant_of_exact_times(schedule, p, half, scale):
    rule = PipelineRule(schedule, p, 2 if schedule == "interleaved" else 1, half_speed_tokens=half)
    times = {m: scale * float(rule.cost(m, 65_536)) for m in (p, 2 * p, 4 * p, 8 * p)}
    assert abs((rule.fit_half_speed(times, 65_536) or 0) - half) <= 1
    assert rule.fit_half_speed({4: 1.0}, 65_536) is None


def test_numbers_that_do_not_run_are_refused_with_the_nearest(capsys):
    with pytest.raises(PlanError) as caught:
        probe_pipeline("x.py:task", microbatches=[1, 4, 5], stages=2, global_batch_size=16)
    assert [v.nearest for v in caught.value.violations] == [(2,), (4, 8)]
    with pytest.raises(PlanError, match="circular is not run by torch"):
        probe_pipeline("x.py:task", microbatches=[4], stages=2, global_batch_size=16, schedule="circular")
    code, shown = run(capsys, "probe", f"{TASK}:task", "--pipeline-parallel", "2")
    assert code == 2 and "--pipeline-parallel=2 needs --pipeline-microbatches" in shown
    code, shown = run(capsys, "probe", f"{TASK}:task", "--pipeline-microbatches", "2", "--memory", "1GiB", "--exact")
    assert code == 2 and "--memory and --exact cannot be used with --pipeline-microbatches" in " ".join(shown.split())
    code, shown = run(capsys, "probe", f"{TASK}:task", "--pipeline-microbatches", "2", "--timeout", "0.01")
    assert code != 0 and "no result within 0.01 s" in shown, shown


def test_plan_uses_the_fitted_constant(capsys, tmp_path):
    file, line = tmp_path / "pipeline.json", ["--global-batch-size", "64", "--sequence-length", "128"]
    line += ["--pipeline-parallel", "4", "--devices", "4", "--json"]
    chosen = {}
    for half in (0, 512, 100_000):
        file.write_text(json.dumps({"schema": 1, "kind": "pipeline", "half_speed_tokens": half}))
        code, shown = run(capsys, "plan", *line, "--from-probe", str(file))
        assert code == 0, shown
        chosen[half] = json.loads(shown)["pipeline"]["pipeline_microbatches"]
    assert chosen[0] == 64 and chosen[0] > chosen[512] > chosen[100_000]


@pytest.mark.torch
def test_two_processes_with_equal_stages_idle_as_predicted_and_plan_reads_the_result(capsys, tmp_path):
    """The stages sleep, so a busy machine does not change how long they take; a late wake-up is far shorter than a sleep."""
    line = ("probe", f"{TASK}:sleeping", "--arg", "seconds=0.16", "--arg", "fixed=0.04", "--global-batch-size", "4")
    code, shown = run(capsys, *line, "--pipeline-microbatches", "2,4", "--json")
    assert code == 0, shown
    made = json.loads(shown)
    assert (made["kind"], made["schedule"], made["stages"], made["tokens"]) == ("pipeline", "torch-1f1b", 2, 64)
    predicted = [trial["predicted_idle_share"] for trial in made["trials"]]
    assert predicted == pytest.approx([1 / 3, 1 / 5])
    for trial in made["trials"]:
        assert trial["idle_share"] == pytest.approx(trial["predicted_idle_share"], abs=0.1), made
    # A pass takes 0.04 s beside 0.02 s for each sample: half speed is at 2 samples of 16 tokens.
    assert 16 <= made["half_speed_tokens"] <= 64, made
    file = tmp_path / "pipeline.json"
    file.write_text(shown)
    size = ("--global-batch-size", "64", "--sequence-length", "16", "--pipeline-parallel", "2", "--devices", "2")
    code, shown = run(capsys, "plan", *size, "--from-probe", str(file))
    words = " ".join(shown.split())
    assert code == 0 and f"a microbatch of {made['half_speed_tokens']} tokens runs at half speed" in words, shown


@pytest.mark.torch
@pytest.mark.rounds
def test_a_traced_model_is_split_for_every_number_and_tokens_are_counted_from_the_input(capsys):
    code, shown = run(
        capsys, "probe", f"{TASK}:traced", "--pipeline-microbatches", "2,4,8", "--global-batch-size", "16"
    )
    assert code == 0, shown
    head, _, columns, *rows = shown.splitlines()
    assert head == "torch-1f1b on 2 ranks, 16 samples (256 tokens) per step"
    assert columns.split() == ["microbatches", "micro", "step", "idle", "predicted", "idle"]
    assert [row.split()[:2] + row.split()[-1:] for row in rows[:3]] == [
        ["2", "8", "33%"],
        ["4", "4", "20%"],
        ["8", "2", "11%"],
    ]
    assert "fastest: " in shown and "plan chooses" in shown
