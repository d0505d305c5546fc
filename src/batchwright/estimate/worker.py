"""The estimating process: `python -m batchwright.estimate.worker REQUEST.json RESULT.json`. Torch or JAX lives here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import BatchwrightError, MissingExtraError, PlanError, RunError
from batchwright.rundir import atomic

from .devices import human
from .fit import SAME_SLOPE, largest, settle
from .jax_step import is_jax
from .records import Point, Request

# When two slopes are one. XLA plans every shape anew, so its peaks wobble (up to 4% between doublings were measured).
_TOLERANCE = {"torch": SAME_SLOPE, "jax": 0.05}


def answer(job: str, request: Request) -> dict[str, Any]:
    """The result of one job (`estimate` or `trial`) as JSON; whatever goes wrong is a result as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its own private tools
        try:
            work = _trial if job == "trial" else _estimate
            return work(request, "jax" if is_jax(_source(request.task)) else "torch")
        except BaseException as error:
            return {"error": _record(error, request.task)}
        finally:
            if "batchwright.estimate.sharded" in sys.modules:
                from .sharded import leave

                leave()


def _estimate(request: Request, framework: str) -> dict[str, Any]:
    runs = _runner(request, framework)
    points: list[Point] = []
    limits: list[dict[str, Any]] = []
    runner: Any = None
    for length in request.sequence_lengths or (None,):
        runner, known = runs(request, length), dict[int, Point]()

        def peak(size: int, runner: Any = runner, known: dict[int, Point] = known) -> int:
            if size not in known:
                started = time.monotonic()
                known[size] = runner.point(size)
                _progress(request, known[size], time.monotonic() - started)
            return known[size].peak_memory_bytes

        for size in request.micro_batch_sizes:
            peak(size)
        found = None
        if request.memory_bytes is not None:
            found = largest(peak, request.memory_bytes, convex=framework == "torch")
            if found > 1 and len(known) > 1:
                peak(max(1, found // 2))  # the line below the limit, for the slope and the fit
        elif not request.micro_batch_sizes:
            settle(peak, lambda size, known=known: _activations(known[size]), tolerance=_TOLERANCE[framework])
        points += [known[size] for size in sorted(known)]
        limits.append({"sequence_length": length, "max_micro_batch_size": found})
    notes = list(getattr(runner, "notes", ()))
    return {"framework": framework, "points": codec.encode(points), "limits": limits, "notes": notes}


def _activations(point: Point) -> bool:
    """Whether what grows with the batch is at least half of the peak."""
    parts = point.breakdown
    return 2 * (parts.get("activations", 0) + parts.get("temporary", 0)) >= point.peak_memory_bytes


def _trial(request: Request, framework: str) -> dict[str, Any]:
    runs = _runner(request, framework)
    if framework == "jax":
        length = request.sequence_lengths[0] if request.sequence_lengths else None
        return {"measured_bytes": runs(request, length).measure(request.micro_batch_sizes[0])}
    from .trial import measure

    return {"measured_bytes": measure(request)}


def _runner(request: Request, framework: str) -> Any:
    """The class that estimates, from the framework's own file; without the framework, the extra that brings it."""
    try:
        if framework == "jax":
            _refuse_torch_options(request)
            from .jax_aot import Compiled

            return Compiled
        from .fake import FakeRuns

        # Torch logs every shape that does not match, with a traceback of its own; ours tells it once.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        return FakeRuns
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "numpy", "jax", "jaxlib"):
            raise
        raise MissingExtraError(
            f"estimate needs {missing.name} for {request.task}, and it is not installed here. "
            f"Install it: pip install 'batchwright[{framework}]'.",
            field="task",
            given=request.task,
            nearest=(f"batchwright[{framework}]",),
        ) from None


def _refuse_torch_options(request: Request) -> None:
    asked = [
        name
        for name, on in (
            ("precision", request.precision != "fp32"),
            ("checkpoint_activations", request.checkpoint_activations),
            ("ranks", request.ranks > 1),
            ("accumulation_steps", request.accumulation_steps > 1),
        )
        if on
    ]
    if asked:
        raise PlanError(
            f"{', '.join(asked)} cannot be set from outside for a JAX step: the function itself decides. Give it "
            "arguments and pass them with --arg.",
            field=asked[0],
        )


def _source(task: str) -> str:
    file = task.rpartition(":")[0]
    path = Path(file if file.endswith(".py") else task).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""  # load_task says what is wrong with it


def _progress(request: Request, point: Point, seconds: float) -> None:
    if request.progress:
        length = "" if point.sequence_length is None else f" sequence_length {point.sequence_length}"
        line = f"estimated micro_batch_size {point.micro_batch_size}{length}: {human(point.peak_memory_bytes)}"
        print(f"{line} ({seconds:.1f} s)", file=sys.stderr, flush=True)


def _record(error: BaseException, task: str) -> dict[str, Any]:
    try:
        if "torch" in sys.modules and not isinstance(error, BatchwrightError):
            from .refuse import explain

            error = explain(error, task)
        elif not isinstance(error, BatchwrightError):
            cause, error = (
                error,
                RunError(f"the task failed: {type(error).__name__}: {error}", field="task", given=task),
            )
            error.__cause__ = cause
    except BaseException as ours:
        return {"kind": "bug", "message": f"{type(ours).__name__}: {ours}", "traceback": traceback.format_exc()}
    cause = error.__cause__
    text = "".join(traceback.format_exception(cause)) if cause is not None else None
    return {"kind": type(error).__name__, **error.record(), "traceback": text}


def main(request_file: str, result_file: str) -> None:
    """Answer the request in a file with a result in another, which appears whole or not at all."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the caller, however it dies
    document = json.loads(Path(request_file).read_text(encoding="utf-8"))
    result = answer(document["job"], codec.decode(Request, document["request"]))
    atomic.write(Path(result_file), json.dumps(result), sync=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
