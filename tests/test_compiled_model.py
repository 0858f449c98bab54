"""The compiled call of a model, without its compiler: copies, state, and steps that never call the model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dtkit.strategies.compiled_model import CompiledModel
from dtkit.strategies.loss import Loss


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Model whose compiled call is twice the original one."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: lambda *args: 2 * call(*args))
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def test_only_the_model_itself_is_compiled(model: nn.Module):
    x = torch.ones(1, 2)
    before, names = model(x), list(model.state_dict())
    CompiledModel(model)
    assert torch.equal(model(x), 2 * before)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(duplicate(x), before)
    assert list(model.state_dict()) == names


def test_step_that_calls_the_model_passes(model: nn.Module):
    loss = CompiledModel(model).check_steps(Loss(training_step=lambda model, batch: model(batch).sum()))
    value, weight = loss(model, torch.ones(1, 2))
    assert weight is None
    assert value.dim() == 0


def test_step_that_calls_only_parts_raises(model: nn.Module):
    loss = CompiledModel(model).check_steps(Loss(training_step=lambda model, batch: model[0](batch).sum()))
    with pytest.raises(ValueError, match="training_step calls only parts or methods of the model"):
        loss(model, torch.ones(1, 2))


def test_checked_step_keeps_its_parameters(model: nn.Module):
    def step(model: Any, batch: Any, optimizers: Any) -> Any:
        raise NotImplementedError

    assert CompiledModel(model).check_steps(Loss(training_step=step)).is_manual
    assert CompiledModel(model).check_steps(Loss(loss_fn=nn.MSELoss())).training_step is None
