"""Numbers of the user's own: collected by step on an engine, and kept in the history by name, rank and step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import dtkit
from dtkit.engine.observe.call_output import CallOutput, activate_output
from dtkit.engine.observe.step_scalars import StepScalars, weigh_scalars
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.scalars import ScalarRecord, ScalarTables
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource

if TYPE_CHECKING:
    from pathlib import Path


def test_values_count_by_the_samples_of_their_micro_batch():
    scalars = StepScalars()
    with scalars.collect():
        dtkit.log(kl=torch.tensor(1.0))
        weigh_scalars(3)
        dtkit.log(kl=torch.tensor(5.0), tokens=(torch.tensor(8.0), 4))
        weigh_scalars(1)
        dtkit.log(late=2.0)
    scalars.end_step(7, 4)
    assert scalars.take() == {"kl": [(7, 8.0, 4.0)], "tokens": [(7, 8.0, 4.0)], "late": [(7, 8.0, 4.0)]}
    assert scalars.take() == {}


@pytest.mark.filterwarnings("error")  # torch warns of tensors that need gradients
def test_function_logs_losses_as_they_are_and_means_of_pairs():
    output = CallOutput()
    with activate_output(output):
        dtkit.log(loss=torch.tensor(2.0, requires_grad=True) * 3, tokens=(torch.tensor(8.0), 4), none=(0.0, 0))
    ((kind, row),) = output.items
    assert kind == "row"
    assert row == {"loss": 6.0, "tokens": 2.0, "none": pytest.approx(math.nan, nan_ok=True)}


def test_logged_tensors_keep_no_graph_and_no_later_change():
    scalars, value = StepScalars(), torch.ones((), requires_grad=True)
    with scalars.collect():
        running = value * 2
        dtkit.log(x=running)
        running.data.add_(1)
    scalars.end_step(0, 1)
    assert scalars.take() == {"x": [(0, 2.0, 1.0)]}


def test_values_of_a_failed_step_are_dropped():
    scalars = StepScalars()
    with scalars.collect():
        dtkit.log(x=1.0)  # and no end_step
    with scalars.collect():
        dtkit.log(x=3.0)
    scalars.end_step(0, 1)
    assert scalars.take() == {"x": [(0, 3.0, 1.0)]}


@pytest.mark.parametrize("name", ["loss", "lr", "step_s"])
def test_names_of_the_historys_own_columns_are_refused(name: str):
    with StepScalars().collect(), pytest.raises(ValueError, match=rf"has a column '{name}' already; .* my_{name}="):
        dtkit.log(**{name: 1.0})


@pytest.mark.parametrize("value", [torch.ones(2), "many", (1.0, 2.0, 3.0)])
def test_only_single_numbers_are_logged(value: object):
    with StepScalars().collect(), pytest.raises(TypeError, match="must be numbers or tensors of one element"):
        dtkit.log(x=value)


def make_tables() -> ScalarTables:
    tables = ScalarTables()
    tables.add(ScalarRecord(0, {"kl": [(0, 2.0, 2.0), (1, 4.0, 2.0)]}))
    tables.add(ScalarRecord(1, {"kl": [(0, 9.0, 1.0)], "other": [(1, 0.0, 0.0)]}))
    return tables


def test_mean_over_ranks_is_weighted():
    tables = make_tables()
    assert tables.names == ["kl", "other"]
    assert [part.tolist() for part in tables.read("kl")] == [[0, 1], [11 / 3, 2.0]]
    assert [part.tolist() for part in tables.read("kl", rank=1)] == [[0], [9.0]]
    assert math.isnan(tables.read("other")[1][0])
    with pytest.raises(ValueError, match="no numbers were logged as 'kll'; did you mean 'kl'"):
        tables.read("kll")
    with pytest.raises(ValueError, match=r"no numbers were logged as 'zz'; there are kl, other\. dtkit\.log"):
        tables.read("zz")


@pytest.mark.parametrize(("name", "meant"), [("los", "loss"), ("troughput", "throughput")])
def test_a_misspelled_series_of_each_run_is_suggested(name: str, meant: str):
    with pytest.raises(ValueError, match=f"no numbers were logged as '{name}'; did you mean '{meant}'"):
        History().scalar(name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lr", r"history\.column\('lr'\) returns"),
        ("learning_rate", r"history\.column\('lr'\) returns"),
        ("accuracy", r"it is a metric: \[\(e\.step, e\['accuracy'\]\) for e in history\.evaluations\]"),
        ("val_accuracy", r"it is a metric: .*e\['accuracy'\]"),
    ],
)
def test_a_series_that_nobody_logs_is_refused_with_the_way_to_get_it(name: str, remedy: str):
    history = History()
    history.add(Evaluation(4, 10, {"loss": 0.5, "accuracy": 0.75}))
    with pytest.raises(ValueError, match=f"no numbers were logged as '{name}'; {remedy}"):
        history.scalar(name)
    assert [(e.step, e["accuracy"]) for e in history.evaluations] == [(4, 0.75)]


def test_loss_and_throughput_are_series_as_logged_numbers_are():
    source = FakeSource(ranks=2)
    source.advance(10)
    history = source.history
    for name, read in (("loss", history.loss), ("throughput", history.throughput)):
        for rank in (None, 1):
            for found, expected in zip(history.scalar(name, rank), read(rank), strict=True):
                np.testing.assert_array_equal(found, expected)
    steps, losses = history.scalar("loss", since=8)
    assert len(steps) == len(losses) == (history.loss()[0] >= 8).sum() > 0
    history.add(ScalarRecord(0, {"loss": [(3, 9.0, 1.0)]}))  # a number of this name that somebody logged
    assert history.scalar("loss")[1].tolist() == [9.0]


def test_step_that_was_taken_again_counts_once():
    tables = make_tables()
    tables.add(ScalarRecord(0, {"kl": [(1, 100.0, 2.0)]}))
    assert [part.tolist() for part in tables.read("kl", rank=0)] == [[0, 1], [1.0, 50.0]]


def make_history() -> History:
    history, rows = History(), np.zeros(4, ROW_DTYPE)
    rows["step"], rows["rank"] = [0, 0, 1, 1], [0, 1, 0, 1]
    history.append(rows)
    for record in make_tables().list_records():
        history.add(record)
    return history


def test_logged_names_are_columns_of_the_history(tmp_path: Path):
    history = make_history()
    assert history.scalar_names == ["kl", "other"]
    np.testing.assert_equal(history.column("kl"), [1.0, 9.0, 2.0, np.nan])
    np.testing.assert_equal(history.to_pandas()["kl"].to_numpy(), [1.0, 9.0, 2.0, np.nan])
    with pytest.raises(ValueError, match=r"no column 'q'; the columns are step, .*, kl, other"):
        history.column("q")
    history.to_jsonl(tmp_path / "history.jsonl")
    read = History.from_jsonl(tmp_path / "history.jsonl")
    np.testing.assert_equal(read.column("kl"), history.column("kl"))


def test_copies_and_continued_histories_have_the_scalars():
    history = make_history()
    continued = History()
    continued.extend(history)
    np.testing.assert_equal(continued.column("kl"), history.column("kl"))
    np.testing.assert_equal(history.copy_until(2, 0, 0).column("kl"), [1.0, 9.0])
