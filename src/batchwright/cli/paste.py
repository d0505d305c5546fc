"""The command line of another tool, pasted after `batchwright VERB`: keep what concerns the batch, list the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache

# The programs whose command lines are recognised by their first argument.
_FRAMEWORKS = frozenset({"nemo", "axolotl", "llamafactory-cli", "trl", "composer", "automodel"})
_PROGRAMS = _FRAMEWORKS | {"python", "python3", "torchrun", "accelerate", "deepspeed", "srun"}
_SWITCHES = frozenset({"decrease_batch_size_if_needed"})  # flags without a value
# Programs that only start the next one; environment variables may follow them.
_WRAPPERS = frozenset(
    {
        "env",
        "nohup",
        "uv",
        "uvx",
        "poetry",
        "time",
        "nice",
        "stdbuf",
        "numactl",
        "ray",
        "mpirun",
        "mpiexec",
        "sudo",
        "exec",
    }
)


def _is_foreign(flag: str, kind: str | None, *, common: bool = False) -> bool:
    """Whether a flag is one of a framework; with `common`, also one that other programs have, too."""
    # Imported here: a command line with flags of ours only does not need it.
    from batchwright.dialects import dialects, is_foreign

    key = flag.partition("=")[0][2:].replace("-", "_")
    return is_foreign(key, kind) or (common and any(d.reads(key) for d in dialects(kind)))


def unpaste(
    arguments: list[str],
    own_flags: Mapping[str, bool],
    is_ours: Callable[[str], bool],
    *,
    kind: str | None = "train",
    everything: bool = False,
    inside: Collection[str] = (),
) -> tuple[list[str], tuple[str, ...]]:
    """Rewrite foreign flags as `key=value`. Returns the arguments for our own parser and those that were ignored.

    `--per_device_train_batch_size 2` is understood anywhere. A whole pasted line may contain anything. `own_flags`
    maps each of our flags to whether it takes a value. With `everything`, every flag of a pasted line is rewritten,
    but our own ones that are `inside`; so are those of a list of flags without a program, if not all of ours are.

    >>> unpaste("nemo llm pretrain --factory llama3_8b data.micro_batch_size=4".split(), {}, lambda key: False)
    (['data.micro_batch_size=4'], ('nemo', 'llm', 'pretrain', '--factory', 'llama3_8b'))
    """
    if any(word == "-c" or (word[:1] == "-" and word[-1] == "c") for word in arguments):
        arguments = _without_shell(arguments)
    # Unknown until the first argument that is not ours.
    pasted: bool | None = True if everything and not own_flags else None
    # Before the first program, only what starts it.
    wrapped = begun = False
    flagged = False
    shorts: Mapping[str, Mapping[str, str]] = {}
    # The short flags of the program whose arguments these are.
    short: Mapping[str, str] = {}
    # Keys that count tasks which are not ranks.
    tasks: frozenset[str] = frozenset()
    kept: list[str] = []
    left: list[str] = []
    begins = cache(lambda name: any(word.startswith(name) for word in arguments))
    # Flags without a program, of which one is a framework's: then others that are common belong to it, too.
    listed = any(
        word[:2] == "--" and word.partition("=")[0] not in own_flags and _is_foreign(word, kind) for word in arguments
    )
    listed_whole = everything and listed and not set(own_flags) <= set(inside)
    last = max((n for n, word in enumerate(arguments) if _program(word) in _PROGRAMS), default=-1)
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        flag, equals, value = argument.partition("=")
        after = arguments[at] if at < len(arguments) else "-"
        takes_next = not equals and _is_value(after, arguments[at + 1 : at + 2] if begun else None)
        whole = listed_whole or (everything and bool(pasted))
        if flag in own_flags and not (whole and flag not in inside):
            kept.append(argument)
            if own_flags[flag] and not equals and at < len(arguments):
                kept.append(arguments[at])
                at += 1
            continue
        if (pasted is None or not (begun or own_flags)) and _is_setting(argument) and at <= last:
            # An environment variable for the program that follows.
            left.append(argument)
            continue
        if pasted is None:
            wrapped = _program(argument) in _WRAPPERS and any(is_command(w) for w in arguments[at:])
            pasted = wrapped or _program(argument) in _PROGRAMS
        if pasted and not shorts:
            from batchwright.dialects.launchers import SHORT, STARTERS, TASKS

            shorts = SHORT
            tasks = TASKS if any(_program(w) in STARTERS for w in arguments) else frozenset()
        begun = begun or is_command(argument)
        wrapped = wrapped and not begun
        if wrapped:
            left.append(argument)
            continue
        if pasted and not argument.startswith("-") and (is_command(argument) or not flagged):
            short = shorts.get(_program(argument), {})
        flagged = False
        if argument[:2] in short and (len(argument) > 2 or takes_next):
            number = after if len(argument) == 2 else argument[2:].removeprefix("=")
            at += len(argument) == 2
            if short[argument[:2]] in tasks:
                left += [argument[:2], number]
            else:
                kept.append(f"{short[argument[:2]]}={number}")
        elif pasted and flag == "--factory" and (value or after != "-"):
            from batchwright.dialects.nemo import factory

            left += [argument] if equals else [argument, after]
            at += not equals
            kept += [key for key in factory(value or after) if not begins(key.partition("=")[0])]
        elif argument.startswith("--") and len(argument) > 2:
            key = flag[2:].replace("-", "_")
            wanted = listed_whole or (everything and bool(pasted))
            if (wanted or _is_foreign(flag, kind, common=listed) or (pasted and is_ours(key))) and key not in tasks:
                if takes_next:
                    value, equals = arguments[at], "="
                    at += 1
                # This flag takes three numbers.
                while key == "rampup_batch_size" and at < len(arguments) and arguments[at].isdigit():
                    value += f",{arguments[at]}"
                    at += 1
                kept.append(f"{key}={value}" if equals else f"{key}=true" if wanted or key in _SWITCHES else argument)
                continue
            if not pasted:
                kept.append(argument)
                continue
            left.append(argument)
            if takes_next:
                left.append(arguments[at])
                at += 1
        elif pasted and equals and not argument.startswith("-"):
            # Hydra's + and ++ add a key.
            kept.append(argument.lstrip("+"))
        elif pasted:
            left.append(argument)
            # The next argument may be the value of this flag.
            flagged = argument.startswith("-")
        else:
            kept.append(argument)
    return kept, tuple(left)


def _is_value(word: str, rest: list[str] | None = None) -> bool:
    """Whether a word can be the value of the flag before it: no flag (but a negative number), key=value or command.

    Inside a command (`rest`: the word after this one, if any), a framework's name before a flag is one: --project axolotl.
    """
    if word.startswith("-"):
        return re.fullmatch(r"-\d+(\.\d+)?", word) is not None
    if rest is not None and word in _FRAMEWORKS and (not rest or rest[0].startswith("-")):
        return True
    return "=" not in word and not is_command(word)


def _without_shell(arguments: list[str]) -> list[str]:
    """The arguments with the command in the text of a shell (`bash -c "..."`) in its place."""
    from .scripts import Line, choose, opened

    lines = [Line(number, tuple(one)) for number, one in enumerate(opened(arguments), 1)]
    chosen, _ = choose("the text of the shell", lines) if len(lines) > 1 else (None, [])
    return list((chosen or lines[-1]).words) if lines else arguments


def _program(argument: str) -> str:
    return argument.rsplit("/", 1)[-1]


def _is_setting(argument: str) -> bool:
    """Whether a shell would read this argument, before a command, as an environment variable."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and name.isupper() and name.isidentifier()


def is_command(argument: str) -> bool:
    """Whether an argument starts another command, so that the short flags after it are not the launcher's."""
    return _program(argument) in _PROGRAMS or argument.startswith("./") or argument.endswith((".py", ".sh"))
