"""The handle of a training run, with which users pause, watch and await it, and get its model.

A run has three parts with one owner each. The :class:`~dtkit.training.config.RunPlan` has the arguments and the
decisions made from them. The *job* on the engines has model, optimizer and position in the data. The driver
(:mod:`dtkit.training.driver`) has state, step and exception. This handle reads them and passes commands on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, SupportsFloat

from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import hide_constructor, hide_from_completion
from dtkit._util.deadline import Deadline
from dtkit.errors import RunError
from dtkit.history.history import History
from dtkit.history.speed import compute_speed
from dtkit.history.workload import EFFICIENCY_STEPS, Efficiency
from dtkit.training import profiling
from dtkit.training.callbacks import call_callbacks
from dtkit.training.driver import Driver
from dtkit.training.job_client import JobClient
from dtkit.training.learning_rate import parse_lr, warn_of_jump
from dtkit.training.lifecycle import RunLifecycle
from dtkit.training.run_waiting import RunWaiter
from dtkit.training.settings import get_step_settings
from dtkit.training.shown_run import ShownRun
from dtkit.training.step_callbacks import StepCallbacks
from dtkit.types import NodeList, State

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from dtkit.checkpoint.result import CheckpointResult
    from dtkit.explain.base import Explanation
    from dtkit.health.stall_report import StallReport
    from dtkit.history.profile import Profile
    from dtkit.history.timeline import Timeline
    from dtkit.planning.memory_report import Memory
    from dtkit.planning.plan import Plan
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.verification import Verification
    from dtkit.training.config import RunPlan
    from dtkit.types import Evaluation, ReplicaCheckResult, RunSpec, Status


@hide_constructor
@suggest_attributes("run")
@hide_from_completion("delay_factors", "ended_engines", "is_released", "lifecycle", "post", "subscribe")
@explain_arguments
class Run(ShownRun):
    """One training on a cluster, which ``cluster.train(...)`` returns. As the last line of a cell, it is a dashboard::

        run.pause()  # all ranks, after the same step
        run.set(lr=0.01)
        run.step(3)  # takes three steps
        run.resume()
        await run  # in a script, run.wait(); then run.model is the trained model

    ``run.pause()``, ``step()``, ``set(lr=...)`` and ``stop()`` return the step at which they took effect on all ranks.
    ``await run``, ``run.wait()`` and ``run.result()`` wait for the end, also through a pause. They raise the run's
    error, or :class:`~dtkit.errors.PausedError` if the run paused because it needs its caller. Every `timeout` is in
    seconds: a call that takes longer raises TimeoutError, and the run goes on. A call that the run's state does not
    allow raises :class:`~dtkit.errors.RunError`.
    """

    lifecycle: RunLifecycle

    def __init__(self, engine_group: EngineGroup, plan: RunPlan) -> None:
        super().__init__(History(ranks_per_replica=plan.options.ranks_per_replica))
        self.history.directions = dict(plan.spec.directions)
        self._engine_group = engine_group
        driver = self._driver = Driver(engine_group, plan, self.history, self._notify, self._run_callbacks)
        self._step_callbacks = StepCallbacks(plan.options.callbacks, self, driver)
        self._job = JobClient(engine_group, driver)
        self._waiter = RunWaiter(
            self,
            driver,
            lambda: engine_group.call_timeout_s,
            self._notify,
            self._step_callbacks.finish,
            self._failure_notice.mark_seen,
        )
        self._verification: Verification | None = None
        self._verified_spec: tuple[object, ...] = ()
        self.lifecycle = RunLifecycle(engine_group, driver, self._job, self._notify)

    def _notify(self) -> None:
        self._failure_notice.update(self._driver.progress)
        self._step_callbacks.notify()
        self._subscribers.notify(self.spec.name)

    def _run_callbacks(self) -> None:
        call_callbacks(self._plan.options.callbacks, self)

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def _plan(self) -> RunPlan:
        return self._driver.progress.plan

    @property
    def spec(self) -> RunSpec:
        """The arguments of the training."""
        return self._plan.spec

    @property
    def status(self) -> Status:
        """Current state, step, epoch (the first one is 1), seconds spent running and seconds left."""
        report = self.stall_report
        describe = self._waiter.describe if report is None else lambda _state: report.text
        return self._driver.progress.make_status(describe)

    @property
    def is_released(self) -> bool:
        """Whether the engines have freed the job."""
        return self._job.is_released

    @property
    def nodes(self) -> NodeList:
        """The engines, by rank."""
        return NodeList(self._engine_group.nodes)

    @property
    def lr(self) -> float | None:
        """The learning rate in effect (of the first parameter group)."""
        return self._driver.progress.lr

    @property
    def exception(self) -> BaseException | None:
        """The error that failed the run, or made it pause; None if there was none."""
        return self._failure_notice.read(self._driver.progress.exception)

    @property
    def delay_factors(self) -> Mapping[int, float]:
        """Ranks that are slowed on purpose, with the factor."""
        return self._driver.progress.delay_factors

    @property
    def verification(self) -> Verification | None:
        """The result of the last `verify`; None before, and after the ranks, the batch or the strategy changed."""
        return self._verification if self._verified_spec == get_step_settings(self.spec) else None

    @property
    def timeline(self) -> Timeline:
        """Picture of when each rank did what in the last steps; of a pipeline also the bubble."""
        return self._driver.progress.recorder.make_timeline(self._plan.options.schedule, self.spec.name)

    @property
    def consistency(self) -> ReplicaCheckResult | None:
        """The last comparison of parameters over the ranks; None before the first."""
        return self._driver.replica_check.checker.result

    @property
    def stall_report(self) -> StallReport | None:
        """The rank that the others wait for, with its phase, line and seconds; None while every rank makes progress."""
        return self._driver.calls.stall_detector.stall_report

    @property
    def ended_engines(self) -> Mapping[int, str] | None:
        """Why the engines of ranks are gone that have ended, also since the run did; None once nobody watches them."""
        return self._engine_group.describe_ended_engines()

    @property
    def model(self) -> Any:
        """The model as trained so far, in the notebook and on the CPU. Yours stays as it was.

        It is fetched from the engines, and stays the same object while the run is at the same step.
        """
        return self._job.fetch_model()

    # -- commands ---------------------------------------------------------------------------------------------

    def pause(self, timeout: float | None = None) -> int:
        """Let all ranks finish the same step, and pause. Returns the number of steps taken so far.

        Raises TimeoutError, which names the rank that is stuck, if that takes longer than `timeout` seconds. Without a
        `timeout`, it waits as long as a collective may take, but only ten seconds for a stuck rank.
        """
        return self._waiter.call("pause", timeout=timeout)

    def resume(self, timeout: float | None = None) -> None:
        """Continue after a pause, from the same step."""
        self._waiter.call("resume", timeout=timeout)

    def step(self, n: int = 1, *, timeout: float | None = None) -> int:
        """Take `n` steps while paused. Returns the number of steps taken so far. Raises the run's error if it fails."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"step({n!r}): the number of steps must be an integer from 1 up")
        num_taken = self._take_steps(n, explain=False, timeout=timeout)
        if self.exception is not None:
            raise self.exception
        return num_taken

    def _take_steps(self, n: int, *, explain: bool, timeout: float | None) -> int:
        try:
            return self._waiter.call("step", (n, explain), timeout=timeout)
        except KeyboardInterrupt:
            self._waiter.pause_or_interrupt()
            raise

    def explain_step(self, timeout: float | None = None) -> Explanation:
        """Take one step while paused, and explain it.

        For replicas: each rank's rows, loss and gradients, their sum, and the update. For a pipeline: the activations
        and gradients that stages send to each other. For sharded parameters: the collectives with their bytes.
        """
        from dtkit.explain import explain

        self._job.check_explainable()
        before = self._driver.progress.step
        if self._take_steps(1, explain=True, timeout=timeout) == before:
            raise self.exception or RunError(f"the run has taken all of its {self.spec.steps} steps; run.extend() it")
        reports = self._driver.steps.explain_reports
        return explain.build_explanation(reports, self.spec.name, self._engine_group.membership.clock_offsets)

    def stop(self, timeout: float | None = None) -> int:
        """End the run at a step boundary; it keeps model and history. Returns the number of steps taken."""
        if self._driver.progress.state in (State.STOPPED, State.COMPLETED):
            return self._driver.progress.step
        return self._waiter.call("stop", timeout=timeout)

    def set(self, *, lr: float, timeout: float | None = None) -> int:
        """Set a new learning rate on every rank from the same step on. Returns the first step that uses it.

        Further parameter groups keep their ratio to the first one. A rate far from the last one gives a warning.
        """
        value = parse_lr(lr)
        warn_of_jump(self.history, self.lr, value)
        return self._waiter.call("lr", value, timeout)

    def post(self, command: str, value: float | None = None) -> Future[int]:
        """Request "pause", "resume", "step", "stop" or "lr" (with `value`) without waiting, as buttons do.

        The future returns the number of steps taken when the command took effect on all ranks.
        """
        values = {"pause": None, "resume": None, "stop": None, "step": (1, False), "lr": value}
        if command not in values:
            raise ValueError(f"{command!r} is not a command of a run; use pause, resume, step, stop or lr")
        return self._driver.submit(command, parse_lr(value) if command == "lr" else values[command])

    def note(self, text: str) -> None:
        """Add a line to the run's log, at the present step."""
        self._driver.progress.add_event("note", str(text))
        self._notify()

    def inject_delay(self, rank: int, factor: float, *, timeout: float | None = None) -> None:
        """Make one rank's computing take `factor` times as long (it sleeps), for lessons. A factor of 1 ends that."""
        self.note(self._job.inject_delay(rank, factor, timeout))

    def inject_fault(self, name: str, rank: int, *, timeout: float | None = None) -> None:
        """End a rank's process, for lessons: ``run.inject_fault("kill", 1)``. The run's log has the step."""
        self.note(self._job.check_fault(name, rank))
        self._job.kill(rank, timeout)

    def save(
        self,
        path: str | Path | None = None,
        *,
        format: str = "dtkit",  # noqa: A002 - a format is one
        keep_last: int | None = None,
        timeout: float | None = None,
    ) -> CheckpointResult:
        """Write a checkpoint, to resume from later, into a new folder in `path`.

        By default, `path` is ``checkpoint_dir``, or else a folder of this run's own in "checkpoints". While the run is
        RUNNING, the checkpoint has the state after the current step, and training continues while ranks write. With
        `keep_last`, only the newest ones stay. Raises CheckpointError if it could not be written; the run and older
        checkpoints are then unchanged. For another `format`, `path` will have the model; see
        :meth:`dtkit.Checkpoint.export`.
        """
        if format != "dtkit":
            return self.lifecycle.export(lambda folder: self.save(folder, timeout=timeout), path, format)
        request = self._job.make_checkpoint_request(path, keep_last)
        if self._driver.progress.state.has_ended:
            self._job.save_after_end(request)
        else:
            self._waiter.call("save", request, timeout)
        return request.result(self._engine_group.call_timeout_s if timeout is None else timeout)

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the run has ended, and raise its error if it failed.

        An interrupt pauses the run at a step boundary, and is raised again. Raises TimeoutError after `timeout`
        seconds; the run continues. Raises PausedError if the run paused because it needs its caller. Without a
        `timeout`, it also raises PausedError if the run is paused when the wait begins.
        """
        self._waiter.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait as `wait` does; return the trained model."""
        self._waiter.wait(timeout)
        return self.model

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self._driver.progress.state.has_ended

    def __await__(self) -> Generator[Any, None, None]:
        return self._waiter.wait_async().__await__()

    # -- questions to the engines -----------------------------------------------------------------------------

    def evaluate(
        self,
        data: Any,
        metrics: Mapping[str, Callable[..., SupportsFloat]] | None = None,
        *,
        batch_size: int | None = None,
        timeout: float | None = None,
    ) -> Evaluation:
        """Return loss and metrics over `data` (arrays, a Dataset, a function or a Partition), split over the ranks::

            result = run.evaluate((X, y), {"accuracy": lambda out, target: (out.argmax(1) == target).float().mean()})
            result["accuracy"]

        By default, `metrics` and `batch_size`, the rows of all ranks, are the training's. The result is exact for any
        number of samples. A run before the current one sends its weights again, while no other run is training.
        """
        return self._job.evaluate(data, metrics, batch_size, timeout)

    def memory(self, plan: Plan | None = None, *, timeout: float | None = None) -> Memory:
        """Return the measured contents of each rank's memory, next to the prediction of `plan` (a cluster.plan).

        Parameters, gradients and optimizer state are the current ones; the peak is the largest memory of each process.
        Of a run that was released, as by the next training, it is the last measurement, if there was one.
        """
        return self._job.measure_memory(plan, timeout)

    def profile(self, steps: int = 3, *, timeout: float | None = None) -> Profile:
        """Take the next steps with torch's profiler on all ranks. Return the operators, and one trace of all ranks.

        A running run is paused for the profile, and continues afterwards. Results stay the same, but these steps take
        longer. ``profile.export_chrome_trace("trace.json.gz")`` writes the trace.
        """
        self._job.check_not_released("profile")
        return profiling.profile_steps(self, self._engine_group, self._plan.job, steps, timeout)

    def efficiency(self, *, timeout: float | None = None) -> Efficiency:
        """Return tokens per second, operations per second, and their share of the devices' peak (MFU).

        The first call counts the model's operations, on tensors without memory. From then on, views show the numbers.
        """
        workload = self.history.workload
        if workload is None:
            workload = self.history.workload = self._job.measure_workload(timeout)
            self._notify()
        rate = compute_speed(self.history, EFFICIENCY_STEPS).samples_per_s
        return Efficiency(workload, rate if math.isfinite(rate) else 0.0, self.spec.world_size)

    def placement(self, *, timeout: float | None = None) -> Any:
        """Return a table of each rank's part of the model; None for the whole, or an even part of each parameter."""
        return self._job.get_placement(timeout)

    def verify(self, steps: int = 20, *, timeout: float | None = None) -> Verification:
        """Check that this training equals training in one process. Shows the result once, and returns it.

        The first `steps` steps are repeated, on all ranks and on one engine alone with the same rows. The run itself
        isn't changed. Without a `timeout` in seconds, each call to the engines has the time limit of a collective.
        """
        verification = self._job.verify(steps, timeout)
        self._verification, self._verified_spec = verification, get_step_settings(self.spec)
        self._notify()
        verification.show()
        return verification

    # -- going on, and letting go -----------------------------------------------------------------------------

    def extend(self, *, epochs: int | None = None, steps: int | None = None, timeout: float | None = None) -> None:
        """Train for this many more epochs (or steps), with the current optimizer."""
        deadline = Deadline(timeout, "extend")
        self.lifecycle.extend(epochs=epochs, steps=steps, timeout=timeout)
        self.resume(deadline.get_remaining_s())

    def repair(self, timeout: float | None = None) -> None:
        """Replace engines that have ended, and continue at the survivors' step. It goes on after a TimeoutError."""
        self._job.check_not_released("run.repair()")
        if self._driver.progress.state.has_ended:
            self.lifecycle.repair(timeout)
        else:
            self._waiter.call("repair", timeout=timeout)

    def release(self, timeout: float | None = None) -> None:
        """Free everything that the engines hold for this run, after fetching its weights. Stops a paused run.

        Raises TimeoutError if the weights don't arrive within `timeout` seconds; the engines then keep the job.
        """
        deadline = Deadline(timeout, "release")
        if self._job.is_running:
            raise RunError(f"this run is at step {self.status.step:,} of {self.spec.steps:,}; run.stop() it first")
        if not self.done():
            self.stop(deadline.get_remaining_s())
        self.lifecycle.release(deadline)
