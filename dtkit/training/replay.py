"""Trainings that `verify` repeats from their start: on all ranks, and in one process, with the times of their steps."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.rpc.protocol import JobOperations, make_call
from dtkit.rpc.reference import StepTimes
from dtkit.training.core_disturbance import CoreDisturbance
from dtkit.training.state_dict import fetch_state_dict, load_payloads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit._util.deadline import Deadline
    from dtkit.messages import DispatchResult
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.reference import Reference, ReferenceReport
    from dtkit.training.config import JobSpec

    StateDict = Mapping[str, Any]

_WARM_UP_STEPS = 3
_MIN_TIMED_STEPS = 5


class Replay:
    """Repeated trainings of one job from its start. Each is freed at its end."""

    def __init__(self, engine_group: EngineGroup, job_spec: JobSpec, deadline: Deadline) -> None:
        self._engine_group, self._job_spec, self._deadline = engine_group, job_spec, deadline
        self._all_ranks_s: list[float] = []
        self._single_process_s: list[float] = []
        self._disturbance = CoreDisturbance(engine_group.nodes)

    def in_float64(self) -> Replay:
        """Return the same for trainings of a copy of the model in float64, on batches in float64."""
        return Replay(self._engine_group, dataclasses.replace(self._job_spec, in_float64=True), self._deadline)

    def get_step_times(self) -> StepTimes | None:
        """Return the medians of the first training and the first reference, without the steps that warm up."""
        times = self._all_ranks_s[_WARM_UP_STEPS:], self._single_process_s[_WARM_UP_STEPS:]
        num_steps = min(map(len, times))
        if num_steps < _MIN_TIMED_STEPS:
            return None
        all_ranks_s, single_process_s = map(statistics.median, times)
        if min(all_ranks_s, single_process_s) <= 0:
            return None
        return StepTimes(num_steps, all_ranks_s, single_process_s, others=self._disturbance.describe())

    def train(self, steps: int) -> StateDict:
        """Return the state dict of the model after distributed training."""
        state, _, self._all_ranks_s = self._train_job(steps, None)
        return state

    def train_reference(self, reference: Reference, steps: int) -> tuple[StateDict, ReferenceReport]:
        """Return the state dict of the model that rank 0 trained alone, and its report."""
        state, report, step_times = self._train_job(steps, reference)
        assert report is not None
        if not self._single_process_s:
            self._single_process_s = [
                step_s - extra_s for step_s, extra_s in zip(step_times, report.comparison_s, strict=False)
            ]
        return state, report

    def _train_job(
        self, steps: int, reference: Reference | None
    ) -> tuple[StateDict, ReferenceReport | None, list[float]]:
        """Return the state dict, the report of a reference, and the seconds of each step."""
        engine_group, deadline = self._engine_group, self._deadline
        job, ranks = engine_group.make_key("job"), None if reference is None else [0]
        try:
            self._job_spec.build(
                engine_group, job, ranks=ranks, reference=reference, timeout=deadline.get_remaining_s()
            )
            step_times = self._advance(job, steps, ranks)
            report = None
            if reference is not None:
                call = make_call(JobOperations.reference_report, job=job)
                payloads = engine_group.call_all(call, ranks=ranks, timeout=deadline.get_remaining_s())
                (report,) = load_payloads(payloads)
            return fetch_state_dict(engine_group, job, ranks, deadline.get_remaining_s()), report, step_times
        finally:
            engine_group.free_later(job)

    def _advance(self, job: str, steps: int, ranks: list[int] | None) -> list[float]:
        """Take the steps, and return the seconds of each, of the slowest rank."""
        done, step_times = 0, list[float]()
        while done < steps:
            call = make_call(JobOperations.advance, job=job, step=done, steps=steps - done)
            replies = self._engine_group.call_all(call, ranks=ranks, timeout=self._deadline.get_remaining_s())
            advance, _ = replies[0]
            step_times += map(max, zip(*(_list_step_times(result) for result, _ in replies), strict=False))
            if advance.end_reason == "nonfinite":
                raise ValueError(
                    f"the gradients are not finite at step {advance.step}, so there is nothing to compare after it. "
                    f"Verify fewer steps: run.verify(steps={max(1, advance.step)})"
                )
            if advance.end_reason == "exhausted":
                break
            done = advance.step
        return step_times


def _list_step_times(result: DispatchResult) -> list[float]:
    return [float(seconds) for seconds in np.asarray(result.rows)["step_s"]]
