"""The settings of a training loop: one frozen record, which is also the `settings` of a spec file (JSON)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, Literal, cast

from batchwright.core.batch.pipeline import RUN_BY_TORCH, SPLIT_BACKWARD
from batchwright.core.codec import decode
from batchwright.core.errors import BatchwrightError, ConfigError, Violation, raise_violations
from batchwright.core.ramp.learning_rate import RULES, SampleSchedule
from batchwright.core.ramp.schedule import Schedule
from batchwright.rundir import names
from batchwright.rundir.files import read_json
from batchwright.rundir.trackers import TRACKERS

Strategy = Literal["auto", "ddp", "fsdp2", "none"]
AccumulateDtype = Literal["float32", "float64"]
ACCUMULATE_DTYPES: tuple[AccumulateDtype, ...] = ("float32", "float64")
STRATEGIES: tuple[Strategy, ...] = ("auto", "ddp", "fsdp2", "none")
SCHEMA = 1
# Whole numbers and their least values; None is left to the default.
_LEAST = {
    "checkpoint_every": 1,
    "evaluate_every": 1,
    "noise_every": 1,
    "log_every": 1,
    "keep": 1,
    "threads": 1,
    "evaluation_batch_size": 1,
    "evaluation_samples": 0,
    "num_workers": 0,
    "ranks_per_host": 1,
    "pipeline_parallel": 1,
    "virtual_stages": 1,
    "inner_microbatches": 1,
    "read_ahead": 1,
    "read_retries": 0,
    "stop_after_nonfinite": 0,
    "launch": 0,
    "start_sample": 0,
    "end_sample": 0,
    "nodes": 1,
    "dataset_size": 1,
    # torch's generators take seeds of 64 bits, with or without a sign.
    "seed": -(2**63),
}
_MOST = {"seed": 2**64 - 1}
_OPTIONAL = (
    "checkpoint_every",
    "evaluate_every",
    "noise_every",
    "threads",
    "evaluation_batch_size",
    "launch",
    "end_sample",
    "nodes",
    "dataset_size",
    "ranks_per_host",
    "inner_microbatches",
)
_NUMBERS = ("max_tokens", "max_norm", "grad_scaler", "peak_flops", "read_timeout", "open_timeout")
_SWITCHES = ("allow_ragged", "shuffle", "resume", "accept_changes", "asynchronous", "progress")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `train` beside the task and the schedule. Every field but the directory has a default.

    >>> Settings(directory="run", micro_batch_size=8).checkpoints
    PosixPath('run/checkpoints')
    """

    directory: str
    """The run directory: checkpoints, ledger, events, status. By default a run resumes from its newest checkpoint."""
    micro_batch_size: int | tuple[int, ...] = 1
    """Samples per rank per forward/backward: one number, or one for each segment of the schedule."""
    allow_ragged: bool = False
    seed: int = 0
    """Seeds the order, the model's first weights, and generators that no checkpoint restores."""
    shuffle: bool = True
    strategy: Strategy = "auto"
    """`ddp` or `fsdp2`; `auto` is DDP on several ranks and the plain model on one."""
    pipeline_parallel: int = 1
    """Ranks that hold the stages of one model: `Task.stage` builds them, or the model is split. Every
    `pipeline_parallel` × data-parallel ranks train one global batch."""
    pipeline_schedule: str = "1f1b"
    """The schedule of the pipeline, one that torch runs."""
    virtual_stages: int = 1
    """Stages on each rank of the pipeline."""
    inner_microbatches: int | None = None
    """Split each micro batch into this many, and fill and empty the pipeline with them. None: the micro batches of a step are
    the microbatches of the pipeline."""
    device: str = "auto"
    """`auto` is the accelerator of this rank if torch finds one, else the CPU; or `cpu`, or what torch calls the accelerator."""
    threads: int | None = None
    """torch's threads in this process; None keeps torch's default, which reads the environment."""
    launch: int | None = None
    """The number of this launch: one start of the training processes. By default the first unused number."""
    start_sample: int = 0
    """Where the run begins, if the samples before it were trained by another program. A checkpoint of this run counts more."""
    end_sample: int | None = None
    """Stop before the step that starts at this sample: the next launch begins there. None: train the whole schedule."""
    max_tokens: float | None = None
    """Stop after the step in which the sum of all weights reaches this number."""
    resume: bool = True
    """False: refuse a directory that has a checkpoint."""
    accept_changes: bool = False
    """Resume even if the position no longer says which samples were trained (another dataset, seed or size)."""
    checkpoint_every: int | None = None
    """Samples between checkpoints; the loop also saves one when it stops."""
    keep: int = 2
    asynchronous: bool = False
    evaluate_every: int | None = None
    """Samples between evaluations; the loop also evaluates at the end."""
    evaluation_samples: int = 0
    """The number of samples at the end of the dataset that are evaluated and never trained."""
    evaluation_batch_size: int | None = None
    """Samples per forward in evaluation; by default the first micro batch size."""
    learning_rate: SampleSchedule | None = None
    """The shape of the rate over samples. Its peak is mapped to the optimizer's own rate of each parameter group."""
    lr_scaling: str = "none"
    """How the rate of a stage scales with its batch relative to the first stage's: none, sqrt or linear."""
    max_norm: float | None = None
    accumulate_dtype: AccumulateDtype | None = None
    """Sum gradients over micro batches and ranks in at least this precision: float32 for half-precision parameters."""
    grad_scaler: float | None = None
    """For fp16 autocast in the loss: the initial scale of a GradScaler. A usual one is 65536 / N for a loss that is a sum
    over N tokens: scalers expect a mean. A step that overflows is skipped, and its samples are counted as skipped."""
    stop_after_nonfinite: int = 10
    """Fail after this many steps in a row with a loss that is NaN or infinite; 0: never. With a limit, weights that are not
    finite are not saved after such a step: the newest checkpoint is from before."""
    noise_every: int | None = None
    """Measure the gradient noise scale every N steps."""
    num_workers: int = 0
    loading_hosts: int | tuple[int, ...] | None = None
    """Hosts that read data, and send the other ranks their rows: a count, or the hosts by number. None: every rank reads."""
    ranks_per_host: int | None = None
    """Ranks on one host; by default, ranks with one host name are on one host."""
    read_ahead: int = 1
    """With loading_hosts: steps whose rows are read at once."""
    read_timeout: float = 540.0
    """With loading_hosts: seconds without rows from a host, after which it counts as hanging."""
    open_timeout: float = 1740.0
    """With loading_hosts: seconds for a reading host to open the dataset; the first time may build an index."""
    read_retries: int = 3
    """How often a read that failed is tried again, after 0.5 s, 1 s, 2 s and so on."""
    log_every: int = 1
    """Steps between `step` events."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU: 6 × parameters × tokens per second / (ranks × peak)."""
    tracker: tuple[str, ...] = ()
    """Where rank 0 records the run: tensorboard, wandb, mlflow, trackio. Each needs its package."""
    nodes: int | None = None
    """The number of nodes of this launch, which trackers record."""
    dataset_size: int | None = None
    """The number of samples to train in one epoch, as the schedule assumes: another number is refused."""
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "loading_hosts"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.tracker, (str, list)):
            object.__setattr__(
                self, "tracker", (self.tracker,) if isinstance(self.tracker, str) else tuple(self.tracker)
            )
        found = self._wrong_kinds()
        raise_violations(ConfigError, found)
        if self.strategy not in STRATEGIES:
            message = f"strategy={self.strategy!r} is not known. One of: {', '.join(STRATEGIES)}."
            found.append(Violation(message, "strategy", self.strategy, STRATEGIES))
        if self.pipeline_schedule not in RUN_BY_TORCH:
            message = (
                f"pipeline_schedule={self.pipeline_schedule!r} is not run by torch. One of: {', '.join(RUN_BY_TORCH)}."
            )
            found.append(Violation(message, "pipeline_schedule", self.pipeline_schedule, tuple(RUN_BY_TORCH)))
        if self.pipeline_parallel != 1:
            found += self._not_in_a_pipeline()
        if self.lr_scaling not in RULES:
            message = f"lr_scaling={self.lr_scaling!r} is not known. One of: {', '.join(RULES)}."
            found.append(Violation(message, "lr_scaling", self.lr_scaling, RULES))
        if self.accumulate_dtype not in (None, *ACCUMULATE_DTYPES):
            message = (
                f"accumulate_dtype={self.accumulate_dtype!r} is not known. One of: {', '.join(ACCUMULATE_DTYPES)}."
            )
            found.append(Violation(message, "accumulate_dtype", self.accumulate_dtype, ACCUMULATE_DTYPES))
        for name in self.tracker:
            if name not in TRACKERS:
                message = f"tracker={name!r} is not known. One of: {', '.join(TRACKERS)}."
                found.append(Violation(message, "tracker", name, TRACKERS))
        if self.grad_scaler is not None and not 0 < self.grad_scaler < math.inf:
            message = f"grad_scaler={self.grad_scaler}: must be above 0 and finite. Nearest: 65536."
            found.append(Violation(message, "grad_scaler", self.grad_scaler, (65536.0,)))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                found += _whole(name, value, least, _MOST.get(name))
        sizes = self.micro_batch_size
        for size in sizes if isinstance(sizes, tuple) else (sizes,):
            found += _whole("micro_batch_size", size, 1)
        hosts = self.loading_hosts
        for host in hosts if isinstance(hosts, tuple) else () if hosts is None else (hosts,):
            found += _whole("loading_hosts", host, 0 if isinstance(hosts, tuple) else 1)
        for name in ("read_timeout", "open_timeout"):
            if not 0 < getattr(self, name) <= TIMEOUT_MAX:
                message = f"{name}={getattr(self, name)}: must be above 0 and at most {TIMEOUT_MAX:,.0f}, in seconds."
                found.append(Violation(message, name, getattr(self, name)))
        if self.read_ahead > 1 and hosts is None:
            message = (
                f"read_ahead={self.read_ahead} needs loading_hosts: without it every rank reads for itself. Nearest: 1."
            )
            found.append(Violation(message, "read_ahead", self.read_ahead, (1,)))
        if self.max_tokens is not None and not self.max_tokens > 0:
            message = f"max_tokens={self.max_tokens}: must be above 0; None sets no limit."
            found.append(Violation(message, "max_tokens", self.max_tokens))
        if self.learning_rate is not None and not self.learning_rate.peak_lr < math.inf:
            message = f"learning_rate.peak_lr={self.learning_rate.peak_lr}: must be finite."
            found.append(Violation(message, "learning_rate", self.learning_rate.peak_lr))
        raise_violations(ConfigError, found)

    def _wrong_kinds(self) -> list[Violation]:
        """Values that are of another kind than their field: a file may hold anything."""
        found: list[Violation] = []
        kinds = dict.fromkeys(_NUMBERS, (Real, "a number")) | dict.fromkeys(_SWITCHES, (bool, "true or false"))
        shape = ", ".join(field.name for field in fields(SampleSchedule))
        kinds |= {"device": (str, "text"), "learning_rate": (SampleSchedule, f"a mapping with {shape}")}
        kinds |= {"tracker": (tuple, f"one or several of {', '.join(TRACKERS)}")}
        for name, (kind, what) in kinds.items():
            value = getattr(self, name)
            unset = value is None and name not in (*_SWITCHES, "device", "tracker", "read_timeout", "open_timeout")
            if not unset and (not isinstance(value, kind) or (kind is Real and isinstance(value, bool))):
                found.append(Violation(f"{name}={_shown(value)}: must be {what}.", name, _shown(value)))
        return found

    def _not_in_a_pipeline(self) -> list[Violation]:
        """Settings that a pipeline does not have."""
        found: list[Violation] = []
        for name, why in (
            ("grad_scaler", "the stages would not skip the same steps: train in bf16"),
            ("loading_hosts", "the ranks of the first and the last stage read for themselves"),
        ):
            if getattr(self, name) is not None:
                message = f"{name} cannot be used with pipeline_parallel={self.pipeline_parallel}: {why}."
                found.append(Violation(message, name, str(getattr(self, name))))
        split, sharded = self.pipeline_schedule in SPLIT_BACKWARD, self.strategy == "fsdp2"
        others = [name for name in RUN_BY_TORCH if name not in SPLIT_BACKWARD]
        if split and sharded:
            message = (
                f"strategy=fsdp2 cannot be used with pipeline_schedule={self.pipeline_schedule}: it loses gradients (torch "
                f"2.13). Nearest: strategy=ddp, which sums the gradients in one all-reduce; or pipeline_schedule "
                f"{', '.join(others)}."
            )
            found.append(Violation(message, "strategy", self.strategy, ("ddp",)))
        if self.noise_every is not None and (split or sharded):
            what = f"pipeline_schedule={self.pipeline_schedule}" if split else "strategy=fsdp2"
            message = (
                f"noise_every={self.noise_every} cannot be used with {what} in a pipeline: the gradients of single microbatches "
                "are not seen there. Use strategy=ddp and pipeline_schedule " + ", ".join(others) + "."
            )
            found.append(Violation(message, "noise_every", self.noise_every))
        return found

    @property
    def root(self) -> Path:
        """The run directory."""
        return Path(self.directory)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / names.CHECKPOINTS

    @property
    def ledger(self) -> Path:
        """The folder of ledgers."""
        return self.root / names.LEDGER


def _whole(name: str, value: object, least: int, most: int | None = None) -> list[Violation]:
    """What is wrong with a whole number, if anything."""
    if isinstance(value, bool) or not isinstance(value, int):
        near = (round(value),) if isinstance(value, float) and math.isfinite(value) and value >= least else ()
        hint = f" Nearest: {near[0]}." if near else ""
        return [Violation(f"{name}={value!r}: must be a whole number (int).{hint}", name, value, near)]
    if value < least:
        return [Violation(f"{name}={_brief(value)}: must be at least {least}.", name, _brief(value), (least,))]
    if most is not None and value > most:
        return [Violation(f"{name}={_brief(value)}: must be at most {most}.", name, _brief(value), (most,))]
    return []


def _shown(value: object) -> str:
    return _brief(value) if isinstance(value, int) else repr(value)[:60]


def _brief(value: int) -> str:
    # Python refuses to print numbers of more than 4300 digits.
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"


@dataclass(frozen=True)
class Spec:
    """A training process in one JSON file: `python -m batchwright.runtime.loop SPEC.json`, alone or under torchrun."""

    task: str
    args: Mapping[str, Any]
    schedule: Schedule
    settings: Settings


def read_spec(path: Path | str) -> Spec:
    """Read {"schema": 1, "task": "FILE.py:function", "args": {}, "schedule": {…}, "settings": {…}}.

    `schedule` is `core.codec.encode(schedule)`; `settings` has the fields of `Settings`.
    """
    document = read_json(Path(path))
    if not isinstance(document, dict) or not document.keys() >= {"task", "schedule", "settings"}:
        raise ConfigError(f"{path} is not a spec: it needs task, schedule and settings.", field="spec", given=str(path))
    document = cast(dict[str, Any], document)
    if document.get("schema", SCHEMA) > SCHEMA:
        raise ConfigError(
            f"{path} has schema {document['schema']}; this version reads {SCHEMA}.",
            field="schema",
            given=document["schema"],
        )
    settings = read_settings(document["settings"], f"{path}: settings")
    return Spec(document["task"], document.get("args") or {}, decode(Schedule, document["schedule"]), settings)


def _unknown(given: Mapping[str, Any], record: type, where: str) -> list[Violation]:
    known = [field.name for field in fields(record)]
    found: list[Violation] = []
    for name in map(str, given):
        if name not in known:
            near = tuple(difflib.get_close_matches(name, known))
            hint = f" Nearest: {', '.join(near)}." if near else ""
            found.append(Violation(f"{where} has no field {name!r}.{hint}", name, name, near))
    return found


def read_settings(given: Mapping[str, Any], where: str) -> Settings:
    """`Settings` from raw values; an unknown name is an error that names the nearest fields."""
    shape = given.get("learning_rate")
    found = _unknown(given, Settings, where)
    if isinstance(shape, Mapping):
        found += _unknown(cast("Mapping[str, Any]", shape), SampleSchedule, f"{where}.learning_rate")
    raise_violations(ConfigError, found)
    try:
        return decode(Settings, given)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, BatchwrightError):
            raise
        raise ConfigError(f"{where} cannot be read: {error}.", field="settings") from None
