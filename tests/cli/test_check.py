"""`batchwright check`: text, JSON keys, exit codes, and that a user sees only their own traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchwright.cli.check import command
from batchwright.core.errors import ConfigError, RunError

pytestmark = pytest.mark.torch

TASKS = Path(__file__).parents[1] / "runtime" / "check" / "check_tasks.py"


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(name: str, *argv: str) -> Result:
    return CliRunner().invoke(command, [f"{TASKS}:{name}", *argv], catch_exceptions=False)


def fails(*argv: str) -> Exception:
    error = CliRunner().invoke(command, list(argv)).exception
    assert isinstance(error, Exception)
    return error


def test_json_has_the_keys_others_rely_on():
    result = run("ragged_tail", "--global-batch-size", "8", "--micro-batch-size", "2,3", "--json")
    assert result.exit_code == 5
    document = json.loads(result.stdout)
    assert document["schema"] == 1 and document["ok"] is False
    assert [{k: s[k] for k in ("micro_batch_size", "accumulation_steps", "ranks")} for s in document["splits"]] == [
        {"micro_batch_size": 2, "accumulation_steps": 4, "ranks": 1},
        {"micro_batch_size": 3, "accumulation_steps": 3, "ranks": 1},
    ]
    assert document["splits"][0]["relative_error"] < 1e-6 < document["splits"][1]["relative_error"]
    assert set(document["findings"][0]) == {"cause", "severity", "message"}
    assert document["findings"][0]["cause"] == "ragged-tail"


def test_text_shows_the_verdict_the_splits_and_the_cause_and_progress_goes_to_stderr():
    result = run("auxiliary_in_sum")
    assert result.exit_code == 5
    assert result.stdout.startswith("not ok: 1 error (16 samples)\n\n  micro  accumulation  ranks  relative error")
    assert "router" in result.stdout and "error: auxiliary-scaled" in result.stdout
    assert "return loss_sum, weight" in " ".join(result.stdout.split())
    assert "check: 16 micro batches of 1" in result.stderr and "check:" not in result.stdout


def test_a_correct_task_exits_with_0():
    result = run("cnn", "--micro-batch-size", "4")
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: the split does not change the gradient")


def test_a_ramp_makes_a_step_counted_rate_an_error():
    assert run("scheduled").exit_code == 0
    argv = ("--ramp", "0:8 800:16", "--lr-horizon-steps", "1000", "--samples", "16000")
    result = run("scheduled", *argv)
    assert result.exit_code == 5
    assert "error: step-counted-schedule" in result.stdout


def test_allow_turns_an_error_into_a_note():
    result = run("batch_norm", "--allow", "batch-norm")
    assert result.exit_code == 0
    assert "note: batch-norm" in result.stdout


def test_arguments_reach_the_function():
    assert run("sized", "--arg", "classes=7", "--micro-batch-size", "8").exit_code == 0
    assert isinstance(fails(f"{TASKS}:sized", "--arg", "classes=2"), RunError)  # labels go to 4
    assert "is not KEY=VALUE" in str(fails(f"{TASKS}:sized", "--arg", "classes"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "neither is given"),
        ((f"{TASKS}:cnn", "--ledger", "x"), "both are given"),
        ((f"{TASKS}:cnn", "--accumulate-dtype", "int8"), "--accumulate-dtype='int8' is not one of"),
        ((f"{TASKS}:cnn", "--micro-batch-size", "two"), "--micro-batch-size='two' is not a number"),
        ((f"{TASKS}:cn",), "Did you mean cnn"),
        ((f"{TASKS}:cnn", "--seed", "-1"), "must be at least 0"),
    ],
)
def test_requests_that_cannot_be_read_name_the_field(argv, message):
    error = fails(*argv)
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_the_only_traceback_is_the_users(cli):
    done = cli("check", f"{TASKS}:broken_at_one", "--micro-batch-size", "1", "--json")
    assert done.code == 5
    assert done.json["error"]["type"] == "RunError"
    assert 'raise ValueError("one is not enough")' in done.err
    frames = [line for line in done.err.splitlines() if line.lstrip().startswith("File ")]
    assert frames and all("check_tasks.py" in line for line in frames)


def written(folder: Path, *, twice: bool = False) -> str:
    """A run of four steps of eight samples; `twice` feeds the second step's samples again in the third."""
    from batchwright.runtime.data.order import GlobalOrder
    from batchwright.runtime.state.ledger import Ledger

    order = GlobalOrder(64, seed=1)
    ledger = Ledger(folder / "ledger", order)
    for step in range(4):
        start = 8 * (1 if twice and step == 2 else step)
        ledger.fed(order.ids(range(start, start + 8)))
        ledger.applied(step, 8 * step, 8)
    ledger.finish()
    checkpoint = folder / "checkpoints" / "step-000000000004-launch-00000"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"launch": 0, "position": 32}))
    return str(folder)


def test_a_ledger_in_order_passes(tmp_path):
    result = CliRunner().invoke(command, ["--ledger", written(tmp_path), "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert {k: document[k] for k in ("schema", "ok", "samples", "gaps", "repeats", "discarded_samples")} == {
        "schema": 1,
        "ok": True,
        "samples": 32,
        "gaps": 0,
        "repeats": 0,
        "discarded_samples": 0,
    }


def test_a_ledger_with_a_fault_exits_with_5(tmp_path):
    result = CliRunner().invoke(command, ["--ledger", written(tmp_path, twice=True)], catch_exceptions=False)
    assert result.exit_code == 5
    assert result.stdout.startswith("not ok\n") and "findings:" in result.stdout


def test_a_ledger_that_is_not_there_is_a_run_error(tmp_path):
    error = fails("--ledger", str(tmp_path / "nothing"))
    assert isinstance(error, ConfigError) and "nothing is not a directory" in str(error)
    error = fails("--ledger", str(tmp_path))
    assert isinstance(error, RunError) and str(tmp_path) in str(error)
