"""Batches of reinforcement learning as one graph: prompts -> responses -> updates -> micro batches.

    round:   prompts × generations = responses, all sampled from one policy
    update:  an equal part of the round's prompts, each with its whole group of responses
    micro:   what one data-parallel rank processes at once
    lag:     updates between the policy that sampled a response and the one that learns from it; at worst
             (updates − 1) + rounds_ahead × updates, with updates counted over all iterations of a round

Every count says whether it counts prompts or responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import ConfigError, PlanError, Violation, either, raise_violations
from .numbers import count, divisors, nearest_divisors, nearest_multiples, nearest_of


@dataclass(frozen=True)
class RLPlan:
    """One round of reinforcement learning: every count of prompts, responses, updates and micro batches."""

    prompts_per_round: int
    generations_per_prompt: int
    responses_per_round: int
    updates_per_pass: int
    iterations: int
    updates_per_round: int
    prompts_per_update: int
    responses_per_update: int
    data_parallel_size: int
    train_micro_responses: int
    train_micro_prompts: int | None
    accumulation_steps: int
    rollout_micro_prompts: int
    rollout_micro_responses: int
    rollout_micro_steps: int
    rounds_ahead: int
    on_policy: bool
    worst_policy_lag_updates: int
    train_micro_given: bool = True
    """False: a training micro batch is a rank's whole part of an update, whatever the number of prompts."""
    rollout_micro_given: bool = True
    """False: a rollout micro batch is the whole round, whatever the number of prompts."""
    notes: tuple[str, ...] = ()


UNITS = ("prompts", "responses")
LARGEST = 10**12  # far above any round, and listing its divisors is still fast
_OFF = ("-1", "none", "null", "off")


def rl(
    *,
    prompts: int | str,
    generations: int | str,
    train_micro_prompts: int | str | None = None,
    train_micro_responses: int | str | None = None,
    rollout_micro_prompts: int | str | None = None,
    updates: int | str = 1,
    iterations: int | str = 1,
    rounds_ahead: int | str = 0,
    data_parallel_size: int | str = 1,
    micro_batch_size: int | str | None = None,
    micro_batch_unit: str | None = None,
) -> RLPlan:
    """The batch of an RL job; a micro batch of None or -1 means no micro-batching.

    `micro_batch_size` is MaxText's one key for both micro batches, rollout and training, over all ranks. MaxText's code counts
    prompts in it, and its page counts responses (prompt-response pairs): `micro_batch_unit` says which.

    >>> plan = rl(prompts=32, generations=8, train_micro_prompts=4)
    >>> plan.responses_per_update, plan.accumulation_steps, plan.on_policy
    (256, 8, True)
    """
    wrong: list[Violation] = []

    def read(name: str, value: int | str, least: int = 1) -> int:
        try:
            return count(value, name, least=least, most=LARGEST)
        except ConfigError as error:
            wrong.extend(error.violations)
            return least

    def micro_or_none(name: str, value: int | str | None) -> int | None:
        return None if value is None or str(value).lower() in _OFF else read(name, value)

    sizes = _Sizes(
        read("prompts", prompts),
        read("generations", generations),
        read("updates", updates),
        read("data_parallel_size", data_parallel_size),
        micro_or_none("train_micro_prompts", train_micro_prompts),
        micro_or_none("train_micro_responses", train_micro_responses),
    )
    rollout_prompts = micro_or_none("rollout_micro_prompts", rollout_micro_prompts)
    both = micro_or_none("micro_batch_size", micro_batch_size)
    unit = "prompts" if micro_batch_unit is None else str(micro_batch_unit).strip().lower()
    if unit not in UNITS:
        message = f"micro_batch_unit={micro_batch_unit!r} is not known. One of: {', '.join(UNITS)}."
        wrong.append(Violation(message, "micro_batch_unit", micro_batch_unit, UNITS))
    elif micro_batch_unit is not None and micro_batch_size is None:
        message = f"micro_batch_unit={unit} says what micro_batch_size counts, and that is not given."
        wrong.append(Violation(message, "micro_batch_unit", micro_batch_unit))
    passes, ahead = read("iterations", iterations), read("rounds_ahead", rounds_ahead, 0)
    raise_violations(ConfigError, wrong)
    count(sizes.prompts * sizes.generations, "responses_per_round", most=LARGEST)
    trains = train_micro_prompts is None and train_micro_responses is None  # -1 counts as given
    rolls = rollout_micro_prompts is None
    if both is None or not (trains or rolls):
        return _graph(sizes, rollout_prompts, passes, ahead)
    if unit == "responses":
        return _in_responses(both, sizes, trains, rolls, rollout_prompts, passes, ahead)
    if trains:
        sizes = replace(sizes, train_micro_prompts=_prompts_of_a_rank(both, sizes))
    if rolls:
        made = _graph(sizes, both, passes, ahead, rollout_name="micro_batch_size")
    else:
        made = _graph(sizes, rollout_prompts, passes, ahead)
    if micro_batch_unit is not None:
        return made
    note = (
        f"micro_batch_size={both} was read as prompts, as MaxText's code counts: {both} × {sizes.generations} generations = "
        f"{both * sizes.generations} responses. MaxText's page counts prompt-response pairs: for that reading give "
        "micro_batch_unit=responses."
    )
    return replace(made, notes=(note, *made.notes))


def _in_responses(
    both: int, sizes: _Sizes, trains: bool, rolls: bool, rollout_prompts: int | None, passes: int, ahead: int
) -> RLPlan:
    """MaxText's one micro batch, counted in responses over all ranks. A rollout samples whole groups."""
    ranks, notes = sizes.data_parallel_size, ()
    if trains:
        responses = sizes.prompts // sizes.updates * sizes.generations
        whole = [ranks * n for n in divisors(responses // ranks)] if responses % ranks == 0 else []
        # If the updates or the ranks do not divide, `_graph` says so.
        if whole and sizes.prompts % sizes.updates == 0 and both not in whole:
            near = nearest_of(whole, both)
            raise PlanError(
                f"micro_batch_size={both} does not divide an update: it counts the responses of all ranks, an update has "
                f"{responses} responses, {responses} / {both} = {responses / both:.2f}, and {both} / {ranks} "
                f"data_parallel_size = {both / ranks:.2f}. Nearest: {either(near)}.",
                field="micro_batch_size",
                given=both,
                nearest=near,
            )
        sizes = replace(sizes, train_micro_responses=max(1, both // ranks))
    if rolls:
        groups, over = divmod(both, sizes.generations)
        if over == 0 and sizes.prompts % groups == 0:
            rollout_prompts = groups
        else:
            notes = (
                f"micro_batch_size={both} responses are not a part of the round in whole groups of {sizes.generations}: "
                "responses to all prompts are generated at once. To split the rollout, give rollout_micro_prompts.",
            )
    made = _graph(sizes, rollout_prompts, passes, ahead)
    return replace(made, notes=(*notes, *made.notes))


def resized(plan: RLPlan, prompts: int) -> RLPlan:
    """The same plan for a round with another number of prompts: a prompt ramp.

    A micro batch that was given stays as it is. Without one, it stays the whole round, or a rank's whole part of an update.

    >>> plan = rl(prompts=32, generations=8, train_micro_responses=16, rollout_micro_prompts=4)
    >>> resized(plan, 8).accumulation_steps, resized(plan, 8).rollout_micro_steps
    (4, 2)
    """
    if prompts == plan.prompts_per_round:
        return plan
    return rl(
        prompts=prompts,
        generations=plan.generations_per_prompt,
        train_micro_responses=plan.train_micro_responses if plan.train_micro_given else None,
        rollout_micro_prompts=plan.rollout_micro_prompts if plan.rollout_micro_given else None,
        updates=plan.updates_per_pass,
        iterations=plan.iterations,
        rounds_ahead=plan.rounds_ahead,
        data_parallel_size=plan.data_parallel_size,
    )


def _prompts_of_a_rank(micro: int, sizes: _Sizes) -> int:
    """A rank's part of a micro batch that is counted over all ranks. The micro batch must also divide an update."""
    ranks, (part, over) = sizes.data_parallel_size, divmod(sizes.prompts, sizes.updates)
    if over:
        return max(1, micro // ranks)  # `_graph` raises the error about the updates
    whole = [ranks * n for n in divisors(part // ranks)] if part % ranks == 0 else []
    if micro in whole:
        return micro // ranks
    near = nearest_of(whole, micro)
    raise PlanError(
        f"micro_batch_size={micro} does not divide an update: it counts the prompts of all ranks, an update has "
        f"{part} prompts, {part} / {micro} = {part / micro:.2f}, and {micro} / {ranks} data_parallel_size = "
        f"{micro / ranks:.2f}. "
        + (f"Nearest: {either(near)}." if near else "No number of prompts works: give train_micro_responses."),
        field="micro_batch_size",
        given=micro,
        nearest=near,
    )


@dataclass(frozen=True)
class _Sizes:
    prompts: int
    generations: int
    updates: int
    data_parallel_size: int
    train_micro_prompts: int | None
    train_micro_responses: int | None

    def works(self) -> bool:
        """Whether updates, ranks and micro batches all divide the responses."""
        responses = self.prompts // self.updates * self.generations
        micro = self.train_micro_responses or (self.train_micro_prompts or 0) * self.generations or 1
        return self.prompts % self.updates == 0 and responses % (self.data_parallel_size * micro) == 0

    def nearest(self, name: str, candidates: Sequence[int]) -> tuple[int, ...]:
        """The nearest candidates for one size on both sides; only those that work with the other sizes, if any do."""
        wanted = getattr(self, name)
        good = [n for n in candidates if replace(self, **{name: n}).works()] or candidates
        return nearest_of(good, wanted)


def _graph(
    sizes: _Sizes,
    rollout_micro_prompts: int | None,
    iterations: int,
    rounds_ahead: int,
    rollout_name: str = "rollout_micro_prompts",
) -> RLPlan:
    prompts, generations, updates = sizes.prompts, sizes.generations, sizes.updates
    data_parallel_size = sizes.data_parallel_size
    train_micro_prompts, train_micro_responses = sizes.train_micro_prompts, sizes.train_micro_responses
    wrong: list[Violation] = []
    if prompts % updates:
        near = sizes.nearest("updates", divisors(prompts))
        wrong.append(
            Violation(
                f"updates={updates} would split a prompt's group of responses: {prompts} prompts / {updates} updates = "
                f"{prompts / updates:.2f} prompts each. Advantages are computed over whole groups, so a group belongs to one "
                f"update. Nearest: {either(near)} updates.",
                "updates",
                updates,
                near,
            )
        )
        raise_violations(PlanError, wrong)
    prompts_per_update = prompts // updates
    responses = prompts_per_update * generations
    if train_micro_prompts is not None and train_micro_responses is not None:
        if train_micro_prompts * generations != train_micro_responses:
            wrong.append(
                Violation(
                    f"train_micro_prompts={train_micro_prompts} contradicts train_micro_responses="
                    f"{train_micro_responses}: {train_micro_prompts} prompts × {generations} generations = "
                    f"{train_micro_prompts * generations} responses. Give one of them.",
                    "train_micro_responses",
                    train_micro_responses,
                    (train_micro_prompts * generations,),
                )
            )
    if responses % data_parallel_size:
        near = sizes.nearest("data_parallel_size", divisors(responses))
        wrong.append(
            Violation(
                f"data_parallel_size={data_parallel_size} does not divide the {responses} responses of an update "
                f"({prompts_per_update} prompts × {generations} generations): {responses} / {data_parallel_size} = "
                f"{responses / data_parallel_size:.2f}. Nearest: {either(near)}.",
                "data_parallel_size",
                data_parallel_size,
                near,
            )
        )
        raise_violations(PlanError, wrong)
    share = responses // data_parallel_size
    unit, micro = "train_micro_responses", train_micro_responses or share
    if train_micro_prompts is not None:
        unit, micro = "train_micro_prompts", train_micro_prompts * generations
    if share % micro:
        # Valid sizes in the given unit: divisors of the rank's share; whole groups if prompts are counted.
        if unit == "train_micro_prompts":
            whole = share // generations if share % generations == 0 else 0
            near = nearest_divisors(whole, train_micro_prompts or 1) if whole else ()
            in_words = f"{train_micro_prompts} prompts × {generations} generations = {micro} responses"
        else:
            near, in_words = nearest_divisors(share, micro), f"{micro} responses"
        wrong.append(
            Violation(
                f"{unit}={train_micro_prompts or micro} does not divide an update: {in_words}, and the {share} "
                f"responses of a rank ({responses} / {data_parallel_size}) / {micro} = {share / micro:.2f}. "
                + (
                    f"Nearest: {either(near)}."
                    if near
                    else "No number of whole groups divides it: give train_micro_responses."
                ),
                unit,
                train_micro_prompts or micro,
                near,
            )
        )
    rollout = prompts if rollout_micro_prompts is None else rollout_micro_prompts
    if prompts % rollout:
        near = nearest_divisors(prompts, rollout)
        wrong.append(
            Violation(
                f"{rollout_name}={rollout} does not divide the round's {prompts} prompts: {prompts} / {rollout} "
                f"= {prompts / rollout:.2f}. Nearest: {either(near)}, or prompts {either(nearest_multiples(rollout, prompts))}.",
                rollout_name,
                rollout,
                near,
            )
        )
    raise_violations(PlanError, wrong)

    updates_per_round = updates * iterations
    on_policy = updates_per_round == 1 and rounds_ahead == 0
    return RLPlan(
        prompts_per_round=prompts,
        generations_per_prompt=generations,
        responses_per_round=prompts * generations,
        updates_per_pass=updates,
        iterations=iterations,
        updates_per_round=updates_per_round,
        prompts_per_update=prompts_per_update,
        responses_per_update=responses,
        data_parallel_size=data_parallel_size,
        train_micro_responses=micro,
        train_micro_prompts=micro // generations if micro % generations == 0 else None,
        accumulation_steps=share // micro,
        rollout_micro_prompts=rollout,
        rollout_micro_responses=rollout * generations,
        rollout_micro_steps=prompts // rollout,
        rounds_ahead=rounds_ahead,
        on_policy=on_policy,
        worst_policy_lag_updates=(updates_per_round - 1) + rounds_ahead * updates_per_round,
        train_micro_given=not (train_micro_prompts is None and train_micro_responses is None),
        rollout_micro_given=rollout_micro_prompts is not None,
        notes=_notes(generations, micro, share, updates_per_round, rounds_ahead, rollout < prompts),
    )


def _notes(
    generations: int, micro: int, share: int, updates_per_round: int, rounds_ahead: int, rolls_in_parts: bool
) -> tuple[str, ...]:
    notes: list[str] = []
    if generations == 1:
        notes.append(
            "generations=1: estimators that compare the responses of one prompt (GRPO, RLOO) get zero advantage; they "
            "need at least 2."
        )
    if micro % generations and generations > 1:
        notes.append(
            f"A training micro batch of {micro} responses cuts groups of {generations} in two. The gradient is exact if "
            "advantages are computed per group before the update is split; no group crosses an update."
        )
    if micro < share and not rolls_in_parts:
        notes.append("Accumulation does not reduce the memory of generation; rollout_micro_prompts does.")
    if updates_per_round > 1:
        first = " Only the first update is on-policy." if rounds_ahead == 0 else ""
        notes.append(
            f"{updates_per_round} updates learn from one round, so the loss needs an importance ratio (with clipping).{first}"
        )
    if rounds_ahead:
        notes.append(
            f"Responses wait up to {rounds_ahead} round{'s' * (rounds_ahead > 1)} before they are learned from: "
            "correct for the policy that sampled them. Where groups that are too old are dropped, count them: train_rl "
            "samples them again, and elsewhere the update gets smaller."
        )
    return tuple(notes)
