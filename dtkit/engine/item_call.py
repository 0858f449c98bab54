"""One item of a map on an engine. The function is loaded once, and an item's error doesn't affect other items."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded
from dtkit.engine.observe import error_report
from dtkit.types import Failure

if TYPE_CHECKING:
    from dtkit.rpc.payload import Payload

ItemResult = tuple["Payload | None", Failure | None]
"""Result of an item, or its failure."""

_loaded: dict[str, Any] = {}  # the function and arguments of the current map, by its key


def call_item(key: str, shared: Payload | None, item: Any) -> ItemResult:
    """Call a map's function with one item. `shared` has the function and its other arguments in the first call.

    The result is packed here, so that a result that can't be pickled fails only its item.
    """
    return run_guarded(lambda: (_compute(key, shared, item), None), lambda error: (None, _describe(error)))


def _compute(key: str, shared: Payload | None, item: Any) -> Payload:
    from dtkit.engine.session import get_session

    if key not in _loaded:
        assert shared is not None
        _loaded.clear()
        _loaded[key] = shared.load()
    function, args, kwargs = _loaded[key]
    return get_session().state.pack(function(item, *args, **kwargs), name="the function's result")


def _describe(error: Exception) -> Failure:
    from dtkit.engine.error_hints import add_general_hint
    from dtkit.engine.session import get_session

    add_general_hint(error)
    return Failure(
        rank=get_session().state.rank,
        host=socket.gethostname(),
        type=error_report.name_error(error),
        message=error_report.format_message(error),
        traceback=error_report.format_traceback(error),
        user_frames=error_report.list_user_frames(error),
    )


def forget_items() -> None:
    """Free the objects that the last map has loaded."""
    _loaded.clear()
