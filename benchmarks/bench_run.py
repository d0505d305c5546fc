"""What the supervisor and a boundary cost; and random kills of a real run, with an exact audit at the end.

python benchmarks/bench_run.py [ROUNDS] [SEED]        # default: 8 rounds
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests" / "launch"
BATCHWRIGHT = (sys.executable, "-m", "batchwright", "run")
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def wait(found, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if value := found():
                return value
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    raise TimeoutError(f"nothing found in {seconds:.0f} s")


def newest(run: Path) -> Path | None:
    return max((p.parent for p in run.glob("launches/*/manifest.json")), default=None)


def supervisor_share(folder: Path, seconds: float = 20.0) -> float:
    """CPU time of the supervisor during training that reports twenty times a second."""
    run = folder / "share"
    flags = ("--global-batch-size", "8", "--samples", "1M", "--dir", str(run))
    trainer = (sys.executable, str(TESTS / "trainer.py"), "8", "{start_sample}", "{end_sample}", "slow=0.05")
    process = subprocess.Popen(
        [*BATCHWRIGHT, *flags, "--", *trainer], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait(lambda: list(run.glob("launches/*/status.json")))
        time.sleep(2)
        begun, before = time.monotonic(), cpu_seconds(process.pid)
        time.sleep(seconds)
        return (cpu_seconds(process.pid) - before) / (time.monotonic() - begun)
    finally:
        process.kill()
        process.wait()


class Torture:
    """One run of the tiny task on two ranks, which is disturbed again and again."""

    def __init__(self, folder: Path, rounds: int, seed: int) -> None:
        self.mark, self.run = folder / "hang", folder / 'it\'s a "run"'
        self.rounds, self.draw = rounds, random.Random(seed)
        flags = (
            f"--samples {256 + 96 * rounds} --nodes 2 --devices-per-node 1 --node-policy constant-work --retry-seconds 0.1 "
            "--stall-seconds 10 --checkpoint-samples 32 --max-retries 20 --arg slow=0.05"
        )
        place = (f"{TESTS / 'tiny.py'}:task", "--thresholds", "0:8 96:16", "--dir", str(self.run))
        self.begin = (*place, *flags.split(), "--arg", f"hang={self.mark}")
        self.process = self.start(*self.begin)
        self.done: list[str] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*BATCHWRIGHT, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def steps(self, launch: Path) -> int:
        path = self.run / "events" / f"launch-{int(launch.name):05d}.jsonl"
        return path.read_text().count('"kind": "step"') if path.exists() else 0

    def strike(self) -> bool:
        """Wait for a launch that trains, then disturb it once; False if the run has ended before."""

        def training():
            launch = newest(self.run)
            return self.process.poll() is not None or (
                launch is not None
                and self.steps(launch) >= self.draw.randint(1, 5)
                and not (launch / "ending.json").exists()
            )

        wait(training)
        launch = newest(self.run)
        if self.process.poll() is not None or launch is None:
            return False
        ranks = [json.loads(p.read_text()) for p in launch.glob("ranks/?.json")]
        victim = self.draw.choice(ranks)
        what = self.draw.choice(("rank", "torchrun", "supervisor", "stop", "hang", "truncate"))
        try:
            if what == "rank":
                os.kill(victim["pid"], signal.SIGKILL)
            elif what == "torchrun":
                parent = Path(f"/proc/{victim['parent']}/stat").read_text().rsplit(")", 1)[1].split()[1]
                os.kill(int(parent), signal.SIGKILL)
            elif what == "hang":
                self.mark.write_text(str(ranks.index(victim)))
            elif what == "stop":
                os.kill(victim["pid"], signal.SIGSTOP)
            else:
                self.process.kill()
                self.process.wait()
                if what == "truncate" and len(list(self.run.glob("checkpoints/step-*"))) > 1:
                    last = max(self.run.glob("checkpoints/step-*"), key=lambda p: p.name.split("-launch-")[::-1])
                    file = self.draw.choice([p for p in last.rglob("*") if p.is_file()])
                    os.truncate(file, file.stat().st_size // 2)
                self.process = self.start("--resume", str(self.run))
        except (ProcessLookupError, FileNotFoundError):  # it has just ended
            return True
        self.done.append(what)
        number = int(launch.name)
        wait(lambda: self.process.poll() is not None or int((newest(self.run) or launch).name) > number)
        self.mark.unlink(missing_ok=True)
        return True

    def finish(self) -> dict:
        for _ in range(self.rounds):
            if not self.strike():
                break
        code = self.process.wait(600)
        status = subprocess.run([*BATCHWRIGHT, "--status", str(self.run), "--json"], capture_output=True, check=True)
        command = [*BATCHWRIGHT[:-1], "check", "--ledger", str(self.run), "--json"]
        checked = subprocess.run(command, capture_output=True, check=False)  # the ids, too; 5 if a sample is wrong
        return {"code": code, **json.loads(status.stdout), "ledger": json.loads(checked.stdout)}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = supervisor_share(folder)
        print(f"| the supervisor | |\n|---|---|\n| CPU, of one core | {share:.2%} |")
        if share > 0.01:
            broken.append(f"the supervisor takes {share:.2%} of a core, more than 1%")
        torture = Torture(folder, rounds, seed)
        try:
            document = torture.finish()
        finally:
            torture.process.kill()
        ledger, boundaries = document["ledger"], document["boundaries"]
        print(f"\n| torture, seed {seed} | |\n|---|---|")
        for what in sorted(set(torture.done)):
            print(f"| {what} | {torture.done.count(what)} |")
        print(f"| state | {document['state']}, exit {document['code']} |")
        print(
            f"| audit | ok {ledger['ok']}, {ledger['gaps']} gaps, {ledger['repeats']} repeats, of {ledger['samples']} |"
        )
        print(f"| discarded and redone | {ledger['discarded_samples']} samples |")
        lost = sorted(b["lost_seconds"] for b in boundaries)
        if lost:
            print(
                f"| lost per boundary | {lost[len(lost) // 2]:.1f} s (median of {len(lost)}, {lost[0]:.1f} to {lost[-1]:.1f}) |"
            )
        if document["state"] != "complete" or not ledger["ok"] or ledger["samples"] != document["total_samples"]:
            broken.append(f"torture with seed {seed}: {document['state']}, ledger {ledger}")
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
