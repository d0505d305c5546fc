"""The supervisor with scripted trainers that fail in every way: real processes, no torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import time

import pytest

from .conftest import PATIENCE


def test_three_stages_become_three_adjacent_launches(run):
    code, out, err = run(*run.scripted())
    assert code == 0, err
    assert "complete: 512 of 512 samples" in out
    starts = [(e["start_sample"], e["end_sample"], e["nodes"]) for e in run.events("launch")]
    assert starts == [(0, 64, 1), (64, 192, 2), (192, 512, 4)]
    document = run.status()
    assert (document["state"], document["restarts"], document["step"]) == ("complete", 0, 26)
    assert document["ledger"] == {"ok": None, "gaps": None, "repeats": None}  # a command has no ledger
    assert [p.name for p in run.directory.parent.iterdir()] == [run.directory.name]  # no file outside, no injection


def test_a_crash_is_retried_from_the_last_position_and_its_reason_shown(run):
    code, _, err = run(*run.scripted("crash@96"))
    assert code == 0
    assert "rank 0 exited with 1: ValueError: the shelf is empty" in err
    assert "retry 1 of 3" in err
    assert [e["start_sample"] for e in run.events("launch")] == [0, 64, 80, 192]
    assert run.status()["restarts"] == 1


def test_a_kill_is_named_by_its_signal(run):
    code, _, err = run(*run.scripted("kill@200"))
    assert code == 0
    assert "rank 0 was killed by SIGKILL" in err


def test_an_exit_code_of_0_before_the_end_does_not_end_the_run(run):
    code, _, err = run(*run.scripted("leave@96", flags=("--max-retries", "0")))
    assert code == 0
    assert "the command exited with code 0 before end_sample" in err
    assert "retry" not in err  # it saved and exited, as at a time limit: no failure
    assert run.status()["consumed_samples"] == 512


def test_retries_are_capped_and_the_failure_is_the_exit_code(run):
    code, out, err = run(*run.scripted("crash@96!", flags=("--max-retries", "2")))
    assert code == 5
    assert err.count("ValueError") >= 3
    assert [e["number"] for e in run.events("launch")] == [1, 2, 3, 4]
    assert "failed: 80 of 512 samples" in out and "--resume" in out
    document = run.status()
    assert document["state"] == "failed"
    assert "ValueError: the shelf is empty" in document["reason"]


def test_out_of_memory_names_smaller_splits_and_a_resume_takes_them(run):
    flags = ("--max-micro-batch-size", "8")
    code, _, err = run(*run.scripted("oom@80!", flags=flags))
    assert code == 5
    assert "micro_batch_size 8 × accumulation_steps 1 × data_parallel_size 2 does not fit in memory" in err
    assert "4 × 2 × 2 or 2 × 4 × 2" in err and "--max-micro-batch-size 4" in err
    assert len(run.events("launch")) == 3  # one retry, in case another process used the memory; not two
    plan = run.directory / "plan.json"
    plan.write_text(plan.read_text().replace("oom@80!", "slow=0.001"))
    code, _, err = run.resume("--max-micro-batch-size", "4")
    assert code == 0, err
    assert "batch 16 = 4 micro × 2 accumulation × 2 ranks" in err


def test_a_command_that_trains_past_its_end_is_stopped_at_once(run):
    code, _, err = run(*run.scripted("over=8"))
    assert code == 5
    assert "trained to sample 72, 8 past its end_sample 64" in err
    assert len(run.events("launch")) == 1


def test_the_error_of_a_script_under_torchrun_is_its_own(run, tmp_path):
    """torchrun writes a traceback of its own, and a table, after that of the rank."""
    script = tmp_path / "script.py"
    script.write_text("def read():\n    raise KeyError('no labels in this batch')\n\nread()\n")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script))
    place = ("--dir", str(run.directory), "--max-retries", "0")
    code, _, err = run("--global-batch-size", "8", "--samples", "64", "--devices", "1", *place, "--", *launcher)
    assert code == 5
    assert "rank 0 exited with 1: KeyError: 'no labels in this batch'" in err and "script.py" in err
    assert "ChildFailedError" not in err, err


def test_a_launch_without_progress_is_ended_and_the_line_where_it_hangs_is_named(run):
    code, _, err = run(*run.scripted("hang@96", flags=("--stall-seconds", "1.5")))
    assert code == 0, err
    assert "no progress for" in err and "rank 0 is stuck at" in err and "trainer.py" in err and "_happen" in err


def test_a_suspended_machine_is_no_stall(run):
    process = run.start(*run.scripted("slow=0.1", flags=("--stall-seconds", "8")))
    run.until(lambda: run.position() > 16)
    trainer = json.loads((run.newest() / "ranks" / "0.json").read_text())["pid"]
    os.kill(trainer, signal.SIGSTOP)
    time.sleep(1)  # the supervisor has read its last step
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(9)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(1)  # the supervisor polls first
    os.kill(trainer, signal.SIGCONT)
    code, _, err = run.finish()
    assert code == 0 and "no progress" not in err, err


def test_a_stopped_process_is_named(run):
    code, _, err = run(*run.scripted("stop@96", flags=("--stall-seconds", "1.5")))
    assert code == 0, err
    assert "rank 0 (process " in err and "is stopped" in err


def test_a_command_that_hangs_after_its_end_is_ended_at_the_stall_limit(run):
    code, _, err = run(*run.scripted("tail", flags=("--stall-seconds", "1", "--grace-seconds", "0.1")))
    assert code == 0, err
    assert len(run.events("launch")) == 3


def test_a_command_may_work_longer_than_grace_seconds_after_its_end(run):
    code, _, err = run(*run.scripted("export=1", flags=("--grace-seconds", "0.1")))
    assert code == 0, err
    assert {p.name for p in run.directory.glob("exported-*")} == {"exported-64", "exported-192", "exported-512"}


def test_a_guard_that_is_killed_leaves_nothing_running(run):
    with run.held() as hold:
        run.start(*run.scripted(hold, "child"))
        run.until(lambda: run.position() == 24)
        launch = run.newest()
        mine = [line for line in run.processes() if " sleep 1000" in line]
        assert mine
        os.kill(json.loads((launch / "manifest.json").read_text())["handle"]["pid"], signal.SIGKILL)
        run.until(lambda: run.newest() != launch)
        assert not set(mine) & set(run.processes())
    code, _, err = run.finish()
    assert code == 0, err


def test_a_guard_that_is_stopped_does_not_stop_the_run(run):
    with run.held() as hold:
        run.start(*run.scripted(hold))
        guard = run.until(lambda: json.loads((run.newest() / "manifest.json").read_text())["handle"])["pid"]
        os.kill(guard, signal.SIGSTOP)
    code, _, err = run.finish()
    assert code == 0, err


def test_grandchildren_are_ended_with_their_launch(run):
    code, _, err = run(*run.scripted("child"))
    assert code == 0, err
    run.assert_nothing_left()


def test_a_killed_supervisor_is_resumed(run):
    with run.held() as hold:
        process = run.start(*run.scripted(hold, "child"))
        run.until(lambda: run.position() == 24)
        process.kill()
        process.communicate()
    run.assert_nothing_left()
    document = run.status()
    assert document["state"] == "stopped" and "gone" in document["reason"]
    code, _, err = run.resume()
    assert code == 0, err
    document = run.status()
    assert (document["state"], document["consumed_samples"], document["restarts"]) == ("complete", 512, 1)
    assert any("its supervisor ended" in (e["failure"] or {}).get("reason", "") for e in run.events("ended"))


def test_a_second_supervisor_is_refused_and_the_first_continues(run):
    with run.held() as hold:
        first = run.start(*run.scripted(hold))
        run.until(lambda: run.position())
        code, _, err = run.resume()
        assert code == 4
        assert f"another supervisor (process {first.pid} on " in err
        document = run.status()
        assert document["state"] == "running" and document["supervisor"] == first.pid
        assert document["consumed_samples"] > 0
        code, _, err = run(*run.scripted())
        assert code == 2 and "already holds a run" in err
    run.process = first
    code, _, err = run.finish()
    assert code == 0, err


def test_stop_saves_and_ends_and_resume_continues(run):
    with run.held() as hold:
        first = run.start(*run.scripted(hold))
        run.until(lambda: run.position() > 16)
        code, out, err = run("--stop", str(run.directory))
        assert code == 0, err
        assert out.startswith("stopped: ")
        assert first.wait(PATIENCE) == 130
        first.communicate()
    document = run.status()
    assert document["state"] == "stopped" and document["consumed_samples"] == 32  # with the step in progress
    assert run.resume()[0] == 0
    assert run.status()["state"] == "complete"


def test_one_interrupt_saves_and_stops(run):
    with run.held() as hold:
        process = run.start(*run.scripted(hold))
        run.until(lambda: run.position() > 16)
        process.send_signal(signal.SIGINT)
        code, out, err = run.finish()
    assert code == 130 and "a checkpoint first" in err and "stopped: " in out


def test_two_interrupts_stop_now_even_a_command_that_ignores_sigterm(run):
    with run.held() as hold:
        process = run.start(*run.scripted(hold, "ignore", flags=("--grace-seconds", "600")))
        run.until(lambda: run.position() > 16)
        process.send_signal(signal.SIGINT)
        run.until(lambda: "a checkpoint first" in run.stderr())  # the first one has arrived
        time.sleep(1.2)  # within a second both would count as one
        process.send_signal(signal.SIGINT)
        code, _, _ = run.finish()
    assert code == 130
    assert run.status()["consumed_samples"] == 24  # no further step
    run.assert_nothing_left()


def test_a_command_gets_one_stop_signal_and_a_closing_terminal_counts_as_one_request(run):
    with run.held() as hold:
        process = run.start(*run.scripted(hold, "save=2"))
        run.until(lambda: run.position() > 16)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        code, _, err = run.finish()
    assert code == 130 and "no checkpoint" not in err, err
    assert "reached" in (run.newest() / "logs" / "rank-0.log").read_text()
    assert run.status()["consumed_samples"] == 32


def test_the_samples_lost_by_a_stop_without_a_checkpoint_are_named(run):
    with run.held() as hold:
        process = run.start(*run.scripted(hold, flags=("--position-command", "echo 0")))
        run.until(lambda: run.position() > 16)
        process.send_signal(signal.SIGTERM)
        code, _, err = run.finish()
    assert code == 130
    assert "no checkpoint was made: " in err and "samples, from 0 to " in err


def test_a_shell_script_can_trap_its_stop_signal(run):
    status = '"$BATCHWRIGHT_STATUS_FILE"'
    script = f"trap 'echo 24 > {status}; exit' USR1; echo 16 > {status}; while :; do sleep 0.05; done"
    arguments = run.scripted(flags=("--stop-signal", "SIGUSR1"))
    process = run.start(*arguments[: arguments.index("--")], "--", "sh", "-c", script, "{global_batch_size}")
    run.until(lambda: (run.newest() / "status.json").read_text().strip() == "16")
    process.send_signal(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130, err
    assert run.status()["consumed_samples"] == 24


def test_the_seed_of_a_run_cannot_be_changed(run):
    assert run(*run.scripted("crash@96!", flags=("--max-retries", "0")))[0] == 5
    before = (run.directory / "plan.json").read_text()
    code, _, err = run.resume("--seed", "7")
    assert code == 2 and "--seed cannot be changed" in err
    assert (run.directory / "plan.json").read_text() == before
    assert run.resume("--max-retries", "1")[0] == 5
    assert json.loads((run.directory / "plan.json").read_text())["options"]["max_retries"] == 1


def test_an_old_launch_cannot_move_the_run(run):
    """Each launch has its own status file: an old launch that still writes does not change the position."""
    process = run.start(*run.scripted("slow=0.05"))
    run.until(lambda: run.position() > 64)
    (run.directory / "launches" / "0001" / "status.json").write_text('{"consumed_samples": 500}')
    assert json.loads((run.directory / "launch.json").read_text())["launch"] >= 2
    assert run.finish()[0] == 0
    assert [e["start_sample"] for e in run.events("launch")] == [0, 64, 192]
    assert process.returncode == 0


def test_files_with_environment_values_are_readable_by_their_owner_only(run):
    code, _, err = run(*run.scripted(flags=("--env", 'TOKEN=it\'s $(secret) "x"')))
    assert code == 0, err
    manifest = run.directory / "launches" / "0001" / "manifest.json"
    assert json.loads(manifest.read_text())["environment"]["TOKEN"] == 'it\'s $(secret) "x"'
    holding = [p for p in run.directory.rglob("*") if p.is_file() and "secret" in p.read_text(errors="replace")]
    assert manifest in holding
    assert {stat.S_IMODE(p.stat().st_mode) for p in holding} == {0o600}


def test_a_position_command_gives_the_position(run):
    memory = run.directory.parent / "memory"
    memory.write_text("0")
    tell = f"{sys.executable} -c \"print('so far:'); print(open('{memory}').read())\""
    code, _, err = run(*run.scripted("silent", f"memory={memory}", "crash@96", flags=("--position-command", tell)))
    assert code == 0, err
    assert [e["start_sample"] for e in run.events("launch")] == [0, 64, 80, 192]


def test_a_position_command_that_fails_is_retried(run):
    where = run.directory.parent / "where.py"
    where.write_text(
        "import os, sys\n"
        "assert os.getsid(0) == os.getpid()\n"  # the terminal's Ctrl-C does not reach it
        "failed, memory = (os.path.join(os.path.dirname(__file__), name) for name in ('failed', 'memory'))\n"
        "if not os.path.exists(failed):\n"
        "    open(failed, 'w').close()\n"
        "    sys.exit('the bucket does not answer')\n"
        "os.remove(failed)\n"
        "print(open(memory).read() if os.path.exists(memory) else 0)\n"
    )
    script = ("silent", f"memory={where.with_name('memory')}")
    code, _, err = run(*run.scripted(*script, flags=("--position-command", f"{sys.executable} {where}")))
    assert code == 0, err
    assert "the bucket does not answer" in err and "Retry in 0.1 s (1 of 3)" in err
    assert len(run.events("launch")) == 3


def test_a_position_command_without_a_number_is_an_error(run):
    code, _, err = run(*run.scripted(flags=("--position-command", f"{sys.executable} -c 'print(\"here\")'")))
    assert code == 5 and "(3 of 3)" in err
    assert "did not print a position" in err and "'here'" in err


def test_stages_share_a_launch_unless_the_command_has_a_placeholder_for_its_batch(run):
    arguments = run.scripted()
    plain = tuple("16" if w == "{global_batch_size}" else w for w in arguments)
    constant = tuple("constant" if w == "constant-work" else w for w in plain)
    code, _, err = run(*constant)
    assert code == 0, err
    assert [(e["start_sample"], e["end_sample"]) for e in run.events("launch")] == [(0, 512)]


def test_boundaries_are_timed(run):
    code, out, _ = run(*run.scripted("slow=0.1"))
    assert code == 0
    found = run.events("boundary")
    assert [b["position"] for b in found] == [64, 192]
    for b in found:
        parts = b["save_seconds"] + b["stop_seconds"] + b["start_seconds"] + b["load_seconds"]
        assert b["planned"] and 0 < parts <= b["lost_seconds"] + 0.5
    assert "time lost at boundaries" in out
    assert run.status()["lost_seconds"] > 0


def test_a_command_that_never_reports_its_position_gets_advice(run):
    code, _, err = run(*run.scripted("silent", flags=("--max-retries", "0")))
    assert code == 5 and "before end_sample" in err
    assert "BATCHWRIGHT_STATUS_FILE names" in err and "--position-command" in err


def test_damaged_events_end_neither_the_run_nor_its_status(run):
    code, _, err = run(*run.scripted())
    assert code == 0, err
    path = run.directory / "events" / "supervisor.jsonl"
    damage = b'[1]\n\xff\n{"kind": "boundary"}\n{"kind": "boundary", "position": "x"}\n3\n'
    path.write_bytes(damage + path.read_bytes() + damage)
    assert len(run.status()["boundaries"]) == 2
    code, out, err = run("--status", str(run.directory))
    assert code == 0 and "time lost at boundaries" in out, err
    code, out, err = run.resume()
    assert code == 0, err


def test_a_stop_request_that_is_no_object_still_stops_the_run(run):
    with run.held() as hold:
        run.start(*run.scripted(hold))
        run.until(lambda: run.position() > 16)
        (run.directory / "stop.json").write_text("[1]")
        code, _, err = run.finish()
    assert code == 130 and "a checkpoint first" in err, err
    assert run.resume()[0] == 0


def test_a_stop_request_that_is_a_directory_stops_the_run_and_is_named_at_the_next_start(run):
    with run.held() as hold:
        run.start(*run.scripted(hold))
        run.until(lambda: run.position() > 16)
        (run.directory / "stop.json").mkdir()
        code, _, err = run.finish()
    assert code == 130 and "a checkpoint first" in err, err
    code, _, err = run.resume()
    assert code == 4 and "stop.json" in err, err


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_run_whose_directory_is_removed_is_ended_and_not_made_again(run, again):
    with run.held() as hold:
        run.start(*run.scripted(hold))
        run.until(lambda: run.position() > 16)
        run.directory.rename(run.directory.with_name("aside"))
        if again:
            shutil.copytree(run.directory.with_name("aside"), run.directory)
        before = sorted(run.directory.rglob("*"))
        code, _, err = run.finish()
    assert code == 4 and "was removed or replaced while its run was in progress" in err, err
    assert run.directory.exists() == again and sorted(run.directory.rglob("*")) == before
    run.assert_nothing_left()
