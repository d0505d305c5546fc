"""The processes of a JAX job: join them, and agree on small numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from batchwright.core.errors import RunError
from batchwright.runtime.ranks import Ranks, check_rendezvous, discover, rendezvous


def join() -> Ranks:
    """Join the processes that a launcher started, before JAX looks for devices; alone, it changes nothing."""
    ranks = discover()
    if ranks.size > 1 and not jax.distributed.is_initialized():
        check_rendezvous(ranks)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # used by the CPU backend only
        jax.distributed.initialize(rendezvous(), ranks.size, ranks.rank)
    return ranks


def maxima(*values: int) -> list[int]:
    """The largest of each of several numbers below 2^31, of all processes; every process waits for all others."""
    if jax.process_count() == 1:
        return list(values)
    return np.asarray(multihost_utils.process_allgather(np.array(values, np.int32))).max(axis=0).tolist()


def total(value: int) -> int:
    """The sum of the numbers of all processes."""
    if jax.process_count() == 1:
        return value
    # In two parts: JAX has no 64-bit integers by default.
    parts = np.asarray(multihost_utils.process_allgather(np.array(divmod(value, 2**30), np.int32)), np.int64)
    return int((parts[:, 0] * 2**30 + parts[:, 1]).sum())


def answered(question: Callable[[], Any], by: int = 0) -> Any:
    """What `question()` returns on one process, a value of JSON, on all processes. Its error is raised on all of them."""
    if jax.process_count() == 1:
        return question()
    asked, said, raised = jax.process_index() == by, "", None
    if asked:
        try:
            said = json.dumps({"answer": question()})
        except Exception as error:
            said, raised = json.dumps({"fault": f"{type(error).__name__}: {error}"[:2000]}), error
    text = np.frombuffer(said.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text)), is_source=asked))
    data = multihost_utils.broadcast_one_to_all(text if asked else np.zeros(size, np.uint8), is_source=asked)
    if raised is not None:
        raise raised
    found = json.loads(np.asarray(data).tobytes())
    if "fault" in found:
        raise RunError(f"process {by}: {found['fault']}")
    return found["answer"]
