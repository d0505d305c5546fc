"""A command with places to fill in: each word is filled on its own and never goes through a shell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from batchwright.core.errors import ConfigError, Violation, raise_violations

# What a launch of one stage knows; a launch of several has no one batch.
BATCH_PLACES = ("global_batch_size", "micro_batch_size", "accumulation_steps")
PLACES = (
    *BATCH_PLACES, "nodes", "devices_per_node", "devices", "data_parallel_size", "start_sample", "end_sample",
    "first_step", "end_step", "samples", "steps", "stage", "launch", "run_dir", "status_file",
)  # fmt: skip
_PLACE = re.compile(r"\{\{|\}\}|\{([a-z][a-z_]*)\}")


def places(words: Iterable[str]) -> set[str]:
    """The places that a command has.

    >>> sorted(places(["train", "--batch={global_batch_size}", "--until", "{end_sample}"]))
    ['end_sample', 'global_batch_size']
    """
    return {found[1] for word in words for found in _PLACE.finditer(word) if found[1]}


def fill(words: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Fill every place; `{{name}}` stays as `{name}`, and braces around anything else are left alone.

    >>> fill(["--batch={global_batch_size}", '{"a": 1}', "{{nodes}}"], {"global_batch_size": 64})
    ('--batch=64', '{"a": 1}', '{nodes}')
    """
    return tuple(_PLACE.sub(lambda m: str(values[m[1]]) if m[1] else m[0][0], word) for word in words)


def check(words: Sequence[str], field: str = "command") -> None:
    """Refuse places that nobody fills."""
    wrong: list[Violation] = []
    for name in sorted(places(words) - set(PLACES)):
        near = tuple(f"{{{n}}}" for n in get_close_matches(name, PLACES, n=2))
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(PLACES)}."
        message = (
            f"the {field} has a place {{{name}}} that nothing fills. {hint} Write {{{{{name}}}}} to keep the braces."
        )
        wrong.append(Violation(message, field, f"{{{name}}}", near))
    raise_violations(ConfigError, wrong)
