"""Choice of parameters: Optuna's study, or a plain list of combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dtkit._util.formatting import name_type

if TYPE_CHECKING:
    from collections.abc import Sequence

Direction = Literal["minimize", "maximize"]


class Study(Protocol):
    """Interface that the driver needs of a study."""

    direction: str
    """"minimize" or "maximize"."""

    def ask(self) -> Any:
        """Return a new trial, with `number` and `params`, and the methods that an objective calls."""

    def tell(self, trial: Any, state: str, value: float | None) -> None:
        """Store how a trial has ended: "complete", "pruned" or "failed"."""


class OptunaStudy:
    """Optuna's study. Its sampler chooses parameters, and its pruner ends bad trials."""

    def __init__(self, study: Any) -> None:
        self.study = study
        if not (hasattr(study, "directions") and hasattr(study, "ask")):
            raise TypeError(f"study={study!r} is {name_type(study)}; give Optuna's, as optuna.create_study() makes it")
        if len(study.directions) != 1:
            raise ValueError(f"the study has {len(study.directions)} directions; cluster.search optimizes one value")
        self.direction = study.direction.name.lower()

    @classmethod
    def create(cls, direction: Direction, seed: int | None) -> OptunaStudy:
        """Return a new study, with Optuna's default sampler and pruner. Raises ImportError without Optuna."""
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                "cluster.search without a space needs Optuna: pip install 'dtkit-jupyter[optuna]'. Or give choices, as "
                "in space={'lr': [0.1, 0.01]}"
            ) from error
        sampler = optuna.samplers.TPESampler(seed=seed)
        return cls(optuna.create_study(direction=direction, sampler=sampler))

    def ask(self) -> Any:
        """Return a new trial of Optuna's."""
        return self.study.ask()

    def tell(self, trial: Any, state: str, value: float | None) -> None:
        """Store how a trial has ended."""
        from optuna.trial import TrialState

        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        self.study.tell(trial, value, states[state])


class GridStudy:
    """All combinations of some choices, in order, or some of them at random. Nothing is pruned."""

    def __init__(
        self, space: Mapping[str, Sequence[Any]], direction: Direction, n_trials: int | None, seed: int | None
    ) -> None:
        if not isinstance(space, Mapping):
            raise TypeError(f"space={space!r}; give lists of choices by name, as in space={{'lr': [0.1, 0.01]}}")
        for name, choices in space.items():
            if isinstance(choices, str) or not hasattr(choices, "__len__") or not len(choices):
                raise ValueError(f"space[{name!r}]={choices!r}; it must be a list of choices, such as [0.1, 0.01]")
        self.direction: str = direction
        combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
        if n_trials is not None and n_trials < len(combinations):
            combinations = random.Random(seed).sample(combinations, n_trials)  # noqa: S311 - no secret
        self._combinations = combinations
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._combinations)

    def ask(self) -> GridTrial:
        """Return a trial of the next combination."""
        trial = GridTrial(self._num_asked, self._combinations[self._num_asked])
        self._num_asked += 1
        return trial

    def tell(self, trial: Any, state: str, value: float | None) -> None:
        """Do nothing: the result has all trials."""


class GridTrial:
    """One combination. An objective may still call the methods of Optuna's trials."""

    def __init__(self, number: int, params: dict[str, Any]) -> None:
        self.number, self.params = number, params

    def _get(self, name: str, *_: Any, **__: Any) -> Any:
        if name not in self.params:
            raise ValueError(f"{name!r} is not in space=, which has {', '.join(self.params)}")
        return self.params[name]

    suggest_float = suggest_int = suggest_categorical = _get

    def report(self, value: float, step: int) -> None:
        """Do nothing: the driver keeps the reported values."""

    def should_prune(self) -> bool:
        """Return False: only Optuna has pruners."""
        return False

    def set_user_attr(self, key: str, value: Any) -> None:
        """Do nothing."""
