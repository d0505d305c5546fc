"""The devices of a job and how they are divided among the ways to be parallel."""

from __future__ import annotations

from math import gcd, lcm

from .errors import Violation, either
from .nearest import nearest_divisors
from .record import record


@record
class World:
    """`devices = data_parallel_size × tensor × pipeline × context`; expert parallelism lives inside data parallelism.

    >>> World(data_parallel_size=64, devices_per_node=8, tensor_parallel=2).nodes
    16
    """

    data_parallel_size: int
    devices_per_node: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

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
        """Nodes of `devices_per_node` devices; None where that is unknown or several nodes would not be full."""
        if self.devices_per_node is None:
            return None
        if self.devices < self.devices_per_node:
            return 1
        if self.devices % self.devices_per_node:
            return None
        return self.devices // self.devices_per_node

    def split(self) -> str:
        """How one replica is made up, in words: `tensor 2 × pipeline 4`, or nothing when it is one device."""
        parts = (
            ("tensor", self.tensor_parallel),
            ("pipeline", self.pipeline_parallel),
            ("context", self.context_parallel),
        )
        return " × ".join(f"{name} {size}" for name, size in parts if size > 1)

    @property
    def replica_step(self) -> int:
        """Replicas come in multiples of this when every node is to be full.

        >>> World(1, devices_per_node=8, tensor_parallel=2).replica_step
        4
        """
        if self.devices_per_node is None:
            return 1
        return self.devices_per_node // gcd(self.devices_per_node, self.model_parallel_size)

    def violations(self) -> list[Violation]:
        """What does not divide: devices over nodes, experts over replicas."""
        found: list[Violation] = []
        if self.devices_per_node is not None and self.nodes is None:
            spread = self.data_parallel_size % self.expert_parallel == 0  # then it has to stay so
            step = lcm(self.replica_step, self.expert_parallel if spread else 1)
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
        if self.data_parallel_size % self.expert_parallel:
            nearest = nearest_divisors(self.data_parallel_size, self.expert_parallel)
            found.append(
                Violation(
                    f"expert_parallel={self.expert_parallel} does not divide data_parallel_size={self.data_parallel_size}: "
                    f"experts are spread over data-parallel ranks, and {self.data_parallel_size} / {self.expert_parallel} = "
                    f"{self.data_parallel_size / self.expert_parallel:.2f}. Nearest: {either(nearest)}.",
                    "expert_parallel",
                    self.expert_parallel,
                    tuple(nearest),
                )
            )
        return found
