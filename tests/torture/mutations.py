"""Random damage to run directories and probe journals, then every command that reads them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from .calls import NOBODY, Call, Caller
from .material import PROBE, Material
from .mutate import Mutation
from .record import Case

# --resume: no waiting, whatever the plan says now.
IMPATIENT = "--max-retries 0 --retry-seconds 0 --stall-seconds 30 --start-seconds 60 --grace-seconds 1".split()
FOREIGN = "this file is not batchwright's"


def mutations(
    material: Material, place: Path, call: Caller, seed: str, numbers: range, resumes: float = 0.06
) -> Iterator[Case]:
    """One damage per case, in a copy. `resumes` is the share of tasks that are resumed: each takes ten seconds and more."""
    for number in numbers:
        draw = random.Random(f"{seed} mutations {number}")
        sources = (material.done, material.half, material.command_done, material.command_half, material.probe)
        source = draw.choices(sources, (30, 30, 5, 25, 10))[0]
        folder = place / str(number)
        folder.mkdir(parents=True)
        yield _case(source, material, folder, draw, call, number, resumes)
        for parent, names, _ in os.walk(folder):
            for name in names:
                if not os.path.islink(os.path.join(parent, name)):
                    os.chmod(os.path.join(parent, name), 0o700)
        shutil.rmtree(folder)


def _case(
    source: Path, material: Material, folder: Path, draw: random.Random, call: Caller, number: int, resumes: float
) -> Case:
    root, outside = folder / "it", folder / "outside"
    shutil.copytree(source, root)
    user = NOBODY if os.geteuid() == 0 and draw.random() < 0.2 else None
    if user is not None:  # only another user than root is refused anything
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
    mutation = Mutation(root, outside, draw, user)
    foreign = [outside, root / "notes.txt"]  # after the draw: these are not damaged
    for path in foreign:
        path.write_text(FOREIGN)
    what = f"{source.name}: {mutation.apply()}{' (as another user)' if user is not None else ''}"
    calls: list[Call] = []
    wrong: list[str] = []
    if source == material.probe:
        calls += _probe_calls(root, call, user)
    else:
        before = _listing(root)
        calls.append(call("run", "--status", root, cwd=folder, user=user))
        calls.append(call("run", "--status", root, "--json", cwd=folder, user=user))
        calls.append(call("report", root, "--markdown", "--json", cwd=folder, user=user))
        if source in (material.done, material.half):
            calls.append(call("check", "--ledger", root, cwd=folder, user=user))
            calls.append(call("check", "--ledger", root, "--json", cwd=folder, user=user))
            wrong += _named(mutation, calls[-1])
        wrong += [f"reading changed {name}" for name in _differences(before, _listing(root))]
        calls.append(call("run", "--stop", root, cwd=folder, user=user))
        # Another user may not be able to read this Python. A damaged plan of a task may ask for a million ranks.
        slow = (
            draw.random() < (2 * resumes if source == material.done else resumes) and mutation.path.name != "plan.json"
        )
        if user is None and (source in (material.command_done, material.command_half) or slow):
            calls.append(call("run", "--resume", root, *IMPATIENT, cwd=folder, seconds=180))
            wrong += _tracebacks(root)
    for made in calls:
        wrong += made.wrong()
    wrong += [f"{path} was changed" for path in foreign if path.read_text() != FOREIGN]
    codes = tuple(made.code for made in calls if made.code is not None)
    return Case("mutations", number, what, codes, tuple(wrong))


def _tracebacks(root: Path) -> list[str]:
    """What a rank logged: an error of batchwright is a sentence there, too."""
    found: list[str] = []
    for path in root.glob("launches/*/logs/rank-*.log"):
        text = path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""
        found += [f"{path.name}: {text[-2500:]}"] if "Traceback (most" in text else []
    return found


def _probe_calls(root: Path, call: Caller, user: int | None) -> Iterator[Call]:
    yield call("probe", "--dir", "journal", *PROBE, cwd=root, user=user)
    yield call("report", "result.json", "--markdown", cwd=root, user=user)
    yield call("plan", "--global-batch-size", "64", "--nodes", "1", "--from-probe", "result.json", cwd=root, user=user)
    ramp = ("ramp", "--thresholds", "0:8 64:16", "--samples", "512", "--nodes", "2", "--devices-per-node", "1")
    yield call(*ramp, "--node-policy", "min-time", "--from-probe", "result.json", cwd=root, user=user)


def _named(mutation: Mutation, checked: Call) -> list[str]:
    """A line of a ledger that is no JSON object is named: the file and the line. The last line may be cut off."""
    path = mutation.path
    if path.parent.name != "ledger" or path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK):
        return []
    lines = [(at, line) for at, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip(b"\0 ")]
    wrong: list[str] = []
    for at, line in lines[:-1]:
        try:
            if isinstance(json.loads(line.decode()), dict):
                continue
        except (ValueError, RecursionError):
            pass
        if f"{path.name}, line {at}" not in checked.out:
            wrong.append(f"{path.name}, line {at} is damaged, and check --ledger does not say so: {checked.out[:600]}")
    return wrong


def _listing(root: Path) -> dict[str, tuple[int, ...]]:
    """Every entry with its type, size and times."""
    found: dict[str, tuple[int, ...]] = {}
    for path in root.rglob("*"):
        facts = path.lstat()
        found[str(path.relative_to(root))] = (facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    return found


def _differences(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
