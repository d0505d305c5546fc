"""Batched reads against single ones, over an HTTP server on this machine with latency.

    python benchmarks/bench_sources.py [--rounds 7] [--latency 0.02]

A source reads the same rows of one file in two ways: one by one (`source[i]`), and in batches (`source.__getitems__`). The
rows of a batch are neighbours (an order that is not shuffled), or random ones, which are read in requests of their own, up
to `connections` at a time. Ways run in turn, round after round; a ratio is the median over rounds, with its range. Waiting
for the server is what is measured, so times are those of the clock. Amplification: bytes that arrived / bytes of the rows.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchwright.runtime import Access, JsonLines, TokenFile
from tests.runtime.data.sources import made
from tests.runtime.data.sources.server import serving

ROWS, LENGTH, BATCH, BATCHES = 20_000, 1024, 32, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before the server answers")
    given = parser.parse_args()
    tokens = np.arange(ROWS * LENGTH, dtype=np.uint16)
    texts = [{"i": i, "text": "x" * 200} for i in range(ROWS)]
    files = {"tokens.npy": made.npy(tokens), "texts.jsonl": made.json_lines(texts)}
    print(f"Server latency {given.latency * 1000:g} ms, batches of {BATCH} rows, {given.rounds} interleaved rounds.\n")
    head = "source", "rows of a batch", "connections", "rows/s one by one", "rows/s batched", "ratio (median, range)"
    print("| " + " | ".join([*head, "requests per batch", "amplification"]) + " |")
    print("|" + "---|" * 8)
    with serving(files, latency=given.latency) as server, tempfile.TemporaryDirectory() as folder:
        for name in ("tokens", "texts"):
            for order in ("neighbours", "random"):
                for connections in (1, 4):
                    access = Access(connections=connections)
                    if name == "tokens":
                        source = TokenFile(f"{server.url}/tokens.npy", sequence_length=LENGTH, access=access)
                    else:
                        source = JsonLines(f"{server.url}/texts.jsonl", index_folder=folder, access=access)
                    row_bytes = len(files["texts.jsonl"]) / ROWS if name == "texts" else 2 * LENGTH
                    print(line(name, order, connections, source, row_bytes, given.rounds), flush=True)


def line(name: str, order: str, connections: int, source: JsonLines | TokenFile, row_bytes: float, rounds: int) -> str:
    draw = random.Random(1)
    times: dict[str, list[float]] = {"single": [], "batched": []}
    requests = received = 0
    source[0]
    for turn in range(rounds + 1):
        batches = [ids(order, draw) for _ in range(BATCHES)]
        begun = time.perf_counter()
        alone = [source[i] for i in batches[0]]
        single = (time.perf_counter() - begun) / BATCH
        before = source.reads.record()
        begun = time.perf_counter()
        together = [source.__getitems__(batch) for batch in batches]
        batched = (time.perf_counter() - begun) / (BATCH * BATCHES)
        after = source.reads.record()
        assert all(np.array_equal(a, b) for a, b in zip(alone, together[0], strict=True))
        if turn:  # the first round opens connections
            times["single"].append(single)
            times["batched"].append(batched)
            requests += after["requests"] - before["requests"]
            received += after["bytes"] - before["bytes"]
    ratios = [a / b for a, b in zip(times["single"], times["batched"], strict=True)]
    speed = [f"{1 / median(times[way]):,.0f}" for way in ("single", "batched")]
    ratio = f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
    per_batch, amplified = requests / (rounds * BATCHES), received / (rounds * BATCHES * BATCH * row_bytes)
    return (
        f"| {name} | {order} | {connections} | {speed[0]} | {speed[1]} | {ratio} | {per_batch:.1f} | {amplified:.2f} |"
    )


def ids(order: str, draw: random.Random) -> list[int]:
    if order == "random":
        return draw.sample(range(ROWS), BATCH)
    first = draw.randrange(ROWS - BATCH)
    return list(range(first, first + BATCH))


if __name__ == "__main__":
    main()
