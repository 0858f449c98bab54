"""The largest absolute gradients of a reference's steps."""

from __future__ import annotations

import torch
from torch import nn

from dtkit.engine.largest_gradients import LargestGradients


def compute(*gradients: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return the largest sizes of these gradients of one parameter each, step by step."""
    largest = LargestGradients()
    for step in gradients:
        pairs = []
        for name, gradient in step.items():
            p = nn.Parameter(torch.zeros(3, dtype=torch.float32 if gradient is None else gradient.dtype))
            p.grad = gradient
            pairs.append((name, p))
        largest.update(pairs)
    return largest.compute()


def test_gradients_of_both_signs_count_by_their_size():
    first, second = torch.tensor([1.0, -4.0, -0.0]), torch.tensor([-2.0, 3.0, 0.0])
    assert compute({"w": first}, {"w": second})["w"].tolist() == [2, 4, 0]
    assert first.tolist() == [1, -4, 0]  # the optimizer still needs it


def test_a_parameter_without_gradient_in_some_steps_keeps_its_largest():
    one, two = torch.tensor([1.0, 0, 0]), torch.tensor([0, -2.0, 0])
    found = compute({"w": one, "b": None}, {"w": None, "b": None}, {"w": two, "b": one})
    assert {name: size.tolist() for name, size in found.items()} == {"w": [1, 2, 0], "b": [1, 0, 0]}


def test_a_nonfinite_gradient_stays_visible():
    found = compute({"w": torch.tensor([1.0, torch.nan, -torch.inf])}, {"w": torch.ones(3)})["w"]
    assert found[0] == 1
    assert found[1].isnan()
    assert found[2] == torch.inf


def test_sparse_and_complex_gradients_are_measured():
    sparse = torch.tensor([0, -3.0, 0]).to_sparse()
    found = compute({"w": sparse, "z": torch.tensor([3 + 4j, 0, 1j])}, {"w": torch.ones(3), "z": torch.zeros(3)})
    assert found["w"].tolist() == [1, 3, 1]
    assert found["z"].tolist() == [5, 0, 1]


def test_gradients_in_a_graph_do_not_keep_the_graph():
    p = nn.Parameter(torch.ones(3))
    (p.grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    largest = LargestGradients()
    for _ in range(2):
        largest.update([("w", p)])
    assert not largest.compute()["w"].requires_grad
