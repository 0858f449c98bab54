"""Speed and duration of a run: one definition and one rounding in every view."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

import dtkit
from dtkit._util import formatting
from dtkit.dashboard import report
from dtkit.dashboard.figures import run_figure
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.text import run_text
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.speed import compute_speed
from dtkit.types import State
from tests.support.fake_source import FakeSource
from tests.support.node import evaluate_page_code

if TYPE_CHECKING:
    from pathlib import Path


def make_history(step_s: np.ndarray, samples: int = 32) -> History:
    """Return a history of these seconds by step and rank; NaN for a rank that has no row."""
    history = History()
    for step, times in enumerate(step_s):
        ranks = np.flatnonzero(np.isfinite(times))
        rows = np.zeros(len(ranks), ROW_DTYPE)
        rows["step"], rows["rank"], rows["samples"], rows["step_s"] = step, ranks, samples, times[ranks]
        history.append(rows)
    return history


def test_time_of_ranks_that_are_slow_in_turn_is_not_the_sum_of_the_slowest():
    steps = np.arange(41)[:, None] + np.arange(2)
    speed = compute_speed(make_history(np.where(steps % 2, 0.03, 0.01)))
    assert speed.step_s == pytest.approx(0.02)
    assert speed.samples_per_s == pytest.approx(64 / 0.02)


def test_the_first_step_warms_up_and_does_not_count():
    times = np.full((11, 2), 0.1)
    times[0] = 30.0
    assert compute_speed(make_history(times)).step_s == pytest.approx(0.1)
    assert compute_speed(make_history(times[:1])).step_s == pytest.approx(30.0)
    assert compute_speed(make_history(times), 4).step_s == pytest.approx(0.1)


def test_steps_of_a_lost_rank_are_not_missing_from_the_time():
    times = np.full((31, 3), 0.1)
    times[:, 2] = 0.2  # the slowest rank, which is lost for ten steps
    times[11:21, 2] = np.nan
    speed = compute_speed(make_history(times))
    assert speed.step_s * 30 == pytest.approx(20 * 0.2 + 10 * 0.1)
    assert speed.samples_per_s == pytest.approx((20 * 96 + 10 * 64) / 5)


def test_a_long_history_counts_every_row_once():
    history = History()
    rows = np.zeros(3 * 12_001, ROW_DTYPE)
    rows["step"], rows["rank"] = np.repeat(np.arange(12_001), 3), np.tile(np.arange(3), 12_001)
    rows["samples"], rows["step_s"] = 1, 0.5
    history.append(rows)
    assert compute_speed(history) == pytest.approx((6.0, 0.5))


def test_no_step_has_no_speed():
    assert all(map(math.isnan, compute_speed(History())))


def test_every_view_shows_one_duration_and_one_speed(tmp_path: Path):
    run = FakeSource(ranks=2)
    run.slowness = {1: 1.5}
    run.advance(200)
    run.slowness = {}
    run.advance(77)  # 27.7 s; a view that rounds would show 28 s
    run.end(State.STOPPED)
    elapsed, rate = "27 s", formatting.format_rate(compute_speed(run.history).samples_per_s)
    report.write_report(run, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    cards = dict(re.findall(r'<div class="card"><span>([^<]*)</span><b>([^<]*)</b>', page))
    assert (cards["duration"], cards["throughput"]) == (elapsed, rate)
    header, row = (re.split(" {2,}", line) for line in repr(dtkit.compare(run, run)).splitlines()[:2])
    assert [row[header.index(name)] for name in ("duration", "samples/s")] == [elapsed, rate]
    assert f", {elapsed} elapsed" in run_text.format_run(run)
    assert f"steps in {elapsed}" in run_figure.draw_run(run).get_suptitle().replace("\u00a0", " ").replace("\n", " ")
    seconds = MessageBuilder(run).build_snapshot().content["status"]["elapsed"]
    assert evaluate_page_code(tmp_path, "numbers.js", ["elapsedTime"], f"elapsedTime({seconds})") == elapsed


def test_page_and_notebook_round_a_duration_alike(tmp_path: Path):
    seconds = [0, 0.04, 0.1, 0.99, 1.29, 8.2, 9.99, 10, 59.9, 125, 3780.5, 1e6]
    shown = evaluate_page_code(tmp_path, "numbers.js", ["elapsedTime"], f"{seconds}.map((s) => elapsedTime(s))")
    assert shown == [formatting.format_elapsed(value) for value in seconds]
