"""The adapter for transformers' Trainer, and for every trainer that is made of it, such as TRL's SFTTrainer.

    from batchwright.adapters.huggingface import exact

    schedule = batchwright.Thresholds([(0, 256), (500_000, 512)]).compile().until(1_000_000)
    trainer = exact(Trainer)(model, args=args, train_dataset=dataset, schedule=schedule)
    trainer.train(resume_from_checkpoint=True)         # on any number of ranks

The Trainer's own accumulation stays at 1: one item of its loader is one optimizer step. The loss of a micro batch is the
model's mean × its weight / the weight of the step × ranks, which needs no cooperation from the model.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
# `Exact` is a mixin: the class behind it has what it calls.

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from batchwright.core.batch.plan import BatchPlan
from batchwright.core.errors import PlanError, RunError, Violation, raise_violations
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.schedule import Rule, Schedule
from batchwright.runtime.device import pins
from batchwright.runtime.ranks import discover

from .adapter import Adapter, Group, Weight, definer, mixed, refused
from .additive import labels_that_count, warn_of_batch_statistics
from .additive import test as test_loss
from .course import course, under_run
from .huggingface_files import NAME, check_position, newest
from .sealed import fault, rotate, seal, sealed, unseal

LABELS = labels_that_count(shifted=False), labels_that_count(shifted=True)  # the default weight is the one that fits
# Methods that decide what is trained when. A class that has its own cannot be adapted.
_DECIDE = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples", "_run_epoch", "_inner_training_loop")
logger = logging.getLogger(__name__)


class Exact:
    """The mixin of `exact`: it stands before a Trainer class, whose own names it must not take: these begin with two `_`."""

    loss_is_scaled_for_ga = True  # compute_loss scales; training_step must not divide again

    def __init__(
        self,
        *args: Any,
        schedule: Schedule | Rule | Ramp | BatchPlan | None = None,
        weight: Weight | None = None,
        allow_ragged: bool = False,
        additive: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        run = under_run()
        raise_violations(PlanError, _refused(self, run is not None))
        arguments = self.args

        def budget(open_ended: Schedule) -> int:
            """Where a schedule without an end ends: as in the Trainer, at max_steps, or after num_train_epochs."""
            if arguments.max_steps > 0:
                return open_ended.at_step(arguments.max_steps).start_sample
            return max(1, int(arguments.num_train_epochs * len(self.train_dataset)))

        found = course(
            schedule,
            micro_batch_size=arguments.per_device_train_batch_size,
            budget=budget,
            allow_ragged=allow_ragged,
            run=run,
        )
        if arguments.max_steps > 0 and arguments.max_steps != found.steps:
            raise PlanError(
                f"max_steps={arguments.max_steps}, but the schedule ends after {found.steps} steps. Leave max_steps out, or "
                "give a schedule without an end.",
                field="max_steps",
                given=arguments.max_steps,
                nearest=(found.steps,),
            )
        arguments.per_device_train_batch_size = found.micro_batch_sizes[-1]
        arguments.ignore_data_skip = True  # the loader starts at the position; there is nothing to skip
        data, self.__collate = data_of(self)
        self.batchwright = Adapter(
            found,
            data,
            rank=arguments.process_index,
            ranks=arguments.world_size,
            directory=arguments.output_dir,
            seed=arguments.seed if arguments.data_seed is None else arguments.data_seed,
            shuffle=arguments.train_sampling_strategy != "sequential",
            run=run,
        )
        self.__weights, self.__additive = (weight,) if weight else LABELS, additive
        self.__chosen: Weight | None = None  # of the weights, in the first step of a launch
        self.__start = 0  # the position at which the launch started
        self.__group: Group | None = None  # the present step
        self.__scale: float | None = None  # of the present micro batch; None outside a step
        self.__given: Any = None  # the data of the present micro batch, as they were weighed
        self.__computed = False  # whether its loss was
        self.__loss_scale = 1.0  # of fp16, in the present step
        self.__stop = False
        self.__by_samples: LambdaLR | None = None
        # First, so that the user's callbacks see the new position; and last, so that none of them takes back a stop.
        handler = self.callback_handler
        handler.callbacks = [_Follow(self.__applied), *handler.callbacks, _Follow(self.__ended)]

    # -- what is trained when

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer; `resume_from_checkpoint=True` finds the newest complete checkpoint, or starts without one."""
        raise_violations(PlanError, _refused(self, self.batchwright.run is not None))  # callbacks may be new
        state: Mapping[str, Any] | None = None
        if resume_from_checkpoint is True:
            found = self.batchwright.from_first(
                "looking for the newest checkpoint", lambda: newest(Path(self.args.output_dir))
            )
            resume_from_checkpoint, state = (str(found[0]), found[1]) if found else (None, None)
        elif resume_from_checkpoint:
            state = sealed(Path(resume_from_checkpoint))
            if state is None:
                raise RunError(
                    f"{resume_from_checkpoint} is not a complete checkpoint of exact(Trainer): "
                    f"{fault(Path(resume_from_checkpoint))}.",
                    field="resume_from_checkpoint",
                    given=str(resume_from_checkpoint),
                )
        else:
            resume_from_checkpoint = None
        if state is not None and resume_from_checkpoint is not None:
            check_position(Path(resume_from_checkpoint), state)
        self.__group = self.__chosen = None
        self.batchwright.open(state, str(resume_from_checkpoint))
        self.__start = self.batchwright.position
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.batchwright.close()

    def get_train_dataloader(self) -> _Steps:
        return _Steps(self.batchwright, self.__collate, self.args)

    def set_initial_training_values(self, *_: Any) -> tuple[int, int, int, int, int, int, int]:
        found = self.batchwright.course
        size = found.schedule.segments[-1].global_batch_size
        return 1, found.steps, len(self.batchwright.dataset), found.samples, size, found.steps, found.steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.batchwright.done:  # the launch before was killed between its last save and its report
            self.control.should_training_stop = True
            return
        if (scheduler := self.__by_samples) is not None:
            # The rate that was saved is that of the schedule before: its end may have been another one.
            rates = [base * at(0) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates  # the Trainer logs these
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Group], num_batches: int, device: Any
    ) -> tuple[list[Group], None]:
        group = next(epoch_iterator, None)
        if group is None:
            self.control.should_training_stop = True
            return [], None
        self.__group = group
        return [group], None

    # -- the gradient of a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        group, losses, scaler = self.__group, list[Tensor](), self.accelerator.scaler
        self.__loss_scale = scaler.get_scale() if scaler is not None else 1.0
        if self.__chosen is None:
            self.__chosen = self.__choose(model, group)
        scales, self.__stop = self.batchwright.weigh(group, self.__chosen, self.args.device)
        try:
            for micro, scale in zip(group, scales, strict=True):
                self.__scale, self.__given, self.__computed = scale, copy.copy(micro.data), False
                last = micro.index == micro.count - 1
                with nullcontext() if last else self.accelerator.no_sync(model):
                    losses.append(super().training_step(model, micro.data))
                if not self.__computed:
                    raise RunError(
                        f"training_step of {self.__definer('training_step')} does not call compute_loss, so the adapter cannot "
                        "scale the loss of a micro batch. This class cannot be exact.",
                        field="trainer",
                    )
        finally:
            self.__scale = self.__given = None
        return torch.stack(losses).sum()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Refuse a class that trains other data than those that were weighed, if their weight is another one."""
        given, weight = self.__given, self.__chosen
        if given is not None and weight is not None and not _same(given, inputs):
            before, now = float(weight(given)), float(weight(inputs))
            if before != now:
                raise RunError(
                    f"training_step of {self.__definer('training_step')} changes the batch: its weight was {before:g}, and is "
                    f"{now:g}. The weights of a step must be known before its first micro batch, so this class cannot be "
                    "exact. Change the batch in the dataset or in the collator.",
                    field="trainer",
                )
        return super()._prepare_inputs(inputs)

    def __definer(self, method: str) -> str:
        return getattr(definer(type(self), method, after=Exact), "__name__", "this class")

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.__scale is None:  # an evaluation
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        self.__computed = True
        try:
            found = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
        except TypeError as error:
            if self.compute_loss_func is None:
                raise
            raise RunError(
                f"the model or compute_loss_func failed: {error}. compute_loss_func may need num_items_in_batch, which is None: "
                "the adapter scales the mean of each micro batch itself, so compute_loss_func must then return that mean.",
                field="compute_loss_func",
            ) from error
        return (found[0] * self.__scale, *found[1:]) if return_outputs else found * self.__scale

    def __choose(self, model: nn.Module, group: Group) -> Weight:
        """What the loss is a mean over, measured in the first step; a loss that does not add up is refused."""
        warn_of_batch_statistics(model, logger.warning)

        def loss(data: Any) -> Tensor:
            inputs, self.__scale = self._prepare_inputs(copy.copy(data)), 1.0
            try:
                with self.compute_loss_context_manager():
                    return self.compute_loss(model, inputs)
            finally:
                self.__scale = None

        # TRL's trainers count tokens and average metrics in compute_loss.
        kept = {
            name: copy.deepcopy(vars(self)[name]) for name in ("_metrics", "_total_train_tokens") if name in vars(self)
        }
        try:
            return test_loss(
                model,
                loss,
                self.__weights,
                lambda weights: self.batchwright.pieces(group, weights, self.__collate),
                half=self.args.bf16 or self.args.fp16,
                largest=lambda values: self.batchwright.largest(values, self.args.device),
                warn=logger.warning,
                compare=self.__additive,
                without_sync=lambda: self.accelerator.no_sync(model),
                routers=[(self, "aux_loss_enabled")],
            )
        finally:
            vars(self).update(kept)

    # -- after a step

    def __applied(self, state: TrainerState, _: TrainerControl) -> None:
        # Not accelerate's `optimizer_step_was_skipped`: a fused optimizer, the Trainer's default, leaves out the update itself.
        scaler = self.accelerator.scaler
        skipped = scaler is not None and scaler.get_scale() < self.__loss_scale
        self.batchwright.applied(self.__group, "skipped" if skipped else "applied")
        if self.__by_samples is not None and self.accelerator.optimizer_step_was_skipped:
            with warnings.catch_warnings():  # the Trainer leaves the rate as it was
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the first update
                self.lr_scheduler.step()
        state.epoch = self.batchwright.position / len(self.batchwright.dataset)

    def __ended(self, _: TrainerState, control: TrainerControl) -> None:
        if self.batchwright.done or self.__stop:
            control.should_training_stop = True
            control.should_save = control.should_save or self.batchwright.run is not None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        arguments, output = self.args, Path(self._get_output_dir(trial=trial))
        folder = output / f"checkpoint-{self.state.global_step}"
        self.batchwright.before_save()
        self.batchwright.from_first("beginning the checkpoint", lambda: unseal(folder))
        self.state.stateful_callbacks[NAME] = {"args": {}, "attributes": self.batchwright.state()}
        limit, arguments.save_total_limit = arguments.save_total_limit, None  # the older one goes when this is complete
        try:
            super()._save_checkpoint(model, trial)
        finally:
            arguments.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # all ranks have written their files
        if self.batchwright.rank == 0:
            seal(folder, self.batchwright.state())
            self.batchwright.saved()
            rotate(output.glob("checkpoint-*"), limit, {folder, Path(self.state.best_model_checkpoint or folder)})

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A schedule of the Trainer counts samples: it ends where the run ends, whatever the ramp."""
        found, arguments = self.batchwright.course, self.args
        if not _scheduler_is_the_trainers(self):  # the user's own counts steps
            return super().create_scheduler(found.steps, optimizer)
        steps = arguments.warmup_steps
        if steps >= 1:  # a number of steps; below 1 it is a part of the run
            arguments.warmup_steps = (
                found.schedule.at_step(int(steps)).start_sample if steps < found.steps else found.samples
            )
        try:
            scheduler = super().create_scheduler(found.samples, optimizer)
        finally:
            arguments.warmup_steps = steps
        if isinstance(scheduler, LambdaLR):
            # Not the scheduler's own counter: it stands still where fp16 skips a step.
            scheduler.lr_lambdas = [lambda _, at=at: at(self.__reached()) for at in scheduler.lr_lambdas]
            self.__by_samples = scheduler
        return scheduler

    def __reached(self) -> int:
        """The position after the present step; before the first one, where the launch starts."""
        return self.__group.step.end_sample if self.__group is not None else self.batchwright.position

    # -- numbers that the Trainer logs; it passes the whole group

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        """The Trainer counts the share of its steps; in a ramp, steps differ."""
        steps = self.state.global_step - self._initial_global_step
        trained = (self.batchwright.position - self.__start) * self.state.max_steps / max(steps, 1)
        return super()._finalize_training(trial, trained, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        one = super().floating_point_ops
        return sum(one(micro.data) for micro in inputs) if isinstance(inputs, Group) else one(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for data in [micro.data for micro in inputs] if isinstance(inputs, Group) else [inputs]:
            super()._track_num_input_tokens(data)


def exact(trainer: type[Trainer]) -> type[Any]:
    """The Trainer class with exact accumulation, ramps and exact resume.

    Its constructor takes four more keywords: `schedule` (a rule, a compiled schedule, a plan or a ramp; under `batchwright
    run` it is that of the run), `weight` (a function of a batch: what its loss is a mean over; the default counts labels
    that are not -100, without the first of each row if the loss does not use it), `allow_ragged` (run batches that do not
    divide) and `additive=False` (skip the test of the loss).
    """
    return mixed(Exact, trainer, Trainer, "transformers.Trainer: exact(Trainer)(…), not exact(Trainer(…))")


class _Follow(TrainerCallback):
    """Tells the trainer when the optimizer has applied a step."""

    def __init__(self, told: Callable[[TrainerState, TrainerControl], None]) -> None:
        self._told = told

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._told(state, control)


class _Steps:
    """The loader that the Trainer iterates. It starts at the position when it is iterated, and has no length."""

    def __init__(self, adapter: Adapter, collate: Callable[[list[Any]], Any], arguments: Any) -> None:
        self._adapter, self._collate, self._arguments, self.dataset = adapter, collate, arguments, adapter.dataset

    def __iter__(self) -> Iterator[Group]:
        arguments = self._arguments
        workers = arguments.dataloader_num_workers
        options = {
            "persistent_workers": arguments.dataloader_persistent_workers,
            "prefetch_factor": arguments.dataloader_prefetch_factor,
        }
        return self._adapter.groups(
            self._collate,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory and pins(arguments.device),
            **(options if workers else {}),
        )


def weights_of(trainer: Trainer) -> tuple[Weight, ...]:
    """The weight that was given, or the two of which the one is used that fits."""
    return getattr(trainer, "_Exact__weights", LABELS)


def data_of(trainer: Trainer) -> tuple[Any, Callable[[list[Any]], Any]]:
    """The dataset and the collator, without the columns that the model does not take: as the Trainer does it."""
    if hasattr(trainer.train_dataset, "column_names"):  # of the package datasets
        return trainer._remove_unused_columns(trainer.train_dataset, description="training"), trainer.data_collator
    return trainer.train_dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, "training")


def _same(given: Any, inputs: Any) -> bool:
    """Whether a batch has the members of another one: the same objects, and not copies."""
    if not (isinstance(given, Mapping) and isinstance(inputs, Mapping)):
        return given is inputs
    return all(inputs.get(name) is value for name, value in given.items())


def _refused(trainer: Any, under_run: bool) -> list[Violation]:
    """Everything about a trainer that cannot be exact, or was not tested."""
    args, data = trainer.args, trainer.train_dataset
    accelerator = trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None)
    own = [
        name
        for name in _DECIDE
        if definer(type(trainer), name) not in (Exact, Trainer, None)
        or definer(type(trainer), name, after=Exact) not in (Trainer, None)
    ]
    on_policy = hasattr(trainer, "generate_on_policy_outputs")  # TRL's GKDTrainer
    generated = [name for name in ("lmbda", "seq_kd") if on_policy and getattr(trainer, name, 0)]
    stopping = [type(c).__name__ for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    hub = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    optim = str(getattr(args.optim, "value", args.optim))
    saves = {
        "save_strategy": args.save_strategy,
        "eval_strategy": args.eval_strategy,
        "logging_strategy": args.logging_strategy,
    }
    counted = [name for name in args.lr_scheduler_kwargs or {} if name.endswith("_steps") or name == "timescale"]
    rate = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    checks: list[tuple[bool, str, Any, str]] = [
        (args.gradient_accumulation_steps != 1, "gradient_accumulation_steps", args.gradient_accumulation_steps,
         "must be 1: the schedule decides how many micro batches a step has"),
        (not (hasattr(data, "__len__") and hasattr(data, "__getitem__")), "train_dataset", type(data).__name__,
         "must be map-style, with len() and [i]: a stream has no positions to resume from"),
        (args.train_sampling_strategy not in ("random", "sequential"), "train_sampling_strategy", args.train_sampling_strategy,
         "must be random or sequential: the order of samples may not depend on the split"),
        (args.auto_find_batch_size, "auto_find_batch_size", True,
         "must be False: use batchwright probe to find the micro batch"),
        (args.dataloader_drop_last, "dataloader_drop_last", True, "must be False: the schedule decides where the run ends"),
        (discover().size != args.world_size, "world_size", args.world_size,
         f"but the launcher started {discover().size} processes, which would train alone: without an accelerator, set "
         "use_cpu=True"),
        (args.n_gpu > 1, "n_gpu", args.n_gpu, "must be at most 1 per process: start one process per GPU, with torchrun"),
        (args.save_only_model, "save_only_model", True, "must be False: without the optimizer no checkpoint can be continued"),
        (args.save_total_limit == 1 and args.metric_for_best_model is not None, "save_total_limit", 1,
         "must be at least 2 with metric_for_best_model or load_best_model_at_end: the Trainer deletes the newest checkpoint "
         "at the end"),
        (args.push_to_hub and hub in ("checkpoint", "all_checkpoints"), "hub_strategy", hub,
         "must be end or every_save: a checkpoint is uploaded before it is complete, and could never be continued"),
        (under_run and bool(stopping), "callbacks", ", ".join(stopping),
         "must not be used under batchwright run: it would start a launch again that ends before its boundary"),
        (args.save_on_each_node, "save_on_each_node", True, "must be False: all ranks must see the same output_dir"),
        (under_run and str(getattr(args.save_strategy, "value", args.save_strategy)) == "best", "save_strategy", "best",
         "must be steps or no under batchwright run: it cancels the save at the boundary of a launch"),
        (getattr(args, "enable_jit_checkpoint", False), "enable_jit_checkpoint", True,
         "must be False: it saves within a step. batchwright run saves after the step when it is stopped"),
        (bool(trainer.is_deepspeed_enabled), "deepspeed", True, "was not tested, and is refused: it accumulates by itself"),
        (bool(args.fsdp) or bool(trainer.is_fsdp_enabled) or getattr(trainer, "is_distributed_loading_by_transformers", False),
         "fsdp", True,
         "was not tested, and is refused, also for a model that transformers has sharded while loading it"),
        (bool(args.ddp_static_graph), "ddp_static_graph", True,
         "must be False: DDP then expects every backward pass to be the same, and only the last one of a step synchronises"),
        (parallel is not None, "parallelism_config", type(parallel).__name__,
         "must be None: tensor, context and sequence parallel were not tested"),
        ("lomo" in optim or "layerwise" in optim, "optim", optim,
         "must not update weights during backward: a step has several of them"),
        (bool(counted) and _scheduler_is_the_trainers(trainer), "lr_scheduler_kwargs", ", ".join(counted),
         "must not count steps, since the learning rate counts samples: pass a scheduler of your own in optimizers="),
        (rate == "inverse_sqrt" and not args.warmup_steps and _scheduler_is_the_trainers(trainer), "lr_scheduler_type", rate,
         "needs warmup_steps: without them its time scale is 10,000 steps, and the learning rate counts samples"),
        (bool(generated), "trainer", ", ".join(generated),
         f"must be 0: {type(trainer).__name__} replaces batches by generated ones, after their weight is known"),
        (bool(own), "trainer", ", ".join(own),
         "is defined by this Trainer class, and the adapter would replace it: the class decides by itself what is trained when"),
    ]  # fmt: skip
    checks += [
        (
            str(getattr(value, "value", value)) == "epoch",
            name,
            "epoch",
            'must count steps ("steps"): a run is one long epoch',
        )
        for name, value in saves.items()
    ]
    return refused(checks, type(trainer), Exact, "trainer", "Trainer")


def _scheduler_is_the_trainers(trainer: Any) -> bool:
    """Whether the Trainer makes the scheduler from its arguments: neither given, nor made by a class of the user."""
    return trainer.lr_scheduler is None and definer(type(trainer), "create_scheduler", after=Exact) is Trainer
