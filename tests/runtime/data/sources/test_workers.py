"""Sources in workers of a DataLoader and in batchwright's Loader: connections are opened again in every process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from torch.utils.data import DataLoader

from batchwright.core.ramp.rules import Constant
from batchwright.runtime import Access, GlobalOrder, JsonLines, Loader, Parquet, StepSampler, TarShards, TokenFile
from tests.runtime.data.sources import made
from tests.runtime.data.sources.server import serving
from tests.runtime.data.sources.test_faults import FILES, ROWS, TARS, TOKENS

pytestmark = pytest.mark.torch
# torch warns that a process with threads is forked; the sources are made for it.
pytestmark = [pytestmark, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]
ACCESS = Access(tries=6, timeout=20, first_pause=0.001, longest_pause=0.01)


def every_third(n: int, again: int) -> object:
    return 503 if again == 0 and n % 3 == 0 else None


@pytest.mark.parametrize(
    ("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")], ids=["in this process", "fork", "spawn"]
)
def test_rows_are_the_same_in_every_worker(workers, method, tmp_path):
    with serving(FILES, every_third) as server:
        sources = [
            (JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path, access=ACCESS), ROWS),
            (Parquet(f"{server.url}/a.parquet", access=ACCESS), ROWS),
            (TarShards(f"{server.url}/a.tar", index_folder=tmp_path, access=ACCESS), TARS),
            (TokenFile(f"{server.url}/m", access=ACCESS), TOKENS.reshape(200, 15).tolist()),
        ]
        for source, expected in sources[: None if method != "spawn" else 1]:
            source[0]  # this process has open connections when the workers start
            loader = DataLoader(
                source,
                batch_size=50,
                num_workers=workers,
                multiprocessing_context=method,
                collate_fn=list,
                timeout=60 if workers else 0,
            )
            rows = [row for batch in loader for row in batch]
            assert [r.tolist() for r in rows] == expected if isinstance(source, TokenFile) else rows == expected
            assert source[0] is not None  # and still has them


def test_the_loader_trains_on_every_row_once(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(made.json_lines(ROWS))
    source = JsonLines(tmp_path / "a.jsonl")
    order = GlobalOrder(len(source), seed=1)
    sampler = StepSampler(Constant(40).compile().until(samples=200), micro_batch_size=8)
    seen = [row["i"] for micro in Loader(source, order, sampler, collate=list, num_workers=2) for row in micro.data]
    assert seen == order.ids(range(200)).tolist() and sorted(seen) == list(range(200))
