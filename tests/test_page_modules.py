"""Modules of the page on their own, without a browser: numbers as text, buckets of curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.summary.curves import CurveBuckets
from tests.support.node import evaluate_page_code

if TYPE_CHECKING:
    from pathlib import Path


def test_numbers_of_any_size_are_short(tmp_path: Path):
    values = [5e19, 1e11, 1.25e9, 2.5e6, 30_000, 0.25, 2e-5]
    ticks, numbers = evaluate_page_code(
        tmp_path, "numbers.js", ["number", "tick"], f"[{values}.map((v) => tick(v)), {values}.map((v) => number(v))]"
    )
    assert ticks == ["5e19", "1e11", "1.25e9", "2.5M", "30k", "0.25", "2e-5"]
    assert numbers == ["5e19", "1e11", "1.3e9", "2,500,000", "30,000", "0.250", "2.0e-5"]


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
    """The page and the figure of a run draw the same quantiles."""
    rows = np.random.default_rng(1).uniform(0.9, 1.1, (500, 1, 1)).astype("f4")
    rows[37] = 40.0  # a step that the machine held up
    buckets = CurveBuckets(1, 0, 0, np.repeat(rows, 3, axis=2))
    expected = buckets.merge_to_quantiles(64).values[:, 0]
    assert len(expected) == 63
    assert expected[4, 2] < 30 < rows[32:40].max()
    assert (expected[5:, 0] > rows[40:].min()).any()
    data = np.repeat(rows, 3).tolist()
    curves = f"{{data: {data}, used: 500, width: 1, origin: 0}}"
    grain = f"bucketGrain({curves}, 1, {{first: 0, nodes: 0, banded: false}}, 64)"
    values = "((g) => Array.from({length: g.used}, (_, at) => [0, 1, 2].map((which) => g.value(0, at, which))))"
    found = evaluate_page_code(tmp_path, "chart/grain.js", ["bucketGrain"], f"{values}({grain})")
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-5)


_PACED_PAGE = """((cost, until, spare) => {
  let now = 0, frames = [], timers = [], posted = [];
  const drawn = [], reported = [];
  Object.defineProperty(globalThis, "performance", { value: { now: () => now } });
  globalThis.requestAnimationFrame = (call) => frames.push(call);
  globalThis.setTimeout = (call, ms) => timers.push({ at: now + ms, call });
  globalThis.clearTimeout = () => { timers = []; };
  globalThis.MessageChannel = class {
    port1 = { close: () => {} };
    port2 = { postMessage: () => posted.push(this.port1) };
  };
  const redraw = () => requestAnimationFrame(() => { drawn.push(now); now += cost; });
  const pacer = newPacer(redraw, (ms) => reported.push(ms), () => spare);
  const run = (calls) => { for (const call of calls.splice(0)) call(); };
  for (let message = 0; now < until; now += 10) {
    if (now >= message) { pacer.soon(); message += 250; }
    const due = timers.filter(({ at }) => at <= now);
    timers = timers.filter(({ at }) => at > now);
    for (const { call } of due) call();
    run(frames);
    for (const port of posted.splice(0)) port.onmessage();
  }
  pacer.now();
  run(frames);
  return { drawn: drawn.slice(0, -1), wait: now - drawn.at(-1) - cost, reported };
})"""


def test_a_page_draws_rarely_where_drawing_takes_long(tmp_path: Path):
    """On cores that are all busy, a frame takes long, and the training on them pays for it."""
    quick, slow, frozen, spare = (
        evaluate_page_code(
            tmp_path / cost, "pacing.js", ["newPacer"], f"{_PACED_PAGE}({cost}, 60_000, {has_spare_core})"
        )
        for cost, has_spare_core in (("2", "false"), ("15", "false"), ("400", "false"), ("16", "true"))
    )
    assert 50 <= len(quick["drawn"]) <= 62  # one a second, which a person can still read
    assert quick["reported"] == []
    assert len(spare["drawn"]) >= 220  # nothing waits for the core that it takes
    assert (
        len(slow["drawn"]) <= 40 / 15 + 0.006 * 60_000 / 15 + 2
    )  # what may be spent at once, and then a share of the time
    assert slow["reported"][-1] == 2500
    gaps = np.diff(frozen["drawn"])
    assert 2000 <= np.median(gaps) <= 3000  # it stays live
    assert gaps.max() <= 3000
    assert frozen["reported"][-1] == 2500
    assert quick["wait"] == slow["wait"] == frozen["wait"] == 0  # what a person waits for comes at once


def test_signs_of_events_next_to_each_other_are_one_in_their_order(tmp_path: Path):
    """A sign that grows must not be drawn over the one before it."""
    marks = '[{at: 100, glyph: "‖"}, {at: 112, glyph: "lr"}, {at: 112, glyph: "▶"}, {at: 300, glyph: "‖"}]'
    back = '[{at: 100, glyph: "‖"}, {at: 101, glyph: "lr"}, {at: 100, glyph: "▶"}]'
    text = 'joinGlyphs(["‖", "lr", "▶", "↓"])'
    signs, (sign,), joined = evaluate_page_code(
        tmp_path, "chart/marks.js", ["mergeSigns", "joinGlyphs"], f"[mergeSigns({marks}), mergeSigns({back}), {text}]"
    )
    assert joined == "‖\u2009lr\u2009▶↓"
    assert signs == [{"at": 106, "glyphs": ["‖", "lr", "▶"]}, {"at": 300, "glyphs": ["‖"]}]
    assert sign["glyphs"] == ["‖", "lr", "▶"]
