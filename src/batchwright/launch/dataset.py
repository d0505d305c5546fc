"""The number of samples that a task trains in one epoch: a process of its own loads the task and tells."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchwright.core.errors import PlanError, RunError
from batchwright.processes.endings import error_from_record, from_exit, sentence
from batchwright.processes.start import GuardedProcess, environment
from batchwright.processes.target import is_jax_task, task_file
from batchwright.rundir.files import find_object, write_json

from .records import Options
from .work import LOOP_ENVIRONMENT


def dataset_size(target: str, arguments: Mapping[str, Any], options: Options) -> int:
    """The length of the task's dataset, without the samples that are held out for evaluation."""
    task_file(target)
    with tempfile.TemporaryDirectory(prefix="batchwright-dataset-") as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        write_json(asked, {"target": target, "arguments": arguments}, sync=False)
        room = "jax" if is_jax_task(target) else "runtime"
        code = f"import sys; from batchwright.{room}.task import write_dataset_size; write_dataset_size(*sys.argv[1:])"
        env = environment(LOOP_ENVIRONMENT, {"OMP_NUM_THREADS": str(options.threads)}, options.environment)
        # The user's code may print: that goes to standard error, since standard output is for the result.
        with GuardedProcess([sys.executable, "-c", code, str(asked), str(answered)], env, scratch=folder) as child:
            done = child.watch(options.start_seconds, echo=True)
        result = find_object(answered) or {}
    if result.get("error"):
        raise error_from_record(result["error"])
    if not isinstance(size := result.get("dataset_size"), int):
        why = f"it did not finish within {options.start_seconds:g} s (start_seconds)"
        if done.returncode is not None:
            why = from_exit(done.returncode, done.output).reason
        raise RunError(
            f"epochs need the length of the dataset, and the task could not be loaded: {sentence(why)} Or give "
            "dataset_size.",
            field="dataset_size",
        )
    held = options.settings.get("evaluation_samples", 0)
    if not isinstance(held, int) or not 0 <= held < size:
        raise PlanError(
            f"evaluation_samples={held} leaves nothing to train: the dataset has {size} samples.",
            field="evaluation_samples",
            given=held,
        )
    return size - held
