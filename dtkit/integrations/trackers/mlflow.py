"""MLflow: runs of an experiment, in a local store or on a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.integrations.trackers.base import Tracker, check_name
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dtkit.integrations.trackers.tracked import Point, TrackedRun

ID_TAG = "dtkit.run"
"""Tag with the run's id, since MLflow assigns ids of its own."""
_MAX_BATCH = 1000  # metrics in one request, the limit of MLflow's servers; the limit of parameters is a tenth of it
_STATUS = {State.COMPLETED: "FINISHED", State.STOPPED: "KILLED", State.FAILED: "FAILED"}


class MLflow(Tracker):
    """Write runs to MLflow: metrics, parameters, tags, and the report as an artifact.

    experiment : name of the experiment, which is created if necessary.
    tracking_uri : such as ``"sqlite:///mlflow.db"``, or a server's address; by default MLflow's own setting.
    params, every, per_node, report : see :class:`Tracker`.
    """

    package, extra = "mlflow", "mlflow"

    def __init__(
        self,
        experiment: str = "dtkit",
        *,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
        per_node: bool = True,
        report: bool = True,
    ) -> None:
        check_name("experiment", experiment)
        super().__init__(params=params, every=every, per_node=per_node, report=report)
        self.experiment, self.tracking_uri = experiment, tracking_uri

    def open(self, run: TrackedRun) -> MLflowWriter:
        """Return the writer of a run. The run is looked up by its tag, or created."""
        from mlflow import MlflowClient

        client = MlflowClient(self.tracking_uri)
        experiment = client.get_experiment_by_name(self.experiment)
        experiment_id = client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        known = client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if known:
            run_id = known[0].info.run_id
            client.update_run(run_id, status="RUNNING")
        else:
            tags = {ID_TAG: run.id} | dict.fromkeys(run.tags, "true")
            run_id = client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
        return MLflowWriter(client, run_id)

    def __repr__(self) -> str:
        return f"MLflow({self.experiment!r})"


class MLflowWriter:
    """One run, by MLflow's id."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Store parameters. Parameters of a resumed run that have changed become tags, since MLflow's parameters can't
        change.
        """
        from mlflow.entities import Param, RunTag

        before = self._client.get_run(self._run_id).data.params
        new = [Param(name, str(value)) for name, value in values.items() if name not in before]
        changed = [
            RunTag(f"resumed.{name}", str(value)) for name, value in values.items() if before.get(name) != str(value)
        ]
        tags = changed if before else []
        if "git_commit" in values:
            tags.append(RunTag("mlflow.source.git.commit", str(values["git_commit"])))
        for part in _split(new, _MAX_BATCH // 10):
            self._client.log_batch(self._run_id, params=part)
        for part in _split(tags, _MAX_BATCH // 10):
            self._client.log_batch(self._run_id, tags=part)

    def write_points(self, points: Sequence[Point]) -> None:
        """Store metrics."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for part in _split(metrics, _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=part)

    def write_report(self, path: Path) -> None:
        """Store the report as an artifact."""
        self._client.log_artifact(self._run_id, str(path))

    def close(self, state: State) -> None:
        """Set the run's status."""
        if state in _STATUS:
            self._client.set_terminated(self._run_id, _STATUS[state])


def _split(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
