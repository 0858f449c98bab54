"""Making variables and objects equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.tensorflow.operations import broadcast
from dtkit.integrations.horovod.torch import allgather_object as gather
from dtkit.integrations.horovod.torch import broadcast_object as send

if TYPE_CHECKING:
    from collections.abc import Sequence


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrite variables, TensorFlow's or Keras's, with those of rank `root_rank`.

    inplace : accepted, but without effect.
    """
    for variable in variables:
        if _has_numbers(variable):
            variable.assign(broadcast(_read(variable), root_rank, process_set=process_set))


def _read(variable: Any) -> Any:
    """Return a variable's tensor. ``value`` is a property of Keras's variables, and a method of TensorFlow's."""
    return variable.value() if callable(variable.value) else variable.value


def _has_numbers(variable: Any) -> bool:
    """Return whether a variable has values to send; seeds of random layers are strings in some versions."""
    return bool(np.dtype(getattr(variable.dtype, "as_numpy_dtype", variable.dtype)).kind != "O")


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` on every rank. `session` must be None: sessions no longer exist."""
    _check_session(session)
    return send(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order. `session` must be None: sessions no longer exist."""
    _check_session(session)
    return gather(obj, name, process_set)


def _check_session(session: Any) -> None:
    if session is not None:
        raise NotImplementedError("sessions belong to TensorFlow 1; leave session out")


def broadcast_global_variables(root_rank: int) -> None:
    """Raise NotImplementedError: TensorFlow 2 has no list of all variables."""
    raise NotImplementedError(
        "TensorFlow 2 has no global variables; use broadcast_variables(model.variables, root_rank) instead"
    )
