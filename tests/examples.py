"""How many examples a property gets: by BATCHWRIGHT_EXAMPLES, `few` in `make check` and `all` in `make test-all`."""

from __future__ import annotations

import os

_PARTS = {"few": 4, "": 2, "all": 1}


def many(count: int) -> int:
    return count // _PARTS[os.environ.get("BATCHWRIGHT_EXAMPLES", "")]
