"""The reference of :mod:`tests.bench.gpu`: a plain PyTorch loop on one device.

The loop does the same as a careful user's script: shuffled batches from pinned memory, autocast, a fused optimizer. It
keeps no records and checks nothing. Each line of its input is a number of steps; it answers with their seconds.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch

from tests.bench.gpt import GPTS, optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.gpt import Gpt


def batches(gpt: Gpt, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield batches, shuffled again in each epoch."""
    tokens = gpt.tokens()
    while True:
        for rows in torch.split(torch.randperm(len(tokens)), gpt.batch):
            batch = tokens[rows]
            yield batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch


def main(name: str, mode: str) -> None:
    """Take a window of steps for each line of the input."""
    gpt, device = GPTS[name], torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = gpt.model().to(device)
    if mode == "compiled":
        model.compile()
    update, data = optimizer(list(model.parameters())), batches(gpt, device)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            tokens = next(data)
            update.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            update.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
