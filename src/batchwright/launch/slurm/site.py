"""What a cluster wants to hear: partition, account, time and the rest, from `launch.slurm` and a site's own file.

A run keeps its own copy, with a random token that marks its jobs, in RUN/slurm.json (owner only).
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import ConfigError, EnvironmentFault, Violation, raise_violations
from batchwright.core.fields import choice, unknown_key
from batchwright.core.numbers import count, positive
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.rundir.files import find_json

READ_SECONDS = 5.0  # for a file that is there and cannot be read
LAUNCHERS = ("srun", "torchrun")
LISTS = ("prologue", "sbatch", "srun", "container_mounts")  # of a site and of a run, one after the other
# Ours: the chain would not hold if a site's line changed them.
_OWN = (
    "nodes", "N", "ntasks", "n", "ntasks-per-node", "job-name", "J", "output", "o", "error", "e", "dependency", "d",
    "requeue", "no-requeue", "signal", "array", "a", "wait", "W", "parsable", "test-only", "comment", "chdir", "D",
    "kill-on-invalid-dep", "wrap", "begin", "b", "hold", "H", "clusters", "M", "tasks-per-node",
)  # fmt: skip
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


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
    container: str | tuple[str, ...] | None = None  # an image for pyxis (enroot), or the words that start a container
    container_mounts: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()  # shell commands before the ranks, each a whole command
    sbatch: tuple[str, ...] = ()  # any further lines, with or without #SBATCH
    srun: tuple[str, ...] = ()  # any further words for srun
    launcher: str = "srun"  # direct ranks; torchrun: one per node
    python: str | None = None  # the ranks' interpreter where it is another, as inside a container
    signal_seconds: int = 120  # before the time limit: time for a checkpoint
    nodes_submit: bool = True  # False: compute nodes may not submit, so that a chain is queued at its start
    spares: int = 2  # jobs queued behind each launch of such a chain, for time limits and failures
    elastic: bool = False  # take fewer nodes where the wanted number would have to be waited for
    elastic_seconds: float = 600.0  # that much waiting is fine
    poll_seconds: float = 5.0  # between two questions to the controller

    def lines(self) -> tuple[str, ...]:
        """The options of sbatch that a site's values become, quoted as sbatch reads them."""
        named = {"partition": self.partition, "account": self.account, "qos": self.qos, "time": self.time,
                 "gres": self.gres, "constraint": self.constraint}  # fmt: skip
        return (*(f"--{k}={quote(v)}" for k, v in named.items() if v is not None), *self.sbatch)


def quote(value: str) -> str:
    """A value on an #SBATCH line; Slurm has quotes of its own there, and no shell ever sees the line.

    >>> quote("plain-1.0"), quote('two words "here"')
    ('plain-1.0', '"two words \\\\"here\\\\""')
    """
    if re.fullmatch(r"[\w@%+=:,./&|!*\[\]()^-]+", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(value: Any, name: str) -> str:
    if not isinstance(value, (str, int, float)) or isinstance(value, bool) or _CONTROL.search(str(value)):
        shown = repr(value)[:60]
        raise ConfigError(f"slurm.{name}={shown} has to be one line of text.", field=name, given=shown)
    return str(value)


def _time(value: Any, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        # YAML reads 24:00:00 without quotes as 86400, and Slurm reads a bare number as minutes.
        clock = f"{value // 3600:02d}:{value // 60 % 60:02d}:{value % 60:02d}"
        raise ConfigError(
            f"slurm.time={value} may be {value} minutes (Slurm) or {clock} (YAML reads 24:00:00 as a number): put it "
            f"in quotes. Nearest: '{value}' or '{clock}'.",
            field=name,
            given=value,
            nearest=(str(value), clock),
        )
    text = _text(value, name)
    if not _TIME.fullmatch(text):
        message = (
            f"slurm.time={text[:40]!r} is not a time of Slurm: minutes, minutes:seconds, hours:minutes:seconds or "
            "days-hours[:minutes[:seconds]]."
        )
        raise ConfigError(message, field=name, given=text[:40], nearest=("24:00:00",))
    return text


def seconds_of(time: str) -> int | None:
    """A time of Slurm in seconds; None where there is no limit.

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
    return tuple(_text(v, name) for v in ([value] if isinstance(value, str) else value))


def _commands(value: Any, name: str) -> tuple[str, ...]:
    """Shell commands: these may well have several lines, but no NUL."""
    found = tuple(str(v) for v in ([value] if isinstance(value, str) else value))
    if any("\0" in v for v in found):
        raise ConfigError(f"slurm.{name} has a NUL character.", field=name)
    return found


def _lines(value: Any, name: str) -> tuple[str, ...]:
    lines, wrong = [], list[Violation]()
    for text in _texts(value, name):
        line = text.removeprefix("#SBATCH").strip()
        if not re.match(r"--?[A-Za-z]", line):
            message = f"slurm.sbatch: {line[:60]!r} is not an option of sbatch. Write --name=value."
            wrong.append(Violation(message, name, line[:60]))
        elif any(_is_own(word) for word in line.split()):  # sbatch reads several options on a line
            message = f"slurm.sbatch: {line[:60]!r} is batchwright's own to say: the chain depends on it. Leave it out."
            wrong.append(Violation(message, name, line[:60]))
        lines.append(line)
    raise_violations(ConfigError, wrong)
    return tuple(lines)


def _is_own(word: str) -> bool:
    """Whether a word is an option of ours; sbatch takes the beginning of a long one for the whole.

    >>> [_is_own(word) for word in ("-N3", "--nodes=3", "--dep=after:1", "--exclusive", "--nodelist=a", "3")]
    [True, True, True, False, False, False]
    """
    if word.startswith("--"):
        return any(own.startswith(word[2:].partition("=")[0]) for own in _OWN)
    return word.startswith("-") and word[1:2] in _OWN


def _container(value: Any, name: str) -> str | tuple[str, ...]:
    return _text(value, name) if isinstance(value, str) else _texts(value, name)


def _yes(value: Any, name: str) -> bool:
    word = str(value).strip().lower()
    if word not in ("true", "false", "yes", "no", "1", "0"):
        raise ConfigError(
            f"slurm.{name}={word[:40]!r} is neither true nor false.", field=name, nearest=("true", "false")
        )
    return word in ("true", "yes", "1")


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "name": lambda value, name: str(value),  # any text: the script keeps what a job's name can hold
    **dict.fromkeys(("partition", "account", "qos", "gres", "constraint", "python"), _text),
    "time": _time,
    "container": _container,
    "container_mounts": _texts,
    "prologue": _commands,
    "sbatch": _lines,
    "srun": _texts,
    "launcher": choice(*LAUNCHERS),
    "signal_seconds": partial(count, most=65_535),  # Slurm's own limit
    "nodes_submit": _yes,
    "spares": partial(count, least=0, most=1000),
    "elastic": _yes,
    "elastic_seconds": lambda value, name: 0.0 if str(value).strip() in ("0", "0.0") else positive(value, name),
    "poll_seconds": positive,
}


def read_site(*layers: Mapping[str, Any]) -> Site:
    """A site from raw values, the later layers on top; lists of lines add up, as a site and a run both have some.

    >>> read_site({"partition": "gpu", "sbatch": ["--exclusive"]}, {"sbatch": "--mem=0"}).sbatch
    ('--exclusive', '--mem=0')
    """
    wrong: list[Violation] = []
    read: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if value is None:
                continue
            if key not in _READERS:
                wrong.append(
                    unknown_key(f"launch.slurm.{key}", str(value)[:40], [f"launch.slurm.{n}" for n in _READERS])
                )
                continue
            try:
                found = _READERS[key](value, key)
            except ConfigError as error:
                wrong.extend(error.violations)
                continue
            read[key] = (*read.get(key, ()), *found) if key in LISTS else found
    site = Site(**read)
    limit = seconds_of(site.time) if site.time is not None else None
    if not wrong and limit is not None and limit <= site.signal_seconds:
        message = (
            f"slurm.time={site.time} is {limit} s, and signal_seconds={site.signal_seconds} asks every job to stop that "
            "long before its end: none would come to a step."
        )
        wrong.append(Violation(message, "signal_seconds", site.signal_seconds, (max(1, limit // 4),)))
    raise_violations(ConfigError, wrong)
    return site


def layers(section: Any, site: Mapping[str, Any] | None, elastic: bool = False) -> dict[str, Any]:
    """The raw settings of a run: the site's file below, `launch.slurm` above, the flag on top. `read_site` reads them.

    >>> layers({"sbatch": "--mem=0"}, {"partition": "gpu", "sbatch": ["--exclusive"]})
    {'partition': 'gpu', 'sbatch': ['--exclusive', '--mem=0']}
    """
    if not isinstance(section or {}, Mapping) or not isinstance(site or {}, Mapping):
        raise ConfigError("launch.slurm and a site file have to be mappings.", field="slurm")
    made: dict[str, Any] = dict(site or {})
    for key, value in (section or {}).items():
        parts = [made[key], value] if key in LISTS and key in made else []
        made[key] = [x for part in parts for x in ([part] if isinstance(part, str) else part)] if parts else value
    return {**made, "elastic": True} if elastic else made


@dataclass(frozen=True)
class SlurmRun:
    """RUN/slurm.json: the site, the mark of this run's jobs, and whether they chain themselves."""

    site: Site
    token: str
    detached: bool = False
    after: int = 0  # the last launch before a person began this chain: what failed before is no longer held against it

    @staticmethod
    def path(directory: RunDirectory) -> Path:
        """Where it is kept."""
        return directory.path / "slurm.json"

    @classmethod
    def load(cls, directory: RunDirectory) -> SlurmRun:
        """That of a run; a new one with nothing in it where there is none."""
        deadline = time.monotonic() + READ_SECONDS
        while not isinstance(document := find_json(path := cls.path(directory)), Mapping) and path.exists():
            # A file server's moment of weakness passes; a new token would lose the jobs.
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"{path} cannot be read; it marks the jobs of this run. Try again, or mend it.",
                    field="dir",
                    given=str(directory.path),
                )
            time.sleep(0.1)
        if isinstance(document, Mapping):
            made = codec.decode(cls, document)
            found = document["site"].get("container")
            return replace(made, site=replace(made.site, container=tuple(found))) if isinstance(found, list) else made
        return cls(Site(), secrets.token_hex(6))

    def save(self, directory: RunDirectory) -> SlurmRun:
        """Write it; the same run goes on with the same token."""
        write_json(self.path(directory), self)
        return self


def remember(directory: RunDirectory, site: Site | None, *, detached: bool) -> SlurmRun:
    """The run's record, with a new site where one is given."""
    known = SlurmRun.load(directory)
    return replace(known, site=site or known.site, detached=detached).save(directory)


def job_name(site: Site, directory: RunDirectory) -> str:
    """A name that squeue can show: control characters, which no job name survives, become spaces."""
    return (_CONTROL.sub(" ", site.name or f"batchwright {directory.path.name}").strip() or "batchwright")[:128]
