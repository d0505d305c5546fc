"""Training that can trust its samples and its gradient, on torch's own DDP, FSDP2 and DataLoader.

    order     which sample is at which position: a keyed permutation with random access
    sampler   which positions this rank trains on in each step
    loader    one DataLoader for all stages
    step      the gradient of the whole global batch, however it was split
    task      what a user's file returns

The pieces are usable one by one; nothing here needs the others' loop.
"""

from .loader import Loader, Micro
from .noise import NoiseEstimate, NoiseScale
from .order import GlobalOrder
from .parallel import StepResult
from .ranks import Ranks, data_parallel, discover
from .sampler import Slice, StepSampler
from .step import Accumulator, GradientStep, accumulate
from .task import Task, load_task, windows

__all__ = [
    "Accumulator",
    "GlobalOrder",
    "GradientStep",
    "Loader",
    "Micro",
    "NoiseEstimate",
    "NoiseScale",
    "Ranks",
    "Slice",
    "StepResult",
    "StepSampler",
    "Task",
    "accumulate",
    "data_parallel",
    "discover",
    "load_task",
    "windows",
]
