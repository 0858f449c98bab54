"""Models of other frameworks. Packages of `dtkit.integrations` convert them into torch modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtkit.training.config import TrainConfig

_ADAPTERS = {"keras": "dtkit.integrations.keras.adapter"}
"""Module with a function ``adapt(model, data, config)``, by the top-level package of a model's class."""


def adapt_model(model: Any, data: Any, config: TrainConfig) -> tuple[Any, Any, TrainConfig]:
    """Return a torch module with data and arguments for it. For a torch model, these are returned as they are."""
    for kind in type(model).__mro__:
        if (adapter := _ADAPTERS.get(kind.__module__.partition(".")[0])) is not None:
            adapted: tuple[Any, Any, TrainConfig] = importlib.import_module(adapter).adapt(model, data, config)
            return adapted
    return model, data, config


def to_user_model(model: Any) -> Any:
    """Return the model in the user's form, with the weights of the torch module that was made from it."""
    return model.to_user_model() if hasattr(model, "to_user_model") else model
