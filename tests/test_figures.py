"""The kept picture, by its structure: lines, labels, bands, marks."""

import numpy as np
import pytest

from dtkit.dashboard import figures
from dtkit.records import Evaluation, State
from tests.fake_source import FakeSource


def lines(ax):
    return [line.get_gid() for line in ax.get_lines() if not line.get_gid().startswith("event-")]


def end_labels(ax):
    return {text.get_text() for text in ax.texts if text.get_gid() == "end"}


def test_a_line_and_a_label_a_node_and_one_for_all():
    source = FakeSource(ranks=4)
    source.advance(50)
    loss, throughput = figures.run_figure(source).axes
    nodes = [f"node {k}" for k in range(4)]
    assert lines(loss) == [*nodes, "mean"]
    assert lines(throughput) == [*nodes, "all ÷ 4"]
    assert end_labels(loss) == {*nodes, "mean"}
    assert end_labels(throughput) == {*nodes, "all ÷ 4"}
    assert throughput.get_ylim()[0] == 0
    steps, values = source.history.loss(2)
    drawn = loss.get_lines()[2]
    np.testing.assert_array_equal(drawn.get_xdata(), steps)
    np.testing.assert_allclose(drawn.get_ydata(), values, rtol=1e-6)


@pytest.mark.parametrize("ranks", [9, 256])
def test_many_nodes_are_a_band_and_their_mean(ranks):
    source = FakeSource(ranks=ranks)
    source.advance(30)
    loss, throughput = figures.run_figure(source).axes
    assert lines(loss) == ["mean"]
    assert lines(throughput) == [f"all ÷ {ranks}"]
    assert len(loss.collections) == 1


def test_one_node_needs_no_mean():
    source = FakeSource(ranks=1)
    source.advance(30)
    loss, throughput = figures.run_figure(source).axes
    assert lines(loss) == lines(throughput) == ["node 0"]


def test_the_title_says_what_how_and_how_far():
    source = FakeSource(name="$Net_0$ <b>")  # mathematics and markup stay text
    source.advance(12)
    source.state = State.PAUSED
    figure = figures.run_figure(source)
    assert figure.get_suptitle() == "$Net_0$ <b> · DataParallel() · 4 nodes · paused · 12 of 400 steps"
    assert figures.png(figure).startswith(b"\x89PNG")


def test_events_and_validation_are_marked():
    source = FakeSource()
    source.advance(20)
    source.event("lr", "learning rate set to 0.01")
    source.event("print", "not worth a mark")
    source.advance(20)
    source.history.add(Evaluation(30, 100, {"loss": 0.7, "accuracy": 0.9}))
    loss, throughput = figures.run_figure(source).axes
    for ax in (loss, throughput):
        assert [x.get_gid() for x in ax.get_lines() if x.get_gid().startswith("event-")] == ["event-lr"]
    assert "valid" in lines(loss)
    assert "valid" in end_labels(loss)
    assert "valid" not in lines(throughput)


@pytest.mark.parametrize("state", list(State))
def test_without_a_step_it_says_so(state):
    source = FakeSource()
    source.state = state
    figure = figures.run_figure(source)
    assert all(any(t.get_text() == "no step yet" for t in ax.texts) for ax in figure.axes)
    figures.png(figure)


@pytest.mark.parametrize("losses", [[1.0], [float("nan")], [float("inf")], [1e300, -1e300], [0.0, 0.0]])
def test_strange_losses_are_drawn_without_a_warning(losses):
    source = FakeSource(ranks=2)
    for loss in losses:
        source.advance(1, loss=loss)
    figures.png(figures.run_figure(source))


def test_a_long_run_is_drawn_from_few_points_with_its_extremes():
    source = FakeSource(ranks=4, steps=100_000)
    source.advance(50_000)
    source.advance(1, loss=77.0)
    source.advance(49_999)
    loss = figures.run_figure(source).axes[0]
    assert all(len(line.get_xdata()) <= 512 for line in loss.get_lines())
    assert max(band.get_paths()[0].vertices[:, 1].max() for band in loss.collections) == 77


def test_the_picture_does_not_follow_a_style():
    import matplotlib as mpl

    source = FakeSource()
    source.advance(5)
    with mpl.rc_context({"text.color": "white", "axes.facecolor": "black", "savefig.facecolor": "black"}):
        figure = figures.run_figure(source)
        figures.png(figure)
    assert figure.axes[0].get_facecolor() == (1, 1, 1, 1)
    assert figure.axes[0]._left_title.get_color() == figures.INK
    assert figure._suptitle.get_color() == figures.INK


def test_pyplot_is_never_loaded():
    import subprocess
    import sys

    code = "import dtkit.dashboard.figures, sys; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.0, 0.01], [0.0, 0.1]),
        ([0.99, 1.0], [0.9, 1.0]),
        ([], []),
    ],
)
def test_labels_are_pushed_apart_around_their_middle(wanted, placed):
    assert figures.spread(wanted, 0.1) == pytest.approx(placed)
