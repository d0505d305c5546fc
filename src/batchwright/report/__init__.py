"""Charts, reports and plots of what batchwright plans, measures and runs. No torch."""

import sys
from types import ModuleType
from typing import Any


class _ReportPackage(ModuleType):
    """`batchwright.report` is this package; a call of it is a call of the verb of the same name."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        from batchwright.api import report

        return report(*args, **given)


sys.modules[__name__].__class__ = _ReportPackage
