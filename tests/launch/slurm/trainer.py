"""A stand-in for a training script: steps of 16 samples, a save every second step, a clean end on a signal.

It writes what it trained on, with its job and process, so that a test can check it. It checks the fence before it saves, as
every script must that several jobs might run.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

STEP = 16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=int, required=True)
    parser.add_argument("--end", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--hold", type=Path, help="wait at sample --hold-at while this file exists")
    parser.add_argument("--hold-at", type=int, default=10**9)
    parser.add_argument("--enough", type=int, help="exit with code 0 at this sample, once")
    parser.add_argument(
        "--kill-job", action="store_true", help="SIGKILL for the job's first process, the parent's parent"
    )
    given = parser.parse_args()
    if given.kill_job:
        os.kill(int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: stop.append(n))
    launch = int(os.environ["BATCHWRIGHT_LAUNCH"])
    fence, status = Path(os.environ["BATCHWRIGHT_FENCE_FILE"]), Path(os.environ["BATCHWRIGHT_STATUS_FILE"])
    trained = Path(os.environ["BATCHWRIGHT_RUN_DIR"], "trained")
    trained.mkdir(exist_ok=True)
    mine = {"job": os.environ.get("SLURM_JOB_ID"), "pid": os.getpid(), "nodes": int(os.environ["SLURM_JOB_NUM_NODES"])}
    assert mine["nodes"] == given.nodes, (mine, given.nodes)
    hostile = os.environ.get("HOSTILE")

    def save(position: int) -> None:
        if json.loads(fence.read_text())["launch"] != launch:
            print("a newer launch has the fence", flush=True)
            sys.exit(3)
        part = status.with_name(f"{status.name}.part")
        part.write_text(json.dumps({"consumed_samples": position}))
        os.replace(part, status)

    with open(trained / f"launch-{launch:04d}.jsonl", "a", encoding="utf-8") as ledger:
        position, saved = given.start, given.start
        enough = given.end if given.enough is None or given.start >= given.enough else min(given.end, given.enough)
        while position < enough:
            if position >= given.hold_at and given.hold is not None:
                while given.hold.exists() and not stop:
                    time.sleep(0.05)
            time.sleep(given.seconds)
            line = {"start": position, "end": min(position + STEP, given.end), **mine, "hostile": hostile}
            position = line["end"]
            ledger.write(json.dumps(line) + "\n")
            ledger.flush()
            if position // STEP % 2 == 0:
                save(position)
                saved = position
            if stop:
                break  # after a step
        if stop:
            time.sleep(0.5)  # as a slow save: the job receives its own signal meanwhile
        if saved != position:
            save(position)
    return 0


if __name__ == "__main__":
    sys.exit(main())
