"""A cluster that another notebook had, taken over: found on this machine, with its run and all that was seen of it.

The engines go on where they stand; what the older notebook still has in flight is refused from here on. The run's
history is read from the cluster's folder, where it was written as it came, and so is what the engines did after that:
they keep there what nobody said to have read (:mod:`dtkit.history.engine_outbox`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit import __version__
from dtkit.cluster import cluster_file, transport
from dtkit.cluster.cluster import Cluster
from dtkit.errors import VersionMismatchError
from dtkit.training import persisted_run, recovered_state

if TYPE_CHECKING:
    from dtkit.training.run import Run


def attach(name: Any = None, *, client: Any = None, **options: Any) -> Cluster:
    """Take over a cluster that runs: one that a notebook started which has ended, or another one still has.

    Parameters
    ----------
    name
        Which, of several: as the error lists them. Without it the one whose notebook has ended.
    client
        Instead: a connected ``ipyparallel.Client``, for engines that somebody else started by whatever launcher.
        ``close()`` then leaves the engines running.
    options
        With `client`: those of :class:`Cluster` that make sense for engines that run already (device, threads, timeout,
        step_timeout, interface); and ``folder=``, where they meet: on several hosts one that all of them see.

    Returns
    -------
    Cluster
        Its ``current_run`` is the run that was going on, paused where the engines stand, with its whole history;
        ``current_run.resume_from()`` goes on.

    Raises
    ------
    ClusterError
        Where none is running, or several are; where one doesn't answer.
    VersionMismatch
        Where it was started by another version of dtkit.

    """
    if client is None and not isinstance(name, str | Path | None):
        client, name = name, None
    if client is not None:
        return Cluster.from_transport(transport.wrap_client(client), **options)
    if options:
        raise TypeError(
            f"attach({', '.join(options)}=...): a cluster that is taken over stays as it was started; options are for "
            "attach(client=...)"
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
        found = persisted_run.load(cluster, job)
        if found is not None:
            return Run.reattach(cluster, job, *found)
    return None
