"""Positions that other programs have stored, as one position: how many samples of *their* order were trained.

That is exact if the samples trained so far are the first N of an order that can be read at any position. Then a dataset that
follows this order, read with `GlobalOrder(len(dataset), shuffle=False)` and `StepSampler(…, start=N)`, goes on with the next
sample, on any number of ranks and reading hosts. Where it is not exact, the functions refuse and say why.

    program                     its order                                            the dataset to read
    Megatron, single            the indices of its dataset, which shuffles inside    that dataset
    torchdata                   rank r of R takes r, r + R, … (DistributedSampler)   the dataset
    grain, a slice per process  process s of S takes ds[s::S] of a MapDataset        that MapDataset
    grain, a shard per process  process s of S reads a shard of its own              Interleaved(shards)

In MaxText, `expansion_factor_real_data` of 1/2 or 1/4 is the case in which fewer hosts go on from the states of more: here
the states of all S processes become one position, so any number of hosts goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from batchwright.core.errors import PlanError
from batchwright.core.numbers import count


def megatron_position(consumed_samples: int, *, dataloader_type: str = "single") -> int:
    """The position of Megatron-LM's `consumed_train_samples` (in `args` of its checkpoint).

    >>> megatron_position(1312)
    1312
    """
    if dataloader_type != "single":
        raise PlanError(
            f"dataloader_type={dataloader_type!r} cannot be imported exactly: its order depends on the micro batch and on the "
            "number of ranks, so consumed_samples does not say which samples were trained. Exact: single.",
            field="dataloader_type",
            given=dataloader_type,
            nearest=("single",),
        )
    return count(consumed_samples, "consumed_samples", least=0)


def torchdata_position(
    states: Sequence[Mapping[str, Any]], *, batch_size: int, shuffled: bool, dataset_size: int | None = None
) -> int:
    """The position of torchdata's `StatefulDataLoader.state_dict()`, one state per rank, in any order.

    Each rank's loader has `batch_size`, a map-style dataset and a DistributedSampler; `shuffled`: the sampler shuffles.
    `dataset_size` is needed where a state does not say that all of its batches were full: the last one of an epoch may be short.

    >>> state = {"_num_yielded": 2, "_sampler_iter_state": {"samples_yielded": 6}}
    >>> torchdata_position([state, state], batch_size=3, shuffled=False)
    12
    """
    if shuffled:
        raise PlanError(
            "shuffled=True cannot be imported exactly: the sampler's permutation is not an order that can be read at any "
            "position. Exact: a sampler with shuffle=False, or the end of an epoch, which is a position by itself.",
            field="shuffled",
            given=True,
        )
    batches: list[int] = []
    full = True
    rows = count(batch_size, "batch_size")
    for rank, state in enumerate(states):
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _not_a_state("torchdata", rank, "a dictionary")
        main: Any = state
        known, later = state.get("_num_yielded"), 0
        if isinstance(snapshot := state.get("_snapshot"), Mapping):
            main = cast("Mapping[str, Any]", snapshot).get("_main_snapshot") or {}
            known = cast("Mapping[str, Any]", snapshot).get("_snapshot_step")
            later = count(state.get("_steps_since_snapshot", 0), "_steps_since_snapshot", least=0)
        if known is None:
            raise _not_a_state("torchdata", rank, "_num_yielded or _snapshot")
        known = count(known, "_num_yielded", least=0)
        if state.get("_iterator_finished"):
            raise _inexact(f"the loader of rank {rank} has finished its epoch. The position is the end of that epoch.")
        found = main.get("_sampler_iter_state")
        sampler = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})
        if sampler.get("sampler_iter_state") is not None:
            raise _inexact(
                f"the sampler of rank {rank} draws from a random generator, so its order cannot be read at any position."
            )
        if state.get("fetcher_state") is not None or state.get("dataset_state") is not None:
            raise _inexact(
                f"the dataset of rank {rank} is a stream with a state of its own. Only map-style datasets are exact."
            )
        samples = sampler.get("samples_yielded")
        if samples is not None and samples != known * rows:
            raise _inexact(
                f"rank {rank} has yielded {samples} samples in {known} batches, and {known} batches of batch_size={rows} are "
                f"{known * rows}. Either batch_size was another, or the last batch was short: then the epoch has ended, and its "
                "end is the position."
            )
        full = full and samples is not None and not later
        batches.append(known + later)
    position = _even(batches, "batches") * rows * len(states)
    if dataset_size is None and not full:
        raise _inexact("they do not say whether the last batches were full. Give dataset_size=len(dataset).")
    if dataset_size is not None and position > count(dataset_size, "dataset_size"):
        raise _inexact(
            f"{position:,} samples are more than dataset_size={dataset_size:,}: the last batches were short or padded, so the "
            "epoch has ended, and its end is the position."
        )
    return position


def grain_position(
    states: Sequence[Mapping[str, Any] | str | bytes], *, rows_per_index: int = 1, processes: int | None = None
) -> int:
    """The position of grain's per-process iterator states (`get_state()`, MaxText's `process_0-of-8.json`), in order.

    `rows_per_index`: the batch size, if the MapDataset was batched before it became an iterator; its indices count batches.
    `processes`: how many have stored a state, as the file names say (8); most states do not say it, and one that is missing
    would give a smaller position.

    >>> grain_position([{"next_index": 4}] * 8, processes=8)
    32
    """
    if processes is not None and len(states) != processes:
        raise _inexact(
            f"{len(states)} states are given, and processes={processes} have stored one each: all are needed."
        )
    read = [_grain(process, len(states), state) for process, state in enumerate(states)]
    return _even(read, "indices") * count(rows_per_index, "rows_per_index") * len(states)


# Keys of states of grain whose rows do not follow from one index.
_IN_FLIGHT = ("iterators_in_use_states", "parents", "window_index")


def _grain(process: int, processes: int, state: Mapping[str, Any] | str | bytes) -> int:
    """How many indices one process has read."""
    if isinstance(state, (str, bytes)):
        try:
            state = cast("Mapping[str, Any]", json.loads(state))
        except ValueError:
            raise _not_a_state("grain", process, "JSON") from None
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"state {process} is not a state of grain: it is no JSON object.", field="states", given=process
        )
    if (found := state.get("next_index")) is not None:
        return count(found, "next_index", least=0)
    seen = state.get("last_seen_indices")
    if not isinstance(seen, Mapping) and (keys := [key for key in _IN_FLIGHT if key in state]):
        raise _inexact(
            f"state {process} has {', '.join(keys)}: its pipeline holds rows that were read and not trained (mp_prefetch, a "
            "shuffle window, a mixture), so no position says which were trained. Exact: a MapDataset that is shuffled and "
            "batched by index."
        )
    if not isinstance(seen, Mapping):
        raise _not_a_state("grain", process, "next_index or last_seen_indices")
    # The DataLoader: worker w of W has read its indices up to one of them, out of process, process + processes, …
    shard = re.search(r"shard_index=(\d+), shard_count=(\d+)", str(state.get("sampler")))
    if shard is None or (int(shard[1]), int(shard[2])) != (process, processes):
        raise _inexact(
            f"state {process} says {shard[0] if shard else 'nothing of its shard'}, and {processes} states are given: all of "
            "them are needed, in the order of their processes."
        )
    try:
        last = [
            int(value) for _, value in sorted(cast("Mapping[str, Any]", seen).items(), key=lambda item: int(item[0]))
        ]
    except (TypeError, ValueError):
        raise _not_a_state("grain", process, "whole numbers in last_seen_indices") from None
    per_worker = [max(0, ((one - process) // processes - worker) // len(last) + 1) for worker, one in enumerate(last)]
    return _even(per_worker, f"records of the workers of process {process}") * len(last)


class Interleaved:
    """Shards of equal lengths as one map-style dataset: sample p is `shards[p % S][p // S]`.

    What S processes that each read a shard of their own have trained is the beginning of this order, if all are equally far.

    >>> shards = Interleaved(["adg", "beh", "cfi"])
    >>> "".join(shards[p] for p in range(len(shards)))
    'abcdefghi'
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        lengths = [len(shard) for shard in shards]
        if len(set(lengths)) != 1:
            raise PlanError(
                f"the shards have {min(lengths, default=0):,} to {max(lengths, default=0):,} samples: interleaved shards must "
                "have equal lengths, since the longer ones would be trained alone at the end. Drop their remainders.",
                field="shards",
                given=str(lengths)[:60],
            )
        self.shards, self._length = tuple(shards), lengths[0]

    def __len__(self) -> int:
        return self._length * len(self.shards)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.shards[index % len(self.shards)][index // len(self.shards)]


def _even(numbers: Sequence[int], what: str) -> int:
    """The one number that all have."""
    if not numbers:
        raise PlanError("no states are given.", field="states")
    if len(set(numbers)) > 1:
        shown = ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
        raise _inexact(
            f"they are not equally far: {shown} {what}. Save the states of all processes after the same step."
        )
    return numbers[0]


def _inexact(reason: str) -> PlanError:
    return PlanError(f"the states cannot be imported exactly: {reason}", field="states")


def _not_a_state(program: str, number: int, expected: str) -> PlanError:
    return PlanError(f"state {number} is not a state of {program}: it has no {expected}.", field="states", given=number)
