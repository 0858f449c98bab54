"""Checks of the arguments of `cluster.train_xgboost`, before anything is sent."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from dtkit._util.formatting import name_type

TRAIN = "train"
"""Name of the training data where metrics are shown."""
_OWN_ARGUMENTS = {
    "params",
    "dtrain",
    "num_boost_round",
    "evals",
    "evals_result",
    "early_stopping_rounds",
    "verbose_eval",
}
_OWN_ARGUMENTS |= {"callbacks"}


def check_arguments(params: Any, num_boost_round: Any, evals: Any, early_stopping_rounds: Any) -> None:
    """Raise TypeError or ValueError for invalid arguments."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params={params!r}; give XGBoost's parameters by name, as in {{'objective': 'binary:logistic'}}"
        )
    _check_rounds("num_boost_round", num_boost_round)
    if evals is not None and not isinstance(evals, Mapping):
        raise TypeError(
            f"evals is {name_type(evals)}; give validation data by name, as in "
            'evals={"validation": (X_validation, y_validation)}'
        )
    if TRAIN in (evals or {}):
        raise ValueError("evals has the name 'train', which is that of the training data; choose another name")
    if early_stopping_rounds is None:
        return
    _check_rounds("early_stopping_rounds", early_stopping_rounds)
    if not evals:
        raise ValueError('early_stopping_rounds needs evals, as in evals={"validation": (X_validation, y_validation)}')


def _check_rounds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}; it must be a number of rounds, at least 1")


def check_options(options: Mapping[str, Any], xgboost: Any) -> None:
    """Raise TypeError for options that ``xgboost.train`` doesn't have, or that dtkit sets itself."""
    known = sorted(set(inspect.signature(xgboost.train).parameters) - _OWN_ARGUMENTS)
    for name in options:
        if name in _OWN_ARGUMENTS:
            raise TypeError(
                f"{name}= can't be given, since dtkit shows the rounds and keeps their metrics; leave it out"
            )
        if name not in known:
            similar = difflib.get_close_matches(name, ["num_boost_round", *known], n=1)
            hint = f"did you mean {similar[0]}=?" if similar else f"it takes {', '.join(known)}"
            raise TypeError(f"Cluster.train_xgboost() has no argument {name}=; {hint}")
    start = options.get("xgb_model")
    if start is not None and not hasattr(getattr(start, "booster", start), "save_raw"):
        raise TypeError(
            f"xgb_model={start!r}; give the result of a training, or a booster, as in "
            'xgb_model=xgboost.Booster(model_file="model.ubj")'
        )
