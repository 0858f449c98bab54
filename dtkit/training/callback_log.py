"""Numbers that a callback after an epoch passes to `dtkit.log`: they become a column of the history, as a step's do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dtkit.history.scalars import ScalarRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.history.history import History


@contextlib.contextmanager
def add_logged(history: History, step: int) -> Iterator[None]:
    """Let this thread's calls of `dtkit.log` add to a step of the history within the context.

    The history gets them as numbers of rank 0, as no rank has a part in them.
    """
    from dtkit.engine.observe.call_output import redirect_thread_log
    from dtkit.engine.observe.step_scalars import check_logged_names

    def add(values: dict[str, float]) -> None:
        check_logged_names(values)
        history.add(ScalarRecord(0, {name: [(step, value, 1.0)] for name, value in values.items()}))

    with redirect_thread_log(add):
        yield
