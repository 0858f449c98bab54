"""ipyparallel's view for ``%%px``, which takes the cluster's lock."""

from __future__ import annotations

import contextlib
from typing import Any

import ipyparallel as ipp


class LockedView(ipp.DirectView):  # type: ignore[misc]  # ipyparallel has no types
    """A DirectView whose fan-outs take the cluster's lock."""

    lock: Any = contextlib.nullcontext()

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """See ipyparallel's DirectView."""
        block = kwargs.pop("block", None)
        with self.lock:
            result = super().execute(*args, block=False, **kwargs)
        if self.block if block is None else block:
            # waits: a user's %%px has no limit; an interrupt ends it
            result.get()
        return result
