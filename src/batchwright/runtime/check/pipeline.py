"""The gradient of a pipelined model, to compare it with the whole model's: same weights, same micro batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.errors import PlanError, RunError
from batchwright.core.numbers import divisors
from batchwright.runtime.stages import build_stages
from batchwright.runtime.step.pipeline import PipelineAccumulator, stage_indices
from batchwright.runtime.step.pipeline_calls import asked_of

from .gradients import Gradient, Rig, Variant, gradients


def legal_sizes(rule: PipelineRule, size: int, ranks: int, wanted: Collection[int]) -> list[int]:
    """The micro batch sizes of `wanted` that the pipeline runs; if it runs none of them, the largest that it runs.

    >>> legal_sizes(PipelineRule("torch-1f1b", 4), 16, 1, (1, 3, 8, 16)), legal_sizes(PipelineRule("gpipe", 2), 6, 2, (4,))
    ([1], [3])
    """
    share, rest = divmod(size, ranks)
    legal = [m for m in divisors(share) if rule.refusal(share // m) is None] if not rest else []
    if not legal:
        raise PlanError(
            f"global_batch_size={size} on {ranks} data-parallel ranks has no number of microbatches that {rule.schedule} runs "
            f"on {rule.stages} ranks. Nearest: {rule.fewest * ranks} samples, in micro batches of 1.",
            field="global_batch_size",
            given=size,
            nearest=(rule.fewest * ranks,),
        )
    return [m for m in legal if m in wanted] or legal[-1:]


class StagedRig(Rig):
    """A rig whose model is the stages of this rank; `split` gives the gradient of all stages."""

    def __init__(self, rig: Rig, stages: nn.ModuleList, rule: PipelineRule, mesh: Any) -> None:
        self.task, self.size, self.seed, self.accumulate_dtype = rig.task, rig.size, rig.seed, rig.accumulate_dtype
        self.model, self.device, self.dtypes, self.rule, self.mesh = stages, rig.device, rig.dtypes, rule, mesh
        self._rows = None

    def split(self, variant: Variant, micro_batch_size: int, *_: Any, **__: Any) -> Gradient:
        """The gradient that reaches `optimizer.step`, by the names of the whole model's parameters."""
        rank, ranks = self.mesh.get_local_rank("dp"), self.mesh["dp"].size()
        micros = self._micros(variant, micro_batch_size, rank, ranks)
        with self._run(variant, micro=micro_batch_size) as stages:
            owner = PipelineAccumulator(
                list(stages.children()),
                lambda model, batch: self._loss(model, batch, variant),
                pipeline=self.mesh["pp"],
                group=self.mesh["dp"],
                schedule=self.rule.schedule,
            )
            optimizer = torch.optim.SGD(stages.parameters(), lr=0.0)
            for step in owner.steps(micros):
                step.run()
                step.apply(optimizer)
            own = {name.partition(".")[2]: g for name, g in gradients(stages).items()}
        gathered: list[Any] = [None] * self.rule.stages
        dist.all_gather_object(gathered, own, group=owner.pipeline)  # pyright: ignore[reportUnknownMemberType]
        return {name: g for each in gathered for name, g in each.items()}


def staged_rig(rig: Rig, rule: PipelineRule, mesh: DeviceMesh, micro_batch_size: int) -> StagedRig:
    """The stages of this rank, for one micro batch size, with the weights of the whole model.

    A model that torch's tracer splits may have fixed that size.
    """
    count = rule.stages * rule.virtual_stages
    indices = stage_indices(rule.schedule, mesh.get_local_rank("pp"), rule.stages, rule.virtual_stages)
    micros = rig._micros(replace(Variant(), random=True), micro_batch_size)  # pyright: ignore[reportPrivateUsage]
    made = build_stages(
        rig.task, rig.seed, indices, count, lambda: asked_of(rig.task.loss_of, micros[0], torch.device("cpu"))
    )
    weights = rig.model.state_dict()
    for index, module in zip(indices, made, strict=True):
        names = set(module.state_dict())
        if unknown := sorted(names - weights.keys()):
            raise RunError(
                f"stage {index} of {count} has {', '.join(unknown[:3])}, which the whole model does not have, so they cannot be "
                "compared. Give the parameters of a stage the names that they have in Task.model.",
                field="stage",
                given=unknown[0],
            )
        module.load_state_dict({name: weights[name] for name in names})
    return StagedRig(rig, nn.ModuleList(made), rule, mesh)
