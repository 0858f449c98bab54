"""Parameters without a gradient: told in the notebook, where the strategy needs one in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support.small import train


class Spare(nn.Module):
    """Model with a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


class Experts(nn.Module):
    """Model of which these rows choose one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[1](x)


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        (dtkit.DataParallel(), r"DataParallel\(find_unused_parameters=True\), or call requires_grad_\(False\)"),
        (dtkit.Sharded(), r"Sharded training needs a model that uses all parameters"),
    ],
    ids=repr,
)
def test_unused_parameters_are_told_in_the_notebook(cluster: dtkit.Cluster, strategy: Any, remedy: str):
    with pytest.warns(UserWarning, match=rf"^spare.weight, spare.bias got no gradient from the first rows: .*{remedy}"):
        train(cluster, Spare(), strategy=strategy, start=False)


def test_experts_that_other_rows_may_choose_are_not_told(cluster: dtkit.Cluster):
    train(cluster, Experts(), start=False)


def test_unused_parameters_that_are_frozen_are_not_told(cluster: dtkit.Cluster):
    model = Spare()
    model.spare.requires_grad_(False)
    train(cluster, model, start=False)


@pytest.mark.parametrize(
    "strategy", [dtkit.DataParallel(find_unused_parameters=True), dtkit.ParameterAveraging(every=2)], ids=repr
)
def test_strategies_that_take_unused_parameters_say_nothing(cluster: dtkit.Cluster, strategy: Any):
    train(cluster, Spare(), strategy=strategy, start=False)
