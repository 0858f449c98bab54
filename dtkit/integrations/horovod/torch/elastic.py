"""State that survives a failed collective: commit, restore, and an equal start on all ranks.

The ranks of a script stay the same: hosts never come or go. After a failed collective `run` restores the last commit,
forms the group again, and calls the function again. If a process ends, dtkit ends the others; start the script again.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils.data import Sampler

from dtkit._util import timeouts
from dtkit.integrations.horovod import basics
from dtkit.integrations.horovod.exceptions import HorovodInternalError
from dtkit.integrations.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_RESETS = 3  # without a commit in between: the error would only be repeated


class State:
    """Base class of what is committed and restored."""

    def __init__(self) -> None:
        self.num_commits = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these functions after each reset."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks, after the group was formed again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory. A failure returns to it."""
        self.save()
        self.num_commits += 1

    def check_host_updates(self) -> None:
        """Do nothing: the ranks of a script stay the same."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite the state with rank 0's, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new group; a subclass may override it."""


class ObjectState(State):
    """Objects that are pickled. Each keyword argument becomes an attribute."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._saved_state = kwargs
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep the attributes' current values."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Return the attributes to their saved values."""
        self._set_attributes()

    def sync(self) -> None:
        """Overwrite the attributes with rank 0's saved values."""
        if self._saved_state:
            self._saved_state = broadcast_object(self._saved_state)
            self._set_attributes()


class TorchState(ObjectState):
    """Models, optimizers, samplers and other objects of a training.

    model, optimizer : saved by their state dicts, as are further models, optimizers and `ElasticSampler` in `kwargs`.
    kwargs : other values are pickled. Each argument becomes an attribute.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer} | kwargs
        self._handlers = {name: _Handler(value) for name, value in given.items() if _is_handled(value)}
        super().__init__(**{name: value for name, value in given.items() if name not in self._handlers})
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
        """Overwrite all parts with rank 0's, and save them."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()


class ElasticSampler(Sampler[int]):
    """Sampler of one rank's part of a dataset, which remembers how many samples of the epoch are done.

    Call `record_batch` after each batch, and `set_epoch` at the end of an epoch. After a restore it continues with the
    samples that are left, shared among the ranks. `seed` must be the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002
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
        """Count a batch of `batch_size` samples on each rank as done."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many of its samples are done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from another sampler's state."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share the samples that are left among the current ranks."""
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
    """A model, an optimizer or a sampler with the copy of its state dict that was saved last."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if isinstance(self.value, torch.nn.Module):
            broadcast_parameters(self.value.state_dict(), root_rank=0)
        elif isinstance(self.value, torch.optim.Optimizer):
            broadcast_optimizer_state(self.value, root_rank=0)
        else:
            self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


def _is_handled(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler))


def run(func: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Decorate a training function whose first argument is a state.

    Rank 0's state is copied to all ranks, then the function is called. After HorovodInternalError the state returns to
    the last commit, the group is formed again, and the function is called again: three times without a commit at most.
    """

    @functools.wraps(func)
    def call(state: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        num_resets, num_commits = 0, state.num_commits
        while True:
            try:
                state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                num_resets = 1 if state.num_commits > num_commits else num_resets + 1
                num_commits = state.num_commits
                if num_resets > _MAX_RESETS or not basics.can_restart():
                    raise
                state.restore()
            basics.shutdown()
            basics.start(timeout_s=timeouts.HOROVOD_RESET_TIMEOUT_S)
            state.on_reset()

    return call  # type: ignore[return-value]  # the wrapper names its first argument
