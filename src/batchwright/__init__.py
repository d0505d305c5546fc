"""batchwright: the batch size of a training job, from end to end.

Every verb, error and rule is a name here and is looked up on first use, so `import batchwright` costs next to nothing.
`probe`, `estimate`, `check` and `train` need torch or JAX when they are called; the other names need the standard
library only. The pieces of the training loop are in `batchwright.runtime`.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers read it as true; importing typing would cost more than all the rest

if TYPE_CHECKING:
    from .api import Plan as Plan
    from .api import check_config as check_config
    from .api import convert as convert
    from .api import nearby as nearby
    from .api import plan as plan
    from .api import ramp as ramp
    from .api import report as report
    from .api import run as run
    from .core.batch.nearby import Nearby as Nearby
    from .core.errors import BatchwrightError as BatchwrightError
    from .core.errors import ConfigError as ConfigError
    from .core.errors import EnvironmentFault as EnvironmentFault
    from .core.errors import MissingExtraError as MissingExtraError
    from .core.errors import NothingFitsError as NothingFitsError
    from .core.errors import PlanError as PlanError
    from .core.errors import RunError as RunError
    from .core.errors import ScheduleError as ScheduleError
    from .core.ramp.learning_rate import SampleSchedule as SampleSchedule
    from .core.ramp.rules import Constant as Constant
    from .core.ramp.rules import Doubling as Doubling
    from .core.ramp.rules import Linear as Linear
    from .core.ramp.rules import PerDevice as PerDevice
    from .core.ramp.rules import Thresholds as Thresholds
    from .core.ramp.schedule import Rule as Rule
    from .core.ramp.schedule import Schedule as Schedule
    from .core.ramp.schedule import Segment as Segment
    from .core.rl import RLPlan as RLPlan
    from .core.rl import rl as rl
    from .estimate.estimate import estimate as estimate
    from .probe.prober import probe as probe
    from .ramps import Ramp as Ramp
    from .runtime.check.compare import check as check
    from .runtime.loop.train import train as train

# The module of each public name.
_HOMES = {
    "BatchwrightError": "core.errors",
    "ConfigError": "core.errors",
    "Constant": "core.ramp.rules",
    "Doubling": "core.ramp.rules",
    "EnvironmentFault": "core.errors",
    "Linear": "core.ramp.rules",
    "MissingExtraError": "core.errors",
    "Nearby": "core.batch.nearby",
    "NothingFitsError": "core.errors",
    "PerDevice": "core.ramp.rules",
    "Plan": "api",
    "PlanError": "core.errors",
    "RLPlan": "core.rl",
    "Ramp": "ramps",
    "Rule": "core.ramp.schedule",
    "RunError": "core.errors",
    "SampleSchedule": "core.ramp.learning_rate",
    "Schedule": "core.ramp.schedule",
    "ScheduleError": "core.errors",
    "Segment": "core.ramp.schedule",
    "Thresholds": "core.ramp.rules",
    "check": "runtime.check.compare",
    "check_config": "api",
    "convert": "api",
    "estimate": "estimate.estimate",
    "nearby": "api",
    "plan": "api",
    "probe": "probe.prober",
    "ramp": "api",
    "report": "api",
    "rl": "core.rl",
    "run": "api",
    "train": "runtime.loop.train",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"batchwright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
