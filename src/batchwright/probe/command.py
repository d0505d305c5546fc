"""Trials of any command with {micro_batch_size} in it: scripts of other frameworks, unchanged.

A step is a line that matches `--step-regex`, a marker that the script prints (`batchwright: step 12`), or what common
frameworks print. After enough steps the command is ended, so it may be a whole training run. A command that prints no
steps has to end by itself, with exit status 0, to count as a size that fits. With `{steps}` in the command no line is
needed: it is timed at two numbers of steps, and the difference does not contain the start-up.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchwright.core.errors import EnvironmentFault, NothingFitsError
from batchwright.processes.endings import ExitCause, from_exit
from batchwright.processes.start import Exit, GuardedProcess

from .machine import UNLOADED, file_digest, sources, trial_environment
from .records import PLACEHOLDER, STEPS, ProbeRequest, Trial
from .speed import Timing

# A loss of the training: `loss`, `train_loss`, `lm_loss`, but not `val_loss` or `eval/loss`.
_LOSS = r"(?<![a-z])(?<!val[ _/.-])(?<!eval[ _/.-])(?<!valid[ _/.-])(?<!validation[ _/.-])(?<!test[ _/.-])loss\b"
# tqdm without a description, as in Hugging Face's Trainer and Accelerate's scripts
_BARE = r"^\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \["
_NOT_TRAINING = r"(?!.*\b(?:eval|valid|val|test)\w*\b[^|]*(?:\||\dit \[))"
# What common loops print per step. The first group is the number of the step; a second group (the total) distinguishes
# the progress bar of the training from that of an evaluation. Bars with a description ("Loading checkpoint shards: 25%|")
# and a bare "step 3" are not steps: programs print them before training, so a size would count that has not trained yet.
MARKERS = (
    r"batchwright: step (\d+)",
    r"completed step: (\d+)",  # MaxText
    r"\biteration\s+(\d+)/",  # Megatron-LM, NeMo
    r"\bglobal_step[ =:]+(\d+)",  # NeMo 2
    # torchtitan, Accelerate's examples; but not `validate step: 3` (torchtitan), `Completed eval step: 3` (MaxText).
    r"^(?!.*\b(?:eval\w*|valid\w*|val|test)[ \w]* step\b).*?\bstep[ =:#]+(\d+)\b.*" + _LOSS,
    r"\bstep=(\d+), skipped=\d+, lr=",  # DeepSpeed, with steps_per_print
    r"^\[(?:epoch=\d+\]\[)?batch=(\d+)(?:/(\d+))?\]",  # Composer's ConsoleLogger, by epochs or batches
    # nanoGPT, which prints its evaluations as `step`; litgpt: `Epoch 1 | iter 3 step 1 | loss train: 2.1, val: n/a`
    r"\biter[ =:#]+(\d+)\b(?!: val).*" + _LOSS,
    r"(?<!\d)(\d+)\s*/\s*(\d+) batches\b.*" + _LOSS,  # PyTorch's word_language_model
    _BARE,
    # tqdm with a description, if that names an epoch or training, or if a loss is behind the bar; `3/?` is Lightning's bar
    # and `3it` tqdm's own, where the number of batches is not known. `0/?` is drawn before the first step.
    r"^\s*(?:train\w*|(?:train\w*[ ,:-]*)?epoch)\b[^|%]*:\s*(?:\d+%)?\|[^|]*\|\s*(?!0/\?)(\d+)/(?:(\d+)|\?) \[",
    r"^" + _NOT_TRAINING + r"[^|]*\|[^|]*\|\s*(?!0/\?)(\d+)/(?:(\d+)|\?) \[[^\]]*" + _LOSS,
    r"^\s*(?:train\w*|(?:train\w*[ ,:-]*)?epoch)\b[^|%]*:\s*([1-9]\d*)it \[",
    r"^" + _NOT_TRAINING + r"[^|%]*?(?<!\d)([1-9]\d*)it \[[^\]]*" + _LOSS,
    # Lightning: `Epoch 0:  12%|█▎ | 3/25 [00:01<…]` is tqdm's; with rich: `Epoch 0/4 ━━━ 3/25 0:00:01 • 0:00:09`, or `3/--`.
    r"^\s*Epoch \d+/-?\d+\s+[━╸╺ ]+\s*(?!0/--)(\d+)/(?:(\d+)|--) ",
    # Keras: `  3/25 ━━━━━━━━━━━━━━━━━━━━ 1s 60ms/step - loss: 2.3`; older: `3/25 [==>...] - ETA: 1s - loss: 2.3`; and
    # `      3/Unknown 1s 60ms/step - loss: 2.3`, if the data have no length.
    r"^[\s\x08]*(\d+)/(?:(\d+) (?:[━─]+|\[[=>.]+\])|Unknown) .*" + _LOSS,
)
_EPOCH = re.compile(r"\bepoch\W{0,4}(\d+)", re.IGNORECASE)
_ANY_LOSS = re.compile(_LOSS, re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
# A line may be printed before its step ends; at the third line, two steps with optimizer state are done.
_LIMIT_STEPS = 3
# A bar without a description may be that of a preparation, which a size that is too large survives. It counts if a loss is
# printed, if it starts again (an epoch), or if it has lasted for so many seconds and not ended.
_BARE_SECONDS = 5.0
_FEW, _MANY = 5, 25  # {steps}


@dataclass
class CommandRunner:
    """Makes trials of a command; `--memory` limits the address space of each of its processes, imports included."""

    request: ProbeRequest
    scratch: Path
    identity: Mapping[str, Any] = field(default_factory=dict[str, Any])

    written: set[str] = field(default_factory=set[str])
    """Files that the command writes: they are its output, and not its code."""

    def __post_init__(self) -> None:
        command = self.request.command
        program = shutil.which(command[0]) if command else None
        self._before = self._last = self._code()
        self._changed: set[str] = set()
        self._fixed = {
            "command": " ".join(command),
            "device": platform.node(),
            "program": str(Path(program).resolve()) if program else None,  # the path of a Python mostly has its version
            "versions": {"python": platform.python_version()},
        }
        self._identify()

    def _identify(self) -> None:
        code = {path: found for path, found in self._before.items() if path not in self.written}
        self.identity = {**self._fixed, "code": code}

    def _code(self) -> dict[str, str]:
        """Fingerprints of the files that the command names, and of the *.py files in the folders of its scripts."""
        command = self.request.command
        # An argument may be longer than a name of a file can be: Path.is_file would raise an error.
        files = {argument: Path(argument) for argument in command if os.path.isfile(argument)}
        folders = {p.resolve().parent for p in files.values() if p.suffix == ".py"}
        # A module in this folder, as Python finds it.
        for module in (after for flag, after in pairwise(command) if flag == "-m"):
            top = Path(module.partition(".")[0])
            folders |= {top.resolve()} if os.path.isdir(top) else {Path.cwd()} if os.path.isfile(f"{top}.py") else set()
        found = {argument: file_digest(path) for argument, path in files.items()}
        for folder in folders:
            found |= sources(folder)
        return dict(sorted(found.items()))

    def note_written(self) -> None:
        """After a trial: a file is output if it is new, or if it changed in two trials: one change may be an edit.

        A *.py file that was there before is code in any case.
        """
        last, self._last = self._last, self._code()
        changed = {path for path, found in self._last.items() if found != last.get(path)}
        new = changed - self._before.keys()
        twice = {path for path in changed & self._changed if not path.endswith(".py")}
        self._changed |= changed
        if found := (new | twice) - self.written:
            self.written |= found
            self._identify()

    def ignore(self, written: Iterable[str]) -> None:
        """Take these files for output: an earlier probe has seen that the command writes them."""
        self.written |= set(written)
        self._identify()

    def conditions(self, purpose: str) -> dict[str, Any]:
        """What the verdict depends on, apart from the command."""
        r = self.request
        timed = {"seconds": r.seconds} if purpose == "throughput" else {}
        space = resource.getrlimit(resource.RLIMIT_AS)[0]  # `ulimit -v` limits the command, too
        return {"memory": r.memory, "margin": r.margin, "address_space": space, "step_regex": r.step_regex} | timed

    def describe(self) -> Mapping[str, Any]:
        """The identity; nothing has to run for it."""
        return self.identity

    def limit(self, size: int) -> Trial:
        """Whether a size runs."""
        steps = _Steps(self.request.step_regex, least=_LIMIT_STEPS, seconds=0.0)
        done = self._run(size, _LIMIT_STEPS, steps, limited=True)
        if self.request.memory and not done.enough and done.returncode and UNLOADED in done.output:
            raise NothingFitsError(
                f"memory={self.request.memory:,} bytes are not enough for the libraries of the command: {UNLOADED}. The limit "
                "holds for each of its processes, imports included. Nearest: more --memory.",
                field="memory",
                given=self.request.memory,
            )
        return self._trial(size, "limit", done)

    def throughput(self, size: int, contrasts: bool = False) -> Trial:
        """How fast a size is; `contrasts` are for tasks only."""
        if any(STEPS in argument for argument in self.request.command) and not self.request.step_regex:
            few = self._run(size, _FEW, None, limited=False)
            many = self._run(size, _MANY, None, limited=False)
            if few.returncode == many.returncode == 0 and many.seconds > few.seconds:
                # Two totals show no noise. The interval assumes that start-up varies by 10%.
                step = (many.seconds - few.seconds) / (_MANY - _FEW)
                slack = 0.1 * few.seconds / (_MANY - _FEW)
                timing = Timing(step, max(step / 10, step - slack), step + slack, 0.0, _MANY - _FEW, _FEW)
                return self._trial(size, "throughput", many, timing)
            return self._trial(size, "throughput", many if few.returncode == 0 else few)
        seen = _Steps(self.request.step_regex, least=_FEW + 3, seconds=self.request.seconds)
        done = self._run(size, _MANY, seen, limited=False)
        timing = seen.timing()
        trial = self._trial(size, "throughput", done, timing)
        return trial if timing else replace(trial, last_lines=_printable(done.output.strip().splitlines()[-3:]))

    def _run(self, size: int, steps: int, seen: _Steps | None, limited: bool) -> Exit:
        r = self.request
        command = [argument.replace(PLACEHOLDER, str(size)).replace(STEPS, str(steps)) for argument in r.command]
        env = trial_environment(limited=limited and r.memory is not None, task=False)
        space = r.memory - r.margin if r.memory and limited else 0
        self._report.unlink(missing_ok=True)
        # Without a limit, a size may need more than the host has: that must not end another program.
        guarded = {"scratch": str(self.scratch), "address_space": space, "first": True, "report": str(self._report)}
        with GuardedProcess(command, env, **guarded) as child:
            done = child.watch(r.timeout, on_line=seen.see if seen else None)
        self.note_written()
        if done.returncode in (126, 127) and done.output.startswith(f"{command[0]}: "):
            raise EnvironmentFault(
                f"the command cannot be started: {done.output.strip()}.", field="command", given=command[0]
            )
        return done

    @property
    def _report(self) -> Path:
        return self.scratch / "exit.json"

    def _peaks(self) -> dict[str, int]:
        """What the guard measured of the last command."""
        try:
            return json.loads(self._report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _trial(self, size: int, purpose: str, done: Exit, timing: Timing | None = None) -> Trial:
        r = self.request
        limit = r.memory - r.margin if r.memory else None
        peak = self._peaks().get("peak_address_space_bytes" if limit else "peak_resident_bytes") or None
        if done.enough or done.returncode == 0:
            return Trial(
                size,
                "fits",
                purpose,
                peak,
                limit,
                seconds=done.seconds,
                timing=timing,
                step_seconds=timing.seconds if timing else None,
                samples_per_second=size / timing.seconds if timing else None,
            )
        if done.returncode is None:
            cause = ExitCause("hang", f"no end within {r.timeout:g} s, and too few steps were seen (see --step-regex)")
        else:
            cause = from_exit(done.returncode, done.output)
        return Trial(
            size,
            cause.status,
            purpose,
            None,
            limit,
            seconds=done.seconds,
            cause=cause.kind,
            reason=cause.reason,
            traceback=cause.traceback or done.output[-2000:].strip() or None,
        )


def _printable(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines to show: without colours, and without characters that move a terminal's cursor."""
    return tuple("".join(c for c in _COLOUR.sub("", line) if c.isprintable()).strip()[:160] for line in lines)


_LEAST_TIMES = 3  # a median with an interval needs three
_DIGITS = 15  # a number with more digits is not the number of a step
_LONGEST_LINE = 2000  # patterns are searched in this many characters


@dataclass
class _Series:
    """What one pattern has found: growing numbers, and the time of a step between two of them."""

    first: float
    last: float
    numbers: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    epoch: str = ""
    restarted: bool = False
    ended: bool = False

    def add(self, number: int, when: float, total: str, epoch: str) -> None:
        """Add the number of a step, and the time of its line."""
        steps = number - self.numbers[-1] if self.numbers else 1
        if steps == 0 and total == str(number) and epoch != self.epoch:
            steps = number  # the end of another epoch: if it has one step, no smaller number comes between
        self.epoch = epoch
        self.restarted = self.restarted or steps < 0
        self.ended = total == str(number)
        if self.numbers and steps > 0 and when > self.last:  # lines that arrive together show no time
            self.times.append((when - self.last) / steps)
        if steps > 0:
            self.numbers.append(number)
        elif steps < 0:
            self.numbers[-1] = number  # a new epoch counts from its start
        self.last = when if steps else self.last


class _Steps:
    """Steps seen in the output. Every pattern has a series; the longest one with a growing number counts.

    After our own marker was seen, nothing else counts.
    """

    def __init__(self, regex: str | None, least: int, seconds: float) -> None:
        self._patterns = [re.compile(p, re.IGNORECASE) for p in ((regex,) if regex else MARKERS)]
        self._totals = regex is None  # a further group of the user's pattern may be a loss
        self._least, self._seconds = least, seconds
        self._series: dict[tuple[Any, ...], _Series] = {}
        self._enough: _Series | None = None
        self._epoch = ""
        self._loss: float | None = None

    def see(self, line: str, when: float) -> bool:
        """Read a line; True when there were enough steps over enough time."""
        line = _COLOUR.sub("", line[:_LONGEST_LINE])
        if named := _EPOCH.search(line):
            self._epoch = named[1]
        if _ANY_LOSS.search(line):
            self._loss = when
        for pattern in self._patterns:
            found = pattern.search(line)
            if found is None:
                continue
            first, *others = found.groups("") or ("",)
            if first.isdecimal() and len(first) > _DIGITS:
                continue
            if pattern is self._patterns[0] and len(self._patterns) > 1:
                self._patterns = [pattern]
                self._series.clear()  # what was counted before the first marker may not be steps
            key = (pattern, *others) if self._totals else (pattern,)
            series = self._series.setdefault(key, _Series(when, when))
            number = int(first) if first.isdecimal() else len(series.numbers)
            series.add(number, when, others[0] if others and self._totals else "", self._epoch)
            long = len(series.numbers) >= self._least and series.last - series.first >= self._seconds
            if long and len(series.times) >= _LEAST_TIMES and (pattern.pattern != _BARE or self._trains(series)):
                self._enough = self._enough or series
        return self._enough is not None

    def _trains(self, bar: _Series) -> bool:
        """Whether a bar without a description is that of the training."""
        if bar.restarted or (self._loss is not None and self._loss >= bar.first):
            return True
        return not bar.ended and bar.last - bar.first >= _BARE_SECONDS

    @property
    def numbers(self) -> list[int]:
        """The numbers of the steps."""
        return self._best.numbers if self._best else []

    def timing(self) -> Timing | None:
        """The time of a step, if enough lines arrived one by one."""
        times = self._best.times if self._best else []
        return Timing.of(times) if len(times) >= _LEAST_TIMES else None

    @property
    def _best(self) -> _Series | None:
        """The series that ended the trial, or else the longest."""
        return self._enough or max(self._series.values(), key=lambda series: len(series.numbers), default=None)
