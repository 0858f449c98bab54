"""A GAN."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
draws = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(64, 16, generator=draws), torch.randn(64, 8, generator=draws))


def judge(logits, value):
    """Return the loss for the judgement that rows are real (1) or fake (0)."""
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def training_step(nets, batch, optimizers):
    """Update both nets."""
    (generator, discriminator), (real, noise) = nets, batch
    generator_optimizer, discriminator_optimizer = optimizers
    fake = generator(noise)
    discriminator_optimizer.zero_grad()
    both = discriminator(torch.cat([real, fake.detach()]))
    (judge(both[: len(real)], 1.0) + judge(both[len(real) :], 0.0)).backward()
    discriminator_optimizer.step()
    generator_optimizer.zero_grad()
    loss = judge(discriminator(fake), 1.0)
    loss.backward()
    generator_optimizer.step()
    return loss


run = cluster.train(
    nn.ModuleList([generator, discriminator]), DataLoader(rows, batch_size=16), training_step=training_step,
    optimizer=lambda model: [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in model],
    epochs=1,
)  # fmt: skip
run.wait()
checksum = sum(p.double().sum().item() for p in run.model.parameters())
