"""`check` finds the defects that were planted in JAX losses, as it does in torch tasks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.needs import needs

needs("jax")
needs("optax")

WIDTH = 4
TASK = f"{Path(__file__).parents[2] / 'examples' / 'jax_gpt' / 'jax_gpt.py'}:task"


def row(i: int) -> dict:
    draw = np.random.default_rng(i)
    weight = (np.arange(3) < 1 + i % 3).astype(np.float32)
    values = {"x": draw.normal(size=(3, WIDTH)), "y": draw.normal(size=3)}
    return {name: value.astype(np.float32) for name, value in values.items()} | {"weight": weight}


ROWS = [row(i) for i in range(24)]


def task(loss, optimizer=None, dtype="float32"):
    import jax
    import optax

    from batchwright.jax import JaxTask

    params = {
        "in": {"kernel": np.linspace(-1, 1, WIDTH * 5).reshape(WIDTH, 5)},
        "out": {"kernel": np.linspace(-1, 1, 5)},
    }
    params = jax.tree.map(lambda p: jax.numpy.asarray(p, dtype), params)
    return JaxTask(params, loss, optimizer or optax.sgd(0.1), ROWS)


def forward(params, batch):
    import jax.numpy as jnp

    hidden = jnp.tanh(batch["x"] @ params["in"]["kernel"])
    return hidden, (hidden @ params["out"]["kernel"] - batch["y"]) ** 2


def exact(params, batch):
    _, each = forward(params, batch)
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def mean_with_count(params, batch):
    total, weight = exact(params, batch)
    return total / weight, weight


def mean_of_means(params, batch):
    total, weight = exact(params, batch)
    return total / weight, 1.0


def sum_without_weight(params, batch):
    return exact(params, batch)[0], 1.0


def ragged_tail(params, batch):
    _, each = forward(params, batch)
    return each.mean(), 1.0


def balance(params, batch):
    hidden, _ = forward(params, batch)
    return ((hidden**2).sum(-1) * batch["weight"]).sum() / batch["weight"].sum()


def auxiliary(params, batch):
    return (*exact(params, batch), 0.5 * balance(params, batch))


def auxiliary_in_sum(params, batch):
    total, weight = exact(params, batch)
    return total + 0.5 * balance(params, batch), weight


def auxiliary_as_sum(params, batch):
    total, weight = exact(params, batch)
    return total, weight, 0.5 * balance(params, batch) * weight


def auxiliary_statistic(params, batch):
    hidden, _ = forward(params, batch)
    return (*exact(params, batch), 0.5 * (hidden.mean((0, 1)) ** 2).sum())


def contrastive(params, batch):
    import jax
    import jax.numpy as jnp

    hidden, _ = forward(params, batch)
    flat = hidden.reshape(len(hidden), -1)
    return -jnp.diag(jax.nn.log_softmax(flat @ flat.T)).sum(), len(flat)


def batch_norm(params, batch):
    hidden, _ = forward(params, batch)
    hidden = (hidden - hidden.mean(0)) / (hidden.var(0) + 0.1) ** 0.5
    each = (hidden @ params["out"]["kernel"] - batch["y"]) ** 2
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def dropout(params, batch):
    import jax

    hidden, _ = forward(params, batch)
    hidden = hidden * jax.random.bernoulli(jax.random.key(1), 0.8, hidden.shape) / 0.8
    each = (hidden @ params["out"]["kernel"] - batch["y"]) ** 2
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def dropout_and_mean(params, batch):
    total, weight = dropout(params, batch)
    return total / weight, 1.0


def draws(params, batch):
    import jax

    hidden, _ = forward(params, batch)
    keys, shape = jax.random.split(jax.random.key(1), 4), hidden.shape
    noise = jax.random.gumbel(keys[0], shape) + jax.random.exponential(keys[1], shape)
    noise += jax.random.rademacher(keys[2], shape) + jax.random.choice(keys[3], np.float32([0.5, 2.0]), shape)
    each = ((hidden + 0.1 * noise) @ params["out"]["kernel"] - batch["y"]) ** 2
    return (each * batch["weight"]).sum(), batch["weight"].sum()


CASES = {
    exact: (True, []),
    auxiliary: (True, []),
    mean_with_count: (False, ["scaled-by-accumulation", "mean-of-means"]),
    mean_of_means: (False, ["mean-of-means"]),
    sum_without_weight: (False, ["scaled-by-accumulation"]),
    ragged_tail: (False, ["ragged-tail"]),
    auxiliary_in_sum: (False, ["auxiliary-scaled"]),
    auxiliary_as_sum: (False, ["auxiliary-scaled"]),
    auxiliary_statistic: (True, ["auxiliary-per-micro-batch"]),
    contrastive: (False, ["in-batch-negatives"]),
    batch_norm: (False, ["in-batch-negatives"]),
    dropout: (True, ["dropout"]),
    draws: (True, ["dropout"]),
    dropout_and_mean: (False, ["dropout", "mean-of-means"]),
}
FEW = (mean_of_means, dropout_and_mean)


@pytest.mark.parametrize(
    "loss", [loss if loss in FEW else pytest.param(loss, marks=pytest.mark.rounds) for loss in CASES]
)
def test_planted_defects_are_found(loss):
    from batchwright.jax import check

    report = check(task(loss), global_batch_size=12, micro_batch_sizes=(2, 5))
    ok, causes = CASES[loss]
    assert (report.ok, sorted(f.cause for f in report.findings)) == (ok, sorted(causes)), report
    assert all("F.cross_entropy" not in f.message for f in report.findings)


def test_draws_in_a_compiled_function_are_found():
    import jax

    from batchwright.jax import check

    report = check(task(jax.jit(draws)), global_batch_size=12, micro_batch_sizes=(2, 5))
    assert (report.ok, [f.cause for f in report.findings]) == (True, ["dropout"]), report


@pytest.mark.rounds
def test_a_schedule_of_optax_counts_steps():
    import optax

    from batchwright.core.ramp.rules import parse_thresholds
    from batchwright.jax import check

    scheduled = task(exact, optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))
    report = check(scheduled, global_batch_size=4, micro_batch_sizes=(2,), ramp=parse_thresholds("0:4 64:8").compile())
    assert not report.ok and [f.cause for f in report.findings] == ["step-counted-schedule"]


@pytest.mark.rounds
def test_half_precision_is_rounding():
    from batchwright.jax import check

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check(task(exact, dtype="bfloat16"), global_batch_size=12, micro_batch_sizes=(2, 5))
    assert report.ok, report


def test_the_command_refuses_what_a_jax_task_does_not_have(run_command):
    for flag, value, message in (
        ("--accumulate-dtype", "float64", "always summed in fp32 or wider"),
        ("--pipeline-parallel", "2", "stages of a JaxTask are not compared"),
    ):
        code, _, err = run_command("check", TASK, flag, value)
        assert code == 2 and message in err, err


@pytest.mark.rounds
def test_the_command_compares_on_two_devices(run_command):
    sizes = ["--global-batch-size", "8", "--micro-batch-size", "2", "--ranks", "2"]
    arguments = ["--arg", "sequence_length=16", "--arg", "files=10"]
    code, out, err = run_command("check", TASK, *sizes, *arguments, "--json")
    assert code == 0, err
    splits = [(split["micro_batch_size"], split["ranks"]) for split in json.loads(out)["splits"]]
    assert splits == [(2, 1), (2, 2)]
