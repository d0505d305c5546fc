"""Stands in for a training script: takes steps of 16 samples, saves every second one, ends cleanly when asked to.

It writes what it trained on, with its job and process, so that a test can audit it; and checks the fence before it
saves, as any script has to that several jobs might run.
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
    parser.add_argument("--hold", type=Path, help="wait at sample --hold-at as long as this file is there")
    parser.add_argument("--hold-at", type=int, default=10**9)
    parser.add_argument("--enough", type=int, help="end as if all were done, once, at this sample")
    parser.add_argument(
        "--kill-job", action="store_true", help="SIGKILL for the job's own process, the parent's parent"
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
            print("a newer launch has taken over", flush=True)
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
                break  # after a step, whenever it was asked
        if stop:
            time.sleep(0.5)  # a save takes a while: whoever asked the ranks has by then told their job, too
        if saved != position:
            save(position)
    return 0


if __name__ == "__main__":
    sys.exit(main())
