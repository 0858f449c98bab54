"""A trial as the objective sees it, on an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from dtkit._util.formatting import name_type
from dtkit.integrations.search.channel import EngineEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.integrations.search.channel import TrialStart

_Choice = TypeVar("_Choice", None, bool, int, float, str)

PRUNED = "pruned"
"""First element of the result of a trial that ended early."""


class TrialPruned(Exception):  # noqa: N818 - as Optuna calls it
    """An objective raises it to end a trial after :meth:`Trial.should_prune`. Optuna's own exception works too."""


class Trial:
    """One trial, with Optuna's methods to choose its parameters and to report intermediate values."""

    def __init__(self, start: TrialStart) -> None:
        self.number = start.number
        """Number of the trial, from 0 up."""
        self.params = dict(start.params)
        """Parameters that are chosen, by name."""
        self._channel = EngineEnd(start)

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Choose a number between `low` and `high`; with `log`, evenly in its logarithm."""
        return float(self._suggest("suggest_float", name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Choose an integer from `low` to `high`."""
        return int(self._suggest("suggest_int", name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[_Choice]) -> _Choice:
        """Choose one of `choices`."""
        chosen: _Choice = self._suggest("suggest_categorical", name, list(choices))
        return chosen

    def _suggest(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        self.params[name] = self._channel.ask(method, name, *args, **kwargs)
        return self.params[name]

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value, such as the loss after an epoch. Doesn't wait."""
        self._channel.tell("report", float(value), int(step))

    def should_prune(self) -> bool:
        """Return whether the trial should end because its reported values are bad. Raise TrialPruned then."""
        return bool(self._channel.ask("should_prune"))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Store a JSON value with the trial."""
        self._channel.tell("set_user_attr", key, value)


def run_trial(start: TrialStart, objective: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, float | None]:
    """Call the objective on an engine; return ("complete", value), or ("pruned", None)."""
    try:
        value = objective(Trial(start), *args, **kwargs)
    except Exception as error:
        if any(kind.__name__ == TrialPruned.__name__ for kind in type(error).__mro__):  # Optuna's, or this module's
            return PRUNED, None
        raise
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"the objective returned {name_type(value)}; it must return a number")
    return "complete", float(value)
