"""The command line as a program: help, did-you-mean, signals, pipes, narrow terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import pytest

import batchwright
import batchwright.cli

BATCHWRIGHT = str(Path(sys.executable).with_name("batchwright"))
PLAN = ["plan", "--global-batch-size", "64", "--devices", "2"]


def test_a_real_process_prints_what_the_fast_runner_prints(cli):
    done = subprocess.run([BATCHWRIGHT, *PLAN], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == cli(*PLAN).out
    wrong = [sys.executable, "-m", "batchwright", "plan", "--global-batch-size", "x", "--json"]
    failed = subprocess.run(wrong, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (failed.returncode, failed.stderr) == (2, "")
    assert failed.stdout == cli(*wrong[3:]).out


def test_help_and_version(cli):
    assert cli("--version").out == f"batchwright {batchwright.__version__}\n"
    top = cli("--help")
    assert top.code == 0
    assert cli().out == top.out
    for verb in ("plan", "rl"):
        assert f"  {verb} " in top.out
        assert cli(verb, "-h").out == cli(verb, "--help").out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["pln"], "Did you mean plan?"),
        (["xyzzy"], "The verbs are: plan"),
        ([""], "is not a verb"),
        (["plan", "--global-batch-siz", "3"], "--global-batch-size"),
        (["rl", "--prompt", "3"], "--prompts"),
        (["plan", "global_batch_siz=3"], "Did you mean global_batch_size"),
        (["plan", "data.micro_batch_sizes=3"], "Did you mean data.micro_batch_size"),
        (["plan", "--nodes"], "requires an argument"),
        (["--nonsense"], "No such option"),
        (["plan", "--round", "sideways"], "is not one of down, up"),
        (["plan", "--pipeline-schedule", "2f2b", "--pipeline-parallel", "2"], "gpipe, 1f1b"),
    ],
)
def test_an_error_suggests_what_was_meant(cli, argv, hint):
    ran = cli(*argv)
    assert ran.code == 2
    assert hint in ran.err
    as_json = cli(*argv, "--json")
    assert as_json.code == 2
    if argv != ["plan", "--nodes"]:  # there, --nodes takes --json as its value
        assert hint in as_json.json["error"]["message"]
        assert set(as_json.json["error"]) >= {"type", "message", "field", "given", "nearest"}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_is_130_without_a_traceback(cli, monkeypatch, stop):
    from batchwright.cli import plan

    def interrupted(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(plan, "gather", interrupted)
    ran = cli(*PLAN)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.split() == ["interrupted"]


def test_ctrl_c_in_a_real_process(tmp_path):
    fifo = tmp_path / "never-written.yaml"
    script = "import sys, time, batchwright.cli as c, batchwright.cli.plan as p\n"
    script += (
        "p.gather = lambda *_, **__: (print('ready', file=sys.stderr, flush=True), time.sleep(60))\nc.main(['plan'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, cwd=fifo.parent)
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 130


def test_a_bug_in_batchwright_exits_with_1_without_a_traceback(cli, monkeypatch):
    from batchwright.cli import plan

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(plan, "gather", broken)
    ran = cli(*PLAN)
    assert ran.code == 1
    assert "This is a bug in batchwright (RuntimeError: boom" in ran.err
    assert "Traceback" not in ran.err
    assert cli(*PLAN, "--json").json["error"]["type"] == "RuntimeError"


@pytest.mark.parametrize(
    ("argv", "stream", "code"),
    [
        (PLAN, "stdout", 0),
        ([*PLAN, "--json"], "stdout", 0),
        (["plan", "--help"], "stdout", 0),
        (["plan", "--json"], "stdout", 2),
        (["plan"], "stderr", 2),
    ],
)
def test_a_closed_pipe_is_not_an_error(argv, stream, code):
    read, write = os.pipe()
    os.close(read)
    try:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: write}
        done = subprocess.run([BATCHWRIGHT, *argv], **streams, timeout=60)
    finally:
        os.close(write)
    assert done.returncode == code
    assert not (done.stdout or done.stderr)


def test_a_narrow_terminal(cli, monkeypatch):
    for columns in ("40", "1", "0", "x"):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli(*PLAN).code == 0
        assert cli("plan", "--help").code == 0


@pytest.mark.parametrize("columns", [40, 1])
def test_notes_are_wrapped_at_the_width_of_a_real_terminal(columns):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        done = subprocess.run([BATCHWRIGHT, *PLAN], stdout=terminal, stderr=subprocess.PIPE, timeout=60)
        out = os.read(master, 100_000).decode()
    finally:
        os.close(terminal)
        os.close(master)
    assert (done.returncode, done.stderr) == (0, b"")
    notes = out.partition("notes:")[2].splitlines()
    assert len(notes) > 4
    assert max(map(len, notes)) <= 40


@pytest.mark.parametrize(("rows", "columns"), [(3, 80), (1, 1), (0, 0), (3, 10), (24, 60)])
def test_a_plot_on_a_small_terminal(rows, columns):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    argv = ["ramp", "--linear", "1,1,9", "--global-batch-size", "4", "--samples", "64"]
    try:
        done = subprocess.run([BATCHWRIGHT, *argv], stdout=terminal, stderr=subprocess.PIPE, timeout=60)
        out = os.read(master, 100_000).decode()
    finally:
        os.close(terminal)
        os.close(master)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "global batch" in out


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("plan --global-batch-size 64 --devices 2", 0),
        ("plan --global-batch-size 64 --devices 2 --json", 0),
        ("plan", 2),
        ("plan --help", 0),
        ("ramp --linear 1,1,9 --global-batch-size 4", 0),
        ("run --samples 8 --global-batch-size 8 --dry-run -- true", 0),
    ],
)
def test_closed_streams(line, code, closed):
    done = subprocess.run(f"{BATCHWRIGHT} {line} {closed}", shell=True, capture_output=True, timeout=60)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr and b"bug" not in done.stderr


def test_the_output_of_a_child_process_does_not_get_into_a_file_when_streams_are_closed(tmp_path):
    script = "import subprocess, sys, batchwright.cli as c, batchwright.cli.plan as p\n"
    script += "def gather(*_, **__):\n    with open('kept', 'w') as f:\n        f.write('a')\n        f.flush()\n"
    script += "        subprocess.run(['sh', '-c', 'echo out; echo err >&2; cat'])\n    sys.exit(0)\n"
    script += "p.gather = gather\nc.main(['plan'])"
    (tmp_path / "script.py").write_text(script)
    line = f"{sys.executable} script.py <&- >&- 2>&-"
    assert subprocess.run(line, shell=True, cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "kept").read_text() == "a"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_arguments_that_are_not_text_and_terminals_without_unicode(encoding):
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    for argv in (
        [*PLAN, "--json"],
        PLAN,
        ["plan", b"global_batch_size=\xff\xfe"],
        ["plan", "nemo", b"\xff", b"x\xff=1", *PLAN[1:]],
    ):
        done = subprocess.run([BATCHWRIGHT, *argv], capture_output=True, env=env, timeout=60)
        assert done.returncode in (0, 2)
        assert b"Traceback" not in done.stderr
        assert b"bug" not in done.stderr


def test_a_full_disk_under_the_output_exits_with_4():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "batchwright", "plan", "--global-batch-size", "8"],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 4
    assert done.stderr.decode() == "error: the output cannot be written: No space left on device.\n"


@pytest.mark.parametrize(("size", "code"), [("8", 4), ("x", 2)])
def test_a_full_disk_under_both_outputs_keeps_the_exit_code(size, code):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "batchwright", "plan", "--global-batch-size", size]
        assert subprocess.run(command, stdout=full, stderr=full).returncode == code


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "{}"],
        ["ramp", "--linear", "1,1,9", "--global-batch-size", "4", "--from-probe", "{}"],
        ["estimate", "{}"],
        ["check", "{}"],
        ["check", "--ledger", "{}"],
        ["probe", "{}"],
        ["run", "{}", "--samples", "8", "--global-batch-size", "8"],
        ["run", "--site", "{}", "--engine", "slurm", "--samples", "8", "--global-batch-size", "8", "--", "train"],
        ["run", "--status", "{}"],
    ],
)
def test_what_is_not_a_file_is_refused_at_once(argv, tmp_path):
    places = [tmp_path / name for name in ("fifo", "fifo.py", "fifo.yaml", "loop.yaml", "folder.yaml")]
    for fifo in places[:3]:
        os.mkfifo(fifo)
    places[3].symlink_to(places[3])
    places[4].mkdir()
    for place in places:
        if "--ledger" in argv and place.is_dir():
            continue
        line = [BATCHWRIGHT, *(word.format(place) for word in argv)]
        # Nobody writes to the FIFO: a process that opens it waits forever.
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 2, (line, done.stderr)
        assert done.stderr.startswith("error: ")


def test_an_error_of_the_operating_system_exits_with_4(cli, monkeypatch):
    from batchwright.cli import plan

    def unreadable(*_: object, **__: object) -> None:
        open("/proc/self/mem/x")

    monkeypatch.setattr(plan, "gather", unreadable)
    ran = cli(*PLAN)
    assert (ran.code, ran.err) == (4, "error: /proc/self/mem/x: Not a directory.\n")
    assert cli(*PLAN, "--json").json["error"]["type"] == "EnvironmentFault"


@pytest.mark.parametrize("place", ["~nouser/x", "x" * 300, f"a/{'x' * 300}/b", "x/" * 3000, "loop/x", b"a\xffb"])
@pytest.mark.parametrize("flag", ["--dir", "--status", "--resume", "--stop"])
def test_a_run_directory_with_a_path_that_cannot_be_used(place, flag, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    line = [BATCHWRIGHT, "run", flag, place]
    if flag == "--dir":
        line += ["--samples", "8", "--global-batch-size", "8", "--dry-run", "--", "true"]
    done = subprocess.run(line, capture_output=True, timeout=60, cwd=tmp_path)
    if flag == "--dir" and place == b"a\xffb":
        # Linux allows such a name.
        assert done.returncode == 0
        return
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ") and len(done.stderr) < 1000


def test_json_in_the_users_command_does_not_change_the_output(cli):
    ran = cli("run", "--keep", "0", "--samples", "8", "--thresholds", "0:8", "--", "train", "--json")
    assert (ran.code, ran.out) == (2, "") and ran.err.startswith("error: --keep=0")


def test_ctrl_c_during_the_import_of_the_command_line_shows_no_traceback(tmp_path):
    # A stand-in for a slow disk: click is imported while Ctrl-C comes.
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "batchwright", "plan"], capture_output=True, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
