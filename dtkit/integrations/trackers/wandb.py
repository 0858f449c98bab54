"""Weights & Biases: runs of a project, on disk (offline) or on its server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtkit.integrations.trackers.base import Tracker, check_name
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.integrations.trackers.tracked import Point, TrackedRun


class Wandb(Tracker):
    """Write runs for Weights & Biases: history, config, and the report as a file of the run.

    project : name of the project.
    mode : "offline" writes to disk, for ``wandb sync`` later; "online" needs ``wandb login`` before.
    folder : where to create the folder ``wandb``; by default in the notebook's folder.
    params, every, per_node, report : see :class:`Tracker`.

    A resumed run keeps its id. Offline, each part of the run has a folder of its own; ``wandb sync`` joins them.
    """

    package, extra = "wandb", "wandb"

    def __init__(
        self,
        project: str = "dtkit",
        *,
        mode: Literal["offline", "online"] = "offline",
        folder: str | Path = ".",
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
        per_node: bool = True,
        report: bool = True,
    ) -> None:
        check_name("project", project, "/\\#?%:")
        if mode not in ("offline", "online"):
            raise ValueError(f"mode={mode!r}; it must be 'offline' or 'online'")
        super().__init__(params=params, every=every, per_node=per_node, report=report)
        self.project, self.mode, self.folder = project, mode, Path(folder).absolute()

    def open(self, run: TrackedRun) -> WandbWriter:
        """Return the writer of a run. Other runs of W&B in this process stay open."""
        import wandb

        started = wandb.init(
            project=self.project,
            id=run.id,
            name=run.name,
            tags=list(run.tags),
            dir=str(self.folder),
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(  # dtkit writes the commit and the memory itself
                silent=True, console="off", x_disable_stats=True, disable_git=True, disable_job_creation=True
            ),
        )
        started.define_metric("step", summary="none")
        # W&B would update the summary with each row, which doubles the time of a row. `write_points` updates it
        # instead.
        started.define_metric("*", step_metric="step", summary="none")
        return WandbWriter(started)

    def __repr__(self) -> str:
        return f"Wandb({self.project!r}, mode={self.mode!r})"


class WandbWriter:
    """One run. Its x axis is the number "step", because W&B's own steps can't go back when an engine was lost."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Store the config."""
        self._run.config.update(dict(values), allow_val_change=True)

    def write_points(self, points: Sequence[Point]) -> None:
        """Store a row for each step, and the last number of each name in the summary."""
        last: dict[str, float] = {}
        for point in points:
            row = {"step": point.step, **point.values}
            self._run.log(row)
            last |= row
        self._run.summary.update(last)

    def write_report(self, path: Path) -> None:
        """Store the report as a file of the run."""
        folder = Path(self._run.dir)
        copy = folder / "report.html"
        shutil.copyfile(path, copy)
        self._run.save(str(copy), base_path=str(folder), policy="now")

    def close(self, state: State) -> None:
        """Finish the run."""
        self._run.summary["state"] = state.value
        self._run.finish(exit_code=int(state is State.FAILED))
