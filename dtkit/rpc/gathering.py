"""The ranks' replies: those of one message, and the time limit for all ranks'."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.messages import Reply


class ReplyDeadline:
    """Remaining time to wait for a call's replies.

    `first_grace_s` is the grace before the interrupt, and `grace_s` that after it. `from_first_reply`: the first one
    also begins with the first success, for calls in which a late rank would wait in vain.
    """

    def __init__(
        self,
        futures: Sequence[Future[Reply[Any]]],
        timeout: float,
        *,
        first_grace_s: float,
        grace_s: float,
        from_first_reply: bool,
    ) -> None:
        self.reply_arrived = threading.Event()
        self._limit, self._from_first_reply = time.monotonic() + timeout, from_first_reply
        self._first_grace_s, self._grace_s = first_grace_s, grace_s
        self._grace_end = math.inf
        for future in futures:
            future.add_done_callback(self._on_reply)

    @property
    def remaining_s(self) -> float:
        """Remaining seconds, at most until the end of a grace period; not positive after that."""
        return min(self._limit, self._grace_end) - time.monotonic()

    def begin_grace(self) -> None:
        """Begin one more grace period for the ranks that were just interrupted."""
        self._limit = self._grace_end = time.monotonic() + self._grace_s

    def _on_reply(self, future: Future[Reply[Any]]) -> None:
        # waits: already done here
        has_failed = future.result().failure is not None
        if (has_failed or self._from_first_reply) and self._grace_end == math.inf:
            self._grace_end = time.monotonic() + self._first_grace_s
        self.reply_arrived.set()


def split_replies(message_reply: Future[Any], num_calls: int) -> list[Future[Reply[Any]]]:
    """Return a future for each call of a message. An engine that is lost or interrupted has one reply for all."""
    parts: list[Future[Reply[Any]]] = [Future() for _ in range(num_calls)]
    remaining = list(parts)

    def resolve(done: Future[Any]) -> None:
        # waits: already done here
        reply = done.result()
        replies = reply if isinstance(reply, list) else [reply] * num_calls
        for part in replies:
            remaining.pop(0).set_result(part)  # so that the message's future refers to no reply any more

    message_reply.add_done_callback(resolve)
    return parts
