"""Positions that other programs stored: what real grain and torchdata would read next is what is read next here."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import batchwright
from batchwright.core.errors import PlanError
from batchwright.dialects.positions import Interleaved, grain_position, megatron_position, torchdata_position
from tests.needs import needs

SIZE = 96


class Records:
    """A source of grain: record i is i."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> int:
        return int(index)


def rest(dataset: Any, position: int, ranks: int) -> list[int]:
    """What `ranks` ranks of batchwright train on from a position to the end, step by step."""
    from batchwright.core.ramp.rules import Constant
    from batchwright.runtime.data.loader import Loader
    from batchwright.runtime.data.order import GlobalOrder
    from batchwright.runtime.data.sampler import StepSampler

    schedule = Constant(8).compile().until(len(dataset))
    order = GlobalOrder(len(dataset), shuffle=False)
    loaders = [
        Loader(dataset, order, StepSampler(schedule, 8 // ranks, r, ranks, position), collate=list)
        for r in range(ranks)
    ]
    return [row for micros in zip(*loaders, strict=True) for micro in micros for row in micro.data]


@pytest.mark.torch
@pytest.mark.parametrize(("stored", "hosts"), [(4, 2), (4, 1), (2, 4)])  # MaxText's factors 1/2 and 1/4, and more hosts
def test_other_numbers_of_hosts_go_on_from_the_states_of_grain(stored: int, hosts: int) -> None:
    needs("grain")
    import grain.python as grain

    whole = grain.MapDataset.source(Records()).shuffle(seed=3)
    iterators = [iter(whole[s::stored].to_iter_dataset().batch(2)) for s in range(stored)]
    trained = sorted(int(row) for iterator in iterators for _ in range(4) for row in next(iterator))
    states = [json.dumps(iterator.get_state()) for iterator in iterators]
    position = grain_position(states)
    assert position == len(trained) == 8 * stored
    following = [int(row) for _ in range(2) for iterator in iterators for row in next(iterator)]
    found = [int(row) for row in rest(whole, position, hosts)]
    assert sorted(found[: len(following)]) == sorted(following)
    assert sorted(found + trained) == list(range(SIZE))


@pytest.mark.torch
def test_a_batched_map_dataset_of_grain_counts_batches() -> None:
    needs("grain")
    import grain.python as grain

    iterators = [iter(grain.MapDataset.source(Records())[s::4].batch(2).to_iter_dataset()) for s in range(4)]
    for iterator in iterators:
        next(iterator), next(iterator), next(iterator)
    states = [iterator.get_state() for iterator in iterators]
    assert grain_position(states, rows_per_index=2) == 24


@pytest.mark.torch
@pytest.mark.parametrize("hosts", [2, 1])
def test_shards_of_grains_data_loader_are_interleaved(hosts: int) -> None:
    """Each of 4 processes shuffles a shard of its own: 2 hosts, or 1, go on with all of them."""
    needs("grain")
    import grain.python as grain

    def sampler(shard: int) -> Any:
        options = grain.ShardOptions(shard_index=shard, shard_count=4, drop_remainder=True)
        return grain.IndexSampler(num_records=SIZE, shard_options=options, shuffle=True, num_epochs=1, seed=3)

    def loader(shard: int) -> Any:
        return grain.DataLoader(
            data_source=Records(), sampler=sampler(shard), operations=[grain.Batch(2)], worker_count=0
        )

    iterators = [iter(loader(shard)) for shard in range(4)]
    trained = sorted(int(row) for iterator in iterators for _ in range(4) for row in next(iterator))
    position = grain_position([iterator.get_state() for iterator in iterators])
    assert position == len(trained) == 32
    shards = [[sampler(s)[s + 4 * at].record_key for at in range(SIZE // 4)] for s in range(4)]
    following = sorted(int(row) for iterator in iterators for row in next(iterator))
    found = rest(Interleaved(shards), position, hosts)
    assert sorted(found[:8]) == following and sorted(found + trained) == list(range(SIZE))


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.rounds)])
def test_other_numbers_of_ranks_go_on_from_the_states_of_torchdata(workers: int) -> None:
    needs("torchdata")
    from torch.utils.data import DistributedSampler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

        loaders = []
        for rank in range(4):
            made = DistributedSampler(range(SIZE), num_replicas=4, rank=rank, shuffle=False)
            loaders.append(StatefulDataLoader(list(range(SIZE)), batch_size=2, sampler=made, num_workers=workers))
        iterators = [iter(loader) for loader in loaders]
        trained = sorted(int(row) for iterator in iterators for _ in range(3) for row in next(iterator))
        states = [loader.state_dict() for loader in loaders]
        random = StatefulDataLoader(list(range(SIZE)), batch_size=2, shuffle=True)
        next(iter(random))
        drawn = random.state_dict()
    position = torchdata_position(states, batch_size=2, shuffled=False)
    assert position == len(trained) == 24 and trained == list(range(24))
    assert rest(list(range(SIZE)), position, 2) == list(range(24, SIZE))
    with pytest.raises(PlanError, match="draws from a random generator"):
        torchdata_position([drawn], batch_size=2, shuffled=False)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("workers", "every"),
    [(0, 1), pytest.param(2, 1, marks=pytest.mark.rounds), pytest.param(2, 3, marks=pytest.mark.rounds)],
)
def test_a_short_last_batch_of_torchdata_is_no_position(workers: int, every: int) -> None:
    """97 samples on 4 ranks are 25 each, three of them padding: after 13 batches of 2 nobody has trained 104."""
    needs("torchdata")
    from torch.utils.data import DistributedSampler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

        data, states = list(range(97)), {12: [], 13: []}
        for rank in range(4):
            made = DistributedSampler(data, num_replicas=4, rank=rank, shuffle=False)
            options = {"num_workers": workers, "snapshot_every_n_steps": every}
            loader = StatefulDataLoader(data, batch_size=2, sampler=made, **options)
            iterator = iter(loader)
            for batch in range(1, 14):
                next(iterator)
                if batch in states:
                    states[batch].append(loader.state_dict())
    assert torchdata_position(states[12], batch_size=2, shuffled=False) == 96
    message = "25 samples in 13 batches" if every == 1 else "Give dataset_size"
    with pytest.raises(PlanError, match=message):
        torchdata_position(states[13], batch_size=2, shuffled=False)
    with pytest.raises(PlanError, match=r"25 samples in 13 batches|104 samples are more than dataset_size=97"):
        torchdata_position(states[13], batch_size=2, shuffled=False, dataset_size=97)
    with pytest.raises(PlanError, match="batch_size was another"):
        torchdata_position(states[12], batch_size=3, shuffled=False)


# Megatron-LM's training loop is not part of the package megatron-core; its dataset is, and shuffles inside. The sampler of
# dataloader type single takes its indices in order, whatever the number of ranks, so what follows N samples is sample N.
MEGATRON = """
import sys, types, numpy, torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from batchwright.core.ramp.rules import Constant
from batchwright.dialects.positions import megatron_position
from batchwright.runtime import GlobalOrder, Loader, StepSampler
prefix = sys.argv[1]
builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
for document in range(200):
    builder.add_item(torch.arange(document, document + 20))
    builder.end_document()
builder.finalize(f"{prefix}.idx")
config = GPTDatasetConfig(
    random_seed=5, sequence_length=16, blend=([prefix], None), split="1,0,0", path_to_cache=f"{prefix}-cache",
    tokenizer=types.SimpleNamespace(eod=999, pad=998, vocab_size=1000, unique_identifiers={"class": "none"}),
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
)
[dataset, *_] = BlendedMegatronDatasetBuilder(GPTDataset, [96, 0, 0], lambda: True, config).build()
theirs = [dataset[i]["tokens"].tolist() for i in range(96)]
assert len(dataset) >= 96 and theirs != sorted(theirs)  # it shuffles
order = GlobalOrder(len(dataset), shuffle=False)
# 32 samples were trained in batches of 8; 3 ranks, or 1, go on with batches of 6.
for ranks in (3, 1):
    schedule = Constant(8).compile().until(32).continued(32, Constant(6).compile().until(92))
    loaders = [Loader(dataset, order, StepSampler(schedule, 2, r, ranks, megatron_position(32))) for r in range(ranks)]
    ours = [row for micros in zip(*loaders) for micro in micros for row in micro.data["tokens"].tolist()]
    assert ours == theirs[32:92], (len(ours), ranks)
print("exact")
"""


@pytest.mark.torch
@pytest.mark.rounds
def test_what_follows_in_megatrons_dataset_is_read_next(tmp_path: Path) -> None:
    needs("megatron.core")
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON, str(tmp_path / "corpus")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "exact" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda: megatron_position(1312, dataloader_type="cyclic"), "depends on the micro batch"),
        (lambda: megatron_position(-1), "consumed_samples"),
        (lambda: torchdata_position([{"_num_yielded": 1}], batch_size=2, shuffled=True), "permutation"),
        (lambda: torchdata_position([{}], batch_size=2, shuffled=False), "not a state of torchdata"),
        (
            lambda: torchdata_position([{"_num_yielded": 1}, {"_num_yielded": 2}], batch_size=2, shuffled=False),
            "not equally far: 1, 2 batches",
        ),
        (
            lambda: torchdata_position([{"_num_yielded": 1, "_iterator_finished": True}], batch_size=2, shuffled=False),
            "finished its epoch",
        ),
        (
            lambda: torchdata_position([{"_num_yielded": 1, "fetcher_state": {}}], batch_size=2, shuffled=False),
            "a stream with a state of its own",
        ),
        (lambda: grain_position([{"next_index": 4}, {"next_index": 5}]), "not equally far: 4, 5 indices"),
        (lambda: grain_position([]), "no states"),
        (lambda: grain_position([{"next_index": 4}] * 4, processes=8), "4 states are given, and processes=8"),
        (lambda: grain_position([{"next_index": -4}]), "next_index=-4: must be at least 0"),
        (lambda: grain_position([{"next_index": True}]), "next_index=True"),
        (
            lambda: torchdata_position([{"_num_yielded": True}], batch_size=2, shuffled=False),
            "_num_yielded=True",
        ),
        (lambda: torchdata_position([{"_num_yielded": 1}], batch_size=2, shuffled=False), "Give dataset_size"),
        (lambda: grain_position(["nothing"]), "not a state of grain"),
        (lambda: grain_position([{}]), "not a state of grain"),
        (lambda: grain_position(["3"]), "not a state of grain: it is no JSON object"),
        (
            lambda: grain_position([{"parents": [{"next_index": 1}], "index": 2}]),
            "state 0 has parents: its pipeline holds",
        ),
        (
            lambda: grain_position([{"last_seen_indices": {"0": 3}, "sampler": "shard_index=1, shard_count=4"}]),
            "all of them",
        ),
        (
            lambda: grain_position([{"last_seen_indices": {"0": None}, "sampler": "shard_index=0, shard_count=1"}]),
            "it has no whole numbers in last_seen_indices",
        ),
        (lambda: torchdata_position([None], batch_size=2, shuffled=False), "not a state of torchdata"),
        (lambda: Interleaved(["ab", "c"]), "equal lengths"),
    ],
)
def test_what_is_not_exact_is_refused_with_the_reason(ask: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        ask()


def test_workers_of_grain_that_are_equally_far() -> None:
    def state(*last: int) -> dict[str, Any]:
        return {"last_seen_indices": dict(zip("0123", last, strict=False)), "sampler": "shard_index=0, shard_count=1"}

    assert grain_position([state(2, 3)]) == 4  # worker 0 has read 0 and 2, worker 1 has read 1 and 3
    with pytest.raises(PlanError, match="records of the workers"):
        grain_position([state(4, 3)])


def test_plan_says_that_maxtext_halves_its_load_batch() -> None:
    plan = batchwright.plan({"per_device_batch_size": 2, "expansion_factor_real_data": 0.5}, devices=256, hosts=32)
    assert plan.loading.load_batch_size == 512
    assert any("loads 1/2 of the batch" in note for note in plan.notes)
