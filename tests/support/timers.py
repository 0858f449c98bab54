"""A clock and timers that a test drives."""


class Timers:
    """A clock that the test sets, and timers that run when it says so."""

    def __init__(self):
        self.now, self.waiting = 0.0, []

    def clock(self):
        return self.now

    def later(self, delay, call):
        self.waiting.append((self.now + delay, call))

    def run(self):
        """Run all timers, in order, moving the clock on; returns when each ran."""
        ran = []
        while self.waiting:
            self.waiting.sort(key=lambda item: item[0])
            at, call = self.waiting.pop(0)
            self.now = max(self.now, at)
            ran.append(self.now)
            call()
        return ran
