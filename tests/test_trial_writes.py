"""Trials on the model that is trained leave what its forward passes write as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from dtkit.engine.label_weight import find_label_weight
from dtkit.engine.stream_trial import is_whole_batch
from dtkit.strategies.loss import Loss
from dtkit.strategies.tensor.plan_check import run_plan_check
from tests.support.language_model import LENGTH, VOCABULARY, LanguageModel, compute_own_loss

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 64


class Experts(LanguageModel):
    """Model that stores in evaluation how many tokens an expert takes, as NLLB's mixture of experts does."""

    def __init__(self) -> None:
        super().__init__(shift=True)
        self.capacity = CAPACITY
        self.register_buffer("num_passes", torch.zeros(1))

    def forward(self, *args: Any, **arguments: Any) -> Any:
        if not self.training:
            self.capacity = LENGTH
            self.num_passes += 1
        return super().forward(*args, **arguments)


def make_tokens(num_rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (num_rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.clone()}


def check_plan(model: Experts, loss: Loss) -> None:
    run_plan_check(model, loss, make_tokens(2), list(model.parameters()), [1] * len(list(model.parameters())))


TRIALS: dict[str, Callable[[Experts, Loss], Any]] = {
    "weight of labels": lambda model, loss: find_label_weight(loss, model, make_tokens, None),
    "batches of a stream": lambda model, loss: is_whole_batch(make_tokens(3), model, loss, lambda rows: rows[0]),
    "plan of slices": check_plan,
}


@pytest.mark.parametrize("trial", TRIALS)
def test_trial_keeps_numbers_and_buffers_of_modules(trial: str):
    model = Experts()
    TRIALS[trial](model, Loss(None, compute_own_loss))
    assert model.training
    assert (model.capacity, float(model.num_passes)) == (CAPACITY, 0)
