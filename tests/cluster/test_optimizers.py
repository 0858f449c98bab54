"""Optimizers that look at the model: groups by name and shape train as in one process, under every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support import small
from tests.support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

DATA, SHARDED, PIPELINE = dtkit.DataParallel(), dtkit.Sharded(), dtkit.Pipeline(2, 2)
TENSOR = dtkit.TensorParallel(2, plan={"layers.0": "colwise", "layers.2": "rowwise"})


class Configured(nn.Module):
    """Model that makes its own optimizer, in the manner of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result

    def configure_optimizers(self, weight_decay: float) -> torch.optim.Optimizer:
        decayed = [p for _, p in self.named_parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def configure(model: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = model.configure_optimizers(weight_decay=0.5)
    return optimizer


def group_by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with another rate for the last layer."""
    groups = [{"params": [p], "lr": 0.05 if name.startswith("layers.4") else 0.01} for name, p in named_parameters]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def make_muon_and_adam(named_parameters: Any) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, and AdamW for the others."""
    named = list(named_parameters)
    matrices, others = ([p for _, p in named if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    makers = [(matrices, lambda ps: torch.optim.Muon(ps, lr=0.02)), (others, lambda ps: torch.optim.AdamW(ps, lr=0.01))]
    return [make(part) for part, make in makers if part]


@pytest.mark.parametrize("optimizer", [slow(configure), group_by_name, slow(make_muon_and_adam)])
@pytest.mark.parametrize(
    "strategy", [slow(DATA), SHARDED, PIPELINE, slow(TENSOR)], ids=lambda strategy: type(strategy).__name__
)
def test_groups_of_an_optimizer_train_as_in_one_process(cluster2: dtkit.Cluster, strategy: Any, optimizer: Any):
    run = small.train(cluster2, Configured(), optimizer=optimizer, strategy=strategy, steps=4)
    run.wait(60)
    verification = run.verify(4)
    assert verification.verdict == "PASS", verification.text()


@pytest.mark.parametrize("name", ["Adafactor", slow("Rprop")])
@pytest.mark.parametrize("strategy", [SHARDED, slow(TENSOR)], ids=lambda strategy: type(strategy).__name__)
def test_optimizer_that_fails_on_shards_is_refused_before_the_first_step(
    cluster2: dtkit.Cluster, strategy: Any, name: str
):
    with pytest.raises(dtkit.errors.EngineError, match=rf"torch's {name} can't train sharded parameters. Use .*AdamW"):
        small.train(cluster2, Configured(), optimizer=getattr(torch.optim, name), strategy=strategy, steps=4)
    small.check_usable(cluster2)


@pytest.mark.slow
def test_several_optimizers_continue_from_a_checkpoint(cluster2: dtkit.Cluster, tmp_path: Path):
    options: dict[str, Any] = {"optimizer": make_muon_and_adam, "shuffle": "global"}
    first = small.train(cluster2, Configured(), steps=2, checkpoint_dir=tmp_path, checkpoint_every=2, **options)
    first.wait(60)
    resumed = small.train(
        cluster2, Configured(), steps=4, resume_from=tmp_path, lr_scheduler=halve_each_step, **options
    )
    resumed.wait(60)
    assert resumed.history.column("lr").tolist() == [0.02] * 4 + [0.02, 0.02, 0.01, 0.01]
    whole = small.train(cluster2, Configured(), steps=4, **options)
    whole.wait(60)
    resumed_again = small.train(cluster2, Configured(), steps=4, resume_from=tmp_path, **options)
    resumed_again.wait(60)
    expected = whole.model.state_dict()
    for name, value in resumed_again.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def halve_each_step(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def give_twice(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters[:1], lr=0.1)]


def test_parameter_in_two_optimizers_is_refused(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.FirstBatchError, match="a parameter is in two of the optimizers"):
        small.train(cluster2, optimizer=give_twice)
