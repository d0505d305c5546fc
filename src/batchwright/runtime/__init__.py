"""The training loop and its parts, on torch's own DDP, FSDP2 and DataLoader.

    task     what a user's file returns
    data/    which samples each rank reads in each step, and files to read them from
    step/    the gradient of the whole global batch, at any split
    state/   checkpoints, the ledger of samples, and its audit
    loop/    `train`, which combines them
    rl/      reinforcement learning: `train_rl`, where sampling overlaps training
    check/   does a split change the gradient?

Each part also works alone: docs/own_loop.md builds a loop from them. Names are imported on first use.
"""

TYPE_CHECKING = False  # type checkers read it as true

if TYPE_CHECKING:
    from .data.loader import Loader as Loader
    from .data.loader import Micro as Micro
    from .data.order import GlobalOrder as GlobalOrder
    from .data.readers import ReadingHosts as ReadingHosts
    from .data.sampler import Slice as Slice
    from .data.sampler import StepSampler as StepSampler
    from .data.sources.access import Access as Access
    from .data.sources.access import Reads as Reads
    from .data.sources.jsonl import JsonLines as JsonLines
    from .data.sources.parquet import Parquet as Parquet
    from .data.sources.shards import Shards as Shards
    from .data.sources.shards import indexed as indexed
    from .data.sources.tar import TarShards as TarShards
    from .data.sources.tokens import TokenFile as TokenFile
    from .data.windows import windows as windows
    from .device import to_device as to_device
    from .loop.events import read_events as read_events
    from .loop.settings import Settings as Settings
    from .loop.train import train as train
    from .ranks import Ranks as Ranks
    from .ranks import data_parallel as data_parallel
    from .ranks import discover as discover
    from .rl.record import RoundResult as RoundResult
    from .rl.settings import RLSettings as RLSettings
    from .rl.task import Prompts as Prompts
    from .rl.task import RLTask as RLTask
    from .rl.train import train_rl as train_rl
    from .state.audit import LedgerAudit as LedgerAudit
    from .state.audit import audit as audit
    from .state.checkpoint import Checkpoints as Checkpoints
    from .state.ledger import Ledger as Ledger
    from .state.ledger import next_launch as next_launch
    from .step.accumulate import Accumulator as Accumulator
    from .step.accumulate import GradientStep as GradientStep
    from .step.accumulate import StepResult as StepResult
    from .step.accumulate import accumulate as accumulate
    from .step.noise import NoiseEstimate as NoiseEstimate
    from .step.noise import NoiseScale as NoiseScale
    from .step.pipeline import PipelineAccumulator as PipelineAccumulator
    from .task import Task as Task
    from .task import load_task as load_task

# Name -> module; imported on first use, since FSDP alone takes a second to import.
_HOMES = {
    "Access": "data.sources.access",
    "Accumulator": "step.accumulate",
    "Checkpoints": "state.checkpoint",
    "GlobalOrder": "data.order",
    "GradientStep": "step.accumulate",
    "PipelineAccumulator": "step.pipeline",
    "JsonLines": "data.sources.jsonl",
    "Ledger": "state.ledger",
    "LedgerAudit": "state.audit",
    "Loader": "data.loader",
    "Micro": "data.loader",
    "NoiseEstimate": "step.noise",
    "NoiseScale": "step.noise",
    "Parquet": "data.sources.parquet",
    "Prompts": "rl.task",
    "RLSettings": "rl.settings",
    "RLTask": "rl.task",
    "Ranks": "ranks",
    "ReadingHosts": "data.readers",
    "Reads": "data.sources.access",
    "RoundResult": "rl.record",
    "Settings": "loop.settings",
    "Shards": "data.sources.shards",
    "Slice": "data.sampler",
    "StepResult": "step.accumulate",
    "StepSampler": "data.sampler",
    "TarShards": "data.sources.tar",
    "Task": "task",
    "TokenFile": "data.sources.tokens",
    "accumulate": "step.accumulate",
    "audit": "state.audit",
    "data_parallel": "ranks",
    "discover": "ranks",
    "indexed": "data.sources.shards",
    "load_task": "task",
    "next_launch": "state.ledger",
    "read_events": "loop.events",
    "to_device": "device",
    "train": "loop.train",
    "train_rl": "rl.train",
    "windows": "data.windows",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"batchwright.runtime.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
