"""The settings of a cluster: partition, account, time and more, from `launch.slurm` and a site file.

A run keeps its own copy in RUN/slurm.json (owner only), with a random token that is part of its jobs' comments.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from batchwright.core import codec
from batchwright.core.errors import ConfigError, EnvironmentFault, Violation, raise_violations
from batchwright.core.fields import Readers, choice, read_fields, seconds, switch
from batchwright.core.numbers import count, positive
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.rundir.files import find_object

READ_SECONDS = 5.0  # for a file that exists but cannot be read
LAUNCHERS = ("srun", "torchrun")
LISTS = ("prologue", "sbatch", "srun", "container_mounts")  # the run's entries follow those of the site
# batchwright sets these itself: a chain needs them as they are.
_OWN = frozenset(
    "nodes N ntasks n ntasks-per-node tasks-per-node job-name J output o error e dependency d requeue no-requeue signal "
    "array a wait W parsable test-only comment chdir D kill-on-invalid-dep wrap begin b hold H clusters M".split()
)
_TIME = re.compile(r"(\d{1,9}-)?\d{1,9}(:\d{1,9}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE | re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_OPTIONS = ("partition", "account", "qos", "time", "gres", "constraint")  # of sbatch, by the same names


@dataclass(frozen=True)
class Site:
    """How jobs are submitted; every field is a key of `launch.slurm` and of a site file.

    >>> Site(partition="gpu", time="24:00:00").lines()
    ('--partition=gpu', '--time=24:00:00')
    """

    name: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gres: str | None = None
    constraint: str | None = None
    container: str | tuple[str, ...] | None = None  # an image for pyxis (enroot), or a command that starts a container
    container_mounts: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()  # shell commands before the ranks
    sbatch: tuple[str, ...] = ()  # more options of sbatch, with or without #SBATCH
    srun: tuple[str, ...] = ()  # more options of srun
    launcher: str = "srun"  # srun: every rank is a task; torchrun: one torchrun per node
    python: str | None = None  # the ranks' interpreter, if it is another one, as inside a container
    signal_seconds: int = 120  # before the time limit: time for a checkpoint
    nodes_submit: bool = True  # False: compute nodes may not submit, so the whole chain is queued at the start
    spares: int = 2  # successors behind each launch of a chain that is queued at the start
    elastic: bool = False  # take fewer nodes if the planned number is not free soon
    elastic_seconds: float = 600.0  # "soon"
    poll_seconds: float = 5.0  # between two calls of squeue

    def lines(self) -> tuple[str, ...]:
        """The options of sbatch for these settings, quoted as sbatch reads them."""
        named = {name: getattr(self, name) for name in _OPTIONS}
        return (*(f"--{k}={quote(v)}" for k, v in named.items() if v is not None), *self.sbatch)


def quote(value: str) -> str:
    """A value on an #SBATCH line: Slurm has its own quotes there, and no shell reads the line.

    >>> quote("plain-1.0"), quote('two words "here"')
    ('plain-1.0', '"two words \\\\"here\\\\""')
    """
    if re.fullmatch(r"[\w@%+=:,./&|!*\[\]()^-]+", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def can_be_passed(text: str) -> bool:
    """Whether a process can get this text: no NUL, and no half of a surrogate pair, which YAML can describe."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _text(value: Any, name: str) -> str:
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if not plain or _CONTROL.search(str(value)) or not can_be_passed(str(value)):
        shown = repr(value)[:60]
        raise ConfigError(f"slurm.{name}={shown} must be one line of text.", field=name, given=shown)
    return str(value)


def _time(value: Any, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        # YAML reads 24:00:00 without quotes as 86400, and Slurm reads a bare number as minutes.
        clock = f"{value // 3600:02d}:{value // 60 % 60:02d}:{value % 60:02d}"
        raise ConfigError(
            f"slurm.time={value} may be {value} minutes (Slurm) or {clock} (YAML reads 24:00:00 as a number): "
            f"write it in quotes. Nearest: '{value}' or '{clock}'.",
            field=name,
            given=value,
            nearest=(str(value), clock),
        )
    text = _text(value, name)
    if not _TIME.fullmatch(text):
        message = (
            f"slurm.time={text[:40]!r} is not a Slurm time: minutes, minutes:seconds, hours:minutes:seconds or "
            "days-hours[:minutes[:seconds]]."
        )
        raise ConfigError(message, field=name, given=text[:40], nearest=("24:00:00",))
    return text


def seconds_of(time: str) -> int | None:
    """A Slurm time in seconds; None if there is no limit.

    >>> seconds_of("90"), seconds_of("1:30"), seconds_of("24:00:00"), seconds_of("1-12"), seconds_of("INFINITE")
    (5400, 90, 86400, 129600, None)
    """
    if not time[0].isdigit():
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)  # a bare number is minutes, after days it is hours
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _texts(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_text(v, name) for v in _items(value, name))


def _items(value: Any, name: str) -> list[Any]:
    if not isinstance(value, (str, list, tuple)):
        shown = repr(value)[:60]
        raise ConfigError(f"slurm.{name}={shown} must be text or a list of texts.", field=name, given=shown)
    return _list(value)


def _commands(value: Any, name: str) -> tuple[str, ...]:
    """Shell commands: a command may have several lines, but no NUL."""
    found = _items(value, name)
    for command in found:
        if not isinstance(command, str) or not can_be_passed(command):
            shown = repr(command)[:60]
            message = f"slurm.{name}: {shown} must be text without NUL and without half a surrogate pair."
            raise ConfigError(message, field=name, given=shown)
    return tuple(found)


def _lines(value: Any, name: str) -> tuple[str, ...]:
    lines, wrong = list[str](), list[Violation]()
    for text in _texts(value, name):
        line = text.removeprefix("#SBATCH").strip()
        if not re.match(r"--?[A-Za-z]", line):
            message = f"slurm.sbatch: {line[:60]!r} is not an option of sbatch. Write --name=value."
            wrong.append(Violation(message, name, line[:60]))
        elif any(_is_own(word) for word in line.split()):  # sbatch reads several options per line
            message = f"slurm.sbatch: {line[:60]!r} is set by batchwright: a chain depends on it. Leave it out."
            wrong.append(Violation(message, name, line[:60]))
        lines.append(line)
    raise_violations(ConfigError, wrong)
    return tuple(lines)


def _is_own(word: str) -> bool:
    """Whether batchwright sets this option itself; sbatch accepts the first letters of a long option.

    >>> [_is_own(word) for word in ("-N3", "--nodes=3", "--dep=after:1", "--exclusive", "--nodelist=a", "3")]
    [True, True, True, False, False, False]
    """
    if word.startswith("--"):
        return any(own.startswith(word[2:].partition("=")[0]) for own in _OWN)
    return word.startswith("-") and word[1:2] in _OWN


def _container(value: Any, name: str) -> str | tuple[str, ...]:
    return _text(value, name) if isinstance(value, str) else _texts(value, name)


def _name(value: Any, name: str) -> str:
    """Any text: `job_name` replaces control characters."""
    return _text(_CONTROL.sub(" ", str(value)), name)


_READERS: Readers = {
    "name": _name,
    **dict.fromkeys((*_OPTIONS, "python"), _text),
    "time": _time,
    "container": _container,
    "container_mounts": _texts,
    "prologue": _commands,
    "sbatch": _lines,
    "srun": _texts,
    "launcher": choice(*LAUNCHERS),
    "signal_seconds": partial(count, most=65_535),  # Slurm's limit
    "nodes_submit": switch,
    "spares": partial(count, least=0, most=1000),
    "elastic": switch,
    "elastic_seconds": seconds,
    "poll_seconds": positive,
}


def read_site(given: Mapping[str, Any]) -> Site:
    """A site from raw values.

    >>> read_site({"partition": "gpu", "sbatch": "--mem=0"}).sbatch
    ('--mem=0',)
    """
    site = Site(**read_fields(given, _READERS, "launch.slurm."))
    limit = seconds_of(site.time) if site.time is not None else None
    if limit is not None and limit <= site.signal_seconds:
        raise ConfigError(
            f"slurm.time={site.time} is {limit} s, and signal_seconds={site.signal_seconds} asks every job to stop that "
            "long before its end: no job would take a step.",
            field="signal_seconds",
            given=site.signal_seconds,
            nearest=(max(1, limit // 4),),
        )
    return site


def layers(section: Any, site: Any, elastic: bool = False) -> dict[str, Any]:
    """The raw settings of a run: `launch.slurm` over the site file; entries of lists follow one another.

    >>> layers({"sbatch": "--mem=0"}, {"partition": "gpu", "sbatch": ["--exclusive"]})
    {'partition': 'gpu', 'sbatch': ['--exclusive', '--mem=0']}
    """
    made: dict[str, Any] = {}
    for layer in (site, section):
        if layer is None:
            continue
        if not isinstance(layer, Mapping):
            raise ConfigError("launch.slurm and a site file must be mappings.", field="slurm")
        for key, value in cast("Mapping[str, Any]", layer).items():
            made[key] = [*_list(made[key]), *_list(value)] if key in LISTS and key in made else value
    return {**made, "elastic": True} if elastic else made


def _list(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True)
class SlurmRun:
    """RUN/slurm.json: the site, the token of this run's jobs, and whether they are a chain."""

    site: Site
    token: str
    detached: bool = False
    after: int = 0  # the last launch before a person started this chain: failures before it no longer count

    @staticmethod
    def path(directory: RunDirectory) -> Path:
        """Where it is kept."""
        return directory.path / "slurm.json"

    @classmethod
    def load(cls, directory: RunDirectory) -> SlurmRun:
        """The record of a run; a new one if the run has none."""
        deadline, path = time.monotonic() + READ_SECONDS, cls.path(directory)
        while (document := find_object(path)) is None:
            if not path.exists():
                return cls(Site(), secrets.token_hex(6))
            # A transient read error passes; with a new token the run would lose its jobs.
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"{path} cannot be read; it holds the token of this run's jobs. Try again, or repair it.",
                    field="dir",
                    given=str(directory.path),
                )
            time.sleep(0.1)
        return codec.decode(cls, document)

    def save(self, directory: RunDirectory) -> SlurmRun:
        """Write it."""
        write_json(self.path(directory), self)
        return self


def remember(directory: RunDirectory, site: Site, *, detached: bool) -> SlurmRun:
    """The run's record with these settings; its token stays the same."""
    return replace(SlurmRun.load(directory), site=site, detached=detached).save(directory)


def job_name(site: Site, directory: RunDirectory) -> str:
    """The name for squeue; control characters, which a job name cannot hold, become spaces."""
    return (_CONTROL.sub(" ", site.name or f"batchwright {directory.path.name}").strip() or "batchwright")[:128]
