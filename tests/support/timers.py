"""A clock and timers that a test drives."""


class Timers:
    """Clock that the test sets, and timers that run when the test calls `run`."""

    def __init__(self):
        self.now, self.waiting = 0.0, []

    def clock(self):
        return self.now

    def later(self, delay, call):
        self.waiting.append((self.now + delay, call))

    def run(self):
        """Run all timers in order, moving the clock on, and return the time of each."""
        times = []
        while self.waiting:
            self.waiting.sort(key=lambda item: item[0])
            at, call = self.waiting.pop(0)
            self.now = max(self.now, at)
            times.append(self.now)
            call()
        return times
