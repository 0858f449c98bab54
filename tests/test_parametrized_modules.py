"""Modules with parametrizations, which torch refuses to pickle."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from dtkit.rpc import pickling


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    conv = parametrizations.weight_norm(nn.Conv1d(2, 3, 3), dim=2)
    return nn.Sequential(conv, nn.Flatten(), parametrizations.spectral_norm(nn.Linear(12, 3)))


def test_modules_with_parametrizations_are_pickled_with_their_properties():
    model, x = make_model(), torch.randn(4, 2, 6)
    # unpickles: the model of this test
    loaded = pickling.loads(pickling.dumps(model))
    for module in (model, loaded, copy.deepcopy(loaded)):
        module.eval()
        assert torch.equal(module(x), model(x))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert parametrize.is_parametrized(loaded[0], "weight")
    assert isinstance(loaded[0], nn.Conv1d)
    loaded(x).sum().backward()
    assert loaded[0].parametrizations.weight.original1.grad is not None
    # unpickles: the model of this test
    assert torch.equal(pickling.loads(pickling.dumps(loaded)).eval()(x), model(x))
