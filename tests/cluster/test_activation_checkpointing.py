"""Activation checkpointing: the same training in less memory, under every strategy, known to plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support import small
from tests.support.marks import slow

pytestmark = pytest.mark.cluster


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.dropout = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 4)), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.dropout(self.layers(x))
        return result


class Stack(nn.Module):
    """Blocks with dropout, which must drop the same numbers when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Residual() for _ in range(4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


STRATEGIES = [
    dtkit.DataParallel(),
    slow(dtkit.DataParallel(accumulate=2)),
    slow(dtkit.Sharded()),
    dtkit.Pipeline(2, 2, split=["blocks.2"]),  # a measured cut may differ, and each stage draws its own dropout
    slow(dtkit.TensorParallel(2, plan={"blocks.*.layers.0": "colwise", "blocks.*.layers.2": "rowwise"})),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_training_is_the_same_as_without(cluster2: dtkit.Cluster, strategy: Any):
    options: dict[str, Any] = {"strategy": strategy, "shuffle": "global", "steps": 4}
    expected = small.train(cluster2, Stack().double(), make_rows(), **options)
    expected.wait(60)
    parameters = expected.model.state_dict()
    run = small.train(cluster2, Stack().double(), make_rows(), activation_checkpointing=True, **options)
    run.wait(60)
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, parameters[name], rtol=0, atol=1e-12)


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = small.data()
    return x.double(), y


def make_wide() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 3))


def plan(cluster: dtkit.Cluster, **options: Any) -> Any:
    rows = torch.randn(8, 64), torch.zeros(8, dtype=torch.long)
    strategies = [dtkit.DataParallel(), dtkit.Sharded()]
    return cluster.plan(
        make_wide(), rows, batch_size=512, optimizer=small.sgd, loss=nn.CrossEntropyLoss(),
        strategies=strategies, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_plan_knows_it_and_finds_the_largest_batch(cluster2: dtkit.Cluster):
    plain, checkpointed = plan(cluster2), plan(cluster2, activation_checkpointing=True)
    assert checkpointed.rows[0].activations < 0.6 * plain.rows[0].activations
    largest = plain.largest_batch()
    assert checkpointed.largest_batch() > largest > 512
    assert plain.largest_batch(dtkit.Sharded()) >= largest
    with pytest.raises(ValueError, match=r"Pipeline\(.*is not in this plan"):
        plain.largest_batch(dtkit.Pipeline(2, 2))


@pytest.mark.parametrize(
    ("model", "blocks", "strategy", "message"),
    [
        (nn.Linear(4, 3), True, None, "Linear has no chain of blocks"),
        (Stack(), ["block.0"], None, "names 'block.0', and Stack has no such module; it has blocks"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            True,
            None,
            "would count each batch twice",
        ),
        (Stack(), True, dtkit.Pipeline(2, 4, "ZBVZeroBubble"), "ZBVZeroBubble runs backward in two passes"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics")
def test_what_cannot_be_computed_again_is_refused(
    cluster2: dtkit.Cluster, model: nn.Module, blocks: Any, strategy: Any, message: str
):
    kind = ValueError if strategy is None else dtkit.errors.EngineError  # told by the notebook, or by the stages
    with pytest.raises(kind, match=message):
        small.train(cluster2, model, activation_checkpointing=blocks, strategy=strategy)


def test_argument_of_another_type_is_refused(cluster2: dtkit.Cluster):
    with pytest.raises(TypeError, match="activation_checkpointing='blocks'; it must be True"):
        small.train(cluster2, Stack(), activation_checkpointing="blocks")
