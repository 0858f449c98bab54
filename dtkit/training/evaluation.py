"""When a run's held-out data is evaluated: at the end of every epoch, and where the run ends.

An evaluation stands between two steps like a step of its own: what comes after it (the next step, a save, callbacks,
the end) depends on it, since a schedule may. One that came to nothing is therefore due again before any of these. That
it may have had its effect on some ranks already does no harm: see
:meth:`dtkit.engine.lr_schedule.LearningRates.held_out`.
"""

from __future__ import annotations


class EvaluationTracker:
    """Those of one run. All is called by the run's driver."""

    def __init__(self) -> None:
        self.last_evaluated_step = 0
        """The step after which the last one was made."""
        self._last_requested_step = 0  # the same of those that are under way

    def is_due(self, step: int, steps_per_epoch: int, total_steps: int) -> bool:
        """Whether to evaluate after so many steps, of `last` in all: none is under way or made there."""
        return step > self._last_requested_step and (step % steps_per_epoch == 0 or step == total_steps)

    def on_sent(self, step: int) -> None:
        """It is asked for."""
        self._last_requested_step = step

    def mark_done(self, step: int) -> None:
        """It was made, or can't be: it is not asked for again."""
        self.last_evaluated_step = step
        self._last_requested_step = max(self._last_requested_step, step)

    def on_cancel(self) -> None:
        """Those that are under way came to nothing."""
        self._last_requested_step = self.last_evaluated_step

    def reset_to(self, step: int, last_evaluated_step: int | None = None) -> None:
        """The run goes on from `step`: what was evaluated beyond that will be again. `made`: only so far it was."""
        self.last_evaluated_step = self._last_requested_step = min(
            step, self.last_evaluated_step if last_evaluated_step is None else last_evaluated_step
        )
