"""Documents for charts and reports: of every kind, whole and damaged, without training."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import batchwright
from batchwright.core.batch.request import read_request
from batchwright.core.ramp.request import read_ramp
from batchwright.estimate.devices import NO_ALLOWANCE
from batchwright.estimate.records import Calibration, Estimate, Length, Placement, Point, Slope
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.plan import build
from batchwright.launch.records import TASK, Ending, Failure, Manifest, Options
from batchwright.probe.pipeline import PipelineProbe, PipelineTrial
from batchwright.probe.records import Probe, Trial
from batchwright.probe.speed import Timing, analyse, diagnose
from batchwright.rundir.events import ROUND_COLUMNS

GIB = 2**30
START = 1_700_000_000.0


def gpt3_5b() -> Any:
    """The ramp that NeMo's documentation plots for GPT-3 5B."""
    return batchwright.ramp(
        linear="256,256,10M", global_batch_size=2048, micro_batch_size=4, nodes=16, devices_per_node=8, samples="20M"
    )


def probe(**changes: Any) -> Probe:
    """A probe of four sizes on two ranks, of which 33 fails."""
    seconds = {1: 0.011, 4: 0.014, 16: 0.026, 32: 0.042}
    timings = {size: Timing(s, s * 0.97, s * 1.05, 0.02, 30, 2) for size, s in seconds.items()}
    peaks = {1: 2 * GIB, 16: 4 * GIB, 32: 6 * GIB}
    trials = [
        Trial(s, "fits", "limit", peak, 8 * GIB, predicted_peak_memory_bytes=peak - GIB // 8)
        for s, peak in peaks.items()
    ]
    trials.append(
        Trial(33, "oom", "limit", cause="device-oom", reason="CUDA out of memory", predicted_peak_memory_bytes=8 * GIB)
    )
    trials += [
        Trial(s, "fits", "throughput", samples_per_second=2 * s / t.seconds, timing=t) for s, t in timings.items()
    ]
    contrasts = {
        "cached": Timing(0.042, 0.041, 0.043, 0.02, 30, 2),
        "loader": Timing(0.060, 0.059, 0.061, 0.02, 30, 2),
        "accumulate": Timing(0.030, 0.029, 0.031, 0.02, 30, 2),
    }
    trials.append(replace(trials[-1], contrasts=contrasts, timing=contrasts["cached"]))
    curve = analyse(timings)
    made = Probe(
        tuple(trials), 32, 33, curve.saturating, 32, curve.largest_worthwhile, "input", curve=curve,
        diagnosis=diagnose(contrasts, curve, 32, 2), memory_bytes=8 * GIB, ranks=2, device="cpu", target="train.py:task",
        identity={"versions": {"python": "3.12"}}, notes=("A note.",),
    )  # fmt: skip
    return replace(made, **changes)


def estimate(**changes: Any) -> Estimate:
    """An estimate of three sizes on a device of 8 GiB, and one real trial."""

    def point(size: int) -> Point:
        parts = {
            "parameters": GIB,
            "gradients": GIB,
            "optimizer": 2 * GIB,
            "activations": size * GIB // 8,
            "other": 2**20,
        }
        return Point(size, None, sum(parts.values()), parts)

    made = Estimate(
        "train.py:task", "torch", None, 8 * GIB, 0, "fp32", False, 1, 1, tuple(point(size) for size in (1, 8, 31)),
        (Length(None, Slope(GIB / 8, 4 * GIB, (8, 31)), 31),), 31, NO_ALLOWANCE, 7 * GIB,
        calibration=Calibration(8, None, 5 * GIB, 5 * GIB + GIB // 4, GIB // 4, 29), assumptions=("An assumption.",),
    )  # fmt: skip
    return replace(made, **changes)


def plan() -> Any:
    """A plan of a model: 4 micro × 2 accumulation × 128 ranks, on devices of 8 GiB."""
    made = batchwright.plan(global_batch_size=1024, nodes=16, devices_per_node=8, max_micro_batch_size=6)
    parts = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": GIB}
    placed = Placement(
        None, "llama", None, 8 * GIB, 0, NO_ALLOWANCE, 7 * GIB, "bf16", "adamw", 0, False, False, 1, 5 * GIB, parts, "estimated",
        (), (),
    )  # fmt: skip
    return replace(made, memory=placed, settings={"per_device_train_batch_size": 4})


def pipeline() -> PipelineProbe:
    """A probe of a pipeline of two ranks."""
    trials = (PipelineTrial(2, 4, 0.5, 0.35, 1 / 3), PipelineTrial(8, 1, 0.4, 0.14, 1 / 9))
    return PipelineProbe("torch-1f1b", 2, 1, 8, 128.0, "cpu", trials, 8, 2, 24, ("a note",))


def documents() -> dict[str, Mapping[str, Any]]:
    """One of each kind that `--json` prints, as JSON."""
    made = {
        "plan": plan(),
        "ramp": gpt3_5b(),
        "probe": probe(),
        "pipeline": pipeline(),
        "estimate": estimate(),
    }
    return {kind: json.loads(json.dumps(one.to_json())) for kind, one in made.items()}


def rounds() -> dict[str, Any]:
    """A run of `train_rl` as `rundir.events.read_rounds` returns it."""
    spans = [
        ["trainer 0", "wait", 0.0, 1.0], ["rollout 0", "rollout", -0.1, 1.0], ["rollout 0", "rollout", 1.0, 2.0],
        ["trainer 0", "train", 1.0, 1.9], ["trainer 0", "train", 2.0, 2.9], ["trainer 0", "update", 2.9, 3.0],
    ]  # fmt: skip
    columns: dict[str, list[float]] = {name: [float(n) for n in range(3)] for name in ROUND_COLUMNS}
    last = {name: values[-1] for name, values in columns.items()} | {"seconds": 3.0, "spans": [*spans, ["damaged"]]}
    return {
        "name": "rl",
        "rounds": columns,
        "last": last,
        "replaced_workers": 0,
        "discarded_responses": 8,
        "skipped": {},
    }


def round_event(number: int, samples: int, **more: Any) -> dict[str, Any]:
    """One round as `train_rl` writes it."""
    spans = [["rollout 0", "rollout", 0.0, 1.0 + number], ["trainer 0", "train", 1.0 + number, 2.0 + number]]
    return {
        "kind": "round", "round": number, "samples": samples, "prompts": 8, "responses": 32, "dropped_responses": 0,
        "policy_version": number, "policy_lag": 0, "loss": 0.5, "reward": 0.25 * number, "seconds": 2.0 + number,
        "rollout_seconds": 1.0 + number, "train_seconds": 1.0, "wait_seconds": 0.0, "spans": spans, **more,
    }  # fmt: skip


def rl_directory(root: Path, rounds: int = 3) -> Path:
    """A run of `train_rl`, which writes no plan.json."""
    start = {"kind": "launch", "time": START, "launch": 1, "samples": 0}
    write_lines(root / "events" / "launch-00001.jsonl", [start, *(round_event(i, 8 * i + 8) for i in range(rounds))])
    return root


def step_event(
    step: int, samples: int, batch: int, stage: int, launch: int, when: float, loss: Any, **more: Any
) -> dict[str, Any]:
    """One step as the loop writes it."""
    return {
        "kind": "step", "time": when, "launch": launch, "step": step, "samples": samples, "tokens": samples * 128.0,
        "loss": loss, "global_batch_size": batch, "micro_batch_size": 4, "accumulation_steps": 2, "stage": stage, "ranks": 2,
        "samples_per_second": batch / 0.1, "tokens_per_second": 128 * batch / 0.1, "step_seconds": 0.1, "learning_rate": 1e-3,
        **more,
    }  # fmt: skip


def write_lines(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def run_directory(
    root: Path, *, steps: int = 200, losses: Mapping[int, Any] | None = None, failed: bool = True
) -> Path:
    """A run of two stages (batch 8 on one node, 16 on two) in two launches of `steps` steps; the first one failed once.

    `losses` are those of chosen steps; every other one falls from 5.
    """
    first = steps * 8
    total = first + steps * 16
    batch = read_request({"micro_batch_size": 4, "nodes": 2, "devices_per_node": 1}, origins={"nodes": "--nodes"})
    ramp = read_ramp(
        {"thresholds": f"0:8 {first}:16", "samples": total, "node_policy": "constant-work", "stage_seconds": "0.1,0.1"}
    )
    plan, _ = build(batch, ramp, Options(), command=["train"])
    root.mkdir(parents=True, exist_ok=True)
    directory = RunDirectory(root)
    write_json(root / "plan.json", replace(plan, kind=TASK, target="/home/me/train.py:task", command=()))
    half = first // 2
    spans = (
        [(0, half + 8, "failed"), (half, first, "done"), (first, total, "done")]
        if failed
        else [(0, first, "done"), (first, total, "done")]
    )
    noise, when = random.Random(4), START
    for number, (start, end, outcome) in enumerate(spans, 1):
        stage = int(start >= first)
        size, begun = (8, 16)[stage], when
        events: list[dict[str, Any]] = [
            {"kind": "launch", "time": when + 5, "launch": number, "samples": start, "step": 0, "ranks": 1 + stage,
             "strategy": "ddp", "device": "cpu", "parameters": 1000}
        ]  # fmt: skip
        when += 5
        for samples in range(start + size, end + 1, size):
            step = (samples - 1) // 8 if not stage else steps + (samples - first - 1) // 16
            when += 0.1
            loss = (losses or {}).get(step, 2 + 3 / (1 + step / 20) + 0.05 * noise.random())
            scale = (
                {"noise_scale": 900.0 + step, "noise_low": 700.0 + step, "noise_high": 1300.0 + step}
                if step % 10 == 0
                else {}
            )
            events.append(step_event(step, samples, size, stage, number, when, loss, **scale))
        events.append(
            {
                "kind": "evaluation",
                "time": when,
                "launch": number,
                "samples": end,
                "step": 1,
                "loss": 2.5,
                "weight": 8.0,
                "seconds": 1.0,
            }
        )
        write_lines(root / "events" / f"launch-{number:05d}.jsonl", events)
        manifest = Manifest(
            number, stage, 1 + stage, 1 + stage, start, total if stage else first, ("train",), {}, "/", begun
        )
        folder = directory.launch(number)
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", manifest)
        failure = Failure("rank 0 exited with code 1", 0, 1, ("ValueError: <b>bad</b>",), advice="Look at the log.")
        write_json(
            folder / "ending.json",
            Ending(
                number,
                outcome,
                half if outcome == "failed" else end,
                when + 1,
                failure=failure if outcome == "failed" else None,
            ),
        )
        when += 3
    boundary = {"kind": "boundary", "time": when, "position": first} | dict.fromkeys(
        ("save_seconds", "stop_seconds", "start_seconds", "load_seconds", "lost_seconds"), 1.5
    )
    write_lines(root / "events" / "supervisor.jsonl", [boundary])
    saved = root / "checkpoints" / f"step-{2 * steps:012d}-launch-{len(spans):05d}"
    checkpoint(saved, total, 2 * steps, len(spans))
    return root


def checkpoint(folder: Path, position: int, step: int, launch: int) -> None:
    """A complete checkpoint without tensors."""
    import hashlib

    folder.mkdir(parents=True)
    facts = {"versions": {"python": "3.12.1", "torch": "2.13.0"}}
    state = json.dumps({"launch": launch, "position": position, "step": step, "fingerprint": facts}).encode()
    (folder / "state.json").write_bytes(state)
    listed = {"state.json": {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}}
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "files": listed}))
