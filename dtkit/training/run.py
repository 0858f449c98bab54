"""The handle of a training run: what a user pauses, watches, awaits and asks for the model.

A run has three parts with one owner each: the :class:`~dtkit.types.RunSpec` says what was asked for and never
changes but by `extend`; the *job* on the engines has model, optimiser and place in the data; the driver
(:mod:`dtkit.training.driver`) has state, step and exception. This handle reads them and passes commands on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, overload

from dtkit._util.guard import notify
from dtkit.checkpoint import checkpoint
from dtkit.checkpoint.manager import Save, Saved
from dtkit.data import distribute
from dtkit.errors import DtkitError, RunError
from dtkit.history.history import History
from dtkit.history.run_log import RUNS, Spool
from dtkit.training import persisted_run, state_dict
from dtkit.training.callback_runner import CALLBACKS
from dtkit.training.driver import ANEW, Driver, Route
from dtkit.training.recorder import evaluation
from dtkit.types import Event, State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from matplotlib.figure import Figure

    from dtkit.cluster.cluster import Cluster
    from dtkit.data.distribute import DataHandle
    from dtkit.explain.data_parallel import Explanation
    from dtkit.health.stall_report import Finding
    from dtkit.history.timeline import Timeline
    from dtkit.planning.cost_model import Plan
    from dtkit.planning.memory_report import Memory
    from dtkit.training.config import Extras, Order
    from dtkit.training.recovery import Recovered
    from dtkit.training.resume import Resumption
    from dtkit.training.verify import Verification
    from dtkit.types import Consistency, Evaluation, NodeInfo, RunSpec

_log = logging.getLogger("dtkit")
_SLOWEST = 100.0
_LAST_S = 5.0  # for the weights, as the cluster closes
_PAUSE_S = 10.0  # that an interrupted cell waits for the engines
_PART_S = 0.1
_END_S = 10.0  # that views are given to take in the end of a run
_LOOK_S = 1.0  # between two looks at a run that is awaited

_BUTTONS_LATER = "buttons act after this cell; the kernel's interrupt button pauses now"


class Run:
    """One training on a cluster. Shown as the last line of a cell it is a live dashboard.

    ``run.pause()``, ``resume()``, ``step()``, ``set(lr=...)`` and ``stop()`` return the step at which they took effect:
    all ranks stand there. ``await run`` or ``run.wait()`` return when it has left RUNNING, for whatever reason, and
    raise what failed it.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: RunSpec,
        order: Order,
        extras: Extras,
        job: str | None = None,
    ) -> None:
        self.spec = spec
        self.history = History(copies=extras.copies)
        """What every rank did in every step: a table, see :class:`~dtkit.History`."""
        self.slowed: Mapping[int, float] = {}
        """The ranks that are slowed on purpose, and how many times slower."""
        self._cluster, self._order, self._extras = cluster, order, extras
        self._job = job or cluster.new_key("job")
        self._callbacks: list[Callable[[], None]] = []
        # locks: while a callback is noted
        self._callbacks_lock = threading.Lock()
        self._message = ""
        self._released = False
        self._state: tuple[int, Mapping[str, Any]] | None = None
        self._driver = Driver(cluster, self._route(), self.history, self._notify)
        self._snapshots = cluster.snapshots(self._job)
        saver = self._driver.saver
        saver.plan, saver.describe = extras.saves, self._described
        saver.snapshots = dataclasses.replace(extras.snapshots, to=self._snapshots)
        self._driver.snapshots.rhythm = extras.rhythm

    def build(self, resumption: Resumption | None = None) -> None:
        """Make the job on the engines; the run then stands paused before its first step, or where it was saved."""
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(self._forget)
            self._driver.lr = self._order.build(self._cluster, self._job)
            if resumption is not None:
                self._driver.lr, overruled = resumption.put_into(self._cluster, self._job)
                self.history.extend(resumption.checkpoint.history())
                self._driver.stand_at(resumption.step, resumption.called, resumption.evaluated)
                resumption.put_into_callbacks(self._extras.callbacks)
                mesh = self._extras.strategy.build_mesh(self.spec.world_size)
                self.note(resumption.text(self.spec, mesh, overruled))
            otherwise.pop_all()
        self._cluster.note_job(present=True)
        self._put_down()
        self._driver.start()

    # -- for a notebook that takes over ------------------------------------------------------------------------

    def _put_down(self) -> None:
        """What a notebook needs that takes this run over; and from here on all that comes of it."""
        if not self._cluster.outlives:
            return
        spool, lacks = persisted_run.put_down(self._cluster, self._job, self.spec, self._order, self._extras)
        if lacks:
            self.note(lacks)
        spool.begin(self.history)

    def _put_down_anew(self) -> None:
        """The run is to go on otherwise than was put down. Its history follows where it did."""
        if self.history.spool is None or self._cluster.superseded:  # what lies there is another notebook's
            return
        try:
            persisted_run.put_down(self._cluster, self._job, self.spec, self._order, self._extras)
        except OSError as error:
            why = f"{error.strerror or error}: {self.history.spool.folder}"
            self.note(f"a notebook that takes over will take the run to end as it was to before: {why}")

    @classmethod
    def again(cls, cluster: Cluster, job: str, spec: RunSpec, order: Order, extras: Extras) -> Run:
        """The run of a cluster that was taken over, with all that was written down of it. It stands paused."""
        from dtkit.history import engine_outbox
        from dtkit.history import run_log as spool
        from dtkit.training import recovered_state, recovery

        spec, extras = _of_size(cluster.world_size, spec, extras)
        run = cls(cluster, spec, order, extras, job)
        folder = cluster.folder / RUNS / job
        run.history.extend(spool.history(folder, copies=extras.copies))
        Spool(folder).begin(run.history)
        lost = cluster.lost()
        standings = recovery.stand(cluster, job, lost)
        ranks = range(cluster.world_size)
        left = {rank: engine_outbox.read(cluster.folder, job, rank) for rank in ranks}
        found_last = {rank: engine_outbox.evaluations(cluster.folder, job, rank) for rank in ranks}
        common = min((standing.step for standing in standings.values()), default=0)
        run._driver.catch_up(left, found_last, common)
        if lost or len(standings) < cluster.world_size or recovery.apart(standings):
            found = run._recover(lost)
            step, run._driver.lr, source = found.step, found.lr, f" ({found.source})" if found.source else ""
        else:
            step, run._driver.lr, source = standings[0].step, standings[0].lr, ""
            if (
                state := recovered_state.left_behind(cluster.folder, job)
            ) is not None:  # and put back before that one died
                state.drop(cluster.folder, job)
        evaluated = max((one.step for one in run.history.evaluations), default=0)
        run._driver.stand_at(step, step, evaluated, ran_s=float(run.history.totals()["step_s"].sum()))
        last = next((e.kind for e in reversed(run.history.events) if e.kind in ("lost", "repair")), "repair")
        kind = "note" if last == "repair" else "repair"  # that one died before it could say so
        run.history.add(Event(step, kind, f"taken over at step {step}{source}", time.time()))
        run._driver.start()
        return run

    @property
    def released(self) -> bool:
        """Whether the engines have forgotten it."""
        return self._released

    def repair(self) -> None:
        """Go on from where survivors stand, with other engines in place of those that are gone."""
        self._check_kept("run.repair()")
        if not self._driver.state.ended:
            self._ask("repair")
        elif lost := self._cluster.lost():
            size = self._cluster.world_size
            self._driver.mended(lost, size, self._recover(lost))

    def _route(self) -> Route:
        evaluate, more = None, self._extras
        if more.valid is not None:
            evaluate = self._evaluation_args(more.valid, more.metrics)
        callbacks = self._call_back if more.callbacks else None
        return Route(
            self._job,
            self.spec.steps,
            self.spec.steps_per_epoch,
            evaluate,
            callbacks,
            more.balance,
            self._recover,
            more.on_failure,
        )

    def _recover(self, lost: Sequence[int]) -> Recovered:
        """Have the job made anew, and know of the ranks that are there then. Called on the driver's thread."""
        from dtkit.training.recovery import Recovery

        more, shrinks = self._extras, self._extras.on_failure == "shrink"
        recover = Recovery(
            self._cluster, self._job, self._order, more.strategy, self.spec.batch_size, shrinks, self._snapshots
        )
        found = recover(lost)
        if self._cluster.world_size != self.spec.world_size:
            self.spec, self._extras = _of_size(self._cluster.world_size, self.spec, more)
            self.history.copies = self._extras.copies
            self._driver.route = self._route()
        self.slowed = {}  # the new jobs run at full speed
        return found

    def _call_back(self) -> None:
        for callback in self._extras.callbacks:
            callback(self)

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """State, step, epoch, seconds spent running and seconds left, as of now."""
        driver = self._driver
        finding = driver.finding
        return Status(
            state=driver.state,
            step=driver.step,
            steps=self.spec.steps,
            epoch=driver.step // self.spec.steps_per_epoch,
            elapsed_s=driver.elapsed_s,
            remaining_s=self._remaining(),
            message=self._message if finding is None else finding.text,
        )

    def _remaining(self) -> float | None:
        done, left = self._driver.step, self.spec.steps - self._driver.step
        if not done or self._driver.state.ended:
            return None
        recent = self.history.totals(max(0, self.history.steps - 50))["step_s"]
        return left * float(recent.mean()) if len(recent) else None

    @property
    def nodes(self) -> list[NodeInfo]:
        """The engines, by rank."""
        return self._cluster.nodes

    @property
    def lr(self) -> float | None:
        """The learning rate in force (of the first parameter group)."""
        return self._driver.lr

    @property
    def exception(self) -> BaseException | None:
        """What failed the run, or (NaN) made it pause; None while all is well."""
        return self._driver.exception

    @property
    def timeline(self) -> Timeline:
        """What every rank did when, in the last steps: a picture, and in a pipeline the bubble."""
        from dtkit.history import comm_time, message_times
        from dtkit.history.timeline import Timeline, merge

        spans = comm_time.cut(message_times.cut(merge(*self._driver.spans), self.history.copies))
        return Timeline(spans, schedule=self._extras.schedule, title=f" of {self.spec.name}")

    def trace(self, path: str | Path) -> None:
        """Write the last steps as a Chrome trace, which https://ui.perfetto.dev opens."""
        self.timeline.trace(path)

    @property
    def consistency(self) -> Consistency | None:
        """What the last comparison of the parameters over the ranks found; None before the first."""
        return self._driver.watch.found

    @property
    def finding(self) -> Finding | None:
        """Who keeps the others waiting now: rank, phase, line, for how many seconds; None while all is well."""
        return self._driver.finding

    # -- what one asks of it ----------------------------------------------------------------------------------

    def pause(self) -> int:
        """Let all ranks finish the same step and stand there. Returns how many steps were taken so far."""
        return self._ask("pause")

    def resume(self) -> int:
        """Go on. Returns the step from which."""
        return self._ask("resume")

    @overload
    def step(self, n: int = 1, *, explain: Literal[False] = False) -> int: ...

    @overload
    def step(self, n: int = 1, *, explain: Literal[True]) -> Explanation: ...

    def step(self, n: int = 1, *, explain: bool = False) -> int | Explanation:
        """Take `n` steps while paused. Returns how many were taken so far; raises what failed the run.

        With ``explain=True``, one step is taken apart. Of replicas: each rank's rows, loss and gradients, their sum,
        the update. Of a pipeline: the activations and gradients that cross the borders between stages. Where parameters
        are cut: the collectives, with their bytes.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"step({n!r}): the number of steps must be an integer from 1 up")
        if not explain:
            return self._stepped(n)
        if n != 1:
            raise ValueError(f"step({n}, explain=True): one step is explained at a time; call run.step(explain=True)")
        if not self._extras.explains:
            raise RunError(
                f"{self.spec.strategy} has no whole gradients on each rank to be all-reduced, and nothing is cut or "
                "sent within a step: there is little to take apart. Train with DataParallel(), Pipeline(), Sharded() "
                "or TensorParallel() to see a step taken apart"
            )
        return self._explained()

    def _stepped(self, n: int) -> int:
        try:
            taken = self._ask("step", (n, False))
        except KeyboardInterrupt:
            self._pause_or_break()
            raise
        if self.exception is not None:
            raise self.exception
        return taken

    def _explained(self) -> Explanation:
        from dtkit.explain import explain as explaining

        before = self._driver.step
        if self._ask("step", (1, True)) == before:
            raise self.exception or RunError(f"the run has taken all of its {self.spec.steps} steps; run.extend() it")
        return explaining.build_explanation(self._driver.reports, self.spec.name, self._cluster.clock_offsets)

    def slow(self, rank: int, factor: float) -> int:
        """Have one rank's computing take `factor` times as long (it sleeps), for lessons and tests; 1 ends it.

        Every picture of the run says so. Returns the step at which it was asked for.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.spec.world_size:
            raise ValueError(f"slow(rank={rank!r}): there are ranks 0 to {self.spec.world_size - 1}")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _SLOWEST:
            raise ValueError(f"slow(factor={factor!r}): it must be a number from 1 (as fast as it is) to {_SLOWEST:g}")
        self._check_kept("slow")
        self._cluster.ask("slow", ranks=[rank], job=self._job, factor=float(factor))
        others = {r: f for r, f in self.slowed.items() if r != rank}
        self.slowed = others if factor == 1 else dict(sorted({**others, rank: float(factor)}.items()))
        self.note(f"node {rank} " + ("runs at full speed" if factor == 1 else f"slowed {factor:g}x on purpose"))
        return self._driver.step

    def drill(self, name: str, rank: int) -> int:
        """End a rank's process, for lessons: ``run.drill("kill", 1)``. Returns the steps taken so far."""
        ranks = self._cluster.world_size
        if name != "kill" or isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
            raise ValueError(f"drill({name!r}, {rank!r}): it is drill('kill', rank), with a rank from 0 to {ranks - 1}")
        self._check_kept("drill")
        self.note(f"node {rank} killed on purpose")
        self._cluster.kill([rank])
        return self._driver.step

    def note(self, text: str) -> None:
        """Add a line to the run's log, marked at the present step."""
        self.history.add(Event(self._driver.step, "note", str(text), time.time()))
        self._notify()

    def stop(self) -> int:
        """End the run at a step boundary; it keeps model and history. Returns how many steps were taken."""
        if self._driver.state in (State.STOPPED, State.COMPLETED):
            return self._driver.step
        return self._ask("stop")

    def set(self, *, lr: float) -> int:
        """Give every rank a new learning rate, with the same step. Returns the first step that uses it.

        Further parameter groups keep their ratio to the first one.
        """
        return self._ask("lr", _checked_lr(lr))

    def post(self, command: str, value: float | None = None) -> Future[int]:
        """Ask for "pause", "resume", "step", "stop" or "lr" (with `value`), without waiting: what buttons call.

        The answer will be how many steps were taken when it took effect on all ranks.
        """
        values = {"pause": None, "resume": None, "stop": None, "step": (1, False), "lr": value}
        if command not in values:
            raise ValueError(f"{command!r} is no command of a run; use pause, resume, step, stop or lr")
        return self._driver.ask(command, _checked_lr(value) if command == "lr" else values[command])

    def _ask(self, command: str, value: Any = None) -> int:
        patience = self._cluster.patience
        try:
            return self._driver.ask(command, value).result(patience)
        except TimeoutError:
            raise RunError(
                f"the engines did not come to the end of a step within {patience:.0f} s, so {command!r} did not take "
                "effect. cluster.interrupt() ends what they are doing, and the run"
            ) from None

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(self, path: str | Path | None = None, *, keep: int | None = None) -> Saved:
        """Write a checkpoint into a folder of its own in `path` (by default ``save_to``), to train on from it later.

        While the run is RUNNING, after the step that is being taken; training goes on while ranks write. With `keep`,
        only so many checkpoints stay in `path`, the newest ones. Raises CheckpointError where it could not be written:
        the run and older checkpoints are as they were.
        """
        target = self._extras.saves.to if path is None else path
        if target is None:
            raise ValueError("save(): there is no path. Name a folder: run.save('checkpoints/first')")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"save(keep={keep!r}): it is how many checkpoints stay; an integer from 1 up")
        self._check_kept("save")
        save = Save(checkpoint.given("save(path", target).absolute(), keep)
        if self._driver.state.ended:
            self._save_ended(save)
        else:
            self._ask("save", save)
        return save.result(self._cluster.patience)

    def _save_ended(self, save: Save) -> None:
        """There is no driver any more that could send it."""
        saver, step = self._driver.saver, self._driver.step
        saver.want(save)
        if saver.next(step) is None:
            return
        try:
            values: list[Any] = self._cluster.ask("save", job=self._job, step=step, **save.args())
        except DtkitError as error:
            saver.failed(save, step, error)
        else:
            saver.landed(save, step, values)

    def _described(self) -> dict[str, Any]:
        """What a checkpoint says of this run, besides its state on the engines."""
        from dtkit.training.resume import callback_states

        callbacks = callback_states(self._extras.callbacks)
        found = {"spec": dataclasses.asdict(self.spec), "called": self._driver.called, "callbacks": callbacks}
        if self._extras.valid is not None:
            found["evaluated"] = self._driver.evaluations.made
        return found

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Until the run has left RUNNING, for whatever reason; raises what failed it.

        An interrupt pauses the run at a step boundary and is raised again. Raises TimeoutError after `timeout`
        seconds, with the run going on.
        """
        self._check_not_in_callback()
        with self._watched():
            left = self._driver.wait(timeout)
        if not left:
            raise TimeoutError(
                f"the run is at step {self.status.step} of {self.spec.steps} after {timeout} s and goes on; wait "
                "again, or run.pause()"
            )
        self._settle()

    def __await__(self) -> Generator[Any, None, None]:
        return self._left_running().__await__()

    async def _left_running(self) -> None:
        """As `wait`, with the kernel free meanwhile, so that buttons act. Cancelling it pauses the run."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(news.set)

        unsubscribe = self.subscribe(tell)
        try:
            while self._driver.state in (State.PENDING, State.RUNNING):
                news.clear()
                with contextlib.suppress(TimeoutError):  # a word that never comes is no reason to wait for ever
                    # waits: inside asyncio.wait_for, with a timeout
                    await asyncio.wait_for(news.wait(), _LOOK_S)
        except asyncio.CancelledError:
            with contextlib.suppress(RunError):
                self.post("pause")
            raise
        finally:
            unsubscribe()
        await loop.run_in_executor(None, self._settle)

    @contextlib.contextmanager
    def _watched(self) -> Generator[None, None, None]:
        """While a cell blocks, it says so; an interrupt pauses the run, from the first moment on."""
        with contextlib.ExitStack() as after:
            try:
                self._say_blocked(after)
                yield
            except KeyboardInterrupt:
                self._pause_or_break()
                raise

    def _say_blocked(self, after: contextlib.ExitStack) -> None:
        """Text progress in a terminal, and in a notebook a word on the buttons; `after` ends it."""
        from dtkit.dashboard import display, text

        if self._driver.state.ended:
            return
        if display.in_notebook():
            after.callback(self._say, "")
            self._say(_BUTTONS_LATER)
        else:
            after.callback(text.follow(self))

    def _say(self, message: str) -> None:
        self._message = message
        self._notify()

    def _pause_or_break(self) -> None:
        """Pause at a step boundary; a second interrupt before it has breaks off what the engines do."""
        first = not self._driver.pausing
        with contextlib.suppress(RunError, TimeoutError):
            try:
                _until(self._driver.ask("pause" if first else "break"))
            except KeyboardInterrupt:
                _until(self._driver.ask("break"))
            except TimeoutError:
                if first:
                    self.note(f"not paused after {_PAUSE_S:.0f} s: another interrupt breaks off what is under way")

    def _check_not_in_callback(self) -> None:
        if threading.current_thread().name == CALLBACKS:
            raise RunError("a callback can't wait for the run, which waits for its callbacks; return instead")

    def _settle(self) -> None:
        """The run has left RUNNING: let its displays become pictures, and raise what failed it."""
        from dtkit.dashboard import display

        if self._driver.state.ended:
            # waits: Saver.join has a default timeout
            self._driver.saver.join()  # who waits for a run may go on from its last checkpoint
            display.settle(self)
        if self.exception is not None:
            raise self.exception

    # -- the model --------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model as trained so far: a new object in the notebook, on the CPU. Yours stays as it was."""
        return self._order.copies.build(self._fetch())

    def _fetch(self) -> Mapping[str, Any]:
        """The whole model's state dict, as of the step that the run stands at."""
        if self._state is not None and (self._released or self._state[0] == self._driver.step):
            return self._state[1]
        if self._released:
            raise RunError(
                "this run was released, and its weights could not be fetched before (an engine was lost or stuck, or "
                "no step was made). Ask for run.model as soon as a run has ended"
            )
        before = self._driver.step
        state = state_dict.fetch(self._cluster, "state", self._job)
        if not self._running() and before == self._driver.step:
            self._state = before, state
        return state

    def evaluate(self, data: Any, metrics: Mapping[str, Callable[..., Any]] | None = None) -> Evaluation:
        """Loss and metrics over `data` (arrays, a Dataset, a function or a Partition), each rank taking a part.

        `metrics` are those given to `train` unless named here. The result is exact for any number of samples.
        """
        self._check_kept("evaluate")
        placed = distribute.distribute_validation_data(self._cluster, data, training_data=self._order.data)
        args = self._evaluation_args(placed, self._extras.metrics if metrics is None else metrics)
        step = self._driver.step
        return evaluation(step, self._cluster.ask("evaluate", job=self._job, **args))

    def _evaluation_args(self, data: DataHandle, metrics: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
        per_rank = -(-self.spec.batch_size // self.spec.world_size)
        program = self._cluster.dumps(dict(metrics), name="metrics")
        return {"data": data.key, "program": program, "batch_size": per_rank, "loading": self._order.loading}

    def memory(self, plan: Plan | None = None) -> Memory:
        """What each rank's memory is filled with, as measured; with what `plan` (a cluster.plan) said behind it.

        Parameters, gradients and optimiser state are counted on the engines now, and the peak is the most that each
        process grew to while this run took steps.
        """
        from dtkit.planning.memory_report import Memory

        self._check_kept("memory")
        step, found = self._driver.step, self._cluster.ask("memory", job=self._job)
        return Memory.from_reports(self.spec.name, self.spec.strategy, step, found, plan)

    def placement(self) -> Any:
        """Which part of the model lies where, as the engines placed it: a table, by the strategy.

        Of a Pipeline its stages, with what their layers were measured to cost; of TensorParallel what each module is
        cut into. None where every rank has the whole model, or an even part of every parameter.
        """
        self._check_kept("placement")
        return self._cluster.ask("placement", ranks=[0], job=self._job)[0]

    def verify(self, steps: int = 20) -> Verification:
        """Is this training the same as in one process? Prints the answer, and returns it.

        The first `steps` steps are taken again from the kept start, once on all ranks and once on one engine alone with
        the same rows; the parameters are then compared. Neither touches the run.
        """
        from dtkit.training import verify

        if self._running():
            raise RunError("verify needs the engines to itself; call run.pause() first, then run.resume()")
        self._check_kept("verify")
        found = verify.verify(self._cluster, self._order, min(steps, self.spec.steps), self._extras.caveats)
        print(found.text())  # noqa: T201 - asked for as a report
        return found

    # -- going on, and letting go -----------------------------------------------------------------------------

    def extend(self, *, epochs: int | None = None, steps: int | None = None) -> None:
        """Train on for so many epochs (or steps) more, with the optimiser as it stands."""
        if (epochs is None) == (steps is None):
            raise ValueError(f"epochs={epochs}, steps={steps}: say how much longer by one of them, as in epochs=1")
        more = steps if steps is not None else (epochs or 0) * self.spec.steps_per_epoch
        if more < 1:
            raise ValueError(f"epochs={epochs}, steps={steps}: train on by at least one step")
        if self._driver.state not in (State.COMPLETED, State.STOPPED):
            word = f"this run is {self._driver.state.value}; extend one that has completed or was stopped"
            raise RunError(f"{word}. {ANEW}" if self._driver.state is State.FAILED else word)
        self._check_kept("extend")
        if not self._driver.over(_END_S):
            raise RunError(f"the run has ended, and a view has not yet taken that in after {_END_S:.0f} s; try again")
        self.spec = dataclasses.replace(self.spec, steps=self._driver.step + more)
        self._driver.route = self._route()
        self._driver.start()
        self._put_down_anew()
        self.resume()

    def release(self) -> None:
        """Free the engines' copy of the model, after fetching its weights. A paused run is stopped. Idempotent."""
        if self._released:
            return
        if self._running():
            raise RunError(f"this run is at step {self.status.step} of {self.spec.steps}; run.stop() it first")
        if not self._driver.state.ended:
            self.stop()
        self._fetch_if_possible()
        self._released = True
        self._forget()
        written = self.history.spool
        self.history.part()
        if self._cluster.superseded:  # what lies in its folder is another notebook's now
            return
        shutil.rmtree(self._snapshots, ignore_errors=True)
        if written is not None:
            written.remove()

    def _forget(self) -> None:
        """Have the engines let go of the job, so far as they have one."""
        with contextlib.suppress(DtkitError):
            self._cluster.ask("unload", keys=[*self._order.own, self._job])
            self._cluster.note_job(present=False)

    def abandon(self) -> None:
        """The cluster is closing: end, keeping the weights where the engines still give them."""
        stands = self._driver.abandon(timeout=3.0)
        self._driver.saver.settle(timeout=10.0)
        if stands and self._driver.step and not self._released:
            with contextlib.suppress(DtkitError):
                state = state_dict.fetch_at_once(self._cluster, "state", self._job, _LAST_S)
                self._state = self._state if state is None else (self._driver.step, state)
        self.history.part()
        self._released = True

    def _fetch_if_possible(self) -> None:
        """An engine that is gone can't give its weights; then there are none to keep."""
        try:
            self._state = self._driver.step, self._fetch()
        except DtkitError as error:
            _log.warning("the weights of %s were not kept: %s", self.spec.name, error)

    def _running(self) -> bool:
        return self._driver.state in (State.PENDING, State.RUNNING)

    def _check_kept(self, what: str) -> None:
        if self._released:
            raise RunError(
                f"{what} needs the job on the engines, and this run was released: by run.release(), by a later train "
                "or with its cluster. Its weights are in run.model"
            )

    # -- views ------------------------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after every change, from any thread; returns what ends that."""
        with self._callbacks_lock:
            self._callbacks.append(callback)

        def unsubscribe() -> None:
            with self._callbacks_lock, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return unsubscribe

    def _notify(self) -> None:
        if self._driver.route.steps != self.spec.steps:  # a stream ended before them
            route = self._driver.route
            self.spec = dataclasses.replace(self.spec, steps=route.steps, steps_per_epoch=route.steps_per_epoch)
        with self._callbacks_lock:
            callbacks = list(self._callbacks)
        notify(callbacks, self.spec.name)

    def figure(self) -> Figure:
        """The run as a matplotlib Figure, at any time: loss and throughput, per node and together."""
        from dtkit.dashboard import figures

        return figures.run_figure(self)

    def __repr__(self) -> str:
        from dtkit.dashboard import text

        return text.summary(self)

    def dashboard(self, *, drills: bool = False) -> None:
        """Show the dashboard here, as `run` in the last line of a cell does.

        With ``drills=True`` it can also slow nodes down and end them, for lessons.
        """
        from dtkit.dashboard import display

        display.show(self, drills=drills)

    def report(self, path: str | Path, *, alone: Run | History | None = None) -> None:
        """Write the run as one HTML file that needs nothing else: figures, nodes, versions, schedule and events.

        `alone`: the same training in one process (a run on one engine, or its history), to say how it scales.
        """
        from dtkit.dashboard import report

        report.write(self, path, alone=alone.history if isinstance(alone, Run) else alone)

    def _ipython_display_(self) -> None:
        from dtkit.dashboard import display

        display.show(self)


def _of_size(size: int, spec: RunSpec, extras: Extras) -> tuple[RunSpec, Extras]:
    """What was asked for, for as many ranks as there are: some may have been left out since."""
    if size == spec.world_size:
        return spec, extras
    even = None if extras.balance is None else (1,) * size
    copies = size // extras.strategy.build_mesh(size).replicas
    return dataclasses.replace(spec, world_size=size), dataclasses.replace(extras, balance=even, copies=copies)


def _until(answer: Future[int]) -> None:
    """Wait for an answer in short parts: a signal that another thread received is seen between two of them."""
    deadline = time.monotonic() + _PAUSE_S
    while not answer.done() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            answer.result(_PART_S)
    answer.result(0)


def _checked_lr(lr: Any) -> float:
    try:
        value = float(lr)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"lr={lr!r}; a learning rate is a finite number from 0 up")
    return value
