"""Rules and remedies for arguments that torch's optimizers refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from dtkit.engine.error_hints import add_general_hint

if TYPE_CHECKING:
    from collections.abc import Callable

PARAMETERS = [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("name", "arguments", "start"),
    [
        ("SGD", {"lr": -1}, "lr is -1 and must not be negative. Correct it in optimizer=: lr=0.1 for SGD"),
        ("Adafactor", {"lr": -1}, "lr is -1 and must not be negative"),
        ("SGD", {"momentum": -1}, "momentum is -1 and must not be negative. Correct it in optimizer=: momentum=0.9"),
        ("Adam", {"betas": (1, 2)}, "betas[0] is 1 and must be from 0 to below 1"),
        ("RAdam", {"betas": (0.9, 2)}, "betas[1] is 2 and must be from 0 to below 1"),
        ("AdamW", {"eps": -1}, "eps is -1 and must not be negative"),
        ("AdamW", {"weight_decay": -1}, "weight_decay is -1 and must not be negative"),
        ("RMSprop", {"alpha": -1}, "alpha is -1 and must not be negative"),
        ("Adadelta", {"rho": 2}, "rho is 2 and must be from 0 to 1"),
        ("Adagrad", {"lr_decay": -1}, "lr_decay is -1 and must not be negative"),
        ("NAdam", {"momentum_decay": -1}, "momentum_decay is -1 and must not be negative"),
    ],
)
def test_a_refused_argument_gets_its_rule_and_a_usual_value(name: str, arguments: dict[str, Any], start: str):
    with pytest.raises(ValueError, match=r"Invalid|should be") as caught:
        getattr(torch.optim, name)(PARAMETERS, **arguments)
    assert add_general_hint(caught.value)
    assert caught.value.__notes__[0].startswith(start)


def test_the_same_words_of_other_code_get_no_hint():
    with pytest.raises(ValueError, match="Invalid alpha") as caught:
        raise ValueError("Invalid alpha value: -1")
    assert not add_general_hint(caught.value)


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda: torch.optim.SGD(PARAMETERS, nesterov=True), "Give both, as in torch.optim.SGD"),
        (lambda: torch.optim.SGD([]), "The function in optimizer= has left out all parameters"),
        (lambda: torch.optim.SGD([{"params": PARAMETERS}] * 2), "Give each parameter to one group"),
        (
            lambda: torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(PARAMETERS), max_lr=1),
            "The run takes one step for each update",
        ),
        (
            lambda: torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(PARAMETERS), [float, float]),
            "The optimizer has one parameter group",
        ),
    ],
    ids=["nesterov", "empty", "groups", "length", "functions"],
)
def test_refused_arguments_without_a_value_get_a_remedy(make: Callable[[], object], start: str):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        make()
    assert add_general_hint(caught.value)
    assert caught.value.__notes__[0].startswith(start)
