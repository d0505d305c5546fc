"""From files, `key=value` arguments and flags to a request. A flag wins over `key=value`, which wins over a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from batchwright.core.batch.request import READERS, BatchRequest, read_request
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import unknown_key

from .files import names_file, not_read, read_arguments, without_deleted, words_of
from .naming import Verb, remember
from .paste import unpaste

if TYPE_CHECKING:
    from batchwright.dialects.record import Dialect, Given

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

    `kind` says which frameworks it reads. A pasted line is read whole, but for the verb's own flags `inside` it (None: all).
    """

    kind: str | None = "train"
    inside: Collection[str] | None = None

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
            everything=True,
            inside=own if self.inside is None else self.inside,
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
    arguments: tuple[str, ...],
    flags: Mapping[str, Any],
    left_out: tuple[str, ...] = (),
    own: Collection[str] = READERS,
    *,
    defaults: bool = True,
) -> Gathered:
    """The values of files, `key=value` arguments and flags, for the fields that a verb reads (`own`).

    A configuration of another framework has that framework's `defaults`, unless the caller chooses the micro batch.
    """
    typed = {name: value for name, value in flags.items() if value is not None and value is not False}
    if not arguments and not left_out:
        # Flags alone need no translation.
        return Gathered(typed, {name: f"--{name.replace('_', '-')}" for name in typed}, ())
    from batchwright import dialects

    entries: list[tuple[str, dialects.Given]] = []
    lenient = bool(left_out)
    wrong: list[Violation] = []
    lenient = lenient or any(argument.startswith("~") for argument in arguments)
    read: set[str] = set()  # arguments and keys that name a file
    for argument, is_key, found in read_arguments(arguments, left_out):
        if is_key:
            key, _, value = argument.partition("=")
            key = key.strip().lstrip("+")
            foreign = dialects.is_foreign(key)
            lenient = lenient or foreign or len(found) > 1
            read |= {key} if len(found) > 1 else set()
            if "." in key and key.split(".")[0] in SECTIONS and key not in _NATIVE and not foreign:
                wrong.append(unknown_key(key, value, _NATIVE))
                continue
            if not value.strip() and (_native(key) in own or foreign):
                wrong.append(Violation(f"{key[:60]}= has no value. Write {key[:60]}=N, or leave it out.", key[:60]))
                continue
        elif argument in left_out:
            read.add(argument)
        elif all(name.split(".")[0] in SECTIONS for name, _ in found):
            wrong += [
                unknown_key(name, given.value, _NATIVE, f" of {argument}")
                for name, given in found
                if SECTIONS[name.split(".")[0]] and name not in _NATIVE
            ]
            found = [(name, given) for name, given in found if name in _NATIVE]
        else:
            lenient = True
        entries += [(_native(name), given) for name, given in found]
    raise_violations(ConfigError, wrong)
    entries = without_deleted(entries, (*arguments, *left_out))
    read |= {key for key, one in entries if names_file(key, one)}
    unread = not_read(arguments, left_out, entries)
    other, _ = dialects.detect([key for key, _ in entries], (*left_out, *words_of(arguments)))
    typed_as = {key: given.origin for key, given in entries if given.level == 1}
    entries, others = without_others(entries, {*own, *_NATIVE.values()}, left_out, other)
    entries += [(name, dialects.Given(value, f"--{name.replace('_', '-')}", 2)) for name, value in typed.items()]
    resolved = dialects.resolve(
        entries,
        own={*own, *_NATIVE.values()},
        lenient=lenient,
        framework=other if other is not None and other.kind == "train" else None,
        defaults=defaults,
    )
    ignored = {key: typed_as.get(key, key) for key in (*others, *resolved.ignored) if key not in read}
    notes = [*resolved.notes, *unread]
    if other is not None and other.kind == "rl":
        hint = f"These are keys of {other.title}, which counts {other.unit}: batchwright rl reads them."
        if not any(given.level < 2 for given in resolved.fields.values()):
            raise ConfigError(hint, field="file")
        notes.append(hint)
    rest = " ".join(argument for argument in left_out if argument not in read)
    doubtful = [shown for key, shown in ignored.items() if dialects.is_about_a_batch(key)]
    if plain := [argument for argument in (rest, *ignored.values()) if argument and argument not in doubtful]:
        notes.append("Ignored because it does not concern the batch: " + _brief(plain))
    if doubtful:
        notes.append(f"{NOT_READ}: " + _brief(doubtful))
    # A file may contain keys of other verbs. A key on the command line is expected to count.
    others = sorted(g.origin for name, g in resolved.fields.items() if name not in own and g.level > 0)
    if others:
        notes.append(f"Not read by this verb: {', '.join(others)}. See batchwright --help.")
    fields = {name: given for name, given in resolved.fields.items() if name in own}
    if grown := _last_stage(resolved.fields, own):
        fields["global_batch_size"] = grown
        notes.append(f"The batch grows: {grown.value} is its last stage. batchwright ramp shows all.")
    values = {name: given.value for name, given in fields.items()}
    origins = {name: given.origin for name, given in fields.items()}
    remember(values, origins)
    return Gathered(values, origins, tuple(notes))


def _last_stage(fields: Mapping[str, Given], own: Collection[str]) -> Given | None:
    """The batch at the end of a ramp, for a verb that reads no ramps, where only its stages say how large it is."""
    names = ("thresholds", "thresholds_tokens", "thresholds_steps", "doubling")
    rule = next((name for name in names if name in fields and name not in own), None)
    if rule is None or {"global_batch_size", "global_batch_size_tokens"} & set(fields):
        return None
    from batchwright.core.ramp.request import RAMP_READERS, compile_schedule, read_ramp

    values = {name: given.value for name, given in fields.items()}
    request = read_request({name: value for name, value in values.items() if name in READERS})
    wanted = {name: values[name] for name in (rule, "allow_falling") if name in values and name in RAMP_READERS}
    schedule, _ = compile_schedule(request, read_ramp(wanted), None)
    return replace(fields[rule], value=schedule.segments[-1].global_batch_size)


def without_others(
    entries: Iterable[tuple[str, Given]],
    own: Collection[str],
    left_out: tuple[str, ...],
    framework: Dialect | None,
    kind: str = "train",
) -> tuple[list[tuple[str, Given]], list[str]]:
    """The entries without those of a pasted line that are no keys of ours or of its framework, and the names of these.

    A flag that looks like a misspelt key about the batch is an error.
    """
    from batchwright import dialects

    kept = list(entries)
    if not left_out:
        return kept, []
    every = dialects.dialects()
    inside = every if framework is None else [framework, every[-1], *(d for d in every if d.name in framework.beside)]
    known = {key for key, _ in kept if key in own or any(key in d.known for d in inside)}
    flags = {key for key, given in kept if given.level == 1 and key not in known}
    foreign = {key for key in flags if any(key in d.known for d in every)}
    others = [key for key, _ in kept if key in flags and (key in foreign or "." not in key)]
    plain = [key for key in others if key not in foreign]
    raise_violations(ConfigError, dialects.misspelt_flags(plain, own, [key for key, _ in kept], kind))
    return [one for one in kept if one[0] not in others], others


def _native(key: str) -> str:
    return _NATIVE.get(key, key)


def _brief(arguments: list[str]) -> str:
    text = ", ".join(argument for argument in arguments if argument)
    return text if len(text) <= 200 else text[:200] + " …"
