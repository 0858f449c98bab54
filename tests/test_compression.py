"""Gradients are compressed on their way to other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtkit.strategies.compression import make_comm_hook


@pytest.mark.parametrize(("method", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_gradients_travel_in_half_precision_and_return_in_their_own(method: str, dtype: torch.dtype):
    sent: list[torch.dtype] = []

    def start_all_reduce(tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        sent.append(tensor.dtype)
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([tensor * 2])
        return done

    group: Any = SimpleNamespace(start_all_reduce=start_all_reduce)
    gradients = torch.tensor([1.0, 0.5])
    bucket = SimpleNamespace(buffer=lambda: gradients)
    reduced = make_comm_hook(method, group)(bucket).wait()
    assert sent == [dtype]
    assert (reduced.dtype, reduced.tolist()) == (torch.float32, [2.0, 1.0])
