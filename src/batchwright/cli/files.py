"""Configuration files: YAML, JSON, TOML and lists of flags, as plain trees of limited size, and as dotted keys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchwright.core.errors import ConfigError
from batchwright.core.numbers import LONGEST

from .options import FILES

# A few times the largest file in use (MaxText's base.yml): a larger one would take more than a second.
LARGEST_FILE = 2**18
MOST_KEYS = 10_000
MOST_ITEMS = 100_000


def read_file(path: str) -> Mapping[str, Any]:
    """A YAML, JSON or TOML file as a mapping; everything else is an error that names the file."""
    tree = _parse(path, read_text(path))
    if not isinstance(tree, Mapping):
        shown = path[:120]
        raise ConfigError(f"{shown} contains no keys: the top level must be a mapping.", field="file", given=shown)
    refuse_deep(path, tree)
    return _plain(path, tree)


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


def read_keys(path: str, text: str | None = None) -> dict[str, Any]:
    """The dotted keys of a file, or of a `text` for it: nested keys, a list of flags (`--key value`), or `key=value` lines.

    Keys of flags are written with underscores, and OmegaConf's references to other keys (`${model.length}`) are resolved.
    """
    from batchwright.dialects import flatten

    text = read_text(path) if text is None else text
    tree: Any = ""
    if path.endswith(FILES) or not _has_flags(text):
        tree = _parse(path, text)
        refuse_deep(path, tree)
        tree = _plain(path, tree)
    if isinstance(tree, str) and _has_flags(text):
        tree = _split(path, text)
    if isinstance(tree, list) and tree and all(isinstance(word, (str, int, float)) for word in tree):
        return _flag_keys([str(word) for word in tree])
    if not isinstance(tree, Mapping):
        shown = path[:120]
        raise ConfigError(
            f"{shown} contains no keys: the top level must be a mapping or a list of flags.", field="file", given=shown
        )
    found: dict[str, Any] = {}
    for key, value in flatten(tree).items():
        if (
            isinstance(value, list)
            and value
            and all(isinstance(v, (str, int, float)) for v in value)
            and _is_flag(value[0])
        ):
            found |= _flag_keys([str(word) for word in value])
        else:
            found[_underscored(key)] = value
    return {key: _referenced(key, value, found) for key, value in found.items()}


def _has_flags(text: str) -> bool:
    return (
        re.search(r"^\s*(--?[a-zA-Z]|[+\w.]+=)", text, re.MULTILINE) is not None
        or re.search(r"\s--[a-zA-Z]", text) is not None
    )


def _is_flag(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("--") and len(word) > 2


def _underscored(key: str) -> str:
    """A key as it is, or a flag (`--micro-batch-size`, also in a section such as MODEL_ARGS) as a key."""
    key = key[key.rfind(".--") + 1 :]
    return ".".join(part.removeprefix("--").replace("-", "_") if "-" in part else part for part in key.split("."))


def _split(path: str, text: str) -> list[str]:
    import shlex

    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        shown = path[:120]
        raise ConfigError(f"{shown} is not a list of flags: {error}.", field="file", given=shown) from None


def _flag_keys(words: list[str]) -> dict[str, Any]:
    """The keys of a list of flags or of a command line, as a pasted line is read."""
    from .paste import unpaste

    kept, _ = unpaste(words, {}, lambda key: True, everything=True)
    return {key: value for key, equals, value in (word.partition("=") for word in kept) if equals}


def _referenced(key: str, value: Any, keys: Mapping[str, Any]) -> Any:
    """The value that OmegaConf's `${a.b}`, `${.b}` or `${oc.select:a.b,default}` stands for; others stay as they are."""
    for _ in range(8):
        if isinstance(value, str) and (variable := re.fullmatch(r"\$\{oc\.env:\w+,\s*([^{}]*?)\s*\}", value)):
            return variable[1]  # the default of an environment variable
        match = (
            re.fullmatch(r"\$\{(oc\.select:)?(\.*)([\w.]+)(?:,([^{}]*))?\}", value) if isinstance(value, str) else None
        )
        if match is None:
            return value
        select, dots, name, default = match.groups()
        if dots:
            name = ".".join([*key.split(".")[: -len(dots)], name])
        if name not in keys and (not select or default is None):
            return value
        value = keys.get(name, default)
        key = name
    return value


def read_value(key: str, value: str) -> Any:
    """The value of `launch.key=value` or `task.key=value`, which is YAML; text that is not YAML is taken as it is.

    >>> read_value("task.args.lr", "[1, 2]"), read_value("task.args.glob", "*.jsonl")
    ([1, 2], '*.jsonl')
    """
    try:
        read = _parse(key, value)
    except ConfigError as error:
        # An incomplete list is more likely a typing error than a text.
        if value.lstrip()[:1] in ("[", "{", "'", '"', "&", "!"):
            message = f"{error} To give it as text, put it in quotes: {key}='\"...\"'."
            raise ConfigError(message, field=key[:80], given=value[:80]) from None
        return value
    refuse_deep(key, read)
    return _plain(key, read)


def _parse(path: str, text: str) -> Any:
    kind = os.path.splitext(path)[1][1:]
    try:
        if kind == "json":
            import json

            return json.loads(text, object_pairs_hook=_unique)
        if kind == "toml":
            import tomllib

            return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {kind.upper()}: {error}.", field="file", given=path) from None
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain YAML of limited depth. A key that is given twice is an error."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > 100:
                raise ValueError("it is nested more than 100 levels deep")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except Exception as error:
        # A tag with a wrong value raises any kind of error: KeyError, IndexError and others.
        problem = next(iter(str(getattr(error, "problem", None) or error).splitlines()), type(error).__name__)
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(f"{path} is not plain YAML: {problem}{where}.", field="file", given=path) from None


def refuse_deep(path: str, tree: Any) -> None:
    """Limit depth and size: with anchors, a small file can describe an endless tree."""
    level: list[Any] = [tree]
    keys = items = 0
    for _ in range(16):
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
        f"{MOST_ITEMS:,} items in 16 levels.",
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
