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
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from batchwright.core.batch.plan import BatchPlan
from batchwright.core.errors import PlanError, RunError, Violation, raise_violations
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.schedule import Rule, Schedule
from batchwright.runtime.device import pins, widest_float
from batchwright.runtime.ranks import discover

from .adapter import Adapter, Group, Weight
from .additive import (
    FP32,
    GRADIENTS,
    HALF,
    difference,
    gradient_difference,
    labels_that_count,
    refuse,
    warn_of_batch_statistics,
    without_draws,
)
from .course import course, under_run
from .sealed import newest, rotate, seal, sealed, unseal

NAME = "batchwright"  # of the position in trainer_state.json
# Methods that decide what is trained when. A class that has its own cannot be adapted.
_DECIDE = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples", "_run_epoch", "_inner_training_loop")
logger = logging.getLogger(__name__)


class Exact:
    """The mixin of `exact`: it stands before a Trainer class."""

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
        data, self._collate = data_of(self)
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
        self._weight = weight or labels_that_count(self._loss_shifts_labels)
        self._additive = additive
        self._group: Group | None = None  # the present step
        self._scales: list[float] = []
        self._scale: float | None = None  # of the present micro batch; None outside a step
        self._loss_scale = 1.0  # of fp16, in the present step
        self._stop = self._warned = self._by_samples = False
        self.add_callback(_Follow(self))

    # -- what is trained when

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer; `resume_from_checkpoint=True` finds the newest complete checkpoint, or starts without one."""
        state: Mapping[str, Any] | None = None
        if resume_from_checkpoint is True:
            folders = Path(self.args.output_dir).glob("checkpoint-*")
            found = self.batchwright.from_first(lambda: newest(folders))
            resume_from_checkpoint, state = (str(found[0]), found[1]) if found else (None, None)
        elif resume_from_checkpoint:
            state = sealed(Path(resume_from_checkpoint))
            if state is None:
                raise RunError(
                    f"{resume_from_checkpoint} is not a complete checkpoint of exact(Trainer): its batchwright.json is missing, "
                    "or a file has another size. It was saved without batchwright, or the save was interrupted.",
                    field="resume_from_checkpoint",
                    given=str(resume_from_checkpoint),
                )
        else:
            resume_from_checkpoint = None
        if state is not None and resume_from_checkpoint is not None:
            _same_position(Path(resume_from_checkpoint), state)
        self._group = None
        self.batchwright.open(state)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.batchwright.close()

    def get_train_dataloader(self) -> _Steps:
        return _Steps(self)

    def set_initial_training_values(self, *_: Any) -> tuple[int, int, int, int, int, int, int]:
        found = self.batchwright.course
        size = found.schedule.segments[-1].global_batch_size
        return 1, found.steps, len(self.batchwright.dataset), found.samples, size, found.steps, found.steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.batchwright.done:  # the launch before was killed between its last save and its report
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Group], num_batches: int, device: Any
    ) -> tuple[list[Group], None]:
        group = next(epoch_iterator, None)
        if group is None:
            self.control.should_training_stop = True
            return [], None
        self._scales, stop = self.batchwright.weigh(group, self._weight, device)
        self._group, self._stop = group, stop
        return [group], None

    # -- the gradient of a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        group, losses, scaler = self._group, list[Tensor](), self.accelerator.scaler
        self._loss_scale = scaler.get_scale() if scaler is not None else 1.0
        if not self._warned:
            self._warned = True
            warn_of_batch_statistics(model, logger.warning)
        if self._additive and self.batchwright.position == 0:
            self._test_loss(model, group)
        try:
            for micro, scale in zip(group, self._scales, strict=True):
                self._scale = scale
                last = micro.index == micro.count - 1
                with nullcontext() if last else self.accelerator.no_sync(model):
                    losses.append(super().training_step(model, micro.data))
        finally:
            self._scale = None
        return torch.stack(losses).sum()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._scale is None:  # an evaluation
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
        return (found[0] * self._scale, *found[1:]) if return_outputs else found * self._scale

    def _test_loss(self, model: nn.Module, group: Group) -> None:
        """Refuse a loss that does not add up. Every rank runs the model equally often, since it may be collective."""
        usable = (m for m, scale in zip(group, self._scales, strict=True) if scale)
        micro = next(usable, group[0])
        parts = self.batchwright.halves(micro, self._collate) if micro is not group[0] or self._scales[0] else None
        half = {p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16}
        tolerance = HALF if half or self.args.bf16 or self.args.fp16 else FP32

        if parts is None:
            logger.warning(
                "On rank %d the test whether the loss adds up sees nothing: the micro batch has one sample, or its collator "
                "draws and its tensors cannot be divided by rows.",
                self.batchwright.rank,
            )

        def loss(data: Any) -> Tensor:
            inputs = self._prepare_inputs(copy.copy(data))
            with self.compute_loss_context_manager():
                return super(Exact, self).compute_loss(model, inputs, num_items_in_batch=None)

        def measured() -> list[float]:
            """The differences of the loss and of the gradient, the largest of all ranks."""
            given = self._weight, micro.data, parts or (micro.data, micro.data)
            found = difference(lambda data: float(loss(data)), *given)
            with self.accelerator.no_sync(model):
                gradient = gradient_difference(model, loss, *given)
            worst = torch.tensor([found, gradient], dtype=widest_float(self.args.device), device=self.args.device)
            worst = worst.nan_to_num(nan=torch.inf, posinf=torch.inf)  # of NaN and 0, the largest may be 0
            if self.batchwright.ranks > 1:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            return worst.tolist()

        # TRL's trainers count tokens and average metrics in compute_loss.
        kept = {
            name: copy.deepcopy(vars(self)[name]) for name in ("_metrics", "_total_train_tokens") if name in vars(self)
        }
        with without_draws(model):
            found, gradient = measured()
            if not (found <= tolerance and gradient <= GRADIENTS[tolerance]):
                with _without_router(self) as router:
                    alone, without = measured() if router else (found, gradient)
                refuse(alone, tolerance, without)
                logger.warning(
                    "The balance loss of the router is a statistic of each micro batch, so it depends on the split: the loss "
                    "of a micro batch is %.2g away from that of its halves, its gradient %.2g, and without the balance loss %.2g "
                    "and %.2g. Everything else is exact.",
                    *(found, gradient, alone, without),
                )
        vars(self).update(kept)

    # -- after a step

    def _applied(self, state: TrainerState, control: TrainerControl) -> None:
        # Not accelerate's `optimizer_step_was_skipped`: a fused optimizer, the Trainer's default, leaves out the update itself.
        scaler = self.accelerator.scaler
        skipped = scaler is not None and scaler.get_scale() < self._loss_scale
        self.batchwright.applied(self._group, "skipped" if skipped else "applied")
        if self._by_samples and self.accelerator.optimizer_step_was_skipped:
            with warnings.catch_warnings():  # the Trainer leaves the rate as it was
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the first update
                self.lr_scheduler.step()
        state.epoch = self.batchwright.position / len(self.batchwright.dataset)
        if self.batchwright.done or self._stop:
            control.should_training_stop = True
            control.should_save = control.should_save or self.batchwright.run is not None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        arguments, output = self.args, Path(self._get_output_dir(trial=trial))
        folder = output / f"checkpoint-{self.state.global_step}"
        self.batchwright.before_save()
        self.batchwright.from_first(lambda: unseal(folder))
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
            scheduler.lr_lambdas = [lambda _, at=at: at(self._reached()) for at in scheduler.lr_lambdas]
            self._by_samples = True
        return scheduler

    def _reached(self) -> int:
        """The position after the present step; before the first one, where the launch starts."""
        return self._group.step.end_sample if self._group is not None else self.batchwright.position

    # -- numbers that the Trainer logs; it passes the whole group

    def floating_point_ops(self, inputs: Any) -> int:
        one = super().floating_point_ops
        return sum(one(micro.data) for micro in inputs) if isinstance(inputs, Group) else one(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for data in [micro.data for micro in inputs] if isinstance(inputs, Group) else [inputs]:
            super()._track_num_input_tokens(data)


@cache
def exact(trainer: type[Trainer]) -> type[Any]:
    """The Trainer class with exact accumulation, ramps and exact resume.

    Its constructor takes four more keywords: `schedule` (a rule, a compiled schedule, a plan or a ramp; under `batchwright
    run` it is that of the run), `weight` (a function of a batch: what its loss is a mean over; the default counts labels
    that are not -100), `allow_ragged` (run batches that do not divide) and `additive=False` (skip the test of the loss).
    """
    return type(f"Exact{trainer.__name__}", (Exact, trainer), {"__doc__": trainer.__doc__})


class _Follow(TrainerCallback):
    """Tells the trainer when the optimizer has applied a step."""

    def __init__(self, trainer: Exact) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer._applied(state, control)


class _Steps:
    """The loader that the Trainer iterates. It starts at the position when it is iterated, and has no length."""

    def __init__(self, trainer: Exact) -> None:
        self._trainer, self.dataset = trainer, trainer.batchwright.dataset

    def __iter__(self) -> Iterator[Group]:
        arguments = self._trainer.args
        workers = arguments.dataloader_num_workers
        options = {
            "persistent_workers": arguments.dataloader_persistent_workers,
            "prefetch_factor": arguments.dataloader_prefetch_factor,
        }
        return self._trainer.batchwright.groups(
            self._trainer._collate,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory and pins(arguments.device),
            **(options if workers else {}),
        )


def data_of(trainer: Trainer) -> tuple[Any, Callable[[list[Any]], Any]]:
    """The dataset and the collator, without the columns that the model does not take: as the Trainer does it."""
    if hasattr(trainer.train_dataset, "column_names"):  # of the package datasets
        return trainer._remove_unused_columns(trainer.train_dataset, description="training"), trainer.data_collator
    return trainer.train_dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, "training")


def _same_position(folder: Path, state: Mapping[str, Any]) -> None:
    """The seal and the Trainer's own file must name one position."""
    stored = TrainerState.load_from_json(str(folder / "trainer_state.json")).stateful_callbacks.get(NAME) or {}
    position = stored.get("attributes", {}).get("position")
    if position != state.get("position"):
        raise RunError(
            f"{folder} is inconsistent: trainer_state.json has position {position}, batchwright.json {state.get('position')}.",
            field="resume_from_checkpoint",
            given=str(folder),
        )


@contextmanager
def _without_router(trainer: Any) -> Iterator[bool]:
    """Switch off the balance loss of a mixture of experts; False if the model has none."""
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    switches = [(config, "output_router_logits"), (trainer, "aux_loss_enabled")]
    on = [(owner, name) for owner, name in switches if getattr(owner, name, False)]
    for owner, name in on:
        setattr(owner, name, False)
    try:
        yield bool(on)
    finally:
        for owner, name in on:
            setattr(owner, name, True)


def _refused(trainer: Any, under_run: bool) -> list[Violation]:
    """Everything about a trainer that cannot be exact, or was not tested."""
    args, data = trainer.args, trainer.train_dataset
    accelerator = trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None)
    own = [
        name
        for name in _DECIDE
        if _definer(type(trainer), name) not in (Exact, Trainer, None)
        or _definer(type(trainer), name, after=Exact) not in (Trainer, None)
    ]
    above = [name for name in vars(Exact) if not name.startswith("__") and _definer(type(trainer), name) is not Exact]
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
        (args.save_on_each_node, "save_on_each_node", True, "must be False: all ranks must see the same output_dir"),
        (under_run and str(getattr(args.save_strategy, "value", args.save_strategy)) == "best", "save_strategy", "best",
         "must be steps or no under batchwright run: it cancels the save at the boundary of a launch"),
        (getattr(args, "enable_jit_checkpoint", False), "enable_jit_checkpoint", True,
         "must be False: it saves within a step. batchwright run saves after the step when it is stopped"),
        (bool(trainer.is_deepspeed_enabled), "deepspeed", True, "was not tested, and is refused: it accumulates by itself"),
        (bool(trainer.is_fsdp_enabled), "fsdp", True, "was not tested, and is refused"),
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
        (bool(above), "trainer", ", ".join(above),
         f"replaces a part of the adapter, since {type(trainer).__name__} is a subclass of it. Put your class inside: "
         "class Mine(Trainer), and then exact(Mine)"),
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
    return [Violation(f"{name}={given}: {text}.", name, given) for wrong, name, given, text in checks if wrong]


def _scheduler_is_the_trainers(trainer: Any) -> bool:
    """Whether the Trainer makes the scheduler from its arguments: neither given, nor made by a class of the user."""
    return trainer.lr_scheduler is None and _definer(type(trainer), "create_scheduler", after=Exact) is Trainer


def _definer(kind: type, name: str, after: type | None = None) -> type | None:
    """The class of the method resolution order that defines a method, the first one or the first after a class."""
    order = kind.__mro__[kind.__mro__.index(after) + 1 :] if after else kind.__mro__
    return next((one for one in order if name in vars(one)), None)
