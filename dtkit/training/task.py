"""A user's own function on every rank: for one's own loops, and for whole scripts.

What ranks log and print comes live, numbered, as messages that may be lost; the call's return carries all of it and
fills the gaps. Each rank answers for itself, so the first failure is seen at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import notify_views, return_error, run_guarded_in_thread
from dtkit.dashboard.text import call_text
from dtkit.errors import DtkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import pandas as pd
    from matplotlib.figure import Figure

    from dtkit.cluster.cluster import Cluster
    from dtkit.rpc.payload import Payload
    from dtkit.types import Reply

# A user's loop may train for days. What can't wait is seen otherwise: a failed rank at once, a lost engine by its
# nanny.
_UNLIMITED_S = 1e7
_INTERRUPT_TIMEOUT_S = 30.0
_POLL_S = 0.5


class Task:
    """A function running on all ranks. ``result()`` waits; shown in a cell it is live.

    ``rows`` has what `dtkit.log` reported (dicts with rank and index), ``output`` what was printed (rank, line).
    """

    def __init__(self, cluster: Cluster, name: str, *, own_group: bool) -> None:
        self.name, self.world_size = name, cluster.world_size
        self.rows: list[dict[str, Any]] = []
        self.output: list[tuple[int, str]] = []
        self.state = "running"
        """"running", "done" or "failed"."""
        self._cluster, self._own_group = cluster, own_group
        self._num_received = [0] * cluster.world_size  # items taken from each rank
        self._num_rows = [0] * cluster.world_size
        self._futures: Sequence[Future[Reply]] = ()
        # locks: while lines are appended
        self._lock = threading.Lock()
        self._done_event = threading.Event()
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    # -- while it runs ----------------------------------------------------------------------------------------

    def receive(self, rank: int, first: int, items: Sequence[tuple[str, Any]]) -> None:
        """Take a rank's items, numbered from `first`; what is behind a gap waits for the call's return."""
        with self._lock:
            known = self._num_received[rank]
            if first > known:
                return
            for kind, what in items[known - first :]:
                if kind == "row":
                    # Numbers that JSON lacks come live as text: "nan", "inf".
                    values = {name: float(value) for name, value in what.items()}
                    self.rows.append({"rank": rank, "index": self._num_rows[rank], **values})
                    self._num_rows[rank] += 1
                else:
                    self.output.append((rank, what))
                self._num_received[rank] += 1
        self._notify()

    def start_collecting(self, futures: Sequence[Future[Reply]], payload: Payload) -> None:
        """Have a thread of the task's own wait for all ranks, whether anybody asks for the result or not."""
        self._futures = futures
        threading.Thread(target=self._run_collector, args=(payload,), name=f"dtkit-{self.name}", daemon=True).start()

    def _run_collector(self, payload: Payload) -> None:
        """Settle; whatever goes wrong, `result` raises it."""
        self._error = run_guarded_in_thread(lambda: self._collect_replies(payload), return_error)
        self.state = "done" if self._error is None else "failed"
        self._done_event.set()
        self._notify()

    def _collect_replies(self, payload: Payload) -> None:
        """Wait for all ranks, and take what they say."""
        try:
            replies = self._cluster.gather_replies(self._futures, _UNLIMITED_S)
        finally:
            self._cluster.discard_payload(payload)
        self._process_replies(replies)

    def _process_replies(self, replies: Sequence[Reply]) -> None:
        results: list[Payload] = []
        for rank, reply in enumerate(replies):
            if isinstance(reply.value, tuple):  # (result or None, everything that was said)
                self.receive(rank, 0, reply.value[1])
                results += [reply.value[0]] if reply.value[0] is not None else []
        try:
            try:
                self._cluster.unwrap(replies)
            finally:
                if self._own_group:
                    self._restore_group(already_reformed=any(reply.failure for reply in replies))
            self._results = [result.load() for result in results]
        finally:
            for result in results:  # those of ranks that succeeded where another failed, too
                result.discard()

    def _restore_group(self, *, already_reformed: bool) -> None:
        """The script's group has ended; form ours again."""
        if not already_reformed:
            self._cluster.form_process_group()

    # -- for the user -----------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether all ranks have answered."""
        return self._done_event.is_set()

    def result(self, timeout: float | None = None) -> list[Any]:
        """What the function returned, by rank; raises what failed it. TimeoutError leaves it running."""
        if not self._wait(timeout):
            raise TimeoutError(f"{self.name} still runs after {timeout} s; wait again, or end it with cancel()")
        if self._error is not None:
            raise self._error
        return list(self._results)

    def display_and_wait(self) -> list[Any]:
        """As `result`, with a live view. An interrupt reaches the engines and is raised again."""
        with call_text.display_until_done(self):
            try:
                self._wait()
            except KeyboardInterrupt:
                with contextlib.suppress(DtkitError):  # a cluster that was closed meanwhile has nothing to interrupt
                    self.cancel()
                self._wait(_INTERRUPT_TIMEOUT_S)  # the group is formed anew; a second interrupt doesn't wait for it
                raise
        return self.result(0)

    def _wait(self, timeout: float | None = None) -> bool:
        """Wait until the call is over; whether it is. A signal that another thread got is seen between two waits."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done_event.is_set():
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._done_event.wait(min(left, _POLL_S))
        return True

    def cancel(self) -> None:
        """Interrupt the engines that still run the function: it ends there with KeyboardInterrupt."""
        running = [rank for rank, future in enumerate(self._futures) if not future.done()]
        if running:
            self._cluster.interrupt(running)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame of what was logged: rank, index and a column per name. Needs pandas."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def figure(self) -> Figure:
        """What was logged, as a matplotlib Figure: an axes per name, a line per rank."""
        return call_text.draw_figure(self)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after every change, from any thread; returns what ends that."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return unsubscribe

    def _notify(self) -> None:
        notify_views(list(self._callbacks), self.name)

    def __repr__(self) -> str:
        return call_text.format_text(self)

    def _ipython_display_(self) -> None:
        call_text.show(self)


def submit(
    cluster: Cluster, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, own_group: bool
) -> Task:
    """See :meth:`dtkit.Cluster.submit`."""
    cluster.check_open()
    if not callable(fn):
        raise TypeError(
            f"fn is a {type(fn).__name__}, which can't be called; give a function, as in cluster.run(main, x)"
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    task = Task(cluster, name, own_group=own_group)
    shipment = cluster.upload(cluster.pack((fn, args, kwargs), name=name))
    try:
        group: dict[str, Any] = {}
        if own_group:
            group = {"port": _open_rendezvous_store(cluster), "attempt": cluster.next_restart_count()}
        futures = cluster.fan_out("call_function", listen=task.receive, shipment=shipment, **group)
    except BaseException:  # an interrupt too: nobody will open the upload
        cluster.discard_payload(shipment)
        raise
    task.start_collecting(futures, shipment)
    return task


def _open_rendezvous_store(cluster: Cluster) -> int:
    """The port of a store for a script's own group. Rank 0 may have a long call to end first."""
    return int(
        cluster.unwrap(cluster.gather_replies(cluster.fan_out("open_torchrun_store", ranks=[0]), _UNLIMITED_S))[0]
    )
