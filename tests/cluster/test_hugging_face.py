"""Models of Hugging Face's transformers, as they are: they compute their own loss, under every strategy."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

import dtkit
from tests.support.marks import slow

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MBartConfig,
    MBartForConditionalGeneration,
    default_data_collator,
)

from tests.support.hugging_face import MODELS, make_gpt2, make_llama, make_mixtral, make_samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

STRATEGIES = {
    "data": dtkit.DataParallel(),
    "sharded": dtkit.Sharded(),
    "tensor": dtkit.TensorParallel(2),
    "pipeline": dtkit.Pipeline(2, 2),
}
FAST = [("classifier", "data"), ("gpt2", "tensor"), ("bert", "pipeline")]
CASES = [
    (model, strategy) if (model, strategy) in FAST else slow((model, strategy))
    for model in MODELS
    for strategy in STRATEGIES
]


def train(cluster: dtkit.Cluster, model: Any, samples: Any, **options: Any) -> dtkit.Run:
    """Train on batches of seven, which neither two ranks nor two micro-batches can split evenly."""
    defaults: dict[str, Any] = {"optimizer": make_sgd, "batch_size": 7, "steps": 4, "shuffle": "global"}
    run = cluster.train(model, samples, **(defaults | options))
    run.wait(90)
    return run


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def match_share(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == labels).double().mean()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_model_trains_on_its_own_loss_as_in_one_process(cluster2: dtkit.Cluster, case: tuple[str, str]):
    name, strategy = case
    samples, held_out = make_samples(24, name), make_samples(9, name)
    run = train(cluster2, MODELS[name](), samples, strategy=STRATEGIES[strategy], metrics={"match": match_share})
    verification = run.verify(4)
    assert verification.verdict == "PASS", verification.text()
    evaluation = run.evaluate(held_out)
    batch, model = default_collate(held_out), run.model.eval()
    with torch.no_grad():
        output = model(**batch)
    assert evaluation["loss"] == pytest.approx(float(output.loss), abs=1e-5)  # transformers computes it in float32
    assert evaluation["match"] == pytest.approx(float(match_share(output.logits, batch["labels"])), abs=1e-12)


def test_trained_model_generates_and_is_saved(cluster2: dtkit.Cluster, tmp_path: Path):
    run = train(cluster2, make_llama(), make_samples(16, "llama"), strategy=dtkit.Pipeline(2, 2))
    tokens = torch.tensor([[1, 2, 3]])
    generated = run.model.generate(tokens, max_new_tokens=4, do_sample=False)
    run.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded.generate(tokens, max_new_tokens=4, do_sample=False), generated)


def train_float32_llama(cluster: dtkit.Cluster, strategy: Any, optimizer: Any) -> dtkit.Run:
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    tokens = torch.randint(64, (96, 16))
    data = {"input_ids": tokens, "labels": tokens}
    return train(cluster, model, data, strategy=strategy, optimizer=optimizer, batch_size=16, steps=20, shuffle="shard")


def test_rounding_that_adam_amplifies_passes_with_its_reason(cluster2: dtkit.Cluster):
    verification = train_float32_llama(cluster2, dtkit.TensorParallel(2), make_adam).verify()
    assert verification.max_difference > verification.tolerance
    assert verification.float64_difference < 1e-12
    assert verification.verdict == "PASS", verification.text()
    assert "it is rounding in float32, which the training amplifies" in verification.text()


class WrongAdam(torch.optim.AdamW):
    """AdamW that takes gradients of sliced parameters for 1 % larger: those of all ranks, or of one."""

    def __init__(self, parameters: Any, wrong_ranks: tuple[int, ...]) -> None:
        super().__init__(parameters, lr=0.01)
        self._wrong_ranks = wrong_ranks

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, DTensor) and dist.get_rank() in self._wrong_ranks:
                    p.grad.to_local().mul_(1.01)
        return super().step(closure)


@pytest.mark.parametrize("wrong_ranks", [(1,), slow((0, 1))])
def test_error_that_hides_among_amplified_rounding_fails(cluster2: dtkit.Cluster, wrong_ranks: tuple[int, ...]):
    """Adam's steps hardly depend on the scale of the gradients, so float32 alone can't tell."""
    optimizer = functools.partial(WrongAdam, wrong_ranks=wrong_ranks)
    verification = train_float32_llama(cluster2, dtkit.TensorParallel(2), optimizer).verify()
    assert verification.verdict == "FAIL", verification.text()
    assert "rounding in float32 doesn't explain it" in verification.text()


def make_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("bert", "pipeline", "data"),
        ("bert", "data", "pipeline"),
        ("bert", "pipeline", "pipeline"),
        ("gpt2", "tensor", "data"),
        ("gpt2", "data", "tensor"),
        ("gpt2", "pipeline", "tensor"),
    ],
)
def test_checkpoint_of_another_strategy_continues_the_training(
    cluster2: dtkit.Cluster, tmp_path: Path, model: str, first: str, second: str
):
    """The optimizer's state of a tied parameter belongs to all of its names; GPT2's queries, keys, values are fused."""
    options: dict[str, Any] = {"optimizer": make_adam, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    samples, make = make_samples(21, model), MODELS[model]
    train(cluster2, make(), samples, strategy=STRATEGIES[first], **(options | {"steps": 2}))
    run = train(cluster2, make(), samples, strategy=STRATEGIES[second], **options, resume_from=tmp_path)
    expected = train(cluster2, make(), samples, optimizer=make_adam).model.state_dict()
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)  # its loss is float32


@pytest.mark.slow
def test_ranks_with_both_ends_of_the_model_share_tied_weights(cluster2: dtkit.Cluster):
    """The first and the last of these stages are on one rank, which then has one parameter for both."""
    strategy = dtkit.Pipeline(2, 2, "ZBVZeroBubble", clip_grad_norm=0.01)
    run = train(cluster2, make_gpt2(), make_samples(14, "gpt2"), strategy=strategy)
    verification = run.verify(4)
    assert verification.verdict == "PASS", verification.text()


def test_router_losses_of_a_mixture_of_experts_count_on_engines(cluster2: dtkit.Cluster):
    samples = make_samples(1, "llama") * 8  # ranks with equal samples have equal router losses
    model, reference = make_mixtral(), make_mixtral()
    optimizer = make_sgd(reference.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        output = reference(**default_collate(samples))
        assert output.aux_loss > 0
        output.loss.backward()
        optimizer.step()
    run = train(cluster2, model, samples, batch_size=8, steps=2)
    trained = run.model.state_dict()
    assert max(float((trained[k] - v).abs().max()) for k, v in reference.state_dict().items()) <= 1e-6


def test_norm_counts_a_tied_parameter_once(cluster2: dtkit.Cluster):
    samples = make_samples(14, "gpt2")
    strategies = dtkit.Pipeline(2, 2, clip_grad_norm=0.01), dtkit.DataParallel(clip_grad_norm=0.01)
    norms = [
        train(cluster2, make_gpt2(), samples, strategy=strategy, steps=1).history.column("grad_norm")[0]
        for strategy in strategies
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_collator_of_transformers_makes_the_batches(cluster2: dtkit.Cluster):
    """The samples have lists of numbers, from which only the collator makes tensors."""
    samples = make_samples(16, "classifier")
    plain = [{name: value.tolist() for name, value in sample.items()} for sample in samples]
    losses = []
    for rows, options in ((samples, {}), (plain, {"collate_fn": default_data_collator})):
        run = train(cluster2, MODELS["classifier"](), rows, steps=2, **options)
        losses.append(run.history.loss()[1].tolist())
    assert losses[0] == pytest.approx(losses[1])


def test_pipeline_refuses_batches_of_another_length(cluster2: dtkit.Cluster):
    samples = make_samples(14, "bert")
    shorter = [{name: value[:6] for name, value in sample.items()} for sample in samples[7:]]
    options: dict[str, Any] = {"strategy": STRATEGIES["pipeline"], "shuffle": None}
    with pytest.raises(dtkit.errors.EngineError, match=r"the model was traced for .*Pad all samples to one length"):
        train(cluster2, MODELS["bert"](), samples[:7] + shorter, **options)


def test_batch_without_labels_is_explained(cluster2: dtkit.Cluster):
    samples = [{"input_ids": sample["input_ids"]} for sample in make_samples(8, "llama")]
    with pytest.raises(dtkit.errors.FirstBatchError, match=r"the model returned no loss, .* if the batch has 'labels'"):
        train(cluster2, make_llama(), samples)


def test_pipeline_refuses_labels_that_cannot_mark_padding(cluster2: dtkit.Cluster):
    several = torch.tensor([1.0, 0.0])  # yes or no for each of two classes
    samples = [sample | {"labels": several} for sample in make_samples(8, "classifier")]
    with pytest.raises(dtkit.errors.EngineError, match=r"the batch has float32 labels, .* Give loss="):
        train(cluster2, MODELS["classifier"](), samples, strategy=dtkit.Pipeline(2, 2))


def make_mbart() -> Any:
    """Return a model whose decoder begins with the last label of each row."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return MBartForConditionalGeneration(MBartConfig(**sizes, **heads, dropout=0.0, pad_token_id=0)).double()


@pytest.mark.slow
def test_model_that_needs_a_label_in_each_row_names_the_padding(cluster2: dtkit.Cluster):
    samples = make_samples(16, "t5")
    options: dict[str, Any] = {"strategy": dtkit.Pipeline(2, 2), "shuffle": None}
    with pytest.raises(dtkit.errors.EngineError, match=r"(?s)out of bounds.*all labels of a padding row are -100"):
        train(cluster2, make_mbart(), samples, **options, steps=1)
    run = train(cluster2, make_mbart(), samples, **options, batch_size=8, steps=2)
    expected = make_mbart().train()
    optimizer = make_sgd(expected.parameters())
    for batch in (samples[:8], samples[8:]):
        optimizer.zero_grad()
        expected(**default_collate(batch)).loss.backward()
        optimizer.step()
    for p, q in zip(run.model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-7)  # transformers computes the loss in float32
