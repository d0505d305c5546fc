"""From the words of a command line to a request: file < `key=value` < flag, and each value remembers its source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from batchwright import dialects
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.request import READERS, Request, read_request, unknown_key
from batchwright.dialects.paste import unpaste

# The sections of batchwright.yaml, and which fields live in those that a plan reads.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "batch": (
        "global_batch_size", "global_batch_size_tokens", "sequence_length", "micro_batch_size", "accumulation_steps",
        "max_micro_batch_size", "round", "allow_ragged", "samples_per_second", "step_seconds",
    ),
    "world": (
        "data_parallel_size", "devices", "nodes", "devices_per_node", "tensor_parallel", "pipeline_parallel",
        "context_parallel", "expert_parallel", "pipeline_schedule", "pipeline_style", "pipeline_microbatches",
        "pipeline_group", "virtual_stages", "delayed_forwarding",
    ),
    "loading": ("hosts", "expansion_factor", "loading_hosts", "stored_hosts", "equal_rows"),
    "ramp": (), "nodes": (), "launch": (), "task": (),
}  # fmt: skip
_NATIVE = {f"{section}.{name}": name for section, names in SECTIONS.items() for name in names}
LARGEST_FILE = 2**22


class PasteCommand(click.Command):
    """A verb that also takes another tool's flags, or its whole command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {flag for p in self.get_params(ctx) for flag in (*p.opts, *p.secondary_opts)}
        words, left = unpaste(args, own, lambda key: key in READERS)
        ctx.meta["left_out"] = left
        return super().parse_args(ctx, words)


def gather(words: tuple[str, ...], flags: Mapping[str, Any], left_out: tuple[str, ...] = ()) -> Request:
    """The request that files, overrides and flags make together."""
    entries: list[tuple[str, dialects.Given]] = []
    lenient = bool(left_out)
    wrong: list[Violation] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not os.path.exists(word):
            key = key.strip()
            lenient = lenient or dialects.is_foreign(key)
            if value.strip().lower() in ("null", "none", "~", ""):
                continue
            entries.append((_native(key), dialects.Given(value.strip().strip("'\""), f"{key}={value}", 1)))
        else:
            tree = read_file(word)
            ours = all(str(section) in SECTIONS for section in tree)
            for name, item in dialects.flatten(tree).items():
                if item is None or (ours and not SECTIONS[name.split(".")[0]]):
                    continue
                if ours and name not in _NATIVE:
                    wrong.append(unknown_key(name, item, _NATIVE, f" of {word}"))
                    continue
                lenient = lenient or not ours
                entries.append((_native(name), dialects.Given(item, f"{word}: {name}", 0)))
    raise_violations(ConfigError, wrong)
    entries += [
        (name, dialects.Given(value, f"--{name.replace('_', '-')}", 2))
        for name, value in flags.items()
        if value is not None and value is not False
    ]
    resolved = dialects.resolve(entries, lenient=lenient)
    notes = list(resolved.notes)
    if left_out or resolved.ignored:
        notes.append("Left out, as it does not concern the batch: " + _brief([" ".join(left_out), *resolved.ignored]))
    return read_request(
        {name: given.value for name, given in resolved.fields.items()},
        origins={name: given.origin for name, given in resolved.fields.items()},
        notes=notes,
    )


def read_file(path: str) -> Mapping[str, Any]:
    """A YAML, JSON or TOML file as a mapping; anything else about it is an error that names it."""
    shown = path[:120]
    try:
        if not os.path.isfile(path):
            raise OSError("there is no such file" if not os.path.exists(path) else "it is not a regular file")
        if os.path.getsize(path) > LARGEST_FILE:
            raise OSError(f"it is larger than {LARGEST_FILE >> 20} MiB")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{shown!r} is neither key=value nor a file that can be read: {error}.", field="file", given=shown
        ) from None
    tree = _parse(path, text)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{shown} holds no keys: the top level has to be a mapping.", field="file", given=shown)
    _refuse_deep(path, tree)
    return tree


def _parse(path: str, text: str) -> Any:
    kind = os.path.splitext(path)[1][1:]
    try:
        if kind == "json":
            import json

            return json.loads(text)
        if kind == "toml":
            import tomllib

            return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {kind.upper()}: {error}.", field="file", given=path) from None
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(f"{path} is not plain YAML: {problem}{where}.", field="file", given=path) from None


def _refuse_deep(path: str, tree: Mapping[Any, Any]) -> None:
    """Anchors can make a small file endless: bound depth and size before anything walks it."""
    level: list[Mapping[Any, Any]] = [tree]
    for _ in range(16):
        level = [v for m in level for v in m.values() if isinstance(v, Mapping)]
        if not level:
            return
        if len(level) > 10_000:
            break
    raise ConfigError(f"{path} is nested too deeply or too widely for a configuration.", field="file", given=path)


def _native(key: str) -> str:
    return _NATIVE.get(key, key)


def _brief(words: list[str]) -> str:
    text = ", ".join(word for word in words if word)
    return text if len(text) <= 200 else text[:200] + " …"
