"""Configuration files: YAML, JSON, TOML and lists of flags, as plain trees of limited size, and as dotted keys."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchwright.core.errors import ConfigError
from batchwright.core.numbers import LONGEST

from .options import FILES

if TYPE_CHECKING:
    from batchwright.dialects.record import Given

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


def read_entries(path: str, text: str | None = None) -> list[tuple[str, Given]]:
    """The keys of a file that have a value, and those of the DeepSpeed configuration that it names or contains.

    `auto` is a value that another program gives.
    """
    return _entries(path, read_keys(path, text), follow=True)


def _entries(path: str, keys: Mapping[str, Any], *, follow: bool) -> list[tuple[str, Given]]:
    from batchwright.dialects.record import Given

    found = [
        # DeepSpeed's configuration inside another one has DeepSpeed's keys.
        (key.removeprefix(_DEEPSPEED), Given(scalar(value), f"{path}: {key}", 0))
        for key, value in keys.items()
        if value is not None
    ]
    for key in _NAMING if follow else ():
        named = read_named(key, keys.get(key), os.path.dirname(path))
        # Accelerate takes what the file says, whatever stands beside its name.
        said = {name for name, one in named if one.value != "auto"} if key == _ACCELERATE else set[str]()
        found = [one for one in found if one[0] not in said] + named
    return found


_DEEPSPEED, _ACCELERATE = "deepspeed.", "deepspeed_config.deepspeed_config_file"
# Keys that name the file of a configuration, or contain one as JSON, and the section that its keys belong to.
_NAMING = {
    **dict.fromkeys(("deepspeed", "deepspeed_config", "deepspeed_config_file", _ACCELERATE), ""),
    "accelerator_config": "accelerator_config.",
}


def read_named(key: str, value: Any, folder: str = "") -> list[tuple[str, Given]]:
    """The keys of a configuration that a key names (`deepspeed=ds.json`) or contains; none if it is something else."""
    section = _NAMING.get(key)
    if section is not None and isinstance(value, str) and value.lstrip().startswith("{"):
        value = read_value(key, value)
    if section is not None and isinstance(value, Mapping):
        from batchwright.dialects import flatten

        return [(section + name, one) for name, one in _entries(key, flatten(value), follow=False)]
    path = _here(value, folder) if isinstance(value, str) else None
    if path is None:
        return []
    try:
        return [((section or "") + name, one) for name, one in _entries(path, read_keys(path), follow=section is None)]
    except ConfigError:
        if section is not None:
            raise
        return []  # data, for example


def _here(name: str, folder: str) -> str | None:
    """Where a file that a configuration in this folder names is, or None."""
    paths = (os.path.join(folder, name), name)
    return next((path for path in paths if path.endswith(FILES) and os.path.isfile(path)), None)


def not_read(words: Iterable[str], entries: Iterable[tuple[str, Given]]) -> str:
    """The configurations that a command line or a key such as `deepspeed` names and that do not exist."""
    paths = [word.rpartition("=")[2] for word in words]
    named = [path for path in paths if path.endswith(_CONFIGS) and not os.path.exists(path)]
    named += [
        one.value
        for key, one in entries
        if key in _NAMING
        and isinstance(one.value, str)
        and one.value.endswith(FILES)
        and _here(one.value, os.path.dirname(one.origin.rpartition(": ")[0])) is None
    ]
    return ", ".join(path[-80:] for path in dict.fromkeys(named))


_CONFIGS = (".yaml", ".yml", ".toml")
MISSING = "{} is not a file here: what it says is not read."


def read_arguments(
    arguments: Iterable[str], left_out: Iterable[str] = ()
) -> Iterator[tuple[str, bool, list[tuple[str, Given]]]]:
    """Each argument, whether it is `KEY=VALUE`, and its keys: those of a file, or one and those of the file that it names.

    The files that the rest of a pasted line (`left_out`) names come last. What `~key` deletes is still there.
    """
    from batchwright.dialects.record import Given

    for argument in arguments:
        key, equals, value = argument.partition("=")
        key, value = key.strip().lstrip("+"), value.strip()
        if argument.startswith("~"):
            continue
        if not equals or os.path.exists(argument):
            yield argument, False, read_entries(argument)
        elif is_unset(value):
            yield argument, True, []
        else:
            plain = value.strip("'\"")
            read_as = scalar(read_value(key, plain)) if plain[:1] in ("[", "{") else plain
            yield argument, True, [(key, Given(read_as, f"{key}={value}", 1)), *read_named(key, plain)]
    for argument in left_out:
        if named := read_named("", argument.rpartition("=")[2]):
            yield argument, False, named


def words_of(arguments: Iterable[str]) -> list[str]:
    """The words of command lines that are kept in files, such as shell scripts: a program in them says which framework it is."""
    lines = [one for one in arguments if not one.endswith(FILES) and os.path.isfile(one)]
    return [word for path in lines for word in read_text(path).split()]


def is_unset(value: str) -> bool:
    """Whether the value of `key=value` says that none is given, or that the program finds it.

    >>> [is_unset(value) for value in ("null", "auto", "", "0", "false")]
    [True, True, True, False, False]
    """
    return value.strip().lower() in ("", "null", "none", "~", "auto")


def without_deleted(entries: Iterable[tuple[str, Given]], arguments: Collection[str]) -> list[tuple[str, Given]]:
    """The entries without those that Hydra's `~key` deletes, each with all keys below it."""
    deleted = [one[1:].partition("=")[0] for one in arguments if one.startswith("~")]
    return [(key, one) for key, one in entries if not any(f"{key}.".startswith(f"{name}.") for name in deleted)]


def _has_flags(text: str) -> bool:
    return (
        re.search(r"^[ \t]*(--?[a-zA-Z]|[+\w.]+=)", text, re.MULTILINE) is not None
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
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        shown = path[:120]
        raise ConfigError(f"{shown} is not a list of flags: {error}.", field="file", given=shown) from None
    return _with_variables(path, words)


_ASSIGNED = re.compile(r"([a-zA-Z_]\w*)(\+?)=(\(?)(.*)", re.DOTALL).fullmatch
_USED = re.compile(r"\$\{?(\w+)").match


def _with_variables(path: str, words: list[str]) -> list[str]:
    """The words of a script with the flags of its variables (`ARGS=(--lr 1)`, `ARGS="--lr 1"`) where it uses them.

    If it uses none of them, another script may: then all count.
    """
    flags: dict[str, list[str]] = {}
    inserted = 0

    def is_used(word: str) -> bool:
        name = _USED(word)
        return name is not None and name[1] in flags

    def filled(parts: Iterable[str]) -> list[str]:
        nonlocal inserted
        found: list[str] = []
        for part in parts:
            name = _USED(part)
            one = flags.get(name[1], [part]) if name else [part]
            inserted += len(one) if one and name else 0
            if inserted > MOST_ITEMS:
                shown = path[:120]
                message = f"{shown}: its variables make more than {MOST_ITEMS:,} words."
                raise ConfigError(message, field="file", given=shown)
            found += one
        return found

    rest: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        assigned = _ASSIGNED(word)
        name, more, array, value = assigned.groups() if assigned else ("", "", "", word)
        if array:
            first, left_open = at, value.count("(") - value.count(")")
            while left_open >= 0 and at < len(words):
                left_open += words[at].count("(") - words[at].count(")")
                at += 1
            parts = [value, *words[first:at]]
            parts[-1] = parts[-1].rpartition(")")[0] if left_open < 0 else parts[-1]
        else:
            parts = _parts(value.rstrip("; \n"))
            if not name or not any(_is_flag(part) or is_used(part) for part in parts):
                rest.append(word)
                continue
        parts = filled(part for part in parts if part)
        if more:
            flags.setdefault(name, []).extend(parts)
        else:
            flags[name] = parts
    split = [parts if any(map(is_used, parts := _parts(word))) else [word] for word in rest]
    if any(is_used(part) for parts in split for part in parts):
        return filled(part for parts in split for part in parts)
    return [*rest, *(word for one in flags.values() for word in one)]


def _parts(word: str) -> list[str]:
    """The words inside a quoted one, as the shell that uses it splits it."""
    import shlex

    if not re.search(r"\s", word) or not ("--" in word or "$" in word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()


def _flag_keys(words: list[str]) -> dict[str, Any]:
    """The keys of a list of flags or of a command line, as a pasted line is read."""
    from .paste import unpaste

    kept, _ = unpaste(words, {}, lambda key: True, everything=True)
    return {key: value for key, equals, value in (word.partition("=") for word in kept) if equals}


def _referenced(key: str, value: Any, keys: Mapping[str, Any]) -> Any:
    """The value that OmegaConf's `${a.b}`, `${.b}` or `${oc.select:a.b,default}` stands for; others stay as they are."""
    for _ in range(8):
        if isinstance(value, str) and (variable := re.fullmatch(r"\$\{oc\.env:\w+,([^{}]*)\}", value)):
            return variable[1].strip()  # the default of an environment variable
        match = (
            re.fullmatch(r"\$\{(oc\.select:)?(\.*)(\w[\w.]*)(?:,([^{}]*))?\}", value)
            if isinstance(value, str)
            else None
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
