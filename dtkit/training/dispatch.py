"""How many steps to send in one dispatch: pure arithmetic on measured times.

A dispatch should last a second: long enough that what happens between two of them (8 to 12 ms on two busy cores) costs
about one per cent, short enough that a new learning rate and the picture come soon. (A pause does not wait for its
end.) The number starts at one, since the first steps compile and warm up and say nothing of the later ones, and grows
at most fourfold at a time.
"""

from __future__ import annotations

TARGET_DISPATCH_S = 1.0  # what a dispatch should last
SLOW_STEP_S = 0.5  # steps that take longer go one by one, and the next is sent when one has landed
MAX_GROWTH = 4
MAX_SEND_FRACTION = 0.05  # of a dispatch's time that sending it may take


class DispatchSizer:
    """Fed with what was measured; asked for the next dispatch."""

    def __init__(self) -> None:
        self.next_steps = 1
        """Steps to put into the next dispatch."""
        self.step_s = 0.0
        """Seconds that a step takes, as last seen; 0 before the first."""
        self._mean_send_s = 0.0

    def on_sent(self, seconds: float) -> None:
        """Note how long a fan-out took in the notebook."""
        self._mean_send_s = seconds if not self._mean_send_s else 0.8 * self._mean_send_s + 0.2 * seconds

    def on_result(self, steps: int, step_s: float) -> None:
        """Note a dispatch that did `steps` steps of `step_s` seconds each."""
        if not steps:
            return
        self.step_s = max(step_s, 1e-6)
        wanted = max(TARGET_DISPATCH_S, self._mean_send_s / MAX_SEND_FRACTION) / self.step_s
        self.next_steps = 1 if self.step_s >= SLOW_STEP_S else max(1, min(round(wanted), MAX_GROWTH * steps))

    @property
    def max_in_flight(self) -> int:
        """Dispatches to keep in flight: two, so that engines don't wait for the notebook; one when steps are slow."""
        return 1 if self.step_s >= SLOW_STEP_S else 2
