"""`batchwright run`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from batchwright.core import codec
from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError, RunError, Violation, raise_violations
from batchwright.core.fields import unknown_key
from batchwright.core.ramp.request import RAMP_READERS, read_ramp
from batchwright.rundir.status import READING_HEAD, reading_rows
from batchwright.rundir.trackers import TRACKERS

from . import GROUPS, text
from .config import gather
from .naming import spell
from .options import (
    CommandLine,
    batch_options,
    check_settings,
    complete,
    inner_options,
    json_option,
    mapping,
    number,
    print_json,
    schedule_options,
    stack,
    task_arguments,
    task_option,
)
from .parse import read_file, read_value
from .ramp import node_options, render, rule_options

if TYPE_CHECKING:
    from batchwright.core.ramp.ramp import Ramp
    from batchwright.launch.directory import RunDirectory
    from batchwright.launch.records import RunPlan

_world_options = stack(
    number("--nodes", "Nodes of the largest stage; on this machine, a node is a group of processes."),
    number("--devices-per-node", "Processes (devices) in each node."),
    number("--devices", "Number of processes in total, instead of --nodes and --devices-per-node."),
    number("--pipeline-parallel", "Processes that hold the stages of one model.  [default: 1]"),
    schedule_options,
    inner_options,
)
_start_option = number(
    "--start-sample", "The first sample to train, if those before it were trained by another program.", "SAMPLE"
)
_loading_options = stack(
    number(
        "--loading-hosts", "Nodes that read data and send the others their rows, at most.  [default: every rank reads]"
    ),
    number("--expansion-factor", "All nodes / reading nodes, instead of --loading-hosts.", "F"),
    number("--read-ahead", "With --loading-hosts: steps whose rows are read at once.  [default: 1]"),
)
_launch_options = stack(
    number(
        "--engine",
        "What starts the processes: local | slurm.  [default: local]",
        "NAME",
    ),
    number("--site", "Slurm: a file with the settings of the cluster (the keys of launch.slurm).", "FILE.yaml"),
    click.option("--detach", is_flag=True, help="Slurm: submit the first job and exit; each job submits the next one."),
    click.option("--elastic", is_flag=True, help="Slurm: start with fewer nodes instead of waiting long."),
    number("--dir", "The run directory.  [default: runs/NAME, NAME from the task file or the command]", "RUN_DIR"),
    task_option,
    click.option(
        "--env", multiple=True, metavar="KEY=VALUE", help="An environment variable for every rank; repeatable."
    ),
    number(
        "--position-command", "A command that prints how many samples your command has trained on and saved.", "COMMAND"
    ),
    number("--checkpoint-samples", "Samples between checkpoints.  [default: a twentieth of the run]"),
    number("--keep", "Number of checkpoints to keep.  [default: 3]"),
    number("--strategy", "How ranks share the model: auto | ddp | fsdp2 | none.  [default: auto]", "NAME"),
    number(
        "--stop-after-nonfinite",
        "Stop after this many steps in a row with a loss that is NaN or infinite; 0: never.  [default: 10]",
    ),
    click.option(
        "--tracker",
        multiple=True,
        metavar="NAME",
        help=f"Record the run of a task in {' | '.join(TRACKERS)}; repeatable.",
        shell_complete=complete,
    ),
    number("--seed", "Seed of the model and the sample order.  [default: 0]"),
    number("--threads", "CPU threads per rank.  [default: 1]"),
    number("--max-retries", "Retries after failures without a new checkpoint in between.  [default: 3]"),
    number(
        "--retry-seconds", "Seconds before the first retry; each further retry waits twice as long.  [default: 5]", "S"
    ),
    number(
        "--stall-seconds",
        "Restart after this many seconds without progress, or never.  [default: 600; for a command: never]",
        "S",
    ),
    number("--start-seconds", "The same before the first step of a launch and for a save.  [default: 1800]", "S"),
    number("--grace-seconds", "Seconds for a last checkpoint before the processes are killed.  [default: 60]", "S"),
    number("--stop-signal", "The signal that makes your command save and exit.  [default: SIGTERM]", "NAME"),
)
_LAUNCH_FLAGS = (
    "engine",
    "checkpoint_samples",
    "keep",
    "strategy",
    "stop_after_nonfinite",
    "tracker",
    "seed",
    "threads",
    "max_retries",
    "retry_seconds",
    "stall_seconds",
    "start_seconds",
    "grace_seconds",
    "stop_signal",
)


@click.command(
    cls=CommandLine,
    epilog="\b\nExamples:\n"
    "  batchwright run train.py:task --linear 16,16,96 --global-batch-size 64 --samples 4096 \\\n"
    "      --micro-batch-size 8 --nodes 4 --devices-per-node 1 --node-policy constant-work\n"
    "  batchwright run batchwright.yaml --dry-run\n"
    "  batchwright run --samples 1M --thresholds '0:256 500K:512' --nodes 4 --devices-per-node 8 \\\n"
    "      -- python train.py --batch {global_batch_size} --until {end_sample}\n"
    "  batchwright run --resume runs/train",
)
@click.argument(
    "arguments",
    nargs=-1,
    metavar="[FILE.py:FUNCTION] [FILE.yaml] [KEY=VALUE]... [-- COMMAND...]",
    shell_complete=complete,
)
@rule_options
@batch_options
@_world_options
@_start_option
@_loading_options
@node_options
@_launch_options
@click.option(
    "--dry-run", is_flag=True, help="Print the command, environment and stages of every launch; start nothing."
)
@click.option("--resume", metavar="RUN_DIR", help="Continue a run that was stopped or failed.", shell_complete=complete)
@click.option(
    "--status", "status_of", metavar="RUN_DIR", help="Print the state and position of a run.", shell_complete=complete
)
@click.option(
    "--stop", "stop_of", metavar="RUN_DIR", help="Stop a run after it has saved a checkpoint.", shell_complete=complete
)
@click.option(
    "--plot",
    is_flag=True,
    help="With --status: also draw batch, nodes, loss, throughput by stage, noise scale and node-hours.",
)
@click.option("--now", is_flag=True, help="With --stop: do not save a checkpoint.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    arguments: tuple[str, ...],
    dry_run: bool,
    resume: str | None,
    status_of: str | None,
    stop_of: str | None,
    plot: bool,
    now: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train the whole ramp, launch by launch, each stage on its own nodes, and restart after failures.

    Trains a task (FILE.py:function) in the loop of batchwright, or runs any command. In a command, every launch fills in
    {global_batch_size}, {micro_batch_size}, {accumulation_steps}, {nodes}, {start_sample} and {end_sample}. A command
    reports its position in the file that BATCHWRIGHT_STATUS_FILE names, or through --position-command. All state is in
    the run directory. Ctrl-C once: save a checkpoint and stop; twice: stop now.
    """
    from batchwright.launch.directory import RunDirectory
    from batchwright.launch.plan import begin

    existing = {"--resume": resume, "--status": status_of, "--stop": stop_of}
    chosen = [name for name, value in existing.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are mutually exclusive.", field=chosen[1][2:])
    if dry_run and chosen:
        raise ConfigError(
            f"--dry-run shows a new run, and {chosen[0]} needs an existing one. To show that, use --status RUN_DIR.",
            field="dry-run",
        )
    if now and stop_of is None:
        raise ConfigError("--now needs --stop RUN_DIR.", field="now")
    if plot and status_of is None:
        raise ConfigError("--plot needs --status RUN_DIR.", field="plot")
    if plot and as_json:
        raise ConfigError("--plot and --json are mutually exclusive.", field="json")
    if status_of is not None:
        _show_status(RunDirectory(status_of, "--status"), as_json, stairs=plot, charts=plot)
    elif stop_of is not None:
        _stop(RunDirectory(stop_of, "--stop"), now, as_json)
    elif resume is not None:
        directory = RunDirectory(resume, "--resume")
        try:
            directory, plan = _resumed(directory, arguments + ctx.meta["command"], flags)
            ctx.exit(_detach(directory, plan, as_json) if flags["detach"] else _supervise(directory, plan, as_json))
        finally:
            directory.unlock()
    else:
        directory, plan, made = _new(arguments, ctx.meta["command"], flags)
        if dry_run:
            _dry_run(directory, plan, made, as_json)
            return
        try:
            begin(directory, plan)
            ctx.exit(_detach(directory, plan, as_json) if flags["detach"] else _supervise(directory, plan, as_json))
        finally:
            directory.unlock()


def _new(
    arguments: tuple[str, ...], after: tuple[str, ...], flags: dict[str, Any]
) -> tuple[RunDirectory, RunPlan, Ramp]:
    """A plan from files, overrides and flags."""
    from batchwright.launch.directory import RunDirectory
    from batchwright.launch.plan import build, default_directory
    from batchwright.launch.settings import TASK_KEYS, read_options, split_command

    targets = [w for w in arguments if _is_task(w)]
    mine = [
        w
        for w in arguments
        if w not in targets and "=" in w and w.partition("=")[0].split(".")[0] in ("launch", "task")
    ]
    rest = tuple(w for w in arguments if w not in targets and w not in mine)
    launch, task = _sections(rest, mine)
    _cluster(launch, flags)
    own = {name: value for name, value in flags.items() if name in READERS or name in RAMP_READERS}
    gathered = gather(rest, own, own=[*READERS, *RAMP_READERS])
    probe = {"probe": read_file(flags["from_probe"])} if flags["from_probe"] else {}
    wanted = read_ramp({k: v for k, v in gathered.values.items() if k in RAMP_READERS} | probe)
    unknown = [unknown_key(f"task.{k}", "", [f"task.{n}" for n in TASK_KEYS]) for k in task if k not in TASK_KEYS]
    if "settings" in launch:
        unknown.append(Violation("launch.settings is not a known key. Did you mean task.settings?", "launch.settings"))
    if len(targets) > 1:
        unknown.append(Violation(f"{' and '.join(targets)} are two tasks: a run takes one.", "task", targets[1]))
    raise_violations(ConfigError, unknown)
    there = {name: launch.pop(name, None) for name in ("dir", "position_command", "command", "environment")}
    variables = [f"{k}={v}" for k, v in mapping(there["environment"], "launch.environment").items()]
    flagged = {name: flags[name] for name in _LAUNCH_FLAGS if flags[name] not in (None, ())}
    values = {
        **launch,
        "settings": mapping(task.get("settings"), "task.settings"),
        **flagged,
        "environment": [*variables, *flags["env"]],
    }
    plan, made = build(
        gathered.request(),
        wanted,
        read_options(values, command=bool(after or there["command"])),
        target=targets[0] if targets else None if after else _text(task.get("target"), "task.target"),
        arguments={**mapping(task.get("args"), "task.args"), **task_arguments(flags["args"])},
        command=after or (() if targets else split_command(there["command"] or ())),
        position_command=split_command(flags["position_command"] or there["position_command"] or ()),
    )
    check_settings(plan)
    place = flags["dir"] if flags["dir"] is not None else _text(there["dir"], "launch.dir")
    return default_directory(plan) if place is None else RunDirectory(place, "--dir"), plan, made


def _text(value: Any, name: str) -> str | None:
    """A value that must be text: YAML reads 5 and true as other things."""
    if value is not None and (not isinstance(value, str) or "\0" in value):
        shown = repr(value)[:60]
        raise ConfigError(f"{name}={shown} must be text. Put it in quotes.", field=name, given=shown)
    return value


def _cluster(launch: dict[str, Any], flags: dict[str, Any]) -> None:
    """Add the site's file and the flags of a cluster to `launch.slurm`; an error with other engines."""
    from batchwright.launch.slurm.site import layers

    given = [name for name in ("site", "detach", "elastic") if flags[name]]
    name = flags["engine"] or launch.get("engine") or "local"
    if given and name != "slurm":
        raise ConfigError(
            f"--{given[0]} needs --engine slurm; the engine is {name}.",
            field=given[0],
            given=flags[given[0]],
            nearest=("slurm",),
        )
    if given or launch.get("slurm"):
        site = read_file(flags["site"]) if flags["site"] else None
        launch["slurm"] = layers(launch.get("slurm"), site, flags["elastic"])


def _sections(arguments: tuple[str, ...], overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `launch` and `task` sections of the files, with `launch.key=value` and `task.key=value` on top."""
    sections: dict[str, Any] = {"launch": {}, "task": {}}
    for argument in arguments:
        if "=" not in argument or os.path.exists(argument):
            tree = read_file(argument)
            for name, section in sections.items():
                section.update(tree.get(name) if isinstance(tree.get(name), Mapping) else {})
    for argument in overrides:
        key, _, value = argument.partition("=")
        *path, last = key.split(".")
        into = sections
        for part in path:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                raise ConfigError(
                    f"{key[:80]} is not a key: {part} is a value, not a section.", field=key[:80], given=value[:80]
                )
        into[last] = read_value(key, value)
    return mapping(sections["launch"], "launch"), mapping(sections["task"], "task")


def _is_task(argument: str) -> bool:
    file, _, name = argument.rpartition(":")
    return argument.endswith(".py") or (file.endswith(".py") and name.isidentifier())


def _resumed(
    directory: RunDirectory, arguments: tuple[str, ...], flags: dict[str, Any]
) -> tuple[RunDirectory, RunPlan]:
    """The plan of an existing run, with changed launch settings and, from its position on, another ramp."""
    from batchwright.launch.resume import resume

    options = directory.plan().options
    own = {name: value for name, value in flags.items() if name in READERS or name in RAMP_READERS}
    known = {*_LAUNCH_FLAGS, *own, "from_probe", "env", "site", "detach", "elastic"} - {"seed"}
    others = sorted(name for name, value in flags.items() if value not in (None, False, ()) and name not in known)
    words = [word for word in arguments if "=" not in word or word.split(".")[0] in ("launch", "task")]
    if words or others:
        named = ", ".join([*words, *(f"--{name.replace('_', '-')}" for name in others)])
        raise ConfigError(
            f"{named[:200]} cannot be changed with --resume. Flags and KEY=VALUE of the batch, the world and the ramp can, "
            "and launch settings as flags.",
            field="resume",
            given=named[:200],
        )
    gathered = gather(arguments, own, own=[*READERS, *RAMP_READERS])
    probe = {"probe": read_file(flags["from_probe"])} if flags["from_probe"] else {}
    ramp = {name: value for name, value in gathered.values.items() if name in RAMP_READERS} | probe
    values = {name: flags[name] for name in _LAUNCH_FLAGS if flags[name] not in (None, ())}
    section: dict[str, Any] = {"engine": options.engine, "slurm": dict(options.slurm)}
    _cluster(section, flags)
    changes = {**values, "slurm": section["slurm"], "environment": list(flags["env"])}
    return directory, check_settings(resume(directory, changes, gathered.request(), ramp))


def _detach(directory: RunDirectory, plan: RunPlan, as_json: bool) -> int:
    """Submit the first job of a chain, or all jobs, and return."""
    from batchwright.launch.slurm.control import detach

    for note in plan.notes:
        click.echo(f"note: {spell(note)}", err=True)
    # The jobs take the lock.
    directory.unlock()
    jobs = detach(directory, plan)
    place = shlex.quote(str(directory.path))
    if as_json:
        state = "running" if jobs else "complete"
        print_json({"schema": codec.SCHEMA, "state": state, "jobs": jobs, "dir": str(directory.path)})
    elif jobs:
        click.echo(
            f"submitted: job {', '.join(jobs)}. Each job submits the next one. Watch: batchwright run --status {place}"
        )
    else:
        click.echo("nothing to do: the run is complete")
    return 0


def _supervise(directory: RunDirectory, plan: RunPlan, as_json: bool) -> int:
    """Run all launches; returns the exit code."""
    from batchwright.launch.show import display
    from batchwright.launch.supervisor import supervise

    shown = display()
    for note in plan.notes:
        shown.note(f"note: {spell(note)}")
    shown.note(f"run directory: {directory.path}")
    try:
        state = supervise(directory, plan, shown, owns_process=True)
    finally:
        shown.close()
    proven = _show_status(directory, as_json, stairs=True, plan=plan)
    if state == "complete" and not proven:
        return RunError.exit_code
    return {"complete": 0, "stopped": 130}.get(state, RunError.exit_code)


def _show_status(
    directory: RunDirectory, as_json: bool, *, stairs: bool = False, charts: bool = False, plan: RunPlan | None = None
) -> bool:
    """Print the state of a run; returns False if the audit of its ledger found a fault. `charts` needs every event."""
    from batchwright.inputs import ledger as audited
    from batchwright.launch import status as shown
    from batchwright.report.sections import verdict

    plan = plan or directory.plan()
    now, jobs = shown.status(directory, plan), None
    if plan.options.engine == "slurm":
        from batchwright.launch.slurm.control import seen

        now, jobs = seen(directory, plan, now)
    ledger = audited(directory, plan)
    if as_json:
        print_json(now.to_json(ledger) | ({"chain": jobs.to_json(plan)} if jobs else {}))
        return ledger["ok"] is not False
    lines = text.fitted([shown.headline(plan, now), *([f"reason: {now.reason}"] if now.reason else [])])
    if rows := shown.launch_rows(now):
        less = ("ranks", "nodes", "stage", "from sample")
        lines += ["", *text.table(rows, head=shown.LAUNCH_HEAD, right=range(7), drop=less)]
    if rows := reading_rows(now.starts_list[-16:]):
        less = ("rows per reader", "amplification", "rows read")
        lines += ["", "reading:", *text.table(rows, head=READING_HEAD, right=(0, *range(2, 6)), drop=less)]
    if jobs:
        lines += ["", *text.table(jobs.cells(), head=jobs.head, right=(0, 1, *range(3, 9))), f"  {jobs.sum(plan)}"]
    if rows := shown.boundary_rows(now.boundaries):
        head, less = shown.BOUNDARY_HEAD, ("load", "save", "stop", "start")
        lines += ["", "time lost at boundaries:", *text.table(rows, head=head, right=range(6), drop=less)]
    if ledger.get("ok") is not None:
        lines += ["", *text.fitted([f"ledger: {verdict(ledger)}"])]
        lines += text.bullets([f"{f['cause']}: {f['message']}" for f in ledger["findings"][:3]])
    if stairs and now.starts and not charts:
        from batchwright.report.plots import staircase

        edges = [*(s.start_sample for s in plan.stages), plan.total_samples]
        series = {"global batch": [s.global_batch_size for s in plan.stages], "nodes": [s.nodes for s in plan.stages]}
        lines += ["", staircase(edges, series, xlabel="samples", height=9, color=text.color())]
    if charts:
        from batchwright.launch.history import history
        from batchwright.report.text_charts import text_charts

        lines += text_charts("run", history(directory, plan, now, ledger))
    verbs = [verb for group in GROUPS.values() for verb in group]
    if steps := shown.next_steps(plan, now, ledger, verbs):
        lines += ["", "next:", *text.bullets(steps)]
    click.echo("\n".join(lines))
    return ledger["ok"] is not False


def _stop(directory: RunDirectory, now: bool, as_json: bool) -> None:
    """Ask the supervisor to stop, and wait until it has."""
    from batchwright.launch.status import stop

    plan = directory.plan()
    if plan.options.engine == "slurm":
        from batchwright.launch.slurm.control import is_chain
        from batchwright.launch.slurm.control import stop as stop_chain

        lost = directory.supervisor() is None and not (directory.path / "outcome.json").exists()
        if is_chain(directory) or lost:
            stop_chain(directory, plan, now)
            _show_status(directory, as_json, plan=plan)
            return
    if directory.supervisor() is not None:
        click.echo("stopping" + ("" if now else ": a checkpoint first"), err=True)
        stop(directory, plan, now)
    _show_status(directory, as_json, plan=plan)


def _dry_run(directory: RunDirectory, plan: RunPlan, made: Ramp, as_json: bool) -> None:
    """Print every launch as it would start from its first sample."""
    if plan.options.engine == "slurm":
        from batchwright.launch.slurm.control import dry_run
    else:
        from batchwright.launch.work import dry_run

    records = dry_run(directory, plan)
    if as_json:
        print_json({"schema": codec.SCHEMA, "dir": str(directory.path), "launches": records, "stages": made.stages()})
        return
    lines = render(made)
    for record in records:
        where = f"{record['nodes']} nodes × {plan.devices_per_node} = {record['ranks']} ranks"
        span = f"samples {record['start_sample']:,} to {record['end_sample']:,}"
        lines += ["", f"launch {record['index'] + 1}: {where}, {span}"]
        lines += [f"  {key}={shlex.quote(value)}" for key, value in record["environment"].items()]
        lines += ["  $ " + " ".join(shlex.quote(_near(argument)) for argument in record["command"])]
        lines += [f"  {key}: {_near(record[key])}" for key in ("script", "test") if key in record]
    click.echo("\n".join(lines))


def _near(argument: str) -> str:
    """A path relative to this directory, so that the line is short; --json has the full path."""
    return "python" if argument == sys.executable else argument.replace(os.getcwd() + os.sep, "")
