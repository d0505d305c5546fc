"""How many examples a property is given: all of them in `make test`, a quarter in `make check`."""

from __future__ import annotations

import os


def many(count: int) -> int:
    return count // 4 if os.environ.get("BATCHWRIGHT_QUICK") else count
