"""Plans for tensor parallelism: what is found in common shapes, what is refused, and what the table says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from dtkit.plan import Benchmark, Facts
from dtkit.strategies import tensor_plan
from dtkit.strategies.sharded import Sharded, blocks
from dtkit.strategies.sliced import skeleton
from dtkit.strategies.tensor import TensorParallel
from tests.cluster.nets import Convolution, Decoder, Encoder


def mlp(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, 6), nn.Linear(6, 3))


# -- auto ----------------------------------------------------------------------------------------------------


def test_a_pair_of_linear_layers_with_activations_between():
    assert tensor_plan.auto(mlp(), 2).styles == {"0": "colwise", "3": "rowwise"}


def test_layers_with_anything_else_between_are_no_pair():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    with pytest.raises(ValueError, match=r"finds nothing in Sequential .*plan=\{'fc1': 'colwise'"):
        tensor_plan.auto(net, 2)


def test_pairs_follow_each_other():
    net = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)
    )
    assert tensor_plan.auto(net, 2).styles == {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}


def test_the_feed_forward_pair_of_torch_s_encoder_is_cut_and_its_attention_is_not():
    plan = tensor_plan.auto(Encoder(), 2)
    assert plan.styles == {
        f"layers.layers.{k}.linear{j}": style for k in (0, 1) for j, style in ((1, "colwise"), (2, "rowwise"))
    }
    by_name = {row.name: row for row in plan.rows}
    assert by_name["layers.layers.0.self_attn"].style == "whole"
    assert "in one piece" in by_name["layers.layers.0.self_attn"].note


def test_attention_is_cut_by_heads_where_they_divide():
    styles = tensor_plan.auto(Decoder(), 2).styles
    assert {styles[f"h.0.{name}"] for name in "qkv"} == {"heads"}
    assert styles["h.0.proj"] == "rowwise"
    assert (styles["h.1.mlp.0"], styles["h.1.mlp.2"]) == ("colwise", "rowwise")


@pytest.mark.parametrize("ways", [2, 8])
def test_attention_whose_heads_do_not_divide_or_that_is_fused_is_computed_whole(ways: int):
    model = Decoder("fused" if ways == 2 else "torch")  # 4 heads
    plan = tensor_plan.auto(model, ways)
    first = "h.0.c_attn" if ways == 2 else "h.0.q"
    assert (plan.styles[first], plan.styles["h.0.proj"]) == ("gathered", "scattered")
    assert "attention itself is computed whole" in {row.name: row.note for row in plan.rows}[first]


def test_what_does_not_divide_stays_whole_and_the_table_says_why():
    net = nn.ModuleDict({"a": mlp(8), "b": mlp(9)})
    plan = tensor_plan.auto(net, 2)
    assert plan.styles == {"a.0": "colwise", "a.3": "rowwise"}
    assert "9 outputs can't be cut into 2 equal parts" in repr(plan)


def test_gated_pairs_of_known_names():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    assert tensor_plan.auto(Gated(), 4).styles == {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def test_tied_parameters_stay_tied():
    net = mlp()
    net.more = nn.Linear(4, 8)
    net.more.weight = net[0].weight
    with pytest.raises(ValueError, match="shares a parameter with 'more', and cutting it would untie them"):
        tensor_plan.auto(net, 2)


def test_nothing_to_cut():
    with pytest.raises(ValueError, match=r"TensorParallel\(2\) finds nothing in Convolution"):
        tensor_plan.auto(Convolution(), 2)


# -- a user's plan -------------------------------------------------------------------------------------------


def test_everything_wrong_with_a_plan_is_listed_at_once():
    plan = {"0": "colwise", "3.weight": "rowwise", "1": "colwise", "4": "sideways"}
    with pytest.raises(ValueError, match="can't follow") as caught:
        tensor_plan.check(mlp(9), 2, plan)
    message = str(caught.value)
    for expected in (
        "'3.weight': no such module",
        "'1': colwise is for a Linear or an Embedding, and this is a ReLU",
        "'4': style 'sideways' is none of",
        "'0': 9 outputs can't be cut into 2 equal parts (colwise)",
        "named_modules()",
    ):
        assert expected in message


def test_a_name_nearly_right_is_suggested():
    with pytest.raises(ValueError, match=r"'h.0.mlp.9': no such module \(there is 'h.0.mlp"):
        tensor_plan.check(Decoder(), 2, {"h.0.mlp.9": "colwise"})


@pytest.mark.parametrize(
    ("name", "style", "message"),
    [
        ("wte", "loss", "loss is for a Linear"),
        ("head", "sequence", "sequence is for a LayerNorm or RMSNorm, and this is a Linear"),
        ("head", "diagonal", "style 'diagonal' is none of colwise, rowwise"),
        ("head", "gathered", "3 outputs can't be cut into 2"),
        ("head", "rowwise", None),
    ],
)
def test_styles_and_what_they_are_for(name: str, style: str, message: str | None):
    if message is None:
        assert tensor_plan.check(Decoder(), 2, {name: style}).styles == {name: style}
    else:
        with pytest.raises(ValueError, match=message):
            tensor_plan.check(Decoder(), 2, {name: style})


def test_a_star_stands_for_one_part_of_a_name():
    plan = tensor_plan.check(Decoder(), 2, {"h.*.mlp.0": "colwise", "h.*.mlp.2": ColwiseParallel()})
    assert sorted(plan.styles) == ["h.0.mlp.0", "h.0.mlp.2", "h.1.mlp.0", "h.1.mlp.2"]
    assert {row.name: row.style for row in plan.rows}["h.0.mlp.2"] == "ColwiseParallel"


def test_the_table_counts_what_each_rank_holds():
    plan = tensor_plan.auto(mlp(), 2)
    held = {row.name: (row.parameters, row.here) for row in plan.rows}
    assert held == {"0": (40, 20), "3": (54, 30), "4": (21, 21)}  # a rowwise bias lies on every rank
    text = tensor_plan.describe(plan)
    assert text.startswith("Sequential in 2 slices\nmodule")
    assert "Linear 4 -> 8" in text
    assert "62% of the parameters on each rank" in text


# -- the strategies' own checks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ways": 0}, ValueError, "ways=0"),
        ({"ways": 2.0}, TypeError, "ways=2.0"),
        ({"ways": 2, "plan": "car"}, ValueError, "plan='car'; it must be 'auto'"),
        ({"ways": 2, "plan": {}}, ValueError, "cuts nothing"),
        ({"ways": 2, "plan": ["0"]}, TypeError, "plan is a list"),
        ({"ways": 2, "replicas": 0}, ValueError, "replicas=0"),
        ({"ways": 2, "clip_norm": -1}, ValueError, "clip_norm=-1"),
    ],
)
def test_options_that_are_none(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        TensorParallel(**options)


def test_degrees_must_multiply_to_the_world_size():
    with pytest.raises(ValueError, match=r"replicas 1 x ways 3 = 3, but there are 4 ranks"):
        TensorParallel(3).mesh(4)
    with pytest.raises(ValueError, match=r"replicas 3 x shards 1 = 3, but there are 4 ranks"):
        Sharded(3).mesh(4)
    assert Sharded(2).mesh(4).replicas == 4  # every rank takes samples of its own
    assert TensorParallel(2, replicas=2).mesh(4).replicas == 2


def test_precision_is_bf16_or_none():
    with pytest.raises(ValueError, match="precision='fp16'; it must be one of 'bf16'"):
        Sharded(precision="fp16")


def test_what_was_typed_is_what_is_shown():
    assert repr(TensorParallel(2)) == "TensorParallel(ways=2)"
    assert repr(Sharded(2, clip_norm=1.0)) == "Sharded(replicas=2, clip_norm=1.0)"


def test_the_plan_of_a_strategy_is_shown_before_it_is_used():
    assert TensorParallel(2).plan_for(mlp()).styles == {"0": "colwise", "3": "rowwise"}
    assert TensorParallel(2, {"3": "scattered"}).plan_for(mlp()).styles == {"3": "scattered"}


FACTS = Facts(rows=8, sent=0, parameters=4400, gradients=4400, state=8800, update=0, shapes=((100, 10), (100,)))


def test_sharded_costs_a_part_of_everything():
    benchmark = Benchmark.unmeasured(4)
    whole, halves = Sharded().cost(FACTS, benchmark), Sharded(2).cost(FACTS, benchmark)
    assert (whole.parameters, whole.gradients, whole.state) == (1100, 1100, 2200)
    assert (halves.parameters, halves.gradients, halves.state) == (2200, 2200, 4400)
    # Two gathers and gloo's reduce-scatter, which is an all-reduce: 3/4 + 3/4 + 6/4 of the parameters.
    assert whole.sent_bytes == pytest.approx(3 * 4400)


def test_tensor_parallel_costs_a_part_of_the_matrices():
    cost = TensorParallel(2).cost(FACTS, Benchmark.unmeasured(2))
    assert cost.parameters == cost.gradients == 4000 // 2 + 400
    assert cost.sent_bytes == 0


# -- blocks and skeletons ------------------------------------------------------------------------------------


def test_blocks_are_the_layers_of_sequences():
    assert [name for name, _ in blocks(mlp())] == ["0", "3", "4"]
    assert [name for name, _ in blocks(Encoder())] == ["layers.layers.0", "layers.layers.1"]
    assert [name for name, _ in blocks(Decoder())] == ["h.0", "h.1"]
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])])
    assert [name for name, _ in blocks(nested)] == ["0.0"]


def test_a_block_that_shares_a_parameter_is_none():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    assert [name for name, _ in blocks(net)] == ["1"]


def test_a_skeleton_has_no_numbers_and_keeps_ties():
    model = Decoder(tied=True)
    copied = skeleton(model)
    assert all(p.is_meta for p in copied.parameters())
    assert all(b.is_meta for b in copied.buffers())
    assert copied.head.weight is copied.wte.weight
    assert not any(p.is_meta for p in model.parameters())
    assert [p.shape for p in copied.parameters()] == [p.shape for p in model.parameters()]
    assert torch.equal(model.h[0].past, model.h[1].past)
