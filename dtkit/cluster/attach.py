"""A cluster that another notebook had, taken over: found on this machine, with its run and all that was seen of it.

The engines go on where they stand; what the older notebook still has in flight is refused from here on. The run's
history is read from the cluster's folder, where it was written as it came, and so is what the engines did after that:
they keep there what nobody said to have read (:mod:`dtkit.history.engine_outbox`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtkit import __version__
from dtkit.cluster import cluster_file, transport
from dtkit.cluster.cluster import Cluster
from dtkit.errors import VersionMismatchError
from dtkit.training import persisted_run, recovered_state

if TYPE_CHECKING:
    from dtkit.training.run import Run


def attach(name: str | Path | None = None) -> Cluster:
    """Take over a running cluster, whether its notebook has ended or not.

    Parameters
    ----------
    name
        Name of the cluster, as the error for several clusters lists them. By default, the cluster whose notebook has
        ended.

    Returns
    -------
    Cluster
        Its ``current_run`` is the run that was in progress, with its whole history. It is paused where the engines
        are; ``current_run.resume()`` continues it.

    Raises
    ------
    ClusterError
        If no cluster is running, if several are, or if an engine doesn't answer.
    VersionMismatchError
        If another version of dtkit started the cluster.

    """
    if not isinstance(name, str | Path | None):
        raise TypeError(
            f"attach({name!r}): name must be a cluster's name. For engines that you started with ipyparallel, use "
            "dtkit.Cluster.from_client(client)"
        )
    found = cluster_file.choose_cluster(
        cluster_file.find_running(transport.get_runtime_folder()), None if name is None else str(name)
    )
    if found.version != __version__:
        raise VersionMismatchError(
            f"{found.name} was started by dtkit {found.version}, and this is {__version__}. Take it over with "
            "that version, or close it: its processes end by themselves when its notebook is gone"
        )
    cluster = Cluster.reattach(found)
    try:
        cluster.current_run = _restore_run(cluster)
        if lost := cluster.find_lost_ranks():  # with a run, that has seen to it
            cluster.replace(lost)
            cluster.clear_if_all_new()
    except BaseException:
        cluster.undo_reattach(found)
        raise
    return cluster


def _restore_run(cluster: Cluster) -> Run | None:
    """The run whose job the engines have."""
    from dtkit.training.run import Run

    jobs = [job for heritage in cluster.engine_inventories for job in heritage.job_steps]
    jobs += recovered_state.list_jobs(cluster.folder)  # that ended on the engines, to be made anew
    for job in dict.fromkeys(jobs):
        plan = persisted_run.load(cluster, job, cluster.engine_inventories[0].rank)
        if plan is not None:
            run = Run(cluster, plan.adapt_to(cluster.world_size))
            run.lifecycle.reattach()
            return run
    return None
