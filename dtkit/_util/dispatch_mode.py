"""A base of modes that observe torch's operations."""

from __future__ import annotations

from dtkit._util.torch_private import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """torch's mode, without its compiler.

    torch exempts the code of other modes from compilation. For that, it loads its compiler at their first operation,
    which takes half a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
