"""Keys as text: a new configuration in a framework's format, and keys set in the text of an existing file.

An edit changes only the values that it sets and adds missing keys to their section: comments, order and everything else
stay. The result is read again, and an edit that changed anything else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from batchwright.core.errors import ConfigError

from . import flatten

FORMS = ("yaml", "json", "toml", "keys", "flags", "dashes")


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a tree.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def written(keys: Mapping[str, Any], form: str) -> str:
    """Keys in a form: a file of YAML, JSON or TOML, `key=value` lines, or flags (`dashes`: with - for _).

    >>> written({"a.b": 4}, "keys"), written({"rampup_batch_size": [32, 8, 9384]}, "dashes")
    ('a.b=4', '--rampup-batch-size 32 8 9384')
    """
    if form == "json":
        return json.dumps(nested(keys), indent=2)
    if form == "yaml":
        return _set_yaml("", keys).rstrip("\n")
    if form == "toml":
        return _set_toml("", keys).strip("\n")
    import shlex

    if form == "keys":
        return "\n".join(shlex.quote(f"{key}={_plain(value)}") for key, value in keys.items())
    lines: list[str] = []
    for key, value in keys.items():
        flag = "--" + (key.replace("_", "-") if form == "dashes" else key)
        if isinstance(value, list):
            lines.append(" ".join([flag, *(shlex.quote(str(item)) for item in value)]))
        else:
            lines.append(flag if value is True else f"{flag} {shlex.quote(str(value))}")
    return " \\\n".join(lines)


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else str(value)


def edited(text: str, form: str, keys: Mapping[str, Any], where: str = "the file") -> str:
    """The text of a YAML, JSON or TOML file with these keys set.

    >>> edited("a:\\n  b: 1  # one\\n  c: 2\\n", "yaml", {"a.b": 4, "a.d": 5})
    'a:\\n  b: 4  # one\\n  c: 2\\n  d: 5\\n'
    """
    try:
        wanted = flatten(_read(text, form)) | dict(keys)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid {form.upper()}: {error}.", field="into", given=where) from None
    try:
        made = {"json": _set_json, "toml": _set_toml, "yaml": _set_yaml}[form](text, keys)
        found = flatten(_read(made, form))
    except ValueError:
        made, found = text, None
    if found is None or {k: v for k, v in found.items() if v is not None} != {
        k: v for k, v in wanted.items() if v is not None
    }:
        raise ConfigError(
            f"{where} cannot be edited without changing other keys: write these by hand: {written(keys, 'keys')[:400]}",
            field="into",
            given=where,
        )
    return made


def _read(text: str, form: str) -> dict[str, Any]:
    if form == "json":
        return json.loads(text or "{}")
    if form == "toml":
        import tomllib

        return tomllib.loads(text)
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError("the file contains no keys: the top level must be a mapping.", field="into")
    return tree or {}


def _set_json(text: str, keys: Mapping[str, Any]) -> str:
    """JSON has no comments: the tree is written again, in its order and with its indent."""
    tree = json.loads(text or "{}")
    for key, value in keys.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    indent = re.search(r"^[ \t]+(?=\")", text, re.MULTILINE)
    made = json.dumps(tree, indent=indent[0] if indent else None, ensure_ascii=False)
    return made + ("\n" if text.endswith("\n") else "")


def _set_yaml(text: str, keys: Mapping[str, Any]) -> str:
    import yaml

    for key, value in keys.items():
        try:
            root = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
        if root is None:
            text += ("" if text.endswith("\n") or not text else "\n") + _yaml_lines(key.split("."), value, 0)
            continue
        node, mapping, rest = _find(root, key.split("."))
        if node is not None:
            start, end = node.start_mark.index, _end(node)
            space = " " if text[start - 1 : start] == ":" else ""
            text = text[:start] + space + _flow(value) + text[end:]
        else:
            text = _added(text, mapping, rest, value)
    return text


def _find(node: Any, path: list[str]) -> tuple[Any, Any, list[str]]:
    """The node of a value, or None with the innermost mapping that there is and the rest of the path."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{'.'.join(path)} cannot be set: its section is not a mapping.", field="into")
    for size in range(len(path), 0, -1):  # a dotted key may be written as one
        name = ".".join(path[:size])
        for key, value in node.value:
            if key.value == name:
                if size == len(path):
                    return value, node, []
                if isinstance(value, yaml.MappingNode):
                    return _find(value, path[size:])
    return None, node, path


def _end(node: Any) -> int:
    """Where a node's text ends: a block ends with its last scalar, not with the comments after it."""
    import yaml

    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _added(text: str, mapping: Any, path: list[str], value: Any) -> str:
    """The text with a key at the end of a mapping."""
    if mapping.flow_style or not mapping.value:
        at = mapping.end_mark.index - 1
        comma = ", " if mapping.value else ""
        for part in reversed(path[1:]):
            value = {part: value}
        return f"{text[:at].rstrip() if mapping.value else text[:at]}{comma}{path[0]}: {_flow(value)}{text[at:]}"
    column = mapping.value[0][0].start_mark.column
    at = text.find("\n", max(_end(mapping.value[-1][1]) - 1, 0))
    if at < 0:
        text, at = text + "\n", len(text)
    return text[: at + 1] + _yaml_lines(path, value, column) + text[at + 1 :]


def _yaml_lines(path: list[str], value: Any, column: int) -> str:
    lines = [f"{' ' * (column + 2 * depth)}{part}:" for depth, part in enumerate(path)]
    return "\n".join(lines) + f" {_flow(value)}\n"


def _flow(value: Any) -> str:
    """A value in one line of YAML, also inside braces."""
    import yaml

    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False).strip()[1:-1]
    return json.dumps(value) if "\n" in text else text  # JSON is YAML


def _set_toml(text: str, keys: Mapping[str, Any]) -> str:
    for key, value in keys.items():
        *path, last = key.split(".")
        text = _set_toml_key(text, ".".join(path), last, _toml(value))
    return text


def _set_toml_key(text: str, section: str, name: str, value: str) -> str:
    lines = text.splitlines(keepends=True)
    at, inside, found = "", section == "", None
    last = 0 if inside else None  # after which line of the section a new key goes
    for number, line in enumerate(lines):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$", line):
            at = header[1].replace('"', "").replace(" ", "")
            inside = at == section
            last = number + 1 if inside else last
            continue
        assign = re.match(r'(\s*"?([\w.-]+)"?\s*=\s*)(.*?)(\s*(?:#.*)?)$', line.rstrip("\r\n"))
        if inside and line.strip() and not line.lstrip().startswith("#"):
            last = number + 1
        whole = f"{section}.{name}" if section and at == "" else name
        if assign and ((inside and assign[2] == name) or (at == "" and assign[2] == whole)):
            found = number, assign
    if found is not None:
        number, assign = found
        ending = "\n" if lines[number].endswith("\n") else ""
        lines[number] = f"{assign[1]}{value}{assign[4]}{ending}"
        return "".join(lines)
    if last is None:
        gap = "\n" if text and not text.endswith("\n\n") else ""
        return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{gap}[{section}]\n{name} = {value}\n"
    if last and not lines[last - 1].endswith("\n"):
        lines[last - 1] += "\n"
    return "".join([*lines[:last], f"{name} = {value}\n", *lines[last:]])


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
