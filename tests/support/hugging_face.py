"""Models of Hugging Face's transformers from small configs, with random weights and without dropout."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY, LENGTH, CLASSES = 64, 10, 2
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def make_llama(**sizes: int) -> Any:
    torch.manual_seed(0)
    defaults = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**(defaults | sizes))
    return LlamaForCausalLM(config).double()


def make_mixtral() -> Any:
    """Return a mixture of experts whose loss has a large share of the routers' loss."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts, **routers)).double()


def make_qwen_moe() -> Any:
    torch.manual_seed(0)
    sizes = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    widths = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **experts, **widths, **routers)).double()


MIXTURES = {"mixtral": make_mixtral, "qwen2_moe": make_qwen_moe}


def make_gpt2() -> Any:
    """Return a model whose embedding and head are one parameter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double()


def _make_bert_config() -> BertConfig:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**_SIZES, **dropout, intermediate_size=64, max_position_embeddings=64, num_labels=CLASSES)


def make_bert() -> Any:
    """Return a model with tied weights and tied biases."""
    torch.manual_seed(0)
    return BertForMaskedLM(_make_bert_config()).double()


def make_classifier() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(_make_bert_config()).double()


def make_t5() -> Any:
    """Return a model of an encoder and a decoder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config).double()


MODELS = {"llama": make_llama, "gpt2": make_gpt2, "bert": make_bert, "classifier": make_classifier, "t5": make_t5}


def make_samples(count: int, model: str) -> list[dict[str, torch.Tensor]]:
    """Return samples of different lengths, padded: token ids, attention mask and labels."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for k in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        length = int(torch.randint(3, LENGTH + 1, (1,), generator=generator))
        mask = (torch.arange(LENGTH) < length).long()
        labels = torch.tensor(k % CLASSES) if model == "classifier" else torch.where(mask.bool(), tokens, -100)
        samples.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return samples
