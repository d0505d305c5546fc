"""The adapter for Lightning's Trainer.

    from batchwright.adapters.lightning import Steps, exact

    schedule = batchwright.Thresholds([(0, 256), (500_000, 512)]).compile().until(1_000_000)
    trainer = L.Trainer(max_epochs=1)
    trainer.fit(exact(MyModule)(…), Steps(dataset, schedule, micro_batch_size=4), ckpt_path="last")  # on any number of ranks

One item of the loader is one optimizer step, and `accumulate_grad_batches` stays at 1, so clipping, precision, validation
intervals, loggers and checkpoints of Lightning count optimizer steps. `training_step` of the module keeps returning a mean over
one micro batch; the adapter runs it for every micro batch and scales it by weight / weight of the step × ranks.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
# `Exact` is a mixin: the class behind it has what it calls.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from batchwright.core.batch.plan import BatchPlan
from batchwright.core.errors import ConfigError, PlanError, RunError, Violation, raise_violations
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.schedule import Rule, Schedule
from batchwright.runtime.data.loader import MapDataset
from batchwright.runtime.step.accumulate import set_learning_rate

from .adapter import Adapter, Group, Weight, mixed, refused
from .additive import labels_that_count, warn_of_batch_statistics
from .additive import test as test_loss
from .course import Course, course, under_run
from .lightning_files import WholeFiles, last_path, position, reopen, saves_last

_NAMES = {  # arguments of a DataLoader
    "batch_size": "micro_batch_size, and the global batch is in the schedule",
    "collate_fn": "collate",
}
_TUNERS = (BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging)
# The default weight is the one that fits. Without labels that are classes, both count samples.
LABELS = tuple(labels_that_count(shifted, samples=True) for shifted in (False, True))


class Steps:
    """The train loader of an `exact` module: one item is one optimizer step. Lightning saves and restores its position.

    - `schedule`: a rule, a compiled schedule, a plan or a ramp; under `batchwright run` that of the run, and may be left out.
      Without an end it trains every sample once.
    - `weight`: a function of a batch: what its loss is a mean over. The default counts labels that are not -100, without the
      first of each row if the loss does not use it; or samples.
    - `learning_rate`: a function of a step's first sample, such as `SampleSchedule(…).at`. It multiplies the rate of each
      parameter group.
    - `additive=False` skips the test whether the loss adds up. `directory` holds the ledger; the default is `batchwright` in
      the Trainer's `default_root_dir`.
    - `collate` and further options (`num_workers`, `pin_memory`, …) are those of `batchwright.runtime.Loader`.
    """

    def __init__(
        self,
        dataset: MapDataset,
        schedule: Schedule | Rule | Ramp | BatchPlan | None = None,
        *,
        micro_batch_size: int = 1,
        weight: Weight | None = None,
        learning_rate: Callable[[int], float] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        allow_ragged: bool = False,
        additive: bool = True,
        directory: Path | str | None = None,
        **options: Any,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigError(
                f"dataset={type(dataset).__name__}: must be map-style, with len() and [i]: a stream has no positions to resume "
                "from. Of a DataLoader, pass its dataset, and its collate_fn as collate.",
                field="dataset",
                given=type(dataset).__name__,
            )
        for theirs, ours in _NAMES.items():
            if theirs in options:
                raise ConfigError(f"{theirs}: in Steps it is {ours}.", field=theirs, given=options[theirs])
        self.run = under_run()
        self.course: Course = course(
            schedule,
            micro_batch_size=micro_batch_size,
            budget=lambda _: len(dataset),
            allow_ragged=allow_ragged,
            run=self.run,
        )
        self.dataset, self.learning_rate, self.collate = dataset, learning_rate, collate
        self.weights = (weight,) if weight else LABELS
        self.order = {"seed": seed, "shuffle": shuffle}
        self.additive, self.directory, self.options = additive, directory, options
        self.adapter: Adapter | None = None

    def __len__(self) -> int:
        """Optimizer steps of the whole run, also after a resume: Lightning counts those before it."""
        return self.course.steps

    def __iter__(self) -> Iterator[Item]:
        """The items of this launch; nothing is read before the first one is asked for."""
        if self.adapter is None:
            raise RunError(
                "Steps yields whole optimizer steps, which only an exact module can train: trainer.fit(exact(MyModule)(…), "
                "Steps(…)).",
                field="module",
            )
        yield from map(Item, self.adapter.groups(self.collate, **self.options))

    def state_dict(self) -> dict[str, Any]:
        """The position, for Lightning's checkpoint."""
        return self.adapter.state() if self.adapter is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: the module has read the position already, also where Lightning does not call this."""

    def open(self, trainer: Any, state: Mapping[str, Any] | None, origin: str = "") -> Adapter:
        """Start a launch in a trainer, at the position of a checkpoint or at the start. Collective."""
        self.adapter = Adapter(
            self.course,
            self.dataset,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            directory=self.directory or Path(trainer.default_root_dir) / "batchwright",
            run=self.run,
            **self.order,
        )
        self.adapter.open(state, origin)
        return self.adapter


class Item:
    """One optimizer step on this rank. Neither a list nor a dataclass: Lightning would take those apart."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.stop = False

    def __iter__(self) -> Iterator[Any]:
        """One micro batch, whose size Lightning uses where the module logs means of an epoch."""
        yield self.group[0].data


class Exact:
    """The mixin of `exact`: it stands before a LightningModule, whose own names it must not take: these begin with two `_`."""

    __steps: Steps | None = None
    __item: Item | None = None  # the present step
    __weight: Weight | None = None  # that of `Steps`, or the default that fits; known after the first step of a launch
    __loaded: Mapping[str, Any] | None = None  # the checkpoint that the fit continues from
    __written: tuple[int, int] | None = None  # inode and time of the checkpoint that was reported last

    # -- the start

    def configure_callbacks(self) -> list[Callback]:
        found = super().configure_callbacks()
        return [*(found if isinstance(found, Sequence) else [found]), _AtError(self.__close)]

    def setup(self, stage: str) -> None:
        self.__loaded = self.__weight = None
        callbacks = self._trainer.callbacks if self._trainer is not None and stage == "fit" else ()
        tuners = [type(c).__name__ for c in callbacks if isinstance(c, _TUNERS)]
        if tuners:  # some begin in `on_fit_start`, before that of the module
            name = ", ".join(tuners)
            raise PlanError(
                f"callbacks={name}: must not be used: it trains steps or changes accumulation by itself.",
                field="callbacks",
                given=name,
            )
        super().setup(stage)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # load_from_checkpoint, validate, test and predict use the weights alone.
        if self._trainer is None or self._trainer.state.fn != "fit":
            return
        self.__loaded = checkpoint

    def on_fit_start(self) -> None:
        super().on_fit_start()
        trainer = self.trainer
        trainer.fit_loop.setup_data()  # Lightning would ask for the loader only after the sanity check
        steps = trainer.train_dataloader
        raise_violations(PlanError, _refused(self, trainer, steps))
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFiles()
        self.__steps = steps
        adapter = steps.open(trainer, *position(self.__loaded, str(trainer.ckpt_path)))
        adapter.unlisten()  # until training starts: Lightning stores the handlers now, and restores them after the fit
        if self.__loaded is not None and not adapter.done:
            reopen(self.__loaded)
        self.__written, self.__loaded = self.__last_file(), None
        if adapter.done:
            trainer.should_stop = True

    def on_train_start(self) -> None:
        super().on_train_start()
        warn_of_batch_statistics(self, rank_zero_warn)
        self.__steps.adapter.listen()  # not Lightning's handler of SIGTERM: it calls a collective wherever the process is

    def on_fit_end(self) -> None:
        super().on_fit_end()
        self.__close()

    def __close(self) -> None:
        if self.__steps is not None and self.__steps.adapter is not None:
            self.__steps.adapter.close()

    # -- the data of a step; hooks of the module or the datamodule get micro batches

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        one = super()._on_before_batch_transfer
        if not isinstance(batch, Item):
            return one(batch, dataloader_idx)
        before = self.__before(dataloader_idx)
        batch.group = Group(replace(micro, data=before(micro.data)) for micro in batch.group)
        return batch

    def _apply_batch_transfer_handler(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """A step stays where it is: `training_step` moves one micro batch at a time, so that accumulation needs no memory."""
        one = super()._apply_batch_transfer_handler
        return batch if isinstance(batch, Item) else one(batch, device, dataloader_idx)

    def __before(self, index: int = 0) -> Callable[[Any], Any]:
        one, convert = super()._on_before_batch_transfer, self.trainer.precision_plugin.convert_input
        return lambda data: one(convert(data), index)

    def __move(self, data: Any) -> Any:
        """To the device, and through the hooks after that; not in the autocast of `training_step`."""
        kind = self.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            return super()._apply_batch_transfer_handler(data, self.device, 0)

    # -- the gradient of a step

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: Lightning calls it after `training_step`, where all but the last micro batch have their gradients."""

    def training_step(self, batch: Item, batch_idx: int) -> Any:
        one, trainer = super().training_step, self.trainer
        several = len(signature(one).parameters) > 1
        self.__item = batch

        def run(data: Any) -> Any:
            return one(data, batch_idx) if several else one(data)

        if self.__weight is None:
            self.__weight = self.__choose(run, batch.group)
        # Weighed before the transfer: after it, reading a weight would wait for the device.
        scales, batch.stop = self.__steps.adapter.weigh(batch.group, self.__weight, self.device)
        super().optimizer_zero_grad(trainer.current_epoch, batch_idx, trainer.optimizers[0])
        total: Any = 0.0
        loss: Any = None
        output: Any = None
        for micro, scale in zip(batch.group, scales, strict=True):
            output = run(self.__move(micro.data))
            loss = loss_of(output) * scale
            total = total + loss.detach()
            if micro.index < micro.count - 1:
                # Within DDP's forward, its reducer waits for the forward to end: this backward is not synchronised. It must
                # not run under the autocast of the forward.
                with torch.autocast(self.device.type, enabled=False):
                    trainer.strategy.backward(loss, None)
        step = batch.group.step
        total = trainer.strategy.reduce(total, reduce_op="mean")
        samples = {"global_batch_size": float(step.global_batch_size), "consumed_samples": float(step.end_sample)}
        self.log("exact_loss", total, prog_bar=True, batch_size=step.global_batch_size)
        self.log_dict(samples, batch_size=step.global_batch_size)
        # The value is the exact loss of the step, for callbacks; the gradient is that of the last micro batch.
        exact_loss = loss + (total - loss.detach())
        return {**output, "loss": exact_loss} if isinstance(output, Mapping) else exact_loss

    def __choose(self, run: Callable[[Any], Any], group: Group) -> Weight:
        """What the loss is a mean over, measured in the first step; a loss that does not add up is refused."""
        steps, precision = self.__steps, self.trainer.precision_plugin

        def loss(data: Any) -> Tensor:
            with precision.train_step_context():
                return loss_of(run(data))

        self.log = lambda *_, **__: None  # these runs are no training
        self.zero_grad()  # those of the fit before
        try:
            with torch.autocast(self.device.type, enabled=False):
                return test_loss(
                    self,
                    loss,
                    steps.weights,
                    lambda weights: steps.adapter.pieces(
                        group, weights, steps.collate, before=self.__before(), after=self.__move
                    ),
                    half=not precision.precision.startswith(("32", "64")),
                    largest=lambda values: steps.adapter.largest(values, self.device),
                    warn=rank_zero_warn,
                    compare=steps.additive,
                )
        finally:
            del self.log
            for metric in (m for m in self.modules() if isinstance(m, Metric)):
                metric.reset()

    # -- after a step

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Apply the step, and then advance: callbacks that save come before `on_train_batch_end` of the module."""
        steps, scaler = self.__steps, getattr(self.trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 0.0
        updates: list[Any] = []
        with self.trainer.optimizers[0].register_step_post_hook(lambda *_: updates.append(None)):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        skipped = scaler is not None and scaler.get_scale() < scale
        if not updates and not skipped:
            raise RunError(
                f"optimizer_step of the module did not call optimizer.step in step {self.__item.group.step.step:,}. It is called "
                "once per optimizer step of the schedule, and must apply each. For a larger batch, change the schedule.",
                field="optimizer_step",
            )
        steps.adapter.applied(self.__item.group, "skipped" if skipped else "applied")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        self.__report()
        if self.__steps.learning_rate is not None:
            set_learning_rate(self.trainer.optimizers, self.__steps.learning_rate(batch.group.step.start_sample))
        return super().on_train_batch_start(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        adapter, trainer = self.__steps.adapter, self.trainer
        if adapter.done or batch.stop:
            # At the end of the schedule the epoch ends by itself, and Lightning validates if it is time.
            trainer.should_stop = trainer.should_stop or adapter.position < adapter.course.samples
            if adapter.run is not None:
                callback = saves_last(trainer)
                callback.last_model_path = str(last_path(callback))
                trainer.save_checkpoint(callback.last_model_path)
                self.__report()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.__report()
        self.__steps.adapter.unlisten()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        adapter = self.__steps.adapter if self.__steps is not None else None
        if adapter is None or adapter.launch is None:
            return
        adapter.before_save()

    def __report(self) -> None:
        """Report the position once the file is there from which the next launch continues.

        Lightning writes a checkpoint and then `last.ckpt`. After a kill between the two, the next launch continues from the
        older one: so the position is reported when the second has changed, and both have the position of the present step.
        """
        written = self.__last_file() if self.__steps.adapter.rank == 0 else None
        if written is not None and written != self.__written:
            self.__written = written
            self.__steps.adapter.saved()

    def __last_file(self) -> tuple[int, int] | None:
        callback = saves_last(self.trainer)
        try:
            found = last_path(callback).stat() if callback is not None else None
        except FileNotFoundError:
            return None
        return None if found is None else (found.st_ino, found.st_mtime_ns)


def exact(module: type[LightningModule]) -> type[Any]:
    """The LightningModule class with exact accumulation, ramps and exact resume; its train loader is `Steps`."""
    return mixed(
        Exact,
        module,
        LightningModule,
        "lightning.pytorch.LightningModule: exact(MyModule)(…), not exact(MyModule(…)); and not of the package pytorch_lightning",
    )


class _AtError(Callback):
    """Ends the launch when a fit fails: there is no such hook of a module."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()


def loss_of(output: Any) -> Tensor:
    """The loss in what `training_step` returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise RunError(
            f"training_step returned {type(loss).__name__}, not a loss: a micro batch cannot be left out of a step. Give it the "
            "weight 0 instead.",
            field="training_step",
            given=type(loss).__name__,
        )
    return loss


def _refused(module: Any, trainer: Any, steps: Any) -> list[Violation]:
    """Everything about a trainer and a module that cannot be exact, or was not tested."""
    strategy = trainer.strategy
    tested = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and not strategy.handles_gradient_accumulation
    own = signature(super(Exact, module).training_step).parameters
    schedulers = trainer.lr_scheduler_configs
    by_epoch = [type(c.scheduler).__name__ for c in schedulers if c.interval == "epoch"]
    scheduled = isinstance(steps, Steps) and steps.learning_rate is not None and bool(schedulers)
    started = TorchElasticEnvironment().world_size() if TorchElasticEnvironment.detect() else trainer.world_size
    checks: list[tuple[bool, str, Any, str]] = [
        (not isinstance(steps, Steps), "train_dataloaders", type(steps).__name__,
         "must be batchwright.adapters.lightning.Steps: one item is one optimizer step"),
        (started != trainer.world_size, "devices", trainer.world_size // max(1, trainer.num_nodes),
         f"but torchrun started {started} processes, which would train alone: devices × num_nodes must be {started}. On the CPU "
         "Lightning's default is 1"),
        (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches", trainer.accumulate_grad_batches,
         "must be 1: the schedule decides how many micro batches a step has"),
        (trainer.fit_loop.max_epochs != 1, "max_epochs", trainer.fit_loop.max_epochs,
         "must be 1: the schedule says how many samples are trained, and Lightning counts that as one epoch"),
        (bool(trainer.min_epochs), "min_epochs", trainer.min_epochs, "must not be given: a request to stop would be ignored"),
        (bool(trainer.min_steps), "min_steps", trainer.min_steps, "must not be given: a request to stop would be ignored"),
        (bool(by_epoch), "configure_optimizers", f"{', '.join(by_epoch)} with interval='epoch'",
         "must have the interval 'step', in {'scheduler': …, 'interval': 'step'}: the whole run is one epoch, so it would never "
         "change the rate. Lightning's default is 'epoch'"),
        (trainer.overfit_batches > 0, "overfit_batches", trainer.overfit_batches, "must be 0: give a smaller dataset"),
        (not module.automatic_optimization, "automatic_optimization", False,
         "must be True: a step of manual optimization ends where its code says"),
        (len(trainer.optimizers) != 1, "configure_optimizers", f"{len(trainer.optimizers)} optimizers",
         "must return one optimizer"),
        ("dataloader_iter" in own, "training_step", "dataloader_iter",
         "must take a batch: a step of its own reading has no position"),
        (not tested, "strategy", type(strategy).__name__, "was not tested, and is refused: use one device, or ddp"),
        (bool(getattr(strategy, "_ddp_kwargs", {}).get("static_graph")), "static_graph", True,
         "must be False: DDP would record the backward of one micro batch as that of the step"),
        (getattr(module, "_compiler_ctx", None) is not None, "module", "torch.compile(module)",
         "must not be compiled as a whole: compile the network inside it"),
        (scheduled, "learning_rate", "a scheduler",
         "must be one of the two: learning_rate of Steps, or the scheduler of configure_optimizers"),
        (isinstance(strategy.checkpoint_io, AsyncCheckpointIO), "plugins", "AsyncCheckpointIO",
         "must not be used: a position would be reported before its checkpoint exists"),
    ]  # fmt: skip
    if isinstance(steps, Steps) and steps.run is not None:
        saves = saves_last(trainer)
        whole = saves is not None and saves.save_last is True and not saves.save_weights_only
        ends = [type(c).__name__ for c in trainer.callbacks if isinstance(c, (EarlyStopping, Timer))]
        last, share = trainer.max_steps, trainer.limit_train_batches
        early = "under batchwright run: training would end before the schedule"
        checks += [
            (not whole, "callbacks", "no last.ckpt" if saves is None else
             f"ModelCheckpoint(save_last={saves.save_last!r}, save_weights_only={saves.save_weights_only})",
             "must have ModelCheckpoint(dirpath, save_last=True) under batchwright run, which saves more than weights: the next "
             "launch continues from it"),
            (0 <= last < steps.course.steps, "max_steps", last,
             f"must be at least {steps.course.steps:,}, or not given, {early}"),
            (share != 1.0, "limit_train_batches", share, f"must be 1.0 {early}"),
            (bool(ends), "callbacks", ", ".join(ends), f"must not be used {early} (Timer is that of max_time)"),
        ]  # fmt: skip
    return refused(checks, type(module), Exact, "module", "MyModule")
