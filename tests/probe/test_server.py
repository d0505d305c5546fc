"""Forked trials: as fresh as new processes, ended like them, and gone with the prober."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from batchwright.core.errors import ConfigError
from batchwright.probe.records import read_request
from batchwright.probe.runner import TaskRunner

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="on other systems no trial is forked"),
]
TASK = """
import os, time, torch
from pathlib import Path
from batchwright.runtime.task import Task

HERE = Path(__file__).parent
seen = []

def loss(model, x):
    seen.append(len(x))
    with open(HERE / "trials", "a") as file:
        print(os.getpid(), os.getppid(), len(seen), file=file)
    while len(x) > 4:
        time.sleep(0.1)
    return model(x).sum(), len(x)

def task():
    return Task(model=lambda: torch.nn.Linear(2, 1), dataset=[torch.ones(2)] * 8, loss=loss,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


@pytest.fixture
def runner(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "scratch").mkdir()
    with closing(
        TaskRunner(read_request(f"{tmp_path / 'task.py'}:task", memory="1GiB", timeout=600), tmp_path / "scratch")
    ) as made:
        yield made


def lines(folder: Path) -> list[list[int]]:
    path = folder / "trials"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_for(condition, seconds=600.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_each_trial_is_a_process_that_has_run_nothing_before(runner, tmp_path):
    assert runner.limit(2).fits
    assert runner.limit(1).fits
    first, second = lines(tmp_path)[:3], lines(tmp_path)[3:]
    assert {row[0] for row in first} != {row[0] for row in second}
    assert [row[2] for row in first] == [row[2] for row in second] == [1, 2, 3]


def test_a_hang_ends_in_time_and_the_next_trial_runs(runner, tmp_path):
    assert runner.limit(2).fits  # the imports are done
    patient = runner.request.timeout
    object.__setattr__(runner.request, "timeout", 20.0)
    trial = runner.limit(5)
    object.__setattr__(runner.request, "timeout", patient)
    assert (trial.status, trial.cause) == ("timeout", "hang")
    assert all(gone(pid) for pid in lines(tmp_path)[-1][:2])
    assert runner.limit(2).fits


def test_a_killed_server_ends_its_trial_and_is_replaced(runner, tmp_path):
    def kill():
        _, server, _ = wait_for(lambda: lines(tmp_path))[0]
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    trial = runner.limit(5)
    killer.join()
    assert not trial.fits
    assert all(wait_for(lambda pid=pid: gone(pid)) for pid in lines(tmp_path)[0][:2])
    assert runner.limit(2).fits


def test_a_killed_prober_leaves_nothing(runner, tmp_path, request):
    code = f"""
    from pathlib import Path
    from batchwright.probe.records import read_request
    from batchwright.probe.runner import TaskRunner
    TaskRunner(read_request({runner.request.target!r}, memory="1GiB"), Path({str(tmp_path / "scratch")!r})).limit(5)
    """
    prober = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    request.addfinalizer(prober.kill)
    trial, server, _ = wait_for(lambda: lines(tmp_path))[0]
    guard = parent(server)
    assert parent(guard) == prober.pid
    prober.kill()
    prober.wait()
    wait_for(lambda: all(gone(pid) for pid in (trial, server, guard)) and not (tmp_path / "scratch").exists())


def test_a_killed_guard_leaves_nothing(runner, tmp_path):
    def kill():
        _, server, _ = wait_for(lambda: lines(tmp_path))[0]
        os.kill(parent(server), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert not runner.limit(5).fits
    killer.join()
    assert all(wait_for(lambda pid=pid: gone(pid)) for pid in lines(tmp_path)[0][:2])


def test_processes_that_a_trial_leaves_behind_are_ended_before_the_next_trial(runner, tmp_path):
    daemon = f"import time; open({str(tmp_path / 'daemon')!r}, 'w').write('started'); time.sleep(600)"
    start = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-S', '-c', {daemon!r}], start_new_session=True)"
    start += f"\nopen({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
    start += f"while not os.path.exists({str(tmp_path / 'daemon')!r}): time.sleep(0.01)\n"
    (tmp_path / "task.py").write_text(TASK + start)
    assert runner.limit(2).fits
    assert gone(int((tmp_path / "child").read_text()))
    server = lines(tmp_path)[0][1]
    assert not gone(server)
    assert runner.limit(1).fits
    assert lines(tmp_path)[-1][1] == server


def test_imports_that_fail_show_their_error(runner, tmp_path, monkeypatch):
    (tmp_path / "site" / "numpy").mkdir(parents=True)
    (tmp_path / "site" / "numpy" / "__init__.py").write_text("raise RuntimeError('a broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    trial = runner.limit(1)
    assert (trial.status, trial.cause) == ("crash", "crash")
    assert "RuntimeError: a broken installation" in trial.reason
    assert "a broken installation" in trial.traceback


def test_where_an_import_has_used_the_device_a_trial_is_a_new_interpreter(runner, tmp_path, monkeypatch):
    """There is no device here, so torch's answer after a fork is replaced."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import torch\n"
        "torch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')\n"
        "torch.cuda._is_in_bad_fork = lambda: True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    seen: list[bytes] = []

    def look():
        pid = wait_for(lambda: lines(tmp_path))[0][0]
        seen.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(pid, signal.SIGKILL)

    looker = threading.Thread(target=look)
    looker.start()
    runner.limit(5)
    looker.join()
    assert b"batchwright.probe.worker" in seen[0]
    assert runner.limit(2).fits


def test_imports_that_hang_end_with_the_prober(runner, tmp_path):
    (tmp_path / "site" / "numpy").mkdir(parents=True)
    hangs = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "site" / "numpy" / "__init__.py").write_text(hangs)
    code = f"""
    from pathlib import Path
    from batchwright.probe.records import read_request
    from batchwright.probe.runner import TaskRunner
    TaskRunner(read_request({runner.request.target!r}, memory="1GiB"), Path({str(tmp_path / "scratch")!r})).limit(1)
    """
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env) as prober:
        server = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        prober.kill()
    wait_for(lambda: gone(server) and not (tmp_path / "scratch").exists())


@pytest.mark.parametrize("device", ["nonsense", *["cuda"] * (not torch.cuda.is_available()), "meta"])
def test_a_device_that_is_not_available_is_refused_by_name(runner, device):
    object.__setattr__(runner.request, "on", device)
    with pytest.raises(ConfigError, match=rf"on='{device}' is not available: torch .* finds cpu") as caught:
        runner.limit(1)
    assert caught.value.nearest[0] == "cpu"
