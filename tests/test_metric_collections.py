"""Collections of metrics: every reader has their values by the same names."""

import sys

import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import dtkit
from dtkit._util.metric_collections import import_metric_modules, list_metric_modules, split_collections
from dtkit.engine.stateful_metrics import StatefulMetrics
from dtkit.history.metric_direction import read_directions
from dtkit.testing.fake_transport import FakeTransport
from tests.support.small import data, net, train


def make_metrics():
    collection = torchmetrics.MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)], prefix="top_")
    return {"all": collection, "alone": MulticlassAccuracy(4)}


def test_values_of_a_collection_have_its_own_names_for_every_reader():
    names = ["top_MulticlassAccuracy", "top_MulticlassF1Score", "alone"]
    assert list(split_collections(make_metrics())) == names
    assert list(read_directions(make_metrics())) == names
    computed = StatefulMetrics(make_metrics(), torch.device("cpu"))
    assert sorted(computed._metrics) == sorted(names)


def test_engines_get_the_modules_of_metrics_before_the_first_step():
    def own(output, target):
        return (output - target).mean()

    own.__module__ = "__main__"
    modules = list_metric_modules(make_metrics() | {"own": own, "built in": torch.nn.functional.l1_loss})
    assert modules == (MulticlassAccuracy.__module__, MulticlassF1Score.__module__, "torch.nn.functional")


def test_a_module_that_raises_at_import_fails_no_job_and_hinders_no_other_import(tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no display')\n")
    (tmp_path / "has_a_metric.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import_metric_modules(["raises_at_import", "does_not_exist", "has_a_metric"])
    assert sys.modules.pop("has_a_metric")


@pytest.mark.parametrize("monitor", ["top_MulticlassF1Score", "alone"])
def test_early_stopping_monitors_a_metric_of_a_collection(monitor):
    cluster = dtkit.Cluster.from_transport(FakeTransport(2), device="cpu")
    stopping = dtkit.EarlyStopping(monitor=monitor)
    train(cluster, net(), metrics=make_metrics(), validation=data(), callbacks=[stopping]).stop()
    with pytest.raises(ValueError, match="top_MulticlassAccuracy"):
        train(cluster, net(), metrics=make_metrics(), validation=data(), callbacks=[dtkit.EarlyStopping(monitor="all")])
