"""dtkit.compare: several runs as a figure over bytes and steps, a table, and text."""

import base64
import dataclasses
import functools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch import nn

import dtkit
from dtkit._util import formatting
from dtkit.dashboard.compare import Comparison
from dtkit.dashboard.comparison_frame import read_numbers
from dtkit.dashboard.figures.comparison_figure import draw_comparison_charts, draw_comparison_legend
from dtkit.dashboard.line_samples import format_notebook_sample
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.summary import comparison as comparison_summary
from dtkit.dashboard.summary.function_text import read_function, read_optimizer
from dtkit.dashboard.summary.run_lines import choose_dash
from dtkit.dashboard.summary.source_differences import tell_sources_apart
from dtkit.dashboard.summary.spec_differences import list_differences
from dtkit.dashboard.text import comparison_text
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.speed import compute_speed, read_step_ends
from dtkit.testing.fake_transport import FakeTransport
from dtkit.training.function_sources import read_sources
from dtkit.training.settings import describe_value
from dtkit.types import Evaluation, RunSpec, State
from tests.support.comparison_sources import make_diverging_pair, make_logging_runs, make_source, make_wavering_pair
from tests.support.fake_source import FakeSource
from tests.support.report_page import remove_own_scripts
from tests.support.small import train
from tests.support.verification import make_verification


def test_the_table_agrees_with_the_histories():
    plain, eighth = make_source(), make_source("ParameterAveraging(every=8)", every=8)
    comparison = dtkit.compare([plain, eighth])
    first, second = comparison.rows
    assert (first.label, first.nodes, first.steps) == ("DataParallel()", 4, 80)
    assert first.sent_bytes == 80 * 400_000
    assert second.sent_bytes == first.sent_bytes / 8
    assert second.bytes_per_step == 50_000
    totals = plain.history.totals()
    assert first.seconds == pytest.approx(plain.status.elapsed_s)
    assert first.samples_per_s == pytest.approx(totals["samples"][1:].sum() / totals["step_s"][1:].sum(), rel=1e-3)
    assert first.loss == pytest.approx(totals["loss"][-20:].mean())


@pytest.mark.parametrize(
    ("losses", "bold"),
    [
        ((1.0, 1.0 + 5e-7), []),
        ((1.0, 1.0), []),
        ((1.0, 1.0 + 1e-5), []),
        ((1.0, 1.01), [0]),
        ((2.0, 1.552, 1.5521), [1, 2]),
        ((2.0, 1.0, 1.0 + 5e-7), [1, 2]),
        ((2.0, float("nan"), 1.0), [2]),
        ((1.0, float("nan")), []),
    ],
)
def test_losses_that_differ_by_rounding_are_all_bold_or_none(losses, bold):
    (row,) = dtkit.compare([make_source()]).rows
    rows = [dataclasses.replace(row, label=f"run {k}", loss=loss) for k, loss in enumerate(losses)]
    table = comparison_text.make_table(rows)
    column = list(table.header).index("final training loss")
    assert table.bold_cells == [(row, column) for row in bold]


def test_the_text_of_a_comparison_is_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    header, *lines = (
        repr(dtkit.compare([make_source(), make_source("ParameterAveraging(every=8)", every=8)]))
        .partition("\n\n")[0]
        .splitlines()
    )
    columns = [
        name for name in comparison_text.NUMBER_COLUMNS if name not in ("nodes", "time in steps")
    ]  # which are equal
    assert re.split(" {2,}", header) == ["run", "state", *columns]
    assert lines[0].startswith("DataParallel()  ")
    assert "32 MB" in lines[0]
    assert "4 MB" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_the_html_of_a_comparison_is_a_figure_and_an_escaped_table():
    comparison = dtkit.compare([make_source(), make_source("Odd('<script>')")])
    page = comparison._repr_html_()
    assert '<img src="data:image/png;base64,' in page
    assert page.count("<tr>") == 3
    assert "<script>" not in page
    assert "Odd(<wbr>&#x27;&lt;script&gt;&#x27;)" in page
    numbers = re.findall(r'<td style="text-align: right; white-space: nowrap;', page)
    assert len(numbers) == 2 * (
        len(comparison_text.NUMBER_COLUMNS) - 4
    )  # equal bytes and nodes are hidden, and time in steps
    assert 'alt="Loss against steps and time. 1: DataParallel(): loss ' in page
    assert comparison._repr_png_().startswith(b"\x89PNG")


def test_bytes_keep_enough_digits_to_compare_ratios():
    whole, eighth = dtkit.compare([make_source(sent=463_000), make_source("E()", every=8, sent=463_000)]).rows
    assert comparison_text.format_numbers(whole)[3:5] == ("37 MB", "463 kB")
    assert comparison_text.format_numbers(eighth)[3:5] == ("4.63 MB", "57.9 kB")


def test_to_pandas_has_a_row_for_each_run():
    pytest.importorskip("pandas")
    runs = [make_source(), make_source("B()")]
    for run, rate in zip(runs, ("0.1", "0.02"), strict=True):
        run.spec = dataclasses.replace(run.spec, settings=(("lr", rate),))
    frame = dtkit.compare(runs, labels=["A", "B()"]).to_pandas()
    assert list(frame.index) == ["A", "B()"]
    assert list(frame["lr"]) == [0.1, 0.02]
    assert not {"directions", "basis"} & set(frame.columns)
    assert frame.loc["B()", "sent per node"] == 80 * 400_000


def test_numbers_of_a_data_frame_are_in_the_columns_of_the_table():
    pytest.importorskip("pandas")
    comparison = dtkit.compare(*make_scored_runs()[:2], make_source("c()", sent=100, ranks=2), sort_by="accuracy")
    table, frame = comparison_text.make_table(comparison.rows), comparison.to_pandas()
    assert list(frame.index) == [label for label, *_ in table.rows]
    numbers = [name for name in table.header if name not in table.text_columns]
    assert {"nodes", "per step", "final training loss", "best validation accuracy", "samples/s"} <= set(numbers)
    for (row, column), value in table.values.items():
        assert frame[table.header[column]].iloc[row] == value
    assert set(frame.columns) - set(numbers) == {
        "run", "strategy", "state", "failure", "cause", "verified", "time in steps",
    } | {name for name, *_ in comparison.differences}  # fmt: skip
    assert frame["steps"].dtype.kind == frame["nodes"].dtype.kind == "i"


def test_settings_of_a_data_frame_are_numbers_that_can_be_grouped():
    pytest.importorskip("pandas")
    settings = [{"lr": lr, "seed": seed, "batch_size": 64, "steps": 1440} for lr in (0.1, 0.02) for seed in (0, 1)]
    settings[-1] |= {"batch_size": 1440, "steps": 7, "strategy": f"{'long ' * 20}A()"}
    runs = with_settings(*settings)
    for k, run in enumerate(runs):
        run.lr = settings[k]["lr"]
        run.advance(20, loss=k + 1.0)
    frame = dtkit.compare(runs, sort_by="loss", labels=["0.1", "0.1 again", "0.02", "0.02 again"]).to_pandas()
    assert frame["run"].tolist() == [1, 2, 3, 4]
    assert {name: frame[name].dtype.kind for name in ("first learning rate", "seed", "batch_size", "epochs")} == {
        "first learning rate": "f", "seed": "i", "batch_size": "i", "epochs": "f",
    }  # fmt: skip
    grouped = frame.groupby("first learning rate")["final training loss"].agg(["mean", "std"])
    assert grouped.loc[0.1, "mean"] == pytest.approx(1.5)
    assert not [name for name in frame if "(setting)" in name]
    assert frame.columns.is_unique
    assert frame["steps"].tolist() == [20] * 4  # those that were taken
    assert frame["strategy"].tolist()[-1] == f"{'long ' * 20}A()"  # whole, as in the settings


def test_a_setting_that_labels_show_is_in_the_data_frame():
    pytest.importorskip("pandas")
    runs = with_settings({"lr": 0.1}, {"lr": 0.02})
    frame = dtkit.compare(*runs, labels=["0.1", "0.02"]).to_pandas()
    assert frame["learning rate"].tolist() == [0.1, 0.02]
    history = runs[0].history
    assert np.isnan(dtkit.compare(*with_settings({"seed": 1}, {"seed": 2}), history).to_pandas()["seed"].iloc[-1])


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["1,440", "12"], [1440, 12]),
        (["1e-3", "0.5"], [0.001, 0.5]),
        (["1,2", "3"], ["1,2", "3"]),
        (["default", "1.0"], ["default", "1.0"]),
        (["-3", "1,000.5"], [-3.0, 1000.5]),
    ],
)
def test_texts_of_settings_are_numbers_where_all_are(texts, values):
    assert read_numbers(texts) == values


def test_lines_differ_by_more_than_color():
    comparison = dtkit.compare([make_source(f"S{k}()", seed=k) for k in range(8)])
    for ax in comparison.figure().axes:
        lines = ax.get_lines()
        assert len({(line._unscaled_dash_pattern[1], line.get_color()) for line in lines}) == 8
        assert len({line._unscaled_dash_pattern[1] for line in lines[:4]}) == 4
        assert {line.get_marker() for line in lines} == {""}  # as in the live view


def test_equal_lines_take_turns_so_that_none_hides_another(tmp_path):
    """Runs 1 and 3 were one line in neither of their colors."""
    comparison = dtkit.compare(make_source("A()"), make_source("B()", seed=1), make_source("C()"))
    for figure in [comparison.figure(), *draw_comparison_charts(comparison.labels, comparison.histories)]:
        (_, one), (_, own), (_, other) = (line._unscaled_dash_pattern for line in figure.axes[0].get_lines())
        assert list(one) == list(other) == [6, 6]
        assert list(own) != [6, 6]
    comparison.report(tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert re.findall(r'<path class="series s(\d)[^"]*" style="stroke-dasharray: 9 9; stroke-dashoffset: (\d+)', page)[
        :2
    ] == [("0", "18"), ("2", "9")]


def test_losses_are_drawn_against_steps_and_bytes():
    one, other = make_source(steps=40), make_source("ParameterAveraging(every=8)", every=8, steps=40)
    steps, _, sent = dtkit.compare([one, other]).figure().axes
    for by_step, by_bytes in zip(steps.get_lines(), sent.get_lines(), strict=True):
        np.testing.assert_array_equal(by_step.get_ydata(), by_bytes.get_ydata())
    np.testing.assert_array_equal(sent.get_lines()[0].get_xdata(), 400_000 * np.arange(1, 41))
    np.testing.assert_array_equal(sent.get_lines()[1].get_xdata(), 400_000 * (np.arange(1, 41) // 8))
    _, losses = one.history.loss()
    np.testing.assert_allclose(steps.get_lines()[0].get_ydata(), losses, rtol=1e-6)
    assert sent.get_xscale() == "linear"


def test_very_different_bytes_get_a_logarithmic_axis():
    figure = dtkit.compare([make_source(), make_source("Tiny()", sent=4_000)]).figure()
    assert figure.axes[2].get_xscale() == "log"
    figure.canvas.draw()


def test_a_steeply_falling_loss_gets_a_logarithmic_axis():
    steep = FakeSource(ranks=2)
    for loss in (10.0, 1.0, 0.1):
        steep.advance(5, loss=loss)
    figure = dtkit.compare([steep]).figure()
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log"]
    figure.canvas.draw()


def test_a_long_comparison_is_drawn_from_few_points():
    runs = [make_source(steps=5000), make_source("B()", steps=5000, sent=200_000)]
    steps, _, sent = dtkit.compare(runs).figure().axes
    assert len(steps.get_lines()[0].get_xdata()) <= 256
    assert sent.get_lines()[0].get_xdata()[-1] == 5000 * 400_000


def test_runs_without_steps_or_bytes_are_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    empty, alone = FakeSource(name="Fresh"), make_source(ranks=1, sent=0)
    for runs in ([empty], [alone], [empty, alone], [empty, make_source("B()")]):
        comparison = dtkit.compare(runs)
        assert comparison._repr_png_().startswith(b"\x89PNG")
        assert len(repr(comparison).partition("\n\n")[0].splitlines()) == 1 + len(runs)
    texts = {text.get_text() for ax in dtkit.compare([empty]).figure().axes for text in ax.texts}
    assert texts == {"no step yet"}


def test_a_comparison_reads_its_runs_when_it_is_shown():
    going = make_source(steps=10)
    comparison = dtkit.compare([going])
    going.advance(30)
    assert comparison.rows[0].steps == 40


def test_saved_histories_are_compared(tmp_path):
    source = make_source(steps=10)
    source.history.to_jsonl(tmp_path / "run.jsonl")
    back = dtkit.History.from_jsonl(tmp_path / "run.jsonl")
    before, after = dtkit.compare([source, back]).rows
    assert (after.steps, after.sent_bytes, after.loss) == (before.steps, before.sent_bytes, before.loss)
    assert dtkit.compare([back]).rows[0].label == "history"


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (lambda: [make_source("A()"), make_source("B()")], ["A()", "B()"]),
        (lambda: [make_source(name="One"), make_source(name="Other")], ["One", "Other"]),
        (
            lambda: [make_source("A()"), make_source("A()", name="X"), make_source("B()")],
            ["ConvNet A()", "X", "ConvNet B()"],
        ),
        (
            lambda: [
                make_source("A()"),
                make_source("A()", name="X"),
                make_source("A()"),
                make_source("A()", name="Y"),
            ],
            ["ConvNet (1)", "X", "ConvNet (2)", "Y"],
        ),
        (lambda: [make_source("A()"), make_source("A()")], ["ConvNet (1)", "ConvNet (2)"]),
        (lambda: [make_source("A()"), make_source("B()").history], ["ConvNet", "history"]),
        (lambda: [make_source("B()").history] * 2, ["history (1)", "history (2)"]),
    ],
)
def test_default_labels_are_what_differs_between_runs(runs, labels):
    assert list(dtkit.compare(runs()).labels) == labels


def with_settings(*settings, name="ConvNet"):
    """Return a run for each mapping of settings: fields of its spec, `lr` as typed, and other arguments."""
    runs = [FakeSource(name=name) for _ in settings]
    for run, values in zip(runs, settings, strict=True):
        rest = dict(values)
        optimizer = f"lambda p: torch.optim.{rest.pop('optimizer', 'SGD')}(p, lr={rest.pop('lr', 0.1)})"
        fields = {key: rest.pop(key) for key in list(rest) if key in RunSpec.__dataclass_fields__}
        run.spec = dataclasses.replace(run.spec, optimizer=optimizer, settings=tuple(rest.items()), **fields)
    return runs


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ([{"lr": 0.1}, {"lr": 0.01}, {"lr": 30}], ["lr 0.1", "lr 0.01", "lr 30"]),
        ([{"lr": 0.1, "seed": 0}, {"lr": 0.01, "seed": 1}], ["lr 0.1", "lr 0.01"]),
        ([{"lr": 12.0}, {"lr": "1e-2"}, {"lr": "rate"}], ["lr 12", "lr 0.01", "lr rate"]),  # as of a step
        (
            [{"batch_size": 64}, {"batch_size": 64, "lr": 0.3}, {"batch_size": 32}],
            ["batch 64, lr 0.1", "batch 64, lr 0.3", "batch 32, lr 0.1"],
        ),
        ([{"seed": 0}, {"seed": 1}], ["seed 0", "seed 1"]),
        ([{"batch_size": 64, "steps": 9}, {"batch_size": 32, "steps": 18}], ["batch 64", "batch 32"]),
        ([{}, {"clip_grad_norm": "1.0"}], ["clip_grad_norm default", "clip_grad_norm 1.0"]),
        ([{}, {"optimizer": "Adam"}], ["SGD", "Adam"]),
        ([{}, {"sampler": "a" * 40}], ["ConvNet (1)", "ConvNet (2)"]),  # too long
        ([{}, {"lr": 0.3}, {"lr": 0.3}], ["lr 0.1", "lr 0.3 (1)", "lr 0.3 (2)"]),  # two are the same
    ],
)
def test_runs_of_one_name_are_labeled_by_the_settings_that_tell_them_apart(settings, labels):
    comparison = dtkit.compare(with_settings(*settings))
    assert list(comparison.labels) == labels
    head = ComparisonMessageBuilder(comparison).build_snapshot().content["head"]
    if not any(label.endswith("(1)") for label in labels):  # equal names have no number there
        assert head["runs"] == head["names"] == [row[0] for row in head["table"]["rows"]] == labels


def test_a_name_that_only_some_runs_share_stays_before_their_setting():
    runs = [*with_settings({"lr": 0.1}, {"lr": 0.3}), *with_settings({"lr": 0.1}, name="Other")]
    assert dtkit.compare(runs).labels == ("ConvNet, lr 0.1", "ConvNet, lr 0.3", "Other")
    assert dtkit.compare(runs, labels=["a", "b", "c"]).labels == ("a", "b", "c")


def test_a_label_has_the_rate_as_typed_while_a_run_has_no_step():
    runs = with_settings({"lr": 0.1}, {"lr": 0.01})
    runs[0].advance(1)
    assert dtkit.compare(runs).labels == ("lr 0.1", "lr 0.01")


def test_strategies_are_named_once_in_a_comparison():
    text = repr(dtkit.compare([make_source(), make_source("ParameterAveraging(every=8)", every=8)], labels=["a", "b"]))
    assert text.count("ParameterAveraging(every=8)") == 1
    assert text.splitlines()[0].split()[:3] == ["run", "state", "steps"]


def test_runs_may_be_arguments():
    comparison = dtkit.compare(make_source(), make_source(), make_source().history, labels=["a", "b", "c"])
    assert list(comparison.labels) == ["a", "b", "c"]
    assert len(comparison.rows) == 3


def test_labels_may_be_given():
    assert list(dtkit.compare([make_source(), make_source()], labels=["a", "b"]).labels) == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: dtkit.compare([]), ValueError, r"compare\(\[\]\).*at least one run"),
        (dtkit.compare, ValueError, r"nothing to compare; give at least one run"),
        (lambda: dtkit.compare(FakeSource()), TypeError, r"call compare\(run, other\)"),
        (lambda: dtkit.compare(FakeSource().history), TypeError, r"a History.*call compare\(run, other\)"),
        (lambda: dtkit.compare([FakeSource()], FakeSource()), TypeError, "a list next to other arguments"),
        (lambda: dtkit.compare([FakeSource()], ["a"]), TypeError, r"labels need their name.*labels=\['a'\]"),
        (lambda: dtkit.compare(FakeSource(), FakeSource(), ["a", "b"]), TypeError, r"labels=\['a', 'b'\]"),
        (lambda: dtkit.compare(FakeSource(), 3), TypeError, "item 1 is 3;"),
        (lambda: dtkit.compare("run.jsonl"), TypeError, r"'run.jsonl'"),
        (lambda: dtkit.compare(["run.jsonl"]), TypeError, r"item 0 is 'run.jsonl'.*from_jsonl"),
        (lambda: dtkit.compare([FakeSource(), 3]), TypeError, "item 1 is 3;"),
        (lambda: dtkit.compare(3), TypeError, r"compare\(3\): it takes runs"),
        (lambda: dtkit.compare([FakeSource()], labels=["a", "b"]), ValueError, "are 2 for 1 run"),
        (lambda: dtkit.compare([FakeSource()] * 2, labels=["a", "a"]), ValueError, "the same label"),
        (lambda: dtkit.compare([FakeSource()], labels="a"), TypeError, "a list with a name for each"),
        (lambda: dtkit.compare([FakeSource()], labels=[1]), TypeError, "a list with a name for each"),
    ],
)
def test_invalid_arguments_of_compare_are_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_compare_loads_no_matplotlib():
    code = "import dtkit, sys; dtkit.compare; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_equal_names_are_numbered_once_where_the_view_numbers_the_runs():
    runs = [make_source(), make_source()]
    runs[1].state, runs[1].exception = State.FAILED, ValueError("no such rows")
    head = ComparisonMessageBuilder(dtkit.compare(runs)).build_snapshot().content["head"]
    assert head["runs"] == ["ConvNet", "ConvNet"]
    assert [row[0] for row in head["table"]["rows"]] == ["ConvNet", "ConvNet"]
    assert head["ends"][0].startswith("2: ConvNet failed: ")
    assert dtkit.compare(runs).labels == ("ConvNet (1)", "ConvNet (2)")  # where nothing else numbers them


def test_the_peak_of_a_run_that_came_back_is_shown_beside_one_that_did_not():
    came_back, lost = np.array([2.3, 0.02, 50.0, 2.3, 0.5]), np.array([2.3, 6e22, np.inf])
    assert comparison_summary.find_loss_cap([came_back]) is None
    assert comparison_summary.find_loss_cap([came_back, lost]) == 50.0
    assert comparison_summary.find_loss_cap([np.array([2.3, 1e9, 0.5]), lost]) == pytest.approx(6.9)


def test_a_run_that_diverged_leaves_the_charts_of_losses_at_one_step(tmp_path):
    good, diverged = make_wavering_pair()
    assert comparison_summary.find_exits([good.history, diverged.history]) == [None, 11]
    comparison = dtkit.compare(good, diverged)
    head = ComparisonMessageBuilder(comparison).build_snapshot().content["head"]
    assert head["left"] == ["", "diverged at step 11"]
    by_step, by_time, accuracy, validation = comparison.figure().axes
    ends = []
    for ax in (by_step, by_time, validation, accuracy):
        x, y = ax.get_lines()[1].get_data()
        ends.append(float(np.asarray(x)[np.isfinite(np.asarray(y, float))].max()))
    assert ends[0] == pytest.approx(11, abs=2)  # a bucket
    assert ends[1] < 0.1 * float(by_time.get_lines()[0].get_xdata().max())
    assert [text.get_text().strip() for text in by_step.texts] == ["diverged at step 11"]
    assert ends[2:] == [100, 400]  # the first evaluation after it; an accuracy does not diverge
    comparison.report(tmp_path / "runs.html")


def test_a_run_that_came_back_from_a_peak_is_drawn_to_its_end():
    good, diverged = make_wavering_pair()
    came_back = FakeSource(steps=400, name="back")
    came_back.advance(20)
    came_back.advance(1, loss=1e6)
    came_back.advance(379, loss=0.5)
    assert comparison_summary.find_exits([good.history, came_back.history, diverged.history]) == [None, None, 11]


@pytest.mark.parametrize(("name", "best"), [("accuracy", [1]), ("rmse", [0]), ("confidence", [])])
def test_a_metric_has_a_best_only_where_its_name_says_what_is_better(name: str, best: list[int]):
    """The dashboard had none for "confidence", and the comparison had its highest in bold."""
    low, high = make_source(), make_source()
    for source, value in ((low, 0.2), (high, 0.9)):
        source.history.add(Evaluation(source.step, 10, {name: value}))
    table = comparison_text.make_table(dtkit.compare(low, high).rows)
    column = list(table.header).index(f"best validation {name}")
    assert [row for row, bold in table.bold_cells if bold == column] == best


def test_the_notes_of_a_table_are_those_that_apply():
    first, second = dtkit.compare(make_source(name="a"), make_source(name="b")).rows
    *_, line = comparison_text.list_table_notes(
        [first, dataclasses.replace(second, loss=first.loss, samples_per_s=first.samples_per_s)]
    )
    notes = line.split(" · ")
    assert not any(note.startswith(("bold", "sent", "verified", "best validation")) for note in notes)
    assert "final training loss: mean of the last 20 steps" in notes
    *_, line = comparison_text.list_table_notes([first, dataclasses.replace(second, loss=first.loss / 2)])
    assert line.endswith(" · bold: the best · below a number: the difference from the first run")


def with_metrics(strategy: str, accuracies, **options):
    source = make_source(strategy, **options)
    for k, accuracy in enumerate(accuracies):
        source.history.add(Evaluation(20 * (k + 1), 100, {"loss": 1 - accuracy, "accuracy": accuracy}))
    return source


def test_the_table_names_training_and_validation_and_explains_only_its_columns():
    equal_bytes = [with_metrics("DataParallel()", [0.5, 0.9]), with_metrics("Sharded()", [0.6, 0.7])]
    page = dtkit.compare(equal_bytes)._repr_html_()
    assert re.findall(r"<th[^>]*>([^<]*loss)</th>", page) == ["final training loss", "best validation loss"]
    (note,) = re.findall("<small>(.*?)</small>", page)
    assert "best validation: the best of a run's evaluations" in note
    assert "bytes" not in note
    without = dtkit.compare([make_source("A()"), make_source("B()", every=8)])._repr_html_()
    (note,) = re.findall("<small>(.*?)</small>", without)
    assert "bytes that one node sent" in note
    assert "validation" not in note


def with_losses(history: History, losses: list[float]) -> np.ndarray:
    """Return further rows of one rank with these losses."""
    rows = np.repeat(history.rows(len(history) - 1), len(losses))
    rows["step"] += 1 + np.arange(len(losses))
    rows["loss"] = losses
    return rows


def test_a_learning_rate_that_a_function_hides_is_compared():
    runs = [FakeSource(ranks=1) for _ in range(3)]
    runs[1].lr = 0.02
    for run in runs[:2]:
        run.advance(3)
    assert dtkit.compare(runs).differences == [("first learning rate", "0.1", "0.02", "—")]
    assert dtkit.compare([runs[0], runs[0]]).differences == []


@pytest.mark.parametrize(
    ("optimizers", "shown"),
    [
        (
            [
                "lambda params, lr=0.1: torch.optim.SGD(params, lr=lr)",
                "lambda params, lr=0.02: torch.optim.SGD(params, lr=lr)",
            ],
            [],
        ),
        (["lambda params: torch.optim.SGD(params, lr=lr)"] * 2, []),
        (["partial(SGD, lr=0.1)", "partial(SGD, lr=0.02)"], []),
        (
            ["lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)", "lambda m: AdamW(m.parameters(), lr=0.02)"],
            [("optimizer", "SGD(momentum=0.9)", "AdamW")],
        ),
        (
            ["lambda p: SGD([{'params': p}], lr=0.1)", "lambda p: SGD(p, **options)"],
            [("optimizer", "SGD([{'params': p}], lr=0.1)", "SGD(p, **options)")],
        ),
    ],
    ids=["defaults", "closures", "partial", "classes", "unreadable"],
)
def test_a_sweep_of_learning_rates_is_told_in_one_form(optimizers, shown):
    runs = [FakeSource(ranks=1) for _ in range(2)]
    runs[1].lr = 0.02
    for run, optimizer in zip(runs, optimizers, strict=True):
        settings = (("optimizer", optimizer),)  # as `train` has it
        run.spec = dataclasses.replace(run.spec, optimizer=optimizer, settings=settings)
        run.advance(3)
    assert dtkit.compare(runs).differences == [*shown, ("first learning rate", "0.1", "0.02")]


def test_typed_learning_rates_are_compared_where_the_first_ones_are_equal():
    runs = [FakeSource(ranks=1) for _ in range(2)]
    for run, rate in zip(runs, (0.1, 0.02), strict=True):
        optimizer = f"lambda params, lr={rate}: torch.optim.SGD(params, lr=lr)"
        run.spec = dataclasses.replace(run.spec, optimizer=optimizer)
    assert dtkit.compare(runs).differences == [("learning rate", "0.1", "0.02")]


def test_rates_set_by_hand_are_compared_and_a_divergence_is_no_setting():
    quiet, steered, lost = (FakeSource(ranks=1) for _ in range(3))
    for run in (quiet, steered, lost):
        run.advance(40)
    for lr in (0.05, 0.02, 0.0, 0.01):
        steered.event("lr", f"learning rate {lr:g}")
    lost.history.append(with_losses(lost.history, [float("nan")] * 3))
    comparison = dtkit.compare(quiet, steered, lost)
    assert comparison.differences == [
        ("learning rate set by hand", "—", "1 more, 0.02 from step 40, 0 from step 40, 0.01 from step 40", "—"),
    ]
    assert f"{comparison.labels[2]} diverged: the loss is NaN since step 41: " in repr(comparison)


def test_metrics_and_differing_settings_are_compared():
    one = with_metrics("DataParallel()", [0.5, 0.9, 0.8])
    other = with_metrics("Sharded()", [0.6, 0.7, 0.75])
    one.spec = dataclasses.replace(one.spec, settings=(("lr_scheduler", "cosine"),))
    comparison = dtkit.compare([one, other])
    assert comparison.rows[0].best == pytest.approx({"loss": 0.1, "accuracy": 0.9})
    assert comparison.differences == [("lr_scheduler", "cosine", "none")]
    shorter = dataclasses.replace(other.spec, steps=other.spec.steps // 2)
    other.spec, spec = shorter, other.spec
    lengths = [("epochs", "2", "1"), ("steps", "80", "40")]
    assert [row for row in comparison.differences if row[0] in ("epochs", "steps")] == lengths
    other.spec = spec
    named = dtkit.compare([one, other], labels=["a", "b"])
    assert named.differences[0] == ("strategy", "DataParallel()", "Sharded()")
    page = comparison._repr_html_()
    assert "<b>0.900</b>" in page
    assert "<b>0.750</b>" not in page
    titles = [ax.get_title(loc="left") for ax in comparison.figure().axes]
    assert titles == ["Loss against steps", "Loss against time", "Validation accuracy", "Validation loss"]
    assert "lr_scheduler" in repr(comparison)
    assert comparison.to_pandas().loc["Sharded()", "best validation accuracy"] == pytest.approx(0.75)


def list_bold(rows: list[comparison_summary.ComparisonRow]) -> set[str]:
    table = comparison_text.make_table(rows)
    return {table.header[column] for _, column in table.bold_cells}


@pytest.mark.parametrize(
    ("changes", "bold", "line"),
    [
        ({}, {"final training loss", "best validation loss", "best validation accuracy"}, None),
        (
            {"loss": "mse_loss"},
            {"best validation accuracy"},
            "differ in loss function, so there is no best final training loss or validation loss",
        ),
        (
            {"settings": (("validation", "Tensor of 9"),)},
            {"final training loss"},
            "differ in validation data, so there is no best validation",
        ),
        (
            {"samples": 7},
            {"best validation loss", "best validation accuracy"},
            "differ in training data, so there is no best final training loss",
        ),
        (
            {"steps": 9},
            {"final training loss", "best validation loss", "best validation accuracy"},
            "differ in epochs: the best may be the one that trained longest",
        ),
    ],
    ids=["none", "loss", "validation", "rows", "epochs"],
)
def test_no_run_is_the_best_by_numbers_of_different_meaning(changes, bold, line):
    one, other = with_metrics("DataParallel()", [0.5, 0.9]), with_metrics("Sharded()", [0.6, 0.7])
    other.spec = dataclasses.replace(other.spec, **changes)
    comparison = dtkit.compare(one, other)
    first, second = comparison.rows
    assert list_bold([first, dataclasses.replace(second, loss=first.loss / 2)]) - {"samples/s"} == bold
    for text in (repr(comparison), comparison._repr_html_()):
        assert (line or "the runs differ") in text if line else "the runs differ" not in text


def test_few_settings_of_many_runs_are_a_narrow_table():
    runs = [with_metrics(f"DataParallel(bucket_cap_mb={k})", [0.5, 0.9]) for k in range(5)]
    comparison = dtkit.compare(runs, labels=list("abcde"))
    tables = comparison._repr_html_().split("<table")
    assert tables[-1].count("<th ") == 2
    assert tables[-1].index("run") < tables[-1].index("strategy")


def test_a_comparison_is_written_as_one_page(tmp_path):
    runs = [with_metrics("DataParallel()", [0.5, 0.9]), with_metrics("Odd('<script>')", [0.6, 0.7])]
    dtkit.compare([*runs, runs[0].history], labels=["a", "b", "c"]).report(tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|https?://", remove_own_scripts(page))
    headings = re.findall(r"<h3>([^<]*) <small>", page)
    assert headings == [
        "Loss against steps",
        "Loss against time",
        "Throughput",
        "Validation loss",
        "Validation accuracy",
    ]
    assert "<b>0.900</b>" in page
    assert "Settings that differ" in page  # the labels are no strategies


def test_settings_that_all_runs_share_are_listed(tmp_path):
    runs = [with_metrics("DataParallel()", [0.5, 0.9]), with_metrics("Sharded()", [0.6, 0.7])]
    comparison = dtkit.compare(runs, labels=["a", "b"])
    shared = dict(comparison.common)
    assert shared["batch_size"] == str(runs[0].spec.batch_size)
    assert "strategy" not in shared
    comparison.report(tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert re.search(r"Settings that all runs share</h2>\s*<details>.*?>batch_size<", page, re.DOTALL)
    assert dtkit.compare([runs[0], runs[1].history]).common == []  # of which nobody knows the settings


def test_a_comparison_without_steps_is_written(tmp_path):
    dtkit.compare([FakeSource()]).report(tmp_path / "runs.html")
    assert "Comparison of 1 run" in (tmp_path / "runs.html").read_text(encoding="utf-8")


def test_a_run_and_its_history_have_the_same_steps_and_duration(tmp_path):
    engines = FakeTransport(2)
    rows = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = cluster.train(
            nn.Linear(2, 2), rows, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, batch_size=16, steps=40
        )
        run.wait(10)
        run.history.to_jsonl(tmp_path / "history.jsonl")
        kept = dtkit.History.from_jsonl(tmp_path / "history.jsonl")
        first, *others = dtkit.compare(run, run.history, kept).rows
    assert first.steps == run.status.step == 40
    assert {(row.steps, row.seconds) for row in others} == {(first.steps, first.seconds)}


def test_steps_without_a_record_count_as_the_dashboard_counts_them():
    source, history = make_source(steps=40), dtkit.History()
    rows = source.history.rows().copy()
    rows["step"] -= 1  # as engines count
    history.append(rows[(rows["step"] < 10) | (rows["step"] >= 20)])
    assert history.num_steps == 30
    (row,) = dtkit.compare([history]).rows
    assert row.steps == 40


def test_long_names_are_told_apart_by_what_differs():
    start = "resnet50 on imagenet, baseline with cosine warm-up and momentum 0.9,"
    runs = [make_source(name=f"{start} seed {k}", steps=5) for k in range(8)]
    comparison = dtkit.compare(*runs)
    assert comparison.labels == tuple(f"…seed {k}" for k in range(8))
    assert comparison.names == tuple(f"{start} seed {k}" for k in range(8))
    comparison = dtkit.compare(*runs[:2], labels=[f"{start} first of two", f"{start} second of two"])
    assert comparison.labels == ("…0.9, first of two", "…0.9, second of two")


def test_a_run_that_diverged_leaves_room_for_the_others():
    figure = dtkit.compare(*make_diverging_pair()).figure()
    axes = {ax.get_title(loc="left"): ax for ax in figure.axes}
    for name in ("Loss against steps", "Loss against time", "Validation loss"):
        low, high = axes[name].get_ylim()
        good = next(line for line in axes[name].get_lines() if line.get_gid().startswith("good")).get_ydata()
        assert high < 10, name
        assert np.ptp(good) > 0.3 * (high - low), name
        assert "left out" in axes[name].get_xlabel()  # as in the live view
    assert axes["Validation accuracy"].get_xlabel() == "step"


def test_the_html_of_a_comparison_has_room_between_its_parts_and_escapes_metrics():
    runs = [make_source(name="a"), make_source("B()", name="b")]
    for run in runs:
        run.spec = dataclasses.replace(run.spec, settings=(("validation", run.spec.name),))
        run.history.add(Evaluation(80, 100, {"<i>x": 1.0}))
    page = dtkit.compare(runs, labels=["first", "second"])._repr_html_()
    assert re.search(
        r"</small></div><div style='margin-top: [^']+'><table.*</table></div><div style='margin-top:", page
    )
    assert "no best validation &lt;i&gt;x" in page
    assert "<i>" not in page


def test_a_run_that_diverged_before_its_first_validation_leaves_the_axis():
    """Its line began at 300, so the axis had room for it, and none for the runs that learned."""
    good, bad = make_source(name="good"), make_source(name="bad")
    for run, losses in ((good, [0.5, 0.4]), (bad, [300.0, 250.0])):
        for step, loss in zip((40, 80), losses, strict=True):
            run.history.add(Evaluation(step, 100, {"loss": loss}))
    cap = comparison_summary.find_metric_cap([good.history, bad.history], "loss")
    assert cap is not None
    assert cap < 20


def test_losses_that_fall_or_begin_high_have_no_cap():
    assert comparison_summary.find_loss_cap([np.array([1e6, 1.0, 1e-3]), np.array([2.0, 1.0])]) is not None
    assert comparison_summary.find_loss_cap([np.array([500.0, 1.0, 1e-6]), np.array([2.0, 6.0])]) is None
    assert comparison_summary.find_loss_cap([np.array([np.nan, -1.0]), np.empty(0)]) is None
    assert comparison_summary.find_loss_cap([np.array([2.0, 1e30, np.inf, np.nan])]) == pytest.approx(6.0)


def test_numbers_that_two_runs_logged_have_a_panel():
    axes = {ax.get_title(loc="left"): ax for ax in dtkit.compare(*make_logging_runs()).figure().axes}
    assert list(axes) == ["Loss against steps", "Loss against time", "entropy"]
    first, second = (line for line in axes["entropy"].get_lines() if len(line.get_xdata()))
    assert first.get_ydata()[-1] == pytest.approx(1.0)
    assert second.get_xdata()[-1] == 300


def test_numbers_that_two_runs_logged_are_a_series_of_the_live_view():
    message = ComparisonMessageBuilder(dtkit.compare(*make_logging_runs())).build_snapshot()
    (entry,) = [one for one in message.content["series"] if one["name"].startswith("dtkit.log/")]
    assert entry["title"] == "entropy"
    values = np.frombuffer(message.buffers[2], "<f4")[entry["first"] :][: entry["points"] * (entry["lines"] + 1)]
    table = values.reshape(entry["points"], -1)
    assert 90 < len(table) <= 128
    np.testing.assert_allclose(table[:, 1], 2 - table[:, 0] / 400, atol=0.02)
    assert np.isnan(table[-1, 2])
    assert np.isnan(table[:, 3]).all()


def test_the_printed_table_has_the_states_of_runs_that_did_not_complete():
    runs = [make_source(name=name) for name in ("first", "second", "third")]
    for run, state in zip(runs, (State.COMPLETED, State.FAILED, State.PAUSED), strict=True):
        run.state = state
    comparison = dtkit.compare(*runs, runs[0].history, labels=["a", "b", "c", "d"])
    head, *lines = repr(comparison).split("\n\n")[0].splitlines()
    assert head.split()[:2] == ["run", "state"]
    assert [line.split()[1] for line in lines] == ["completed", "failed", "paused", "kept"]
    assert comparison.to_pandas()["state"].tolist() == ["completed", "failed", "paused", "kept"]
    runs[1].state = runs[2].state = State.COMPLETED
    assert "state" not in repr(comparison).splitlines()[0]


@pytest.mark.parametrize("num_runs", [2, 8])
def test_the_picture_of_a_comparison_is_readable_in_a_window_of_600_px(num_runs):
    runs = [make_source(name=f"width {2**k}, rate 0.05, momentum 0.9, {k}") for k in range(num_runs)]
    figure = dtkit.compare(runs).figure()
    pixels_per_point = 484 / figure.get_figwidth() / 72  # a cell's output is 484 px wide
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert [text for text in texts if round(text.get_fontsize() * pixels_per_point) < 10] == []
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert [text.get_text() for text in legend.get_texts()] == list(dtkit.compare(runs).labels)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1)", "cross_entropy(label_smoothing=0.1)"),
        ("lambda o, t: F.cross_entropy(o, t, label_smoothing=s), where s=0.2", "cross_entropy(label_smoothing=0.2)"),
        ("lambda o: StepLR(o, size), where size=10", "StepLR(10)"),
        ("lambda o, t, k=2: k * o.sum()", "2 * o.sum()"),
        ("lambda o, t: o.sum(dim=1)", "o.sum(dim=1)"),
        ("lambda o, t: f(o, **options)", "f(o, **options)"),
        ("own_loss, where weight=0.5", "own_loss, where weight=0.5"),
        ("{'accuracy': lambda o, t: f(o, k), where k=5}", "{'accuracy': lambda o, t: f(o, k), where k=5}"),
    ],
)
def test_a_lambda_is_named_by_what_it_calls(text, name):
    assert read_function(text) == name


def test_the_rate_of_a_lambda_that_closes_over_it_is_known():
    found = read_optimizer("lambda p: torch.optim.SGD(p, lr=rate, momentum=m), where rate=0.1, m=0.9")
    assert (found.name, found.rate) == ("SGD(momentum=0.9)", "0.1")


def test_runs_whose_functions_close_over_other_values_differ_by_these():
    def make_spec(smoothing: float, weight: float) -> RunSpec:
        def own_schedule(optimizer: object) -> object:
            return optimizer, weight

        loss = lambda o, t: nn.functional.cross_entropy(o, t, label_smoothing=smoothing)  # noqa: E731 - is described
        settings = ("loss", describe_value(loss)), ("lr_scheduler", describe_value(own_schedule))
        return dataclasses.replace(FakeSource().spec, settings=settings)

    rows = list_differences([make_spec(0.1, 1.0), make_spec(0.2, 2.0)])
    assert rows == [
        ("loss", "cross_entropy(label_smoothing=0.1)", "cross_entropy(label_smoothing=0.2)"),
        ("lr_scheduler", "own_schedule, where weight=1.0", "own_schedule, where weight=2.0"),
    ]


def test_functions_that_differ_only_in_the_order_of_their_arguments_are_told_in_full():
    specs = [
        dataclasses.replace(FakeSource().spec, settings=(("loss", f"lambda o, t: f({arguments})"),))
        for arguments in ("o, t", "t, o")
    ]
    assert list_differences(specs) == [("loss", "lambda o, t: f(o, t)", "lambda o, t: f(t, o)")]


def test_options_that_the_text_of_a_loss_leaves_out_are_told():
    assert describe_value(nn.CrossEntropyLoss(label_smoothing=0.1)) == "CrossEntropyLoss(label_smoothing=0.1)"
    assert describe_value(nn.CrossEntropyLoss()) == "CrossEntropyLoss()"


def test_a_comparison_names_the_result_of_each_verification():
    runs = [make_source(name=name) for name in ("passed", "failed", "apart", "none")]
    header = comparison_text.make_table(dtkit.compare(runs).rows).header
    assert comparison_text.VERIFIED not in header
    passed = make_verification()
    runs[0].verification = passed
    runs[1].verification = dataclasses.replace(passed, verdict="FAIL", max_difference=0.25)
    runs[2].verification = dataclasses.replace(
        passed, verdict="NOT COMPARABLE", max_difference=float("nan"), differences={}
    )
    comparison = dtkit.compare([*runs, runs[0].history])
    table = comparison_text.make_table(comparison.rows)
    column = list(table.header).index(comparison_text.VERIFIED)
    cells = ["PASS, 3e-08", "FAIL, 0.25", "NOT COMPARABLE", "no", "no"]
    assert [row[column] for row in table.rows] == cells
    assert all(cell in repr(comparison) and cell in comparison._repr_html_() for cell in cells)
    assert "largest difference to one process" in comparison._repr_html_()


def test_throughput_of_a_comparison_is_as_smooth_as_that_of_a_run():
    noisy = FakeSource(ranks=2)
    for k in range(640):
        noisy.slowness = {0: 1.0, 1: 5.0 if k % 10 == 0 else 1.0}
        noisy.advance(1)
    comparison = dtkit.compare([noisy, make_source(steps=40)])
    message = ComparisonMessageBuilder(comparison).build_snapshot()
    place = next(series for series in message.content["series"] if series["title"] == "Throughput")
    assert place["points"] <= 64
    values = np.frombuffer(message.buffers[2], "<f4")[place["first"] :][: place["points"] * (place["lines"] + 1)]
    rates = values.reshape(place["points"], -1)[:, 1]
    whole = compute_speed(noisy.history).samples_per_s  # a mean of the steps' rates is larger
    np.testing.assert_allclose(rates, whole, rtol=0.1)
    np.testing.assert_allclose(comparison_summary.read_rates(noisy.history.totals())[1], whole, rtol=0.1)
    assert noisy.history.throughput()[1].min() < 0.5 * whole


def test_the_time_axis_ends_where_the_table_says():
    """The slowest steps of different ranks overlap where ranks don't wait for each other: their sum is too long."""
    rows = np.zeros(200, ROW_DTYPE)
    rows["step"], rows["rank"] = np.repeat(np.arange(100), 2), np.tile([0, 1], 100)
    rows["step_s"] = np.where((rows["step"] + rows["rank"]) % 2, 0.5, 0.1)
    rows["samples"], rows["weight"], rows["loss"] = 64, 64, 1.0
    history = History()
    history.append(rows)
    ends = read_step_ends(history)
    assert ends[-1] == pytest.approx(30)  # of each rank; the slowest steps are 50 s
    message = ComparisonMessageBuilder(dtkit.compare([history, make_source(steps=40)])).build_snapshot()
    _, milliseconds = message.content["head"]["axes"]["time"][0]
    assert milliseconds[-1] == pytest.approx(30_000, rel=1e-3)


def make_named_loss(scale):
    """Return one of two functions of the same name, whose second lines differ."""
    if scale == 1:

        def loss(outputs, targets):
            difference = outputs - targets
            return difference.abs().mean()
    else:

        def loss(outputs, targets):
            # squares weigh outliers more
            difference = outputs - targets
            return (difference**2).mean()

    return loss


def make_spec_with_loss(loss):
    return dataclasses.replace(
        FakeSource().spec,
        settings=(("loss", describe_value(loss)),),
        sources=(("loss", read_sources(loss)),),
    )


def test_functions_of_one_name_are_told_apart_by_the_lines_that_differ():
    specs = [make_spec_with_loss(make_named_loss(scale)) for scale in (1, 2)]
    assert list_differences(specs) == [
        ("loss", "loss: return difference.abs().mean()", "loss: return (difference**2).mean()")
    ]
    assert list_differences([specs[0], make_spec_with_loss(make_named_loss(1))]) == []


def test_functions_of_packages_beside_the_installation_have_no_source():
    """Debian's packages, and those that pip installed for one user, are in other folders than sysconfig names."""
    for folder in ("/usr/lib/python3/dist-packages", "/home/me/.local/lib/python3.11/site-packages"):
        functions = {"__name__": "losses"}
        exec(compile("def loss(output, target): return 0", f"{folder}/losses.py", "exec"), functions)
        assert read_sources(functions["loss"]) == ""


def test_the_digest_of_a_function_without_source_is_the_same_in_each_process():
    code = (
        "from dtkit.training.function_sources import read_sources\n"
        "print(read_sources(eval(\"lambda x: x in {'a', 'b', 'c', 'd', 'e'}\")))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(digests) == 1
    assert "bytecode" in digests.pop()


def test_functions_without_source_of_one_name_are_told_apart():
    losses = [eval(f"lambda o, t: {power} * (o - t)") for power in (2, 3)]
    (row,) = list_differences([make_spec_with_loss(loss) for loss in losses])
    assert row[1].startswith("a lambda: no source; bytecode ")
    assert row[1] != row[2]
    assert list_differences([make_spec_with_loss(eval("lambda o, t: 2 * (o - t)")) for _ in range(2)]) == []


@pytest.mark.parametrize(
    ("sources", "texts"),
    [
        (["a\nb", "a"], ["f: b", "f (2)"]),
        (["a\nb", "b\na"], ["f (1)", "f (2)"]),
        (["a", "a\n\n# why"], ["f", "f"]),
        (["a", ""], ["f", "f"]),
        (["1\n2\n3\n4\n5", "6"], ["f: 1; 2; 3; and 2 more lines", "f: 6"]),
    ],
)
def test_sources_are_told_apart_by_their_own_lines_or_by_numbers(sources, texts):
    assert tell_sources_apart(["f", "f"], sources) == texts


def test_optimizers_that_differ_in_their_rate_only_have_no_row_of_lines():
    text = "lambda p: torch.optim.SGD(p, lr={rate})"
    specs = [
        dataclasses.replace(
            FakeSource().spec, optimizer=text.format(rate=rate), sources=(("optimizer", f"SGD(p, lr={rate})"),)
        )
        for rate in (0.1, 0.2)
    ]
    assert list_differences(specs) == []


def test_a_comparison_shows_no_secret_of_a_function():
    def make_loss(number):
        if number == 1:

            def loss(outputs, targets):
                log(outputs, api_key="sesame")
                return (outputs - targets).abs()
        else:

            def loss(outputs, targets):
                log(outputs)
                return (outputs - targets).abs()

        return loss

    (row,) = list_differences([make_spec_with_loss(make_loss(number)) for number in (1, 2)])
    assert row == ("loss", 'loss: log(outputs, api_key="***")', "loss: log(outputs)")


def log(*_args, **_options): ...


def test_long_names_that_end_differently_keep_their_ends():
    start = "a long name of a run with many hyper-parameters lr=0.1 momentum=0.9"
    names = [f"{start} seed=1", f"{start} seed=2", "other"]
    labels = dtkit.compare([FakeSource(ranks=1, name=name) for name in names]).labels
    assert labels[0].startswith("a long name of a run")
    assert [label[-6:] for label in labels[:2]] == ["seed=1", "seed=2"]
    assert labels[2] == "other"
    assert max(map(len, labels)) <= 60


def test_the_text_of_a_comparison_names_the_best_runs():
    runs = [FakeSource(ranks=2, name=name, seed=k) for k, name in enumerate(("short", "long"))]
    for run, steps, accuracy in zip(runs, (40, 200), (0.9, 0.8), strict=True):
        run.advance(steps)
        run.history.add(Evaluation(steps, 100, {"accuracy": accuracy}))
    (line,) = [line for line in repr(dtkit.compare(runs)).splitlines() if line.startswith("best: ")]
    assert re.match(r"best: final training loss long \([\d.]+\), validation accuracy short \(0.900\)", line)
    assert "best: " not in repr(dtkit.compare([runs[0]]))


def test_the_key_below_a_printed_table_has_the_words_of_the_page():
    comparison = dtkit.compare(make_source(), make_source("B()", sent=100))
    _, key = repr(comparison).split("\n\n")
    (note,) = re.findall("<small>([^<]*)</small></div>", comparison._repr_html_())
    assert set(key.splitlines()) == {line for line in note.split(" · ") if not line.startswith(("bold", "below"))}
    assert [line.partition(":")[0] for line in key.splitlines()][-2:] == ["samples/s", "duration"]


def test_printed_numbers_that_read_alike_have_their_difference():
    rows = make_rows({"loss": 0.5034}, {"loss": 0.5026}, {"loss": 0.4})
    text = comparison_text.format_text(rows)
    assert re.findall(r"0\.\S+(?: \([^)]+\))?", text.partition("\nbest: ")[0]) == [
        "0.503", "0.503 (\N{MINUS SIGN}0.2 %)", "0.400",
    ]  # fmt: skip
    assert text.endswith("\nin brackets: the difference from the first run")
    assert "brackets" not in comparison_text.format_text(rows[::2])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "None"), (torch.optim.SGD([torch.zeros(1)], lr=1), "an SGD"), (nn.LSTM(1, 1), "an LSTM"), (1, "an int")],
)
def test_a_value_of_another_type_has_the_right_article(value, text):
    assert formatting.name_type(value) == text


def test_a_partial_loss_is_told_by_its_function_and_options():
    with dtkit.Cluster.from_transport(FakeTransport(1), device="cpu") as cluster:
        loss = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
        assert train(cluster, loss=loss, start=False).spec.loss == "partial(cross_entropy, label_smoothing=0.1)"


def make_rows(*changes: dict[str, object]) -> list[comparison_summary.ComparisonRow]:
    """Return completed runs that are equal but for these fields."""
    (row,) = dtkit.compare([make_source()]).rows
    return [dataclasses.replace(row, label=f"run {k}", state="completed", **each) for k, each in enumerate(changes)]


@pytest.mark.parametrize(
    ("first", "later", "text"),
    [
        (100.0, 103.2, "+3 %"),
        (100.0, 50.0, "\N{MINUS SIGN}50 %"),
        (100.0, 100.01, None),
        (100.0, 1234.0, "12.3 times"),
        (1.0, 0.05, "\N{MINUS SIGN}95 %"),
        (0.5, 0.0001, "1/5,000"),
        (0.5, 1e30, None),
        (0.0, 1.0, None),
        (float("nan"), 1.0, None),
        (1.0, float("nan"), None),
    ],
)
def test_numbers_of_later_runs_have_their_difference_from_the_first(first: float, later: float, text: str | None):
    table = comparison_text.make_table(make_rows({"loss": first}, {"loss": later}))
    column = list(table.header).index("final training loss")
    assert table.small_texts.get((1, column)) == text
    assert (0, column) not in table.small_texts


def test_numbers_that_mean_different_things_have_no_difference():
    slow, other = {"samples_per_s": 9.0}, {"basis": {comparison_summary.LOSS: "other"}}
    runs = {"loss": 1.0}, {"loss": 2.0, "state": "failed"} | slow, {"loss": 2.0} | slow | other
    rows = make_rows({}, {}, {})
    rows = [dataclasses.replace(row, **each) for row, each in zip(rows, runs, strict=True)]
    table = comparison_text.make_table(rows)
    columns = {name: k for k, name in enumerate(table.header)}
    assert not [row for row, column in table.small_texts if column == columns["final training loss"]]
    assert [row for row, column in table.small_texts if column == columns["samples/s"]] == [2]
    assert not [cell for cell in table.small_texts if cell[1] == columns["steps"]]


def test_the_duration_of_a_run_that_goes_on_has_no_difference():
    first, second = make_rows({"seconds": 10.0}, {"seconds": 5.0})
    table = comparison_text.make_table([first, second])
    assert table.small_texts[1, list(table.header).index("duration")] == "\N{MINUS SIGN}50 %"
    table = comparison_text.make_table([first, dataclasses.replace(second, state="running")])
    assert (1, list(table.header).index("duration")) not in table.small_texts


def test_pages_explain_the_differences_and_texts_have_none_of_unlike_numbers(tmp_path):
    comparison = dtkit.compare(make_source(), make_source("B()", sent=100))
    comparison.report(tmp_path / "runs.html")
    for page in (comparison._repr_html_(), (tmp_path / "runs.html").read_text(encoding="utf-8")):
        assert "below a number: the difference from the first run" in page
        assert re.search(r"<br><small [^>]+>1/4,000</small>", page)
    assert "1/4,000" not in repr(comparison)


def test_live_view_report_and_saved_notebook_have_the_same_table(tmp_path):
    comparison = dtkit.compare(make_source(), make_source("B()", sent=100))
    live = ComparisonMessageBuilder(comparison).build_snapshot().content["head"]
    comparison.report(tmp_path / "runs.html")
    for page in (comparison._repr_html_(), (tmp_path / "runs.html").read_text(encoding="utf-8")):
        table = page[page.index("<table") : page.index("</table>")]
        assert re.findall(r"> (\d: \w+)", table) == ["1: Data", "2: B"]
        assert re.findall(r"<small [^>]+>([^<]+)</small>", table) == [text for *_, text in live["table"]["small"]]
        assert [line in page for line in live["note"].splitlines()] == [True] * len(live["note"].splitlines())
    assert [row[0] for row in live["table"]["rows"]] == ["DataParallel()", "B()"]  # the page numbers them


def make_scored_runs() -> list[FakeSource]:
    """Return three runs: the best loss, the best accuracy, and none of both."""
    runs = [make_source(f"{name}()") for name in "abc"]
    for run, loss, accuracy in zip(runs, (0.3, 0.1, None), (0.9, 0.8, None), strict=True):
        if loss is not None:
            run.history.add(Evaluation(80, 10, {"loss": loss, "accuracy": accuracy}))
    return runs


@pytest.mark.parametrize(
    ("sort_by", "labels"),
    [
        ("best validation loss", ("b()", "a()", "c()")),
        ("loss", ("b()", "a()", "c()")),
        ("accuracy", ("a()", "b()", "c()")),
        ("steps", ("a()", "b()", "c()")),
    ],
)
def test_runs_are_sorted_by_a_column_with_the_best_first(sort_by: str, labels: tuple[str, ...]):
    runs = make_scored_runs()
    comparison = dtkit.compare(*runs, sort_by=sort_by)
    assert tuple(row.label for row in comparison.rows) == labels
    assert comparison.labels == ("a()", "b()", "c()")
    named = dtkit.compare(*runs, labels=["A", "B", "C"], sort_by=sort_by)
    assert [row.label.lower() for row in named.rows] == [label[0] for label in labels]


def make_sorted_comparison() -> Comparison:
    """Return three runs, of which the tables have the second one first."""
    runs = make_scored_runs()
    for run, rate in zip(runs, ("0.3", "0.1", "0.2"), strict=True):
        run.spec = dataclasses.replace(run.spec, settings=(("lr", rate),))
    return dtkit.compare(*runs, labels=["A", "B", "C"], sort_by="best loss")


def test_sorted_runs_keep_their_colors_in_pictures():
    runs = make_scored_runs()
    looks = []
    for sort_by in (None, "best loss"):
        figure = dtkit.compare(*runs, sort_by=sort_by).figure()
        drawn = [{line.get_label(): line for line in ax.get_lines()} for ax in figure.axes]
        (legend,) = figure.legends
        drawn.append(dict(zip([text.get_text() for text in legend.get_texts()], legend.get_lines(), strict=True)))
        looks.append([
            {name: (line.get_color(), line._unscaled_dash_pattern) for name, line in lines.items()} for lines in drawn
        ])  # fmt: skip
    assert looks[0] == looks[1]
    assert [list(each[-1]) for each in looks] == [["a()", "b()", "c()"], ["b()", "a()", "c()"]]


def test_sorted_runs_keep_their_numbers_and_samples_in_pages(tmp_path):
    comparison = make_sorted_comparison()
    comparison.report(tmp_path / "runs.html")
    report, page = (tmp_path / "runs.html").read_text(encoding="utf-8"), comparison._repr_html_()
    for text in (page, report):
        runs, settings = re.findall("<table.*?</table>", text)[:2]
        assert re.findall(r"[> ](\d: [ABC])<", runs) == ["2: B", "1: A", "3: C"]
        assert re.findall(r">(\d: [ABC]|0\.[123])<", settings) == ["2: B", "0.1", "1: A", "0.3", "3: C", "0.2"]
        assert "below a number: the difference from run 2" in text
    assert re.findall(r'<td [^>]*><svg class="chart sample"[^>]*><path class="series (s\d)', report) == [
        "s1",
        "s0",
        "s2",
    ]
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page.split("</table>")[0])
    assert images == re.findall(r'base64,([^"]*)"', "".join(format_notebook_sample(k) for k in (1, 0, 2)))
    legend = re.findall(r'<ul class="legend">.*?</ul>', report)[0]
    drawn = re.findall(r"series (s\d).*?>(\d: [ABC])<", legend)
    assert drawn == [("s1", "2: B"), ("s0", "1: A"), ("s2", "3: C")]


def test_sorted_runs_keep_their_places_in_the_live_view():
    head = ComparisonMessageBuilder(make_sorted_comparison()).build_snapshot().content["head"]
    assert head["runs"] == head["names"] == ["A", "B", "C"]
    for table in (head["table"], head["settings"]):
        assert table["runs"] == [1, 0, 2]
        assert [row[0] for row in table["rows"]] == ["B", "A", "C"]


def test_the_mark_of_the_sorted_column_is_left_out_once_runs_have_another_order():
    runs = make_scored_runs()
    comparison = dtkit.compare(*runs, sort_by="steps")
    read = ComparisonMessageBuilder(comparison).build_snapshot
    table = read().content["head"]["table"]
    assert [name for name, order in zip(table["header"], table["sorted"], strict=True) if order != "none"] == ["steps"]
    assert "ascending" in table["sorted"]
    runs[0].advance(500)
    table = read().content["head"]["table"]
    assert [row[0] for row in table["rows"]] == ["a()", "b()", "c()"]  # as of the call
    assert set(table["sorted"]) == {"none"}


def test_a_printed_table_that_is_sorted_names_the_run_of_its_differences():
    rows = make_rows({"loss": 0.5034}, {"loss": 0.5026})
    rows = [dataclasses.replace(row, number=number) for row, number in zip(rows, (2, 1), strict=True)]
    assert comparison_text.format_text(rows).endswith("\nin brackets: the difference from run 0")
    names = [line[0] for line in repr(make_sorted_comparison()).split("\n") if line[:1] in ("A", "B")]
    assert names[0] == "B"
    (settings,) = [
        part for part in repr(make_sorted_comparison()).split("\n\n") if part.startswith("run") and "lr" in part
    ]
    assert [line.split() for line in settings.splitlines()][1:] == [
        ["B", "b()", "0.1"],
        ["A", "a()", "0.3"],
        ["C", "c()", "0.2"],
    ]


def test_a_column_that_no_table_has_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ValueError, match=r"sort_by='acuracy': did you mean 'accuracy'\? It may be 'accuracy', "):
        dtkit.compare(*make_scored_runs(), sort_by="acuracy")
    with pytest.raises(ValueError, match=r"did you mean 'best loss'\? It may be .*'best loss', .*'steps'"):
        dtkit.compare(*make_scored_runs(), sort_by="bset loss")
    with pytest.raises(TypeError, match="sort_by=3: the name of a column"):
        dtkit.compare(*make_scored_runs(), sort_by=3)


def test_a_short_run_is_drawn_in_the_same_parts_as_a_long_one():
    short, long = make_source(steps=250), make_source("B()", steps=3000)
    ax = dtkit.compare(short, long).figure().axes[0]
    first, second = (line.get_xdata() for line in ax.get_lines())
    assert len(first) <= 24
    assert len(second) <= comparison_summary.NUM_LOSS_BUCKETS


def test_the_names_of_the_lines_are_shown_once():
    comparison = dtkit.compare(make_source(), make_source("B()"))
    charts = draw_comparison_charts(comparison.labels, comparison.histories)
    assert not [figure for figure in charts if figure.legends]
    (legend,) = draw_comparison_legend(comparison.labels, comparison.order).legends
    assert [text.get_text() for text in legend.get_texts()] == list(comparison.labels)
    assert comparison._repr_html_().count("image/png") == 1 + len(charts)


def test_saved_tables_have_the_line_of_each_run_at_its_name(tmp_path):
    comparison = dtkit.compare([make_source(f"run {k}") for k in range(5)])
    first_cells = re.findall(r"<tr><td [^>]*>(.*?)</td>", comparison._repr_html_().split("</table>")[0])
    samples = [re.findall(r'^<img src="data:image/svg\+xml;base64,([^"]*)"', cell) for cell in first_cells]
    drawn = [base64.b64decode(sample).decode() for (sample,) in samples]
    dashes = [re.findall('stroke-dasharray="([^"]*)"', svg)[0] for svg in drawn]
    assert len(set(drawn)) == 5
    assert dashes[0] == "none"
    assert len(set(dashes[:4])) == 4
    comparison.report(tmp_path / "comparison.html")
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    looks = re.findall(r'<td [^>]*><svg class="chart sample"[^>]*><path class="series ([^"]*)"', page)
    assert looks == [f"s{k} dash{choose_dash(k)}" for k in range(5)]


def test_a_run_of_less_than_a_second_is_not_the_fastest():
    """Its own report says that its speed is no steady mean, and a comparison had it in bold."""
    (row,) = dtkit.compare([make_source()]).rows
    rows = [dataclasses.replace(row, label=f"run {k}", samples_per_s=1000.0 * k, steps_s=9 / k) for k in (1, 2, 10)]
    for shown, bold in ((rows, [1]), (rows[:2], [1]), (rows[1:], [])):
        table = comparison_text.make_table(shown)
        column = list(table.header).index("samples/s")
        assert [row for row, k in table.bold_cells if k == column] == bold
    assert any("less than a second" in line for line in comparison_text.list_table_notes(rows))
    assert not any("less than a second" in line for line in comparison_text.list_table_notes(rows[:2]))
