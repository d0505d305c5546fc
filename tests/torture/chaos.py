"""A ramp under random signals to random processes at random moments, resumed until it is complete; then a full audit.

At the end every sample is in exactly one step, the weights and the optimizer's state are bit-equal to those of an
undisturbed run, no process is left, and every exit code was promised.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.conftest import Run

from .calls import Caller
from .material import BOUNDARY, SAMPLES, task
from .proof import proof
from .record import Case, traceback_of_ours, unpromised

ROUND_SECONDS = 600.0  # a longer round hangs
RESUMES = 12  # more of them: it does not complete
# A stopped rank is noticed soon; a busy machine may look stalled once more, which costs a retry and nothing else.
FLAGS = "--stall-seconds 10 --start-seconds 60 --grace-seconds 10 --max-retries 8".split()
ROLES = ("supervisor", "guard", "torchrun", "parent", "rank")
MOMENTS = ("birth", "startup", "steps", "save", "boundary")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGSTOP")


@dataclass(frozen=True)
class Strike:
    """One signal: after `delay` seconds from its moment, to a process of this role."""

    moment: str
    delay: float
    role: str
    signal: str
    stopped: float | None = None  # seconds until SIGCONT; None: it stays stopped
    which: int = 0  # of several processes of this role

    def __str__(self) -> str:
        rest = "" if self.signal != "SIGSTOP" else f" for {self.stopped:.1f} s" if self.stopped else " for good"
        return f"{self.signal}{rest} to {self.role}, {self.delay:.2f} s after {self.moment}"


def strikes(draw: random.Random) -> list[Strike]:
    """One to four of them. A stopped supervisor is always continued: nobody else could do it."""
    made: list[Strike] = []
    for _ in range(draw.randint(1, 4)):
        moment, role, name = draw.choice(MOMENTS), draw.choice(ROLES), draw.choice(SIGNALS)
        role = "supervisor" if moment == "birth" else role  # there is no other yet
        longest = {"birth": 1.0, "startup": 5.0}.get(moment, 0.3)
        stopped = draw.uniform(0.2, 3.0) if role == "supervisor" or draw.random() < 0.5 else None
        made.append(Strike(moment, draw.uniform(0, longest), role, name, stopped, draw.randrange(8)))
    return made


class Round:
    """One run from its start to its end, however often it is resumed."""

    def __init__(self, directory: Path, planned: list[Strike]) -> None:
        self.run, self.planned = Run(directory), planned
        self.deadline = time.monotonic() + ROUND_SECONDS
        self.codes: list[int] = []
        self.wrong: list[str] = []
        self.missed = 0
        self._left: set[int] = set()  # processes that stay stopped
        self._seen = 0  # the newest launch when the last strike came

    def play(self) -> None:
        """Start, strike, resume, until it is complete."""
        left = list(self.planned)
        while True:
            # Without a plan it was stopped before it began.
            planned = (self.run.directory / "plan.json").exists()
            self.run.start(*(("--resume", str(self.run.directory), *FLAGS) if planned else task(self.run, *FLAGS)))
            sent = self._supervised(left)
            if self.wrong:
                return
            code, out, err = self.run.finish()
            self.codes.append(code)
            if code not in sent:  # a signal may end a process before or after it handles signals
                self.wrong += unpromised(code, out, err)
            elif traceback_of_ours(err):
                self.wrong.append(f"a traceback: {err[-3000:]}")
            self._await_processes()
            if code == 0 or self.wrong:
                return
            if len(self.codes) > RESUMES:
                self.wrong.append(f"not complete after {RESUMES} resumes: {err[-3000:]}")
                return

    def _supervised(self, left: list[Strike]) -> set[int]:
        """Strike until the supervisor ends; returns the exit codes that signals to it may give."""
        process, codes = self.run.process, set[int]()
        born = time.monotonic()
        while process.poll() is None and left:
            if not self._moment(left[0], born):
                continue
            strike = left.pop(0)
            if self._wait(strike.delay):
                continue
            pid = self._hit(strike)
            if strike.role == "supervisor" and pid:
                codes.add(-signal.Signals[strike.signal])
        while process.poll() is None and not self._wait(0.05):
            pass
        return codes

    def _wait(self, seconds: float) -> bool:
        """Wait; True if the supervisor ended before. The round fails at its time limit."""
        end = time.monotonic() + seconds
        while True:
            if time.monotonic() > self.deadline:
                self._hang()
                return True
            if self.run.process.poll() is not None:
                return True
            if (rest := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(0.02, rest))

    def _hang(self) -> None:
        processes = [f"{line} ({_state(line.split()[0])})" for line in self.run.processes()]
        self.wrong.append("it hangs:\n" + "\n".join([*processes, self.run.stderr()[-3000:]]))
        for line in self.run.processes():
            _send(int(line.split()[0]), signal.SIGKILL)
        self.run.process.kill()
        self.run.process.wait()

    def _moment(self, strike: Strike, born: float) -> bool:
        """Whether the moment of a strike has come; waits a little if not."""
        run, root = self.run, self.run.directory
        launches = sorted(root.glob("launches/*/manifest.json"))
        newest = int(launches[-1].parent.name) if launches else 0
        come = {
            "birth": True,
            "startup": newest > self._seen,
            "save": any(root.glob("checkpoints/.partial-*")),
            "boundary": any(root.glob(f"checkpoints/step-{BOUNDARY // 8:012d}-*")),
        }
        if strike.moment == "steps":
            try:
                begun = json.loads(launches[-1].read_text())["start_sample"] if launches else 0
                come["steps"] = newest > 0 and run.position() >= begun + 16
            except (OSError, ValueError):
                come["steps"] = False
        if come[strike.moment]:
            self._seen = newest
            return True
        self._wait(0.002 if strike.moment == "save" else 0.02)
        return False

    def _hit(self, strike: Strike) -> int | None:
        """Send the signal; the process that got it, or None if there is none of this role."""
        found = [self.run.process.pid] if strike.role == "supervisor" else self._processes().get(strike.role, [])
        if not found:
            self.missed += 1
            return None
        pid = found[strike.which % len(found)]
        _send(pid, signal.Signals[strike.signal])
        if strike.signal == "SIGSTOP" and strike.stopped is None:
            self._left.add(pid)
        elif strike.signal == "SIGSTOP":
            self._wait(strike.stopped or 0.0)
            _send(pid, signal.SIGCONT)
        return pid

    def _processes(self) -> dict[str, list[int]]:
        """The processes of the run by their role."""
        found: dict[str, list[int]] = {}
        for line in self.run.processes():
            pid, _, _ = line.partition(" ")
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            role = (
                "guard"
                if b"guard.py" in words
                else "torchrun"
                if b"torch.distributed.run" in words
                else "parent"
                if b"batchwright.launch.rank" in words
                else "rank"
                if b"batchwright.runtime.loop" in words
                else "other"
            )
            found.setdefault(role, []).append(int(pid))
        return found

    def _await_processes(self) -> None:
        """No process is left; only a guard that we stopped may be, which a resume ends."""
        end = time.monotonic() + 60
        while lines := self.run.processes():
            if any(_state(str(pid)) == "T" for pid in self._left):
                return
            if time.monotonic() > end:
                self.wrong.append("processes are left: " + "; ".join(lines))
                return
            time.sleep(0.05)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "-"


def result(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the rest of the state in the newest checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name.split("-launch-")[::-1])
    tensors: dict[str, Any] = {}
    _load_state_dict(
        tensors, dcp.FileSystemReader(newest / "tensors"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    state = json.loads((newest / "state.json").read_text())
    return tensors, {key: state[key] for key in ("step", "position", "tokens", "optimizer", "skipped_steps", "ranks")}


def differences(one: tuple[dict[str, Any], dict[str, Any]], two: tuple[dict[str, Any], dict[str, Any]]) -> list[str]:
    """What differs between two results, in a single bit."""
    import torch

    found = [f"state {key}: {one[1][key]} and {two[1][key]}" for key in one[1] if one[1][key] != two[1][key]]
    found += [f"tensor {key} is in one of them only" for key in one[0].keys() ^ two[0].keys()]
    return found + [
        f"tensor {key} differs"
        for key in one[0].keys() & two[0].keys()
        if not torch.equal(_bits(one[0][key]), _bits(two[0][key]))
    ]


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def reference(folder: Path) -> Path:
    """An undisturbed run."""
    run = Run(folder)
    if not (folder / "outcome.json").exists():
        code, _, err = run(*task(run))
        assert code == 0, err
    run.close()
    assert not proof(folder, SAMPLES).problems
    return folder


def chaos(undisturbed: Path, place: Path, call: Caller, seed: str, numbers: range) -> Iterator[Case]:
    """One round per number."""
    expected = result(undisturbed)
    place.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        planned = strikes(random.Random(f"{seed} chaos {number}"))
        played = Round(place / f"round {number}", planned)
        directory = played.run.directory
        try:
            played.play()
            wrong = played.wrong or _audited(directory, call, expected)
        except AssertionError as error:
            wrong = [f"{error}"]
        finally:
            played.run.close()
        what = "; ".join(map(str, planned)) + (f" ({played.missed} found no process)" if played.missed else "")
        yield Case("chaos", number, what, tuple(played.codes), tuple(wrong))
        if not wrong:
            shutil.rmtree(directory)


def _audited(directory: Path, call: Caller, expected: tuple[dict[str, Any], dict[str, Any]]) -> list[str]:
    """What is wrong with a complete run: by the independent audit, by batchwright's own, and bit by bit."""
    audited = proof(directory, SAMPLES)
    wrong = [f"the independent audit: {text}" for text in audited.problems]
    checked = call("check", "--ledger", directory, "--json", cwd=directory.parent)
    wrong += checked.wrong()
    if checked.code != 0 or json.loads(checked.out)["samples"] != SAMPLES:
        wrong.append(f"check --ledger: {checked.out[:2000]}{checked.err[:500]}")
    shown = call("run", "--status", directory, "--json", cwd=directory.parent)
    wrong += shown.wrong()
    if shown.code != 0 or json.loads(shown.out)["state"] != "complete":
        wrong.append(f"run --status: {shown.out[:2000]}{shown.err[:500]}")
    return wrong + differences(result(directory), expected)
