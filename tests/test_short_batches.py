"""Batches of few rows in charts of several runs: they set no limits of an axis, and no sample is lost."""

import numpy as np
import pytest

import dtkit
from dtkit.dashboard.compare import Comparison
from dtkit.dashboard.figures.comparison_figure import draw_comparison
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.summary.comparison import MEAN_LOSS, read_rates
from dtkit.dashboard.summary.curves import Curves
from dtkit.dashboard.summary.short_batches import SHORT_BATCH_NOTE, compute_drawn_losses, join_short_batches
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.totals import TOTAL_DTYPE
from tests.support.report_page import remove_own_scripts


def make_history(epochs: int = 10, sizes: tuple[int, ...] = (19, 19, 19, 3)) -> History:
    """Return a history whose short batches have a loss of 9 instead of 1, and whose steps last 0.1 s."""
    rows = np.zeros(epochs * len(sizes), ROW_DTYPE)
    rows["step"], rows["samples"] = np.arange(1, len(rows) + 1), np.tile(sizes, epochs)
    rows["weight"], rows["step_s"] = rows["samples"], 0.1
    rows["loss"] = np.where(rows["samples"] == 3, 9, 1)
    history = History()
    history.append(rows)
    return history


def make_totals(samples: list[int], losses: list[float]) -> np.ndarray:
    totals = np.zeros(len(samples), TOTAL_DTYPE)
    totals["step"], totals["samples"] = np.arange(1, len(samples) + 1), samples
    totals["loss"], totals["step_s"] = losses, 0.1
    totals["weight"] = np.where(np.isnan(losses), 0, samples)
    return totals


def read_series(comparison: Comparison, title: str) -> np.ndarray:
    message = ComparisonMessageBuilder(comparison).build_snapshot()
    place = next(series for series in message.content["series"] if series["title"] == title)
    values = np.frombuffer(message.buffers[2], "<f4")[place["first"] :][: place["points"] * (place["lines"] + 1)]
    return values.reshape(place["points"], -1)


MERGED_LOSS = (19 * 1 + 3 * 9) / 22


def test_a_short_batch_has_the_mean_with_the_batch_before():
    comparison = dtkit.compare(make_history(), make_history(sizes=(19,)))
    message = ComparisonMessageBuilder(comparison).build_snapshot()
    curves = np.frombuffer(message.buffers[0], "<f4").reshape(-1, 3, 3)
    assert curves[3, 0] == pytest.approx(MERGED_LOSS)
    assert np.nanmax(curves) == pytest.approx(MERGED_LOSS)
    assert np.nanmax(read_series(comparison, "Loss against time")[:, 1:]) == pytest.approx(MERGED_LOSS)
    figure = draw_comparison(comparison.labels, comparison.histories, comparison.order)
    assert max(ax.get_ylim()[1] for ax in figure.axes) < 3
    assert comparison.histories[0].loss()[1].max() == 9


def test_the_throughput_has_no_dip_at_a_short_batch_and_counts_each_sample():
    comparison = dtkit.compare(make_history(), make_history(sizes=(19,)))
    rates = read_series(comparison, "Throughput")[:, 1]
    np.testing.assert_allclose(rates[np.isfinite(rates)], 60 / 0.4, rtol=1e-4)
    np.testing.assert_allclose(read_rates(comparison.histories[0].totals())[1], 60 / 0.4, rtol=1e-4)
    history = make_history(100, (19, 3))
    rest = make_history(1, (19, 19, 8)).rows()
    rest["step"] += 200
    history.append(rest)
    steps, samples, seconds = join_short_batches(history.totals())
    assert steps.tolist() == [*range(1, 200, 2), 201, 202]
    assert (samples.sum(), seconds.sum()) == pytest.approx((2246, 20.3))


def test_curves_read_in_parts_merge_short_batches_too():
    whole, once, parts = make_history(), Curves((MEAN_LOSS,), 1), Curves((MEAN_LOSS,), 1)
    once.update(whole)
    growing = History()
    for row in whole.rows():
        growing.append(row.reshape(1))
        parts.update(growing)
    np.testing.assert_array_equal(parts.get_all().values, once.get_all().values)
    assert once.get_all().values[3, 0, 1] == pytest.approx(MERGED_LOSS)


@pytest.mark.parametrize(
    ("samples", "losses", "drawn"),
    [
        ([], [], []),
        ([3, 19], [9, 1], [9, 1]),
        ([64, 32, 32], [1, 5, 9], [1, 5, 9]),
        ([64, 16, 16], [1, 6, 9], [1, 2, 9]),
        ([64, 0, 64], [1, 5, 1], [1, 5, 1]),
        ([64, 16], [np.nan, 9], [np.nan, 9]),
        ([64, 16], [1, np.nan], [1, np.nan]),
        ([64, 16], [np.inf, 9], [np.inf, 9]),
    ],
)
def test_only_the_first_of_smaller_batches_is_merged_and_only_with_a_known_loss(samples, losses, drawn):
    np.testing.assert_allclose(compute_drawn_losses(make_totals(samples, losses)), drawn)


def test_a_page_says_that_short_batches_are_merged(tmp_path):
    for sizes, is_told in (((19, 19, 19, 3), True), ((19,), False)):
        comparison = dtkit.compare(make_history(sizes=sizes), make_history(sizes=(19,)))
        message = ComparisonMessageBuilder(comparison).build_snapshot()
        assert message.content["head"]["help"] == (SHORT_BATCH_NOTE if is_told else "")
        comparison.report(tmp_path / "comparison.html")
        page = remove_own_scripts((tmp_path / "comparison.html").read_text(encoding="utf-8"))
        assert (SHORT_BATCH_NOTE[1:] in page) is is_told
        assert ("he last batch of an epoch" in page) is is_told  # what a reader knows it by
