"""Names of strategies, losses and optimizers that users of other libraries give: the one that is meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtkit
from dtkit._util.meant_names import find_loss, find_optimizer, find_strategy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", "dtkit.DataParallel()"),
        ("DDP", "dtkit.DataParallel()"),
        ("data_parallel", "dtkit.DataParallel()"),
        ("DistributedDataParallel", "dtkit.DataParallel()"),
        ("fsdp", "dtkit.Sharded()"),
        ("ZeRO-3", "dtkit.Sharded()"),
        ("sharded", "dtkit.Sharded()"),
        ("pipeline", "dtkit.Pipeline(2, micro_batches=4)"),
        ("tensor_parallel", "dtkit.TensorParallel(2)"),
        ("local-sgd", "dtkit.ParameterAveraging()"),
        ("quantum", None),
        (3, None),
    ],
)
def test_a_strategy_is_found_by_its_usual_names(name, expected):
    assert find_strategy(name) == expected
    if expected is not None:
        assert eval(expected, {"dtkit": dtkit})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mse", "nn.MSELoss()"),
        ("mean_squared_error", "nn.MSELoss()"),
        ("MSELoss", "nn.MSELoss()"),
        ("cross_entropy", "nn.CrossEntropyLoss()"),
        ("crossentropy", "nn.CrossEntropyLoss()"),
        ("sparse_categorical_crossentropy", "nn.CrossEntropyLoss()"),
        ("bce", "nn.BCEWithLogitsLoss()"),
        ("binary_crossentropy", "nn.BCEWithLogitsLoss()"),
        ("mae", "nn.L1Loss()"),
        ("l1", "nn.L1Loss()"),
        ("huber", "nn.HuberLoss()"),
        ("kl_div", "nn.KLDivLoss(reduction='batchmean')"),
        ("happiness", None),
        (3, None),
    ],
)
def test_a_loss_is_found_by_its_usual_names(name, expected):
    assert find_loss(name) == expected
    if expected is not None:
        assert callable(eval(expected, {"nn": nn}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adam", "torch.optim.Adam(params, lr=0.001)"),
        ("AdamW", "torch.optim.AdamW(params, lr=0.001)"),
        ("adam_w", "torch.optim.AdamW(params, lr=0.001)"),
        ("sgd", "torch.optim.SGD(params, lr=0.1)"),
        ("momentum", "torch.optim.SGD(params, lr=0.1, momentum=0.9)"),
        ("rmsprop", "torch.optim.RMSprop(params, lr=0.001)"),
        ("optimizer", None),
        ("fancy", None),
        (None, None),
    ],
)
def test_an_optimizer_is_found_by_its_usual_names(name, expected):
    assert find_optimizer(name) == expected
    if expected is not None:
        params = [nn.Parameter(torch.zeros(1))]
        assert eval(expected, {"torch": torch, "params": params})
