"""A small language model whose forward returns its loss, in the manner of Hugging Face."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH = 11, 6


class LanguageModel(nn.Module):
    """Small model whose forward returns a loss, in the manner of Hugging Face."""

    def __init__(self, *, shift: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = shift
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.embedding(input_ids))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def compute_own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss
