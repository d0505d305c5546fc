"""What a micro step of an update is fed: finished responses, prepared by whole groups, recorded, and collated.

The first trainer waits for the responses and tells the others which files have them (`board`); every trainer reads for itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch.utils import data

from batchwright.core.ramp.schedule import Step
from batchwright.core.rl import RLPlan
from batchwright.processes.endings import error_from_record, users_code
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.state.ledger import Ledger
from batchwright.runtime.state.updates import Updates

from .link import STATUS, Mailbox, pauses
from .ranks import Side
from .record import Clock
from .responses import Piece, Responses
from .rollouts import Rollouts
from .rounds import Update, block_prompts, micro_responses, new_prompts
from .task import Group, RLTask


@dataclass
class Micro:
    """A micro batch whose data are waited for when they are needed: the accumulator looks one micro batch ahead."""

    step: Step
    index: int
    count: int
    ids: range
    load: Callable[[], Any]
    filler: bool = False

    @property
    def data(self) -> Any:
        """The collated responses."""
        return self.load()


class Feed:
    """The responses of this trainer: `micros` for each update."""

    def __init__(
        self,
        task: RLTask,
        order: GlobalOrder,
        responses: Responses,
        ledger: Ledger,
        updates: Updates,
        rank: int,
        rollouts: Rollouts | None,
        side: Side | None,
    ) -> None:
        self._task, self._order, self._responses = task, order, responses
        self._ledger, self._updates, self._rank, self._rollouts = ledger, updates, rank, rollouts
        self._store = side.store if side else None
        self._board = Mailbox(side.store, "pieces", shared=True) if side else None
        self._loaded: dict[Piece, tuple[list[Group], list[list[int]]]] = {}
        self.lag = 0
        """The worst lag of the responses of the present update so far."""

    def micros(self, update: Update, plan: RLPlan, step: Step, clock: Clock) -> Iterator[Micro]:
        """This rank's micro batches of an update."""
        self.lag = 0
        whole = Step(update.version, update.prompts.start, plan.responses_per_update, step.segment)
        for index in range(plan.accumulation_steps):
            own = micro_responses(plan, index, self._rank)

            def load(index: int = index, own: range = own) -> Any:
                return self._batch(update, plan, index, own, clock)

            yield Micro(whole, index, plan.accumulation_steps, own, load)

    def applied(self) -> None:
        """An update is applied: every trainer has read what the first one told of it."""
        if self._board is not None and self._rollouts is not None:
            self._board.sweep()

    def _batch(self, update: Update, plan: RLPlan, index: int, own: range, clock: Clock) -> Any:
        """The collated responses of one micro step; waits until they are finished."""
        begin = clock.now()
        pieces = self._pieces(block_prompts(plan, update, index), first_pass=update.number < plan.updates_per_pass)
        begin = clock.add("wait", begin)
        self._loaded = {piece: groups for piece, groups in self._loaded.items() if piece in pieces}
        self.lag = max(self.lag, *(update.version - piece.version for piece in pieces))
        generations, first = plan.generations_per_prompt, update.prompts.start
        used: list[tuple[range, int]] = []
        rows: list[Any] = []
        numbers: list[int] = []
        for piece in pieces:
            span = range(
                max(own.start, (piece.positions.start - first) * generations),
                min(own.stop, (piece.positions.stop - first) * generations),
            )
            if span:
                groups, numbered = self._groups(piece)
                places = [divmod(k - (piece.positions.start - first) * generations, generations) for k in span]
                rows += [groups[group][generation] for group, generation in places]
                numbers += [numbered[group][generation] for group, generation in places]
                used.append((piece.positions, piece.version))
        self._updates.fed(update.version, numbers, used)
        if update.number < plan.updates_per_pass and (prompts := new_prompts(plan, update, own)):
            self._ledger.fed(self._order.ids(prompts))
        with users_code("RLTask.collate failed"):
            batch = (self._task.collate or cast(Any, data).default_collate)(rows)
        clock.add("train", begin)
        return batch

    def _groups(self, piece: Piece) -> tuple[list[Group], list[list[int]]]:
        """The prepared groups of a piece, and the numbers of their responses as stored: read once while it is trained."""
        if piece not in self._loaded:
            groups, generations = self._responses.read(piece), self._responses.generations
            numbered = [[r["prompt_position"] * generations + r["generation"] for r in group] for group in groups]
            for index, position in enumerate(piece.positions):
                with users_code(f"RLTask.prepare failed for the prompt at position {position:,}"):
                    groups[index] = self._task.prepared(groups[index], position)
            self._loaded[piece] = groups, numbered
        return self._loaded[piece]

    def _pieces(self, prompts: range, *, first_pass: bool) -> list[Piece]:
        """The files that hold the responses to these prompts: the first trainer finds them, and tells the others."""
        if self._rollouts is not None:
            pieces = self._rollouts.pieces(prompts)
            if first_pass:
                self._rollouts.advance(prompts.stop)
            if self._board is not None:
                self._board.put({"pieces": [piece.name for piece in pieces]})
            return pieces
        assert self._board is not None and self._store is not None
        pause = pauses()
        while (message := self._board.poll()) is None:
            if self._store.check([STATUS]):
                raise error_from_record(json.loads(self._store.get(STATUS))["failed"])
            pause()
        return [piece for name in message["pieces"] if (piece := Piece.named(name))]
