"""A fast command line: `batchwright` in this process, with streams that are as strict as a terminal's."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from batchwright.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one document on stdout; strict, so NaN and a second document are errors."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


def run(*argv: str) -> Ran:
    """`batchwright ARGV…`, without the cost of a new interpreter."""
    kept = sys.stdout, sys.stderr
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    sys.stdout, sys.stderr = out, err
    try:
        main([str(word) for word in argv])
    except SystemExit as done:
        code = done.code
    finally:
        sys.stdout, sys.stderr = kept
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.detach().getvalue().decode("utf-8"))
    assert isinstance(code, int)
    return Ran(code, *texts)


@pytest.fixture(scope="session")
def cli() -> Callable[..., Ran]:
    """Run a command line in this process."""
    return run
