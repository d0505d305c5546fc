"""Training that can trust its samples and its gradient, on torch's own DDP, FSDP2 and DataLoader.

    order     which sample is at which position: a keyed permutation with random access
    sampler   which positions this rank trains on in each step
    loader    one DataLoader for all stages
    step      the gradient of the whole global batch, however it was split
    task      what a user's file returns

The pieces are usable one by one; nothing here needs the others' loop.
"""

TYPE_CHECKING = False  # type checkers read it as true

if TYPE_CHECKING:
    from .loader import Loader as Loader
    from .loader import Micro as Micro
    from .loop import train as train
    from .noise import NoiseEstimate as NoiseEstimate
    from .noise import NoiseScale as NoiseScale
    from .order import GlobalOrder as GlobalOrder
    from .parallel import StepResult as StepResult
    from .ranks import Ranks as Ranks
    from .ranks import data_parallel as data_parallel
    from .ranks import discover as discover
    from .sampler import Slice as Slice
    from .sampler import StepSampler as StepSampler
    from .settings import Settings as Settings
    from .step import Accumulator as Accumulator
    from .step import GradientStep as GradientStep
    from .step import accumulate as accumulate
    from .task import Task as Task
    from .task import load_task as load_task
    from .task import windows as windows

# Where each name lives; looked up on first use, since FSDP alone takes a second to import.
_HOMES = {
    "Accumulator": "step",
    "GlobalOrder": "order",
    "GradientStep": "step",
    "Loader": "loader",
    "Micro": "loader",
    "NoiseEstimate": "noise",
    "NoiseScale": "noise",
    "Ranks": "ranks",
    "Settings": "settings",
    "Slice": "sampler",
    "StepResult": "parallel",
    "StepSampler": "sampler",
    "Task": "task",
    "accumulate": "step",
    "data_parallel": "ranks",
    "discover": "ranks",
    "load_task": "task",
    "train": "loop",
    "windows": "task",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"batchwright.runtime.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
