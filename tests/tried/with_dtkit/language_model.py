"""The language model of the script for Hugging Face's Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
run = cluster.train(model, rows, optimizer=torch.optim.AdamW, batch_size=8, steps=4)
run.wait()
checksum = float(sum(p.double().sum() for p in run.model.parameters()))
