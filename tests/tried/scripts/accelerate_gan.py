"""A GAN in a loop of one's own under Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
draws = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(64, 16, generator=draws), torch.randn(64, 8, generator=draws))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
generator, discriminator, generator_optimizer, discriminator_optimizer, loader = accelerator.prepare(
    generator, discriminator, generator_optimizer, discriminator_optimizer, DataLoader(rows, batch_size=8)
)


def judge(logits, value):
    """Return the loss for the judgement that rows are real (1) or fake (0)."""
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


for real, noise in loader:
    fake = generator(noise)
    discriminator_optimizer.zero_grad()
    both = discriminator(torch.cat([real, fake.detach()]))
    accelerator.backward(judge(both[: len(real)], 1.0) + judge(both[len(real) :], 0.0))
    discriminator_optimizer.step()
    generator_optimizer.zero_grad()
    accelerator.backward(judge(discriminator(fake), 1.0))
    generator_optimizer.step()
parts = accelerator.unwrap_model(generator), accelerator.unwrap_model(discriminator)
print("checksum", sum(p.double().sum().item() for part in parts for p in part.parameters()))
