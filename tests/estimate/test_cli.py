"""`batchwright estimate` for people and for scripts."""

from __future__ import annotations

import json
import re

import pytest

from batchwright.cli import main
from batchwright.cli.options import task_arguments
from batchwright.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def run(capfd):
    def of(*arguments: str, verb: str = "estimate") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([verb, *arguments])
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return of


@pytest.mark.torch
def test_the_answer_comes_first_and_says_that_it_is_predicted(run, tasks):
    code, out, err = run(
        f"{tasks}:gpt", "--memory", "64MiB", "--margin", "1MiB", "--sequence-length", "32,64", "--arg", "layers=1"
    )
    assert code == 0
    first = out.splitlines()[0]
    assert (
        first.startswith("max_micro_batch_size ") and "at sequence_length 64, predicted, in 64.0 MiB (1.0 MiB" in first
    )
    for text in (
        "parameters",
        "optimizer",
        "activations",
        "per sample over",
        "frontier, from peak =",
        "assumptions:",
        "not validated on a device",
        "predicted, not measured",
    ):
        assert text in out
    assert "estimated micro_batch_size 1 sequence_length 32" in err
    assert "█" not in out, "a pipe gets no plot unless asked"


@pytest.mark.torch
def test_a_calibrated_answer_shows_both(run, tasks, monkeypatch):
    monkeypatch.setattr("batchwright.estimate.steps.measure", lambda request: 2**20)
    code, out, _ = run(f"{tasks}:small", "--device", "t4-16g", "--micro-batch-size", "64,128", "--calibrate", "--plot")
    assert "Memory, predicted" in out and "◆ measured" in out
    assert code == 0 and "one real trial on this CPU" in out and re.search(r"measured +1\.0 MiB", out)
    assert "with the difference added, max_micro_batch_size would be" in out


@pytest.mark.torch
def test_a_failing_task_exits_5_with_its_traceback_on_stderr(run, tasks):
    code, out, err = run(f"{tasks}:wrong", "--micro-batch-size", "2", "--json")
    assert code == 5 and json.loads(out)["error"]["type"] == "RunError"
    assert "Traceback" in err and 'raise ValueError("the labels are missing")' in err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("masked", "--micro-batch-size", "2"), 2), (("small", "--memory", "1KiB"), 3), (("nope",), 2)],
)
def test_exit_codes(run, tasks, arguments, code):
    assert run(f"{tasks}:{arguments[0]}", *arguments[1:])[0] == code


def test_invalid_requests_exit_2(run, tasks):
    assert run("x.py:task", "--device", "h100")[0] == 2
    assert run("x.py:task", "--memory", "lots")[0] == 2
    assert run("x.py:task", "--micro-batch-size", "2,x")[0] == 2
    code, _, err = run()
    assert code == 2 and "needs a task" in err
    named = f"{tasks}:small"
    planned = ("--task", named, "--global-batch-size", "8", "--probe")
    for verb, task in (("estimate", (named,)), ("plan", planned)):
        code, _, err = run(*task, "--device", "h100", "--memory", "1GiB", verb=verb)
        assert code == 2 and "--device and --memory are mutually exclusive: h100-80g has" in err


def test_what_is_kept_free_needs_something_to_keep_it_of(run, tasks):
    for flag, value in (("margin", "1GiB"), ("context", "1GiB"), ("workspaces", "1GiB"), ("fragmentation", "5%")):
        code, _, err = run(f"{tasks}:small", f"--{flag}", value)
        assert code == 2 and f"--{flag}=" in err and "no effect without device or memory" in err, err


@pytest.mark.torch
@pytest.mark.parametrize("flag", ["--context", "--workspaces", "--fragmentation", "--margin"])
def test_a_size_that_leaves_less_than_the_allowance_does_not_fit_safely(run, tasks, peaks, flag):
    """Three sizes: below what is usable, between that and all memory, and above it."""
    sizes = (64, 128, 256)
    low, middle, high = peaks(f"{tasks}:small", sizes).values()
    total = (middle + high) // 2
    kept = total - (low + middle) // 2
    percent = 100 * kept / (total - kept)
    given = f"{percent:.3f}%" if flag == "--fragmentation" else str(kept)
    named = (f"{tasks}:small", "--memory", str(total), flag, given, "--micro-batch-size", "64,128,256")
    code, out, err = run(*named)
    assert code == 0, err
    assert out.startswith("max_micro_batch_size 64, predicted, in ")
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["64"], ["128"], ["256"])]
    assert [row[-1] for row in rows] == ["yes", "safely", "no"] and rows[1][-2] == "not"
    code, out, _ = run(*named, "--json")
    made = json.loads(out)
    assert [p["verdict"] for p in made["points"]] == ["fits", "does not fit safely", "does not fit"]
    assert [p["fits"] for p in made["points"]] == [True, False, False]
    assert low <= made["usable_bytes"] < middle <= made["memory_bytes"] < high and made["source"] == "predicted"
    code, _, err = run(*named[:-1], "128")
    assert code == 3 and "error: nothing fits safely: " in " ".join(err.split())
    code, _, err = run(*named[:-1], "256")
    assert code == 3 and "error: nothing fits: " in " ".join(err.split())


def test_devices_are_listed(run):
    code, out, _ = run("--device", "list", "--json")
    assert code == 0 and {"name", "memory_bytes", "source"} <= set(json.loads(out)["devices"][0])
    assert "h100-80g" in run("--device", "list")[1]


def test_arguments_are_what_they_look_like():
    assert task_arguments(("a=1", "b=x=y", "c=null", "d=1e-3")) == {"a": 1, "b": "x=y", "c": None, "d": 0.001}
    with pytest.raises(ConfigError, match="not KEY=VALUE"):
        task_arguments(("layers",))


@pytest.mark.torch
def test_a_task_without_blocks_becomes_a_plan_in_text(run, tasks):
    batch = ("--memory", "1MiB", "--global-batch-size", "64", "--devices", "2")
    code, out, err = run("--task", f"{tasks}:small", *batch, "--no-shard", verb="plan")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "64 = 32 micro × 1 accumulation × 2 data-parallel"
    table = lines.index("ways to train, best first:")
    # One way: nothing can be recomputed, and sharding is forbidden.
    assert lines[table + 2].split()[:4] == ["no", "no", "32", "1"] and not lines[table + 3]
    assert "  per_device_train_batch_size=32," in lines and "  gradient_accumulation_steps=1," in lines
    assert re.search(r"buckets 2\.1 KiB", out) and "DDP's buckets" in out  # 2 × (16² + 16) parameters of 4 bytes


@pytest.mark.torch
def test_notes_about_a_model_reach_its_plan_and_what_is_too_small_says_which_way(run, tasks):
    task = ("--task", f"{tasks}:recurrent", "--global-batch-size", "4")
    code, out, err = run(*task, "--memory", "1MiB", "--json", verb="plan")
    assert code == 0, err
    assert any("recurrent kernels" in note for note in json.loads(out)["notes"])
    code, out, err = run(*task, "--memory", "4KiB", verb="plan")
    flat = " ".join(err.split())
    assert code == 3 and "not recomputed and not sharded, needs an estimated" in flat
    assert "--precision bf16" in out and "ranks" not in out  # a ModuleList cannot be sharded
    code, out, err = run("--task", f"{tasks}:small", "--global-batch-size", "1024", "--memory", "4KiB", verb="plan")
    assert code == 3 and re.search(r"--shard --devices \d+", out) and "ranks=" not in out + err
