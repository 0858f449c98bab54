"""Whether other programs took the cores while the engines measured something, and which ones they were."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.processor_use import ProcessorCount, name_this_process
from dtkit._util.resources import count_cores
from dtkit.history.core_use import name_largest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import NodeInfo

_MIN_SECONDS = 0.5  # counts have steps of 10 ms for each process
_MIN_TAKEN = 0.3  # cores beyond those that the engines leave, from which times of steps are not those of the machine


class CoreDisturbance:
    """The use of this host's cores by others than the engines and this notebook, since this object was made."""

    def __init__(self, nodes: Sequence[NodeInfo]) -> None:
        host = socket.gethostname()
        self._nodes = nodes if all(node.host == host and node.device == "cpu" for node in nodes) else ()
        self._start = ProcessorCount.take()

    def describe(self) -> str:
        """Return which others took cores that the engines needed; "" if none did, or if that is not known."""
        now = ProcessorCount.take()
        if not self._nodes or now.at_s - self._start.at_s < _MIN_SECONDS:
            return ""
        others = self._start.measure_others(now, {node.pid for node in self._nodes})
        others.pop(name_this_process(), None)
        num_cores, used = count_cores(), sum(others.values())
        if used < max(0, num_cores - sum(node.threads for node in self._nodes)) + _MIN_TAKEN:
            return ""
        named = name_largest(others, needed=0.0)
        text = f"other programs used {used:.1f} of {formatting.format_count(num_cores, 'core')}"
        return text if named is None else f"{text} meanwhile: {named}"
