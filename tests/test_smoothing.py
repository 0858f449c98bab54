"""Moving averages of the page's charts: one weight means the same number of steps in each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.curves import LOSS, MAX_BUCKETS, downsample
from tests.support.fake_source import FakeSource
from tests.support.node import evaluate_page_code

if TYPE_CHECKING:
    from pathlib import Path

_WEIGHT = 0.99
_GRAINS = """({
  points: (steps, values, merged) => seriesGrain({
    points: steps.length, lines: 1, merged, values: steps.flatMap((step, k) => [step, values[k]]),
  }),
  buckets: (means, width, origin = 1, last, most) => bucketGrain(
    { data: means.flatMap((v) => [v, v, v]), used: means.length, width, origin, last }, 1,
    { first: 0, nodes: 0, banded: false }, most,
  ),
  smooth: (grain, weight) => movingAverage(grain, 0, weight),
})"""


def smooth(folder: Path, grains: list[str], weight: float = _WEIGHT) -> list[np.ndarray]:
    """Return the moving averages of grains that `_GRAINS` makes as `make`."""
    (code := folder / "code").mkdir()
    averages = ", ".join(f"make.smooth({grain}, {weight})" for grain in grains)
    module = 'chart/average.js";\nimport { bucketGrain, seriesGrain } from "./static/chart/grain.js'
    found = evaluate_page_code(code, module, ["movingAverage"], f"((make) => [{averages}])({_GRAINS})")
    return [np.array(line, float) for line in found]  # None is NaN


def average_steps(values: np.ndarray, weight: float = _WEIGHT) -> np.ndarray:
    """Return the moving average of every step, as TensorBoard has it: without the bias of its start."""
    sums, average = 0.0, []
    for step, value in enumerate(values, 1):
        sums = weight * sums + (1 - weight) * value
        average.append(sums / (1 - weight**step))
    return np.array(average)


def make_series(count: int = 1850) -> np.ndarray:
    steps = np.arange(1, count + 1)
    return 2 * np.exp(-steps / 300) + 0.1 * np.sin(steps / 90)


def as_points(steps: Any, values: Any, *more: Any) -> str:
    return f"make.points({', '.join(json.dumps(np.asarray(part).tolist()) for part in (steps, values, *more))})"


def as_buckets(values: np.ndarray, width: int) -> str:
    return f"make.buckets({json.dumps(values.reshape(-1, width).mean(axis=1).tolist())}, {width})"


def test_a_line_of_single_steps_has_the_usual_moving_average(tmp_path: Path):
    values = make_series()
    (line,) = smooth(tmp_path, [as_points(1 + np.arange(len(values)), values)])
    np.testing.assert_allclose(line, average_steps(values), rtol=1e-9)


@pytest.mark.parametrize("weight", [0.5, 0.9, 0.99, 0.995])
def test_smoothing_a_constant_gives_the_constant(tmp_path: Path, weight: float):
    steps = np.cumsum(np.random.default_rng(0).integers(1, 400, 60))
    constant = np.full(60, 0.7)
    grains = [as_points(steps, constant), as_points(steps, constant, [37, 1, int(steps[-1])]), as_buckets(constant, 5)]
    for line in smooth(tmp_path, grains, weight):
        np.testing.assert_allclose(line, 0.7, rtol=1e-9)


def test_one_weight_means_the_same_steps_in_every_chart(tmp_path: Path):
    """A chart draws each step, each tenth one that was logged, or means of many."""
    values, width = make_series(), 37
    middles = np.arange(0, len(values), width) + width // 2
    means = values.reshape(-1, width).mean(axis=1)
    rare = np.arange(9, len(values), 10)
    grains = [
        as_points(1 + rare, values[rare]),
        as_buckets(values, width),
        as_points(1 + middles, means, [width, 1, 1850]),
    ]
    logged, buckets, merged = smooth(tmp_path, grains)
    expected = average_steps(values)
    span = np.ptp(values)
    assert np.abs(logged[10:] - expected[rare][10:]).max() < 0.03 * span
    for line in (buckets, merged):
        assert np.abs(line[3:] - expected[middles][3:]).max() < 0.03 * span


def test_a_smoothed_line_begins_at_its_first_value(tmp_path: Path):
    grains = [
        as_points([30, 40], [0.9, 0.8]),
        as_points([19, 56], [0.9, 0.8], [37, 1, 70]),
        "make.buckets([0.9, 0.8], 37)",
    ]
    for line in smooth(tmp_path, grains):
        assert line[0] == pytest.approx(0.9)


def test_a_gap_ages_what_was_before_it_and_no_value_stands_for_it(tmp_path: Path):
    steps = np.concatenate([np.arange(1, 200), np.arange(5000, 5200)])
    values = np.where(steps < 200, 5.0, np.where(steps % 2, 1.0, 2.0))
    (line,) = smooth(tmp_path, [as_points(steps, values)])
    after = line[steps >= 5000]
    assert after[0] == 2.0
    assert abs(after[20] - 1.5) < 0.1, "the first value after a gap counts for all of it"


def test_an_incomplete_last_bucket_counts_by_its_steps(tmp_path: Path):
    """The last of 801 steps is alone in its bucket: one noisy step must not bend the end of the smoothed line."""
    values = np.where(np.arange(801) < 800, 1.0, 9.0)
    means = [*values[:800].reshape(-1, 8).mean(axis=1), values[800]]
    grain = f"make.buckets({json.dumps(means)}, 8, 1, 801, null)"
    (line,) = smooth(tmp_path, [grain], 0.9)
    assert line[-1] == pytest.approx(average_steps(values, 0.9)[-1], rel=1e-6)
    assert line[-2] == pytest.approx(1)


def test_messages_and_figures_have_the_steps_of_an_incomplete_bucket():
    source = FakeSource(ranks=2)
    source.advance(last := 2 * MAX_BUCKETS + 5)
    builder = MessageBuilder(source)
    curves = builder.build_snapshot().content["curves"]
    assert (curves["width"], curves["last"]) == (4, last)
    assert builder.build_detail(10, 20).content["curves"]["last"] == 20
    part = downsample(source.history, LOSS, 2)
    assert part.middle_steps[-2:].tolist() == [last - 2.5, last]
    expected = source.history.totals()["loss"][-32 - 5 :].mean()  # the last bucket is a part of the one before it
    assert part.merge_to_quantiles(64).values[-1, -1, 1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("mode", "middle"), [("step", 5.5), ("time", 5.0)])
def test_a_compared_run_counts_no_steps_after_its_last(tmp_path: Path, mode: str, middle: float):
    """The second run ends with the first step of a part that the first one has whole, and so does the last point."""
    values = [np.ones(401), np.where(np.arange(321) < 320, 1.0, 9.0)]
    parts = [[part[k : k + 10].mean() if k < len(part) else None for k in range(0, 401, 10)] for part in values]
    middles = np.minimum(np.arange(0, 401, 10) + middle, 401)
    rows = [[at, first, second, None] for at, first, second in zip(middles, *parts, strict=True)]
    store = {"head": {"axes": {"time": [[[1, 401], [1, 401]], [[1, 321], [1, 321]]], "last": [401, 321]}}}
    numbers = f"{json.dumps([number for row in rows for number in row])}.map((v) => v ?? NaN)"
    series = f"seriesGrain({{ points: {len(rows)}, lines: 3, values: {numbers} }})"
    module = (
        'chart/average.js";\nimport { seriesGrain } from "./static/chart/grain.js";\n'
        'import { withSteps } from "./static/chart/run_axis.js'
    )
    grain = f'withSteps({json.dumps(store)}, {series}, "{mode}")'
    line = evaluate_page_code(tmp_path, module, ["movingAverage"], f"movingAverage({grain}, 1, 0.9)")
    assert line[32] == pytest.approx(average_steps(values[1], 0.9)[-1], rel=0.05)


def test_a_range_in_sight_goes_on_from_the_steps_before_it(tmp_path: Path):
    values = make_series()
    coarse, fine = as_buckets(values, 37), json.dumps(values[740:1110].tolist())
    (line,) = smooth(tmp_path, [f"{{ ...make.buckets({fine}, 1, 741), earlier: {coarse} }}"])
    assert np.abs(line - average_steps(values)[740:1110]).max() < 0.01 * np.ptp(values)


def test_runs_on_a_time_axis_are_smoothed_by_their_steps(tmp_path: Path):
    """The second run's steps take four times as long, so that a part of the axis has a quarter of the steps."""
    values = make_series(1600)
    parts = [values.reshape(-1, 80).mean(axis=1), values[:400].reshape(-1, 20).mean(axis=1)]
    rows = np.column_stack([np.arange(20) * 80 + 40.0, *parts, np.full(20, np.nan)])
    store = {"head": {"axes": {"time": [[[1, 1600], [1, 1600]], [[1, 400], [4, 1600]]]}}}
    series = f"seriesGrain({{ points: 20, lines: 3, values: {json.dumps(rows.reshape(-1).tolist())} }})"
    module = (
        'chart/average.js";\nimport { seriesGrain } from "./static/chart/grain.js";\n'
        'import { withSteps } from "./static/chart/run_axis.js'
    )
    lines = evaluate_page_code(
        tmp_path,
        module,
        ["movingAverage"],
        f'[0, 1].map((run) => movingAverage(withSteps({json.dumps(store)}, {series}, "time"), run, {_WEIGHT}))',
    )
    for line, width in zip(lines, (80, 20), strict=True):
        middles = np.arange(20) * width + width // 2
        expected = average_steps(values[: 20 * width])[middles]
        assert np.abs(np.array(line) - expected)[2:].max() < 0.05 * np.ptp(values)
