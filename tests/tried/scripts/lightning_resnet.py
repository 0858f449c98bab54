"""torchvision's ResNet-18 in a Lightning module."""

import pytorch_lightning as pl
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    """Classifier of images."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torchvision.models.resnet18(num_classes=10)
        self.loss_function = nn.CrossEntropyLoss()

    def training_step(self, batch, _batch_idx):
        """Return the loss."""
        x, y = batch
        return self.loss_function(self.model(x), y)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(images, torch.arange(64) % 10)
module = Module()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(rows, batch_size=16))
print("checksum", sum(p.double().sum().item() for p in module.parameters()))
