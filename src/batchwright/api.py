"""The verbs as Python functions: the command line with values instead of flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

from . import dialects
from .core.batch.nearby import Nearby
from .core.batch.nearby import nearby as _nearby
from .core.batch.plan import BatchPlan
from .core.batch.plan import plan as _plan
from .core.batch.request import READERS, BatchRequest, read_request
from .core.errors import ConfigError, NothingFitsError, PlanError, Violation, raise_violations
from .core.numbers import percentage
from .report.notebook import Shown

if TYPE_CHECKING:
    from os import PathLike

    from .dialects.checking import Report as ConfigReport
    from .dialects.converting import Conversion
    from .dialects.record import Reading
    from .launch.status import RunStatus
    from .ramps import Ramp
    from .report.write import Report


@dataclass(frozen=True)
class Plan(BatchPlan, Shown):
    """A plan with `apply`, which writes it into a NeMo recipe, and `chart`.

    With a model or a task: `memory` is how it is trained and what it needs, `settings` are those of Hugging Face's
    TrainingArguments.
    """

    kind = "plan"
    memory: Any = None  # an estimate.Placement, or None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """The plan as `--json` prints it; `memory` and `settings` only for a model or a task."""
        document = super().to_json()
        return document if self.settings else {k: v for k, v in document.items() if k not in ("memory", "settings")}

    def apply(self, recipe: object) -> dict[str, Any]:
        """Set the plan's numbers on an object with NeMo's attributes; returns what was set, by dotted name."""
        from .dialects import nemo

        return nemo.write_recipe(self, recipe)


def _resolve(
    source: object, given: Mapping[str, Any], own: Collection[str], *, defaults: bool = True
) -> dialects.Resolved:
    """Fields from a mapping with keys in any spelling or a NeMo recipe, and from keywords, which take precedence."""
    entries: list[tuple[str, dialects.Given]] = []
    lenient = False
    if source is not None:
        if isinstance(source, Mapping):
            keys = dialects.flatten(cast("Mapping[Any, Any]", source))
        else:
            from .dialects import nemo

            keys, lenient = nemo.read_recipe(source), True
        entries += [(key, dialects.Given(value, key, 0)) for key, value in keys.items()]
    entries += [(key, dialects.Given(value, "", 1)) for key, value in given.items() if value is not None]
    return dialects.resolve(entries, own=own, lenient=lenient, defaults=defaults)


def _request(resolved: dialects.Resolved) -> BatchRequest:
    fields = {name: given for name, given in resolved.fields.items() if name in READERS}
    return read_request(
        {name: given.value for name, given in fields.items()},
        origins={name: given.origin for name, given in fields.items() if given.origin},
        notes=resolved.notes,
    )


# What `plan` takes for a model or a task besides the batch and its devices.
MEMORY = (
    "task", "model", "args", "device", "memory_bytes", "margin_bytes", "context_bytes", "workspace_bytes",
    "fragmentation_percent", "precision", "optimizer", "lora", "checkpoint_activations", "shard", "probe", "timeout",
    "progress",
)  # fmt: skip


def plan(source: object = None, /, **given: Any) -> Plan:
    """Plan a batch: give the known numbers, get all. The names are those of `batchwright plan`'s flags.

    With `model` (a Hugging Face configuration) or `task` (`FILE.py:function`), and `device` or `memory_bytes`, the micro
    batch is one that fits by an estimate, or with `probe=True` one that ran.

    >>> p = plan(global_batch_size=1024, nodes=16, devices_per_node=8, tensor_parallel=2, max_micro_batch_size=6)
    >>> p.micro_batch_size, p.accumulation_steps, p.data_parallel_size
    (4, 4, 64)
    """
    memory = {name: given.pop(name) for name in MEMORY if name in given}
    request = _request(_resolve(source, given, READERS, defaults=not memory))
    return plan_in_memory(request, **memory) if memory else _as_plan(_plan(request))


def plan_in_memory(request: BatchRequest, **memory: Any) -> Plan:
    """The plan of a model or a task whose micro batch fits: estimated, or measured with `probe`."""
    from .dialects.huggingface import training_arguments

    if memory.pop("probe", False):
        return _probed(request, **memory)
    from .estimate.plan import plan_memory

    made, placed = plan_memory(request, **memory)
    settings = training_arguments(
        made.micro_batch_size,
        made.accumulation_steps,
        precision=placed.precision,
        optimizer=placed.optimizer,
        checkpoint_activations=placed.checkpoint_activations,
        sharded=placed.sharded,
    )
    return replace(_as_plan(made), memory=placed, settings=settings)


def _probed(
    request: BatchRequest,
    *,
    task: str | None = None,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    device: Any = None,
    memory_bytes: int | None = None,
    margin_bytes: int = 0,
    precision: str | None = None,
    optimizer: str | None = None,
    lora: int = 0,
    checkpoint_activations: bool | None = None,
    **others: Any,
) -> Plan:
    """The same with sizes that ran on this machine: one process, within the memory of the device that is named."""
    from .core.batch.request import within_probe
    from .core.nodes.throughput import Throughput
    from .dialects.huggingface import training_arguments
    from .estimate.estimate import find_room
    from .estimate.model import find_config
    from .estimate.plan import described, on_devices, probe_target
    from .probe.prober import probe

    room, wrong = find_room(device, memory_bytes, margin_bytes, None, None, None)
    progress, timeout = others.pop("progress", None), others.pop("timeout", None)
    wrong += [
        Violation(f"{name} has no effect with probe: what runs is measured.", name, value)
        for name, value in others.items()
        if value is not None
    ]
    if task is not None:
        own = {"precision": precision, "checkpoint_activations": checkpoint_activations}
        wrong += [
            Violation(f"{name} cannot be set with probe: the task runs as it is.", name, value)
            for name, value in own.items()
            if value is not None
        ]
    if request.tensor_parallel > 1:
        message = f"tensor_parallel={request.tensor_parallel} cannot be probed: a probe runs one device."
        wrong.append(Violation(message, "tensor_parallel", request.tensor_parallel, (1,)))
    base, more = described(request, task, model, args, precision or "fp32", optimizer, lora, room, False)
    request, invalid = on_devices(request)
    raise_violations(PlanError, [*wrong, *more, *invalid])
    if model is not None:
        base = replace(base, model=find_config(model, lora))
    target, arguments = probe_target(base, bool(checkpoint_activations))
    sizes = [size for size in (request.max_micro_batch_size, request.micro_batch_size) if size is not None]
    measured = probe(
        target,
        args=arguments,
        max=min(sizes, default=None),
        **{name: value for name, value in {"progress": progress, "timeout": timeout}.items() if value is not None},
        **({} if room.memory_bytes is None else {"memory": room.memory_bytes, "margin": margin_bytes or None}),
    )
    recommended, most = measured.recommended_micro_batch_size, measured.max_micro_batch_size
    if recommended is None:
        raise NothingFitsError(
            f"no size can be planned: micro_batch_size {most} is the largest that ran, and the probe recommends none. "
            + " ".join(measured.notes),
            field="max_micro_batch_size",
        )
    record, remarks = measured.to_json(), list(measured.notes)
    if request.micro_batch_size is None:  # one that is given may be any that ran
        record["max_micro_batch_size"] = recommended
        if recommended < most:
            remarks.append(f"The probe recommends micro_batch_size {recommended}, and {most} is the largest that ran.")
    # Sizes up to what the probe allows, also where the request allows larger ones.
    within = within_probe(replace(request, max_micro_batch_size=None), record)
    if within.max_micro_batch_size == request.max_micro_batch_size:
        within = replace(within, origins=request.origins)
    made = _plan(within, Throughput.from_probe(record))
    if made.micro_batch_size not in {trial.micro_batch_size for trial in measured.trials if trial.fits}:
        remarks.append(
            f"micro_batch_size {made.micro_batch_size} did not run itself: a larger one did, and its time is between "
            "measured ones."
        )
    made = replace(made, notes=(*made.notes, *remarks))
    if made.data_parallel_size > 1:
        ddp = (
            f"The probe ran one process without DDP. On {made.data_parallel_size} ranks, DDP's buckets need as much memory "
            "again as the gradients (gradient_as_bucket_view=False)."
        )
        made = replace(made, notes=(*made.notes, ddp))
    settings = training_arguments(
        made.micro_batch_size,
        made.accumulation_steps,
        precision=base.precision,
        optimizer=base.optimizer if model else None,
        checkpoint_activations=bool(checkpoint_activations),
    )
    if model is None:  # the task decides
        del settings["gradient_checkpointing"]
    return replace(_as_plan(made), settings=settings)


def _as_plan(made: BatchPlan) -> Plan:
    return Plan(**{name: getattr(made, name) for name in made.__dataclass_fields__})


def nearby(source: object = None, /, *, tolerance: str | float, **given: Any) -> tuple[Nearby, ...]:
    """Valid batches and rank counts close to a request, closest first.

    >>> nearby(global_batch_size=1000, micro_batch_size=3, data_parallel_size=64, tolerance="5%")[0].global_batch_size
    960
    """
    return _nearby(_request(_resolve(source, given, READERS)), percentage(tolerance))


def ramp(source: object = None, /, **given: Any) -> Ramp:
    """A batch that grows: every stage with its nodes, cost and learning rate. Names as in `batchwright ramp`'s flags.

    >>> r = ramp(linear=(256, 128, "50M"), global_batch_size=1024)
    >>> r.at_sample(30_000_000).global_batch_size
    640
    """
    from .core.ramp.ramp import ramp as make
    from .core.ramp.request import RAMP_READERS, read_ramp
    from .ramps import Ramp

    resolved = _resolve(source, given, [*READERS, *RAMP_READERS])
    wanted = read_ramp({name: g.value for name, g in resolved.fields.items() if name in RAMP_READERS})
    made = make(_request(resolved), wanted)
    return Ramp(**{name: getattr(made, name) for name in made.__dataclass_fields__})


def check_config(
    source: Mapping[str, Any],
    /,
    *,
    framework: str | None = None,
    against: Mapping[str, Any] | None = None,
    **devices: Any,
) -> ConfigReport:
    """What is wrong with a configuration of another framework: `batchwright check CONFIG` with a mapping of its keys.

    `framework` is `NAME` or `NAME@VERSION`, by default the one that the keys belong to; `devices` are devices, nodes,
    devices_per_node and sequence_length, where the configuration does not have them.

    >>> check_config({"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4}, devices=8).ok
    False
    """
    from .dialects.checking import check

    earlier = None if against is None else _configuration(against, framework, devices)
    return check(_configuration(source, framework, devices), earlier)


def convert(source: Mapping[str, Any], /, to: str, *, framework: str | None = None, **devices: Any) -> Conversion:
    """The batch of a configuration in the keys of another framework; the arguments are those of `check_config`.

    >>> made = convert({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, "nemo", devices=16)
    >>> made.status, made.keys["data.global_batch_size"]
    ('exact', 512)
    """
    from .dialects.converting import convert as make
    from .dialects.reading import named

    return make(_configuration(source, framework, devices), *named(to))


def _configuration(source: Mapping[str, Any], framework: str | None, devices: Mapping[str, Any]) -> Reading:
    from .core.fields import unknown_key
    from .dialects.reading import read

    known = ("devices", "nodes", "devices_per_node", "sequence_length")
    raise_violations(ConfigError, [unknown_key(n, v, known) for n, v in devices.items() if n not in known])
    keys = dialects.flatten(cast("Mapping[Any, Any]", source))
    entries = [(key, dialects.Given(value, key, 0)) for key, value in keys.items() if value is not None]
    return read(entries, name=framework, world={name: dialects.Given(v, name, 2) for name, v in devices.items()})


def run(
    target: str | Sequence[str] | None = None,
    /,
    *,
    arguments: Mapping[str, Any] | None = None,
    dir: str | None = None,
    resume: str | None = None,
    progress: bool = True,
    **given: Any,
) -> RunStatus:
    """Train a whole ramp, launch by launch, and restart after failures. Names are those of `batchwright run`'s flags.

    `target` is `FILE.py:function`, with `arguments` for the function, or a command as a list. With `resume`, a run
    directory, the rest changes its launch settings and, from its position on, its batch, world and ramp. Returns the state
    at the end, also of a run that failed or was stopped.
    """
    from .core.ramp.request import RAMP_READERS, read_ramp
    from .launch import plan as planning
    from .launch.directory import RunDirectory
    from .launch.resume import resume as resumed
    from .launch.settings import READERS as OPTIONS
    from .launch.settings import read_options
    from .launch.show import LineDisplay, display
    from .launch.status import status
    from .launch.supervisor import supervise

    options = {name: given.pop(name) for name in list(given) if name in OPTIONS}
    resolved = _resolve(None, given, [*READERS, *RAMP_READERS])
    request = _request(resolved)
    ramp_values = {name: g.value for name, g in resolved.fields.items() if name in RAMP_READERS}
    if resume is not None:
        directory = RunDirectory(resume)
        fixed = {"target": target, "arguments": arguments, "dir": dir, "seed": options.get("seed")}
        if named := [name for name, value in fixed.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(named)} cannot be changed with resume. The batch, the world, the ramp and launch settings can.",
                field="resume",
                given=resume,
            )
        made = resumed(directory, options, request, ramp_values)
    else:
        command = () if target is None or isinstance(target, str) else tuple(target)
        made, _ = planning.build(
            request,
            read_ramp(ramp_values),
            read_options(options, command=bool(command)),
            target=None if command or target is None else str(target),
            arguments=arguments,
            command=command,
        )
        directory = RunDirectory(dir) if dir else planning.default_directory(made)
        planning.begin(directory, made)
    shown = display() if progress else LineDisplay(StringIO())
    try:
        supervise(directory, made, shown)
    finally:
        shown.close()
        directory.unlock()
    return status(directory, made)


def report(
    *sources: str | PathLike[str] | Shown,
    output: str | PathLike[str] | None = None,
    png: str | PathLike[str] | None = None,
    svg: str | PathLike[str] | None = None,
    markdown: str | PathLike[str] | None = None,
    theme: str = "auto",
) -> Report:
    """Write a report of runs, plans, ramps, probes and estimates: results, run directories, or files of `--json`.

    `output` is an HTML file (`report.html` if nothing else is asked for), `png` and `svg` are directories, `markdown` is a
    file or `-`, which only returns the text.
    """
    from .inputs import read_inputs
    from .report.write import write

    inputs = [(one.kind, one.document, one.source) for one in read_inputs(sources)]
    if output is png is svg is markdown is None:
        output = "report.html"
    return write(inputs, output=output, png_dir=png, svg_dir=svg, markdown=markdown, theme=theme)
