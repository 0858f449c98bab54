"""Cutting a model into stages: balanced costs, chains of layers, and copies on devices."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dtkit
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.planning.layer_chain import LayerCosts
from dtkit.strategies.loss import Loss, ModelInputs
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.cut import StageCut, balance_stages, even_out_ranks, find_layer_chain, find_named_starts
from dtkit.strategies.pipeline.trace import split_model
from tests.support import nets
from tests.support.best_cut import find_smallest_maximum

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [5, 1, 1, 1, 1, 1], [1, 9, 1, 1, 3, 3], [0.5, 2, 2, 0.1, 7, 1, 1]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_slowest_stage_is_as_fast_as_possible(costs, parts):
    starts = balance_stages(costs, parts)
    cut = StageCut(tuple("abcdefg"[: len(costs)]), LayerCosts(tuple(costs)), starts)
    assert starts[0] == 0
    assert all(len(stage) for stage in cut.stages)
    assert max(cut.compute_stage_cost(k) for k in range(parts)) == find_smallest_maximum(costs, parts)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), [(0, 5), (3, 0), (1, 4), (9, 1)])
def test_costs_around_the_layers_are_balanced(before, after, parts):
    """The head is as expensive as several of the eight blocks."""
    costs = LayerCosts((1.0,) * 8, before, after)
    cut = StageCut(tuple("abcdefgh"), costs, balance_stages(costs.per_layer, parts))
    stage_costs = [cut.compute_stage_cost(k) for k in range(parts)]
    assert sum(stage_costs) == 8 + before + after
    assert max(stage_costs) == find_smallest_maximum([1 + before, *(1.0,) * 6, 1 + after], parts)
    assert max(stage_costs) < max(before + 8 // parts, after + 8 // parts)  # the cut by blocks alone


ZBV, LOOPED = (0, 1, 1, 0), (0, 1, 0, 1)


@pytest.mark.parametrize("stage_ranks", [ZBV, LOOPED, (0, 1, 2, 2, 1, 0), (0, 1, 2, 3)])
def test_even_out_ranks_balances_ranks_with_several_stages(stage_ranks):
    costs = LayerCosts((1.0,) * 17, before_layers=2.0, after_layers=4.0).per_layer
    starts = balance_stages(costs, len(stage_ranks))
    before, after = (
        loads(costs, starts, stage_ranks),
        loads(costs, even_out_ranks(costs, starts, stage_ranks), stage_ranks),
    )
    assert max(after.stages) == max(before.stages) == find_smallest_maximum(costs, len(stage_ranks))
    assert max(after.ranks) <= max(before.ranks)
    assert max(after.ranks) - min(after.ranks) <= max(1.0, max(after.stages) - min(costs))
    assert min(map(len, after.places)) > 0


def test_rank_with_the_first_and_last_stage_gets_fewer_layers():
    """In a schedule like ZBV, rank 0 has the embeddings and the head."""
    costs = LayerCosts((1.0,) * 8, before_layers=1.0, after_layers=3.0).per_layer
    starts = balance_stages(costs, 4)
    cut = loads(costs, even_out_ranks(costs, (0, 3, 5, 7), ZBV), ZBV)
    assert loads(costs, (0, 3, 5, 7), ZBV).ranks == [8.0, 4.0]  # the same slowest stage
    assert max(loads(costs, starts, ZBV).stages) == max(cut.stages) == 4.0
    assert cut.ranks == [6.0, 6.0]


def loads(costs, starts, stage_ranks):
    places = [range(a, b) for a, b in itertools.pairwise([*starts, len(costs)])]
    parts = [sum(costs[k] for k in place) for place in places]
    ranks = [
        sum(p for p, home in zip(parts, stage_ranks, strict=True) if home == rank)
        for rank in range(max(stage_ranks) + 1)
    ]
    return SimpleNamespace(places=places, stages=parts, ranks=ranks)


# -- costs of layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_layers_of_unequal_cost_are_cut_well(parts):
    """Compared with every contiguous cut on the same measurements."""
    widths = [16, 512, 8, 8, 768, 768, 4, 256, 1024, 16, 3]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    costs = layer_costs.measure_seconds(model, ModelInputs((torch.randn(64, 16),)), CPU)
    cut = StageCut(tuple(map(str, range(10))), costs, balance_stages(costs.per_layer, parts))
    assert max(costs.layers) > 5 * min(costs.layers)
    assert max(cut.compute_stage_cost(k) for k in range(parts)) <= 1.15 * find_smallest_maximum(costs.per_layer, parts)


def test_layers_of_a_sequential_are_its_children():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [name for name, _ in find_layer_chain(model)] == ["0", "1", "2"]
    assert layer_costs.count_by_layer(model, ModelInputs((torch.zeros(1, 2),))) == LayerCosts((6, 0, 6))


class Decoder(nn.Module):
    """A model that declares its head first and its embedding last; the head uses the parameter `second`."""

    def __init__(self, vocabulary=7, width=8, blocks=4):
        super().__init__()
        self.head = nn.Linear(width, vocabulary)
        self.first, self.second = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(3, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.embed = nn.Embedding(vocabulary, width)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = (self.embed(tokens) + self.first) * (1 + 0 * positions.to(tokens.device))[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + self.second.sum(0)) * self.scale


TOKENS = torch.zeros(3, 5, dtype=torch.long)


def test_layers_of_other_models_are_their_blocks():
    model = Decoder()
    assert [name for name, _ in find_layer_chain(model)] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    costs = layer_costs.measure_seconds(model, ModelInputs((TOKENS,)), CPU)
    assert len(costs.layers) == 4
    assert min(*costs.layers, costs.before_layers, costs.after_layers) > 0


def test_parameters_around_the_blocks_count_where_they_are_used():
    costs, outputs = layer_costs.measure_sizes(Decoder(), ModelInputs((TOKENS,)))
    assert outputs == (4 * 3 * 5 * 8,) * 4  # float32 x rows x positions x features
    assert costs == LayerCosts((72,) * 4, before_layers=7 * 8 + 8, after_layers=8 * 7 + 7 + 3 * 8)


def test_measured_costs_show_slow_layers():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 3))
    costs = layer_costs.measure_seconds(model, ModelInputs((torch.randn(32, 64),)), CPU).layers
    assert costs[2] == max(costs)
    assert costs[2] > 3 * costs[0]


def test_measured_costs_show_a_slow_head_and_loss():
    model, tokens = Decoder(vocabulary=50_000, width=32), torch.zeros(4, 32, dtype=torch.long)
    costs = layer_costs.measure_seconds(model, ModelInputs((tokens,)), CPU)
    assert costs.after_layers > 3 * max(costs.layers)
    small = Decoder()
    with_loss = layer_costs.measure_seconds(small, ModelInputs((TOKENS,)), CPU, lambda output: _slow_loss(output, 1000))
    assert with_loss.after_layers > 3 * layer_costs.measure_seconds(small, ModelInputs((TOKENS,)), CPU).after_layers
    assert with_loss.before_layers < with_loss.after_layers  # which another process may have interrupted


def _slow_loss(output, rounds):
    for _ in range(rounds):
        output = output + 0.001
    return output.sum()


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("by", ["time", "parameters"])
def test_model_with_a_large_vocabulary_is_cut_well(by, parts):
    """Compared with every contiguous cut on the same measurements."""
    model, tokens = Decoder(vocabulary=5000, width=32, blocks=9), torch.zeros(4, 16, dtype=torch.long)
    cut = dtkit.Pipeline(parts, parts, balance_by=by).plan_for(model, tokens)
    assert max(cut.compute_stage_cost(k) for k in range(parts)) <= 1.15 * find_smallest_maximum(
        cut.costs.per_layer, parts
    )
    most = 3 if parts == 2 else 2  # without the head it would be 4; another process may interrupt a measurement
    assert len(cut.stages[-1]) <= most  # a head is as expensive as all of the blocks
    assert cut.costs.after_layers > sum(cut.costs.layers[-3:])


def test_measuring_does_not_change_the_model():
    """Neither batch statistics nor random numbers change; layers may work in place or occur twice."""
    twice = nn.Linear(4, 4)
    model = nn.Sequential(twice, nn.BatchNorm1d(4), nn.ReLU(inplace=True), twice, nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    costs = layer_costs.measure_seconds(model, ModelInputs((torch.randn(6, 4),)), CPU)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    torch.randn(6, 4)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(costs.layers) == 6
    assert costs.layers[0] == costs.layers[3]


def test_repr_of_a_cut_shows_costs_around_the_layers():
    cut = dtkit.Pipeline(2, 2, balance_by="parameters").plan_for(Decoder(vocabulary=100), TOKENS)
    assert repr(cut).splitlines() == [
        "4 layers in 2 stages, by parameters",
        "stage  from      to        layers  before them  after them  total",
        "    0  blocks.0  blocks.2     216          808              1,024",
        "    1  blocks.3  blocks.3      72                      924    996",
    ]
    lines = repr(
        dataclasses.replace(cut, costs=LayerCosts((0.001, 0.002, 0.003, 0.004), 0.01, 0.02), cost_unit="time")
    ).splitlines()
    assert " ".join(lines[2].split()) == "0 blocks.0 blocks.2 6.0 ms 10 ms 16 ms"
    assert " ".join(lines[3].split()) == "1 blocks.3 blocks.3 4.0 ms 20 ms 24 ms"


def test_plan_for_explains_why_a_model_can_not_be_cut():
    with pytest.raises(ValueError, match=r"Linear has no layers in a chain, too few for 2 stages.*Sharded"):
        dtkit.Pipeline(2, 2).plan_for(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(TypeError, match=r"a micro-batch: plan_for\(model, X\[:8\]\)"):
        dtkit.Pipeline(2, 2).plan_for(Decoder())
    cut = dtkit.Pipeline(2, 2, split=["blocks.3"]).plan_for(Decoder(), TOKENS)
    assert cut.stage_starts == (0, 3)


# -- copies on devices ----------------------------------------------------------------------------------------


class Alone:
    """A group of one rank, which broadcasts its own tensors, or empty ones instead of other ranks'."""

    def __init__(self, rank, shape):
        self.rank, self._shape = rank, shape

    def all_reduce(self, tensor):
        return tensor

    def broadcast_tensors(self, tensors, _source, device):
        return tuple(tensors) if tensors is not None else (torch.empty(self._shape, device=device),)


def dropping():
    return nets.Decoder(blocks=4, dropout=0.5)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's exporter, of its own code
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("make", "border", "schedule", "by"),
    [
        (nets.deep, (3, 12), "1F1B", "time"),
        (nets.deep, (3, 12), "ZBVZeroBubble", "parameters"),
        (dropping, (3, nets.FEATURES, nets.WIDTH), "ZBVZeroBubble", "parameters"),
        (Decoder, (3, 5, 8), "1F1B", "time"),
    ],
)
def test_device_gets_its_stages_only(make, border, schedule, by, rank):
    """The device is torch's "meta", where a moved model would lose its values."""
    model = make().train()
    batch = (TOKENS if make is Decoder else torch.randn(3, nets.FEATURES), torch.zeros(3, dtype=torch.long))
    strategy = dtkit.Pipeline(2, 4, schedule, balance_by=by)
    context = WorkerContext(
        Alone(rank, border), META, PhaseTimer(None), [0], strategy.build_mesh(2), lambda _: batch, 3
    )
    loss_fn = Loss(lambda output, _: output.sum(), None)
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    with Arrivals(META) as arrivals:
        placed = strategy._place_stages(model, loss_fn, context)
    local = [t for part in placed.modules.values() for t in (*part.module.parameters(), *part.module.buffers())]
    assert list(placed.modules) == strategy.pipeline_schedule.get_stages(rank)
    assert len(placed.io.training) == len(placed.io.evaluation) == strategy.pipeline_schedule.stages + 1
    assert {t.device for t in local} == {META}
    assert all(value.device == CPU and torch.equal(value, kept) for value, kept in before.values())
    assert all(value is model.state_dict(keep_vars=True)[name] for name, (value, _) in before.items())
    assert all(value.device == CPU for value in placed.unstaged_entries.values())
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in local if isinstance(p, nn.Parameter))
    assert others > 0
    if by == "parameters" or rank == 1:  # rank 0 also copies layers there, to time them
        assert arrivals.num_elements == sum(t.numel() for t in {id(t): t for t in local}.values())
    for stage, part in placed.modules.items():  # traces create tensors there as well
        inputs = placed.io.training[stage]
        for module in (part.module, part.evaluation.module):
            assert module(*inputs).device == META


class Arrivals(torch.overrides.TorchFunctionMode):
    """Mode that counts the elements copied to a device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.num_elements = device, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and made.device == self.device and (kwargs or {}).get("copy"):
            self.num_elements += made.numel()
        return made


def test_model_without_a_chain_has_no_layers():
    assert find_layer_chain(nn.Linear(2, 2)) == []


def test_find_named_starts_checks_the_names():
    layers = ["0", "1", "2", "3"]
    assert find_named_starts(["2"], layers, 2) == (0, 2)
    with pytest.raises(ValueError, match="split names 'x', but this model has no such layer; it can be cut at 1, 2, 3"):
        find_named_starts(["x"], layers, 2)
    with pytest.raises(ValueError, match="gives 3 stages of this model, but there must be 2"):
        find_named_starts(["1", "2"], layers, 2)
    with pytest.raises(ValueError, match="in order, the 2 layers"):
        find_named_starts(["2", "1"], layers, 3)


def test_unused_layers_raise():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x):
            return self.blocks[0](x)

    with pytest.raises(ValueError, match=r"blocks.1 took no part"):
        layer_costs.measure_seconds(Odd(), ModelInputs((torch.zeros(1, 2),)), CPU)


class Undecided(nn.Module):
    """A model with data-dependent control flow, which can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)) if x.sum() > 0 else self.blocks[0](x)


def test_model_that_can_not_be_traced_raises_with_the_remedy():
    cut = StageCut(("blocks.0", "blocks.1"), LayerCosts((1.0, 1.0)), (0, 1))
    with pytest.raises(ValueError, match=r"Undecided can't be traced.*use strategy=dtkit.Sharded\(\)") as raised:
        split_model(Undecided(), cut, ModelInputs((torch.ones(4, 2),)), CPU)
    assert raised.value.__cause__ is not None  # torch's error has the location
