"""A small GPT2."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=1))
tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
run = cluster.train(
    model, {"input_ids": tokens, "labels": tokens}, batch_size=8, shuffle=None, epochs=1,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
)  # fmt: skip
run.wait()
checksum = sum(p.double().sum().item() for p in run.model.parameters())
