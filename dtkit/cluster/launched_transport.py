"""The transport over engines that dtkit starts and ends.

A started cluster consists of the notebook, ipyparallel's controller, and the engines, each with a nanny process. A
reaper outlives the notebook (:mod:`dtkit.cluster.reaper`). One process forks the engines
(:mod:`dtkit.cluster.forkserver`). All of them share one folder that only the user can enter. It has connection files,
logs, and the stores at which process groups meet.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util import resources, timeouts
from dtkit._util.deadline import wait_until
from dtkit._util.process import ProcessId
from dtkit.cluster import reaper
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.exit_status import describe_exit
from dtkit.cluster.launchers.agents import AgentLauncher
from dtkit.cluster.launchers.launcher import Launcher
from dtkit.cluster.launchers.local import choose_local_launcher
from dtkit.cluster.lease import Lease
from dtkit.cluster.transport import IpyparallelTransport
from dtkit.errors import ClusterError
from dtkit.rpc.transport import REPAIR_REMEDY
from dtkit.types import EngineLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.cluster.cluster_file import ClusterInfo
    from dtkit.rpc.job_end import JobEnd


_NO_ENGINE = -1
"""Stands for the engine id of a rank without an engine."""


class LaunchedTransport(IpyparallelTransport):
    """Transport over a controller, engines and spare engines of its own."""

    _remedy = REPAIR_REMEDY
    on_refill: Callable[[], object]
    """Called in a thread after spare engines were started."""

    def __init__(self, config: LaunchConfig, folder: Path, launcher: Launcher, lease: Lease) -> None:
        self.config, self.folder = config, folder
        self._launcher, self._lease = launcher, lease
        self.spare_ids: list[int] = []
        """Ipyparallel's ids of the engines that wait to replace one."""
        self._processes: dict[int, ProcessId] = {}  # of this host, by ipyparallel's ids
        self.on_refill = bool
        # locks: while engines start, which has a timeout
        self._start_lock = threading.Lock()  # any engine that connects meanwhile is the holder's
        # locks: while engines start, which has a timeout
        self._refill_lock = threading.Lock()  # the number of missing spares doesn't change meanwhile
        self._is_closing = False

    @classmethod
    def start(cls, n: int, config: LaunchConfig, on_wait: Callable[[str], object] = bool) -> LaunchedTransport:
        """Start reaper, controller, `n` engines and the spare ones."""
        folder = _make_cluster_folder()
        lease = Lease.start(folder, config.lease_s, config.job_lease_s)
        transport = cls(config, folder, _get_launcher_class(config)(config, folder), lease)
        transport._launcher.on_wait = transport._launcher.on_queue = on_wait
        try:
            transport._launcher.start_controller()
            transport._report_members()
            IpyparallelTransport.__init__(transport, transport._launcher.connect(), [])
            transport._connect_hosts(n)
            ids = transport._start_engines(n + config.spares)
        except BaseException:
            transport.close()
            raise
        transport._launcher.on_wait = bool
        transport._launcher.on_queue = transport._tell_queue
        transport.engine_ids, transport.spare_ids = ids[:n], ids[n:]
        transport._preload(transport.spare_ids)
        return transport

    @classmethod
    def reattach(cls, info: ClusterInfo) -> LaunchedTransport:
        """Return a transport over the engines that another notebook started."""
        config = LaunchConfig.from_json(info.launch_config)
        launcher = _get_launcher_class(config).reattach(config, info.folder)
        client = launcher.connect()
        lease = Lease.take_over(info.folder, config.lease_s, config.job_lease_s, info.reaper)
        transport = cls(config, info.folder, launcher, lease)
        IpyparallelTransport.__init__(transport, client, list(info.engine_ids))
        transport._launcher.on_queue = transport._tell_queue
        transport.spare_ids = list(info.spare_ids)
        transport._connect_hosts(len(info.engine_ids))
        if transport.hosts is not None:
            transport.hosts.exchange()  # results that the other notebook hasn't read
        return transport

    def _tell_queue(self, text: str) -> None:
        self.on_queue(text)  # which may have changed since the launcher got this method

    def _connect_hosts(self, num_engines: int) -> None:
        self.config = self._launcher.connect_hosts(self._client, num_engines)
        self.hosts = self._launcher.make_host_access(lambda rank: self.engine_ids[rank])
        self._report_members()

    @property
    def reaper(self) -> ProcessId:
        """Process that ends the cluster; it owns the shared files."""
        return self._lease.reaper

    def check_reachable(self) -> None:
        """Raise ClusterError if the controller has ended."""
        if self._launcher.has_controller_ended():
            raise ClusterError(
                "the controller, through which every message goes, has ended. This cluster can't be used any more: "
                "cluster.close() ends its engines. Start another one, and train with resume_from= from the last "
                "checkpoint"
            )

    @property
    def has_time_limits(self) -> bool:
        """Whether a scheduler may end the engines' jobs at a time that is known before."""
        return self._launcher.has_time_limits

    @property
    def submits_further_jobs(self) -> bool:
        """Whether a further job takes the place of one that ends."""
        return bool((self.config.hosts or {}).get("requeue"))

    def list_job_ends(self) -> list[JobEnd]:
        """Return when jobs of engines end. Raises ClusterError if the scheduler doesn't answer."""
        return self._launcher.list_job_ends()

    def end_job_early(self, job: str) -> None:
        """End a job whose engines are prepared for it; the next repair submits a further one."""
        self._launcher.end_job_early(job)

    def _describe_host(self, rank: int) -> str:
        return self._launcher.describe_host(self.engine_ids[rank])

    def find_lost_ranks(self) -> list[int]:
        """Return the ranks whose engines have ended, or end because their host's agent has ended."""
        lost_hosts = {rank for rank, engine in enumerate(self.engine_ids) if self._launcher.has_lost_host(engine)}
        return sorted({*super().find_lost_ranks(), *lost_hosts})

    def track_processes(self, pids: Mapping[int, int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank, pid in pids.items():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._processes.setdefault(self.engine_ids[rank], ProcessId.from_pid(pid))

    def _find_cause(self, rank: int) -> EngineLoss:
        jobs = self._launcher.describe_ended_jobs()
        reason = f" ({jobs})" if jobs else ""
        process = self._processes.get(self.engine_ids[rank])
        if process is None:
            return EngineLoss(f"its process has ended, or was silent for {timeouts.HEARTBEAT_TIMEOUT_S:.0f} s{reason}")
        if not process.wait_until_ended(timeouts.ENDING_PROCESS_TIMEOUT_S):
            return EngineLoss(f"its process runs, but was silent for {timeouts.HEARTBEAT_TIMEOUT_S:.0f} s{reason}")
        process.wait_until_reaped(timeouts.ENDING_PROCESS_TIMEOUT_S)  # by its parent, which knows the exit code
        code = self._launcher.get_exit_code(process.pid)
        return EngineLoss(f"its process has ended{describe_exit(code)}{reason}", exit_code=code)

    def end_processes(self, pids: Sequence[int]) -> None:
        """End these engines at once. The controller forgets a stopped engine, which no message can end."""
        reaper.kill_members(self.folder, pids)

    def detach(self) -> None:
        """Stop using the engines, which now belong to another notebook."""
        self._is_closing = True
        self._launcher.detach()
        self._client.close()
        self._lease.release()

    def close(self) -> None:
        """Let the reaper end all processes, since it knows every one of them."""
        self._is_closing = True
        try:
            self._launcher.end_hosts()
            if (client := getattr(self, "_client", None)) is not None:  # missing if starting failed
                client.close()
            self._launcher.stop()
        finally:
            self._lease.end_cluster()
            self._launcher.reap()

    # -- engines ----------------------------------------------------------------------------------------------

    def replace(self, ranks: Sequence[int]) -> None:
        """End the engines of these ranks, and take spare engines or new ones instead."""
        self.kill(ranks)
        missing = [rank for rank in ranks if not self._use_spare(rank)]
        if missing:
            with self._refill_lock:  # spares that are already starting are ready sooner than new engines
                missing = [rank for rank in missing if not self._use_spare(rank)]
        if missing:
            for rank, engine in zip(missing, self._start_engines(len(missing)), strict=True):
                self.engine_ids[rank] = engine
        if len(self.spare_ids) < self.config.spares:
            threading.Thread(target=self._refill_spares, name="dtkit-spares", daemon=True).start()

    def set_aside(self, ranks: Sequence[int]) -> None:
        """Make spare engines of the engines of these ranks."""
        for rank in ranks:
            self.spare_ids.insert(0, self.engine_ids[rank])
            self.engine_ids[rank] = _NO_ENGINE

    def _use_spare(self, rank: int) -> bool:
        while self.spare_ids:
            engine = self.spare_ids.pop(0)
            if engine in self._client.ids:
                self.engine_ids[rank] = engine
                return True
        return False

    def _refill_spares(self) -> None:
        """Start missing spares. A replacement that needs one meanwhile waits for it."""
        try:
            with self._refill_lock, contextlib.suppress(ClusterError):  # without spares, a replacement takes longer
                self._add_spares()
        # broad: closing the cluster takes client, launcher and folder away from this thread
        except Exception:
            if not self._is_closing:
                raise
        resources.trim_malloc()  # this thread may have had a malloc arena of its own

    def _add_spares(self) -> None:
        engines = self._start_engines(max(0, self.config.spares - len(self.spare_ids)))
        if not engines:  # another thread was quicker, or the cluster is closing
            return
        self._preload(engines)
        self.spare_ids += engines
        self._launcher.remove_ended_engines()
        self.on_refill()

    def _preload(self, engines: Sequence[int]) -> None:
        if engines:
            self._client.direct_view(engines).apply_async(_load_torch)

    def _start_engines(self, n: int) -> list[int]:
        """Start engines, wait until they are connected, and return their ids."""
        with self._start_lock:
            known = set(self._client.ids)
            self._launcher.start_engines(n)
            self._report_members()
            timeout = self.config.timeout
            if not wait_until(lambda: len(self._list_new(known)) >= n or self._is_closing, timeout):
                self._raise_missing(len(self._list_new(known)), n)
            self._report_members()  # with the nannies
            _make_private(self.folder)
            return self._launcher.order_engines(self._list_new(known))[:n]

    def _list_new(self, known: set[int]) -> list[int]:
        """Return the engines that have connected since then, without agents."""
        return [engine for engine in self._client.ids if engine not in known and not self._launcher.is_agent(engine)]

    def _report_members(self) -> None:
        self._lease.write_members(self._launcher.list_pids())

    def _raise_missing(self, num_started: int, n: int) -> None:
        logs = "\n".join(path.read_text()[-500:] for path in sorted((self.folder / "log").glob("ipengine*"))[:1])
        raise ClusterError(
            f"{num_started} of {n} engines came within {self.config.timeout:g} s; give them longer with timeout=, or "
            f"fewer engines. The first engine's log ends:\n{logs}"
        )


def get_runtime_folder() -> Path:
    """Return Jupyter's folder for files that live as long as a session."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())


def _get_launcher_class(config: LaunchConfig) -> type[Launcher]:
    if config.hosts is not None:
        return AgentLauncher
    return choose_local_launcher(config) if config.launcher == "local" else Launcher


def _load_torch() -> None:
    """Load the modules that take longest when an engine joins, and at its first step with any strategy."""
    from dtkit._util.lazy_compiler import load_compiler
    from dtkit.engine.warmup import preload

    load_compiler()
    preload()


def _make_cluster_folder() -> Path:
    """Create a folder that only this user can enter."""
    folder = get_runtime_folder() / f"dtkit-{secrets.token_hex(4)}"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def _make_private(folder: Path) -> None:
    """Let only this user read what ipyparallel wrote, such as logs."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # engines replace their files all the time
            path.chmod(0o700 if path.is_dir() else 0o600)
