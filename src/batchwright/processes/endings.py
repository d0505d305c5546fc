"""Why a process of the user ended, and how its traceback reaches the command line.

One list of causes for trials and for ranks of a run, found by the exception's class, then by text, then by signal:

| kind            | status  | what it means                                                         |
|---|---|---|
| `device-oom`    | oom     | the accelerator's memory, or a library's workspace on it, is exhausted |
| `host-oom`      | oom     | the host's memory is: an allocation failed, or the kernel killed it    |
| `loader-worker` | oom     | a DataLoader worker was killed, mostly for host or shared memory       |
| `hang`          | timeout | no end within the timeout                                              |
| `compile`       | crash   | a compiler failed, and not for lack of memory                          |
| `crash`         | crash   | anything else: it does not depend on the size, so the search stops     |

The texts for the CPU were printed by torch 2.13; those of accelerators are from the issue trackers of PyTorch, JAX and
the libraries.

A child process writes its error as `error_record`. `error_from_record` makes the same error in the parent, with the
user's traceback as a note (`__notes__`), which the command line prints.
"""

from __future__ import annotations

import re
import signal
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from batchwright.core import errors
from batchwright.core.errors import BatchwrightError, RunError, Violation

STATUS = {
    "device-oom": "oom",
    "host-oom": "oom",
    "loader-worker": "oom",
    "hang": "timeout",
    "compile": "crash",
    "crash": "crash",
}


@dataclass(frozen=True)
class ExitCause:
    """Why a process failed: the kind, the evidence, and the user's traceback if there is one.

    >>> ExitCause("device-oom", "torch.OutOfMemoryError").status
    'oom'
    """

    kind: str
    reason: str
    traceback: str | None = None

    @property
    def status(self) -> str:
        """The trial's status: oom, timeout or crash."""
        return STATUS[self.kind]


_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")  # wherever they are: a .pth file may point to another environment
# Class -> kind. Of an exception's class and its base classes, the most derived one in this table decides.
_CLASSES = {
    "OutOfMemoryError": "device-oom",  # torch.OutOfMemoryError, which CUDA, HIP and XPU raise
    "MemoryError": "host-oom",  # also numpy's _ArrayMemoryError, by inheritance
}
# Classes that mean a mistake in the code: their text is not searched for memory.
_MISTAKES = re.compile(
    r"^(ValueError|TypeError|KeyError|IndexError|AttributeError|NameError|UnboundLocalError|ImportError|"
    r"ModuleNotFoundError|AssertionError|NotImplementedError|SyntaxError|FileNotFoundError|ZeroDivisionError)$"
)
# Text -> kind, first match wins: the specific before the general.
_TEXTS: tuple[tuple[str, str], ...] = (
    (r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (is killed by signal: (Killed|Bus error|Aborted|Terminated)|"
     r"exited unexpectedly)", "loader-worker"),
    (r"unable to (mmap|write to file|open shared memory object).{0,200}(Cannot allocate memory|No space left)",
     "loader-worker"),
    (r"(CUDA|HIP|XPU|NPU|MPS backend) out of memory", "device-oom"),
    (r"(CUDA|HIP)( driver| runtime)? error:? .{0,40}out of memory", "device-oom"),
    (r"(cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory)", "device-oom"),
    (r"(UR_RESULT_ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)|OUT_OF_DEVICE_MEMORY)", "device-oom"),
    (r"RESOURCE_EXHAUSTED.{0,400}?(memory|alloc|hbm|vmem)", "device-oom"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "device-oom"),
    (r"CUBLAS_STATUS_NOT_INITIALIZED.{0,60}cublasCreate", "device-oom"),  # the handle's workspace did not fit
    (r"CUDNN_STATUS_(ALLOC_FAILED|NOT_SUPPORTED)", "device-oom"),  # NOT_SUPPORTED: no engine's workspace fits
    (r"unable to find an engine to execute this computation", "device-oom"),
    (r"MIOPEN_STATUS_ALLOC_FAILED|miopenStatusAllocFailed|rocblas_status_memory_error", "device-oom"),
    (r"(NCCL|nccl|Cuda failure).{0,200}out of memory", "device-oom"),
    (r"DefaultCPUAllocator: (can't allocate memory|not enough memory)", "host-oom"),  # Linux, Windows
    (r"alloc_cpu\.cpp.{0,80}(allocate|not enough memory)", "host-oom"),
    (r"Unable to allocate [\d.]+ \w+ for an array", "host-oom"),  # numpy
    (r"std::bad_alloc|\bMemoryError\b|Cannot allocate memory|\[Errno 12\]", "host-oom"),
    # Under a budget of address space a thread's stack may be what no longer fits.
    (r"Thread creation failed: Resource temporarily unavailable|can't start new thread", "host-oom"),
    (r"could not create a (memory object|primitive)", "host-oom"),  # oneDNN's scratchpad
    (r"Signal 9 \(SIGKILL\) received by PID|exits with return code = -9", "host-oom"),  # torchrun, deepspeed of a rank
    (r"[Oo]ut [Oo]f [Mm]emory: Killed process|oom[-_]kill|OOMKilled|Exceeded job memory limit", "host-oom"),
    (r"(torch\._inductor|torch\._dynamo|triton\.compiler|BackendCompilerFailed|InductorError|XLA compil)", "compile"),
    (r"\bout of memory\b", "device-oom"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern, re.DOTALL), kind) for pattern, kind in _TEXTS)
# Signal -> kind, when the output gives no cause.
_SIGNALS = {
    "SIGKILL": ("host-oom", "killed by SIGKILL, as the kernel's out-of-memory killer does"),
    "SIGBUS": ("host-oom", "killed by SIGBUS, as when shared memory (/dev/shm) is exhausted"),
}


def from_exception(classes: Sequence[str], text: str) -> ExitCause | None:
    """The cause that an exception shows, from its class and base classes (most derived first) and its text; None: not known.

    >>> from_exception(["RuntimeError", "Exception"], "CUDA error: out of memory").kind
    'device-oom'
    >>> from_exception(["ValueError", "Exception"], "out of memory").kind
    'crash'
    """
    found = from_text(text)
    for name in classes:
        if name in _CLASSES:
            return ExitCause(found.kind if found else _CLASSES[name], _first(text, name))
    if classes and _MISTAKES.match(classes[0]):
        return ExitCause("crash", _first(text, classes[0]))
    return found


def from_text(text: str) -> ExitCause | None:
    """The cause that an error text shows, or None.

    >>> from_text("RESOURCE_EXHAUSTED: Out of memory allocating 597099076 bytes.").kind
    'device-oom'
    """
    for pattern, kind in _COMPILED:
        if found := pattern.search(text):
            line = text[text.rfind("\n", 0, found.start()) + 1 :].split("\n", 1)[0]
            return ExitCause(kind, line.strip()[:300])
    return None


def cause_of(error: BaseException) -> ExitCause:
    """The cause that an exception, or one of its causes, shows; with the user's traceback."""
    chain: list[BaseException] = []
    next_error: BaseException | None = error
    while next_error is not None and next_error not in chain:
        chain.append(next_error)
        next_error = next_error.__cause__ or next_error.__context__
    shown = error.__cause__ if isinstance(error, RunError) and error.__cause__ else error
    # The message of our own errors says everything.
    trace = None if isinstance(shown, BatchwrightError) else format_users_traceback(shown)
    found = [from_exception([c.__name__ for c in type(e).__mro__], str(e)) for e in chain]
    out_of_memory = next((c for c in found if c and c.status == "oom"), None)
    known = out_of_memory or next((c for c in found if c and c.kind == "compile"), None)
    return ExitCause(
        known.kind if known else "crash", known.reason if known else f"{type(shown).__name__}: {shown}", trace
    )


def is_users(filename: str) -> bool:
    """Whether a frame's file is the user's: not ours, not a library's."""
    installed = any(part in filename for part in _INSTALLED)
    return not installed and not filename.startswith((_OURS, "<", *_LIBRARIES))


def users_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on; None if no frame is the user's."""
    return _first_frame(error, is_users)


def users_traceback(error: BaseException) -> TracebackType | None:
    """The traceback as the user should see it: it starts in their code, or at least outside of ours."""
    outside = _first_frame(error, lambda file: not file.startswith((_OURS, "<frozen importlib")))
    return users_frames(error) or outside or error.__traceback__


def format_users_traceback(error: BaseException) -> str:
    """The lines of `users_traceback`."""
    return "".join(traceback.format_exception(type(error), error, users_traceback(error)))


def _first_frame(error: BaseException, wanted: Callable[[str], bool]) -> TracebackType | None:
    def frames() -> Iterator[TracebackType]:
        frame = error.__traceback__
        while frame is not None:
            yield frame
            frame = frame.tb_next

    return next((f for f in frames() if wanted(f.tb_frame.f_code.co_filename)), None)


@contextmanager
def users_code(failure: str, given: str | None = None) -> Generator[None]:
    """Run a user's code: raise RunError from any exception, and cut its traceback to begin in the user's code."""
    try:
        yield
    except BatchwrightError:
        raise
    except (Exception, SystemExit) as error:
        cause = error.with_traceback(users_traceback(error))
        raise RunError(f"{failure}: {type(error).__name__}: {error}", field="task", given=given) from cause


def sentence(text: str) -> str:
    """A user's text with one full stop at its end.

    >>> sentence("use train.py instead."), sentence("no labels")
    ('use train.py instead.', 'no labels.')
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def error_record(error: BatchwrightError) -> dict[str, Any]:
    """An error as a child process writes it: what `--json` prints, and the user's traceback."""
    cause = error.__cause__
    return {**error.record(), "traceback": None if cause is None else format_users_traceback(cause)}


def error_from_record(record: Mapping[str, Any]) -> BatchwrightError:
    """The error that a child process wrote."""
    kind: type[BatchwrightError] = getattr(errors, record["type"], RunError)
    violations = [
        Violation(v["message"], v["field"], v["given"], tuple(v["nearest"]))
        for v in record.get("violations") or [record]
    ]
    error = kind(violations=violations)
    if record.get("traceback"):
        error.add_note(record["traceback"].rstrip())
    return error


_RANK = r"(?:\[\w+\]: ?)*"  # torch and torchrun put `[rank1]: ` before every line
_RAISED = re.compile(
    rf"^{_RANK}((?:[\w.]+\.)?(_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))(?::(?: .*)?)?)$", re.MULTILINE
)
# What torchrun, accelerate and others raise when a rank has failed.
_LAUNCHERS = {"ChildFailedError", "CalledProcessError"}
_TRACEBACK = "Traceback (most recent call last):"
# What a destructor raised while a process was ending is never the reason of its end.
_IGNORED = re.compile(
    rf"^{_RANK}Exception ignored (?:in|while)[^\n]*\n(?:{_RANK}{re.escape(_TRACEBACK)}[^\n]*\n"
    rf"(?:(?:\[\w+\]: )*[ \t][^\n]*\n)*)?[^\n]*\n?",
    re.MULTILINE,
)


def from_exit(returncode: int, output: str) -> ExitCause:
    """Why a process ended, from its return code and its last output: a traceback's class, text, then signal.

    Of several exceptions, one that is out of memory counts: launchers and other ranks fail after it, and because of it.

    >>> from_exit(-9, "").kind, from_exit(137, "").kind, from_exit(-11, "").kind
    ('host-oom', 'host-oom', 'crash')
    """
    output = _IGNORED.sub("", output)
    found, trace = _raised(output) if _TRACEBACK in output else (from_text(output), None)
    if found and found.kind != "crash":
        return ExitCause(found.kind, found.reason, trace)
    number = -returncode if returncode < 0 else returncode - 128  # a shell reports signal n as 128 + n
    if number in {s.value for s in signal.Signals}:
        name = signal.Signals(number).name
        kind, reason = _SIGNALS.get(name, ("crash", f"killed by {name}"))
        return ExitCause(kind, reason, trace)
    if found:
        return ExitCause("crash", found.reason, trace)
    return ExitCause("crash", f"exit status {returncode}" + (f": {_last(output)}" if output.strip() else ""), trace)


def _raised(output: str) -> tuple[ExitCause | None, str]:
    """The cause that the exceptions in an output show, and the traceback of that exception."""
    raised = list(_RAISED.finditer(output, output.find(_TRACEBACK)))
    # What follows an exception's line belongs to it: messages have several lines.
    ends = [*(match.start() for match in raised[1:]), len(output)]
    texts = [(m, output[m.start(1) : end].split(_TRACEBACK)[0]) for m, end in zip(raised, ends, strict=True)]
    texts = [(m, text) for m, text in texts if m[2] not in _LAUNCHERS] or texts
    known = [(m, text, from_exception([m[2], "Exception"], text)) for m, text in texts]
    if not known:
        return from_text(output), output[output.rfind(_TRACEBACK) :].strip()
    match, text, cause = next((one for one in known if one[2] and one[2].status == "oom"), known[-1])
    trace = output[output.rfind(_TRACEBACK, 0, match.start()) : match.start()] + text
    return cause or ExitCause("crash", _first(match[1], "an exception")), trace.strip()


def _first(text: str, name: str) -> str:
    line = text.strip().split("\n", 1)[0][:300]
    return line if line.startswith(name) or "." in line.split(":")[0] else f"{name}: {line}" if line else name


def _last(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1][:300]
