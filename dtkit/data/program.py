"""Pickled programs for measurements on engines: model, loss and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.data.broadcast import ModelHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.rpc.engine_group import EngineGroup


def pickle_program(
    engine_group: EngineGroup,
    model: Any,
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
    optimizer: Callable[..., Any],
    *,
    activation_checkpointing: bool | Sequence[str] = False,
) -> bytes:
    """Return the pickled program. It has the shapes of a model that was not sent yet."""
    from dtkit.strategies.class_weights import convert_class_weights
    from dtkit.strategies.loss import Loss
    from dtkit.strategies.meta_copy import copy_to_meta

    shapes = None if isinstance(model, ModelHandle) else copy_to_meta(model)
    return engine_group.uploads.dumps(
        (shapes, Loss(convert_class_weights(loss_fn), training_step), optimizer, activation_checkpointing), name="plan"
    )
