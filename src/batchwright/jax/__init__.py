"""Exact batches for JAX programs: accumulation, one order of samples, checkpoints, without compiling again in a ramp.

    gradient     the gradient of the whole batch, at any split
    feed         which rows each process gives to its devices
    words        MaxText's words for both
    checkpoint   arrays and the position, saved with orbax
    task         what a user's file returns
    loop         `train`, which combines them
    compare      `check`: does a split change the gradient?

Nothing here imports torch. Names are imported on first use.
"""

TYPE_CHECKING = False  # type checkers read it as true

if TYPE_CHECKING:
    from .checkpoint import Checkpoints as Checkpoints
    from .checkpoint import restore as restore
    from .checkpoint import save as save
    from .compare import check as check
    from .feed import Feed as Feed
    from .feed import StepBatch as StepBatch
    from .gradient import Accumulated as Accumulated
    from .gradient import MicroSteps as MicroSteps
    from .gradient import accumulate as accumulate
    from .gradient import micro_steps as micro_steps
    from .loop import train as train
    from .task import JaxTask as JaxTask
    from .task import load_task as load_task
    from .words import maxtext as maxtext

# Name -> module
_HOMES = {
    "Accumulated": "gradient",
    "Checkpoints": "checkpoint",
    "Feed": "feed",
    "JaxTask": "task",
    "MicroSteps": "gradient",
    "StepBatch": "feed",
    "accumulate": "gradient",
    "check": "compare",
    "load_task": "task",
    "maxtext": "words",
    "micro_steps": "gradient",
    "restore": "checkpoint",
    "save": "checkpoint",
    "train": "loop",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright.jax' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"batchwright.jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
