"""Trainers and samplers as ranks of one torchrun job: the first ranks train, the last `rollout_workers` sample.

Each side has its own process groups, so that neither waits for the other in a collective: gradients, control and saving among
the trainers; weights from the first trainer to all rollout ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from batchwright.core.codec import decode
from batchwright.core.errors import BatchwrightError, PlanError, RunError
from batchwright.core.rl import RLPlan
from batchwright.processes.endings import error_from_record, error_record
from batchwright.rundir.status import Status
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.device import choose, collectives_for, use
from batchwright.runtime.loop.process import ThisProcess
from batchwright.runtime.loop.signals import StopSignals
from batchwright.runtime.ranks import check_rendezvous, discover

from .link import LAUNCH, STATUS, STOP, BroadcastWeights, pauses, size_of
from .responses import Responses
from .settings import RLSettings
from .task import RLTask
from .worker import Sampler, Worker, Workers, mailboxes, tell_signal

_collectives = cast(Any, dist)
# Seconds that a collective may take beside sampling, and the most that is passed to torch: a year.
_MARGIN, _MOST_SECONDS = 1800.0, 365 * 86400.0
_calls = itertools.count()  # of `divided` in this process: the store of a job keeps the keys of an earlier call


@dataclass(frozen=True)
class Side:
    """This rank: a trainer's `process`, or None on a rollout rank; the store of all ranks and the group of the weights."""

    process: ThisProcess | None
    sampler: int
    """The number of this rollout rank."""
    samplers: int
    device: torch.device
    store: Store
    weights: dist.ProcessGroup


def longest_wait(micros: int, settings: RLSettings) -> timedelta:
    """For weights, and for trainers that wait for the first one: a rank takes weights after all that it was asked for before.

    A rank that hangs is found earlier, by its rollout_timeout.

    >>> longest_wait(4, RLSettings(directory="run", rollout_timeout=3600))
    datetime.timedelta(seconds=19800)
    """
    return timedelta(seconds=min(_MOST_SECONDS, _MARGIN + settings.rollout_timeout * (1 + micros)))


@contextmanager
def divided(plan: RLPlan, settings: RLSettings, micros: int) -> Generator[Side]:
    """Join the job that torchrun describes, and divide its ranks; `micros` are in the queue at most."""
    ranks = discover()
    size = dist.get_world_size() if dist.is_initialized() else ranks.size
    trainers, samplers = size - settings.rollout_workers, settings.rollout_workers
    if trainers != plan.data_parallel_size:
        needed = plan.data_parallel_size + samplers
        raise PlanError(
            f"rollout='ranks' on {size} ranks: {size} − rollout_workers={samplers} leaves {trainers} to train, and the plan has "
            f"data_parallel_size={plan.data_parallel_size}. Nearest: {needed} ranks.",
            field="rollout_workers",
            given=samplers,
            nearest=(needed - plan.data_parallel_size,),
        )
    if settings.strategy == "none" and trainers > 1:
        raise PlanError(
            f"strategy='none' does not train on {trainers} ranks. Nearest: 'ddp', 'fsdp2'.",
            field="strategy",
            given="none",
            nearest=("ddp", "fsdp2"),
        )
    place = choose(settings.device, ranks)
    use(place)
    ours = not dist.is_initialized()
    if ours:
        check_rendezvous(ranks)
        dist.init_process_group(**collectives_for(place, ranks.size), rank=ranks.rank, world_size=ranks.size)
    rank, training = dist.get_rank(), list(range(trainers))
    wait, sampling = longest_wait(micros, settings), [0, *range(trainers, size)]
    gradients = _collectives.new_group(training)
    control = _collectives.new_group(training, backend="gloo", timeout=wait)
    saving = _collectives.new_group(training, backend="gloo")
    weights = _collectives.new_group(sampling, backend="gloo", timeout=wait)
    process = None
    if rank < trainers:
        process = ThisProcess(rank, trainers, place, control, False, saving, gradients)
    store = PrefixStore(f"batchwright-rl/{next(_calls)}", _collectives.distributed_c10d._get_default_store())
    yield Side(process, rank - trainers, samplers, place, store, weights)
    # After an error the groups stay: the other ranks may be blocked in them.
    for group in (weights, saving, control, gradients):
        dist.destroy_process_group(group)
    if ours and dist.is_initialized():
        dist.destroy_process_group()


def on_ranks(side: Side, size: int) -> Workers:
    """The rollout ranks as workers; they end when any trainer fails."""

    def ended() -> str | None:
        return "ended, because another trainer failed" if side.store.check([STATUS]) else None

    def start(number: int, attempt: int) -> Worker:
        asks, answers = mailboxes(side.store, number, attempt)
        return Worker(number, asks, answers, ended)

    return Workers(side.store, BroadcastWeights(side.weights, size), start, side.samplers)


def serve_rank(task: RLTask, plan: RLPlan, settings: RLSettings, side: Side, signals: StopSignals) -> Status:
    """What a rollout rank does: sample until the trainers stop. Returns their status.

    After a signal it tells the trainers, and samples on: they finish their round and save.
    """
    if settings.rollout_threads is not None:
        torch.set_num_threads(settings.rollout_threads)
    told, pause = side.store, pauses()
    while not told.check([LAUNCH]) and not told.check([STOP]):
        tell_signal(told, signals)
        pause()
    try:
        if told.check([LAUNCH]):
            begun = json.loads(told.get(LAUNCH))
            policy = task.build_model(settings.seed).to(side.device)
            order = GlobalOrder(len(task.dataset), settings.seed, settings.shuffle)
            if order != (theirs := GlobalOrder(**begun["order"])):
                raise RunError(
                    f"rank {plan.data_parallel_size + side.sampler}, which samples, has {order}, and the trainers have {theirs}: "
                    "it would sample other prompts. Give all ranks the same dataset, seed and shuffle.",
                    field="dataset",
                )
            responses = Responses(
                settings.root, begun["launch"], plan.generations_per_prompt, conditions=begun["conditions"]
            )
            sampler = Sampler(task, policy, order, responses, settings)
            sampler.signals = signals
            sampler.serve(side.store, BroadcastWeights(side.weights, size_of(policy)), side.sampler, 0)
    except Exception:
        # Weights that do not arrive, because the trainers have failed: their error says more.
        if not told.check([STATUS]):
            raise
    if not told.check([STATUS]):
        raise RunError("the trainers have stopped without a result: their own output says why.", field="rollout")
    found = json.loads(told.get(STATUS))
    if "failed" in found:
        raise error_from_record(found["failed"])
    return decode(Status, found)


def tell_status(side: Side | None, found: dict[str, Any]) -> None:
    """A trainer: how the job ended, for the other ranks. Rollout ranks stop after it."""
    if side is not None:
        with suppress(Exception):
            side.store.set(STATUS, json.dumps(found))
            side.store.set(STOP, "1")


def tell_failure(side: Side | None, error: BaseException) -> None:
    """A trainer that failed: the same, unless another failed before."""
    if side is not None and side.store.check([STATUS]):
        return
    ours = error if isinstance(error, BatchwrightError) else RunError(f"{type(error).__name__}: {error}")
    tell_status(side, {"failed": error_record(ours)})
