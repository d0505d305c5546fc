"""The loop: stop anywhere, resume anywhere, lose nothing. With real processes and real kills."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from loop_runs import Launch, final, furthest, launch, launches, losses, progress, ramp, status
from loop_tasks import task

from batchwright.core.codec import encode
from batchwright.core.errors import ConfigError, EnvironmentFault, PlanError, RunError
from batchwright.core.ramp.learning_rate import SampleSchedule
from batchwright.core.ramp.rules import Constant, Thresholds
from batchwright.rundir.fence import Fence
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.loop.settings import Settings
from batchwright.runtime.loop.train import main, train
from batchwright.runtime.state.audit import audit
from batchwright.runtime.state.checkpoint import Checkpoints
from batchwright.runtime.task import Task

TASK = Path(__file__).parent / "loop_tasks.py"
# AdamW divides by √v: if a gradient is near zero, a difference in its last bits becomes a visible part of the rate.
CLOSE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(directory: Path, **changes) -> Settings:
    return Settings(**{"directory": str(directory), "micro_batch_size": 4, "progress": False, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run without interruption: one process, three stages."""
    directory = tmp_path_factory.mktemp("whole")
    train(task(), ramp(), settings(directory))
    return directory


def test_a_run_trains_all_samples_and_reports_it(whole):
    assert (status(whole)["state"], status(whole)["reason"], status(whole)["position"]) == ("complete", "end", 192)
    found = audit(whole)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.discarded_samples) == (True, 192, 0, 0, 0)
    seen = losses(whole)
    assert seen[max(seen)] < seen[0] / 2
    train(task(), ramp(), settings(whole))  # a complete run is left as it is
    assert audit(whole).samples == 192
    assert len(losses(whole)) == len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_three_launches_on_1_2_and_4_ranks_train_like_one_process(whole, tmp_path, strategy):
    ends = [s.end_sample for s in ramp().segments]
    for ranks, end in zip((1, 2, 4), ends, strict=True):
        options = {"directory": str(tmp_path), "micro_batch_size": 2, "strategy": strategy, "end_sample": end}
        assert launch(ranks, ramp(), options) in ([75], [0] * ranks)
        assert status(tmp_path)["position"] == end
        following = status(tmp_path)["next_stage"]
        assert following is None if end == 192 else following["start_sample"] == end
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.lineage, found.discarded_samples) == (True, 192, (0, 1, 2), 0)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-4)
    assert furthest(final(tmp_path), final(whole)) < CLOSE
    starts = [e for e in read_events(tmp_path) if e["kind"] == "launch"]
    assert [e["ranks"] for e in starts] == [1, 2, 4]
    assert all(e["lost_seconds"] > 0 for e in starts[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "auto"),
        pytest.param(2, "ddp", marks=pytest.mark.rounds),
        pytest.param(4, "ddp", marks=pytest.mark.rounds),
        pytest.param(2, "fsdp2", marks=pytest.mark.rounds),
        (4, "fsdp2"),
    ],
)
def test_bit_equal_after_kill_at_equal_world(tmp_path, ranks, strategy):
    """With dropout: the generators of each rank are restored."""
    options = {"micro_batch_size": 2, "checkpoint_every": 32, "num_workers": 0, "strategy": strategy}
    kinds = {"dropout": 0.2, "width": 64}
    assert launch(ranks, ramp(), {"directory": str(tmp_path / "a"), **options}, **kinds) == [0] * ranks
    killed = Launch(ranks, ramp(), {"directory": str(tmp_path / "b"), **options}, {**kinds, "pause": 0.02})
    _until(lambda: progress(tmp_path / "b") >= 64)
    killed.kill()
    assert set(killed.wait()) == {-signal.SIGKILL}
    assert launch(ranks, ramp(), {"directory": str(tmp_path / "b"), **options}, **kinds) == [0] * ranks
    one, two = final(tmp_path / "a"), final(tmp_path / "b")
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    found = audit(tmp_path / "b")
    assert found.ok and found.samples == 192 and found.launches == 2


@pytest.mark.slow
def test_killed_at_random_moments_it_reaches_the_end_on_any_ranks(whole, tmp_path):
    draw = random.Random(5)
    for round_ in range(5):
        ranks, micro = draw.choice([1, 2, 4]), draw.choice([1, 2])
        options = {
            "directory": str(tmp_path),
            "micro_batch_size": micro,
            "checkpoint_every": 16,
            "strategy": draw.choice(["ddp", "fsdp2"]),
            "asynchronous": bool(round_ % 2),
        }
        before = launches(tmp_path)
        # The first launch waits after its third step, so that step is lost: the last checkpoint is that of the second one.
        hold = 3 * 8 // (ranks * micro) if round_ == 0 else None
        running = Launch(ranks, ramp(), options, {"pause": 0.03, "hold": hold})
        if hold:
            _until(lambda ranks=ranks: all(progress(tmp_path, rank) == 24 for rank in range(ranks)))
        elif round_ != 2:  # that one at any moment, also during set-up
            _until(lambda before=before: launches(tmp_path) > before and progress(tmp_path) > 0)
        time.sleep(draw.random() * 0.3)
        # All ranks, or one, after which the others fail.
        running.kill(*([] if hold or round_ % 2 else [draw.randrange(ranks)]))
        running.wait(40)
        found = audit(tmp_path)
        assert found.ok, found.findings
        assert not hold or (found.samples, found.unsaved_samples) == (16, 8)
    assert launch(2, ramp(), {"directory": str(tmp_path), "micro_batch_size": 2}) == [0, 0]
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 192, 0, 0), found.findings
    assert found.unsaved_samples == 0 and found.discarded_samples >= 8
    assert furthest(final(tmp_path), final(whole)) < CLOSE


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_step_with_a_checkpoint(tmp_path):
    running = Launch(2, ramp(), {"directory": str(tmp_path), "micro_batch_size": 2}, {"pause": 0.03})
    _until(lambda: progress(tmp_path) >= 8)
    running.kill(1, number=signal.SIGUSR1)
    assert running.wait() == [0, 0]
    said = status(tmp_path)
    assert (said["state"], said["reason"], said["signal"]) == ("stopped", "signal", "SIGUSR1")
    assert 0 < said["position"] < 192
    found = audit(tmp_path)
    assert found.ok and found.samples == said["position"] and found.unsaved_samples == found.discarded_samples == 0


@pytest.mark.slow
def test_ranks_whose_datasets_have_different_lengths_are_refused_by_all(tmp_path, capfd):
    codes = launch(2, ramp(), {"directory": str(tmp_path), "micro_batch_size": 2}, shorter=6)
    assert 0 not in codes and not (tmp_path / "ledger").exists()
    said = "RunError: the ranks have datasets of different lengths: 256 on rank 0, 250 on rank 1."
    assert capfd.readouterr().err.count(said) == 2


@pytest.mark.slow
def test_a_length_that_one_rank_cannot_read_is_an_error_of_all(tmp_path, capfd):
    """Not that of a collective whose other side has gone."""
    codes = launch(2, ramp(), {"directory": str(tmp_path), "micro_batch_size": 2}, fault=(1, "len"))
    said = capfd.readouterr().err
    why = "FileNotFoundError: /data/shard-00017.bin is not on this host"
    assert 0 not in codes and f"errors.RunError: rank 1: len(dataset) failed: {why}" in said
    assert f"\n{why}" in said and "Connection closed by peer" not in said


@pytest.mark.slow
@pytest.mark.parametrize("reading", [{}, {"loading_hosts": [0], "ranks_per_host": 1}])
def test_an_error_of_the_rank_that_reads_for_the_fingerprint_is_raised_by_all_with_its_type(tmp_path, capfd, reading):
    options = {"directory": str(tmp_path), "micro_batch_size": 2, **reading}
    assert 0 not in launch(2, ramp(), options, fault=(0, "row"))
    assert capfd.readouterr().err.count("errors.PlanError: cannot read a.jsonl: its row 17 is not JSON.") == 2


@pytest.mark.rounds
@pytest.mark.slow
def test_the_spec_file_alone_and_under_torchrun(whole, tmp_path):
    spec, run = tmp_path / "spec.json", tmp_path / "a run with 'quotes'"
    content = {
        "schema": 1,
        "task": f"{TASK}:task",
        "args": {"pause": 0.001},
        "schedule": encode(ramp()),
        "settings": {"directory": str(run), "micro_batch_size": [4, 4, 2], "end_sample": 96, "threads": 1},
    }
    spec.write_text(json.dumps(content))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    bare = subprocess.run(
        [sys.executable, "-m", "batchwright.runtime.loop", spec], env=clean, capture_output=True, text=True
    )
    assert bare.returncode == 75, bare.stderr
    assert "stage 1 from step 4: global batch 16" in bare.stderr
    assert status(run)["next_stage"]["stage"] == 2
    content["settings"]["end_sample"] = None
    spec.write_text(json.dumps(content))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**clean, "OMP_NUM_THREADS": "1"}
    both = subprocess.run([*torchrun, "-m", "batchwright.runtime.loop", spec], env=env, capture_output=True, text=True)
    assert both.returncode == 0, both.stderr
    assert status(run)["state"] == "complete" and status(run)["ranks"] == 2
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)
    assert audit(run).ok


def test_a_spec_with_a_misspelt_setting_is_refused(tmp_path, capsys):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"task": "t.py", "schedule": encode(ramp()), "settings": {"directory": "r", "kep": 3}}))
    assert main([str(spec)]) == 2
    assert "settings has no field 'kep'. Nearest: keep." in capsys.readouterr().err
    assert main([]) == 2 and main([str(tmp_path / "none.json")]) == 5


def test_evaluation_does_not_depend_on_its_batch_and_does_not_disturb_training(tmp_path):
    seen = []
    for name, size, every in (("a", 3, 32), ("b", 20, 64)):
        options = {"evaluation_samples": 20, "evaluate_every": every, "evaluation_batch_size": size}
        train(task(dropout=0.3), ramp(), settings(tmp_path / name, **options))
        seen.append({e["samples"]: e["loss"] for e in read_events(tmp_path / name) if e["kind"] == "evaluation"})
    assert seen[0].keys() == {32, 64, 96, 128, 160, 192} and seen[1].keys() == {64, 128, 192}
    assert seen[1] == pytest.approx({k: seen[0][k] for k in seen[1]}, rel=1e-6)
    assert furthest(final(tmp_path / "a"), final(tmp_path / "b")) == 0


@pytest.mark.slow
def test_evaluation_on_two_ranks_equals_that_on_one(tmp_path):
    options = {"micro_batch_size": 4, "evaluation_samples": 7, "evaluation_batch_size": 2, "end_sample": 8}
    for name, ranks, strategy in (("1", 1, "auto"), ("2", 2, "ddp"), ("2f", 2, "fsdp2")):
        launch(ranks, ramp(), {"directory": str(tmp_path / name), "strategy": strategy, **options})
    assert status(tmp_path / "2")["evaluation_loss"] == pytest.approx(
        status(tmp_path / "1")["evaluation_loss"], rel=1e-5
    )
    assert status(tmp_path / "2f")["evaluation_loss"] == pytest.approx(
        status(tmp_path / "1")["evaluation_loss"], rel=1e-5
    )


def test_the_rate_is_a_function_of_samples_and_stage_and_survives_a_restart(tmp_path):
    shape = SampleSchedule(peak_lr=3.0, end_sample=192, warmup_samples=32, decay="linear")
    options = {"learning_rate": shape, "lr_scaling": "sqrt"}
    train(task(), ramp(), settings(tmp_path, end_sample=96, **options))
    train(task(), ramp(), settings(tmp_path, **options))
    for e in (e for e in read_events(tmp_path) if e["kind"] == "step"):
        start = e["samples"] - e["global_batch_size"]
        assert e["learning_rate"] == pytest.approx(1e-2 * shape.at(start, (e["global_batch_size"] / 8) ** 0.5) / 3)


def test_a_budget_of_real_tokens_ends_the_run(tmp_path):
    result = train(task(), ramp(), settings(tmp_path, max_tokens=100))
    assert (result.state, result.reason) == ("complete", "tokens")
    assert 100 <= result.tokens < 100 + 3 * 32 and result.position < 192


def test_where_a_launch_may_not_end(tmp_path):
    expected = r"end_sample=50 must be the end of a step.*: step 5 trains samples 48 to 64"
    with pytest.raises(PlanError, match=expected) as caught:
        train(task(), ramp(), settings(tmp_path, end_sample=50))
    assert caught.value.nearest == (48, 64)
    assert status(tmp_path)["state"] == "failed" and "end_sample=50" in status(tmp_path)["error"]["message"]


def test_a_changed_plan_is_explained(tmp_path):
    train(task(), ramp(), settings(tmp_path, end_sample=96))
    before = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    with pytest.raises(PlanError, match=r"seed was 0 and is 1: .* position 96 no longer says which samples") as caught:
        train(task(size=300), ramp(), settings(tmp_path, seed=1))
    assert [v.field for v in caught.value.violations] == ["dataset_size", "seed", "dataset"]
    with pytest.raises(PlanError, match="resume is off"):
        train(task(), ramp(), settings(tmp_path, resume=False))
    with pytest.raises(RunError, match=r"model/into.weight is \(24, 8\) here, \(16, 8\) there"):
        train(task(width=24), ramp(), settings(tmp_path))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == before
    # The past stays; the new schedule applies from here on.
    result = train(task(), Constant(8).compile().until(128), settings(tmp_path, accumulate_dtype="float64"))
    assert (result.step, result.position) == (8 + 4, 128)
    notes = [e for e in read_events(tmp_path) if e["kind"] == "launch"][-1]["notes"]
    assert any("schedule changed" in note and "the past stays" in note for note in notes)
    assert any("accumulate_dtype was that of the parameters and is float64" in note for note in notes)
    found = audit(tmp_path)
    assert found.ok and found.samples == 128


def test_a_micro_batch_for_each_stage_follows_the_schedule_that_is_extended_or_edited(tmp_path):
    def micro_batches(directory):
        events = (e for e in read_events(directory) if e["kind"] == "step")
        return {e["samples"]: (e["global_batch_size"], e["micro_batch_size"]) for e in events}

    rule = Thresholds(((0, 8), (80, 16)))
    stages = {"micro_batch_size": (2, 4), "log_every": 1}
    train(task(512), rule.compile().until(200), settings(tmp_path, **stages, end_sample=96))
    train(task(512), rule.compile().until(300), settings(tmp_path, **stages, end_sample=112, allow_ragged=True))
    # A third stage, and an earlier one that the run did not have: micro batch sizes follow the samples.
    edited = Thresholds(((0, 8), (40, 16), (128, 32))).compile().until(300)
    longer = {"micro_batch_size": (2, 8, 16), "log_every": 1, "allow_ragged": True}
    train(task(512), edited, settings(tmp_path, **longer, end_sample=176))
    train(task(512), edited, settings(tmp_path, **longer))
    found = micro_batches(tmp_path)
    assert [found[end] for end in (8, 80, 96, 112, 128, 144, 176, 272, 300)] == [
        (8, 2),
        (8, 2),
        (16, 4),
        (16, 4),
        (16, 8),
        (16, 8),
        (32, 16),
        (32, 16),
        (28, 16),
    ]
    assert audit(tmp_path).ok and audit(tmp_path).samples == 300
    assert status(tmp_path)["stages"] == 3  # equal stages stay one
    # A stage that the new plan does not have: its samples get the first number.
    other = tmp_path / "other"
    train(task(512), rule.compile().until(200), settings(other, **stages, end_sample=112))
    fewer = Thresholds(((0, 16), (128, 32))).compile().until(192)
    train(task(512), fewer, settings(other, micro_batch_size=(8, 16), log_every=1))
    assert [micro_batches(other)[end] for end in (80, 112, 128, 160)] == [(8, 2), (16, 4), (16, 8), (32, 16)]


def test_the_fence_keeps_an_old_launch_from_writing(tmp_path):
    def takes_over(result, model, optimizer):
        if result.step == 3:
            Fence(tmp_path, 5).claim()

    with pytest.raises(EnvironmentFault, match="a newer launch has taken over"):
        train(task(), ramp(), settings(tmp_path, launch=2, checkpoint_every=16), on_step=takes_over)
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if "partial" in p.name]
    assert status(tmp_path)["state"] == "running"  # of the last save of launch 2, which may no longer write its failure
    with pytest.raises(EnvironmentFault, match="launch=4 is too late: launch 5"):
        train(task(), ramp(), settings(tmp_path, launch=4))
    assert train(task(), ramp(), settings(tmp_path)).launch == 6
    assert audit(tmp_path).ok
    with pytest.raises(RunError, match="launch=6 has run in"):
        train(task(), ramp(), settings(tmp_path, launch=6))


def test_an_error_of_the_users_code_is_in_the_status(tmp_path):
    def broken(model, batch):
        raise ZeroDivisionError("mine")

    mine = task()
    object.__setattr__(mine, "loss", broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(mine, ramp(), settings(tmp_path))
    error = status(tmp_path)["error"]
    assert (error["type"], error["rank"]) == ("ZeroDivisionError", 0) and "broken" in "".join(error["traceback"])


def _until(true, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.005)


@pytest.mark.slow
def test_saving_in_the_background_does_not_disturb_the_steps(tmp_path):
    options = {"micro_batch_size": 1, "checkpoint_every": 8, "asynchronous": True}
    assert launch(2, ramp(), {"directory": str(tmp_path), **options}) == [0, 0]
    assert len([e for e in read_events(tmp_path) if e["kind"] == "save"]) > 3 and audit(tmp_path).ok


def test_an_evaluation_that_is_not_finite_does_not_prevent_checkpoints(tmp_path):
    plain, drawn = task(), []

    def loss(model, batch):
        total, weight = plain.loss(model, batch)
        if not model.training:
            drawn.append(torch.rand(()))
            total = total * float("nan")
        return total.reshape(1), weight

    mine = task(dropout=0.3)
    object.__setattr__(mine, "loss", loss)
    for name, every in (("a", 32), ("b", 96)):
        made = train(mine, ramp(), settings(tmp_path / name, evaluate_every=every), evaluation=plain.dataset)
        assert made.state == "complete" and made.evaluation_loss is None
        assert [e["loss"] for e in read_events(tmp_path / name) if e["kind"] == "evaluation"][-1] == "nan"
    assert drawn and furthest(final(tmp_path / "a"), final(tmp_path / "b")) == 0  # generators are restored
    with pytest.raises(ConfigError, match="evaluate_every=8 has nothing to evaluate"):
        train(mine, ramp(), settings(tmp_path / "c", evaluate_every=8))


def test_a_spent_budget_and_a_complete_run_stay_so(tmp_path):
    first = train(task(), ramp(), settings(tmp_path / "a", max_tokens=100))
    again = train(task(), ramp(), settings(tmp_path / "a", max_tokens=100))
    assert (again.reason, again.position, again.tokens) == ("tokens", first.position, first.tokens)

    def signalled(result, model, optimizer):
        if result.end_sample == 192:
            os.kill(os.getpid(), signal.SIGTERM)

    ended = train(task(), ramp(), settings(tmp_path / "b"), on_step=signalled)
    assert (ended.state, ended.reason) == ("complete", "end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_in_a_schedule_without_an_end(tmp_path, number):
    def signalled(result, model, optimizer):
        if result.end_sample == 24:
            os.kill(os.getpid(), number)

    stopped = train(task(), Constant(8).compile(), settings(tmp_path), on_step=signalled)
    assert (stopped.state, stopped.reason, stopped.signal) == ("stopped", "signal", signal.Signals(number).name)
    assert (stopped.position, stopped.checkpoint) == (24, "step-000000000003-launch-00000")
    assert train(task(), Constant(8).compile().until(32), settings(tmp_path)).state == "complete"
    assert audit(tmp_path).ok and audit(tmp_path).samples == 32


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")  # a warning of FSDP2 about its own wrapping
def test_an_error_leaves_no_group_of_one_behind(tmp_path):
    def fail(result, model, optimizer):
        raise ArithmeticError("no further")

    with pytest.raises(ArithmeticError):
        train(task(), ramp(), settings(tmp_path, strategy="fsdp2"), on_step=fail)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_failing_rank_ends_at_once_with_its_error(tmp_path):
    spec = tmp_path / "spec.json"
    wanted = {"directory": str(tmp_path / "run"), "micro_batch_size": 2, "progress": False, "device": "cpu"}
    target = f"{Path(__file__).parent / 'failing_rank.py'}:task"
    spec.write_text(json.dumps({"task": target, "schedule": encode(ramp()), "settings": wanted}))
    # The store is in this process, as that of torchrun is in its agent: nobody else can take its port.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "batchwright.runtime.loop", spec],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(TASK.parent)},
        )
        for rank in range(2)
    ]
    try:
        said = ranks[1].communicate(timeout=300)[1]
        assert ranks[1].returncode == 1 and "ArithmeticError: rank 1 fails" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_signal_is_answered_by_a_save_and_not_by_an_evaluation_first(tmp_path):
    def signalled(result, model, optimizer):
        if result.end_sample == 32:
            os.kill(os.getpid(), signal.SIGTERM)

    options = {"evaluation_samples": 20, "log_every": 100}
    stopped = train(task(), ramp(), settings(tmp_path, **options), on_step=signalled)
    assert (stopped.reason, stopped.position) == ("signal", 32)
    assert train(task(), ramp(), settings(tmp_path, **options)).state == "complete"
    seen = [(e["kind"], e["samples"]) for e in read_events(tmp_path) if e["kind"] in ("step", "evaluation")]
    first, resumed = (ramp().at_sample(sample).end_sample for sample in (0, 32))
    whole = ramp().total_samples
    assert seen == [
        ("step", first),
        ("step", resumed),
        ("evaluation", whole),
    ]  # the first step of each launch is always shown


def test_a_refused_start_does_not_change_a_run_that_trains(tmp_path):
    def meanwhile(result, model, optimizer):
        if result.step == 6:
            before = (tmp_path / "launch.json").read_bytes(), (tmp_path / "status.json").read_bytes()
            for wrong in ({"resume": False}, {"seed": 7}):
                with pytest.raises(PlanError):
                    train(task(), ramp(), settings(tmp_path, **wrong))
            assert ((tmp_path / "launch.json").read_bytes(), (tmp_path / "status.json").read_bytes()) == before

    live = train(task(), ramp(), settings(tmp_path, checkpoint_every=16), on_step=meanwhile)
    assert (live.state, live.launch) == ("complete", 0) and status(tmp_path)["state"] == "complete"


def test_a_launch_number_is_used_after_the_claim_alone(tmp_path):
    Fence(tmp_path, 0).claim()
    assert train(task(), ramp(), settings(tmp_path, end_sample=8)).launch == 1


def test_a_status_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "status").write_text("a file")
    with pytest.raises(EnvironmentFault, match="the status could not be written") as caught:
        train(task(), ramp(), settings(tmp_path))
    assert caught.value.exit_code == 4


def test_ranks_without_a_rendezvous_or_a_strategy_are_refused(tmp_path, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EnvironmentFault, match="no MASTER_ADDR and no MASTER_PORT"):
        train(task(), ramp(), settings(tmp_path))
    with pytest.raises(PlanError, match="strategy='none' does not train on 2 ranks"):
        train(task(), ramp(), settings(tmp_path, strategy="none"))


def test_a_step_that_overflows_is_skipped_counted_and_the_scale_survives_a_restart(tmp_path):
    spike = int(GlobalOrder(256, 0).ids([40])[0])  # in step 4: samples 32 to 48
    options = {"grad_scaler": 1024.0, "noise_every": 1}
    one = train(task(spike=spike), ramp(), settings(tmp_path / "a", **options))
    train(task(spike=spike), ramp(), settings(tmp_path / "b", end_sample=96, **options))
    two = train(task(spike=spike), ramp(), settings(tmp_path / "b", **options))
    assert (one.state, one.skipped_steps, two.skipped_steps) == ("complete", 1, 1)
    for name in "ab":
        steps = [e for e in read_events(tmp_path / name) if e["kind"] == "step"]
        assert [e["step"] for e in steps if e["outcome"] == "skipped"] == [4]
        assert [e["loss_scale"] for e in steps] == [1024.0] * 4 + [512.0] * 7
        found = audit(tmp_path / name)
        assert (found.ok, found.samples, found.skipped_samples) == (True, 192, 16)
        state = json.loads(next((tmp_path / name / "checkpoints").glob("step-000000000011-*/state.json")).read_text())
        assert state["scaler"]["scale"] == 512.0 and state["scaler"]["_growth_tracker"] == 6
        assert len(state["noise"]) == 10  # no measurement in a step that overflows
        assert status(tmp_path / name)["skipped_steps"] == 1
    assert furthest(final(tmp_path / "a"), final(tmp_path / "b")) == 0
    assert all(torch.isfinite(value).all() for value in final(tmp_path / "a").values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_skip_together(tmp_path, strategy):
    spike = int(GlobalOrder(256, 0).ids([40])[0])
    options = {"micro_batch_size": 2, "grad_scaler": 1024.0}
    launch(1, ramp(), {"directory": str(tmp_path / "1"), **options}, spike=spike)
    assert launch(2, ramp(), {"directory": str(tmp_path / "2"), "strategy": strategy, **options}, spike=spike) == [0, 0]
    assert status(tmp_path / "2")["skipped_steps"] == 1 and audit(tmp_path / "2").skipped_samples == 16
    assert furthest(final(tmp_path / "1"), final(tmp_path / "2")) < CLOSE


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")  # a warning of FSDP2 about its own wrapping
@pytest.mark.parametrize("strategy", ["auto", pytest.param("fsdp2", marks=pytest.mark.rounds)])
def test_half_precision_gradients_are_summed_in_the_given_precision(tmp_path, strategy):
    """256 micro batches of one sample: a bf16 sum rounds away what an fp32 sum keeps."""
    gradients = {}
    for name, half, kind in (("exact", False, None), ("bf16", True, None), ("fp32", True, "float32")):

        def keep(result, model, optimizer, name=name):
            whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            gradients[name] = torch.cat([g.detach().float().reshape(-1) for g in whole])

        options = {"micro_batch_size": 1, "strategy": strategy, "accumulate_dtype": kind}
        schedule = Constant(256).compile().until(256)
        train(task(half=half), schedule, settings(tmp_path / name, **options), on_step=keep)
    errors = {name: float((g - gradients["exact"]).norm()) for name, g in gradients.items()}
    assert errors["fp32"] < 0.5 * errors["bf16"], errors


def test_wrong_precisions_are_refused_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, accumulate_dtype="float8", grad_scaler=0.0)
    assert [v.field for v in caught.value.violations] == ["accumulate_dtype", "grad_scaler"]
    assert "float32, float64" in str(caught.value) and "Nearest: 65536" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 4.0}, "micro_batch_size=4.0: must be a whole number (int). Nearest: 4."),
        ({"micro_batch_size": (4, 2.5)}, "micro_batch_size=2.5: must be a whole number"),
        ({"micro_batch_size": 0}, "micro_batch_size=0: must be at least 1."),
        ({"micro_batch_size": None}, "micro_batch_size=None: must be a whole number"),
        ({"checkpoint_every": 16.0}, "checkpoint_every=16.0: must be a whole number"),
        ({"end_sample": 32.0}, "end_sample=32.0: must be a whole number"),
        ({"keep": True}, "keep=True: must be a whole number"),
        ({"num_workers": -1}, "num_workers=-1: must be at least 0."),
        ({"evaluation_samples": -5}, "evaluation_samples=-5: must be at least 0."),
        ({"launch": -1}, "launch=-1: must be at least 0."),
        ({"seed": 2**64}, "seed=18446744073709551616: must be at most 18446744073709551615."),
        ({"seed": 10**5000}, "seed=a number of 16610 bits: must be at most"),
        ({"seed": -(10**30)}, "must be at least -9223372036854775808."),
        ({"max_tokens": float("nan")}, "max_tokens=nan: must be above 0"),
        (
            {"learning_rate": SampleSchedule(peak_lr=float("inf"), end_sample=100)},
            "learning_rate.peak_lr=inf: must be finite.",
        ),
    ],
)
def test_settings_that_no_run_can_have_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError) as raised:
        settings(tmp_path, **changes)
    assert message in str(raised.value)


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, -(2**63)])
def test_the_largest_seeds_work(tmp_path, seed):
    assert train(task(), ramp(32), settings(tmp_path, seed=seed)).state == "complete"


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_is_no_number_is_refused_before_anything_is_written(tmp_path, rate):
    given = replace(task(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))
    with pytest.raises(ConfigError, match=f"the optimizer has lr={rate}: must be a finite number"):
        train(given, ramp(), settings(tmp_path / "run"))
    # AdamW itself refuses NaN.
    with pytest.raises((ConfigError, RunError), match=rf"(Task\.optimizer failed: ValueError: .*|lr=){rate}"):
        train(task(lr=rate), ramp(), settings(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, "a weight of type NoneType"),
        ("3", "a weight of type str"),
        (torch.ones(2), r"a weight of type Tensor of shape \(2,\)"),
    ],
)
def test_a_weight_that_is_no_number_is_named(tmp_path, weight, message):
    given = replace(task(), loss=lambda model, batch: (model(batch[0]).sum(), weight))
    with pytest.raises(RunError, match=message):
        train(given, ramp(), settings(tmp_path))


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"noise_every": 1}, {"noise_every": 2, "max_norm": 0.5}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_clipped_and_measured_like_dense_ones(tmp_path, options, optimizer):
    def made(sparse: bool) -> Task:
        return Task(
            model=lambda: torch.nn.Embedding(9, 3, sparse=sparse),
            dataset=[torch.tensor([i % 7, (i * i) % 9]) for i in range(64)],
            loss=lambda model, batch: ((model(batch) ** 2).sum(), batch.numel()),
            optimizer=lambda parameters: (optimizer if sparse else torch.optim.SGD)(parameters, lr=0.1),
        )

    for sparse in (True, False):
        train(made(sparse), ramp(64), settings(tmp_path / str(sparse), **options))
    if optimizer is torch.optim.SGD:
        assert furthest(final(tmp_path / "True"), final(tmp_path / "False")) < 1e-6
        norms = [[e["grad_norm"] for e in read_events(tmp_path / d) if e["kind"] == "step"] for d in ("True", "False")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5, nan_ok=True)


def test_a_loader_worker_that_dies_during_a_save_does_not_fail_the_save(tmp_path):
    """torch reports it by an exception in a handler of SIGCHLD, at any line of the main thread."""
    killed: list[int] = []
    reported = threading.Event()

    def may_save() -> bool:  # called in the middle of a save, and before the first step, without a worker
        if not killed and (workers := multiprocessing.active_children()):
            handler = signal.getsignal(signal.SIGCHLD)
            signal.signal(signal.SIGCHLD, lambda *given: (reported.set(), handler(*given)))
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)
            assert reported.wait(60)
            signal.signal(signal.SIGCHLD, handler)
        return True

    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*killed by signal"):
        train(task(), ramp(), settings(tmp_path, num_workers=1, checkpoint_every=64), may_save=may_save)
    saved = Checkpoints(tmp_path / "checkpoints").newest()
    assert killed and saved is not None and saved.position == 64
    assert train(task(), ramp(), settings(tmp_path)).state == "complete"
    assert audit(tmp_path).ok


@pytest.mark.parametrize("together", [2, 5])
def test_processes_that_start_together_get_launches_of_their_own(tmp_path, together):
    code = "import pathlib, sys; from batchwright.rundir.status import claim_launch; sys.stdin.read(); "
    code += f"print(claim_launch(pathlib.Path({str(tmp_path)!r})))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(together)
    ]
    for process in started:  # now all of them may go on
        process.stdin.close()
    with ExitStack() as stack:
        numbers = [int(stack.enter_context(process).stdout.read()) for process in started]
    assert sorted(numbers) == list(range(together))


def test_of_two_runs_that_start_together_one_trains_and_the_status_is_its_own(tmp_path):
    """The second one starts between the set-up and the first step of the first one."""
    other: list[None] = []

    def second(result, model, optimizer):
        if not other:
            other.append(None)
            train(task(), ramp(32), settings(tmp_path))

    with pytest.raises(EnvironmentFault, match="a newer launch has taken over"):
        train(task(), ramp(), settings(tmp_path, checkpoint_every=64), on_step=second)
    assert status(tmp_path)["launch"] == 1 and status(tmp_path)["state"] == "complete"
    assert json.loads((tmp_path / "status" / "launch-00001.json").read_text())["position"] == 32
    assert json.loads((tmp_path / "status" / "launch-00000.json").read_text())["state"] == "running"


def test_a_launch_number_that_was_used_is_refused_before_its_status_is_replaced(tmp_path):
    train(task(), ramp(), settings(tmp_path, launch=3))
    before = (tmp_path / "status" / "launch-00003.json").read_text()
    with pytest.raises(RunError, match=r"launch=3 has run in .* already.* Nearest: 4"):
        train(task(), ramp(256), settings(tmp_path, launch=3))
    assert (tmp_path / "status" / "launch-00003.json").read_text() == before


def test_nonfinite_losses_stop_a_run_and_are_not_saved(tmp_path):
    """The weights are NaN after sample `spike`, so every later loss is."""
    spiked = task(spike=int(GlobalOrder(256, 0).ids(range(40, 41))[0]))
    with pytest.raises(
        RunError, match=r"not finite in 3 steps in a row: nan in step .* from checkpoint step-0+4-launch"
    ):
        train(spiked, ramp(), settings(tmp_path, checkpoint_every=16, stop_after_nonfinite=3))
    saved = Checkpoints(tmp_path / "checkpoints").newest()
    assert saved is not None and saved.position == 32
    assert status(tmp_path)["nonfinite_steps"] == 3
    assert [e["steps"] for e in read_events(tmp_path) if e["kind"] == "nonfinite"] == [3]
    ended = train(spiked, ramp(), settings(tmp_path, stop_after_nonfinite=0))
    wrong = [loss for loss in losses(tmp_path).values() if loss in ("nan", "inf")]
    assert (ended.state, ended.nonfinite_steps) == ("complete", len(wrong))


def test_a_nonfinite_loss_with_finite_weights_is_saved(tmp_path):
    plain, calls = task(), iter(range(1000))

    def loss(model, batch):
        loss_sum, weight = plain.loss(model, batch)
        return loss_sum + (math.inf if next(calls) == 9 else 0.0), weight  # the gradient is finite

    ended = train(replace(plain, loss=loss), ramp(), settings(tmp_path, checkpoint_every=48, keep=9))
    assert (ended.state, ended.nonfinite_steps) == ("complete", 1)
    states = [json.loads(path.read_text()) for path in (tmp_path / "checkpoints").glob("*/state.json")]
    assert sorted(state["position"] for state in states) == [48, 96, 160, 192]


@pytest.mark.parametrize("stop", ["signal", "boundary", "end"])
def test_weights_that_are_not_finite_are_not_saved_when_a_launch_stops(tmp_path, stop):
    spiked = task(spike=int(GlobalOrder(256, 0).ids(range(70, 71))[0]))
    options = settings(tmp_path, checkpoint_every=16, end_sample=96 if stop == "boundary" else None)

    def on_step(result, model, optimizer):
        if stop == "signal" and result.end_sample == 96:
            os.kill(os.getpid(), signal.SIGTERM)

    if stop == "signal":
        assert train(spiked, ramp(), options, on_step=on_step).reason == "signal"
    else:
        with pytest.raises(RunError, match="the loss was not finite in"):
            train(spiked, ramp(), options)
    saved = Checkpoints(tmp_path / "checkpoints").newest()
    assert saved is not None and saved.position == 64 and status(tmp_path)["nonfinite_steps"] > 0


def test_a_long_evaluation_and_a_save_say_that_they_began(tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.runtime.loop.train._ALIVE_SECONDS", -1.0)
    train(task(), ramp(64), settings(tmp_path, evaluation_samples=16, evaluate_every=64, checkpoint_every=32))
    kinds = [e["kind"] for e in read_events(tmp_path)]
    assert kinds.index("saving") < kinds.index("save") and kinds.index("evaluating") < kinds.index("evaluation")
    assert [e["evaluated"] for e in read_events(tmp_path) if e["kind"] == "evaluating"][:4] == [0, 4, 8, 12]
