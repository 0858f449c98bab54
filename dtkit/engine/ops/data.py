"""Data and models that the engine holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util.formatting import name_type
from dtkit.rpc.protocol import DataOperations, ModelOperations

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dtkit.engine.ops.state import EngineState
    from dtkit.rpc.payload import Payload


class DataOps(DataOperations):
    """See :class:`~dtkit.rpc.protocol.DataOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def load_data(self, *, key: str, payload: Payload, sizes: Sequence[int] | None) -> int | None:
        """Store data under `key`; return the number of rows, or None for a stream of unknown length."""
        from dtkit.engine.data.batches import Shards
        from dtkit.engine.data.iterable import StreamSource
        from dtkit.engine.data.sources import as_source

        loaded = self._state.load(payload)
        data, indices = (loaded(), None) if sizes is None else loaded
        source = as_source(data)
        if isinstance(source, StreamSource):
            self._state.streams[key] = source
            return None
        rows = range(len(source)) if indices is None else indices
        self._state.data[key] = source, Shards(rows, sizes or [len(source)])
        return len(source)

    def set_shards(self, *, key: str, indices: np.ndarray, sizes: Sequence[int]) -> None:
        """Set which rows of stored data belong to which shard."""
        from dtkit.engine.data.batches import Shards

        source, _ = self._state.data[key]
        self._state.data[key] = source, Shards(indices, sizes)

    def release(self, *, keys: Sequence[str]) -> None:
        """Free data, models and jobs."""
        self._state.release(keys)

    def repartition(self) -> None:
        """Partition all data into as many shards as there are ranks now."""
        from dtkit.engine.data.batches import Shards

        world_size = self._state.get_group().world_size
        for key, (source, shards) in self._state.data.items():
            rows = np.concatenate([shards.get_rows(shard) for shard in range(len(shards.sizes))])
            sizes = [len(part) for part in np.array_split(rows, world_size)]
            self._state.data[key] = source, Shards(rows, sizes)

    def export_data(self) -> Payload:
        """Return all data and models, for a new engine. It may be on a host without a copy of their buffers."""
        state = self._state
        models = {key: state.get_model(key) if _is_on_hosts(model) else model for key, model in state.models.items()}
        return state.pack((models, state.data, state.streams))

    def import_data(self, *, payload: Payload) -> None:
        """Store the data that another engine has exported."""
        state = self._state
        state.models, state.data, state.streams = payload.load()


def _is_on_hosts(model: torch.nn.Module | Payload) -> bool:
    """Return whether each of several hosts has a copy of a model's buffers."""
    return getattr(model, "host_buffers", None) is not None


class ModelOps(ModelOperations):
    """See :class:`~dtkit.rpc.protocol.ModelOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def store_model(self, *, key: str, payload: Payload) -> None:
        """Store a model that is mapped from a file when a job needs it."""
        self._state.models[key] = payload

    def receive_model(self, *, key: str, payload: Payload) -> str:
        """Store a model in memory; return the checksum of its state."""
        import torch

        model = self._state.load(payload)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"the payload holds {name_type(model)}; it must be a torch.nn.Module")
        self._state.models[key] = model
        return compute_model_checksum(model)

    def export_model(self, *, key: str) -> Payload:
        """Return a model as it was sent."""
        return self._state.pack(self._state.get_model(key))


def compute_model_checksum(model: torch.nn.Module) -> str:
    """Return a digest of all parameters and buffers, which depends on every bit. Twelve hexadecimal digits."""
    from dtkit.engine.observe.tensor_values import compute_digest

    return compute_digest(model.state_dict().items())
