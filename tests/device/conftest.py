"""`on_device(function, *args)` runs a case in a process with a device; `on_ranks` in two processes of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.device.host import SIMULATED, Hosts


def _hosts(ranks: int) -> Iterator[Callable[..., list[Any]]]:
    if SIMULATED:
        from tests.device.sim.patches import why_not

        if reason := why_not():
            pytest.skip(reason)
    else:
        import torch

        if torch.accelerator.device_count() < ranks:
            pytest.skip(f"{torch.accelerator.device_count()} accelerators, and the case needs {ranks}")
    current = Hosts(ranks)

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        nonlocal current
        if not current.alive:
            current = Hosts(ranks)
        return current(function, *args)

    yield run
    current.end()


@pytest.fixture(scope="session")
def _one() -> Iterator[Callable[..., list[Any]]]:
    yield from _hosts(1)


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`on_ranks(function, *args)`: the results of two ranks."""
    yield from _hosts(2)


@pytest.fixture
def on_device(_one: Callable[..., list[Any]]) -> Callable[..., Any]:
    """`on_device(function, *args)`: the result of `function(*args)` in a process with a device."""
    return lambda function, *args: _one(function, *args)[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/device/" in item.path.as_posix():
            item.add_marker(pytest.mark.torch)
