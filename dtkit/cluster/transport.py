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
from dtkit.rpc.entrypoint import MIMETYPE, Entry
from dtkit.types import Failure, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster_file import Papers

LEASE_S, JOB_LEASE_S = 60.0, 1800.0
_BEAT_MS = 500
SILENT_S = 8.0
"""After so long without a heartbeat an engine is given up. That its process has ended is known at once, by other ways:
this is for one that is stopped, and nothing may wait for that over 10 s without a word, not even as a group forms."""
_HUB_RECORDS = 256  # of requests and results that the hub keeps, for nobody: they must not grow all the while


def of_client(client: Any) -> Engines:
    """The engines of a client that somebody else connected."""
    if not isinstance(client, ipp.Client):
        raise TypeError(
            f"attach(client={client!r}): client must be an ipyparallel.Client, as in attach(client=ipp.Cluster(n=2)"
            ".start_and_connect_sync())"
        )
    if not client.ids:
        raise ClusterError("the client has no engines yet; call client.wait_for_engines(n) first")
    return Engines(client, list(client.ids))


class Engines:
    """The transport over a connected client. Leaves engines alone when closed."""

    def __init__(self, client: ipp.Client, engine_ids: list[int]) -> None:
        self._client = client
        self.engine_ids = list(engine_ids)
        self._entry = Entry()

    def send(self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None) -> Future[Reply]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        reply: Future[Reply] = Future()
        client = self._client
        engine = client._engines.get(self.engine_ids[rank])  # noqa: SLF001 - a view would make ten objects for each
        if engine is None:
            reply.set_result(_lost(rank))
            return reply
        sent = client.send_apply_request(client._mux_stream, self._entry, [message], ident=engine.encode())  # noqa: SLF001
        if listen is not None:
            _Listener(sent.output.metadata, listen, reply).start()
        waiting = [reply]
        sent.add_done_callback(lambda done: waiting.pop().set_result(self._read(rank, done)))
        return reply

    def _read(self, rank: int, done: Any) -> Reply:
        """What came back, whatever it is; and forget it in the client's history, which would grow for ever.

        The client's other tables clear themselves once the engine has reported idle, which they are needed for. Its
        futures lie in cycles, until Python next looks for garbage among all that a notebook holds: hence the answer is
        taken out of them, as is the future that waits for it.
        """
        with contextlib.suppress(ValueError):
            self._client.history.remove(done.msg_id)
        found = done.result(timeout=0)
        if isinstance(found, list):
            # unpickles: an engine's reply; engines are trusted (see the README)
            return pickle.loads(found.pop())  # type: ignore[no-any-return]
        name = getattr(found, "ename", type(found).__name__)
        if name == ipp.error.EngineError.__name__:  # so the client tells that an engine died in a call
            return _lost(rank)
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

    def lost(self) -> list[int]:
        """The ranks whose engines have ended."""
        alive = set(self._client.ids)
        return [rank for rank, engine in enumerate(self.engine_ids) if engine not in alive]

    def kill(self, ranks: Sequence[int], timeout: float = 5.0) -> None:
        """End these engines by SIGKILL, through their nannies, and wait until they are known to be gone."""
        targets = [self.engine_ids[rank] for rank in ranks if self.engine_ids[rank] in self._client.ids]
        if targets:
            self._client.send_signal(signal.SIGKILL, targets=targets, block=False)
            _until(lambda: not set(targets) & set(self._client.ids), timeout)

    def drop(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks: those above move down."""
        self.engine_ids = [engine for rank, engine in enumerate(self.engine_ids) if rank not in set(ranks)]

    def replace(self, ranks: Sequence[int]) -> None:
        """Have a new engine at each of these ranks: only possible where we start engines."""
        raise ClusterError(
            f"the engines of {formatting.plural(len(ranks), 'rank')} are gone ({', '.join(map(str, ranks))}), and this "
            "cluster was attached to engines that somebody else started, so it can't start others. Train with "
            "on_failure='shrink', or start engines where those came from, and attach again"
        )

    def locked_view(self, lock: threading.RLock) -> ipp.DirectView:
        """A view for ``%%px`` that fans out under the cluster's lock."""
        view = _LockedView(self._client, self._client._mux_stream, targets=self.engine_ids)  # noqa: SLF001 - as Client.direct_view
        view.lock = lock
        view.block = True  # %%px ends when the engines have run it: what they print stands under it, errors are raised
        return view

    def close(self) -> None:
        """Nothing was started here."""


class _Listener:
    """Hands on what an engine publishes while a call runs: the client collects, a thread looks."""

    def __init__(self, metadata: Any, listen: Callable[[int, list[Any]], None], reply: Future[Reply]) -> None:
        self._metadata = metadata
        self._listen, self._over = listen, threading.Event()
        self._seen = 0
        reply.add_done_callback(lambda _: self._over.set())

    def start(self) -> None:
        threading.Thread(target=self._run, name="dtkit-listen", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            outputs = self._metadata["outputs"]
            while self._seen < len(outputs):
                data = outputs[self._seen]["data"].get(MIMETYPE)
                outputs[self._seen] = None  # handed on; the client would keep it
                self._seen += 1
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
class Start:
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
    def of(cls, said: dict[str, Any]) -> Start:
        """From what `dataclasses.asdict` gave, and JSON."""
        plan = DevicePlan(**{**said["plan"], "devices": tuple(said["plan"]["devices"])})
        return cls(**{**said, "plan": plan})


class StartedEngines(Engines):
    """A transport over engines that we start, and end."""

    on_refill: Callable[[], None]
    """Called in a thread when there are other spares."""

    def __init__(self, n: int, how: Start) -> None:
        self._how = how
        self.on_refill = _nothing
        self._sets: list[str] = []
        self._controller_seen: tuple[int, float] | None = None
        self._spares: list[int] = []
        # locks: while engines start, which has a timeout
        self._starting = threading.Lock()  # who holds it knows that an engine that comes is its own
        # locks: while engines start, which has a timeout
        self._refilling = threading.Lock()  # who holds it knows how many spares are missing
        self._closing = False
        self._warden: subprocess.Popen[bytes] | None = None
        self.folder = _new_folder()
        lease = how.lease
        self._lease = (LEASE_S if lease is None else lease, JOB_LEASE_S if lease is None else lease)
        # locks: while engines start, which has a timeout
        self._owning, self._owns = threading.Lock(), False
        self._take_lock(timeout=5.0)
        reaper.write_members(self.folder, [], *self._lease)
        self._warden = reaper.start(self.folder)
        self._watcher = cluster_file.identity(self._warden.pid)
        self.keeper = shared_memory.Owner.of(self._warden.pid)
        try:
            client = self._start_controller()
            super().__init__(client, [])
            ids = self._start_engines(n + how.spares)
        except BaseException:
            self.close()
            raise
        self.engine_ids, self._spares = ids[:n], ids[n:]
        if self._spares:
            self._client.direct_view(self._spares).apply_async(_load_torch)

    def _start_controller(self) -> ipp.Client:
        launcher = self._how.launcher
        self._cluster = cluster = ipp.Cluster(
            controller_ip="127.0.0.1" if launcher == "local" else "",  # "": the launcher's own choice
            engine_launcher_class=launcher,
            profile_dir=str(self.folder),
            cluster_id="dtkit",
            shutdown_atexit=False,
            log_level=50,
            controller_args=[
                f"--HeartMonitor.period={_BEAT_MS}",  # engines are registered on a beat
                f"--HeartMonitor.max_heartmonitor_misses={round(SILENT_S * 1000 / _BEAT_MS)}",
                "--IPController.enable_curve=True",
                f"--DictDB.record_limit={_HUB_RECORDS}",
            ],
        )
        # waits: ipyparallel starts a process and returns
        cluster.start_controller_sync()
        self._controller_seen = self._controller  # while it surely lives
        self._watch()
        return self._connect()

    def _connect(self) -> ipp.Client:
        timeout = self._how.timeout
        controller = self._controller
        ended = controller is not None and not cluster_file.lives(*controller)
        if ended or self._cluster.controller is None:  # so ipyparallel says it
            raise ClusterError(
                f"the controller of {self.folder.name}, through which every message goes, has ended, so that nobody "
                "can reach its engines. They end by themselves soon after its notebook, or as that closes it. Start "
                "another cluster with dtkit.Cluster(), and train with resume= from the last checkpoint"
            )
        try:
            return self._cluster.connect_client_sync(timeout=timeout)
        except TimeoutError:
            raise ClusterError(
                f"the controller did not answer within {timeout:g} s; give it longer with timeout="
            ) from None

    @classmethod
    def again(cls, found: Papers) -> StartedEngines:
        """Those that another notebook started, with their ids by rank."""
        self = cls.__new__(cls)
        self._how = Start.of(found.start)
        self.on_refill = _nothing
        self._controller_seen = None
        self._sets, self._spares = [], list(found.spare_ids)
        # locks: while engines start, which has a timeout
        self._starting, self._refilling, self._closing = threading.Lock(), threading.Lock(), False
        self.folder, self._warden = found.folder, None
        self._watcher = found.warden
        lease = self._how.lease
        self._lease = (LEASE_S if lease is None else lease, JOB_LEASE_S if lease is None else lease)
        # locks: while engines start, which has a timeout
        self._owning, self._owns = threading.Lock(), False
        self.keeper = shared_memory.Owner.of(found.warden[0])
        self._cluster = ipp.Cluster.from_file(profile_dir=str(self.folder), cluster_id="dtkit")
        self._sets = list(self._cluster.engines)
        client = self._connect()
        Engines.__init__(self, client, list(found.engine_ids))
        threading.Thread(target=self._own, name="dtkit-lock", daemon=True).start()
        return self

    def _own(self) -> None:
        """Hold the lock by which the warden knows that somebody is there; an older notebook may still have it."""
        pause = threading.Event()
        while not self._closing:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                self._take_lock(timeout=0.0)
                return
            pause.wait(0.5)

    def _take_lock(self, timeout: float) -> None:
        with self._owning:  # else one that is taken while somebody closes is never released
            if not self._closing:
                reaper.take_lock(self.folder, timeout)
                self._owns = True

    def _release_lock(self) -> None:
        with self._owning:
            if self._owns:
                self._owns = False
                reaper.release_lock(self.folder)

    def check_reachable(self) -> None:
        """The controller is a process of ours: messages go through it."""
        controller = self._controller
        if controller is not None and not cluster_file.lives(*controller):
            raise ClusterError(
                "the controller, through which every message goes, has ended. This cluster can't be used any more: "
                "cluster.close() ends its engines. Start another one, and train with resume= from the last checkpoint"
            )

    def watcher(self) -> tuple[int, float]:
        """Pid and start time of the warden."""
        return self._watcher

    @property
    def spare_ids(self) -> list[int]:
        """Ipyparallel's ids of the engines that wait."""
        return list(self._spares)

    @property
    def how(self) -> Start:
        """How they were started."""
        return self._how

    def let_alone(self) -> None:
        """Somebody else has these engines now: speak to them no more."""
        self._closing = True
        self._client.close()
        self._release_lock()

    # -- engines ----------------------------------------------------------------------------------------------

    @property
    def _controller(self) -> tuple[int, float] | None:
        if self._controller_seen is None and hasattr(self._cluster.controller, "process"):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._controller_seen = cluster_file.identity(self._cluster.controller.process.pid)
        return self._controller_seen

    def _start_engines(self, n: int) -> list[int]:
        """Start so many, and wait for them. Returns their ids."""
        with self._starting:
            known = set(self._client.ids)
            how = self._how
            if how.launcher == "local":
                # One set per engine: each has its own environment, and can be ended by itself.
                environment = how.plan.environment(0, how.memory_limit)
                # waits: ipyparallel waits at most 60 s for the connection file
                self._sets += [self._cluster.start_engines_sync(1, environment=environment) for _ in range(n)]
            else:
                # waits: ipyparallel waits at most 60 s for the connection file
                self._sets.append(self._cluster.start_engines_sync(n))
            self._watch()
            if not _until(lambda: len(set(self._client.ids) - known) >= n or self._closing, how.timeout):
                self._tell_missing(len(set(self._client.ids) - known), n)
            self._watch()  # the nannies, too
            _seal(self.folder)
            return sorted(set(self._client.ids) - known)[:n]

    def _tell_missing(self, came: int, n: int) -> None:
        logs = "\n".join(p.read_text()[-500:] for p in sorted((self.folder / "log").glob("ipengine*"))[:1])
        raise ClusterError(
            f"{came} of {n} engines came within {self._how.timeout:g} s; give them longer with timeout=, or fewer "
            f"engines. The first engine's log ends:\n{logs}"
        )

    def replace(self, ranks: Sequence[int]) -> None:
        """Have a new engine at each of these ranks, whose own are ended if they still live. Spares come first."""
        self.kill(ranks)
        missing = [rank for rank in ranks if not self._take_spare(rank)]
        if missing:
            with self._refilling:  # what is being started already is there sooner than what would be from now on
                missing = [rank for rank in missing if not self._take_spare(rank)]
        if missing:
            for rank, engine in zip(missing, self._start_engines(len(missing)), strict=True):
                self.engine_ids[rank] = engine
        if len(self._spares) < self._how.spares:
            threading.Thread(target=self._refill, name="dtkit-spares", daemon=True).start()

    def _take_spare(self, rank: int) -> bool:
        while self._spares:
            engine = self._spares.pop(0)
            if engine in self._client.ids:
                self.engine_ids[rank] = engine
                return True
        return False

    def _refill(self) -> None:
        """Start what is missing of the spares; whoever needs one meanwhile waits for it."""
        with self._refilling, contextlib.suppress(ClusterError):  # then there is none, and a replacement takes longer
            found = self._start_engines(max(0, self._how.spares - len(self._spares)))
            if not found:  # another thread was quicker, or the cluster is closing
                return
            view = self._client.direct_view(found)
            view.apply_async(_load_torch)
            self._spares += found
            self._forget_ended()
            self.on_refill()
        resources.give_back()  # of an arena of malloc's that this thread may have had to itself

    def _forget_ended(self) -> None:
        """Let go of what started engines that have ended: ipyparallel keeps it, with an event loop each."""
        for name in list(self._sets):
            launchers = getattr(self._cluster.engines.get(name), "launchers", {})
            if launchers and not any(engine.process.is_running() for engine in launchers.values()):
                self._sets.remove(name)
                self._cluster.engines.pop(name)
        self._cluster.update_cluster_file()  # which a notebook that takes over reads

    def _watch(self) -> None:
        """Tell the warden all processes that run by now."""
        roots = [self._cluster.controller.process.pid] if hasattr(self._cluster.controller, "process") else []
        for name in self._sets:
            launchers = getattr(self._cluster.engines.get(name), "launchers", {})
            roots += [engine.process.pid for engine in launchers.values()]
        pids = list(roots)
        for pid in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        reaper.write_members(self.folder, pids, *self._lease)

    def close(self) -> None:
        """Ask the warden to end everything; it knows every process."""
        self._closing = True
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()
        remote = getattr(self, "_cluster", None)
        if remote is not None and remote.engine_launcher_class is not ipp.cluster.launcher.LocalEngineSetLauncher:
            try:
                # waits: ipyparallel waits at most 10 s for each process to end
                remote.stop_cluster_sync()
            finally:
                self._end_warden()
        self._end_warden()

    def _end_warden(self) -> None:
        if self._warden is not None:
            self._warden.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._warden.wait(timeout=10)
            self._warden = None
        elif cluster_file.lives(*self._watcher):
            psutil.Process(self._watcher[0]).terminate()
            _until(lambda: not cluster_file.lives(*self._watcher), 10)
        self._release_lock()


def _nothing() -> None:
    """Until somebody wants to know that there are other spares."""


def _load_torch() -> None:
    """What takes longest when an engine joins, and when it takes its first step."""
    from dtkit.engine.warmup import preload

    preload()


def _until(condition: Callable[[], bool], timeout: float) -> bool:
    """Look every 20 ms; whether it came true in time."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def _lost(rank: int, why: str = f"its process has ended, or was silent for {SILENT_S:.0f} s") -> Reply:
    message = f"the engine of rank {rank} is gone: {why}. cluster.repair() starts another one in its place"
    return Reply(failure=Failure(rank, "?", "EngineLost", message, "", kind="lost"))


def runtime_folder() -> Path:
    """Where Jupyter keeps what lives as long as a session."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())


def _new_folder() -> Path:
    """A folder that only this user can enter."""
    folder = runtime_folder() / f"dtkit-{secrets.token_hex(4)}"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def _seal(folder: Path) -> None:
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
