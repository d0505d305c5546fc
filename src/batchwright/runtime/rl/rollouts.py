"""What the first trainer asks of the workers: every prompt of the rounds ahead once, as far as the queue and the lag allow.

    while the queue has room:
        micro batch = the first prompts that are neither finished nor asked for
        if the newest policy will be too old for their round: stop (stale="wait"), or ask early (stale="drop")
        ask the worker with the least to do

It is asked when a round begins, whenever training moves on, and when a policy is published; never because an answer came. So
which policy samples the responses that are trained does not depend on how fast anybody is, and a run can be repeated exactly.

What was asked for early is asked for again as soon as a policy is published that may sample it. A worker skips an early micro
batch that it has not begun when the next policy is there; what it has begun or finished is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchwright.core.ramp.schedule import Step
from batchwright.processes.endings import error_from_record

from .link import pauses
from .responses import Piece, Responses, Spans
from .rounds import Rounds
from .settings import RLSettings
from .worker import Worker, Workers, dead, hanging

Tell = Callable[..., None]
_FAR = 2**62  # after every position


@dataclass(frozen=True)
class _Asked:
    """A piece that a worker was asked for."""

    piece: Piece
    worker: Worker


class Rollouts:
    """The queue of responses: what is finished, what is asked for, and the policy that samples next."""

    def __init__(
        self,
        rounds: Rounds,
        responses: Responses,
        workers: Workers,
        settings: RLSettings,
        tell: Tell,
        kept: Mapping[Piece, float | None],
    ) -> None:
        self._rounds, self._responses, self._workers, self._settings = rounds, responses, workers, settings
        self._tell = tell  # an event
        # Each span is a finished Piece, or one that was asked for.
        self._spans = Spans()
        for piece in kept:
            self._spans.add(piece.positions, piece)
        self._rewards = dict(kept)  # the sum of the rewards of each piece, None if it has none
        self._version = -1
        self._position = rounds.schedule.at_step(rounds.first).start_sample
        self.dropped = 0
        """Responses that were sampled and dropped, since somebody set this to 0."""
        self.sampled: list[dict[str, Any]] = []
        """Answers since somebody cleared this, for the record of a round."""

    def publish(self, version: int, block: Tensor) -> None:
        """From now on, responses are sampled by this policy."""
        pause = pauses()
        while not self._workers.weights.ready():
            self._collect()
            self._look_after()
            pause()
        self._version = version
        self._workers.weights.publish(block)  # first: a worker that is told takes them at once
        for worker in self._workers.each:
            worker.asks.put({"weights": version})
        self._collect()
        self._drop_early()
        self._ask_ahead()

    def _drop_early(self) -> None:
        """Drop what was sampled early for a round that the newest policy may sample: it is asked for again."""
        for held in self._spans.between(self._position, _FAR):
            piece: Piece = held.piece if isinstance(held, _Asked) else held
            if piece.version < self._oldest(piece.positions.start) <= self._version:
                self._spans.remove(piece.positions)
                if held is piece:  # one that is being sampled is dropped when it arrives
                    self._drop(piece)

    def _drop(self, piece: Piece) -> None:
        self.dropped += len(piece.positions) * self._responses.generations
        self._responses.delete(piece)

    def _oldest(self, position: int) -> int:
        """The oldest policy that may sample the prompt at a position."""
        return self._rounds.oldest(self._rounds.schedule.at_sample(position).step)

    def advance(self, position: int) -> None:
        """All prompts before a position are trained once, or being trained: there is room for others."""
        self._position = max(self._position, position)
        self._ask_ahead()

    def forget(self, before: int) -> None:
        """All prompts before a position are trained, and will not be asked for again."""
        self._spans.forget(before)
        self._rewards = {piece: total for piece, total in self._rewards.items() if piece.positions.stop > before}

    def reward(self, step: Step) -> float | None:
        """The mean reward of a finished round; None if its responses have no numbers as rewards."""
        sums = [self._rewards.get(piece) for piece in self.trained(step)]
        known = [total for total in sums if total is not None]
        if not known or len(known) < len(sums):
            return None
        return sum(known) / (step.global_batch_size * self._responses.generations)

    def trained(self, step: Step) -> list[Piece]:
        """The pieces of a finished round."""
        return self._spans.between(step.start_sample, step.end_sample)

    def pieces(self, positions: range) -> list[Piece]:
        """The finished responses to these prompts; waits for them."""
        found: list[Piece] = []
        at = positions.start
        while at < positions.stop:
            found.append(self._piece(at))
            at = found[-1].positions.stop
        return found

    def _piece(self, position: int) -> Piece:
        pause = pauses()
        while not isinstance(held := self._spans.at(position), Piece):
            if held is None:
                self._ask(self._missing(position))
            self._collect()
            self._look_after()
            if not isinstance(self._spans.at(position), Piece):
                pause()
        return held

    def _missing(self, position: int) -> range:
        """The next prompts, from a position on, that are neither finished nor asked for; at most one micro batch."""
        gap = self._spans.gap(position)
        micro = self._rounds.next_micro(gap.start)
        return range(gap.start, min(gap.stop, micro.stop))

    def _ask_ahead(self) -> None:
        plan, total = self._rounds.plan, self._rounds.schedule.total_samples
        while True:
            at = self._spans.gap(self._position).start
            if self._version < 0 or at == total:
                return
            step = self._rounds.schedule.at_sample(at)
            if self._settings.stale == "wait" and self._version < self._rounds.oldest(step.step):
                return
            micros = self._rounds.plan_of(step.global_batch_size).rollout_micro_steps
            if self._spans.count_from(self._position) >= (self._settings.queue or (plan.rounds_ahead + 1) * micros):
                return
            self._ask(self._missing(at))

    def _ask(self, positions: range, worker: Worker | None = None) -> None:
        worker = worker or min(self._workers.each, key=lambda one: len(one.asked))
        if not worker.asked:
            worker.heard = time.monotonic()
        round = self._rounds.schedule.at_sample(positions.start).step
        message = {"prompts": [positions.start, positions.stop], "version": self._version, "round": round}
        worker.asks.put({**message, "early": self._version < self._rounds.oldest(round)})
        piece = Piece(positions, self._version)
        worker.asked.append(piece)
        self._spans.add(positions, _Asked(piece, worker))

    def _collect(self) -> None:
        """Take the answers that are there."""
        for worker in self._workers.each:
            while (answer := worker.answers.poll()) is not None:
                worker.heard, worker.lost = time.monotonic(), 0
                if "error" in answer:
                    raise error_from_record(answer["error"])
                piece = Piece(range(*answer["prompts"]), answer["version"])
                worker.asked.remove(piece)
                if answer.get(
                    "skipped"
                ):  # its prompts were asked for again when the policy was published that it waited for
                    continue
                self.sampled.append({**answer, "worker": worker.number})
                if self._spans.at(piece.positions.start) == _Asked(piece, worker):
                    self._spans.add(piece.positions, piece)
                    self._rewards[piece] = answer["rewards"]
                else:
                    self._drop(piece)

    def _look_after(self) -> None:
        """Replace workers that died or hang, where that is possible; else raise the error."""
        for worker in self._workers.each:
            how = worker.ended()
            silent = bool(worker.asked) and time.monotonic() - worker.heard > self._settings.rollout_timeout
            if how is None and not silent:
                continue
            error = dead(worker, how) if how else hanging(worker, self._settings.rollout_timeout)
            if self._settings.rollout != "process" or worker.lost >= self._settings.rollout_restarts:
                raise error
            self._collect()  # what it finished before
            new = self._workers.replace(worker.number)
            self._tell(
                "rollout_replaced",
                worker=worker.number,
                why=str(error),
                prompts=sum(len(p.positions) for p in worker.asked),
            )
            if self._version >= 0:
                new.asks.put({"weights": self._version})
            for piece in worker.asked:
                if self._spans.at(piece.positions.start) == _Asked(piece, worker):
                    self._ask(piece.positions, new)
