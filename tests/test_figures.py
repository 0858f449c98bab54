"""The static figure of a run: lines, labels, bands, and marks."""

import dataclasses
import itertools

import numpy as np
import pytest
from matplotlib.text import Text

import dtkit
from dtkit._util import formatting
from dtkit.dashboard import kept_picture
from dtkit.dashboard.figures import plan_figure, render, run_charts, run_figure, style
from dtkit.dashboard.figures.panels.tiles import list_tiles
from dtkit.dashboard.summary.event_marks import describe_event_marks
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing
from dtkit.errors import EngineError
from dtkit.explain import explain
from dtkit.health.diagnosis import RankObservation
from dtkit.health.stall_report import report_stuck
from dtkit.history.scalars import ScalarRecord
from dtkit.schedules.schedule import Schedule
from dtkit.types import Evaluation, Event, Failure, ReplicaCheckResult, State
from tests.support.fake_source import FakeSource
from tests.support.plans import make_plan
from tests.support.stage_reports import make_pipeline_reports, make_sharded_reports


def panel(figure, name):
    """The axes with that title."""
    (found,) = [ax for ax in figure.axes if ax._left_title.get_text() == name]
    return found


def get_notices(figure):
    """The notices under the title, without the verdict and the learning rate."""
    notices = [text for text in figure.texts if (text.get_gid() or "").startswith("notice-")]
    return [text for text in notices if text.get_gid() not in ("notice-verdict", "notice-lr")]


def lines(ax):
    return [line.get_gid() for line in ax.get_lines() if not line.get_gid().startswith("event-")]


def end_labels(ax):
    return {text.get_text() for text in ax.texts if text.get_gid() == "end"}


def test_each_metric_has_a_panel():
    source = FakeSource(ranks=2)
    source.advance(50)
    for step in (10, 20, 50):
        source.history.add(Evaluation(step, 10, {"loss": 1.0, "accuracy": step / 100, "broken": float("nan")}))
    figure = run_figure.draw_run(source)
    accuracy = panel(figure, "accuracy")
    (line,) = [line for line in accuracy.get_lines() if line.get_gid() == "metric accuracy"]
    assert line.get_ydata().tolist() == [0.1, 0.2, 0.5]
    assert accuracy.get_xlim() == panel(figure, "Loss").get_xlim()  # equal steps stand below each other
    assert accuracy._right_title.get_text() == "last 0.500"  # without the rest, for which there is no room
    assert not [ax for ax in figure.axes if ax._left_title.get_text() in ("loss", "broken")]


@pytest.mark.parametrize("width", [6, 9])
def test_a_long_headline_stays_within_its_figure(width):
    figure = render.create_figure(width, 3)
    style.set_figure_title(
        figure, "Memory after 10 steps of Sequential with Pipeline(stages=2, balance_by='parameters')" * 2
    )
    figure.canvas.draw()
    assert figure.get_suptitle().count("\n") >= 1
    assert figure._suptitle.get_window_extent().x1 <= width * figure.dpi


def test_signs_of_near_events_are_one_and_none_overlaps():
    source = FakeSource(ranks=2)
    near = (("pause", 3), ("lr", 3), ("resume", 9), ("lost", 4))
    for kind, steps in (*near, ("repair", 30), ("repair", 60), ("save", 90)):
        source.advance(steps)
        source.event(kind, kind)
    source.advance(60)
    figure = run_figure.draw_run(source)
    figure.canvas.draw()
    for name in ("Loss", "Throughput"):
        signs = [text for text in panel(figure, name).texts if text.get_gid() == "sign"]
        assert len(signs) >= 2
        assert [text.get_text() for text in signs[:3]] == ["‖", "lr", "▶"]
        urgent = {text.get_text() for text in signs if text.get_color() != style.MUTED_COLOR}
        assert urgent == {"†"}
        boxes = sorted((text.get_window_extent() for text in signs), key=lambda box: box.x0)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        dots = [text for text in panel(figure, name).texts if text.get_gid() == "between signs"]
        assert {text.get_text() for text in dots} == {"·"}  # so that two events are not read as one
        assert len(dots) >= 2


def test_the_sign_of_an_event_after_the_last_values_is_at_their_end():
    source = FakeSource(ranks=2)
    source.advance(20)
    source.history.add(Event(23, "error", "the loss is inf", 1_700_000_100.0))
    ax = panel(run_figure.draw_run(source), "Loss")
    (sign,) = [text for text in ax.texts if text.get_gid() == "sign"]
    assert sign.xy[0] == ax.get_xlim()[1]


@pytest.mark.parametrize("lowest", [0.5, 1e-6])  # a linear scale, and a logarithmic one
def test_signs_of_events_are_above_all_lines_and_points(lowest: float):
    source = FakeSource(ranks=2)
    source.advance(60)
    values = [(step, lowest if step <= 8 else 1.0, 1.0) for step in range(1, 61)]
    source.history.add(ScalarRecord(0, {"share": values}))
    for step in range(5, 61, 5):
        source.history.add(Evaluation(step, 10, {"loss": 1.0, "accuracy": 1 - 1 / step**2}))
    source.event("pause", "paused")
    figure = run_figure.draw_run(source)
    figure.canvas.draw()
    assert panel(figure, "share").get_yscale() == ("linear" if lowest == 0.5 else "log")
    for name in ("Throughput", "share", "accuracy"):
        ax = panel(figure, name)
        (sign,) = [text for text in ax.texts if text.get_gid() == "sign"]
        highest = ax.transData.transform((60, ax.dataLim.y1))[1]
        assert highest + 2 / 72 * figure.dpi < sign.get_window_extent().y0, name  # points have a height


def test_a_number_that_is_logged_and_validated_has_one_panel_and_one_tile():
    """Two panels had to be told apart by their titles, while the loss had its validations in one."""
    source = FakeSource(ranks=2)
    source.advance(60)
    source.history.add(ScalarRecord(0, {"confidence": [(step, 0.5, 1.0) for step in range(1, 61)]}))
    source.history.add(Evaluation(60, 10, {"loss": 1.0, "confidence": 0.9}))
    figure = run_figure.draw_run(source)
    titles = [ax._left_title.get_text() for ax in figure.axes]
    assert [title for title in titles if "confidence" in title] == ["confidence"]
    ax = panel(figure, "confidence")
    (points,) = [line for line in ax.lines if line.get_gid() == "validation"]
    np.testing.assert_equal(points.get_xydata(), [[60, 0.9]])
    assert ax.get_ylim()[1] > 0.9
    (ax,) = dict(list_charts(source))["confidence"].axes  # which has room for all of its title
    assert ax.get_title(loc="right") == "last 0.500, ◇ validation 0.900"
    tiles = {tile.label: tile for tile in list_tiles(source)}
    assert (tiles["confidence"].value, tiles["confidence"].note) == ("0.500", "validation 0.900")


def test_a_long_title_gets_smaller_before_it_is_cut():
    source, name = FakeSource(ranks=2), "a rather long name of a number"
    source.advance(20)
    source.history.add(ScalarRecord(0, {"entropy": [(step, 0.5, 1.0) for step in range(1, 21)]}))
    source.history.add(ScalarRecord(0, {name: [(step, 0.5, 1.0) for step in range(1, 21)]}))
    source.history.add(Evaluation(20, 10, {"loss": 1.0, "accuracy": 0.9, "top5 accuracy": 0.9}))
    title = panel(run_figure.draw_run(source), name)._left_title
    assert 8 <= title.get_fontsize() < 10


CELL_WIDTHS = {600: 484, 800: 692}
"""Width of a cell's output in JupyterLab by that of the window, in CSS pixels, as measured in Chromium."""


@pytest.mark.parametrize("ranks", [4, 16])
def test_the_texts_of_a_picture_are_readable_in_narrow_windows(ranks):
    source = make_complete_run(ranks)
    figure = run_figure.draw_run(source)
    width = render.get_css_width(figure) - 2 * render.CARD_PADDING  # as a saved notebook shows it
    assert width <= CELL_WIDTHS[800]
    points = {text.get_text(): text.get_fontsize() for text in figure.findobj(Text) if text.get_text()}
    pixels_per_point = min(width, CELL_WIDTHS[600] - 2 * render.CARD_PADDING) / figure.get_figwidth() / 72
    assert {text: size for text, size in points.items() if round(size * pixels_per_point) < 10} == {}


REPAIRED = "node 1 replaced: all go on from step 40 1.3 s after the loss, no step lost"


def make_complete_run(ranks=4):
    """Return a run with metrics, numbers of its own and of the machines, a replaced node and a timeline."""
    source = FakeSource(ranks=ranks, strips=True)
    source.advance(40)
    source.event("lost", "node 1 was lost: its process ended with signal SIGKILL (killed) on host0", 1)
    source.history.add(Event(40, "repair", REPAIRED, 1_700_000_040.0, 1, "node 1 replaced in 1.3 s, no step lost"))
    source.event("print", "a line of rank 0", 0)
    source.advance(20)
    source.history.add(Evaluation(60, 10, {"loss": 1.0, "accuracy": 0.75}))
    for name in ("entropy", "system/CPU (cores)", "system/network cards (MB/s)"):
        for rank in range(ranks):
            source.history.add(ScalarRecord(rank, {name: [(step, 0.5 + rank, 1.0) for step in range(1, 61, 5)]}))
    return source


def test_the_picture_has_what_the_live_view_has():
    figure = run_figure.draw_run(make_complete_run())
    names = {text.get_text() for text in figure.findobj(Text)}
    assert {"throughput", "mean loss", "mean step time", "waiting", "nodes", "4 / 4", "accuracy", "0.750"} <= names
    assert {"entropy", "CPU (cores)", "Network cards (MB/s)", "Timeline"} <= names
    assert {"engine", "pid", "4003", "host0", "13"} <= names  # the table of nodes
    assert any(text.startswith(REPAIRED[:30]) for text in names)
    assert "[0] a line of rank 0" in names
    assert not [name for name in names if "evaluation" in name]


def test_a_saved_notebook_keeps_the_panels_about_learning_and_speed():
    """A picture of all panels was 2,200 pixels long, and took two seconds of a core at each end of a run."""
    source = make_complete_run()
    names = [name for name, _ in list_charts(source)]
    assert names[:2] == ["Loss", "Throughput"]
    assert {"accuracy", "entropy", "Gradient norm", "Where a step's time goes"} <= set(names)
    assert not {"Timeline", "CPU (cores)", "Learning rate"} & set(names)
    source.lr = 0.05
    source.advance(20)
    assert "Learning rate" in [name for name, _ in list_charts(source)]
    picture = kept_picture.draw_kept_picture(source)
    for word in (
        "throughput",
        "mean loss",
        "nodes",
        "+ node 1 replaced in 1.3 s, no step lost",
        REPAIRED,
        "run.report()",
    ):
        assert word in picture.page
    assert 'alt="the charts of the run"' in picture.page
    assert 1200 < picture.width < 1260  # JupyterLab's cell in a window of 1,400 px has 1,250


def list_charts(source):
    return [(figure.axes[0].get_title(loc="left"), figure) for figure in run_charts.draw_run_charts(source)]


def test_charts_of_a_saved_notebook_are_readable_and_of_one_height_in_a_row():
    charts = list_charts(make_complete_run(ranks=2))
    assert len({figure.get_figwidth() for _, figure in charts}) == 1
    for _, figure in charts:
        assert figure.get_figwidth() <= 472 / 72 * style.SMALL_FONT_SIZE / 10 + 0.05  # 10 px in a window of 600 px
        assert not find_overlapping_texts(figure)
    heights = [figure.get_figheight() for _, figure in charts]
    assert all(left == right for left, right in zip(heights[::2], heights[1::2], strict=False))
    assert len({tuple(figure.axes[0].get_position().intervalx.round(4)) for _, figure in charts}) == 1


def test_memory_with_much_room_is_a_line_of_a_saved_notebook():
    source = make_complete_run(ranks=2)
    assert "Memory" not in dict(list_charts(source))
    line = "node 0 315 MB of 8 GB · 4 %, node 1 316 MB of 8 GB · 4 %"
    assert line in kept_picture.draw_kept_picture(source).page
    source.nodes = [dataclasses.replace(node, memory_total=500_000_000) for node in source.nodes]
    assert "Memory" in dict(list_charts(source))
    assert "Memory limits" not in kept_picture.draw_kept_picture(source).page


def test_the_mean_loss_of_the_tile_is_at_the_line_and_ticks_are_short():
    """Two means of different steps had one name."""
    source = FakeSource(ranks=2)
    source.advance(20, loss=0.25)
    source.advance(1, loss=0.5)
    (ax,) = dict(list_charts(source))["Loss"].axes
    (tile,) = [tile for tile in list_tiles(source) if tile.label == "mean loss"]
    assert tile.value == "0.263"  # of 20 steps
    assert "mean 0.263" in [text.get_text() for text in ax.texts]
    assert "0.3" in [text.get_text() for text in ax.get_yticklabels()]


def test_the_kept_picture_of_a_failed_run_has_its_error_and_its_log():
    source = make_complete_run()
    source.state, source.exception = State.FAILED, ValueError("a <b>bad</b> batch")
    picture = kept_picture.draw_kept_picture(source)
    assert REPAIRED in picture.page
    assert "ValueError: a &lt;b&gt;bad&lt;/b&gt; batch" in picture.page


def test_a_run_that_failed_before_its_first_step_keeps_its_words():
    source = FakeSource(ranks=2)
    source.state, source.exception = State.FAILED, ValueError("a bad batch")
    picture = kept_picture.draw_kept_picture(source)
    assert "ValueError: a bad batch" in picture.page
    assert "<img" not in picture.page
    assert picture.width > 600


def test_a_learning_rate_is_drawn_in_steps():
    source = FakeSource(ranks=2)
    for source.lr in (0.1, 2.0, 0.05):
        source.advance(20)
    chart = dict(list_charts(source))["Learning rate"].axes[0]
    (line,) = [line for line in chart.get_lines() if "event" not in line.get_gid()]
    assert line.get_drawstyle() == "steps-mid"


def test_a_learning_rate_has_no_value_between_two_that_were_set():
    source = FakeSource(ranks=2)
    source.advance(603)
    source.lr = 0.005
    source.advance(402)
    chart = dict(list_charts(source))["Learning rate"].axes[0]
    (line,) = [line for line in chart.get_lines() if "event" not in line.get_gid()]
    assert np.unique(line.get_ydata()).tolist() == pytest.approx([0.005, 0.1])


def test_marks_of_events_take_no_room_from_a_logarithmic_axis():
    source = FakeSource(ranks=2)
    source.advance(40)
    source.advance(1, loss=50.0)
    source.advance(40, loss=1e-3)
    source.event("pause", "paused")
    loss = panel(run_figure.draw_run(source), "Loss")
    assert loss.get_yscale() == "log"
    assert loss.get_ylim()[1] < 200


def test_a_band_on_a_logarithmic_axis_ends_at_the_least_positive_value():
    source = FakeSource(ranks=1, steps=2000)
    for steps, loss in ((1, 50.0), (300, 1.0), (1, 0.0), (300, 0.01)):
        source.advance(steps, loss=loss)
    loss = panel(run_figure.draw_run(source), "Loss")
    assert loss.get_yscale() == "log"
    edges = [float(path.vertices[:, 1].min()) for band in loss.collections for path in band.get_paths()]
    assert min(edges) == pytest.approx(0.01)


@pytest.mark.parametrize(("ranks", "words"), [(1, "band: "), (2, "┅ with waiting, bands: "), (12, "band: ")])
def test_the_bands_of_the_throughput_are_named_in_every_figure(ranks: int, words: str):
    source = FakeSource(ranks=ranks)
    source.advance(200)
    charts = dict(list_charts(source))
    for ax in (panel(run_figure.draw_run(source), "Throughput"), charts["Throughput"].axes[0]):
        assert ax.get_xlabel() == f"step, {words}10 to 90 %"


def test_prints_give_way_to_events_in_the_log_of_the_picture():
    source = make_complete_run()
    for k in range(100):
        source.event("print", f"line {k}", 0)
    texts = [text.get_text() for text in run_figure.draw_run(source).findobj(Text)]
    assert any(text.startswith(REPAIRED[:30]) for text in texts)
    assert "[0] line 99" in texts
    assert "[0] line 5" not in texts
    assert "14 of 103 events" in texts


def test_a_picture_names_each_phase_in_one_legend():
    figure = run_figure.draw_run(make_complete_run())
    legends = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
    assert [text.get_text() for legend in legends for text in legend.get_texts()] == list(PHASES)
    pipeline = FakeSource(ranks=4, stages=4, strips=True)
    pipeline.advance(60)
    figure = run_figure.draw_run(pipeline)
    named = [text.get_text() for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()]
    assert len(named) == len(set(named))


def test_names_of_lines_move_apart_where_they_are_drawn():
    source = FakeSource(ranks=8)
    source.advance(60)
    figure = run_figure.draw_run(source)
    figure.canvas.draw()
    heights = sorted(text.get_window_extent().y0 for text in figure.axes[0].texts if text.get_gid() == "end")
    tallest = max(text.get_window_extent().height for text in figure.axes[0].texts if text.get_gid() == "end")
    assert min(b - a for a, b in itertools.pairwise(heights)) >= tallest - 1


def test_names_at_the_top_of_a_panel_leave_room_for_its_note():
    source = FakeSource(ranks=2)
    source.advance(60)
    for rank in range(2):
        rows = [(step, 300.0 + rank + step / 60, 1.0) for step in range(1, 61)]
        source.history.add(ScalarRecord(rank, {"system/memory (MB)": rows}))  # lines that end at the top
    figure = run_figure.draw_run(source)
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == "Memory (MB)")
    assert ax.get_ylim()[1] > 305  # the line is not cut
    names = [text.get_window_extent() for text in ax.texts if text.get_gid() == "end"]
    assert len(names) == 3
    assert max(box.y1 for box in names) <= ax.get_window_extent().y1 + 0.5
    assert all(b.y0 >= a.y1 - 1 for a, b in itertools.pairwise(sorted(names, key=lambda box: box.y0)))


def test_panels_of_the_machines_have_the_steps_of_the_run():
    source = FakeSource(ranks=2)
    source.advance(60)
    for rank in range(2):
        source.history.add(ScalarRecord(rank, {"system/CPU (cores)": [(step, 0.5, 1.0) for step in (10, 30, 45)]}))
    figure = run_figure.draw_run(source)
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == "CPU (cores)")
    assert ax.get_xlim() == (1, 60)


def test_each_node_has_a_line_and_a_label():
    source = FakeSource(ranks=4)
    source.advance(50)
    loss, throughput, *_ = run_figure.draw_run(source).axes
    nodes = [f"node {k}" for k in range(4)]
    assert lines(loss) == [*nodes, "mean"]
    assert lines(throughput) == [*nodes, "with waiting"]
    assert end_labels(loss) == {*nodes, "mean"}
    assert end_labels(throughput) == {*nodes}  # longer names would take the width from the lines
    assert throughput.get_xlabel() == "step, ┅ with waiting"
    assert throughput.get_ylim()[0] == 0
    steps, values = source.history.loss(2)
    drawn = loss.get_lines()[2]
    np.testing.assert_array_equal(drawn.get_xdata(), steps)
    np.testing.assert_allclose(drawn.get_ydata(), values, rtol=1e-6)


@pytest.mark.parametrize(("factor", "scale"), [(1.1, "linear"), (2.0, "log")])
def test_logged_numbers_over_many_orders_have_a_log_scale_as_in_the_live_view(factor: float, scale: str):
    source = FakeSource(ranks=2)
    source.advance(40)
    for rank in range(2):
        source.history.add(ScalarRecord(rank, {"norm": [(step, factor**step, 1.0) for step in range(1, 41)]}))
    assert panel(run_figure.draw_run(source), "norm").get_yscale() == scale
    assert panel(dtkit.compare(source, source).figure(), "norm").get_yscale() == scale


def test_lines_take_most_of_a_panel():
    source = make_complete_run(ranks=2)
    charts = dict(list_charts(source))
    for name in ("Loss", "Throughput", "entropy"):
        assert charts[name].axes[0].get_window_extent().width > 0.74 * charts[name].bbox.width


def test_steps_without_rows_are_a_gap_with_single_steps_as_dots():
    source = FakeSource(ranks=2)
    for steps_with, steps_without in ((20, 10), (1, 10), (20, 0)):
        source.advance(steps_with)
        source.lose(1)
        source.advance(steps_without)
        source.event("repair", "node 1 replaced")
    loss = run_figure.draw_run(source).axes[0]
    both, gaps = loss.get_lines()[:2]
    assert np.isfinite(both.get_ydata()).all()
    assert np.isnan(gaps.get_ydata()).sum() == 20
    assert (both.get_markevery(), gaps.get_markevery()) == ([], [30])


@pytest.mark.parametrize("ranks", [9, 256])
def test_many_nodes_are_drawn_as_a_band_with_the_mean(ranks):
    source = FakeSource(ranks=ranks)
    source.advance(30)
    figure = run_figure.draw_run(source)
    loss, throughput = panel(figure, "Loss"), panel(figure, "Throughput")
    assert lines(loss) == ["mean"]
    assert lines(throughput) == ["with waiting"]
    assert len(loss.collections) == 1


def test_one_node_has_no_mean_line():
    source = FakeSource(ranks=1)
    source.advance(30)
    loss, throughput, *_ = run_figure.draw_run(source).axes
    assert lines(loss) == lines(throughput) == ["node 0"]


def test_lines_of_nodes_are_pale_below_a_solid_mean_as_in_the_live_view():
    source = FakeSource(ranks=2)
    source.advance(30)
    for rank in range(2):
        source.history.add(ScalarRecord(rank, {"entropy": [(step, 1.0, 1.0) for step in range(30)]}))
    panels = {ax.get_title(loc="left"): ax.get_lines()[:3] for ax in run_figure.draw_run(source).axes}
    for name in ("Loss", "entropy"):
        *nodes, mean = panels[name]
        assert [line.get_alpha() for line in nodes] == [0.7, 0.7]
        assert mean.get_linestyle() == "-"
        assert mean.get_linewidth() > nodes[0].get_linewidth()
    assert panels["Throughput"][2].get_linestyle() != "-"  # with waiting, which is not a mean of the lines above it


def test_stages_without_a_loss_have_no_line_and_samples_count_once():
    source = FakeSource(ranks=4, stages=2)
    source.advance(50)
    loss, throughput, *_ = run_figure.draw_run(source).axes
    assert lines(loss) == ["node 1", "node 3", "mean"]
    assert loss.get_lines()[1].get_color() == style.COLORS[3]  # a node keeps its colour
    assert lines(throughput) == [*(f"node {k}" for k in range(4)), "with waiting"]
    *nodes, overall = [line.get_ydata() for line in throughput.get_lines()]
    assert all((overall <= 1.001 * own).all() for own in nodes)
    np.testing.assert_allclose(overall, source.history.throughput()[1] / 2, rtol=1e-6)


def test_throughput_of_uneven_steps_is_that_of_their_samples_and_time():
    """A mean of rates exceeds it: one step in ten takes ten times as long here."""
    source = FakeSource(ranks=2)
    for k in range(640):
        source.slowness = {0: 10.0, 1: 10.0} if k % 10 == 0 else {}
        source.advance(1)
    throughput = run_figure.draw_run(source).axes[1]
    rows, totals = source.history.rows(), source.history.totals()
    for rank, line in enumerate(throughput.get_lines()[:2]):
        own = rows[rows["rank"] == rank]
        expected = own["samples"].sum() / (own["step_s"] - own["wait_s"]).sum()
        assert 1 / np.mean(1 / line.get_ydata()) == pytest.approx(expected, rel=0.01)
    overall = 1 / np.mean(1 / throughput.get_lines()[2].get_ydata())
    assert 2 * overall == pytest.approx(totals["samples"].sum() / totals["step_s"].sum(), rel=0.01)


def test_a_single_pipeline_has_a_throughput_line_for_all_nodes():
    source = FakeSource(ranks=2, stages=2)
    source.advance(50)
    throughput = run_figure.draw_run(source).axes[1]
    assert lines(throughput) == ["node 0", "node 1", "all"]
    np.testing.assert_allclose(throughput.get_lines()[-1].get_ydata(), source.history.throughput()[1], rtol=1e-6)


def test_the_title_has_model_strategy_and_progress():
    source = FakeSource(name="$Net_0$ <b>")  # mathematics and markup stay text
    source.advance(12)
    source.state = State.PAUSED
    figure = run_figure.draw_run(source)
    title = figure.get_suptitle().replace("\u00a0", " ").split("\n")
    assert title == ["$Net_0$ <b> · DataParallel() · 4 nodes · paused", "12 of 400 steps in 1.2 s"]
    assert render.render_png(figure).startswith(b"\x89PNG")


def test_events_and_validation_are_marked():
    source = FakeSource()
    source.advance(20)
    source.event("lr", "learning rate set to 0.01")
    source.event("print", "not worth a mark")
    source.advance(20)
    source.history.add(Evaluation(30, 100, {"loss": 0.7, "accuracy": 0.9}))
    loss, throughput, *_ = run_figure.draw_run(source).axes
    for ax in (loss, throughput):
        assert [x.get_gid() for x in ax.get_lines() if x.get_gid().startswith("event-")] == ["event-lr"]
    assert "validation" in lines(loss)
    assert loss._right_title.get_text() == "by node, ◇ validation"
    assert "validation" not in lines(throughput)


@pytest.mark.parametrize("ranks", [2, 8])
def test_step_time_bars_show_the_phases(ranks):
    source = FakeSource(ranks=ranks)
    source.slowness = {1: 2.0}
    source.advance(60)
    ax = panel(run_figure.draw_run(source), "Where a step's time goes")
    timing = compute_step_timing(source.history, ranks)
    for rank in range(ranks):
        left = 0.0
        for k, phase in enumerate(PHASES):
            (bar,) = [patch for patch in ax.patches if patch.get_gid() == f"{phase}-{rank}"]
            assert bar.get_x() == pytest.approx(left, abs=1e-6)
            assert bar.get_width() == pytest.approx(1e3 * timing.seconds[rank, k])
            left += bar.get_width()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["node 0", "▲ node 1", *(f"node {k}" for k in range(2, ranks))]
    assert ax._right_title.get_text() == f"▲ {timing.straggler.text.partition(': ')[0]}"  # the share has no room
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(PHASES)
    looks = {(str(patch.get_hatch()), patch.get_facecolor()) for patch in ax.get_legend().get_patches()}
    assert (
        len({hatch for hatch, _ in looks}) >= 6
    )  # told apart without colour; "forward" and "other" are dark and empty


def test_many_nodes_have_three_bars_without_a_straggler():
    source = FakeSource(ranks=16)
    source.advance(60)
    ax = panel(run_figure.draw_run(source), "Where a step's time goes")
    assert [label.get_text().split(":")[0] for label in ax.get_yticklabels()] == ["fastest", "median", "slowest"]
    assert ax._right_title.get_text() == ""


def test_optional_panels_are_drawn_where_they_have_data():
    source = FakeSource()
    source.advance(30)
    figure = run_figure.draw_run(source)
    assert lines(panel(figure, "Gradient norm")) == [formatting.format_loss(source.history.totals()["grad_norm"][-1])]
    rate = "learning rate 0.1, the same since the first step"
    assert rate in [text.get_text() for text in figure.texts]  # a line, not a third of the height
    assert "Learning rate" not in [ax._left_title.get_text() for ax in figure.axes]
    source.lr = 0.01
    rate = "learning rate 0.01 from the next step on, 0.1 until now"
    assert rate in [text.get_text() for text in run_figure.draw_run(source).texts]
    source.advance(30)
    rate = panel(run_figure.draw_run(source), "Learning rate")
    assert lines(rate) == ["0.01"]
    assert rate._right_title.get_text().startswith("since step 31")
    plain = FakeSource()
    plain.advance(30)
    plain.history.rows()["grad_norm"][:] = np.nan
    plain.history._table._totals.read(0, 30)["grad_norm"][:] = np.nan
    titles = [ax._left_title.get_text() for ax in run_figure.draw_run(plain).axes]
    assert titles == ["Loss", "Throughput", "Where a step's time goes", "Memory", "", ""]  # texts have their own


def test_replica_checks_and_delays_are_listed_below_the_title():
    source = FakeSource()
    source.advance(30)
    assert get_notices(run_figure.draw_run(source)) == []
    source.delay_factors, source.consistency = {1: 2.0}, ReplicaCheckResult(30, (), None)
    figure = run_figure.draw_run(source)
    assert [text.get_text() for text in get_notices(figure)] == [
        "✓ parameters identical on 4 nodes, checked at step 30",
        "▼ node 1 slowed 2x on purpose",
    ]
    source.consistency = ReplicaCheckResult(30, (1, 3), 20)
    alert = get_notices(run_figure.draw_run(source))[0]
    assert alert.get_text() == "✕ nodes 1 and 3 differ since step 20: parameters are no longer equal"
    assert (alert.get_color(), alert.get_weight()) == (style.ALERT_COLOR, "bold")


def test_the_legend_of_marks_tells_stopped_nodes_from_stuck_ones():
    source = FakeSource(ranks=4)
    source.advance(30)
    observation = RankObservation(2, "host0", 1234, "stopped")
    source.event("stuck", formatting.name_nodes(report_stuck("stopped", observation, 4).text), rank=2)
    source.event("stuck", "node 1 keeps the others waiting", rank=1)
    assert describe_event_marks(source.history.events) == "⊘ node 2 stopped · ⊘ node 1 stuck"


def test_no_line_below_the_title_ends_within_a_command():
    source = FakeSource(ranks=2)
    source.advance(30)
    source.stick(1)
    for length in range(1, 40):  # the command comes at every place of a line
        remedy = f"{'x' * length} `kill -CONT 12345` on host0 lets it go on"
        source.stall_report = dataclasses.replace(source.stall_report, remedy=remedy)
        (line,) = [line for kind, line in run_figure._wrap_title_lines(source) if "kill" in line]
        assert "`kill -CONT 12345`" in line


def test_lines_that_continue_one_below_the_title_are_indented_alike():
    for length in range(1, 120):  # a space comes at every place of a line
        first, *others = run_figure._wrap_line(f"{'x' * length} {'y' * 50} {'z' * 20} words that follow")
        assert not first.startswith(" ")
        assert {len(line) - len(line.lstrip()) for line in others} == {4}
    assert run_figure._wrap_line("") == []


def find_overlapping_texts(figure):
    """Pairs of texts and panels that cover each other, and texts beyond the edge, by their bounding boxes."""
    figure.canvas.draw()
    titles = [t for ax in figure.axes for t in (ax._left_title, ax._right_title, ax.xaxis.label)]
    ends = [text for ax in figure.axes for text in ax.texts if text.get_gid() == "end"]
    tiles = [text for ax in figure.axes for text in ax.texts if text.get_gid() == "tile"]
    legends = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
    patches = [ax.patch for ax in figure.axes if ax.axison]
    found = [*figure.texts, *titles, *ends, *tiles, *legends, *patches]
    boxes = [
        (str(item), item.get_window_extent()) for item in found if not hasattr(item, "get_text") or item.get_text()
    ]
    pairs = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) >= 1 and min(a.y1, b.y1) - max(a.y0, b.y0) >= 1
    ]
    return pairs + [(name, "edge") for name, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.x1 + 1]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("steps", [20, 60, 3000])
def test_elements_of_the_figure_do_not_overlap(ranks, steps):
    """Titles, names of lines and legends; many steps have bands."""
    source = FakeSource(ranks=ranks, name="A rather long name of a model", strips=True)
    source.slowness, source.delay_factors = {0: 1.6}, {0: 1.6}
    source.consistency = ReplicaCheckResult(30, (), None)
    source.advance(steps)
    long_name = "intersection over union of the rarest class"
    source.history.add(Evaluation(steps, 10, {"loss": 1.0, "accuracy": 0.123456, long_name: 0.123456}))
    source.lr = 0.01
    source.event("lr", "learning rate 0.01")
    source.advance(20)
    assert find_overlapping_texts(run_figure.draw_run(source)) == []


def test_elements_of_a_comparison_do_not_overlap():
    runs = [FakeSource(ranks=2, seed=k, name=f"A rather long name of a model {k}") for k in range(5)]
    for run in runs:
        run.advance(200)
        run.history.add(Evaluation(200, 10, {"loss": 0.01 + 3, "accuracy": 0.9}))
    assert find_overlapping_texts(dtkit.compare(runs).figure()) == []


@pytest.mark.parametrize("state", list(State))
def test_a_run_without_steps_has_a_placeholder(state):
    source = FakeSource()
    source.state = state
    figure = run_figure.draw_run(source)
    assert all(any(t.get_text() == "no step yet" for t in ax.texts) for ax in figure.axes)
    render.render_png(figure)


@pytest.mark.parametrize("losses", [[1.0], [float("nan")], [float("inf")], [1e300, -1e300], [0.0, 0.0]])
def test_nonfinite_losses_are_drawn_without_a_warning(losses):
    source = FakeSource(ranks=2)
    for loss in losses:
        source.advance(1, loss=loss)
    render.render_png(run_figure.draw_run(source))


def test_a_long_run_is_drawn_from_few_points_with_extremes():
    source = FakeSource(ranks=4, steps=100_000)
    source.advance(50_000)
    source.advance(1, loss=77.0)
    source.advance(49_999)
    loss = run_figure.draw_run(source).axes[0]
    assert all(len(line.get_xdata()) <= 512 for line in loss.get_lines())
    assert max(band.get_paths()[0].vertices[:, 1].max() for band in loss.collections) == 77


def test_the_figure_ignores_matplotlib_styles():
    import matplotlib as mpl

    source = FakeSource()
    source.advance(5)
    with mpl.rc_context({"text.color": "white", "axes.facecolor": "black", "savefig.facecolor": "black"}):
        figure = run_figure.draw_run(source)
        render.render_png(figure)
    assert figure.axes[0].get_facecolor() == (1, 1, 1, 1)
    assert figure.axes[0]._left_title.get_color() == style.TEXT_COLOR
    assert figure._suptitle.get_color() == style.TEXT_COLOR


def test_pyplot_is_never_loaded():
    import subprocess
    import sys

    code = "import dtkit.dashboard.figures.run_figure, sys; sys.exit('matplotlib.pyplot' in sys.modules)"
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
def test_close_labels_are_spread_around_their_middle(wanted, placed):
    assert style.spread_positions(wanted, 0.1) == pytest.approx(placed)


def test_a_failed_run_shows_its_error_first():
    source = FakeSource(ranks=2)
    source.exception = EngineError(
        [Failure(1, "host", "ValueError", "bad", "all", 3, user_frames=(("a.py", 7, "step", "x = 1"),))]
    )
    source.end(State.FAILED)
    source.advance(3)
    figure = run_figure.draw_run(source)
    texts = [text.get_text() for text in get_notices(figure)]
    assert texts[0] == "EngineError: node 1 on host, step 3: ValueError: bad"
    assert texts[1:3] == ["  File a.py, line 7, in step", "    x = 1"]
    assert figure.axes


def test_a_run_that_failed_before_its_first_step_shows_nodes_and_log():
    source = FakeSource(ranks=2)
    source.exception = RuntimeError("no step was made")
    source.end(State.FAILED)
    figure = run_figure.draw_run(source)
    assert all(ax.texts and not ax.lines and not ax.axison for ax in figure.axes)
    texts = [text.get_text() for ax in figure.axes for text in ax.findobj(Text)]
    assert {"Nodes", "Log", "host0", "done"} <= set(texts)
    assert get_notices(figure)[0].get_text() == "RuntimeError: no step was made"


def make_wide_figures():
    """Return figures of a plan, a schedule, and explained steps."""
    explained = [
        explain.build_explanation(make(), "Net", None) for make in (make_pipeline_reports, make_sharded_reports)
    ]
    schedule = Schedule.from_name("1F1B", 4, 8)
    return [plan_figure.draw_plan(make_plan()), schedule.figure(), *(step.figure() for step in explained)]


def test_the_texts_of_wide_figures_are_readable_in_a_window_of_600_px():
    """A cell is 484 px wide there. A box of a schedule may have a shorter text."""
    for figure in make_wide_figures():
        texts = [text for ax in figure.axes for text in ax.findobj(Text) if text.get_text() and text.get_visible()]
        pixels = 484 / figure.get_figwidth() / 72  # of a point
        assert min(pixels * text.get_fontsize() for text in texts) >= 7.5


def test_times_below_a_comparison_do_not_touch():
    runs = [FakeSource(ranks=2, seed=k) for k in range(2)]
    for run in runs:
        run.advance(60)
    figure = dtkit.compare(runs).figure()
    (ax,) = [ax for ax in figure.axes if ax.get_xlabel() == "time"]
    ax.set_xlim(0, 0.16 * ax.get_xlim()[1] / runs[0].history.totals()["step_s"].sum())  # of milliseconds
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
    assert len(boxes) >= 3
    assert all(right.x0 - left.x1 >= 4 for left, right in itertools.pairwise(boxes))


def test_the_note_of_a_tile_ends_before_the_next_one():
    source = FakeSource(ranks=2, steps=400, strips=True)
    source.advance(400)
    source.history.add(Evaluation(400, 300, {"loss": 0.201, "accuracy": 0.9}))
    source.history.add(Event(400, "done", "done", 1.0, None))
    source.state = State.COMPLETED
    figure = run_figure.draw_run(source)
    tiles = [text.get_text() for ax in figure.axes for text in ax.texts if text.get_gid() == "tile"]
    assert "samples/s, all steps but the first" in tiles
    assert not find_overlapping_texts(figure)
