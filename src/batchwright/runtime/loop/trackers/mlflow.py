"""MLflow: one run for all launches, at MLFLOW_TRACKING_URI or in `RUN/mlflow.db`."""

from __future__ import annotations

import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from . import CONFIG, OVER_SAMPLES, Recorder

# A request takes some milliseconds: the numbers of fast steps are sent together.
_SEND_SECONDS = 1.0
_MOST_METRICS = 900  # MLflow takes 1,000 in one request
_STATUS = {"end": "FINISHED", "tokens": "FINISHED", "boundary": "SCHEDULED", "signal": "KILLED"}


class MLflow(Recorder):
    """Logs metrics by step through a client of its own: the user's active run and tracking URI stay as they are."""

    name = "mlflow"

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = cast(Any, mlflow)
        self._entities = self._mlflow.entities
        self._waiting: list[Any] = []
        self._sent = 0.0

    def begin(self, launch: Mapping[str, Any]) -> None:
        """Create the run, or set it to RUNNING again. Parameters cannot change: those of the first launch stay."""
        mlflow = self._mlflow
        uri = None if mlflow.is_tracking_uri_set() else f"sqlite:///{quote(str(self.run / 'mlflow.db'))}"
        self._client = mlflow.MlflowClient(uri)
        self._id, known = self.identity(self._create)
        self._client.update_run(self._id, status="RUNNING")
        if known:
            last = self._client.get_run(self._id).data.metrics
            self.recorded, self.evaluated = int(last.get("train/step", -1)) + 1, int(last.get("evaluation/samples", 0))
        else:
            parameters = [self._entities.Param(name, str(launch.get(name))) for name in CONFIG]
            self._client.log_batch(self._id, params=parameters, synchronous=True)

    def _create(self) -> str:
        variables, client = self._mlflow.environment_variables, self._client
        experiment, name = variables.MLFLOW_EXPERIMENT_ID.get(), variables.MLFLOW_EXPERIMENT_NAME.get() or "batchwright"
        if not experiment:
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
        return client.create_run(experiment, run_name=self.run.name).info.run_id

    def record(self, values: Mapping[str, float], step: int, samples: int, time: float) -> None:
        """Collect the metrics of about a second, then send them."""
        when = int(time * 1000)
        for name, value in values.items():
            self._waiting.append(self._entities.Metric(name, float(value), when, step))
            if name in OVER_SAMPLES:
                self._waiting.append(self._entities.Metric(OVER_SAMPLES[name], float(value), when, samples))
        if clock.monotonic() - self._sent >= _SEND_SECONDS or len(self._waiting) >= _MOST_METRICS:
            self.flush()

    def flush(self) -> None:
        """Send the metrics that wait."""
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting, synchronous=True)
        self._waiting, self._sent = [], clock.monotonic()

    def end(self) -> None:
        """Send the rest and set the status; a launch that did not stop by itself has failed."""
        self.flush()
        self._client.set_terminated(self._id, status=_STATUS.get(self.stopped or "", "FAILED"))


RECORDER = MLflow
