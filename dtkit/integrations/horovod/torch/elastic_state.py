"""State that survives a failed collective: commit, restore, and an equal start on all ranks.

After a failed collective `run` restores the last commit, forms the group again, and calls the function again. If a
rank's process is killed, its engine starts the script again, and the new process copies the others' state. If an engine
is lost, the notebook replaces it, or the script continues with fewer ranks (:mod:`dtkit.training.elastic_script`).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from dtkit.integrations.horovod import basics
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.exceptions import HorovodInternalError
from dtkit.integrations.horovod.torch.functions import broadcast_object
from dtkit.integrations.horovod.torch.operations import allgather
from dtkit.rpc.script_ranks import ELASTIC_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_RESETS = 5
"""Maximum of resets without a commit in between. An engine restarts a killed process three times, and may then be
replaced.
"""


class State:
    """Base class of states that can be committed and restored."""

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
        """Do nothing: ranks change only after a failed collective, which raises an error."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite the state with that of rank `get_context().sync_root`, and save it."""
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
        """Overwrite the attributes with another rank's saved values."""
        if self._saved_state:
            # unpickles: sent by a rank of the same script
            self._saved_state = broadcast_object(self._saved_state, get_context().sync_root)
            self._set_attributes()


def run(func: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Decorate a training function whose first argument is a state.

    The decorated function first copies the state of the rank with most commits to all ranks. After
    HorovodInternalError, it restores the last commit, forms the group again, maybe with fewer ranks, and calls your
    function again. It does so at most five times without a commit in between. Call no other collective before it, since
    a restarted process would wait for the others there.
    """

    @functools.wraps(func)
    def call(state: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        _ask_for_restarts()
        num_resets, num_commits = 0, state.num_commits
        while True:
            try:
                get_context().sync_root = _find_most_advanced_rank(state)
                state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                num_resets = 1 if state.num_commits > num_commits else num_resets + 1
                num_commits = state.num_commits
                if num_resets > _MAX_RESETS or not basics.can_restart():
                    raise
                state.restore()
            basics.join_again()
            state.on_reset()

    return call  # type: ignore[return-value]  # the wrapper names its first argument


def _ask_for_restarts() -> None:
    """Let the engine start this script again if its process is killed."""
    if path := os.environ.get(ELASTIC_VARIABLE):
        Path(path).touch()


def _find_most_advanced_rank(state: State) -> int:
    return int(allgather(torch.tensor([state.num_commits])).argmax())
