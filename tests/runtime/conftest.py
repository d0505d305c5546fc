"""Real ranks for tests: `run_ranks(function, ranks, *args)` calls a function in N gloo processes."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts several processes, or takes longer than a second")


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """`run_ranks(function, 4, *args, timeout=600)` gives `[function(rank, *args) for rank in range(4)]`.

    Every call runs in its own process, in an initialised gloo group. The function must be importable (module level), its
    arguments and result picklable. A rank that fails or hangs fails the test, and no rank outlives the call.
    """
    return _run_ranks


def _run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 600) -> list[Any]:
    context = get_context("forkserver")  # torch is imported once, in a server without threads
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=_rank, args=(function, rank, ranks, store, timeout, args, pipes[rank][1]), daemon=False
            )
            for rank in range(ranks)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()  # so the pipe ends with the process
            results = _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
            for process in processes:
                process.join(10)
            return results
        finally:
            for process, (receiver, _) in zip(processes, pipes, strict=True):
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
                    process.close()
                receiver.close()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    """One result per rank. The first failure ends the wait: the other ranks may hang in a collective because of it."""
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = {receivers[rank]: rank for rank in range(len(receivers)) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"ranks {sorted(waiting.values())} of {len(receivers)} did not finish in time")
        for receiver in ready:
            rank = waiting[receiver]  # type: ignore[index]
            try:
                ok, value = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                pytest.fail(f"rank {rank} ended without a result")
            if not ok:
                pytest.fail(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
    args: tuple[Any, ...],
    to: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # as in a process of torchrun: DataLoader workers would inherit forkserver
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        value = function(rank, *args)
        dist.destroy_process_group()
        to.send((True, value))
    except BaseException:
        to.send((False, traceback.format_exc()))
    finally:
        to.close()
