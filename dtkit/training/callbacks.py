"""Ready-made callbacks: functions of the run that ``cluster.train(callbacks=[...])`` calls after every epoch."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.training.run import Run


class EarlyStopping:
    """Stop a run whose metric has not become better for `patience` epochs in a row.

    Parameters
    ----------
    patience
        Epochs without a better value that are put up with.
    metric
        "loss", or a name given to ``metrics``: of the held-out data where there is `validation`; without, the mean loss
        of training over the epoch.
    min_delta
        How much better counts as better.
    largest
        Whether larger is better, as for an accuracy.

    """

    def __init__(
        self, patience: int = 3, *, monitor: str = "loss", min_delta: float = 0.0, largest: bool = False
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience={patience!r}; it must be a number of epochs from 1 up")
        if not (isinstance(min_delta, int | float) and min_delta >= 0):
            raise ValueError(f"min_delta={min_delta!r}; it must be a number from 0 up")
        self.patience, self.monitor, self.min_delta, self.largest = patience, monitor, min_delta, largest
        self._is_restored = False
        self._reset(None)

    def _reset(self, run: Run | None) -> None:
        self._run = None if run is None else weakref.ref(run)
        self.best = -math.inf if self.largest else math.inf
        """The best value so far."""
        self.best_epoch = 0
        self._epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"best": self.best, "best_epoch": self.best_epoch, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the next run that calls, as if it were the one that was saved."""
        self.best, self.best_epoch, self._epoch = state["best"], state["best_epoch"], state["epoch"]
        self._is_restored = True

    def __call__(self, run: Run) -> None:
        """Look at the epoch that has just ended. With another run than the last time, begin anew."""
        if self._is_restored:
            self._run, self._is_restored = weakref.ref(run), False
        elif self._run is None or self._run() is not run:
            self._reset(run)
        self._epoch += 1
        value = self._get_value(run)
        gain = value - self.best if self.largest else self.best - value
        if gain > self.min_delta:
            self.best, self.best_epoch = value, self._epoch
        elif self._epoch - self.best_epoch >= self.patience:
            run.note(
                f"stopped early after epoch {self._epoch}: {self.monitor} {value:.4g}, and the best was "
                f"{self.best:.4g}, after epoch {self.best_epoch}"
            )
            run.stop()

    def _get_value(self, run: Run) -> float:
        if run.history.evaluations:
            values = run.history.evaluations[-1].values
            if self.monitor not in values:
                raise ValueError(
                    f"EarlyStopping(monitor={self.monitor!r}), but what is evaluated is {', '.join(values)}"
                )
            return values[self.monitor]
        if self.monitor != "loss":
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}) needs held-out data: cluster.train(validation=...)"
            )
        rows = run.history.totals(max(0, run.history.num_steps - run.spec.steps_per_epoch))
        return float((rows["loss"] * rows["weight"]).sum() / rows["weight"].sum())

    def __repr__(self) -> str:
        return f"EarlyStopping(patience={self.patience}, metric={self.monitor!r}, best={self.best:.4g})"
