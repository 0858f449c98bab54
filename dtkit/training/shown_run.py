"""What a run shows: its views, its verdict, and the files that show it elsewhere."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from dtkit._util.guard import notify_views
from dtkit.dashboard.run_view import RunView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dtkit._util.views import Figure
    from dtkit.dashboard.summary.verdict import Verdict
    from dtkit.history.history import History


class ShownRun(RunView):
    """The part of a run that its views use, and that makes views. :class:`~dtkit.Run` has the properties."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._views: list[Callable[[], None]] = []
        # locks: while a callback is noted
        self._views_lock = threading.Lock()

    @property
    def history(self) -> History:
        """What every rank did in every step: a table, see :class:`~dtkit.History`."""
        return self._history

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change, from any thread; return the function that ends that."""
        with self._views_lock:
            self._views.append(callback)

        def unsubscribe() -> None:
            with self._views_lock, contextlib.suppress(ValueError):
                self._views.remove(callback)

        return unsubscribe

    def _notify_views(self) -> None:
        with self._views_lock:
            views = list(self._views)
        notify_views(views, self.spec.name)

    @property
    def verdict(self) -> Verdict:
        """What holds the run back and what would help, in one line; ``run.verdict.explain()`` prints the numbers."""
        from dtkit.dashboard.summary.verdict import find_verdict

        return find_verdict(self.history, self.spec)

    def figure(self) -> Figure:
        """Return the run as a matplotlib Figure, at any time: loss and throughput, per node and together."""
        from dtkit.dashboard.figures import run_figure

        return run_figure.draw_run(self)

    def __repr__(self) -> str:
        from dtkit.dashboard.text import run_text

        return run_text.format_run(self)

    def dashboard(self, *, fault_injection: bool = False) -> None:
        """Show the dashboard here, as `run` in the last line of a cell does.

        With ``fault_injection=True`` it can also slow nodes down and end them, for lessons.
        """
        from dtkit.dashboard import display

        display.show(self, fault_injection=fault_injection)

    def report(self, path: str | Path, *, single_process: ShownRun | History | None = None) -> None:
        """Write the run as one HTML file that needs nothing else.

        `single_process`: the same training on one engine (a run, or its history), to show the scaling.
        """
        from dtkit.dashboard import report

        history = single_process.history if isinstance(single_process, ShownRun) else single_process
        report.write_report(self, path, single_process=history)

    def _ipython_display_(self) -> None:
        from dtkit.dashboard import display

        display.show(self)
