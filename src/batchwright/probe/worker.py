"""One trial of a task, in a process of its own: forked by `server.py`, or `python -m batchwright.probe.worker SPEC.json`.

The result file is replaced atomically at every stage, so the prober knows the last stage of each rank even when the
process is killed. The step is written here, and is not that of `runtime.step`, which also handles schedules, ledgers and
noise: a trial should depend on little, and both need the same memory (loss / weight, backward, optimizer). There are two
steps, so that the optimizer's state exists; the second has two micro steps, so that gradients exist.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo  # any optimizer loads it, and its size does not belong to the batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.core import codec
from batchwright.core.errors import EnvironmentFault, PlanError
from batchwright.processes.endings import cause_of, error_record
from batchwright.processes.guard import die_with
from batchwright.processes.memory import physical_memory, status_bytes
from batchwright.processes.target import split_target
from batchwright.rundir import atomic
from batchwright.runtime.containers import elements, own
from batchwright.runtime.device import (
    Pinnable,
    choose,
    collectives_for,
    device_name,
    free_and_total,
    limit_memory,
    may_fork,  # noqa: F401  # for the server, which imports nothing else of `runtime`
    outside_allocator,
    peaks,
    pins,
    synchronise,
    to_device,
    use,
)
from batchwright.runtime.ranks import discover
from batchwright.runtime.task import Task, load_task

from .machine import busy_seconds, code_below, digest
from .speed import Timing

_SEED = 0


class Worker:
    """A task on one rank, and its result file."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.size: int = spec["micro_batch_size"]
        self.ranks = discover()
        self.path = Path(spec["result"] + f".{self.ranks.rank}")
        self.result: dict[str, Any] = {"status": "running", "stage": 0, "doing": "starting"}
        self.base = status_bytes("VmSize")
        self.device = torch.device("cpu")
        self._free: Callable[[], None] = lambda: None

    def room(self) -> list[int]:
        """What the limit depends on, apart from the request: a stored trial counts only where this is the same."""
        memory: int | None = self.spec["memory"]
        if self.device.type == "cpu":
            return [] if memory else [self.spec["host_memory"], resource.getrlimit(resource.RLIMIT_AS)[0]]
        found = free_and_total(self.device)
        # In hundredths: a little of a device's memory comes and goes.
        return [] if found is None else [100 * min(memory or found[1], found[0]) // found[1]]

    def _set_limit(self) -> Callable[[], None]:
        """Set the memory limit; returns a function that removes it, so that a failure can still be written."""
        if not self.spec["limited"]:
            return lambda: None
        if self.device.type != "cpu":
            self._limit_device()
            return lambda: None
        memory: int = self.spec["memory"] or self.spec["host_memory"]
        self.result["limit_bytes"] = budget = max(1, memory - self.spec["margin"])
        # With RLIMIT_AS allocations fail as on a device; Linux ignores RLIMIT_RSS. Only the soft limit is set.
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        room = None if soft == resource.RLIM_INFINITY else soft - self.base  # `ulimit -v` may have set one
        if room is not None and room < budget:
            if self.spec["memory"] is not None or room < 1:
                raise EnvironmentFault(
                    f"ulimit -v allows {soft:,} bytes; {self.base:,} are used before the task is built, and the budget is "
                    f"{budget:,}. Nearest: --memory {max(0, room) + self.spec['margin']}, or ulimit -v unlimited.",
                    field="memory",
                    given=self.spec["memory"],
                    nearest=(max(0, room) + self.spec["margin"],),
                )
            self.result["limit_bytes"] = budget = room
        most, ranks = physical_memory(), self.ranks.size
        if memory * ranks > most:
            raise PlanError(
                f"memory={memory:,} bytes on {ranks} rank{'s' * (ranks > 1)} are more than the {most:,} bytes of this machine: "
                f"a trial might take all of them, and the system ends some program. Nearest: {most // ranks:,}.",
                field="memory",
                given=memory,
                nearest=(most // ranks,),
            )
        resource.setrlimit(resource.RLIMIT_AS, (self.base + budget, hard))
        return lambda: resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    def _limit_device(self) -> None:
        """Limit torch's allocator on an accelerator. What lies outside of it needs memory, too, and cannot be limited."""
        memory, outside = self.spec["memory"], outside_allocator(self.ranks.size)
        found = free_and_total(self.device)
        if found is None:
            if memory is not None:
                raise PlanError(
                    f"memory={memory:,} cannot be set: batchwright sets no limit on {self.device.type}. Leave it out.",
                    field="memory",
                    given=memory,
                )
            return
        free, total = found
        usable = min(memory or total, free)
        budget = usable - self.spec["margin"] - outside
        if budget < 1:
            least = outside + self.spec["margin"] + 1
            raise PlanError(
                f"memory={usable:,} bytes leave nothing for the job: a margin of {self.spec['margin']:,}, and {outside:,} for "
                f"what lies outside torch's allocator ({self.ranks.size} ranks), are kept free. {free:,} of {total:,} bytes of "
                f"{self.device} are free. Nearest: at least {least:,}.",
                field="memory",
                given=memory,
                nearest=(least,),
            )
        limit_memory(self.device, budget, total)
        self.result.update(limit_bytes=budget, outside_bytes=outside)

    def stage(self, doing: str) -> None:
        """Write what this rank does now."""
        self.write(stage=self.result["stage"] + 1, doing=doing)

    def write(self, **more: Any) -> None:
        self.result.update(more)
        atomic.write(self.path, json.dumps(codec.encode(self.result)), sync=False)

    def run(self) -> int:
        """The whole trial; torchrun ends the other ranks if the exit status is not 0."""
        try:
            self.device = self._choose()
            use(self.device)
            self.result["room"] = self.room()
            self._free = self._set_limit()
            self.stage("building the task")
            self._build()
            if self.spec["mode"] != "describe":
                getattr(self, "_" + self.spec["mode"])()
                self.write(**self._peaks())
            self.write(status="done")
            return 0
        except (Exception, SystemExit) as error:
            self._free()
            if isinstance(error, PlanError | EnvironmentFault):
                self.write(status="invalid", error=error_record(error))
            else:
                cause = cause_of(error)
                self.write(status="failed", kind=cause.kind, reason=cause.reason, traceback=cause.traceback)
            return 1

    def _choose(self) -> torch.device:
        try:
            return choose(self.spec["on"] or "auto", self.ranks)
        except PlanError as error:  # the request calls it `on`
            message = str(error).replace("device=", "on=", 1)
            raise PlanError(message, field="on", given=self.spec["on"], nearest=error.nearest) from None

    def _build(self) -> None:
        if self.ranks.size > 1:
            torch.distributed.init_process_group(**collectives_for(self.device, self.ranks.size))
        self.task: Task = load_task(self.spec["target"], self.spec["args"])
        model = self.task.build_model(_SEED).to(self.device)
        model.train()
        bare = model
        if self.ranks.size > 1:
            ids = [self.device] if self.device.type != "cpu" else None
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        self.model = model
        self.optimizer = self.task.optimizer(model.parameters())
        self.longest: int | None = self.spec["longest_index"]
        if self.spec["longest"] and self.longest is None and self.task.example_batch is None:
            self.longest = max(range(len(self.task.dataset)), key=lambda i: elements(self.task.dataset[i]))
        example = self.batch(0, 1)
        length = tokens(example) if equal_lengths(self.task) else None  # else padding decides
        self.result["tokens_per_sample"] = tokens(example) if self.longest is not None else length
        self.write(
            identity=identity(self.spec, length, bare, self.optimizer, example, self.device),
            longest_index=self.longest,
        )

    def batch(self, step: int, size: int) -> Any:
        """A batch on the device: the task's example, the longest sample repeated, or samples in order."""
        task = self.task
        if task.example_batch is not None:
            return to_device(task.example_batch(size), self.device)
        count = len(task.dataset)
        first = (step * self.ranks.size + self.ranks.rank) * size
        ids = [self.longest if self.longest is not None else (first + i) % count for i in range(size)]
        return to_device(collated(task, ids), self.device)

    def loss(self, batch: Any) -> torch.Tensor:
        total, weight, mean = self.task.loss_of(self.model, batch)
        return total / weight if mean is None else total / weight + mean

    def step(self, batch: Any, update: bool = True) -> None:
        """One optimizer step with one micro batch; with `update=False`, only its forward and backward."""
        with self._no_sync(not update):
            self.loss(batch).backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _no_sync(self, wanted: bool) -> Any:
        ddp = isinstance(self.model, nn.parallel.DistributedDataParallel)
        return self.model.no_sync() if wanted and ddp else contextlib.nullcontext()  # pyright: ignore

    def _limit(self) -> None:
        batch, read = None, 0
        for step in range(self.spec["steps"]):
            # From the second micro step on, gradients exist beside the activations: one step shows that.
            micro_steps = self.spec["micro_steps"] if step + 1 == self.spec["steps"] else 1
            for micro in range(micro_steps):
                self.stage(f"reading the batch of step {step}")
                batch, read = self.batch(read, self.size), read + 1  # the old batch is still in memory, as in any loop
                with self._no_sync(micro + 1 < micro_steps):
                    self.stage(f"forward of step {step}")
                    loss = self.loss(batch)
                    self.stage(f"backward of step {step}")
                    loss.backward()
                    del loss
            self.stage(f"optimizer in step {step}")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        synchronise(self.device)

    def _evaluation(self) -> None:
        try:  # during training the optimizer's state exists
            self.step(self.batch(0, 1))
        except ValueError:  # batch norm cannot train on one sample
            self.step(self.batch(0, 2))
        self.model.eval()
        batch = None
        with torch.no_grad():
            for step in range(self.spec["steps"]):
                self.stage(f"evaluation batch {step}")
                batch = self.batch(step, self.size)
                self.loss(batch)
        synchronise(self.device)

    def _throughput(self) -> None:
        batch = self.batch(0, self.size)
        self.stage("warm-up")
        cached = lambda: self.step(batch)  # noqa: E731
        cached()
        if self.spec["micro_steps"] > 1:  # as in a limit trial: the peaks of both are compared
            self.step(batch, update=False)
        self.result["timing"] = self._time(cached, first=2)
        if self.spec["contrasts"]:
            self.stage("contrasts")
            contrasts: dict[str, Timing] = {}
            if self.ranks.size > 1:  # it shows the synchronisation
                contrasts["accumulate"] = self._time(lambda: self.step(batch, update=False))
                self.optimizer.zero_grad(set_to_none=True)
            if self.task.example_batch is None:  # with an example batch, the dataset may not be here
                feed = self._loader()
                contrasts["loader"] = self._time(lambda: self.step(next(feed)), first=3 + 2 * self.spec["workers"])
            # Measured before and after the others: if the machine became busy, the interval is wide.
            contrasts["cached"] = self.result["timing"].merged(self._time(cached, first=2))
            self.result["contrasts"] = contrasts
            # Last: a model that was compiled runs eagerly after its operations were counted.
            if self.ranks.size == 1:
                self.result["flops"], self.result["flops_type"] = self._flops(batch)

    def _loader(self) -> Iterator[Any]:
        count, size = len(self.task.dataset), self.size
        order = ([(k * size + i) % count for i in range(size)] for k in range(10**9))
        collate = self.task.collate or torch.utils.data.default_collate
        loader: Any = torch.utils.data.DataLoader(
            self.task.dataset,
            batch_sampler=order,
            collate_fn=Pinnable.after(collate) if pins(self.device) else collate,
            num_workers=self.spec["workers"],
            pin_memory=pins(self.device),
        )
        return (to_device(batch, self.device) for batch in loader)

    def _time(self, step: Callable[[], None], first: int = 3) -> Timing:
        """The step's times; after the `first` ones it is known how many fit into the seconds."""

        def once() -> tuple[float, float]:
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            synchronise(self.device)
            return time.perf_counter() - wall, time.process_time() - cpu

        known = [once() for _ in range(first)][-3:]
        steps = int(self.spec["seconds"] / max(1e-6, min(wall for wall, _ in known[1:])))
        steps = self._agree(max(3, min(100, steps)))
        switches, wall = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.monotonic()
        before, own = busy_seconds(), time.process_time()
        times = known + [once() for _ in range(steps)]
        after, own = busy_seconds(), time.process_time() - own
        wall = time.monotonic() - wall
        others = after - before - self._sum(own) if before and after else None
        return Timing.of(
            [t for t, _ in times],
            [c for _, c in times],
            contention=max(0.0, others) / wall / (os.cpu_count() or 1) if others is not None and wall else None,
            switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches,
        )

    def _agree(self, steps: int) -> int:
        """Rank 0's number, for all ranks: with different numbers they would wait for each other forever."""
        if self.ranks.size == 1:
            return steps
        shared = torch.tensor([steps], device=self.device)
        torch.distributed.broadcast(shared, 0)
        return int(shared.item())

    def _sum(self, seconds: float) -> float:
        """The sum over all ranks: to each, the others are not other programs."""
        if self.ranks.size == 1:
            return seconds
        shared = torch.tensor([seconds], device=self.device)
        torch.distributed.all_reduce(shared)
        return float(shared.item())

    def _flops(self, batch: Any) -> tuple[float | None, str | None]:
        """What torch counts in a step, and the type that it multiplies in: under autocast not that of the parameters."""
        from torch.utils.flop_counter import FlopCounterMode

        try:
            counter = FlopCounterMode(display=False)
            with MultipliedTypes(counter.flop_registry) as seen, counter:
                self.step(batch)
            return float(counter.get_total_flops()) or None, seen.smallest()
        except (NotImplementedError, AttributeError, KeyError):  # an operation that it does not know
            return None, None

    def _peaks(self) -> dict[str, Any]:
        if self.device.type != "cpu":
            return peaks(self.device)
        return {"peak_memory_bytes": max(0, status_bytes("VmPeak") - self.base)}


class MultipliedTypes(TorchDispatchMode):
    """The floating-point types of the operations that a FLOP counter counts."""

    def __init__(self, counted: Container[Any]) -> None:
        super().__init__()
        self.counted = counted
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket in self.counted:
            self.types |= {t.dtype for t in tensors(args) if t.is_floating_point()}
        return func(*args, **(kwargs or {}))

    def smallest(self) -> str | None:
        """The smallest type: a device is fastest in it. bfloat16 before float16, whose peak is the same."""
        named = {(t.itemsize, str(t).removeprefix("torch.")) for t in self.types}
        return min(named)[1] if named else None


def tensors(data: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, numpy.ndarray):
        return [torch.as_tensor(data)]
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return [t for part in parts for t in tensors(part)]


def tokens(batch: Any) -> int | None:
    """Tokens per sample: the second dimension of the first two-dimensional tensor of integers (token ids)."""
    for t in tensors(batch):
        if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool:
            return int(t.shape[1])
    return None


def collated(task: Task, ids: Sequence[int]) -> Any:
    """The samples with these indexes as a batch of the task."""
    return (task.collate or torch.utils.data.default_collate)([own(task.dataset[i]) for i in ids])


def equal_lengths(task: Task) -> bool:
    """Whether all samples have as many tokens, judged by four of them, each alone in a batch; so has an example batch."""
    if task.example_batch is not None:
        return True
    last = len(task.dataset) - 1
    return len({tokens(collated(task, [i])) for i in {0, last // 3, last // 2, last}}) == 1


def identity(
    spec: dict[str, Any], length: int | None, model: nn.Module, optimizer: Any, example: Any, device: torch.device
) -> dict[str, Any]:
    """What was measured; if any of it changes, old measurements do not count."""
    shapes = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    shapes += [(n, tuple(b.shape), str(b.dtype), False) for n, b in model.named_buffers()]
    count = sum(p.numel() for p in model.parameters())
    folder = Path(split_target(spec["target"])[0]).resolve().parent
    options = {k: v for k, v in optimizer.defaults.items() if k not in ("lr", "weight_decay")}
    return {
        "model": f"{type(model).__name__} with {count:,} parameters ({digest(repr(shapes))})",
        "optimizer": type(optimizer).__name__,
        "optimizer_options": {k: str(v) for k, v in sorted(options.items())},
        "precision": "+".join(sorted({s[2].removeprefix("torch.") for s in shapes}))
        + f" ({torch.get_float32_matmul_precision()} matmul)",
        "sequence_length": length,
        "sample": [[list(t.shape[1:]), str(t.dtype).removeprefix("torch.")] for t in tensors(example)],
        "device": device_name(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        "args": {k: str(v) for k, v in sorted(spec["args"].items())},
        "code": code_below(folder),
    }


def main(path: str) -> None:
    """Read the specification, run the trial, write the result."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    if spec["ranks"] > 1:
        die_with(os.getppid())  # a killed torchrun does not end its ranks
    gc.collect()
    worker = Worker(spec)
    code = worker.run()
    if worker.ranks.size > 1 and torch.distributed.is_initialized() and code == 0:
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a destructor in the user's code must not turn a finished trial into a crash


if __name__ == "__main__":
    main(sys.argv[1])
