"""`batchwright check`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from batchwright.core.batch.pipeline import RUN_BY_TORCH, PipelineRule
from batchwright.core.batch.plan import pipeline_rule
from batchwright.core.batch.request import read_request, unused_pipeline
from batchwright.core.codec import SCHEMA, encode
from batchwright.core.errors import ConfigError, MissingExtraError, PlanError, RunError, Violation, raise_violations
from batchwright.core.numbers import count
from batchwright.runtime.check.names import unknown_causes

from . import text
from .config import PasteCommand
from .naming import notes
from .options import (
    CONFIGURATION_FLAGS,
    DEVICES,
    FILES,
    FRAMEWORK,
    complete,
    counts,
    devices_options,
    json_option,
    number,
    print_json,
    read_task,
    schedule_options,
    task_option,
)

if TYPE_CHECKING:
    from batchwright.dialects.checking import Report
    from batchwright.runtime.check import CheckReport

_DTYPES = ("float32", "float64")


class CheckCommand(PasteCommand):
    """A verb that reads a pasted command line whole."""

    kind = None
    inside = CONFIGURATION_FLAGS


@click.command(
    cls=CheckCommand,
    epilog="\b\nExamples:\n  batchwright check train.py:task --global-batch-size 32 --micro-batch-size 1,3,16 --ranks 2\n"
    '  batchwright check train.py:task --ramp "0:256 10M:512 50M:1024"\n'
    "  batchwright check --ledger runs/7b\n"
    "  batchwright check ds_config.json --devices 16\n"
    "  batchwright check sft.yaml --from trl --against sft.old.yaml --devices 8",
)
@click.argument("arguments", nargs=-1, metavar="[FILE.py:FUNCTION | CONFIG [KEY=VALUE]...]", shell_complete=complete)
@task_option
@number("--global-batch-size", "Samples in the batch that is split.  [default: 16]")
@number(
    "--micro-batch-size",
    "Micro batches to split it into, in samples.  [default: 1, one that does not divide, half, all]",
    "N,N,...",
)
@number("--ranks", "Also split over this many processes (DDP over gloo).  [default: 1]")
@number("--pipeline-parallel", "Also split the model over this many processes, times --ranks.  [default: 1]")
@schedule_options
@number("--seed", "Seed of the model, the sample order and dropout.  [default: 0]")
@number(
    "--accumulate-dtype",
    f"{' | '.join(_DTYPES)}: accumulate gradients in this type.  [default: the parameters' type]",
    "NAME",
)
@number(
    "--ramp", 'The batch grows: from sample AT on, SIZE samples per step, such as "0:256 10M:512".', '"AT:SIZE ..."'
)
@number("--lr-horizon-steps", "Optimizer steps after which the learning-rate schedule ends.")
@number("--samples", "Training budget in samples, to compare with --lr-horizon-steps.")
@click.option(
    "--allow", multiple=True, metavar="CAUSE", help="Report this cause as a note, not as an error; repeatable."
)
@number("--from", "A configuration: the framework that it is for, and its version.  [default: detected]", FRAMEWORK)
@devices_options
@number("--against", "A configuration: an earlier one, to find what did not change with the batch.", "CONFIG")
@click.option("--each", is_flag=True, help="Several configurations: check each by itself, as a pre-commit hook does.")
@click.option("--ledger", metavar="DIR", help="Audit the ledger of a run instead: is every sample in exactly one step?")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    arguments: tuple[str, ...],
    args: tuple[str, ...],
    allow: tuple[str, ...],
    each: bool,
    ledger: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Check a task or a configuration: does a split change the gradient, and is the batch what you think it is?

    FILE.py:FUNCTION: runs one global batch in one piece and in several splits, compares the gradients that reach the
    optimizer, and names the cause of every difference: a mean of means, a loss scaled by accumulation, BatchNorm,
    precision, and others.

    CONFIG, a configuration of another framework (a file, KEY=VALUE, or its pasted command line): says what the batch is,
    which rules of the framework it breaks, which keys this version ignores, and what depends on the batch.

    Exits with 5 if something is wrong.
    """
    left_out: tuple[str, ...] = ctx.meta["left_out"]
    if ledger is None and _is_configuration(arguments, left_out, each):
        each = each and not left_out
        files = [(one,) for one in arguments] if each else [arguments]
        ctx.exit(_configurations(files, left_out, allow, flags, args, as_json=as_json, each=each))
    unused = [f"--{name.replace('_', '-')}" for name in (*DEVICES, "from", "against") if flags.get(name) is not None]
    unused += ["--each"] * each
    if unused:
        message = f"{', '.join(unused)}: only for a configuration."
        if not arguments:
            message += (
                " To check the flags of another program, put the program in front: check python pretrain_gpt.py --…"
            )
        raise ConfigError(message, field=unused[0].lstrip("-"))
    if len(arguments) > 1:
        raise ConfigError(f"check takes one task, and {arguments[1][:60]!r} is another argument.", field="task")
    target = arguments[0] if arguments else None
    if (target is None) == (ledger is None):
        raise ConfigError(
            "check needs either FILE.py:function (a task), a configuration, or --ledger DIR (a run); "
            f"{'both are given' if target else 'neither is given'}.",
            field="task",
            given=target,
        )
    if ledger is not None:
        ctx.exit(_audit(ledger, as_json))
    report = _check(str(target), args, allow, flags)
    if as_json:
        print_json(report.to_json())
    else:
        click.echo("\n".join(render(report)))
    ctx.exit(0 if report.ok else RunError.exit_code)


def _is_configuration(arguments: tuple[str, ...], left_out: tuple[str, ...], each: bool) -> bool:
    """Whether a configuration is given, and not a task or a project file with a task."""
    if left_out or any("=" in one and not os.path.exists(one) for one in arguments):
        return True
    if not arguments or arguments[0].endswith(".py") or ".py:" in arguments[0]:
        return False
    if each or not os.path.isfile(arguments[0]):
        return each
    if not arguments[0].endswith(FILES):
        return True
    from .files import read_keys
    from .parse import read_text

    text = read_text(arguments[0])  # parsed once, unless it may be a project file
    return not ("task" in text and "target" in text) or "task.target" not in read_keys(arguments[0])


def _configurations(
    files: list[tuple[str, ...]],
    left_out: tuple[str, ...],
    allow: tuple[str, ...],
    flags: dict[str, Any],
    args: tuple[str, ...],
    *,
    as_json: bool,
    each: bool,
) -> int:
    """Check the configuration of one job, in one file or several, or with `each` of several jobs."""
    from batchwright.dialects.checking import CAUSES, check
    from batchwright.dialects.reading import named

    from .frameworks import read_configuration, world_of
    from .frameworks import render as lines_of

    others = {n: v for n, v in flags.items() if n not in (*DEVICES, "from", "against")} | {"arg": args or None}
    unused = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    wrong = [Violation(f"{name}: only for a task, not for a configuration.", name[2:]) for name in unused]
    wrong += unknown_causes(allow, CAUSES)
    raise_violations(ConfigError, wrong)
    world_of(flags)  # a wrong flag is not the fault of a file
    if flags["from"] is not None:
        named(flags["from"])
    reports: dict[str, Report] = {}
    unknown: list[str] = []
    unreadable: dict[str, str] = {}
    for file in files:
        try:
            reading = read_configuration(file, left_out, flags, flags["from"])
        except ConfigError as wrong_file:
            if not each:
                raise
            if wrong_file.field == "from":
                unknown.append(" ".join(file))
            else:
                unreadable[" ".join(file)] = str(wrong_file)
            continue
        earlier = None
        if flags["against"] is not None:
            earlier = read_configuration((flags["against"],), (), flags, flags["from"] or reading.dialect.name)
        reports[" ".join(file)] = check(reading, earlier, allow)
    ok = not unreadable and all(report.ok for report in reports.values())
    if as_json and not each:
        print_json({"schema": SCHEMA, **next(iter(reports.values())).to_json()})
    elif as_json:
        found = [{"file": name, **report.to_json()} for name, report in reports.items()]
        lost = [{"file": name, "message": message} for name, message in unreadable.items()]
        print_json({"schema": SCHEMA, "ok": ok, "configurations": found, "no_framework": unknown, "unreadable": lost})
    else:
        parts = [[f"{name}:", *lines_of(report)] if each else lines_of(report) for name, report in reports.items()]
        parts += [[f"{name}: no framework that batchwright knows; not checked"] for name in unknown]
        parts += [[f"{name}: not ok: it cannot be read", *text.bullets([said])] for name, said in unreadable.items()]
        click.echo("\n\n".join("\n".join(part) for part in parts))
    return 0 if ok else RunError.exit_code


def _check(target: str, args: tuple[str, ...], allow: tuple[str, ...], flags: dict[str, Any]) -> CheckReport:
    from batchwright.core.ramp.rules import parse_thresholds

    numbers = {name: None if flags[name] is None else count(flags[name], name) for name in _COUNTS}
    seed = 0 if flags["seed"] is None else count(flags["seed"], "seed", least=0, most=2**32 - 1)
    sizes = counts(flags["micro_batch_size"], "micro_batch_size")
    ramp = None if flags["ramp"] is None else parse_thresholds(flags["ramp"]).compile()
    (target, arguments), kind = read_task(target, args), flags["accumulate_dtype"]
    if kind not in (None, *_DTYPES):
        raise ConfigError(
            f"accumulate_dtype={kind!r} is not one of {', '.join(_DTYPES)}.", field="accumulate_dtype", given=kind
        )
    pipeline = _pipeline(flags, numbers["pipeline_parallel"] or 1)
    # Checked before torch is imported, which takes seconds.
    raise_violations(PlanError, unknown_causes(allow))
    shared = {
        "global_batch_size": numbers["global_batch_size"],
        "micro_batch_sizes": sizes or None,
        "ranks": numbers["ranks"] or 1,
        "seed": seed,
        "ramp": ramp,
        "lr_horizon_steps": numbers["lr_horizon_steps"],
        "budget_samples": numbers["samples"],
        "allow": allow,
        "progress": lambda line: click.echo(f"check: {line}", err=True),
    }
    from batchwright.processes.target import is_jax_task

    with _users_traceback():
        if is_jax_task(target):
            if kind is not None:
                raise ConfigError(
                    f"accumulate_dtype={kind}: gradients of a JaxTask are always summed in fp32 or wider.",
                    field="accumulate_dtype",
                    given=kind,
                )
            if pipeline is not None:
                raise ConfigError(
                    f"pipeline_parallel={numbers['pipeline_parallel']}: stages of a JaxTask are not compared.",
                    field="pipeline_parallel",
                    given=numbers["pipeline_parallel"],
                )
            return _check_jax(target, arguments, shared)
        return _check_torch(target, arguments, kind, shared | {"pipeline": pipeline})


def _check_jax(target: str, arguments: dict[str, Any], shared: dict[str, Any]) -> CheckReport:
    with _needed("jax", ("jax", "jaxlib", "numpy", "optax", "orbax")):
        import jax

        from batchwright.jax import check, load_task
    jax.config.update("jax_num_cpu_devices", shared["ranks"])  # before the user's file uses a device
    return check(load_task(target, arguments), **shared)


def _check_torch(target: str, arguments: dict[str, Any], kind: str | None, shared: dict[str, Any]) -> CheckReport:
    with _needed("torch", ("torch", "numpy")):
        import torch

        from batchwright.runtime.check import check
        from batchwright.runtime.state.generators import set_seeds
        from batchwright.runtime.task import load_task
    # The function may draw random numbers (a model, a synthetic dataset): the same ones in every process.
    set_seeds(shared["seed"])
    dtype = getattr(torch, kind) if kind else None
    return check(load_task(target, arguments), source=(target, arguments), accumulate_dtype=dtype, **shared)


@contextmanager
def _users_traceback() -> Iterator[None]:
    try:
        yield
    except RunError as error:
        if error.__cause__ is not None:
            import traceback

            click.echo("".join(traceback.format_exception(error.__cause__)), err=True, nl=False)
        raise


_COUNTS = ("global_batch_size", "ranks", "lr_horizon_steps", "samples", "pipeline_parallel", "virtual_stages")


def _pipeline(flags: dict[str, Any], stages: int) -> PipelineRule | None:
    """The pipeline that is compared with the whole model, by the rules of torch, which runs it."""
    given = {name: flags[name] for name in ("pipeline_schedule", "virtual_stages") if flags[name] is not None}
    request = read_request({"pipeline_parallel": stages, **given})
    raise_violations(PlanError, unused_pipeline(request))
    rule = pipeline_rule(request)
    if rule is None:
        return None
    if rule.schedule not in RUN_BY_TORCH:
        raise PlanError(
            f"pipeline_schedule={rule.schedule} is not run by torch. Nearest: {', '.join(RUN_BY_TORCH)}.",
            field="pipeline_schedule",
            given=rule.schedule,
            nearest=tuple(RUN_BY_TORCH),
        )
    return replace(rule, schedule=RUN_BY_TORCH[rule.schedule])


@contextmanager
def _needed(extra: str, packages: tuple[str, ...]) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        message = f"check needs {error.name}, which is not installed. Install it: pip install 'batchwright[{extra}]'."
        raise MissingExtraError(message, field="extra", given=error.name, nearest=(f"batchwright[{extra}]",)) from None


def _audit(directory: str, as_json: bool) -> int:
    # Checked before torch is imported, which takes seconds.
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory} is not a directory.", field="ledger", given=directory)
    with _needed("torch", ("torch", "numpy")):
        from batchwright.runtime.state.audit import audit

    made = audit(directory)
    if as_json:
        print_json({"schema": SCHEMA, **encode(made)})
    else:
        shown = ["samples", "gaps", "repeats", "discarded_samples", *["skipped_samples"] * (made.skipped_samples > 0)]
        if made.updates:
            shown += ["updates", "responses", "dropped_responses", "discarded_responses", "policy_lag"]
        lines = [
            "ok" if made.ok else "not ok",
            "",
            *text.table([(n, f"{getattr(made, n):,}") for n in shown], right=[1]),
        ]
        found = [f"{f.cause}: {f.message}" for f in made.findings]
        lines += ["", "findings:", *text.bullets(found)] if found else []
        click.echo("\n".join([*lines, *notes(made.notes)]))
    return 0 if made.ok else RunError.exit_code


def render(report: CheckReport) -> list[str]:
    """A report as text: the verdict, the splits with their errors, and the findings."""
    errors = sum(f.severity == "error" for f in report.findings)
    verdict = (
        "ok: the split does not change the gradient" if report.ok else f"not ok: {errors} error{'s' * (errors > 1)}"
    )
    piped = any(s.pipeline_parallel > 1 for s in report.splits)
    lines = [f"{verdict} ({report.global_batch_size} samples)", ""]
    lines += text.table(
        [
            (
                s.micro_batch_size,
                s.accumulation_steps,
                s.ranks,
                *([s.pipeline_parallel] if piped else []),
                _error(s.relative_error),
                _groups(s.groups),
            )
            for s in report.splits
        ],
        head=("micro", "accumulation", "ranks", *(["pipeline"] if piped else []), "relative error", "most of it in"),
        right=range(4 + piped),
    )
    for finding in report.findings:
        lines += ["", f"{finding.severity}: {finding.cause}", *text.bullets([finding.message])]
    return lines + notes(report.notes)


def _error(value: float | None) -> str:
    return "does not run" if value is None else f"{value:.1e}"


def _groups(groups: Any) -> str:
    # Smaller errors are rounding: their place says nothing.
    large = [(name, error) for name, error in groups.items() if error > 1e-5][:2]
    return ", ".join(f"{name} {error:.1e}" for name, error in large)
