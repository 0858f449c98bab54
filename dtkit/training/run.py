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

from dtkit._util.guard import notify_views
from dtkit.checkpoint import checkpoint
from dtkit.checkpoint.manager import CheckpointRequest, CheckpointResult
from dtkit.data import distribute
from dtkit.errors import DtkitError, RunError
from dtkit.history.history import History
from dtkit.history.run_log import RUNS_FOLDER, RunLog
from dtkit.training import persisted_run, state_dict
from dtkit.training.callback_runner import CALLBACK_THREAD_NAME
from dtkit.training.driver import RETRAIN_HINT, Driver, RunPlan
from dtkit.training.recorder import combine_evaluations
from dtkit.types import Event, State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from matplotlib.figure import Figure

    from dtkit.cluster.cluster import Cluster
    from dtkit.data.distribute import DataHandle
    from dtkit.explain.data_parallel import Explanation
    from dtkit.health.stall_report import StallReport
    from dtkit.history.timeline import Timeline
    from dtkit.planning.cost_model import Plan
    from dtkit.planning.memory_report import Memory
    from dtkit.training.config import JobSpec, RunOptions
    from dtkit.training.recovery import RecoveryResult
    from dtkit.training.resume import ResumePoint
    from dtkit.training.verify import Verification
    from dtkit.types import Evaluation, NodeInfo, ReplicaCheckResult, RunSpec

_log = logging.getLogger("dtkit")
_MAX_DELAY_FACTOR = 100.0
_FINAL_FETCH_TIMEOUT_S = 5.0  # for the weights, as the cluster closes
_PAUSE_TIMEOUT_S = 10.0  # that an interrupted cell waits for the engines
_ANSWER_POLL_S = 0.1
_JOIN_TIMEOUT_S = 10.0  # that views are given to take in the end of a run
_STATE_POLL_S = 1.0  # between two looks at a run that is awaited

_BUTTONS_BLOCKED_MESSAGE = "buttons act after this cell; the kernel's interrupt button pauses now"


class Run:
    """One training on a cluster. Shown as the last line of a cell it is a live dashboard.

    ``run.pause()``, ``resume_from()``, ``step()``, ``set(lr=...)`` and ``stop()`` return the step at which they took
    effect: all ranks stand there. ``await run`` or ``run.wait()`` return when it has left RUNNING, for whatever reason,
    and raise what failed it.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: RunSpec,
        job_spec: JobSpec,
        options: RunOptions,
        job: str | None = None,
    ) -> None:
        self.spec = spec
        self.history = History(ranks_per_replica=options.ranks_per_replica)
        """What every rank did in every step: a table, see :class:`~dtkit.History`."""
        self.delay_factors: Mapping[int, float] = {}
        """The ranks that are slowed on purpose, and how many times slower."""
        self._cluster, self._job_spec, self._options = cluster, job_spec, options
        self._job = job or cluster.make_key("job")
        self._callbacks: list[Callable[[], None]] = []
        # locks: while a callback is noted
        self._callbacks_lock = threading.Lock()
        self._message = ""
        self._released = False
        self._fetched_state: tuple[int, Mapping[str, Any]] | None = None
        self._driver = Driver(cluster, self._make_plan(), self.history, self._notify)
        self._snapshot_folder = cluster.make_snapshot_folder(self._job)
        saver = self._driver.checkpoint_manager
        saver.policy, saver.describe = options.checkpoint_policy, self._describe_for_checkpoint
        saver.snapshot_policy = dataclasses.replace(options.disk_snapshot_policy, folder=self._snapshot_folder)
        self._driver.snapshot_tracker.interval = options.snapshot_interval

    def build(self, resume_point: ResumePoint | None = None) -> None:
        """Make the job on the engines; the run then stands paused before its first step, or where it was saved."""
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(self._unload_job)
            self._driver.lr = self._job_spec.build(self._cluster, self._job)
            if resume_point is not None:
                self._driver.lr, overruled = resume_point.restore_job(self._cluster, self._job)
                self.history.extend(resume_point.checkpoint.load_history())
                self._driver.restore_position(
                    resume_point.step, resume_point.last_callback_step, resume_point.last_evaluation_step
                )
                resume_point.restore_callbacks(self._options.callbacks)
                mesh = self._options.strategy.build_mesh(self.spec.world_size)
                self.note(resume_point.describe(self.spec, mesh, overruled))
            otherwise.pop_all()
        self._cluster.set_job_flag(present=True)
        self._persist()
        self._driver.start()

    # -- for a notebook that takes over ------------------------------------------------------------------------

    def _persist(self) -> None:
        """What a notebook needs that takes this run over; and from here on all that comes of it."""
        if not self._cluster.can_be_reattached:
            return
        spool, lacks = persisted_run.save(self._cluster, self._job, self.spec, self._job_spec, self._options)
        if lacks:
            self.note(lacks)
        spool.start_recording(self.history)

    def _update_persisted(self) -> None:
        """The run is to go on otherwise than was put down. Its history follows where it did."""
        if self.history.run_log is None or self._cluster.is_superseded:  # what lies there is another notebook's
            return
        try:
            persisted_run.save(self._cluster, self._job, self.spec, self._job_spec, self._options)
        except OSError as error:
            why = f"{error.strerror or error}: {self.history.run_log.folder}"
            self.note(f"a notebook that takes over will take the run to end as it was to before: {why}")

    @classmethod
    def reattach(cls, cluster: Cluster, job: str, spec: RunSpec, job_spec: JobSpec, options: RunOptions) -> Run:
        """The run of a cluster that was taken over, with all that was written down of it. It stands paused."""
        from dtkit.history import engine_outbox
        from dtkit.history import run_log as spool
        from dtkit.training import recovered_state, recovery

        spec, options = _adapt_to_world_size(cluster.world_size, spec, options)
        run = cls(cluster, spec, job_spec, options, job)
        folder = cluster.folder / RUNS_FOLDER / job
        run.history.extend(spool.read_history(folder, ranks_per_replica=options.ranks_per_replica))
        RunLog(folder).start_recording(run.history)
        lost = cluster.find_lost_ranks()
        standings = recovery.query_positions(cluster, job, lost)
        ranks = range(cluster.world_size)
        left = {rank: engine_outbox.read_dispatches(cluster.folder, job, rank) for rank in ranks}
        found_last = {rank: engine_outbox.read_evaluations(cluster.folder, job, rank) for rank in ranks}
        common = min((standing.step for standing in standings.values()), default=0)
        run._driver.replay_unread(left, found_last, common)
        if lost or len(standings) < cluster.world_size or recovery.is_out_of_sync(standings):
            found = run._recover(lost)
            step, run._driver.lr, source = found.step, found.lr, f" ({found.source})" if found.source else ""
        else:
            step, run._driver.lr, source = standings[0].step, standings[0].lr, ""
            if (
                state := recovered_state.load_interrupted(cluster.folder, job)
            ) is not None:  # and put back before that one died
                state.discard(cluster.folder, job)
        evaluated = max((one.step for one in run.history.evaluations), default=0)
        run._driver.restore_position(step, step, evaluated, elapsed_s=float(run.history.totals()["step_s"].sum()))
        last = next((e.kind for e in reversed(run.history.events) if e.kind in ("lost", "repair")), "repair")
        kind = "note" if last == "repair" else "repair"  # that one died before it could say so
        run.history.add(Event(step, kind, f"taken over at step {step}{source}", time.time()))
        run._driver.start()
        return run

    @property
    def is_released(self) -> bool:
        """Whether the engines have forgotten it."""
        return self._released

    def repair(self) -> None:
        """Go on from where survivors stand, with other engines in place of those that are gone."""
        self._check_not_released("run.repair()")
        if not self._driver.state.has_ended:
            self._call("repair")
        elif lost := self._cluster.find_lost_ranks():
            size = self._cluster.world_size
            self._driver.record_repair(lost, size, self._recover(lost))

    def _make_plan(self) -> RunPlan:
        evaluate, more = None, self._options
        if more.validation is not None:
            evaluate = self._make_evaluation_args(more.validation, more.metrics)
        callbacks = self._run_callbacks if more.callbacks else None
        return RunPlan(
            self._job,
            self.spec.steps,
            self.spec.steps_per_epoch,
            evaluate,
            callbacks,
            more.balanced_shard_sizes,
            self._recover,
            more.on_failure,
        )

    def _recover(self, lost_ranks: Sequence[int]) -> RecoveryResult:
        """Have the job made anew, and know of the ranks that are there then. Called on the driver's thread."""
        from dtkit.training.recovery import Recovery

        more, shrinks = self._options, self._options.on_failure == "shrink"
        recover = Recovery(
            self._cluster,
            self._job,
            self._job_spec,
            more.strategy,
            self.spec.batch_size,
            shrinks,
            self._snapshot_folder,
        )
        found = recover(lost_ranks)
        if self._cluster.world_size != self.spec.world_size:
            self.spec, self._options = _adapt_to_world_size(self._cluster.world_size, self.spec, more)
            self.history.ranks_per_replica = self._options.ranks_per_replica
            self._driver.plan = self._make_plan()
        self.delay_factors = {}  # the new jobs run at full speed
        return found

    def _run_callbacks(self) -> None:
        for callback in self._options.callbacks:
            callback(self)

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """State, step, epoch, seconds spent running and seconds left, as of now."""
        driver = self._driver
        finding = driver.stall_report
        return Status(
            state=driver.state,
            step=driver.step,
            steps=self.spec.steps,
            epoch=driver.step // self.spec.steps_per_epoch,
            elapsed_s=driver.elapsed_s,
            remaining_s=self._estimate_remaining_s(),
            message=self._message if finding is None else finding.text,
        )

    def _estimate_remaining_s(self) -> float | None:
        done, left = self._driver.step, self.spec.steps - self._driver.step
        if not done or self._driver.state.has_ended:
            return None
        recent = self.history.totals(max(0, self.history.num_steps - 50))["step_s"]
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
        from dtkit.history.timeline import Timeline, merge_spans

        spans = comm_time.split_wait_spans(
            message_times.split_wait_spans(merge_spans(*self._driver.recent_spans), self.history.ranks_per_replica)
        )
        return Timeline(spans, schedule=self._options.schedule, title=f" of {self.spec.name}")

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the last steps as a Chrome trace, which https://ui.perfetto.dev opens."""
        self.timeline.export_chrome_trace(path)

    @property
    def consistency(self) -> ReplicaCheckResult | None:
        """What the last comparison of the parameters over the ranks found; None before the first."""
        return self._driver.replica_checker.result

    @property
    def stall_report(self) -> StallReport | None:
        """Who keeps the others waiting now: rank, phase, line, for how many seconds; None while all is well."""
        return self._driver.stall_report

    # -- what one asks of it ----------------------------------------------------------------------------------

    def pause(self) -> int:
        """Let all ranks finish the same step and stand there. Returns how many steps were taken so far."""
        return self._call("pause")

    def resume(self) -> int:
        """Go on. Returns the step from which."""
        return self._call("resume")

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
            return self._take_steps(n)
        if n != 1:
            raise ValueError(f"step({n}, explain=True): one step is explained at a time; call run.step(explain=True)")
        if not self._options.supports_explain:
            raise RunError(
                f"{self.spec.strategy} has no whole gradients on each rank to be all-reduced, and nothing is cut or "
                "sent within a step: there is little to take apart. Train with DataParallel(), Pipeline(), Sharded() "
                "or TensorParallel() to see a step taken apart"
            )
        return self._explain_step()

    def _take_steps(self, n: int) -> int:
        try:
            taken = self._call("step", (n, False))
        except KeyboardInterrupt:
            self._pause_or_interrupt()
            raise
        if self.exception is not None:
            raise self.exception
        return taken

    def _explain_step(self) -> Explanation:
        from dtkit.explain import explain as explaining

        before = self._driver.step
        if self._call("step", (1, True)) == before:
            raise self.exception or RunError(f"the run has taken all of its {self.spec.steps} steps; run.extend() it")
        return explaining.build_explanation(self._driver.explain_reports, self.spec.name, self._cluster.clock_offsets)

    def inject_delay(self, rank: int, factor: float) -> int:
        """Have one rank's computing take `step_factor` times as long (it sleeps), for lessons and tests; 1 ends it.

        Every picture of the run says so. Returns the step at which it was asked for.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.spec.world_size:
            raise ValueError(f"slow(rank={rank!r}): there are ranks 0 to {self.spec.world_size - 1}")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _MAX_DELAY_FACTOR:
            raise ValueError(
                f"slow(factor={factor!r}): it must be a number from 1 (as fast as it is) to {_MAX_DELAY_FACTOR:g}"
            )
        self._check_not_released("slow")
        self._cluster.call_all("inject_delay", ranks=[rank], job=self._job, factor=float(factor))
        others = {r: f for r, f in self.delay_factors.items() if r != rank}
        self.delay_factors = others if factor == 1 else dict(sorted({**others, rank: float(factor)}.items()))
        self.note(f"node {rank} " + ("runs at full speed" if factor == 1 else f"slowed {factor:g}x on purpose"))
        return self._driver.step

    def inject_fault(self, name: str, rank: int) -> int:
        """End a rank's process, for lessons: ``run.drill("kill", 1)``. Returns the steps taken so far."""
        ranks = self._cluster.world_size
        if name != "kill" or isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
            raise ValueError(f"drill({name!r}, {rank!r}): it is drill('kill', rank), with a rank from 0 to {ranks - 1}")
        self._check_not_released("drill")
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
        return self._call("stop")

    def set(self, *, lr: float) -> int:
        """Give every rank a new learning rate, with the same step. Returns the first step that uses it.

        Further parameter groups keep their ratio to the first one.
        """
        return self._call("lr", _parse_lr(lr))

    def post(self, command: str, value: float | None = None) -> Future[int]:
        """Ask for "pause", "resume", "step", "stop" or "lr" (with `value`), without waiting: what buttons call.

        The answer will be how many steps were taken when it took effect on all ranks.
        """
        values = {"pause": None, "resume": None, "stop": None, "step": (1, False), "lr": value}
        if command not in values:
            raise ValueError(f"{command!r} is no command of a run; use pause, resume, step, stop or lr")
        return self._driver.submit(command, _parse_lr(value) if command == "lr" else values[command])

    def _call(self, command: str, value: Any = None) -> int:
        patience = self._cluster.call_timeout_s
        try:
            return self._driver.submit(command, value).result(patience)
        except TimeoutError:
            raise RunError(
                f"the engines did not come to the end of a step within {patience:.0f} s, so {command!r} did not take "
                "effect. cluster.interrupt() ends what they are doing, and the run"
            ) from None

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(self, path: str | Path | None = None, *, keep_last: int | None = None) -> CheckpointResult:
        """Write a checkpoint into a folder of its own in `path` (by default ``checkpoint_dir``), to train on from it later.

        While the run is RUNNING, after the step that is being taken; training goes on while ranks write. With `keep`,
        only so many checkpoints stay in `path`, the newest ones. Raises CheckpointError where it could not be written:
        the run and older checkpoints are as they were.
        """
        target = self._options.checkpoint_policy.folder if path is None else path
        if target is None:
            raise ValueError("save(): there is no path. Name a folder: run.save('checkpoints/first')")
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"save(keep={keep_last!r}): it is how many checkpoints stay; an integer from 1 up")
        self._check_not_released("save")
        save = CheckpointRequest(checkpoint.parse_path("save(path", target).absolute(), keep_last)
        if self._driver.state.has_ended:
            self._save_after_end(save)
        else:
            self._call("save", save)
        return save.result(self._cluster.call_timeout_s)

    def _save_after_end(self, request: CheckpointRequest) -> None:
        """There is no driver any more that could send it."""
        saver, step = self._driver.checkpoint_manager, self._driver.step
        saver.add_request(request)
        if saver.begin_next(step) is None:
            return
        try:
            values: list[Any] = self._cluster.call_all(
                "save_checkpoint", job=self._job, step=step, **request.make_args()
            )
        except DtkitError as error:
            saver.on_failure(request, step, error)
        else:
            saver.on_result(request, step, values)

    def _describe_for_checkpoint(self) -> dict[str, Any]:
        """What a checkpoint says of this run, besides its state on the engines."""
        from dtkit.training.resume import collect_callback_states

        callbacks = collect_callback_states(self._options.callbacks)
        found = {
            "spec": dataclasses.asdict(self.spec),
            "called": self._driver.last_callback_step,
            "callbacks": callbacks,
        }
        if self._options.validation is not None:
            found["evaluated"] = self._driver.evaluation_tracker.last_evaluated_step
        return found

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Until the run has left RUNNING, for whatever reason; raises what failed it.

        An interrupt pauses the run at a step boundary and is raised again. Raises TimeoutError after `timeout`
        seconds, with the run going on.
        """
        self._check_not_in_callback()
        with self._pause_on_interrupt():
            left = self._driver.wait(timeout)
        if not left:
            raise TimeoutError(
                f"the run is at step {self.status.step} of {self.spec.steps} after {timeout} s and goes on; wait "
                "again, or run.pause()"
            )
        self._finish_wait()

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
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
                    await asyncio.wait_for(news.wait(), _STATE_POLL_S)
        except asyncio.CancelledError:
            with contextlib.suppress(RunError):
                self.post("pause")
            raise
        finally:
            unsubscribe()
        await loop.run_in_executor(None, self._finish_wait)

    @contextlib.contextmanager
    def _pause_on_interrupt(self) -> Generator[None, None, None]:
        """While a cell blocks, it says so; an interrupt pauses the run, from the first moment on."""
        with contextlib.ExitStack() as after:
            try:
                self._show_blocking(after)
                yield
            except KeyboardInterrupt:
                self._pause_or_interrupt()
                raise

    def _show_blocking(self, exit_stack: contextlib.ExitStack) -> None:
        """Text progress in a terminal, and in a notebook a word on the buttons; `after` ends it."""
        from dtkit.dashboard import display
        from dtkit.dashboard.text import run_text as text

        if self._driver.state.has_ended:
            return
        if display.in_notebook():
            exit_stack.callback(self._set_message, "")
            self._set_message(_BUTTONS_BLOCKED_MESSAGE)
        else:
            exit_stack.callback(text.start_text_progress(self))

    def _set_message(self, message: str) -> None:
        self._message = message
        self._notify()

    def _pause_or_interrupt(self) -> None:
        """Pause at a step boundary; a second interrupt before it has breaks off what the engines do."""
        first = not self._driver.is_pausing
        with contextlib.suppress(RunError, TimeoutError):
            try:
                _wait_for_answer(self._driver.submit("pause" if first else "break"))
            except KeyboardInterrupt:
                _wait_for_answer(self._driver.submit("break"))
            except TimeoutError:
                if first:
                    self.note(
                        f"not paused after {_PAUSE_TIMEOUT_S:.0f} s: another interrupt breaks off what is under way"
                    )

    def _check_not_in_callback(self) -> None:
        if threading.current_thread().name == CALLBACK_THREAD_NAME:
            raise RunError("a callback can't wait for the run, which waits for its callbacks; return instead")

    def _finish_wait(self) -> None:
        """The run has left RUNNING: let its displays become pictures, and raise what failed it."""
        from dtkit.dashboard import display

        if self._driver.state.has_ended:
            # waits: Saver.join has a default timeout
            self._driver.checkpoint_manager.join()  # who waits for a run may go on from its last checkpoint
            display.wait_until_replaced(self)
        if self.exception is not None:
            raise self.exception

    # -- the model --------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model as trained so far: a new object in the notebook, on the CPU. Yours stays as it was."""
        return self._job_spec.model_handle.build_with_state(self._fetch_state_dict())

    def _fetch_state_dict(self) -> Mapping[str, Any]:
        """The whole model's state dict, as of the step that the run stands at."""
        if self._fetched_state is not None and (self._released or self._fetched_state[0] == self._driver.step):
            return self._fetched_state[1]
        if self._released:
            raise RunError(
                "this run was released, and its weights could not be fetched before (an engine was lost or stuck, or "
                "no step was made). Ask for run.model as soon as a run has ended"
            )
        before = self._driver.step
        state = state_dict.fetch_tensors(self._cluster, "state_dict_parts", self._job)
        if not self._is_running() and before == self._driver.step:
            self._fetched_state = before, state
        return state

    def evaluate(self, data: Any, metrics: Mapping[str, Callable[..., Any]] | None = None) -> Evaluation:
        """Loss and metrics over `data` (arrays, a Dataset, a function or a Partition), each rank taking a part.

        `metrics` are those given to `train` unless named here. The result is exact for any number of samples.
        """
        self._check_not_released("evaluate")
        placed = distribute.distribute_validation_data(self._cluster, data, training_data=self._job_spec.data_handle)
        args = self._make_evaluation_args(placed, self._options.metrics if metrics is None else metrics)
        step = self._driver.step
        return combine_evaluations(step, self._cluster.call_all("evaluate", job=self._job, **args))

    def _make_evaluation_args(self, data: DataHandle, metrics: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
        per_rank = -(-self.spec.batch_size // self.spec.world_size)
        program = self._cluster.dumps(dict(metrics), name="metrics")
        return {"data": data.key, "program": program, "batch_size": per_rank, "loading": self._job_spec.loading}

    def memory(self, plan: Plan | None = None) -> Memory:
        """What each rank's memory is filled with, as measured; with what `plan` (a cluster.plan) said behind it.

        Parameters, gradients and optimiser state are counted on the engines now, and the peak is the most that each
        process grew to while this run took steps.
        """
        from dtkit.planning.memory_report import Memory

        self._check_not_released("memory")
        step, found = self._driver.step, self._cluster.call_all("memory_usage", job=self._job)
        return Memory.from_reports(self.spec.name, self.spec.strategy, step, found, plan)

    def placement(self) -> Any:
        """Which part of the model lies where, as the engines placed it: a table, by the strategy.

        Of a Pipeline its stages, with what their layers were measured to cost; of TensorParallel what each module is
        cut into. None where every rank has the whole model, or an even part of every parameter.
        """
        self._check_not_released("placement")
        return self._cluster.call_all("model_placement", ranks=[0], job=self._job)[0]

    def verify(self, steps: int = 20) -> Verification:
        """Is this training the same as in one process? Prints the answer, and returns it.

        The first `steps` steps are taken again from the kept start, once on all ranks and once on one engine alone with
        the same rows; the parameters are then compared. Neither touches the run.
        """
        from dtkit.training import verify

        if self._is_running():
            raise RunError("verify needs the engines to itself; call run.pause() first, then run.resume()")
        self._check_not_released("verify")
        found = verify.verify(
            self._cluster, self._job_spec, min(steps, self.spec.steps), self._options.equivalence_notes
        )
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
            raise RunError(f"{word}. {RETRAIN_HINT}" if self._driver.state is State.FAILED else word)
        self._check_not_released("extend")
        if not self._driver.join(_JOIN_TIMEOUT_S):
            raise RunError(
                f"the run has ended, and a view has not yet taken that in after {_JOIN_TIMEOUT_S:.0f} s; try again"
            )
        self.spec = dataclasses.replace(self.spec, steps=self._driver.step + more)
        self._driver.plan = self._make_plan()
        self._driver.start()
        self._update_persisted()
        self.resume()

    def release(self) -> None:
        """Free the engines' copy of the model, after fetching its weights. A paused run is stopped. Idempotent."""
        if self._released:
            return
        if self._is_running():
            raise RunError(f"this run is at step {self.status.step} of {self.spec.steps}; run.stop() it first")
        if not self._driver.state.has_ended:
            self.stop()
        self._try_fetch_state_dict()
        self._released = True
        self._unload_job()
        written = self.history.run_log
        self.history.close_run_log()
        if self._cluster.is_superseded:  # what lies in its folder is another notebook's now
            return
        shutil.rmtree(self._snapshot_folder, ignore_errors=True)
        if written is not None:
            written.remove()

    def _unload_job(self) -> None:
        """Have the engines let go of the job, so far as they have one."""
        with contextlib.suppress(DtkitError):
            self._cluster.call_all("release", keys=[*self._job_spec.owned_keys, self._job])
            self._cluster.set_job_flag(present=False)

    def on_cluster_closing(self) -> None:
        """The cluster is closing: end, keeping the weights where the engines still give them."""
        stands = self._driver.shut_down(timeout=3.0)
        self._driver.checkpoint_manager.close(timeout=10.0)
        if stands and self._driver.step and not self._released:
            with contextlib.suppress(DtkitError):
                state = state_dict.fetch_tensors_within(
                    self._cluster, "state_dict_parts", self._job, _FINAL_FETCH_TIMEOUT_S
                )
                self._fetched_state = self._fetched_state if state is None else (self._driver.step, state)
        self.history.close_run_log()
        self._released = True

    def _try_fetch_state_dict(self) -> None:
        """An engine that is gone can't give its weights; then there are none to keep."""
        try:
            self._fetched_state = self._driver.step, self._fetch_state_dict()
        except DtkitError as error:
            _log.warning("the weights of %s were not kept: %s", self.spec.name, error)

    def _is_running(self) -> bool:
        return self._driver.state in (State.PENDING, State.RUNNING)

    def _check_not_released(self, action: str) -> None:
        if self._released:
            raise RunError(
                f"{action} needs the job on the engines, and this run was released: by run.release(), by a later train "
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
        if self._driver.plan.steps != self.spec.steps:  # a stream ended before them
            route = self._driver.plan
            self.spec = dataclasses.replace(self.spec, steps=route.steps, steps_per_epoch=route.steps_per_epoch)
        with self._callbacks_lock:
            callbacks = list(self._callbacks)
        notify_views(callbacks, self.spec.name)

    def figure(self) -> Figure:
        """The run as a matplotlib Figure, at any time: loss and throughput, per node and together."""
        from dtkit.dashboard.figures import run_figure

        return run_figure.draw_run(self)

    def __repr__(self) -> str:
        from dtkit.dashboard.text import run_text as text

        return text.format_run(self)

    def dashboard(self, *, fault_injection: bool = False) -> None:
        """Show the dashboard here, as `run` in the last line of a cell does.

        With ``drills=True`` it can also slow nodes down and end them, for lessons.
        """
        from dtkit.dashboard import display

        display.show(self, fault_injection=fault_injection)

    def report(self, path: str | Path, *, single_process: Run | History | None = None) -> None:
        """Write the run as one HTML file that needs nothing else: figures, nodes, versions, schedule and events.

        `alone`: the same training in one process (a run on one engine, or its history), to say how it scales.
        """
        from dtkit.dashboard import report

        report.write_report(self, path, single_process=single_process.history if isinstance(single_process, Run) else single_process)

    def _ipython_display_(self) -> None:
        from dtkit.dashboard import display

        display.show(self)


def _adapt_to_world_size(world_size: int, spec: RunSpec, options: RunOptions) -> tuple[RunSpec, RunOptions]:
    """What was asked for, for as many ranks as there are: some may have been left out since."""
    if world_size == spec.world_size:
        return spec, options
    even = None if options.balanced_shard_sizes is None else (1,) * world_size
    copies = world_size // options.strategy.build_mesh(world_size).num_replicas
    return dataclasses.replace(spec, world_size=world_size), dataclasses.replace(
        options, balanced_shard_sizes=even, ranks_per_replica=copies
    )


def _wait_for_answer(answer: Future[int]) -> None:
    """Wait for an answer in short parts: a signal that another thread received is seen between two of them."""
    deadline = time.monotonic() + _PAUSE_TIMEOUT_S
    while not answer.done() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            answer.result(_ANSWER_POLL_S)
    answer.result(0)


def _parse_lr(lr: Any) -> float:
    try:
        value = float(lr)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"lr={lr!r}; a learning rate is a finite number from 0 up")
    return value
