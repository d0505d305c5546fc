"""From files, `key=value` arguments and flags to a request. A flag wins over `key=value`, which wins over a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import click

from batchwright.core.batch.request import READERS, BatchRequest, read_request
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import unknown_key

from .files import read_keys, scalar
from .naming import Verb, remember
from .options import FILES
from .paste import unpaste

# The sections of batchwright.yaml and their fields; a verb takes those it reads.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "batch": (
        "global_batch_size", "global_batch_size_tokens", "sequence_length", "micro_batch_size", "accumulation_steps",
        "max_micro_batch_size", "round", "allow_ragged", "samples_per_second", "step_seconds",
    ),
    "world": (
        "data_parallel_size", "devices", "nodes", "devices_per_node", "tensor_parallel", "pipeline_parallel",
        "context_parallel", "expert_parallel", "expert_tensor_parallel", "pipeline_schedule", "pipeline_style",
        "pipeline_microbatches", "pipeline_group", "virtual_stages", "delayed_forwarding",
    ),
    "loading": ("hosts", "expansion_factor", "loading_hosts", "stored_hosts", "equal_rows", "read_ahead"),
    "ramp": (
        "linear", "per_device", "thresholds", "thresholds_tokens", "thresholds_steps", "doubling", "recipe",
        "sequence_lengths", "allow_falling", "samples", "tokens", "epochs", "dataset_size", "last_step", "start_sample",
        "lr", "lr_scaling", "optimizer", "lr_horizon_steps", "lr_horizon_samples",
    ),
    "nodes": (
        "node_policy", "micro_step_seconds", "sync_seconds", "stage_seconds", "restart_seconds", "deadline_hours",
        "node_hours_budget", "stop_every_stage",
    ),
    "launch": (), "task": (),
}  # fmt: skip
_NATIVE = {f"{section}.{name}": name for section, names in SECTIONS.items() for name in names}
NOT_READ = "Ignored because batchwright does not know it, though it may concern the batch"


class PasteCommand(Verb):
    """A verb that also accepts the flags of another tool, or its whole command line.

    `kind` says which frameworks it reads; with `everything`, a pasted line is read whole, but for the flags `inside` it.
    """

    kind: str | None = "train"
    everything = False
    inside: Collection[str] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes the line
            return super().parse_args(ctx, args)
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        own = {flag: not p.is_flag for p in options for flag in (*p.opts, *p.secondary_opts)}
        arguments, left = unpaste(
            args,
            own,
            lambda key: f"--{key.replace('_', '-')}" in own,
            kind=self.kind,
            everything=self.everything,
            inside=self.inside,
        )
        ctx.meta["left_out"] = left
        return super().parse_args(ctx, arguments)


@dataclass(frozen=True)
class Gathered:
    """Values by field name, where each was given, and notes on how they were read."""

    values: dict[str, Any]
    origins: dict[str, str]
    notes: tuple[str, ...]

    def request(self) -> BatchRequest:
        """The fields that describe a batch and its world."""
        values = {name: value for name, value in self.values.items() if name in READERS}
        return read_request(values, origins=self.origins, notes=self.notes)


def gather(
    arguments: tuple[str, ...], flags: Mapping[str, Any], left_out: tuple[str, ...] = (), own: Collection[str] = READERS
) -> Gathered:
    """The values of files, `key=value` arguments and flags, for the fields that a verb reads (`own`)."""
    typed = {name: value for name, value in flags.items() if value is not None and value is not False}
    if not arguments and not left_out:
        # Flags alone need no translation.
        return Gathered(typed, {name: f"--{name.replace('_', '-')}" for name in typed}, ())
    from batchwright import dialects

    entries: list[tuple[str, dialects.Given]] = []
    lenient = bool(left_out)
    wrong: list[Violation] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not os.path.exists(argument):
            key = key.strip()
            lenient = lenient or dialects.is_foreign(key)
            in_section = "." in key and key.split(".")[0] in SECTIONS
            if in_section and key not in _NATIVE and not dialects.is_foreign(key):
                wrong.append(unknown_key(key, value, _NATIVE))
                continue
            if not value.strip() and (_native(key) in own or dialects.is_foreign(key)):
                wrong.append(Violation(f"{key[:60]}= has no value. Write {key[:60]}=N, or leave it out.", key[:60]))
                continue
            if value.strip().lower() in ("null", "none", "~", ""):
                continue
            entries.append((_native(key), dialects.Given(value.strip().strip("'\""), f"{key}={value}", 1)))
        else:
            keys = read_keys(argument)
            ours = all(name.split(".")[0] in SECTIONS for name in keys)
            lenient = lenient or not ours
            for name, item in keys.items():
                if item in (None, "auto") or (ours and not SECTIONS[name.split(".")[0]]):
                    continue
                if ours and name not in _NATIVE:
                    wrong.append(unknown_key(name, scalar(item), _NATIVE, f" of {argument}"))
                else:
                    entries.append((_native(name), dialects.Given(scalar(item), f"{argument}: {name}", 0)))
    raise_violations(ConfigError, wrong + dialects.misspelt_flags(left_out, own, [key for key, _ in entries]))
    read: set[str] = set()
    unread: list[str] = []
    for argument in left_out:
        for name, item in _pasted(argument).items():
            if dialects.is_foreign(name) or name in _NATIVE:
                read.add(argument)
                entries.append((_native(name), dialects.Given(scalar(item), f"{argument}: {name}", 0)))
            elif dialects.is_about_a_batch(name):
                unread.append(name)
    entries += [(name, dialects.Given(value, f"--{name.replace('_', '-')}", 2)) for name, value in typed.items()]
    resolved = dialects.resolve(entries, own={*own, *_NATIVE.values()}, lenient=lenient)
    other, _ = dialects.detect([key for key, _ in entries], left_out)
    notes = [*resolved.notes]
    if other is not None and other.kind == "rl":
        hint = f"These are keys of {other.title}, which counts {other.unit}: batchwright rl reads them."
        if not any(given.level < 2 for given in resolved.fields.values()):
            raise ConfigError(hint, field="file")
        notes.append(hint)
    rest, doubtful = _apart(tuple(argument for argument in left_out if argument not in read), dialects.is_about_a_batch)
    doubtful += [*filter(dialects.is_about_a_batch, resolved.ignored), *unread]
    if plain := [argument for argument in (" ".join(rest), *resolved.ignored) if argument and argument not in doubtful]:
        notes.append("Ignored because it does not concern the batch: " + _brief(plain))
    if doubtful:
        notes.append(f"{NOT_READ}: " + _brief(doubtful))
    # A file may contain keys of other verbs. A key on the command line is expected to count.
    others = sorted(g.origin for name, g in resolved.fields.items() if name not in own and g.level > 0)
    if others:
        notes.append(f"Not read by this verb: {', '.join(others)}. See batchwright --help.")
    fields = {name: given for name, given in resolved.fields.items() if name in own}
    values = {name: given.value for name, given in fields.items()}
    origins = {name: given.origin for name, given in fields.items()}
    remember(values, origins)
    return Gathered(values, origins, tuple(notes))


def _pasted(argument: str) -> Mapping[str, Any]:
    """The keys of a configuration file that a pasted line names; none if it names no file."""
    path = argument.rpartition("=")[2]
    if not path.endswith(FILES) or not os.path.isfile(path):
        return {}
    try:
        return {name: item for name, item in read_keys(path).items() if item not in (None, "auto")}
    except ConfigError:
        # The file holds something else, such as data.
        return {}


def _apart(arguments: tuple[str, ...], doubtful: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Arguments of a pasted line that do not concern the batch, and flags that may, each with its value."""
    rest: list[str] = []
    found: list[str] = []
    into = rest
    for argument in arguments:
        if argument.startswith("-"):
            into = found if argument.startswith("--") and doubtful(argument.partition("=")[0]) else rest
        elif into is found:
            found[-1] += f" {argument}"
            into = rest
            continue
        into.append(argument)
    return rest, found


def _native(key: str) -> str:
    return _NATIVE.get(key, key)


def _brief(arguments: list[str]) -> str:
    text = ", ".join(argument for argument in arguments if argument)
    return text if len(text) <= 200 else text[:200] + " …"
