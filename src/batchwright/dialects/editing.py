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
            if not isinstance(place, dict):
                raise ValueError(f"{part} is a value and a section")
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
            f"{where} cannot be edited without changing other keys: write these by hand: "
            f"{written(keys, 'keys')[:400].replace(chr(10), ', ')}",
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
        tree = yaml.load(text, fast_loader())
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError("the file contains no keys: the top level must be a mapping.", field="into")
    return tree or {}


def _set_json(text: str, keys: Mapping[str, Any]) -> str:
    text = text if text.strip() else "{}"
    for key, value in keys.items():
        text = _set_json_key(text, key.split("."), value)
    return text


def _set_json_key(text: str, path: list[str], value: Any) -> str:
    """The text with one value replaced, or one key added behind the last one of its object, written as that one is."""
    at = _SPACE(text, 0).end()
    members = _members(text, at)
    while len(path) > 1 and path[0] in members and text[members[path[0]][2]] == "{":
        at = members[path[0]][2]
        path, members = path[1:], _members(text, at)
    indent = re.search(r"\n([ \t]*)$", text[: next(iter(members.values()), (at,))[0]])
    if len(path) == 1 and path[0] in members:
        _, _, start, end = members[path[0]]
        return text[:start] + _json(value, indent) + text[end:]
    added = _json(nested({".".join(path[1:]): value}) if path[1:] else value, indent)
    if not members:
        return f"{text[: at + 1]}{json.dumps(path[0])}: {added}{text[at + 1 :]}"
    start, colon, first, end = list(members.values())[-1]
    before = text[at + 1 : next(iter(members.values()))[0]] or " " * (text[colon:first] != ":")
    return f"{text[:end]},{before}{json.dumps(path[0])}{text[colon:first]}{added}{text[end:]}"


_SPACE: Any = re.compile(r"[ \t\r\n]*").match


def _members(text: str, at: int) -> dict[str, tuple[int, int, int, int]]:
    """For each member of the object at a position: where its name starts and ends, and where its value starts and ends."""
    decoder, found = json.JSONDecoder(), dict[str, tuple[int, int, int, int]]()
    if text[at] != "{":
        raise ValueError("not an object")
    at = _SPACE(text, at + 1).end()
    while text[at] != "}":
        name, end = decoder.raw_decode(text, at)
        first = _SPACE(text, _SPACE(text, end).end() + 1).end()
        last = decoder.raw_decode(text, first)[1]
        found[name] = (at, end, first, last)
        at = _SPACE(text, last).end()
        at = _SPACE(text, at + 1).end() if text[at] == "," else at
    return found


def _json(value: Any, indent: re.Match[str] | None) -> str:
    """A value; a mapping in lines of their own where its neighbours are."""
    if indent is None or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    step = indent[1] if len(indent[1]) < 5 else "  "
    return json.dumps(value, indent=step, ensure_ascii=False).replace("\n", "\n" + indent[1])


def _set_yaml(text: str, keys: Mapping[str, Any]) -> str:
    import yaml

    try:
        root = yaml.compose(text, fast_loader())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if root is None:
        return text + ("" if text.endswith("\n") or not text else "\n") + _yaml_lines(nested(keys), 0)
    edits: list[tuple[int, int, int, str]] = []  # from where, to where, in which column, what
    added: dict[int, tuple[Any, dict[str, Any]]] = {}
    for key, value in keys.items():
        node, mapping, rest = _find(root, key.split("."))
        if node is None:
            added.setdefault(id(mapping), (mapping, {}))[1][".".join(rest)] = value
            continue
        start = node.start_mark.index
        space = " " if text[start - 1 : start] == ":" else ""
        if isinstance(node, yaml.SequenceNode) and not node.flow_style:
            space = "  "  # its dashes may be in the column of the key, and no other value may
        edits.append((start, _end(node), 0, space + _flow(value)))
    edits += [_addition(text, mapping, nested(rest)) for mapping, rest in added.values()]
    if any(start > len(text) for start, *_ in edits):
        text += "\n"
    # From the end to the beginning, so that positions stay right; at one position, inner keys come first.
    for start, end, _, new in sorted(edits, key=lambda edit: (-edit[0], edit[2])):
        text = text[:start] + new + text[end:]
    return text


def fast_loader() -> Any:
    """PyYAML's safe loader: the one in C where it was built, which is ten times as fast."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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


def _addition(text: str, mapping: Any, tree: Mapping[str, Any]) -> tuple[int, int, int, str]:
    """The edit that adds keys at the end of a mapping."""
    if mapping.flow_style or not mapping.value:
        end = mapping.end_mark.index - 1
        start = len(text[:end].rstrip()) if mapping.value else end
        items = ", ".join(f"{key}: {_flow(value)}" for key, value in tree.items())
        return start, start, 0, f"{', ' * bool(mapping.value)}{items}"
    column = mapping.value[0][0].start_mark.column
    at = f"{text}\n".find("\n", max(_end(mapping.value[-1][1]) - 1, 0)) + 1
    return at, at, column, _yaml_lines(tree, column)


def _yaml_lines(tree: Mapping[str, Any], column: int) -> str:
    """Keys in lines of their own, each section below its name."""
    return "".join(
        f"{' ' * column}{key}:\n{_yaml_lines(value, column + 2)}"
        if isinstance(value, dict)
        else f"{' ' * column}{key}: {_flow(value)}\n"
        for key, value in tree.items()
    )


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
        if header := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            at = "".join(header[1].replace('"', "").split())
            inside = at == section
            last = number + 1 if inside else last
            continue
        assign = re.match(r'\s*"?([\w.-]+)"?\s*=\s*', line)
        if inside and line.strip() and not line.lstrip().startswith("#"):
            last = number + 1
        whole = f"{section}.{name}" if section and at == "" else name
        if assign and ((inside and assign[1] == name) or (at == "" and assign[1] == whole)):
            found = number, assign
    if found is not None:
        number, assign = found
        old = lines[number][assign.end() :].partition("#")[0].rstrip()  # a comment and the line end stay
        lines[number] = f"{assign[0]}{value}{lines[number][assign.end() + len(old) :]}"
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
