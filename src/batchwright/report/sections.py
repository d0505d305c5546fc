"""What a report says about each document: a summary, charts, tables, failures and notes; the same for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchwright.core.numbers import format_bytes, human
from batchwright.rundir.status import READING_HEAD, reading_rows

from .charts import charts_of
from .charts.plan import equation
from .charts.spec import Document, Spec, finite

# Rows of a table; in a longer one the middle is left out.
_MOST_ROWS = 60
# Failures and findings that are listed; how many more there are is said.
_MOST_LINES = 20


@dataclass(frozen=True)
class Table:
    """A table with its title; columns of numbers align right."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Lines:
    """Sentences below a title; `code` are lines that a program printed."""

    title: str
    lines: tuple[str, ...]
    code: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One document of a report. `charts` are by name, with the theme that was asked for."""

    kind: str
    title: str
    source: str
    summary: tuple[str, ...]
    charts: Mapping[str, Spec] = field(default_factory=dict[str, Spec])
    blocks: tuple[Table | Lines, ...] = ()


def section(kind: str, document: Document, source: str, theme: str) -> Section:
    """The section of a document of a known kind; `source` is the file or directory that it was read from."""
    title, summary, blocks = _SECTIONS[kind](document)
    kept = (b for b in blocks if (b.rows if isinstance(b, Table) else b.lines or b.code))
    return Section(kind, title, source, tuple(summary), charts_of(kind, document, theme), tuple(kept))


Parts = tuple[str, list[str], Iterable[Table | Lines]]


def _plan(plan: Document) -> Parts:
    sources, reasons = plan.get("sources") or {}, plan.get("reasons") or {}
    numbers = {**(plan.get("loading") or {}), **(plan.get("pipeline") or {}), **plan}
    rows = [(name, _cell(numbers.get(name)), source, reasons.get(name) or "") for name, source in sources.items()]
    columns = {
        "micro_batch_size": "micro", "accumulation_steps": "accumulation", "data_parallel_size": "data-parallel",
        "reason": "difference",
    }  # fmt: skip
    return (
        "Plan",
        [equation(plan)],
        [
            _table("The equation and its sources", ("number", "value", "source", "reason"), rows),
            _records("Alternatives", plan.get("alternatives"), columns),
            _notes(plan),
        ],
    )  # fmt: skip


_STAGE = {
    "index": "stage", "global_batch_size": "global batch", "micro_batch_size": "micro", "accumulation_steps": "accumulation",
    "data_parallel_size": "ranks", "nodes": "nodes", "steps": "steps", "start_sample": "from sample",
    "end_sample": "to sample", "step_seconds": "s/step", "hours": "hours", "node_hours": "node-hours",
}  # fmt: skip


# In the table of a run these are not what the run took.
_PLANNED = {name: f"{_STAGE[name]} (planned)" for name in ("step_seconds", "hours", "node_hours")}


def _stages(stages: Sequence[Mapping[str, Any]], columns: Mapping[str, str] = _STAGE) -> Table:
    title = "The equation, stage by stage: global batch = micro × accumulation × ranks"
    return _records(title, _counted(stages), columns)


def _counted(records: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Records whose index counts from 1, as people count."""
    return [{**record, "index": record["index"] + 1, "launch": record["index"] + 1} for record in records or ()]


def _ramp(ramp: Document) -> Parts:
    stages = ramp["stages"]
    first, last = stages[0], stages[-1]
    total = "open end"
    if ramp.get("total_steps") is not None and ramp.get("total_samples") is not None:
        total = f"{ramp['total_steps']:,} steps, {human(ramp['total_samples'])} samples"
    if start := ramp.get("start_sample"):
        steps, samples = ramp.get("remaining_steps"), ramp.get("remaining_samples")
        left = "" if steps is None or samples is None else f": {steps:,} steps, {human(samples)} samples"
        total = f"from sample {human(start)} on{left} (the whole ramp: {total})"
    summary = [
        f"global batch {first['global_batch_size']:,} -> {last['global_batch_size']:,} in {len(stages)} "
        f"stage{'s' * (len(stages) > 1)}; {total}"
    ]
    if finite(ramp.get("node_hours")) and finite(ramp.get("hours")):
        summary.append(
            f"{ramp['hours']:,.4g} hours and {ramp['node_hours']:,.4g} node-hours, restarts included (predicted)"
        )
    sources = [(name, source) for name, source in (ramp.get("sources") or {}).items()]
    launches = _records(
        "Launches", _counted(ramp.get("launches")),
        {name: _STAGE.get(name, "launch") for name in ("launch", "nodes", "start_sample", "end_sample")},
    )  # fmt: skip
    return (
        "Ramp",
        summary,
        [_stages(stages), _table("Where the numbers come from", ("number", "source"), sources), launches, _notes(ramp)],
    )


def _probe(probe: Document) -> Parts:
    failing, size = probe.get("first_failing_micro_batch_size"), probe.get("recommended_micro_batch_size")
    summary = [
        f"micro_batch_size {probe['max_micro_batch_size']} is the largest that ran"
        + (f"; {failing} did not" if failing else "; larger sizes were not tried"),
        f"recommended: micro_batch_size {size}" if size else "recommended: no size (see the notes)",
    ]
    if diagnosis := probe.get("diagnosis"):
        text = diagnosis["text"]
        summary.append(f"bottleneck: {diagnosis['bottleneck']}. {text[:1].upper()}{text[1:]}")
    rows = [
        (
            t["purpose"], _cell(t["micro_batch_size"]), t["status"], format_bytes(t.get("peak_memory_bytes")),
            format_bytes(t.get("predicted_peak_memory_bytes")), _cell(t.get("samples_per_second")), _cell(t.get("seconds")),
        )
        for t in probe["trials"]
    ]  # fmt: skip
    failed = [t for t in probe["trials"] if t["status"] != "fits"]
    reasons = [
        f"micro_batch_size {t['micro_batch_size']}: {t['cause'] or t['status']}. {t['reason'] or ''}" for t in failed
    ]
    identity = probe.get("identity") or {}
    return (
        f"Probe of {_name(probe.get('target')) or 'a command'}",
        summary,
        [
            _table(
                "Trials",
                ("purpose", "micro batch", "verdict", "peak memory", "predicted", "samples/s", "seconds"),
                rows,
            ),
            Lines("Failures", tuple(reasons)),
            _versions(identity.get("versions"), device=probe.get("device")),
            _notes(probe),
        ],
    )


def _pipeline(probe: Document) -> Parts:
    summary = [
        f"fastest: {probe['best_microbatches']} microbatches; plan chooses {probe['planned_microbatches']} of these",
    ]
    if (half := probe.get("half_speed_tokens")) is not None:
        summary.append(f"a microbatch of {_cell(half)} tokens runs at half speed")
    rows = [
        (
            _cell(t["pipeline_microbatches"]), _cell(t["micro_batch_size"]), _cell(t["step_seconds"]),
            _cell(t["idle_share"]), _cell(t["predicted_idle_share"]),
        )
        for t in probe["trials"]
    ]  # fmt: skip
    head = ("microbatches", "micro batch", "seconds of a step", "idle share", "predicted idle share")
    where = f"{_cell(probe['stages'])} ranks, {_cell(probe['global_batch_size'])} samples of a step"
    return f"Pipeline {probe['schedule']}: {where}", summary, [_table("Trials", head, rows), _notes(probe)]


def _estimate(estimate: Document) -> Parts:
    most, limit = estimate.get("max_micro_batch_size"), estimate.get("memory_bytes")
    measured = estimate.get("probe") or (estimate.get("calibration") or {}).get("measured_bytes")
    summary = [
        "The sizes in the table are predicted; the chart also shows what was measured."
        if measured
        else "All sizes are predicted, not measured."
    ]
    if most is not None:
        summary.insert(0, f"max_micro_batch_size {most}, predicted, in {format_bytes(limit)}")
    points = estimate["points"]
    kinds = [k for k in (points[0]["breakdown"] if points else ()) if any(p["breakdown"].get(k) for p in points)]
    rows = [
        {name: p.get(name) for name in ("sequence_length", "micro_batch_size", "verdict")}
        | {k: format_bytes(p["breakdown"].get(k, 0)) for k in kinds}
        | {"peak": format_bytes(p["peak_memory_bytes"])}
        for p in points
    ]
    columns = {"sequence_length": "length", "micro_batch_size": "micro batch"} | {
        n: n for n in ("peak", *kinds, "verdict")
    }
    return (
        f"Estimate of {_name(estimate.get('model') or estimate.get('task'))}",
        summary,
        [
            _records("Peak memory, predicted", rows, columns),
            Lines("Assumptions", tuple(estimate.get("assumptions") or ())),
            _notes(estimate),
        ],
    )


def _run(run: Document) -> Parts:
    plan = run["plan"]
    what = plan["target"] or " ".join(plan["command"])
    summary = [run["headline"], *([f"reason: {run['reason']}"] if run["reason"] else []), f"trained: {what}"]
    starts = [
        (
            _cell(s["number"]), "-" if s["stage"] is None else _cell(s["stage"] + 1), _cell(s["nodes"]), _cell(s["ranks"]),
            _cell(s["start_sample"]), _cell(s["position"]), _seconds(s["seconds"]),
            s["outcome"] or ("running" if run["state"] == "running" else "unknown"),
        )
        for s in run["history"]
    ]  # fmt: skip
    parts = ("save_seconds", "stop_seconds", "start_seconds", "load_seconds", "lost_seconds")
    boundaries = [(_cell(b["position"]), *(_seconds(b[part]) for part in parts)) for b in run["boundaries"]]
    replanned = [
        f"At sample {human(int(e['position']))} the rest of the run was planned anew."
        for e in run["replanned"]
        if finite(e.get("position"))
    ]  # fmt: skip
    earlier = len(run["failures"]) - _MOST_LINES
    return (
        f"Run {run['name']}",
        summary,
        [
            _stages(plan["stages"], _STAGE | _PLANNED),
            _table("Where the numbers come from", ("number", "value", "source"), _given(plan)),
            _table("Launches", ("launch", "stage", "nodes", "ranks", "from sample", "to sample", "time", "outcome"), starts),
            _table("Reading", READING_HEAD, reading_rows(run["history"])),
            _table("Time lost at boundaries", ("at sample", "save", "stop", "start", "load", "lost"), boundaries),
            *(_failure(f) for f in run["failures"][-_MOST_LINES:]),
            Lines("Earlier failures", (f"{earlier:,} more.",) if earlier > 0 else ()),
            Lines("Ledger", tuple(_ledger(run["ledger"], plan["kind"]))),
            Lines("Changes of the plan", tuple(replanned)),
            _skipped(run),
            _versions(run["versions"], **{name: run[name] for name in ("device", "strategy", "parameters")}, seed=plan["seed"]),
            _notes(plan),
        ],
    )  # fmt: skip


def _skipped(run: Document) -> Lines:
    """The lines of events that could not be read, by file."""
    said = [
        f"{name}: 1 line was skipped, because it is damaged or incomplete."
        if count == 1
        else f"{name}: {count:,} lines were skipped, because they are damaged or incomplete."
        for name, count in run["skipped"].items()
    ]
    return Lines("Left out of this report", tuple(said))


def _given(plan: Document) -> list[tuple[str, str, str]]:
    """Every number that was given, and how those that were not follow from them."""
    rows = [(name, _cell(value), plan["origins"].get(name) or "given") for name, value in plan["given"].items()]
    derived = {
        "data_parallel_size": "derived: nodes × devices_per_node / devices of a replica",
        "accumulation_steps": "derived: global batch / (micro × ranks)",
        "nodes of each stage": f"derived by node_policy {plan['given'].get('node_policy') or '(default)'}",
    }
    return rows + [(name, "by stage", source) for name, source in derived.items() if name not in plan["given"]]


def _failure(failure: Mapping[str, Any]) -> Lines:
    """Why one launch failed, with the last lines of its log."""
    lines = [failure["reason"], *([failure["advice"]] if failure.get("advice") else [])]
    return Lines(
        f"Failure of launch {failure['number']}; its last checkpoint is at sample {failure['position']:,}",
        tuple(lines),
        tuple(failure["lines"]),
    )


def _ledger(ledger: Mapping[str, Any], kind: str) -> list[str]:
    if ledger.get("ok") is None:
        return [
            "A command keeps no ledger."
            if kind == "command"
            else "It was not audited: no ledger, or numpy is not installed."
        ]
    proven = ["Every saved sample was trained in exactly one step."] if ledger["ok"] else []
    findings = [f"{f['cause']}: {f['message']}" for f in ledger.get("findings") or ()]
    more = len(findings) - _MOST_LINES
    return [f"{verdict(ledger)}.", *proven, *findings[:_MOST_LINES], *([f"{more:,} more."] if more > 0 else [])]


def verdict(ledger: Mapping[str, Any]) -> str:
    """The audit of a ledger in one line."""
    how = "ids, spans and counts" if ledger.get("ids_checked") else "spans and counts, not ids"
    return (
        f"{'ok' if ledger['ok'] else 'NOT ok'} ({how}), {ledger['gaps']:,} gaps, {ledger['repeats']:,} repeats, "
        f"{ledger.get('discarded_samples') or 0:,} samples discarded and trained again"
    )


def _versions(versions: Mapping[str, Any] | None, **facts: Any) -> Table:
    known = {
        **(versions if isinstance(versions, Mapping) else {}),
        **{name: value for name, value in facts.items() if value is not None},
    }
    rows = [(str(name), _cell(value)) for name, value in known.items()]
    return _table("Versions", ("name", "value"), rows)


def _notes(document: Document) -> Lines:
    return Lines("Notes", tuple(str(note) for note in document.get("notes") or ()))


def _records(title: str, records: Sequence[Mapping[str, Any]] | None, columns: Mapping[str, str]) -> Table:
    """A table of records; a column without any value is left out."""
    records = records or ()
    kept = [key for key in columns if any(record.get(key) is not None for record in records)]
    rows = [tuple(_cell(record.get(key)) for key in kept) for record in records]
    return _table(title, tuple(columns[key] for key in kept), rows)


def _table(title: str, head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    if len(rows) > _MOST_ROWS:
        left = len(rows) - _MOST_ROWS + 1
        between = (f"… {left:,} more", *[""] * (len(head) - 1))
        rows = [*rows[: _MOST_ROWS // 2], between, *rows[-_MOST_ROWS // 2 + 1 :]]
    return Table(title, tuple(head), tuple(tuple(row) for row in rows))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}"


def _name(target: str | None) -> str:
    """A task or model without its folders, and without the end of a long command."""
    return (target or "").rpartition("/")[2][:80]


def _seconds(value: object) -> str:
    return f"{value:,.1f} s" if isinstance(value, (int, float)) else "-"


def _rl(run: Document) -> Parts:
    columns, last, ledger = run["rounds"], run["last"], run.get("ledger") or {}
    count = len(columns["round"])
    totals = {name: sum(v for v in columns[name] if finite(v)) for name in columns}
    whole, logged = totals["seconds"] or 1.0, "all rounds"
    if ledger.get("updates"):  # it has every round; events are written every `log_every` rounds
        names = {"prompts": "samples", "responses": "responses", "dropped_responses": "dropped_responses"}
        totals |= {name: ledger[column] for name, column in names.items()}
        logged, count = f"{count:,} logged" if count < ledger["steps"] else logged, ledger["steps"]
    summary = [
        f"{count:,} round{'s' * (count > 1)}, {int(totals['prompts']):,} prompts, {int(totals['responses']):,} responses; reward "
        f"{_cell(_number(columns['reward'][0]))} at first, {_cell(_number(columns['reward'][-1]))} at last"
    ]
    worst = max((v for v in columns["policy_lag"] if finite(v)), default=0)
    rows = [
        ("responses that entered an update", _cell(int(totals["responses"]))),
        ("dropped because they were too old, and sampled again", _cell(int(totals["dropped_responses"]))),
        ("discarded after a restart", _cell(run.get("discarded_responses"))),
        ("worst policy lag (updates)", _cell(int(worst))),
        ("workers that were replaced", _cell(run.get("replaced_workers"))),
    ]
    parts = {"rollout_seconds": "rollout, all workers", "train_seconds": "train", "wait_seconds": "the trainer waits"}
    times = [
        (label, _seconds(_number(last.get(name))), _seconds(totals[name]), f"{totals[name] / whole:.0%}")
        for name, label in parts.items()
    ]
    proof = (
        []
        if not ledger
        else ["ok" if ledger["ok"] else "failed", *(f["message"] for f in ledger["findings"][:_MOST_LINES])]
    )
    return (
        f"Run {run['name']}",
        summary,
        [
            _table("The batch that was really used", ("what", "number"), rows),
            _table("Where the time went", ("what", "last round", logged, "of the run"), times),
            Lines("Ledger", tuple(proof)),
            _skipped(run),
        ],
    )  # fmt: skip


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and finite(value) else None


_SECTIONS: dict[str, Callable[[Document], Parts]] = {
    "plan": _plan,
    "ramp": _ramp,
    "probe": _probe,
    "pipeline": _pipeline,
    "estimate": _estimate,
    "run": _run,
    "rl": _rl,
}
