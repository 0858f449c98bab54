"""Plans for tensor parallelism: what is found in common shapes, what is refused, and what the table says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from dtkit.planning.cost_model import Benchmark, ModelProfile
from dtkit.strategies.meta_copy import copy_to_meta
from dtkit.strategies.sharded import Sharded, find_blocks
from dtkit.strategies.tensor import plan as tensor_plan
from dtkit.strategies.tensor.tensor_parallel import TensorParallel
from tests.cluster.nets import GPT, WIDTH, Attention, Convolution, Decoder, Encoder


def mlp(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, 6), nn.Linear(6, 3))


# -- auto ----------------------------------------------------------------------------------------------------


def test_a_pair_of_linear_layers_with_activations_between():
    assert tensor_plan.find_plan(mlp(), 2).styles == {"0": "colwise", "3": "rowwise"}


def test_layers_with_anything_else_between_are_no_pair():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    with pytest.raises(ValueError, match=r"finds nothing in Sequential .*plan=\{'fc1': 'colwise'"):
        tensor_plan.find_plan(net, 2)


def test_pairs_follow_each_other():
    net = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)
    )
    assert tensor_plan.find_plan(net, 2).styles == {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}


def test_torch_s_encoder_is_cut_in_its_feed_forward_pair_and_its_attention():
    plan = tensor_plan.find_plan(Encoder(), 2)
    layer = {"self_attn": "heads", "self_attn.out_proj": "rowwise", "linear1": "colwise", "linear2": "rowwise"}
    assert plan.styles == {f"layers.layers.{k}.{name}": style for k in (0, 1) for name, style in layer.items()}
    by_name = {row.name: row for row in plan.rows}
    attention = by_name["layers.layers.0.self_attn"]
    assert (attention.parameters, attention.local_parameters) == (216, 108)
    assert attention.note == "4 heads, 2 on each rank"
    assert "4 heads, 2 on each rank" in repr(plan)


class Named(nn.MultiheadAttention):
    """Might do anything."""


@pytest.mark.parametrize(
    ("attention", "ways", "why"),
    [
        (nn.MultiheadAttention(12, 6), 4, "6 heads can't be cut into 4 equal parts"),
        (nn.MultiheadAttention(8, 4, add_bias_kv=True), 2, "add_bias_kv and add_zero_attn can't be cut by heads"),
        (nn.MultiheadAttention(8, 4, add_zero_attn=True), 2, "add_bias_kv and add_zero_attn can't be cut by heads"),
        (Named(8, 4), 2, "heads is for nn.MultiheadAttention itself, and this is a Named, made of it"),
    ],
)
def test_torch_s_attention_that_can_not_be_cut_stays_whole_and_the_table_says_why(
    attention: nn.MultiheadAttention, ways: int, why: str
):
    net = nn.ModuleDict({"mlp": mlp(), "attention": attention})
    plan = tensor_plan.find_plan(net, ways)
    assert set(plan.styles) == {"mlp.0", "mlp.3"}
    notes = {row.name: row.note for row in plan.rows}
    assert why in notes["attention"]
    assert why in notes["attention.out_proj"]
    with pytest.raises(ValueError, match="'attention': .*" + why):
        tensor_plan.validate_plan(net, ways, {"attention": "heads"})


def test_attention_alone_is_a_model_too():
    assert tensor_plan.find_plan(nn.MultiheadAttention(8, 4), 2).styles == {"": "heads", "out_proj": "rowwise"}


def test_attention_is_cut_by_heads_where_they_divide():
    styles = tensor_plan.find_plan(Decoder(), 2).styles
    assert {styles[f"h.0.{name}"] for name in "qkv"} == {"heads"}
    assert styles["h.0.proj"] == "rowwise"
    assert (styles["h.1.mlp.0"], styles["h.1.mlp.2"]) == ("colwise", "rowwise")


def test_attention_in_one_layer_is_cut_by_heads_where_its_forward_can_be():
    plan = tensor_plan.find_plan(GPT(), 2)
    layer = {"attn.c_attn": "fused", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    assert plan.styles == {f"h.{k}.{name}": style for k in (0, 1) for name, style in layer.items()}
    row = next(row for row in plan.rows if row.name == "h.1.attn.c_attn")
    assert (row.parameters, row.local_parameters, row.note) == (216, 108, "4 heads, 2 on each rank")


class ByHead(Attention):
    """Each head has its queries, keys and values together."""

    def parts(self, x: torch.Tensor) -> Any:
        each = self.c_attn(x).view(*x.shape[:2], self.n_head, 3, -1)
        return (each[..., k, :].flatten(2) for k in range(3))


class Wider(Attention):
    """Fewer keys and values than queries would do so."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 5 * WIDTH)


@pytest.mark.parametrize(
    ("attention", "ways", "why"),
    [
        (Attention, 8, "4 heads can't be cut into 8 equal parts"),
        (ByHead, 2, "its heads meet before c_proj"),
        (Wider, 2, "c_attn makes 40 numbers, and not three times the 8 of c_proj"),
    ],
)
def test_attention_in_one_layer_that_can_not_be_cut_is_computed_whole(attention: Any, ways: int, why: str):
    plan = tensor_plan.find_plan(nn.ModuleDict({"attn": attention(), "mlp": mlp()}), ways)
    assert (plan.styles["attn.c_attn"], plan.styles["attn.c_proj"]) == ("gathered", "scattered")
    note = {row.name: row.note for row in plan.rows}["attn.c_attn"]
    assert note.startswith(f"attention itself is computed whole on each rank: {why}")


def test_attention_whose_heads_do_not_divide_is_computed_whole():
    plan = tensor_plan.find_plan(Decoder(), 8)  # 4 heads
    assert (plan.styles["h.0.q"], plan.styles["h.0.proj"]) == ("gathered", "scattered")
    note = {row.name: row.note for row in plan.rows}["h.0.q"]
    assert note == "attention itself is computed whole on each rank: 4 heads can't be cut into 8 equal parts (heads)"


def test_what_does_not_divide_stays_whole_and_the_table_says_why():
    net = nn.ModuleDict({"a": mlp(8), "b": mlp(9)})
    plan = tensor_plan.find_plan(net, 2)
    assert plan.styles == {"a.0": "colwise", "a.3": "rowwise"}
    assert "9 outputs can't be cut into 2 equal parts" in repr(plan)


def test_gated_pairs_of_known_names():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    assert tensor_plan.find_plan(Gated(), 4).styles == {
        "gate_proj": "colwise",
        "up_proj": "colwise",
        "down_proj": "rowwise",
    }


def test_tied_parameters_stay_tied():
    net = mlp()
    net.more = nn.Linear(4, 8)
    net.more.weight = net[0].weight
    with pytest.raises(ValueError, match="shares a parameter with 'more', and cutting it would untie them"):
        tensor_plan.find_plan(net, 2)


def test_nothing_to_cut():
    with pytest.raises(ValueError, match=r"TensorParallel\(2\) finds nothing in Convolution"):
        tensor_plan.find_plan(Convolution(), 2)


def test_what_does_not_divide_is_named_first():
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    with pytest.raises(ValueError, match=r"(?s)by itself: these do not divide by 3.*32.*Use other ways, or say"):
        tensor_plan.find_plan(net, 3)


# -- a user's plan -------------------------------------------------------------------------------------------


def test_everything_wrong_with_a_plan_is_listed_at_once():
    plan = {"0": "colwise", "3.weight": "rowwise", "1": "colwise", "4": "sideways"}
    with pytest.raises(ValueError, match="can't follow") as caught:
        tensor_plan.validate_plan(mlp(9), 2, plan)
    message = str(caught.value)
    for expected in (
        "'3.weight': no such module",
        "'1': colwise is for a Linear or an Embedding, and this is a ReLU",
        "'4': style 'sideways' is none of",
        "'0': 9 outputs can't be cut into 2 equal parts (colwise)",
        "named_modules()",
    ):
        assert expected in message


def test_heads_that_do_not_divide_are_listed():
    net = nn.ModuleDict({"a": nn.MultiheadAttention(12, 6), "b": Attention(12, 6), "c": Decoder().h[0]})
    plan = {"a": "heads", "b.c_attn": "fused", "c.q": "heads", "c.proj": "fused", "b": "heads"}
    with pytest.raises(ValueError, match="can't follow") as caught:
        tensor_plan.validate_plan(net, 8, plan)
    message = str(caught.value)
    for expected in (
        "'a': 6 heads can't be cut into 8 equal parts (heads)",
        "'a.out_proj': 12 inputs can't be cut into 8 equal parts (rowwise)",
        "'b.c_attn': 6 heads can't be cut into 8 equal parts (heads)",
        "'b.c_attn': 12 queries (and as many keys and values) can't be cut into 8 equal parts (fused)",
        "'c.q': 4 heads can't be cut into 8 equal parts (heads)",
        "'c.proj': 8 outputs are no queries, keys and values of one size (fused)",
        "'b': heads is for a Linear or an Embedding, and this is a Attention",
    ):
        assert expected in message


def test_attention_by_name():
    plan = tensor_plan.validate_plan(GPT(), 2, {"h.*.attn.c_attn": "fused", "h.*.attn.c_proj": "rowwise"})
    assert len(plan.styles) == 4
    plan = tensor_plan.validate_plan(Encoder(), 2, {"layers.layers.*.self_attn": "heads"})
    assert plan.styles["layers.layers.1.self_attn.out_proj"] == "rowwise"  # what takes the heads goes with them
    assert "4 heads, 2 on each rank" in repr(plan)


def test_a_name_nearly_right_is_suggested():
    with pytest.raises(ValueError, match=r"'h.0.mlp.9': no such module \(there is 'h.0.mlp"):
        tensor_plan.validate_plan(Decoder(), 2, {"h.0.mlp.9": "colwise"})


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
        assert tensor_plan.validate_plan(Decoder(), 2, {name: style}).styles == {name: style}
    else:
        with pytest.raises(ValueError, match=message):
            tensor_plan.validate_plan(Decoder(), 2, {name: style})


def test_a_star_stands_for_one_part_of_a_name():
    plan = tensor_plan.validate_plan(Decoder(), 2, {"h.*.mlp.0": "colwise", "h.*.mlp.2": ColwiseParallel()})
    assert sorted(plan.styles) == ["h.0.mlp.0", "h.0.mlp.2", "h.1.mlp.0", "h.1.mlp.2"]
    assert {row.name: row.style for row in plan.rows}["h.0.mlp.2"] == "ColwiseParallel"


def test_the_table_counts_what_each_rank_holds():
    plan = tensor_plan.find_plan(mlp(), 2)
    held = {row.name: (row.parameters, row.local_parameters) for row in plan.rows}
    assert held == {"0": (40, 20), "3": (54, 30), "4": (21, 21)}  # a rowwise bias lies on every rank
    text = tensor_plan.format_plan(plan)
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
        ({"ways": 2, "clip_grad_norm": -1}, ValueError, "clip_grad_norm=-1"),
    ],
)
def test_options_that_are_none(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        TensorParallel(**options)


def test_degrees_must_multiply_to_the_world_size():
    with pytest.raises(ValueError, match=r"replicas 1 x ways 3 = 3, but there are 4 ranks"):
        TensorParallel(3).build_mesh(4)
    with pytest.raises(ValueError, match=r"replicas 3 x shards 1 = 3, but there are 4 ranks"):
        Sharded(3).build_mesh(4)
    assert Sharded(2).build_mesh(4).num_replicas == 4  # every rank takes samples of its own
    assert TensorParallel(2, replicas=2).build_mesh(4).num_replicas == 2


def test_precision_is_bf16_or_none():
    with pytest.raises(ValueError, match="precision='fp16'; it must be one of 'bf16'"):
        Sharded(precision="fp16")


def test_what_was_typed_is_what_is_shown():
    assert repr(TensorParallel(2)) == "TensorParallel(tp_size=2)"
    assert repr(Sharded(2, clip_grad_norm=1.0)) == "Sharded(replicas=2, clip_grad_norm=1.0)"


def test_the_plan_of_a_strategy_is_shown_before_it_is_used():
    assert TensorParallel(2).plan_for(mlp()).styles == {"0": "colwise", "3": "rowwise"}
    assert TensorParallel(2, {"3": "scattered"}).plan_for(mlp()).styles == {"3": "scattered"}


FACTS = ModelProfile(
    rows=8,
    sent_model=0,
    parameters=4400,
    gradients=4400,
    optimizer_state=8800,
    update_temporaries=0,
    gradient_shapes=((100, 10), (100,)),
)


def test_sharded_costs_a_part_of_everything():
    benchmark = Benchmark.memory_only(4)
    whole, halves = Sharded().estimate_cost(FACTS, benchmark), Sharded(2).estimate_cost(FACTS, benchmark)
    assert (whole.parameters, whole.gradients, whole.optimizer_state) == (1100, 1100, 2200)
    assert (halves.parameters, halves.gradients, halves.optimizer_state) == (2200, 2200, 4400)
    # Two gathers and gloo's reduce-scatter, which is an all-reduce: 3/4 + 3/4 + 6/4 of the parameters.
    assert whole.sent_bytes == pytest.approx(3 * 4400)


def test_tensor_parallel_costs_a_part_of_the_matrices():
    cost = TensorParallel(2).estimate_cost(FACTS, Benchmark.memory_only(2))
    assert cost.parameters == cost.gradients == 4000 // 2 + 400
    assert math.isnan(cost.sent_bytes)  # that depends on what the layers pass on
    assert TensorParallel(1).estimate_cost(FACTS, Benchmark.memory_only(1)).sent_bytes == 0


# -- blocks and skeletons ------------------------------------------------------------------------------------


def test_blocks_are_the_layers_of_sequences():
    assert [name for name, _ in find_blocks(mlp())] == ["0", "3", "4"]
    assert [name for name, _ in find_blocks(Encoder())] == ["layers.layers.0", "layers.layers.1"]
    assert [name for name, _ in find_blocks(Decoder())] == ["h.0", "h.1"]
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])])
    assert [name for name, _ in find_blocks(nested)] == ["0.0"]


def test_a_block_that_shares_a_parameter_is_none():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    assert [name for name, _ in find_blocks(net)] == ["1"]


def test_a_skeleton_has_no_numbers_and_keeps_ties():
    model = Decoder(tied=True)
    copied = copy_to_meta(model)
    assert all(p.is_meta for p in copied.parameters())
    assert all(b.is_meta for b in copied.buffers())
    assert copied.head.weight is copied.wte.weight
    assert not any(p.is_meta for p in model.parameters())
    assert [p.shape for p in copied.parameters()] == [p.shape for p in model.parameters()]
    assert torch.equal(model.h[0].past, model.h[1].past)
