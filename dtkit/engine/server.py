"""The way into an engine: a pickled :class:`~dtkit.types.Request` comes, a :class:`~dtkit.types.Reply` goes.

Whatever goes wrong becomes a :class:`~dtkit.types.Failure` in the reply, never an exception, so that each rank
answers for itself. A rank that fails breaks the group up, so that its peers are out of their collective at once; the
notebook then forms the next generation.
"""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

from dtkit.engine.session import get_session
from dtkit.errors import RefusedError
from dtkit.types import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.types import Request

# locks: for one call; calls never overlap anyway
_request_lock = threading.Lock()


def handle_request(message: bytes, publish: Callable[[int, list[Any]], None] | None) -> bytes:
    """Serve one request. The boundary that reports: whatever is raised here becomes a Failure."""
    # unpickles: sent by the notebook; engines run what it sends
    request: Request = pickle.loads(message)
    session = get_session()
    with _request_lock, session.watchdog.track_request(request), session.sigint_handler.handle_during_request():
        try:
            session.sigint_handler.raise_if_interrupted()
            value = session.serve_request(request, publish)
            session.sigint_handler.work_done = True
            reply = Reply(value)
        # broad: the error becomes a Failure in the engine's reply
        except BaseException as error:  # noqa: BLE001 - reported to the notebook with its traceback
            session.sigint_handler.work_done = True
            reply = Reply(session.collect_partial_result(request), session.build_failure(error, request))
            if not isinstance(error, RefusedError) and session.group is not None:
                session.group.abort()
    return pickle.dumps(reply, protocol=5)


def attach_sigint_handler(kernel: Any) -> None:
    """Have the session decide what SIGINT does on this engine: see :mod:`dtkit.engine.comm.sigint`."""
    get_session().sigint_handler.attach_to_kernel(kernel)
