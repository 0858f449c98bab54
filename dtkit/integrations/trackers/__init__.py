"""Experiment trackers as callbacks: ``cluster.train(..., callbacks=[TensorBoard("runs")])``.

They write a run's records in the background: steps, nodes, evaluations, numbers from `dtkit.log`, parameters, the git
commit, and the report.
"""

from dtkit.integrations.trackers.base import Tracker
from dtkit.integrations.trackers.mlflow import MLflow
from dtkit.integrations.trackers.tensorboard import TensorBoard
from dtkit.integrations.trackers.tracked import Point, TrackedRun, Writer
from dtkit.integrations.trackers.trackio import Trackio
from dtkit.integrations.trackers.wandb import Wandb

__all__ = ["MLflow", "Point", "TensorBoard", "TrackedRun", "Tracker", "Trackio", "Wandb", "Writer"]
