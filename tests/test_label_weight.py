"""Losses that are means over labels: which of them are recognized, and the weight that they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtkit.engine.label_weight import find_label_weight
from dtkit.strategies.loss import LabelWeight, Loss
from tests.support.language_model import LENGTH, VOCABULARY, LanguageModel, compute_own_loss

PLAIN, SHIFTED = LabelWeight(-100), LabelWeight(-100, skips_first=True)


def make_tokens(num_rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (num_rows, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.parametrize(("shift", "expected"), [(False, PLAIN), (True, SHIFTED)])
def test_labels_that_a_model_counts_are_found_by_trial(shift: bool, expected: LabelWeight):  # noqa: FBT001 - a parameter of the test
    model = LanguageModel(shift=shift)
    assert find_label_weight(Loss(None, compute_own_loss), model, make_tokens, None) == expected
    assert model.training


@pytest.mark.parametrize(("shift", "expected"), [(False, PLAIN), (True, SHIFTED)])
def test_trial_finds_the_weight_although_the_first_samples_have_padding(shift: bool, expected: LabelWeight):  # noqa: FBT001 - a parameter of the test
    def make_padded(num_rows: int) -> dict[str, torch.Tensor]:
        batch = make_tokens(num_rows)
        batch["labels"][:, LENGTH // 2 :] = -100
        return batch

    model = LanguageModel(shift=shift)
    assert find_label_weight(Loss(None, compute_own_loss), model, make_padded, None) == expected


def test_trial_of_a_model_with_a_zero_head_adds_noise():
    model = LanguageModel(shift=True)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    assert find_label_weight(Loss(None, compute_own_loss), model, make_tokens, None) == SHIFTED
    assert not model.head.weight.any()


@pytest.mark.parametrize(("loss_type", "expected"), [("ForCausalLM", SHIFTED), ("ForMaskedLM", PLAIN)])
def test_loss_type_of_hugging_face_needs_no_trial(loss_type: str, expected: LabelWeight):
    model = LanguageModel(shift=False)
    model.loss_type = loss_type
    assert find_label_weight(Loss(None, compute_own_loss), model, make_tokens, None) == expected


def make_classes(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(num_rows) % 3


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy], ids=["module", "function"])
def test_known_targets_decide_whether_they_are_weighted(loss: Any):
    model, targets = nn.Linear(4, 3), torch.arange(8) % 3
    assert find_label_weight(Loss(loss, None), model, make_classes, targets) is None
    assert find_label_weight(Loss(loss, None), model, make_classes, None) is None
    targets[5] = -100
    assert find_label_weight(Loss(loss, None), model, make_classes, targets) == PLAIN


def test_mean_over_samples_keeps_its_form():
    def compute_mean_over_samples(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model.head(model.embedding(batch["input_ids"]))  # type: ignore[operator, union-attr]
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses.sum(1) / LENGTH).mean()

    loss = Loss(None, compute_mean_over_samples)
    assert find_label_weight(loss, LanguageModel(shift=False), make_tokens, None) is None


def test_pair_and_step_that_fails_keep_their_form():
    model = LanguageModel(shift=False)
    pair = Loss(None, lambda m, b: (m(**b).loss * 3, 3))
    assert find_label_weight(pair, model, make_tokens, None) is None
    failing = Loss(None, lambda _m, b: b["missing"])
    assert find_label_weight(failing, model, make_tokens, None) is None


def test_weighted_loss_of_parts_gives_the_loss_of_the_batch():
    model, batch = LanguageModel(shift=True), make_tokens(4)
    batch["labels"][0, 1:] = -100
    batch["labels"][1, 3:] = -100
    whole = compute_own_loss(model, batch)
    loss = Loss(None, compute_own_loss, label_weight=SHIFTED)
    pairs = [loss(model, {name: value[rows] for name, value in batch.items()}) for rows in (slice(2), slice(2, 4))]
    total = sum(weight for _, weight in pairs if weight is not None)
    torch.testing.assert_close(sum(value for value, _ in pairs) / total, whole.double(), check_dtype=False)


def test_repr_of_a_weight_names_the_counted_labels():
    assert str(PLAIN) == "all labels other than -100"
    assert str(SHIFTED) == "all labels but the first of each row other than -100"
