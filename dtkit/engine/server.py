"""Entry point of an engine: takes a pickled :class:`~dtkit.messages.Request`, or several, and returns the replies.

Every error becomes a :class:`~dtkit.types.Failure` in the reply, so each rank replies for itself. A rank that fails
aborts its process group, so that its peers leave their collectives at once. The notebook then forms the next
generation.
"""

from __future__ import annotations

import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

from dtkit.engine.session import get_session
from dtkit.errors import RefusedError
from dtkit.messages import Reply
from dtkit.rpc.protocol import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.engine.session import Session
    from dtkit.messages import OutputItem, Request

# locks: for one call; an engine gets no second call meanwhile
_request_lock = threading.Lock()


def handle_request(
    message: bytes, publish: Callable[[int, list[OutputItem]], None] | None, session: Session | None = None
) -> bytes:
    """Serve the request of a message, or several in order, by default in the session of this process.

    Return the reply, or a list of replies. All errors are caught here.
    """
    # unpickles: sent by the notebook; engines run what it sends
    content: Request | tuple[Request, ...] = pickle.loads(message)
    session = session or get_session()
    session.state.message_begun_at = time.monotonic()
    if isinstance(content, tuple):
        return pickle.dumps([_serve(request, publish, session) for request in content], protocol=5)
    return pickle.dumps(_serve(content, publish, session), protocol=5)


def _serve(request: Request, publish: Callable[[int, list[OutputItem]], None] | None, session: Session) -> Reply[Any]:
    state = session.state
    with _request_lock, state.watchdog.track_request(request), state.sigint_handler.handle_during_request():
        try:
            state.sigint_handler.raise_if_interrupted()
            value = session.serve_request(request, publish)
            state.sigint_handler.work_done = True
            reply: Reply[Any] = Reply(value)
        # broad: the error becomes a Failure in the engine's reply
        except BaseException as error:  # noqa: BLE001 - reported to the notebook with its traceback
            state.sigint_handler.work_done = True
            reply = session.make_error_reply(error, request)
            if state.group is not None and _may_keep_peers_waiting(error, request):
                state.group.abort()
    return reply


def _may_keep_peers_waiting(error: BaseException, request: Request) -> bool:
    """Return whether the request takes part in collectives. Otherwise the group stays: the notebook counts on it."""
    operation = OPERATIONS.get(request.op)
    return not isinstance(error, RefusedError) and (operation is None or not operation.is_independent)


def attach_sigint_handler(kernel: Any) -> None:
    """Let the session handle SIGINT on this engine: see :mod:`dtkit.engine.comm.sigint`."""
    get_session().state.sigint_handler.attach_to_kernel(kernel)
