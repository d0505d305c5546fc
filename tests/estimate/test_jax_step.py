"""JAX steps, compiled ahead of time."""

from __future__ import annotations

import pytest

from batchwright.core.errors import PlanError, RunError
from batchwright.estimate import estimate, worker
from batchwright.estimate.records import EstimateRequest
from tests.needs import needs

SOURCE = """
import jax, jax.numpy as jnp
from batchwright.estimate import JaxStep

def loss(params, x):
    for w in params:
        x = jax.nn.gelu(x @ w)
    return (x ** 2).sum()

def step(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

def task(layers=4, sequence_length=8, donate=True):
    width = 128
    def arguments(micro_batch_size):
        params = [jnp.zeros((width, width)) for _ in range(layers)]
        return params, jax.ShapeDtypeStruct((micro_batch_size * sequence_length, width), jnp.float32)
    return JaxStep(step, arguments, donate=(0,) if donate else ())

def broken():
    return JaxStep(lambda x: x.no_such_thing, lambda micro_batch_size: (jnp.zeros(micro_batch_size),))

def not_a_step():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    needs("jax")
    path = tmp_path / "train_jax.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def jax_task(file):
    return file


def test_arguments_outputs_and_temporaries_less_what_is_shared(jax_task):
    made = estimate(f"{jax_task}:task", memory_bytes=2**24)
    assert made.framework == "jax" and any("XLA" in line for line in made.assumptions)
    weights = 4 * 128 * 128 * 4
    for p in made.points:
        parts = p.breakdown
        assert p.peak_memory_bytes == sum(parts.values())
        assert parts["aliased"] == -weights  # donated: the new weights take the place of the old
        assert parts["outputs"] == pytest.approx(weights, abs=1024)  # and a table of where they are
        assert parts["arguments"] == weights + p.micro_batch_size * 8 * 128 * 4
    by_size = {p.micro_batch_size: p.peak_memory_bytes for p in made.points}
    best = made.max_micro_batch_size
    assert by_size[best] <= 2**24 < by_size[best + 1]


def test_lengths_are_arguments_and_nothing_is_shared_unless_donated(jax_task):
    made = estimate(f"{jax_task}:task", args={"donate": False}, sequence_lengths=(8, 16), micro_batch_sizes=(64, 128))
    assert made.points[0].breakdown["aliased"] == 0
    at = {(p.micro_batch_size, p.sequence_length): p.peak_memory_bytes for p in made.points}
    assert at[128, 8] == at[64, 16] and made.fit is not None


def test_a_real_trial_is_near_the_compilers_figure(file):
    request = EstimateRequest(f"{file}:task", micro_batch_sizes=(8192,))
    estimated = worker.run("estimate", request, timeout=900)["points"][0]["peak_memory_bytes"]
    measured = worker.run("trial", request, timeout=900)["measured_bytes"]
    assert estimated == pytest.approx(measured, rel=0.2) and estimated > 2**27


def test_options_of_torch_are_refused(jax_task):
    with pytest.raises(PlanError, match="precision, ranks cannot be set for a JAX step"):
        estimate(f"{jax_task}:task", precision="bf16", ranks=2, micro_batch_sizes=(1,))


def test_errors_in_the_file_are_named(jax_task):
    with pytest.raises(PlanError, match="has no function 'nothing'"):
        estimate(f"{jax_task}:nothing", micro_batch_sizes=(1,))
    with pytest.raises(PlanError, match=r"takes no argument 'depth'"):
        estimate(f"{jax_task}:task", args={"depth": 1}, micro_batch_sizes=(1,))
    with pytest.raises(PlanError, match=r"takes no argument 'layer'.* Did you mean layers\?"):
        estimate(f"{jax_task}:task", args={"layer": 1}, micro_batch_sizes=(1,))
    with pytest.raises(RunError, match="returned int, not a batchwright"):
        estimate(f"{jax_task}:not_a_step", micro_batch_sizes=(1,))
    with pytest.raises(RunError, match="no_such_thing") as caught:
        estimate(f"{jax_task}:broken", micro_batch_sizes=(1,))
    assert "train_jax.py" in caught.value.__notes__[0]


def test_a_jax_task_is_estimated_as_its_loop_runs_it(tmp_path):
    needs("optax")
    file = tmp_path / "task.py"
    file.write_text("""
import jax.numpy as jnp, numpy as np, optax
from batchwright.jax import JaxTask

def task():
    return JaxTask(
        params=lambda key: {"w": jnp.zeros((256, 256)), "out": jnp.zeros((256, 1))},
        loss=lambda p, batch: ((jnp.tanh(batch["x"] @ p["w"]) @ p["out"]).sum(), len(batch["x"])),
        optimizer=optax.adam(1e-3),
        dataset=[{"x": np.zeros(256, np.float32)}] * 4,
    )
""")
    result = estimate(f"{file}:task", micro_batch_sizes=(64, 4096))
    small, large = result.points
    weights = 4 * (256 * 256 + 256)
    # Parameters and both moments of Adam are arguments; at 64 rows they are nearly all of them.
    assert 3 * weights < small.breakdown["arguments"] < 3 * weights + 2 * 64 * 256 * 4
    assert large.breakdown["arguments"] - small.breakdown["arguments"] == (4096 - 64) * 256 * 4
    assert result.framework == "jax"
