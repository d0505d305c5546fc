"""What a round was, and where its time went: the result that users get, and the event that reports draw."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from batchwright.core.codec import encode

# Spans of time in the event of a round: so many at most for all processes, and none that is a smaller part of the round. A
# line has 20 KB.
_MOST_SPANS, _SHORTEST = 400, 0.001
Span = tuple[str, str, float, float]


@dataclass(frozen=True)
class RoundResult:
    """One round: what was sampled and trained, and where its time went, on the first trainer; the same on all trainers."""

    round: int
    first_prompt: int
    prompts: int
    responses: int
    dropped_responses: int
    policy_version: int
    policy_lag: int
    loss: float
    reward: float | None
    seconds: float
    rollout_seconds: float
    train_seconds: float
    wait_seconds: float


@dataclass
class Clock:
    """Where the time of a round goes: spans of (process, kind, begin, end), in seconds since 1970, so that those of several
    processes can be compared. Durations do not depend on a clock that is set."""

    process: str
    begin: float = field(default_factory=time.time)
    spans: list[Span] = field(default_factory=list[Span])
    _began: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        """Seconds since 1970."""
        return self.begin + time.perf_counter() - self._began

    def add(self, kind: str, begin: float) -> float:
        """Add a span of this process that ends now; returns its end."""
        self.spans.append((self.process, kind, begin, end := self.now()))
        return end

    def total(self, kind: str) -> float:
        """The seconds of all spans of a kind."""
        return sum(end - begin for _, one, begin, end in self.spans if one == kind)


def round_event(made: RoundResult, start: float, spans: list[Span]) -> dict[str, Any]:
    """The values of a `round` event; its spans, of all processes, count from the start of the round."""
    counted = [
        [process, kind, round(begin - start, 6), round(end - start, 6)]
        for process, kind, begin, end in _few(spans, _SHORTEST * made.seconds)
    ]
    return {"spans": counted, "begin": start, **encode(made)}


def _few(spans: list[Span], least: float) -> list[Span]:
    """At most _MOST_SPANS spans, as many for each process. Neighbours of one kind are joined, and the shortest left out."""
    by_process: dict[str, list[Span]] = {}
    for span in sorted(spans, key=itemgetter(2)):
        by_process.setdefault(span[0], []).append(span)
    most = max(1, _MOST_SPANS // max(1, len(by_process)))
    found: list[Span] = []
    for own in by_process.values():
        visible = _joined([span for span in _joined(own, least) if span[3] - span[2] > least], least)
        found += visible if len(visible) <= most else _coarse(visible, most)
    return found


def _joined(spans: list[Span], least: float) -> list[Span]:
    """The spans of one process, in order; those of one kind with less than `least` seconds between them are one."""
    made: list[Span] = []
    for process, kind, begin, end in spans:
        if made and made[-1][1] == kind and begin - made[-1][3] <= least:
            made[-1] = (process, kind, made[-1][2], max(end, made[-1][3]))
        else:
            made.append((process, kind, begin, end))
    return made


def _coarse(spans: list[Span], most: int) -> list[Span]:
    """The spans of one process, which do not overlap, in as many equal parts of their time: each shows its most frequent kind."""
    first, width = spans[0][2], (spans[-1][3] - spans[0][2]) / most
    parts: list[dict[str, float]] = [{} for _ in range(most)]
    for _, kind, begin, end in spans:
        for at in range(int((begin - first) / width), min(most - 1, int((end - first) / width)) + 1):
            inside = min(end, first + (at + 1) * width) - max(begin, first + at * width)
            parts[at][kind] = parts[at].get(kind, 0.0) + inside
    drawn = [
        (spans[0][0], max(part, key=lambda kind: part[kind]), first + at * width, first + (at + 1) * width)
        for at, part in enumerate(parts)
        if sum(part.values()) > width / 2  # else it was idle for most of the time
    ]
    return _joined(drawn, width / 2)
