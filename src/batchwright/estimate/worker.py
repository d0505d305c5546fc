"""The estimating process, from both sides: `run` starts it and returns its result; in it, `main` loads torch or JAX."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import BatchwrightError, MissingExtraError, PlanError, RunError
from batchwright.core.numbers import format_bytes
from batchwright.processes.endings import error_from_record, error_record, from_exit, sentence
from batchwright.processes.start import FIXED_ALLOCATOR, GuardedProcess, environment
from batchwright.processes.target import expanded, split_target
from batchwright.rundir import atomic

from .fit import SAME_SLOPE, largest, settle
from .jax_step import is_jax
from .records import EstimateRequest, Point

# Slopes measured without a fixed allocator are 17% off (docs/estimate.md). JAX stays on the CPU: no device may be used.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
# When two slopes are equal. XLA plans every shape separately, so its peaks vary (up to 4% between doublings were measured).
_TOLERANCE = {"torch": SAME_SLOPE, "jax": 0.05}


def run(job: str, request: EstimateRequest, *, timeout: float) -> dict[str, Any]:
    """Do one job (`estimate` or `trial`) in a process of its own, which never outlives this call."""
    with tempfile.TemporaryDirectory(prefix="batchwright-estimate-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps({"job": job, "request": codec.encode(request)}), encoding="utf-8")
        code = "import sys; from batchwright.estimate.worker import main; main(*sys.argv[1:])"
        command = [sys.executable, "-W", "ignore", "-c", code, str(asked), str(answered)]
        env = environment(FIXED_ALLOCATOR, _ENVIRONMENT)
        # The user's code may print: that goes to standard error, since standard output is for the result.
        with GuardedProcess(command, env, scratch=folder) as child:
            done = child.watch(timeout, echo=True)
        if done.returncode is None:
            raise RunError(
                f"{job} did not finish within {timeout:g} s. Give it more time (--timeout), or fewer sizes "
                "(--micro-batch-size).",
                field="timeout",
                given=timeout,
            )
        if not answered.exists():
            reason = sentence(from_exit(done.returncode, done.output).reason)
            raise RunError(f"the estimating process ended without a result: {reason} Probe instead.", field="task")
        result = json.loads(answered.read_text(encoding="utf-8"))
    return _checked(result)


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    error: Mapping[str, Any] | None = result.get("error")
    if error is None:
        return result
    if error["type"] == "bug":
        raise RuntimeError(f"in the estimating process: {error['message']}")
    raise error_from_record(error)


def answer(job: str, request: EstimateRequest) -> dict[str, Any]:
    """The result of one job as JSON; an error is a result as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own private tools
        try:
            work = _trial if job == "trial" else _estimate
            return work(request, "jax" if is_jax(_source(request.task)) else "torch")
        except BaseException as error:
            return {"error": _error(error, request.task)}
        finally:
            if "batchwright.estimate.fake" in sys.modules:
                from .fake import destroy_fake_group

                destroy_fake_group()


def _estimate(request: EstimateRequest, framework: str) -> dict[str, Any]:
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
        if request.micro_batch_sizes and request.memory_bytes is not None:
            found = max((b for b in known if known[b].peak_memory_bytes <= request.memory_bytes), default=0)
        elif request.memory_bytes is not None:
            found = largest(peak, request.memory_bytes, convex=framework == "torch")
            if found > 1 and len(known) > 1:
                peak(max(1, found // 2))  # a second point below the limit, for the slope and the fit
        elif not request.micro_batch_sizes:
            settle(peak, lambda size, known=known: _activations(known[size]), tolerance=_TOLERANCE[framework])
        points += [known[size] for size in sorted(known)]
        limits.append({"sequence_length": length, "max_micro_batch_size": found})
    notes = list(getattr(runner, "notes", ()))
    rules = list(getattr(runner, "rules", ()))
    return {"framework": framework, "points": codec.encode(points), "limits": limits, "notes": notes, "rules": rules}


def _activations(point: Point) -> bool:
    """Whether at least half of the peak grows with the batch."""
    parts = point.breakdown
    return 2 * (parts.get("activations", 0) + parts.get("temporary", 0)) >= point.peak_memory_bytes


def _trial(request: EstimateRequest, framework: str) -> dict[str, Any]:
    runs = _runner(request, framework)
    if framework == "jax":
        length = next(iter(request.sequence_lengths), None)
        return {"measured_bytes": runs(request, length).measure(request.micro_batch_sizes[0])}
    from .steps import measure

    return {"measured_bytes": measure(request)}


def _runner(request: EstimateRequest, framework: str) -> Any:
    """The class that estimates with this framework; if it is not installed, an error names the extra."""
    try:
        if framework == "jax":
            _refuse_torch_options(request)
            import jax  # noqa: F401

            from .jax_step import CompiledRuns

            return CompiledRuns
        from .fake import FakeRuns

        # Torch logs every shape that does not match, with a traceback; our error shows it once.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        return FakeRuns
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "numpy", "jax", "jaxlib"):
            raise
        raise MissingExtraError(
            f"estimate needs {missing.name} for {request.task}, and it is not installed. "
            f"Install it: pip install 'batchwright[{framework}]'.",
            field="task",
            given=request.task,
            nearest=(f"batchwright[{framework}]",),
        ) from None


def _refuse_torch_options(request: EstimateRequest) -> None:
    asked = [
        name
        for name, on in (
            ("precision", request.precision != "fp32"),
            ("checkpoint_activations", request.checkpoint_activations),
            ("quantize_frozen", request.quantize_frozen),
            ("ranks", request.ranks > 1),
            ("accumulation_steps", request.accumulation_steps > 1),
        )
        if on
    ]
    if asked:
        raise PlanError(
            f"{', '.join(asked)} cannot be set for a JAX step: its function decides. Add arguments to the function and "
            "pass them with --arg.",
            field=asked[0],
        )


def _source(task: str) -> str:
    try:
        return expanded(split_target(task)[0]).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""  # load_task reports what is wrong


def _progress(request: EstimateRequest, point: Point, seconds: float) -> None:
    if request.progress:
        length = "" if point.sequence_length is None else f" sequence_length {point.sequence_length}"
        line = f"estimated micro_batch_size {point.micro_batch_size}{length}: {format_bytes(point.peak_memory_bytes)}"
        print(f"{line} ({seconds:.1f} s)", file=sys.stderr, flush=True)


def _error(error: BaseException, task: str) -> dict[str, Any]:
    try:
        if "torch" in sys.modules and isinstance(error, Exception) and not isinstance(error, BatchwrightError):
            from .fake import explain

            error = explain(error, task)
        elif not isinstance(error, BatchwrightError):
            cause = error
            error = RunError(f"the task failed: {type(error).__name__}: {error}", field="task", given=task)
            error.__cause__ = cause
    except BaseException as bug:
        return {"type": "bug", "message": f"{type(bug).__name__}: {bug}", "traceback": traceback.format_exc()}
    return error_record(error)


def main(request_file: str, result_file: str) -> None:
    """In the estimating process: read the request from one file, write the result to the other."""
    document = json.loads(Path(request_file).read_text(encoding="utf-8"))
    result = answer(document["job"], codec.decode(EstimateRequest, document["request"]))
    atomic.write(Path(result_file), json.dumps(result), sync=False)
