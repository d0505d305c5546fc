"""What fits, what is fast, and why: trials in processes of their own. Only the trials load torch."""

import sys
from types import ModuleType
from typing import Any

from .prober import probe as probe
from .records import Probe as Probe
from .records import Trial as Trial

__all__ = ["Probe", "Trial", "probe"]


class _ProbePackage(ModuleType):
    """`batchwright.probe` is this package; a call of it is a call of its function of the same name."""

    def __call__(self, *args: Any, **given: Any) -> Probe:
        return probe(*args, **given)


sys.modules[__name__].__class__ = _ProbePackage
