"""Who samples: takes the weights of a policy, samples responses to prompts, writes them to a file, and says so.

`serve` is the same in a thread, in a worker process and on a rollout rank. A worker knows nothing of rounds: it does what it
is asked, in order, and keeps nothing. So one that is killed loses the micro batch that it was sampling, and no other.
"""

from __future__ import annotations

import copy
import datetime
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from batchwright.core.errors import BatchwrightError, PlanError, RunError
from batchwright.processes.endings import error_record, users_code
from batchwright.processes.guard import die_with
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.reading import Reader
from batchwright.runtime.loop.signals import STOP_SIGNALS, StopSignals
from batchwright.runtime.state import generators

from .link import SIGNAL, STOP, Mailbox, SharedWeights, Weights, digest_of, load, pauses
from .responses import Piece, Responses, total_reward
from .settings import RLSettings
from .task import Prompts, RLTask, checked

_STORE_SECONDS = datetime.timedelta(seconds=300)
_END_SECONDS = 5.0  # for a thread to end; it cannot be killed


@dataclass
class Sampler:
    """All that a worker needs to sample."""

    task: RLTask
    policy: nn.Module
    order: GlobalOrder
    responses: Responses
    settings: RLSettings
    signals: StopSignals | None = None
    """Signals to this process, of which the trainers are told."""
    _weights: str = ""
    """A digest of the policy's weights."""

    def serve(self, store: Store, weights: Weights, worker: int, attempt: int) -> None:
        """Do what is asked, until there is the key `stop`: then no more, even if more was asked.

        Weights that were sent before are still taken: in a broadcast, a rank may get them from another.
        """
        asks, answers = mailboxes(store, worker, attempt)
        waiting: deque[dict[str, Any]] = deque()
        self.policy.eval()
        while True:
            pause = pauses()
            while True:
                stop = store.check([STOP])  # first: what was asked before it is then there
                while (message := asks.poll()) is not None:
                    waiting.append(message)
                tell_signal(store, self.signals)
                if stop or waiting:
                    break
                pause()
            if stop:
                for _ in [one for one in waiting if "weights" in one]:
                    weights.take(worker)
                return
            message = waiting.popleft()
            if "weights" in message:
                block = weights.take(worker)
                load(self.policy, block)
                self._weights = digest_of(block)
            elif message.get("early") and any("weights" in one for one in waiting):
                answers.put({**message, "skipped": True})
            else:
                answers.put(self._answer(message))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        begin, clock = time.time(), time.perf_counter()
        try:
            rewards = self._sample(range(*message["prompts"]), message["version"], message["round"])
        except BatchwrightError as error:
            return {**message, "error": error_record(error)}
        return {**message, "begin": begin, "end": begin + time.perf_counter() - clock, "rewards": rewards}

    def _sample(self, positions: range, version: int, round: int) -> float | None:
        """Sample and store the responses to these prompts; returns the sum of their rewards, if they have any."""
        seed, generations = self.order.seed, self.responses.generations
        # A thread shares the generators with training, so they stay untouched.
        alone = self.settings.rollout != "thread"
        ids = cast("list[int]", self.order.ids(positions).tolist())
        where = f"for the prompts at positions {positions.start:,} to {positions.stop:,}"
        with users_code(f"reading {where} failed"):
            reader = Reader(self.task.dataset, seed, list, self.settings.read_retries)
            rows = reader.rows(positions, ids) if alone else reader.unseeded(positions, ids)
        prompts = Prompts(rows, positions, ids, seed, round, version)
        with users_code(f"RLTask.rollout failed {where}"), torch.no_grad():
            if alone:
                on_device = any(parameter.device.type != "cpu" for parameter in self.policy.parameters())
                generators.seed_sample(seed, positions.start, accelerator=on_device)
            groups = checked(self.task.rollout(self.policy, prompts, generations), prompts, generations)
            self.responses.write(prompts, groups, self._weights)
        return total_reward(response for group in groups for response in group)


def tell_signal(store: Store, signals: StopSignals | None) -> None:
    """Tell the trainers of a signal to this process."""
    if signals is not None and signals.received:
        store.set(SIGNAL, str(signals.received))


def mailboxes(store: Store, worker: int, attempt: int) -> tuple[Mailbox, Mailbox]:
    """What is asked of a worker, and what it answers; a worker that replaces another begins anew."""
    return Mailbox(store, f"{worker}/{attempt}/ask"), Mailbox(store, f"{worker}/{attempt}/answer")


@dataclass(eq=False)
class Worker:
    """A worker as the trainer sees it."""

    number: int
    asks: Mailbox
    answers: Mailbox
    ended: Callable[[], str | None] = lambda: None
    """How it ended, if it has."""
    end: Callable[[], None] = lambda: None
    """End it, after the key `stop` is there or it was given up."""
    asked: list[Piece] = field(default_factory=list[Piece])
    """What it was asked for and has not answered yet, in this order."""
    heard: float = field(default_factory=time.monotonic)
    """When it last answered, or was first asked after that."""
    lost: int = 0
    """How often it was replaced since it last answered."""


class Workers:
    """The workers of one launch, their store, and the way of the weights."""

    def __init__(self, store: Store, weights: Weights, start: Callable[[int, int], Worker], count: int) -> None:
        self.store, self.weights, self._start = store, weights, start
        self._attempts = [0] * count
        self.each = [start(number, 0) for number in range(count)]

    def replace(self, number: int) -> Worker:
        """End a worker and start another in its place."""
        self.each[number].end()
        self._attempts[number] += 1
        self.weights.rejoin(number)
        old, self.each[number] = self.each[number], self._start(number, self._attempts[number])
        self.each[number].lost = old.lost + 1
        return self.each[number]

    def stop(self) -> None:
        """Let all workers end."""
        self.store.set(STOP, "1")
        for worker in self.each:
            worker.end()


def in_a_thread(sampler: Sampler, size: int) -> Workers:
    """One worker in a thread of this process, with a copy of the model."""
    store, weights = HashStore(), SharedWeights(size, 1)
    sampler.policy = copy.deepcopy(sampler.policy)
    failures: list[str] = []

    def serve() -> None:
        try:
            sampler.serve(store, weights, 0, 0)
        except BaseException as error:
            failures.append(f"failed: {type(error).__name__}: {error}")

    def start(number: int, attempt: int) -> Worker:
        thread = threading.Thread(target=serve, name="batchwright-rollout", daemon=True)
        thread.start()
        asks, answers = mailboxes(store, number, attempt)
        return Worker(
            number, asks, answers, lambda: failures[0] if failures else None, lambda: thread.join(_END_SECONDS)
        )

    return Workers(store, weights, start, 1)


def in_processes(sampler: Sampler, size: int) -> Workers:
    """Forked worker processes: they need no pickled functions, and die with this process."""
    device = next(sampler.policy.parameters()).device
    if device.type != "cpu" or not hasattr(os, "fork"):
        raise PlanError(
            f"rollout='process' forks, which a process that uses {device.type} cannot do. Nearest: 'ranks' (under torchrun), "
            "'thread'.",
            field="rollout",
            given="process",
            nearest=("ranks", "thread"),
        )
    count = sampler.settings.rollout_workers
    server = TCPStore("127.0.0.1", 0, None, True, _STORE_SECONDS, wait_for_workers=False)
    weights = SharedWeights(size, count)

    def start(number: int, attempt: int) -> Worker:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                die_with(parent)
                for stop in STOP_SIGNALS:
                    signal.signal(stop, signal.SIG_IGN)  # the trainer hears it, too, and stops this process
                # After a fork, torch hangs with more than one thread: OpenMP's threads are not there.
                torch.set_num_threads(1)
                store = TCPStore("127.0.0.1", server.port, None, False, _STORE_SECONDS, wait_for_workers=False)
                sampler.serve(store, weights, number, attempt)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        asks, answers = mailboxes(server, number, attempt)
        process = _Child(child)
        return Worker(number, asks, answers, process.ended, process.end)

    return Workers(server, weights, start, count)


class _Child:
    """A forked process."""

    def __init__(self, pid: int) -> None:
        self._pid, self._status = pid, None

    def ended(self) -> str | None:
        """How it ended, or None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if not pid:
                return None
            self._status = os.waitstatus_to_exitcode(status)
        code = self._status
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def end(self) -> None:
        """Kill it, if it has not ended: what it has finished is in files."""
        if self.ended() is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._status = -signal.SIGKILL


def hanging(worker: Worker, seconds: float) -> RunError:
    """The error for a worker that does not answer."""
    return RunError(
        f"rollout {worker.number} has not answered for {seconds:g} s (rollout_timeout): it samples responses to "
        f"{_few(worker)}.",
        field="rollout_timeout",
        given=seconds,
    )


def dead(worker: Worker, how: str) -> RunError:
    """The error for a worker that ended."""
    again = f", {worker.lost + 1} times without an answer in between" if worker.lost else ""
    return RunError(
        f"rollout {worker.number} {how}{again}, while it sampled responses to {_few(worker)}.", field="rollout"
    )


def _few(worker: Worker) -> str:
    if not worker.asked:
        return "no prompts"
    positions = worker.asked[0].positions
    return f"the prompts at positions {positions.start:,} to {positions.stop:,}"
