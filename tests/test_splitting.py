"""Cutting a model into stages: arithmetic, and what may be cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from dtkit.strategies import stages
from dtkit.strategies.splitting import Cut, balanced, chain, named, parameter_costs, time_costs


def best(costs, parts):
    """The smallest possible largest part, by trying all."""
    n = len(costs)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, n]))
        for ends in itertools.combinations(range(1, n), parts - 1)
    )


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [5, 1, 1, 1, 1, 1], [1, 9, 1, 1, 3, 3], [0.5, 2, 2, 0.1, 7, 1, 1]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_any_contiguous_cut_allows(costs, parts):
    starts = balanced(costs, parts)
    cut = Cut(tuple("abcdefg"[: len(costs)]), tuple(costs), starts)
    assert starts[0] == 0
    assert all(len(stage) for stage in cut.stages)
    assert max(cut.cost(k) for k in range(parts)) == best(costs, parts)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_measured_layers_of_very_unequal_cost_are_cut_as_well_as_can_be(parts):
    """Against every contiguous cut, on the same measurements."""
    widths = [16, 512, 8, 8, 768, 768, 4, 256, 1024, 16, 3]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    costs = time_costs(model, chain(model), [torch.randn(64, 16)])
    cut = Cut(tuple(map(str, range(len(costs)))), tuple(costs), balanced(costs, parts))
    assert max(costs) > 5 * min(costs)
    assert max(cut.cost(k) for k in range(parts)) <= 1.15 * best(costs, parts)


def test_layers_of_a_sequential_are_its_children():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [name for name, _ in chain(model)] == ["0", "1", "2"]
    assert parameter_costs(chain(model)) == [6, 0, 6]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_layers_of_another_model_are_its_blocks():
    model = Decoder()
    layers = chain(model)
    assert [name for name, _ in layers] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    costs = time_costs(model, layers, [torch.zeros(3, 5, dtype=torch.long)])
    assert len(costs) == 4
    assert min(costs) > 0


def test_slow_layers_are_seen_to_be_slow():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 3))
    costs = time_costs(model, chain(model), [torch.randn(32, 64)])
    assert costs[2] == max(costs)
    assert costs[2] > 3 * costs[0]


def test_what_has_no_chain():
    assert chain(nn.Linear(2, 2)) == []


def test_names_given_by_the_user():
    layers = ["0", "1", "2", "3"]
    assert named(["2"], layers, 2) == (0, 2)
    with pytest.raises(
        ValueError, match="split has 'x', which begins no layer of this model; it can be cut at 1, 2, 3"
    ):
        named(["x"], layers, 2)
    with pytest.raises(ValueError, match="gives 3 stages of this model, and 2 are wanted"):
        named(["1", "2"], layers, 2)
    with pytest.raises(ValueError, match="in order, the 2 layers"):
        named(["2", "1"], layers, 3)


def test_a_layer_that_takes_no_part():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x):
            return self.blocks[0](x)

    model = Odd()
    with pytest.raises(ValueError, match=r"blocks.1 took no part"):
        time_costs(model, chain(model), [torch.zeros(1, 2)])


class Undecided(nn.Module):
    """Its way depends on the data, which no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)) if x.sum() > 0 else self.blocks[0](x)


def test_a_model_that_cannot_be_traced_is_refused_with_what_to_do():
    cut = Cut(("blocks.0", "blocks.1"), (1.0, 1.0), (0, 1))
    with pytest.raises(ValueError, match=r"Undecided can't be traced.*use strategy=dtkit.Sharded\(\)") as raised:
        stages.parts_of(Undecided(), cut, (torch.ones(4, 2),))
    assert raised.value.__cause__ is not None  # torch's own error says where
