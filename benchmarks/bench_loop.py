"""The loop against one written by hand, checkpoints against torch.save, the audit of a million steps, and torture.

    python benchmarks/bench_loop.py [--pairs 200] [--rounds 7] [--torture 20]
    python benchmarks/bench_loop.py --only loop --pairs 400 [--device auto]

The loop is compared step by step with the same steps by hand, in one process. The other parts are interleaved round by
round, in CPU or wall time; the ratio is the median of the rounds' ratios, with the smallest and largest in brackets.
Threads: 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "bytegpt"), str(ROOT / "tests" / "runtime" / "loop")]

from bytegpt import task  # noqa: E402

from batchwright.core.ramp.rules import Constant  # noqa: E402
from batchwright.runtime import Checkpoints, GlobalOrder, Ledger, Settings, StepResult, Task, audit, train  # noqa: E402
from batchwright.runtime.device import choose, synchronise, to_device  # noqa: E402
from batchwright.runtime.ranks import Ranks  # noqa: E402
from batchwright.runtime.state import tensors  # noqa: E402
from batchwright.runtime.state.audit import _expected  # noqa: E402
from batchwright.runtime.state.ledger import WIDTH, _line  # noqa: E402

BATCH, MICRO = 16, 8
WARM = 5  # steps that are not counted
DEVICE = torch.device("cpu")  # --device sets another one, for the loop alone


def clock() -> float:
    return time.process_time()


class Hand:
    """A loop by hand: the same samples, split, loss, division and optimizer; no ledger, events or signals."""

    def __init__(self, mine: Task, ids: list[int]) -> None:
        self.mine, self.ids, self.model = mine, ids, mine.build_model(0).to(DEVICE)
        self.optimizer = mine.optimizer(self.model.parameters())

    def step(self, index: int) -> None:
        self.optimizer.zero_grad()
        ids, total = self.ids[index * BATCH : (index + 1) * BATCH], 0
        for at in range(0, BATCH, MICRO):
            batch = to_device(self.mine.collate([self.mine.dataset[i] for i in ids[at : at + MICRO]]), DEVICE)
            loss, weight = self.mine.loss(self.model, batch)
            loss.backward()
            total += weight
        for parameter in self.model.parameters():
            parameter.grad /= total
        self.optimizer.step()


def loop_ratio(pairs: int) -> None:
    """Step by step in one process: the loop's step, then the same step by hand twice, once as a control.

    A step of the loop is everything from the end of the step by hand to `on_step`: loading, forward, backward, optimizer,
    ledger, events and the checks between steps. Set-up and saving are left out. (The thread of the events writes twice a
    second, during any of the steps.)
    """
    mine, steps = task("small", 128, files=60), pairs + WARM
    order, schedule = GlobalOrder(len(mine.dataset), 0), Constant(BATCH).compile().until(steps * BATCH)
    ids = order.ids(range(steps * BATCH)).tolist()
    hands = [Hand(mine, ids), Hand(mine, ids)]
    taken: list[tuple[Clocks, Clocks, Clocks]] = []  # the loop, by hand, the control
    last: list[Clocks] = []

    def on_step(result: StepResult, model: nn.Module, _: object) -> None:
        loop, found = clocks(), [(0.0, 0.0), (0.0, 0.0)]
        for which in (0, 1) if result.step % 2 else (1, 0):
            before = clocks()
            hands[which].step(result.step)
            found[which] = between(before, clocks())
        if result.step >= WARM:
            taken.append((between(last[0], loop), found[0], found[1]))
        if result.step == WARM:  # the same work; later, rounding makes the weights differ
            both = zip(model.parameters(), hands[0].model.parameters(), strict=True)
            assert all(
                torch.allclose(ours, theirs, atol=1e-5 if DEVICE.type == "cpu" else 1e-3) for ours, theirs in both
            )
        last[:] = [clocks()]

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(directory=folder, micro_batch_size=MICRO, progress=False, device=str(DEVICE))
        train(mine, schedule, settings, on_step=on_step)
    print(f"| one step of {BATCH} samples, {pairs} pairs | by hand | batchwright / by hand | by hand / by hand |")
    print("|---|---|---|---|")
    for at, name in enumerate(("CPU time", "wall time")):
        hand = statistics.median(h[at] for _, h, _ in taken)
        ratios, control = [t[at] / h[at] for t, h, _ in taken], [c[at] / h[at] for _, h, c in taken]
        print(f"| {name} | {hand * 1e3:.0f} ms | {bootstrap(ratios)} | {bootstrap(control)} |")
    print(f"\nMedian of the pairs' ratios with a 95% bootstrap interval; {time.perf_counter() - began:.0f} s.")


Clocks = tuple[float, float]  # CPU time of this process, wall time


def clocks() -> Clocks:
    synchronise(DEVICE)
    return time.process_time(), time.perf_counter()


def between(before: Clocks, after: Clocks) -> Clocks:
    return after[0] - before[0], after[1] - before[1]


def bootstrap(values: list[float], draws: int = 4000) -> str:
    """The median, and the 2.5% and 97.5% points of the medians of resampled values."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return f"{statistics.median(values):.4f} [{medians[draws // 40]:.4f}, {medians[-draws // 40]:.4f}]"


def save_ratio(rounds: int) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    rows: dict[str, list[tuple[float, float]]] = {"save, synced": [], "load, verified": [], "load, not verified": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = sum(t.numel() * t.element_size() for t in tensors.split(model, (optimizer,))[0].values())
        checkpoints, wall = Checkpoints(folder / "ours", keep=1), time.perf_counter

        def plain_save(_: int) -> None:
            with open(folder / "plain.pt", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

        def plain_load() -> None:
            state = torch.load(folder / "plain.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        def save(index: int) -> None:
            checkpoints.save(model, optimizer, step=index, position=index)

        def load(verify: bool) -> None:
            saved = checkpoints.newest(verify=verify)
            assert saved is not None
            checkpoints.load(saved, model, optimizer)

        plain_save(0), save(0)
        for index in range(1, rounds + 1):
            rows["save, synced"].append((timed(wall, plain_save, index), timed(wall, save, index)))
            rows["load, verified"].append((timed(wall, plain_load), timed(wall, load, True)))
            rows["load, not verified"].append((timed(wall, plain_load), timed(wall, load, False)))
    print(
        f"\n| checkpoint of {size / 1e6:.0f} MB, wall time | torch.save / load | batchwright | ratio |\n|---|---|---|---|"
    )
    for what, pairs in rows.items():
        one, two = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        print(f"| {what} | {one:.2f} s | {two:.2f} s | {shown([b / a for a, b in pairs])} |")


def timed(now: Callable[[], float], call: Callable[..., object], *args: object) -> float:
    before = now()
    call(*args)
    return now() - before


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"


def audit_speed(steps: int = 1_000_000, batch: int = 8) -> None:
    order = GlobalOrder(10**9, seed=1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ledger = Ledger(root / "ledger", order)
        for first in range(0, steps, 1000):
            hash_ = _expected(order, first * batch, (first + 1000) * batch, first, batch)
            ledger.applied(first, first * batch, batch)
            run = ledger._run
            assert run is not None
            run.steps, run.samples, run.low, run.high = 1000, 1000 * batch, hash_ % 2**64, hash_ >> 64
            ledger.close(sync=False)
            os.pwrite(ledger._file, _line(run), ledger._offset - WIDTH)
        ledger.finish()
        folder = root / "checkpoints" / f"step-{steps:012d}-launch-00000"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"position": steps * batch, "step": steps, "launch": 0}))
        whole = timed(clock, lambda: audit(root))
        spans = timed(clock, lambda: audit(root, recompute=False))
        assert audit(root).ok
        print(f"\n| audit of {steps:,} steps, {steps * batch:,} samples | CPU time |\n|---|---|")
        print(
            f"| ids recomputed | {whole:.1f} s ({steps * batch / whole / 1e6:.0f} M samples/s) |\n| spans only | {spans:.3f} s |"
        )
    ids = order.ids(range(64))
    with tempfile.TemporaryDirectory() as name:
        ledger = Ledger(name, order)
        before = clock()
        for step in range(20_000):
            ledger.fed(ids)
            ledger.applied(step, step * 64, 64)
        print(f"| one step of 64 samples in the ledger | {(clock() - before) / 20_000 * 1e6:.0f} µs |")
        ledger.finish()


def torture(rounds: int) -> None:
    """kill -9 at random times, with random ranks and strategies, until the run is complete; then the audit."""
    from loop_runs import Launch, final, furthest, launch, progress, ramp
    from loop_runs import launches as launches_of

    draw, discarded, launches = random.Random(11), 0, 0
    folder = Path(tempfile.mkdtemp())
    launch(1, ramp(384), {"directory": str(folder / "whole"), "micro_batch_size": 4})
    worst = 0.0
    for index in range(rounds):
        run = folder / f"run{index}"
        for _ in range(4):
            ranks = draw.choice([1, 2, 4])
            options = {
                "directory": str(run),
                "micro_batch_size": draw.choice([1, 2]),
                "checkpoint_every": 32,
                "strategy": draw.choice(["ddp", "fsdp2"]),
                "asynchronous": draw.random() < 0.5,
            }
            before = launches_of(run)
            running = Launch(ranks, ramp(384), options, {"pause": 0.005})
            deadline = time.monotonic() + 20
            while (launches_of(run) == before or not progress(run)) and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(draw.random() * 0.5)
            running.kill(*([] if draw.random() < 0.5 else [draw.randrange(ranks)]))
            running.wait(40)
            launches += 1
        assert set(launch(2, ramp(384), {"directory": str(run), "micro_batch_size": 2})) == {0}
        found = audit(run)
        assert found.ok and found.samples == 384, found.findings
        discarded += found.discarded_samples
        worst = max(worst, furthest(final(run), final(folder / "whole")))
    shutil.rmtree(folder)
    print(f"\n| torture | |\n|---|---|\n| runs, kills | {rounds}, {launches} |\n| audits that held | {rounds} |")
    print(f"| samples discarded and redone | {discarded:,} |\n| largest difference of a weight | {worst:.1e} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torture", type=int, default=6)
    parser.add_argument("--only", choices=["loop", "save", "audit", "torture"])
    parser.add_argument("--device", default="cpu", help="of the part `loop`")
    given = parser.parse_args()
    DEVICE = choose(given.device, Ranks())
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], None]] = {
        "loop": lambda: loop_ratio(given.pairs),
        "save": lambda: save_ratio(given.rounds),
        "audit": audit_speed,
        "torture": lambda: torture(given.torture),
    }
    for name in [given.only] if given.only else parts:
        parts[name]()
