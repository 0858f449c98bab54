"""Sources of runs to compare, without engines."""

import dataclasses

import numpy as np

from tests.support.fake_source import FakeSource


def make_source(strategy="DataParallel()", *, every=1, steps=80, ranks=4, name="ConvNet", sent=400_000):
    """Return a run whose ranks send `sent` bytes in every `every`-th step."""
    source = FakeSource(ranks=ranks, steps=steps, name=name)
    source.spec = dataclasses.replace(source.spec, strategy=strategy)
    source.sends = lambda step: np.where(step % every == 0, sent, 0)
    source.advance(steps)
    return source
