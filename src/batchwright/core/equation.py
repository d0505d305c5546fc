"""The equation, solved: global_batch_size = micro_batch_size × accumulation_steps × data_parallel_size.

`solve` takes the numbers that are known and gives every way to choose the rest, best first: the largest micro batch
that fits, then the least accumulation (accumulation saves memory, it does not add throughput). Where a pipeline's
microbatches are the accumulation steps, the trade-off of `core.pipeline` ranks them instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from .errors import PlanError, Violation, either
from .nearest import divisors, nearest_divisors, nearest_multiples
from .pipeline import PipelineRule
from .world import World

MOST_ALTERNATIVES = 1000  # enough for every divisor of any batch in use; three free numbers can give millions


@dataclass(frozen=True)
class Split:
    """One way to make a batch: the three factors."""

    micro_batch_size: int
    accumulation_steps: int
    data_parallel_size: int

    @property
    def product(self) -> int:
        """The batch they make.

        >>> Split(4, 8, 2).product
        64
        """
        return self.micro_batch_size * self.accumulation_steps * self.data_parallel_size


@dataclass(frozen=True)
class Unknowns:
    """What is known of the equation (None where unknown), and what the world and the pipeline allow."""

    global_batch_size: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    data_parallel_size: int | None
    max_micro_batch_size: int | None = None
    world: World = field(default_factory=lambda: World(1))
    pipeline: PipelineRule | None = None
    sequence_length: int | None = None

    @property
    def known(self) -> dict[str, int]:
        """The known factors, by name."""
        factors = {
            "micro_batch_size": self.micro_batch_size,
            "accumulation_steps": self.accumulation_steps,
            "data_parallel_size": self.data_parallel_size,
        }
        return {name: value for name, value in factors.items() if value is not None}


def solve(given: Unknowns) -> tuple[Split, ...]:
    """Every split of a known global batch, best first; an error with the arithmetic where there is none.

    >>> solve(Unknowns(64, None, None, 8, max_micro_batch_size=4))[0]
    Split(micro_batch_size=4, accumulation_steps=2, data_parallel_size=8)
    """
    batch = given.global_batch_size
    if batch is None:
        return (_smallest(given),)
    known = given.known
    product = 1
    for value in known.values():
        product *= value
    if len(known) == 3 and product != batch:
        raise _contradiction(batch, known, product)
    if batch % product:
        raise _indivisible(given, batch, product)
    found = tuple(islice(_ranked(given, batch), MOST_ALTERNATIVES))
    if not found:
        raise _refused(given, batch)
    return found


def _smallest(given: Unknowns) -> Split:
    """No global batch is asked for: one accumulation step (or what the pipeline needs) on the ranks there are."""
    micro = given.micro_batch_size or given.max_micro_batch_size
    if micro is None:
        raise PlanError(
            "There is not enough to plan from: "
            + (" and ".join(f"{name}={value}" for name, value in given.known.items()) or "nothing")
            + " is known. Give global_batch_size (or global_batch_size_tokens), micro_batch_size or max_micro_batch_size.",
            field="global_batch_size",
        )
    steps = given.accumulation_steps
    if steps is None:
        rule = given.pipeline
        steps = 1 if rule is None else next(m for m in range(rule.stages, 10**9) if rule.refusal(m) is None)
    split = Split(micro, steps, given.data_parallel_size or given.world.replica_step)
    if _illegal(given, split):
        raise _refused(given, split.product)
    return split


def _ranked(given: Unknowns, batch: int) -> Iterator[Split]:
    splits = (s for s in _splits(given, batch) if not _illegal(given, s))
    rule = given.pipeline
    if rule is None or given.data_parallel_size is None:
        return splits
    tokens = batch // given.data_parallel_size * (given.sequence_length or 4096)  # 4096: assumed, and said in a note
    return iter(sorted(splits, key=lambda s: (rule.cost(s.accumulation_steps, tokens), -s.micro_batch_size)))


def _splits(given: Unknowns, batch: int) -> Iterator[Split]:
    """The divisors walked with the micro batch falling and the accumulation rising."""
    micro, steps, ranks = given.micro_batch_size, given.accumulation_steps, given.data_parallel_size
    all_divisors = () if micro and (steps or ranks) else divisors(batch)
    for m in (micro,) if micro else reversed(all_divisors):
        if batch % m or (given.max_micro_batch_size and m > given.max_micro_batch_size and not micro):
            continue
        rest = batch // m
        if steps and ranks:
            if rest == steps * ranks:
                yield Split(m, steps, ranks)
        elif steps or ranks:
            fixed = steps or ranks or 1
            if rest % fixed == 0:
                yield Split(m, steps or rest // fixed, ranks or rest // fixed)
        else:
            for a in all_divisors:
                if a > rest:
                    break
                if rest % a == 0:
                    yield Split(m, a, rest // a)


def _illegal(given: Unknowns, split: Split) -> list[Violation]:
    wrong: list[Violation] = []
    limit = given.max_micro_batch_size
    if limit is not None and split.micro_batch_size > limit:
        wrong.append(
            Violation(
                f"micro_batch_size={split.micro_batch_size} is more than max_micro_batch_size={limit}, the most that "
                f"fits. Nearest: {limit}.",
                "micro_batch_size",
                split.micro_batch_size,
                (limit,),
            )
        )
    if given.pipeline is not None:
        reason = given.pipeline.refusal(split.accumulation_steps)
        if reason:
            near = given.pipeline.nearest(split.accumulation_steps)
            wrong.append(
                Violation(
                    f"accumulation_steps={split.accumulation_steps} are the pipeline's microbatches, and {reason}. "
                    f"Nearest: {either(near)}.",
                    "accumulation_steps",
                    split.accumulation_steps,
                    near,
                )
            )
    world = given.world
    if given.data_parallel_size is None:
        step = world.replica_step
        if (world.devices_per_node and split.data_parallel_size % step) or (
            split.data_parallel_size % world.expert_parallel
        ):
            wrong.append(
                Violation(
                    f"data_parallel_size={split.data_parallel_size} does not fit the world: whole nodes of "
                    f"{world.devices_per_node or 'any'} devices hold {step} replicas, expert_parallel is "
                    f"{world.expert_parallel}.",
                    "data_parallel_size",
                    split.data_parallel_size,
                )
            )
    return wrong


def _refused(given: Unknowns, batch: int) -> PlanError:
    """Divisible, but nothing that divides it is allowed: say why for the closest split."""
    free = Unknowns(batch, given.micro_batch_size, given.accumulation_steps, given.data_parallel_size)
    closest = min(
        islice(_splits(free, batch), MOST_ALTERNATIVES),
        key=lambda s: len(_illegal(given, s)),
        default=Split(given.micro_batch_size or 1, given.accumulation_steps or 1, given.data_parallel_size or 1),
    )
    wrong = _illegal(given, closest)
    head = f"global_batch_size={batch} has no split that is allowed with {equation(given.known) or 'these limits'}"
    first = wrong[0]
    return PlanError(
        violations=[
            Violation(f"{head}. {first.message}", first.field, first.given, first.nearest),
            *wrong[1:],
        ]
    )


def _contradiction(batch: int, known: dict[str, int], product: int) -> PlanError:
    fixes = [f"global_batch_size={product}"]
    for name, value in known.items():
        others = product // value
        if batch % others == 0:
            fixes.append(f"{name}={batch // others}")
    return PlanError(
        f"global_batch_size={batch} contradicts {equation(known)} = {product}. Nearest: {', or '.join(fixes)}.",
        field="global_batch_size",
        given=batch,
        nearest=(product,),
    )


_WHOLE = {
    "micro_batch_size": ("samples in every micro batch", "samples"),
    "accumulation_steps": ("accumulation steps", "steps"),
    "data_parallel_size": ("data-parallel ranks", "ranks"),
}


def _indivisible(given: Unknowns, batch: int, product: int) -> PlanError:
    known = given.known
    free = [name for name in _WHOLE if name not in known]
    what, unit = _WHOLE[free[0]] if len(free) == 1 else (f"samples for {equation(known)}", "×")
    near = nearest_multiples(product, batch)
    shown = " or ".join(f"{n} ({n // product} {_one(unit, n // product)})" for n in near)
    arithmetic = f"{equation(known)} = {product}, and " if len(known) > 1 else ""
    message = (
        f"global_batch_size={batch} is not a whole number of {what}: {arithmetic}{batch} / {product} = "
        f"{batch / product:.2f}. Nearest: {shown}."
    )
    for name in ("data_parallel_size", "micro_batch_size"):
        if name in known:
            others = product // known[name]
            if batch % others == 0:
                fits = [n for n in nearest_divisors(batch // others, known[name]) if n != known[name]]
                message += f" Or keep {batch} with {name} {either(fits)}."
                break
    if "data_parallel_size" in known:
        message += " Or allow_ragged, where shares differ by one sample."
    return PlanError(message, field="global_batch_size", given=batch, nearest=near)


def equation(factors: dict[str, int]) -> str:
    """`micro_batch_size 3 × data_parallel_size 64`."""
    return " × ".join(f"{name} {value}" for name, value in factors.items())


def _one(unit: str, number: int) -> str:
    return unit.removesuffix("s") if number == 1 else unit
