"""Which rank is on which host, which hosts read, and who reads which rows for whom. Numbers only.

The ranks of a job run on hosts. If only some hosts read, each of them reads a contiguous part of every load batch, in its
first rank, and sends rows to the ranks that train on them. A load batch is the span of one step, or of `read_ahead` steps.
Readers and ranks only partition it, so the order of samples does not depend on either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from batchwright.core.batch.loading import loading, part_of, share
from batchwright.core.errors import PlanError
from batchwright.core.ramp.schedule import Step

from .sampler import StepSampler

LoadingHosts = int | Fraction | Sequence[int]
"""How many hosts read: a count, an expansion factor (a `Fraction`: all hosts / reading hosts), or the hosts themselves."""


@dataclass(frozen=True)
class Hosts:
    """The host of every rank, and the hosts that read.

    >>> Hosts.of(ranks=8, loading_hosts=2, ranks_per_host=2)
    Hosts(of_rank=(0, 0, 1, 1, 2, 2, 3, 3), reading=(0, 1))
    """

    of_rank: tuple[int, ...]
    reading: tuple[int, ...]

    @classmethod
    def of(cls, ranks: int, loading_hosts: LoadingHosts, ranks_per_host: int | Sequence[int] | None = None) -> Hosts:
        """From what a user gives. `ranks_per_host`: a number, or the host of every rank; None: each rank is a host."""
        if isinstance(ranks_per_host, int) or ranks_per_host is None:
            each = 1 if ranks_per_host is None else ranks_per_host
            of_rank = tuple(rank // each for rank in range(ranks)) if each > 0 else ()
        else:
            of_rank = tuple(ranks_per_host)
        hosts = sorted(set(of_rank))
        if len(of_rank) != ranks or hosts != list(range(len(hosts))):
            raise PlanError(
                f"ranks_per_host={str(ranks_per_host)[:60]}: must be a number, or for each of the {ranks} ranks the number of "
                "its host, counted from 0 without gaps.",
                field="ranks_per_host",
                given=str(ranks_per_host)[:60],
            )
        return cls(of_rank, _reading(loading_hosts, len(hosts)))

    @property
    def readers(self) -> tuple[int, ...]:
        """The rank that reads on each reading host: its first one."""
        return tuple(self.of_rank.index(host) for host in self.reading)


def checked(given: Any) -> int | Fraction | list[int]:
    """What a user gives, of the kinds that it may have.

    >>> checked((0, 2)), checked(Fraction(4, 3))
    ([0, 2], Fraction(4, 3))
    """
    if isinstance(given, Fraction) or _whole(given):
        return given
    if isinstance(given, (list, tuple, range)) and all(map(_whole, cast("Sequence[Any]", given))):
        return list(cast("Sequence[int]", given))
    shown = str(cast(Any, given))[:60]
    raise PlanError(
        f"loading_hosts={shown} is of type {type(cast(Any, given)).__name__}: must be a number of hosts, a list of hosts such "
        "as [0, 2], or an expansion factor as a Fraction, such as Fraction(3, 2).",
        field="loading_hosts",
        given=shown,
    )


def _whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _reading(loading_hosts: LoadingHosts, hosts: int) -> tuple[int, ...]:
    given = checked(loading_hosts)
    if isinstance(given, Fraction):
        if given < 1:
            raise PlanError(
                f"expansion_factor={given}: must be at least 1 in a loader. Below 1 it means that fewer hosts continue from "
                "the states of more hosts: one position says where all of them were (batchwright.dialects.positions).",
                field="expansion_factor",
                given=str(given),
                nearest=(1,),
            )
        return tuple(range(loading(1, hosts=hosts, expansion_factor=given).loading_hosts))
    if isinstance(given, int):
        if not 1 <= given <= hosts:
            nearest = min(max(given, 1), hosts)
            raise PlanError(
                f"loading_hosts={given}: must be 1 to {hosts}, the number of hosts. Nearest: {nearest}. Ranks with one host name "
                "are on one host, unless ranks_per_host says otherwise.",
                field="loading_hosts",
                given=given,
                nearest=(nearest,),
            )
        return tuple(range(given))
    chosen = tuple(given)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(hosts)):
        raise PlanError(
            f"loading_hosts={str(list(chosen))[:60]}: must name at least one host, each once, out of 0 to {hosts - 1}.",
            field="loading_hosts",
            given=str(list(chosen))[:60],
            nearest=tuple(range(hosts))[:4],
        )
    return chosen


@dataclass(frozen=True)
class LoadBatch:
    """Steps whose rows are read at once, as load batch `number` of an iteration."""

    number: int
    steps: tuple[Step, ...]

    @property
    def span(self) -> range:
        """All positions."""
        return range(self.steps[0].start_sample, self.steps[-1].end_sample)

    def read_by(self, reader: int, readers: int) -> range:
        """The positions that one reader reads."""
        return share(self.span, reader, readers)

    def needed(self, rank: int, ranks: int) -> list[range]:
        """The positions that a rank needs, step by step; a rank without a share repeats the first sample of the step."""
        spans = (range(step.start_sample, step.end_sample) for step in self.steps)
        return [share(span, rank, ranks) or span[:1] for span in spans]

    def sources(self, rank: int, ranks: int, readers: int) -> dict[int, int]:
        """How many rows a rank gets from each reader, in the order of their positions.

        >>> LoadBatch(0, (Step(0, 0, 10, 0),)).sources(rank=1, ranks=2, readers=3)
        {1: 2, 2: 3}
        """
        found: dict[int, int] = {}
        for part in self.needed(rank, ranks):
            for reader in range(part_of(self.span, part[0], readers), part_of(self.span, part[-1], readers) + 1):
                rows = _common(part, self.read_by(reader, readers))
                found[reader] = found.get(reader, 0) + len(rows)
        return found

    def served(self, part: range, ranks: int) -> dict[int, list[range]]:
        """Which positions of `part` each rank needs; a rank that needs none is left out."""
        found: dict[int, list[range]] = {}
        for step in self.steps:
            span = range(step.start_sample, step.end_sample)
            here = _common(span, part)
            if not here:
                continue
            for rank in range(part_of(span, here[0], ranks), part_of(span, here[-1], ranks) + 1):
                found.setdefault(rank, []).append(_common(here, share(span, rank, ranks)))
            if here[0] == span[0]:
                for rank in range(len(span), ranks):
                    found.setdefault(rank, []).append(span[:1])
        return found


def load_batches(sampler: StepSampler, read_ahead: int) -> Iterator[LoadBatch]:
    """The steps of a sampler, `read_ahead` at a time."""
    number, steps = 0, list[Step]()
    for step in sampler.steps():
        steps.append(step)
        if len(steps) == read_ahead:
            yield LoadBatch(number, tuple(steps))
            number, steps = number + 1, []
    if steps:
        yield LoadBatch(number, tuple(steps))


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), max(min(one.stop, other.stop), max(one.start, other.start)))
