"""batchwright: the batch size of a training job, from end to end.

The names here need the standard library only; `batchwright.runtime` and others bring their own dependencies.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers read it as true; typing itself would cost more than all the rest

if TYPE_CHECKING:
    from .api import Nearby as Nearby
    from .api import Plan as Plan
    from .api import nearby as nearby
    from .api import plan as plan
    from .api import ramp as ramp
    from .core.errors import BatchwrightError as BatchwrightError
    from .core.errors import ConfigError as ConfigError
    from .core.errors import MissingExtraError as MissingExtraError
    from .core.errors import PlanError as PlanError
    from .core.errors import ScheduleError as ScheduleError
    from .core.ramp import Ramp as Ramp
    from .core.rl import RLPlan as RLPlan
    from .core.rl import rl as rl
    from .core.schedule import Schedule as Schedule

# Where each public name lives; looked up on first use, so that `import batchwright` costs next to nothing.
_HOMES = {
    "BatchwrightError": "core.errors",
    "ConfigError": "core.errors",
    "MissingExtraError": "core.errors",
    "Nearby": "api",
    "Plan": "api",
    "PlanError": "core.errors",
    "RLPlan": "core.rl",
    "Ramp": "core.ramp",
    "Schedule": "core.schedule",
    "ScheduleError": "core.errors",
    "nearby": "api",
    "plan": "api",
    "ramp": "api",
    "rl": "core.rl",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"batchwright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
