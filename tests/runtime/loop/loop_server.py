"""Imports everything once and forks ranks on request, so that a launch imports nothing. Requests and answers are JSON lines."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import loop_reshard
import loop_tasks
import torch
import torch.distributed as dist

from batchwright.core.codec import decode
from batchwright.core.ramp.rules import Constant
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.loop.settings import Settings
from batchwright.runtime.loop.train import train


def rank_main(rank: int, request: dict[str, Any]) -> int:
    ranks, folder = request["start"], request["folder"]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if ranks > 1 or "call" in request:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    if "call" in request:
        value = getattr(loop_reshard, request["call"])(rank, *request["args"])
        with open(f"{folder}/rank{rank}.pickle", "wb") as file:
            pickle.dump(value, file)
        if ranks > 1:
            dist.destroy_process_group()
        return 0
    status = train(
        loop_tasks.task(**request["task"]), decode(Schedule, request["schedule"]), decode(Settings, request["settings"])
    )
    if ranks > 1:
        dist.destroy_process_group()
    return status.exit_code


def start(request: dict[str, Any]) -> list[int]:
    pids = []
    for rank in range(request["start"]):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        with open(f"{request['folder']}/rank{rank}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                code = rank_main(rank, request)
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    return pids


def wait(pids: list[int], timeout: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:  # torch imports its compiler in the first step of an optimizer
        train(loop_tasks.task(), Constant(8).compile().until(8), Settings(directory=warm, progress=False))
    for line in sys.stdin:
        request = json.loads(line)
        answer = start(request) if "start" in request else wait(request["wait"], request["timeout"])
        print(json.dumps(answer), flush=True)
