"""A disk that fails in the middle of a run: full, read-only, unreadable, or with a limit of file sizes.

The run ends with a sentence that names the cause; so does everything that is tried before the repair; after it, the run
is resumed and complete.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.launch.conftest import TRAINER, Run

from .material import PROBE, SAMPLES, task
from .proof import proof
from .record import Case, unpromised

LIMIT = 100  # bytes in a file, for EFBIG: less than any record of a run
FLAGS = "--max-retries 1 --retry-seconds 0.1 --stall-seconds 60 --grace-seconds 5".split()
# Without these, root may read everything.
LIKE_ANYONE = ("--inh-caps=-dac_override,-dac_read_search", "--bounding-set=-dac_override,-dac_read_search")
SECONDS = 300.0  # a longer call hangs


class Unavailable(Exception):
    """This machine cannot do that to a disk."""


@dataclass(frozen=True)
class Fault:
    """A disk, how it breaks under a run, how it is repaired, and what an error may say then."""

    place: Path
    broken: Callable[[Run], None]
    repaired: Callable[[], None]
    words: tuple[str, ...]
    first: tuple[str, ...] = ()
    """What starts every command, from the beginning on."""
    later: tuple[str, ...] = ()
    """What starts the commands between the break and the repair."""


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:4])}: {done.stderr.strip()[:200]}")


@contextmanager
def full(folder: Path) -> Iterator[Fault]:
    """A tmpfs of 3 MiB without a free byte."""
    disk, ballast = folder / "disk", folder / "disk" / "ballast"
    disk.mkdir()
    _call("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk))

    def fill(_: Run) -> None:
        with open(ballast, "wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass

    try:
        yield Fault(disk, fill, ballast.unlink, ("No space left", "disk is full", "bytes left"))
    finally:
        _call("umount", "-l", str(disk))


@contextmanager
def read_only(folder: Path) -> Iterator[Fault]:
    """An ext4 file system that found an error: the kernel makes it read-only while files are open."""
    disk, image = folder / "disk", folder / "image"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    _call("mkfs.ext4", "-q", str(image))
    mount = ("mount", "-o", "loop,errors=remount-ro", str(image), str(disk))
    _call(*mount)

    def fail(_: Run) -> None:
        device = subprocess.run(["findmnt", "-no", "SOURCE", str(disk)], capture_output=True, text=True, check=True)
        Path(f"/sys/fs/ext4/{Path(device.stdout.strip()).name}/trigger_fs_error").write_text("1")

    def repair() -> None:
        _call("umount", str(disk))
        _call(*mount)

    try:
        device = subprocess.run(["findmnt", "-no", "SOURCE", str(disk)], capture_output=True, text=True, check=True)
        if not Path(f"/sys/fs/ext4/{Path(device.stdout.strip()).name}/trigger_fs_error").exists():
            raise Unavailable("this kernel cannot provoke an error of ext4")
        yield Fault(disk, fail, repair, ("Read-only file system", "Input/output error"))
    finally:
        _call("umount", "-l", str(disk))


@contextmanager
def unreadable(folder: Path) -> Iterator[Fault]:
    """The run directory may no longer be read, written or entered."""
    disk = folder / "disk"
    (disk / "run").mkdir(parents=True)
    (disk / "journal").mkdir()
    _call("setpriv", *LIKE_ANYONE, "true")

    def close(_: Run) -> None:
        for path in disk.iterdir():
            path.chmod(0)

    def open_again() -> None:
        for path in disk.iterdir():
            path.chmod(0o755)

    try:
        yield Fault(disk, close, open_again, ("Permission denied",), first=("setpriv", *LIKE_ANYONE))
    finally:
        open_again()


@contextmanager
def too_large(folder: Path) -> Iterator[Fault]:
    """No file may be larger than a few bytes: `ulimit -f`, or a quota."""
    disk = folder / "disk"
    disk.mkdir()
    _call("prlimit", "--fsize=100", "true")

    def limit(run: Run) -> None:
        for pid in (run.process.pid, *(int(line.split()[0]) for line in run.processes())):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    yield Fault(disk, limit, lambda: None, ("File too large",), later=("prlimit", f"--fsize={LIMIT}"))


FAULTS = {"full": full, "read-only": read_only, "unreadable": unreadable, "too large": too_large}
KINDS = ("command", "task")


class Play:
    """One fault under one kind of run."""

    def __init__(self, kind: str, fault: Fault) -> None:
        self.kind, self.fault = kind, fault
        self.run = Run(fault.place / "run")
        self.codes: list[int] = []
        self.wrong: list[str] = []

    def play(self) -> None:
        """Start, break, try everything, repair, resume."""
        fault, run = self.fault, self.run
        run.prefix = fault.first
        if self.kind == "task":
            run.start(*task(run, *FLAGS))
            run.until(lambda: any((run.directory / "checkpoints").glob("step-*")) and run.position() >= 32)
        else:
            fixed = "--samples 512 --nodes 2 --devices-per-node 1 --node-policy constant-work".split()
            place = ("--thresholds", "0:8 64:16", "--dir", str(run.directory))
            run.start(*place, *fixed, *FLAGS, "--", *TRAINER, "slow=0.1")
            run.until(lambda: run.position() >= 16)
        fault.broken(run)
        try:
            out, _ = run.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"the supervisor hangs: {run.stderr()[-2000:]}")
            run.process.kill()
            run.process.communicate()
            return
        # Its standard error is a file, too: where no file may grow, only the exit code is left.
        self._judge("run", run.process.returncode, out, run.stderr(), explained=not fault.later)
        self._nothing_left()
        self._tries()
        fault.repaired()
        code, out, err = run.resume(*FLAGS)
        self._judge("run --resume, repaired", code, out, err)
        if code != 0:
            self.wrong.append(f"the repaired run does not complete: {err[-2000:]}")
        elif self.kind == "task":
            self.wrong += proof(run.directory, SAMPLES).problems
        self._nothing_left()

    def _tries(self) -> None:
        """What a user tries while the disk is broken."""
        run, place = self.run, self.fault.place
        self._batchwright("run", "--status", run.directory)
        self._batchwright("run", "--status", run.directory, "--json")
        self._batchwright("run", "--stop", run.directory)
        if self.kind == "task":
            self._batchwright("check", "--ledger", run.directory)
        self._batchwright("run", "--resume", run.directory, *FLAGS, fails=True)
        self._batchwright("probe", "--dir", place / "journal", *PROBE, fails=True)
        if not self.fault.first:  # else there is no place that is broken and empty
            new = ("--samples", "64", "--global-batch-size", "8", "--dir", place / "new", "--", "true")
            self._batchwright("run", *new, fails=True)

    def _batchwright(self, *argv: str | Path, fails: bool = False) -> None:
        words = [os.fspath(word) for word in argv]
        self.fault.broken(self.run)  # again: the command before may have made room
        command = [*self.fault.first, *self.fault.later, sys.executable, "-m", "batchwright", *words]
        try:
            done = subprocess.run(
                command, cwd=self.fault.place.parent, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{' '.join(words)} hangs")
            return
        self._judge(" ".join(words), done.returncode, done.stdout, done.stderr, explained=fails)

    def _judge(self, what: str, code: int, out: str, err: str, explained: bool = False) -> None:
        self.codes.append(code)
        self.wrong += [f"{what}: {text}" for text in unpromised(code, out, err)]
        if explained and (code not in (4, 5) or not any(word in out + err for word in self.fault.words)):
            self.wrong.append(
                f"{what}: exit code {code}, and none of {self.fault.words} in:\n{err[-1500:]}{out[-500:]}"
            )

    def _nothing_left(self) -> None:
        try:
            self.run.until(lambda: not self.run.processes(), seconds=60, ended=False)
        except AssertionError:
            self.wrong.append(f"processes are left: {self.run.processes()}")


def disk(folder: Path, kind: str, fault: str, number: int = 0) -> Case:
    """One case; Unavailable if this machine cannot do it."""
    if os.geteuid() != 0:
        raise Unavailable("breaking a disk needs root")
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        played = Play(kind, stack.enter_context(FAULTS[fault](folder)))
        stack.callback(played.run.close)
        try:
            played.play()
        except AssertionError as error:
            played.wrong.append(str(error))
    if not played.wrong:
        shutil.rmtree(folder)
    return Case("disks", number, f"{fault} under a {kind}", tuple(played.codes), tuple(played.wrong))
