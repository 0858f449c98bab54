"""Distributed training of PyTorch models, driven and watched from a notebook.

The front door: every public name, found in its module when it is first asked for. Importing this loads neither
torch nor matplotlib nor ipyparallel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtkit.checkpoint.checkpoint import Checkpoint, list_checkpoints
    from dtkit.cluster.attach import attach
    from dtkit.cluster.cluster import Cluster
    from dtkit.dashboard.compare import compare
    from dtkit.dashboard.custom import panel
    from dtkit.data.partition import Partition
    from dtkit.engine.observe.call_output import log
    from dtkit.errors import (
        CannotSend,
        CheckpointError,
        ClusterClosed,
        ClusterError,
        DtkitError,
        EngineError,
        NonFiniteError,
        Refused,
        RunError,
        VersionMismatch,
    )
    from dtkit.explain.data_parallel import StepExplanation
    from dtkit.history.history import History
    from dtkit.schedules.schedule import Schedule
    from dtkit.strategies.averaging import OuterSGD, ParameterAveraging
    from dtkit.strategies.data_parallel import DataParallel
    from dtkit.strategies.naive import NaiveDataParallel
    from dtkit.strategies.pipeline.pipeline import Pipeline
    from dtkit.strategies.sharded import Sharded
    from dtkit.strategies.tensor.tensor_parallel import TensorParallel
    from dtkit.training.callbacks import EarlyStopping
    from dtkit.training.run import Run
    from dtkit.types import Consistency, NodeInfo, RunSpec, State, Status, StepRecord

__version__ = "0.1.0"

_HOMES = {
    "CannotSend": "errors",
    "Checkpoint": "checkpoint.checkpoint",
    "CheckpointError": "errors",
    "Cluster": "cluster.cluster",
    "ClusterClosed": "errors",
    "ClusterError": "errors",
    "Consistency": "types",
    "DataParallel": "strategies.data_parallel",
    "DtkitError": "errors",
    "EarlyStopping": "training.callbacks",
    "EngineError": "errors",
    "History": "history.history",
    "NaiveDataParallel": "strategies.naive",
    "NodeInfo": "types",
    "NonFiniteError": "errors",
    "OuterSGD": "strategies.averaging",
    "ParameterAveraging": "strategies.averaging",
    "Partition": "data.partition",
    "Pipeline": "strategies.pipeline.pipeline",
    "Refused": "errors",
    "Run": "training.run",
    "RunError": "errors",
    "RunSpec": "types",
    "Schedule": "schedules.schedule",
    "Sharded": "strategies.sharded",
    "State": "types",
    "Status": "types",
    "StepExplanation": "explain.data_parallel",
    "StepRecord": "types",
    "TensorParallel": "strategies.tensor.tensor_parallel",
    "VersionMismatch": "errors",
    "attach": "cluster.attach",
    "checkpoints": "checkpoint.checkpoint",
    "compare": "dashboard.compare",
    "log": "engine.observe.call_output",
    "panel": "dashboard.custom",
}

__all__ = [  # noqa: PLE0604, RUF100 - the names resolve by __getattr__
    "CannotSend",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "ClusterClosed",
    "ClusterError",
    "Consistency",
    "DataParallel",
    "DtkitError",
    "EarlyStopping",
    "EngineError",
    "History",
    "NaiveDataParallel",
    "NodeInfo",
    "NonFiniteError",
    "OuterSGD",
    "ParameterAveraging",
    "Partition",
    "Pipeline",
    "Refused",
    "Run",
    "RunError",
    "RunSpec",
    "Schedule",
    "Sharded",
    "State",
    "Status",
    "StepExplanation",
    "StepRecord",
    "TensorParallel",
    "VersionMismatch",
    "attach",
    "checkpoints",
    "compare",
    "log",
    "panel",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dtkit' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        module = importlib.import_module(f"dtkit.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dtkit":
            raise ImportError(_OVERWRITTEN) from error
        raise
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return list(__all__)


_OVERWRITTEN = (
    "parts of dtkit are missing: the package index has an unrelated distribution named `dtkit`, which installs into "
    "the same folder. Repair it with: pip uninstall -y dtkit dtkit-jupyter; pip install dtkit-jupyter"
)


def _check_installation() -> None:
    """Notice that the unrelated distribution `dtkit` was installed over this one, while this file is still ours."""
    import importlib.metadata
    import warnings

    try:
        other = importlib.metadata.version("dtkit")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the unrelated distribution `dtkit` {other} is installed beside `dtkit-jupyter`, and both install into the "
        "folder dtkit/. Repair it with: pip uninstall -y dtkit dtkit-jupyter; pip install dtkit-jupyter",
        UserWarning,
        stacklevel=3,
    )


_check_installation()
