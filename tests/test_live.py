"""The live view: down-sampling, messages, throttling, the widget, and the display replaced at the end."""

import base64
import dataclasses
import itertools
import json
import logging
import math
import os
import queue
import re
import socket
import subprocess
import sys
import textwrap
import threading

import matplotlib.text
import numpy as np
import pytest

from dtkit._util import formatting, timeouts
from dtkit.dashboard import display, kept_picture
from dtkit.dashboard.live import messages, widget
from dtkit.dashboard.live.bundle import STATIC_FOLDER, bundle_modules
from dtkit.dashboard.live.log_lines import MAX_LOG_LINES, MAX_MARKS
from dtkit.dashboard.live.messages import MAX_CHANGE_EVENTS, MessageBuilder
from dtkit.dashboard.run_view import RunView
from dtkit.dashboard.summary import spare_core, stall
from dtkit.dashboard.summary.best_values import find_best_value
from dtkit.dashboard.summary.curves import CHARTS, LOSS, LR, MAX_BUCKETS, Curves, downsample
from dtkit.dashboard.summary.event_marks import MARKED_EVENTS
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing
from dtkit.dashboard.text import run_text
from dtkit.dashboard.throttle import VIEW_NICENESS, Throttle, start_timer
from dtkit.history.history import History
from dtkit.history.scalars import ScalarRecord
from dtkit.types import Evaluation, Event, ReplicaCheckResult, State, StepRecord
from tests.support.fake_source import FakeSource
from tests.support.node import find_node
from tests.support.rows_read import count_rows_read
from tests.support.timers import Timers

STATIC = STATIC_FOLDER


def size(message):
    return len(json.dumps(message.content, allow_nan=False)) + sum(map(len, message.buffers))


# -- curves ----------------------------------------------------------------------------------------------


def records(step, losses):
    return [StepRecord(step, 0, r, 8, x, 8, 0.1, 0, 0, 0, 0, 0.1, 1) for r, x in enumerate(losses)]


def test_curves_keep_extremes_in_a_fixed_number_of_buckets():
    source = FakeSource(ranks=2, steps=100_000)
    source.advance(60_000)
    source.advance(1, loss=99.0)
    source.advance(39_999)
    part = downsample(source.history, LOSS, 2)
    assert MAX_BUCKETS // 2 <= len(part.values) <= MAX_BUCKETS
    rows = source.history.rows()
    for rank in (0, 1):
        losses = rows["loss"][rows["rank"] == rank]
        assert np.nanmax(part.values[:, rank, 2]) == np.float32(losses.max()) == 99
        assert np.nanmin(part.values[:, rank, 0]) == np.float32(losses.min())
    bucket = part.values[int(np.nanargmax(part.values[:, 0, 2]))]
    assert bucket[0, 1] < 5  # the mean stays readable beside the spike
    assert part.middle_steps[0] < part.middle_steps[-1] <= 100_000 + part.width


def test_a_message_has_no_check_of_a_later_step_than_its_progress():
    class SteppingSource(FakeSource):
        """A run that takes a step and checks its replicas while a message about it is built."""

        @property
        def consistency(self):
            self.step += 1
            return ReplicaCheckResult(self.step, (), None, None)

        @consistency.setter
        def consistency(self, _result):
            pass

    content = MessageBuilder(SteppingSource(ranks=2)).build_snapshot().content
    assert content["status"]["step"] == 1
    assert [notice["text"] for notice in content["notices"]] == ["parameters identical on 2 nodes, checked at step 1"]


def test_a_page_that_zooms_gets_single_steps_and_bad_ranges_nothing():
    source = FakeSource(ranks=2, steps=100_000)
    source.advance(50_000)
    dashboard, sent = widget.Dashboard(source), []
    dashboard.send = lambda content, buffers=(): sent.append((content, buffers))
    for steps in ([1, "2"], [1], None, [1.5, 2.5], {"a": 1}, [True, 9]):
        dashboard._on_page_message(None, {"zoom": steps}, [])
    assert "detail" not in [content["kind"] for content, _ in sent]
    dashboard._on_page_message(None, {"zoom": [40_001, 40_400]}, [])
    content, (buffer, *_) = next(message for message in sent if message[0]["kind"] == "detail")
    assert content["curves"] == {"width": 1, "origin": 40_001, "last": 40_400, "buckets": 400}
    values = np.frombuffer(buffer, "<f4").reshape(400, -1, 3)
    losses = source.history.loss(1)[1]
    np.testing.assert_array_equal(values[:, 1, 1], losses[40_000:40_400].astype("f4"))
    dashboard._on_page_message(None, {"zoom": [60_000, 70_000]}, [])  # beyond the last step
    details = [content for content, _ in sent if content["kind"] == "detail"]
    assert details[-1]["curves"]["buckets"] == 0
    dashboard.close()


def test_a_page_that_zooms_gets_the_time_of_these_steps():
    source = FakeSource(ranks=2, steps=100_000)
    source.advance(400)
    source.slowness = {1: 3.0}
    source.advance(100)
    source.slowness = {}
    source.advance(500)
    builder = MessageBuilder(source)
    snapshot = builder.build_snapshot()
    assert snapshot.content["time"]["steps"] == "steps 951 to 1,000"
    detail = builder.build_detail(401, 500)
    rows = source.history.rows()
    rows = rows[(rows["step"] >= 401) & (rows["step"] <= 500)]
    bars = np.frombuffer(detail.buffers[1], "<f4").reshape(2, len(PHASES))
    for rank in range(2):
        mine = rows[rows["rank"] == rank]
        assert bars[rank, PHASES.index("backward")] == pytest.approx(mine["backward_s"].mean())
        assert bars[rank].sum() == pytest.approx(mine["step_s"].mean())
    assert detail.content["time"]["steps"] == "steps 401 to 500"
    assert detail.content["time"]["straggler"].startswith("node 1 keeps the others waiting")
    assert builder.build_change().content["nodes_now"]["slow"] == []  # a page's range changes nothing else
    assert "time" not in builder.build_detail(2_000, 3_000).content  # no step of these was taken


def test_the_time_of_very_many_steps_is_that_of_some_of_them(monkeypatch):
    source = FakeSource(ranks=2, steps=200_000)
    source.advance(30_000)
    source.slowness = dict.fromkeys(range(2), 2.0)
    source.advance(30_000)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    num_read = count_rows_read(monkeypatch)
    detail = builder.build_detail(0, 60_000)
    assert max(num_read) <= 20_000  # never the whole history at once
    assert detail.content["time"]["steps"] == "steps 1 to 60,000"
    assert detail.content["curves"]["buckets"] == 0  # a page has these already
    forward_s = np.frombuffer(detail.buffers[1], "<f4").reshape(2, len(PHASES))[:, PHASES.index("forward")]
    assert forward_s == pytest.approx(source.history.column("forward_s").mean(), rel=0.01)


def test_a_page_that_zooms_gets_a_timeline_and_whether_it_is_of_these_steps():
    source = FakeSource(ranks=2, strips=True)
    source.advance(300)
    builder = MessageBuilder(source)
    detail = builder.build_detail(250, 310)
    assert detail.content["strip"]["step"] == 300
    assert "no timeline" not in detail.content["strip"]["note"]
    assert len(detail.buffers[2]) == 10 * detail.content["strip"]["boxes"] > 0
    assert builder.build_detail(100, 200).content["strip"]["note"] == "step 300 (100 to 200 have no timeline)"
    assert "strip" not in MessageBuilder(FakeSource(ranks=2)).build_detail(1, 2).content


def test_a_message_of_a_long_run_reads_its_last_rows_alone(monkeypatch):
    """Messages about a million steps would take a core from the engines otherwise."""
    source = FakeSource(ranks=2, steps=100_000)
    source.advance(20_000)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    builder.build_text()
    num_read = count_rows_read(monkeypatch)
    source.advance(10)
    builder.build_text()
    source.advance(10)
    builder.build_change()
    assert max(num_read) <= 2_000


def test_curves_of_few_steps_hold_the_exact_values():
    source = FakeSource(ranks=3, steps=100)
    source.advance(100)
    part = downsample(source.history, LOSS, 3)
    assert part.is_flat
    assert part.width == 1
    for rank in range(3):
        steps, losses = source.history.loss(rank)
        np.testing.assert_array_equal(part.middle_steps, steps)
        np.testing.assert_array_equal(part.values[:, rank, 1], losses.astype("f4"))


def test_curves_read_in_parts_equal_curves_read_at_once():
    source, bit = FakeSource(ranks=4, steps=5000), Curves(CHARTS, 4)
    for k in range(60):
        source.advance(1 + 7 * (k % 20))
        bit.update(source.history)
    once = Curves(CHARTS, 4)
    once.update(source.history)
    a, b = bit.get_all(), once.get_all()
    assert (a.width, a.origin) == (b.width, b.origin)
    np.testing.assert_allclose(a.values, b.values, rtol=1e-6)


def test_rows_of_ranks_that_a_view_does_not_have_draw_nothing():
    source = FakeSource(ranks=2)
    source.advance(5)
    curves = Curves((LR,), 2)
    rows = source.history.rows()
    rows = rows[rows["rank"] == 1].copy()
    rows["rank"] = 2  # of an engine that joined since
    curves.add_rows(rows, source.history.totals(), 1)
    assert np.isnan(curves.get_all().values).all()


def test_many_ranks_share_a_band():
    source = FakeSource(ranks=9)
    source.advance(20)
    part = downsample(source.history, LOSS, 9)
    assert part.values.shape[1] == 2
    losses = source.history.rows()["loss"].reshape(20, 9)
    np.testing.assert_array_equal(part.values[:, 0, 0], losses.min(1).astype("f4"))
    np.testing.assert_array_equal(part.values[:, 0, 2], losses.max(1).astype("f4"))


def test_nonfinite_losses_leave_only_a_gap():
    history = History()
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        history.append(records(step, [loss]))
    part = downsample(history, LOSS, 1)
    np.testing.assert_array_equal(part.values[:, 0, 1], np.array([1, np.nan, np.nan, 2], "f4"))


def test_late_rows_go_to_the_bucket_of_their_step():
    history, curves = History(), Curves((LOSS,), 2)
    for step in range(10):
        history.append(records(step, [1.0]))
    curves.update(history)
    curves.take_changes()
    history.append([StepRecord(3, 0, 1, 8, 7.0, 8, 0.1, 0, 0, 0, 0, 0.1, 1)])
    curves.update(history)
    assert curves.take_changes().first == 3
    assert curves.get_all().values[3, 1, 1] == 7


# -- messages -----------------------------------------------------------------------------------------------


def keep_log(events):
    """Return the lines that a page keeps, as latest() in store.js does."""
    marked = [event for event in events[:-MAX_LOG_LINES] if event["kind"] in MARKED_EVENTS]
    return [*marked[-MAX_MARKS:], *events[-MAX_LOG_LINES:]]


class Page:
    """The page state that messages build up: the Python mirror of apply() in store.js."""

    def __init__(self, message):
        self.seq, self.kept = 0, None
        self.apply(message)

    def apply(self, message):
        content, part = message.content, message.content["curves"]
        whole = content["kind"] == "snapshot"
        assert whole or content["base"] == self.seq
        self.seq = content["seq"]
        values = np.frombuffer(message.buffers[0], "<f4")
        if whole:
            self.head, self.log, self.width = content["head"], list(content["events"]), part["width"]
            self.columns = content["head"]["columns"]
            self.values = np.zeros((0, self.columns, 3), "f4")
            self.evaluations = list(content["evaluations"])
        else:
            self.log = keep_log(self.log + content.get("events", []))
            self.evaluations += content.get("evaluations", [])
        self.status, self.tiles, self.notices = content["status"], content["tiles"], content["notices"]
        while self.width < part["width"]:
            self._join()
        values = np.repeat(values, 3) if part["flat"] else values
        values = values.reshape(part["buckets"], self.columns, 3)
        end = part["first"] + part["buckets"]
        if end > len(self.values):
            room = np.full((end, *self.values.shape[1:]), np.nan, "f4")
            room[: len(self.values)] = self.values
            self.values = room
        self.values[part["first"] : end] = values
        if message.buffers[1]:
            self.ranks = np.frombuffer(message.buffers[1], "<f4").reshape(-1, 3)
        if "time" in content:
            self.time, self.bars = content["time"], np.frombuffer(message.buffers[2], "<f4")

    def _join(self):
        if len(self.values) % 2:
            self.values = np.concatenate([self.values, np.full_like(self.values[:1], np.nan)])
        a, b = self.values[0::2], self.values[1::2]
        mean = np.where(np.isnan(b), a, np.where(np.isnan(a), b, (a + b) / 2))
        self.values = np.stack([np.fmin(a, b)[..., 0], mean[..., 1], np.fmax(a, b)[..., 2]], axis=-1)
        self.width *= 2


def long_story(builder, source):
    """Messages of a run with everything in it: slow, fast, events, evaluations, joins."""
    yield builder.build_snapshot()
    for k in range(80):
        source.advance(1 + (k % 9) * 11, loss=float("nan") if k == 20 else None)
        source.lr = 0.1 if k < 40 else 0.03
        source.consistency = ReplicaCheckResult(source.step, (), None)
        if k % 10 == 0:
            source.event("lr", f"learning rate {k}")
            source.history.add(Evaluation(source.step, 10, {"loss": 0.5, "accuracy": float("nan")}))
        yield builder.build_change()
    while builder.has_pending:
        yield builder.build_change()


def assert_same(a, b):
    assert (a.seq, a.width, a.log, a.status, a.tiles) == (b.seq, b.width, b.log, b.status, b.tiles)
    assert (a.evaluations, a.notices, a.time) == (b.evaluations, b.notices, b.time)
    np.testing.assert_array_equal(a.bars, b.bars)
    np.testing.assert_array_equal(a.ranks, b.ranks)
    np.testing.assert_allclose(a.values, b.values, rtol=2e-6)
    np.testing.assert_array_equal(a.values[..., [0, 2]], b.values[..., [0, 2]])  # extremes to the bit


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_late_snapshot_equals_the_sum_of_all_changes(ranks):
    source = FakeSource(ranks=ranks, steps=5000)
    builder = MessageBuilder(source)
    story = long_story(builder, source)
    early = Page(next(story))
    for message in story:
        early.apply(message)
    assert early.width > 1  # buckets were joined on the way
    late = Page(builder.build_snapshot())
    late.seq = early.seq
    assert_same(early, late)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("steps", [1, 10, 100, 1000])
def test_the_size_of_a_change_is_bounded(ranks, steps):
    source = FakeSource(ranks=ranks, steps=100_000)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    for _ in range(30):
        source.advance(steps)
        for k in range(50):
            source.event("print", f"{k} " + "x" * 1000)
        assert size(builder.build_change()) <= 10_000
    sent = 0
    while builder.has_pending:  # the remaining events follow in a few messages
        assert size(builder.build_change()) <= 10_000
        sent += 1
        assert sent < 100


def test_a_change_has_only_what_changed():
    source = FakeSource()
    builder = MessageBuilder(source)
    source.advance(300)
    builder.build_snapshot()
    source.advance(1)
    message = builder.build_change()
    assert message.content["curves"]["buckets"] == 1
    assert {"head", "nodes", "events", "evaluations"}.isdisjoint(message.content)
    idle = builder.build_change()
    assert idle.content["curves"]["buckets"] == 0
    assert [len(b) for b in idle.buffers] == [0] * 5
    assert "time" not in idle.content
    assert size(idle) < 1000


def test_a_flood_of_prints_keeps_only_the_last_log_lines():
    source = FakeSource()
    builder = MessageBuilder(source)
    builder.build_snapshot()
    for k in range(10_000):
        source.event("print", str(k))
    texts = []
    while builder.has_pending:
        events = builder.build_change().content["events"]
        assert len(events) <= MAX_CHANGE_EVENTS
        texts += [e["text"] for e in events]
    assert texts == [str(k) for k in range(10_000 - MAX_LOG_LINES, 10_000)]


@pytest.mark.parametrize("kind", ["evaluation", "print"])
def test_many_evaluations_and_prints_push_no_pause_out_of_the_log(kind):
    source = FakeSource()
    builder = MessageBuilder(source)
    page = Page(builder.build_snapshot())
    for name in ("pause", "lost", "repair"):
        source.event(name, name)
    for k in range(2 * MAX_LOG_LINES):
        source.event(kind, str(k))
    while builder.has_pending:
        page.apply(builder.build_change())
    for log in (page.log, Page(builder.build_snapshot()).log):
        assert [event["kind"] for event in log[:3]] == ["pause", "lost", "repair"]
        assert len(log) == 3 + (0 if kind == "evaluation" else MAX_LOG_LINES)


def test_a_snapshot_of_a_long_run_stays_small():
    source = FakeSource(ranks=4, steps=100_000)
    source.advance(100_000)
    assert size(MessageBuilder(source).build_snapshot()) < 70_000


def test_engine_output_is_sent_as_plain_text():
    source = FakeSource(name="<img src=x onerror=alert(1)>")
    source.event("print", "<script>alert(1)</script>\x1b[31m\x00", rank=1)
    source.exception = RuntimeError("<b>rank 1</b>\nsecond\x07 line")
    content = MessageBuilder(source).build_snapshot().content
    assert content["events"][0]["text"] == "<script>alert(1)</script> [31m"
    assert content["error"] == "RuntimeError: <b>rank 1</b>\nsecond  line"
    script = bundle_modules(STATIC / "dashboard.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", script)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)  # nothing is loaded from anywhere


def test_messages_are_json_without_nan():
    source = FakeSource()
    source.lr = float("nan")
    source.advance(3, loss=float("nan"))
    builder = MessageBuilder(source)
    json.dumps(builder.build_snapshot().content, allow_nan=False)
    tiles = {tile["label"]: tile["value"] for tile in builder.build_change().content["tiles"]}
    assert tiles["mean loss"] == "NaN"


def test_tiles_agree_with_the_records():
    source = FakeSource(ranks=4, steps=400)
    source.advance(150)
    source.advance(50, loss=0.25)
    tiles = {tile["label"]: tile for tile in MessageBuilder(source).build_snapshot().content["tiles"]}
    totals = source.history.totals(150)
    throughput = totals["samples"].sum() / totals["step_s"].sum()
    assert tiles["throughput"]["value"] == f"{throughput:,.0f}"
    assert (tiles["mean step time"]["value"], tiles["mean step time"]["note"]) == (
        formatting.format_duration(totals["samples"].mean() / throughput),
        "last 50 steps",
    )
    loss = tiles["mean loss"]
    assert (loss["value"], loss["note"]) == ("0.250", "20 steps, spread 0")
    assert not any(tile["alert"] for tile in tiles.values())
    rows = source.history.rows(150 * 4)
    waiting = f"{100 * rows['wait_s'].sum() / rows['step_s'].sum():.0f} %"
    assert (tiles["waiting"]["value"], tiles["waiting"]["note"]) == (waiting, "of all nodes' time")
    assert tiles["nodes"] == {"label": "nodes", "value": "4 / 4", "note": "on 1 host", "alert": False}
    assert list(tiles) == ["throughput", "mean loss", "mean step time", "waiting", "nodes"]


def test_a_text_has_the_last_values_in_titles_of_charts():
    source = FakeSource(ranks=2, steps=400)
    source.advance(300)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    source.advance(1)
    source.history.add(Evaluation(301, 10, {"accuracy": 0.9}))
    for rank in range(2):
        numbers = {"kl": [(300, 5.0, 1.0), (301, 1.0 + rank, 1.0)], "system/CPU (cores)": [(301, 1.0, 1.0)]}
        source.history.add(ScalarRecord(rank, numbers | {"rare": [(100, 1.0, 1.0)]}))
    evaluations = [{"step": 301, "values": {"accuracy": 0.9}}]
    for _ in range(2):
        assert builder.build_text().content["newest"] == {"evaluations": evaluations, "numbers": {"kl": 1.5}}
    assert builder.build_change().content["evaluations"] == evaluations
    assert builder.build_text().content["newest"]["evaluations"] == []


def test_the_last_and_the_best_value_of_a_metric_have_a_tile():
    source = FakeSource()
    source.advance(60)
    shown = []
    for step, accuracy in ((20, 0.5), (40, 0.75), (60, 0.625)):
        source.history.add(Evaluation(step, 100, {"loss": 1.0, "accuracy": accuracy}))
        tiles = {tile["label"]: tile for tile in MessageBuilder(source).build_snapshot().content["tiles"]}
        assert "loss" not in tiles  # next to that of the training
        shown.append((tiles["accuracy"]["value"], tiles["accuracy"]["note"]))
    assert shown == [
        ("0.500", "validation, best so far"), ("0.750", "validation, best so far"), ("0.625", "validation, best 0.750"),
    ]  # fmt: skip


def test_the_tile_of_a_number_that_is_logged_and_validated_says_which_is_which():
    source = FakeSource()
    source.advance(300)
    for rank in range(4):
        source.history.add(ScalarRecord(rank, {"accuracy": [(300, 0.96, 1.0)], "kl": [(5, 2.0 + rank, 1.0)]}))
    for step, accuracy in ((200, 0.917), (300, 0.887)):
        source.history.add(Evaluation(step, 100, {"loss": 1.0, "accuracy": accuracy, "kl": 0.25}))
    tiles = {tile["label"]: tile for tile in MessageBuilder(source).build_snapshot().content["tiles"]}
    assert (tiles["accuracy"]["value"], tiles["accuracy"]["note"]) == ("0.960", "validation 0.887, best 0.917")
    assert (tiles["kl"]["value"], tiles["kl"]["note"]) == ("3.50", "validation 0.250, best so far")  # logged once


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("val_accuracy", "validation, best so far"), ("top5", "validation, best so far"),
        ("rmse", "validation, best so far"), ("confidence", "validation"), ("entropy", "validation"),
    ],
)  # fmt: skip
def test_a_metric_whose_name_does_not_say_what_is_better_has_no_best_value(name, note):
    """A tile said that 0.786 was "the best" confidence."""
    source = FakeSource()
    source.advance(60)
    source.history.add(Evaluation(60, 100, {"loss": 1.0, name: 0.5}))
    tiles = {tile["label"]: tile for tile in MessageBuilder(source).build_snapshot().content["tiles"]}
    assert (tiles[name]["value"], tiles[name]["note"]) == ("0.500", note)


def test_the_best_value_follows_evaluations_that_are_replaced_or_undone():
    history = FakeSource().history
    assert math.isnan(find_best_value(history, "error"))
    for step, error in ((10, 0.5), (20, math.nan), (30, 0.25)):
        history.add(Evaluation(step, 100, {"error": error}))
        find_best_value(history, "error")
    assert find_best_value(history, "error") == 0.25  # less is better, by its name
    history.add(Evaluation(30, 100, {"error": 0.125}))
    assert find_best_value(history, "error") == 0.125
    history.evaluations = history.evaluations[:2]
    assert find_best_value(history, "error") == 0.5


def test_the_loss_tile_is_a_mean_by_samples_over_the_steps_it_names():
    source = FakeSource(ranks=1)
    source.advance(29, loss=1.5)
    source.advance(19, loss=0.5)
    source.history.append([StepRecord(49, 0, 1, 2, 8.0, 2, 0.1, 0, 0, 0, 0, 0.1, 1)])  # the rest of an epoch
    tiles = {tile["label"]: tile for tile in MessageBuilder(source).build_snapshot().content["tiles"]}
    mean = (19 * 64 * 0.5 + 2 * 8.0) / (19 * 64 + 2)
    loss = tiles["mean loss"]
    assert (loss["value"], loss["note"]) == (formatting.format_loss(mean), "20 steps")


def test_the_live_time_panel_has_the_bars_of_the_figure():
    source = FakeSource(ranks=4)
    source.slowness = {1: 2.0}
    source.advance(60)
    message = MessageBuilder(source).build_snapshot()
    timing = compute_step_timing(source.history, 4)
    sent = np.frombuffer(message.buffers[2], "<f4").reshape(4, len(PHASES))
    np.testing.assert_array_equal(sent, timing.seconds.astype("f4"))
    time = message.content["time"]
    assert (time["steps"], time["straggler"]) == ("steps 11 to 60", timing.straggler.text)
    assert time["bars"][1] == {"rank": 1, "label": "node 1", "slow": True}
    assert message.content["head"]["phases"] == PHASES
    tiles = {tile["label"]: tile["note"] for tile in message.content["tiles"]}
    assert tiles["mean step time"] == "▲ slowest: node 1"


def test_node_throughput_excludes_waiting():
    source = FakeSource(ranks=2)
    source.slowness = {1: 2.0}
    source.advance(60)
    rows = source.history.rows(10 * 2)
    rates = np.frombuffer(MessageBuilder(source).build_snapshot().buffers[1], "<f4").reshape(2, 3)[:, 1]
    for rank in (0, 1):
        own = rows[rows["rank"] == rank]
        assert rates[rank] == pytest.approx(own["samples"].sum() / (own["step_s"] - own["wait_s"]).sum(), rel=1e-4)
    assert rates[0] > 1.5 * rates[1]


def test_notices_are_sent_with_their_kind():
    source = FakeSource(ranks=4)
    source.delay_factors, source.consistency = {1: 2.0}, ReplicaCheckResult(412, (), None)
    assert MessageBuilder(source).build_snapshot().content["notices"] == [
        {"kind": "identical", "text": "parameters identical on 4 nodes, checked at step 412"},
        {"kind": "slowed", "text": "node 1 slowed 2x on purpose"},
    ]


def test_a_stall_is_sent_until_it_ends():
    source = FakeSource(ranks=4)
    source.advance(30)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    source.message = "rank 1 keeps the others waiting"  # as a run has it: the finding's text
    source.stick(1)
    content = builder.build_change().content
    nodes = {tile["label"]: tile for tile in content["tiles"]}["nodes"]
    assert nodes == {"label": "nodes", "value": "4 / 4", "note": "⊘ node 1 stuck: forward", "alert": True}
    assert (content["nodes_now"]["stuck"], content["nodes_now"]["stopped"]) == ([1], [])
    assert content["notices"] == [
        {
            "kind": "stuck",
            "text": "node 1 is stuck in forward of step 31, and the others wait for it. It is at train.py:12 in "
            "step. cluster.stacks() shows the position of all nodes",
        }
    ]
    assert content["status"]["message"] == ""  # reported only once
    assert [mark["kind"] for mark in builder.build_snapshot().content["marks"]] == ["stuck"]
    said = content["notices"]
    source.stick(1, seconds=40.0)
    content = builder.build_change().content
    assert {tile["label"]: tile for tile in content["tiles"]}["nodes"]["note"] == "⊘ node 1 stuck: forward"
    assert content["notices"] == said  # a screen reader repeats an alert whenever its text changes
    source.stall_report, source.message = None, ""
    content = builder.build_change().content
    assert (content["notices"], content["nodes_now"]["stuck"]) == ([], [])
    assert [mark["kind"] for mark in builder.build_snapshot().content["marks"]] == ["stuck", "stuck"]


def test_the_remedy_for_a_stopped_node_ends_with_its_loss():
    source = FakeSource(ranks=4)
    source.advance(30)
    source.stick(1)
    source.lose(1)
    (notice,) = MessageBuilder(source).build_snapshot().content["notices"]
    assert notice == {"kind": "lost", "text": "node 1 was lost at step 30; 3 nodes of 4 left"}
    assert "stuck" not in run_text.format_run(source)


def test_a_stall_of_all_nodes_is_shown_and_a_straggler_is_not_stuck():
    source = FakeSource(ranks=4)
    source.advance(30)
    source.stick(None, seconds=75.0)
    content = MessageBuilder(source).build_snapshot().content
    assert {tile["label"]: tile for tile in content["tiles"]}["nodes"]["note"] == "⊘ no node moves"
    assert content["notices"][0]["text"] == "no node moves. cluster.stacks() shows the position of all nodes"
    assert content["nodes_now"]["stuck"] == []
    source.stall_report = dataclasses.replace(source.stall_report, kind="straggler", rank=2)
    content = MessageBuilder(source).build_snapshot().content
    assert (content["notices"], content["nodes_now"]["stuck"]) == ([], [])


@pytest.mark.parametrize(
    ("phase", "step", "tile", "place"),
    [
        ("idle", None, "not in the call", "is stuck: not in the call"),
        ("idle", 12, "not in the call", "is stuck: not in the call"),
        ("collective", None, "a collective", "is stuck in a collective"),
        ("step", 12, "a step", "is stuck in step 12"),
        ("unknown", None, "", "is stuck"),
        ("backward", 12, "backward", "is stuck in backward of step 12"),
    ],
)
def test_every_phase_of_a_stuck_node_has_a_description(phase, step, tile, place):
    source = FakeSource(ranks=2)
    source.stick(1, phase=phase)
    found = dataclasses.replace(source.stall_report, step=step)
    assert stall.format_short(found) == f"⊘ node 1 stuck: {tile}, 12 s".replace(": ,", ":")
    assert stall.format_sentence(found).startswith(f"node 1 {place}, and the others wait for it. It is at train.py:12")


@pytest.mark.parametrize(
    ("phase", "tile", "badge", "sentence"),
    [
        ("forward", "last in forward, 12 s", ", last seen in forward", ", last seen in forward of step 1, and"),
        ("unknown", "12 s", "", ", last seen in step 1, and"),
        ("idle", "not in the call, 12 s", None, ": not in the call, and"),
    ],
)
def test_a_stopped_node_was_only_seen_where_it_last_reported(phase, tile, badge, sentence):
    source = FakeSource(ranks=2)
    source.stick(1, phase=phase)
    found = dataclasses.replace(source.stall_report, is_stopped=True)
    assert stall.format_short(found) == f"⊘ node 1 stopped: {tile}"
    assert badge is None or stall.format_position(found) == f"stopped: node 1{badge}"
    text = f"node 1 is stopped{sentence} the others wait for it. It was last at train.py:12"
    assert stall.format_sentence(found).startswith(text)


def test_values_equal_on_all_ranks_have_one_line():
    source = FakeSource(ranks=4)
    source.advance(10)
    part = Curves(CHARTS, 4)
    part.update(source.history)
    layouts = {layout.name: layout for layout in part.chart_layouts}
    assert [(name, found.first, found.nodes) for name, found in layouts.items()] == [
        ("loss", 0, 4),
        ("throughput", 5, 4),
        ("lr", 10, 0),
        ("grad_norm", 11, 0),
        ("step_s", 12, 0),
    ]
    totals = source.history.totals()
    np.testing.assert_array_equal(part.get_all().values[:, 11, 1], totals["grad_norm"].astype("f4"))
    assert (part.get_all().values[:, 10] == np.float32(0.1)).all()


def test_the_page_merges_changes_like_the_notebook(tmp_path):
    """The page's own store, fed with the messages of a run, ends with what a snapshot holds."""
    source = FakeSource(ranks=4, steps=5000)
    builder = MessageBuilder(source)
    messages = [*long_story(builder, source)]
    source.advance(5000 - source.step)
    messages.append(builder.build_change())
    while builder.has_pending_curves:
        messages.append(builder.build_rest())
    messages.append(builder.build_snapshot())
    assert [message.content["kind"] for message in messages].count("rest") > 1
    (tmp_path / "store.mjs").write_bytes((STATIC / "store.js").read_bytes())
    (tmp_path / "messages.json").write_text(
        json.dumps([[m.content, [base64.b64encode(b).decode() for b in m.buffers]] for m in messages])
    )
    (tmp_path / "run.mjs").write_text(
        textwrap.dedent("""
        import { newStore, apply } from "./store.mjs";
        import { readFileSync } from "node:fs";
        const messages = JSON.parse(readFileSync("messages.json"));
        const decode = (b) => {
          const bytes = Buffer.from(b, "base64");
          return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
        };
        const take = (store, [content, buffers]) => apply(store, content, buffers.map(decode));
        const early = newStore(), late = newStore(), gappy = newStore();
        const applied = messages.slice(0, -1).map((m) => take(early, m));
        take(late, messages.at(-1));
        take(gappy, messages[0]);
        const gap = take(gappy, messages[5]);
        const plain = ({ curves, log, evaluations, ranks, status, marks, notices, time, bars }) => {
          const each = early.head.columns * 3;
          const kept = curves.data.slice(0, curves.used * each);
          const data = Array.from(kept, (v) => (Number.isNaN(v) ? null : v));
          const { width, used } = curves;
          const numbers = { data, ranks: [...ranks], bars: [...bars] };
          return { width, used, ...numbers, log, evaluations, status, marks, notices, time };
        };
        const all = applied.every(Boolean);
        console.log(JSON.stringify({ all, gap, early: plain(early), late: plain(late) }));
        """)
    )
    done = subprocess.run(
        [find_node(), "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["all"]
    assert said["gap"] is False  # a change that doesn't follow on is refused: the page asks for a snapshot
    early, late = said["early"], said["late"]
    np.testing.assert_allclose(np.array(early.pop("data"), float), np.array(late.pop("data"), float), rtol=2e-6)
    assert early == late


@pytest.mark.parametrize("name", ["dashboard.js", "compare.js", "call.js"])
def test_the_bundle_is_one_valid_module(tmp_path, name):
    """A top-level name that two files share would make a bundle that no browser loads."""
    entry = STATIC / name
    code = bundle_modules(entry)
    (tmp_path / "all.mjs").write_text(code, encoding="utf-8")
    run = 'import start from "./all.mjs"; console.log(Object.keys(start()).sort().join());'
    (tmp_path / "run.mjs").write_text(run, encoding="utf-8")
    done = subprocess.run(
        [find_node(), "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("initialize,render", "")
    assert not re.search(r"^import ", code, re.MULTILINE)
    assert re.findall(r"^export .{13}", code, re.MULTILINE) == ["export default () =>"]
    parts = {path.name for path in STATIC.rglob("*.js")} - {"call.js", "compare.js", "report.js"}  # other entries
    used = set(re.findall(r"/([\w]+\.js)\";$", "\n".join(p.read_text() for p in STATIC.rglob("*.js")), re.MULTILINE))
    assert parts == used | {"dashboard.js"}  # no file is missing from the bundle


def test_the_modules_of_a_report_are_a_valid_script(tmp_path):
    code = bundle_modules(STATIC / "report.js")
    (tmp_path / "all.mjs").write_text(code, encoding="utf-8")
    command = [find_node(), "--check", "all.mjs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not re.search(r"^(import|export) ", code, re.MULTILINE)


def test_every_figure_panel_has_a_live_counterpart():
    kept = {path.stem for path in (STATIC.parents[1] / "figures" / "panels").glob("*.py")} - {"__init__"}
    live_ones = {path.stem for path in (STATIC / "panels").glob("*.js")}
    assert kept
    assert kept <= live_ones


def test_a_confirmation_ends_with_the_next_event():
    source = FakeSource(ranks=2)
    source.advance(20)
    builder = MessageBuilder(source)
    source.event("pause", "paused at step 20")
    builder.note_effect("paused at step 20 on all nodes")
    assert builder.build_snapshot().content["effect"] == {"count": 1, "text": "paused at step 20 on all nodes"}
    source.event("print", "a line of the user's own")
    assert builder.build_change().content["effect"]["text"]
    source.event("resume", "resume at step 20")
    assert builder.build_change().content["effect"] == {"count": 1, "text": ""}


# -- throttling ------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_views_run_at_a_lower_priority_than_the_notebook():
    reported = queue.SimpleQueue()
    start_timer(0.0, lambda: reported.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert reported.get(timeout=10) == min(19, own + VIEW_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def throttled(work, timers, interval=0.25):
    return Throttle(work, interval, clock=timers.clock, call_later=timers.later)


def test_a_throttle_limits_calls_and_always_makes_the_last_one():
    timers, seen, value = Timers(), [], 0
    throttle = throttled(lambda: seen.append((timers.now, value)), timers)
    for k in range(1000):  # ten seconds of a poke every 10 ms
        timers.now, value = k / 100, k
        throttle.trigger()
        due = [t for t in timers.waiting if t[0] <= timers.now]
        timers.waiting = [t for t in timers.waiting if t[0] > timers.now]
        for _, call in due:
            call()
    timers.run()
    times = [at for at, _ in seen]
    assert seen[-1][1] == 999
    assert seen[0] == (0, 0)  # the first at once
    assert min(b - a for a, b in itertools.pairwise(times)) >= 0.25 - 1e-9
    assert 38 <= len(seen) <= 42


def test_a_trigger_during_a_call_is_not_lost():
    timers, runs = Timers(), []

    def work():
        runs.append(timers.now)
        if len(runs) == 1:
            throttle.trigger()

    throttle = throttled(work, timers)
    throttle.trigger()
    timers.run()
    assert runs == [0, 0.25]


def test_an_error_in_a_view_is_logged_once(caplog):
    timers = Timers()
    throttle = throttled(lambda: 1 / 0, timers)
    with caplog.at_level(logging.WARNING, "dtkit.dashboard"):
        for _ in range(5):
            throttle.trigger()
            timers.run()
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_pressing_call_does_not_wait_for_a_long_interval():
    timers, runs = Timers(), []
    throttle = throttled(lambda: runs.append(timers.now), timers)
    throttle.interval = 2.5
    throttle.trigger()
    timers.run()
    timers.now = 1.0
    throttle.trigger()
    throttle.trigger(is_pressing=True)
    timers.run()
    assert runs == [0, 1.0]  # the timer of the first trigger makes no call
    throttle.trigger()
    timers.run()
    assert runs == [0, 1.0, 3.5]


def test_a_delayed_call_comes_sooner_with_a_trigger():
    timers, runs = Timers(), []
    throttle = throttled(lambda: runs.append(timers.now), timers)
    throttle.trigger(delay_s=1.0)
    throttle.trigger(delay_s=0.5)
    timers.run()
    assert runs == [0.5]


def test_a_closed_throttle_makes_no_call():
    timers, runs = Timers(), []
    throttle = throttled(lambda: runs.append(1), timers)
    throttle.trigger()
    throttle.close()
    throttle.trigger()
    timers.run()
    assert runs == []


# -- the widget ------------------------------------------------------------------------------------------


@pytest.fixture
def timers():
    return Timers()


@pytest.fixture
def watched(timers, monkeypatch):
    """A dashboard whose messages are kept, without its signs of life: (source, dashboard, messages)."""
    source = FakeSource()
    dashboard = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    sent = []

    def send(content, buffers=()):
        if content["kind"] != "alive":
            sent.append((content, buffers))

    monkeypatch.setattr(dashboard, "send", send)
    yield source, dashboard, sent
    dashboard.close()


def test_the_fake_run_satisfies_the_protocol():
    assert isinstance(FakeSource(), RunView)


def test_the_model_opens_with_a_snapshot():
    source = FakeSource()
    source.advance(10)
    dashboard = widget.Dashboard(source)
    assert dashboard.opening["content"]["kind"] == "snapshot"
    assert dashboard.opening["content"]["status"]["step"] == 10
    assert "createElement" in str(dashboard._esm)
    dashboard.close()
    assert source.subscribers == 0


def test_page_gets_signs_of_life_until_the_view_is_closed(monkeypatch):
    monkeypatch.setattr(timeouts, "LIVE_HEARTBEAT_S", 0.01)
    dashboard = widget.Dashboard(FakeSource())
    alive = threading.Semaphore(0)
    monkeypatch.setattr(dashboard, "send", lambda content, buffers=(): content["kind"] == "alive" and alive.release())
    assert dashboard._heartbeat._thread is None  # no page listens
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    dashboard._on_page_message(dashboard, {"hello": "gap"}, [])
    assert all(alive.acquire(timeout=10) for _ in range(3))
    dashboard.close()
    dashboard._heartbeat._thread.join(10)
    assert not dashboard._heartbeat._thread.is_alive()


def test_engines_that_end_after_their_run_are_reported_until_nobody_watches_them(timers, monkeypatch):
    source = FakeSource()
    source.advance(10)
    source.end()
    source.ended_engines = {}
    dashboard = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    dashboard._heartbeat.stop()
    sent = []
    monkeypatch.setattr(dashboard, "send", lambda content, _buffers=(): sent.append(content))
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    timers.run()
    sent.clear()
    for ended in ({}, {1: "rank 1 is gone"}, {1: "rank 1 is gone"}, {}):
        source.ended_engines = ended
        timers.now += 1
        assert dashboard._send_sign_of_life()
        timers.run()
    assert [content["nodes_now"].get("ended") for content in sent] == [[1], None]
    assert sent[0]["nodes_now"]["reasons"] == "node 1 is gone"
    source.ended_engines = None  # the cluster was closed
    assert not dashboard._send_sign_of_life()
    dashboard.close()


def test_a_sign_of_life_is_sent_once_and_then_only_between_rare_messages(timers, monkeypatch):
    source = FakeSource()
    dashboard = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    dashboard._heartbeat.stop()
    kinds = []
    monkeypatch.setattr(dashboard, "send", lambda content, _buffers=(): kinds.append(content["kind"]))
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    for seconds, expected in ((0.0, ["snapshot", "alive"]), (1.0, []), (timeouts.LIVE_HEARTBEAT_S, ["alive"])):
        timers.now += seconds
        assert dashboard._send_sign_of_life()
        assert kinds == expected
        kinds.clear()
    source.advance()
    timers.run()
    assert dashboard._send_sign_of_life()
    assert set(kinds) == {"change"}  # which was a sign of life
    dashboard.close()


def test_only_messages_with_the_charts_move_the_counter(timers, monkeypatch):
    """A counter that moved alone was ahead of the charts and tiles next to it."""
    source = FakeSource()
    dashboard = widget.Dashboard(source, clock=timers.clock, call_later=timers.later)
    dashboard._heartbeat.stop()
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    timers.run()
    dashboard._on_page_message(dashboard, {"attention": {"page": "a", "isWatched": False}}, [])
    sent = []
    monkeypatch.setattr(dashboard, "send", lambda content, _buffers=(): sent.append(content))
    for _ in range(3):
        source.advance(7)
        timers.now += 0.8 * timeouts.LIVE_HEARTBEAT_S
        assert dashboard._send_sign_of_life()
    assert sent == 2 * [{"kind": "alive"}]
    dashboard.close()


def test_messages_to_a_page_on_busy_cores_follow_each_dispatch(watched, timers, monkeypatch):
    source, dashboard, _sent = watched
    monkeypatch.setattr(widget, "has_spare_core", lambda _run: False)
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    timers.run()
    for _ in range(5):
        timers.now += timeouts.TARGET_DISPATCH_S
        source.advance(1)
        assert dashboard._throttle._due_at <= timers.now  # at once, since the last one was a dispatch ago
        timers.run()


def test_changes_are_sent_after_the_first_hello(watched, timers):
    source, dashboard, sent = watched

    def updates(count):
        sent.clear()
        for _ in range(count):
            source.advance(1)
            timers.run()
        return [content["kind"] for content, _ in sent]

    assert list(updates(8)).count("snapshot") in (3, 4)  # 1, 2, 4, 8; the first is the opening's
    sent.clear()
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    assert [content["kind"] for content, _ in sent] == ["snapshot"]
    assert set(updates(20)) == {"change"}


def test_messages_are_numbered_without_gaps(watched, timers):
    source, dashboard, sent = watched
    for k in range(10):
        source.advance(1)
        timers.run()
        if k == 4:
            dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    contents = [content for content, _ in sent]
    assert all(b["base"] == a["seq"] for a, b in itertools.pairwise(contents))


def test_pending_changes_are_sent_without_further_updates(watched, timers):
    source, dashboard, sent = watched
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    sent.clear()
    source.advance(400)
    timers.run()
    assert len(sent) > 1
    assert not dashboard._message_builder.has_pending


@pytest.fixture
def unwatched(watched, monkeypatch):
    """Return (source, dashboard, sent) of a page that nobody is at, on cores that are all busy."""
    source, dashboard, sent = watched
    monkeypatch.setattr(widget, "has_spare_core", lambda _run: False)
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    report_level(dashboard, "open")
    return source, dashboard, sent


def report_level(dashboard, level, page="a"):
    dashboard._on_page_message(dashboard, {"attention": {"page": page, "level": level}}, [])


def test_curves_keep_up_with_the_state_on_a_page_that_nobody_watches(unwatched, timers):
    """A change has few points, and such a page gets few changes: charts were thousands of steps behind."""
    source, dashboard, sent = unwatched
    timers.run()
    begun = timers.now
    sent.clear()
    source.advance(400)
    timers.run()
    assert len(sent) > 2
    assert not dashboard._message_builder.has_pending_curves
    assert timers.now - begun <= timeouts.LIVE_UNWATCHED_INTERVAL_S + len(sent) * timeouts.LIVE_INTERVAL_S


@pytest.mark.parametrize("state", [State.PAUSED, State.COMPLETED])
def test_series_catch_up_at_once_when_the_run_rests(watched, timers, state):
    """Their charts ended hundreds of steps before the others, and stayed so while the run paused."""
    source, dashboard, sent = watched
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    for step in (1, 2):
        source.history.add(ScalarRecord(0, {"system/CPU (cores)": [(step, 1.0, 1.0)]}))
        source.changed()
        timers.run()
    source.history.add(ScalarRecord(0, {"system/CPU (cores)": [(3, 1.0, 1.0)]}))
    source.changed()
    assert dashboard._series_throttle._due_at is None  # they come with the next update
    source.state = state
    source.changed()
    assert dashboard._series_throttle._due_at <= timers.now + timeouts.LIVE_INTERVAL_S
    sent.clear()
    timers.run()
    assert [content["series"][0]["points"] for content, _ in sent if content["kind"] == "series"] == [3]


def test_series_follow_each_update(watched, timers):
    """Their charts ended hundreds of steps before the others, or after them."""
    source, dashboard, sent = watched
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    timers.run()
    for step in (1, 2, 3):
        timers.now += timeouts.TARGET_DISPATCH_S
        source.history.add(ScalarRecord(0, {"kl": [(step, 1.0, 1.0)]}))
        source.advance(1)
        sent.clear()
        timers.run()
        kinds = [content["kind"] for content, _ in sent]
        assert kinds[: kinds.index("series") + 1] == ["change", "series"]


def test_curves_that_a_change_left_follow_without_the_state(watched, timers, monkeypatch):
    """Building the state takes most of a message's time, and the training pays for it where all cores are busy."""
    source, dashboard, sent = watched
    monkeypatch.setattr(widget, "has_spare_core", lambda _run: False)
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    sent.clear()
    source.advance(300)
    timers.run()
    kinds = [content["kind"] for content, _ in sent]
    assert kinds[:3] == ["change", "rest", "rest"]
    assert [content["base"] for content, _ in sent[1:]] == [content["seq"] for content, _ in sent[:-1]]
    assert all("status" not in content for content, _ in sent if content["kind"] == "rest")
    assert not dashboard._message_builder.has_pending_curves
    source.advance(300)
    source.event("pause", "paused")
    source.state = State.PAUSED
    sent.clear()
    source.changed()
    timers.run()
    assert sent[0][0]["status"]["state"] == "paused"  # a state that a person waits for is in the first message


@pytest.mark.parametrize("is_spare", [True, False])
def test_all_curves_follow_the_state_that_they_belong_to_at_once(watched, timers, monkeypatch, is_spare):
    """Charts and tables were hundreds of steps behind the headline in the first seconds of a fast run."""
    source, dashboard, _ = watched
    monkeypatch.setattr(widget, "has_spare_core", lambda _run: is_spare)
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    sent = []
    monkeypatch.setattr(dashboard, "send", lambda content, _buffers=(): sent.append((timers.now, content)))
    source.advance(400)
    timers.run()
    begun, first = sent[0]
    assert first["status"]["step"] == 400
    curves = [content["curves"] for at, content in sent if at == begun]
    assert max((one["first"] + one["buckets"]) * one["width"] for one in curves) >= 400


def test_rows_that_arrive_while_a_message_is_built_are_in_the_next_one(monkeypatch):
    """The table of nodes kept the loss of an earlier step while a run paused."""
    source = FakeSource(ranks=2)
    source.advance(20)
    builder = MessageBuilder(source)
    builder.build_snapshot()
    source.advance(5)
    compute = messages.compute_run_metrics

    def compute_and_advance(*args):
        found = compute(*args)
        source.advance(1)
        return found

    monkeypatch.setattr(messages, "compute_run_metrics", compute_and_advance)
    builder.build_change()
    monkeypatch.setattr(messages, "compute_run_metrics", compute)
    by_rank = np.frombuffer(builder.build_change().buffers[1], "<f4").reshape(-1, 3)
    np.testing.assert_allclose(by_rank[:, 0], [source.history.loss(rank)[1][-1] for rank in range(2)], rtol=1e-6)


def test_a_timeline_that_is_not_due_sends_no_messages_meanwhile(timers, monkeypatch):
    """Each of them had the whole state, four times a second."""
    source = FakeSource(strips=True)
    source.advance(10)
    dashboard, sent = widget.Dashboard(source, clock=timers.clock, call_later=timers.later), []
    dashboard._message_builder = MessageBuilder(source, timers.clock)
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    monkeypatch.setattr(dashboard, "send", lambda content, buffers=(): sent.append((timers.now, content)))
    for _ in range(3):
        source.advance(10)
        timers.run()
    changes = [(at, "strip" in content) for at, content in sent if content["kind"] == "change"]
    assert sum(has_strip for _, has_strip in changes) == 3
    assert len(changes) <= 2 * 3
    dashboard.close()


def advance_for(source, timers, seconds):
    """Take a step each half second, and run the timers that are due until then."""
    for _ in range(2 * seconds):
        source.advance(1)
        until = timers.now + 0.5
        while timers.waiting and min(timers.waiting, key=lambda item: item[0])[0] <= until:
            timers.waiting.sort(key=lambda item: item[0])
            at, call = timers.waiting.pop(0)
            timers.now = max(timers.now, at)
            call()
        timers.now = until


def test_an_untouched_page_gets_its_text_each_second_and_its_charts_more_rarely(unwatched, timers):
    """All of it came each three seconds: someone who only watches saw a stutter."""
    source, dashboard, sent = unwatched
    timers.run()
    source.advance(1)  # the first step is awaited
    timers.run()
    begun, steps = timers.now, []
    sent.clear()
    send = dashboard.send
    dashboard.send = lambda content, buffers=(): (steps.append((timers.now, content)), send(content, buffers))
    advance_for(source, timers, 20)
    shown = [at - begun for at, content in steps if "status" in content]
    assert np.diff(shown).max() <= 1.25
    charts = [content for _, content in steps if content["kind"] == "change"]
    assert 20 / timeouts.LIVE_UNWATCHED_INTERVAL_S - 1 <= len(charts) <= 20 / timeouts.LIVE_UNWATCHED_INTERVAL_S
    texts = [content for _, content in steps if content["kind"] == "text"]
    assert set(texts[0]) == {"kind", "status", "lr", "tiles", "throughput", "newest"}
    for text, change in ((texts[-1], charts[-1]),):
        assert text["tiles"][0]["label"] == change["tiles"][0]["label"]
        assert text["status"]["step"] > change["status"]["step"] or steps[-1][1] is change
    timers.run()
    assert [content for _, content in steps if content["kind"] != "rest"][-1]["kind"] == "change"  # charts catch up
    begun = timers.now
    source.state = State.PAUSED
    source.event("pause", "paused at step 1")
    assert min(at for at, _ in timers.waiting) - begun <= timeouts.LIVE_INTERVAL_S / 5 + timeouts.TIMER_TOLERANCE_S
    timers.run()
    assert sent[-1][0]["status"]["state"] == "paused"
    assert sent[-1][0]["kind"] == "change"


def test_a_hidden_page_gets_hardly_anything_until_it_is_in_sight_again(unwatched, timers, monkeypatch):
    source, dashboard, sent = unwatched
    monkeypatch.setattr(widget, "has_spare_core", lambda _run: True)  # it is of no use to anybody there, either
    timers.run()
    source.advance(1)  # the first step is awaited
    timers.run()
    report_level(dashboard, "hidden")
    sent.clear()
    advance_for(source, timers, 20)
    assert len([content for content, _ in sent if "status" in content]) <= 20 / (2 * timeouts.LIVE_UNWATCHED_INTERVAL_S)
    report_level(dashboard, "open")
    sent.clear()
    assert min(at for at, _ in timers.waiting) - timers.now <= timeouts.LIVE_INTERVAL_S
    timers.run()
    assert sent[0][0]["kind"] == "change"
    assert sent[0][0]["status"]["step"] == source.status.step


def test_a_new_state_waits_for_no_interval_of_the_charts(watched, timers):
    """A pause follows the last message of its dispatch at once, and waited for a quarter of a second after it."""
    source, dashboard, sent = watched
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])
    timers.run()
    timers.now += 2
    source.advance(1)
    timers.waiting.sort(key=lambda item: item[0])
    timers.waiting.pop(0)[1]()  # the message of the dispatch
    source.state = State.PAUSED
    source.event("pause", "paused at step 1")
    begun = timers.now
    assert min(at for at, _ in timers.waiting) - begun <= timeouts.LIVE_INTERVAL_S / 5 + timeouts.TIMER_TOLERANCE_S
    timers.run()
    assert sent[-1][0]["status"]["state"] == "paused"


def test_a_page_whose_person_comes_back_gets_what_it_lacks_soon(unwatched, timers):
    source, dashboard, sent = unwatched
    timers.run()
    source.advance(1)  # the first step is awaited
    timers.run()
    begun = timers.now
    source.advance(7)
    report_level(dashboard, "watched")
    assert min(at for at, _ in timers.waiting) - begun <= 3 * timeouts.LIVE_INTERVAL_S
    timers.run()
    assert sent[-1][0]["status"]["step"] == source.status.step


def test_a_page_gets_all_messages_while_somebody_is_at_any_page(unwatched):
    _source, dashboard, _sent = unwatched
    often, rarely = 0.0, timeouts.LIVE_UNWATCHED_INTERVAL_S
    assert dashboard._find_charts_interval() == rarely
    for bad in (None, [], {"page": 1, "level": "watched"}, {"page": "b"}, {"page": "b", "level": "yes"}, {"level": 2}):
        dashboard._on_page_message(dashboard, {"attention": bad}, [])
    assert dashboard._find_charts_interval() == rarely
    found = []
    for page, level in (("b", "watched"), ("a", "watched"), ("b", "hidden"), ("a", "open"), ("a", "hidden")):
        report_level(dashboard, level, page)
        found.append((dashboard._find_charts_interval(), dashboard._throttle.interval))
    each = 3 * timeouts.LIVE_INTERVAL_S
    assert found == [*[(often, each)] * 3, (rarely, each), (often, (2 * timeouts.LIVE_UNWATCHED_INTERVAL_S))]
    dashboard._on_page_message(dashboard, {"hello": "gap"}, [])
    assert dashboard._throttle.interval == (2 * timeouts.LIVE_UNWATCHED_INTERVAL_S)
    dashboard._on_page_message(dashboard, {"hello": "opened"}, [])  # a person has just opened it
    assert dashboard._throttle.interval == each


def choose_refresh(dashboard, seconds, page="a", level="watched"):
    dashboard._on_page_message(dashboard, {"attention": {"page": page, "level": level, "refresh": seconds}}, [])


def test_a_person_may_choose_rarer_messages_but_a_new_state_comes_at_once(unwatched, timers):
    source, dashboard, sent = unwatched
    timers.run()
    source.advance(1)  # the first step is awaited
    timers.run()
    choose_refresh(dashboard, 5)
    sent.clear()
    advance_for(source, timers, 20)
    charts = [content for content, _ in sent if "status" in content]
    assert 3 <= len(charts) <= 5
    assert {content["kind"] for content in charts} == {"change"}  # all of it at once
    begun = timers.now
    source.state = State.PAUSED
    source.event("pause", "paused at step 1")
    assert min(at for at, _ in timers.waiting) - begun <= timeouts.LIVE_INTERVAL_S / 5 + timeouts.TIMER_TOLERANCE_S
    timers.run()
    begun = timers.now
    source.history.add(Evaluation(source.step, 10, {"loss": 1.0}))  # of a run at rest: no later message brings it
    source.changed()
    assert min(at for at, _ in timers.waiting) - begun <= timeouts.LIVE_INTERVAL_S
    source.state = State.RUNNING
    timers.run()
    source.advance(1)
    begun = timers.now
    choose_refresh(dashboard, 0)
    assert min(at for at, _ in timers.waiting) - begun <= 3 * timeouts.LIVE_INTERVAL_S


def test_the_shortest_interval_that_persons_chose_counts_on_pages_in_sight(unwatched):
    _source, dashboard, _sent = unwatched
    choose_refresh(dashboard, 15)
    assert dashboard._throttle.interval == dashboard._picture_throttle.interval == 15
    choose_refresh(dashboard, 5, "b")
    assert dashboard._throttle.interval == 5
    choose_refresh(dashboard, 0, "b", level="hidden")
    assert dashboard._throttle.interval == 15
    for bad in (-1, math.nan, True, "5", None):
        choose_refresh(dashboard, bad)
        assert dashboard._throttle.interval == 3 * timeouts.LIVE_INTERVAL_S


def test_a_core_to_spare_sends_all_messages_also_to_an_unwatched_page(unwatched, monkeypatch):
    _source, dashboard, _sent = unwatched
    monkeypatch.setattr(widget, "has_spare_core", lambda _run: True)
    report_level(dashboard, "open")
    assert dashboard._throttle.interval == timeouts.LIVE_INTERVAL_S
    assert dashboard._find_charts_interval() == 0


@pytest.mark.parametrize("command", ["resume", "lr"])
def test_the_first_step_after_a_command_reaches_an_unwatched_page_at_once(unwatched, timers, command):
    source, dashboard, sent = unwatched
    source.advance(5)
    source.state = State.PAUSED if command == "resume" else State.RUNNING
    source.event("pause", "paused at step 5")
    timers.run()
    for taken in range(2):
        if not taken and command == "resume":
            source.state = State.RUNNING
            source.changed()
            timers.run()
        if not taken and command == "lr":
            dashboard._report_command("effect", "lr", "learning rate 0.01 since step 5")
            timers.run()
        begun = timers.now
        source.advance(1)
        delays = [at - begun for at, _ in timers.waiting]
        longest = timeouts.LIVE_UNWATCHED_INTERVAL_S if taken else timeouts.LIVE_INTERVAL_S
        assert 0 <= min(delays) <= longest
        assert (min(delays) > timeouts.LIVE_INTERVAL_S) == bool(taken)  # later ones have time
        timers.run()
        assert sent[-1][0]["status"]["step"] == 6 + taken
        assert sent[-1][0].get("is_first_step", False) != bool(taken)


@pytest.mark.parametrize("command", ["pause", "resume", "step", "stop"])
def test_a_button_only_posts_its_command(watched, command):
    source, dashboard, _ = watched
    dashboard._on_page_message(dashboard, {"command": command, "value": 3}, [])
    assert source.posted == [(command, None)]


@pytest.mark.parametrize("bad", ["0.1", None, float("nan"), -1])
def test_an_invalid_learning_rate_is_refused_on_the_page(watched, bad):
    source, dashboard, sent = watched
    dashboard._on_page_message(dashboard, {"command": "lr", "value": bad}, [])
    assert source.posted == []
    assert sent[-1][0]["kind"] == "refused"
    assert "such as 0.01" in sent[-1][0]["text"]
    dashboard._on_page_message(dashboard, {"command": "lr", "value": 0.03}, [])
    assert source.posted == [("lr", 0.03)]


def test_a_refusal_by_the_run_is_shown_on_the_page(watched):
    source, dashboard, sent = watched
    source.refuse = RuntimeError("the run has ended")
    dashboard._on_page_message(dashboard, {"command": "pause"}, [])
    assert sent[-1][0] == {"kind": "refused", "command": "pause", "text": "the run has ended"}


def test_unknown_messages_of_a_page_are_ignored(watched):
    source, dashboard, _ = watched
    for content in ("pause", None, {}, {"command": "rm"}, {"command": "__class__"}):
        dashboard._on_page_message(dashboard, content, [])
    assert source.posted == []


def test_a_failing_view_does_not_affect_the_run(watched, timers, monkeypatch, caplog):
    source, dashboard, _ = watched
    monkeypatch.setattr(dashboard._message_builder, "build_change", lambda: 1 / 0)
    dashboard._is_page_ready = True
    source.advance(1)
    timers.run()
    source.advance(1)
    timers.run()
    assert source.step == 2
    assert "the training goes on" in caplog.text


def test_importing_the_widget_loads_no_heavy_package():
    code = (
        "import sys, dtkit.dashboard.live.widget, dtkit.dashboard.display, dtkit.dashboard.text.run_text;"
        "print([m for m in ('torch', 'ipyparallel', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- the display -----------------------------------------------------------------------------------------


class Handle:
    def __init__(self):
        self.updates = []

    def update(self, data, *, metadata, raw):
        assert raw
        self.updates.append((data, metadata))

    @property
    def final_outputs(self):
        """Outputs of the run's end: a picture, or its error, without the sentence on a run that goes on."""
        return [(data, metadata) for data, metadata in self.updates if "image/png" in data or "text/html" not in data]


@pytest.fixture
def notebook(monkeypatch):
    """A front end that keeps what is displayed: (object, handle or None)."""
    shown = []

    def show(obj, *, display_id=False, metadata=None, raw=False):
        handle = Handle() if display_id else None
        shown.append((obj, handle))
        return handle

    monkeypatch.setattr("IPython.display.display", show)
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.delenv("VSCODE_PID", raising=False)
    yield shown
    while display._displays:
        display._displays.popitem()[1].close()


def test_an_ended_run_has_a_picture_and_stays_live(notebook):
    source = FakeSource()
    source.advance(5)
    display.show(source)
    display.show(source)
    (first_place, _), (_, first), (second_place, _), (_, second) = notebook
    models = {re.search('data-dtkit-live="(.+?)"', place["text/html"])[1] for place in (first_place, second_place)}
    assert len(models) == 1  # two views are in step by construction
    rule = r"<style>\[data-jp-theme-light=false\][^<]+</style>"  # the picture is dark in a dark theme
    assert re.fullmatch(
        rf'<div class="dtkit-live" data-dtkit-live="\w+" data-dtkit-shown="\d+">{rule}</div>', first_place["text/html"]
    )
    source.state = State.PAUSED
    source.changed()
    assert first.updates == []
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    for handle in (first, second):
        [(data, metadata)] = handle.final_outputs
        assert handle.updates[-1] == (data, metadata)
        assert set(data) == {"text/html", "image/png", "text/plain"}
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
        assert "completed" in data["text/plain"]
        assert metadata["image/png"]["width"] > 500
        assert "unconfined" not in metadata["image/png"]  # it would scroll in a narrow cell
    assert get_widget(source).comm is not None


def get_widget(source):
    return display._displays[source]._widget


def test_no_cell_holds_a_widget_view(notebook):
    """Without its kernel it would read "model not found"."""
    source = FakeSource()
    display.show(source)
    source.advance(5)
    display._displays[source]._draw_picture()
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    (_, handle) = notebook[1]
    assert len(handle.final_outputs) == 1
    bundles = [bundle for bundle, _ in notebook] + [data for data, _ in handle.updates]
    assert set().union(*bundles) == {"text/html", "image/png", "text/plain"}


def test_a_run_that_goes_on_has_a_picture_with_its_time(notebook):
    source = FakeSource()
    source.advance(5)
    display.show(source)
    (data, handle) = notebook[1]
    assert "Running, step 5 of 400 at " in data["text/html"]
    assert "a front end that loads Jupyter widgets (anywidget)" in data["text/plain"]
    source.advance(7)
    displays = display._displays[source]
    displays._draw_picture()
    [(data, _)] = handle.updates
    assert re.search(
        r"Running, step 12 of 400 at [\d:]{8}, refreshed now and then.*<img [^>]*base64,iVBOR", data["text/html"]
    )
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    displays._draw_picture()  # too late
    assert set(handle.updates[-1][0]) == {"text/html", "image/png", "text/plain"}


def test_a_run_without_a_spare_core_keeps_its_text_up_to_date(notebook, monkeypatch):
    """A notebook that is saved meanwhile said "no step yet", whatever the run had done."""
    source = FakeSource(ranks=1)
    source.nodes = [dataclasses.replace(node, host=socket.gethostname(), threads=1000) for node in source.nodes]
    display.show(source)
    (_, handle), displays = notebook[1], display._displays[source]
    monkeypatch.setattr(displays._text_throttle, "trigger", displays._refresh_text)
    source.advance(7)
    displays._start_drawing()
    [(data, _)] = handle.updates
    assert "Running, step 7 of 400 at " in data["text/html"]
    assert "<img" not in data["text/html"]
    displays._draw_picture()
    source.advance(30)
    data = handle.updates[-1][0]["text/html"]
    assert (
        "Running, step 37 of 400 at " in data
    )  # drawing takes a share of the time, so the last picture may be minutes old
    assert "The picture below is of step 7 at " in data
    assert "<img" in data


def test_words_and_charts_of_a_notebook_saved_amid_a_run_are_of_one_step(notebook, monkeypatch):
    """The header said step 7,500, and the charts ended at step 1,624, with other numbers at their lines."""
    monkeypatch.setattr(display, "start_timer", lambda delay, callback: None)
    source = FakeSource()
    source.advance(5)
    source.state = State.PAUSED
    display.show(source)
    (_, handle), displays = notebook[1], display._displays[source]
    displays._draw_picture()
    assert ">‖ paused</strong>" in handle.updates[-1][0]["text/html"]
    source.state = State.RUNNING
    source.advance(7)
    displays._refresh_text()
    sentence, page = re.fullmatch("<div><p><em>(.+?)</em></p>(.+)</div>", handle.updates[-1][0]["text/html"]).groups()
    assert sentence.startswith("Running, step 12 of 400 at ")
    assert re.search(r" The picture below is of step 5 at [\d:]{8}\.$", sentence)
    assert "5 of 400 steps" in page
    assert "12 of 400 steps" not in page
    displays._draw_picture()
    assert "12 of 400 steps" in handle.updates[-1][0]["text/html"]


def test_words_of_a_picture_are_of_the_step_to_which_its_charts_are_drawn(monkeypatch):
    """Making images of charts takes seconds on a busy machine, and the run goes on."""
    source = FakeSource()
    source.advance(5)
    draw = kept_picture.draw_card
    monkeypatch.setattr(kept_picture, "draw_card", lambda figure: (source.advance(7), draw(figure))[1])
    page = kept_picture.draw_page(source)
    assert page.step == 5
    assert "5 of 400 steps" in page.page


def test_the_mean_loss_of_a_picture_amid_a_run_is_that_of_its_words(monkeypatch):
    """A saved picture had 0.00934 in its tile, and 0.0113 at the end of the line."""
    source, drawn = FakeSource(), []
    source.advance(30, loss=0.25)
    draw = kept_picture.draw_run_charts

    def draw_later(run, *mean_loss):
        source.advance(30, loss=4.0)
        drawn.extend(draw(run, *mean_loss))
        return drawn

    monkeypatch.setattr(kept_picture, "draw_run_charts", draw_later)
    assert ">0.250</strong>" in kept_picture.draw_page(source).page
    assert "mean 0.250" in [text.get_text() for text in drawn[0].findobj(matplotlib.text.Text)]


def test_a_pause_draws_a_picture_without_the_wait_for_its_share_of_the_time(notebook, monkeypatch):
    """A notebook that was saved minutes after a pause had the picture of the one before."""
    monkeypatch.setattr(display, "start_timer", lambda delay, callback: None)  # it would trigger in between
    source = FakeSource()
    source.advance(5)
    display.show(source)
    displays = display._displays[source]
    displays._draw_picture()
    asked = []
    monkeypatch.setattr(displays._throttle, "trigger", lambda *, is_pressing=False: asked.append(is_pressing))
    displays._may_draw = True
    source.advance(7)
    source.state = State.PAUSED
    source.changed()
    source.changed()
    displays._draw_picture()
    source.changed()  # nothing is new
    assert asked == [False, True, True, False]


def test_a_lost_node_draws_a_picture_without_the_wait_for_its_share_of_the_time(notebook, monkeypatch):
    """The picture of a notebook that was saved amid a run had no sign of a node that was lost minutes before."""
    monkeypatch.setattr(display, "start_timer", lambda delay, callback: None)
    source = FakeSource()
    source.advance(5)
    display.show(source)
    displays, asked = display._displays[source], []
    displays._draw_picture()
    monkeypatch.setattr(displays._throttle, "trigger", lambda *, is_pressing=False: asked.append(is_pressing))
    displays._may_draw = True
    source.advance(1)
    source.history.add(Event(6, "lost", "node 1 was lost", 0.0, 1))
    source.changed()
    source.changed()
    assert asked[-2:] == [True, False]


def test_pictures_of_a_young_run_keep_up_with_it_and_cost_little_later():
    age, drawn_at = timeouts.KEPT_PICTURE_BUSY_FIRST_S, []
    while age < 4000:
        drawn_at.append(age)
        age += display.choose_interval_s(1.0, age)
    assert drawn_at[:4] == [20, 60, 180, 540]  # no picture is of less than the first third
    assert {b - a for a, b in itertools.pairwise(drawn_at[3:])} == {1.0 / display.MAX_DRAWING_SHARE}
    assert display.choose_interval_s(0.01, 1000.0) == timeouts.KEPT_PICTURE_INTERVAL_S


@pytest.mark.parametrize(("threads", "expected"), [(1, [1, 1, 2]), (1000, [0, 1, 2])])
def test_a_run_without_a_spare_core_is_drawn_later_or_when_it_pauses(notebook, monkeypatch, threads, expected):
    monkeypatch.setattr(display, "start_timer", lambda delay, callback: None)
    source = FakeSource(ranks=1)
    host = socket.gethostname()
    source.nodes = [dataclasses.replace(node, host=host, threads=threads) for node in source.nodes]
    display.show(source)
    displays, draws = display._displays[source], []
    monkeypatch.setattr(spare_core, "count_cores", lambda: 2)
    monkeypatch.setattr(displays._throttle, "trigger", lambda **_options: draws.append(source.state))
    displays._start_drawing()  # after seconds
    counts = [len(draws)]
    source.state = State.PAUSED
    if threads > 1:
        source.changed()
    counts.append(len(draws))
    source.state = State.RUNNING
    displays._start_drawing()  # after a minute
    counts.append(len(draws))
    assert counts == expected


def test_an_extended_run_is_drawn_again_at_its_next_end(notebook):
    source = FakeSource()
    display.show(source)
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    source.state = State.RUNNING
    source.advance(5)
    assert not display.wait_until_replaced(source, timeout=0)
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    assert len(notebook[1][1].final_outputs) == 2


@pytest.mark.parametrize(
    ("has_picture", "further", "text"),
    [
        (False, 0, "The charts are being drawn."),
        (True, 6, "The charts are being drawn."),  # those of the first steps
        (True, 5, "These charts are of step 5. Those of the run's end are being drawn."),
    ],
)
def test_the_words_of_an_end_wait_for_no_chart(notebook, monkeypatch, has_picture, further, text):
    """A notebook that was saved meanwhile had the text of a running run, the charts of its first steps, or none."""
    source = FakeSource()
    source.advance(5)
    display.show(source)
    (_, handle), known = notebook[1], []
    if has_picture:
        display._displays[source]._draw_picture()
    source.advance(further)
    draw = display.make_static_output
    monkeypatch.setattr(display, "make_static_output", lambda *a: (known.append(handle.updates[-1][0]), draw(*a))[1])
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    (meanwhile,) = known
    assert "completed" in meanwhile["text/plain"]
    assert ">✓ completed</strong>" in meanwhile["text/html"]
    assert text in meanwhile["text/html"]
    assert ("<img" in meanwhile["text/html"]) == text.startswith("These")
    assert handle.updates[-1] == handle.final_outputs[-1]


def test_the_charts_of_an_end_do_not_wait_for_the_png(notebook, monkeypatch):
    """A notebook is saved seconds after "completed", and few front ends need the PNG."""
    source = FakeSource()
    source.advance(5)
    display.show(source)
    (_, handle), known = notebook[1], []
    join = kept_picture._join_cards
    monkeypatch.setattr(
        kept_picture, "_join_cards", lambda cards: (known.append(handle.updates[-1][0]), join(cards))[1]
    )
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    (before,) = known
    assert "<img" in before["text/html"]
    assert before["text/html"] == handle.updates[-1][0]["text/html"]
    assert "image/png" not in before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_the_picture_of_an_end_is_drawn_at_the_notebooks_priority(notebook, monkeypatch):
    """On busy cores a lower one takes several times as long, and the training needs nothing any more."""
    priorities, draw = [], display.make_static_output

    def note_priority(*args):
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return draw(*args)

    monkeypatch.setattr(display, "make_static_output", note_priority)
    source = FakeSource()
    display.show(source)
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    assert priorities == [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]


def test_views_of_the_oldest_ended_runs_are_closed(notebook, monkeypatch):
    monkeypatch.setattr(display, "MAX_ENDED_VIEWS", 0)
    first, second = FakeSource(), FakeSource()
    display.show(first)
    widget = get_widget(first)
    first.end()
    assert display.wait_until_replaced(first, timeout=60)
    display.show(second)
    assert widget.comm is None
    assert first.subscribers == 0
    assert first not in display._displays
    assert get_widget(second).comm is not None


def test_vs_code_gets_a_widget_view_until_the_end(notebook, monkeypatch):
    monkeypatch.setenv("VSCODE_PID", "1")
    source = FakeSource()
    display.show(source)
    [(widget, handle)] = notebook
    assert widget is get_widget(source)
    display._displays[source]._draw_picture()
    assert handle.updates == []
    source.end()
    assert display.wait_until_replaced(source, timeout=60)
    assert [set(data) for data, _ in handle.updates] == [{"text/html", "image/png", "text/plain"}]


def test_a_run_that_had_ended_is_shown_with_its_picture(notebook):
    source = FakeSource()
    source.advance(5)
    source.end()
    display.show(source)
    (data, _) = notebook[1]
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert display.wait_until_replaced(source, timeout=0)


def test_a_failing_picture_is_replaced_by_text_with_the_error(notebook, monkeypatch):
    source = FakeSource()
    display.show(source)
    monkeypatch.setattr(display, "make_static_output", lambda *_: 1 / 0)
    source.end(State.FAILED)
    assert display.wait_until_replaced(source, timeout=60)
    [(data, _)] = notebook[1][1].final_outputs
    assert "failed" in data["text/plain"]
    assert "ZeroDivisionError" in data["text/plain"]


def test_a_run_outside_a_notebook_is_shown_as_text(capsys):
    assert threading.current_thread() is threading.main_thread()
    display.show(FakeSource(name="Net"))
    assert capsys.readouterr().out.startswith("Net · DataParallel() · running\n")
