"""Remedies in the errors of losses, for typical mistakes with outputs and targets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.engine.error_hints import add_hints
from dtkit.engine.loss_hints import is_loss
from dtkit.engine.observe.error_report import format_message

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, LABELS = torch.zeros(5, 64), torch.arange(5) % 3
POSITIONS = torch.zeros(5, 4, 64)
THREE, ONE = nn.Linear(64, 3), nn.Linear(64, 1)
BINARY = F.binary_cross_entropy_with_logits


@pytest.mark.parametrize(
    ("model", "inputs", "target", "loss", "expected"),
    [
        (
            THREE,
            ROWS,
            LABELS,
            F.binary_cross_entropy_with_logits,
            r"has 3 outputs .* For one of 3 .* use nn\.CrossEntropyLo",
        ),
        (
            THREE,
            ROWS,
            LABELS[:, None],
            F.binary_cross_entropy_with_logits,
            r"targets of 0 and 1 of shape \(5, 3\), as fl",
        ),
        (
            ONE,
            ROWS,
            (LABELS > 0).long()[:, None],
            F.binary_cross_entropy_with_logits,
            r"int64, and this loss expects fl",
        ),
        (
            ONE,
            ROWS - 9,
            torch.ones(5, 1),
            F.binary_cross_entropy,
            r"not between 0 and 1\. Use nn\.BCEWithLogitsLoss",
        ),
        (
            THREE,
            ROWS,
            LABELS + 1,
            F.cross_entropy,
            r"between 1 and 3, .* has 3 outputs; .* from 0, as in y - y\.min\(\) for all",
        ),
        (THREE, ROWS, LABELS - 1, F.cross_entropy, r"between -1 and 1, .*without a label can have -100"),
        (THREE, ROWS, LABELS + LABELS, F.cross_entropy, r"between 0 and 4, .* Use nn\.Linear\(\.\.\., 5\) or more"),
        (nn.Flatten(), ROWS[:, :3], LABELS + 1, F.cross_entropy, r"between 1 and 3; .* as many outputs"),
        (
            THREE,
            POSITIONS,
            LABELS,
            F.cross_entropy,
            r"need targets of shape \(5, 3\), .* are \(5,\)\. .*output\[:, -1\]",
        ),
        (
            THREE,
            POSITIONS,
            torch.zeros(5, 4).long(),
            F.cross_entropy,
            r"they are \(5, 4\)\. Move .*transpose\(1, 2\)",
        ),
    ],
    ids=["labels", "column", "integers", "logits", "from 1", "from -1", "few", "no layer", "sequence", "positions"],
)
def test_loss_that_refuses_output_or_target_gets_the_remedy(
    model: nn.Module, inputs: torch.Tensor, target: torch.Tensor, loss: Callable[..., Any], expected: str
):
    if model is ONE:
        nn.init.ones_(model.weight)  # so that its outputs are no probabilities
    with pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
        loss(model(inputs), target)
    add_hints(caught.value, [(5, (inputs, target))], model)
    message = format_message(caught.value)
    assert re.search(expected, message), message
    assert len(message.splitlines()) <= 3


def test_layers_are_no_losses():
    assert is_loss("cross_entropy_loss")
    assert is_loss("kl_div")
    assert not is_loss("linear")
