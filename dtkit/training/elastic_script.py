"""A script whose ranks survive the loss of engines, under Horovod's `elastic.run`.

The script's processes read their ranks from a :class:`~dtkit.rpc.script_ranks.ScriptFolder`, which this module changes
when an engine is lost. Either another engine, waiting or new, takes the lost one's place, or the script continues with
fewer ranks. The other engines are busy with the script, so a new engine joins the cluster's process group only after
it. Engines that are still missing are replaced then, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting, timeouts
from dtkit.engine.script_process import KILLED
from dtkit.errors import ClusterClosedError, ClusterError, DtkitError, EngineError, format_ranks
from dtkit.rpc.replacement import replace_lost_ranks
from dtkit.rpc.script_ranks import ScriptFolder, ScriptRanks
from dtkit.training.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from dtkit.messages import Reply
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.protocol import Call


@dataclasses.dataclass(frozen=True)
class ElasticPolicy:
    """How a script continues after the loss of an engine."""

    min_np: int
    """Fewest ranks with which the script may continue."""
    max_np: int
    """Most ranks to start with. Further engines wait to replace a lost one."""
    shrinks: bool
    """Whether it continues with fewer ranks without waiting for another engine."""


def make_policy(
    world_size: int, *, horovod: Any, min_np: int | None, max_np: int | None, on_failure: str | None
) -> ElasticPolicy | None:
    """Check the arguments of :meth:`dtkit.Cluster.torchrun`, and return the policy; None without Horovod."""
    if not isinstance(horovod, bool):
        raise TypeError(f"horovod={horovod!r}; it must be True or False")
    options = {"min_np": min_np, "max_np": max_np, "on_failure": on_failure}
    names = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if names and not horovod:
        raise ValueError(
            f"{', '.join(names)}: only scripts under hvd.elastic.run go on without a lost engine; add horovod=True, or "
            "leave it out"
        )
    if not horovod:
        return None
    for name, value in (("min_np", min_np), ("max_np", max_np)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}; it must be a number of ranks from 1 up")
    if on_failure not in (None, "repair", "shrink"):
        raise ValueError(
            f"on_failure={on_failure!r}; for scripts it must be 'repair', which replaces a lost engine, or 'shrink', "
            "which goes on with fewer ranks"
        )
    if min_np is not None and max_np is not None and min_np > max_np:
        raise ValueError(f"min_np={min_np} is more than max_np={max_np}; it must not be")
    if min_np is not None and min_np > world_size:
        raise ValueError(
            f"min_np={min_np}, and the cluster has {formatting.format_count(world_size, 'engine')}; start a larger "
            "cluster, or ask for fewer"
        )
    num_ranks = world_size if max_np is None else min(max_np, world_size)
    shrinks = on_failure == "shrink" or (on_failure is None and min_np is not None)
    return ElasticPolicy(1 if min_np is None else min_np, num_ranks, shrinks)


SCRIPT_NOTE = "starting a fresh Python process for each rank, which imports its modules anew"
"""What happens before the first output of a script."""


class ElasticTask(Task):
    """A script on engines of one host. Output is listed under the ranks of the engines."""

    note = SCRIPT_NOTE

    def __init__(
        self, engine_group: EngineGroup, name: str, repair: Callable[[], object] | None, policy: ElasticPolicy
    ) -> None:
        super().__init__(engine_group, name, repair)
        self._policy = policy
        path = engine_group.folder / engine_group.make_key("script")
        self.folder = ScriptFolder.create(path, range(policy.max_np))
        self._idle = list(range(policy.max_np, engine_group.world_size))
        """Slots that may replace a lost one."""
        self._lost: set[int] = set()
        """Slots whose engines are gone, or whose processes were killed too often."""
        self._new: set[int] = set()
        """Slots of new engines, which are in no common process group yet."""
        self._by_slot: dict[int, Future[Reply[Any]]] = {}
        self._make_slot_call: Callable[[int], Call[Any]]
        self._answered = threading.Event()

    def start(self, payload: Payload, make_slot_call: Callable[[int], Call[Any]]) -> None:
        """Start the script on all slots. `make_slot_call` returns the call for one slot."""
        self._make_slot_call = make_slot_call
        self._send(self.folder.read().slots)
        self.start_collecting(list(self._by_slot.values()), payload)

    def _send(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._num_received[slot] = 0
        calls = [self._make_slot_call(slot) for slot in slots]
        futures = self.engine_group.fan_out(calls, ranks=slots, listen=self.receive)
        for slot, future in zip(slots, futures, strict=True):
            self._by_slot[slot] = future
            future.add_done_callback(lambda _: self._answered.set())

    # -- until the script has ended ---------------------------------------------------------------------------

    def _collect_replies(self, payload: Payload) -> None:
        group = self.engine_group
        try:
            slots = self._wait_until_ended()
            futures = [self._by_slot[slot] for slot in slots]
            replies = group.gather_replies(futures, timeouts.TASK_TIMEOUT_S, slots)
        finally:
            group.uploads.discard(payload)
            self.folder.remove()
            if not group.is_closed:
                self._make_whole()
        self._process_slot_replies(dict(zip(slots, replies, strict=True)))

    def _wait_until_ended(self) -> Sequence[int]:
        """Wait until all ranks have ended, or one has failed finally. Return the slots of the ranks."""
        while True:
            self._answered.clear()
            slots = self.folder.read().slots
            # waits: already done here
            replies = {slot: f.result() for slot in slots if (f := self._by_slot[slot]).done()}
            lost = [slot for slot, reply in replies.items() if self._is_lost(reply)]
            has_failed = any(reply.failure is not None for slot, reply in replies.items() if slot not in lost)
            if len(replies) == len(slots) and not lost:
                return slots
            if has_failed or (lost and not self._can_go_on(lost)):
                return slots
            if lost:
                self._go_on_without(lost)
                continue
            if self.engine_group.is_closed:
                raise ClusterClosedError("this cluster was closed while it ran a script; start another one")
            if not self._answered.wait(timeouts.REPLY_POLL_S):
                self.engine_group.transport.check_reachable()

    def _is_lost(self, reply: Reply[Any]) -> bool:
        failure = reply.failure
        return failure is not None and (failure.kind == "lost" or (failure.type == KILLED and self._policy.shrinks))

    def _can_go_on(self, lost: Sequence[int]) -> bool:
        """Return whether the script can continue: other ranks hold the state, and wait for the notebook's decision."""
        ranks = self.folder.read()
        has_survivors = len(ranks.slots) > len(lost) and not self.folder.find_ended(ranks)
        return has_survivors and not self._was_cancelled and self.folder.elastic_file.exists()

    def _go_on_without(self, lost: Sequence[int]) -> None:
        """Let other engines take the lost ones' places, or let the script go on with fewer ranks."""
        self._lost |= set(lost)
        substitutes = dict(zip(lost, self._idle, strict=False))
        self._idle = self._idle[len(substitutes) :]
        missing = [slot for slot in lost if slot not in substitutes]
        num_left = len(self.folder.read().slots) - len(missing)
        failure: DtkitError | None = None
        if missing and (not self._policy.shrinks or num_left < self._policy.min_np):
            self._add_line(missing[0], f"the engine of {format_ranks(missing)} was lost; another one is started")
            failure = self._replace(missing)
            missing = [] if failure is None else missing
        if failure is not None and num_left < self._policy.min_np:
            raise failure
        if missing or substitutes:
            self._change_ranks(substitutes, missing)
        self._send([*substitutes.values(), *(slot for slot in lost if slot in self._new)])

    def _replace(self, slots: Sequence[int]) -> DtkitError | None:
        """Start new engines in these slots; return the error that prevents it, if any."""
        try:
            self.engine_group.membership.start_single_engines(slots, self.folder.path)
        except (ClusterError, EngineError) as error:
            return error
        self._new |= set(slots)
        self._lost -= set(slots)
        return None

    def _change_ranks(self, substitutes: Mapping[int, int], dropped: Sequence[int]) -> None:
        """Publish the script's new ranks to its processes."""
        old = self.folder.read()
        slots = tuple(substitutes.get(slot, slot) for slot in old.slots if slot not in dropped)
        count = formatting.format_count(len(slots), "rank")
        reason = f"the engine of {format_ranks([*substitutes, *dropped])} was lost"
        self._add_line(
            slots[0], f"{reason}; the script goes on with {count}, on the engines {', '.join(map(str, slots))}"
        )
        self.folder.write(ScriptRanks(old.version + 1, slots))

    def _add_line(self, slot: int, line: str) -> None:
        with self._lock:
            self.output.append((slot, line))
        self._notify()

    # -- afterwards -------------------------------------------------------------------------------------------

    def _make_whole(self) -> None:
        """Bring new engines into the cluster's process group, with the others' data, and replace those still lost."""
        group = self.engine_group
        if not self._new and not self._lost:
            return
        # The repair then finds these ranks missing, and uses these engines.
        group.transport.set_aside(sorted(self._new))
        if lost := group.membership.find_lost_ranks():
            try:
                if self._repair is not None:
                    self._repair()
            except DtkitError:  # an attached cluster can't start engines
                with contextlib.suppress(DtkitError):  # the next call raises the same error
                    replace_lost_ranks(group, lost, shrink=True)
        else:
            group.membership.form_process_group()

    def _process_slot_replies(self, replies: Mapping[int, Reply[Any]]) -> None:
        """Collect the results of the script's ranks, in their order."""
        for slot, reply in replies.items():
            if isinstance(reply.value, tuple):
                self.receive(slot, 0, reply.value[1])
        self._load_results(list(replies.values()))

    def _list_running_ranks(self) -> list[int]:
        return [slot for slot, future in self._by_slot.items() if not future.done()]
