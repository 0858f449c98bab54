"""Common base of experiment trackers: a callback of ``cluster.train`` that feeds one writer for each run."""

from __future__ import annotations

import importlib
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dtkit.integrations.trackers.feed import FeedOptions, RunFeed

if TYPE_CHECKING:
    from dtkit.integrations.trackers.tracked import TrackedRun, Writer
    from dtkit.training.run import Run


def check_name(argument: str, name: object, forbidden: str = "") -> None:
    """Raise ValueError unless `name` is text that isn't empty and has none of the `forbidden` characters."""
    if not isinstance(name, str) or not name.strip() or set(name) & set(forbidden):
        rule = f" without {' '.join(forbidden)}" if forbidden else ""
        raise ValueError(f"{argument}={name!r}; it must be a name{rule}, such as {argument}='digits'")


class Tracker(ABC):
    """Base of the callbacks for experiment trackers. A tracker may serve several runs, one after another.

    Each tracker has these options besides its own:

    params : parameters to store in addition to the run's, such as ``{"dropout": 0.1}``. They may be nested.
    every : steps between two points. By default, as many evenly spaced steps as can be written in 0.3 % of the time. At
        the end, as many of the last steps are written as fit into three seconds.
    per_node : whether to write the loss, speed, waiting time and memory of each node.
    report : whether to store the run's HTML report when it ends.

    A tracker that raises is switched off with one warning; the training goes on. A subclass implements :meth:`open`.
    """

    package: ClassVar[str] = ""
    """The module that a tracker needs, if any."""
    extra: ClassVar[str] = ""
    """The extra of ``dtkit-jupyter`` that installs it."""

    def __init__(
        self,
        *,
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
        per_node: bool = True,
        report: bool = True,
    ) -> None:
        """Raises ImportError, with the package to install, if the tracker's package is missing."""
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}; it must be a number of steps from 1 up, or None")
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"params={params!r}; give parameters by name, as in params={{'dropout': 0.1}}")
        for option, value in (("per_node", per_node), ("report", report)):
            if not isinstance(value, bool):
                raise TypeError(f"{option}={value!r}; it must be True or False")
        self._import_package()
        self._options = FeedOptions(params or {}, every, per_node, report)
        self._key = uuid.uuid4().hex[:12]
        self._resumed_id = ""
        self._feeds: weakref.WeakSet[RunFeed] = weakref.WeakSet()
        self._feed: weakref.ref[RunFeed] | None = None

    @abstractmethod
    def open(self, run: TrackedRun) -> Writer:
        """Return the writer of a run, which is new or resumed. This may raise, and take some seconds."""

    def _import_package(self) -> None:
        if not self.package:
            return
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(
                f"{type(self).__name__} needs the package {self.package} ({error}): pip install "
                f"'dtkit-jupyter[{self.extra}]'"
            ) from error

    # -- what a training calls --------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Begin to write a run, or continue."""
        resumed_id, self._resumed_id = self._resumed_id, ""
        feed = RunFeed(run, self.open, self._options, key=self._key, resumed_id=resumed_id)
        self._feeds.add(feed)
        self._feed = weakref.ref(feed)
        feed.start()

    def finish_writing(self, timeout: float) -> None:
        """Wait until all records are written, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for feed in list(self._feeds):
            feed.finish(max(0.0, deadline - time.monotonic()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the id of the run in the tracker."""
        feed = None if self._feed is None else self._feed()
        return {"id": "" if feed is None else feed.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the saved run in the tracker."""
        self._resumed_id = str(state["id"])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another notebook that takes the run over."""
        return vars(self) | {"_feed": None, "_feeds": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._feeds = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
