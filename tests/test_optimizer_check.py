"""The trial of optimizer= and lr_scheduler= in the notebook: what it refuses, and what it leaves to the engines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from dtkit.errors import FirstBatchError
from tests.support.small import net, sgd, train

if TYPE_CHECKING:
    from collections.abc import Callable

    import dtkit

OTHER = net()
SETTINGS = {"lr": 0.1}
MADE: list[object] = []


def make_twice(params: Any) -> Any:
    return [sgd(params), sgd(params)]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda params: torch.optim.SGD(params, lr=-1), "lr is -1 and must not be negative"),
        (lambda params: None, "optimizer= returned NoneType; it must return"),
        (lambda params: sgd(OTHER.parameters()), "the optimizer holds 4 parameters, not all of them the model's"),
        (lambda params: torch.optim.SGD(params, lr="0.1"), "Give a number without quotes"),
        (lambda params: torch.optim.SGD(params, learning_rate=0.1), "did you mean lr="),
        (lambda params: torch.optim.Adamm(params, lr=0.1), "has no attribute 'Adamm'"),
        (lambda params: torch.optim.SGD(params, lr=0.1, nesterov=True), "Give both, as in"),
        (lambda params: torch.optim.SGD(params, lr=SETTINGS["rate"]), "KeyError: 'rate'"),
        (torch.optim.LBFGS, "needs a closure"),
        (make_twice, "a parameter is in two of the optimizers"),
    ],
    ids=["value", "None", "model", "text", "keyword", "name", "options", "key", "closure", "twice"],
)
def test_optimizer_is_made_in_the_notebook_first(cluster: dtkit.Cluster, optimizer: Any, expected: str):
    with pytest.raises(FirstBatchError, match=r"^optimizer= fails, before the training starts: ") as caught:
        train(cluster, optimizer=optimizer)
    assert expected in str(caught.value)
    assert cluster.current_run is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda optimizer: None, "returned NoneType; it must return a torch scheduler"),
        (lambda optimizer: StepLR(optimizer, gamma=0.1), "missing 1 required positional argument: 'step_size'"),
        (lambda optimizer: OneCycleLR(optimizer, max_lr=1), "total_steps=epochs"),
        (lambda optimizer: LambdaLR(optimizer, lambda step: 1 / 0), "ZeroDivisionError"),
        (lambda optimizer: StepLR(sgd(OTHER.parameters()), 3), "the scheduler has another optimizer"),
    ],
    ids=["None", "argument", "length", "function", "optimizer"],
)
def test_schedule_is_made_in_the_notebook_first(
    cluster: dtkit.Cluster, make: Callable[[torch.optim.Optimizer], LRScheduler], expected: str
):
    with pytest.raises(FirstBatchError, match=r"^lr_scheduler= fails, before the training starts: ") as caught:
        train(cluster, lr_scheduler=make)
    assert expected in str(caught.value)


def read_values(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=min(0.1, params[0].norm().item()))


def ask_for_rank(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1 * (1 + torch.distributed.get_rank()))


def use_mesh(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1 / params[0].device_mesh.size())


def fuse(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


@pytest.mark.parametrize("optimizer", [read_values, ask_for_rank, use_mesh, fuse])
def test_optimizer_that_needs_an_engine_is_left_to_the_engines(cluster: dtkit.Cluster, optimizer: Any):
    train(cluster, optimizer=optimizer).wait(30)


def test_trial_of_an_optimizer_changes_nothing_and_loads_no_compiler(
    cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    def make(params: Any) -> torch.optim.Optimizer:
        print("made")
        MADE.append(params)
        return sgd(params)

    model, is_loaded = net(), "torch._dynamo" in sys.modules
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(cluster, model, optimizer=make, start=False)
    assert capsys.readouterr().out == ""
    assert not MADE
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ("torch._dynamo" in sys.modules) == is_loaded
