"""The same BERT, data and schedule as with Hugging Face's Trainer."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)  # fmt: skip

import dtkit

words = ["[PAD]", "[UNK]", *(f"w{k}" for k in range(62))]
rules = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
rules.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="[PAD]", unk_token="[UNK]")
sentences = [" ".join(f"w{k * n % 62}" for n in range(1, 4 + k % 9)) for k in range(64)]
rows = Dataset.from_dict({"sentence": sentences, "label": [k % 2 for k in range(64)]})
rows = rows.map(lambda examples: tokenizer(examples["sentence"], truncation=True, max_length=10), batched=True)
rows = rows.remove_columns("sentence")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(**sizes, **dropout, max_position_embeddings=16))
run = cluster.train(
    model, rows.select(range(48)), validation=rows.select(range(48, 64)), batch_size=8, shuffle=None, epochs=2,
    collate_fn=DataCollatorWithPadding(tokenizer), strategy=dtkit.DataParallel(clip_grad_norm=1.0),
    metrics={"accuracy": lambda logits, labels: (logits.argmax(-1) == labels).double().mean()},
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0),
    lr_scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 0, 12),
)  # fmt: skip
run.wait()
run.model.save_pretrained("out")
checksum = sum(p.double().sum().item() for p in run.model.parameters())
