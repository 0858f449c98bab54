"""How the notebook's memory and the opening of a dashboard grow with the number of steps."""

from __future__ import annotations

import gc
import json
import time

import numpy as np
import psutil

from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.history.history import ROW_DTYPE, History
from tests.bench.pairs import PAIRS, Sample, report
from tests.support.fake_source import FakeSource

STEPS, RANKS, DISPATCH = 1_000_000, 2, 1000
NODES, NODE_STEPS = (2, 16, 64, 256), 1000
MAX_MEMORY_MB, MAX_OPENING_S = 300, 1.0


def growth() -> bool:
    """Measure a million tiny steps of two ranks, the first message of their dashboard, and that of more nodes."""
    measure_nodes()
    return measure_memory() & measure_opening()


def measure_memory() -> bool:
    """Append the rows of a million steps, and measure the process."""
    gc.collect()
    before, history, seconds = psutil.Process().memory_full_info().uss, History(), 0.0
    for first in range(0, STEPS, DISPATCH):
        rows = _make_rows(first)
        start = time.perf_counter()
        history.append(rows)
        seconds += time.perf_counter() - start
    assert len(history) == STEPS * RANKS
    added = (psutil.Process().memory_full_info().uss - before) / 1e6
    print(f"  {1e6 * seconds / STEPS:.2f} us a step to append the rows of {RANKS} ranks")
    return report(f"memory of {STEPS:,} steps of {RANKS} ranks", Sample([added]), unit="MB", most=MAX_MEMORY_MB)


def _make_rows(first: int) -> np.ndarray:
    """Return the rows of a dispatch, in the order in which the recorder appends them."""
    rows = np.zeros(DISPATCH * RANKS, ROW_DTYPE)
    rows["step"] = np.repeat(np.arange(first, first + DISPATCH), RANKS)
    rows["rank"] = np.tile(np.arange(RANKS), DISPATCH)
    rows["samples"], rows["weight"], rows["loss"], rows["step_s"] = 32, 32, 1.0, 0.001
    return rows


def measure_opening() -> bool:
    """Measure the first message, which a newly opened page gets."""
    source = FakeSource(ranks=RANKS, steps=STEPS)
    source.advance(STEPS)
    seconds = []
    for _ in range(PAIRS):
        start = time.thread_time()
        MessageBuilder(source).build_snapshot()
        seconds.append(time.thread_time() - start)
    return report(f"processor time to open a run of {STEPS:,} steps", Sample(seconds), unit="s", most=MAX_OPENING_S)


def measure_nodes() -> None:
    """Print the processor time and size of the first message of a dashboard, by number of nodes."""
    for ranks in NODES:
        source = FakeSource(ranks=ranks, steps=NODE_STEPS)
        source.advance(NODE_STEPS)
        seconds, size = [], 0
        for _ in range(PAIRS):
            start = time.thread_time()
            message = MessageBuilder(source).build_snapshot()
            seconds.append(time.thread_time() - start)
            size = len(json.dumps(message.content)) + sum(map(len, message.buffers))
        low, middle, high = np.percentile(seconds, [25, 50, 75])
        text = f"{1000 * middle:.1f} ({1000 * low:.1f} to {1000 * high:.1f}) ms, {size / 1000:.0f} kB"
        print(f"  first message of {NODE_STEPS:,} steps on {ranks} nodes: {text}")
