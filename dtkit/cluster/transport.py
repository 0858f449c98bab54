"""The engines as ipyparallel has them: started, spoken to, interrupted, ended. The only module that imports it.

The layout of a started cluster: the notebook; a warden that outlives it (:mod:`dtkit.cluster.reaper`); ipyparallel's
controller; and one engine set per rank, so that each engine has an environment of its own. All of it lives in one
folder that only the user can enter: connection files, logs, and the FileStore that the process group meets at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import secrets
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
import psutil

from dtkit._util import formatting
from dtkit.cluster import cluster_file, reaper, resources
from dtkit.cluster.devices import DevicePlan
from dtkit.errors import ClusterError
from dtkit.rpc import shared_memory
from dtkit.rpc.entrypoint import MIMETYPE, Entrypoint
from dtkit.types import Failure, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster_file import ClusterInfo

DEFAULT_LEASE_S, DEFAULT_JOB_LEASE_S = 60.0, 1800.0
_HEARTBEAT_PERIOD_MS = 500
HEARTBEAT_TIMEOUT_S = 8.0
"""After so long without a heartbeat an engine is given up. That its process has ended is known at once, by other ways:
this is for one that is stopped, and nothing may wait for that over 10 s without a word, not even as a group forms."""
_HUB_RECORD_LIMIT = 256  # of requests and results that the hub keeps, for nobody: they must not grow all the while


def wrap_client(client: Any) -> IpyparallelTransport:
    """The engines of a client that somebody else connected."""
    if not isinstance(client, ipp.Client):
        raise TypeError(
            f"from_client({client!r}): client must be an ipyparallel.Client, as in from_client(ipp.Cluster(n=2)"
            ".start_and_connect_sync())"
        )
    if not client.ids:
        raise ClusterError("the client has no engines yet; call client.wait_for_engines(n) first")
    return IpyparallelTransport(client, list(client.ids))


class IpyparallelTransport:
    """The transport over a connected client. Leaves engines alone when closed."""

    def __init__(self, client: ipp.Client, engine_ids: list[int]) -> None:
        self._client = client
        self.engine_ids = list(engine_ids)
        self._entrypoint = Entrypoint()

    def send(self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None) -> Future[Reply]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        reply: Future[Reply] = Future()
        client = self._client
        engine = client._engines.get(self.engine_ids[rank])  # noqa: SLF001 - a view would make ten objects for each
        if engine is None:
            reply.set_result(_make_lost_reply(rank))
            return reply
        sent = client.send_apply_request(client._mux_stream, self._entrypoint, [message], ident=engine.encode())  # noqa: SLF001
        if listen is not None:
            _OutputListener(sent.output.metadata, listen, reply).start()
        waiting = [reply]
        sent.add_done_callback(lambda done: waiting.pop().set_result(self._read_reply(rank, done)))
        return reply

    def _read_reply(self, rank: int, finished: Any) -> Reply:
        """What came back, whatever it is; and forget it in the client's history, which would grow for ever.

        The client's other tables clear themselves once the engine has reported idle, which they are needed for. Its
        futures lie in cycles, until Python next looks for garbage among all that a notebook holds: hence the answer is
        taken out of them, as is the future that waits for it.
        """
        with contextlib.suppress(ValueError):
            self._client.history.remove(finished.msg_id)
        found = finished.result(timeout=0)
        if isinstance(found, list):
            # unpickles: an engine's reply; engines are trusted (see the README)
            return pickle.loads(found.pop())  # type: ignore[no-any-return]
        name = getattr(found, "ename", type(found).__name__)
        if name == ipp.error.EngineError.__name__:  # so the client tells that an engine died in a call
            return _make_lost_reply(rank)
        kind = "interrupted" if name == KeyboardInterrupt.__name__ else "error"  # between two calls
        trace = getattr(found, "traceback", None) or ""
        return Reply(failure=Failure(rank, "?", name, getattr(found, "evalue", str(found)), trace, kind=kind))

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:
        """Through each engine's nanny."""
        alive = [self.engine_ids[r] for r in ranks if self.engine_ids[r] in self._client.ids]
        for number in (signal.SIGCONT, signal.SIGINT) if wake else (signal.SIGINT,):
            if alive:
                self._client.send_signal(number, targets=alive, block=False)

    def check_reachable(self) -> None:
        """Somebody else's controller can't be asked after."""

    def find_lost_ranks(self) -> list[int]:
        """The ranks whose engines have ended."""
        alive = set(self._client.ids)
        return [rank for rank, engine in enumerate(self.engine_ids) if engine not in alive]

    def kill(self, ranks: Sequence[int], timeout: float = 5.0) -> None:
        """End these engines by SIGKILL, through their nannies, and wait until they are known to be gone."""
        targets = [self.engine_ids[rank] for rank in ranks if self.engine_ids[rank] in self._client.ids]
        if targets:
            self._client.send_signal(signal.SIGKILL, targets=targets, block=False)
            _wait_until(lambda: not set(targets) & set(self._client.ids), timeout)

    def drop(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks: those above move down."""
        self.engine_ids = [engine for rank, engine in enumerate(self.engine_ids) if rank not in set(ranks)]

    def replace(self, ranks: Sequence[int]) -> None:
        """Have a new engine at each of these ranks: only possible where we start engines."""
        raise ClusterError(
            f"the engines of {formatting.format_count(len(ranks), 'rank')} are gone "
            f"({', '.join(map(str, ranks))}), and this "
            "cluster was attached to engines that somebody else started, so it can't start others. Train with "
            "on_failure='shrink', or start engines where those came from, and attach again"
        )

    def make_locked_view(self, lock: threading.RLock) -> ipp.DirectView:
        """A view for ``%%px`` that fans out under the cluster's lock."""
        view = _LockedView(self._client, self._client._mux_stream, targets=self.engine_ids)  # noqa: SLF001 - as Client.direct_view
        view.lock = lock
        view.block = True  # %%px ends when the engines have run it: what they print stands under it, errors are raised
        return view

    def close(self) -> None:
        """Nothing was started here."""


class _OutputListener:
    """Hands on what an engine publishes while a call runs: the client collects, a thread looks."""

    def __init__(self, metadata: Any, listen: Callable[[int, list[Any]], None], reply: Future[Reply]) -> None:
        self._metadata = metadata
        self._listen, self._reply_arrived = listen, threading.Event()
        self._num_handled = 0
        reply.add_done_callback(lambda _: self._reply_arrived.set())

    def start(self) -> None:
        threading.Thread(target=self._poll_outputs, name="dtkit-listen", daemon=True).start()

    def _poll_outputs(self) -> None:
        while not self._reply_arrived.wait(0.1):
            outputs = self._metadata["outputs"]
            while self._num_handled < len(outputs):
                data = outputs[self._num_handled]["data"].get(MIMETYPE)
                outputs[self._num_handled] = None  # handed on; the client would keep it
                self._num_handled += 1
                if data is not None:
                    self._listen(data["first"], data["items"])


class _LockedView(ipp.DirectView):  # type: ignore[misc]  # ipyparallel has no types
    """A DirectView whose fan-outs take the cluster's lock."""

    lock: Any = contextlib.nullcontext()

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        block = kwargs.pop("block", None)
        with self.lock:
            result = super().execute(*args, block=False, **kwargs)
        if self.block if block is None else block:
            # waits: a user's %%px may take as long as it likes; an interrupt ends it
            result.get()
        return result


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How engines are started."""

    launcher: str
    plan: DevicePlan
    timeout: float
    memory_limit: int | None = None
    lease: float | None = None
    spares: int = 0
    """Engines that are started along, and wait to replace one."""
    keep_alive: bool = False
    """Whether they outlive a script."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LaunchConfig:
        """From what `dataclasses.asdict` gave, and JSON."""
        plan = DevicePlan(**{**fields["plan"], "devices": tuple(fields["plan"]["devices"])})
        return cls(**{**fields, "plan": plan})


class LaunchedTransport(IpyparallelTransport):
    """A transport over engines that we start, and end."""

    on_refill: Callable[[], None]
    """Called in a thread when there are other spares."""

    def __init__(self, n: int, config: LaunchConfig) -> None:
        self._config = config
        self.on_refill = _do_nothing
        self._engine_set_ids: list[str] = []
        self._cached_controller_identity: tuple[int, float] | None = None
        self._spare_ids: list[int] = []
        # locks: while engines start, which has a timeout
        self._start_lock = threading.Lock()  # who holds it knows that an engine that comes is its own
        # locks: while engines start, which has a timeout
        self._refill_lock = threading.Lock()  # who holds it knows how many spares are missing
        self._is_closing = False
        self._reaper: subprocess.Popen[bytes] | None = None
        self.folder = _make_cluster_folder()
        lease = config.lease
        self._lease_and_job_lease_s = (
            DEFAULT_LEASE_S if lease is None else lease,
            DEFAULT_JOB_LEASE_S if lease is None else lease,
        )
        # locks: while engines start, which has a timeout
        self._ownership_lock, self._holds_lock = threading.Lock(), False
        self._acquire_lock(timeout=5.0)
        reaper.write_members(self.folder, [], *self._lease_and_job_lease_s)
        self._reaper = reaper.start_reaper(self.folder)
        self._reaper_identity = cluster_file.get_process_identity(self._reaper.pid)
        self.file_owner = shared_memory.ProcessId.from_pid(self._reaper.pid)
        try:
            client = self._start_controller()
            super().__init__(client, [])
            ids = self._start_engines(n + config.spares)
        except BaseException:
            self.close()
            raise
        self.engine_ids, self._spare_ids = ids[:n], ids[n:]
        if self._spare_ids:
            self._client.direct_view(self._spare_ids).apply_async(_load_torch)

    def _start_controller(self) -> ipp.Client:
        launcher = self._config.launcher
        self._cluster = cluster = ipp.Cluster(
            controller_ip="127.0.0.1" if launcher == "local" else "",  # "": the launcher's own choice
            engine_launcher_class=launcher,
            profile_dir=str(self.folder),
            cluster_id="dtkit",
            shutdown_atexit=False,
            log_level=50,
            controller_args=[
                f"--HeartMonitor.period={_HEARTBEAT_PERIOD_MS}",  # engines are registered on a beat
                f"--HeartMonitor.max_heartmonitor_misses={round(HEARTBEAT_TIMEOUT_S * 1000 / _HEARTBEAT_PERIOD_MS)}",
                "--IPController.enable_curve=True",
                f"--DictDB.record_limit={_HUB_RECORD_LIMIT}",
            ],
        )
        # waits: ipyparallel starts a process and returns
        cluster.start_controller_sync()
        self._cached_controller_identity = self._controller_identity  # while it surely lives
        self._report_members()
        return self._connect()

    def _connect(self) -> ipp.Client:
        timeout = self._config.timeout
        controller = self._controller_identity
        ended = controller is not None and not cluster_file.is_process_alive(*controller)
        if ended or self._cluster.controller is None:  # so ipyparallel says it
            raise ClusterError(
                f"the controller of {self.folder.name}, through which every message goes, has ended, so that nobody "
                "can reach its engines. They end by themselves soon after its notebook, or as that closes it. Start "
                "another cluster with dtkit.Cluster(), and train with resume_from= from the last checkpoint"
            )
        try:
            return self._cluster.connect_client_sync(timeout=timeout)
        except TimeoutError:
            raise ClusterError(
                f"the controller did not answer within {timeout:g} s; give it longer with timeout="
            ) from None

    @classmethod
    def reattach(cls, info: ClusterInfo) -> LaunchedTransport:
        """Those that another notebook started, with their ids by rank."""
        self = cls.__new__(cls)
        self._config = LaunchConfig.from_json(info.launch_config)
        self.on_refill = _do_nothing
        self._cached_controller_identity = None
        self._engine_set_ids, self._spare_ids = [], list(info.spare_ids)
        # locks: while engines start, which has a timeout
        self._start_lock, self._refill_lock, self._is_closing = threading.Lock(), threading.Lock(), False
        self.folder, self._reaper = info.folder, None
        self._reaper_identity = info.warden
        lease = self._config.lease
        self._lease_and_job_lease_s = (
            DEFAULT_LEASE_S if lease is None else lease,
            DEFAULT_JOB_LEASE_S if lease is None else lease,
        )
        # locks: while engines start, which has a timeout
        self._ownership_lock, self._holds_lock = threading.Lock(), False
        self.file_owner = shared_memory.ProcessId.from_pid(info.warden[0])
        self._cluster = ipp.Cluster.from_file(profile_dir=str(self.folder), cluster_id="dtkit")
        self._engine_set_ids = list(self._cluster.engines)
        client = self._connect()
        IpyparallelTransport.__init__(self, client, list(info.engine_ids))
        threading.Thread(target=self._acquire_lock_when_free, name="dtkit-lock", daemon=True).start()
        return self

    def _acquire_lock_when_free(self) -> None:
        """Hold the lock by which the warden knows that somebody is there; an older notebook may still have it."""
        pause = threading.Event()
        while not self._is_closing:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                self._acquire_lock(timeout=0.0)
                return
            pause.wait(0.5)

    def _acquire_lock(self, timeout: float) -> None:
        with self._ownership_lock:  # else one that is taken while somebody closes is never released
            if not self._is_closing:
                reaper.acquire_lock(self.folder, timeout)
                self._holds_lock = True

    def _release_lock(self) -> None:
        with self._ownership_lock:
            if self._holds_lock:
                self._holds_lock = False
                reaper.release_lock(self.folder)

    def check_reachable(self) -> None:
        """The controller is a process of ours: messages go through it."""
        controller = self._controller_identity
        if controller is not None and not cluster_file.is_process_alive(*controller):
            raise ClusterError(
                "the controller, through which every message goes, has ended. This cluster can't be used any more: "
                "cluster.close() ends its engines. Start another one, and train with resume_from= from the last "
                "checkpoint"
            )

    def get_reaper_identity(self) -> tuple[int, float]:
        """Pid and start time of the warden."""
        return self._reaper_identity

    @property
    def spare_ids(self) -> list[int]:
        """Ipyparallel's ids of the engines that wait."""
        return list(self._spare_ids)

    @property
    def config(self) -> LaunchConfig:
        """How they were started."""
        return self._config

    def detach(self) -> None:
        """Somebody else has these engines now: speak to them no more."""
        self._is_closing = True
        self._client.close()
        self._release_lock()

    # -- engines ----------------------------------------------------------------------------------------------

    @property
    def _controller_identity(self) -> tuple[int, float] | None:
        if self._cached_controller_identity is None and hasattr(self._cluster.controller, "process"):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._cached_controller_identity = cluster_file.get_process_identity(
                    self._cluster.controller.process.pid
                )
        return self._cached_controller_identity

    def _start_engines(self, n: int) -> list[int]:
        """Start so many, and wait for them. Returns their ids."""
        with self._start_lock:
            known = set(self._client.ids)
            how = self._config
            if how.launcher == "local":
                # One set per engine: each has its own environment, and can be ended by itself.
                environment = how.plan.make_environment(0, how.memory_limit)
                # waits: ipyparallel waits at most 60 s for the connection file
                self._engine_set_ids += [self._cluster.start_engines_sync(1, environment=environment) for _ in range(n)]
            else:
                # waits: ipyparallel waits at most 60 s for the connection file
                self._engine_set_ids.append(self._cluster.start_engines_sync(n))
            self._report_members()
            if not _wait_until(lambda: len(set(self._client.ids) - known) >= n or self._is_closing, how.timeout):
                self._raise_missing(len(set(self._client.ids) - known), n)
            self._report_members()  # the nannies, too
            _make_private(self.folder)
            return sorted(set(self._client.ids) - known)[:n]

    def _raise_missing(self, num_started: int, n: int) -> None:
        logs = "\n".join(p.read_text()[-500:] for p in sorted((self.folder / "log").glob("ipengine*"))[:1])
        raise ClusterError(
            f"{num_started} of {n} engines came within {self._config.timeout:g} s; give them longer with "
            "timeout=, or fewer "
            f"engines. The first engine's log ends:\n{logs}"
        )

    def replace(self, ranks: Sequence[int]) -> None:
        """Have a new engine at each of these ranks, whose own are ended if they still live. Spares come first."""
        self.kill(ranks)
        missing = [rank for rank in ranks if not self._use_spare(rank)]
        if missing:
            with self._refill_lock:  # what is being started already is there sooner than what would be from now on
                missing = [rank for rank in missing if not self._use_spare(rank)]
        if missing:
            for rank, engine in zip(missing, self._start_engines(len(missing)), strict=True):
                self.engine_ids[rank] = engine
        if len(self._spare_ids) < self._config.spares:
            threading.Thread(target=self._refill_spares, name="dtkit-spares", daemon=True).start()

    def _use_spare(self, rank: int) -> bool:
        while self._spare_ids:
            engine = self._spare_ids.pop(0)
            if engine in self._client.ids:
                self.engine_ids[rank] = engine
                return True
        return False

    def _refill_spares(self) -> None:
        """Start what is missing of the spares; whoever needs one meanwhile waits for it."""
        with self._refill_lock, contextlib.suppress(ClusterError):  # then there is none, and a replacement takes longer
            found = self._start_engines(max(0, self._config.spares - len(self._spare_ids)))
            if not found:  # another thread was quicker, or the cluster is closing
                return
            view = self._client.direct_view(found)
            view.apply_async(_load_torch)
            self._spare_ids += found
            self._remove_ended_launchers()
            self.on_refill()
        resources.trim_malloc()  # of an arena of malloc's that this thread may have had to itself

    def _remove_ended_launchers(self) -> None:
        """Let go of what started engines that have ended: ipyparallel keeps it, with an event loop each."""
        for name in list(self._engine_set_ids):
            launchers = getattr(self._cluster.engines.get(name), "launchers", {})
            if launchers and not any(engine.process.is_running() for engine in launchers.values()):
                self._engine_set_ids.remove(name)
                self._cluster.engines.pop(name)
        self._cluster.update_cluster_file()  # which a notebook that takes over reads

    def _report_members(self) -> None:
        """Tell the warden all processes that run by now."""
        roots = [self._cluster.controller.process.pid] if hasattr(self._cluster.controller, "process") else []
        for name in self._engine_set_ids:
            launchers = getattr(self._cluster.engines.get(name), "launchers", {})
            roots += [engine.process.pid for engine in launchers.values()]
        pids = list(roots)
        for pid in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        reaper.write_members(self.folder, pids, *self._lease_and_job_lease_s)

    def close(self) -> None:
        """Ask the warden to end everything; it knows every process."""
        self._is_closing = True
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()
        remote = getattr(self, "_cluster", None)
        if remote is not None and remote.engine_launcher_class is not ipp.cluster.launcher.LocalEngineSetLauncher:
            try:
                # waits: ipyparallel waits at most 10 s for each process to end
                remote.stop_cluster_sync()
            finally:
                self._end_reaper()
        self._end_reaper()

    def _end_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(timeout=10)
            self._reaper = None
        elif cluster_file.is_process_alive(*self._reaper_identity):
            psutil.Process(self._reaper_identity[0]).terminate()
            _wait_until(lambda: not cluster_file.is_process_alive(*self._reaper_identity), 10)
        self._release_lock()


def _do_nothing() -> None:
    """Until somebody wants to know that there are other spares."""


def _load_torch() -> None:
    """What takes longest when an engine joins, and when it takes its first step."""
    from dtkit.engine.warmup import preload

    preload()


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Look every 20 ms; whether it came true in time."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def _make_lost_reply(
    rank: int, reason: str = f"its process has ended, or was silent for {HEARTBEAT_TIMEOUT_S:.0f} s"
) -> Reply:
    message = f"the engine of rank {rank} is gone: {reason}. cluster.repair() starts another one in its place"
    return Reply(failure=Failure(rank, "?", "EngineLost", message, "", kind="lost"))


def get_runtime_folder() -> Path:
    """Where Jupyter keeps what lives as long as a session."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())


def _make_cluster_folder() -> Path:
    """A folder that only this user can enter."""
    folder = get_runtime_folder() / f"dtkit-{secrets.token_hex(4)}"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def _make_private(folder: Path) -> None:
    """Make what ipyparallel wrote as the umask says (logs, among others) the user's alone."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # engines write theirs anew all the time
            path.chmod(0o700 if path.is_dir() else 0o600)


def check_launcher(launcher: str) -> None:
    """Raise ValueError for a launcher that ipyparallel doesn't know."""
    try:
        ipp.cluster.launcher.find_launcher_class(launcher, "engine")
    except (KeyError, AttributeError):
        raise ValueError(
            f"launcher={launcher!r}; it must be 'local', or the name of a launcher that ipyparallel knows, such as "
            "'ssh', 'slurm' or 'mpi'"
        ) from None
