"""A small GPT2 in a Lightning module."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


class Module(pl.LightningModule):
    """Language model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=1))

    def training_step(self, batch, _batch_idx):
        """Return the loss."""
        return self.model(**batch).loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
module = Module().train()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(rows, batch_size=4))
print("checksum", sum(p.double().sum().item() for p in module.parameters()))
