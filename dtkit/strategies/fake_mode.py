"""A mode of torch's fake tensors that stays one object when a tensor of it is copied."""

from __future__ import annotations

from typing import Any

from dtkit._util.torch_private import FakeTensorMode


class SharedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # of __init_subclass__
    """Fake tensors without values, whose copies belong to the same mode.

    torch's exporter copies a parameter that several stages use. The copy of a plain mode has the addresses of the weak
    references to storages that the mode knows, but doesn't count as their owner. Both modes then give the references
    back. The second one writes into memory that may belong to something else, and the process may crash much later
    (``StorageWeakRef`` in torch.multiprocessing.reductions).
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFakeMode:
        """Return this mode."""
        return self
