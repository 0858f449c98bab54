"""Distributed training of PyTorch models, driven and watched from a notebook.

    cluster = dtkit.Cluster(2)  # start two engines
    run = cluster.train(
        model, (X, y), loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=64, epochs=10,
    )
    run  # the live dashboard; run.pause(), run.step(), run.resume(), run.set(lr=...)
    await run  # in a script, run.wait()
    run.verify()  # PASS if the result equals that of one process

``dtkit.Cluster?`` and ``dtkit.Cluster.train?`` list all options. ``dtkit.attach()`` takes a cluster over after a
restart of the kernel. ``cluster.plan`` predicts what each strategy costs, and ``cluster.run`` calls your own function
on every rank. Results are in `dtkit.types`, errors in `dtkit.errors`, and lessons in `dtkit.lessons`.

All public names are here. Each is imported from its module at its first use, so that ``import dtkit`` loads neither
torch nor matplotlib nor ipyparallel.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dtkit._util.installation import VERSION

if TYPE_CHECKING:
    from dtkit import errors, lessons, types
    from dtkit.checkpoint.checkpoint import Checkpoint, list_checkpoints
    from dtkit.cluster.attach import attach
    from dtkit.cluster.cluster import Cluster
    from dtkit.cluster.launchers.batch import Batch
    from dtkit.cluster.launchers.mpi import MPI
    from dtkit.cluster.launchers.slurm import Slurm
    from dtkit.cluster.launchers.ssh import SSH
    from dtkit.dashboard.compare import compare
    from dtkit.dashboard.figures.custom_panels import panel
    from dtkit.data.partition import Partition
    from dtkit.engine.callbacks import EngineCallback, ExponentialMovingAverage
    from dtkit.engine.observe.call_output import log
    from dtkit.errors import DtkitError
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

__version__ = VERSION

_HOMES = {  # public name -> its module
    "Batch": "cluster.launchers.batch",
    "Checkpoint": "checkpoint.checkpoint",
    "Cluster": "cluster.cluster",
    "DataParallel": "strategies.data_parallel",
    "DtkitError": "errors",
    "EarlyStopping": "training.callbacks",
    "EngineCallback": "engine.callbacks",
    "ExponentialMovingAverage": "engine.callbacks",
    "History": "history.history",
    "MPI": "cluster.launchers.mpi",
    "NaiveDataParallel": "strategies.naive",
    "OuterSGD": "strategies.averaging",
    "ParameterAveraging": "strategies.averaging",
    "Partition": "data.partition",
    "Pipeline": "strategies.pipeline.pipeline",
    "Run": "training.run",
    "SSH": "cluster.launchers.ssh",
    "Schedule": "schedules.schedule",
    "Sharded": "strategies.sharded",
    "Slurm": "cluster.launchers.slurm",
    "TensorParallel": "strategies.tensor.tensor_parallel",
    "attach": "cluster.attach",
    "compare": "dashboard.compare",
    "list_checkpoints": "checkpoint.checkpoint",
    "log": "engine.observe.call_output",
    "panel": "dashboard.figures.custom_panels",
}
_MODULES = ("errors", "lessons", "types")  # all errors, the lessons of the notebooks, and the types of results

__all__ = [  # noqa: PLE0604, RUF022, RUF100 - the names resolve by __getattr__
    "Batch",
    "Checkpoint",
    "Cluster",
    "DataParallel",
    "DtkitError",
    "EarlyStopping",
    "EngineCallback",
    "ExponentialMovingAverage",
    "History",
    "MPI",
    "NaiveDataParallel",
    "OuterSGD",
    "ParameterAveraging",
    "Partition",
    "Pipeline",
    "Run",
    "SSH",
    "Schedule",
    "Sharded",
    "Slurm",
    "TensorParallel",
    "attach",
    "compare",
    "errors",
    "lessons",
    "list_checkpoints",
    "log",
    "panel",
    "types",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dtkit.{name}")
    if name not in _HOMES:
        raise _make_attribute_error(name)
    try:
        module = importlib.import_module(f"dtkit.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dtkit":
            raise ImportError(_OVERWRITTEN) from error
        raise
    value = globals()[name] = getattr(module, name)
    return value


def _make_attribute_error(name: str) -> AttributeError:
    from dtkit._util.attributes import describe_missing

    return AttributeError(describe_missing("dtkit", name, __all__), name="", obj=None)


def __dir__() -> list[str]:
    return list(__all__)


_OVERWRITTEN = (
    "parts of dtkit are missing: the package index has an unrelated distribution named `dtkit`, which installs into "
    "the same folder. Repair it with: pip uninstall -y dtkit dtkit-jupyter; pip install dtkit-jupyter"
)


def _check_platform(platform: str = sys.platform) -> None:
    """Raise ImportError on Windows, where the first cluster would fail for lack of a module of Unix."""
    if platform == "win32":
        raise ImportError(
            "dtkit needs Linux or another Unix, and this is Windows. Install it in WSL, and start Jupyter there: "
            "https://learn.microsoft.com/windows/wsl/install"
        )


def _check_installation() -> None:
    """Warn if the unrelated distribution `dtkit` is installed too, as long as it has not replaced this file."""
    import importlib.metadata
    import warnings

    try:
        other = importlib.metadata.version("dtkit")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the unrelated distribution `dtkit` {other} is installed next to `dtkit-jupyter`, and both install into the "
        "folder dtkit/. Repair it with: pip uninstall -y dtkit dtkit-jupyter; pip install dtkit-jupyter",
        UserWarning,
        stacklevel=3,
    )


def _use_dir_for_tab_key() -> None:
    """Let IPython's Tab key offer what is for users, if this is IPython."""
    if "IPython" in sys.modules:
        from dtkit._util import notebook, tab_key

        if (shell := notebook.get_shell()) is not None:
            tab_key.use_dir(shell)


_check_platform()
_check_installation()
_use_dir_for_tab_key()
