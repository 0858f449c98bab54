"""Modules of the page on their own, without a browser: numbers as text, buckets of curves."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dtkit._util import formatting
from dtkit.dashboard.kept_picture import STATE_GLYPHS
from dtkit.dashboard.live.bundle import STATIC_FOLDER
from dtkit.dashboard.live.evaluation_feed import MAX_SNAPSHOT_EVALUATIONS
from dtkit.dashboard.live.log_lines import build_log_line
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.curves import CurveBuckets
from dtkit.dashboard.summary.event_marks import EVENT_GLYPHS, describe_event_marks
from dtkit.dashboard.summary.notices import ALERT_KINDS, NOTICE_GLYPHS
from dtkit.dashboard.summary.value_scale import find_log_floor, spans_orders
from dtkit.health.stall_report import STOPPED_WORDS
from dtkit.history.undone_steps import UndoneSteps
from dtkit.types import Evaluation, Event
from tests.support.fake_source import FakeSource
from tests.support.node import evaluate_page_code

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.dashboard.live.messages import Message


def test_numbers_of_any_size_are_short(tmp_path: Path):
    values = [5e19, 1e11, 1.25e9, 2.5e6, 30_000, 0.25, 2e-5]
    ticks, numbers = evaluate_page_code(
        tmp_path, "numbers.js", ["number", "tick"], f"[{values}.map((v) => tick(v)), {values}.map((v) => number(v))]"
    )
    assert ticks == ["5e19", "1e11", "1.25e9", "2.5M", "30k", "0.25", "2e-5"]
    assert [formatting.format_tick(value) for value in values] == ticks
    assert numbers == ["5e19", "1e11", "1.3e9", "2,500,000", "30,000", "0.250", "2e-5"]


def test_ticks_of_a_time_axis_change_their_unit_once(tmp_path: Path):
    seconds = [0, 0.5, 30, 60, 75, 90, 120, 180, 7200]
    found = evaluate_page_code(tmp_path, "chart/axis.js", ["shortTime"], f"{seconds}.map(shortTime)")
    assert found == ["0", "0.5 s", "30 s", "1 min", "75 s", "1.5 min", "2 min", "3 min", "2 h"]
    assert [formatting.format_time_tick(each) for each in seconds] == found


def test_page_and_python_write_a_number_alike(tmp_path: Path):
    """The tile is written by Python, and the chart below it by the page."""
    written = {
        0: "0",
        1.234e-9: "1.2e-9",
        2e-5: "2e-5",
        -1.23e-5: "-1.2e-5",
        9.96e-5: "1e-4",
        1e-4: "0.0001",
        0.00026: "0.00026",
        0.000996: "0.001",
        0.00123: "0.00123",
        0.5031: "0.503",
        0.99951: "1.00",
        9.996: "10.0",
        12.345: "12.3",
        99.96: "100",
        123.4: "123",
        999.6: "1,000",
        -45678.9: "-45,679",
        250_000: "250,000",
        2.5e6: "2,500,000",
        9_719_699: "9,720,000",
        1.27e9: "1.3e9",
        5e19: "5e19",
    }
    assert [formatting.format_loss(value) for value in written] == list(written.values())
    texts = evaluate_page_code(tmp_path, "numbers.js", ["number"], f"{json.dumps(list(written))}.map((v) => number(v))")
    assert texts == list(written.values())


def test_no_axis_has_a_single_number(tmp_path: Path):
    limits = [[low, low * ratio] for low in (0.011, 0.3, 0.97, 7, 95) for ratio in (1.01, 1.3, 2, 3.7, 12, 1e5)]
    counts = ", ".join(
        f"[{low}, {high}, {name}({low}, {high}, {count})]"
        for low, high in limits
        for name in ("ticks", "logTicks")
        for count in (2, 3, 5)
    )
    for low, high, found in evaluate_page_code(tmp_path, "numbers.js", ["ticks", "logTicks"], f"[{counts}]"):
        assert 2 <= len(found) <= 16, (low, high, found)
        assert low * (1 - 1e-6) <= found[0] < found[-1] <= high * (1 + 1e-6)


def test_a_band_of_merged_buckets_leaves_out_single_slow_steps(tmp_path: Path):
    rows = np.random.default_rng(1).uniform(0.9, 1.1, (500, 1, 1)).astype("f4")
    rows[37] = 40.0  # a step that the machine held up
    merged = merge_in_figure_and_page(tmp_path, rows)
    assert len(merged) == 63
    assert merged[4, 2] < 30 < rows[32:40].max()
    assert (merged[5:, 0] > rows[40:].min()).any()


def test_a_single_last_step_is_a_part_of_the_merged_bucket_before_it(tmp_path: Path):
    """A step after a pause has another time than a mean of many."""
    rows = np.ones((505, 1, 1), "f4")
    rows[504] = 9.0
    merged = merge_in_figure_and_page(tmp_path, rows)
    assert len(merged) == 63
    assert merged[-1, 1] == pytest.approx((8 + 9) / 9)


def merge_in_figure_and_page(tmp_path: Path, rows: np.ndarray) -> np.ndarray:
    """Return lower quantile, mean and upper quantile of merged buckets, which page and figure share."""
    buckets = CurveBuckets(1, 0, 0, np.repeat(rows, 3, axis=2), len(rows) - 1)
    merged = buckets.merge_to_quantiles(64).values[:, 0]
    data = np.repeat(rows, 3).tolist()
    curves = f"{{data: {data}, used: {len(rows)}, width: 1, origin: 0}}"
    grain = f"bucketGrain({curves}, 1, {{first: 0, nodes: 0, banded: false}}, 64)"
    values = "((g) => Array.from({length: g.used}, (_, at) => [0, 1, 2].map((which) => g.value(0, at, which))))"
    found = evaluate_page_code(tmp_path, "chart/grain.js", ["bucketGrain"], f"{values}({grain})")
    np.testing.assert_allclose(np.array(found), merged, rtol=1e-5)
    return merged


def test_a_rate_is_plain_while_it_can_be_read_at_a_glance(tmp_path: Path):
    rates = [0, 0.1, 0.0003, 0.00002, 0.00000146, 12345.678, 123456]
    texts = evaluate_page_code(tmp_path, "numbers.js", ["shortRate"], f"{json.dumps(rates)}.map(shortRate)")
    assert texts == ["0", "0.1", "0.0003", "0.00002", "1.46e-6", "12,350", "1.235e5"]


_PACED_PAGE = """((cost, until, spare, every = 250, parts = 1, refreshMs = 0) => {
  let now = 0, frames = [], timers = [], posted = [];
  const drawn = [], charts = [];
  Object.defineProperty(globalThis, "performance", { value: { now: () => now } });
  globalThis.requestAnimationFrame = (call) => frames.push(call);
  globalThis.setTimeout = (call, ms) => timers.push({ at: now + ms, call });
  globalThis.clearTimeout = () => { timers = []; };
  globalThis.MessageChannel = class {
    port1 = { close: () => {} };
    port2 = { postMessage: () => posted.push(this.port1) };
  };
  globalThis.getNow = () => now;
  const redraw = (isHeadOnly) => requestAnimationFrame(() => {
    drawn.push(now);
    if (!isHeadOnly) { charts.push(now); now += cost(); }
  });
  const pacer = newPacer(redraw, () => spare, () => refreshMs);
  const run = (calls) => { for (const call of calls.splice(0)) call(); };
  for (let message = 0, part = 0; now < until; now += 10) {
    while (now >= message + 10 * part) {
      pacer.soon();
      part = (part + 1) % parts;
      if (part === 0) message += every;
    }
    const due = timers.filter(({ at }) => at <= now);
    timers = timers.filter(({ at }) => at > now);
    for (const { call } of due) call();
    run(frames);
    for (const port of posted.splice(0)) port.onmessage();
  }
  const began = now;
  pacer.now();
  run(frames);
  return { drawn: drawn.slice(0, -1), charts: charts.slice(0, -1), wait: began - charts.at(-1) };
})"""


def test_a_page_draws_rarely_where_drawing_takes_long(tmp_path: Path):
    """On cores that are all busy, the training pays for what drawing takes."""
    quick, usual, slow, frozen, spare = (
        evaluate_page_code(
            tmp_path / cost, "pacing.js", ["newPacer"], f"{_PACED_PAGE}(() => {cost}, 60_000, {has_spare_core})"
        )
        for cost, has_spare_core in (("2", "false"), ("14", "false"), ("40", "false"), ("400", "false"), ("16", "true"))
    )
    for page in (quick, usual):
        assert 60 <= len(page["charts"]) <= 82  # at least one a second
        assert np.diff(page["charts"]).max() <= 1000
    assert len(spare["charts"]) >= 200  # nothing waits for the core that it takes
    assert len(slow["charts"]) <= 0.02 * 60_000 / 40 + 5
    gaps = np.diff(frozen["charts"])
    assert 2000 <= np.median(gaps) <= 3500  # it stays live
    assert gaps.max() <= 3500
    assert quick["wait"] == slow["wait"] == frozen["wait"] == 0  # what a person waits for comes at once


def test_numbers_above_the_charts_do_not_wait_for_charts_that_take_long(tmp_path: Path):
    page = evaluate_page_code(tmp_path, "pacing.js", ["newPacer"], f"{_PACED_PAGE}(() => 90, 60_000, false)")
    assert np.diff(page["drawn"]).max() <= 1000
    assert np.median(np.diff(page["charts"])) >= 2000


def test_parts_of_a_message_are_drawn_together(tmp_path: Path):
    page = evaluate_page_code(tmp_path, "pacing.js", ["newPacer"], f"{_PACED_PAGE}(() => 0, 60_000, false, 3000, 3)")
    assert len(page["charts"]) == 20
    assert page["charts"] == page["drawn"]


def test_a_page_draws_at_the_interval_that_a_person_chose(tmp_path: Path):
    often = f"{_PACED_PAGE}(() => 2, 60_000, true, 250, 1, 5000)"
    alike = f"{_PACED_PAGE}(() => 2, 60_000, true, 5000, 3, 5000)"
    page, same = (
        evaluate_page_code(tmp_path / name, "pacing.js", ["newPacer"], code)
        for name, code in (("often", often), ("alike", alike))
    )
    assert page["drawn"] == page["charts"]  # all is drawn alike
    assert np.diff(page["drawn"]).min() >= 4500
    assert len(page["drawn"]) >= 12
    assert len(same["drawn"]) == 12  # each message once, with all its parts, and none waits for the next one
    assert page["wait"] == 0


_ATTENDED_PAGE = """(() => {
  let now = 1000, timers = [];
  const told = [], listeners = new Map();
  Date.now = () => now;
  globalThis.setTimeout = (call, ms) => timers.push({ at: now + ms, call });
  globalThis.clearTimeout = () => { timers = []; };
  globalThis.document = {
    hidden: false,
    addEventListener: (kind, call) => listeners.set(kind, call),
    removeEventListener: (kind) => listeners.delete(kind),
  };
  let look = null;
  globalThis.IntersectionObserver = class {
    constructor(call) { look = (target, isIntersecting) => call([{ target, isIntersecting }]); }
    observe() {}
    disconnect() {}
  };
  let chosen = 0;
  const chose = [], tell = ({ level, refresh }) => { told.push([now - 1000, level]); chose.push(refresh); };
  const view = {}, { end, watch, update, isHidden } = followAttention(tell, () => chosen);
  watch(view);
  const wait = (ms) => {
    for (const until = now + ms; now < until;) {
      now += 500;
      const due = timers.filter(({ at }) => at <= now);
      timers = timers.filter(({ at }) => at > now);
      for (const { call } of due) call();
    }
  };
  wait(20_000);
  listeners.get("pointermove")();
  wait(100_000);
  listeners.get("keydown")();
  wait(5000);
  document.hidden = true;
  listeners.get("visibilitychange")();
  wait(60_000);
  document.hidden = false;
  listeners.get("visibilitychange")();
  wait(1000);
  look(view, false); // scrolled past
  wait(500);
  look(view, true);
  wait(500);
  look(view, false);
  wait(5000);
  const isAway = isHidden();
  look(view, true);
  wait(1000);
  chosen = 15;
  update();
  update();
  end();
  wait(60_000);
  return [told, listeners.size, isAway, chose];
})()"""


def test_a_page_tells_when_a_person_comes_and_has_gone(tmp_path: Path):
    told, listening, is_away, chosen = evaluate_page_code(tmp_path, "attention.js", ["followAttention"], _ATTENDED_PAGE)
    levels = dict(told)
    assert levels == {
        0: "watched",
        50_000: "open",
        120_000: "watched",
        125_000: "hidden",
        185_000: "watched",
        188_000: "hidden",
        192_000: "watched",
        193_000: "watched",
    }
    assert (listening, is_away) == (0, True)
    assert chosen == [*[0] * 7, 15]  # what a person chooses is told once


def test_a_page_that_other_processes_interrupt_keeps_its_pace(tmp_path: Path):
    """A drawing that waits for a core takes longer, but costs the training nothing more."""
    cost = "() => (getNow() < 1000 || Math.floor(getNow() / 1000) % 3 ? 90 : 9)"
    page = evaluate_page_code(tmp_path, "pacing.js", ["newPacer"], f"{_PACED_PAGE}({cost}, 60_000, false)")
    assert np.diff(page["charts"]).max() <= 1000


_GRAIN = "((values) => ({ used: values.length, lines: 1, value: (_line, at) => values[at] }))"


@pytest.mark.parametrize(("smallest", "count", "is_logarithmic"), [(1e-4, 1, False), (1e-4, 40, True)])
def test_single_small_values_make_no_logarithmic_scale(
    tmp_path: Path, smallest: float, count: int, *, is_logarithmic: bool
):
    """A view made after a restart has coarser buckets, without the small value, and had another scale."""
    values = [2.3, *[0.1] * 300, *[smallest] * count, *[0.1] * 40]
    found = evaluate_page_code(tmp_path, "chart/grain.js", ["spansOrders"], f"spansOrders({_GRAIN}({values}))")
    assert found is is_logarithmic
    assert spans_orders(np.array(values)[:, None].repeat(3, 1)) is is_logarithmic


@pytest.mark.parametrize(("end", "is_logarithmic"), [(0.003, True), (0.05, False)])
def test_a_loss_that_would_touch_the_axis_has_a_logarithmic_scale(tmp_path: Path, end: float, *, is_logarithmic: bool):
    values = (2.3 * np.exp(-np.arange(0, 20, 0.05)) + end).tolist()
    found = evaluate_page_code(tmp_path, "chart/grain.js", ["spansOrders"], f"spansOrders({_GRAIN}({values}))")
    assert found is is_logarithmic
    assert spans_orders(np.array(values)[:, None].repeat(3, 1)) is is_logarithmic


def test_single_small_values_take_no_logarithmic_axis_down(tmp_path: Path):
    options = "{ shown: () => true, from: 0, to: 999, extra: [], isLog: true }"
    value = "(_line, at, which) => (which ? means : lows)[at]"
    grain = f"((means, lows) => ({{ used: means.length, lines: 1, span: (at) => [at, at], value: {value} }}))"
    means = [float(v) for v in np.geomspace(2, 0.01, 320)]
    lows = [1e-6 if k % 50 == 20 else 0.3 * mean for k, mean in enumerate(means)]
    down = [*means, 1e-5]  # a new value is always in sight
    limits = f"[[{means}, {lows}], [{down}, {down}]].map(([v, w]) => valueLimits({grain}(v, w), {options}))"
    ended, falling = evaluate_page_code(tmp_path, "chart/grain.js", ["valueLimits"], limits)
    assert 0.001 < ended[0] < 0.005
    assert find_log_floor([np.array(means)]) == pytest.approx(1.1 * ended[0])  # the page leaves room below it
    assert 5e-6 < falling[0] < 1e-5


def test_signs_of_events_next_to_each_other_are_one_in_their_order(tmp_path: Path):
    """A sign that grows must not be drawn over the one before it."""
    marks = '[{at: 100, glyph: "‖"}, {at: 112, glyph: "lr"}, {at: 112, glyph: "▶"}, {at: 300, glyph: "‖"}]'
    back = '[{at: 100, glyph: "‖"}, {at: 101, glyph: "lr"}, {at: 100, glyph: "▶"}]'
    signs, (sign,) = evaluate_page_code(
        tmp_path, "chart/marks.js", ["mergeSigns"], f"[mergeSigns({marks}), mergeSigns({back})]"
    )
    first, last = (
        {"at": 106, "half": 27, "glyphs": ["‖", "lr", "▶"], "marks": [0, 1, 2]},
        {"at": 300, "half": 4.5, "glyphs": ["‖"], "marks": [3]},
    )
    assert signs == [first, last]
    assert sign["glyphs"] == ["‖", "lr", "▶"]
    assert sign["marks"] == [0, 1, 2]


def test_failures_are_among_the_signs_that_a_place_has_room_for(tmp_path: Path):
    kinds = ["lost", "pause", "lr", "resume", "repair", "save", "stop"]
    marks = json.dumps([{"at": 100 + k, "glyph": EVENT_GLYPHS[kind], "kind": kind} for k, kind in enumerate(kinds)])
    (sign,), (at_edge,) = evaluate_page_code(
        tmp_path, "chart/marks.js", ["mergeSigns"], f"[mergeSigns({marks}), mergeSigns({marks}, 50, 110)]"
    )
    assert (sign["at"], sign["glyphs"]) == (103, ["†", "▶", "+", "↓", "■"])
    assert 80 < at_edge["at"] < 100  # all of its text is left of 110


def test_the_key_to_the_marks_is_that_of_pictures_and_reports(tmp_path: Path):
    events = [Event(k, kind, "", 0.0, None) for k, kind in enumerate(EVENT_GLYPHS)]
    events += [Event(99, "lost", "", 0.0, rank) for rank in (3, 1)]
    events += [
        Event(99, "stuck", f"node 2 {STOPPED_WORDS}", 0.0, 2),
        *(Event(99, "error", "", 0.0, k) for k in range(5)),
    ]
    lines = json.dumps([build_log_line(event) for event in events])
    key = evaluate_page_code(tmp_path, "chart/marks.js", ["describeMarks"], f"describeMarks({lines})")
    assert key == describe_event_marks(events)
    assert "⊘ node 2 stopped" in key


def test_a_page_has_the_glyphs_of_pictures_and_terminals(tmp_path: Path):
    names = {"panels/header.js": ["STATE_GLYPH"], "panels/notices.js": ["NOTICE_GLYPH", "URGENT_NOTICES"]}
    (states,), (notices, urgent) = (
        evaluate_page_code(tmp_path / str(k), module, found, f"[{', '.join(found)}]")
        for k, (module, found) in enumerate(names.items())
    )
    assert {state: states[state.value] for state in STATE_GLYPHS} == STATE_GLYPHS
    assert (notices, tuple(urgent)) == (NOTICE_GLYPHS, ALERT_KINDS)


def test_the_numbers_of_an_axis_have_one_form(tmp_path: Path):
    axes: dict[tuple[float, ...], list[str]] = {
        (1, 1e6, 1e12): ["1", "1e6", "1e12"],
        (1, 1e3, 1e6, 1e9): ["1", "1e3", "1e6", "1e9"],
        (10, 1e4, 1e6): ["10", "10k", "1M"],
        (1, 1e3, 1e5): ["1", "1k", "100k"],
        (0, 5e3, 1e4, 1.5e4): ["0", "5k", "10k", "15k"],
        (5e5, 1e6, 1.5e6): ["0.5M", "1M", "1.5M"],
        (12340, 12345, 12350): ["12,340", "12,345", "12,350"],
        (0, 5e-4, 1e-3, 1.5e-3): ["0", "5e-4", "1e-3", "1.5e-3"],
        (1e-4, 1e-2, 1, 100): ["1e-4", "1e-2", "1", "1e2"],
        (0, 500, 1000): ["0", "500", "1,000"],
        (-0.05, 0, 0.05): ["-0.05", "0", "0.05"],
    }
    calls = ", ".join(f"{list(values)}.map(tickFormat({list(values)}))" for values in axes)
    assert evaluate_page_code(tmp_path, "numbers.js", ["tickFormat"], f"[{calls}]") == list(axes.values())


def test_the_numbers_of_a_column_have_one_form(tmp_path: Path):
    columns: dict[tuple[float | None, ...], list[str]] = {
        (0.00187, 0.0006): ["0.00187", "0.00060"],
        (486.4, 98.52): ["486.4", "98.5"],
        (1204.0, 987.0): ["1,204", "987"],
        (9e-5, 1.2e-4): ["9.0e-5", "1.2e-4"],
        (3.4e25, 8_123_456.0): ["3.4e25", "8.1e6"],
        (0.5, None, 0.0): ["0.500", "—", "0"],
    }
    calls = ", ".join(f"numberColumn({json.dumps(values)})" for values in columns)
    assert evaluate_page_code(tmp_path, "numbers.js", ["numberColumn"], f"[{calls}]") == list(columns.values())


_TWO_RUNS = """((mode, exact) => {
  const axes = { epoch: [10, 20], samples: [4, 8], time: [[[1, 40], [5, 200]], [[1, 40], [50, 2000]]], last: [40, 40] };
  const store = { view: { x: mode }, head: { runs: ["fast", "slow"], axes } };
  const points = [[10, 1, 2, NaN], [20, NaN, 3, NaN], [40, 5, 6, NaN]];
  const grain = seriesGrain({ points: 3, lines: 3, values: points.flat() });
  const placed = placedGrain(store, grain, exact);
  const all = Array.from({ length: placed.used }, (_, at) => at);
  const lines = [0, 1].map((line) => all.map((at) => [placed.step(at), placed.value(line, at, 1)])
    .filter(([, v]) => !Number.isNaN(v)));
  return [axisOfRuns(store).of(placed.step(placed.used - 1)), lines];
})"""


_WITH_GRAIN = """await (async () => {
  const { seriesGrain } = await import("./static/chart/grain.js");
  return %s;
})()"""


def test_runs_of_other_speeds_have_their_own_places_on_an_axis(tmp_path: Path):
    """Milliseconds, samples, and thousandths of an epoch: the same step of two runs is at two places."""
    calls = ", ".join(f"{_TWO_RUNS}('{mode}', true)" for mode in ("time", "samples", "epoch"))
    code = _WITH_GRAIN % f"[{calls}]"
    time, samples, epoch = evaluate_page_code(tmp_path, "chart/run_axis.js", ["axisOfRuns", "placedGrain"], code)
    assert time[1] == [[[50, 1], [200, 5]], [[500, 2], [1000, 3], [2000, 6]]]
    assert time[0] == 2.0  # seconds
    assert samples[1] == [[[40, 1], [160, 5]], [[80, 2], [160, 3], [320, 6]]]
    assert epoch[1] == [[[1000, 1], [4000, 5]], [[500, 2], [1000, 3], [2000, 6]]]
    assert epoch[0] == 4.0


def test_a_pointer_finds_each_run_between_its_values(tmp_path: Path):
    code = _WITH_GRAIN % f"{_TWO_RUNS}('time', false)"
    _, (fast, slow) = evaluate_page_code(tmp_path, "chart/run_axis.js", ["axisOfRuns", "placedGrain"], code)
    assert len(slow) > 150  # of 256 places, those from its first value to its last
    values = [value for _, value in slow]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (2, 6)
    assert max(place for place, _ in fast) < 220


def test_a_page_draws_the_first_step_after_a_command_at_once_but_no_other(tmp_path: Path):
    source = FakeSource(ranks=1)
    builder = MessageBuilder(source)
    messages = [builder.build_snapshot()]
    for _ in range(3):
        source.advance(1)
        messages.append(builder.build_change())
    received = ", ".join(
        f"[{json.dumps(message.content)}, {json.dumps([list(buffer) for buffer in message.buffers])}]"
        for message in messages
    )
    receive = "([c, b]) => { apply(store, c, b.map((x) => Uint8Array.from(x))); return pressing(store); }"
    texts = f"((store, messages) => messages.map({receive}))"
    opened, first, second, third = evaluate_page_code(
        tmp_path, "store.js", ["apply", "newStore", "pressing"], f"{texts}(newStore(), [{received}])"
    )
    assert opened != first == second == third


def test_the_label_of_points_stands_as_their_last_one_does(tmp_path: Path):
    """Labels of lines stand as their lines end, also where the validation lies between them."""
    lines = '{ y: 50, label: "node 0" }, { y: 47, label: "mean" }'
    above, below = (f'orderLabels([{lines}, {{ y: {y}, label: "validation", isPoint: true }}])' for y in (40, 58))
    names = "map(({ label }) => label)"
    found = evaluate_page_code(tmp_path, "chart/lines.js", ["orderLabels"], f"[{above}.{names}, {below}.{names}]")
    assert found == [["validation", "mean", "node 0"], ["mean", "node 0", "validation"]]


@pytest.mark.parametrize(("heights", "is_kept"), [((50, 52, 51), True), ((53, 50, 52), True), ((54, 50, 52), False)])
def test_labels_keep_their_order_while_their_lines_cross_within_noise(
    tmp_path: Path, heights: tuple[int, int, int], *, is_kept: bool
):
    names = ["node 0", "mean", "node 1"]
    ends = [{"y": y, "label": name, "hue": name} for y, name in zip(heights, names, strict=True)]
    former = [f"{name} undefined" for name in names]
    code = f"orderLabels({json.dumps(ends)}, {json.dumps(former)}).map(({{ label }}) => label)"
    found = evaluate_page_code(tmp_path, "chart/lines.js", ["orderLabels"], code)
    by_height = [name for _, name in sorted(zip(heights, names, strict=True))]
    assert by_height != names
    assert found == (names if is_kept else by_height)


def list_shown_evaluations(folder: Path, messages: list[Message]) -> list[list[tuple[int, float]]]:
    """Return the (step, loss) of the evaluations that a page has after each message."""
    sent = [[m.content, [base64.b64encode(buffer).decode() for buffer in m.buffers]] for m in messages]
    code = f"""(() => {{
      const store = newStore();
      return {json.dumps(sent)}.map(([content, buffers]) => {{
        apply(store, content, buffers.map((text) => new DataView(new Uint8Array(Buffer.from(text, "base64")).buffer)));
        return store.evaluations.map((e) => [e.step, e.values.loss]);
      }});
    }})()"""
    shown: list[list[tuple[int, float]]] = evaluate_page_code(folder, "store.js", ["newStore", "apply"], code)
    return shown


def test_many_evaluations_are_thinned_over_the_whole_run(tmp_path: Path):
    source = FakeSource(ranks=1, steps=100_000)
    source.advance(50)
    builder, messages = MessageBuilder(source), []
    for count in (3000, 200, 200):  # the first ones are in a snapshot
        start = len(source.history.evaluations)
        for step in range(start + 1, start + count + 1):
            source.history.add(Evaluation(step, 1, {"loss": 1 / step}))
        messages.append(builder.build_change() if messages else builder.build_snapshot())
    for _ in range(20):
        start = len(source.history.evaluations)
        for step in range(start + 1, start + 101):
            source.history.add(Evaluation(step, 1, {"loss": 1 / step}))
        messages.append(builder.build_change())
    opened, *_, last = ([step for step, _ in shown] for shown in list_shown_evaluations(tmp_path, messages))
    assert (len(opened), opened[0], opened[-1]) == (MAX_SNAPSHOT_EVALUATIONS, 1, 3000)
    assert set(np.diff(opened)) == {6, 7}
    assert (last[0], last[-1]) == (1, 5400)
    assert len(last) < 2001
    assert max(np.diff(last)) < 54  # so that even the oldest part has a point in each hundredth of the run


@pytest.mark.parametrize(("num_rows", "kind"), [(5, "change"), (50, "snapshot")], ids=["evaluations", "rows"])
def test_the_page_forgets_evaluations_of_undone_steps(tmp_path: Path, num_rows: int, kind: str):
    """Where rows are undone, too, the page gets everything again."""
    source = FakeSource(ranks=2, steps=100)
    builder = MessageBuilder(source)
    messages = [builder.build_snapshot()]
    source.advance(num_rows)
    for step in (10, 20, 30, 40):
        source.history.add(Evaluation(step, 10, {"loss": 1.0}))
    messages.append(builder.build_change())
    source.history.add(UndoneSteps(25))
    messages.append(builder.build_change())
    assert messages[-1].content["kind"] == kind
    assert kind == "snapshot" or messages[-1].content["undone_after"] == 20
    for step in (30, 40):
        source.history.add(Evaluation(step, 10, {"loss": 2.0}))
    messages.append(builder.build_change())
    source.history.add(UndoneSteps(12))  # back, and on, before a message
    source.history.add(Evaluation(20, 10, {"loss": 3.0}))
    messages.append(builder.build_change())
    assert [e["step"] for e in builder.build_snapshot().content["evaluations"]] == [10, 20]
    assert list_shown_evaluations(tmp_path, messages) == [
        [],
        [[10, 1], [20, 1], [30, 1], [40, 1]],
        [[10, 1], [20, 1]],
        [[10, 1], [20, 1], [30, 2], [40, 2]],
        [[10, 1], [20, 3]],
    ]


def test_a_caption_loses_its_last_parts_where_they_have_no_room(tmp_path: Path):
    note = "log scale · validation, last 0.625, from 0.125 to 0.625"
    calls = ", ".join(f"fitCaption('accuracy', {note!r}, {width})" for width in (1000, 370, 250, 140, 30))
    assert evaluate_page_code(tmp_path, "chart/caption.js", ["fitCaption"], f"[{calls}]") == [
        note, "log scale · validation, last 0.625", "log scale · validation", "log scale", "",
    ]  # fmt: skip


def test_a_caption_is_never_cut_within_a_word(tmp_path: Path):
    calls = ", ".join(f"fitCaption('Loss', 'mean over all nodes', {width})" for width in (150, 144, 110, 100))
    assert evaluate_page_code(tmp_path, "chart/caption.js", ["fitCaption"], f"[{calls}]") == [
        "mean over all…", "mean over all…", "mean over…", "mean…",
    ]  # fmt: skip


def test_a_band_whose_value_is_0_ends_at_the_least_positive_value_in_sight(tmp_path: Path):
    rows = [[0.02, 0.5, 0.9], [0, 0.4, 0.8], [0.1, 0.3, 0.7]]
    value = f"onlyPositive((_line, at, which) => {rows}[at][which])"
    grain = f"{{ used: 3, lines: 1, value: {value}, span: (at) => [10 * at, 10 * at + 9] }}"
    calls = ", ".join(f"leastInSight({grain}, () => true, {first}, 40)" for first in (0, 10))
    found = evaluate_page_code(tmp_path, "chart/grain.js", ["leastInSight", "onlyPositive"], f"[{calls}]")
    assert found == [0.02, 0.1]


def test_a_tooltip_is_beside_the_pointer_on_the_side_with_more_room(tmp_path: Path):
    size, panel, narrow = "[180, 90]", "[500, 220]", "[300, 220]"
    points = ((100, 100, panel), (249, 5, panel), (251, 215, panel), (499, 100, panel))
    points += ((150, 60, narrow), (150, 200, narrow), (10, 60, narrow))
    calls = ", ".join(f"placeTip({x}, {y}, {size}, {room})" for x, y, room in points)
    found = evaluate_page_code(tmp_path, "chart/tooltip.js", ["placeTip"], f"[{calls}]")
    assert found[:4] == [[114, 90], [263, 0], [57, 108], [305, 90]]
    assert found[4:] == [[60, 74], [60, 96], [24, 50]]


def test_rules_on_what_an_element_has_look_at_its_children_only():
    """A rule on all descendants of JupyterLab's outputs computed all styles again at each new text of the view."""
    rules = (STATIC_FOLDER / "dashboard.css").read_text(encoding="utf-8")
    assert re.findall(r":has\((?!> )[^)]*\)", rules) == []
