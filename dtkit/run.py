"""The handle of a training run: what a user pauses, watches, awaits and asks for the model.

A run has three parts with one owner each: the :class:`~dtkit.records.RunSpec` says what was asked for and never
changes but by `extend`; the *job* on the engines has model, optimiser and place in the data; the driver
(:mod:`dtkit.driver`) has state, step and exception. This handle reads them and passes commands on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from dtkit import pieces, placing
from dtkit.driver import CALLBACKS, Driver, Route, evaluation
from dtkit.errors import ClusterError, RunError
from dtkit.history import History
from dtkit.records import Event, State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from dtkit.cluster import Cluster
    from dtkit.engine.loading import Loading
    from dtkit.explanation import StepExplanation
    from dtkit.placing import Placed
    from dtkit.records import Consistency, Evaluation, JobPlan, NodeInfo, RunSpec
    from dtkit.replicas import Replicas
    from dtkit.timeline import Timeline
    from dtkit.verify import Verification

_log = logging.getLogger("dtkit")
_SLOWEST = 100.0

_BUTTONS_LATER = "buttons act after this cell; the kernel's interrupt button pauses now"


@dataclasses.dataclass(frozen=True)
class Order:
    """What the engines were told to make: enough to make it again, as `verify` does."""

    copies: Replicas
    data: Placed
    plan: JobPlan
    program: bytes
    """Objective, optimiser and strategy, pickled."""
    loading: Loading | None = None

    def build(self, cluster: Cluster, job: str, *, ranks: list[int] | None = None, alone: bool = False) -> float:
        """Make a job of it on all ranks, or alone on one. Returns the learning rate."""
        args: dict[str, Any] = {
            "job": job,
            "model": self.copies.key,
            "data": self.data.key,
            "program": self.program,
            "plan": self.plan,
            "loading": self.loading,
        }
        return float(cluster.ask("build", ranks=ranks, alone=alone, **args)[0])


@dataclasses.dataclass(frozen=True)
class Extras:
    """What a run does besides taking steps, and what it can't."""

    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    valid: Placed | None = None
    callbacks: Sequence[Callable[[Run], Any]] = ()
    balance: tuple[int, ...] | None = None
    """Rows of each shard, where faster ranks are to take more of each batch."""
    caveats: tuple[str, ...] = ()
    """Why the training is not that of one process."""
    explains: bool = True
    """Whether the strategy can take a step apart."""
    parts_per_rank: int = 1
    """Parts of a model that a rank of a pipeline has."""
    copies: int = 1
    """Ranks that share one replica of the model, and so take the same samples."""


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
    ) -> None:
        self.spec = spec
        self.history = History(copies=extras.copies)
        """What every rank did in every step: a table, see :class:`~dtkit.History`."""
        self.slowed: Mapping[int, float] = {}
        """The ranks that are slowed on purpose, and how many times slower."""
        self._cluster, self._order, self._extras = cluster, order, extras
        self._job = cluster.new_key("job")
        self._callbacks: list[Callable[[], None]] = []
        self._callbacks_lock = threading.Lock()
        self._message = ""
        self._released = False
        self._state: tuple[int, Mapping[str, Any]] | None = None
        self._driver = Driver(cluster, self._route(), self.history, self._notify)

    def build(self) -> None:
        """Make the job on the engines; the run then stands paused before its first step."""
        self._driver.lr = self._order.build(self._cluster, self._job)
        self._cluster.note_job(present=True)
        self._driver.start()

    def _route(self) -> Route:
        evaluate, more = None, self._extras
        if more.valid is not None:
            evaluate = self._evaluation_args(more.valid, more.metrics)
        callbacks = self._call_back if more.callbacks else None
        return Route(self._job, self.spec.steps, self.spec.steps_per_epoch, evaluate, callbacks, more.balance)

    def _call_back(self) -> None:
        for callback in self._extras.callbacks:
            callback(self)

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """State, step, epoch, seconds spent running and seconds left, as of now."""
        driver = self._driver
        return Status(
            state=driver.state,
            step=driver.step,
            steps=self.spec.steps,
            epoch=driver.step // self.spec.steps_per_epoch,
            elapsed_s=driver.elapsed_s,
            remaining_s=self._remaining(),
            message=self._message,
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
        from dtkit.timeline import SPAN, Timeline, merge

        parts = self._driver.spans
        spans = merge(parts, self._cluster.clock_offsets) if parts else np.empty(0, SPAN)
        return Timeline(spans, parts_per_rank=self._extras.parts_per_rank, title=f" of {self.spec.name}")

    def trace(self, path: str | Path) -> None:
        """Write the last steps as a Chrome trace, which https://ui.perfetto.dev opens."""
        self.timeline.trace(path)

    @property
    def consistency(self) -> Consistency | None:
        """What the last comparison of the parameters over the ranks found; None before the first."""
        return self._driver.watch.found

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
    def step(self, n: int = 1, *, explain: Literal[True]) -> StepExplanation: ...

    def step(self, n: int = 1, *, explain: bool = False) -> int | StepExplanation:
        """Take `n` steps while paused. Returns how many were taken so far.

        With ``explain=True``, one step is taken apart: each rank's rows, loss and gradients, their sum, the update.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"step({n!r}): the number of steps must be an integer from 1 up")
        if not explain:
            return self._ask("step", (n, False))
        if n != 1:
            raise ValueError(f"step({n}, explain=True): one step is explained at a time; call run.step(explain=True)")
        if not self._extras.explains:
            raise RunError(
                f"{self.spec.strategy} has no whole gradients on each rank to be all-reduced, which is what an "
                "explanation shows. Train with DataParallel() to see a step taken apart"
            )
        return self._explained()

    def _explained(self) -> StepExplanation:
        from dtkit.explanation import StepExplanation

        before = self._driver.step
        if self._ask("step", (1, True)) == before:
            raise self.exception or RunError(f"the run has taken all of its {self.spec.steps} steps; run.extend() it")
        return StepExplanation.from_reports(self._driver.reports)

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

    def post(self, command: str, value: float | None = None) -> None:
        """Ask for "pause", "resume", "step", "stop" or "lr" (with `value`), without waiting: what buttons call."""
        values = {"pause": None, "resume": None, "stop": None, "step": (1, False), "lr": value}
        if command not in values:
            raise ValueError(f"{command!r} is no command of a run; use pause, resume, step, stop or lr")
        self._driver.ask(command, _checked_lr(value) if command == "lr" else values[command])

    def _ask(self, command: str, value: Any = None) -> int:
        patience = self._cluster.patience
        try:
            return self._driver.ask(command, value).result(patience)
        except TimeoutError:
            raise RunError(
                f"the engines did not come to the end of a step within {patience:.0f} s, so {command!r} did not take "
                "effect. cluster.interrupt() ends what they are doing, and the run"
            ) from None

    def wait(self, timeout: float | None = None) -> None:
        """Until the run has left RUNNING, for whatever reason; raises what failed it.

        An interrupt pauses the run at a step boundary and is raised again. Raises TimeoutError after `timeout`
        seconds, with the run going on.
        """
        self._check_not_in_callback()
        with self._watched():
            try:
                left = self._driver.wait(timeout)
            except KeyboardInterrupt:
                self._pause_soon()
                raise
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
                await news.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(RunError):
                self.post("pause")
            raise
        finally:
            unsubscribe()
        await loop.run_in_executor(None, self._settle)

    @contextlib.contextmanager
    def _watched(self) -> Generator[None, None, None]:
        """While a cell blocks: text progress in a terminal, and in a notebook a word on the buttons."""
        from dtkit.dashboard import display, text

        if self._driver.state.ended:
            yield
        elif display.in_notebook():
            self._say(_BUTTONS_LATER)
            try:
                yield
            finally:
                self._say("")
        else:
            unfollow = text.follow(self)
            try:
                yield
            finally:
                unfollow()

    def _say(self, message: str) -> None:
        self._message = message
        self._notify()

    def _pause_soon(self) -> None:
        with contextlib.suppress(RunError, TimeoutError):
            self._driver.ask("pause").result(10)

    def _check_not_in_callback(self) -> None:
        if threading.current_thread().name == CALLBACKS:
            raise RunError("a callback can't wait for the run, which waits for its callbacks; return instead")

    def _settle(self) -> None:
        """The run has left RUNNING: let its displays become pictures, and raise what failed it."""
        from dtkit.dashboard import display

        if self._driver.state.ended:
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
                "this run was released before its weights could be fetched (its cluster was closed, or an engine was "
                "lost). Ask for run.model before closing the cluster"
            )
        before = self._driver.step
        state = pieces.fetch(self._cluster, "state", self._job)
        if not self._running() and before == self._driver.step:
            self._state = before, state
        return state

    def evaluate(self, data: Any, metrics: Mapping[str, Callable[..., Any]] | None = None) -> Evaluation:
        """Loss and metrics over `data` (arrays, a Dataset, a function or a Partition), each rank taking a part.

        `metrics` are those given to `train` unless named here. The result is exact for any number of samples.
        """
        self._check_kept("evaluate")
        placed = placing.place(self._cluster, data, like=self._order.data)
        args = self._evaluation_args(placed, self._extras.metrics if metrics is None else metrics)
        step = self._driver.step
        return evaluation(step, self._cluster.ask("evaluate", job=self._job, **args))

    def _evaluation_args(self, data: Placed, metrics: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
        per_rank = -(-self.spec.batch_size // self.spec.world_size)
        program = self._cluster.dumps(dict(metrics), name="metrics")
        return {"data": data.key, "program": program, "batch_size": per_rank, "loading": self._order.loading}

    def verify(self, steps: int = 20) -> Verification:
        """Is this training the same as in one process? Prints the answer, and returns it.

        The first `steps` steps are taken again from the kept start, once on all ranks and once on one engine alone with
        the same rows; the parameters are then compared. Neither touches the run.
        """
        from dtkit import verify

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
            raise RunError(f"this run is {self._driver.state.value}; extend one that has completed or was stopped")
        self._check_kept("extend")
        self.spec = dataclasses.replace(self.spec, steps=self._driver.step + more)
        self._driver.route = self._route()
        self._driver.start()
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
        with contextlib.suppress(ClusterError):
            self._cluster.ask("unload", keys=[self._job])
            self._cluster.note_job(present=False)

    def abandon(self) -> None:
        """The cluster is closing: end, keeping the weights where the engines still give them."""
        self._driver.abandon(timeout=3.0)
        self._released = True

    def _fetch_if_possible(self) -> None:
        """An engine that is gone can't give its weights; then there are none to keep."""
        try:
            self._state = self._driver.step, self._fetch()
        except ClusterError as error:
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
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - an error in a view never touches training; it is logged
                _log.exception("a view of %s failed", self.spec.name)

    def figure(self) -> Figure:
        """The run as a matplotlib Figure, at any time: loss and throughput, per node and together."""
        from dtkit.dashboard import figures

        return figures.run_figure(self)

    def __repr__(self) -> str:
        from dtkit.dashboard import text

        return text.summary(self)

    def _ipython_display_(self) -> None:
        from dtkit.dashboard import display

        display.show(self)


def _checked_lr(lr: Any) -> float:
    try:
        value = float(lr)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"lr={lr!r}; a learning rate is a finite number from 0 up")
    return value
