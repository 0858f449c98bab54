"""Reports of a run: headline numbers, charts with tooltips, settings as typed, the model, folded tables."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import formatting
from dtkit.dashboard import report
from dtkit.dashboard.figures import run_figure
from dtkit.dashboard.report_cards import iterate_cards
from dtkit.dashboard.report_page import format_notice
from dtkit.dashboard.summary.comparison import find_best_evaluation, make_row
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.summary.pauses import find_pauses
from dtkit.dashboard.summary.ticks import choose_log_ticks, choose_ticks
from dtkit.dashboard.svg_chart import MAX_POINTS, Series, draw_chart
from dtkit.dashboard.text import run_text
from dtkit.dashboard.text.comparison_text import make_table
from dtkit.data.layers import MAX_LAYERS, summarize_model
from dtkit.data.notebook_data import describe_shapes
from dtkit.engine.data.memmap import MappedFile
from dtkit.errors import EngineError
from dtkit.history.metric_direction import is_better_lower
from dtkit.history.scalars import BETWEEN_PREFIX, ScalarRecord
from dtkit.history.speed import TimeParts, compute_speed, split_time
from dtkit.rpc.reference import StepTimes
from dtkit.testing.fake_transport import FakeTransport
from dtkit.training.settings import describe_value
from dtkit.types import Evaluation, Event, Failure, ModelSummary, State
from tests.support.comparison_sources import make_diverging_pair, make_logging_runs
from tests.support.fake_source import FakeSource
from tests.support.verification import make_verification


def write(source: FakeSource, folder, **options) -> str:
    report.write_report(source, folder / "run.html", **options)
    return (folder / "run.html").read_text(encoding="utf-8")


def test_the_headline_has_the_best_of_each_metric(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    for step, loss, accuracy in ((10, 0.9, 0.5), (20, 0.6, 0.8), (30, 0.7, 0.75)):
        source.history.add(Evaluation(step, 100, {"loss": loss, "accuracy": accuracy}))
    page = write(source, tmp_path)
    cards = re.findall(r'<div class="card"><span>([^<]*)</span><b>([^<]*)</b><span>([^<]*)</span>', page)
    assert ("validation loss", "0.600", "lowest, at step 20; the last 0.700") in cards
    assert ("validation accuracy", "0.800", "highest, at step 20; the last 0.750") in cards
    assert "prefers-color-scheme: dark" in page
    assert "<summary>the arithmetic</summary>" in page


def test_losses_that_reach_exactly_zero_are_drawn_on_a_logarithmic_axis(tmp_path):
    source = FakeSource(ranks=2)
    for loss in (100.0, 1.0, 0.0):  # as a hinge loss does
        source.advance(20, loss=loss)
    page = write(source, tmp_path)
    assert re.search(r"<h3>Loss <small>[^<]*logarithmic</small>", page)


def test_the_error_of_a_failed_run_keeps_its_lines_and_says_node(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    frames = (("train.py", 12, "loss", "raise ValueError('no')"),)
    source.exception = EngineError([Failure(1, "host0", "ValueError", "no", "Traceback", step=40, user_frames=frames)])
    page = write(source, tmp_path)
    assert "white-space: pre-wrap" in page
    (error,) = re.findall(r'<p class="error">(.*?)</p>', page, re.DOTALL)
    assert error.splitlines()[:2] == [
        "EngineError: node 1 on host0, step 40: ValueError: no",
        "  File train.py, line 12, in loss",
    ]


def test_a_number_that_is_logged_and_validated_has_one_chart_without_scripts_too(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(60)
    source.history.add(ScalarRecord(0, {"confidence": [(step, 0.5, 1.0) for step in range(1, 61)]}))
    source.history.add(Evaluation(60, 10, {"loss": 1.0, "confidence": 0.9, "accuracy": 0.7}))
    charts = re.findall(r"<figure>(<h3>.*?)</figure>", write(source, tmp_path), re.DOTALL)
    titles = [re.findall(r"<h3>(.*?) <small>(.*?)</small>", chart)[0] for chart in charts]
    assert ("confidence", "logged, and its validation") in titles
    assert ("accuracy", "validation") in titles
    (chart,) = [chart for chart in charts if "<h3>confidence" in chart]
    assert "validation 0.900" in chart


def test_a_notice_is_prose_in_which_only_what_a_user_types_is_code():
    assert format_notice("lower the rate, call run.set(lr=0.1), or set clip_grad_norm=.", is_alert=True) == (
        '<p class="notice alert">lower the rate, call <code>run.set(lr=0.1)</code>, or set '
        "<code>clip_grad_norm=</code>.</p>"
    )
    assert format_notice("mode='max' and <b>") == (
        '<p class="notice"><code>mode=&#x27;max&#x27;</code> and &lt;b&gt;</p>'
    )


def test_report_of_a_failed_run_has_traceback_start_and_commit(tmp_path, monkeypatch):
    source = FakeSource(ranks=2)
    source.history.add(Event(0, "start", "start at step 0", time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))))
    source.exception = EngineError([Failure(1, "host0", "ValueError", "no", "Traceback of <this>\n  inside", step=40)])
    monkeypatch.chdir(tmp_path)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first", "--allow-empty"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    page = write(source, tmp_path)
    assert "Traceback of &lt;this&gt;\n  inside</pre></details>" in page
    assert ".full" not in page.partition("<h2>Charts")[0]
    for text in ("2026-01-02 03:04:05", commit[:12], platform.node(), str(tmp_path)):
        assert text in page


def test_a_report_says_whether_files_differ_from_the_commit(tmp_path, monkeypatch):
    source = FakeSource(ranks=2)
    source.advance(5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)
    page = write(source, tmp_path)
    assert "git commit" in page
    assert "and local changes" not in page
    (tmp_path / "train.py").write_text("lr = 0.2\n")
    assert " and local changes<" in write(source, tmp_path)
    monkeypatch.setenv("PATH", "")  # without git
    assert "git commit" not in write(source, tmp_path)


def test_a_description_is_shown_as_typed_below_the_title(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(5)
    page = write(source, tmp_path, description="Is <b>lr 0.1</b> too large?\nSecond try.")
    head = page.partition("<h1>")[2].partition('<div class="cards"')[0]
    assert '<p class="description">Is &lt;b&gt;lr 0.1&lt;/b&gt; too large?\nSecond try.</p>' in head
    assert '<p class="description">' not in write(source, tmp_path)
    comparison = dtkit.compare(source, FakeSource(ranks=2)).report(tmp_path / "both.html", description="Two <runs>")
    assert '<p class="description">Two &lt;runs&gt;</p>' in Path(comparison).read_text()
    with pytest.raises(TypeError, match=r"description=3: a text, as in"):
        write(source, tmp_path, description=3)


def test_evaluations_have_a_table_of_their_own(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.event("pause", "paused at step 40")
    for step in range(1, 41):
        source.history.add(Evaluation(step, 100, {"loss": step / 100}))
        source.event("evaluation", f"validation loss {step / 100}")
    page = write(source, tmp_path)
    assert "<h2>Evaluations</h2><details><summary>40 rows</summary>" in page
    events = page.split("<h2>Events</h2>")[1]
    assert "paused at step 40" in events
    assert "validation loss" not in events


def test_the_learning_rate_is_that_of_the_last_step_as_in_the_chart(tmp_path):
    source = FakeSource(ranks=2)
    source.lr = 0.25
    source.advance(40)
    source.lr = 0.125  # that of a next step
    assert "0.25 in the last step" in write(source, tmp_path)


def test_learning_rates_of_undone_steps_are_left_out(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(10)
    source.lr = 0.0625
    source.advance(10)
    source.step = 10  # back to a snapshot
    source.advance(10)
    (table,) = re.findall(r"<h2>Learning rates</h2>(.*?)</table>", write(source, tmp_path), re.DOTALL)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", table) == ["1", "0.1", "11", "0.0625"]
    source.step, source.lr = 5, 0.1  # and once more, before the change
    source.advance(5)
    assert "<h2>Learning rates</h2>" not in write(source, tmp_path)


def test_a_report_is_a_path_that_a_notebook_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = FakeSource(ranks=2)
    source.advance(40)
    written = report.write_report(source, "my run.html")
    assert repr(written).startswith(f"Report of ConvNet: {tmp_path}/my run.html (")
    assert Path(written).read_text(encoding="utf-8").startswith("<!doctype html>")
    shown = written._repr_html_()
    assert 'href="my%20run.html"' in shown
    assert "training loss" in shown
    assert "samples/s, all steps but the first" in shown


def test_reports_without_a_path_are_named_after_run_and_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, other = FakeSource(ranks=2, name="a/b: c"), FakeSource(ranks=2, name="a/b: c")
    other.step = 1  # its start is a second later
    for run in (source, other):
        run.event("start", "start")
    first, again, second = (report.write_report(run).path for run in (source, source, other))
    assert first == again != second
    assert first.parent == tmp_path
    assert re.fullmatch(r"a-b-c-\d{8}-\d{6}\.html", first.name)


def test_reports_load_neither_matplotlib_nor_widgets(tmp_path):
    """Together they took four of the five seconds that the first report of a script took."""
    code = (
        "import sys, dtkit\n"
        "from dtkit.dashboard.report import write_report\n"
        "from tests.support.fake_source import FakeSource\n"
        "source = FakeSource(ranks=2)\n"
        "source.advance(40)\n"
        "write_report(source, 'run.html')\n"
        "dtkit.compare([source, source]).report()\n"
        "print({'matplotlib', 'ipywidgets', 'IPython', 'torch'} & set(sys.modules))"
    )
    paths = os.pathsep.join([str(Path(dtkit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert result.stdout.strip() == "set()"


def test_a_diverged_run_does_not_look_completed(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.end()
    assert '<span class="state good">completed</span>' in write(source, tmp_path)
    source.advance(20, loss=500.0)
    assert '<span class="state bad">diverged</span>' in write(source, tmp_path)
    assert run_text.format_run(source).splitlines()[0].endswith("diverged")
    assert "diverged" in run_figure.draw_run(source).get_suptitle()


def test_the_card_of_a_diverged_run_has_the_last_metric_with_the_best_below(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    for step, accuracy in ((10, 0.7), (20, 0.8), (30, 0.6)):
        source.history.add(Evaluation(step, 100, {"accuracy": accuracy}))
    assert read_cards(source, tmp_path)["validation accuracy"] == ("0.800", "highest, at step 20; the last 0.600")
    source.advance(20, loss=500.0)
    assert read_cards(source, tmp_path)["validation accuracy"] == ("0.600", "the last; highest 0.800 at step 20")


def read_cards(source: FakeSource, folder) -> dict[str, tuple[str, str]]:
    page = write(source, folder)
    cards = re.findall(r'<div class="card"><span>([^<]*)</span><b>([^<]*)</b><span>([^<]*)</span>', page)
    return {name: (value, note) for name, value, note in cards}


def test_a_report_says_node_where_errors_and_results_say_rank(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    failures = [
        Failure(1, "host0", "ValueError", "no", "File rank.py", step=40),
        Failure(0, "host0", "RuntimeError", "lost", "", victim=True),
    ]
    source.exception = EngineError(failures)
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.100, single_process_s=0.125))
    page = write(source, tmp_path)
    for text in ("Traceback of node 1:", "node 0 only lost its peer.", "median step 100 ms on 2 nodes", "File rank.py"):
        assert text in page
    assert not re.search(r"\branks? \d|\d ranks?\b", page)


def test_the_speed_up_over_one_process_comes_from_a_verification(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    assert "speed-up" not in read_cards(source, tmp_path)  # no card for what nobody measured
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.100, single_process_s=0.125))
    cards = read_cards(source, tmp_path)
    note = "over one process: 125 ms / 100 ms a step, medians of 17 steps of run.verify()"
    assert cards["speed-up"] == ("1.25 times", note)
    assert cards["scaling efficiency"] == ("62 %", "of the ideal speed-up: 1.25 / 2 nodes")


def test_the_result_of_a_verification_is_a_card_and_a_section(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    assert "verified" not in read_cards(source, tmp_path)
    assert "Verification" not in write(source, tmp_path)
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.100, single_process_s=0.125))
    assert read_cards(source, tmp_path)["verified"] == (
        "PASS",
        "largest difference 2.98e-08, tolerance 1e-05, 20 steps against one process",
    )
    section = write(source, tmp_path).split("<h2>Verification against one process</h2>")[1]
    for text in (
        "PASS: 20 steps on 2 nodes against one process, float32<",
        "largest difference of the parameters 2.98e-08, tolerance 1e-05<",
        "1.25 times as fast<",
        "<summary>Differences of the parameters: at most 2.98e-08, in weight</summary>",
    ):
        assert text in section
    assert "difference=" not in section


def test_the_tables_of_a_report_come_after_what_most_readers_look_for(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.history.read_valid_rows()["lr"][:] = np.repeat([0.1, 0.05, 0.02, 0.01], 20)
    source.event("lr", "learning rate 0.05")
    source.verification = make_verification()
    headings = re.findall(r"<h2>([^<]*)</h2>", write(source, tmp_path))
    order = ["Charts", "Where a step's time goes", "Settings, as typed", "Origin", "Events"]
    assert [name for name in headings if name in order] == order
    assert headings[-2:] == ["Verification against one process", "Learning rates"]


def test_the_sources_of_functions_are_folded_below_the_settings(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(5)
    source.spec = dataclasses.replace(source.spec, sources=(("loss", "def loss(o, t):\n    return o < t"),))
    page = write(source, tmp_path)
    assert '<summary>source of loss</summary><pre class="scroll">def loss(o, t):\n    return o &lt; t</pre>' in page


def test_a_verification_without_a_comparison_says_why(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.verification = dataclasses.replace(
        make_verification(), verdict="NOT COMPARABLE", max_difference=math.nan, differences={},
        incomparable_reasons=("its step calls <a collective>",),
    )  # fmt: skip
    assert read_cards(source, tmp_path)["verified"] == ("NOT COMPARABLE", "20 steps against one process")
    assert "its step calls &lt;a collective&gt;" in write(source, tmp_path)


def test_the_verdict_of_a_report_agrees_with_its_card(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.112, single_process_s=0.080))
    page = write(source, tmp_path)
    assert "<b>0.71 times</b>" in page
    assert "one process is faster, with 80 ms a step instead of 112 ms (medians of run.verify())" in page
    assert "the nodes are 0.71 times as fast" in page


@pytest.mark.parametrize(
    ("factor", "rule"),
    [(0.0, "took no time"), (-1.0, "took no time"), (math.nan, "took no time"), (1e-7, "differ"), (1e7, "differ")],
)
def test_a_speed_that_no_process_can_have_is_refused_for_the_scaling(tmp_path, factor, rule):
    source, single, impossible = FakeSource(ranks=2), FakeSource(ranks=1), dtkit.History()
    source.advance(40)
    single.advance(40)
    rows = single.history.rows().copy()
    rows["step_s"] *= factor
    impossible.append(rows)
    with pytest.raises(ValueError, match=f"single_process=.*{rule}.*train the same on dtkit.Cluster"):
        write(source, tmp_path, single_process=impossible)


def test_the_verdict_of_a_report_uses_the_given_history_of_one_process(tmp_path):
    source, single = FakeSource(ranks=2), FakeSource(ranks=1)
    source.advance(40)
    single.slowness = {0: 0.1}  # of the time to compute
    single.advance(40)
    page = write(source, tmp_path, single_process=single.history)
    (ratio,) = re.findall(r"speed-up</span><b>([\d.]+) times", page)
    assert float(ratio) < 0.9
    assert "one process is faster" in page
    assert f"the nodes are {ratio} times as fast" in page


def test_times_that_no_number_of_nodes_explains_are_not_a_speed(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.002, single_process_s=0.009))
    cards = read_cards(source, tmp_path)
    assert "speed-up" not in cards
    assert "not comparable, because other programs used the processors" in write(source, tmp_path)
    assert "scaling efficiency" not in cards


@pytest.mark.parametrize(
    ("all_ranks_s", "reason"),
    [
        (0.5, "the median step took 500 ms in run.verify(), 4.9 times the 102 ms of the run: the machine was busy"),
        (0.02, "the median step took 102 ms in the run, 5.1 times the 20 ms of run.verify(): the machine was busy"),
    ],
)
def test_a_verification_on_a_busy_machine_gives_no_speed_up(tmp_path, all_ranks_s: float, reason: str):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.verification = make_verification(StepTimes(17, all_ranks_s, single_process_s=0.21 * all_ranks_s))
    page = write(source, tmp_path)
    cards = read_cards(source, tmp_path)
    assert "speed-up" not in cards
    assert html.escape(f"not comparable, because {reason}, or 17 steps are too few") in page
    assert "0.21 times" not in page
    assert "one process is faster" not in page


def test_one_process_has_no_speed_up_over_one_process(tmp_path):
    source = FakeSource(ranks=1)
    source.advance(40)
    assert "speed-up" not in read_cards(source, tmp_path)


@pytest.mark.parametrize(
    ("all_ranks_s", "words"),
    [
        (0.010, "1.40 times as fast"),
        (0.014, "1.00 times as fast"),
        (0.01403, "1.00 times as fast"),
        (0.0154, "1.10 times slower"),
        (0.050, "3.6 times slower"),
    ],
)
def test_a_verification_names_the_nodes_slower_where_they_are(all_ranks_s: float, words: str):
    times = StepTimes(17, all_ranks_s=all_ranks_s, single_process_s=0.014)
    assert make_verification(times).text().endswith(f"in one process: {words}")


def test_a_verification_of_one_process_compares_no_speed():
    times = StepTimes(17, all_ranks_s=0.012, single_process_s=0.009)
    assert "in one process: 1.33 times slower" in make_verification(times).text()
    text = dataclasses.replace(make_verification(times), world_size=1).text()
    assert "median step 12 ms" in text
    assert "times" not in text


@pytest.mark.parametrize("name", ["loss", "val_loss", "error", "rmse", "perplexity", "word error", "kl"])
def test_losses_and_errors_are_better_when_lower(name):
    assert is_better_lower(name, {})


@pytest.mark.parametrize("name", ["accuracy", "f1", "auc", "reward", "weekly"])
def test_other_metrics_are_better_when_higher(name):
    assert not is_better_lower(name, {})


def test_values_that_are_not_finite_are_never_the_best():
    source = FakeSource()
    source.history.add(Evaluation(1, 10, {"loss": float("nan")}))
    assert find_best_evaluation(source.history, "loss") is None


def test_long_tables_are_folded_and_short_ones_open(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(10)
    source.event("note", "hello")
    assert "rows</summary>" not in write(source, tmp_path)
    for k in range(30):
        source.event("note", f"event {k}")
    assert "<details><summary>all 31 events</summary>" in write(source, tmp_path)


def test_marked_events_are_seen_without_unfolding(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(10)
    for k in range(30):
        source.event("note", f"event {k}")
    source.event("lost", "node 1 lost at step 10", 1)
    source.event("pause", "paused at step 10")
    page = write(source, tmp_path)
    opened, _, folded = page.split("<h2>Events</h2>")[1].partition("<details>")
    assert "node 1 lost at step 10" in opened
    assert "event 3" not in opened
    assert "node 1 lost at step 10" in folded
    assert '<p class="marks">marks: † node 1 lost · ‖ paused</p>' in page
    assert read_cards(source, tmp_path)["duration"][1].startswith("without pauses; ")


def test_a_report_has_the_length_of_the_pauses_beside_the_duration(tmp_path):
    source = FakeSource(ranks=2, steps=20)
    at = 1_700_000_000.0
    source.history.add(Event(0, "start", "start at step 0", at))
    source.advance(10)
    source.history.add(Event(10, "pause", "paused at step 10", at + 5))
    source.history.add(Event(10, "lr", "learning rate 0.1", at + 100))
    source.history.add(Event(10, "resume", "resume at step 10", at + 371))
    source.advance(2)
    source.history.add(Event(12, "pause", "paused at step 12", at + 372))
    source.history.add(Event(12, "stop", "stopped at step 12", at + 374))
    source.state, source.elapsed_s = State.STOPPED, 60.0
    value, note = read_cards(source, tmp_path)["duration"]
    assert value == "1 min 0 s"
    assert re.fullmatch(r"without 6 min 8 s of pauses; 5\d s of it between the steps", note)
    lead = re.search(r'<p class="lead">.*?</p>', (tmp_path / "run.html").read_text(encoding="utf-8"))
    assert "<br>step 12 of 20, epoch 2 of 2. Written <time>" in lead[0]


def add_events(source: FakeSource, *events: tuple[float, int, str, str]) -> None:
    for seconds, step, kind, text in events:
        source.history.add(Event(step, kind, text, 1_700_000_000.0 + seconds, 1 if kind == "lost" else None))


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (("error", "not finite at step 10; all nodes paused before the update"), "not finite"),
        (("lost", "node 1 lost at step 10: its process has ended"), "lost node"),
        (("error", "a callback failed: ValueError: no"), "error"),
    ],
)
@pytest.mark.parametrize("end", ["resume", "start", "stop"])
def test_a_pause_that_a_failure_caused_counts_with_its_cause(failure, cause, end):
    source = FakeSource(ranks=2, steps=20)
    source.advance(10)
    add_events(source, (0, 0, "start", ""), (20, 10, *failure), (50, 10, "lr", ""), (80, 10, end, ""))
    source.advance(2)
    note = {name: note for name, _, note in iterate_cards(source, None)}["duration"]
    assert note.partition(";")[0] == f"without 1 min 0 s of pauses ({cause})"


def test_a_run_that_a_failure_has_paused_has_a_duration_without_pauses():
    source = FakeSource(ranks=2, steps=20)
    source.advance(10)
    add_events(source, (0, 0, "start", ""), (20, 10, "error", "not finite at step 10"))
    source.state, source.exception = State.PAUSED, ValueError("not finite")
    note = {name: note for name, _, note in iterate_cards(source, None)}["duration"]
    assert note.partition(";")[0] == "without pauses"


def test_failures_that_paused_nothing_are_no_pauses():
    history = FakeSource().history
    lost = Event(10, "lost", "node 1 lost", 20.0, 1)
    for event in (lost, Event(9, "repair", "replaced", 50.0), Event(10, "stop", "stopped", 60.0)):
        history.add(event)
    assert find_pauses(history) == (0.0, False, ())
    history.add(Event(10, "error", "parameters are not equal", 70.0))
    history.add(Event(30, "stop", "stopped at step 30", 80.0))
    assert find_pauses(history) == (0.0, False, ())
    history.add(Event(30, "error", "not finite at step 30", 90.0))
    history.num_inherited_events = len(history.events)
    history.add(Event(30, "resume", "resume at step 30", 5000.0))  # by a run that goes on from a checkpoint
    assert find_pauses(history) == (0.0, False, ())


def test_a_pause_after_a_repair_begins_with_its_own_failure():
    history = FakeSource().history
    for seconds, kind in ((0, "lost"), (30, "repair"), (40, "error"), (45, "lost"), (70, "repair"), (100, "resume")):
        history.add(Event(10, kind, "not finite at step 10" if kind == "error" else "", seconds))
    assert find_pauses(history) == (60.0, False, ("not finite",))


def test_settings_and_model_are_in_the_report_as_typed(tmp_path):
    cluster = dtkit.Cluster.from_transport(FakeTransport(2), device="cpu")
    rows = torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64)
    run = cluster.train(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        rows,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=16,
        steps=4,
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
        start=False,
    )
    assert run.spec.optimizer == "lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"
    run.step(2)
    run.report(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)" in page
    assert "(output.argmax(1) == target).float().mean()" in page
    assert "&lt;lambda&gt;" not in page
    assert "67 parameters." in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert cells[cells.index("Linear") - 1 : cells.index("Linear") + 2] == ["0", "Linear", "40"]
    assert cells[cells.index("model") + 1] == "Sequential, 67 parameters, all trainable"
    assert cells[cells.index("data") + 1] == "(64, 4) float32, target (64,) int64"
    assert "(64, 4) float32, target (64,) int64; 64 samples in an epoch" in repr(run.spec)
    cluster.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((np.zeros((3, 2), "f4"),), "(3, 2) float32"),
        ((torch.zeros(3, 1, dtype=torch.bfloat16), np.zeros((3, 4)), np.zeros(3, "i8")),
         "(3, 1) bfloat16, (3, 4) float64, target (3,) int64"),
        ({"x": np.zeros((3, 2)), "labels": np.zeros(3, bool)}, "x (3, 2) float64, labels (3,) bool"),
        ((MappedFile("rows.npy", "<f4", (9, 2), (8, 4), 0, 72),), "(9, 2) float32"),
        ([1, 2], ""),
    ],
)  # fmt: skip
def test_data_are_described_by_shapes_and_dtypes(data, text):
    assert describe_shapes(data) == text


SMALL = 0.001


def scale(x: float, *, by: float) -> float:
    return x * by


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (scale, "scale"),
        (functools.partial(scale, by=2), "partial(scale, by=2)"),
        (lambda x: x + 1, "lambda x: x + 1"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
        (torch.optim.SGD, "SGD"),
        ({"double": scale}, "{'double': scale}"),
        ((np.zeros(3), np.zeros(3)), "(ndarray of 3, ndarray of 3)"),
        (0.5, "0.5"),
        (object(), "object"),
    ],
)
def test_values_are_described_as_typed(value, text):
    assert describe_value(value) == text


def test_a_lambda_over_several_lines_is_one_line():
    function = lambda x: (  # noqa: E731 - a lambda is described
        x + 1
    )
    assert describe_value(function) == "lambda x: x + 1"


def test_a_lambda_has_the_values_that_it_reads_from_outside():
    rate, model = 0.1, nn.Linear(1, 1)
    assert describe_value(lambda p: (p, rate, model)) == "lambda p: (p, rate, model), where rate=0.1"
    assert describe_value(lambda p: (p, SMALL, np.e)) == "lambda p: (p, SMALL, np.e), where SMALL=0.001"


def test_a_lambda_without_source_is_named_as_one():
    assert describe_value(eval("lambda x: x + 1")) == "a lambda"
    assert describe_value(eval("lambda p: torch.optim.Adam(p, lr=1e-3)")) == "lambda p: torch.optim.Adam(...)"
    assert describe_value(eval("lambda p: abs(p) + max(p)")) == "a lambda"


def test_a_deep_model_is_cut_where_its_layers_fit():
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))  # noqa: E731 - short
    small, large = nn.Sequential(block(), block()), nn.Sequential(*[block() for _ in range(40)])
    assert [layer.name for layer in summarize_model(small).layers] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    summary = summarize_model(large)
    assert len(summary.layers) == 40 <= MAX_LAYERS
    assert sum(layer.parameters for layer in summary.layers) == summary.parameters == 40 * 12


# -- charts ----------------------------------------------------------------------------------------------


def read_tips(page: str) -> list[list[str]]:
    """Return the texts of each tooltip: position, and then name and value of each series."""
    tips = re.findall(r'<g class="tip">.*?<text[^>]*>(.*?)</text>', page)
    return [[text for text in re.findall(r">([^<>]+)</tspan>", tip) if text != "●"] for tip in tips]


def chart(*series: Series) -> str:
    return draw_chart("Loss", "note", series, format_y=lambda y: f"{y:.3g}")


def test_a_tooltip_names_every_series_at_its_step():
    steps = np.arange(5.0)
    page = chart(Series("node 0", steps, steps, 0), Series("mean", steps, 2 * steps, None))
    assert read_tips(page)[3] == ["step 3", "node 0", "3", "mean", "6"]
    assert page.count('<g class="strip">') == 5
    assert '<ul class="legend">' in page


def test_a_tooltip_leaves_out_a_series_beyond_its_end():
    short, long = np.arange(5.0), np.arange(40.0)
    tips = read_tips(chart(Series("short", short, short, 0), Series("long", long, long, 1)))
    assert tips[4] == ["step 4", "short", "4", "long", "4"]
    assert tips[30] == ["step 30", "long", "30"]


def test_the_legend_hides_the_line_of_each_series():
    steps = np.arange(5.0)
    page = chart(Series("node 0", steps, steps, 0), Series("mean", steps, 2 * steps, None))
    for k in (0, 1):
        assert f'class="toggle{k}" checked' in page
        assert re.search(rf'<path class="series \w+ line{k}"', page)


def test_a_loss_over_decades_has_a_logarithmic_axis_with_several_numbers():
    steps = np.arange(50.0)
    page = draw_chart(
        "Loss", "", [Series("a", steps, 10 ** (-steps / 15), 0)], format_y="{:.3g}".format, may_be_log=True
    )
    numbers = [float(text) for text in re.findall(r'text-anchor="end">([0-9.e-]+)</text>', page)]
    assert "logarithmic" in page
    assert {0.001, 0.01, 0.1} <= set(numbers)


@pytest.mark.parametrize("ratio", [1.02, 1.3, 2, 3.5, 9, 11, 60, 1e4, 1e9])
@pytest.mark.parametrize("low", [0.011, 0.3, 0.97, 7])
def test_a_logarithmic_axis_never_has_a_single_number(low, ratio):
    found = choose_log_ticks(low, low * ratio)
    assert 2 <= len(found) <= 16
    assert all(low <= tick <= low * ratio for tick in found)


def test_a_long_series_is_drawn_from_few_points_without_gaps():
    steps = np.arange(10_000.0)
    values = np.where(steps % 7 == 0, np.nan, 1.0)
    page = chart(Series("all", steps, values, None))
    assert 50 < page.count('<g class="strip">') <= MAX_POINTS
    assert "nan" not in page


def read_heights(page: str) -> tuple[list[float], list[float]]:
    """Return the heights of the points of the line and of the band, in pixels from the top."""
    (line,) = re.findall(r'<path class="series [^"]*" d="([^"]*)"', page)
    (band,) = re.findall(r'<path class="band [^"]*" opacity="[^"]*" d="([^"]*)"', page) or [""]
    return [[float(height) for height in re.findall(r",([\d.]+)", shape)] for shape in (line, band)]


@pytest.mark.parametrize("num_steps", [40, 1000])
def test_steps_without_rows_are_a_gap_in_line_and_band_of_the_report(num_steps):
    steps = np.arange(float(num_steps))
    values = np.where((steps > 0.4 * num_steps) & (steps < 0.6 * num_steps), np.nan, 1 + steps % 2)
    page = chart(Series("node 1", steps, values, 0))
    (line,) = re.findall(r'<path class="series [^"]*" d="([^"]*)"', page)
    assert line.count("M") == 2
    bands = re.findall(r'<path class="band [^"]*" opacity="[^"]*" d="([^"]*)"', page)
    assert [band.count("M") for band in bands] == [2] * (num_steps > MAX_POINTS)
    tips = read_tips(page)
    assert tips[len(tips) // 2][1:] == []  # nothing is known there
    assert "nan" not in page.lower()


def test_a_single_known_step_between_gaps_is_a_dot():
    steps = np.arange(9.0)
    page = chart(Series("node 1", steps, np.array([1, 1, 1, np.nan, 1, np.nan, 1, 1, 1]), 0))
    (line,) = re.findall(r'<path class="series [^"]*" d="([^"]*)"', page)
    assert [part.endswith("h.01") for part in line.split("M")[1:]] == [False, True, False]


def test_merged_steps_have_a_band_to_their_extremes_and_a_note():
    steps, values = np.arange(1000.0), np.ones(1000)
    values[700] = 9.0  # a spike of one step
    page = chart(Series("norm", steps, values, 0))
    line, band = read_heights(page)
    assert min(band) < min(line) - 100
    assert "<small>note, mean and range of 8 steps</small>" in page
    assert "2 (1 to 9)" in [tip[2] for tip in read_tips(page)]
    few = chart(Series("norm", steps[:MAX_POINTS], values[:MAX_POINTS], 0))
    assert "polygon" not in few
    assert "<small>note</small>" in few


def test_evaluations_are_never_averaged():
    steps = np.arange(400.0)
    values = np.where(steps == 201, 0.957, 0.9 + 0.001 * (steps % 7))
    page = chart(Series("accuracy", steps, values, 0, exact=True))
    shown = {float(tip[2]) for tip in read_tips(page)}
    assert shown <= set(np.round(values, 3))
    assert 0.957 in shown
    assert page.count('<g class="strip">') <= MAX_POINTS
    assert "polygon" not in page


def test_the_charts_of_a_report_have_the_extremes_of_its_steps(tmp_path):
    source = FakeSource(ranks=1, steps=2000)
    source.advance(1, loss=2.3)
    source.advance(999, loss=0.5)
    page = write(source, tmp_path)
    (chart_of_loss,) = re.findall(r"<h3>Loss .*?</figure>", page, re.DOTALL)
    assert "mean and range of 8 steps" in chart_of_loss
    assert "(0.500 to 2.30)</tspan>" in chart_of_loss


def test_nodes_are_pale_below_a_solid_mean_as_in_the_live_view(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    page = write(source, tmp_path)
    loss, throughput = (
        re.search(rf"<figure><h3>{title} .*?</figure>", page, re.DOTALL)[0] for title in ("Loss", "Throughput")
    )
    assert re.findall(r'<path class="series ([^"]*) line', loss) == ["s0 part", "s1 part", "all"]
    assert re.findall(r'<path class="series ([^"]*) line', throughput) == ["s0", "s1", "all dashed"]


def test_nothing_to_draw_is_no_chart():
    assert chart(Series("all", np.empty(0), np.empty(0), None)) == ""
    assert chart(Series("all", np.arange(2.0), np.full(2, np.nan), None)) == ""


def test_names_are_escaped():
    assert "<b>" not in chart(Series("<b>", np.arange(2.0), np.arange(2.0), 1))


@pytest.mark.parametrize(("low", "high", "ticks"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3, 3, [3]), (0, 2e-4, 6)])
def test_ticks_are_round_numbers_within_the_limits(low, high, ticks):
    found = choose_ticks(low, high)
    assert found == pytest.approx(ticks) if isinstance(ticks, list) else len(found) in (ticks - 1, ticks)


def test_a_run_without_steps_has_a_report(tmp_path):
    source = FakeSource(ranks=2)
    source.spec = dataclasses.replace(source.spec, model=None)
    assert "No step yet." in write(source, tmp_path)


def test_a_missing_folder_is_told_before_a_report_is_made(tmp_path: Path):
    source = FakeSource(ranks=1)
    with pytest.raises(FileNotFoundError, match=r"no/such does not exist\. Create it"):
        report.write_report(source, tmp_path / "no/such/report.html")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        dtkit.compare(source, source).report(tmp_path / "no/such/report.html")


def test_a_report_has_what_the_live_view_has_of_machines_and_phases(tmp_path):
    source = FakeSource(ranks=2)
    source.slowness = {1: 1.6}
    source.advance(60)
    for name in ("system/CPU (cores)", "system/network cards (MB/s)"):
        source.history.add(ScalarRecord(0, {name: [(step, 0.5, 1.0) for step in range(1, 61, 5)]}))
    text = Path(report.write_report(source, tmp_path / "report.html")).read_text()
    assert "CPU <small>cores, by node</small>" in text
    assert "Network cards <small>MB/s, by node</small>" in text
    nodes = text.partition("Nodes</h2>")[2].partition("</table>")[0]
    assert "316 MB of 8 GB" in nodes.replace("\u00a0", " ")
    phases = text.partition("Where a step's time goes</h2>")[2].partition("</table>")[0]
    assert "▲ node 1" in phases
    assert re.search(r">5\d %<", phases)  # backward, of the slow node
    bars = re.findall(r'<div class="phase (\w+)" style="flex: 0 1 ([\d.]+)%" title="[^"]+ ms, [^"]+ %">', phases)
    assert {name for name, _ in bars} >= {"data", "forward", "backward", "waiting", "communication", "update"}
    assert sum(float(width) for _, width in bars) == pytest.approx(200, abs=1)  # of two nodes


def test_the_losses_of_a_column_have_one_form_in_report_and_comparison(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    source.history.add(Evaluation(20, 100, {"loss": 0.00886}))
    source.history.add(Evaluation(40, 100, {"loss": 2.7e-5}))
    evaluations = write(source, tmp_path).partition("<h2>Evaluations</h2>")[2].partition("</table>")[0]
    assert re.findall(r">(0\.[^<]+)<", evaluations) == ["0.00886", "0.000027"]
    rows = [make_row(name, source.history, "") for name in "ab"]
    rows[0] = dataclasses.replace(rows[0], loss=0.00886, best={"loss": 0.00886})
    rows[1] = dataclasses.replace(rows[1], loss=2.7e-5)
    first, second = make_table(rows).rows
    assert first.count("0.00886") == second.count("0.000027") == 2


def test_a_model_of_one_layer_has_no_empty_table(tmp_path):
    source = FakeSource()
    source.spec = dataclasses.replace(source.spec, model=ModelSummary(84, 84, ()))
    source.advance(5)
    text = Path(report.write_report(source, tmp_path / "report.html")).read_text()
    assert "<h2>Model</h2><p>ConvNet: 84 parameters.</p>" in text
    assert "<tbody></tbody>" not in text


def test_the_best_that_a_card_names_has_a_ring_in_its_chart(tmp_path):
    source = FakeSource(steps=40)
    source.advance(40)
    for step, loss, accuracy in ((10, 0.9, 0.5), (20, 0.4, 0.8), (40, 0.6, 0.9)):
        source.history.add(Evaluation(step, 100, {"loss": loss, "accuracy": accuracy}))
    page = write(source, tmp_path)
    rings = re.findall(r'<g class="best line\d+"><title>([^<]*)</title>', page)
    assert rings == ["lowest 0.400, at step 20", "highest 0.900, at step 40"]
    messages = json.loads(re.findall(r'id="dtk-messages">(.*?)</script>', page)[0])
    assert messages[0]["content"]["head"]["best"] == {"loss": [20, 0.4, "lowest"], "accuracy": [40, 0.9, "highest"]}
    single = FakeSource(steps=40)
    single.advance(40)
    single.history.add(Evaluation(40, 100, {"loss": 0.5}))
    assert '<g class="best' not in write(single, tmp_path)  # there is nothing to choose from


def test_the_charts_of_a_report_have_the_same_steps_at_the_same_place():
    series = [Series("a", np.array([20.0]), np.array([1.0]), 0, exact=True)]
    text = draw_chart("accuracy", "", series, format_y=str, x_range=(0, 40))
    x = float(re.search(r'<circle class="[^"]*" cx="([0-9.]+)"', text)[1])
    assert x == pytest.approx((58 + 560 - 12) / 2, abs=0.1)  # the middle of the axis


def test_the_report_of_a_comparison_leaves_room_beside_a_diverged_run(tmp_path):
    path = dtkit.compare(*make_diverging_pair()).report(tmp_path / "comparison.html")
    text = Path(path).read_text()
    assert "above 7.83 left out" in text
    assert "1e+30" not in re.sub(r"<table.*?</table>", "", text, flags=re.DOTALL)
    assert 'class="series s1 dash1 line1"' in text


def test_the_report_of_a_comparison_has_numbers_that_two_runs_logged(tmp_path):
    text = Path(dtkit.compare(*make_logging_runs()).report(tmp_path / "comparison.html")).read_text()
    assert "<h3>entropy <small>logged, mean over all nodes" in text


def test_the_name_of_an_axis_is_below_the_labels_of_its_ticks():
    page = draw_chart("Loss", "", [Series("mean", np.arange(4.0), np.ones(4), 0)], format_y=str)
    texts = re.findall(r'<text(?: class="name")? x="([\d.]+)" y="([\d.]+)" text-anchor="middle">([^<]+)</text>', page)
    rows = {float(y) for _, y, text in texts if text != "step"}
    (below,) = [float(y) for _, y, text in texts if text == "step"]
    assert [text for _, _, text in texts] == ["0", "1", "2", "3", "step"]
    assert len(rows) == 1
    assert 10 <= below - rows.pop() <= 24
    assert below < float(re.search(r'viewBox="0 0 560 (\d+)"', page)[1])


def test_a_short_run_names_the_steps_of_its_numbers():
    source = FakeSource(ranks=2)
    source.advance(4)
    cards = {name: note for name, _, note in iterate_cards(source, None)}
    assert cards["training loss"] == "mean of the last 4 steps"
    assert cards["throughput"] == "samples/s, all steps but the first; too few for a steady mean: 3 steps"
    brief = FakeSource(ranks=2)
    brief.slowness = {0: 0.1, 1: 0.1}
    brief.advance(30)
    brief.elapsed_s = 0.9  # of which nothing is worth a word but the steps
    note = {name: note for name, _, note in iterate_cards(brief, None)}["throughput"]
    reason = "too short for a steady mean: these steps took"
    assert re.fullmatch(rf"samples/s, all steps but the first; {reason} \d+ ms", note)
    source.advance(40)
    cards = {name: note for name, _, note in iterate_cards(source, None)}
    assert (cards["training loss"], cards["throughput"]) == (
        "mean of the last 20 steps",
        "samples/s, all steps but the first",
    )


def test_tile_report_comparison_and_terminal_have_one_loss():
    source = FakeSource(ranks=2)
    source.advance(30, loss=2.0)
    source.advance(20, loss=0.5)
    source.advance(1, loss=0.9)
    expected = formatting.format_loss((19 * 0.5 + 0.9) / 20)
    tiles = {tile.label: tile for tile in build_tiles(source, compute_run_metrics(source.history, 2))}
    cards = {name: value for name, value, _ in iterate_cards(source, None)}
    row = make_row("run", source.history, "")
    assert {tiles["mean loss"].value, cards["training loss"], formatting.format_loss(row.loss)} == {expected}
    assert tiles["mean loss"].note.startswith("20 steps")
    assert f"loss {expected} (mean of 20 steps); " in run_text.format_run(source)


def test_the_parts_of_a_duration_add_up_and_explain_the_samples_per_second(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(200)
    source.event("done", "done after 200 steps")
    source.state = State.COMPLETED
    in_steps_s = 199 * compute_speed(source.history).step_s
    parts = split_time(source.history, 50.0)
    assert parts.steps_s == pytest.approx(in_steps_s)
    assert sum(parts) == pytest.approx(50.0)
    assert compute_speed(source.history).samples_per_s == pytest.approx(199 * 128 / parts.steps_s)
    source.elapsed_s = 50.0  # most of it between the steps
    cards = read_cards(source, tmp_path)
    value, note = cards["duration"]
    assert value == "50 s"
    assert re.fullmatch(r"\d+ s of it between the steps", note)  # it was neither evaluated nor saved
    source.history.add(Evaluation(100, 1, {"loss": 1.0}))
    assert read_cards(source, tmp_path)["duration"][1] == f"{note} (validation)"
    source.event("save", "checkpoint at step 100")
    assert read_cards(source, tmp_path)["duration"][1] == f"{note} (validation, saving)"
    overall = formatting.format_rate(199 * 128 / (parts.steps_s + parts.between_s))
    assert cards["throughput"][1] == f"samples/s, all steps but the first, {overall} with the time between them"
    assert f"50 s elapsed, {note} (validation, saving)" in run_text.format_run(source)  # the words of the card
    row = make_row("a", source.history, "", (200, 50.0))
    assert row.steps_s == parts.steps_s
    columns = make_table([row]).header
    assert list(columns[-3:]) == ["samples/s", "time in steps", "duration"]


def test_the_rate_overall_is_over_the_time_that_the_duration_names():
    """A card had 298 ms between the steps, and the rate beside it was over 129 ms: what engines had measured."""
    source = FakeSource(ranks=2)
    source.advance(72)
    source.history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}waiting": [(30, 2.0, 1.0)]}))
    source.event("done", "done after 72 steps")
    source.state, source.elapsed_s = State.COMPLETED, 12.0
    parts = split_time(source.history, 12.0)
    overall = formatting.format_rate(71 * 128 / (parts.steps_s + parts.between_s))
    cards = {label: note for label, _, note in iterate_cards(source, None)}
    assert cards["throughput"] == f"samples/s, all steps but the first, {overall} with the time between them"
    assert cards["duration"] == f"{formatting.format_duration(parts.between_s)} of it between the steps"
    assert next(build_tiles(source, compute_run_metrics(source.history, 2))).note == f"samples/s, {overall} overall"
    assert f"in steps, {overall} with the time between them" in run_text.format_run(source)


def test_no_rate_is_over_time_that_no_duration_names():
    assert TimeParts(0.15, 0.0, 0.09).share_between == 0  # too short to be told apart from the whole
    assert TimeParts(0.15, 9.0, 0.3).share_between == 0  # next to a long first step
    assert TimeParts(0.15, 0.0, 0.3).share_between == pytest.approx(2 / 3)


def test_a_band_on_a_logarithmic_axis_ends_at_the_least_positive_value():
    steps, mean = np.arange(6.0), np.array([100.0, 40, 10, 4, 1, 0.6])
    low = np.array([90.0, 30, 0, 3, 0.5, 0.5])
    page = draw_chart(
        "Loss", "", [Series("mean", steps, mean, None, low=low, high=2 * mean, merged=2)],
        format_y=lambda y: f"{y:.3g}", may_be_log=True,
    )  # fmt: skip
    assert "logarithmic" in page
    line, band = read_heights(page)
    assert max(band) == max(band[6:8])  # the edge at 0 is as high as the smallest one
    assert max(band) < 240 - 44  # and above the bottom of the chart
    assert max(line) > 0.9 * max(band)  # which is no further down
    assert "10 (0 to 20)" in [tip[2] for tip in read_tips(page)]


def test_a_report_has_a_rate_that_never_changes_in_a_line(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(20)
    page = write(source, tmp_path)
    assert '<p class="marks">learning rate 0.1 throughout</p>' in page
    assert "<h3>Learning rate" not in page
    source.lr = 0.01
    source.advance(20)
    page = write(source, tmp_path)
    assert "throughout</p>" not in page
    assert "<h3>Learning rate" in page


def test_a_learning_rate_has_one_form_in_the_chart_the_table_and_the_settings(tmp_path):
    source = FakeSource(ranks=2)
    source.lr = 5e-4
    source.advance(20)
    source.lr = 5e-5
    source.advance(20)
    report.write_report(source, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "0.00005 in the last step" in page
    assert ">0.00005</td>" in page  # in the table of rates
    assert not re.search(r">[^<{]*\b5e-0?5\b[^<{]*<", page.partition("<script")[0])
    assert re.search(r"Written <time>[-\d: ]+</time>", page)
