"""YAML, JSON and TOML as plain trees of limited size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchwright.core.errors import ConfigError
from batchwright.core.numbers import LONGEST

# A few times the largest file in use (MaxText's base.yml): a larger one would take more than a second.
LARGEST_FILE = 2**18
MOST_KEYS = 10_000
MOST_ITEMS = 20_000
MOST_NODES = 2 * MOST_KEYS + MOST_ITEMS  # of YAML: every key, value and item
DEEPEST = 100
_LEVELS = 16
_DIGITS = re.compile(r"[-+]?\d[\d_:.]*").fullmatch
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[{{,])[ \t]*\[{{0,2}}[ \t]*(?:{_PART}\.[ \t]*){{{_LEVELS}}}", re.MULTILINE).search


def read_file(path: str) -> Mapping[str, Any]:
    """A YAML, JSON or TOML file as a mapping; everything else is an error that names the file."""
    tree = parse(path, read_text(path))
    if not isinstance(tree, Mapping):
        shown = path[:120]
        raise ConfigError(f"{shown} contains no keys: the top level must be a mapping.", field="file", given=shown)
    return tree


def read_text(path: str) -> str:
    """The text of a file of limited size."""
    shown = path[:120]
    try:
        if not os.path.isfile(path):
            raise OSError("no such file" if not os.path.exists(path) else "it is not a regular file")
        if os.path.getsize(path) > LARGEST_FILE:
            raise OSError(f"it is larger than {LARGEST_FILE >> 10} KiB")
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{shown!r} is neither key=value nor a file that can be read: {error}.", field="file", given=shown
        ) from None


def parse(path: str, text: str) -> Any:
    """A text as a plain tree; the end of the path (`.json`, `.toml`) says what it is, and all else is YAML."""
    tree = _tree(path, text)
    refuse_deep(path, tree)
    return _plain(path, tree)


def _tree(path: str, text: str) -> Any:
    kind, text = os.path.splitext(path)[1][1:], text.removeprefix("\ufeff")  # a mark of the encoding
    try:
        if kind == "json":
            import json

            return json.loads(text, object_pairs_hook=_unique)
        if kind == "toml":
            import tomllib

            if _LONG_KEY(text):  # the parser's time grows with the square of the parts
                raise ValueError(f"it has a key of more than {_LEVELS} parts")
            return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {kind.upper()}: {error}.", field="file", given=path) from None
    import yaml

    from batchwright.dialects.editing import fast_loader

    class Loader(fast_loader()):
        """Plain YAML. A key that is given twice is an error, and so are merge keys (`<<`) that make too many pairs."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.flat: set[int] = set()
            self.merged = 0

        def flatten_mapping(self, node: Any) -> None:
            if id(node) in self.flat:
                return
            self.flat.add(id(node))
            _unique((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
            for one in (inner for value in merged for inner in (value.value if value.id == "sequence" else [value])):
                if isinstance(one, yaml.MappingNode):
                    self.flatten_mapping(one)
                    self.merged += len(one.value)
                if self.merged > MOST_KEYS:
                    raise ValueError(f"its merge keys (<<) make more than {MOST_KEYS:,} keys")
            super().flatten_mapping(node)

    try:
        _refuse_large(yaml.parse(text, fast_loader()))
        return yaml.load(text, Loader)
    except Exception as error:
        # A tag with a wrong value raises any kind of error: KeyError, IndexError and others.
        problem = next(iter(str(getattr(error, "problem", None) or error).splitlines()), type(error).__name__)
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(f"{path} is not plain YAML: {problem}{where}.", field="file", given=path) from None


def _refuse_large(events: Iterable[Any]) -> None:
    """Limit depth and size before a tree is made: in C, a deep one would end the process."""
    from yaml import CollectionEndEvent, CollectionStartEvent, NodeEvent, ScalarEvent

    depth = nodes = 0
    for event in events:
        nodes += isinstance(event, NodeEvent)
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if nodes > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES:,} keys, values and list items")
        if isinstance(event, ScalarEvent) and len(event.value) > 4 * LONGEST and _DIGITS(event.value):
            raise ValueError(f"it has a number of more than {LONGEST} digits")  # 1:1:1 counts in powers of 60


def refuse_deep(path: str, tree: Any) -> None:
    """Limit depth and size: with anchors, a small file can describe an endless tree."""
    level: list[Any] = [tree]
    keys = items = 0
    for _ in range(_LEVELS):
        keys += sum(len(one) for one in level if isinstance(one, Mapping))
        items += sum(len(one) for one in level if isinstance(one, list))
        if keys > MOST_KEYS or items > MOST_ITEMS:
            break
        inner = (one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, (Mapping, list)))
        level = [value for values in inner for value in values if isinstance(value, (Mapping, list))]
        if not level:
            return
    raise ConfigError(
        f"{path[:120]} has too many keys, list items or levels for a configuration file: at most {MOST_KEYS:,} keys and "
        f"{MOST_ITEMS:,} items in {_LEVELS} levels.",
        field="file",
        given=path[:120],
    )


def _plain(path: str, value: Any) -> Any:
    """A tree with dates as text, as a run keeps it in JSON; an error for sets, bytes and other values that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _plain(path, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(path, inner) for inner in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    problem = None
    if value is not None and not isinstance(value, (str, int, float)):
        problem = f"a {type(value).__name__}: only text, numbers, lists and mappings can be read"
    elif isinstance(value, int) and value.bit_length() > 4 * LONGEST:
        problem = f"a number of more than {LONGEST} digits"
    if problem:
        raise ConfigError(f"{path[:120]} contains {problem}.", field="file", given=path[:120])
    return value


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:60]!r} is given twice")
        found[key] = value
    return found


def read_value(key: str, value: str) -> Any:
    """The value of `launch.key=value` or `task.key=value`, which is YAML; text that is not YAML is taken as it is.

    >>> read_value("task.args.lr", "[1, 2]"), read_value("task.args.glob", "*.jsonl")
    ([1, 2], '*.jsonl')
    """
    try:
        read = _tree(key, value)
    except ConfigError as error:
        # An incomplete list is more likely a typing error than a text.
        if value.lstrip()[:1] in ("[", "{", "'", '"', "&", "!"):
            message = f"{error} To give it as text, put it in quotes: {key}='\"...\"'."
            raise ConfigError(message, field=key[:80], given=value[:80]) from None
        return value
    refuse_deep(key, read)
    return _plain(key, read)


def scalar(value: Any) -> Any:
    """A value that can be printed; otherwise its type, because a few lines of YAML can describe an endless list."""
    items = value if isinstance(value, list) else [value]
    parts = [
        part
        for item in items[:1001]
        for part in (item.values() if isinstance(item, Mapping) and len(item) < 10 else [item])
    ]
    if len(items) > 1000 or not all(isinstance(part, (int, float, str)) for part in parts):
        return f"a {type(value).__name__}"
    if any(isinstance(part, int) and part.bit_length() > 4 * LONGEST for part in parts):
        return f"a number of more than {LONGEST} digits"
    return value
