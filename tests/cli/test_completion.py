"""Completion in a real bash, what it imports, and colour: on a terminal only, and not with NO_COLOR."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.boundaries.test_imports import HEAVY, RUN, loaded_after

BIN = Path(sys.executable).parent
RAMP = ["ramp", "--linear", "1,1,9", "--global-batch-size", "4", "--samples", "64"]
bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


def completed(line: str, folder: Path) -> set[str]:
    """What bash would offer at the end of a line: the script of `bash_source`, called as bash calls it."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(_BATCHWRIGHT_COMPLETE=bash_source batchwright)"\n'
        f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n"
        'complete -p batchwright >/dev/null && _batchwright_completion batchwright "${COMP_WORDS[COMP_CWORD]}" ""\n'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return set(done.stdout.split())


@bash
def test_the_script_completes_verbs_flags_and_names(tmp_path):
    assert completed("batchwright r", tmp_path) == {"ramp", "report", "rl", "run"}
    assert completed("batchwright run --tr", tmp_path) == {"--tracker"}
    assert completed("batchwright run --tracker ", tmp_path) == {"tensorboard", "wandb", "mlflow", "trackio"}
    assert completed("batchwright ramp --linear 1,1,9 --last-step s", tmp_path) == {"shorten"}
    assert completed("batchwright convert --to megatron", tmp_path) == {"megatron-lm", "megatron-bridge"}


@bash
def test_the_tab_key_completes_in_an_interactive_bash(tmp_path):
    """A terminal, an interactive shell, and the key: what a user has."""
    (tmp_path / "trainer_of_mine.py").touch()
    source = 'eval "$(_BATCHWRIGHT_COMPLETE=bash_source batchwright)"'
    process, terminal = pty.fork()
    if not process:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment(PS1="ready> ", TERM="xterm"))
    seen = ""

    def until(wanted: str) -> None:
        nonlocal seen
        while wanted not in seen:
            assert select.select([terminal], [], [], 120)[0], seen
            # Escape codes set the state of the terminal, which is not a part of the text.
            seen += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", os.read(terminal, 65536).decode(errors="replace"))

    try:
        until("ready> ")
        os.write(terminal, f"{source}\n".encode())
        for typed, shown in {
            "batchwright est\t": "batchwright estimate ",
            "batchwright ramp --node-policy constant-\t": "batchwright ramp --node-policy constant-work ",
            "batchwright run trainer_\t": "batchwright run trainer_of_mine.py ",
        }.items():
            seen = seen.rpartition("ready> ")[2]  # a new prompt: readline draws only what differs from the line before
            until("ready> ")
            os.write(terminal, typed.encode())
            until(shown)
            os.write(terminal, b"\x15\n")
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("batchwright ", "plan,ramp,rl,probe,estimate,check,run"),
        ("batchwright run --re", "--restart-seconds,--retry-seconds,--resume"),
        ("batchwright run --dir --dry-r", "--dry-run"),
        ("batchwright plan nemo llm --glo", "--global-batch-size,--global-batch-size-tokens"),
        ("batchwright probe --", "--memory"),
        ("batchwright estimate --prec", "--precision"),
        ("batchwright check --", "--ledger"),
    ],
)
def test_completion_imports_nothing_heavy(line, offered, monkeypatch, capfd):
    words = line.split(" ")
    monkeypatch.setenv("_BATCHWRIGHT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    code = f"import sys\nprinted = sys.stdout\n{RUN.format([])}\n"
    loaded = loaded_after(code)
    assert not loaded & (HEAVY | {"batchwright.runtime", "batchwright.launch"}), loaded & HEAVY
    done = subprocess.run([BIN / "batchwright"], capture_output=True, text=True, timeout=120)
    found = [item.partition(",")[2] for item in done.stdout.split()]
    assert set(offered.split(",")) <= set(found), found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell):
    env = environment(_BATCHWRIGHT_COMPLETE=f"{shell}_source")
    done = subprocess.run([BIN / "batchwright"], capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{shell}_complete" in done.stdout


def on_a_terminal(**more: str) -> str:
    master, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [BIN / "batchwright", *RAMP, "--plot"], stdout=terminal, env=environment(**more), timeout=120
        )
        assert done.returncode == 0
        return os.read(master, 100_000).decode()
    finally:
        os.close(terminal)
        os.close(master)


def test_colour_on_a_terminal_only():
    assert "\x1b[" in on_a_terminal(TERM="xterm-256color")
    assert "\x1b[" not in on_a_terminal(TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal(TERM="dumb")
    piped = subprocess.run(
        [BIN / "batchwright", *RAMP, "--plot"], capture_output=True, env=environment(TERM="xterm-256color"), timeout=120
    )
    assert b"\x1b[" not in piped.stdout and "global batch" in piped.stdout.decode()
