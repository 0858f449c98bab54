"""Hugging Face's Trainer on a small BERT, in the manner of its example run_glue.py, with arguments like its own."""

import sys

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)  # fmt: skip

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
set_seed(arguments.seed)
words = ["[PAD]", "[UNK]", *(f"w{k}" for k in range(62))]
rules = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
rules.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="[PAD]", unk_token="[UNK]")
sentences = [" ".join(f"w{k * n % 62}" for n in range(1, 4 + k % 9)) for k in range(64)]
rows = Dataset.from_dict({"sentence": sentences, "label": [k % 2 for k in range(64)]})
rows = rows.map(lambda examples: tokenizer(examples["sentence"], truncation=True, max_length=10), batched=True)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(**sizes, **dropout, max_position_embeddings=16))


def compute_metrics(prediction):
    """Return the share of right answers."""
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


trainer = Trainer(
    model, arguments, train_dataset=rows.select(range(48)), eval_dataset=rows.select(range(48, 64)),
    compute_metrics=compute_metrics, processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer),
)  # fmt: skip
if arguments.do_train:
    trainer.train()
    trainer.save_model()
if arguments.do_eval:
    trainer.log_metrics("eval", trainer.evaluate())
print("checksum", sum(p.double().sum().item() for p in model.parameters()))
