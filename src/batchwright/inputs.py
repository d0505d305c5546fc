"""What a report is made of: run directories, and files that `--json` of a verb wrote. Nothing is run, and torch is not loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import codec
from .core.errors import ConfigError, EnvironmentFault, RunError, Violation, raise_violations
from .report.documents import ACCEPTED, RampDocument, kind_of, why_not
from .report.notebook import Shown
from .rundir import names
from .rundir.events import has_rounds, read_rounds
from .rundir.files import parse_object, read_bytes

if TYPE_CHECKING:
    from .launch.directory import RunDirectory
    from .launch.records import RunPlan

# A ramp of 100,000 stages has 40 MB.
_LARGEST = 1 << 28


@dataclass(frozen=True)
class Input:
    """A document with its kind (plan, ramp, probe, estimate, run, rl), and what it was read from."""

    kind: str
    document: Mapping[str, Any]
    source: str


def read_inputs(sources: Sequence[str | os.PathLike[str] | Shown]) -> list[Input]:
    """Every source, read and checked; one error lists all that cannot be used. Without sources: what is in this folder."""
    wrong: list[Violation] = []
    found: list[Input] = []
    for source in sources or discovered(Path()):
        try:
            found.append(_read(source))
        except ConfigError as error:
            wrong += error.violations
    if wrong:
        wrong[-1] = replace(wrong[-1], message=f"{wrong[-1].message} A report takes {ACCEPTED}.")
    raise_violations(ConfigError, wrong)
    return found


def _read(source: str | os.PathLike[str] | Shown) -> Input:
    if isinstance(source, Shown):
        return Input(source.kind, source.document(), type(source).__name__)
    if not isinstance(source, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{source!r:.120} is a {type(source).__name__}, not a result or a path.",
            field="source",
            given=repr(source)[:120],
        )
    from .launch.directory import RunDirectory

    directory = RunDirectory(source, "report")
    if directory.path.is_dir():
        kind = _run_kind(directory.path)
        if kind == "rl" and (rounds := read_rounds(directory.path)):
            return Input("rl", rounds | {"ledger": _audited(directory.path)}, str(source))
        if kind is None and (below := [str(p) for p in sorted(_folders(Path(source))) if _run_kind(p)]):
            raise ConfigError(
                f"{source} is not a run directory. It holds these: {', '.join(below[:6])}{' …' * (len(below) > 6)}.",
                field="source",
                given=str(source),
                nearest=below[:6],
            )
        return Input("run", read_run(directory), str(source))
    return _read_file(Path(source))


def _read_file(path: Path) -> Input:
    shown = str(path)[:200] if str(path).strip() else repr(str(path)[:200])

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{shown}: {reason}.", field="source", given=shown)

    try:
        if path.exists() and path.stat().st_size > _LARGEST:
            raise refuse(f"it is larger than {_LARGEST >> 20} MiB")
        document = parse_object(read_bytes(path))
    except FileNotFoundError:
        raise refuse("no such file or directory") from None
    except OSError as error:
        raise EnvironmentFault(f"{shown} cannot be read: {error.strerror}.", field="source", given=shown) from None
    except ValueError as error:
        raise refuse(f"it is not a JSON document: {error}") from None
    kind = kind_of(document)
    if kind is None:
        raise refuse(why_not(document))
    try:
        read = codec.read(_record(kind), document)
        if kind == "plan" and read.memory is not None:
            from .estimate.records import Placement

            codec.read(Placement, read.memory)
        if kind == "ramp" and not document["stages"]:
            raise ValueError("stages is empty")
        return Input(kind, read.to_json(), str(path))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise refuse(f"it looks like the output of {kind} --json, but it is damaged: {error}") from None


def _record(kind: str) -> Any:
    """The class of a kind of document."""
    if kind == "ramp":
        return RampDocument
    if kind == "plan":
        from .api import Plan

        return Plan
    if kind == "probe":
        from .probe.records import Probe

        return Probe
    if kind == "pipeline":
        from .probe.pipeline import PipelineProbe

        return PipelineProbe
    from .estimate.records import Estimate

    return Estimate


def read_run(directory: RunDirectory) -> dict[str, Any]:
    """The record of a run with its audit."""
    from .launch.history import history
    from .launch.status import status

    plan = directory.plan()
    now = status(directory, plan)
    if plan.options.engine == "slurm":
        from .launch.slurm.control import seen

        now, _ = seen(directory, plan, now)
    return history(directory, plan, now, ledger(directory, plan))


def ledger(directory: RunDirectory, plan: RunPlan) -> dict[str, Any]:
    """The audit of the loop's ledger, without its ids, which may take minutes; all None without one, as for most commands."""
    nothing = {"ok": None, "gaps": None, "repeats": None}
    if not (directory.path / names.LEDGER).is_dir():
        return nothing
    keys = ("ok", "gaps", "repeats", "samples", "discarded_samples", "ids_checked", "findings")
    made = _audited(directory.path)
    return {key: made[key] for key in keys} if made else nothing


def _audited(run: Path) -> dict[str, Any]:
    """The audit of a ledger, without its ids; empty if there is none."""
    try:
        from .runtime.state.audit import audit
    except ImportError:
        # This machine has no numpy.
        return {}
    try:
        return codec.encode(audit(run, recompute=False))
    except RunError:
        return {}


def discovered(folder: Path) -> list[str]:
    """The run in a folder (itself, or one below it or below runs/) and documents in it, if there is one of each kind."""
    if _run_kind(folder):
        return [str(folder)]
    below = [path for parent in (folder, folder / "runs") for path in sorted(_folders(parent)) if _run_kind(path)]
    found: dict[str, list[str]] = {"run": [str(path) for path in below]} if below else {}
    for path in sorted(folder.glob("*.json"))[:200]:
        try:
            kind = kind_of(parse_object(read_bytes(path))) if path.stat().st_size <= _LARGEST else None
        except (OSError, ValueError):
            continue
        if kind is not None:
            found.setdefault(kind, []).append(str(path))
    several = {kind: paths for kind, paths in found.items() if len(paths) > 1}
    if several or not found:
        listed = "; ".join(f"{kind}: {', '.join(paths[:6])}" for kind, paths in several.items())
        what = f"this folder holds more than one {listed}" if several else "this folder holds nothing to report"
        raise ConfigError(
            f"{what}. Name what to report: {ACCEPTED}.", field="source", nearest=[p[0] for p in several.values()]
        )
    return [path for paths in found.values() for path in paths]


def _run_kind(path: Path) -> str | None:
    """`run` or `rl` for a run directory. The output of `plan` may have the name plan.json, too; `train_rl` writes none."""
    with suppress(OSError, ValueError):
        if "launches" in parse_object(read_bytes(path / names.PLAN)):
            return "run"
    return "rl" if has_rounds(path) else None


def _folders(path: Path) -> list[Path]:
    try:
        return [one for one in path.iterdir() if one.is_dir()]
    except OSError:
        return []
