"""Display of a run: its views, its verdict, and files that show it elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.completion import UserNames
from dtkit._util.guard import Subscribers
from dtkit.errors import NonFiniteError
from dtkit.history.history import History
from dtkit.training.failure_notice import FailureNotice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dtkit._util.views import Figure
    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.verdict import Verdict
    from dtkit.dashboard.written_report import WrittenReport

else:
    RunView = object  # `help` of a run shows its bases, and a protocol is none for users


@explain_arguments
class ShownRun(RunView, metaclass=UserNames):
    """The part of a run that creates views and that views use. :class:`~dtkit.Run` has the properties."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._subscribers = Subscribers()
        self._failure_notice = FailureNotice(self)

    @property
    def name(self) -> str:
        """The run's name in every view: that given to ``cluster.train(name=)``, or the class of its model."""
        return self.spec.name

    @property
    def history(self) -> History:
        """Records of every rank in every step: a table, see :class:`~dtkit.History`."""
        return self._history

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change, from any thread. Return the function that unsubscribes it."""
        return self._subscribers.add(callback)

    @property
    def verdict(self) -> Verdict:
        """The run's bottleneck and a remedy, in one line. ``run.verdict.explain()`` has the numbers."""
        from dtkit.dashboard.summary.activity import name_state
        from dtkit.dashboard.summary.one_process import read_verification
        from dtkit.dashboard.summary.verdict import Verdict, find_verdict

        has_ended = self.status.state.has_ended and self.exception is None  # an error comes before a past divergence
        measured = read_verification(self)
        verdict = find_verdict(self.history, self.spec, measured, self.nodes, has_ended=has_ended)
        if self.exception is None or verdict.cause == "diverged":
            return verdict
        steps = formatting.format_count(self.status.step, "step")
        cause = "failed" if self.status.state.has_ended else "paused"
        advice = "; ".join(filter(None, [_find_remedy(self.exception), "run.exception has the error"]))
        return Verdict(cause, f"{name_state(self)} after {steps}: {advice}", 0.0)

    def figure(self) -> Figure:
        """Return a matplotlib Figure of the run, at any time: loss and throughput, per node and together."""
        from dtkit.dashboard.figures import run_figure

        return run_figure.draw_run(self)

    def __repr__(self) -> str:
        from dtkit.dashboard.text import run_text

        return run_text.format_run(self)

    def dashboard(self, *, fault_injection: bool = False) -> None:
        """Show the dashboard here, as `run` does in the last line of a cell::

            run.dashboard()
            run.dashboard(fault_injection=True)  # with the buttons "Slow down" and "Kill"

        With ``fault_injection=True`` it can also slow nodes down and end them, for lessons.
        """
        from dtkit.dashboard import display

        display.show(self, fault_injection=fault_injection)

    def report(
        self,
        path: str | Path | None = None,
        *,
        description: str = "",
        single_process: ShownRun | History | None = None,
    ) -> WrittenReport:
        """Write the run as one self-contained HTML file. Return its place, which a notebook shows as a link::

            run.report()
            run.report("digits.html", description="Does a learning rate of 0.1 diverge?")

        By default, `path` is a file in the current folder, named after the run and its start. `description` is text
        below the title, such as what the run was to find out. `single_process` is the same training on one engine (a
        run, or its history), to show the scaling.
        """
        from dtkit.dashboard import report

        history = single_process.history if isinstance(single_process, ShownRun) else single_process
        if not isinstance(history, History | None):
            raise TypeError(
                f"single_process={history!r}; it must be the run of one engine, or that run's history. "
                "Train the same on dtkit.Cluster(1), and pass that run"
            )
        return report.write_report(self, path, description=description, single_process=history)

    def _ipython_display_(self) -> None:
        from dtkit.dashboard import display

        display.show(self)


def _find_remedy(error: BaseException) -> str:
    """Return the first remedy of a step that was not finite, as its message has it; nothing of another error."""
    lines = str(error).splitlines() if isinstance(error, NonFiniteError) else []
    return next((line.removeprefix("- ") for line in lines if line.startswith("- ")), "")
