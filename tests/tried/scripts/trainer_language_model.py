"""Hugging Face's Trainer on a small GPT2."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=1))
tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    "out", num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
    train_sampling_strategy="sequential",
)  # fmt: skip
Trainer(model, arguments, train_dataset=rows).train()
print("checksum", sum(p.double().sum().item() for p in model.parameters()))
