"""Sources of runs to compare, without engines."""

import dataclasses

import numpy as np

import dtkit
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.history.scalars import ScalarRecord
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource


def make_source(strategy="DataParallel()", *, every=1, steps=80, ranks=4, name="ConvNet", sent=400_000, seed=0):
    """Return a run whose ranks send `sent` bytes in every `every`-th step."""
    source = FakeSource(ranks=ranks, steps=steps, name=name, seed=seed)
    source.spec = dataclasses.replace(source.spec, strategy=strategy)
    source.sends = lambda step: np.where(step % every == 0, sent, 0)
    source.advance(steps)
    return source


def build_message_of_named(names, steps):
    """Return the live view's message of a comparison of runs with these names, each after `steps` steps."""
    runs = [FakeSource(steps=steps, seed=k, name=name) for k, name in enumerate(names)]
    for run in runs:
        run.advance(steps)
    return ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()


def make_diverging_pair():
    """Return a run that learns, and one whose loss reached 1e30 in five steps."""
    good, diverged = FakeSource(steps=400, name="good"), FakeSource(steps=400, seed=1, name="diverged")
    good.advance(400)
    for k, loss in enumerate((2.4, 1e5, 1e12, 1e20, 1e30)):
        diverged.advance(1, loss=loss)
        diverged.history.add(Evaluation(k + 1, 100, {"loss": loss, "accuracy": 0.1}))
    for step in (100, 200, 300, 400):
        good.history.add(Evaluation(step, 100, {"loss": 100 / step, "accuracy": step / 400}))
    return good, diverged


def make_logging_runs():
    """Return three runs; two of them logged "entropy", one "kl"."""
    runs = [FakeSource(steps=400, seed=k, name=f"run {k}") for k in range(3)]
    for k, run in enumerate(runs):
        run.advance(400)
        if k < 2:
            rows = [(step, 2.0 - k - step / 400, 1.0) for step in range(1, 401 - 100 * k)]
            run.history.add(ScalarRecord(0, {"entropy": rows}))
    runs[2].history.add(ScalarRecord(0, {"kl": [(1, 1.0, 1.0)]}))
    return runs


def make_wavering_pair():
    """Return a run that learns, and one whose loss peaked at step 12, and wavered about three times its first."""
    good, diverged = FakeSource(steps=400, name="good"), FakeSource(steps=400, seed=1, name="diverged")
    good.advance(400)
    diverged.advance(10, loss=2.4)
    diverged.advance(1, loss=30.0)
    diverged.advance(1, loss=1e4)
    for k in range(388):
        diverged.advance(1, loss=7.2 + 2.0 * np.sin(k))
    for step in (1, 5, 100, 200, 300, 400):
        good.history.add(Evaluation(step, 100, {"loss": 100 / (step + 40), "accuracy": step / 400}))
        diverged.history.add(Evaluation(step, 100, {"loss": 2.3 if step < 12 else 6.0, "accuracy": 0.1}))
    return good, diverged
