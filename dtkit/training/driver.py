"""The thread that drives a run: it sends dispatches, takes in what lands, and does what it is asked to.

It is an actor. Everything that happens to a run comes through one inbox, commands and landed replies alike, so its
state has one writer and no two things happen at once. Two dispatches are in flight, so that engines never wait for
the notebook (one when steps are slow, see :mod:`dtkit.training.dispatch`).

Every dispatch says at which step the job must stand. Whatever makes that untrue (a dispatch that ended early since
steps became slow, a group that was formed anew, NaN) lets the engines refuse what was sent behind it. The driver then
sends nothing until all has landed, and goes on from the step that the engines stand at.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util.formatting import plural
from dtkit._util.guard import attempt
from dtkit.checkpoint.manager import Save, Saver
from dtkit.errors import (
    ClusterError,
    DtkitError,
    EngineError,
    NonFiniteError,
    RunError,
    Superseded,
    telling,
    which_ranks,
)
from dtkit.health.detector import Lookout
from dtkit.health.stacks import Probe
from dtkit.rpc.engine_group import GRACE_S
from dtkit.training import recovery
from dtkit.training.callback_runner import Turn
from dtkit.training.dispatch import Pace
from dtkit.training.evaluation import Evaluations
from dtkit.training.learning_rate import LearningRate, Rate
from dtkit.training.load_balancing import Balancer
from dtkit.training.nonfinite import nonfinite
from dtkit.training.pending_call import Flight, resolve
from dtkit.training.recorder import Recorder
from dtkit.training.replica_check import Watch
from dtkit.training.snapshots import Rhythm, Snapshots
from dtkit.types import Advance, Consistency, Failure, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.cluster.cluster import Cluster
    from dtkit.health.stall_report import Finding
    from dtkit.history.engine_outbox import Found, Left
    from dtkit.history.history import History
    from dtkit.training.recovery import Recovered
    from dtkit.types import Reply

_PATIENCE_S = 10.0  # for the other ranks, once one has answered
_BREAK_S = 1.0  # for the same, once they were interrupted
_GRACE_S = 0.5  # and two steps: what a pause takes where nothing is stuck
_MOST_GRACE_S = 1.0  # so that with what a break takes it is less than the three seconds that it may last
_LOOK_S = 0.5
_TRIES = 3  # refusals in a row, without a step between them, before the run gives up
_FALLS = 3  # engines are lost so often at one step before it does: whatever ends them there, ends others too


@dataclasses.dataclass(frozen=True)
class Route:
    """What to send for one run."""

    job: str
    steps: int
    """Where it is to end."""
    steps_per_epoch: int
    evaluation: dict[str, Any] | None = None
    """Arguments of the op "evaluate", for the end of every epoch; None where there is nothing to evaluate on."""
    callbacks: Callable[[], None] | None = None
    """What to call at the end of every epoch, on a thread of its own, before the next one begins."""
    balance: tuple[int, ...] | None = None
    """Rows of each shard, where shares of the batch are to follow the ranks' speeds."""
    recover: Callable[[Sequence[int]], Recovered] | None = None
    """Brings all ranks to one step again, those that are given replaced or left out."""
    on_failure: str = "repair"
    """What to do without being asked when an engine is lost: see :data:`dtkit.training.recovery.MODES`."""


@dataclasses.dataclass(frozen=True)
class _Order:
    """Steps that were sent for."""

    steps: int
    rate: Rate | None
    explain: bool


@dataclasses.dataclass(frozen=True)
class _Command:
    name: str
    value: Any
    answer: Future[int]


class Driver:
    """One run's thread, and the run's state. `changed` is called after every change, without a lock."""

    def __init__(self, cluster: Cluster, route: Route, history: History, changed: Callable[[], None]) -> None:
        self.state, self.step = State.PENDING, 0
        self.lr: float | None = None
        self.exception: BaseException | None = None
        self.route = route
        self.pace = Pace()
        self.watch = Watch()
        self.saver = Saver(history, changed)
        self.snapshots = Snapshots()
        self.evaluations = Evaluations()
        self.reports: list[Any] = []
        """Of the last step that was explained, what each rank saw."""
        self.spans: tuple[list[np.ndarray], list[float] | None] = [], None
        """What each rank did when, in the last steps, and how far each one's clock was ahead."""
        self._balancer = Balancer(route.balance) if route.balance is not None else None
        self._explain = False
        self._cluster, self._history, self._changed = cluster, history, changed
        self._recorder = Recorder(cluster, history)
        self._turn = Turn(route.callbacks)
        self._lookout = Lookout(Probe(cluster.folder, lambda: cluster.nodes))
        self._inbox: queue.SimpleQueue[_Command | Flight] = queue.SimpleQueue()
        # locks: for a few assignments; waits on the Condition are marked
        self._gate = threading.Condition()  # guards `state`, and whether the inbox is still read
        self._flights: collections.deque[Flight] = collections.deque()
        self._next = 0  # the step that the next dispatch starts at
        self._goal = 0
        self._halt: str | None = None  # "pause" or "stop", once nothing is in flight
        self._lost_track = False  # what is in flight will be refused; send nothing before it has landed
        self._tries = 0
        self._fell, self._falls = -1, 0  # the step at which engines were lost last, and how often in a row
        self._lost: list[int] = []  # ranks whose engines are gone, and that were not replaced yet
        self._pause_asked = 0.0  # when somebody began to wait for the end of what is under way
        self._break_at = math.inf  # when what is under way then still is to be interrupted
        self._breaking = False  # what is under way was interrupted
        self._broke_off = False  # and the log says so
        self._waiting: list[Future[int]] = []
        self._rate = LearningRate()
        self._ran = 0.0
        self._since: float | None = None
        self._thread: threading.Thread | None = None

    # -- from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin (or, after the end, begin again) to take commands; the run stands paused."""
        self._next = self._goal = self.step
        self._halt, self._lost_track, self._tries = None, False, 0
        self._turn.forget()
        self._enter(State.PAUSED)
        self._thread = threading.Thread(target=self._run, name=f"dtkit-{self.route.job}", daemon=True)
        self._thread.start()

    def over(self, timeout: float) -> bool:
        """Whether within so many seconds the run has ended, and all views have been told."""
        if self._thread is not None and not self._mine:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return self.state.ended

    def stand_at(self, step: int, called: int, evaluated: int, ran_s: float = 0.0) -> None:
        """Before `start`: the job goes on after so many steps, and seconds; callbacks were called after `called`, and
        held-out data evaluated after `evaluated` of them.
        """
        self._recorder.beyond(step)
        self.step, self._turn.called, self._ran = step, called, ran_s
        self.evaluations.begin_at(step, evaluated)
        self.saver.begin_at(step)
        self.snapshots.begin_at(step)
        if self.route.balance is not None:  # of as many ranks as there are now
            self._balancer = Balancer(self.route.balance)

    def catch_up(self, left: Mapping[int, Left], evaluated: Mapping[int, Mapping[int, Found]], common: int) -> None:
        """Before `start`: record what dispatches and evaluations left unread, by rank; all that are there have taken
        `common` steps. An evaluation that is missing there is made as the run goes on.
        """
        route, seen = self.route, self._recorder.end
        self._recorder.unread(left, common)
        every = route.steps_per_epoch
        due = range(max(1, -(-seen // every)) * every, common, every) if route.evaluation is not None else ()
        if missing := self._recorder.evaluated(evaluated, due):
            steps = ", ".join(map(str, missing))
            self._recorder.note(common, "note", f"what evaluations found after these steps was lost: {steps}")

    def mended(self, lost: Sequence[int], size: int, found: Recovered) -> None:
        """After the end: of `size` ranks these were lost, and the job that was made anew may stand further back."""
        before = self.step
        self.stand_at(found.step, self.called, self.evaluations.made, self._ran)
        self._lost, self.lr = [], found.lr
        how = "replaced" if self._cluster.world_size == size else "left out"
        self._note("repair", _told(lost, how, before, found))
        self._changed()

    @property
    def pausing(self) -> bool:
        """Whether it was asked to pause or stop, and has not yet."""
        return self.state is State.RUNNING and self._halt is not None

    @property
    def called(self) -> int:
        """The step after which callbacks were called last."""
        return self._turn.called

    def ask(self, name: str, value: Any = None) -> Future[int]:
        """Put a command into the inbox; the answer is the step at which it took effect."""
        answer: Future[int] = Future()
        with self._gate:
            if self.state.ended:
                word = f"this run has {_ENDED[self.state]} at step {self.step}, so it can't {_WORDS[name]}"
                raise RunError(f"{word}. {ANEW if self.state is State.FAILED else _ON}")
            self._inbox.put(_Command(name, value, answer))
        return answer

    def abandon(self, timeout: float) -> bool:
        """The cluster is closing: stop at a step boundary if that is soon (True), else just end. Idempotent."""
        self.snapshots.rhythm = Rhythm()  # nobody will come back to one
        stands = self.state.ended
        with contextlib.suppress(RunError, TimeoutError):
            self.ask("stop").result(timeout)
            stands = True
        with contextlib.suppress(RunError):
            self.ask("abandon")
        return stands

    def wait(self, timeout: float | None) -> bool:
        """Until the run has left RUNNING; whether it did within `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        left = False
        with self._gate:
            while not left:  # a signal that another thread received is seen between two waits
                part = max(0.0, min(_LOOK_S, deadline - time.monotonic()))
                left = self._gate.wait_for(lambda: self.state not in (State.PENDING, State.RUNNING), part)
                if time.monotonic() >= deadline:
                    break
        return left

    @property
    def elapsed_s(self) -> float:
        """Seconds spent RUNNING."""
        since = self._since
        return self._ran + (0.0 if since is None else time.monotonic() - since)

    # -- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        attempt(self._loop, self._fail)

    def _fail(self, error: Exception) -> None:
        self._withdraw_all()  # those who wait for what is under way are answered, too
        self._end(State.FAILED, error)

    @property
    def _mine(self) -> bool:
        """Whether this is the run's thread; a view that is told of the end may have it begin again, with another."""
        return self._thread is threading.current_thread()

    def _loop(self) -> None:
        while self._mine and not self.state.ended:
            self._send()
            event = self._take()
            if isinstance(event, _Command):
                self._obey_or_answer(event)
            elif event in self._flights:
                event.arrived = True
                while self._flights and self._flights[0].arrived:  # what was sent first is taken in first
                    self._land(self._flights[0])
            if self._mine and not self._flights:
                self._rest()

    def _obey_or_answer(self, command: _Command) -> None:
        """The run ends where it can't obey; then too nobody is left waiting."""
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(self._waiting.append, command.answer)
            self._obey(command)
            otherwise.pop_all()

    def _take(self) -> _Command | Flight:
        """The next event. Engines that say nothing for longer than a collective may take are stuck."""
        deadline = time.monotonic() + self._cluster.patience
        while True:
            left = self._break_at - time.monotonic()
            if left <= 0:
                self._break_off()
                continue
            try:
                # waits: an idle run waits for its user; else the limit is `patience`
                return self._inbox.get(timeout=min(_LOOK_S, left) if self._flights else None)
            except queue.Empty:
                self._cluster.check_reachable()
                self._look_out()
                if time.monotonic() >= deadline:
                    return self._flights[0]

    def _look_out(self) -> None:
        """Name the rank that keeps the others waiting, once a dispatch is overdue."""
        found = self._lookout.look(time.monotonic())
        if found is not None:
            kind = "stuck" if found.kind == "stuck" else "note"
            self._note(kind, found.text, found.rank)
        if found is not None or self.finding is not None:  # views show for how long
            self._changed()

    @property
    def finding(self) -> Finding | None:
        """Who keeps the others waiting now; None while all is well."""
        return self._lookout.finding

    def _send(self) -> None:
        while self.state is State.RUNNING and not self._halt and not self._lost_track:
            if self._evaluation_due(self._next):
                self._evaluate(self._next)
            dispatches = sum(flight.op == "advance" for flight in self._flights)
            if dispatches >= self.pace.ahead or self._calls_due(self._next):
                return
            self._save(self._next)
            if self._next >= self._goal:
                return
            self._send_steps(self._room())

    def _room(self) -> int:
        """How many steps to send for: to the next thing that is due, and no more than are sent at once."""
        steps = min(self.pace.steps, self._goal - self._next)
        steps = min(steps, self.saver.room(self._next), self.snapshots.room(self._next))
        if self.route.evaluation or self.route.callbacks:
            steps = min(steps, self.route.steps_per_epoch - self._next % self.route.steps_per_epoch)
        return steps

    def _send_steps(self, steps: int) -> None:
        """So many, with what they are to begin with; none, for that alone."""
        order = _Order(steps, self._rate.take(), self._explain and steps > 0)
        more: dict[str, Any] = {"explain": True, "seen": self.step} if order.explain else {"seen": self.step}
        if self.watch.due(time.monotonic()) or self._next + steps == self.route.steps:
            more["fingerprint"] = True
        if self._balancer is not None:
            more["shares"] = self._balancer.shares
        flight = Flight(
            "advance",
            self._next,
            landed=functools.partial(self._take_steps, order),
            failed=functools.partial(self._steps_failed, order, self._next),
            withdrawn=functools.partial(self._steps_withdrawn, order, self._next),
        )
        begun = time.perf_counter()
        self._launch(flight, steps=steps, lr=order.rate and order.rate.value, **more)
        self.pace.sent(time.perf_counter() - begun)
        self._next += steps

    def _save(self, step: int) -> None:
        """Send a save, if one is due after so many steps; with a snapshot, if that is due, it is written of its copy.

        Who waits for a save is to hear what is wrong with the state: that one goes first, with a copy of its own.
        """
        due = self.saver.due(step, self.route.steps)
        if due and self._rate.wanted:
            self._send_steps(0)  # what was set before it is saved along
        copied = not self.saver.wanted and self._snapshot(step)
        if due and (save := self.saver.next(step)) is not None:
            flight = Flight(
                "save",
                step,
                landed=functools.partial(self.saver.landed, save),
                failed=functools.partial(self._save_failed, save),
                withdrawn=functools.partial(self.saver.refused, save),
            )
            self._launch(flight, copied=copied, **save.args())

    def _snapshot(self, step: int) -> bool:
        """Have the ranks keep a snapshot in memory, if one is due after so many steps. Whether that was asked for."""
        if due := self.snapshots.due(step):
            self._send_snapshot(step)
        return due

    def _send_snapshot(self, step: int) -> None:
        self.snapshots.sent(step)
        flight = Flight("snapshot", step, self._take_snapshot, self._snapshot_failed, self.snapshots.refused)
        self._launch(flight)

    def _keeps(self) -> bool:
        """Before the run comes to rest, have what it stands at kept. Whether that is under way."""
        wanted = not self._lost and self.snapshots.lacking(self.step)
        if wanted:
            self._send_snapshot(self.step)
        return wanted

    def _evaluate(self, step: int) -> None:
        assert self.route.evaluation is not None
        self.evaluations.sent(step)
        failed = functools.partial(self._evaluation_failed, step)
        flight = Flight("evaluate", step, self._take_evaluation, failed, self.evaluations.withdrawn)
        self._launch(flight, **self.route.evaluation)

    def _evaluation_due(self, step: int) -> bool:
        route = self.route
        return route.evaluation is not None and self.evaluations.due(step, route.steps_per_epoch, route.steps)

    def _saves(self) -> bool:
        """With nothing else in flight: send a save that is due. An evaluation and callbacks come before it."""
        ahead = self._halt or self._evaluation_due(self.step) or self._calls_due(self.step)
        if self._lost:  # none can be written, and who waits for one must hear of it
            self.saver.drop(f"lost: {which_ranks(self._lost)}; run.resume() or run.repair() replaces what is lost")
        elif self.saver.wanted or (self.state is State.RUNNING and not ahead):
            self._save(self.step)
            while self.saver.wanted and not self._flights:  # one that can't be begun keeps no other one waiting
                self._save(self.step)
        return bool(self._flights)

    def _launch(self, flight: Flight, **args: Any) -> None:
        self._flights.append(flight)
        flight.futures = self._cluster.fan_out(flight.op, job=self.route.job, step=flight.step, **args)
        self._lookout.sent(time.monotonic())
        left = len(flight.futures)
        # locks: for a few assignments; waits on the Condition are marked
        lock = threading.Lock()

        def landed(future: Future[Reply]) -> None:
            # At once with the first failure: the other ranks may be waiting for the one that failed.
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            # waits: already done here
            if last or future.result().failure is not None:
                self._inbox.put(flight)

        for future in flight.futures:
            future.add_done_callback(landed)

    # -- what lands -------------------------------------------------------------------------------------------

    def _land(self, flight: Flight) -> None:
        replies = self._collect(flight)
        self._flights.remove(flight)
        flight.futures.clear()  # they hold the flight by their callbacks, and what it brought
        self._lookout.landed(time.monotonic(), self.pace.step_s or None)
        failures = [reply.failure for reply in replies if reply.failure is not None]
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(flight.withdrawn)
            if failures:
                self._take_failures(flight, replies, failures)
            else:
                flight.landed(flight.step, [reply.value for reply in replies])
            otherwise.pop_all()
        self._look_out()  # who kept the others waiting goes on: nobody may ask again for long
        self._changed()

    def _collect(self, flight: Flight) -> list[Reply]:
        """Of ranks that were interrupted, one that lets none in (in C code) is given up as soon as steps allow.

        Where they are short, that is three seconds after somebody asked for it.
        """
        if not self._breaking:  # one may have failed or refused where another one is stuck
            return self._cluster.collect(flight.futures, _PATIENCE_S, meanwhile=self._look_out)
        grace = min(GRACE_S, max(_BREAK_S, 2 * self._lookout.median_step_s))
        return self._cluster.collect(flight.futures, _BREAK_S, grace=grace)

    def _take_steps(self, order: _Order, step: int, values: Sequence[Any]) -> None:
        advances: list[Advance] = [advance for advance, _ in values]
        self._recorder.steps(values)
        first = advances[0]
        done, self.step, self.lr = first.step - step, first.step, first.lr
        if done:
            self._tries = 0
            self.pace.landed(done, _step_s(advances))
            self._look(advances)
            spans = [np.asarray(a.spans) for a in advances if a.spans is not None]
            self.spans = spans, self._cluster.clock_offsets
        if order.explain:
            self.reports, self._explain = [advance.report for advance in advances], False
        self._rate.landed(order.rate, step)
        if first.ended == "nonfinite":
            self._take_nonfinite(advances)
        elif first.ended == "exhausted":
            self._take_end()
        elif self.step != step + order.steps:
            self._lost_track = True

    def _look(self, advances: Sequence[Advance]) -> None:
        """What the notebook concludes from all ranks' rows: are parameters equal, are shares of the batch fair."""
        seconds = max(advance.fingerprint_s for advance in advances)
        prints = [advance.fingerprint for advance in advances]
        if self.watch.landed(time.monotonic(), self.step, prints, seconds) and self.watch.found is not None:
            self._tell_of_ranks(self.watch.found)
        if self._balancer is not None and self._balancer.landed([np.asarray(a.rows) for a in advances]):
            shares = ", ".join(f"{share:.0%}" for share in self._balancer.shares)
            self._note("note", f"shares of the batch by node: {shares}")

    def _tell_of_ranks(self, found: Consistency) -> None:
        if found.differing:
            names = ", ".join(map(str, found.differing))
            where = "on all nodes" if found.copies is None else "on all nodes that hold the same ones"
            self._note("error", f"parameters are not equal {where}: {names} differ since step {found.since}")

    def _take_end(self) -> None:
        """A stream without length has ended on all ranks: the run is as long as that, and one epoch."""
        self._lost_track = True
        self._goal = self.step
        self.route = dataclasses.replace(self.route, steps=self.step, steps_per_epoch=max(1, self.step))
        self._note("note", f"the stream ended after {self.step} steps")

    def _take_nonfinite(self, advances: Sequence[Advance]) -> None:
        self._lost_track, self._halt = True, self._halt or "pause"
        self.exception = NonFiniteError(nonfinite(self.step, advances, self._cluster.nodes))
        self._note("error", f"not finite at step {self.step}; all ranks paused before the update")

    def _take_evaluation(self, step: int, values: Sequence[Any]) -> None:
        self.evaluations.done(step)
        self._recorder.evaluation(step, values)

    def _take_snapshot(self, _step: int, values: Sequence[Any]) -> None:
        word = self.snapshots.landed(values)
        if word is not None:
            self._note("note", word)

    def _take_failures(self, flight: Flight, replies: Sequence[Reply], failures: Sequence[Failure]) -> None:
        """A refusal, a lost engine and an interrupt can be gone on from; a failure of the user's code can't."""
        if any(f.type == "Superseded" for f in failures):
            self._withdraw_all()
            flight.withdrawn()
            self._history.part()  # the other notebook writes there
            self._end(State.FAILED, Superseded(_TAKEN.format(step=self.step)))
            return
        if all(f.kind == "refused" for f in failures) and self._lost_track:
            flight.withdrawn()
            return
        self._lost_track = True
        self._tries += 1
        self._recorder.failing()
        self._keep_common(dict(enumerate(replies)))
        gone = {f.rank for f in failures if f.gone}  # they have had their time
        patience = _BREAK_S if any(f.kind == "stuck" for f in failures) else _PATIENCE_S
        for other in self._flights:
            ranks = [rank for rank in range(len(other.futures)) if rank not in gone]
            late = self._cluster.collect([other.futures[r] for r in ranks], patience, ranks)
            self._keep_common(dict(zip(ranks, late, strict=True)))
        self._withdraw_all()
        self._lookout.reset()
        own = [f for f in failures if f.kind == "error" and not f.victim]
        lost = sorted(gone | set(self._cluster.lost()))
        if lost and not own:
            flight.withdrawn()
            self._lose(lost, failures)
        elif not own and (self._breaking or self._tries < _TRIES):
            flight.withdrawn()
            self._level()
        else:
            self._level()
            flight.failed(EngineError(telling(failures)))

    def _withdraw_all(self) -> None:
        """Nothing that is under way is waited for any longer."""
        for flight in reversed(self._flights):  # so that what is wanted again stands in order
            flight.withdrawn()
        self._flights.clear()

    def _steps_withdrawn(self, order: _Order, step: int) -> None:
        self._rate.withdrawn(order.rate, step, self.step)

    def _steps_failed(self, order: _Order, step: int, error: EngineError) -> None:
        self._steps_withdrawn(order, step)  # who waits for it is told as the run ends
        self._end(State.FAILED, error)

    def _save_failed(self, save: Save, error: EngineError) -> None:
        self.saver.failed(save, self.step, error)  # the training itself is whole

    def _snapshot_failed(self, error: EngineError) -> None:  # here too
        self._note("error", f"the snapshot in memory failed: {error}".partition("\n")[0])

    def _evaluation_failed(self, step: int, error: EngineError) -> None:  # and here
        self.evaluations.done(step)
        self._halt, self.exception = self._halt or "pause", error
        self._note("error", f"the evaluation failed: {error}".partition("\n")[0])

    def _lose(self, lost: list[int], failures: Sequence[Failure]) -> None:
        """Engines are gone: go on with others or without, or pause until somebody asks for that."""
        self._lost = lost
        for failure in failures:
            if failure.rank in lost:
                why = failure.message.partition(". ")[0]
                self._note("lost", f"node {failure.rank} lost at step {self.step}: {why}", failure.rank)
        self._falls = self._falls + 1 if self.step == self._fell else 1
        self._fell = self.step
        if self.route.on_failure == "pause":
            self._halt, self.exception = self._halt or "pause", EngineError(failures)
        elif self._falls > _FALLS:
            self._note(
                "error", f"engines were lost {self._falls} times in a row at step {self.step}: so would others be"
            )
            self._end(State.FAILED, EngineError(failures))
        else:
            self._repair()

    def _repair(self, why: str = "") -> None:
        """Bring all ranks to one step, the lost ones replaced or left out. What can't be repaired ends the run.

        `why` that is to be done, where none is lost.
        """
        if self.route.recover is None:
            raise ClusterError("this run can't be repaired")
        lost, before, size = self._lost, self.step, self._cluster.world_size
        self._changed()
        try:
            found = self.route.recover(lost)
        except (DtkitError, ValueError) as error:
            self._end(State.FAILED, error)
            return
        self._recorder.beyond(found.step)
        self._lost, self.step, self.lr, self._tries = [], found.step, found.lr, 0
        self._next = self.step
        self._rate.back_at(self.step)
        self.evaluations.begin_at(self.step)
        self.snapshots.begin_at(self.step)
        if self._balancer is not None and self.route.balance is not None:
            self._balancer = Balancer(self.route.balance)
        if lost:
            how = "replaced" if self._cluster.world_size == size else "left out"
            self._note("repair", _told(lost, how, before, found))
        elif (gone := before - found.step) > 0:
            source = f" ({found.source})" if found.source else ""
            self._note("note", f"all go back to step {found.step}, {plural(gone, 'step')} lost{source}: {why}")
        else:
            self._note("note", f"all go on from step {found.step}, no step lost: {why}")

    def _level(self) -> None:
        """After a failure in which no engine was lost: form the group anew, and have all ranks at one step."""
        standings = recovery.stand(self._cluster, self.route.job)
        self._lost = [rank for rank in range(self._cluster.world_size) if rank not in standings]
        if self._lost or recovery.apart(standings):
            self._repair(recovery.why_apart(standings))
            return
        self.step = next(iter(standings.values())).step
        self._form_anew()

    def _form_anew(self) -> None:
        """Twice if need be: an interrupt may arrive at an engine late."""
        with contextlib.suppress(DtkitError):
            self._cluster.form()
            return
        try:
            self._cluster.form()
        except DtkitError as error:
            self._note("error", f"the process group could not be formed anew: {error}")

    def _keep_common(self, replies: Mapping[int, Reply]) -> None:
        """Record the steps that all ranks completed before one failed."""
        common = self._recorder.common(replies)
        if common is not None:
            self.step = common

    # -- commands ---------------------------------------------------------------------------------------------

    def _obey(self, command: _Command) -> None:
        running = self.state is State.RUNNING
        if command.name in ("resume", "step") and self._lost and not running:
            self._repair()
        if self.state.ended:
            self._waiting.append(command.answer)
            self._answer()
        elif command.name == "called":
            self._take_back(*command.value)
        elif command.name == "abandon":
            self._withdraw_all()
            self._end(State.STOPPED)
        elif command.name in ("pause", "stop"):
            if not self._halt:
                self._pause_asked = time.monotonic()
            self._halt = "stop" if "stop" in (self._halt, command.name) else "pause"
            self._waiting.append(command.answer)
            if self._flights:
                self._cluster.hurry(self.route.job, wanted=True)
        else:
            {
                "lr": self._set_lr,
                "resume": self._resume,
                "step": self._step,
                "save": self._want_save,
                "break": self._break,
                "repair": self._mend,
            }[command.name](command)

    def _calls_due(self, step: int) -> bool:
        return self._turn.due(step, self.route.steps_per_epoch)

    def _take_back(self, token: object, error: BaseException | None) -> None:
        """Callbacks have returned."""
        if self._turn.ended(token) and error is not None:
            self._halt, self.exception = self._halt or "pause", error
            self._note("error", f"a callback failed: {type(error).__name__}: {error}".partition("\n")[0])

    def _mend(self, command: _Command) -> None:
        """Somebody asks for what is lost to be replaced. While steps are taken it is seen to anyway."""
        self._lost = sorted({*self._lost, *self._cluster.lost()})
        if self._lost and self.state is not State.RUNNING:
            self._repair()
        resolve(command.answer, self.step)

    def _want_save(self, command: _Command) -> None:
        self.saver.want(command.value)
        resolve(command.answer, self.step)

    def _resume(self, command: _Command) -> None:
        if self._halt != "stop":  # a pause, or the end of some steps, that is overtaken
            self._broke_off = self._explain = False
            while self._waiting:
                resolve(self._waiting.pop(), self.step)
        self._go(self.route.steps, "resume" if self.step else "start")
        resolve(command.answer, self.step)

    def _step(self, command: _Command) -> None:
        if self.state is State.RUNNING:
            word = "the run is RUNNING; call run.pause() first, then run.step() takes one step at a time"
            command.answer.set_exception(RunError(word))
            return
        self._waiting.append(command.answer)
        steps, self._explain = command.value
        self._go(min(self.step + steps, self.route.steps), None)

    def _break(self, command: _Command) -> None:
        """Interrupt what the engines do, and pause where that leaves them.

        Where nothing is known to be stuck, the pause that was asked for has a moment to take effect: broken off amid a
        step, ranks may stand apart, and where each has a part of its own all go back to the last snapshot.
        """
        if not self._halt:
            self._pause_asked, self._halt = time.monotonic(), "pause"
        self._waiting.append(command.answer)
        if self._flights:
            stuck = self.finding is not None and self.finding.kind == "stuck"
            grace = min(_MOST_GRACE_S, _GRACE_S + 2 * self._lookout.median_step_s)
            self._break_at = -math.inf if stuck or self._breaking else self._pause_asked + grace

    def _break_off(self) -> None:
        self._break_at, self._breaking, self._broke_off, self._tries = math.inf, True, True, 0
        self._note("pause", f"interrupted at step {self.step}: what was under way is broken off")
        self._cluster.interrupt()

    def _go(self, goal: int, event: str | None) -> None:
        self._goal, self.exception = goal, None
        if self._halt == "pause":
            self._halt, self._break_at = None, math.inf
        if self.state is not State.RUNNING:
            if event:
                self._note(event, f"{event} at step {self.step}")
            self._enter(State.RUNNING)

    def _set_lr(self, command: _Command) -> None:
        running = self.state is State.RUNNING and not self._turn.taken  # callbacks are called between steps
        self._rate.want(command.value, command.answer if running else None)
        if not running:
            self.lr = command.value
            resolve(command.answer, self.step)
        self._recorder.note(self._next, "lr", f"learning rate {command.value:g}")  # what is under way has the old one
        self._changed()

    # -- states -----------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Nothing is in flight: all ranks stand at `step`."""
        self._next, self._lost_track, self._breaking, self._break_at = self.step, False, False, math.inf
        self._cluster.hurry(self.route.job, wanted=False)  # whoever left the word: a kernel that was killed since, too
        if self.state.ended or self._saves() or (self._halt == "stop" and self._keeps()):
            return
        if self._halt == "stop":
            self._note("stop", f"stopped at step {self.step}")
            self._end(State.STOPPED)
        elif self.state is State.RUNNING:
            self._rest_running()
        elif self.state is State.PAUSED:
            self._halt = None
            self._answer()

    def _rest_running(self) -> None:
        """What is to be done before the next step, if there is one."""
        due = self._evaluation_due(self.step)
        if due and not self._halt:
            self._evaluate(self.step)
        elif not self._halt and self._calls_due(self.step):
            self._turn.take(self.step, lambda *found: self._inbox.put(_Command("called", found, Future())))
        elif (self._halt or self.step >= self.route.steps) and self._keeps():
            return
        elif self.step >= self.route.steps and not due:
            self._note("done", f"done after {self.step} steps")
            self._end(State.COMPLETED)
        elif self._halt or self.step >= self._goal:
            if self._halt and self.exception is None and not self._broke_off:
                self._note("pause", f"paused at step {self.step}")
            self._broke_off = False
            self._halt = None
            self._enter(State.PAUSED)
            self._answer()

    def _end(self, state: State, error: BaseException | None = None) -> None:
        if error is not None:
            self.exception = error
            self._note("error", str(error).partition("\n")[0])
        with self._gate:  # from here on nobody can put a command into the inbox
            self._set(state)
            while not self._inbox.empty():
                event = self._inbox.get_nowait()
                if isinstance(event, _Command):
                    self._waiting.append(event.answer)
                    if event.name == "save":
                        self.saver.want(event.value)
        self.saver.drop(f"the run has {_ENDED[state]} at step {self.step}")
        self._answer()
        self._changed()

    def _answer(self) -> None:
        """Tell those who wait where the run stands now."""
        while self._waiting:
            resolve(self._waiting.pop(), self.step)
        self._rate.answer(self.step)

    def _enter(self, state: State) -> None:
        with self._gate:
            self._set(state)
        self._changed()

    def _set(self, state: State) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._ran, self._since = self._ran + now - self._since, None
        if state is State.RUNNING:
            self._since = now
        self.state = state
        self._gate.notify_all()

    def _note(self, kind: str, text: str, rank: int | None = None) -> None:
        self._recorder.note(self.step, kind, text, rank)


_ENDED = {State.COMPLETED: "completed", State.STOPPED: "been stopped", State.FAILED: "failed"}
ANEW = "run.exception says why. cluster.train(...) starts anew, with resume=path from a checkpoint"
"""What to do when a run has failed."""
_ON = "run.extend(epochs=1) trains on; cluster.train(...) starts anew"
_TAKEN = (
    "another notebook has taken this cluster over, and the run with it, after step {step}. This one shows what was "
    "until then; dtkit.attach() takes it back"
)
_WORDS = {
    "pause": "be paused",
    "resume": "be resumed",
    "stop": "be stopped",
    "step": "take a step",
    "lr": "change",
    "abandon": "end",
    "save": "be saved",
    "break": "be interrupted",
    "repair": "be repaired",
}


def _told(lost: Sequence[int], how: str, before: int, found: Recovered) -> str:
    """What a repair did, in a line."""
    names = ", ".join(map(str, lost))
    gone = max(found.lost_steps, before - found.step)
    steps = "no step lost" if gone == 0 else f"{plural(gone, 'step')} lost"
    nodes = f"node{'s' * (len(lost) > 1)} {names}"
    source = f" ({found.source})" if found.source else ""
    return f"{nodes} {how}: all go on from step {found.step}{source} after {found.seconds:.1f} s, {steps}"


def _step_s(advances: Sequence[Advance]) -> float:
    """Seconds a step: the slowest rank's median."""
    return max(float(np.median(np.asarray(advance.rows)["step_s"])) for advance in advances)
