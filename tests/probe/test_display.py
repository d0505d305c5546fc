"""What a probe prints while it runs: on a real terminal, into a file, and if nobody reads it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

from batchwright.probe.display import TrialLines
from batchwright.probe.records import Trial

PROGRAM = "import sys; sys.exit('MemoryError' if int(sys.argv[1]) > 5 else 0)"
COMMAND = ["--", sys.executable, "-S", "-c", PROGRAM, "{micro_batch_size}"]
PROBE = [sys.executable, "-m", "batchwright", "probe", "--limit-only"]


def on_a_terminal(*arguments: str, columns: int = 200) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")} | {"TERM": "xterm-256color"}
    running = subprocess.Popen([*PROBE, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    return running.wait(600), seen.decode()


def test_a_terminal_shows_the_remaining_time_and_notes_as_they_are(tmp_path):
    """Rich takes [text] for its own markup, and refuses [/text]."""
    folder = str(tmp_path / "a[" / "b]")
    code, seen = on_a_terminal("--dir", folder, *COMMAND)
    assert code == 0, seen
    assert "limit: micro_batch_size 4 … (about " in seen, seen
    code, seen = on_a_terminal("--dir", folder, *COMMAND)
    assert code == 0, seen
    assert f"trials are in {folder}/probe-" in seen.replace("\r\n", ""), seen


def test_a_narrow_terminal_shows_lines_instead_of_a_table(tmp_path):
    code, seen = on_a_terminal("--dir", str(tmp_path), *COMMAND, columns=40)
    assert code == 0, seen
    assert "limit       micro_batch_size 4      fits" in seen and "\x1b" not in seen, seen


def test_after_a_miss_the_remaining_time_is_the_new_one(capsys):
    lines = TrialLines()
    for size, status, left in ((8, "fits", 2), (100, "oom", 1), (60, "fits", 5)):
        lines.started(size, "limit", left)
        lines.finished(Trial(size, status, "limit", cause="host-oom", reason="no memory", seconds=2.0))
    said = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines() if line.startswith("next")]
    assert said == [
        "next micro_batch_size 100 about 2 trials left, 4 s",
        "next micro_batch_size 60 about 6 trials left, 12 s",
    ]


def test_a_probe_that_nobody_watches_gives_its_result(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROBE, "--json", "--dir", str(tmp_path), *COMMAND], stdout=subprocess.PIPE, stderr=writing, timeout=600
    )
    os.close(writing)
    assert done.returncode == 0
    assert json.loads(done.stdout)["max_micro_batch_size"] == 5
