"""`FILE.py:function`, the argument of probe, estimate, check and run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from batchwright.core.errors import ConfigError, RunError, Violation, did_you_mean, raise_violations

from .endings import users_code

T = TypeVar("T")

# A file with one of these may define names that are not in its text.
_MAKES_NAMES = re.compile(r"import\s+\*|__getattr__|__dict__|\b(globals|locals|vars|setattr|exec|sys\.modules)\b")


def split_target(target: str) -> tuple[str, str]:
    """The file and the function (default: `task`).

    >>> split_target("train.py:gpt"), split_target("train.py")
    (('train.py', 'gpt'), ('train.py', 'task'))
    """
    file, _, name = target.rpartition(":")
    return (file, name) if file.endswith(".py") else (target, "task")


def expanded(file: str) -> Path:
    """The absolute path of a file; `~` is the user's home, and stays as it is if that user has none."""
    return Path(os.path.expanduser(file)).absolute()


def task_file(target: str) -> tuple[Path, str]:
    """The file and the function; the file must exist, and its text must contain the name.

    The file is read, not imported: a wrong name is reported before torch is loaded, and before a job waits in a queue.

    >>> task_file("missing.py:task")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    file, name = split_target(target)
    path = expanded(file)
    if not os.path.isfile(path):
        what = "is not a regular file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"task file {file} {what} (looked for it at {path}).", field="task", given=target)
    try:
        with tokenize.open(path) as source:
            text = source.read()
    except (SyntaxError, UnicodeDecodeError):
        return path, name  # the import reports what is wrong, and where
    except OSError as error:
        raise ConfigError(f"task file {file} cannot be read: {error}.", field="task", given=target) from None
    if not re.search(rf"\b{re.escape(name)}\b", text) and not _MAKES_NAMES.search(text):
        raise no_function(target, file, name, set(re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE)))
    return path, name


def no_function(target: str, file: str, name: str, functions: Iterable[str]) -> ConfigError:
    """The error for a function that a file does not have."""
    from difflib import get_close_matches  # imported for wrong input only

    own = sorted(functions)
    near = get_close_matches(name, own, n=2)
    return ConfigError(
        f"{file} has no function {name!r}. It has: {', '.join(own) or 'none'}.{did_you_mean(near)}",
        field="task",
        given=target,
        nearest=[f"{file}:{one}" for one in near],
    )


def imports_name(source: str, name: str) -> bool:
    """Whether the text of a file imports a name from a package.

    >>> imports_name("from batchwright.jax import JaxTask", "JaxTask"), imports_name("import torch", "JaxTask")
    (True, False)
    """
    import ast

    if name not in source:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False  # the import reports what is wrong
    return any(
        isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names) for node in ast.walk(tree)
    )


def is_jax_task(target: str) -> bool:
    """Whether `FILE.py:function` returns a JaxTask: the file imports the name. It is read, not imported."""
    path = expanded(split_target(target)[0])
    try:
        if not path.is_file():  # a FIFO would be read for ever
            return False
        with tokenize.open(path) as source:
            return imports_name(source.read(), "JaxTask")
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return False  # whoever loads the task reports what is wrong


def check_arguments(target: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take, and name those that it needs."""
    from difflib import get_close_matches
    from inspect import signature  # slow to import, and `plan` does not need it

    parameters = signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
    wrong: list[Violation] = []
    for name in [n for n in arguments if n not in parameters]:
        near = tuple(get_close_matches(name, list(parameters), n=2))
        takes = f"it takes: {', '.join(parameters) or 'none'}"
        wrong.append(Violation(f"{target} takes no argument {name!r}; {takes}.{did_you_mean(near)}", "arg", name, near))
    wrong += [
        Violation(f"{target} needs the argument {n!r}: --arg {n}=...", "arg", None, (n,))
        for n in sorted(needed - set(arguments))
    ]
    raise_violations(ConfigError, wrong)


def call_target(
    target: str,
    arguments: dict[str, Any],
    kind: type[T],
    name_of_kind: str,
    convert: Callable[[object], object] = lambda made: made,
) -> T:
    """Import the file, call the function with `arguments`, and return its result, which must be a `kind` once converted."""
    path, name = task_file(target)
    file, module = split_target(target)[0], _import(path.resolve())
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise no_function(target, file, name, own)
    check_arguments(f"{file}:{name}", function, arguments)
    with users_code(f"{file}:{name} failed", str(path)):
        made = convert(function(**arguments))
    if not isinstance(made, kind):
        raise RunError(
            f"{file}:{name} returned {type(made).__name__}, not a {name_of_kind}.",
            field="task",
            given=type(made).__name__,
        )
    return made


def _import(path: Path) -> ModuleType:
    """Import a file under a unique module name, so that a user's `random.py` replaces no other module."""
    name = f"batchwright_task_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.", field="task", given=str(path))
    module = importlib.util.module_from_spec(spec)
    # As with `python FILE.py`, the file may import modules of its own folder.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        with users_code(f"{path.name} cannot be imported", str(path)):
            spec.loader.exec_module(module)
    except RunError:
        del sys.modules[name]
        raise
    return module
