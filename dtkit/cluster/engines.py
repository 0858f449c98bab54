"""Engines that a cluster holds: start, attach, look at, repair, close."""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dtkit._util import formatting, timeouts
from dtkit._util.arguments import explain_arguments, suggest_arguments
from dtkit._util.completion import UserNames
from dtkit._util.notebook import in_notebook, is_kernel_shut_down
from dtkit._util.script_errors import install_hook
from dtkit.cluster import cluster_file
from dtkit.cluster import start as starting
from dtkit.cluster import transport as transports
from dtkit.cluster.devices import plan_devices
from dtkit.cluster.job_end_watcher import JobEndWatcher
from dtkit.cluster.launch_request import make_config, make_host_config
from dtkit.cluster.launched_transport import LaunchedTransport, get_runtime_folder
from dtkit.cluster.launchers.hosts import HostLauncher
from dtkit.cluster.preload import load_for_training
from dtkit.cluster.sigterm import exit_on_sigterm
from dtkit.dashboard.text import cluster_text
from dtkit.errors import ClusterError, NonFiniteError
from dtkit.health import stacks
from dtkit.planning import planner
from dtkit.rpc.protocol import GroupOperations, make_call
from dtkit.rpc.replacement import replace_lost_ranks
from dtkit.training import failure_notice
from dtkit.training.earlier_runs import EarlierRuns
from dtkit.types import NodeList, State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dtkit.cluster.config import LaunchConfig
    from dtkit.cluster.devices import DevicePlan
    from dtkit.dashboard.text.table_page import TablePage
    from dtkit.planning.cost_model import Benchmark
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.transport import Transport
    from dtkit.training.run import Run
    from dtkit.training.task import Task


_clusters: weakref.WeakValueDictionary[Path, Engines] = weakref.WeakValueDictionary()
"""Clusters of this notebook by their folders."""


@explain_arguments
class Engines(metaclass=UserNames):
    """Started or attached engines: their state, repair and end. The base of `Cluster`."""

    current_run: Run | None
    """The last run that was started, also if it failed; None after a `train` that raised an error while the engines
    built its job, since the earlier run was then released."""
    last_task: Task | None
    """The last function or script that was started, with the numbers that it logged."""
    earlier_runs: EarlierRuns
    """Paused runs that a later training replaced, and runs that `verify` can still repeat."""

    @suggest_arguments
    def __init__(
        self,
        n: int | None = None,
        *,
        launcher: str | HostLauncher = "local",
        device: str = "auto",
        threads: int | None = None,
        memory_limit: int | str | None = None,
        timeout: float = timeouts.CLUSTER_TIMEOUT_S,
        step_timeout: float | None = None,
        lease: float | None = None,
        interface: str | None = None,
        spares: int = 0,
        keep_alive: bool = False,
    ) -> None:
        lease = math.inf if keep_alive and lease is None else lease
        limit = None if memory_limit is None else formatting.parse_bytes(memory_limit)
        common = {"timeout": timeout, "memory_limit": limit, "lease": lease, "spares": spares, "keep_alive": keep_alive}
        if isinstance(launcher, HostLauncher):
            config = make_host_config(n, launcher, device, threads, interface=interface, **common)
        else:
            config = make_config(n, launcher, device, threads, **common)
        load_for_training()
        cluster_file.warn_of_unused(cluster_file.find_running(get_runtime_folder()))
        group, plan = starting.start_engines(config, step_timeout=step_timeout, interface=interface)
        self._set_up(group, plan, keep_alive=keep_alive)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the cluster itself: engines aren't copied. scikit-learn's `clone` copies an estimator's parameters."""
        del memo
        return self

    def _set_up(self, group: EngineGroup, plan: DevicePlan, *, keep_alive: bool = False) -> None:
        self._engine_group, self._device_note, self._keep_alive = group, plan.note, keep_alive
        self.current_run = self.last_task = None
        self.earlier_runs = EarlierRuns(lambda: planner.check_idle(self.current_run))
        self._benchmarks: dict[str, Benchmark] = {}
        # locks: while engines are replaced; every step of that has a timeout
        self._repair_lock = threading.RLock()
        self._job_ends = JobEndWatcher(group, lambda: self.current_run)
        self._job_ends.start()
        _clusters[group.folder] = self
        atexit.register(self._close_at_exit)
        exit_on_sigterm()
        install_hook()

    @classmethod
    def from_client(cls, client: Any, **options: Any) -> Self:
        """Make a cluster of engines that somebody else started with ipyparallel, on one or several hosts.

        The options `device`, `threads`, `timeout`, `step_timeout` and `interface` are those of :class:`Cluster`. The
        engines meet in `folder`; if they are on several hosts, it must be one that all hosts see. :meth:`close` leaves
        the engines running.
        """
        return cls.from_transport(transports.wrap_client(client), **options)

    @classmethod
    def from_transport(
        cls, transport: Transport, *, device: str = "auto", threads: int | None = None, **options: Any
    ) -> Self:
        """Make a cluster of a test double's engines (:mod:`dtkit.testing`). Options as for :meth:`from_client`."""
        plan = plan_devices(len(transport.engine_ids), device, threads)
        self = cls.__new__(cls)
        self._set_up(starting.use_engines(transport, plan, **options), plan)
        return self

    @classmethod
    def _find_own(cls, folder: Path) -> Self | None:
        """Return the cluster of this folder if this notebook has it; None if it is closed, or another notebook's."""
        cluster = _clusters.get(folder)
        if not isinstance(cluster, cls):
            return None
        group = cluster._engine_group  # noqa: SLF001 - of this class
        return None if group.is_closed or group.is_superseded else cluster

    @classmethod
    def _from_group(cls, group: EngineGroup, config: LaunchConfig, run: Run | None) -> Self:
        """Make a cluster of engines that were taken over: see :func:`dtkit.attach`."""
        self = cls.__new__(cls)
        self._set_up(group, config.plan, keep_alive=config.keep_alive)
        self.current_run = run
        return self

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeList:
        """One row per rank, with its memory as of the last forming of the group or :meth:`refresh_nodes`."""
        return NodeList(self._engine_group.nodes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._engine_group.world_size

    @property
    def backend(self) -> str:
        """Library of the collectives: "gloo" or "nccl"."""
        return self._engine_group.membership.backend

    @property
    def folder(self) -> Path:
        """The cluster's private folder."""
        return self._engine_group.folder

    def refresh_nodes(self) -> NodeList:
        """Ask every engine for its memory again."""
        self._engine_group.membership.set_nodes(self._engine_group.call_all(make_call(GroupOperations.node_info)))
        return self.nodes

    def stacks(self) -> stacks.Stacks:
        """Return every rank's Python stack as of now, also while engines are busy, in a collective, or stuck.

        This takes half a second on average, and neither waits for calls nor disturbs training.
        """
        self._engine_group.check_open()
        hosts = self._engine_group.transport.hosts
        return stacks.collect_stacks(self.folder, self.nodes, None if hosts is None else hosts.inspect_process)

    def benchmark(self, dtype: str = "float32", *, remeasure: bool = False) -> Benchmark:
        """Measure how fast the engines compute and communicate, in a few seconds. Later calls return the same result.

        All ranks multiply matrices of `dtype` ("float32", "float64", "bfloat16" or "float16") at once. Then come
        all-reduces of growing size, and messages between each pair of ranks. The result shows itself as a table, and
        its ``figure()`` as heat maps. `remeasure` measures again. Raises RunError while a run is running.
        """
        if remeasure or dtype not in self._benchmarks:
            planner.check_idle(self.current_run)
            self._benchmarks[dtype] = planner.run_benchmark(self._engine_group, dtype)
        return self._benchmarks[dtype]

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Interrupt what engines are doing, as the notebook's interrupt button does. Does not wait."""
        self._engine_group.interrupt(ranks)

    def activate(self) -> None:
        """Let ipyparallel's ``%px`` and ``%%px`` use these engines, between dispatches."""
        self._engine_group.check_open()
        make_view = getattr(self._engine_group.transport, "make_locked_view", None)
        if make_view is None:
            raise ClusterError("%%px needs ipyparallel engines; these are of another kind")
        make_view(self._engine_group.lock).activate()

    # -- lost engines, and the end ----------------------------------------------------------------------------

    def repair(self) -> list[int]:
        """Start new engines in place of those that have ended, and return their ranks.

        A running run does this by itself. A paused one continues from the step of the survivors or of a snapshot.
        """
        with self._repair_lock:
            return self._repair()

    def _repair(self) -> list[int]:
        group = self._engine_group
        group.check_open()
        group.check_owned()
        lost_ranks, run = group.membership.find_lost_ranks(), self.current_run
        if run is not None and not run.is_released:
            run.repair()
        elif lost_ranks:
            replace_lost_ranks(group, lost_ranks)
        return lost_ranks

    def close(self) -> None:
        """End the run, then everything that this cluster started. Idempotent.

        Nothing ends if another notebook has taken the cluster over.
        """
        failure_notice.print_pending()
        group = self._engine_group
        self._job_ends.close()
        if group.is_superseded:
            group.detach()
        elif not group.is_closed:
            with group.lock:
                run, self.current_run = self.current_run, None
            if run is not None:
                run.lifecycle.close()
            group.close()
        atexit.unregister(self._close_at_exit)  # after an interrupt above, it closes the cluster

    def _close_at_exit(self) -> None:
        """Close the cluster as a script ends, or as the user shuts a kernel down in which no run is unfinished.

        After a restart of the kernel, the next one may attach. So then the cluster lives as long as the lease.
        """
        if not in_notebook():
            if not self._keep_alive:
                self.close()
        elif is_kernel_shut_down() and self._is_unneeded():
            self._engine_group.cluster_folder.set_job_flag(present=False)  # Jupyter kills the kernel if this takes long
            self.close()

    def _is_unneeded(self) -> bool:
        """Return whether nobody will attach: the user named no lease, and no run has parameters to continue from."""
        transport, run = self._engine_group.transport, self.current_run
        is_leased = not isinstance(transport, LaunchedTransport) or transport.config.lease is not None
        is_ours = not self._engine_group.is_closed and not self._engine_group.is_superseded
        return is_ours and not is_leased and (run is None or run.is_released or _is_over(run))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a cluster stays in its notebook, and engines can't call it; give the function what it needs, such as "
            "cluster.world_size, as an argument"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._make_page().to_text()

    def _repr_html_(self) -> str:
        return self._make_page().to_html()

    def _make_page(self) -> TablePage:
        transport = self._engine_group.transport
        num_spares = len(transport.spare_ids) if isinstance(transport, LaunchedTransport) else 0
        return cluster_text.make_page(self._engine_group, self._device_note, num_spares)


def _is_over(run: Run) -> bool:
    """Return whether a run has ended, or is paused with ruined parameters, from which each step would fail again.

    After another step that was not finite, parameters are as before it, and the user may continue from them.
    """
    state, error = run.status.state, run.exception
    if state is not State.PAUSED or not isinstance(error, NonFiniteError):
        return state.has_ended
    totals = run.history.totals(max(0, run.history.num_steps - 1))
    return error.remedy == "train" or (len(totals) > 0 and not math.isfinite(totals["loss"][-1]))
