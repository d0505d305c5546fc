"""Does a split change the gradient? `check` runs one batch of a task whole and split, and names the causes.

Names are imported on first use: `names` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .causes import Finding as Finding
    from .causes import SplitResult as SplitResult
    from .compare import check as check
    from .splits import CheckReport as CheckReport
    from .splits import default_sizes as default_sizes

_HOMES = {
    "CheckReport": "splits",
    "Finding": "causes",
    "SplitResult": "causes",
    "check": "compare",
    "default_sizes": "splits",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
