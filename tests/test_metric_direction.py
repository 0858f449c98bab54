"""Which values of a metric are better: what the metric states comes before its name."""

import dataclasses
import json

import pytest
import torchmetrics

import dtkit
from dtkit.dashboard.report_cards import iterate_cards
from dtkit.dashboard.summary.metrics import build_metric_tile
from dtkit.dashboard.text.comparison_text import make_table
from dtkit.history.metric_direction import has_direction, is_better_higher, is_better_lower, read_directions
from dtkit.testing.fake_transport import FakeTransport
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource
from tests.support.small import data, net, train


def fid(output, target):
    """Return a number whose name doesn't say what is better."""
    return output.mean()


def make_source(values, stated, name="run"):
    source = FakeSource(ranks=2, name=name)
    source.advance(40)
    source.history.directions = stated
    for step, value in enumerate(values, 1):
        source.history.add(Evaluation(10 * step, 10, {"fid": value}))
    return source


def test_a_metric_states_its_direction_and_else_its_name_does():
    collection = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.R2Score()])
    stated = read_directions({"fid": fid, "explained": torchmetrics.ExplainedVariance(), "all": collection})
    assert stated == {"explained": True, "MeanSquaredError": False, "R2Score": True}
    assert not has_direction("fid", {})
    assert is_better_lower("fid", {"fid": False})
    assert is_better_higher("fid", {"fid": True})
    assert is_better_higher("loss", {"loss": True})
    assert is_better_lower("val_loss", {"fid": True})


@pytest.mark.parametrize(("is_higher", "best", "word"), [(False, 0.25, "lowest"), (True, 0.75, "highest")])
def test_tile_report_and_comparison_have_the_best_that_a_metric_states(is_higher, best, word):
    source = make_source((0.75, 0.25, 0.5), {"fid": is_higher})
    assert build_metric_tile(source.history, "fid", 0.5).note == f"validation, best {best:.3f}"
    cards = {label: (value, note.partition(",")[0]) for label, value, note in iterate_cards(source, None)}
    assert cards["validation fid"] == (f"{best:.3f}", word)
    other = make_source((0.4, 0.6), {"fid": is_higher}, "other")
    table = make_table(dtkit.compare(source, other).rows)
    assert (0, list(table.header).index("best validation fid")) in table.bold_cells
    assert ("best validation fid" in table.high_columns) is is_higher
    undecided = make_table(dtkit.compare(make_source((0.75, 0.25), {}), make_source((0.4,), {}, "other")).rows)
    assert undecided.header[undecided.header.index("best validation fid")] not in undecided.high_columns


def test_a_training_reads_what_its_metrics_state(tmp_path):
    cluster = dtkit.Cluster.from_transport(FakeTransport(2), device="cpu")
    metrics = {"fid": fid, "explained": torchmetrics.ExplainedVariance()}
    run = train(cluster, net(), metrics=metrics, validation=data())
    run.stop()
    assert run.history.directions == {"explained": True}
    assert run.history.copy_until(0, 0, 0).directions == {"explained": True}
    run.history.to_jsonl(tmp_path / "history.jsonl")
    assert dtkit.History.from_jsonl(tmp_path / "history.jsonl").directions == {"explained": True}
    assert json.loads(json.dumps(run.spec.directions)) == [["explained", True]]


@pytest.mark.parametrize(
    ("monitor", "mode", "stated", "best"),
    [
        ("loss", None, {}, 0.5),
        ("accuracy", None, {}, 0.6),
        ("fid", None, {}, 0.5),
        ("fid", None, {"fid": True}, 0.6),
        ("accuracy", "min", {}, 0.5),
        ("accuracy", None, {"accuracy": False}, 0.5),
    ],
)
def test_early_stopping_takes_the_direction_of_what_it_monitors(monitor, mode, stated, best):
    stopping, source = dtkit.EarlyStopping(patience=5, monitor=monitor, mode=mode), make_source((), stated)
    source.spec = dataclasses.replace(source.spec, has_validation=True)
    for step, value in ((10, 0.5), (20, 0.6)):
        source.history.add(Evaluation(step, 10, {"loss": 1.0} | {monitor: value}))
        stopping(source)
    assert stopping.best == best
