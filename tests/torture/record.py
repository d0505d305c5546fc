"""What an attack returns: one record per case, with all that is needed to repeat it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PROMISED = (0, 2, 3, 4, 5, 130)  # exit codes; 1 is a bug of batchwright


@dataclass(frozen=True)
class Case:
    """One case of an attack: what was done, the exit codes that were seen, and what was wrong (nothing: it passed)."""

    attack: str
    number: int
    what: str
    codes: tuple[int, ...] = ()
    wrong: tuple[str, ...] = ()

    def repeat(self, seed: str) -> str:
        """The command that repeats this case."""
        return f"python -m tests.torture --seed {seed} --only {self.attack} --case {self.number}"


def table(cases: Iterable[Case]) -> list[str]:
    """One line per attack: how many cases, which exit codes, how many failures."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.attack, []).append(case)
    rows = [("attack", "cases", "exit codes", "failures")]
    for attack, members in found.items():
        codes = Counter(code for case in members for code in case.codes)
        shown = ", ".join(f"{code}: {count:,}" for code, count in sorted(codes.items()))
        rows.append((attack, f"{len(members):,}", shown, str(sum(bool(case.wrong) for case in members))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def traceback_of_ours(err: str) -> bool:
    """Whether a traceback shows a file of batchwright. Lines of a rank's log are different: they begin with "  | "."""
    lines = err.splitlines()
    return any(line.startswith("Traceback") for line in lines) and any(
        line.startswith("  File ") and "batchwright" in line for line in lines
    )


def unpromised(code: int | None, out: str, err: str) -> list[str]:
    """What breaks the promise in one call: a hang (None), an exit code of our own bug, a traceback of ours."""
    if code is None:
        return [f"it hangs; its stack:\n{err[-4000:]}"]
    wrong = [] if code in PROMISED else [f"exit code {code}: {(err or out)[-2000:]}"]
    if traceback_of_ours(err) or "a bug in batchwright" in out + err:
        wrong.append(f"a traceback or a bug: {err[-2000:]}{out[-500:]}")
    if code and code != 130 and not (out + err).strip():
        wrong.append(f"exit code {code} without a sentence")
    return wrong
