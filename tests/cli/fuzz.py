"""`python -m tests.cli.fuzz --lines 10000 --seed 1`: that many random command lines, each as text and as JSON, in this process.

A line fails if it ends with another exit code than the documented ones, with a traceback or the word `bug`, without a
sentence, too late, with files outside of the directories that are its own, or if `--json` does not agree. Every failure is
printed with the line, the files that it names, and the seed that makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tests.cli.conftest import Ran, run
from tests.cli.lines import MAKERS, Line, line

# How often a verb is tried: those that decide have the most to read.
SHARES = {"plan": 5, "ramp": 6, "rl": 3, "convert": 5, "run": 7, "probe": 2, "estimate": 2, "check": 2, "report": 2}
CPU_SECONDS = 10.0  # far above a usual line, which takes milliseconds
REAL_SECONDS = 20.0  # a line that waits for something
CODES = {"plan": {0, 2, 3, 4}, **{verb: {0, 2} for verb in ("ramp", "rl")}}
EVERY_CODE = {0, 2, 3, 4, 5, 130}
OWN = {"made", "runs", ".batchwright", "a 'dir'", "report.html"}  # where a line may write
_WRONG = re.compile(r"Traceback|bug in batchwright|object at 0x|NoneType|<class |\[Errno|(?<!\.)\.\.(?=\s|$)")
TASK = """
import torch
from batchwright.runtime import Task

def task(width=4, sequence_length=None, lr=0.1):
    rows = [(torch.ones(width) * i, torch.ones(1)) for i in range(32)]
    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
    return Task(torch.nn.Linear(width, 1), rows, loss, lambda parameters: torch.optim.SGD(parameters, lr=lr))
"""


class Late(BaseException):
    """A line waits for something; no `except Exception` may take it."""


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A directory with everything that lines name, as the current one; no program of Slurm can be found in it."""
    before = os.getcwd(), os.environ["PATH"]
    with tempfile.TemporaryDirectory(prefix="batchwright-fuzz-") as name:
        place = Path(name).resolve() / "one" / "two" / "place"
        place.mkdir(parents=True)
        (place / "train.py").write_text(TASK)
        (place / "wrong.py").write_text("def task(:\n")
        (place / "binary.yaml").write_bytes(b"\xff\xfe\x00")
        (place / "huge.yaml").write_text("a: 1\n" * 100_000)
        (place / "loop.yaml").symlink_to(place / "loop.yaml")
        os.mkfifo(place / "fifo.yaml")
        os.mkfifo(place / "fifo.py")
        (place / "folder").mkdir()
        programs = place / "programs"
        programs.mkdir()
        for program in ("true", "false", "sh", "cat"):
            (programs / program).symlink_to(shutil.which(program) or f"/bin/{program}")
        os.chdir(place)
        os.environ["PATH"] = str(programs)
        try:
            with no_processes():
                for kind in ("done", "damaged"):
                    made = run("run", "--samples", "96", "--thresholds", "0:4 32:8", "--dir", kind, "--", "true")
                    assert made.code == 0, made
            (place / "damaged" / "plan.json").write_text('{"schema": 1, "kind": "task"}')
            yield place
        finally:
            os.chdir(before[0])
            os.environ["PATH"] = before[1]


@contextlib.contextmanager
def no_processes() -> Iterator[None]:
    """Replace each place where processes start: all of the input has been read and checked when one is reached.

    `supervise` gets a plan that is written; a trial gets a request, a size and its journal; the estimating process gets its
    request as JSON. Real processes are tested in tests/launch, tests/probe and tests/estimate.
    """
    from batchwright.core import codec
    from batchwright.estimate import worker
    from batchwright.launch import supervisor
    from batchwright.probe import command, runner
    from batchwright.probe.records import Trial
    from batchwright.probe.speed import Timing
    from batchwright.processes.start import Exit

    def trial(self: Any, size: int, mode: str, purpose: str, contrasts: bool = False) -> Trial:
        json.dumps(codec.encode(replace(self.request, directory=None)))
        self.identity = {"device": "cpu"}
        if size > 64:
            return Trial(size, "oom", purpose, cause="device-oom", reason="out of memory")
        timing = Timing(0.01 * size + 0.02, 0.01 * size, 0.01 * size + 0.03, 0.0, 20, 2)
        timed = {"timing": timing, "step_seconds": timing.seconds, "samples_per_second": size / timing.seconds}
        return Trial(size, "fits", purpose, size * 2**20, 2**30, **(timed if purpose == "throughput" else {}))

    def command_run(self: Any, size: int, steps: int, seen: Any, limited: bool) -> Exit:
        return Exit(0, 0.01 * steps, "") if size <= 64 else Exit(1, 0.1, "MemoryError")

    def estimated(job: str, request: Any, *, timeout: float) -> dict[str, Any]:
        json.dumps({"job": job, "request": codec.encode(request)})
        if job == "trial":
            return {"measured_bytes": 10**6}
        if job == "choose":
            parts = {"parameters": 10**6}
            point = {"micro_batch_size": 1, "sequence_length": None, "peak_memory_bytes": 10**6, "breakdown": parts}
            return {"point": point, "remedies": []}
        lengths, sizes = request.sequence_lengths or (None,), request.micro_batch_sizes or (1, 2, 4)
        points = [
            {
                "micro_batch_size": size,
                "sequence_length": length,
                "peak_memory_bytes": 10**6 + size * (length or 1) * 1000,
                "breakdown": {"parameters": 10**6, "activations": size * (length or 1) * 1000},
            }
            for length in lengths
            for size in sizes
        ]
        limit = None if request.memory_bytes is None else max(sizes) if request.memory_bytes > 10**9 else 0
        limits = [{"sequence_length": length, "max_micro_batch_size": limit} for length in lengths]
        return {"framework": "torch", "points": points, "limits": limits, "notes": []}

    with (
        patch.object(supervisor, "supervise", lambda directory, plan, shown, **_: "complete"),
        patch.object(runner.TaskRunner, "_run", trial),
        patch.object(command.CommandRunner, "_run", command_run),
        patch.object(worker, "run", estimated),
        # Drawing takes a tenth of a second for each chart, and tests/report draws all.
        patch("batchwright.report.write.svg", json.dumps),
        patch("batchwright.report.write.png", lambda spec: json.dumps(spec).encode()),
        patch("batchwright.report.html.bundle", str),
    ):
        yield


@contextlib.contextmanager
def small_checks() -> Iterator[None]:
    """`check` starts one process per rank, and a large batch takes long: here one process compares 32 samples. Needs torch."""
    from batchwright.runtime import check as room
    from batchwright.runtime.check import compare

    real = room.check

    def smaller(task: Any, **given: Any) -> Any:
        size = given["global_batch_size"]
        return real(task, **{**given, "global_batch_size": size and min(size, 32)})

    with patch.object(room, "check", smaller), patch.object(compare, "_on_ranks", lambda *_: ([], [])):
        yield


def execute(argv: list[str]) -> tuple[Ran, float]:
    """Run a command line; returns what it did and how long it computed."""

    def late(*_: object) -> None:
        raise Late(f"no end within {REAL_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, REAL_SECONDS)
    start = time.process_time()
    try:
        ran = run(*argv)
    except Late as error:
        ran = Ran(1, "", str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return ran, time.process_time() - start


def problems(one: Line, place: Path) -> tuple[list[str], Ran, float]:
    """Everything that is wrong with the answers to a line, the answer as text, and the time it took."""
    for name, content in one.files.items():
        (place / name).write_bytes(content)
    known = _tree(place)
    try:
        ran, took = execute(one.argv)
        allowed = _allowed(one.argv)
        wrong = _wrong(one.argv, ran) + _written(place, known, allowed)
        if took > CPU_SECONDS:
            wrong.append(f"it computed for {took:.1f} s")
        head = one.argv[: one.argv.index("--")] if "--" in one.argv else one.argv
        if not {"--json", "--csv", "--help", "-h"} & set(head):
            as_json, _ = execute([one.argv[0], "--json", *one.argv[1:]])
            wrong += _wrong_json(ran, as_json) + _written(place, known, allowed)
    finally:
        for name in one.files:
            (place / name).unlink(missing_ok=True)
    return wrong, ran, took


def _wrong(argv: list[str], ran: Ran) -> list[str]:
    wrong: list[str] = []
    if ran.code not in CODES.get(argv[0], EVERY_CODE):
        wrong.append(f"exit code {ran.code}: {(ran.err or ran.out)[:600]}")
    mine = ran.err if ran.code != 5 else "\n".join(s for s in ran.err.splitlines() if s.startswith("error: "))
    if (found := _WRONG.search(mine)) and found[0] not in " ".join(argv):
        wrong.append(f"{found[0]!r} in the error: {mine[:600]}")
    if ran.code in (2, 3, 4) and not re.match(r"(?:.*\n)*error: \S", ran.err):
        wrong.append(f"no sentence: {ran.err[:300]!r}")
    if len(ran.err) > 20_000 and ran.code == 2:
        wrong.append(f"{len(ran.err):,} characters of error")
    return wrong


def _wrong_json(ran: Ran, as_json: Ran) -> list[str]:
    if as_json.code != ran.code:
        return [f"exit code {ran.code}, and {as_json.code} with --json: {ran.err[:200]!r} {as_json.out[-300:]!r}"]
    try:
        document = as_json.json
    except (ValueError, AssertionError) as error:
        return [f"--json gives no document: {error}: {as_json.out[:200]!r}"]
    if document.get("schema") != 1:
        return [f"--json gives no schema: {as_json.out[:200]!r}"]
    error = document.get("error")
    if ran.code in (2, 3, 4) and not (error and error["message"] and isinstance(error["nearest"], list)):
        return [f"--json gives no error: {as_json.out[:200]!r}"]
    return ["--json gives an error with exit code 0"] if error and ran.code == 0 else []


def _tree(place: Path) -> set[str]:
    return {entry.path for base in (place, *list(place.parents)[:2]) for entry in os.scandir(base)}


def _allowed(argv: list[str]) -> list[Path]:
    """The directories that a line may write to: its own by default, and those that it names."""
    flags = ("--dir", "--output", "-o", "--png", "--svg", "--markdown")
    named = [after for word, after in pairwise(argv) if word in flags]
    named += [word.partition("=")[2] for word in argv if word.partition("=")[0] in (*flags, "launch.dir")]
    into = [after for word, after in pairwise(argv) if word == "--into"]
    into += [word.partition("=")[2] for word in argv if word.startswith("--into=")]
    if "--dry-run" not in argv:
        named += [f"{file}{backup}" for file in into for backup in ("", ".bak", ".bak1")]
    return [Path(name).absolute() for name in (*OWN, *named)]


def _written(place: Path, known: set[str], allowed: list[Path]) -> list[str]:
    """What a line wrote where it may not; everything new is removed."""
    new = [Path(path) for path in _tree(place) - known]
    for path in new:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    own = {os.path.normpath(path) for path in allowed}
    stray = [path for path in new if not any(os.path.commonpath([path, one]) in (one, str(path)) for one in own)]
    return [f"it wrote {str(path)!r}" for path in stray]


def verb_of(random: Random) -> str:
    return random.choices(list(SHARES), list(SHARES.values()))[0]


def shown(one: Line) -> str:
    """A line as a shell reads it, and its files."""
    files = "".join(f"\n    {name}: {content[:2000]!r}" for name, content in one.files.items())
    return f"batchwright {shlex.join(one.argv)[:3000]}{files}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cli.fuzz", description=__doc__)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="line N of seed S is always the same")
    parser.add_argument("--first", type=int, default=0, help="begin with this line, to repeat one")
    parser.add_argument("--verb", choices=list(MAKERS), help="only this verb")
    given = parser.parse_args()
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(errors="backslashreplace")  # a line may contain what is not text
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    slowest: dict[str, tuple[float, int, Line]] = {}
    failed, began = 0, time.monotonic()
    import torch

    torch.set_num_threads(1)
    with workspace() as place, no_processes(), small_checks():
        for number in range(given.first, given.first + given.lines):
            random = Random(f"{given.seed} {number}")
            verb = given.verb or verb_of(random)
            one = line(random, verb)
            wrong, ran, took = problems(one, place)
            counts[verb][ran.code] += 1
            slowest[verb] = max(slowest.get(verb, (-1.0, 0, one)), (took, number, one), key=lambda item: item[0])
            if wrong:
                failed += 1
                print(f"\nline {number} of seed {given.seed}: {shown(one)}", flush=True)
                print("\n".join(f"  wrong: {text}" for text in wrong), flush=True)
            if (number + 1) % 500 == 0:
                print(f"{number + 1} lines, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{'verb':10}{'lines':>7}{'valid':>7}  {'exit codes':42}slowest")
    for verb, codes in sorted(counts.items()):
        total, codes_shown = sum(codes.values()), ", ".join(f"{code}: {n}" for code, n in sorted(codes.items()))
        took, number, one = slowest[verb]
        print(f"{verb:10}{total:7}{codes[0] / total:7.0%}  {codes_shown:42}{took:.2f} s (line {number})")
    total = sum(sum(codes.values()) for codes in counts.values())
    valid = sum(codes[0] for codes in counts.values())
    print(
        f"{'all':10}{total:7}{valid / total:7.0%}  {failed} failed, {time.monotonic() - began:.0f} s, seed {given.seed}"
    )
    for verb, (took, number, one) in sorted(slowest.items()):
        if took > 1:
            print(f"slow: {verb}, {took:.1f} s, line {number}: {shown(one)[:600]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
