"""Result of training boosted trees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util.formatting import format_count

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure


@dataclasses.dataclass
class BoostingResult:
    """The trained model and its metrics."""

    booster: Any
    """An ``xgboost.Booster``."""
    history: dict[str, dict[str, list[float]]]
    """Metrics by data ("train" and the names of `evals`), then by metric; one value a round, over all rows."""
    restarts: int = 0
    """Number of times that training was restarted after the loss of an engine."""
    is_complete: bool = True
    """False after an interrupt or an error."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds that the model has."""
        return int(self.booster.num_boosted_rounds())

    @property
    def best_iteration(self) -> int | None:
        """Round with the best metric, from 0, if `early_stopping_rounds` was given."""
        value = self.booster.attr("best_iteration")
        return None if value is None else int(value)

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return the predictions for rows, by the best rounds if the training stopped early."""
        import xgboost

        last = self.num_rounds if self.best_iteration is None else self.best_iteration + 1
        predictions: np.ndarray = self.booster.predict(xgboost.DMatrix(X), iteration_range=(0, last))
        return predictions

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each round and a column such as "train-rmse" for each metric."""
        import pandas as pd

        columns = {
            f"{data}-{name}": values for data, metrics in self.history.items() for name, values in metrics.items()
        }
        return pd.DataFrame(columns).rename_axis("round")

    def figure(self) -> Figure:
        """Return a figure with one axes for each metric and a line for each data set."""
        from dtkit.dashboard.figures import style
        from dtkit.dashboard.figures.render import create_figure

        names = list(dict.fromkeys(name for metrics in self.history.values() for name in metrics))
        figure = create_figure(5.5 * max(1, len(names)), 3.4)
        for ax, name in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names, strict=False):
            style.style_axes(ax)
            style.set_title(ax, name, "after each round")
            for k, (data, metrics) in enumerate(self.history.items()):
                values, color = metrics.get(name, []), style.COLORS[k % len(style.COLORS)]
                # Wider behind: lines of equal values are both seen.
                ax.plot(values, label=data, color=color, linewidth=max(1.2, 2.8 - 1.4 * k))
            if self.best_iteration is not None:
                ax.axvline(
                    self.best_iteration, color=style.MUTED_COLOR, linewidth=0.8, linestyle=":", label="best round"
                )
            ax.set_xlabel("round", fontsize=8)
            ax.legend(frameon=False, fontsize=8)
        return figure

    def __repr__(self) -> str:
        last = ", ".join(
            f"{data}-{name} {values[-1]:.6g}"
            for data, metrics in self.history.items()
            for name, values in metrics.items()
            if values
        )
        state = "" if self.is_complete else ", incomplete"
        best = "" if self.best_iteration is None else f", best round {self.best_iteration}"
        restarts = f", {format_count(self.restarts, 'restart')}" if self.restarts else ""
        return f"BoostingResult({format_count(self.num_rounds, 'round')}{best}{restarts}{state}: {last})"
