"""Metrics of torchmetrics: the values of all rows together, on any number of ranks and with any strategy."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support import small
from tests.support.marks import slow

torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.cluster

STRATEGIES = {
    "data": dtkit.DataParallel(),
    "pipeline": dtkit.Pipeline(2, 2),
    "tensor": dtkit.TensorParallel(2, plan={"0": "colwise", "2": "rowwise"}),
}


def make_metrics() -> dict[str, Any]:
    kinds = torchmetrics.classification
    return {
        "f1": kinds.MulticlassF1Score(3, average="macro"),
        "auroc": kinds.MulticlassAUROC(3),  # it keeps all scores
        "accuracy": small.accuracy,
    }


def test_engines_import_metrics_before_the_first_step(cluster2: dtkit.Cluster):
    """An import of torchmetrics amid the run took seconds, and was a stall."""

    def is_imported() -> bool:
        return "tabnanny" in sys.modules  # a module that nothing else imports

    def hits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).float().mean()

    hits.__module__ = "tabnanny"
    assert cluster2.run(is_imported) == [False, False]
    run = small.train(cluster2, metrics={"hits": hits}, validation=small.data(), start=False)
    assert cluster2.run(is_imported) == [True, True]
    run.stop()


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [("data", 37), ("pipeline", 3), slow("data", 3), slow("pipeline", 37), slow("tensor", 37), slow("tensor", 3)],
)
def test_values_are_those_of_all_rows(cluster2: dtkit.Cluster, strategy: str, rows: int):
    x, y = (part[:rows] for part in small.data())
    y[:3] = torch.arange(3)  # each class occurs
    run = small.train(cluster2, metrics=make_metrics(), validation=(x, y), strategy=STRATEGIES[strategy], epochs=1)
    run.wait(60)
    model: nn.Module = run.model.eval()
    with torch.no_grad():
        logits = model(x)
    for evaluation in (run.history.evaluations[-1], run.evaluate((x, y))):
        for name in ("f1", "auroc"):
            assert evaluation[name] == pytest.approx(float(make_metrics()[name](logits, y)), abs=1e-6)
        assert evaluation["accuracy"] == pytest.approx(float(small.accuracy(logits, y)), abs=1e-6)


def test_collection_gives_each_of_its_metrics(cluster2: dtkit.Cluster):
    kinds = torchmetrics.classification
    both = torchmetrics.MetricCollection({"f1": kinds.MulticlassF1Score(3), "recall": kinds.MulticlassRecall(3)})
    run = small.train(cluster2, metrics={"both": both})
    run.wait(60)
    assert set(run.evaluate(small.data()).values) == {"loss", "f1", "recall"}


def test_metric_by_class_is_refused(cluster2: dtkit.Cluster):
    by_class = torchmetrics.classification.MulticlassF1Score(3, average=None)
    run = small.train(cluster2, metrics={"f1": by_class})
    run.wait(60)
    with pytest.raises(dtkit.errors.EngineError, match=r"metric 'f1' computed a tensor of shape \(3,\).*Average it"):
        run.evaluate(small.data())
