"""Lightning's Trainer with DDP on two processes that torchrun starts."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    """Linear regression."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _batch_idx):
        """Return the loss."""
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


generator = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
module = Module()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(rows, batch_size=4))
print("checksum", sum(p.double().sum().item() for p in module.parameters()))
