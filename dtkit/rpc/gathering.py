"""How long to wait for the ranks' replies: until a deadline, or for a grace period once one rank has failed."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from dtkit.types import Reply


class ReplyDeadline:
    """Time that is left to wait for a call's replies.

    `from_first_reply`: the grace period also begins with the first success, for calls in which a late rank would wait
    in vain.
    """

    def __init__(
        self, futures: Sequence[Future[Reply[Any]]], timeout: float, grace_s: float, *, from_first_reply: bool
    ) -> None:
        self.reply_arrived = threading.Event()
        self._limit, self._grace_s, self._from_first_reply = time.monotonic() + timeout, grace_s, from_first_reply
        self._grace_end = math.inf
        for future in futures:
            future.add_done_callback(self._on_reply)

    @property
    def remaining_s(self) -> float:
        """Seconds left, at most until the end of a grace period; not positive once they are over."""
        return min(self._limit, self._grace_end) - time.monotonic()

    def begin_grace(self) -> None:
        """Let the ranks that were interrupted now take one more grace period."""
        self._limit = self._grace_end = time.monotonic() + self._grace_s

    def _on_reply(self, future: Future[Reply[Any]]) -> None:
        # waits: already done here
        has_failed = future.result().failure is not None
        if (has_failed or self._from_first_reply) and self._grace_end == math.inf:
            self._grace_end = time.monotonic() + self._grace_s
        self.reply_arrived.set()
