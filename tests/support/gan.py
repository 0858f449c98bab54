"""A small GAN of points in a plane, with its training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, NOISE = 49, 3


class Gan(nn.Module):
    """Generator and discriminator of points in a plane."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        torch.optim.SGD(model.discriminator.parameters(), lr=0.05, momentum=0.5),
    ]


def make_points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return real points and noise."""
    generator = torch.Generator().manual_seed(0)
    angle = 6.3 * torch.rand(ROWS, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, NOISE, generator=generator, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], 1), noise


def judge(logits: torch.Tensor, value: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def train_gan(model: Any, batch: Any, optimizers: Any) -> Any:
    """Update the discriminator twice, from two calls of backward, and then the generator."""
    generator, discriminator = optimizers
    real, noise = batch
    fake = model.generator(noise)
    for _ in range(2):
        discriminator.zero_grad()
        judge(model.discriminator(real), 1.0).backward()
        judge(model.discriminator(fake.detach()), 0.0).backward()
        discriminator.step()
    generator.zero_grad()
    loss = judge(model.discriminator(fake), 1.0)
    loss.backward()
    generator.step()
    return loss, {"fake": torch.sigmoid(model.discriminator(fake)).mean()}
