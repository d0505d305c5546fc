"""What tests run in processes of their own: `python -m tests.jax.programs FUNCTION RANK PROCESSES PORT ARGUMENTS`.

They wait for every step: XLA's simulated CPU devices share a few threads, and several steps in flight block each other in
their collectives (XLA then ends the process after 40 s).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batchwright.core.ramp.rules import Linear
from batchwright.jax import Feed, accumulate, micro_steps
from batchwright.jax import feed as feeding
from batchwright.runtime.data.order import GlobalOrder

WIDTH, ROWS = 8, 1000


@contextmanager
def compilations():
    """Counts the programs that XLA compiles, by JAX's own monitoring."""
    seen = Counter()

    def heard(event, duration, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            seen["programs"] += 1

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def loss(params, batch):
    """A sum over tokens with uneven weights, and an auxiliary mean by weight."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    each = ((hidden @ params["out"])[..., 0] - batch["y"]) ** 2
    balance = ((hidden @ params["router"]) ** 2).sum(-1)
    weight = batch["weight"].sum()
    mean = (balance * batch["weight"]).sum() / jnp.where(weight > 0, weight, 1)
    return (each * batch["weight"]).sum(), weight, 0.1 * mean


def initial(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"in": (WIDTH, 8), "out": (8, 4), "router": (8, 4)}
    return {n: jax.random.normal(k, s, dtype) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def row(index, dtype=np.float32):
    draw = np.random.default_rng(index)
    weight = (np.arange(3) < draw.integers(0, 4)) * draw.random()
    made = {"x": draw.normal(size=(3, WIDTH)), "y": draw.normal(size=3), "weight": weight}
    return {name: values.astype(dtype) for name, values in made.items()}


def blank(dtype=np.float32):
    return jax.tree.map(np.zeros_like, row(0, dtype))


def whole_gradient(params, rows):
    """The gradient of the unsplit batch."""
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def mean(params):
        total, weight, auxiliary = loss(params, batch)
        return total / weight + auxiliary

    return jax.jit(jax.grad(mean))(params)


def error(found, wanted):
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    off = sum(float(((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2).sum()) for a, b in pairs)
    return (off / sum(float((np.asarray(b, np.float64) ** 2).sum()) for _, b in pairs)) ** 0.5


MESHES = {
    "data": (("data",), "data", P()),
    "fsdp": (("fsdp",), None, P("fsdp")),
    "data and fsdp": (("data", "fsdp"), "data", P(None, "fsdp")),
}


def mesh_of(kind):
    names, axis, spec = MESHES[kind]
    devices = np.array(jax.devices())
    shape = (2, -1) if len(names) == 2 else (-1,)
    return Mesh(devices.reshape(shape), names), axis, spec


def equal_gradients(kinds):
    """The largest error against the unsplit batch by precision, both forms, uneven batches, on all devices."""
    found = {}
    for bits in (32, 64):
        with jax.enable_x64(bits == 64):
            dtype = jnp.float64 if bits == 64 else jnp.float32
            params = jax.tree.map(np.asarray, initial(dtype))
            for kind in kinds:
                found[f"{kind} {bits}"] = max(_errors(kind, params, np.dtype(dtype)))
    return found


def _errors(kind, host_params, dtype):
    mesh, axis, spec = mesh_of(kind)
    params = jax.tree.map(lambda p: _global(p, NamedSharding(mesh, spec)), host_params)
    options = {"mesh": mesh, "axis": axis} if axis else {}
    step, steps = jax.jit(accumulate(loss, **options)), micro_steps(loss, **options)
    order = GlobalOrder(ROWS, seed=5)
    schedule = Linear(start=16, increment=11, samples=48, target=38).compile().until(16 + 27 + 38)
    rows = [row(i, dtype) for i in range(ROWS)]
    feed = Feed(rows, order, schedule, 2, mesh=mesh, blank=blank(dtype))
    for batch in feed:
        ids = order.ids(range(batch.plan.start_sample, batch.plan.end_sample))
        wanted = whole_gradient(host_params, [rows[i] for i in ids])
        result = jax.block_until_ready(step(params, batch.batches, batch.count))
        sums = steps.init(params)
        for part in batch.micro_batches():
            sums = jax.block_until_ready(steps.add(sums, params, part))
        for one in (result, steps.divide(sums, params)):
            yield error(jax.tree.map(_whole, one.gradient), wanted)
            weight = sum(rows[i]["weight"].sum(dtype=np.float64) for i in ids)
            yield abs(float(one.weight) - weight) / weight


def _global(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _whole(array):
    """An array of all processes, on this one."""
    array = jax.block_until_ready(array)
    return jax.jit(lambda a: a, out_shardings=NamedSharding(array.sharding.mesh, P()))(array).addressable_data(0)


def collectives(kind):
    """The reductions of a compiled step, inside and outside of the loop over micro batches; with and without `mesh`."""
    mesh, axis, spec = mesh_of(kind)
    params = jax.device_put(initial(), NamedSharding(mesh, spec))
    batches = jax.tree.map(lambda x: np.zeros((4, 8, *x.shape), x.dtype), row(0))
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, tuple(mesh.axis_names))))
    found = []
    for options in ({"mesh": mesh, "axis": axis}, {}):
        text = jax.jit(accumulate(loss, **options)).lower(params, batches, jnp.int32(2)).compile().as_text()
        bodies = {name.lstrip("%") for name in re.findall(r"body=(%?[\w.\-]+)", text)}
        counts = {"inside": 0, "outside": 0}
        for part in re.split(r"\n(?=(?:%|ENTRY)[\w.\-%]+ )", text):
            name = part.split()[1 if part.startswith("ENTRY") else 0].lstrip("%")
            counts["inside" if name in bodies else "outside"] += _reductions(part)
        found.append(counts)
    steps = micro_steps(loss, mesh=mesh, axis=axis)
    sums = steps.init(params)
    one = jax.tree.map(lambda leaf: leaf[0], batches)
    forms = {"add": steps.add.lower(sums, params, one), "divide": steps.divide.lower(sums, params)}
    return [*found, {name: _reductions(form.compile().as_text()) for name, form in forms.items()}]


def _reductions(text):
    return len(re.findall(r" all-reduce(?:-start)?\(", text))


def ramp(kind="data", micro=2):
    """Compilations of a ramp of 8 stages, after the arrays are there: of each form, and of a scan over a static shape."""
    mesh, axis, spec = mesh_of(kind)
    options = {"mesh": mesh, "axis": axis} if axis else {}
    feed = Feed(
        [row(i) for i in range(ROWS)],
        GlobalOrder(ROWS),
        Linear(start=16, increment=16, samples=7 * 128, target=128).compile().until(1200),
        micro,
        mesh=mesh,
        blank=blank(),
    )
    params = jax.device_put(initial(), NamedSharding(mesh, spec))
    steps = list(feed)
    batches = [(step.batches, list(step.micro_batches()), step.count) for step in steps]
    once, many = jax.jit(accumulate(loss, **options)), micro_steps(loss, **options)
    many.divide(many.add(many.init(params), params, batches[0][1][0]), params)  # init and divide compile here

    @jax.jit
    def static(params, batches):
        return jax.lax.scan(
            lambda c, b: (c + jax.grad(lambda p: loss(p, b)[0])(params)["in"].sum(), None), 0.0, batches
        )[0]

    counts = {"stages": len(feed.schedule.segments), "counts": sorted({count for *_, count in batches})}
    sums = many.init(params)
    with compilations() as seen:
        for whole, _, count in batches:
            jax.block_until_ready(once(params, whole, np.int32(count)))
    counts["whole"] = seen["programs"]
    with compilations() as seen:
        for _, parts, _ in batches:
            for part in parts:
                sums = jax.block_until_ready(many.add(sums, params, part))
    counts["micro"] = seen["programs"]
    cut = [jax.tree.map(lambda leaf, n=count: np.asarray(leaf)[:n], whole) for whole, _, count in batches]
    with compilations() as seen:
        for one in cut:
            jax.block_until_ready(static(params, one))
    return counts | {"static": seen["programs"]}


def fed(start, end, loading_hosts=None, micro=2):
    """The ids of every step as the devices see them, what this process records, and the rows that it read."""
    mesh, _, _ = mesh_of("data")
    order = GlobalOrder(ROWS, seed=9)
    schedule = Linear(start=16, increment=16, samples=96, target=48).compile().until(end)
    rows = [{"id": np.int32(i), "weight": np.float32(1)} for i in range(ROWS)]
    none = {"id": np.int32(-1), "weight": np.float32(0)}
    feed = Feed(rows, order, schedule, micro, mesh=mesh, start=start, loading_hosts=loading_hosts, blank=none)
    steps, asked, share = [], set(), feeding.share
    mock.patch.object(feeding, "share", lambda span, rank, size: asked.add(rank) or share(span, rank, size)).start()
    for step in feed:
        arrays = jax.tree.map(_whole, step.batches)
        real = np.asarray(arrays["id"])[np.asarray(arrays["weight"]) > 0]
        one_by_one = [int(i) for part in step.micro_batches() for i in np.asarray(_whole(part["id"])) if i >= 0]
        assert sorted(one_by_one) == sorted(real.tolist())
        steps.append([step.plan.start_sample, sorted(real.tolist()), step.ids.tolist()])
    return {"steps": steps, "read": feed.reader.rows_read, "asked": sorted(asked)}


def crossed():
    """The message for a mesh whose ranks have devices on both processes, of which one reads."""
    from batchwright.core.errors import PlanError

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("model", "data"))
    schedule = Linear(start=16, increment=16, samples=96, target=48).compile()
    try:
        Feed([row(i) for i in range(4)], GlobalOrder(4), schedule, 2, mesh=mesh, loading_hosts=[1])
    except PlanError as error:
        return str(error)


def own_loop(directory, until, launch, die_in=None):
    """A loop of a user: optax, the ledger, orbax; stops at `until`. `die_in`: its save dies in a call of this function."""
    import optax

    from batchwright.jax import Checkpoints
    from batchwright.runtime.state.ledger import Ledger

    mesh, axis, _ = mesh_of("data")
    order = GlobalOrder(ROWS, seed=2)
    schedule = Linear(start=16, increment=16, samples=96, target=48).compile().until(320)
    optimizer, everywhere = optax.adam(1e-2), NamedSharding(mesh, P())
    params = jax.tree.map(lambda p: _global(np.asarray(p), everywhere), initial())
    state = (params, jax.jit(optimizer.init, out_shardings=everywhere)(params))
    position, path = 0, Path(directory)
    checkpoints = Checkpoints(path / "checkpoints", keep=3)
    saved = checkpoints.newest()
    if saved is not None:
        state, position = checkpoints.load(saved, state), saved.position
    gradient = accumulate(loss, mesh=mesh, axis=axis)

    @jax.jit
    def train_step(state, batches, count):
        params, inner = state
        updates, inner = optimizer.update(gradient(params, batches, count).gradient, inner, params)
        return optax.apply_updates(params, updates), inner

    number = int(schedule.at_sample(position).step)
    parent, place = saved.launch if saved else None, {"rank": jax.process_index(), "ranks": jax.process_count()}
    ledger = Ledger(path / "ledger", order, launch=launch, start=(number, position), parent=parent, **place)
    for step in Feed([row(i) for i in range(ROWS)], order, schedule, 2, mesh=mesh, start=position, blank=blank()):
        if step.plan.start_sample >= until:
            break
        state = jax.block_until_ready(train_step(state, step.batches, step.count))
        ledger.fed(step.ids)
        ledger.applied(step.plan.step, step.plan.start_sample, step.plan.global_batch_size)
        position, number = step.plan.end_sample, step.plan.step + 1
    ledger.close()
    if die_in is not None:
        mock.patch(die_in, lambda *given: os.kill(os.getpid(), signal.SIGKILL)).start()
    checkpoints.save(state, step=number, position=position, launch=launch, state={})
    ledger.finish()
    return [position, np.concatenate([np.asarray(_whole(p)).ravel() for p in jax.tree.leaves(state[0])]).tolist()]


def trained(directory):
    """Two runs of the loop: replicated parameters, then sharded ones, with a stop in the ramp."""
    import optax

    from batchwright.jax import JaxTask, train
    from batchwright.runtime.loop.settings import Settings

    def task(**sharded):
        rows = [row(i) for i in range(200)]
        return JaxTask(lambda key: initial(), loss, optax.adam(1e-2), rows, blank=blank(), **sharded)

    split = {"mesh": {"data": 2, "fsdp": -1}, "partition": lambda params: jax.tree.map(lambda p: P("fsdp"), params)}
    schedule = Linear(start=16, increment=16, samples=96, target=48).compile().until(250)
    found, settings = {}, {"micro_batch_size": 2, "max_norm": 0.5, "lr_scaling": "sqrt", "progress": False, "keep": 5}
    for name, made in (("replicated", task()), ("sharded", task(**split))):
        folder = f"{directory}/{name}"
        first = train(made, schedule, Settings(directory=folder, end_sample=112, **settings))
        last = train(made, schedule, Settings(directory=folder, **settings))
        text = "".join(path.read_text() for path in sorted(Path(folder, "events").iterdir()))
        lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "step"]
        steps = [[line[key] for key in ("step", "loss", "grad_norm", "accumulation_steps")] for line in lines]
        ends = [[status.state, status.reason, status.position] for status in (first, last)]
        found[name] = {"steps": steps, "ends": ends}
    return found


def edges(directory):
    """Tasks and folders that a loop must survive, or refuse in plain words."""
    import optax

    from batchwright.core.errors import BatchwrightError
    from batchwright.core.ramp.rules import Constant
    from batchwright.jax import Checkpoints, JaxTask, loop, train
    from batchwright.runtime.loop.settings import Settings

    def total(params, batch):
        return (((batch["x"] @ params["w"] - 1) ** 2) * batch["weight"]).sum() * 1e-3, batch["weight"].sum()

    def with_mean(params, batch):
        mean = ((batch["x"] @ params["w"]) * batch["weight"]).sum() / batch["weight"].sum()
        return *total(params, batch), 1e-3 * mean

    def task(loss=total, params=lambda key: {"w": jnp.ones(2)}, weight=0):
        rows = [{"x": np.float32([i, 1]), "weight": np.float32(1)} for i in range(64)]
        none = {"x": np.zeros(2, np.float32), "weight": np.float32(weight)}
        return JaxTask(params, loss, optax.adam(1e-3), rows, blank=none)

    def run(name, task, samples, micro=2, schedule=None, **more):
        settings = Settings(directory=f"{directory}/{name}", micro_batch_size=micro, progress=False, **more)
        return train(task, schedule or Constant(8).compile().until(samples), settings)

    def refused(*given, **more):
        try:
            run(*given, **more)
        except BatchwrightError as error:
            return str(error)

    found, given = {}, {"w": jnp.ones(2)}
    positions = [run(f"arrays {i}", task(params=given), 24).position for i in range(2)]
    found["params that are arrays"] = [positions, np.asarray(given["w"]).tolist()]
    status = run("blank", task(with_mean), 17)  # the last step has one sample, so the second rank has none
    mesh = Mesh(np.array(jax.devices()), ("data",))
    like = jax.device_put({"w": jnp.ones(2)}, NamedSharding(mesh, P()))
    like = {"params": like, "optimizer": jax.device_put(optax.adam(1e-3).init(like), NamedSharding(mesh, P()))}
    checkpoints = Checkpoints(f"{directory}/blank/checkpoints")
    weights = np.asarray(checkpoints.load(checkpoints.newest(), like)["params"]["w"])
    found["a rank with blank rows only"] = [status.position, bool(np.isfinite(weights).all())]
    found["a loss without a weight"] = refused("mean", task(lambda p, b: total(p, b)[0]), 16)
    found["a blank row that weighs"] = refused("weighs", task(weight=1), 17)
    begun = run("begun elsewhere", task(), 40, start_sample=16)
    found["begun elsewhere"] = [begun.state, begun.step, begun.position]
    run("damaged", task(), 16)
    (manifest,) = Path(directory, "damaged", "checkpoints").glob("*/manifest.json")
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(whole | {"schema": 99}))
    found["newer"] = refused("damaged", task(), 16)
    manifest.write_text("{")
    found["damaged"] = refused("damaged", task(), 16)
    kept, compiled = [], loop._Loop._compiled
    with mock.patch.object(loop._Loop, "_compiled", lambda self: kept.append(compiled(self)) or kept[-1]):
        schedule = Linear(start=8, increment=8, samples=64, target=32).compile().until(130)
        run("compiled", task(), 130, schedule=schedule, end_sample=40)
        run("compiled", task(), 130, schedule=schedule, checkpoint_every=16)
    found["compiled"] = [step._cache_size() for step in kept]
    return found


def doctests():
    """The examples in the docstrings of the room."""
    import doctest
    from importlib import import_module

    import batchwright.jax as room

    names = [f"batchwright.jax.{path.stem}" for path in Path(room.__path__[0]).glob("*.py") if path.stem[0] != "_"]
    results = {name: doctest.testmod(import_module(name)) for name in names}
    return {name: [result.failed, result.attempted] for name, result in results.items()}


def main(function, rank, processes, port, arguments):
    if int(processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(rank))
    from tests.jax import loops

    result = (globals().get(function) or getattr(loops, function))(**json.loads(arguments))
    assert "torch" not in sys.modules
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
