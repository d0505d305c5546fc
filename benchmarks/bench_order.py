"""The computed order against stored ones: time, memory, and a start in the middle.

    python benchmarks/bench_order.py [--largest 10_000_000] [--rounds 9]

Times are CPU seconds of one thread. The contenders of a line run in turn, round after round, so that other load on the
machine affects all of them; a ratio is the median over rounds of their quotients, with a distribution-free 95% interval
(with fewer than 6 rounds, their range). Each memory peak is measured in a separate process.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from batchwright.runtime import GlobalOrder

SPAN = 4096  # samples of one step
BATCH = 32  # samples of a micro batch in the contenders that skip batches
POSITION = 10**9
MEMORY = {
    "epoch": lambda n: GlobalOrder(n, 1).ids(range(n)),
    "span": lambda n: GlobalOrder(n, 1).ids(range(n // 2, n // 2 + SPAN)),
    "randperm": lambda n: torch.randperm(n),
    "sampler": lambda n: next(iter(RandomSampler(range(n)))),
}


def cpu_seconds(function: Callable[[], Any]) -> float:
    """CPU time of one call; short calls are repeated until the clock can measure them."""
    for repeats in (1, 10, 100, 1000):
        begun = time.process_time()
        for _ in range(repeats):
            function()
        taken = time.process_time() - begun
        if taken > 0.01:
            break
    return taken / repeats


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every contender, one call each per round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, function in contenders.items():
            taken = cpu_seconds(function)
            if turn:
                times[name].append(taken)
    return times


def ratio(ours: list[float], theirs: list[float]) -> str:
    """How many times longer theirs takes: median and 95% interval (order statistics of the sign test)."""
    quotients = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    n = len(quotients)
    tail = next((k for k in range(n // 2, -1, -1) if binomial_tail(n, k) <= 0.025), -1)
    low, high = quotients[max(tail, 0)], quotients[min(n - 1 - tail, n - 1)]
    return f"{number(median(quotients))} [{number(low)}, {number(high)}]"


def binomial_tail(n: int, k: int) -> float:
    """P(at most k of n fair coins)."""
    total = term = 1
    for i in range(1, k + 1):
        term = term * (n - i + 1) // i
        total += term
    return total / 2**n


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(times: list[float]) -> str:
    value = median(times)
    for unit, scale in (("s", 1), ("ms", 1e3)):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def peak_mebibytes(what: str, n: int) -> float:
    """The largest growth of a separate process while it runs `what`."""
    command = [sys.executable, __file__, "--memory", what, "--largest", str(n)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(what: str, n: int) -> None:
    """Linux only. `ru_maxrss` would include the peak of the imports, and even that of the parent process."""
    GlobalOrder(10, 1).ids(range(10)), torch.randperm(10), next(iter(RandomSampler(range(10))))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    MEMORY[what](n)
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    """A size from /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def bench_epochs(largest: int, rounds: int) -> None:
    times_rows, memory_rows = [], []
    for n in (10**6, 10**7, 10**8):
        if n > largest:
            continue
        order = GlobalOrder(n, seed=1)
        few = rounds if n < 10**8 else min(rounds, 6)
        contenders = {
            "ours": lambda o=order: o.ids(range(o.size)),
            "torch": lambda n=n: torch.randperm(n),
            "span": lambda o=order: o.ids(range(o.size // 2, o.size // 2 + SPAN)),
        }
        epoch = interleaved(contenders, few)
        times_rows.append(
            [
                f"{n:.0e}",
                f"{seconds(epoch['ours'])} ({n / median(epoch['ours']) / 1e6:.1f} M ids/s)",
                seconds(epoch["torch"]),
                ratio(epoch["ours"], epoch["torch"]),
                seconds(epoch["span"]),
                ratio(epoch["span"], epoch["torch"]),
            ]
        )
        peaks = [f"{peak_mebibytes(what, n):,.1f}" for what in ("span", "epoch", "randperm")]
        sampler = f"{peak_mebibytes('sampler', n):,.1f}" if n < 10**8 else "-"  # a list of 10^8 ints: above 4 GB
        memory_rows.append([f"{n:.0e}", *peaks, sampler])
    head = ["n", "GlobalOrder, epoch", "randperm", "randperm / ours", f"GlobalOrder, {SPAN} ids", "randperm / ours"]
    table("Order of an epoch of n samples, and of one step inside it", head, times_rows)
    head = ["n", f"GlobalOrder, {SPAN} ids", "GlobalOrder, epoch", "randperm", "RandomSampler"]
    table("Peak memory (MiB above the start)", head, memory_rows)


def bench_start(largest: int, rounds: int) -> None:
    order = GlobalOrder(POSITION * 2, seed=1)
    starts = {f"{p:.0e}": p for p in (0, POSITION, 10**12)}
    ours = interleaved({k: lambda p=p: order.ids(range(p, p + SPAN)) for k, p in starts.items()}, rounds)
    base = ours[f"{POSITION:.0e}"]
    rows = [["GlobalOrder", k, seconds(t), ratio(base, t), "-"] for k, t in ours.items()]
    for name, skip in skippers().items():
        for samples in (10**5, 10**6, 10**7):
            if samples > largest:
                continue
            both = interleaved(
                {"ours": lambda: order.ids(range(POSITION, POSITION + SPAN)), "theirs": lambda n=samples, s=skip: s(n)},
                min(rounds, 6),
            )
            whole = median(both["theirs"]) * POSITION / samples
            rows.append(
                [
                    name,
                    f"{samples:.0e}",
                    seconds(both["theirs"]),
                    ratio(both["ours"], both["theirs"]),
                    f"{whole:,.0f} s",
                ]
            )
    head = ["start", "at position", "CPU time", "times ours at 1e+09", "extrapolated to 1e+09"]
    table(f"To the first {SPAN} ids after a start in the middle", head, rows)


def skippers() -> dict[str, Callable[[int], Any]]:
    """Ways to start at sample n of an epoch that is a little longer."""

    def torch_sampler(n: int) -> Any:
        sampler = RandomSampler(range(n + SPAN), generator=torch.Generator().manual_seed(1))
        return list(itertools.islice(sampler, n, n + SPAN))

    def torch_batches(n: int) -> Any:
        sampler = RandomSampler(range(n + SPAN), generator=torch.Generator().manual_seed(1))
        return list(itertools.islice(BatchSampler(sampler, BATCH, False), n // BATCH, (n + SPAN) // BATCH))

    found: dict[str, Callable[[int], Any]] = {"RandomSampler": torch_sampler, "BatchSampler": torch_batches}
    try:
        skip_first_batches = import_module("accelerate").skip_first_batches
    except ImportError:
        print("(accelerate is not installed: its row is omitted)", file=sys.stderr)
        return found

    def accelerate(n: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(range(n + SPAN), BATCH, shuffle=True, generator=generator, collate_fn=list)  # type: ignore[arg-type]
        return list(skip_first_batches(loader, n // BATCH))

    return found | {"Accelerate skip_first_batches": accelerate}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--largest", type=int, default=10**7, help="largest epoch to store (10^8 needs 2 GB)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", choices=MEMORY, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.memory:
        print_peak(given.memory, given.largest)
        return
    bench_epochs(given.largest, given.rounds)
    bench_start(given.largest, given.rounds)


if __name__ == "__main__":
    main()
