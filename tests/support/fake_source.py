"""A source for views: a real history, fed by hand, and every part of the protocol settable."""

import contextlib
import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from dtkit.dashboard.summary.lost_nodes import update_lost_nodes
from dtkit.health.stall_report import StallReport
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.timeline import SPAN_DTYPE, Timeline
from dtkit.types import Event, NodeInfo, RunSpec, State, Status


class FakeSource:
    """A run of `ranks` nodes that the test drives; `posted` keeps what views asked for.

    With `stages` the nodes are pipelines of so many: they share their samples, and the last one alone knows a loss.
    `draw_strips` are kept of the last step, so that there is a timeline.
    """

    def __init__(self, ranks=4, steps=400, name="ConvNet", seed=0, stages=1, *, strips=False):
        self.spec = RunSpec(
            name=name, strategy="DataParallel()", world_size=ranks, samples=51200, batch_size=64 * ranks,
            steps=steps, steps_per_epoch=max(1, steps // 2), shuffle="shard", seed=0, loss="CrossEntropyLoss",
            optimizer="SGD",
        )  # fmt: skip
        self.nodes = [
            NodeInfo(r, r + 10, f"host{r // 8}", 4000 + r, "cpu", 8_000_000_000, 5_000_000_000, 1) for r in range(ranks)
        ]
        self.history = History(ranks_per_replica=stages)
        self.state, self.message, self.exception, self.lr = State.RUNNING, "", None, 0.1
        self.remaining_s = 12.0
        self.step = 0
        self.posted = []
        self.refuse = None
        self.delay_factors, self.consistency, self.stall_report = {}, None, None
        self.sends = lambda _step: 400_000 if ranks > 1 else 0  # bytes of a rank in a step
        self.slowness = {}  # rank -> how many times longer it computes
        self._stages, self._strips = stages, strips
        self._callbacks = []
        self._random = np.random.default_rng(seed)

    @property
    def status(self):
        return Status(self.state, self.step, self.spec.steps, 0, self.step * 0.1, self.remaining_s, self.message)

    def subscribe(self, callback):
        self._callbacks.append(callback)

        def unsubscribe():
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return unsubscribe

    @property
    def subscribers(self):
        return len(self._callbacks)

    def changed(self):
        for callback in list(self._callbacks):
            callback()

    def post(self, command, value=None):
        if self.refuse:
            raise self.refuse
        self.posted.append((command, value))

    def advance(self, steps=1, loss=None):
        """Record `steps` more steps of every rank; `loss` overrides the made-up ones."""
        n = self.spec.world_size
        rows = np.zeros(steps * n, ROW_DTYPE)
        rows["step"] = self.step + 1 + np.repeat(np.arange(steps), n)
        rows["rank"] = np.tile(np.arange(n), steps)
        rows["samples"], rows["weight"], rows["lr"] = 64, 64, self.lr or 0
        decay = 2.3 * np.exp(-3 * rows["step"] / self.spec.steps) + 0.3
        noise = self._random.normal(size=len(rows))
        rows["loss"] = decay * (1 + 0.06 * noise) if loss is None else loss
        early = (rows["rank"] + 1) % self.history.ranks_per_replica > 0
        rows["loss"][early], rows["weight"][early] = np.nan, 0
        self._time(rows)
        rows["grad_norm"] = 2 * decay * (1 + 0.1 * np.abs(self._random.normal(size=len(rows))))
        rows["sent_bytes"] = self.sends(rows["step"])
        rows["memory_bytes"] = 315_000_000 + 1_000_000 * rows["rank"]
        lost = update_lost_nodes({}, self.history.events)
        self.history.append(rows[~np.isin(rows["rank"], list(lost))])
        self.step += steps
        self.changed()

    def _time(self, rows):
        """Phases of 100 ms steps: every rank waits for the slowest one; then all communicate at once."""
        ranks = self.spec.world_size
        slow = np.array([self.slowness.get(r, 1.0) for r in range(ranks)])[rows["rank"]]
        noise = 1 + 0.02 * self._random.normal(size=len(rows)) ** 2
        for name, seconds in (("data_s", 0.005), ("forward_s", 0.025), ("backward_s", 0.050)):
            rows[name] = seconds * noise * slow
        ready = sum(rows[name] for name in ("data_s", "forward_s", "backward_s")).reshape(-1, ranks)
        rows["wait_s"] = (ready.max(1, keepdims=True) - ready).reshape(-1)
        rows["comm_s"], rows["update_s"] = (0.012 if ranks > 1 else 0.0), 0.006
        phases = ("data_s", "forward_s", "backward_s", "wait_s", "comm_s", "update_s")
        rows["step_s"] = sum(rows[name] for name in phases) + 0.002

    @property
    def timeline(self):
        """The last step: a pipeline's micro-batches one after the other, or phases with a collective at the end."""
        if not self._strips or not self.step:
            return None
        make = self._piped if self._stages > 1 else self._alike
        return Timeline(np.array([span for rank in range(self.spec.world_size) for span in make(rank)], SPAN_DTYPE))

    def _alike(self, rank):
        slow = self.slowness.get(rank, 1.0)
        ends = np.cumsum([0, 0.005, 0.025 * slow, 0.05 * slow])
        reached = 0.08 * max(self.slowness.values(), default=1.0)
        times = [*ends, reached + 0.017, reached + 0.023]
        phases = ("data", "forward", "backward", "sync", "update")
        return [(self.step, rank, p, -1, -1, a, b) for p, a, b in zip(phases, times, times[1:], strict=False)]

    def _piped(self, rank, batches=4):
        """All forwards, then all backwards, each twice as long."""
        stage, last = rank % self._stages, self._stages - 1
        turn = 0.01 * (batches + last)
        for k in range(batches):
            begin = 0.01 * (k + stage)
            yield self.step, rank, "forward", stage, k, begin, begin + 0.0095
        for k in range(batches):
            begin = turn + 0.02 * (k + last - stage)
            yield self.step, rank, "backward", stage, k, begin, begin + 0.0195

    def lose(self, rank):
        """A node is gone."""
        self.event("lost", f"node {rank} was lost", rank)

    def stick(self, rank, seconds=12.3, phase="forward"):
        """A node is found to keep the others waiting; with None as the rank, no node moves."""
        kind, line = ("together", "") if rank is None else ("stuck", "train.py:12 in step")
        remedy = "cluster.stacks() shows where all ranks stand"
        self.stall_report = StallReport(kind, rank, "host0", phase, self.step + 1, line, "it waits", remedy, seconds)
        self.event("stuck", "no node moves" if rank is None else f"node {rank} is stuck", rank)

    def shrink(self, ranks):
        """A node is lost, and the run goes on with so many, whose ranks have moved down."""
        self.lose(1)
        self.spec = dataclasses.replace(self.spec, world_size=ranks)
        self.nodes = self.nodes[:ranks]
        self.event("repair", "node 1 left out")

    def event(self, kind, text, rank=None):
        self.history.add(Event(self.step, kind, text, 1_700_000_000.0 + self.step, rank))
        self.changed()

    def end(self, state=State.COMPLETED):
        self.state, self.remaining_s = state, None
        self.event("done", "done")


class FaultInjectableSource(FakeSource):
    """A run that takes faults and writes checkpoints; `calls` keeps them, and every command answers at once."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []

    def post(self, command, value=None):
        super().post(command, value)
        future = Future()
        future.set_result(self.step)
        return future

    def inject_delay(self, rank, factor):
        self.calls.append(("slow", rank, factor))
        return self.step

    def inject_fault(self, name, rank):
        self.calls.append((name, rank))
        return self.step

    def save(self, path=None):
        if self.refuse:
            raise self.refuse
        if path is None:
            raise ValueError("there is no path")
        self.calls.append(("save", path))
        return SimpleNamespace(step=self.step, path=f"/somewhere/{path}")
