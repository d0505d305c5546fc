"""A round as arithmetic: which prompts each update has, which policy may sample them, which responses each micro step trains.

    round r      prompts [start, end) of the global order: step r of a schedule that counts prompts
    version      updates that a policy has had; round r begins at  version₀ + (r − r₀) × updates_per_round
    update       an equal, contiguous part of the round's prompts, each with all its responses
    response k   of an update: generation k mod G of prompt k div G
    micro step i of rank j on T ranks, m responses each:  k in [(i·T + j)·m, (i·T + j + 1)·m)

Micro step i of all ranks together is one contiguous block, so that training can begin with the first finished responses. A
response may enter round r if its policy is at most `rounds_ahead` rounds older than the round's first; so its lag is never
more than the plan's worst, (updates − 1) + rounds_ahead × updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from batchwright.core.errors import PlanError, Violation, raise_violations
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.core.rl import RLPlan, resized


@dataclass(frozen=True)
class Update:
    """One optimizer step: the policy of `version` learns from these prompts and becomes `version + 1`."""

    version: int
    round: int
    number: int
    """Its number in the round, over all iterations."""
    prompts: range


@dataclass(frozen=True)
class Rounds:
    """The rounds of a launch, from round `first` on, which begins at policy `version`.

    >>> from batchwright.core.ramp.rules import Constant
    >>> from batchwright.core.rl import rl
    >>> rounds = Rounds(rl(prompts=8, generations=4, updates=2, rounds_ahead=1), Constant(8).compile())
    >>> rounds.version_at(3), rounds.oldest(3), [update.prompts for update in rounds.updates(rounds.schedule.at_step(1))]
    (6, 4, [range(8, 12), range(12, 16)])
    """

    plan: RLPlan
    schedule: Schedule
    first: int = 0
    version: int = 0
    _plans: dict[int, RLPlan] = field(default_factory=dict[int, RLPlan], compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check every stage ahead: its number of prompts must divide as the plan's does."""
        found: list[Violation] = []
        for segment in self.schedule.segments:
            if segment.end_step is not None and segment.end_step <= self.first:
                continue
            sizes = [segment.global_batch_size, segment.global_batch_size - segment.shortfall]
            for size in dict.fromkeys(sizes):
                try:
                    self.plan_of(size)
                except PlanError as error:
                    where = f"rounds of {size} prompts, from round {segment.first_step:,} on: "
                    found += [Violation(where + v.message, v.field, v.given, v.nearest) for v in error.violations]
        raise_violations(PlanError, found)

    def plan_of(self, prompts: int) -> RLPlan:
        """The plan of a round with this number of prompts."""
        if prompts not in self._plans:
            self._plans[prompts] = resized(self.plan, prompts)
        return self._plans[prompts]

    @property
    def most_micros(self) -> int:
        """The most rollout micro batches that rounds_ahead + 1 rounds have."""
        sizes = {segment.global_batch_size for segment in self.schedule.segments}
        return (self.plan.rounds_ahead + 1) * max(self.plan_of(size).rollout_micro_steps for size in sizes)

    def version_at(self, round: int) -> int:
        """The policy with which a round begins; below `version` for rounds before this launch."""
        return self.version + (round - self.first) * self.plan.updates_per_round

    def oldest(self, round: int) -> int:
        """The oldest policy whose responses may enter a round."""
        return self.version_at(round - self.plan.rounds_ahead)

    def updates(self, step: Step) -> Iterator[Update]:
        """The updates of a round, in order: every iteration goes over all its prompts."""
        plan, first = self.plan_of(step.global_batch_size), self.version_at(step.step)
        for number in range(plan.updates_per_round):
            start = step.start_sample + number % plan.updates_per_pass * plan.prompts_per_update
            yield Update(first + number, step.step, number, range(start, start + plan.prompts_per_update))

    def next_micro(self, position: int) -> range:
        """The prompts of the rollout micro batch that has `position`, from there on."""
        step = self.schedule.at_sample(position)
        size = self.plan_of(step.global_batch_size).rollout_micro_prompts
        end = step.start_sample + ((position - step.start_sample) // size + 1) * size
        return range(position, min(end, step.end_sample))


def micro_responses(plan: RLPlan, index: int, rank: int) -> range:
    """The responses of an update that one rank trains in one micro step.

    >>> from batchwright.core.rl import rl
    >>> plan = rl(prompts=4, generations=4, train_micro_responses=2, data_parallel_size=2)
    >>> [micro_responses(plan, index, rank) for index in (0, 1) for rank in (0, 1)]
    [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    """
    start = (index * plan.data_parallel_size + rank) * plan.train_micro_responses
    return range(start, start + plan.train_micro_responses)


def block_prompts(plan: RLPlan, update: Update, index: int) -> range:
    """The prompts whose responses all ranks together train in one micro step of an update."""
    size, generations = plan.data_parallel_size * plan.train_micro_responses, plan.generations_per_prompt
    first, last = index * size // generations, ((index + 1) * size - 1) // generations
    return update.prompts[first : last + 1]


def new_prompts(plan: RLPlan, update: Update, own: range) -> range:
    """The prompts whose first response is among some responses of an update: on that rank, the ledger counts them.

    >>> from batchwright.core.rl import rl
    >>> update = Update(0, 0, 0, range(8, 12))
    >>> [new_prompts(rl(prompts=4, generations=4), update, own) for own in (range(0, 6), range(6, 8), range(8, 16))]
    [range(8, 10), range(10, 10), range(10, 12)]
    """
    return update.prompts[_whole_up(own.start, plan) : _whole_up(own.stop, plan)]


def _whole_up(responses: int, plan: RLPlan) -> int:
    """A number of responses in groups, rounded up."""
    return -(-responses // plan.generations_per_prompt)
