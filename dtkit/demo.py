"""Demo for the terminal: ``python -m dtkit.demo`` trains a small network on digits and verifies the training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtkit

NUM_HELD_OUT = 297


def make_network() -> nn.Module:
    """Return a convolutional network for 8 x 8 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of correct predictions."""
    return (output.argmax(1) == target).float().mean()


def load_dataset() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return scikit-learn's digits, shuffled: (training, held-out) images of shape (1, 8, 8), with labels."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        sys.exit("the demo trains on scikit-learn's digits; install it: pip install scikit-learn")
    import numpy as np

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype("float32").reshape(-1, 1, 8, 8)
    labels = labels[order]
    return (images[NUM_HELD_OUT:], labels[NUM_HELD_OUT:]), (images[:NUM_HELD_OUT], labels[:NUM_HELD_OUT])


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, verify, and write a figure."""
    parser = argparse.ArgumentParser(prog="python -m dtkit.demo", description=__doc__)
    parser.add_argument("--engines", type=int, help="number of engines (as many as this machine can run)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data (%(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("dtkit-demo.png"), help="path of the figure (%(default)s)")
    options = parser.parse_args(arguments)
    if not options.picture.parent.is_dir():  # checked before anything starts
        parser.error(
            f"--picture {options.picture}: the folder {options.picture.parent} does not exist; make it, or give "
            "another path"
        )
    training, held_out = load_dataset()
    with dtkit.Cluster(options.engines) as cluster:
        print(cluster, "\n")
        part = cluster.partition(training, by="stratified", seed=0)
        print(part, "\n")
        run = cluster.train(
            make_network(),
            part,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            batch_size=64,
            epochs=options.epochs,
            metrics={"accuracy": accuracy},
            validation=held_out,
        )
        # waits: every call to the engines has a timeout, so the run ends by itself
        run.wait()
        evaluation = run.evaluate(held_out)
        print(f"\naccuracy on {evaluation.samples} held-out rows: {100 * evaluation.values['accuracy']:.1f} %\n")
        run.verify()
        run.figure().savefig(options.picture, dpi=200)
        print(f"\nthe figure of the run: {options.picture.resolve()}")


if __name__ == "__main__":
    main()
