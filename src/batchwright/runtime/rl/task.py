"""What a user gives to `train_rl`: a task with a rollout, and the prompts that the rollout gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from torch import nn

from batchwright.core.errors import ConfigError, RunError, Violation, raise_violations
from batchwright.runtime.task import Task

Response = dict[str, Any]
Group = list[Response]
# What the loop adds to every response.
ADDED = ("prompt_position", "generation", "policy_version")


@dataclass(frozen=True)
class Prompts:
    """The prompts of one rollout micro batch: rows of the dataset, and their places in the order of the run.

    >>> prompts = Prompts(["2+2=", "3+1="], range(10, 12), ids=[7, 3], seed=0, round=5, policy_version=5)
    >>> len(prompts), prompts.seed_of(10, generation=0) == prompts.seed_of(10, generation=1)
    (2, False)
    """

    data: list[Any]
    positions: range
    """Absolute positions in the global order of prompts."""
    ids: list[int]
    """Their indices in the dataset."""
    seed: int
    """The seed of the run."""
    round: int
    policy_version: int
    """Updates that the weights of the policy have had."""

    def __len__(self) -> int:
        return len(self.positions)

    def seed_of(self, position: int, generation: int) -> int:
        """A seed for one response: 63 bits, a pure function of (seed, position, generation).

        With it, a response does not depend on who samples it, on when, or on the other prompts of the micro batch.
        """
        text = b"batchwright response 1: seed %d, position %d, generation %d" % (self.seed, position, generation)
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


Rollout = Callable[[nn.Module, Prompts, int], Sequence[Sequence[Mapping[str, Any]]]]


@dataclass(frozen=True, kw_only=True)
class RLTask(Task):
    """A `Task` whose dataset holds prompts, and whose loss takes a batch of responses.

    `rollout(policy, prompts, generations)` returns one list for each prompt, with exactly `generations` responses in it; a
    response is a mapping of tensors, arrays, numbers, text, and lists of them. It is called without gradients, and the policy
    is in evaluation mode. `prepare(group)` gets all responses of one prompt and returns as many: advantages are computed
    there, before a group is split over micro batches. `collate` makes a micro batch of responses.
    """

    rollout: Rollout
    prepare: Callable[[Group], Sequence[Mapping[str, Any]]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = {
            "rollout": "a function of (policy, prompts, generations)",
            "prepare": "a function of a group, or None",
        }
        raise_violations(
            ConfigError,
            [
                Violation(
                    f"RLTask.{name} has type {type(value).__name__}. It must be {what}.", name, type(value).__name__
                )
                for name, what in wanted.items()
                if not callable(value := getattr(self, name)) and (name == "rollout" or value is not None)
            ],
        )

    def prepared(self, group: Group, position: int) -> Group:
        """The group of one prompt after `prepare`; an error if responses were added or lost."""
        if self.prepare is None:
            return group
        made = self.prepare(group)
        if len(made) != len(group):
            raise RunError(
                f"RLTask.prepare returned {len(made)} responses for the {len(group)} of the prompt at position {position:,}: "
                "a group is trained whole. To leave a response out, give it the weight 0 in the loss.",
                field="prepare",
                given=len(made),
                nearest=(len(group),),
            )
        return [dict(response) for response in made]


def checked(returned: object, prompts: Prompts, generations: int) -> list[Group]:
    """What a rollout returned, as groups; an error that says what is wrong with it."""

    def refuse(what: str, given: object, nearest: tuple[Any, ...] = ()) -> RunError:
        return RunError(
            f"RLTask.rollout returned {what} for the prompts at positions {prompts.positions.start:,} to "
            f"{prompts.positions.stop:,}. It must return a list for each prompt, of generations={generations} mappings.",
            field="rollout",
            given=given,
            nearest=nearest,
        )

    kind = type(returned).__name__
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise refuse(f"a {kind}", kind)
    groups = cast("Sequence[object]", returned)
    if len(groups) != len(prompts):
        raise refuse(f"{len(groups)} groups of responses, not {len(prompts)},", len(groups), (len(prompts),))
    made: list[Group] = []
    for position, group in zip(prompts.positions, groups, strict=True):
        several = cast("Sequence[object]", group) if isinstance(group, Sequence) else [None]
        if not all(isinstance(one, Mapping) for one in several):
            what = f"a group that is no list of mappings, at position {position:,},"
            raise refuse(what, type(cast(object, group)).__name__)
        responses = [dict(cast("Mapping[str, Any]", one)) for one in several]
        if len(responses) != generations:
            few = "few" if len(responses) < generations else "many"
            what = f"too {few} responses, {len(responses)}, to the prompt at position {position:,},"
            raise refuse(what, len(responses), (generations,))
        for name in ADDED:
            if any(name in one for one in responses):
                raise refuse(f"responses with the key {name!r}, which the loop adds itself,", name)
        made.append(responses)
    return made
