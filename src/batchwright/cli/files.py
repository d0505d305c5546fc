"""The keys of a configuration: those of its file, of the files that it names, and of `key=value`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError

from .options import FILES
from .parse import parse, read_text, read_value, scalar
from .scripts import Script, has_flags, pasted, read_script
from .shell import is_flag

if TYPE_CHECKING:
    from batchwright.dialects.record import Given

_DEEPSPEED = "deepspeed."
_ACCELERATE = "deepspeed_config.deepspeed_config_file"
# Keys that name the file of a configuration, or contain one as JSON, and the section that its keys belong to.
_NAMING = {
    **dict.fromkeys(("deepspeed", "deepspeed_config", "deepspeed_config_file", _ACCELERATE), ""),
    "accelerator_config": "accelerator_config.",
}
_CONFIGS = (".yaml", ".yml", ".toml")
_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
_NAMES_A_FILE = re.compile(r"(?:.*[._])?config(?:_file|_path|_name)?").fullmatch
# A file that a program writes (--save_config run.yaml) is no configuration of it.
_WRITTEN = re.compile(r"(?:.*[._])?(?:save|saved|output|out|dump|write|export|log)(?:[._].*)?").fullmatch


def read_keys(path: str, text: str | None = None) -> dict[str, Any]:
    """The dotted keys of a file, or of a `text` for it: nested keys, a list of flags (`--key value`), or `key=value` lines.

    Keys of flags are written with underscores, and OmegaConf's references to other keys (`${model.length}`) are resolved.
    """
    from batchwright.dialects import flatten

    text = read_text(path) if text is None else text
    tree: Any = "" if _is_script(path, text) else parse(path, text)
    if isinstance(tree, str) and (tree == "" or has_flags(text)):
        script = read_script(path, text)
        if script.keys or script.left:
            return dict(script.keys)
    if isinstance(tree, list) and tree and all(isinstance(word, (str, int, float)) for word in tree):
        return pasted(map(str, tree))[0]
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
            found |= pasted(map(str, value))[0]
        else:
            found[_underscored(key)] = value
    return {key: _referenced(key, value, found) for key, value in found.items()}


def _underscored(key: str) -> str:
    """A key as it is, or a flag (`--micro-batch-size`, also in a section such as MODEL_ARGS) as a key."""
    key = key[key.rfind(".--") + 1 :]
    return ".".join(part.removeprefix("--").replace("-", "_") if "-" in part else part for part in key.split("."))


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


def _is_script(path: str, text: str) -> bool:
    """Whether a file is a shell script or a list of flags, and not YAML, JSON or TOML."""
    return not path.endswith(FILES) and (path.endswith(_SCRIPTS) or has_flags(text))


def _script(path: str) -> Script | None:
    """A shell script or a list of flags; None if the argument is something else."""
    if path.endswith(FILES) or not os.path.isfile(path):
        return None
    text = read_text(path)
    return read_script(path, text) if _is_script(path, text) else None


def read_entries(path: str, text: str | None = None) -> list[tuple[str, Given]]:
    """The keys of a file that have a value, and those of the configurations that it names or contains."""
    found = _entries(path, read_keys(path, text), follow=True)
    script = _script(path) if text is None else None
    if script is None:
        return found
    # As of a pasted line; what a flag says counts.
    named = [(key, value) for key, value in script.keys.items() if key not in _NAMING]
    flags = {key for key, _ in found}
    for key, value in (*named, *(("", word) for word in script.left)):
        found += [one for one in read_named(key, value, os.path.dirname(path)) if one[0] not in flags]
    return found


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
    if path is None or (section is None and _WRITTEN(key)):
        return []
    try:
        found = _entries(path, read_keys(path), follow=section is None, section=owner)
        return [((section or "") + name, one) for name, one in found]
    except ConfigError:
        if section is not None:
            raise
        return []  # data, for example


def _here(name: str, folder: str) -> str | None:
    """Where a file that a configuration in this folder names is, or None: from here, as programs open it, or beside it."""
    paths = (name, os.path.join(folder, name))
    return next((path for path in paths if path.endswith(FILES) and os.path.isfile(path)), None)


def names_file(key: str, one: Given) -> bool:
    """Whether a key names the file of a configuration that is here, or contains one as JSON."""
    if key not in _NAMING or not isinstance(one.value, str):
        return False
    folder = os.path.dirname(one.origin.rpartition(": ")[0])
    return one.value.lstrip().startswith("{") or _here(one.value, folder) is not None


def not_read(arguments: Iterable[str], left_out: Iterable[str], entries: Iterable[tuple[str, Given]]) -> list[str]:
    """Notes on what is not read: parts of scripts, and configurations that are not here or that a variable names."""
    arguments = list(arguments)
    scripts = [script for script in map(_script, arguments) if script is not None]
    pairs = [word.rpartition("=") for word in (*left_out, *arguments, *(w for one in scripts for w in one.left))]
    pairs += [(key, "=", value) for script in scripts for key, value in script.keys.items()]
    absent = [
        path for key, _, path in pairs if path.endswith(_CONFIGS) and not os.path.exists(path) and not _WRITTEN(key)
    ]
    later: list[str] = []
    for key, one in entries:
        if not isinstance(one.value, str):
            continue
        if "$" in one.value and (key in _NAMING or _NAMES_A_FILE(key)):
            later.append(
                f"{key}={one.value[:80]} is known only when the job runs, so the keys of that file are not read."
            )
        elif key in _NAMING and one.value.endswith(FILES) and not names_file(key, one):
            absent.append(one.value)
    absent = [path[-80:] for path in dict.fromkeys(absent) if "$" not in path]
    several = "are not files here, so their" if len(absent) > 1 else "is not a file here, so its"
    said = [f"{', '.join(absent)} {several} keys are not read."] if absent else []
    return [*said, *dict.fromkeys(later), *(note for script in scripts for note in script.notes)]


def read_arguments(
    arguments: Iterable[str], left_out: Iterable[str] = ()
) -> Iterator[tuple[str, bool, list[tuple[str, Given]]]]:
    """Each argument, whether it is `KEY=VALUE`, and its keys: those of a file, or one and those of the file that it names.

    The files that the rest of a pasted line (`left_out`) names come last. What `~key` deletes is still there.
    """
    from batchwright.dialects.record import AUTO, Given

    for argument in arguments:
        key, equals, value = argument.partition("=")
        key, value = key.strip().lstrip("+"), value.strip()
        if argument.startswith("~"):
            continue
        if not equals or os.path.exists(argument):
            yield argument, False, read_entries(argument)
        elif is_unset(value):
            yield argument, True, [(key, Given(AUTO, f"{key}={value}", 1))] if value.lower() == AUTO else []
        else:
            plain = value.strip("'\"")
            read_as = _value(key, plain) if plain[:1] in ("[", "{") else plain
            yield argument, True, [(key, Given(read_as, f"{key}={value}", 1)), *read_named(key, plain)]
    for argument in left_out:
        if named := read_named("", argument.rpartition("=")[2]):
            yield argument, False, named


def _value(key: str, text: str) -> Any:
    """A list or a mapping as the value of a key; text that is none is an error only of keys that frameworks know."""
    from batchwright.dialects import dialects

    try:
        return scalar(read_value(key, text))
    except ConfigError:
        if key in READERS or key in _NAMING or any(key in one.known for one in dialects()):
            raise
        return text


def words_of(arguments: Iterable[str]) -> list[str]:
    """The words of the commands in scripts that are no keys: a program in them says which framework it is."""
    return [word for script in map(_script, arguments) if script is not None for word in script.left]


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
