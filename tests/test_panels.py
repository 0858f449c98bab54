"""Panels beyond curves: lost nodes, outliers and their lines, strips, the user's own panels, reports."""

import dataclasses
import json
import math
import re
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from matplotlib.text import Text

import dtkit
from dtkit._util import formatting, resources, timeouts
from dtkit.dashboard import report
from dtkit.dashboard.figures import custom_panels, run_figure, style
from dtkit.dashboard.live import comparison_messages, comparison_widget, panel_renderer, widget
from dtkit.dashboard.live.commands import CommandHandler
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.comparison import NUM_LOSS_BUCKETS
from dtkit.dashboard.summary.curves import LOSS, downsample
from dtkit.dashboard.summary.lost_nodes import update_lost_nodes
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.summary.node_series import NUM_BUCKETS, NodeSeries
from dtkit.dashboard.summary.notices import collect_notices
from dtkit.dashboard.summary.outliers import find_outliers
from dtkit.dashboard.summary.step_strip import BOX_KINDS, MAX_BOXES, MAX_NODES, make_step_strip
from dtkit.dashboard.summary.timing import compute_step_timing, select_bars
from dtkit.dashboard.summary.verdict import find_verdict
from dtkit.dashboard.text import run_text
from dtkit.history.run_log import TAKEN_OVER
from dtkit.history.scalars import ScalarRecord
from dtkit.history.speed import compute_speed
from dtkit.history.timeline import SPAN_DTYPE, Timeline, convert_simulation
from dtkit.schedules.schedule import Schedule
from dtkit.testing.in_process import InProcessTransport
from dtkit.types import Evaluation, Event, State
from tests.support.fake_source import FakeSource, FaultInjectableSource
from tests.support.report_page import remove_own_scripts
from tests.support.small import train
from tests.support.timers import Timers

# -- lost nodes ------------------------------------------------------------------------------------------


def event(kind, rank, step=7):
    return Event(step, kind, kind, 0.0, rank)


def test_a_node_is_lost_until_it_is_repaired():
    lost = update_lost_nodes({}, [event("lost", 1), event("lost", 3, 9), event("print", 2), event("lost", None)])
    assert lost == {1: 7, 3: 9}
    assert update_lost_nodes(lost, [event("repair", 3)]) == {1: 7}
    assert update_lost_nodes(lost, [event("repair", None)]) == {}
    assert lost == {1: 7, 3: 9}  # the argument is unchanged


def test_lost_nodes_are_counted_and_sent_with_a_notice():
    source = FakeSource(ranks=4)
    source.advance(30)
    source.lose(2)
    builder = MessageBuilder(source)
    content = builder.build_snapshot().content
    nodes = {tile["label"]: tile for tile in content["tiles"]}["nodes"]
    assert (nodes["value"], nodes["note"]) == ("3 / 4", "✕ node 2 lost")
    assert content["notices"][0] == {"kind": "lost", "text": "node 2 was lost at step 30; 3 nodes of 4 left"}
    assert content["nodes_now"]["lost"] == [2]
    assert [mark["kind"] for mark in content["marks"]] == ["lost"]
    source.event("repair", "node 2 is back", 2)
    content = builder.build_change().content
    assert content["nodes_now"]["lost"] == []
    assert content["notices"] == collect_notices(source) == []
    assert (
        next(t for t in build_tiles(source, compute_run_metrics(source.history, 4)) if t.label == "nodes").value
        == "4 / 4"
    )


# -- outliers and their lines ----------------------------------------------------------------------------


def test_similar_nodes_have_no_outliers():
    source = FakeSource(ranks=256)
    for _ in range(20):
        source.advance(20)
        assert find_outliers(compute_run_metrics(source.history, 256)) == []


def test_outliers_are_lost_slow_or_distant_nodes():
    source = FakeSource(ranks=64)
    source.slowness = {5: 2.0, 6: 1.9}
    source.advance(60)
    source.lose(40)
    now = compute_run_metrics(source.history, 64)
    assert find_outliers(now, now.lost_nodes) == [40, 5, 6]
    source.slowness = dict.fromkeys(range(10, 20), 2.0)
    source.advance(60)
    assert len(find_outliers(compute_run_metrics(source.history, 64))) == 4  # more can't be told apart
    assert find_outliers(compute_run_metrics(FakeSource(ranks=8).history, 8)) == []


def test_the_line_of_a_selected_node_has_its_whole_history():
    source, spotlight = FakeSource(ranks=16, steps=4000), NodeSeries(16)
    for _ in range(7):
        source.advance(300)
        spotlight.update(source.history)
    buckets = spotlight.take_changes([3, 9])
    assert buckets.first == 0
    assert buckets.means.shape == (len(buckets.means), 2, 2)
    assert NUM_BUCKETS // 2 <= len(buckets.means) <= NUM_BUCKETS
    for k, rank in enumerate((3, 9)):
        _, losses = source.history.loss(rank)
        whole = losses[: len(losses) // buckets.width * buckets.width].reshape(-1, buckets.width).mean(1)
        np.testing.assert_allclose(buckets.means[: len(whole), 0, k], whole, rtol=1e-5)
    assert spotlight.take_changes([3, 9]) is None  # nothing changed
    source.advance(1)
    spotlight.update(source.history)
    assert len(spotlight.take_changes([3, 9]).means) == 1
    assert spotlight.take_changes([4]).first == 0  # a new selection is sent completely


def test_the_selected_node_is_sent_to_all_pages(monkeypatch):
    source, timers = FakeSource(ranks=16), Timers()
    source.advance(50)
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    sent = []
    monkeypatch.setattr(view, "send", lambda content, buffers=(): sent.append((content, buffers)))
    view._on_page_message(view, {"select": 7}, [])
    content, buffers = sent[-1]
    assert content["selected"] == 7
    assert content["spot"]["ranks"] == (7,)
    drawn = np.frombuffer(buffers[3], "<f4").reshape(-1, 2)
    np.testing.assert_allclose(drawn[:, 0], source.history.loss(7)[1], rtol=1e-6)
    for wrong in (16, -1, "7", None):
        view._on_page_message(view, {"select": wrong}, [])
        assert sent[-1][0]["selected"] is None
    view.close()


def test_outliers_have_lines_in_the_figure():
    source = FakeSource(ranks=16)
    source.slowness = {5: 2.0}
    source.advance(60)
    source.lose(9)
    figure = run_figure.draw_run(source)
    by_name = {ax._left_title.get_text(): ax for ax in figure.axes}
    for name in ("Loss", "Throughput"):
        names = [line.get_gid() for line in by_name[name].get_lines()]
        assert {"▲ node 5", "✕ node 9"} <= set(names)
    squares = {patch.get_gid() for patch in by_name["Nodes at a glance"].patches}
    assert squares == {f"node-{rank}" for rank in range(16)}
    signs = [text.get_text() for text in by_name["Nodes at a glance"].texts]
    assert (signs[5], signs[9], signs[1]) == ("▲", "✕", "1")


def test_replaced_and_left_out_nodes_are_sent():
    source = FakeSource(ranks=4)
    source.advance(20)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    assert "nodes" not in builder.build_change().content
    source.shrink(3)
    source.advance(20)
    change = builder.build_change().content
    assert len(change["nodes"]) == 3
    later = MessageBuilder(source).build_snapshot().content  # a page that is opened now, or that a new kernel opens
    assert (builder.build_snapshot().content["head"]["ranks"], later["head"]["ranks"]) == (
        4,
        4,
    )  # there are lines of four
    assert change["head"]["overall"] == later["head"]["overall"] == "with waiting"  # was divided by 4, and is by 3
    source.advance(40)
    assert "head" not in builder.build_change().content
    assert [bar.rank for bar in select_bars(compute_step_timing(source.history, 4))] == [
        0,
        1,
        2,
    ]  # of the last 50 steps
    for content in (change, later):
        nodes = next(tile for tile in content["tiles"] if tile["label"] == "nodes")
        assert nodes == {"label": "nodes", "value": "3 / 3", "note": "was 4: 1 left out", "alert": False}
        assert content["notices"] == [{"kind": "fewer", "text": "3 nodes: 1 of 4 was lost and left out"}]
        assert (content["nodes_now"]["world"], content["nodes_now"]["lost"]) == (3, [])


def test_nodes_count_as_lost_until_the_run_continues_without_them():
    """The world size changes before the event is recorded."""
    source = FakeSource(ranks=4)
    source.advance(20)
    builder = MessageBuilder(source)
    source.lose(3)
    source.spec = dataclasses.replace(source.spec, world_size=3)
    content = builder.build_snapshot().content
    nodes = next(tile for tile in content["tiles"] if tile["label"] == "nodes")
    assert (nodes["value"], nodes["note"], nodes["alert"]) == ("3 / 4", "✕ node 3 lost", True)
    assert [notice["kind"] for notice in content["notices"]] == ["lost"]


def get_notice_texts(figure):
    """Return the texts below the title of a stored figure."""
    notices = [text for text in figure.texts if (text.get_gid() or "").startswith("notice-")]
    return [text.get_text() for text in notices if text.get_gid() not in ("notice-verdict", "notice-lr")]


def test_the_title_lists_stuck_and_left_out_nodes_and_event_marks():
    source = FakeSource(ranks=4)
    source.advance(20)
    source.lr = 0.01
    source.event("lr", "learning rate 0.01")
    source.shrink(3)
    source.advance(20)
    assert source.history.events[-1].kind == "repair"
    source.stick(2)
    figure = run_figure.draw_run(source)
    assert "· 3 nodes (was 4) ·" in figure._suptitle.get_text().replace("\u00a0", " ")
    first, second, *others = get_notice_texts(figure)
    assert first.startswith("⊘ node 2 is stuck in forward of step 41, and the others wait for it. It is")
    assert second.startswith("    ")  # a long notice is wrapped
    assert others == [
        "○ 3 nodes: 1 of 4 was lost and left out",
        "marks:  lr new learning rate · † node 1 lost · + repaired · ⊘ node 2 stuck",
    ]
    alerts = {text.get_gid() for text in figure.texts if text.get_color() == style.ALERT_COLOR}
    assert alerts == {"notice-stuck"}
    quiet = FakeSource(ranks=2)
    quiet.advance(20)
    assert get_notice_texts(run_figure.draw_run(quiet)) == []


# -- the timeline ----------------------------------------------------------------------------------------


def named(found, rank):
    own = found.boxes[found.boxes["rank"] == rank]
    return [(BOX_KINDS[box["kind"]], round(1e3 * (box["end"] - box["begin"]))) for box in own]


def test_a_collective_is_split_at_the_arrival_of_the_last_node():
    source = FakeSource(ranks=2, strips=True)
    source.slowness = {1: 2.0}
    source.advance(5)
    step_strip = make_step_strip(source.timeline)
    assert step_strip.step == 5
    assert named(step_strip, 0) == [
        ("data", 5), ("forward", 25), ("backward", 50), ("waiting", 75), ("communication", 22), ("update", 6)
    ]  # fmt: skip
    assert [kind for kind, _ in named(step_strip, 1)] == ["data", "forward", "backward", "communication", "update"]


def make_outlier(factor=2.5):
    """Return a history of 60 steps of about 100 ms, and spans of the last two, the second `factor` times as long."""
    source = FakeSource(ranks=2, strips=True)
    source.advance(59)
    usual = source.timeline.spans
    source.advance(1)
    longer = source.timeline.spans
    for name in ("begin", "end"):
        longer[name] *= factor
    return source.history, Timeline(np.concatenate([usual, longer]))


def test_an_ended_run_shows_a_typical_step_of_those_recorded():
    history, timeline = make_outlier()
    step_strip = make_step_strip(timeline, history=history, state=State.COMPLETED)
    assert (step_strip.step, step_strip.note) == (59, "step 59, a typical one of the last 50")
    alone = Timeline(timeline.select_spans(60))
    note = make_step_strip(alone, history=history, state=State.COMPLETED).note
    assert note == "step 60, 2.5 times as long as the median of the last 50"


@pytest.mark.parametrize(("factor", "step"), [(1.2, 60), (2.5, 59)])
def test_a_running_view_shows_the_newest_step_unless_it_took_far_longer(factor, step):
    history, timeline = make_outlier(factor)
    assert make_step_strip(timeline, history=history, state=State.RUNNING).step == step


def test_a_range_of_steps_shows_a_typical_one_or_the_nearest():
    history, timeline = make_outlier()
    within = make_step_strip(timeline, history=history, state=State.RUNNING, steps=(31, 60))
    assert within.note == "step 59, a typical one of steps 31 to 60"
    assert make_step_strip(timeline, history=history, state=State.RUNNING, steps=(60, 60)).note == "step 60"
    before = make_step_strip(timeline, history=history, state=State.RUNNING, steps=(11, 30))
    assert before.note == "step 59 (11 to 30 have no timeline)"


def test_boxes_of_a_pipeline_have_micro_batches():
    source = FakeSource(ranks=4, stages=4, strips=True)
    source.advance(2)
    step_strip = make_step_strip(source.timeline)
    assert step_strip.is_pipelined
    assert re.fullmatch(r"step 2 · bubble \d+ % measured, 43 % by formula", step_strip.note)
    own = step_strip.boxes[step_strip.boxes["rank"] == 2]
    assert own["micro_batch"].tolist() == [0, 1, 2, 3] * 2
    assert not len(step_strip.plan)  # no schedule was given


def test_a_strip_of_a_pipeline_has_the_planned_schedule():
    source = FakeSource(ranks=4, stages=4, strips=True)
    source.advance(2)
    measured = source.timeline.spans
    step_strip = make_step_strip(Timeline(measured, schedule=Schedule.from_name("GPipe", 4, 4)))
    assert len(step_strip.plan) == len(step_strip.boxes) == 32
    for rank in range(4):
        plan, boxes = (part[part["rank"] == rank] for part in (step_strip.plan, step_strip.boxes))
        assert plan["micro_batch"].tolist() == boxes["micro_batch"].tolist()
        assert (plan["begin"] <= boxes["begin"] + 1e-9).all()  # sending is free in a plan
    message = MessageBuilder(source).build_snapshot()
    assert len(message.buffers[4]) == 10 * 32


def test_a_schedule_without_a_formula_is_compared_with_a_simulation():
    zero = Schedule.from_name("ZBVZeroBubble", 2, 4)
    assert make_step_strip(Timeline(convert_simulation(zero.simulate()), schedule=zero)).note.endswith(
        "measured, 4 % by simulation"
    )


def test_messages_between_stages_have_their_own_kinds():
    spans = [
        (3, 0, "send forward", 0, 1, 0, 1),
        (3, 0, "wait", 0, 1, 1, 3),
        (3, 0, "receive backward", 0, 0, 3, 6),
        (3, 0, "backward", 0, 0, 6, 9),
    ]
    step_strip = make_step_strip(Timeline(np.array(spans, SPAN_DTYPE)))
    assert [(kind, seconds // 1000) for kind, seconds in named(step_strip, 0)] == [
        ("send", 1), ("waiting", 2), ("receive", 3), ("backward", 3)
    ]  # fmt: skip
    assert step_strip.boxes["micro_batch"].tolist() == [1, 1, 0, 0]
    assert step_strip.boxes["stage"].tolist() == [0] * 4


def test_a_strip_of_many_nodes_includes_preferred_ranks():
    source = FakeSource(ranks=256, strips=True)
    source.advance(2)
    step_strip = make_step_strip(source.timeline, [77])
    assert len(step_strip.ranks) <= MAX_NODES
    assert 77 in step_strip.ranks
    assert (step_strip.ranks[0], step_strip.ranks[-1]) == (0, 255)
    many = np.zeros(50_000, SPAN_DTYPE)
    many["phase"], many["begin"] = "forward", np.arange(50_000)
    many["end"] = many["begin"] + np.random.default_rng(0).random(50_000)
    assert len(make_step_strip(Timeline(many)).boxes) <= MAX_BOXES
    assert make_step_strip(None) is None
    assert make_step_strip(Timeline(np.empty(0, SPAN_DTYPE))) is None


def test_a_timeline_is_sent_on_change_and_at_most_once_a_second():
    now = [0.0]
    source = FakeSource(ranks=4, strips=True)
    source.advance(5)
    builder = MessageBuilder(source, lambda: now[0])
    first = builder.build_snapshot()
    assert first.content["strip"]["step"] == 5
    assert len(first.buffers[4]) == 10 * first.content["strip"]["boxes"]
    source.advance(5)
    assert "strip" not in builder.build_change().content  # too soon
    assert builder.has_pending
    now[0] = 1.1
    assert builder.build_change().content["strip"]["step"] == 10
    now[0] = 9.0
    assert "strip" not in builder.build_change().content  # nothing new
    assert not builder.has_pending


def test_a_failing_timeline_is_an_error_of_that_panel_only(monkeypatch):
    source = FakeSource(ranks=2)
    source.advance(5)
    monkeypatch.setattr(type(source), "timeline", property(lambda _: 1 / 0))
    content = MessageBuilder(source).build_snapshot().content
    assert content["strip"] == {"error": "ZeroDivisionError: division by zero"}
    assert content["status"]["step"] == 5


def test_verdict_at_the_end_is_that_of_the_run():
    source = FakeSource(steps=500)
    source.advance(10)
    builder = MessageBuilder(source, clock=lambda: 0.0)
    builder.build_snapshot()
    source.slowness = {1: 3.0}
    source.advance(60)
    assert "verdict" not in builder.build_change().content  # it is not due yet
    source.end()
    verdict = find_verdict(source.history, source.spec)
    assert verdict.cause == "straggler"
    assert builder.build_change().content["verdict"]["text"] == verdict.text


# -- commands from a page --------------------------------------------------------------------------------


SAVED = "checkpoint of step 5 on all nodes saved: /somewhere/checkpoints/Conv-Net-1"


def make_handler(source, *, fault_injection=True):
    """A handler of commands, its reports, and an event that is set by each report."""
    reports, reported = [], threading.Event()

    def report(*words):
        reports.append(words)
        reported.set()

    return CommandHandler(source, report, fault_injection=fault_injection), reports, reported


@pytest.mark.parametrize(
    ("command", "value", "text"),
    [
        ("pause", None, "paused at step 412 on all nodes"),
        ("resume", None, "resumed at step 412 on all nodes"),
        ("step", None, "one step taken on all nodes"),
        ("stop", None, "stopped at step 412 on all nodes"),
        ("lr", 0.01, "learning rate 0.01 from step 412 on, on all nodes"),
    ],
)
def test_a_command_reports_the_step_at_which_it_took_effect(command, value, text):
    source = FaultInjectableSource(steps=500)
    source.advance(412)
    handler, reports, _ = make_handler(source)
    handler.handle(command, value)
    assert reports == [("effect", command, text)]


def test_a_step_of_the_button_is_logged_and_those_of_code_are_not():
    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as cluster:
        run = train(cluster, start=False)
        run.step(2)
        handler, reports, reported = make_handler(run)
        handler.handle("step", None)
        assert reported.wait(60)
        assert reports == [("effect", "step", "one step taken on all nodes")]
        assert [(event.step, event.text) for event in run.history.events] == [(3, "one step taken")]


@pytest.mark.parametrize(
    ("lr", "end"),
    [(1e9, ": more than a million times the 0.1 before"), (10.1, ": 101 times the 0.1 before"), (9.0, ""), (0.0, "")],
)
def test_a_learning_rate_far_above_the_one_in_use_is_named_and_applied(lr, end):
    source = FaultInjectableSource(steps=500)
    source.advance(412)
    handler, reports, _ = make_handler(source)
    handler.handle("lr", lr)
    assert source.posted == [("lr", lr)]
    assert reports == [
        ("effect", "lr", f"learning rate {formatting.format_learning_rate(lr)} from step 412 on, on all nodes{end}")
    ]


def test_an_error_of_the_run_is_reported_as_a_refusal(monkeypatch):
    source = FaultInjectableSource()
    future = Future()
    future.set_exception(RuntimeError("the run is RUNNING"))
    monkeypatch.setattr(source, "post", lambda *_: future)
    handler, reports, _ = make_handler(source)
    handler.handle("step", None)
    assert reports == [("refused", "step", "the run is RUNNING")]


@pytest.mark.parametrize(
    ("command", "value", "call", "text"),
    [
        ("slow", {"rank": 3, "factor": 2}, ("slow", 3, 2.0), "node 3 is slowed 2x since step 5"),
        ("slow", {"rank": 3, "factor": 1}, ("slow", 3, 1.0), "node 3 runs at full speed since step 5"),
        ("kill", {"rank": 1}, ("kill", 1), "node 1 was ended at step 5"),
        ("save", None, ("save",), SAVED),
    ],
)
def test_faults_and_checkpoints_run_on_a_thread(command, value, call, text):
    source = FaultInjectableSource(name="Conv/Net 1")
    source.advance(5)
    handler, reports, reported = make_handler(source)
    handler.handle(command, value)
    assert reported.wait(10)
    assert source.calls == [call]
    assert reports == [("effect", command, text)]


def test_a_failed_checkpoint_is_reported_as_a_refusal():
    source = FaultInjectableSource()
    source.refuse = OSError("no space left")
    handler, reports, reported = make_handler(source)
    handler.handle("save", None)
    assert reported.wait(10)
    assert reports == [("refused", "save", "no space left")]


def test_fault_controls_are_offered_only_if_enabled():
    source = FaultInjectableSource()
    handler, reports, _ = make_handler(source, fault_injection=False)
    assert handler.extra_controls == ["save"]
    handler.handle("kill", {"rank": 1})
    assert (source.calls, reports) == ([], [])
    handler.fault_injection = True
    assert handler.extra_controls == ["slow", "kill", "save"]
    assert make_handler(FakeSource())[0].extra_controls == []


@pytest.mark.parametrize(
    ("command", "value", "match"),
    [
        ("slow", {"rank": 9, "factor": 2}, "there are nodes 0 to 3"),
        ("slow", {"rank": 1, "factor": 1000}, "from 1"),
        ("kill", {"rank": True}, "there are nodes"),
        ("kill", None, "there are nodes"),
    ],
)
def test_an_invalid_fault_is_refused_at_once(command, value, match):
    with pytest.raises(ValueError, match=match):
        make_handler(FaultInjectableSource())[0].handle(command, value)


def test_effects_reach_open_pages_and_later_ones():
    source, timers = FaultInjectableSource(), Timers()
    dashboard = widget.Dashboard(source, clock=timers.clock, call_later=timers.later, fault_injection=True)
    assert dashboard.opening["content"]["head"]["offers"] == ["slow", "kill", "save"]
    source.advance(12)
    dashboard._on_page_message(dashboard, {"command": "pause"}, [])
    assert dashboard._message_builder.build_snapshot().content["effect"] == {
        "count": 1,
        "text": "paused at step 12 on all nodes",
    }
    dashboard.close()


# -- the user's own panels -------------------------------------------------------------------------------


@pytest.fixture
def own_panels():
    """A clean register of panels."""
    yield custom_panels
    for name in list(custom_panels.get_panels()):
        custom_panels.remove_panel(name)


def test_custom_panels_and_their_errors_appear_in_the_figure(own_panels):
    @dtkit.panel("Rows so far")
    def rows(ax, history):
        ax.plot([0, 1], [0, len(history)])

    @dtkit.panel("Broken")
    def broken(_ax, _history):
        raise RuntimeError("not <b>today</b>")

    source = FakeSource()
    source.advance(20)
    by_name = {ax._left_title.get_text(): ax for ax in run_figure.draw_run(source).axes}
    assert by_name["Rows so far"].get_lines()[0].get_ydata()[1] == 80
    assert [t.get_text() for t in by_name["Broken"].texts] == ["this panel failed:\nRuntimeError: not\n<b>today</b>"]
    assert "Loss" in by_name
    assert rows(by_name["Loss"], source.history) is None  # the decorated function can still be called


@pytest.mark.usefixtures("own_panels")
def test_texts_of_a_custom_panel_are_as_small_as_others_unless_set():
    @dtkit.panel("Own")
    def own(ax, history):
        ax.plot(*history.loss(), label="a line")
        ax.set(xlabel="x", ylabel="y")
        ax.text(1, 1, "usual")
        ax.text(5, 1, "large", fontsize=14)
        ax.legend()

    source = FakeSource(ranks=2)
    source.advance(20)
    (ax,) = [ax for ax in run_figure.draw_run(source).axes if ax.get_title(loc="left") == "Own"]
    sizes = {text.get_text(): text.get_fontsize() for text in ax.findobj(Text)}
    assert {name: sizes[name] for name in ("x", "y", "usual", "a line", "large")} == {
        "x": 8, "y": 8, "usual": 8, "a line": 8, "large": 14,
    }  # fmt: skip
    assert ax.xaxis.label.get_color() == ax.yaxis.label.get_color() == style.MUTED_COLOR


@pytest.mark.parametrize(("cpu_s", "interval_s"), [(0.02, 2.0), (0.12, 2.4), (0.3, 3.0), (1.0, 5.0)])
def test_custom_panels_are_drawn_at_a_bounded_rate(own_panels, cpu_s, interval_s):
    drawn, now, cpu = [], [100.0], [0.0]

    @dtkit.panel("Mine")
    def draw(_ax, history):
        now[0] += 1.5  # on cores that others use, too
        cpu[0] += cpu_s if drawn else 4.0  # the first drawing imports libraries
        drawn.append(len(history))

    source = FakeSource()
    renderer = panel_renderer.CustomPanelRenderer(source.history, lambda: now[0], lambda: cpu[0])
    assert [picture.png[:4] for picture in renderer.draw_due_panels()] == [b"\x89PNG"]
    assert list(renderer.draw_due_panels()) == []
    due_at = 102.0
    for count in (2, 3):
        source.advance(1)
        assert renderer.is_outdated
        now[0] = due_at - 0.1
        assert renderer.due_in_s == pytest.approx(0.1)
        assert list(renderer.draw_due_panels()) == []
        now[0] = due_at + 0.1
        assert renderer.due_in_s == 0
        list(renderer.draw_due_panels())
        assert len(drawn) == count
        due_at += 0.1 + interval_s
    assert not renderer.is_outdated
    source.advance(1)
    now[0] = due_at
    drawing = renderer.draw_due_panels()
    next(drawing)
    renderer.reset()  # a page was opened, which may have missed this picture
    assert list(drawing) == []
    assert renderer.is_outdated
    assert renderer.due_in_s == 0


def test_custom_panels_and_their_errors_are_sent_to_pages(own_panels, monkeypatch):
    @dtkit.panel("Broken")
    def broken(_ax, _history):
        raise RuntimeError("no")

    timers, source = Timers(), FakeSource()
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    sent = []
    monkeypatch.setattr(view, "send", lambda content, buffers=(): sent.append((content, buffers)))
    timers.run()
    pictures = [(c["name"], c["error"], b) for c, b in sent if c["kind"] == "picture"]
    assert pictures == [("Broken", "RuntimeError: no", [b""])]
    view.close()


def test_a_report_has_the_custom_panels_and_their_errors(own_panels, tmp_path):
    source = FakeSource(ranks=2)
    source.advance(20)

    @dtkit.panel("Rows <so> far", wide=True)
    def draw_rows(ax, history):
        ax.plot([0, len(history)])

    @dtkit.panel("Broken")
    def break_panel(ax, history):
        raise RuntimeError("not <b>today</b>")

    report.write_report(source, tmp_path / "run.html")
    section = (tmp_path / "run.html").read_text(encoding="utf-8").split("<h2>Your panels</h2>")[1].split("<h2>")[0]
    assert section.count("data:image/png;base64,") == 1
    assert '<figure class="panel wide"><h3>Rows &lt;so&gt; far</h3><img' in section
    assert "this panel failed: RuntimeError: not &lt;b&gt;today&lt;/b&gt;" in section


def test_a_report_after_an_attach_says_that_panels_are_not_there(own_panels, tmp_path):
    source, path = FakeSource(ranks=2), tmp_path / "run.html"
    source.advance(20)
    missing = "they are not in this report: run their cells (@dtkit.panel)"

    def write() -> str:
        report.write_report(source, path)
        return path.read_text(encoding="utf-8")

    assert missing not in write()
    source.history.add(Event(20, "note", f"{TAKEN_OVER} at step 20", 1.0, None))
    assert missing in write()
    dtkit.panel("Rows")(lambda ax, history: ax.plot([0, len(history)]))
    assert missing not in write()


def test_a_panel_of_numbers_that_this_run_never_logged_is_no_error(own_panels, tmp_path, monkeypatch):
    @dtkit.panel("Mine")
    def draw(ax, history):
        ax.plot(*history.scalar("conf"))

    source = FakeSource(ranks=2)
    source.advance(20)
    note = "nothing was logged as 'conf' in this run"
    (picture,) = panel_renderer.CustomPanelRenderer(source.history).draw_due_panels()
    assert (picture.error, picture.note, picture.png) == (None, note, b"")
    assert picture.content["note"] == note
    (ax,) = [ax for ax in run_figure.draw_run(source).axes if ax._left_title.get_text() == "Mine"]
    assert [text.get_text().replace("\n", " ") for text in ax.texts] == [note]
    report.write_report(source, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "Your panels" not in page
    assert "conf" not in page
    source.history.add(ScalarRecord(0, {"config": [(3, 1.0, 1.0)]}))  # one that the panel may have meant
    (picture,) = panel_renderer.CustomPanelRenderer(source.history).draw_due_panels()
    assert picture.note is None
    assert "did you mean 'config'?" in picture.error
    source.history.add(ScalarRecord(0, {"conf": [(3, 1.0, 1.0)]}))
    (picture,) = panel_renderer.CustomPanelRenderer(source.history).draw_due_panels()
    assert (picture.error, picture.note, picture.png[:4]) == (None, None, b"\x89PNG")


def test_custom_panels_of_a_run_that_ends_are_drawn_at_once(own_panels, monkeypatch):
    @dtkit.panel("Rows")
    def draw(ax, history):
        ax.set_title(len(history))

    timers, source = Timers(), FakeSource()
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    sent_at = []
    monkeypatch.setattr(view, "send", lambda content, _buffers=(): sent_at.append((content["kind"], timers.now)))
    timers.run()
    source.advance(1)
    timers.run()  # drawn just now: the next drawing is due in two seconds
    sent_at.clear()
    ended_at = timers.now
    source.advance(1)
    source.state = State.COMPLETED
    source.event("done", "completed")
    timers.run()
    assert [at - ended_at <= 2 * timeouts.LIVE_INTERVAL_S for kind, at in sent_at if kind == "picture"] == [True]
    view.close()


def test_a_cell_that_runs_again_replaces_the_panels_it_added_before(own_panels, monkeypatch):
    def run_cell(cell, execution, *names, module="__main__"):
        monkeypatch.setattr(custom_panels, "find_running_cell", lambda: cell and (cell, execution))
        for name in names:

            def draw(_ax, _history):
                pass

            draw.__module__ = module
            dtkit.panel(name)(draw)
        return list(custom_panels.get_panels())

    assert run_cell("a", "1", "First", "Second") == ["First", "Second"]
    assert run_cell("b", "2", "Other") == ["First", "Second", "Other"]
    assert run_cell("a", "3", "Second", "Third") == ["Other", "Second", "Third"]
    assert run_cell("a", "4", "Of a module", module="mine") == ["Other", "Second", "Third", "Of a module"]
    assert run_cell(None, None, "Script", "Second") == ["Other", "Second", "Third", "Of a module", "Script"]
    assert run_cell("a", "5", "Last") == ["Other", "Second", "Of a module", "Script", "Last"]


def test_custom_panels_of_an_ended_run_are_added_and_removed_at_once(own_panels, monkeypatch):
    timers, source = Timers(), FakeSource()
    source.advance(5)
    source.end()
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    sent = []
    monkeypatch.setattr(view, "send", lambda content, _buffers=(): sent.append((content["kind"], content.get("name"))))
    timers.run()
    sent.clear()
    dtkit.panel("New")(lambda ax, _history: ax.plot([1]))
    timers.run()
    assert sent == [("picture", "New")]
    custom_panels.remove_panel("New")
    timers.run()
    assert sent == [("picture", "New"), ("no picture", "New")]
    view.close()
    dtkit.panel("Later")(lambda ax, _history: ax.plot([1]))
    timers.run()
    assert len(sent) == 2


def test_custom_panels_are_drawn_as_wide_as_a_page_shows_them(own_panels, monkeypatch):
    widths = []

    @dtkit.panel("Mine")
    def draw(ax, _history):
        widths.append(round(100 * ax.figure.get_figwidth()))

    timers, source = Timers(), FakeSource()
    source.advance(5)
    source.end()
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    monkeypatch.setattr(view, "send", lambda *_: None)
    timers.run()
    for shown in ({"Mine": 1360}, {"Mine": 1360}, {"Mine": -1}, {"Mine": "wide"}, ["Mine"], None, {"Mine": 40}):
        view._on_page_message(None, {"sight": {"page": "a", "away": [], "widths": shown}}, [])
        timers.run()
    assert widths == [600, 1360, 300]
    view.close()


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (None, ValueError)])
def test_a_custom_panel_needs_a_title(name, error):
    with pytest.raises(error, match="title"):
        dtkit.panel(name)


def test_a_custom_panel_must_be_a_function(own_panels):
    with pytest.raises(TypeError, match="function of"):
        dtkit.panel("x")("not one")


# -- words that change with time --------------------------------------------------------------------------


def test_an_ended_run_has_the_verdict_of_its_last_steps():
    source, now = FakeSource(ranks=2), [0.0]
    source.advance(60)
    builder = MessageBuilder(source, lambda: now[0])
    first = builder.build_snapshot().content["verdict"]["text"]
    source.slowness = {1: 3.0}
    source.advance(60)
    now[0] = 0.1  # sooner than a verdict may change during a run
    assert "verdict" not in builder.build_change().content
    source.end()
    last = builder.build_change().content["verdict"]["text"]
    assert last == find_verdict(source.history, source.spec).text != first


def test_an_effect_is_reported_for_some_seconds():
    source, now = FakeSource(ranks=2), [0.0]
    builder = MessageBuilder(source, lambda: now[0])
    builder.note_effect("paused at step 3")
    now[0] = 10.0
    assert builder.build_snapshot().content["effect"] == {"count": 1, "text": "paused at step 3"}
    now[0] = 20.0  # a page that opens now would take it for the present state
    assert builder.build_snapshot().content["effect"] == {"count": 1, "text": ""}


# -- several runs, and reports ---------------------------------------------------------------------------


def test_runs_are_compared_on_one_axis():
    long, short = FakeSource(steps=5000, name="Long"), FakeSource(steps=5000, name="Short", seed=1)
    long.advance(3000)
    short.advance(100)
    comparison = dtkit.compare([long, short], labels=["long", "<b>short</b>"])
    message = comparison_messages.ComparisonMessageBuilder(comparison).build_snapshot()
    json.dumps(message.content, allow_nan=False)
    part, head = message.content["curves"], message.content["head"]
    values = np.frombuffer(message.buffers[0], "<f4").reshape(part["buckets"], head["columns"], 3)
    assert head["runs"] == ["long", "<b>short</b>"]
    assert message.content["status"] == {"state": "running", "step": 3000}
    once = downsample(long.history, LOSS, 4, NUM_LOSS_BUCKETS)
    assert part["width"] == once.width
    np.testing.assert_allclose(values[:, 0], once.values[:, -1], rtol=1e-5)
    filled = np.isfinite(values[:, 1, 1])
    assert filled.sum() == -(-100 // part["width"])
    assert filled[: filled.sum()].all()
    assert np.isnan(values[:, 2]).all()


def test_series_of_a_comparison_are_losses_by_time_and_each_metric():
    long, short = FakeSource(steps=5000, ranks=2), FakeSource(steps=5000, ranks=2, seed=1)
    long.advance(2000, loss=np.repeat(np.linspace(5.0, 3.0, 2000), 2))
    short.advance(10, loss=3.0)
    long.history.add(Evaluation(1000, 1, {"loss": 0.5, "accuracy": 0.9}))
    short.history.add(Evaluation(10, 1, {"accuracy": 0.8}))
    message = comparison_messages.ComparisonMessageBuilder(dtkit.compare([long, short])).build_snapshot()
    values, found = np.frombuffer(message.buffers[2], "<f4"), {}
    for series in message.content["series"]:
        shape = series["points"], series["lines"] + 1
        found[series["title"]] = values[series["first"] :][: math.prod(shape)].reshape(shape)
    assert list(found) == ["Loss against time", "Validation loss", "Validation accuracy", "Throughput"]
    times, losses = found["Loss against time"][:, 0], found["Loss against time"][:, 1:3]
    seconds = float(long.history.totals()["step_s"].sum())
    assert times[-1] == pytest.approx(1e3 * seconds, rel=0.01)
    falls_in_time = 5 - 2 * times / (1e3 * seconds)
    np.testing.assert_allclose(losses[:, 0], falls_in_time, atol=0.01)
    assert losses[0, 1] == 3.0
    assert np.isnan(losses[10:, 1]).all()
    np.testing.assert_allclose(
        found["Validation accuracy"], [[10, np.nan, 0.8, np.nan], [1000, 0.9, np.nan, np.nan]], rtol=1e-6
    )
    bold = {
        (row, message.content["head"]["table"]["header"][column])
        for row, column in message.content["head"]["table"]["bold"]
    }
    assert (0, "best validation accuracy") in bold


def test_a_comparison_is_live_until_all_runs_have_ended(monkeypatch):
    shown = []
    replaced = threading.Event()

    class Handle:
        def update(self, data, *, metadata, raw):
            shown.append((data, raw))
            replaced.set()

    monkeypatch.delenv("VSCODE_PID", raising=False)
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data) or Handle())
    ended, running = FakeSource(), FakeSource(seed=1)
    for source in (ended, running):
        source.advance(20)
    ended.end()
    assert comparison_widget.try_show(dtkit.compare([ended, running])) is True
    place, picture = shown
    assert "dtkit-live" in place["text/html"]
    assert "image/png" in picture  # the notebook may be saved at any time
    assert running.subscribers == 2
    running.end(State.STOPPED)
    assert replaced.wait(60)
    data, raw = shown[2]
    assert raw
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert len(shown) == 3


def test_a_comparison_of_ended_runs_is_live_where_its_figure_is_kept_too(monkeypatch):
    shown = []
    monkeypatch.delenv("VSCODE_PID", raising=False)
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    ended = FakeSource()
    ended.advance(20)
    ended.end()
    assert comparison_widget.try_show(dtkit.compare([ended])) is True
    assert "image/png" in shown[1]
    monkeypatch.setenv("VSCODE_PID", "1")  # a widget view would take the figure's place in the file
    assert comparison_widget.try_show(dtkit.compare([ended])) is False
    assert len(shown) == 2


def test_a_report_is_one_self_contained_file(tmp_path):
    source = FakeSource(ranks=4, name="<script>alert(1)</script>", strips=True)
    source.advance(50)
    source.lr = 0.01
    source.event("lr", "learning rate 0.01 <img src=x>")
    source.advance(50)
    alone = FakeSource(ranks=1)
    alone.advance(50)
    path = tmp_path / "run.html"
    report.write_report(source, path, single_process=alone.history)
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<img src=x|https?://", remove_own_scripts(page))
    assert "data:image/png;base64," not in page  # charts are drawn by the page
    assert "&lt;script&gt;alert(1)" in page
    for heading in (
        "Charts",
        "Speed-up over one process",
        "Settings, as typed",
        "Nodes",
        "Learning rates",
        "Events",
        "Origin",
    ):
        assert f"<h2>{heading}</h2>" in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert all(str(node.pid) in cells for node in source.nodes)
    rates = [compute_speed(run.history).samples_per_s for run in (source, alone)]
    assert f"{rates[0] / rates[1]:.2f}" in cells
    assert cells[cells.index("51") + 1] == "0.01"
    assert re.search(rf"<t[hd][^>]*>its processor</t[hd]><td[^>]*>.*{resources.count_cores()} core", page)
    assert "learning rate 0.01 &lt;img" in page
    with pytest.raises(ValueError, match="one process"):
        report.write_report(source, path, single_process=source.history)


def test_every_step_axis_has_event_marks():
    source = FakeSource()
    source.advance(30)
    for kind, rank in (("stuck", 1), ("lost", 1), ("repair", 1), ("save", None), ("error", None)):
        source.event(kind, kind, rank)
        source.advance(10)
    for ax in run_figure.draw_run(source).axes:
        if ax._left_title.get_text() in {"Loss", "Throughput", "Gradient norm", "Learning rate"}:
            marks = [line.get_gid() for line in ax.get_lines() if line.get_gid().startswith("event-")]
            assert marks == ["event-stuck", "event-lost", "event-repair", "event-save", "event-error"]


@pytest.mark.usefixtures("own_panels")
def test_a_wide_panel_has_a_row_of_its_own():
    @dtkit.panel("Whole", wide=True)
    def whole(ax, history):
        ax.plot([0, 1])

    source = FakeSource(ranks=2)
    source.advance(20)
    figure = run_figure.draw_run(source)
    figure.canvas.draw()
    width = {ax.get_title(loc="left"): ax.get_position().width for ax in figure.axes}
    assert width["Whole"] > 1.8 * width["Loss"]
    (picture,) = panel_renderer.CustomPanelRenderer(source.history).draw_due_panels()
    assert picture.content["wide"] is True  # for the page
    with pytest.raises(TypeError, match="wide='yes'"):
        dtkit.panel("Whole", wide="yes")


def test_numbers_of_the_user_have_panels_with_a_line_for_each_node():
    source = FakeSource(ranks=2)
    source.advance(40)
    for rank in (0, 1):
        source.history.add(ScalarRecord(rank, {"kl": [(step, 64.0 * (rank + 1), 64.0) for step in range(40)]}))
    (ax,) = [ax for ax in run_figure.draw_run(source).axes if ax.get_title(loc="left") == "kl"]
    assert [line.get_label() for line in ax.get_lines()] == ["node 0", "node 1", "mean"]
    np.testing.assert_allclose(ax.get_lines()[2].get_ydata(), 1.5)
    assert ax.get_title(loc="right") == "last 1.50, from 1.50 to 1.50"
    assert "logged: kl 1.50" in run_text.format_run(source)


def test_custom_panels_out_of_sight_are_not_drawn_until_a_page_shows_them(own_panels, monkeypatch):
    drawn = []

    @dtkit.panel("Mine")
    def draw(_ax, history):
        drawn.append(len(history))

    timers, source = Timers(), FakeSource()
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    monkeypatch.setattr(view, "send", lambda *_: None)

    def advance(seconds):
        timers.now += seconds
        source.advance(1)
        timers.run()
        return len(drawn)

    def report(page, *away):
        view._on_page_message(None, {"sight": {"page": page, "away": list(away)}}, [])

    for nothing in (None, {"page": 1, "away": []}, {"page": "a"}, {"page": "a", "away": "Mine"}):
        view._on_page_message(None, {"sight": nothing}, [])
    assert advance(5) == 1
    report("a", "Mine", "Other")
    assert advance(5) == 1
    report("b")  # another page has it in sight
    timers.run()
    assert len(drawn) == 2
    assert advance(5) == 3
    report("b", "Mine")
    assert advance(5) == 3
    report("a")  # at once, although the last one was just drawn
    assert timers.waiting[0][0] == timers.now
    timers.run()
    assert len(drawn) == 4
    report("a", "Mine")
    assert advance(5) == 4
    view._on_page_message(None, {"hello": "opened"}, [])  # it has no panel to report until a picture comes
    assert advance(5) == 5
    report("a", "Mine")
    assert advance(5) == 5
    assert advance(timeouts.SIGHT_REPORT_LIFE_S) == 6  # pages that report no more may be closed
    view.close()
