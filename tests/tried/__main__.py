"""Train what others wrote, compare with plain loops, and write docs/tried.md: ``python -m tests.tried``.

Each model trains under each strategy on two engines, in float64, and in a plain loop of PyTorch in this process on the
same batches. Each script runs by ``cluster.torchrun``, and its ranks must end with equal parameters.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import default_collate
from transformers import ViTConfig, ViTForImageClassification

import dtkit
from tests.support.hugging_face import MODELS, make_llama, make_samples
from tests.tried.script_table import INTRODUCTION, make_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parents[2] / "docs" / "tried.md"
TRAININGS = {
    "regression": "A linear regression",
    "conv_net": "A convolutional net",
    "language_model": "A small GPT2 of transformers",
    "text_classification": "A small BERT of transformers, as by run_glue.py",
    "gan": "A GAN, with two optimizers",
}
STRATEGIES = [dtkit.DataParallel(), dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)]
BATCH, STEPS, BOUND = 7, 4, 1e-6
PACKAGES = ("torch", "transformers", "peft", "pytorch-lightning", "accelerate")


def make_lora() -> Any:
    return get_peft_model(make_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()


def make_vit() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(**sizes, image_size=16, patch_size=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return ViTForImageClassification(config).double()


def make_images(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    return [{"pixel_values": picture, "labels": torch.tensor(k % 2)} for k, picture in enumerate(pictures)]


def list_models() -> Iterator[tuple[str, Callable[[], Any], list[Any]]]:
    """Yield (name, function that makes the model, its samples)."""
    for name, make in MODELS.items():
        yield type(make()).__name__, make, make_samples(28, name)
    yield "LlamaForCausalLM with LoRA (peft)", make_lora, make_samples(28, "llama")
    yield "ViTForImageClassification", make_vit, make_images(28)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train_in_plain_loop(model: Any, samples: list[Any]) -> dict[str, torch.Tensor]:
    optimizer = make_sgd([p for p in model.train().parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**default_collate(samples[step * BATCH : (step + 1) * BATCH])).loss.backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def compare_with_plain_loop(cluster: dtkit.Cluster, make: Callable[[], Any], samples: Any, strategy: Any) -> str:
    """Return the largest difference of a parameter, or why the strategy refuses the model."""
    expected = train_in_plain_loop(make(), samples)
    try:
        run = cluster.train(
            make(), samples, optimizer=make_sgd, batch_size=BATCH, steps=STEPS, shuffle=None, strategy=strategy
        )
        run.wait(120)
    except (dtkit.DtkitError, ValueError) as error:
        reason = str(error).splitlines()[0][:120]
        has_lost_engine = any(failure.is_engine_gone for failure in getattr(error, "failures", ()))
        return f"**an engine ended: {reason}**" if has_lost_engine else f"refused: {reason}"
    state = run.model.state_dict()
    difference = max(float((state[name] - value).abs().max()) for name, value in expected.items() if value.numel())
    return f"{difference:.1e}" if difference <= BOUND else f"**WRONG by {difference:.1e}**"


def write_page(cluster: dtkit.Cluster) -> bool:
    """Write the page; return whether all is well."""
    names = [f"`{strategy!r}`" for strategy in STRATEGIES]
    lines = ["# Models and scripts that were tried", "", *_INTRODUCTION.splitlines(), ""]
    lines += [f"| model | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for name, make, samples in list_models():
        cells = [compare_with_plain_loop(cluster, make, samples, strategy) for strategy in STRATEGIES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        *INTRODUCTION.splitlines(),
        "",
        *make_table(cluster, TRAININGS),
    ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    lines += ["", *_TRAINER.splitlines(), "", f"With {versions}.", ""]
    PAGE.write_text("\n".join(lines))
    return "**" not in "".join(lines)


_INTRODUCTION = """\
`make test-all` writes this page. Each model comes from a small config with random weights, in float64, and was trained
without a change, by `cluster.train(model, samples, optimizer=make_sgd, batch_size=7, steps=4, shuffle=None,
strategy=...)` on two engines. A cell has the largest difference of any parameter from a plain loop of PyTorch in one
process, after four steps on the same batches. Samples have different lengths, and their padding has labels of -100."""


_TRAINER = """\
Without `--average_tokens_across_devices=False`, this Trainer multiplies the loss of a classifier by the number of
ranks: it takes the loss for a sum over all ranks' labels, and BERT's is the mean over its own."""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), dtkit.Cluster(2, threads=1) as started:
        sys.exit(not write_page(started))
