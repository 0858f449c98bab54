"""State of PyTorch's models, optimizers and samplers for `elastic.run`."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from dtkit.integrations.horovod import basics
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.torch.elastic_state import ObjectState, State, run
from dtkit.integrations.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class TorchState(ObjectState):
    """Models, optimizers, samplers and other objects of a training.

    model, optimizer : saved by their state dicts, as are further models, optimizers and `ElasticSampler` in `kwargs`.
    kwargs : other values are pickled. Each argument becomes an attribute.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {"model": model, "optimizer": optimizer} | kwargs
        self._handlers = {name: _Handler(value) for name, value in values.items() if _is_handled(value)}
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers and value is not handlers[name].value:
            handlers[name] = _Handler(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Save all parts."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore all parts."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Overwrite all parts with another rank's, and save them."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()


class ElasticSampler(Sampler[int]):
    """Sampler of one rank's part of a dataset. It keeps count of the epoch's processed samples.

    Call `record_batch` after each batch, and `set_epoch` at the end of an epoch. After a restore it continues with the
    remaining samples, divided among the ranks. `seed` must be the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.num_replicas, self.rank, self.num_samples, self.total_size = 1, 0, 0, 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` samples on each rank as processed."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from another sampler's state."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)  # noqa: S311 - no secret
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        repeated = self.remaining_indices[: self.total_size - len(self.remaining_indices)]
        return iter((self.remaining_indices + repeated)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class _Handler:
    """A model, an optimizer or a sampler with the last saved copy of its state dict."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        root = get_context().sync_root
        if isinstance(self.value, torch.nn.Module):
            broadcast_parameters(self.value.state_dict(), root)
        elif isinstance(self.value, torch.optim.Optimizer):
            broadcast_optimizer_state(self.value, root)
        else:
            # unpickles: sent by a rank of the same script
            self.value.load_state_dict(broadcast_object(self.value.state_dict(), root))
        self.save()


def _is_handled(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler))
