"""A trainer that counts samples instead of training, and fails as its SCRIPT says.

    python trainer.py BATCH START END [SCRIPT...]

SCRIPT: `crash@96`, `kill@96`, `oom@96`, `hang@96`, `stop@96`, `leave@96` happen once per run directory, with a `!` at the
end every time. `over=8` trains 8 samples past the end; `slow=0.1` sleeps per step; `ignore` ignores SIGTERM; `silent`
writes no status; `child` leaves a grandchild; `tail` hangs after the last save; `export=2` works 2 s after the last save;
`save=2` needs 2 s for a save on SIGTERM and exits on a second one; `hold=FILE` waits after the third step while the file
exists and there is no SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time


def main() -> None:
    batch, position, end = (int(argument) for argument in sys.argv[1:4])
    script = sys.argv[4:]
    options = dict(word.partition("=")[::2] for word in script)
    path = os.environ["BATCHWRIGHT_STATUS_FILE"]
    stopping = []

    def on_term(*_: object) -> None:
        if stopping and "save" in options:
            sys.exit("a second SIGTERM")
        if "ignore" not in options:
            stopping.append(1)

    signal.signal(signal.SIGTERM, on_term)
    end += int(options.get("over", 0))

    def save() -> None:
        if "silent" not in options:
            with open(f"{path}.part", "w") as file:
                json.dump({"consumed_samples": position}, file)
            os.replace(f"{path}.part", path)
        if "memory" in options:  # a checkpoint of its own, for --position-command
            with open(options["memory"], "w") as file:
                file.write(str(position))

    if "child" in options:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    steps = 0
    while position < end:
        while steps == 3 and os.path.exists(options.get("hold", "")) and not stopping:
            time.sleep(0.02)
        steps += 1
        time.sleep(float(options.get("slow", 0.01)))
        position = min(end, position + batch)
        for word in script:
            name, at, where = word.rstrip("!").partition("@")
            done = os.path.join(os.environ["BATCHWRIGHT_RUN_DIR"], f"{name}-{where}.done")
            if at and position >= int(where) and (word.endswith("!") or not os.path.exists(done)):
                open(done, "w").close()
                _happen(name)
        if stopping:
            time.sleep(float(options.get("save", 0)))
        save()
        if stopping:
            break
    if "export" in options:
        time.sleep(float(options["export"]))
        open(os.path.join(os.environ["BATCHWRIGHT_RUN_DIR"], f"exported-{position}"), "w").close()
    print(f"reached {position}", flush=True)
    if "tail" in options:
        time.sleep(1000)


def _happen(name: str) -> None:
    print(f"about to {name}", flush=True)
    if name == "crash":
        raise ValueError("the shelf is empty")
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if name == "oom":
        raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if name == "leave":
        sys.exit(0)
    while name == "hang":
        time.sleep(0.05)


if __name__ == "__main__":
    main()
