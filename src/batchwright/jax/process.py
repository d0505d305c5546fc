"""The processes of a JAX job: join them, and agree on small numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from batchwright.runtime.answers import Answer
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


def from_first(what: str, question: Callable[[], Any], *, field: str = "dataset", first: int = 0) -> Any:
    """What `question()` returns on process `first`, a value of JSON, on all processes. Its error is raised on all of them.

    `what` and `field` name an error that is not batchwright's.
    """
    if jax.process_count() == 1:
        return question()
    asked = jax.process_index() == first
    own = Answer[Any](question if asked else None, f"process {first}: {what} failed", field)
    text = np.frombuffer(_text(own).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text)), is_source=asked))
    data = multihost_utils.broadcast_one_to_all(text if asked else np.zeros(size, np.uint8), is_source=asked)
    return own.heard(json.loads(np.asarray(data).tobytes()))


def from_all(what: str, question: Callable[[], Any]) -> list[Any]:
    """What `question()` about the dataset returns on every process, a value of JSON, on all processes.

    The error of one process is raised on all of them; `what` names it.
    """
    if jax.process_count() == 1:
        return [question()]
    own = Answer[Any](question, f"process {jax.process_index()}: {what} failed", "dataset")
    text = _text(own).encode()
    (size,) = maxima(len(text))
    padded = np.frombuffer(text.ljust(size), np.uint8)  # JSON may have spaces at its end
    return [own.heard(json.loads(one.tobytes())) for one in np.asarray(multihost_utils.process_allgather(padded))]


def _text(own: Answer[Any]) -> str:
    return json.dumps(own.sent, default=str)  # the numbers in an error may be of any type
