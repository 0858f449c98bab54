"""A GPT-2 with random weights on random tokens: the training of :mod:`tests.bench.gpu` and of its reference."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Gpt:
    """Size of the model and of its batches."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    rows: int

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.sequence,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model: nn.Module = GPT2LMHeadModel(config)
        return model

    def tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocabulary, (self.rows, self.sequence), generator=generator)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence

    def count_flops_per_token(self) -> float:
        """Return the operations of forward and backward per token (Chowdhery et al., PaLM, appendix B)."""
        model = self.model()
        num_used = sum(p.numel() for p in model.parameters()) - self.sequence * self.width  # positions are looked up
        return 6.0 * num_used + 12.0 * self.layers * self.width * self.sequence


GPTS = {
    "gpt2": Gpt(layers=12, width=768, heads=12, vocabulary=50257, sequence=1024, batch=16, rows=2048),
    "tiny": Gpt(layers=2, width=64, heads=2, vocabulary=512, sequence=64, batch=8, rows=256),
}


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)
