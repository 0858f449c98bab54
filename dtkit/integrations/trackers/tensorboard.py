"""TensorBoard: event files that ``tensorboard --logdir runs`` shows."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit.integrations.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.integrations.trackers.tracked import Point, TrackedRun
    from dtkit.types import State


class TensorBoard(Tracker):
    """Write runs for TensorBoard: scalars, parameters (the tab HParams), and the report next to the event files.

    folder : folder in which each run gets a folder of its own. A resumed run continues in its folder.
    params, every, per_node, report : see :class:`Tracker`.
    """

    package, extra = "tensorboard", "tensorboard"

    def __init__(
        self,
        folder: str | Path = "runs",
        *,
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
        per_node: bool = True,
        report: bool = True,
    ) -> None:
        super().__init__(params=params, every=every, per_node=per_node, report=report)
        self.folder = Path(folder).absolute()

    def open(self, run: TrackedRun) -> TensorBoardWriter:
        """Return the writer of a run's folder."""
        return TensorBoardWriter(self.folder / run.id, outdated_from=run.outdated_from, is_resumed=run.is_resumed)

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"


class TensorBoardWriter:
    """One event file. Points of a resumed run replace those that an earlier file has from `outdated_from` on."""

    def __init__(self, folder: Path, *, outdated_from: int | None, is_resumed: bool) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self._protocol = folder, event_pb2
        self._is_new = not is_resumed
        self._file = EventFileWriter(str(folder))
        if outdated_from is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._file.add_event(event_pb2.Event(step=outdated_from, session_log=start))

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Write the parameters for the tab HParams, with the loss as its metric."""
        from torch.utils.tensorboard.summary import hparams, text

        if not self._is_new:
            return
        table = "\n".join(
            ["| name | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]
        )
        parameters = hparams(dict(values), {"train/loss": math.nan})  # type: ignore[no-untyped-call]
        for summary in (*parameters, text("parameters", table)):  # type: ignore[no-untyped-call]
            self._file.add_event(self._protocol.Event(summary=summary))

    def write_points(self, points: Sequence[Point]) -> None:
        """Write one event for each step."""
        event_class = self._protocol.Event
        for point in points:
            event = event_class(step=point.step, wall_time=point.time)
            add = event.summary.value.add
            for name, value in point.values.items():
                add(tag=name, simple_value=value)
            self._file.add_event(event)
        self._file.flush()

    def write_report(self, path: Path) -> None:
        """Copy the report into the run's folder."""
        shutil.copyfile(path, self._folder / "report.html")

    def close(self, state: State) -> None:  # noqa: ARG002 - event files have no state
        """Close the file."""
        self._file.close()
