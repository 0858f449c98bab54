"""When a run's held-out data is evaluated: at the end of every epoch, and where the run ends.

An evaluation stands between two steps like a step of its own: what comes after it (the next step, a save, callbacks,
the end) depends on it, since a schedule may. One that came to nothing is therefore due again before any of these. That
it may have had its effect on some ranks already does no harm: see :meth:`dtkit.engine.lr_schedule.Rates.held_out`.
"""

from __future__ import annotations


class Evaluations:
    """Those of one run. All is called by the run's driver."""

    def __init__(self) -> None:
        self.made = 0
        """The step after which the last one was made."""
        self._asked = 0  # the same of those that are under way

    def due(self, step: int, steps_per_epoch: int, last: int) -> bool:
        """Whether to evaluate after so many steps, of `last` in all: none is under way or made there."""
        return step > self._asked and (step % steps_per_epoch == 0 or step == last)

    def sent(self, step: int) -> None:
        """It is asked for."""
        self._asked = step

    def done(self, step: int) -> None:
        """It was made, or can't be: it is not asked for again."""
        self.made = step
        self._asked = max(self._asked, step)

    def withdrawn(self) -> None:
        """Those that are under way came to nothing."""
        self._asked = self.made

    def begin_at(self, step: int, made: int | None = None) -> None:
        """The run goes on from `step`: what was evaluated beyond that will be again. `made`: only so far it was."""
        self.made = self._asked = min(step, self.made if made is None else made)
