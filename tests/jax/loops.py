"""Programs of `tests/jax/programs.py` that train with the loop: how it stops and fails, and where its arrays are."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import batchwright
from batchwright.core.errors import BatchwrightError, PlanError
from batchwright.core.ramp.learning_rate import SampleSchedule
from batchwright.core.ramp.rules import Constant, parse_thresholds
from batchwright.jax import Checkpoints, Feed, JaxTask, check, loop, maxtext, restore, save, train
from batchwright.jax.task import mesh_of
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.loop.settings import Settings

ROWS = [{"x": np.float32([np.sin(i), 1]), "weight": np.float32(1 + i % 3)} for i in range(64)]
BLANK = {"x": np.zeros(2, np.float32), "weight": np.float32(0)}


def squares(params, batch):
    return (((batch["x"] @ params["w"] - 1) ** 2) * batch["weight"]).sum(), batch["weight"].sum()


def task(loss=squares, dataset=ROWS, params=lambda key: {"w": jnp.ones(2)}, optimizer=None, **more):
    return JaxTask(params, loss, optimizer or optax.adam(1e-2), dataset, blank=BLANK, **more)


def run(folder, made, samples=24, schedule=None, micro=2, **more):
    settings = Settings(directory=str(folder), micro_batch_size=micro, progress=False, **more)
    return train(made, schedule or Constant(8).compile().until(samples), settings)


def refused(function, *given, **more):
    """The message of an error; not that of another kind of error, which is raised."""
    try:
        function(*given, **more)
    except BatchwrightError as error:
        return str(error)


def weights(folder, made):
    """The parameters in the newest checkpoint of a run."""
    checkpoints = Checkpoints(Path(folder, "checkpoints"))
    like = made.start(made.build_mesh(), 0)
    return np.asarray(checkpoints.load(checkpoints.newest(), like)["params"]["w"], np.float64)


def events(folder, kind):
    lines = (line for path in sorted(Path(folder, "events").iterdir()) for line in path.read_text().splitlines())
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


class Noticed:
    """A dataset that calls a function before each read."""

    def __init__(self, before) -> None:
        self.before, self.reads, self.fingerprint = before, 0, "rows"

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i):
        self.reads += 1
        self.before(self.reads)
        return ROWS[i]


def cases(directory):
    """All of them in one process: starting one takes longer than most of them."""
    return {made.__name__: made(Path(directory, made.__name__)) for made in (stops, waits, by_hand, compiled)}


def stops(folder):
    """What stops a loop, and what must not."""
    found = {}

    # A signal while the rows of the second step are read, so during the first.
    heard = Noticed(lambda reads: os.kill(os.getpid(), signal.SIGUSR1) if reads == 12 else None)
    status = run(folder / "signal", task(dataset=heard))
    found["signal"] = [status.state, status.reason, status.position, status.signal, status.checkpoint is not None]
    status = run(folder / "signal", task(dataset=Noticed(lambda reads: None)))
    found["after the signal"] = [status.state, status.position]
    status = run(folder / "tokens", task(), max_tokens=20)
    found["tokens"] = [status.reason, status.position, status.tokens >= 20]
    found["ranks"] = [status.ranks, events(folder / "tokens", "step")[0]["ranks"]]

    poisoned = [ROWS[0] | {"x": np.float32([np.nan, 1])}] * 64
    found["not finite"] = refused(run, folder / "nan", task(dataset=poisoned), stop_after_nonfinite=2)
    found["not finite, saved"] = Path(folder, "nan", "checkpoints").exists()
    found["no weight"] = refused(run, folder / "weight", task(dataset=[BLANK] * 64))
    uneven = [*ROWS[:5], ROWS[5] | {"x": np.zeros(3, np.float32)}, *ROWS[6:]]
    found["rows of two shapes"] = refused(run, folder / "shapes", task(dataset=uneven), shuffle=False)
    found["no params"] = refused(run, folder / "params", task(params={}))
    found["main"] = [loop.main([]), loop.main([str(folder / "none.json")])]
    with mock.patch("batchwright.rundir.trackers.find_spec", lambda name: None):
        found["no tracker"] = refused(run, folder / "tracker", task(), tracker="mlflow")
    found["no tracker, claimed"] = (folder / "tracker").exists()

    # fp16: the loss is not finite, and the weights are, although their squares are not.
    half = task(
        lambda params, batch: (squares(params, batch)[0] * jnp.float16(1) + jnp.nan * 0, batch["weight"].sum()),
        params=lambda key: {"w": jnp.full(2, 300, jnp.float16)},
        optimizer=optax.sgd(1e-6),
    )
    status = run(folder / "half", half, samples=8)
    found["finite fp16 weights"] = [status.state, status.nonfinite_steps, weights(folder / "half", half).tolist()]
    steep = task(
        lambda params, batch: (1e3 * (params["w"] * batch["weight"].sum()).sum(), batch["weight"].sum()),
        params=lambda key: {"w": jnp.zeros(2, jnp.float16)},
        optimizer=optax.sgd(1.0),
    )
    run(folder / "steep", steep, samples=8, max_norm=1.0)
    found["clipped fp16 gradient"] = weights(folder / "steep", steep).tolist()

    # The newest of two checkpoints is damaged: that is said once.
    run(folder / "damaged", task(), checkpoint_every=8, end_sample=16)
    newest = sorted((folder / "damaged" / "checkpoints").iterdir())[-1]
    (newest / "state.json").write_text("{}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status = run(folder / "damaged", task())
    found["damaged"] = [status.position, sum("passing over checkpoint" in str(one.message) for one in caught)]
    saved = (checkpoints := Checkpoints(folder / "damaged" / "checkpoints")).newest()
    other = replace(saved, state=saved.state | {"position": 7})
    found["another position"] = refused(checkpoints.load, other, task().start(task().build_mesh(), 0))

    save(folder / "arrays", {"w": jnp.arange(3.0)}, 5)
    arrays, position = restore(folder / "arrays", {"w": np.zeros(3, np.float32)})
    found["like numpy"] = [np.asarray(arrays["w"]).tolist(), position]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        large = task(params=lambda key: {"w": jnp.ones(2), "unused": jax.random.normal(key, (100_000,))})
        found["disk"] = refused(run, folder / "disk", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


class Asked:
    """A dataset without a fingerprint, which writes down what is asked. `error` is raised for every row, or for its length."""

    def __init__(self, size=64, error=None, length=None) -> None:
        self.size, self.error, self.length, self.asked = size, error, length, []

    def __len__(self) -> int:
        self.asked.append("len")
        if self.length is not None:
            raise self.length
        return self.size

    def __getitem__(self, i):
        self.asked.append(int(i))
        if self.error is not None:
            raise self.error
        return ROWS[i]


def raised(function, *given, **more):
    """The class, the text and the field of an error."""
    try:
        function(*given, **more)
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "field", None)]


def agreed(directory):
    """Two processes, of which the second reads, or has another dataset than the first."""
    folder, second = Path(directory), jax.process_index() == 1
    found, rows = {}, Asked()
    status = run(folder / "reads", task(dataset=rows), loading_hosts=[1])
    found["reads"] = [sum(what != "len" for what in rows.asked), status.loading["rows_read"]]

    plain, ours = ValueError("row 17 is not JSON"), PlanError("a.jsonl is not here.", field="path", given="a.jsonl")
    for name, error in (("plain", plain), ("ours", ours)):
        made = task(dataset=Asked(error=error if second else RuntimeError("the first process reads")))
        found[name] = raised(run, folder / name, made, loading_hosts=[1])
    with mock.patch("batchwright.jax.checkpoint.listing", mock.Mock(side_effect=PermissionError("not yours"))):
        found["listing"] = raised(run, folder / "listing", task())
    made = task(dataset=Asked(size=60 if second else 64))
    found["lengths"] = raised(run, folder / "lengths", made)
    failing = Asked(length=FileNotFoundError("no bucket") if second else None)
    found["no length"] = raised(run, folder / "no length", task(dataset=failing))
    found["written"] = sorted(path.name for path in folder.iterdir())
    return found


def waits(directory):
    """The wait for rows that are slower than the devices: each step's first row takes 50 ms, once the devices are done."""
    computed, get = threading.Semaphore(0), jax.device_get

    def slow(reads):
        if reads > 8 and reads % 8 == 1:
            computed.acquire(timeout=10)
            time.sleep(0.05)

    def got(numbers):
        values = get(numbers)
        computed.release()
        return values

    with mock.patch.object(jax, "device_get", got):
        status = run(directory, task(dataset=Noticed(slow)), samples=40)
    return [[event["wait_seconds"] for event in events(directory, "step")], status.loading["wait_seconds"]]


def by_hand(directory):
    """Weights after two steps of the loop, and of plain optax: clipping, a rate over samples, scaled with the batch."""
    schedule = parse_thresholds("0:8 8:16").compile().until(24)
    shape = SampleSchedule(peak_lr=1.0, end_sample=32, decay="linear")
    options = {"max_norm": 0.05, "lr_scaling": "sqrt", "learning_rate": shape}
    run(directory, task(), schedule=schedule, **options)
    params, optimizer = {"w": jnp.ones(2)}, optax.chain(optax.clip_by_global_norm(0.05), optax.scale_by_adam())
    state, order = optimizer.init(params), GlobalOrder(len(ROWS))
    for span, rate in ((range(8), 1e-2), (range(8, 24), 1e-2 * (1 - 8 / 32) * 2**0.5)):
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *[ROWS[i] for i in order.ids(span)])
        gradient = jax.grad(lambda p, b: squares(p, b)[0] / squares(p, b)[1])(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(lambda p, u, r=rate: p - r * u, params, updates)
    norms = [event["grad_norm"] for event in events(directory, "step")]
    return [weights(directory, task()).tolist(), np.asarray(params["w"]).tolist(), norms]


def compiled(directory):
    """For a ramp with its own micro batches, and with a shared one: where it is said to compile, and how often it does."""
    found = []
    for size in (None, 4):
        ramp = batchwright.ramp(thresholds="0:8 16:16 48:32", samples=112, devices=2, micro_batch_size=size)
        kept, made = [], loop._Loop._compiled
        with mock.patch.object(
            loop._Loop, "_compiled", lambda self, made=made, kept=kept: kept.append(made(self)) or kept[-1]
        ):
            sizes = tuple(stage["micro_batch_size"] for stage in ramp.stages())
            run(Path(directory, str(size)), task(), schedule=ramp.schedule, micro=sizes)
        found.append([list(ramp.compiles_at), kept[0]._cache_size()])
    return found


def placed(directory):
    """A mesh with an axis of one device, optimizers of several kinds, MaxText's words, a check on several devices."""
    split = {"mesh": {"data": -1, "fsdp": 4}, "partition": lambda params: P("fsdp")}
    found = {"losses": []}
    for number, more in enumerate(({}, split)):
        run(
            folder := Path(directory, str(number)),
            task(params=lambda key: {"w": jnp.ones(4)}, loss=_wide, **more),
            samples=16,
        )
        found["losses"].append([event["loss"] for event in events(folder, "step")])
    for name, optimizer in {
        "adam": optax.adam(1e-2),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
        "sm3": optax.sm3(1e-2),
        "muon": optax.contrib.muon(1e-2),
    }.items():
        made = task(
            params=lambda key: {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, loss=_matrix, optimizer=optimizer, **split
        )
        mesh = made.build_mesh()
        arrays = made.start(mesh, 0)
        sharded = [leaf for leaf in jax.tree.leaves(arrays["optimizer"]) if not leaf.sharding.is_fully_replicated]
        batch = next(iter(Feed(ROWS, GlobalOrder(64), Constant(8).compile(), 2, mesh=mesh))).batches
        step = made.compiled_step(mesh, arrays)
        params, *_ = step(arrays["params"], arrays["optimizer"], batch, np.int32(1), np.float32(1))
        found[name] = [len(sharded), bool(jnp.isfinite(params["w"]).all() and (params["w"] != 1).any())]
    words = maxtext({"per_device_batch_size": 2, "expansion_factor_real_data": 1}, samples=40, devices=4)
    feed = Feed(ROWS, GlobalOrder(64), mesh=mesh_of({"data": -1}, jax.devices()), **words)
    found["maxtext"] = [[step.plan.global_batch_size, step.batches["x"].shape] for step in feed]
    found["meshes"] = [refused(mesh_of, axes, jax.devices()) for axes in ({"data": -2, "fsdp": -2}, {"data": 3})]

    def reduces(params, batch):
        total, weight = squares(params, batch)
        try:
            return jax.lax.psum(total, "data"), weight
        except NameError:  # one device: no axis
            return total, weight

    for name, loss in {"exact": squares, "reduces": reduces}.items():
        report = check(task(loss), global_batch_size=8, micro_batch_sizes=(1, 2), ranks=2)
        errors = {split.micro_batch_size: split.relative_error < 1e-5 for split in report.splits if split.ranks == 2}
        found[name] = [report.ok, [finding.cause for finding in report.findings], sorted(errors.items())]
    few = replace(task(), blank=None)
    found["three"] = refused(check, few, global_batch_size=8, micro_batch_sizes=(1, 2), ranks=3)
    return found


def _wide(params, batch):
    return ((jnp.tile(batch["x"], 2) @ params["w"] - 1) ** 2 * batch["weight"]).sum(), batch["weight"].sum()


def _matrix(params, batch):
    x = jnp.tile(batch["x"], 2) @ params["w"] + params["b"]
    return ((x - 1) ** 2 * batch["weight"][:, None]).sum(), batch["weight"].sum()
