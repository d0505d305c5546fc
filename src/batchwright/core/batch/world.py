"""The devices of a job, divided into data, tensor, pipeline, context and expert parallel groups."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from batchwright.core.errors import Violation, either


@dataclass(frozen=True)
class World:
    """`devices = data_parallel_size × tensor × pipeline × context`.

    Expert parallelism is not part of this product: the experts' layers divide the same devices in another way, into
    `expert_parallel × expert_tensor_parallel × pipeline` (Megatron's rule; the expert tensor size defaults to the tensor
    size). If that does not divide the devices, the plan has a note, not an error.

    >>> World(data_parallel_size=64, devices_per_node=8, tensor_parallel=2).nodes
    16
    """

    data_parallel_size: int
    devices_per_node: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None

    @property
    def model_parallel_size(self) -> int:
        """Devices that together hold one replica and read the same samples."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def devices(self) -> int:
        """All devices of the job."""
        return self.data_parallel_size * self.model_parallel_size

    @property
    def nodes(self) -> int | None:
        """Nodes of `devices_per_node` devices; None if that is unknown or if one of several nodes would not be full."""
        if self.devices_per_node is None:
            return None
        if self.devices < self.devices_per_node:
            return 1
        if self.devices % self.devices_per_node:
            return None
        return self.devices // self.devices_per_node

    def split(self) -> str:
        """The parts of one replica, such as `tensor 2 × pipeline 4`; empty if a replica is one device."""
        parts = (
            ("tensor", self.tensor_parallel),
            ("pipeline", self.pipeline_parallel),
            ("context", self.context_parallel),
        )
        return " × ".join(f"{name} {size}" for name, size in parts if size > 1)

    @property
    def replica_step(self) -> int:
        """The number of replicas must be a multiple of this to fill every node.

        >>> World(1, devices_per_node=8, tensor_parallel=2).replica_step
        4
        """
        if self.devices_per_node is None:
            return 1
        return self.devices_per_node // gcd(self.devices_per_node, self.model_parallel_size)

    @property
    def expert_step(self) -> int:
        """The number of replicas must be a multiple of this to hold whole groups of experts.

        >>> World(1, expert_parallel=8).expert_step, World(1, tensor_parallel=2, expert_parallel=8).expert_step
        (8, 8)
        >>> World(1, tensor_parallel=2, expert_parallel=8, expert_tensor_parallel=1).expert_step
        4
        """
        group = self.expert_parallel * (self.expert_tensor_parallel or self.tensor_parallel)
        return group // gcd(group, self.tensor_parallel * self.context_parallel)

    def expert_refusal(self) -> str | None:
        """Why the experts do not divide these devices, as a sentence; None if they do.

        >>> World(4, tensor_parallel=2, expert_parallel=8).expert_refusal()
        'Megatron refuses 8 devices: 8 / (expert 8 × expert-tensor 2 × pipeline 1) = 0.50 is not a whole number.'
        """
        if self.data_parallel_size % self.expert_step == 0:
            return None
        tensor = self.expert_tensor_parallel or self.tensor_parallel
        group = self.expert_parallel * tensor * self.pipeline_parallel
        return (
            f"Megatron refuses {self.devices} devices: {self.devices} / (expert {self.expert_parallel} × expert-tensor {tensor} "
            f"× pipeline {self.pipeline_parallel}) = {self.devices / group:.2f} is not a whole number."
        )

    def violations(self) -> list[Violation]:
        """A violation if the devices do not fill whole nodes."""
        found: list[Violation] = []
        if self.devices_per_node is not None and self.nodes is None:
            spread = self.data_parallel_size % self.expert_step == 0  # then the nearest sizes keep that
            step = lcm(self.replica_step, self.expert_step if spread else 1)
            below = self.data_parallel_size // step * step
            nearest = [n for n in (below, below + step) if n]
            found.append(
                Violation(
                    f"data_parallel_size={self.data_parallel_size} does not fill whole nodes: {self.data_parallel_size} × "
                    f"{self.model_parallel_size} devices per replica = {self.devices} devices, and {self.devices} / "
                    f"{self.devices_per_node} devices_per_node = {self.devices / self.devices_per_node:.2f} nodes. "
                    f"Nearest data_parallel_size: {either(nearest)}.",
                    "data_parallel_size",
                    self.data_parallel_size,
                    tuple(nearest),
                )
            )
        return found
