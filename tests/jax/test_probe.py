"""`probe` of a JaxTask: a program of its own, one process per trial."""

from __future__ import annotations

import json

import pytest

from batchwright import probe
from batchwright.core.errors import ConfigError
from tests.needs import needs

needs("jax")
needs("optax")

FILE = """
import numpy as np, optax
from batchwright.jax import JaxTask

def task(n):
    assert n == 6, repr(n)  # a number stays a number
    rows = [np.ones(n, np.float32)] * 8
    return JaxTask({"w": np.ones(n, np.float32)}, lambda p, x: ((x @ p["w"]).sum(), len(x)), optax.sgd(0.1), rows)
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "small.py").write_text(FILE)
    return f"{tmp_path / 'small.py'}:task"


def test_arguments_keep_their_types_and_ranks_are_refused(target, monkeypatch):
    seen = []
    monkeypatch.setattr("batchwright.probe.prober.run_probe", lambda request, **options: seen.append(request))
    probe(target, args={"n": 6})
    assert json.loads(seen[0].command[-2]) == {"n": 6}
    with pytest.raises(ConfigError, match="ranks=2: a JaxTask is probed on all devices of one process"):
        probe(target, args={"n": 6}, ranks=2)


@pytest.mark.rounds
def test_a_probe_measures_a_jax_task(target):
    made = probe(target, args={"n": 6}, max=2, throughput=False, dir=None)
    assert (made.max_micro_batch_size, made.first_failing_micro_batch_size) == (2, None), made
