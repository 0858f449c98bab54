"""A small GPT2 in a loop of one's own under Accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=1))
tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(**batch).loss)
    optimizer.step()
print("checksum", sum(p.double().sum().item() for p in accelerator.unwrap_model(model).parameters()))
