"""Rollout and training that overlap: the gain, against the ideal and against the bound that can be reached.

    python benchmarks/bench_rl.py [--pairs 5] [--milliseconds 40] [--micro 4,8,16] [--ratios 1:1,1:3,3:1] [--json FILE]

A round has M micro batches of rollout time r and training time t. One after the other it takes M (r + t). Overlapped, the
pipeline takes M max(r, t) + min(r, t), so the ideal gain is M (r + t) / (M max(r, t) + min(r, t)). Two busy processes slow each
other down on a small machine. So r and t are measured twice: alone, in the rounds without overlap, which gives the ideal; and
while the other process works, too, in runs that sample one round ahead, which gives the bound.

Work is a fixed number of matrix products, chosen so that the two together take about 2 × `--milliseconds`. One worker process
samples, with one thread; training has one thread. Pairs of runs, overlapped and not, alternate; each number is the median over
the rounds of all pairs, without the first round of a run. The updates of both are compared: they must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import batchwright
from batchwright.runtime import Prompts, RLSettings, RLTask, train_rl
from batchwright.runtime.loop.events import read_events

GENERATIONS, PROMPTS, ROUNDS = 4, 4, 6  # responses per prompt, prompts in a micro batch, rounds of a run
SIZE = 96


def spin(products: int) -> None:
    """A fixed amount of work."""
    matrix = torch.eye(SIZE)  # its product is itself: numbers that shrink would become slow to compute
    for _ in range(products):
        matrix = matrix @ matrix


def products_per_second() -> float:
    """How many of them this machine does, alone."""
    spin(200)
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        spin(1000)
        found.append(1000 / (time.perf_counter() - begin))
    return statistics.median(found)


def task(rollout_work: int, train_work: int) -> RLTask:
    def rollout(policy: nn.Module, prompts: Prompts, generations: int) -> Any:
        spin(rollout_work)
        weight = float(next(policy.parameters()).sum())
        return [
            [{"x": torch.tensor([weight, p, g], dtype=torch.float32)} for g in range(generations)]
            for p in prompts.positions
        ]

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        spin(train_work)
        return model(batch["x"].tanh()).square().sum(), len(batch["x"])

    return RLTask(
        model=lambda: nn.Linear(3, 4),
        dataset=range(1024),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        rollout=rollout,
    )


def run(made: RLTask, micros: int, *, overlap: bool, ahead: int = 0) -> tuple[list[dict[str, Any]], list[float]]:
    """The rounds of one run but the first, and the weights at its end."""
    plan = batchwright.rl(
        prompts=PROMPTS * micros,
        generations=GENERATIONS,
        rollout_micro_prompts=PROMPTS,
        train_micro_prompts=PROMPTS,
        rounds_ahead=ahead,
    )
    weights: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = RLSettings(directory=folder, rollout="process", overlap=overlap, threads=1, progress=False)
        train_rl(made, plan, settings, rounds=ROUNDS, on_round=lambda _, model: weights.extend(flat(model)))
        rounds = [event for event in read_events(Path(folder)) if event["kind"] == "round"]
    return rounds[1:], weights


def flat(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def per_micro(rounds: list[dict[str, Any]], micros: int) -> tuple[float, float]:
    """Seconds of one micro batch: sampled, and trained (with its part of the update)."""
    sampled = statistics.median(event["rollout_seconds"] for event in rounds) / micros
    return sampled, statistics.median(event["train_seconds"] for event in rounds) / micros


def gain(micros: int, r: float, t: float, r_both: float, t_both: float) -> float:
    """One after the other, against the pipeline with these times."""
    return micros * (r + t) / (micros * max(r_both, t_both) + min(r_both, t_both))


def measure(micros: int, ratio: tuple[int, int], pairs: int, milliseconds: float) -> dict[str, Any]:
    speed = products_per_second()
    parts = [max(1, int(2 * milliseconds / 1000 * speed * part / sum(ratio))) for part in ratio]
    made = task(*parts)
    after, together, both = [], [], []
    for pair in range(pairs):
        kinds = ["after", "together", "both"]
        results = {}
        for kind in kinds if pair % 2 else kinds[::-1]:
            # With a round ahead the trainer has work whenever the worker has: both are busy, and neither waits for a policy.
            results[kind] = run(made, micros, overlap=kind != "after", ahead=int(kind == "both"))
        assert results["after"][1] == results["together"][1], "the updates differ"
        after += results["after"][0]
        together += results["together"][0]
        both += results["both"][0]
    r, t = per_micro(after, micros)
    r_both, t_both = per_micro(both, micros)
    seconds = {name: statistics.median(e["seconds"] for e in found) for name, found in (("a", after), ("t", together))}
    return {
        "micro_batches": micros,
        "ratio": ":".join(map(str, ratio)),
        "rollout_ms": 1e3 * r,
        "train_ms": 1e3 * t,
        "rollout_ms_both": 1e3 * r_both,
        "train_ms_both": 1e3 * t_both,
        "ideal": gain(micros, r, t, r, t),
        "bound": gain(micros, r, t, r_both, t_both),
        "measured": seconds["a"] / seconds["t"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=40.0)
    parser.add_argument("--micro", default="4,8,16")
    parser.add_argument("--ratios", default="1:1,1:3,3:1")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("  M  r:t   r, t alone (ms)   both busy (ms)   ideal  bound  measured  bound − measured")
    found = []
    for ratio in given.ratios.split(","):
        for micros in map(int, given.micro.split(",")):
            first, second = map(int, ratio.split(":"))
            one = measure(micros, (first, second), given.pairs, given.milliseconds)
            found.append(one)
            print(
                f"{micros:3}  {ratio}  {one['rollout_ms']:7.1f} {one['train_ms']:7.1f}   {one['rollout_ms_both']:7.1f} "
                f"{one['train_ms_both']:7.1f}   {one['ideal']:5.2f}  {one['bound']:5.2f}  {one['measured']:8.2f}  "
                f"{one['bound'] - one['measured']:+8.2f}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
