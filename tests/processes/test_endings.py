"""Every kind of cause: by class, by text, by signal; and texts that only look like memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from batchwright.processes.endings import cause_of, from_exception, from_exit, from_text

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "67108864 bytes. Error code 12 (Cannot allocate memory)"
)
TEXTS = {
    "CUDA out of memory. Tried to allocate 20.00 MiB": "device-oom",
    "CUDA error: out of memory": "device-oom",
    "CUDA driver error: out of memory": "device-oom",
    "HIP out of memory. Tried to allocate 1.0 GiB": "device-oom",
    "HIP error: out of memory": "device-oom",
    "XPU out of memory. Tried to allocate 1.0 GiB": "device-oom",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)": "device-oom",
    "MPS backend out of memory (MPS allocated: 5.0 GB, max allowed: 9.0 GB)": "device-oom",
    "RESOURCE_EXHAUSTED: Out of memory allocating 597099076 bytes.": "device-oom",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.": "device-oom",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "device-oom",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "device-oom",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "device-oom",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.": "device-oom",
    "GET was unable to find an engine to execute this computation": "device-oom",
    "NCCL error: unhandled cuda error, ncclUnhandledCudaError: Cuda failure 2 'out of memory'": "device-oom",
    CPU: "host-oom",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.": "host-oom",
    "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64": "host-oom",
    "terminate called after throwing an instance of 'std::bad_alloc'": "host-oom",
    "OSError: [Errno 12] Cannot allocate memory": "host-oom",
    "libgomp: Thread creation failed: Resource temporarily unavailable": "host-oom",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0": "host-oom",
    "DataLoader worker (pid 123) is killed by signal: Killed. ": "loader-worker",
    "DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that shm is insufficient.": "loader-worker",
    "DataLoader worker (pid(s) 123, 124) exited unexpectedly": "loader-worker",
    "torch._inductor.exc.InductorError: CppCompileError: C++ compile error": "compile",
}


@pytest.mark.parametrize("text", TEXTS)
def test_text(text):
    assert from_text(text).kind == TEXTS[text]
    assert from_exception(["RuntimeError", "Exception"], text).kind == TEXTS[text]


@pytest.mark.parametrize(
    ("classes", "kind"),
    [
        (["OutOfMemoryError", "RuntimeError", "Exception"], "device-oom"),
        (["_ArrayMemoryError", "MemoryError", "Exception"], "host-oom"),
        (["MemoryError", "Exception"], "host-oom"),
    ],
)
def test_class_decides_without_any_text(classes, kind):
    assert from_exception(classes, "").kind == kind


def test_a_mistake_is_not_memory_whatever_it_says():
    assert from_exception(["ValueError", "Exception"], "CUDA out of memory").kind == "crash"


@pytest.mark.parametrize(
    ("code", "output", "kind"),
    [
        (-9, "", "host-oom"),
        (137, "", "host-oom"),
        (-7, "", "host-oom"),
        (-11, "", "crash"),
        (139, "", "crash"),
        (-6, "", "crash"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", "host-oom"),
        (1, f"Traceback (most recent call last):\n  x\nRuntimeError: {CPU}\n", "host-oom"),
        (1, "Traceback (most recent call last):\n  x\ntorch.OutOfMemoryError: CUDA out of memory.\n", "device-oom"),
        (1, "Traceback (most recent call last):\n  x\nValueError: ran out of memory of names\n", "crash"),
        (2, "usage: train.py [-h]", "crash"),
        (1, "DataLoader worker (pid 5) is killed by signal: Killed.\n", "loader-worker"),
    ],
)
def test_exit(code, output, kind):
    assert from_exit(code, output).kind == kind


TRACE = "Traceback (most recent call last):\n  File 'x'\n"
OOM = TRACE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
DEL = "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + TRACE


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (OOM + TRACE + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n===\n", "device-oom"),
        (OOM + TRACE + "subprocess.CalledProcessError: Command '['python']' returned 1.\n", "device-oom"),
        (OOM + DEL + "AttributeError: 'NoneType' object has no attribute 'close'\n", "device-oom"),
        (
            "".join(f"[rank1]: {line}\n" for line in OOM.splitlines())
            + "".join(f"[rank0]: {line}\n" for line in TRACE.splitlines())
            + "[rank0]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:5\n",
            "device-oom",
        ),
        (TRACE + "KeyError: 'x'\n" + DEL + "MemoryError: CUDA out of memory\n", "crash"),
        (DEL + "StopIteration\n" + OOM, "device-oom"),
        (TRACE + "KeyError: 'x'\n" + TRACE + "ChildFailedError: \n", "crash"),
        (TRACE + "ChildFailedError: \n===\n traceback : Signal 9 (SIGKILL) received by PID 7\n", "host-oom"),
        (TRACE + "RuntimeError: x\n" + TRACE + "ChildFailedError: \n Signal 9 (SIGKILL) received by PID 7\n", "crash"),
    ],
)
def test_out_of_memory_among_several_exceptions(output, kind):
    found = from_exit(1, output)
    assert found.kind == kind
    if kind == "device-oom":
        assert found.reason.startswith("torch.OutOfMemoryError: CUDA out of memory")
        assert found.traceback.rstrip().endswith("2 GiB") or "[rank0]" in found.traceback


def test_the_traceback_of_a_command_is_kept():
    text = "step 1\nTraceback (most recent call last):\n  File 'train.py'\nKeyError: 'x'\n"
    assert from_exit(1, text).traceback.startswith("Traceback")


RANK = """
import os, signal, sys
if "{how}" == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
raise KeyError("a mistake of the rank's")
"""


@pytest.mark.torch
@pytest.mark.parametrize(("how", "kind", "text"), [("kill", "host-oom", "SIGKILL"), ("raise", "crash", "a mistake of")])
def test_what_torchrun_prints_about_a_rank_that_ended(how, kind, text, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "rank.py").write_text(RANK.format(how=how))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run([*launcher, tmp_path / "rank.py"], capture_output=True, text=True, timeout=900)
    found = from_exit(done.returncode, done.stdout + done.stderr)
    assert found.kind == kind
    assert text in found.reason
    if how == "raise":
        assert "rank.py" in found.traceback
        assert "ChildFailedError" not in found.traceback


def test_an_out_of_memory_cause_counts():
    try:
        try:
            raise MemoryError
        except MemoryError as cause:
            raise RuntimeError("building failed") from cause
    except RuntimeError as error:
        assert cause_of(error).kind == "host-oom"
