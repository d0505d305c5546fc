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
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import BatchwrightError, MissingExtraError, PlanError, RunError
from batchwright.core.numbers import format_bytes
from batchwright.processes.endings import error_from_record, error_record, from_exit, sentence
from batchwright.processes.start import FIXED_ALLOCATOR, GuardedProcess, environment
from batchwright.processes.target import expanded, split_target
from batchwright.rundir import atomic

from .choose import choose, closest, ways
from .fit import SAME_SLOPE, largest, settle
from .jax_step import is_jax
from .records import ChoiceRequest, EstimateRequest, Point
from .remedies import remedies
from .walks import Walks

# Slopes measured without a fixed allocator are 17% off (docs/estimate.md). JAX stays on the CPU: no device may be used.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
# When two slopes are equal. XLA plans every shape separately, so its peaks vary (up to 4% between doublings were measured).
_TOLERANCE = {"torch": SAME_SLOPE, "jax": 0.05}


def run(job: str, request: EstimateRequest | ChoiceRequest, *, timeout: float) -> dict[str, Any]:
    """Do one job (`estimate`, `slope`, `trial` or `choose`) in a process of its own, which never outlives this call."""
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
            less = "Give it more time (--timeout), or fewer sizes (--micro-batch-size)."
            if job == "choose":
                less = (
                    "Give a micro batch (--micro-batch-size) or a way to train (--no-shard, --checkpoint-activations)."
                )
            raise RunError(
                f"{'plan' if job == 'choose' else 'estimate'} did not finish within {timeout:g} s. {less}",
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
        bug = RuntimeError(f"in the estimating process: {error['message']}")
        bug.add_note(error["traceback"].rstrip())
        raise bug
    raise error_from_record(error)


def answer(job: str, request: EstimateRequest | ChoiceRequest) -> dict[str, Any]:
    """The result of one job as JSON; an error is a result as well."""
    base = request if isinstance(request, EstimateRequest) else request.base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own private tools
        try:
            framework = "jax" if base.model is None and is_jax(_source(base.task)) else "torch"
            if base.model is not None and base.tensor_parallel > 1:
                from .models.causal_lm import check_split

                check_split(base.model, base.tensor_parallel)
            if isinstance(request, ChoiceRequest):
                return _choose(request, framework)
            return _trial(request, framework) if job == "trial" else _estimate(request, framework, job == "estimate")
        except BaseException as error:
            return {"error": _error(error, base)}
        finally:
            if "batchwright.estimate.fake" in sys.modules:
                from .fake import destroy_fake_group

                destroy_fake_group()


def _estimate(request: EstimateRequest, framework: str, remedy: bool) -> dict[str, Any]:
    runs = _runner(request, framework)
    points: list[Point] = []
    limits: list[dict[str, Any]] = []
    runner: Any = None
    for length in request.sequence_lengths or (None,):
        runner, known = runs(request.as_task(), length), dict[int, Point]()

        def peak(size: int, runner: Any = runner, known: dict[int, Point] = known) -> int:
            if size not in known:
                started = time.monotonic()
                known[size] = runner.point(size).split(request.tensor_parallel)
                _progress(request, known[size], time.monotonic() - started)
            return known[size].peak_memory_bytes

        for size in request.micro_batch_sizes:
            peak(size)
        found, limit = None, request.memory_bytes
        if limit is not None and request.micro_batch_sizes:  # sizes that were given are the only ones
            found = max((size for size in known if peak(size) <= limit), default=0)
        elif limit is not None:
            found = largest(peak, limit, convex=framework == "torch")
            if found > 1 and len(known) > 1:
                peak(max(1, found // 2))  # a second point below the limit, for the slope and the fit
        elif not request.micro_batch_sizes:
            settle(peak, lambda size, known=known: _activations(known[size]), tolerance=_TOLERANCE[framework])
        points += [known[size] for size in sorted(known)]
        limits.append({"sequence_length": length, "max_micro_batch_size": found})
    notes = list(getattr(runner, "notes", ()))
    rules = list(getattr(runner, "rules", ()))
    result = {
        "framework": framework,
        "points": codec.encode(points),
        "limits": limits,
        "notes": notes,
        "rules": rules,
    }
    if request.model is not None:
        from .models.causal_lm import longest_sequence, read_config

        result["longest_sequence"] = longest_sequence(read_config(request.model))
    none = request.memory_bytes is not None and not any(row["max_micro_batch_size"] for row in limits)
    if remedy and framework == "torch" and none:
        length = points[0].sequence_length
        smallest = replace(request, sequence_lengths=() if length is None else (length,))
        result["remedies"] = _remedies(smallest, points[0].micro_batch_size, Walks(runs))
    return result


def _remedies(request: EstimateRequest, size: int, walks: Walks) -> list[Any]:
    assert request.memory_bytes is not None
    if request.progress:
        print("nothing fits; estimating what would", file=sys.stderr, flush=True)
    return codec.encode(remedies(request, size, request.memory_bytes, walks))


def _choose(request: ChoiceRequest, framework: str) -> dict[str, Any]:
    base = request.base
    if framework == "jax":
        raise PlanError(
            f"plan cannot choose how to train {base.task}: a JAX step decides itself. Estimate it, then give the result: "
            "max_micro_batch_size.",
            field="task",
            given=base.task,
        )
    walks = Walks(_runner(base, framework))
    assert base.memory_bytes is not None
    open_ways = ways(request.batch, base, request.checkpoint_activations, request.sharded)
    made = choose(request.batch, open_ways, base.memory_bytes, walks)
    if made is None:
        smallest, _, size = closest(request.batch, open_ways, walks)
        return {
            "point": codec.encode(walks.point(smallest, size, whole=True)),
            "way": codec.encode(smallest),
            "remedies": _remedies(smallest, size, walks),
        }
    return codec.encode(made) | {"rules": walks.said("rules"), "notes": walks.said("notes")}


def _activations(point: Point) -> bool:
    """Whether at least half of the peak grows with the batch."""
    parts = point.breakdown
    return 2 * (parts.get("activations", 0) + parts.get("temporary", 0)) >= point.peak_memory_bytes


def _trial(request: EstimateRequest, framework: str) -> dict[str, Any]:
    runs = _runner(request, framework)
    request = request.as_task()
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


def _error(error: BaseException, base: EstimateRequest) -> dict[str, Any]:
    task = base.task
    try:
        if base.model is not None and isinstance(error, Exception) and not isinstance(error, BatchwrightError):
            error = _of_model(error, base.model)
        elif "torch" in sys.modules and isinstance(error, Exception) and not isinstance(error, BatchwrightError):
            from .fake import explain

            error = explain(error, task)
        elif not isinstance(error, BatchwrightError):
            cause = error
            error = RunError(f"the task failed: {type(error).__name__}: {error}", field="task", given=task)
            error.__cause__ = cause
    except BaseException as bug:
        return {"type": "bug", "message": f"{type(bug).__name__}: {bug}", "traceback": traceback.format_exc()}
    return error_record(error)


def _of_model(error: Exception, model: str) -> PlanError:
    """The error of a model whose step cannot be followed; raised as it is if it is of our own code."""
    if Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(__file__).parents[1]):
        raise error
    text = (str(error).splitlines() or [""])[0]
    return PlanError(
        f"model={model}: a training step of this model cannot be estimated: {sentence(f'{type(error).__name__}: {text}')} "
        "Correct the configuration, or write a task for it: FILE.py:function.",
        field="model",
        given=model,
    )


def main(request_file: str, result_file: str) -> None:
    """In the estimating process: read the request from one file, write the result to the other."""
    document = json.loads(Path(request_file).read_text(encoding="utf-8"))
    kind = ChoiceRequest if document["job"] == "choose" else EstimateRequest
    result = answer(document["job"], codec.decode(kind, document["request"]))
    atomic.write(Path(result_file), json.dumps(result), sync=False)
