"""The trials of a search: a table, live and at the end, and a figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.table import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from dtkit.integrations.search.trial_record import TrialRecord

MAX_SHOWN_TRIALS = 12


class SearchResult:
    """The result of ``cluster.search``. A notebook shows a figure over a table, a terminal the table."""

    def __init__(self, name: str, direction: str, study: Any) -> None:
        self.name, self.direction = name, direction
        """"minimize" or "maximize"."""
        self.study = study
        """Optuna's study, for its own plots; None without Optuna."""
        self.trials: list[TrialRecord] = []

    @property
    def best_trial(self) -> TrialRecord:
        """The trial with the best value. Raises ValueError if none is complete."""
        best = self.find_best()
        if best is None:
            raise ValueError(f"no trial is complete: {self.describe()}")
        return best

    @property
    def best_params(self) -> dict[str, Any]:
        """Parameters of the best trial."""
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """Value of the best trial."""
        value = self.best_trial.value
        assert value is not None
        return value

    def find_best(self) -> TrialRecord | None:
        """Return the best trial, or None if none is complete."""
        known = [t for t in self.trials if t.state == "complete" and t.value is not None and not math.isnan(t.value)]
        return min(known, key=self._get_badness, default=None)

    def _get_badness(self, trial: TrialRecord) -> float:
        value = trial.value if trial.value is not None else trial.last_report
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.direction == "maximize" else value

    def describe(self) -> str:
        """Return the number of trials in each state, and the best value."""
        states = [trial.state for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        best = self.find_best()
        best_text = "" if best is None else f"; best {formatting.format_loss(best.value)} (trial {best.number})"
        return f"{counts or 'no trial yet'}{best_text}"

    def make_table(self, max_trials: int = MAX_SHOWN_TRIALS) -> Table:
        """Return running trials, then the others, best first."""
        order = sorted(self.trials, key=lambda trial: (trial.state != "running", self._get_badness(trial)))
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.params))
        header = ["trial", "state", "value", "step", *names, "node", "time"]
        rows = [[*_format_trial(trial, names)] for trial in order[:max_trials]]
        return Table(header, rows, {"state", *names})

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each trial, as Optuna's does. Needs pandas."""
        import pandas as pd

        rows = [
            {
                "number": trial.number,
                "value": trial.value,
                "state": trial.state,
                "seconds": trial.seconds,
                "rank": trial.rank,
                **{f"params_{name}": value for name, value in trial.params.items()},
            }
            for trial in self.trials
        ]
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """Return a matplotlib Figure of values by trial, and of the intermediate values that trials reported."""
        from dtkit.integrations.search.figure import draw_search

        title = f"search {self.name}: {self.describe()}"
        return draw_search(self.trials, self.find_best(), title, maximize=self.direction == "maximize")

    def format_text(self) -> str:
        """Return the headline and the table."""
        hidden = len(self.trials) - MAX_SHOWN_TRIALS
        more = f"\n  ... and {formatting.format_count(hidden, 'trial')} more" if hidden > 0 else ""
        return f"search {self.name}: {self.describe()}\n{self.make_table().to_text('  ')}{more}"

    def format_html(self) -> str:
        """Return the headline and the table as HTML."""
        headline = Table((), [[f"search {self.name}: {self.describe()}"]]).to_html()
        return f"{headline}{self.make_table().to_html()}"

    def __repr__(self) -> str:
        return self.format_text()

    def _repr_html_(self) -> str:
        from dtkit.dashboard.figures.render import format_img_tag

        return f"{format_img_tag(self.figure(), self.describe())}{self.format_html()}"


def _format_trial(trial: TrialRecord, names: list[str]) -> list[str]:
    value = trial.value if trial.value is not None else trial.last_report
    params = [_format_param(trial.params[name]) if name in trial.params else "" for name in names]
    return [
        str(trial.number),
        trial.state,
        formatting.format_loss(value),
        str(next(reversed(trial.reports), "")),
        *params,
        "" if trial.rank is None else str(trial.rank),
        formatting.format_duration(trial.seconds),
    ]


def _format_param(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else formatting.sanitize_text(str(value), 30)


_last_result: list[SearchResult] = []


def get_last_result() -> SearchResult | None:
    """Return the result of the last search, which may have been ended early; None before the first."""
    return _last_result[0] if _last_result else None


def set_last_result(result: SearchResult) -> None:
    """Keep the result of a search that begins."""
    _last_result[:] = [result]
