"""`make torture`: every attack, with a seed; one table at the end.

python -m tests.torture [--rounds N] [--seed S] [--only chaos|mutations|flips|disks] [--case N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import TypeVar

from .calls import Caller
from .chaos import chaos, reference
from .disks import FAULTS, KINDS, Unavailable, disk
from .flips import flips
from .material import Material, make
from .mutations import mutations
from .record import Case, table

MUTATIONS, FLIPS = 20, 50  # per round
AT_ONCE = 2


def main() -> int:
    """Run the attacks; 1 if a case failed."""
    read = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    read.add_argument("--rounds", type=int, default=100, help="of chaos; each round has 20 mutations and 50 flips")
    read.add_argument("--seed", default=str(int(time.time())), help="default: the time, which is printed")
    read.add_argument("--only", choices=sorted(ATTACKS), action="append", help="this attack only; repeatable")
    read.add_argument("--case", type=int, help="this case of --only only")
    read.add_argument("--most", type=int, help="at most this many cases of each attack")
    read.add_argument("--keep", type=Path, help="the folder of the runs, which is kept; its runs are used again")
    given = read.parse_args()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # under nohup, the processes of a run would ignore SIGHUP
    base = given.keep or Path(tempfile.mkdtemp(prefix="torture-"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    print(f"seed {given.seed}, {given.rounds} rounds, in {base}", flush=True)
    cases: list[Case] = []
    for attack in given.only or ATTACKS:
        cases += ATTACKS[attack](base, given)
    print("", *table(cases), sep="\n")
    failed = [case for case in cases if case.wrong]
    for case in failed[:50]:
        print(f"\nFAILED {case.attack} {case.number}: {case.what}\nrepeat: {case.repeat(given.seed)}")
        print(*(f"  {line}" for text in case.wrong for line in text.splitlines()[:40]), sep="\n")
    if not failed and given.keep is None:
        shutil.rmtree(base)
    return 1 if failed else 0


def _material(base: Path) -> Material:
    folder = base / "material"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        print("making the runs that are damaged", flush=True)
        made = make(folder)
        (folder / "made").touch()
        return made
    names = ("done", "half", "command-done", "command-half", "probe")
    return Material(*(folder / name for name in names))


Given = TypeVar("Given")
Batch = Callable[[Given, Path, Caller, str, range], Iterator[Case]]


def _in_parallel(
    attack: str, batch: Batch[Given], material: Given, count: int, largest: int, base: Path, given: argparse.Namespace
) -> list[Case]:
    """Cases 0 to `count` in parts of at most `largest`, a few parts at once, with a line of progress after each."""
    count = min(count, given.most or count)
    numbers = range(count) if given.case is None else range(given.case, given.case + 1)
    size = max(1, min(largest, len(numbers) // AT_ONCE))
    parts = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    callers: Queue[Caller] = Queue()
    cases: list[Case] = []

    def work(part: range) -> list[Case]:
        caller = callers.get()
        try:
            return list(batch(material, base / attack / str(part[0]), caller, given.seed, part))
        finally:
            callers.put(caller)

    opened = [Caller() for _ in range(AT_ONCE)]
    for caller in opened:
        callers.put(caller)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(work, parts):
            cases += done
            print(f"{attack}: {len(cases)} of {len(numbers)}, {sum(bool(c.wrong) for c in cases)} failed", flush=True)
    for caller in opened:
        caller.__exit__()
    return cases


def _mutations(base: Path, given: argparse.Namespace) -> list[Case]:
    return _in_parallel("mutations", mutations, _material(base), MUTATIONS * given.rounds, 50, base, given)


def _flips(base: Path, given: argparse.Namespace) -> list[Case]:
    return _in_parallel("flips", flips, _material(base), FLIPS * given.rounds, 50, base, given)


def _chaos(base: Path, given: argparse.Namespace) -> list[Case]:
    return _in_parallel("chaos", chaos, reference(base / "undisturbed"), given.rounds, 1, base, given)


def _disks(base: Path, given: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    for number, (kind, fault) in enumerate((kind, fault) for kind in KINDS for fault in FAULTS):
        if given.case not in (None, number):
            continue
        try:
            cases.append(disk(base / "disks" / str(number), kind, fault, number))
            print(f"disks: {cases[-1].what}: {'FAILED' if cases[-1].wrong else 'ok'}", flush=True)
        except Unavailable as reason:
            print(f"disks: {fault} under a {kind}: not possible here: {reason}", flush=True)
    return cases


ATTACKS: dict[str, Callable[[Path, argparse.Namespace], list[Case]]] = {
    "chaos": _chaos,
    "mutations": _mutations,
    "flips": _flips,
    "disks": _disks,
}

if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[2])
    sys.exit(main())
