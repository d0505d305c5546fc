"""The part that all adapters share: the micro batches of each optimizer step, their weights, and the files of the run.

    adapter = Adapter(course, dataset, rank=0, ranks=2, directory="out")
    adapter.open(state_of_the_checkpoint)                 # None: from the start
    for group in adapter.groups(collate=collate):         # one optimizer step: the list of this rank's micro batches
        scales, stop = adapter.weigh(group, weight)       # collective
        for micro, scale in zip(group, scales):        # all but the last without synchronisation
            (mean_loss(micro.data) * scale).backward()
        optimizer.step()
        adapter.applied(group)
        if stop or adapter.done or …:
            adapter.before_save()                         # collective
            save(…, adapter.state())
            adapter.saved()

The loss of a framework is a mean over the micro batch. `scale` is its weight / the weight of the step × ranks: summed over
the micro batches and averaged over the ranks, as DDP does, the gradient is that of the whole batch.
"""

from __future__ import annotations

import copy
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import ConfigError, RunError, Violation
from batchwright.core.ramp.schedule import Step
from batchwright.rundir import names
from batchwright.rundir.checkpoint import MANIFEST, STATE, listing
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import write_json
from batchwright.rundir.status import claim_launch
from batchwright.runtime.answers import Answer
from batchwright.runtime.data.loader import Loader, MapDataset, Micro, Reader, default_collate
from batchwright.runtime.data.order import GlobalOrder, same_length
from batchwright.runtime.data.sampler import Slice, StepSampler
from batchwright.runtime.device import widest_float
from batchwright.runtime.state.ledger import Ledger

from .additive import Pieces, Weight, pieces
from .course import Course, UnderRun

T = TypeVar("T")
_SHOWN = 8  # samples that an error lists


class Group(list[Micro]):
    """This rank's micro batches of one optimizer step."""

    @property
    def step(self) -> Step:
        """The step, which is the same on all ranks."""
        return self[0].step


class Adapter:
    """One run inside another trainer: its position, its ledger, its right to save."""

    def __init__(
        self,
        course: Course,
        dataset: MapDataset,
        *,
        rank: int,
        ranks: int,
        directory: Path | str,
        seed: int = 0,
        shuffle: bool = True,
        run: UnderRun | None = None,
    ) -> None:
        self.course, self.dataset, self.rank, self.ranks, self.run = course, dataset, rank, ranks, run
        self.order = GlobalOrder(len(dataset), seed=seed, shuffle=shuffle)
        self.directory = run.directory if run else Path(directory)
        self.end = min(course.samples, run.end_sample) if run else course.samples
        self.position = run.start_sample if run else 0
        self.launch: int | None = None
        self.sampler()  # refuses batches that do not divide, before anything is built
        self._ledger: Ledger | None = None
        self._spare: Any = None  # the first data with a weight
        self._stop = threading.Event()
        self._handlers: dict[int, Any] = {}  # those before, by signal

    # -- a launch

    def open(self, state: Mapping[str, Any] | None = None, origin: str = "the checkpoint") -> None:
        """Start a launch from the state of a checkpoint, whose name `origin` is, or from sample 0. Collective."""
        self._check_order()
        self.position, parent = self._resumed(state, origin) if state is not None else (0, None)
        if self.run and state is None and self.run.start_sample:
            raise RunError(
                f"batchwright run continues at sample {self.run.start_sample:,}, but no complete checkpoint was found. "
                "Resume from the checkpoints of the launch before: is the output directory the same in every launch?",
                field="checkpoint",
                given=self.run.start_sample,
            )
        self.launch = self.from_first("numbering the launch", self._number)
        if state is not None:
            self.from_first("comparing the checkpoint with the ledger", lambda: self._check_origin(parent))
        self.from_first("claiming the run directory", lambda: Fence(self.directory, self.launch or 0).claim() and None)
        self._ledger = Ledger(
            self.directory / names.LEDGER,
            self.order,
            launch=self.launch,
            rank=self.rank,
            ranks=self.ranks,
            start=(self.course.step_at(self.position), self.position),
            parent=parent,
        )
        if self.run:
            self._report()
        self.listen()

    def listen(self) -> None:
        """Under `batchwright run`, take its stop signal as a request to save and stop, and SIGTERM, which schedulers send.

        Call it again if a framework has replaced a handler.
        """
        if self.run and threading.current_thread() is threading.main_thread():
            for number in {signal.SIGTERM, self.run.stop_signal}:
                self._handlers.setdefault(number, signal.signal(number, lambda *_: self._stop.set()))

    def unlisten(self) -> None:
        """Give the signals back to the handlers before."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._handlers.clear()

    def close(self) -> None:
        """End the launch."""
        if self._ledger is not None:
            self._ledger.finish()
            self._ledger = None
        self.unlisten()

    @property
    def done(self) -> bool:
        """Whether this launch has trained all its samples."""
        return self.position >= self.end

    # -- a step

    def sampler(self) -> StepSampler:
        """This rank's micro batches from the position on."""
        return StepSampler(
            self.course.schedule,
            self.course.micro,
            self.rank,
            self.ranks,
            self.position,
            allow_ragged=self.course.allow_ragged,
        )

    def groups(self, collate: Callable[[list[Any]], Any] | None = None, **options: Any) -> Iterator[Group]:
        """One group per optimizer step, from the position to the end of the launch; `options` are those of `Loader`."""
        group = Group()
        if self.done:
            return
        for micro in Loader(self.dataset, self.order, self.sampler(), collate=collate, **options):
            group.append(micro)
            if micro.index == micro.count - 1:
                yield group
                if group.step.end_sample >= self.end:
                    return
                group = Group()

    def weigh(self, group: Group, weight: Weight, device: torch.device | str = "cpu") -> tuple[list[float], bool]:
        """The scale of each micro batch's mean loss, and whether a signal asks to save and stop. Collective.

        A micro batch without weight has the scale 0. Its data are replaced by those of a micro batch with weight: the mean
        of nothing is NaN, and so is its gradient, also after a multiplication by 0. It is still run, since other ranks
        wait for its collectives.
        """
        weights: list[float] = []
        for index, micro in enumerate(group):
            known = float(weight(micro.data))
            if not known:
                group[index] = replace(micro, data=self._stand_in(group, weight, micro))
            elif self._spare is None:
                self._spare = copy.copy(micro.data)  # the trainer may change the batch
            weights.append(0.0 if micro.filler else known)
        wrong = next((own for own in weights if not 0 <= own < float("inf")), None)
        total, stop = sum(weights) if wrong is None else float("nan"), float(self._stop.is_set())
        if self.ranks > 1:
            sums = torch.tensor([total, stop], dtype=widest_float(torch.device(device)), device=device)
            dist.all_reduce(sums)
            total, stop = sums.tolist()
        if not 0 < total < float("inf"):
            given = total if wrong is None else wrong
            raise RunError(self._without_weight(group.step, given), field="weight", given=given)
        return [self.ranks * own / total for own in weights], bool(stop)

    def applied(self, group: Group, outcome: str = "applied") -> None:
        """Record a step after the optimizer applied it, or `skipped` it because of an overflow in fp16."""
        step = group.step
        if self._ledger is not None:
            for micro in group:
                if not micro.filler:
                    self._ledger.fed(micro.ids)
            self._ledger.applied(step.step, step.start_sample, step.global_batch_size, outcome)
        self.position = step.end_sample

    def pieces(
        self, group: Group, weights: Sequence[Weight], collate: Callable[[list[Any]], Any] | None, **hooks: Any
    ) -> Pieces:
        """The first micro batch with a weight, read again as a whole and in halves; of a single sample, also the next one."""
        micro = next((m for m in group if not m.filler and weights[0](m.data)), None)
        if micro is None:
            data, after = group[0].data, hooks.get("after")  # `before` has changed it already
            return Pieces(after(data) if after else data, (), f"no sample of rank {self.rank} has a weight")
        positions, single = micro.positions, len(micro.positions) == 1
        if single:
            positions = range(positions[0], positions[0] + 2)
        index = Slice(micro.step, 0, 1, positions), self.order.ids(positions)
        samples = Reader(self.dataset, self.order.seed, list)[index][2]
        return replace(pieces(samples, weights, collate or default_collate, **hooks), larger=single)

    def largest(self, values: list[float], device: torch.device | str = "cpu") -> list[float]:
        """The largest of each value over the ranks; NaN counts as infinite. Collective."""
        found = torch.tensor(values, dtype=widest_float(torch.device(device)), device=device)
        found = found.nan_to_num(nan=torch.inf, posinf=torch.inf)  # of NaN and 0, the largest may be 0
        if self.ranks > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    # -- a save

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the weights."""
        order = {"size": self.order.size, "seed": self.order.seed, "shuffle": self.order.shuffle}
        step = self.course.step_at(self.position)
        return {"position": self.position, "step": step, "launch": self.launch, "order": order}

    def before_save(self) -> None:
        """Make the ledger durable, and refuse to save if another launch has taken over. Collective."""
        if self._ledger is not None:
            self._ledger.close()
        if not self.from_first("looking for a newer launch", Fence(self.directory, self.launch or 0)):
            raise RunError(
                f"launch {self.launch} does not save: another launch has taken over {self.directory}.", field="launch"
            )

    def saved(self) -> None:
        """Report a complete checkpoint at this position, to the audit and to `batchwright run`."""
        if self.rank:
            return
        folder = self.directory / names.CHECKPOINTS
        made = names.checkpoint(self.course.step_at(self.position), self.launch or 0)
        write_json(folder / made / STATE, {"schema": SCHEMA, **self.state()})
        for name, _, _ in listing(folder):
            if name != made and not (folder / name / MANIFEST).exists():  # the audit needs the newest record only
                shutil.rmtree(folder / name, ignore_errors=True)
        self._report()

    # -- the ranks

    def from_first(self, what: str, question: Callable[[], T]) -> T:
        """What `question()` about the run's files returns on rank 0, on all ranks. `what` names its error, raised on all."""
        if self.ranks == 1:
            return question()
        own = Answer(question if self.rank == 0 else None, f"rank 0: {what} failed", "directory")
        box = [own.sent]
        dist.broadcast_object_list(box, src=0)
        return own.heard(box[0])

    def _check_order(self) -> None:
        """Refuse ranks whose samples come in different orders: some would be trained twice, and some not at all."""
        if self.ranks == 1:
            return
        orders: list[Any] = [None] * self.ranks
        dist.all_gather_object(orders, self.order)
        same_length([order.size for order in orders])
        other = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if other is not None:
            raise RunError(
                f"the ranks have different orders of samples: {orders[0]} on rank 0, {orders[other]} on rank {other}. Give "
                "all ranks the same seed and shuffle.",
                field="order",
                given=str(orders[other]),
            )

    def _number(self) -> int:
        return self.run.launch if self.run else claim_launch(self.directory)

    def _report(self) -> None:
        if self.run and self.rank == 0:
            write_json(self.run.status_file, {"schema": SCHEMA, "consumed_samples": self.position})

    def _without_weight(self, step: Step, total: float) -> str:
        ids = self.order.ids(range(step.start_sample, step.end_sample)).tolist()
        shown = ", ".join(map(str, ids[:_SHOWN])) + (f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")
        if total:
            return (
                f"step {step.step:,} has no gradient: a micro batch, or the whole step, has the weight {total:g}. It must be a "
                f"finite number, 0 or more. The indices of the step's {len(ids):,} samples in the dataset are {shown}."
            )
        return (
            f"step {step.step:,} has no gradient: the weights of its {len(ids):,} samples add up to 0. Their indices in the "
            f"dataset are {shown}. Give at least one of them a label that counts, or put another sample in its place, and "
            "continue from the last checkpoint: the length of the dataset must stay the same."
        )

    def _stand_in(self, group: Group, weight: Weight, micro: Micro) -> Any:
        """Data with a weight, in place of data without; a copy, since the trainer may change each batch."""
        found = next((copy.copy(m.data) for m in group if weight(m.data)), copy.copy(self._spare))
        if found is None and isinstance(micro.data, Mapping) and torch.is_tensor(micro.data.get("labels")):
            # The first step of this rank has no weight at all. Class 0 exists in every model.
            made = {**micro.data, "labels": torch.zeros_like(micro.data["labels"])}
            found = made if weight(made) else None
        if found is None:
            raise RunError(
                f"rank {self.rank} has no sample with a weight in its first step, so its loss is undefined. Start on fewer "
                "ranks for a step: a checkpoint continues on any number of them. Or give one of its samples a label that counts.",
                field="weight",
            )
        return found

    def _check_origin(self, parent: int | None) -> None:
        """Refuse a checkpoint that no earlier launch of this directory has saved: samples would be in no ledger."""
        if self.run and self.position < self.run.start_sample:
            raise RunError(
                f"batchwright run continues at sample {self.run.start_sample:,}, but the newest complete checkpoint is at "
                f"sample {self.position:,}: the samples between them would be trained twice. Is the output directory the "
                "same in every launch, and were checkpoints deleted?",
                field="checkpoint",
                given=self.position,
                nearest=(self.run.start_sample,),
            )
        folder = self.directory / names.LEDGER
        known = _trained(folder / names.ledger(parent, 0)) if parent is not None else None
        if parent is None or parent >= (self.launch or 0) or known is None or not known[0] <= self.position <= known[1]:
            held = f"there it has samples {known[0]:,} to {known[1]:,}" if known else "there is none"
            raise RunError(
                f"the checkpoint was saved by launch {parent} at sample {self.position:,}, and this is launch {self.launch} of "
                f"{self.directory}: its ledger must hold that launch up to that sample, but {held}. Continue in the "
                "directory of the checkpoint's run, or copy its ledger, too.",
                field="checkpoint",
                given=self.position,
            )

    def _resumed(self, state: Mapping[str, Any], origin: str) -> tuple[int, int | None]:
        """The position and the launch of a checkpoint, if it belongs to this schedule and this dataset."""
        known = self.state()["order"]
        try:
            position, step, order = int(state["position"]), int(state["step"]), dict(state["order"])
        except (KeyError, TypeError, ValueError):
            raise RunError(
                f"{origin} has no position, so it cannot be continued exactly. It was saved without batchwright.",
                field="checkpoint",
            ) from None
        if order != known:
            raise RunError(
                f"{origin} was trained in another order of samples: {order}, and now it is {known}. Use the same "
                "dataset and seed.",
                field="order",
                given=str(order),
            )
        if position > self.course.samples or self.course.step_at(position) != step:
            now = self.course.step_at(min(position, self.course.samples))
            raise RunError(
                f"{origin} is at step {step:,}, sample {position:,}; in this schedule that sample is at step {now:,}. "
                "The steps that were trained cannot change: continue the schedule from the checkpoint's position.",
                field="schedule",
                given=position,
            )
        return position, state.get("launch")


@cache
def mixed(mixin: type, given: Any, base: type, wanted: str) -> type[Any]:
    """The class `given` with a mixin before it; once, and if it is a class of `base`."""
    if not (isinstance(given, type) and issubclass(given, base)):
        name = given.__name__ if isinstance(given, type) else f"{type(given).__name__}(…)"
        raise ConfigError(f"exact({name}): must be a class of {wanted}.", field="class", given=name)
    if issubclass(given, mixin):
        return given

    def reduce(self: Any, protocol: Any) -> Any:
        """An object is pickled (`ddp_spawn`) as how its class was made, which has no name in a module."""
        if type(self) is not made:  # a subclass, which has a name
            return super(made, self).__reduce_ex__(protocol)
        return _unpickled, (mixin, given, base, wanted), self.__getstate__()

    members = {"__doc__": given.__doc__, "__module__": mixin.__module__, "__reduce_ex__": reduce}
    made: type[Any] = type(f"Exact{given.__name__}", (mixin, given), members)
    return made


def _unpickled(*of: Any) -> Any:
    return object.__new__(mixed(*of))


def definer(kind: type, name: str, after: type | None = None) -> type | None:
    """The class of the method resolution order that defines a method, the first one or the first after a class."""
    order = kind.__mro__[kind.__mro__.index(after) + 1 :] if after else kind.__mro__
    return next((one for one in order if name in vars(one)), None)


def refused(
    checks: Iterable[tuple[bool, str, Any, str]], kind: type, mixin: type, part: str, inner: str
) -> list[Violation]:
    """What is wrong of (wrong, name, given, why), and a class that stands before the mixin and replaces a part of it."""
    above = [name for name in vars(mixin) if not name.startswith("__") and definer(kind, name) is not mixin]
    why = (
        f"replaces a part of the adapter, since {kind.__name__} is a subclass of it. Put your class inside: "
        f"class Mine({inner}), and then exact(Mine)"
    )
    found = [*checks, (bool(above), part, ", ".join(above), why)]
    return [Violation(f"{name}={given}: {text}.", name, given) for wrong, name, given, text in found if wrong]


def _trained(ledger: Path) -> tuple[int, int] | None:
    """The samples (from, to) that a launch has trained, by the ledger of one rank; None without a readable header."""
    span: tuple[int, int] | None = None
    try:
        for text in ledger.read_text(encoding="utf-8", errors="replace").splitlines():
            line = json.loads(text)
            if span is None:
                span = int(line["position"]), int(line["position"])
            else:
                span = span[0], int(line["start_sample"]) + int(line["steps"]) * int(line["global_batch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the audit names damage
    return span
