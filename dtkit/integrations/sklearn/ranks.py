"""Sums over ranks, and this process's rows. The same code fits with one process and with many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dtkit.integrations.shards import read_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Ranks(Protocol):
    """The processes that fit together."""

    size: int

    def sum(self, *arrays: Any) -> list[np.ndarray]:
        """Return the sums of float64 arrays over all ranks, by one all-reduce. All ranks get the same bits."""

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Return each rank's array. All have the same shape."""

    def log(self, **numbers: float) -> None:
        """Show numbers of this rank while the others wait."""


class OneProcess:
    """A fit without engines."""

    size = 1

    def sum(self, *arrays: Any) -> list[np.ndarray]:
        """Return the arrays."""
        return [np.asarray(array, dtype=np.float64) for array in arrays]

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the array."""
        return [array]

    def log(self, **numbers: float) -> None:
        """Do nothing."""


class AllRanks:
    """The ranks of the engines' process group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.size = dist.get_world_size()

    def sum(self, *arrays: Any) -> list[np.ndarray]:
        """Return the sums."""
        import torch
        import torch.distributed as dist

        parts = [np.asarray(array, dtype=np.float64) for array in arrays]
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
        dist.all_reduce(flat)
        sums = np.split(flat.numpy(), np.cumsum([part.size for part in parts])[:-1])
        return [total.reshape(part.shape) for total, part in zip(sums, parts, strict=True)]

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Return each rank's array."""
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(np.ascontiguousarray(array))
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor)
        return [part.numpy() for part in gathered]

    def log(self, **numbers: float) -> None:
        """Pass the numbers to `dtkit.log`."""
        from dtkit.engine.observe.call_output import log

        log(**numbers)


class ShardFit:
    """An estimator's fit on an engine, with the rows of its shard. Raises ValueError for values that are not finite.

    name : what the call's view shows, such as "KMeans.fit".
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, key: str, fit: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Call `fit` with the columns and numbers of this rank's rows."""
        columns, rows = read_shard(key)
        check_columns(columns)
        return fit(AllRanks(), columns, rows, **options)


def check_columns(columns: Sequence[np.ndarray]) -> None:
    """Raise ValueError unless the first column is a matrix, and all numbers are finite."""
    features = columns[0]
    if features.ndim != 2:
        raise ValueError(f"X has shape {features.shape}; it must be (rows, features), as in X.reshape(len(X), -1)")
    for name, column in zip("Xy", columns, strict=False):
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            fill = ", or fill them with sklearn.impute" if name == "X" else ""
            raise ValueError(f"{name} contains NaN or infinity; remove these rows{fill}")
