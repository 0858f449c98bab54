"""What panels show beyond curves: lost nodes, outliers and their lines, strips, the user's own panels, reports."""

import dataclasses
import json
import re
import threading
from concurrent.futures import Future

import numpy as np
import pytest

import dtkit
from dtkit.dashboard import report
from dtkit.dashboard.figures import custom_panels, run_figure, style
from dtkit.dashboard.live import comparison_widget, widget
from dtkit.dashboard.live.commands import CommandHandler
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.curves import LOSS, downsample
from dtkit.dashboard.summary.lost_nodes import update_lost_nodes
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.summary.node_series import NUM_BUCKETS, NodeSeries
from dtkit.dashboard.summary.notices import collect_notices
from dtkit.dashboard.summary.outliers import find_outliers
from dtkit.dashboard.summary.step_strip import BOX_KINDS, MAX_BOXES, MAX_NODES, make_step_strip
from dtkit.dashboard.summary.timing import compute_step_timing, select_bars
from dtkit.history.timeline import SPAN_DTYPE, Timeline, convert_simulation
from dtkit.schedules.schedule import Schedule
from dtkit.types import Event, State
from tests.fake_source import Drilled, FakeSource
from tests.test_live import Timers

# -- lost nodes ------------------------------------------------------------------------------------------


def event(kind, rank, step=7):
    return Event(step, kind, kind, 0.0, rank)


def test_a_node_is_lost_until_it_is_repaired():
    lost = update_lost_nodes({}, [event("lost", 1), event("lost", 3, 9), event("print", 2), event("lost", None)])
    assert lost == {1: 7, 3: 9}
    assert update_lost_nodes(lost, [event("repair", 3)]) == {1: 7}
    assert update_lost_nodes(lost, [event("repair", None)]) == {}
    assert lost == {1: 7, 3: 9}  # what was known stays as it was


def test_lost_nodes_are_counted_said_and_sent():
    source = FakeSource(ranks=4)
    source.advance(30)
    source.lose(2)
    feed = MessageBuilder(source)
    content = feed.build_snapshot().content
    nodes = {tile["label"]: tile for tile in content["tiles"]}["nodes"]
    assert (nodes["value"], nodes["note"]) == ("3 / 4", "✕ node 2 lost")
    assert content["remarks"][0] == {"kind": "lost", "text": "node 2 was lost at step 30; 3 nodes of 4 left"}
    assert content["nodes_now"]["lost"] == [2]
    assert [mark["kind"] for mark in content["marks"]] == ["lost"]
    source.event("repair", "node 2 is back", 2)
    content = feed.build_change().content
    assert content["nodes_now"]["lost"] == []
    assert content["remarks"] == collect_notices(source) == []
    assert (
        next(t for t in build_tiles(source, compute_run_metrics(source.history, 4)) if t.label == "nodes").value
        == "4 / 4"
    )


# -- outliers and their lines ----------------------------------------------------------------------------


def test_of_nodes_that_are_alike_none_is_named():
    source = FakeSource(ranks=256)
    for _ in range(20):
        source.advance(20)
        assert find_outliers(compute_run_metrics(source.history, 256)) == []


def test_outliers_are_the_lost_the_slow_and_the_far():
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


def test_a_nodes_line_is_its_own_history_whenever_it_is_chosen():
    source, spotlight = FakeSource(ranks=16, steps=4000), NodeSeries(16)
    for _ in range(7):
        source.advance(300)
        spotlight.update(source.history)
    found = spotlight.take_changes([3, 9])
    assert found.first == 0
    assert found.means.shape == (len(found.means), 2, 2)
    assert NUM_BUCKETS // 2 <= len(found.means) <= NUM_BUCKETS
    for k, rank in enumerate((3, 9)):
        _, losses = source.history.loss(rank)
        whole = losses[: len(losses) // found.width * found.width].reshape(-1, found.width).mean(1)
        np.testing.assert_allclose(found.means[: len(whole), 0, k], whole, rtol=1e-5)
    assert spotlight.take_changes([3, 9]) is None  # nothing changed
    source.advance(1)
    spotlight.update(source.history)
    assert len(spotlight.take_changes([3, 9]).means) == 1
    assert spotlight.take_changes([4]).first == 0  # another choice comes whole


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


def test_outliers_have_lines_in_the_kept_picture_too():
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


def test_nodes_that_were_replaced_or_left_out_are_sent():
    source = FakeSource(ranks=4)
    source.advance(20)
    feed = MessageBuilder(source)
    feed.build_snapshot()
    assert "nodes" not in feed.build_change().content
    source.shrink(3)
    source.advance(20)
    told = feed.build_change().content
    assert len(told["nodes"]) == 3
    later = MessageBuilder(source).build_snapshot().content  # a page that is opened now, or that a new kernel opens
    assert (feed.build_snapshot().content["head"]["ranks"], later["head"]["ranks"]) == (4, 4)  # there are lines of four
    assert told["head"]["overall"] == later["head"]["overall"] == "all ÷ n"  # was divided by 4, and is by 3
    source.advance(40)
    assert "head" not in feed.build_change().content
    assert [bar.rank for bar in select_bars(compute_step_timing(source.history, 4))] == [
        0,
        1,
        2,
    ]  # of the last 50 steps
    for content in (told, later):
        nodes = next(tile for tile in content["tiles"] if tile["label"] == "nodes")
        assert nodes == {"label": "nodes", "value": "3 / 3", "note": "was 4: 1 left out", "alert": False}
        assert content["remarks"] == [{"kind": "fewer", "text": "3 nodes: 1 of 4 was lost and left out"}]
        assert (content["nodes_now"]["world"], content["nodes_now"]["lost"]) == (3, [])


def test_while_nodes_are_being_left_out_they_are_lost():
    """The world is the new one before the event says so."""
    source = FakeSource(ranks=4)
    source.advance(20)
    feed = MessageBuilder(source)
    source.lose(3)
    source.spec = dataclasses.replace(source.spec, world_size=3)
    content = feed.build_snapshot().content
    nodes = next(tile for tile in content["tiles"] if tile["label"] == "nodes")
    assert (nodes["value"], nodes["note"], nodes["alert"]) == ("3 / 4", "✕ node 3 lost", True)
    assert [remark["kind"] for remark in content["remarks"]] == ["lost"]


def said(figure):
    """What stands below the title of a kept picture."""
    return [text.get_text() for text in figure.texts if (text.get_gid() or "").startswith("remark-")]


def test_the_kept_picture_says_who_is_stuck_who_was_left_out_and_what_marks_mean():
    source = FakeSource(ranks=4)
    source.advance(20)
    source.lr = 0.01
    source.event("lr", "learning rate 0.01")
    source.shrink(3)
    source.advance(20)
    assert source.history.events[-1].kind == "repair"
    source.stick(2)
    figure = run_figure.draw_run(source)
    assert " · 3 nodes (was 4) · " in figure._suptitle.get_text()
    first, second, *others = said(figure)
    assert first.startswith("⊘ node 2 is stuck in forward of step 41, and the others wait for it. It stands at train")
    assert second == "    ranks stand"  # a long one goes on below
    assert others == [
        "○ 3 nodes: 1 of 4 was lost and left out",
        "marks:  lr new learning rate   † node 1 lost   + repaired   ⊘ node 2 stuck",
    ]
    alerts = {text.get_gid() for text in figure.texts if text.get_color() == style.ALERT_COLOR}
    assert alerts == {"remark-stuck"}
    quiet = FakeSource(ranks=2)
    quiet.advance(20)
    assert said(run_figure.draw_run(quiet)) == []


# -- the timeline ----------------------------------------------------------------------------------------


def named(found, rank):
    own = found.boxes[found.boxes["rank"] == rank]
    return [(BOX_KINDS[box["kind"]], round(1e3 * (box["end"] - box["begin"]))) for box in own]


def test_a_collective_is_cut_where_the_last_node_arrives():
    source = FakeSource(ranks=2, strips=True)
    source.slowness = {1: 2.0}
    source.advance(5)
    found = make_step_strip(source.timeline)
    assert found.step == 5
    assert named(found, 0) == [
        ("data", 5), ("forward", 25), ("backward", 50), ("waiting", 75), ("communication", 22), ("update", 6)
    ]  # fmt: skip
    assert [kind for kind, _ in named(found, 1)] == ["data", "forward", "backward", "communication", "update"]


def test_a_pipelines_boxes_have_their_micro_batches():
    source = FakeSource(ranks=4, stages=4, strips=True)
    source.advance(2)
    found = make_step_strip(source.timeline)
    assert found.is_pipelined
    assert re.fullmatch(r"step 2 · bubble \d+ % measured, 43 % by formula", found.note)
    own = found.boxes[found.boxes["rank"] == 2]
    assert own["micro_batch"].tolist() == [0, 1, 2, 3] * 2
    assert not len(found.plan)  # no schedule was given


def test_the_planned_schedule_stands_behind_what_was_measured():
    source = FakeSource(ranks=4, stages=4, strips=True)
    source.advance(2)
    measured = source.timeline.spans
    found = make_step_strip(Timeline(measured, schedule=Schedule.from_name("GPipe", 4, 4)))
    assert len(found.plan) == len(found.boxes) == 32
    for rank in range(4):
        plan, boxes = (part[part["rank"] == rank] for part in (found.plan, found.boxes))
        assert plan["micro_batch"].tolist() == boxes["micro_batch"].tolist()
        assert (plan["begin"] <= boxes["begin"] + 1e-9).all()  # sending is free in a plan
    message = MessageBuilder(source).build_snapshot()
    assert len(message.buffers[4]) == 10 * 32


def test_a_schedule_without_a_formula_was_simulated():
    zero = Schedule.from_name("ZBVZeroBubble", 2, 4)
    assert make_step_strip(Timeline(convert_simulation(zero.simulate()), schedule=zero)).note.endswith(
        "measured, 4 % by simulation"
    )


def test_messages_have_kinds_of_their_own():
    spans = [
        (3, 0, "send forward", 0, 1, 0, 1),
        (3, 0, "wait", 0, 1, 1, 3),
        (3, 0, "receive backward", 0, 0, 3, 6),
        (3, 0, "backward", 0, 0, 6, 9),
    ]
    found = make_step_strip(Timeline(np.array(spans, SPAN_DTYPE)))
    assert [(kind, seconds // 1000) for kind, seconds in named(found, 0)] == [
        ("send", 1), ("waiting", 2), ("receive", 3), ("backward", 3)
    ]  # fmt: skip
    assert found.boxes["micro_batch"].tolist() == [1, 1, 0, 0]
    assert found.boxes["stage"].tolist() == [0] * 4


def test_of_many_nodes_some_are_shown_and_those_that_are_asked_for():
    source = FakeSource(ranks=256, strips=True)
    source.advance(2)
    found = make_step_strip(source.timeline, [77])
    assert len(found.ranks) <= MAX_NODES
    assert 77 in found.ranks
    assert (found.ranks[0], found.ranks[-1]) == (0, 255)
    many = np.zeros(50_000, SPAN_DTYPE)
    many["phase"], many["begin"] = "forward", np.arange(50_000)
    many["end"] = many["begin"] + np.random.default_rng(0).random(50_000)
    assert len(make_step_strip(Timeline(many)).boxes) <= MAX_BOXES
    assert make_step_strip(None) is None
    assert make_step_strip(Timeline(np.empty(0, SPAN_DTYPE))) is None


def test_a_timeline_is_sent_when_it_changes_and_once_a_second_at_most():
    now = [0.0]
    source = FakeSource(ranks=4, strips=True)
    source.advance(5)
    feed = MessageBuilder(source, lambda: now[0])
    first = feed.build_snapshot()
    assert first.content["strip"]["step"] == 5
    assert len(first.buffers[4]) == 10 * first.content["strip"]["boxes"]
    source.advance(5)
    assert "strip" not in feed.build_change().content  # too soon
    assert feed.has_pending
    now[0] = 1.1
    assert feed.build_change().content["strip"]["step"] == 10
    now[0] = 9.0
    assert "strip" not in feed.build_change().content  # nothing new
    assert not feed.has_pending


def test_a_timeline_that_fails_is_an_error_of_that_panel_alone(monkeypatch):
    source = FakeSource(ranks=2)
    source.advance(5)
    monkeypatch.setattr(type(source), "timeline", property(lambda _: 1 / 0))
    content = MessageBuilder(source).build_snapshot().content
    assert content["strip"] == {"error": "ZeroDivisionError: division by zero"}
    assert content["status"]["step"] == 5


# -- what a page asks for --------------------------------------------------------------------------------


SAVED = "checkpoint of step 5 on all nodes saved: /somewhere/checkpoints/Conv-Net-1"


def desk(source, *, drills=True):
    heard, news = [], threading.Event()

    def said(*what):
        heard.append(what)
        news.set()

    return CommandHandler(source, said, fault_injection=drills), heard, news


@pytest.mark.parametrize(
    ("command", "value", "text"),
    [
        ("pause", None, "paused at step 412 on all nodes"),
        ("resume", None, "resumed at step 412 on all nodes"),
        ("step", None, "one step taken: all nodes stand at step 412"),
        ("stop", None, "stopped at step 412 on all nodes"),
        ("lr", 0.01, "learning rate 0.01 from step 412 on, on all nodes"),
    ],
)
def test_a_command_says_when_it_took_effect(command, value, text):
    source = Drilled(steps=500)
    source.advance(412)
    asked, heard, _ = desk(source)
    asked.handle(command, value)
    assert heard == [("effect", command, text)]


def test_what_a_run_answers_with_an_error_is_a_refusal(monkeypatch):
    source = Drilled()
    answer = Future()
    answer.set_exception(RuntimeError("the run is RUNNING"))
    monkeypatch.setattr(source, "post_ops", lambda *_: answer)
    asked, heard, _ = desk(source)
    asked.handle("step", None)
    assert heard == [("refused", "step", "the run is RUNNING")]


@pytest.mark.parametrize(
    ("command", "value", "done", "text"),
    [
        ("slow", {"rank": 3, "factor": 2}, ("slow", 3, 2.0), "node 3 is slowed 2x since step 5"),
        ("slow", {"rank": 3, "factor": 1}, ("slow", 3, 1.0), "node 3 runs at full speed since step 5"),
        ("kill", {"rank": 1}, ("kill", 1), "node 1 was ended at step 5"),
        ("save", None, ("save", "checkpoints/Conv-Net-1"), SAVED),
    ],
)
def test_drills_and_checkpoints_are_done_on_a_thread(command, value, done, text):
    source = Drilled(name="Conv/Net 1")
    source.advance(5)
    asked, heard, news = desk(source)
    asked.handle(command, value)
    assert news.wait(10)
    assert source.asked == [done]
    assert heard == [("effect", command, text)]


def test_a_checkpoint_that_fails_is_said():
    source = Drilled()
    source.refuse = OSError("no space left")
    asked, heard, news = desk(source)
    asked.handle("save_checkpoint", None)
    assert news.wait(10)
    assert heard == [("refused", "save", "no space left")]


def test_drills_are_for_those_who_asked_for_them():
    source = Drilled()
    asked, heard, _ = desk(source, drills=False)
    assert asked.extra_controls == ["save"]
    asked.handle("kill", {"rank": 1})
    assert (source.asked, heard) == ([], [])
    asked.fault_injection = True
    assert asked.extra_controls == ["slow", "kill", "save"]
    assert desk(FakeSource())[0].extra_controls == []


@pytest.mark.parametrize(
    ("command", "value", "match"),
    [
        ("slow", {"rank": 9, "factor": 2}, "there are nodes 0 to 3"),
        ("slow", {"rank": 1, "factor": 1000}, "from 1"),
        ("kill", {"rank": True}, "there are nodes"),
        ("kill", None, "there are nodes"),
    ],
)
def test_a_drill_that_makes_no_sense_is_refused_at_once(command, value, match):
    with pytest.raises(ValueError, match=match):
        desk(Drilled())[0].handle(command, value)


def test_effects_reach_the_page_and_those_that_open_later():
    source, timers = Drilled(), Timers()
    view = widget.Dashboard(source, clock=timers.clock, call_later=timers.later, fault_injection=True)
    assert view.opening["content"]["head"]["offers"] == ["slow", "kill", "save"]
    source.advance(12)
    view._on_page_message(view, {"command": "pause"}, [])
    assert view._message_builder.build_snapshot().content["effect"] == {
        "count": 1,
        "text": "paused at step 12 on all nodes",
    }
    view.close()


# -- the user's own panels -------------------------------------------------------------------------------


@pytest.fixture
def own_panels():
    """A clean register of panels."""
    yield custom_panels
    for name in list(custom_panels.get_panels()):
        custom_panels.remove_panel(name)


def test_a_users_panel_stands_in_the_kept_picture(own_panels):
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
    assert [t.get_text() for t in by_name["Broken"].texts] == ["this panel failed: RuntimeError: not <b>today</b>"]
    assert "Loss" in by_name
    assert rows(by_name["Loss"], source.history) is None  # the function stays one's own


def test_pictures_are_drawn_at_a_bounded_rate(own_panels):
    drawn, now = [], [100.0]

    @dtkit.panel("Slow to draw")
    def draw(_ax, history):
        drawn.append(len(history))
        now[0] += 1.0  # a second of drawing: the next not before twenty have passed

    source = FakeSource()
    gallery = custom_panels.CustomPanelRenderer(source.history, lambda: now[0])
    assert [picture.png[:4] for picture in gallery.draw_due_panels()] == [b"\x89PNG"]
    assert list(gallery.draw_due_panels()) == []
    source.advance(1)
    assert gallery.is_outdated
    for later, count in ((115.0, 1), (121.5, 2)):
        now[0] = later
        list(gallery.draw_due_panels())
        assert len(drawn) == count
    assert not gallery.is_outdated


def test_pictures_and_errors_are_sent_to_pages(own_panels, monkeypatch):
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


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (None, ValueError)])
def test_a_panel_needs_a_title(name, error):
    with pytest.raises(error, match="title"):
        dtkit.panel(name)


def test_a_panel_is_a_function(own_panels):
    with pytest.raises(TypeError, match="function of"):
        dtkit.panel("x")("not one")


# -- several runs, and reports ---------------------------------------------------------------------------


def test_runs_are_compared_on_one_axis():
    long, short = FakeSource(steps=5000, name="Long"), FakeSource(steps=5000, name="Short", seed=1)
    long.advance(3000)
    short.advance(100)
    found = dtkit.compare([long, short], labels=["long", "<b>short</b>"])
    message = comparison_widget.ComparisonMessageBuilder(found).build_snapshot()
    json.dumps(message.content, allow_nan=False)
    part, head = message.content["curves"], message.content["head"]
    values = np.frombuffer(message.buffers[0], "<f4").reshape(part["buckets"], head["columns"], 3)
    assert [run["label"] for run in head["runs"]] == ["long", "<b>short</b>"]
    assert message.content["status"] == {"state": "running", "step": 3000}
    once = downsample(long.history, LOSS, 4, comparison_widget.NUM_BUCKETS)
    assert part["width"] == once.width
    np.testing.assert_allclose(values[:, 0], once.values[:, -1], rtol=1e-5)
    filled = np.isfinite(values[:, 1, 1])
    assert filled.sum() == -(-100 // part["width"])
    assert filled[: filled.sum()].all()
    assert np.isnan(values[:, 2]).all()


def test_a_comparison_is_live_until_no_run_goes_on(monkeypatch):
    shown = []
    replaced = threading.Event()

    class Handle:
        def update(self, data, *, raw):
            shown.append((data, raw))
            replaced.set()

    monkeypatch.setattr("IPython.display.display", lambda view, *, display_id: shown.append(view) or Handle())
    ended, running = FakeSource(), FakeSource(seed=1)
    for source in (ended, running):
        source.advance(20)
    ended.end()
    assert comparison_widget.try_show(dtkit.compare([ended, running])) is True
    view = shown[0]
    assert running.subscribers == 2
    running.end(State.STOPPED)
    assert replaced.wait(60)
    data, raw = shown[1]
    assert raw
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert isinstance(view, comparison_widget.ComparisonWidget)
    assert comparison_widget.try_show(dtkit.compare([ended])) is False


def test_a_report_is_one_file_that_needs_nothing_else(tmp_path):
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
    assert not re.search(r"<script|<link|<img src=x|https?://", page)
    assert page.count("data:image/png;base64,") == 1
    assert "&lt;script&gt;alert(1)" in page
    for heading in ("What was seen", "Next to one process", "Nodes", "Schedule", "What happened", "Versions"):
        assert f"<h2>{heading}</h2>" in page
    assert all(f"<td>{node.pid}</td>" in page for node in source.nodes)
    rates = [np.median(s.history.throughput()[1]) for s in (source, alone)]
    assert f"<td>{rates[0] / rates[1]:.2f}</td>" in page
    assert "<td>51</td><td>0.01</td>" in page
    assert "learning rate 0.01 &lt;img" in page
    with pytest.raises(ValueError, match="one process"):
        report.write_report(source, path, single_process=source.history)


def test_every_time_axis_marks_what_happened():
    source = FakeSource()
    source.advance(30)
    for kind, rank in (("stuck", 1), ("lost", 1), ("repair", 1), ("save", None), ("error", None)):
        source.event(kind, kind, rank)
        source.advance(10)
    for ax in run_figure.draw_run(source).axes:
        if ax._left_title.get_text() in {"Loss", "Throughput", "Gradient norm", "Learning rate"}:
            marks = [line.get_gid() for line in ax.get_lines() if line.get_gid().startswith("event-")]
            assert marks == ["event-stuck", "event-lost", "event-repair", "event-save", "event-error"]
