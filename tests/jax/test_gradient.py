"""The gradient of a step is that of the unsplit batch, with one reduction and one compilation for a whole ramp."""

from __future__ import annotations

import pytest

from batchwright.core.errors import PlanError, RunError
from tests.jax.devices import run
from tests.needs import needs

needs("jax")
needs("optax")


def exact(found):
    assert found
    for name, worst in found.items():
        assert worst < (1e-12 if name.endswith("64") else 1e-6), (name, worst)


@pytest.mark.parametrize(
    "devices",
    [pytest.param(1, marks=pytest.mark.rounds), pytest.param(2, marks=pytest.mark.rounds), 4],
)
def test_gradients_of_every_split_are_those_of_the_unsplit_batch(devices):
    kinds = ["data", "fsdp", *(["data and fsdp"] if devices == 4 else [])]
    exact(run("equal_gradients", devices=devices, kinds=kinds)[0])


def test_gradients_on_two_processes_are_those_of_the_unsplit_batch():
    for found in run("equal_gradients", devices=2, processes=2, kinds=["data"]):
        exact(found)


@pytest.mark.rounds
def test_gradients_on_two_processes_with_sharded_parameters():
    for found in run("equal_gradients", devices=2, processes=2, kinds=["fsdp", "data and fsdp"]):
        exact(found)


def test_replicated_parameters_are_reduced_once_per_step():
    ours, plain, micro = run("collectives", devices=4, kind="data")[0]
    assert ours["inside"] == 0 and ours["outside"] == 1
    assert micro == {"add": 0, "divide": 1}
    assert plain["inside"] > 0, "the compiler has learned to do it: `mesh` is no longer needed"


@pytest.mark.parametrize(
    "kind", ["data", *(pytest.param(k, marks=pytest.mark.rounds) for k in ("fsdp", "data and fsdp"))]
)
def test_a_ramp_of_eight_stages_compiles_once(kind):
    found = run("ramp", devices=4, kind=kind)[0]
    assert found["stages"] == 8 and len(found["counts"]) >= 8
    assert found["whole"] == 1 and found["micro"] <= 1  # of `micro`, one may be compiled before
    assert found["static"] >= 8  # the counter counts: a shape per stage is a compilation per stage


def test_sums_are_donated_and_at_least_fp32():
    import jax.numpy as jnp

    from batchwright.jax import micro_steps

    params = jnp.ones(4, jnp.bfloat16)
    steps = micro_steps(lambda p, batch: ((p * batch).sum(), 1))
    first = steps.init(params)
    assert first.gradient.dtype == jnp.float32
    second = steps.add(first, params, jnp.ones(4))
    assert first.gradient.is_deleted()
    for _ in range(1023):
        second = steps.add(second, params, jnp.full(4, 1.0078125))
    done = steps.divide(second, params)
    assert done.gradient.dtype == jnp.bfloat16 and float(done.weight) == 1024
    assert float(done.gradient[0]) == jnp.bfloat16((1 + 1023 * 1.0078125) / 1024)


def test_a_micro_batch_without_weight_adds_nothing_and_one_that_is_not_there_gives_nan():
    import jax
    import jax.numpy as jnp
    import numpy as np

    from batchwright.jax import accumulate, micro_steps

    def loss(p, batch):
        x, weight = batch
        return (p * x * weight).sum(), weight.sum(), (p * x * weight).sum() / weight.sum()

    batches = (jnp.array([[1.0, 3.0], [5.0, 7.0]]), jnp.array([[1.0, 1.0], [0.0, 0.0]]))
    step, steps = jax.jit(accumulate(loss)), micro_steps(loss)
    sums = steps.init(jnp.float32(2))
    for index in range(2):
        sums = steps.add(sums, jnp.float32(2), (batches[0][index], batches[1][index]))
    for found in (step(jnp.float32(2), batches, 2), steps.divide(sums, jnp.float32(2))):
        assert [float(v) for v in found] == [4.0, 4.0, 2.0, 4.0]
    assert all(np.isnan(v) for v in step(jnp.float32(2), batches, 3))


@pytest.mark.parametrize(
    "returned, field",
    [
        (lambda p, b: (p * b).sum(), "loss"),
        (lambda p, b: ((p * b).sum(),), "loss"),
        (lambda p, b: (p * b, 1.0), "loss_sum"),
        (lambda p, b: ((p * b).sum(), b), "weight"),
        (lambda p, b: ((p * b).sum(), "3"), "weight"),
        (lambda p, b: (3, 1.0), "loss_sum"),
        (lambda p, b: ((p * b).sum(), 1.0, p * b), "auxiliary_mean"),
    ],
)
def test_a_loss_of_another_shape_is_refused(returned, field):
    import jax.numpy as jnp

    from batchwright.jax import accumulate

    with pytest.raises(RunError) as caught:
        accumulate(returned)(jnp.ones(3), jnp.ones((2, 3)), 2)
    assert caught.value.field == field


def test_an_axis_that_the_mesh_does_not_have():
    import jax
    import numpy as np

    from batchwright.jax import accumulate

    with pytest.raises(PlanError, match=r"axis='data' is not an axis of the mesh. Its axes: x \(1\)"):
        accumulate(lambda p, b: (p.sum(), 1.0), mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)))


def test_examples_in_docstrings():
    for name, (failed, _) in run("doctests")[0].items():
        assert not failed, name
