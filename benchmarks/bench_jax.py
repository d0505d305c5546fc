"""JAX: a step of `accumulate` against a hand-written scan and optax.MultiSteps, and a ramp against compiling at each stage.

All run the model of examples/jax_gpt on one CPU device, with equal rows. Programs take turns, round after round, and a ratio is
the median over rounds; the scan against itself shows how far two equal programs differ. CPU seconds; compilations are counted
by JAX's own monitoring. The scan is exact, too: sums of losses and weights, divided once. optax.MultiSteps averages the means
of the micro batches, so it computes another gradient, whose error is shown.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "jax_gpt"))
import jax_gpt

from batchwright.jax import accumulate, micro_steps

LENGTH, MICRO, ROUNDS = 64, 4, 15
STAGES = range(1, 9)  # micro batches of each stage of the ramp
MOST = max(STAGES)
COMPILED = [0]
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **facts: COMPILED.__setitem__(0, COMPILED[0] + event.endswith("backend_compile_duration"))
)
ROWS = jax_gpt.Documents(LENGTH, 30)
OPTIMIZER = optax.adamw(1e-3)


def batches(count: int, most: int | None = None):
    """[most, MICRO, …]; those from `count` on are zeros."""
    rows = [ROWS[i] for i in range(count * MICRO)]
    folded = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(count, MICRO, LENGTH), *rows)
    room = (most or count) - count
    return jax.tree.map(lambda a: jnp.asarray(np.concatenate([a, np.zeros((room, *a.shape[1:]), a.dtype)])), folded)


def start():
    params = jax_gpt.initial(jax.random.key(0), LENGTH)
    return params, OPTIMIZER.init(params)


def updated(params, state, gradient):
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def make_whole():
    gradient = accumulate(jax_gpt.loss)
    step = jax.jit(lambda p, s, b, n: updated(p, s, gradient(p, b, n).gradient), donate_argnums=(0, 1))
    return lambda p, s, count, staged: step(p, s, staged[count][0], np.int32(count))


def make_micro():
    steps = micro_steps(jax_gpt.loss)
    apply = jax.jit(updated, donate_argnums=(0, 1))

    def step(p, s, count, staged):
        sums = steps.init(p)
        for part in staged[count][2]:
            sums = steps.add(sums, p, part)
        return apply(p, s, steps.divide(sums, p).gradient)

    return step


def make_scan():
    """The hand-written way: the number of micro batches is a shape."""

    def step(p, s, b):
        def body(sums, part):
            (total, weight), gradient = jax.value_and_grad(jax_gpt.loss, has_aux=True)(p, part)
            return jax.tree.map(jnp.add, sums, (gradient, total, weight)), None

        zeros = (jax.tree.map(jnp.zeros_like, p), 0.0, 0.0)
        (gradient, _, weight), _ = jax.lax.scan(body, zeros, b)
        return updated(p, s, jax.tree.map(lambda g: g / weight, gradient))

    compiled = jax.jit(step, donate_argnums=(0, 1))
    return lambda p, s, count, staged: compiled(p, s, staged[count][1])


def make_multi():
    """optax.MultiSteps: one call per micro batch, whose loss is a mean."""
    multi = {k: optax.MultiSteps(OPTIMIZER, every_k_schedule=k) for k in STAGES}
    states = {}

    def mean(p, part):
        total, weight = jax_gpt.loss(p, part)
        return total / weight

    def micro(p, s, part, k):
        updates, s = multi[k].update(jax.grad(mean)(p, part), s, p)
        return optax.apply_updates(p, updates), s

    compiled = jax.jit(micro, donate_argnums=(0, 1), static_argnums=3)

    def step(p, s, count, staged):
        inner = states.pop(count, None) or multi[count].init(p)
        for part in staged[count][2]:
            p, inner = compiled(p, inner, part, count)
        states[count] = inner
        return p, s

    return step


def seconds(step, count, staged, state, times=3):
    began = time.process_time()
    for _ in range(times):
        state[:] = jax.block_until_ready(step(*state, count, staged))
    return (time.process_time() - began) / times


def spread(values):
    ordered = sorted(values)
    return (
        f"{statistics.median(ordered):.3f} ({ordered[len(ordered) // 4]:.3f} to {ordered[-1 - len(ordered) // 4]:.3f})"
    )


def steady(staged):
    makers = {"scan": make_scan, "accumulate": make_whole, "micro_steps": make_micro, "MultiSteps": make_multi}
    makers["scan again"] = make_scan
    for count in (1, MOST):
        programs = {name: (make(), list(start())) for name, make in makers.items()}
        for step, state in programs.values():
            seconds(step, count, staged, state, 1)  # compiles
        ratios = {name: [] for name in programs}
        base = []
        for _ in range(ROUNDS):
            took = {name: seconds(step, count, staged, state) for name, (step, state) in programs.items()}
            base.append(took["scan"])
            for name, value in took.items():
                ratios[name].append(value / took["scan"])
        taken = 1000 * statistics.median(base)
        print(f"\n{count} micro batch{'es' * (count > 1)} of {MICRO} per step: the scan takes {taken:.1f} ms of CPU")
        for name in list(programs)[1:]:
            print(f"  {name:12} / scan   {spread(ratios[name])}")


def ramp(staged):
    print(f"\na ramp of {len(STAGES)} stages, 3 steps each, with compilation: CPU seconds, wall seconds, compilations")
    rows = {"accumulate": make_whole, "micro_steps": make_micro, "scan, compiled at each stage": make_scan}
    found = {name: [] for name in rows}
    for _ in range(3):
        for name, make in rows.items():
            jax.clear_caches()
            state, step = list(start()), make()
            jax.block_until_ready(state)
            before, cpu, wall = COMPILED[0], time.process_time(), time.perf_counter()
            for count in STAGES:
                seconds(step, count, staged, state)
            found[name].append((time.process_time() - cpu, time.perf_counter() - wall, COMPILED[0] - before))
    for name, values in found.items():
        cpu, wall, compiled = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"  {name:30} {cpu:6.1f} s  {wall:6.1f} s  {compiled:3.0f}")


def errors(staged):
    """The gradient against that of the unsplit batch."""
    params = start()[0]
    rows = jax.tree.map(lambda a: a.reshape(-1, LENGTH), staged[MOST][1])
    whole = jax.grad(lambda p: (lambda t: t[0] / t[1])(jax_gpt.loss(p, rows)))(params)
    ours = accumulate(jax_gpt.loss)(params, staged[MOST][0], MOST).gradient
    means = [
        jax.grad(lambda p, part=part: (lambda t: t[0] / t[1])(jax_gpt.loss(p, part)))(params)
        for part in staged[MOST][2]
    ]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *means)
    off = [
        optax.tree_utils.tree_norm(jax.tree.map(jnp.subtract, g, whole)) / optax.tree_utils.tree_norm(whole)
        for g in (ours, mean)
    ]
    print(
        f"\ngradient against the unsplit batch: accumulate {float(off[0]):.1e}, mean of means (MultiSteps) {float(off[1]):.1e}"
    )


if __name__ == "__main__":
    staged = {}
    for count in STAGES:
        exact = batches(count)
        staged[count] = (batches(count, MOST), exact, [jax.tree.map(lambda a, i=i: a[i], exact) for i in range(count)])
    errors(staged)
    steady(staged)
    ramp(staged)
