"""Plans for tensor parallelism: plans found in common models, errors, and tables."""

from __future__ import annotations

import dataclasses
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
from dtkit.strategies.tensor.auto_plan import find_plan
from dtkit.strategies.tensor.tensor_parallel import TensorParallel
from tests.support.nets import GPT, WIDTH, Attention, Convolution, Decoder, Encoder


def mlp(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, 6), nn.Linear(6, 3))


# -- auto ----------------------------------------------------------------------------------------------------


def test_linear_layers_with_activations_between_are_a_pair():
    assert find_plan(mlp(), 2).styles == {"0": "colwise", "3": "rowwise"}


def test_linear_layers_with_other_layers_between_are_not_a_pair():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    with pytest.raises(ValueError, match=r"finds nothing to shard in Sequential.*plan=\{'fc1': 'colwise'"):
        find_plan(net, 2)


def test_find_plan_finds_consecutive_pairs():
    net = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)
    )
    assert find_plan(net, 2).styles == {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}


def test_find_plan_shards_the_torch_encoder():
    plan = find_plan(Encoder(), 2)
    layer = {"self_attn": "heads", "self_attn.out_proj": "rowwise", "linear1": "colwise", "linear2": "rowwise"}
    assert plan.styles == {f"layers.layers.{k}.{name}": style for k in (0, 1) for name, style in layer.items()}
    by_name = {row.name: row for row in plan.rows}
    attention = by_name["layers.layers.0.self_attn"]
    assert (attention.parameters, attention.local_parameters) == (216, 108)
    assert attention.note == "4 heads, 2 on each rank"
    assert "4 heads, 2 on each rank" in repr(plan)


class Named(nn.MultiheadAttention):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    ("attention", "tp_size", "reason"),
    [
        (nn.MultiheadAttention(12, 6), 4, "6 heads can't be cut into 4 equal parts"),
        (nn.MultiheadAttention(8, 4, add_bias_kv=True), 2, "add_bias_kv and add_zero_attn can't be cut by heads"),
        (nn.MultiheadAttention(8, 4, add_zero_attn=True), 2, "add_bias_kv and add_zero_attn can't be cut by heads"),
        (Named(8, 4), 2, "heads is for nn.MultiheadAttention itself, and this is its subclass Named"),
    ],
)
def test_unshardable_torch_attention_stays_whole_with_a_note(
    attention: nn.MultiheadAttention, tp_size: int, reason: str
):
    net = nn.ModuleDict({"mlp": mlp(), "attention": attention})
    plan = find_plan(net, tp_size)
    assert set(plan.styles) == {"mlp.0", "mlp.3"}
    notes = {row.name: row.note for row in plan.rows}
    assert reason in notes["attention"]
    assert reason in notes["attention.out_proj"]
    with pytest.raises(ValueError, match="'attention': .*" + reason):
        tensor_plan.validate_plan(net, tp_size, {"attention": "heads"})


def test_find_plan_shards_a_model_that_is_itself_an_attention_module():
    assert find_plan(nn.MultiheadAttention(8, 4), 2).styles == {"": "heads", "out_proj": "rowwise"}


def test_attention_is_sharded_by_heads_that_divide():
    styles = find_plan(Decoder(), 2).styles
    assert {styles[f"h.0.{name}"] for name in "qkv"} == {"heads"}
    assert styles["h.0.proj"] == "rowwise"
    assert (styles["h.1.mlp.0"], styles["h.1.mlp.2"]) == ("colwise", "rowwise")


def test_fused_attention_is_sharded_by_heads():
    plan = find_plan(GPT(), 2)
    layer = {"attn.c_attn": "fused", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    assert plan.styles == {f"h.{k}.{name}": style for k in (0, 1) for name, style in layer.items()}
    row = next(row for row in plan.rows if row.name == "h.1.attn.c_attn")
    assert (row.parameters, row.local_parameters, row.note) == (216, 108, "4 heads, 2 on each rank")


def test_plan_in_the_config_of_a_transformers_model_goes_first():
    pytest.importorskip("transformers")
    from tests.support.hugging_face import make_llama

    model = make_llama()
    name = "model.layers.0.self_attn.q_proj"
    assert find_plan(model, 2).styles[name] == "colwise"
    model.config.base_model_tp_plan = None
    assert find_plan(model, 2).styles[name] == "heads"


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_gpt2_of_transformers_is_sharded_by_heads(attn_implementation: str):
    """Its layers are Conv1D, whose weights are transposed."""
    pytest.importorskip("transformers")
    from tests.support.hugging_face import make_gpt2

    model = make_gpt2()
    model.set_attn_implementation(attn_implementation)
    plan = find_plan(model, 2)
    layer = {"attn.c_attn": "fused", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    assert plan.styles == {f"transformer.h.{k}.{name}": style for k in range(4) for name, style in layer.items()}
    row = next(row for row in plan.rows if row.name == "transformer.h.0.attn.c_attn")
    assert (row.parameters, row.local_parameters, row.note) == (3168, 1584, "4 heads, 2 on each rank")


def test_relative_positions_of_t5_are_sharded_by_heads():
    pytest.importorskip("transformers")
    from tests.support.hugging_face import make_t5

    model = make_t5()
    plan = find_plan(model, 2)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    assert plan.styles[name] == "heads"
    row = next(row for row in plan.rows if row.name == name)
    assert (row.parameters, row.local_parameters, row.note) == (128, 64, "4 heads, 2 on each rank")
    assert name not in find_plan(model, 8).styles  # the attention is computed whole


class ByHead(Attention):
    """Attention whose heads have their queries, keys and values together."""

    def parts(self, x: torch.Tensor) -> Any:
        each = self.c_attn(x).view(*x.shape[:2], self.n_head, 3, -1)
        return (each[..., k, :].flatten(2) for k in range(3))


class Wider(Attention):
    """Attention with other sizes, as with fewer keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 5 * WIDTH)


@pytest.mark.parametrize(
    ("attention", "tp_size", "reason"),
    [
        (Attention, 8, "4 heads can't be cut into 8 equal parts"),
        (ByHead, 2, "its heads are not independent before c_proj"),
        (Wider, 2, "c_attn has 40 outputs, not 3 x 8 inputs of c_proj"),
    ],
)
def test_unshardable_fused_attention_is_computed_whole(attention: Any, tp_size: int, reason: str):
    plan = find_plan(nn.ModuleDict({"attn": attention(), "mlp": mlp()}), tp_size)
    assert (plan.styles["attn.c_attn"], plan.styles["attn.c_proj"]) == ("gathered", "scattered")
    note = {row.name: row.note for row in plan.rows}["attn.c_attn"]
    assert note.startswith(f"each rank computes the whole attention: {reason}")


def test_attention_with_heads_that_do_not_divide_is_computed_whole():
    plan = find_plan(Decoder(), 8)  # 4 heads
    assert (plan.styles["h.0.q"], plan.styles["h.0.proj"]) == ("gathered", "scattered")
    note = {row.name: row.note for row in plan.rows}["h.0.q"]
    assert note == "each rank computes the whole attention: 4 heads can't be cut into 8 equal parts (heads)"


def test_layers_that_do_not_divide_stay_whole_with_a_note():
    net = nn.ModuleDict({"a": mlp(8), "b": mlp(9)})
    plan = find_plan(net, 2)
    assert plan.styles == {"a.0": "colwise", "a.3": "rowwise"}
    assert "9 outputs can't be cut into 2 equal parts" in repr(plan)


def test_find_plan_knows_gated_layers_by_name():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    assert find_plan(Gated(), 4).styles == {
        "gate_proj": "colwise",
        "up_proj": "colwise",
        "down_proj": "rowwise",
    }


def test_find_plan_refuses_tied_parameters():
    net = mlp()
    net.more = nn.Linear(4, 8)
    net.more.weight = net[0].weight
    with pytest.raises(ValueError, match="shares a parameter with 'more', and sharding it would untie them"):
        find_plan(net, 2)


def test_find_plan_raises_without_layers_to_shard():
    with pytest.raises(ValueError, match=r"TensorParallel\(2\) finds nothing to shard in Convolution"):
        find_plan(Convolution(), 2)


def test_find_plan_error_names_layers_that_do_not_divide():
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    with pytest.raises(ValueError, match=r"(?s)these layers don't divide by 3.*32.*Use another tp_size, or name"):
        find_plan(net, 3)


# -- a user's plan -------------------------------------------------------------------------------------------


def test_all_problems_of_a_plan_are_in_one_error():
    plan = {"0": "colwise", "3.weight": "rowwise", "1": "colwise", "4": "sideways"}
    with pytest.raises(ValueError, match="can't follow") as caught:
        tensor_plan.validate_plan(mlp(9), 2, plan)
    message = str(caught.value)
    for expected in (
        "'3.weight': no such module",
        "'1': colwise is for a Linear or an Embedding, and this is a ReLU",
        "'4': style 'sideways'; it must be one of",
        "'0': 9 outputs can't be cut into 2 equal parts (colwise)",
        "named_modules()",
    ):
        assert expected in message


def test_heads_that_do_not_divide_are_in_the_error():
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
        "'c.proj': 8 outputs can't be queries, keys and values of one size (fused)",
        "'b': heads is for a Linear or an Embedding, and this is a Attention",
    ):
        assert expected in message


def test_plans_can_name_attention():
    plan = tensor_plan.validate_plan(GPT(), 2, {"h.*.attn.c_attn": "fused", "h.*.attn.c_proj": "rowwise"})
    assert len(plan.styles) == 4
    plan = tensor_plan.validate_plan(Encoder(), 2, {"layers.layers.*.self_attn": "heads"})
    assert plan.styles["layers.layers.1.self_attn.out_proj"] == "rowwise"  # the output layer follows
    assert "4 heads, 2 on each rank" in repr(plan)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match=r"'h.0.mlp.9': no such module \(there is 'h.0.mlp"):
        tensor_plan.validate_plan(Decoder(), 2, {"h.0.mlp.9": "colwise"})


@pytest.mark.parametrize(
    ("name", "style", "message"),
    [
        ("wte", "loss", "loss is for a Linear"),
        ("head", "sequence", "sequence is for a LayerNorm or RMSNorm, and this is a Linear"),
        ("head", "diagonal", "style 'diagonal'; it must be one of colwise, rowwise"),
        ("head", "gathered", "3 outputs can't be cut into 2"),
        ("head", "rowwise", None),
    ],
)
def test_styles_check_the_type_of_their_module(name: str, style: str, message: str | None):
    if message is None:
        assert tensor_plan.validate_plan(Decoder(), 2, {name: style}).styles == {name: style}
    else:
        with pytest.raises(ValueError, match=message):
            tensor_plan.validate_plan(Decoder(), 2, {name: style})


def test_star_matches_one_part_of_a_name():
    plan = tensor_plan.validate_plan(Decoder(), 2, {"h.*.mlp.0": "colwise", "h.*.mlp.2": ColwiseParallel()})
    assert sorted(plan.styles) == ["h.0.mlp.0", "h.0.mlp.2", "h.1.mlp.0", "h.1.mlp.2"]
    assert {row.name: row.style for row in plan.rows}["h.0.mlp.2"] == "ColwiseParallel"


def test_plan_counts_local_parameters():
    plan = find_plan(mlp(), 2)
    parameters = {row.name: (row.parameters, row.local_parameters) for row in plan.rows}
    assert parameters == {"0": (40, 20), "3": (54, 30), "4": (21, 21)}  # every rank holds a rowwise bias
    text = tensor_plan.format_plan(plan)
    assert text.startswith("Sequential in 2 slices\nmodule")
    assert "Linear 4 -> 8" in text
    assert "62 % of the parameters on each rank" in text


# -- options of the strategies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tp_size": 0}, ValueError, "tp_size=0"),
        ({"tp_size": 2.0}, TypeError, "tp_size=2.0"),
        ({"tp_size": 2, "plan": "car"}, ValueError, "plan='car'; it must be 'auto'"),
        ({"tp_size": 2, "plan": {}}, ValueError, "shards nothing"),
        ({"tp_size": 2, "plan": ["0"]}, TypeError, "plan is a list"),
        ({"tp_size": 2, "replicas": 0}, ValueError, "replicas=0"),
        ({"tp_size": 2, "clip_grad_norm": -1}, ValueError, "clip_grad_norm=-1"),
    ],
)
def test_tensor_parallel_refuses_invalid_options(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        TensorParallel(**options)


def test_degrees_must_multiply_to_the_world_size():
    with pytest.raises(ValueError, match=r"replicas 1 x tp_size 3 = 3, but there are 4 ranks"):
        TensorParallel(3).build_mesh(4)
    with pytest.raises(ValueError, match=r"replicas 3 x shards 1 = 3, but there are 4 ranks"):
        Sharded(3).build_mesh(4)
    assert Sharded(2).build_mesh(4).num_replicas == 4  # every rank takes its own samples
    assert TensorParallel(2, replicas=2).build_mesh(4).num_replicas == 2


def test_sharded_refuses_fp16():
    with pytest.raises(ValueError, match="precision='fp16'; it must be one of 'bf16'"):
        Sharded(precision="fp16")


def test_repr_shows_the_given_options():
    assert repr(TensorParallel(2)) == "TensorParallel(tp_size=2)"
    assert repr(Sharded(2, clip_grad_norm=1.0)) == "Sharded(replicas=2, clip_grad_norm=1.0)"


def test_plan_for_returns_the_plan_of_a_strategy():
    assert TensorParallel(2).plan_for(mlp()).styles == {"0": "colwise", "3": "rowwise"}
    assert TensorParallel(2, {"3": "scattered"}).plan_for(mlp()).styles == {"3": "scattered"}


PROFILE = ModelProfile(
    rows=8,
    sent_model=0,
    parameters=4400,
    gradients=4400,
    optimizer_state=8800,
    update_temporaries=0,
    gradient_shapes=((100, 10), (100,)),
)


def test_cost_of_sharded_is_a_share_of_everything():
    benchmark = Benchmark.memory_only(4)
    whole, halves = Sharded().estimate_cost(PROFILE, benchmark), Sharded(2).estimate_cost(PROFILE, benchmark)
    assert (whole.parameters, whole.gradients, whole.optimizer_state) == (1100, 1100, 2200)
    assert (halves.parameters, halves.gradients, halves.optimizer_state) == (2200, 2200, 4400)
    # Two gathers and gloo's reduce-scatter, which is an all-reduce: 3/4 + 3/4 + 6/4 of the parameters.
    assert whole.sent_bytes == pytest.approx(3 * 4400)
    on_one_host = dataclasses.replace(benchmark, direct_sum_timings=((8, 0.0),))
    assert Sharded().estimate_cost(PROFILE, on_one_host).sent_bytes == pytest.approx(9 / 4 * 4400)
    assert Sharded(2).estimate_cost(PROFILE, on_one_host) == halves  # replicas' shards travel by gloo


def test_cost_of_tensor_parallel_is_a_share_of_the_matrices():
    cost = TensorParallel(2).estimate_cost(PROFILE, Benchmark.memory_only(2))
    assert cost.parameters == cost.gradients == 4000 // 2 + 400
    assert math.isnan(cost.sent_bytes)  # depends on what the layers send
    assert TensorParallel(1).estimate_cost(PROFILE, Benchmark.memory_only(1)).sent_bytes == 0


# -- blocks and copies without values ------------------------------------------------------------------------


def test_blocks_are_layers_of_sequences():
    assert [name for name, _ in find_blocks(mlp())] == ["0", "3", "4"]
    assert [name for name, _ in find_blocks(Encoder())] == ["layers.layers.0", "layers.layers.1"]
    assert [name for name, _ in find_blocks(Decoder())] == ["h.0", "h.1"]
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])])
    assert [name for name, _ in find_blocks(nested)] == ["0.0"]


def test_layers_with_shared_parameters_are_not_blocks():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    assert [name for name, _ in find_blocks(net)] == ["1"]


def test_copy_to_meta_keeps_shared_parameters():
    model = Decoder(tied=True)
    copied = copy_to_meta(model)
    assert all(p.is_meta for p in copied.parameters())
    assert all(b.is_meta for b in copied.buffers())
    assert copied.head.weight is copied.wte.weight
    assert not any(p.is_meta for p in model.parameters())
    assert [p.shape for p in copied.parameters()] == [p.shape for p in model.parameters()]
    assert torch.equal(model.h[0].past, model.h[1].past)
