"""Trackio: runs of a project in a local database, shown by ``trackio show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.integrations.trackers.base import Tracker, check_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dtkit.integrations.trackers.tracked import Point, TrackedRun
    from dtkit.types import State


class Trackio(Tracker):
    """Write runs for Trackio: metrics, config, and the report as an artifact.

    project : name of the project.
    params, every, per_node, report : see :class:`Tracker`.
    """

    package, extra = "trackio", "trackio"

    def __init__(
        self,
        project: str = "dtkit",
        *,
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
        per_node: bool = True,
        report: bool = True,
    ) -> None:
        check_name("project", project)
        super().__init__(params=params, every=every, per_node=per_node, report=report)
        self.project = project

    def open(self, run: TrackedRun) -> TrackioWriter:
        """Return the writer of a run."""
        import trackio

        started = trackio.init(
            self.project, name=run.id, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        return TrackioWriter(started)

    def __repr__(self) -> str:
        return f"Trackio({self.project!r})"


class TrackioWriter:
    """One run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Store the config."""
        self._run.config.update(values)

    def write_points(self, points: Sequence[Point]) -> None:
        """Store a row for each step."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def write_report(self, path: Path) -> None:
        """Store the report as an artifact."""
        self._run.log_artifact(path, name="report", type="report")

    def close(self, state: State) -> None:  # noqa: ARG002 - trackio's runs have no state
        """Finish the run."""
        self._run.finish()
