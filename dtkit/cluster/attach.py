"""Taking over another notebook's cluster on this machine, with its run.

The engines keep their state, and refuse the other notebook's calls that are still in flight. The run's history is in
the cluster's folder, where the other notebook wrote it. So are the results that it did not acknowledge
(:mod:`dtkit.history.engine_outbox`).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util.arguments import suggest_arguments
from dtkit._util.formatting import format_count
from dtkit._util.installation import PACKAGE_FOLDER, VERSION, count_differing_files
from dtkit.cluster import cluster_file, start
from dtkit.cluster.cluster import Cluster
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.launched_transport import get_runtime_folder
from dtkit.errors import ClusterError, VersionMismatchError
from dtkit.history import run_log
from dtkit.training import persisted_run, recovered_state
from dtkit.training.callbacks import start_callbacks
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.cluster.cluster_file import ClusterInfo
    from dtkit.messages import EngineInventory
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.run import Run


@suggest_arguments
def attach(name: str | Path | None = None, *, force: bool = False) -> Cluster:
    """Take over a running cluster whose notebook has ended, such as before a restart of the kernel::

        cluster = dtkit.attach()  # in the new kernel
        run = cluster.current_run  # paused, with its whole history
        run.resume()

    A cluster that this notebook has already is returned as it is.

    A line of output names the cluster, its folder and its run, and says how its former notebook gets it back.

    Parameters
    ----------
    name
        Name of the cluster, as the error for several clusters lists them. By default, the cluster whose notebook has
        ended, if that notebook ran in this one's working directory.
    force
        Whether to take the named cluster even if another notebook still uses it, or if it uses another environment.
        One that this notebook has already is then connected anew, and its former object can't be used any more.

    Returns
    -------
    Cluster
        Its ``current_run`` is the run that was in progress, with its whole history. It is paused where the engines
        are, and ``current_run.resume()`` continues it. If it had ended or failed, it is in that state.

    Raises
    ------
    ClusterError
        If no cluster is running, several are, or only one of another folder, which must be named. If another notebook
        uses it, or an engine doesn't answer. If it uses another Python environment, or a module that this notebook
        lacks.
    VersionMismatchError
        If another version of dtkit started the cluster, or dtkit of another folder with other files.

    """
    if not isinstance(name, str | Path | None):
        raise TypeError(
            f"attach({name!r}): name must be a cluster's name. For engines that you started with ipyparallel, use "
            "dtkit.Cluster.from_client(client)"
        )
    running = cluster_file.find_running(get_runtime_folder())
    info = cluster_file.choose_cluster(running, None if name is None else str(name), force=force)
    own = None if force else Cluster._find_own(info.folder)  # noqa: SLF001
    if own is not None:
        print(f"this notebook already has {info.name}; attach() returned that cluster")  # noqa: T201 - nothing changed
        return own
    if info.version != VERSION:
        raise VersionMismatchError(
            f"{info.name} was started by dtkit {info.version}, and this is {VERSION}. Take it over with "
            "that version, or close it: its processes end by themselves when its notebook is gone"
        )
    if info.environment != sys.prefix and not force:
        raise ClusterError(
            f"{info.name} uses the Python environment {info.environment}, and this notebook uses {sys.prefix}. Attach "
            f"from a notebook with that environment, or try it here with attach({info.name!r}, force=True)"
        )
    if not force:
        _check_package(info)
    _check_modules(info)
    group, inventories = start.reattach(info)
    try:
        run = _restore_run(group, inventories)
        cluster = Cluster._from_group(group, LaunchConfig.from_json(info.launch_config), run)  # noqa: SLF001
        if group.membership.find_lost_ranks():  # without a run; a restored run has replaced them
            cluster.repair()
    except BaseException as error:
        start.undo_reattach(group, info)
        if isinstance(error, ModuleNotFoundError):
            raise _make_module_error(info, str(error.name)) from error
        raise
    print(_describe_taken(info, run))  # noqa: T201 - it says what now belongs to this notebook
    return cluster


def _describe_taken(info: ClusterInfo, run: Run | None) -> str:
    """Return which cluster was taken over, and how to return it."""
    job = "without a run" if run is None else f"with the run {run.spec.name} ({_describe_state(run)})"
    return (
        f"took over {info.name} of the folder {info.directory}, {job}.\nAnother notebook takes it back by "
        f"dtkit.attach({info.name!r}, force=True)"
    )


def _describe_state(run: Run) -> str:
    """Return where a run is, and how a paused one continues, since nobody here has paused it."""
    state = f"{run.status.state.value} at step {run.status.step:,}"
    hint = "; cluster.current_run.resume() or its dashboard's Resume button continues it"
    return state + (hint if run.status.state is State.PAUSED else "")


def _check_package(info: ClusterInfo) -> None:
    """Raise VersionMismatchError if the engines loaded dtkit from another folder whose files differ."""
    folder = Path(info.package_folder)
    num_files = 0 if folder == PACKAGE_FOLDER else count_differing_files(folder)
    if num_files:
        raise VersionMismatchError(
            f"the engines of {info.name} run dtkit of {folder}, and this notebook that of {PACKAGE_FOLDER}, which "
            f"differs in {format_count(num_files, 'file')}. Attach from a notebook that imports the former, or try it "
            f"here with attach({info.name!r}, force=True). The cluster is as it was"
        )


def _check_modules(info: ClusterInfo) -> None:
    """Raise ClusterError if the cluster's run needs a module that this notebook doesn't find."""
    for label in run_log.read_labels(info.folder)[-1:]:
        for package in dict.fromkeys(module.partition(".")[0] for module in label.modules):
            if package not in sys.modules and importlib.util.find_spec(package) is None:
                raise _make_module_error(info, package)


def _make_module_error(info: ClusterInfo, module: str) -> ClusterError:
    return ClusterError(
        f"the run of {info.name} needs the module {module!r}, which this notebook doesn't find; attach from a notebook "
        f"in {info.directory}, or add the module's folder to sys.path. The cluster is as it was"
    )


def _restore_run(group: EngineGroup, inventories: Sequence[EngineInventory]) -> Run | None:
    """Return the run whose job the engines hold, or that was being recovered when its notebook died."""
    from dtkit.training.run import Run

    jobs = [job for inventory in inventories for job in inventory.job_steps]
    jobs += recovered_state.list_jobs(group.folder)
    for job in dict.fromkeys(jobs):
        plan = persisted_run.load(group, job, inventories[0].rank)
        if plan is not None:
            run = Run(group, plan.adapt_to(group.world_size))
            run.lifecycle.reattach()
            start_callbacks(plan.options.callbacks, run)
            return run
    return None
