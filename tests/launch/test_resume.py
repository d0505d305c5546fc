"""A run that continues with another ramp, budget or world: the past stays, the rest is planned anew."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import batchwright
from batchwright.core.batch.request import BatchRequest, read_request
from batchwright.core.errors import BatchwrightError, ConfigError, MissingExtraError, ScheduleError
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory
from batchwright.launch.plan import begin, build
from batchwright.launch.records import Options, RunPlan
from batchwright.launch.resume import refit, replan, resume
from batchwright.processes.guard import start_time

from .conftest import TASK

COMMAND = ["train", "{global_batch_size}"]
WORLD = {"nodes": 4, "devices_per_node": 2}


def planned(batch: dict[str, object], **ramp: object) -> RunPlan:
    return build(read_request({**WORLD, **batch}), read_ramp(ramp), Options(), command=COMMAND)[0]


def assert_whole(plan: RunPlan) -> None:
    """Stages are the segments, launches are all stages in order, and both reach from 0 to the end."""
    assert [s.index for s in plan.stages] == list(range(len(plan.stages)))
    for stage, segment in zip(plan.stages, plan.schedule.segments, strict=True):
        assert (stage.global_batch_size, stage.first_step, stage.steps, stage.start_sample, stage.end_sample) == (
            segment.global_batch_size,
            segment.first_step,
            segment.steps,
            segment.start_sample,
            segment.end_sample,
        )
    assert [launch.index for launch in plan.launches] == list(range(len(plan.launches)))
    assert [i for launch in plan.launches for i in launch.stages] == [s.index for s in plan.stages]
    edges = [edge for launch in plan.launches for edge in (launch.start_sample, launch.end_sample)]
    assert edges[0] == 0 and edges[-1] == plan.total_samples and edges[1:-1:2] == edges[2:-1:2]


def test_a_larger_budget_lengthens_the_last_stage():
    plan = planned({}, thresholds="0:8 64:16 192:32", samples=512, node_policy="constant-work")
    longer = replan(plan, BatchRequest(), {"samples": "1024"}, 256)
    assert_whole(longer)
    assert longer.total_samples == 1024 and longer.stages[:2] == plan.stages[:2]
    assert [s.global_batch_size for s in longer.stages] == [8, 16, 32]
    assert "From sample 256 on, the ramp is 8 -> 16 -> 32 until sample 1,024; it was" in longer.notes[-1]


def test_a_complete_run_continues_after_its_shortened_last_step():
    plan = planned({"allow_ragged": True}, thresholds="0:8 64:16", samples=100)
    longer = replan(plan, BatchRequest(), {"samples": 200}, 100)
    assert_whole(longer)
    assert longer.schedule.at_sample(99).end_sample == 100 and longer.stage_at(100).global_batch_size == 16


def test_another_rule_replaces_the_old_one_and_its_last_batch():
    plan = planned(
        {"global_batch_size": 64, "micro_batch_size": 2}, linear="16,16,256", samples=1024, node_policy="constant"
    )
    other = replan(plan, BatchRequest(), {"thresholds": "0:16 320:128"}, 288)
    assert_whole(other)
    assert [(s.global_batch_size, s.start_sample) for s in other.stages][-1][0] == 128
    assert other.ramp is not None and other.ramp.linear is None and other.batch is not None
    assert other.batch.global_batch_size is None and other.batch.micro_batch_size == 2
    again = replan(other, BatchRequest(), {"samples": 2048}, 288)  # what was asked for is kept with its changes
    assert again.total_samples == 2048 and again.stages[-1].global_batch_size == 128


def test_another_world_places_only_what_is_left():
    plan = planned({}, thresholds="0:8 64:16 192:32", samples=512, node_policy="constant")
    fewer = replan(plan, read_request({"nodes": 1}), {}, 128)
    assert_whole(fewer)
    assert [(s.nodes, s.data_parallel_size) for s in fewer.stages] == [(4, 8), (1, 2), (1, 2)]
    assert [launch.nodes for launch in fewer.launches] == [4, 1, 1]
    ranks = replan(plan, read_request({"devices": 2, "devices_per_node": 2}), {}, 192)
    assert ranks.stages[-1].data_parallel_size == 2 and ranks.stages[0].data_parallel_size == 8


def test_a_budget_that_is_already_trained_and_a_position_inside_a_step_are_refused():
    plan = planned({}, thresholds="0:8 64:16 192:32", samples=512)
    with pytest.raises(ConfigError, match="samples=128 is not after the position of the run: 128 samples"):
        replan(plan, BatchRequest(), {"samples": 128}, 128)
    with pytest.raises(ScheduleError, match="position=100 is inside a step"):
        replan(plan, BatchRequest(), {"samples": 1024}, 100)
    with pytest.raises(ConfigError, match="started by an older version"):
        replan(replace(plan, ramp=None), BatchRequest(), {"samples": 1024}, 128)


def test_a_smaller_micro_batch_stays_after_a_replan_and_trained_stages_are_not_split():
    plan = planned({}, thresholds="0:16 64:32", samples=512, node_policy="constant")
    assert [s.micro_batch_size for s in plan.stages] == [2, 4]
    smaller = refit(plan, 1, 64)
    assert [s.micro_batch_size for s in smaller.stages] == [2, 1]
    assert [s.micro_batch_size for s in replan(smaller, BatchRequest(), {"samples": 1024}, 96).stages] == [2, 1]
    fewer = replan(plan, read_request({"nodes": 1, "devices_per_node": 4}), {}, 64)
    assert [s.micro_batch_size for s in refit(fewer, 2, 64).stages] == [2, 2]


def test_an_earlier_launch_keeps_its_ranks():
    """A damaged checkpoint leads back to it."""
    plan = planned({}, thresholds="0:16 64:32", samples=512, node_policy="constant")
    other = replan(plan, read_request({"nodes": 2, "devices_per_node": 8}), {}, 64)
    assert [other.ranks(launch) for launch in other.launches] == [8, 16]


def test_a_plan_is_not_changed_while_a_launch_runs_by_it(run):
    assert run(*run.scripted("crash@96!", flags=("--max-retries", "0")))[0] == 5
    launch = run.newest()
    (launch / "ending.json").unlink()
    sleeper = subprocess.Popen(["sleep", "1000"])
    manifest = json.loads((launch / "manifest.json").read_text())
    manifest["handle"] |= {"pid": sleeper.pid, "start_time": start_time(sleeper.pid)}
    (launch / "manifest.json").write_text(json.dumps(manifest))
    before = (run.directory / "plan.json").read_text()
    try:
        code, _, err = run.resume("--samples", "1024")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert code == 4 and "still runs, by the plan as it is" in " ".join(err.split()), err
    assert (run.directory / "plan.json").read_text() == before


def test_a_damaged_handle_or_exit_record_is_as_if_it_was_not_there(run):
    assert run(*run.scripted("crash@96!", flags=("--max-retries", "0")))[0] == 5
    launch = run.newest()
    (launch / "ending.json").unlink()
    manifest = json.loads((launch / "manifest.json").read_text())
    del manifest["handle"]["pid"]
    (launch / "manifest.json").write_text(json.dumps(manifest))
    (launch / "ranks" / "0.exit.json").write_text('{"code": "x", "time": []}')
    (launch / "ranks" / "\u00b2.json").write_text("{}")
    code, _, err = run.resume("--max-retries", "0")
    assert code == 5 and "bug" not in err and "exited with 1: ValueError: the shelf is empty" in err, err


def test_a_refused_resume_in_python_leaves_the_lock_free(run):
    assert run(*run.scripted())[0] == 0
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not after the position"):
            batchwright.run(resume=str(run.directory), samples=8, progress=False)


def test_a_resume_without_torch_names_the_extra(run, monkeypatch, tmp_path):
    plan, _ = build(read_request(WORLD), read_ramp({"samples": 64, "thresholds": "0:8"}), Options(), target=TASK)
    directory = RunDirectory(tmp_path / "run")
    begin(directory, plan)
    directory.unlock()
    monkeypatch.setattr("batchwright.launch.engine.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="batchwright\\[torch\\]"):
        resume(directory, {})
    assert directory.supervisor() is None


batches = st.lists(st.sampled_from([8, 16, 24, 32, 48, 64]), min_size=1, max_size=4).map(sorted)


@st.composite
def ramps(draw: st.DrawFn) -> dict[str, object]:
    sizes = draw(batches)
    edges = sorted(draw(st.lists(st.integers(1, 60), min_size=len(sizes) - 1, max_size=len(sizes) - 1, unique=True)))
    text = " ".join(f"{64 * edge}:{size}" for edge, size in zip([0, *edges], sizes, strict=True))
    return {"thresholds": text, "samples": draw(st.integers(1, 5000)), "allow_falling": True}


@given(ramps(), ramps(), st.integers(0, 200), st.sampled_from([1, 2, 4]))
def test_steps_that_were_trained_never_change(first, second, step, nodes):
    ragged = {"allow_ragged": True}
    plan = planned(ragged, **first, node_policy="constant")
    position = plan.schedule.at_step(min(step, (plan.schedule.total_steps or 1) - 1)).start_sample
    assume(position < second["samples"])
    try:
        other = replan(plan, read_request({"nodes": nodes}), second, position)
    except BatchwrightError as error:
        assert "Nearest" in str(error), error
        return
    assert_whole(other)
    trained = plan.schedule.at_sample(position).step
    for index in range(trained):
        before, after = plan.schedule.at_step(index), other.schedule.at_step(index)
        assert (before.start_sample, before.end_sample) == (after.start_sample, after.end_sample)
    assert other.schedule.at_sample(position).start_sample == position
    assert other.total_samples == second["samples"]
    assert other.stage_at(position).nodes == nodes


def test_a_stopped_run_continues_with_more_samples_on_more_nodes(run):
    with run.held() as hold:
        process = run.start(*run.scripted(hold))
        run.until(lambda: run.position() > 16)
        process.send_signal(signal.SIGINT)
        assert run.finish()[0] == 130
    code, out, err = run.resume("--samples", "1024", "--thresholds", "0:8 64:16 256:64", "--nodes", "8", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["state"], document["consumed_samples"]) == ("complete", 1024)
    assert [start["nodes"] for start in document["history"]] == [1, 1, 2, 8]
    assert "From sample" in err and "the ramp is 8 -> 16 -> 64 until sample 1,024" in " ".join(err.split())
    (event,) = run.events("replanned")
    assert event["before"]["samples"] == 512 and event["after"]["samples"] == 1024
    code, out, err = run.resume("samples=1280", "--json")  # a complete run, and a key instead of a flag
    assert code == 0 and json.loads(out)["consumed_samples"] == 1280, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seed", "3"), "--seed cannot be changed with --resume"),
        (("x.yaml",), "x.yaml cannot be changed with --resume"),
        (("launch.keep=3",), "launch.keep=3 cannot be changed"),
        (("--samples", "16"), "--samples=16 is not after the position of the run"),
        (("--thresholds", "0:7", "--linear", "1,1,1"), "mutually exclusive"),
    ],
)
def test_what_cannot_change_is_refused_and_nothing_is_written(run, arguments, message):
    assert run(*run.scripted())[0] == 0
    before = (run.directory / "plan.json").read_text()
    code, _, err = run.resume(*arguments)
    assert code == 2 and message in " ".join(err.split()), err
    assert (run.directory / "plan.json").read_text() == before and run.events("replanned") == []


@pytest.mark.rounds
@pytest.mark.torch
def test_the_loop_follows_the_new_ramp_and_the_audit_is_exact(run):
    run.start(*run.task("--checkpoint-samples", "16", ramp="0:8 64:16", samples=512, nodes=2, args=("slow=0.05",)))
    run.until(lambda: run.position() >= 40)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    code, out, err = run.resume("--thresholds", "0:8 128:32", "--samples", "320", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["state"], document["consumed_samples"], document["ledger"]["ok"]) == ("complete", 320, True)
    code, out, err = run.resume("--samples", "400", "--allow-ragged", "--json")
    assert code == 0, err
    assert json.loads(out)["ledger"]["ok"] and json.loads(out)["ledger"]["samples"] == 400
