"""Source of a run view for tests: a real history, with rows and status set by the test."""

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
    """Run of `ranks` nodes that the test drives; `posted` has the commands of views.

    With `stages`, each group of that many nodes is a pipeline, and only its last node has a loss. With `strips` the
    run has a timeline of the last step.
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
        self.remaining_s, self.is_stepping = 12.0, False
        self.step, self.elapsed_s = 0, None
        self.history.read_position = lambda: (self.step, self.status.elapsed_s)
        self.posted = []
        self.refuse = None
        self.delay_factors, self.consistency, self.stall_report = {}, None, None
        self.verification, self.ended_engines, self.is_released = None, None, False
        self.sends = lambda _step: 400_000 if ranks > 1 else 0  # bytes per rank in a step
        self.slowness = {}  # rank -> factor on its computing time
        self._stages, self._strips = stages, strips
        self._callbacks = []
        self._random = np.random.default_rng(seed)

    @property
    def status(self):
        elapsed_s = self.step * 0.1 if self.elapsed_s is None else self.elapsed_s
        is_stepping = self.is_stepping and self.state is State.RUNNING
        return Status(self.state, self.step, self.spec.steps, 0, elapsed_s, self.remaining_s, self.message, is_stepping)

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
        """Record `steps` more steps of each rank, with a made-up loss unless `loss` is given."""
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
        """Fill in the phases of 100 ms steps: each rank waits for the slowest, then all communicate."""
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
        """Timeline of the last step: micro-batches of a pipeline, or phases with a collective at the end."""
        if not self._strips or not self.step:
            return None
        make = self._make_pipeline_spans if self._stages > 1 else self._make_phase_spans
        return Timeline(np.array([span for rank in range(self.spec.world_size) for span in make(rank)], SPAN_DTYPE))

    def _make_phase_spans(self, rank):
        slow = self.slowness.get(rank, 1.0)
        ends = np.cumsum([0, 0.005, 0.025 * slow, 0.05 * slow])
        reached = 0.08 * max(self.slowness.values(), default=1.0)
        times = [*ends, reached + 0.017, reached + 0.023]
        phases = ("data", "forward", "backward", "sync", "update")
        return [(self.step, rank, p, -1, -1, a, b) for p, a, b in zip(phases, times, times[1:], strict=False)]

    def _make_pipeline_spans(self, rank, batches=4):
        """Yield all forward passes, then all backward passes, each twice as long."""
        stage, last = rank % self._stages, self._stages - 1
        turn = 0.01 * (batches + last)
        for k in range(batches):
            begin = 0.01 * (k + stage)
            yield self.step, rank, "forward", stage, k, begin, begin + 0.0095
        for k in range(batches):
            begin = turn + 0.02 * (k + last - stage)
            yield self.step, rank, "backward", stage, k, begin, begin + 0.0195

    def lose(self, rank):
        """Record the loss of a node."""
        self.event("lost", f"node {rank} was lost", rank)

    def stick(self, rank, seconds=12.3, phase="forward"):
        """Report that a node keeps the others waiting; with None as the rank, that no node moves."""
        kind, line = ("together", "") if rank is None else ("stuck", "train.py:12 in step")
        remedy = "cluster.stacks() shows the position of all ranks"
        self.stall_report = StallReport(kind, rank, "host0", phase, self.step + 1, line, "it waits", remedy, seconds)
        self.event("stuck", "no node moves" if rank is None else f"node {rank} is stuck", rank)

    def shrink(self, ranks):
        """Lose a node and continue with `ranks` nodes, which are numbered again."""
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
    """Run that accepts faults and checkpoints and records them in `calls`; commands take effect at once."""

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

    def inject_fault(self, name, rank):
        self.calls.append((name, rank))

    def save(self):
        if self.refuse:
            raise self.refuse
        self.calls.append(("save",))
        return SimpleNamespace(step=self.step, path="/somewhere/checkpoints/Conv-Net-1")
