"""Models of other frameworks, which packages of `dtkit.integrations` turn into torch modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtkit.training.config import TrainConfig

_ADAPTERS = {"keras": "dtkit.integrations.keras.adapter"}
"""Module with a function ``adapt(model, config)``, by the top-level package of a model's class."""


def adapt_model(model: Any, config: TrainConfig) -> tuple[Any, TrainConfig]:
    """Return a torch module, and arguments for it; a torch model and its arguments are returned as they are."""
    for kind in type(model).__mro__:
        if (adapter := _ADAPTERS.get(kind.__module__.partition(".")[0])) is not None:
            adapted: tuple[Any, TrainConfig] = importlib.import_module(adapter).adapt(model, config)
            return adapted
    return model, config


def to_user_model(model: Any) -> Any:
    """Return the model in the form that the user gave, with the weights of a torch module that was made from it."""
    return model.to_user_model() if hasattr(model, "to_user_model") else model
