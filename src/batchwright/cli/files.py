"""The keys of a configuration: those of its file, of the files that it names, and of `key=value`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchwright.core.errors import ConfigError

from .options import FILES
from .parse import parse, read_text, read_value, scalar
from .scripts import has_flags, is_flag, split_script

if TYPE_CHECKING:
    from batchwright.dialects.record import Given

_DEEPSPEED, _ACCELERATE = "deepspeed.", "deepspeed_config.deepspeed_config_file"
# Keys that name the file of a configuration, or contain one as JSON, and the section that its keys belong to.
_NAMING = {
    **dict.fromkeys(("deepspeed", "deepspeed_config", "deepspeed_config_file", _ACCELERATE), ""),
    "accelerator_config": "accelerator_config.",
}
_CONFIGS = (".yaml", ".yml", ".toml")
MISSING = "{} is not a file here: what it says is not read."


def read_keys(path: str, text: str | None = None) -> dict[str, Any]:
    """The dotted keys of a file, or of a `text` for it: nested keys, a list of flags (`--key value`), or `key=value` lines.

    Keys of flags are written with underscores, and OmegaConf's references to other keys (`${model.length}`) are resolved.
    """
    from batchwright.dialects import flatten

    text = read_text(path) if text is None else text
    tree: Any = ""
    if path.endswith(FILES) or not has_flags(text):
        tree = parse(path, text)
    if isinstance(tree, str) and has_flags(text):
        tree = split_script(path, text)
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
            and is_flag(value[0])
        ):
            found |= _flag_keys([str(word) for word in value])
        else:
            found[_underscored(key)] = value
    return {key: _referenced(key, value, found) for key, value in found.items()}


def _underscored(key: str) -> str:
    """A key as it is, or a flag (`--micro-batch-size`, also in a section such as MODEL_ARGS) as a key."""
    key = key[key.rfind(".--") + 1 :]
    return ".".join(part.removeprefix("--").replace("-", "_") if "-" in part else part for part in key.split("."))


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


def read_entries(path: str, text: str | None = None) -> list[tuple[str, Given]]:
    """The keys of a file that have a value, and those of the DeepSpeed configuration that it names or contains.

    `auto` is a value that another program gives.
    """
    return _entries(path, read_keys(path, text), follow=True)


def _entries(path: str, keys: Mapping[str, Any], *, follow: bool, section: str = "") -> list[tuple[str, Given]]:
    from batchwright.dialects.record import Given

    found = [
        # DeepSpeed's configuration inside another one has DeepSpeed's keys.
        (
            key.removeprefix(_DEEPSPEED),
            Given(scalar(value), f"{path}: {key}", 0, "deepspeed" if key.startswith(_DEEPSPEED) else section),
        )
        for key, value in keys.items()
        if value is not None
    ]
    for key in _NAMING if follow else ():
        found += read_named(key, keys.get(key), os.path.dirname(path))
    return found


def read_named(key: str, value: Any, folder: str = "") -> list[tuple[str, Given]]:
    """The keys of a configuration that a key names (`deepspeed=ds.json`) or contains; none if it is something else."""
    section = _NAMING.get(key)
    owner = "deepspeed" if section == "" else ""
    if section is not None and isinstance(value, str) and value.lstrip().startswith("{"):
        value = read_value(key, value)
    if section is not None and isinstance(value, Mapping):
        from batchwright.dialects import flatten

        return [(section + name, one) for name, one in _entries(key, flatten(value), follow=False, section=owner)]
    path = _here(value, folder) if isinstance(value, str) else None
    if path is None:
        return []
    try:
        found = _entries(path, read_keys(path), follow=section is None, section=owner)
        return [((section or "") + name, one) for name, one in found]
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
