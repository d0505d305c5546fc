"""A command line of another tool, pasted after `batchwright VERB`: what concerns the batch is kept, the rest named."""

from __future__ import annotations

from collections.abc import Callable, Mapping

# A line that starts with one of these was written for another program.
_PROGRAMS = frozenset({"nemo", "python", "python3", "torchrun", "accelerate", "deepspeed", "srun"})


def _is_foreign(key: str) -> bool:
    from batchwright.dialects import is_foreign  # flags of our own never get here

    return is_foreign(key)


def unpaste(
    words: list[str], own_flags: Mapping[str, bool], is_ours: Callable[[str], bool]
) -> tuple[list[str], tuple[str, ...]]:
    """Rewrite foreign flags as `key=value`; returns the words for our own parser and those that were left out.

    `--per_device_train_batch_size 2` is understood anywhere. A whole pasted line may hold anything. `own_flags` says
    of each flag of ours whether it takes a value.

    >>> unpaste("nemo llm pretrain --factory llama3_8b data.micro_batch_size=4".split(), {}, lambda key: False)
    (['data.micro_batch_size=4'], ('nemo', 'llm', 'pretrain', '--factory', 'llama3_8b'))
    """
    pasted: bool | None = None  # unknown until the first word that is not ours
    flagged = False
    shorts: Mapping[str, Mapping[str, str]] = {}
    short: Mapping[str, str] = {}  # those of the program whose words these are
    tasks: frozenset[str] = frozenset()  # keys that count tasks which are no ranks
    kept: list[str] = []
    left: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        flag, equals, value = word.partition("=")
        after = words[at] if at < len(words) else "-"
        takes_next = not equals and not after.startswith("-") and "=" not in after and not _is_command(after)
        if flag in own_flags:
            kept.append(word)
            if own_flags[flag] and not equals and at < len(words):
                kept.append(words[at])
                at += 1
            continue
        if pasted is None and _is_setting(word) and any(_program(w) in _PROGRAMS for w in words[at:]):
            left.append(word)  # a variable for the program that follows
            continue
        if pasted is None:
            pasted = _program(word) in _PROGRAMS
            if pasted:
                from batchwright.dialects.launchers import SHORT, STARTERS, TASKS

                shorts = SHORT
                tasks = TASKS if any(_program(w) in STARTERS for w in words) else frozenset()
        if pasted and not word.startswith("-") and (_is_command(word) or not flagged):
            short = shorts.get(_program(word), {})
        flagged = False
        if word[:2] in short and (len(word) > 2 or takes_next):
            number = after if len(word) == 2 else word[2:].removeprefix("=")
            at += len(word) == 2
            if short[word[:2]] in tasks:
                left += [word[:2], number]
            else:
                kept.append(f"{short[word[:2]]}={number}")
        elif pasted and flag == "--factory" and (value or after != "-"):
            from batchwright.dialects.nemo import factory

            left += [word] if equals else [word, after]
            at += not equals
            kept += [
                key for key in factory(value or after) if not any(w.startswith(key.partition("=")[0]) for w in words)
            ]
        elif word.startswith("--") and len(word) > 2:
            key = flag[2:].replace("-", "_")
            if (_is_foreign(key) or (pasted and is_ours(key))) and key not in tasks:
                if takes_next:
                    value, equals = words[at], "="
                    at += 1
                while key == "rampup_batch_size" and at < len(words) and words[at].isdigit():  # takes three numbers
                    value += f",{words[at]}"
                    at += 1
                kept.append(f"{key}={value}" if equals else word)
                continue
            if not pasted:
                kept.append(word)
                continue
            left.append(word)
            if takes_next:
                left.append(words[at])
                at += 1
        elif pasted and equals and not word.startswith("-"):
            kept.append(word.lstrip("+"))  # Hydra's + and ++ add a key
        elif pasted:
            left.append(word)
            flagged = word.startswith("-")  # what comes next may be its value
        else:
            kept.append(word)
    return kept, tuple(left)


def _program(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _is_setting(word: str) -> bool:
    """Whether a shell would read this word, before a command, as a variable."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isupper() and name.isidentifier()


def _is_command(word: str) -> bool:
    """Whether a word starts a command of its own, after which short flags are no longer the launcher's."""
    return _program(word) in _PROGRAMS or word.startswith("./") or word.endswith((".py", ".sh"))
