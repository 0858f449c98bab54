"""Train models of torchvision and timm, compare with plain loops, and write docs/tried-vision.md.

Run ``python -m tests.tried.vision`` after ``pip install .[vision]``. The tests' environment lacks both libraries, since
the package index has no torchvision for PyTorch without CUDA. With a GPU, two engines share it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dtkit
from tests.tried import script_table

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "tried-vision.md"
BATCH, STEPS, BOUND, CLASSES, SIZE = 8, 4, 1e-6, 10, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = ("torch", "torchvision", "timm", "pytorch-lightning", "accelerate")
PAIRS = [dtkit.DataParallel(), dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)]
"""Strategies for two engines."""

_INTRODUCTION = """\
`python -m tests.tried.vision` writes this page where torchvision and timm are installed. Each model has random weights,
in float64, without dropout, and was trained without a change: `cluster.train(model, (images, labels),
loss=nn.CrossEntropyLoss(), ...)`. A cell has the largest difference of any parameter or buffer from a plain loop of
PyTorch in one process, after four steps on the same batches. With batch normalization, each of two ranks normalizes by
its own half of a batch, so those models are compared on one engine only.
"""
_SCRIPTS = """\
The same training by scripts of other libraries and by dtkit, on CPUs, as on the page of
[models and scripts](tried.md):
"""


def list_models() -> dict[str, tuple[Callable[[], Any], bool]]:
    """Return functions that make models, and whether two ranks compute what one does."""
    import timm
    import torchvision

    def make_vision_transformer() -> Any:
        return torchvision.models.VisionTransformer(SIZE, 16, 4, 4, 64, 128, num_classes=CLASSES)

    def make_timm(name: str, **options: Any) -> Callable[[], Any]:
        return lambda: timm.create_model(name, num_classes=CLASSES, **options)

    return {
        "torchvision resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), False),
        "torchvision VisionTransformer": (make_vision_transformer, True),
        "torchvision ConvNeXt": (make_convnext, True),
        "timm vit_tiny_patch16_224": (make_timm("vit_tiny_patch16_224", img_size=SIZE), True),
        "timm convnext_atto": (make_timm("convnext_atto"), True),
        "timm mobilenetv3_small_100": (make_timm("mobilenetv3_small_100", drop_rate=0.0), False),
    }


def make_convnext() -> Any:
    """Return a small model without stochastic depth, which draws differently on each rank."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=CLASSES)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH * STEPS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return images, torch.arange(len(images)) % CLASSES


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def make_model(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().double()


def train_in_plain_loop(model: Any) -> dict[str, torch.Tensor]:
    model = model.to(DEVICE).train()
    optimizer, loss = make_sgd(model.parameters()), nn.CrossEntropyLoss()
    for inputs, labels in zip(*(part.split(BATCH) for part in make_data()), strict=True):
        optimizer.zero_grad()
        loss(model(inputs.to(DEVICE)), labels.to(DEVICE)).backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def compare(cluster: dtkit.Cluster, make: Callable[[], Any], strategy: Any) -> str:
    """Return the largest difference of a parameter, or why the strategy refuses the model."""
    expected = train_in_plain_loop(make_model(make))
    try:
        run = cluster.train(
            make_model(make),
            make_data(),
            loss=nn.CrossEntropyLoss(),
            optimizer=make_sgd,
            batch_size=BATCH,
            steps=STEPS,
            shuffle=None,
            strategy=strategy,
        )
        run.wait(240)
    except (dtkit.DtkitError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0][:120]}"
    state = run.model.state_dict()
    difference = max(float((state[name].cpu() - value).abs().max()) for name, value in expected.items())
    return f"{difference:.1e}" if difference <= BOUND else f"**WRONG by {difference:.1e}**"


def make_table() -> list[str]:
    names = [f"2 engines, {type(strategy).__name__}" for strategy in PAIRS]
    lines = [f"| model | 1 engine | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    with contextlib.ExitStack() as stack:
        single = stack.enter_context(dtkit.Cluster(1, device=DEVICE))
        pair = stack.enter_context(dtkit.Cluster(2, device=DEVICE, threads=1))
        for name, (make, is_same_on_two) in list_models().items():
            cells = [compare(single, make, dtkit.DataParallel())]
            cells += [compare(pair, make, strategy) if is_same_on_two else "" for strategy in PAIRS]
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Write the page; exit with 1 if a result is wrong."""
    if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("timm") is None:
        print("torchvision and timm are not installed (pip install .[vision]): docs/tried-vision.md stays as it is")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    table = make_table()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), dtkit.Cluster(2, threads=1) as cluster:
        scripts = script_table.make_table(cluster, {"resnet": "torchvision's ResNet-18"})
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    device = f"one {torch.cuda.get_device_name()}" if DEVICE == "cuda" else "CPUs"
    lines = ["# Vision models that were tried", "", *_INTRODUCTION.splitlines(), "", *table, ""]
    lines += [*_SCRIPTS.splitlines(), "", *scripts, ""]
    PAGE.write_text("\n".join([*lines, f"On {device}, with {versions}.", ""]))
    sys.exit("**" in "\n".join(table + scripts))


if __name__ == "__main__":
    main()
