"""Solves the equation global_batch_size = micro_batch_size × accumulation_steps × data_parallel_size.

`solve` takes the known numbers and returns every choice of the others, best first: the largest micro batch that fits,
then the least accumulation (accumulation saves memory and adds no throughput). If a pipeline's microbatches are the
accumulation steps, `PipelineRule.cost` ranks the choices instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from batchwright.core.errors import PlanError, Violation, either
from batchwright.core.numbers import divisors, nearest_divisors, nearest_of

from .pipeline import ASSUMED_LENGTH, PipelineRule
from .request import BatchRequest, asked_for

# Batches tried on each side of one that has no split; the valid numbers of a pipeline are much closer.
_TRIES = 200
# Enough for every divisor of any batch in use; three free numbers can give millions.
MOST_ALTERNATIVES = 1000


@dataclass(frozen=True)
class Split:
    """One way to make a batch: the three factors."""

    micro_batch_size: int
    accumulation_steps: int
    data_parallel_size: int

    @property
    def product(self) -> int:
        """The global batch.

        >>> Split(4, 8, 2).product
        64
        """
        return self.micro_batch_size * self.accumulation_steps * self.data_parallel_size


@dataclass(frozen=True)
class Unknowns:
    """The known numbers of the equation (None if unknown), and what the world and the pipeline allow.

    An unknown data-parallel size must be a multiple of `rank_step`.
    """

    global_batch_size: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    data_parallel_size: int | None
    max_micro_batch_size: int | None = None
    rank_step: int = 1
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
    """Every split of a known global batch, best first; an error with the arithmetic if there is none.

    >>> solve(Unknowns(64, None, None, 8, max_micro_batch_size=4))[0]
    Split(micro_batch_size=4, accumulation_steps=2, data_parallel_size=8)
    """
    batch = given.global_batch_size
    if batch is None:
        smallest = _smallest(given)
        if _refusals(given, smallest):
            raise _refused(given, smallest)
        return (smallest,)
    known = given.known
    product = prod(known.values())
    if len(known) == 3 and product != batch:
        raise PlanError(
            violations=[
                _contradiction(batch, known, product),
                *(Violation(f"{reason}.") for reason in _refusals(given, Split(**known))),
            ]
        )
    if batch % product:
        raise _indivisible(given, batch, product)
    found = tuple(islice(splits(given), MOST_ALTERNATIVES))
    if not found:
        free = Unknowns(batch, given.micro_batch_size, given.accumulation_steps, given.data_parallel_size)
        closest = islice(_splits(free, batch), MOST_ALTERNATIVES)
        raise _refused(given, min(closest, key=lambda split: len(_refusals(given, split))))
    return found


def _smallest(given: Unknowns) -> Split:
    """No global batch is given: one accumulation step (or as many as the pipeline needs) on the known ranks."""
    micro = given.micro_batch_size or given.max_micro_batch_size
    if micro is None:
        known = " and ".join(f"{name}={value}" for name, value in given.known.items())
        raise PlanError(
            f"Not enough is known to plan a batch: {f'only {known}' if known else 'nothing'} "
            f"{'are' if len(given.known) > 1 else 'is'} known. Give global_batch_size (or global_batch_size_tokens), "
            "micro_batch_size or max_micro_batch_size.",
            field="global_batch_size",
        )
    steps = given.accumulation_steps
    if steps is None:
        steps = given.pipeline.fewest if given.pipeline else 1
    return Split(micro, steps, given.data_parallel_size or given.rank_step)


def splits(given: Unknowns) -> Iterator[Split]:
    """The valid splits of a known batch, best first.

    >>> next(splits(Unknowns(64, None, None, 8, max_micro_batch_size=4)))
    Split(micro_batch_size=4, accumulation_steps=2, data_parallel_size=8)
    """
    batch, rule = given.global_batch_size or 0, given.pipeline
    allowed = (s for s in _splits(given, batch) if not _refusals(given, s))
    if rule is None:
        return allowed
    ranks = given.data_parallel_size
    if ranks is None:
        # Costs on different numbers of ranks cannot be compared: least accumulation that fills the stages.
        return iter(sorted(allowed, key=lambda s: s.accumulation_steps < rule.stages))
    tokens = batch // ranks * (given.sequence_length or ASSUMED_LENGTH)  # a note says so
    return iter(sorted(allowed, key=lambda s: (rule.cost(s.accumulation_steps, tokens), -s.micro_batch_size)))


def ragged_split(given: Unknowns) -> Split:
    """A split of a batch that the ranks do not divide: shares differ by one sample, and so may the last micro batch.

    accumulation = ceil(ceil(batch / ranks) / micro); a free micro batch is as small as its number of steps allows.

    >>> ragged_split(Unknowns(1000, 3, None, 64))
    Split(micro_batch_size=3, accumulation_steps=6, data_parallel_size=64)
    >>> ragged_split(Unknowns(71, None, None, 8, max_micro_batch_size=8))
    Split(micro_batch_size=5, accumulation_steps=2, data_parallel_size=8)
    """
    ranks = given.data_parallel_size or 1
    share = -(-(given.global_batch_size or 0) // ranks)
    if given.micro_batch_size is not None:
        return Split(given.micro_batch_size, -(-share // given.micro_batch_size), ranks)
    most = given.max_micro_batch_size
    return Split(*ragged_share(share, given.accumulation_steps, most, given.pipeline), ranks)


def ragged_share(share: int, steps: int | None, most: int | None, rule: PipelineRule | None) -> tuple[int, int]:
    """The micro batch and accumulation steps of `share` samples per rank, in `steps` or as few as `most` allows.

    >>> ragged_share(9, None, 8, None)
    (5, 2)
    """
    fewest = steps or -(-share // min(share, most or share))
    if rule is not None and steps is None:  # the first number that fills the pipeline, if any
        tried = (-(-share // -(-share // n)) for n in range(max(fewest, rule.stages), share + 1))
        reach = 4 * rule.stages + (rule.group or 0)  # the valid numbers are much closer
        fewest = next((n for n in islice(tried, reach) if n >= rule.stages and rule.refusal(n) is None), fewest)
    micro = -(-share // fewest)
    return micro, -(-share // micro)


def _splits(given: Unknowns, batch: int) -> Iterator[Split]:
    """All splits, with the micro batch falling and the accumulation rising."""
    micro, steps, ranks = given.micro_batch_size, given.accumulation_steps, given.data_parallel_size
    rest, over = divmod(batch, (steps or 1) * (ranks or 1))
    if over:
        return
    all_divisors = () if micro and (steps or ranks) else divisors(rest)
    for m in (micro,) if micro else reversed(all_divisors):
        if rest % m or (given.max_micro_batch_size and m > given.max_micro_batch_size and not micro):
            continue
        left = rest // m
        if steps and ranks:
            if left == 1:
                yield Split(m, steps, ranks)
        elif steps or ranks:
            yield Split(m, steps or left, ranks or left)
        else:
            for a in all_divisors:
                if a > left:
                    break
                if left % a == 0:
                    yield Split(m, a, left // a)


def _refusals(given: Unknowns, split: Split) -> list[str]:
    """Why a split is not valid, as text; empty if it is."""
    reasons: list[str] = []
    limit = given.max_micro_batch_size
    if limit is not None and split.micro_batch_size > limit:
        reasons.append(f"micro_batch_size={split.micro_batch_size} is more than max_micro_batch_size={limit}")
    refusal = given.pipeline.refusal(split.accumulation_steps) if given.pipeline else None
    if refusal:
        reasons.append(f"accumulation_steps={split.accumulation_steps} are the pipeline's microbatches, and {refusal}")
    if given.data_parallel_size is None and split.data_parallel_size % given.rank_step:
        reasons.append(
            f"data_parallel_size={split.data_parallel_size} is not a multiple of {given.rank_step}, so it does not "
            "fill whole nodes"
        )
    return reasons


def _refused(given: Unknowns, closest: Split) -> PlanError:
    """The error for a batch that divides but has no valid split: the reasons for the closest split, and nearest values."""
    head = f"global_batch_size={closest.product} has no valid split"
    if given.known:
        head += f" with {equation(given.known)}"
    name, near = "global_batch_size", ()
    for name in (*(n for n in ("micro_batch_size", "accumulation_steps") if n in given.known), "global_batch_size"):
        near = _nearest(given, name)
        if near:
            break
    return PlanError(
        f"{head}: {'; '.join(_refusals(given, closest))}." + (f" Nearest: {name} {either(near)}." if near else ""),
        field=name,
        given=getattr(given, name),
        nearest=near,
    )


def _nearest(given: Unknowns, name: str) -> tuple[int, ...]:
    """The nearest values of one number on both sides that work with all the others."""
    batch, wanted = given.global_batch_size, getattr(given, name)
    if name == "global_batch_size":
        return () if batch is None else _nearest_batches(given, batch)
    if batch is None:  # the other numbers are free, so only a limit can refuse this one
        found = (given.max_micro_batch_size,) if name == "micro_batch_size" else ()
        if name == "accumulation_steps" and given.pipeline:
            found = given.pipeline.nearest(wanted)
        return tuple(n for n in found if n and not _refusals(given, _smallest(replace(given, **{name: n}))))
    others = prod(value for other, value in given.known.items() if other != name)
    works = [n for n in divisors(batch // others) if any(splits(replace(given, **{name: n})))]
    return nearest_of(works, wanted)


def _nearest_batches(given: Unknowns, batch: int) -> tuple[int, ...]:
    """The nearest batches on both sides that have a valid split: multiples of the known factors, tried outwards."""
    quantum = prod(given.known.values()) * (given.rank_step if given.data_parallel_size is None else 1)
    times = batch // quantum
    if given.max_micro_batch_size and {"accumulation_steps", "data_parallel_size"} <= set(given.known):
        times = min(times, given.max_micro_batch_size)

    def works(k: int) -> bool:
        return k * quantum != batch and any(splits(replace(given, global_batch_size=k * quantum)))

    below = next((k for k in range(times, max(0, times - _TRIES), -1) if works(k)), None)
    above = next((k for k in range(times + 1, times + _TRIES) if works(k)), None)
    return tuple(k * quantum for k in (below, above) if k)


def _contradiction(batch: int, known: dict[str, int], product: int) -> Violation:
    fixes = [f"global_batch_size={product}"]
    for name, value in known.items():
        others = product // value
        if batch % others == 0:
            fixes.append(f"{name}={batch // others}")
    return Violation(
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
    near = _nearest_batches(given, batch)
    shown = " or ".join(f"{n} ({n // product} {_one(unit, n // product)})" for n in near)
    arithmetic = f"{equation(known)} = {product}, and " if len(known) > 1 else ""
    message = (
        f"global_batch_size={batch} is not a whole number of {what}: {arithmetic}{batch} / {product} = "
        f"{batch / product:.2f}."
    )
    if near:
        message += f" Nearest: {shown}."
    for name in ("data_parallel_size", "micro_batch_size"):
        if name in known:
            others = product // known[name]
            if batch % others == 0:
                step = given.rank_step if name == "data_parallel_size" else 1
                fits = [n for n in nearest_divisors(batch // others, known[name]) if n != known[name] and n % step == 0]
                if fits:
                    message += f" Or keep {batch} with {name} {either(fits)}."
                    break
    if "data_parallel_size" in known:
        message += " Or give allow_ragged: shares then differ by one sample."
    return PlanError(message, field="global_batch_size", given=batch, nearest=near)


def equation(factors: dict[str, int]) -> str:
    """`micro_batch_size 3 × data_parallel_size 64`."""
    return " × ".join(f"{name} {value}" for name, value in factors.items())


def _one(unit: str, number: int) -> str:
    return unit.removesuffix("s") if number == 1 else unit


def rounded_batch(request: BatchRequest, unknowns: Unknowns, notes: list[str]) -> Unknowns:
    """Round the global batch to a multiple of the known factors, if `round` is given."""
    batch = unknowns.global_batch_size
    if request.round is None or batch is None:
        return unknowns
    known = unknowns.known
    quantum = prod(known.values())
    rounded = batch // quantum * quantum if request.round == "down" else -(-batch // quantum) * quantum
    if len(known) < 3:  # to the first multiple with a valid split: a pipeline may refuse some
        step = -quantum if request.round == "down" else quantum
        tried = range(rounded, rounded + 1000 * step, step)
        rounded = next((n for n in tried if n > 0 and any(splits(replace(unknowns, global_batch_size=n)))), rounded)
    asked = f"global_batch_size {batch}"
    if request.global_batch_size_tokens and not asked_for(request, batch):
        asked = f"global_batch_size_tokens {request.global_batch_size_tokens:,}"
    if asked_for(request, rounded):
        return unknowns
    if rounded == 0:
        raise PlanError(
            f"global_batch_size={batch} rounds down to 0: {equation(known)} = {quantum} is more than {batch}. "
            f"Nearest: {quantum} (round up).",
            field="global_batch_size",
            given=batch,
            nearest=(quantum,),
        )
    if len(known) == 3:  # all factors are given: rounding must not hide a contradiction
        return unknowns
    notes.append(
        f"Rounded {request.round} as asked: {asked} -> {rounded} samples"
        + (f", a multiple of {equation(known)}" if known else "")
        + (f" = {quantum}." if len(known) > 1 else ".")
    )
    return replace(unknowns, global_batch_size=rounded)


def ragged_plan(request: BatchRequest, unknowns: Unknowns) -> Split | None:
    """The split of a batch that does not divide, if allow_ragged is given; else None."""
    batch, ranks = unknowns.global_batch_size, unknowns.data_parallel_size
    if not request.allow_ragged or batch is None or ranks is None:
        return None
    share = -(-batch // ranks)
    micro, steps = unknowns.micro_batch_size, unknowns.accumulation_steps
    if batch % (ranks * (micro or 1) * (steps or 1)) == 0:
        return None
    split = ragged_split(unknowns)
    micro, needed = split.micro_batch_size, split.accumulation_steps
    reason = unknowns.pipeline.refusal(needed) if unknowns.pipeline else None
    if unknowns.pipeline and reason:
        near = unknowns.pipeline.nearest(needed)
        batches = [m * micro * ranks if m < needed else (m - 1) * micro * ranks + 1 for m in near]
        raise PlanError(
            f"global_batch_size={batch} on data_parallel_size={ranks} takes {needed} accumulation steps of micro batches "
            f"of {micro}, which the pipeline does not allow: {reason}. Nearest: {either(batches)}.",
            field="global_batch_size",
            given=batch,
            nearest=batches,
        )
    if steps not in (None, needed):
        raise PlanError(
            f"global_batch_size={batch} on data_parallel_size={ranks} takes {needed} accumulation steps: shares of at "
            f"most ceil({batch} / {ranks}) = {share} samples in micro batches of {micro}; not {steps}. "
            f"Nearest: accumulation_steps={needed}.",
            field="accumulation_steps",
            given=steps,
            nearest=(needed,),
        )
    if unknowns.max_micro_batch_size and micro > unknowns.max_micro_batch_size:
        raise PlanError(
            f"micro_batch_size={micro} is more than max_micro_batch_size={unknowns.max_micro_batch_size}. "
            f"Nearest: {unknowns.max_micro_batch_size}.",
            field="micro_batch_size",
            given=micro,
            nearest=(unknowns.max_micro_batch_size,),
        )
    return split
