"""What real trackers have recorded, read from their files without our code; and launches that record, as processes.

`python tests/tracked.py RUN NAMES LAUNCH START END ENDING` emits the events of a launch that trains steps START to END - 1 of 8
samples each, with an evaluation and a save after every fifth step. ENDING: a reason of a stop, `kill`, or the seconds to close.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from batchwright.processes.start import GuardedProcess, environment

Points = dict[str, list[tuple[int, float]]]  # by name: (step, value)


def needs(tracker: str) -> None:
    """Skip if a package is not installed. mlflow and trackio are only in the environment of `make test-all`, which sets
    BATCHWRIGHT_TRACKERS: there a skipped test would look like one that passed."""
    if find_spec(tracker) is None:
        wanted = "BATCHWRIGHT_TRACKERS" if tracker not in ("tensorboard", "wandb") else "CI"
        (pytest.fail if os.environ.get(wanted) else pytest.skip)(f"{tracker} is not installed")


def variables(folder: Path) -> dict[str, str]:
    """Variables for trackers that reach nothing outside of this folder."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(folder / "home"),
        "WANDB_CACHE_DIR": str(folder / "home"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }


def record(run: Path, names: str, launch: int, start: int, end: int, ending: str, **env: str) -> int | None:
    """Run a launch as a process, below a guard as in a run: nothing that a tracker starts is left. Its exit code."""
    command = [sys.executable, __file__, str(run), names, *map(str, (launch, start, end)), ending]
    with GuardedProcess(command, environment(variables(run.parent), env)) as child:
        done = child.watch(600.0)
    print(done.output)
    return done.returncode


def tensorboard(run: Path) -> Points:
    """All scalars as TensorBoard shows them: with the restarts of a writer taken into account."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Points = {}
    for folder in (run / "tensorboard", run / "tensorboard" / "samples"):
        board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for tag in board.Tags()["scalars"]:
            found[tag] = [(e.step, e.value) for e in board.Scalars(tag)]
    return found


def wandb(run: Path) -> list[tuple[str, Points]]:
    """The id and the history of every offline launch, in order."""
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda f: f.stat().st_ctime_ns)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from tests.tracked import history"
    code += "\nimport json\nprint(json.dumps([history(f) for f in sys.argv[1:]]))"
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, timeout=300, check=True)
    return [(name, {k: [tuple(p) for p in ps] for k, ps in points.items()}) for name, points in json.loads(done.stdout)]


def history(path: str) -> tuple[str, Points]:
    """One file of W&B: records of protobuf in the format of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    name, found, data, at, part = "", Points(), Path(path).read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind not in (1, 4):  # the rest of the record follows in the next block
            continue
        record, part = wandb_internal_pb2.Record.FromString(part), b""
        if record.HasField("run"):
            name = record.run.run_id
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for key, value in items.items():
                found.setdefault(key, []).append((items["_step"], value))
    return name, found


def mlflow(folder: Path) -> list[tuple[dict[str, Any], Points]]:
    """The metadata and metrics of every run in the file store, in the order they were written."""
    import yaml

    runs = []
    for meta in (folder / "mlruns").glob("[0-9]*/*/meta.yaml"):
        points: Points = {}
        for file in sorted((meta.parent / "metrics").rglob("*")):
            if file.is_file():
                rows = [line.split() for line in file.read_text().splitlines()]
                points[str(file.relative_to(meta.parent / "metrics"))] = [(int(r[2]), float(r[1])) for r in rows]
        about = yaml.safe_load(meta.read_text())
        params = {file.name: file.read_text() for file in (meta.parent / "params").iterdir()}
        runs.append(({**about, "params": params}, points))
    return runs


def trackio(folder: Path) -> list[tuple[str, Points]]:
    """The name and metrics of every run in the database of the project."""
    runs: dict[str, Points] = {}
    with sqlite3.connect(folder / "trackio" / "batchwright.db") as database:
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
    for run, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            runs.setdefault(run, {}).setdefault(name, []).append((step, value))
    return list(runs.items())


def main(run: Path, names: list[str], launch: int, start: int, end: int, ending: str) -> None:
    from batchwright.runtime.loop.base import leave
    from batchwright.runtime.loop.events import Events
    from batchwright.runtime.loop.trackers import open_tracker

    events = Events(run / "events" / f"launch-{launch:05d}.jsonl", [open_tracker(n, run) for n in names], launch=launch)
    about = {"parameters": 9, "strategy": "none", "device": "cpu", "seed": 0, "dataset_size": 64, "total_samples": 104}
    lost = 2.5 if launch else None
    events.emit("launch", now=True, step=start, samples=start * 8, ranks=1, nodes=1, lost_seconds=lost, **about)
    for step in range(start, end):
        loss = step + launch / 8  # exact also as TensorBoard's 32 bits
        values = {"tokens": step * 16.0, "global_batch_size": 8, "stage": 0, "nodes": 2, "ranks": 2, "noise_scale": 7.0}
        speeds = {"samples_per_second": 80.0, "tokens_per_second": 160.0, "learning_rate": 0.5, "grad_norm": 3.0}
        events.emit("step", step=step, samples=(step + 1) * 8, loss=loss, **values, **speeds, mfu=None)
        if step % 5 == 4:
            events.emit("evaluation", step=step + 1, samples=(step + 1) * 8, loss=loss / 2, weight=1.0, seconds=0.1)
            events.emit("save", step=step + 1, samples=(step + 1) * 8, checkpoint="x", seconds=0.1)
    if ending == "kill":
        events.emit("evaluating", now=True)  # all ignore it: once it is taken, the events before it are done
        while any(feed._waiting for feed in events._feeds):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if ending.isalpha():
        events.emit("stop", reason=ending, step=end, samples=end * 8, next_stage=None)
        events.close()
    else:
        atexit.register((run / "waited").touch)
        events.close(float(ending))
        leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), *map(int, sys.argv[3:6]), sys.argv[6])
