"""The step of a pipeline: microbatches flow through the stages of a model, by torch's own schedules.

    owner = PipelineAccumulator(stages, loss, schedule="1f1b", pipeline=mesh["pp"], group=mesh["dp"])
    for step in owner.steps(micros):
        step.run()                       # forward and backward of all micro batches of the step
        step.apply(optimizer)

gives every stage its part of the gradient that `accumulate` gives to the whole model: sums over all microbatches and
data-parallel ranks, divided once by the step's weight. `loss(model, batch)` is the same function as without a pipeline:

    first stage     the loss is called up to `model(…)`: what it passes there is the input of the pipeline
    last stage      the loss is called with a model that returns the pipeline's output: (loss_sum, weight, auxiliary_mean)
    other stages    need no data; loss, weight and the gradient's norm reach them in the all-reduce of the step's sums

So a loss calls the model once, and uses nothing else of it but `training` (pipeline_calls.py). The microbatches of a step need
equal shapes: torch allocates what a stage receives from the first one.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from batchwright.core.batch.pipeline import RUN_BY_TORCH, SPLIT_BACKWARD, PipelineRule
from batchwright.core.errors import PlanError, RunError, Violation, raise_violations
from batchwright.core.numbers import divisors, nearest_multiples
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.data.windows import Feed, MicroBatch, leading_size
from batchwright.runtime.device import widest_float

from .accumulate import Accumulator, GradientStep, _Ready  # pyright: ignore[reportPrivateUsage]
from .parallel import DataParallel, Group
from .pipeline_calls import Loss, Output, asked_of, called, shape, unfit

# torch's own names of the schedules.
TORCH_NAMES = {
    "gpipe": "GPipe",
    "torch-1f1b": "1F1B",
    "torch-interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
# Schedules that go through the ranks forwards and then backwards: rank r has stages r and 2p - 1 - r.
V_SHAPED = ("zbv", "dualpipev")
# What passes microbatches forward only, in any number, where the stages are placed as for this schedule.
_FORWARD = {"gpipe": "gpipe", "torch-1f1b": "gpipe", "zbv": "zbv", "dualpipev": "zbv"}
# torch's actions of a forward pass. `eval` of its V-shaped schedules would also run those of the backward pass.
_FORWARD_ACTIONS = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def stage_indices(schedule: str, rank: int, ranks: int, virtual_stages: int) -> list[int]:
    """The stages of the model that a rank of the pipeline holds.

    >>> stage_indices("interleaved", 1, 4, 2), stage_indices("zbv", 1, 4, 2)
    ([1, 5], [1, 6])
    """
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * index for index in range(virtual_stages)]


def check_steps(rule: PipelineRule, sampler: StepSampler, inner_microbatches: int | None = None) -> None:
    """Raise an error that names every stage of a ramp, from here on, which the pipeline cannot run."""
    schedule, first = sampler.schedule, sampler.first_step()
    if first is None:
        return
    numbers = [first.step, *(segment.first_step for segment in schedule.segments[first.segment + 1 :])]
    numbers += [schedule.total_steps - 1] if schedule.total_steps else []
    found: dict[str, Violation] = {}
    for step in map(schedule.at_step, dict.fromkeys(numbers)):
        micro, batch, near = sampler.micro(step), step.global_batch_size, ()
        quantum = micro * sampler.ranks
        count, rest = divmod(batch, quantum)
        field, given, reason = "global_batch_size", batch, None
        if rest:
            near = nearest_multiples(quantum, batch)
            reason = f"{batch} / ({micro} × {sampler.ranks} data-parallel ranks) = {batch / quantum:.2f}, and microbatches of "
            reason += "different sizes cannot follow each other in a pipeline"
        elif inner_microbatches is None:
            if refusal := rule.refusal(count):
                near = tuple(quantum * m for m in rule.nearest(count))
                reason = f"it has {count} microbatches, and {refusal}"
        elif micro % inner_microbatches or rule.refusal(inner_microbatches):
            field, given = "inner_microbatches", inner_microbatches
            legal = [m for m in divisors(micro) if rule.refusal(m) is None]
            near = (*[m for m in legal if m < given][-1:], *[m for m in legal if m > given][:1])
            reason = f"micro_batch_size {micro} / {given} = {micro / given:.2f}"
            reason = reason if micro % given else rule.refusal(given)
        if reason is not None:
            message = f"{field}={given} of step {step.step:,} does not run in the pipeline: {reason}."
            message += f" Nearest: {' or '.join(map(str, near))}." if near else ""
            found.setdefault(f"{field}={given}", Violation(message, field, given, near))
    raise_violations(PlanError, list(found.values()))


class PipelineAccumulator(Accumulator):
    """Turns micro batches into steps for the stages of a pipeline that this rank holds.

    - `stages`: the modules of this rank's stages (`stage_indices` says which), each plain, in DDP or in FSDP2.
    - `pipeline`: the ranks that hold the stages of one model; `group`: the ranks that hold the same stages.
    - `seed`: of what the loss draws.
    - `inner_microbatches`: split each micro batch into this many, and fill and empty the pipeline with them (MaxText);
      None: the micro batches of a step are the microbatches of the pipeline (Megatron).
    - further options as in `Accumulator`.

    All ranks of a pipeline need the same micro batches; ranks that hold neither the first nor the last stage need no data.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss: Loss,
        *,
        pipeline: dist.ProcessGroup | DeviceMesh,
        group: Group = "auto",
        schedule: str = "1f1b",
        inner_microbatches: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if schedule not in RUN_BY_TORCH:
            raise PlanError(
                f"schedule={schedule!r} is not one that torch runs: {', '.join(RUN_BY_TORCH)}.",
                field="pipeline_schedule",
                given=schedule,
                nearest=tuple(RUN_BY_TORCH),
            )
        self.pipeline = pipeline.get_group() if isinstance(pipeline, DeviceMesh) else pipeline
        rank, ranks = dist.get_rank(self.pipeline), dist.get_world_size(self.pipeline)
        self.rule = PipelineRule(RUN_BY_TORCH[schedule], ranks, len(stages))
        self.loss, self.inner_microbatches, self.seed = loss, inner_microbatches, seed
        super().__init__(nn.ModuleList(stages), group=group, **options)
        self.shared = DataParallel(
            self.parallel.wrapper, self.parallel.size * ranks, (*self.parallel.groups, self.pipeline), ()
        )
        self.stages = [
            _Stage(module, index, ranks * len(stages), self.device, group=self.pipeline)
            for index, module in zip(stage_indices(schedule, rank, ranks, len(stages)), stages, strict=True)
        ]
        self.first = any(stage.is_first for stage in self.stages)
        self.last = any(stage.is_last for stage in self.stages)
        self._schedule: Any = None
        self._known: tuple[Any, ...] = ()
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        schedule, wrapper = self.rule.schedule, self.parallel.wrapper
        apart = schedule in SPLIT_BACKWARD
        found: list[Violation] = []
        for wrong, field, message in (
            (
                self.partial == "carry",
                "partial",
                "partial='carry' would leave a step open in the pipeline. Nearest: exact, drop.",
            ),
            (
                self.scaler is not None,
                "scaler",
                "a GradScaler decides for the gradients of its own rank, so the stages would skip different steps. Train in "
                "bf16, without a scaler.",
            ),
            (
                apart and wrapper != "ours",
                "schedule",
                f"{schedule} computes the gradients of weights apart from those of inputs, without autograd's hooks, so "
                f"{'DDP does not reduce them' if wrapper == 'ddp' else 'FSDP2 loses some of them (torch 2.13)'}. Pass plain "
                "stages and group=mesh['dp'], or choose another schedule.",
            ),
            (
                (apart or wrapper != "ours") and (self.noise is not None or self.widened),
                "noise" if self.noise is not None else "accumulate_dtype",
                f"the gradients of single microbatches are not seen "
                f"{'under ' + schedule if apart else 'in DDP' if wrapper == 'ddp' else 'in FSDP2'}, and noise and "
                "accumulate_dtype need them. Pass plain stages and group=mesh['dp'], and a schedule other than "
                f"{', '.join(SPLIT_BACKWARD)}.",
            ),
        ):
            if wrong:
                found.append(Violation(message, field))
        raise_violations(PlanError, found)

    def steps(self, micros: Iterable[MicroBatch]) -> Iterator[PipelineStep]:
        """Group micro batches into steps; run and apply each before the next."""
        return cast("Iterator[PipelineStep]", super().steps(micros))

    def _open_step(self, feed: Feed, first: MicroBatch) -> PipelineStep:
        return PipelineStep(self, feed, first)

    def flow(self, micros: Sequence[MicroBatch], backward: bool = True) -> list[tuple[Any, Any, Any]]:
        """Pass microbatches through all stages, forward and backward, or forward only.

        Returns (loss_sum, weight, weight × auxiliary_mean) of each on the last stage, zeros on the others.
        """
        returned: dict[int, tuple[Any, Any, Any]] = {}

        def objective(output: Any, index: Tensor) -> Tensor:
            """The loss of one microbatch; torch also calls it once to infer shapes."""
            micro = micros[int(index)]
            model = Output(output).train(self._training)
            loss_sum, weight, *rest = called(self.loss, model, micro, self.device, self.seed)
            auxiliary = weight * rest[0] if rest and rest[0] is not None else 0.0
            whole = loss_sum + auxiliary
            if whole.numel() != 1:
                raise RunError(
                    f"the loss has shape {tuple(whole.shape)}: return its sum, and the weight to divide by.",
                    field="loss",
                )
            returned[int(index)] = (loss_sum, weight, auxiliary)
            return whole.reshape(()) * (0.0 if micro.filler else self.loss_scale)

        inputs, shapes, fault = self._inputs(micros) if self.first else ([], (), "")
        schedule = self._scheduled(len(micros), shapes, fault, objective, backward)
        target = {"target": torch.arange(len(micros))} if self.last else {}
        (schedule.step if backward else schedule.eval)(*inputs, return_outputs=False, **target)
        real = [self.last and not micro.filler for micro in micros]
        return [returned[index] if counts else (0.0, 0.0, 0.0) for index, counts in enumerate(real)]

    @property
    def _training(self) -> bool:
        return self.stages[0].submod.training

    def _inputs(self, micros: Sequence[MicroBatch]) -> tuple[list[Tensor], tuple[Any, ...], str]:
        """The tensors that the loss passes to the model, each of all microbatches in one, as torch's schedules take them; the
        shapes, with all that is not a tensor; and what torch's schedules could not take, if anything."""
        calls = [asked_of(self.loss, micro, self.device, training=self._training, seed=self.seed) for micro in micros]
        asked = [tree_flatten_with_path(call) for call in calls]
        named, spec = asked[0]
        if fault := unfit(asked):
            return [], (), fault
        values = [value for _, value in named]
        place_of = [place for place, value in enumerate(values) if isinstance(value, Tensor)]

        def call(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = dict(zip(place_of, tensors, strict=True))
            return tree_unflatten([given.get(place, value) for place, value in enumerate(values)], spec)

        for stage in self.stages:
            stage.call = call if stage.is_first else None
        whole = [torch.cat([each[place][1] for each, _ in asked]) for place in place_of]
        return whole, tuple(shape(value) for value in values), ""

    def _scheduled(
        self,
        microbatches: int,
        shapes: tuple[Any, ...],
        fault: str,
        objective: Callable[..., Tensor],
        backward: bool,
    ) -> Any:
        """torch's schedule for this number of microbatches; made anew on all ranks if it or a shape has changed.

        `shapes` are those of the inputs, on the rank that has them. A `fault` of one rank is raised on all of them.
        """
        name = self.rule.schedule if backward else _FORWARD.get(self.rule.schedule, "looped-bfs")
        refusal = replace(self.rule, schedule=name).refusal(microbatches)
        if refusal:
            nearest = self.rule.nearest(microbatches)
            raise PlanError(
                f"{microbatches} microbatches do not run: {refusal}. Nearest: {' or '.join(map(str, nearest))}.",
                field="pipeline_microbatches",
                given=microbatches,
                nearest=nearest,
            )
        known = (name, backward, microbatches, shapes)
        facts = torch.tensor([bool(fault), known != self._known], device=self.device, dtype=torch.int32)
        for one in self.shared.groups:
            dist.all_reduce(facts, dist.ReduceOp.MAX, group=one)
        faulty, changed = cast("list[int]", facts.tolist())
        if faulty:
            for one in self.shared.groups:
                said = [""] * dist.get_world_size(one)
                dist.all_gather_object(said, fault, group=one)
                fault = max(said)
            raise RunError(fault, field="loss")
        if changed:
            self._known, stages = known, self.stages if name not in ("gpipe", "torch-1f1b") else self.stages[0]
            kind = cast(Any, get_schedule_class)(TORCH_NAMES[name])
            self._schedule = kind(stages, microbatches, loss_fn=objective, scale_grads=False)
            order: dict[int, list[Any]] = getattr(self._schedule, "pipeline_order_with_comms", {})
            for rank, actions in order.items() if not backward else ():
                order[rank] = [a for a in actions if a.computation_type.value in _FORWARD_ACTIONS]
        self._schedule._loss_fn = objective
        return self._schedule


class PipelineStep(GradientStep):
    """One open step of a pipeline: `run` it, then `apply` it."""

    _owner: PipelineAccumulator

    def run(self) -> list[MicroBatch]:
        """Forward and backward of all micro batches of the step, which are returned."""
        owner = self._owner
        micros: list[MicroBatch] = []
        for micro in self:
            self._micro = None
            micros.append(micro)
        # torch's stages say themselves when DDP and FSDP2 reduce.
        owner.parallel.synchronise(False)
        inner = owner.inner_microbatches
        for microbatches in [micros] if inner is None else [self._split(micro, inner) for micro in micros]:
            for sums in owner.flow(microbatches):
                self._sums.add(*sums, samples=0)
        if self._sums.flat is not None:
            self._sums.flat.take()
        if owner.last:
            self._sums.samples = sum(len(micro.ids) for micro in micros if not micro.filler)
        return micros

    def _split(self, micro: MicroBatch, parts: int) -> list[MicroBatch]:
        """A micro batch as several, cut along the first dimension of its tensors."""
        if not (self._owner.first or self._owner.last):
            return [_Part(micro, None, micro.ids)] * parts
        values, spec = tree_flatten(micro.data)
        size = leading_size(micro.data)
        whole = all(isinstance(value, Tensor) and value.dim() and len(value) == size for value in values)
        if not whole or size % parts:
            what = f"{size} samples" if whole else "something else than tensors of one first dimension"
            raise PlanError(
                f"step {self.plan.step}: a micro batch of {what} cannot be split into inner_microbatches={parts}.",
                field="inner_microbatches",
                given=parts,
            )
        pieces = zip(*(value.split(size // parts) for value in values), strict=True)
        starts = [part * len(micro.ids) // parts for part in range(parts)]
        return [
            _Part(micro, tree_unflatten(list(piece), spec), micro.ids[start:])
            for start, piece in zip(starts, pieces, strict=True)
        ]

    def _complete(self, optimizers: Any) -> _Ready:
        ready = super()._complete(optimizers)
        if ready.read:  # the norm of the whole gradient is that over all stages
            # Each stage has a norm in the type of its own gradients, and one without gradients has it on the host.
            device = self._owner.device
            square = ready.read[-1].detach().to(device, widest_float(device)).square()
            dist.all_reduce(square, group=self._owner.pipeline)
            ready.read[-1] = square.sqrt()
        return ready


class _Part:
    """A part of a micro batch, for a pipeline inside of an accumulation step. `ids` begin with its first sample."""

    def __init__(self, micro: MicroBatch, data: Any, ids: Sequence[int]) -> None:
        self.step, self.index, self.count, self.ids = micro.step, micro.index, micro.count, ids
        self.filler, self.data = micro.filler, data


class _Stage(PipelineStage):
    """A stage whose first one gets the arguments of the loss's call of the model, by position and by name.

    torch would pass arguments by name to every stage of the rank, and takes only tensors by position.
    """

    call: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.call(args) if self.call else (args, kwargs)
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        args, kwargs = self.call(args) if self.call else (args, kwargs)
        return super()._compute_outputs(*args, module=module, **kwargs)
