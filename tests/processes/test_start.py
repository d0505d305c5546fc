"""Guarded processes: output, exit codes, timeouts, and nothing left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.core.errors import MissingExtraError, PlanError, RunError, Violation
from batchwright.processes.endings import error_from_record, error_record
from batchwright.processes.start import GuardedProcess, environment

PYTHON = [sys.executable, "-S", "-c"]


@pytest.mark.parametrize(
    ("code", "returncode"), [("print('a'); raise SystemExit(3)", 3), ("import os; os.abort()", -6)]
)
def test_output_and_exit_code(code, returncode):
    with GuardedProcess([*PYTHON, code], environment()) as child:
        done = child.watch(60.0)
    assert done.returncode == returncode
    assert returncode < 0 or done.output == "a\n"


def test_a_program_that_does_not_exist():
    with GuardedProcess(["no-such-program"], environment()) as child:
        done = child.watch(60.0)
    assert (done.returncode, done.output) == (127, "no-such-program: No such file or directory\n")


def test_a_timeout_ends_the_command_and_its_children(tmp_path):
    code = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    code += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(c.pid)); time.sleep(600)"
    with GuardedProcess([*PYTHON, code], environment()) as child:
        done = child.watch(5.0)
        assert done.returncode is None and not done.enough and not child.alive
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_enough_lines_end_the_command():
    seen: list[str] = []

    def enough(line: str, when: float) -> bool:
        seen.append(line)
        return line == "3"

    code = "import time\nfor n in range(10**6): print(n, flush=True); time.sleep(0.01)"
    with GuardedProcess([*PYTHON, code], environment()) as child:
        done = child.watch(60.0, on_line=enough)
    assert done.enough and done.returncode is None and seen[:4] == ["0", "1", "2", "3"]


def test_leaving_the_block_ends_the_command():
    with pytest.raises(KeyboardInterrupt), GuardedProcess(["sleep", "1000000"], environment()) as child:
        raise KeyboardInterrupt
    assert not child.alive


def test_echo_copies_the_output_to_standard_error():
    code = (
        "from batchwright.processes.start import GuardedProcess, environment\n"
        "with GuardedProcess(['echo', 'hello'], environment()) as child: child.watch(60.0, echo=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "hello\n")


def test_a_standard_error_without_a_reader_does_not_end_the_command():
    code = (
        "import os; from batchwright.processes.start import GuardedProcess, environment\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
        "with GuardedProcess(['echo', 'hello'], environment()) as child: print(child.watch(60.0, echo=True).output)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "hello\n\n")


def test_a_server_that_ends_before_it_reads_a_request_gives_its_own_exit_code():
    replies, theirs = socket.socketpair()
    with replies, GuardedProcess(["sh", "-c", "sleep 0.5; exit 3"], environment()) as child:
        replies.sendall(b"request")
        theirs.close()  # with the request unread: a read on our side is a connection reset
        assert child.watch(60.0, replies=replies).returncode == 3


def test_changes_replace_and_defaults_do_not(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    made = environment({"A": "1"}, {"A": "2"}, default={"OMP_NUM_THREADS": "1", "B": "3"})
    assert (made["A"], made["B"], made["OMP_NUM_THREADS"]) == ("2", "3", "7")


def test_an_error_reaches_the_parent_with_the_users_traceback():
    error = RunError("the task failed", field="task", given="train.py")
    try:
        exec(compile("raise KeyError('labels')", "/home/somebody/train.py", "exec"))
    except KeyError as cause:
        error.__cause__ = cause
    found = error_from_record(error_record(error))
    assert isinstance(found, RunError) and found.record() == error.record()
    (note,) = found.__notes__
    assert 'File "/home/somebody/train.py", line 1' in note
    assert note.endswith("KeyError: 'labels'")
    two = PlanError(violations=[Violation("one", "a", 1, (2,)), Violation("two", "b")])
    assert error_from_record(error_record(two)).violations == two.violations
    assert isinstance(error_from_record(error_record(MissingExtraError("torch"))), MissingExtraError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_guard_ends_everything_below_it_without_a_traceback(number, tmp_path):
    code = "import subprocess, time; c = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    code += "print(c.pid, flush=True); time.sleep(600)"
    pids: list[int] = []

    def interrupt(line: str, when: float) -> bool:
        pids.append(int(line))
        trial = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(int(Path(f"/proc/{trial}/stat").read_text().rsplit(")", 1)[1].split()[1]), number)
        return False

    with GuardedProcess([*PYTHON, code], environment()) as child:
        done = child.watch(60.0, on_line=interrupt)
    assert (done.returncode, done.output) == (-number, f"{pids[0]}\n")
    assert not Path(f"/proc/{pids[0]}").exists()
