"""Tables on terminals of every width; pipes and files get all columns."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli import text

RAMP = (
    "ramp --linear 256,256,10M --global-batch-size 2048 --micro-batch-size 4 --nodes 16 --devices-per-node 8 --samples 20M "
    "--micro-step-seconds 0.05,0.1 --sequence-length 4096 --lr 1e-4 --no-plot"
).split()
NEAR = "plan --global-batch-size 960 --max-micro-batch-size 4 --nodes 6 --devices-per-node 8 --tolerance 20%".split()


def on_terminal(argv: list[str], columns: int) -> list[str]:
    """What a command writes to a terminal of this width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    done = subprocess.Popen([sys.executable, "-m", "batchwright", *argv], stdout=its)
    os.close(its)
    out = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        out += piece
    os.close(ours)
    assert done.wait(timeout=60) == 0
    return out.decode().splitlines()


@pytest.mark.parametrize("argv", [RAMP, NEAR], ids=["ramp", "plan"])
@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_wider_than_the_terminal(argv, columns):
    lines = on_terminal(argv, columns)
    assert max(map(len, lines)) <= columns
    if argv is RAMP:
        head = next(line for line in lines if line.startswith("  stage")).split()
        assert {"stage", "global", "steps", "nodes", "node-hours"} <= set(head)
        assert any(line.startswith("  left out here: from token, to sample") for line in lines)


def test_the_status_of_a_run_fits_a_narrow_terminal(tmp_path, monkeypatch):
    from tests.report import material

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = on_terminal(["run", "--status", str(material.run_directory(tmp_path / "run", steps=20)), "--plot"], 42)
    shown = lines[: lines.index("next:")]  # what follows has paths, which are not broken
    assert max(map(len, shown)) <= 42 and "  launch  to sample   time  outcome" in shown
    assert "  left out here: ranks, nodes, stage, from" in shown


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_colours_are_for_terminals_that_want_them(monkeypatch, variable, value):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    out = "".join(on_terminal(["ramp", "--linear", "256,256,10M", "--global-batch-size", "2048"], 80))
    assert ("\x1b[" in out) == (value == "xterm")


def test_a_wide_terminal_and_a_pipe_get_the_same_whole_table(cli):
    piped = cli(*RAMP).out.splitlines()
    assert "from token" in next(line for line in piped if line.startswith("  stage"))
    wide = on_terminal(RAMP, 200)
    stop = piped.index("notes:")
    assert wide[:stop] == piped[:stop]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.text("ab ", max_size=40), st.integers(0, 99)), min_size=1, max_size=5),
    st.integers(20, 80),
)
def test_wrapping_loses_no_word(rows, width):
    shown = text.table(
        [(a, b, c, b) for a, b, c in rows], head=("x", "y", "z", "why"), right=[0], drop=["y"], width=width
    )
    for a, b, c in rows:
        assert {str(a), str(c), *b.split()} <= set(" ".join(shown).split())
    whole = text.table([(a, b, c, b) for a, b, c in rows], head=("x", "y", "z", "why"), right=[0])
    assert len(whole) == 1 + len(rows)
    assert text.table([(1, "a")], head=("n", "t"), width=5) == ["  n  t", "  1  a"], (
        "a column of one letter cannot get narrower"
    )
