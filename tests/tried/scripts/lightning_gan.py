"""A GAN in a Lightning module with manual optimization."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def judge(logits, value):
    """Return the loss for the judgement that rows are real (1) or fake (0)."""
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


class Module(pl.LightningModule):
    """GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch, _batch_idx):
        """Update both nets."""
        real, noise = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        fake = self.generator(noise)
        self.toggle_optimizer(discriminator_optimizer)
        discriminator_optimizer.zero_grad()
        both = self.discriminator(torch.cat([real, fake.detach()]))
        self.manual_backward(judge(both[: len(real)], 1.0) + judge(both[len(real) :], 0.0))
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)
        self.toggle_optimizer(generator_optimizer)
        generator_optimizer.zero_grad()
        self.manual_backward(judge(self.discriminator(self.generator(noise)), 1.0))
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

    def configure_optimizers(self):
        """Return an optimizer for each net."""
        nets = self.generator, self.discriminator
        return [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in nets]


draws = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(64, 16, generator=draws), torch.randn(64, 8, generator=draws))
module = Module()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(rows, batch_size=8))
print("checksum", sum(p.double().sum().item() for p in module.parameters()))
