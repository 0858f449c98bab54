"""Controller and engines of one cluster, started by any of ipyparallel's launchers.

ipyparallel is imported where it is used: a fork server loads torch meanwhile.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

import psutil

from dtkit._util import timeouts
from dtkit._util.process import ProcessId
from dtkit.cluster import ipv6
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import ipyparallel as ipp

    from dtkit.cluster.config import LaunchConfig
    from dtkit.cluster.launchers.host_access import HostAccess
    from dtkit.rpc.job_end import JobEnd

_LOG_LEVEL = 50  # ipyparallel prints when engines end, which dtkit reports itself
_HUB_RECORD_LIMIT = 256
"""Number of requests and results that the controller keeps. dtkit never reads them."""


class Launcher:
    """Starts and ends processes through ipyparallel, with any of ipyparallel's launchers by name."""

    controller_ip = ""  # ipyparallel's own choice
    on_wait: Callable[[str], object]
    """Called with a text on what the launcher waits for."""
    on_queue: Callable[[str], object]
    """Called with the state of jobs that wait in a scheduler's queue."""

    def __init__(self, config: LaunchConfig, folder: Path) -> None:
        self.on_wait = self.on_queue = bool
        self._config, self._folder = config, folder
        self._engine_set_ids: list[str] = []
        self._controller: ProcessId | None = None
        self._cluster: Any = None

    @classmethod
    def reattach(cls, config: LaunchConfig, folder: Path) -> Self:
        """Return the launcher of a cluster that another notebook started."""
        import ipyparallel as ipp

        launcher = cls(config, folder)
        launcher._cluster = ipp.Cluster.from_file(profile_dir=str(folder), cluster_id="dtkit", log_level=_LOG_LEVEL)
        launcher._engine_set_ids = list(launcher._cluster.engines)
        return launcher

    # -- controller -------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Start the process through which every message goes."""
        import ipyparallel as ipp

        period_s = compute_heartbeat_period(self._config)
        uses_ipv6 = ipv6.is_ipv6(self.controller_ip)
        self._cluster = ipp.Cluster(
            controller_ip="" if uses_ipv6 else self.controller_ip,
            engine_launcher_class="local" if self._config.hosts is not None else self._config.launcher,
            profile_dir=str(self._folder),
            cluster_id="dtkit",
            shutdown_atexit=False,
            log_level=_LOG_LEVEL,
            controller_args=[
                f"--HeartMonitor.period={round(1000 * period_s)}",
                f"--HeartMonitor.max_heartmonitor_misses={round(timeouts.HEARTBEAT_TIMEOUT_S / period_s)}",
                "--IPController.enable_curve=True",
                f"--DictDB.record_limit={_HUB_RECORD_LIMIT}",
                *(ipv6.list_controller_arguments(self.controller_ip) if uses_ipv6 else ()),
            ],
        )
        # waits: ipyparallel starts a process and returns
        self._cluster.start_controller_sync(**({"controller_cmd": ipv6.get_controller_command()} if uses_ipv6 else {}))
        self._find_controller()  # now, while it runs

    def connect(self) -> ipp.Client:
        """Return a client of the controller."""
        # ipyparallel drops the controller of a cluster file if its process has ended.
        if self.has_controller_ended() or self._cluster.controller is None:
            raise ClusterError(
                f"the controller of {self._folder.name}, through which every message goes, has ended, so that nobody "
                "can reach its engines. They end when the notebook closes the cluster, or soon after the notebook "
                "ends. Start another cluster with dtkit.Cluster(), and train with resume_from= from the last checkpoint"
            )
        timeout = self._config.timeout
        try:
            return self._cluster.connect_client_sync(timeout=timeout)
        except TimeoutError:
            raise ClusterError(
                f"the controller did not answer within {timeout:g} s; give it longer with timeout="
            ) from None

    def has_controller_ended(self) -> bool:
        """Return whether the controller, if it is a process of this host, has ended."""
        controller = self._find_controller()
        return controller is not None and not controller.is_alive

    def _find_controller(self) -> ProcessId | None:
        if self._controller is None and (pid := self._get_controller_pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                self._controller = ProcessId.from_pid(pid)
        return self._controller

    def _get_controller_pid(self) -> int | None:
        process = getattr(self._cluster.controller, "process", None)
        return None if process is None else int(process.pid)

    # -- engines ----------------------------------------------------------------------------------------------

    def start_engines(self, n: int) -> None:
        """Start engines, without waiting for them to connect."""
        # waits: ipyparallel waits at most 60 s for the connection file
        self._engine_set_ids.append(self._cluster.start_engines_sync(n))

    def connect_hosts(self, client: Any, num_engines: int) -> LaunchConfig:
        """Prepare hosts for engines. Return the configuration, possibly with other devices."""
        del client, num_engines
        return self._config

    def make_host_access(self, get_engine_id: Callable[[int], int]) -> HostAccess | None:
        """Return the access, by rank, to hosts that don't share this host's folder; None without such hosts."""
        del get_engine_id
        return None

    def order_engines(self, engine_ids: Sequence[int]) -> list[int]:
        """Return new engines in order of rank."""
        return sorted(engine_ids)

    def is_agent(self, engine_id: int) -> bool:
        """Return whether this ipyparallel engine is an agent, not a rank."""
        del engine_id
        return False

    def detach(self) -> None:
        """Stop background work for the engines, which stay."""

    def end_hosts(self) -> None:
        """End what runs on other hosts, while the controller still runs."""

    def list_pids(self) -> list[int]:
        """Return the pids of this host's processes of the cluster, children included."""
        controller_pid = self._get_controller_pid()
        roots = [] if controller_pid is None else [controller_pid]
        for name in self._engine_set_ids:
            roots += [engine.process.pid for engine in self._get_engine_launchers(name).values()]
        return list_with_children(roots)

    def get_exit_code(self, pid: int) -> int | None:
        """Return the exit code of an engine of this host that has ended, or None if it is unknown."""
        for name in self._engine_set_ids:
            for engine in self._get_engine_launchers(name).values():
                if engine.process.pid == pid:
                    return getattr(engine.process, "returncode", None)  # another notebook may have started it
        return None

    def describe_ended_jobs(self) -> str:
        """Return the states of ended jobs that ran engines; empty if there are none."""
        return ""

    @property
    def has_time_limits(self) -> bool:
        """Whether a scheduler may end jobs at a time that is known before."""
        return False

    def list_job_ends(self) -> list[JobEnd]:
        """Return when jobs end that have a time limit."""
        return []

    def end_job_early(self, job: str) -> None:
        """End a job, which a further one replaces."""

    def describe_host(self, engine_id: int) -> str:
        """Return the name of an engine's host; empty if that is this one, or unknown."""
        del engine_id
        return ""

    def has_lost_host(self, engine_id: int) -> bool:
        """Return whether an engine ends because its host's agent is gone."""
        del engine_id
        return False

    def remove_ended_engines(self) -> None:
        """Forget engines that have ended: ipyparallel keeps an event loop for each of them."""
        for name in list(self._engine_set_ids):
            launchers = self._get_engine_launchers(name)
            if launchers and not any(engine.process.is_running() for engine in launchers.values()):
                self._engine_set_ids.remove(name)
                self._cluster.engines.pop(name)
        self._cluster.update_cluster_file()  # a notebook that takes over reads it

    def _get_engine_launchers(self, name: str) -> dict[Any, Any]:
        launchers: dict[Any, Any] = getattr(self._cluster.engines.get(name), "launchers", {})
        return launchers

    def stop(self) -> None:
        """End processes that the reaper may not reach, because they run on other hosts."""
        if self._cluster is not None:
            # waits: ipyparallel waits at most 10 s for each process to end
            self._cluster.stop_cluster_sync()

    def reap(self) -> None:
        """Wait for children of this process which the reaper has ended."""


def compute_heartbeat_period(config: LaunchConfig) -> float:
    """Return the seconds between two heartbeats. Few engines on this host have more, and so register sooner."""
    if config.hosts is not None:
        return timeouts.HEARTBEAT_PERIOD_S
    period_s = len(config.plan.devices) / timeouts.HEARTBEATS_PER_S
    return min(timeouts.HEARTBEAT_PERIOD_S, max(timeouts.MIN_HEARTBEAT_PERIOD_S, period_s))


def list_with_children(pids: Sequence[int]) -> list[int]:
    """Return processes and all their descendants."""
    processes = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return processes


def check_launcher(name: str) -> None:
    """Raise ValueError for a launcher that ipyparallel doesn't know."""
    if name == "local":
        return
    if name == "ssh":
        raise ValueError("launcher='ssh'; name the hosts, as in launcher=dtkit.SSH(['gpu1:4', 'gpu2:4'])")
    from ipyparallel.cluster.launcher import find_launcher_class

    try:
        find_launcher_class(name, "engine")
    except (KeyError, AttributeError):
        raise ValueError(
            f"launcher={name!r}; it must be 'local', or the name of a launcher that ipyparallel knows, such as "
            "'slurm' or 'mpi'"
        ) from None
