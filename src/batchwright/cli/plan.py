"""`batchwright plan`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from batchwright.core import codec
from batchwright.core.batch.plan import BatchPlan, plan
from batchwright.core.errors import BatchwrightError, PlanError, Violation, raise_violations
from batchwright.core.numbers import format_bytes, percentage

from . import text
from .config import NOT_READ, Gathered, PasteCommand, gather
from .naming import notes, spell
from .options import (
    batch_options,
    complete,
    inner_options,
    json_option,
    memory_options,
    number,
    print_json,
    read_task,
    read_training,
    schedule_options,
    stack,
    task_arguments,
    task_option,
    training_options,
    world_options,
)
from .parse import read_file

if TYPE_CHECKING:
    from batchwright.api import Plan
    from batchwright.core.batch.nearby import Nearby
    from batchwright.core.batch.request import BatchRequest
    from batchwright.core.nodes.throughput import Throughput

_pipeline_options = stack(
    schedule_options,
    inner_options,
    number("--pipeline-group", "Interleaved schedule: microbatches per group.  [default: the stages]"),
    click.option("--delayed-forwarding", is_flag=True, help="Circular schedule: forward activations one step later."),
)

_loading_options = stack(
    number("--hosts", "Hosts that can read data.  [default: one per node]"),
    number(
        "--expansion-factor",
        "All hosts / reading hosts. Below 1: fewer hosts continue with more stored shards.  [default: 1]",
        "F",
    ),
    number("--loading-hosts", "Hosts that read data.  [default: all]"),
    number("--stored-hosts", "Hosts that stored the position from which this job continues.  [default: --hosts]"),
    click.option("--equal-rows", is_flag=True, help="Require that every reading host fetches the same number of rows."),
    number("--read-ahead", "Steps whose rows are read at once.  [default: 1]"),
)


_model_options = stack(
    number("--model", "Plan for a Hugging Face model: config.json, its folder, or a name of the hub.", "MODEL"),
    number("--task", "Plan for a task, as estimate takes it.", "FILE.py:FUNCTION"),
    memory_options,
    training_options,
    click.option(
        "--checkpoint-activations/--no-checkpoint-activations",
        default=None,
        help="Recompute each layer in the backward pass, or not.  [default: chosen]",
    ),
    click.option(
        "--shard/--no-shard",
        default=None,
        help="Shard over the data-parallel ranks (FSDP2), or not.  [default: chosen]",
    ),
    click.option(
        "--probe", is_flag=True, help="Measure on this machine which micro batch fits, instead of an estimate."
    ),
    task_option,
)


@click.command(
    cls=PasteCommand,
    epilog="\b\nExamples:\n  batchwright plan --global-batch-size 1024 --nodes 16 --devices-per-node 8 \\\n"
    "      --tensor-parallel 2 --max-micro-batch-size 6\n"
    "  batchwright plan --model ./llama-7b --device 4090 --nodes 2 --devices-per-node 4 \\\n"
    "      --global-batch-size 512 --sequence-length 2048 --precision bf16",
)
@click.argument("arguments", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...", shell_complete=complete)
@batch_options
@world_options
@_pipeline_options
@_loading_options
@number(
    "--from-probe", "Output of batchwright probe --json: the largest size that fits, and measured times.", "FILE.json"
)
@number("--samples-per-second", "Measured throughput of the whole job, in samples per second.", "X")
@number("--step-seconds", "Measured time of one optimizer step, in seconds.", "X")
@number("--round", "down | up: round the global batch to the next one that divides.  [default: do not round]", "WAY")
@click.option(
    "--allow-ragged", is_flag=True, help="Accept a batch that does not divide: shares of ranks differ by one sample."
)
@_model_options
@number("--tolerance", "Also list valid batches and node counts within this distance, such as 10%.", "PERCENT")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    arguments: tuple[str, ...],
    from_probe: str | None,
    tolerance: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Work out a batch from the numbers you know.

    global batch = micro batch × accumulation steps × data-parallel size. Give the numbers you have, as flags, as
    KEY=VALUE, in a file, or paste the command line of NeMo, MaxText, Hugging Face or another framework. plan derives the
    others and prints where each number comes from. Numbers can have a suffix: 4M is 4,000,000 and 4Mi is 4,194,304.

    With --model or --task and --device, plan estimates the memory, and also chooses the micro batch, recomputation and
    sharding that fit.
    """
    left_out: tuple[str, ...] = ctx.meta["left_out"]
    memory = {name: flags.pop(name) for name in _MEMORY}
    if named := {name: value for name, value in memory.items() if value != _NOT_GIVEN.get(name)}:
        if not left_out:
            unused = {"from_probe": from_probe, "tolerance": tolerance}
            _planned(gather(arguments, flags, defaults=False), memory, unused, as_json)
            return
        # In a pasted line, --model and --device are the program's.
        left_out += tuple(word for name, value in named.items() for word in _typed(name, value))
    request = gather(arguments, flags, left_out, defaults=from_probe is None).request()
    times = None
    if from_probe:
        request, times = _probed(request, from_probe)
    near = None
    if tolerance is not None:
        from batchwright.core.batch.nearby import nearby

        near = nearby(request, percentage(tolerance))
    try:
        made = plan(request, times)
    except PlanError as error:
        # A key that was ignored may be the number that is missing.
        if unread := [note for note in request.notes if note.startswith(NOT_READ)]:
            error = PlanError(violations=[*error.violations, *(Violation(f"{note}.", "file") for note in unread)])
        if near and not as_json:
            click.echo("\n".join(["valid batches nearby:", *_nearby(near)]))
        if near is not None:
            error.nearby = codec.encode(near)  # type: ignore[attr-defined]
        raise error from None
    if as_json:
        extra = {} if near is None else {"nearby": codec.encode(near)}
        print_json(made.to_json() | extra)
    else:
        click.echo("\n".join(render(made, near)))


def _planned(gathered: Gathered, memory: dict[str, Any], unused: dict[str, Any], as_json: bool) -> None:
    """The plan of a model or a task that fits, as text or JSON."""
    from batchwright.api import plan_in_memory

    from .estimate import show_remedies, show_trace

    wrong = [
        Violation(f"{name} has no effect with model or task: they are estimated or probed.", name, value)
        for name, value in unused.items()
        if value is not None
    ]
    if memory["model"] is None and memory["task"] is None:
        named = [_typed(n, v)[0] for n, v in memory.items() if v != _NOT_GIVEN.get(n)]
        wrong.append(Violation(f"{', '.join(named)}: needs --model or --task.", "model"))
    if memory["probe"]:
        wrong += [
            Violation(f"{name} has no effect with probe: what runs is measured.", name, memory[name])
            for name in ("context", "workspaces", "fragmentation", "shard")
            if memory[name] is not None
        ]
    task, arguments = memory["task"], dict[str, Any]()
    readers = (
        lambda: gathered.request(),
        lambda: read_training(memory, {}),
        lambda: read_task(task, memory["args"]) if task else (None, task_arguments(memory["args"])),
    )
    read: list[Any] = []
    for reader in readers:
        try:
            read.append(reader())
        except PlanError as error:
            wrong += error.violations
    raise_violations(PlanError, wrong)
    request, given, (task, arguments) = read
    given |= {name: memory[name] for name in ("model", "checkpoint_activations", "shard", "probe")}
    if memory["probe"]:
        from batchwright.probe.display import TrialLines

        given["progress"] = TrialLines()
    try:
        made = plan_in_memory(request, task=task, args=arguments, **{"progress": True, **given})
    except BatchwrightError as error:
        show_trace(error)
        show_remedies(error, as_json)
        raise
    if as_json:
        print_json(made.to_json())
    else:
        lines = [
            *render(made),
            *_memory(made),
            *_beside(memory["precision"], given.get("lora", 0), made.tensor_parallel),
        ]
        if made.memory is not None:
            lines += ["", "assumptions:", *text.bullets(spell(line) for line in made.memory.assumptions)]
        click.echo("\n".join(lines))


def _beside(precision: str | None, lora: int, tensor_parallel: int) -> list[str]:
    """What TrainingArguments do not contain."""
    lines: list[str] = []
    if precision and precision.endswith("-pure"):
        kind = {"bf16": "bfloat16", "fp16": "float16"}[precision.partition("-")[0]]
        lines.append(f'  and load the model in {kind}: from_pretrained(..., dtype="{kind}")')
    if lora:
        lines.append(f'  and train adapters: peft.LoraConfig(r={lora}, target_modules="all-linear")')
    if tensor_parallel > 1:
        size = tensor_parallel
        lines.append(f"  and split each layer over {size} devices: ParallelismConfig(tp_size={size})")
    return lines


def _memory(made: Plan) -> list[str]:
    """What a planned model needs, the ways to train it, and what to write into the framework's configuration."""
    lines: list[str] = []
    if placed := made.memory:
        from .estimate import where

        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in placed.breakdown.items() if size)
        lines += [
            "",
            f"memory, {placed.source}: {format_bytes(placed.peak_memory_bytes)} of {where(placed)}",
            *text.bullets([parts]),
            "",
            "ways to train, best first:",
            *text.table(
                [
                    (
                        "yes" if c.checkpoint_activations else "no",
                        f"FSDP2 over {made.data_parallel_size}" if c.sharded else "no",
                        c.micro_batch_size or "-",
                        c.accumulation_steps or "-",
                        format_bytes(c.peak_memory_bytes),
                        f"{c.relative_time:.2f}" if c.relative_time else "does not fit",
                        c.source,
                    )
                    for c in placed.candidates
                ],
                head=("recomputed", "sharded", "micro", "accumulation", "peak", "relative time", ""),
                right=range(2, 6),
            ),
        ]
    lines += ["", "Hugging Face TrainingArguments:"]
    lines += [f"  {name}={value!r}," for name, value in made.settings.items()]
    return lines


_MEMORY = (
    "model", "task", "args", "device", "memory", "margin", "context", "workspaces", "fragmentation", "precision",
    "optimizer", "lora", "checkpoint_activations", "shard", "probe",
)  # fmt: skip
_NOT_GIVEN: dict[str, Any] = {"args": (), "probe": False}


def _typed(name: str, value: Any) -> tuple[str, ...]:
    """The flag of a value, as it was typed.

    >>> _typed("shard", False), _typed("device", "h100")
    (('--no-shard',), ('--device', 'h100'))
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return (f"--{flag}", str(value))


def _probed(request: BatchRequest, path: str) -> tuple[BatchRequest, Throughput | None]:
    """The request within what a probe measured, and the measured times."""
    from batchwright.core.batch.request import within_probe
    from batchwright.core.nodes.throughput import Throughput

    record = read_file(path)
    times = None if record.get("kind") == "pipeline" else Throughput.from_probe(record)
    return within_probe(request, record, path), times


def render(made: BatchPlan, near: tuple[Nearby, ...] | None = None) -> list[str]:
    """A plan as text: the equation, the numbers with their sources, alternatives and notes."""
    sign = "≤" if made.ragged else "="
    lines = [
        f"{made.global_batch_size} {sign} {made.micro_batch_size} micro × {made.accumulation_steps} accumulation × "
        f"{made.data_parallel_size} data-parallel" + ("   (ragged)" if made.ragged else ""),
        "",
    ]
    lines += _numbers(made, made, [name for name in made.sources if hasattr(made, name)])
    if made.pipeline:
        p = made.pipeline
        lines += ["", f"pipeline: {p.schedule}, {p.stages} stages", *_numbers(made, p, _PIPELINE)]
    load = made.loading
    if load.hosts > 1 or load.expansion_factor != 1 or load.read_ahead > 1:
        more = ["read_amplification"] * (load.read_amplification != 1 or load.loading_hosts < load.hosts)
        lines += ["", "loading:", *_numbers(made, load, [*_LOADING, *more])]
        if load.stored_shards:
            lines.append(f"  host h continues with stored shards h, h + {load.hosts}, … of {load.stored_shards}")
    if made.alternatives:
        lines += ["", "alternatives, best first:", *_alternatives(made)]
    if near is not None:
        lines += ["", "valid batches nearby:", *_nearby(near)]
    return lines + notes(made.notes)


_ALWAYS = {
    "global_batch_size",
    "micro_batch_size",
    "accumulation_steps",
    "data_parallel_size",
    "devices",
    "nodes",
    "hosts",
    "loading_hosts",
}
_PIPELINE = ("virtual_stages", "pipeline_microbatches", "bubble_fraction", "recommended_microbatches")
_LOADING = ("hosts", "loading_hosts", "expansion_factor", "read_ahead", "load_batch_size", "rows_per_loading_host")
_FEW = 6
_ROWS = 12


def _alternatives(made: BatchPlan) -> list[str]:
    timed = made.alternatives[0].step_seconds is not None
    rows = [
        (
            a.micro_batch_size,
            a.accumulation_steps,
            a.data_parallel_size,
            *([_value(a.step_seconds)] if timed else []),
            a.reason,
        )
        for a in made.alternatives[:_FEW]
    ]
    head = ("micro", "accumulation", "data-parallel", *(["s/step"] if timed else []), "")
    lines = text.table(rows, head=head, right=range(len(head) - 1))
    more = len(made.alternatives) - _FEW
    return lines + ([f"  … and {more} more: --json lists them"] if more > 0 else [])


def _numbers(made: BatchPlan, part: object, names: Iterable[str]) -> list[str]:
    """Numbers of a part of a plan with their sources. Most defaults are left out."""
    return text.table(
        [
            (name, _value(getattr(part, name), name), made.sources[name], made.reasons.get(name, ""))
            for name in names
            if name in made.sources and (made.sources[name] != "default" or name in _ALWAYS)
        ],
        right=[1],
    )


def _value(value: object, name: str = "") -> str:
    # Shares that differ by one.
    if isinstance(value, tuple):
        return f"{value[0]} or {value[-1]}"
    if name.endswith("_fraction"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _nearby(rows: tuple[Nearby, ...]) -> list[str]:
    if not rows:
        return ["  nothing within the tolerance"]
    lines = text.table(
        [
            (
                n.global_batch_size,
                "" if n.nodes is None else n.nodes,
                n.data_parallel_size,
                "" if n.accumulation_steps is None else n.accumulation_steps,
                f"{n.batch_change:+.1%}",
                f"{n.ranks_change:+.1%}",
            )
            for n in rows[:_ROWS]
        ],
        head=("global", "nodes", "data-parallel", "accumulation", "batch", "ranks"),
        right=range(6),
        drop=("ranks", "accumulation", "batch"),
    )
    return lines + ([f"  … and {len(rows) - _ROWS} more: --json lists them"] if len(rows) > _ROWS else [])
