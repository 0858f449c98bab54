"""Train what others wrote, compare with plain loops, and write docs/tried.md: ``python -m tests.tried``.

Each model trains under each strategy on two engines, in float64, and in a plain loop of PyTorch in this process on the
same batches. Each script runs by ``cluster.torchrun``, and its ranks must end with equal parameters.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import runpy
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import default_collate
from transformers import ViTConfig, ViTForImageClassification

import dtkit
from dtkit.training.script_task import submit_script
from tests.support.hugging_face import MODELS, make_llama, make_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parents[2] / "docs" / "tried.md"
FOLDER = Path(__file__).parent
SHUFFLING = "lightning"
"""Library that shuffles the rows in its own way, also of a DataLoader that doesn't."""
DIVIDING_BY_MORE = "trainer_language_model"
"""Script whose loss of GPT2 is smaller by 1/16 here: it also counts the first label of each row, which has no loss."""
TRAININGS = {
    "regression": "A linear regression",
    "conv_net": "A convolutional net",
    "language_model": "A small GPT2 of transformers",
    "text_classification": "A small BERT of transformers, as by run_glue.py",
    "gan": "A GAN, with two optimizers",
}
ARGUMENTS = {
    "trainer_text_classification": [
        *("--output_dir=out", "--do_train", "--do_eval", "--use_cpu", "--per_device_train_batch_size=4"),
        *("--num_train_epochs=2", "--learning_rate=1e-3", "--save_strategy=no", "--report_to=none"),
        *("--disable_tqdm=True", "--train_sampling_strategy=sequential"),
        "--average_tokens_across_devices=False",
    ]
}
"""Arguments of scripts that take some."""
LIBRARIES = {
    "accelerate": "Accelerate",
    "ddp": "DistributedDataParallel",
    "lightning": "Lightning's Trainer",
    "trainer": "Hugging Face's Trainer",
}
STRATEGIES = [dtkit.DataParallel(), dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)]
BATCH, STEPS, BOUND, CHECKSUM_BOUND = 7, 4, 1e-6, 1e-5
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
        return f"refused: {str(error).splitlines()[0][:120]}"
    state = run.model.state_dict()
    difference = max(float((state[name] - value).abs().max()) for name, value in expected.items() if value.numel())
    return f"{difference:.1e}" if difference <= BOUND else f"**WRONG by {difference:.1e}**"


def run_script(cluster: dtkit.Cluster, path: Path) -> tuple[str, float | None]:
    """Return (whether a script's ranks end with equal parameters, their sum)."""
    task = submit_script(cluster._engine_group, str(path), tuple(ARGUMENTS.get(path.stem, ())), {})
    try:
        task.wait(180)
    except dtkit.DtkitError as error:
        return f"**FAILED: {str(error).splitlines()[0][:120]}**", None
    checksums = {line for _, line in task.output if line.startswith("checksum")}
    if len(checksums) == 1:
        return "unchanged", float(checksums.pop().removeprefix("checksum"))
    return f"**ranks differ: {sorted(checksums)}**", None


def compare_scripts(cluster: dtkit.Cluster, training: str) -> Iterator[str]:
    """Yield a row for each script of a training: how it ran, and the same with dtkit."""
    same = FOLDER / "with_dtkit" / f"{training}.py"
    expected = runpy.run_path(str(same), {"cluster": cluster})["checksum"]
    for path in sorted((FOLDER / "scripts").glob(f"*_{training}.py")):
        library = path.stem.removesuffix(f"_{training}")
        outcome, checksum = run_script(cluster, path)
        difference = abs(expected - (checksum or 0.0))
        result = "same" if difference < CHECKSUM_BOUND else f"**other, {difference:.1e}**"
        if library == SHUFFLING:
            result = "rows in another order"
        if path.stem == DIVIDING_BY_MORE and checksum is not None:
            result = "a smaller loss: the Trainer also counts labels that have none"
        yield format_row(path, library, outcome, (count_lines(path), count_lines(same)), result)


def format_row(path: Path, library: str, outcome: str, lines: tuple[int, int], result: str) -> str:
    """Return a script's row of the table."""
    arguments = "".join(f', "{each}"' for each in ARGUMENTS.get(path.stem, ()))
    title = TRAININGS[path.stem.removeprefix(f"{library}_")]
    command = f'`cluster.torchrun("{path.name}"{arguments})`'
    more = "" if lines[1] <= lines[0] else "**"
    return (
        f"| {title} | {LIBRARIES[library]} | {command} | {outcome} | {lines[0]} | {more}{lines[1]}{more} | {result} |"
    )


def count_lines(path: Path) -> int:
    """Return the number of lines with code."""
    text = ast.unparse(_drop_docstrings(ast.parse(path.read_text())))
    return sum(1 for line in text.splitlines() if line.strip())


def _drop_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


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
        *_SCRIPTS.splitlines(),
        "",
        "| training | library | command | its script ran | lines | with dtkit | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row for training in TRAININGS for row in compare_scripts(cluster, training)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    lines += ["", *_TRAINER.splitlines(), "", f"With {versions}.", ""]
    PAGE.write_text("\n".join(lines))
    return "**" not in "".join(lines)


_INTRODUCTION = """\
`make test-all` writes this page. Each model comes from a small config with random weights, in float64, and was trained
without a change, by `cluster.train(model, samples, optimizer=make_sgd, batch_size=7, steps=4, shuffle=None,
strategy=...)` on two engines. A cell has the largest difference of any parameter from a plain loop of PyTorch in one
process, after four steps on the same batches. Samples have different lengths, and their padding has labels of -100."""


_SCRIPTS = """\
Scripts of other libraries by `cluster.torchrun`, on two ranks (`tests/tried/scripts`). Next to them the same training
with `cluster.train` (`tests/tried/with_dtkit`): the lines of each, model and data included, formatted alike, and
whether the trained parameters are the same. A script also needs the command `torchrun --nproc-per-node 2 SCRIPT`, or
Accelerate's `accelerate launch`; in a notebook `cluster = dtkit.Cluster(2)` takes its place, once."""


_TRAINER = """\
Without `--average_tokens_across_devices=False`, this Trainer multiplies the loss of a classifier by the number of
ranks: it takes the loss for a sum over all ranks' labels, and BERT's is the mean over its own."""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), dtkit.Cluster(2, threads=1) as started:
        sys.exit(not write_page(started))
