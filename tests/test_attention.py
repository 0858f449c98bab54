"""Attention by heads, without other ranks: what one computes of it, and which forwards of users can be cut."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from dtkit.strategies.meta_copy import copy_to_meta
from dtkit.strategies.model_shards import load_shards
from dtkit.strategies.tensor.attention import (
    FusedQKV,
    MultiheadAttentionParallel,
    ShardedMultiheadAttention,
    make_fused_qkv,
)
from dtkit.strategies.tensor.attention_check import explain_unsplittable
from tests.cluster.nets import HEADS, WIDTH, Attention, Block

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, LENGTH, KEYS = 3, 4, 5


def alone(ways: int, rank: int) -> DeviceMesh:
    """A mesh of which this process takes the part of one rank; nobody else is there."""
    return DeviceMesh("cpu", torch.arange(ways), mesh_dim_names=(f"r{rank}",), _init_backend=False, _rank=rank)


# -- nn.MultiheadAttention -------------------------------------------------------------------------------------


@pytest.fixture
def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's weights stay with it: there is nobody here to put them together with."""
    monkeypatch.setattr(ShardedMultiheadAttention, "_weights", lambda _self, weights, **_: weights)


class Part(nn.Module):
    """A rowwise layer, before its sum over ranks."""

    def __init__(self, whole: nn.Linear, ways: int, rank: int) -> None:
        super().__init__()
        self.weight = whole.weight.chunk(ways, 1)[rank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def part(whole: nn.MultiheadAttention, ways: int, rank: int) -> nn.Module:
    """The module as a rank has it."""
    mine = copy_to_meta(whole)
    MultiheadAttentionParallel()._apply(mine, alone(ways, rank))
    load_shards(whole, mine, torch.device("cpu"))
    mine.out_proj = Part(whole.out_proj, ways, rank)
    return mine.train(whole.training)


def masks(kind: str, queries: int, keys: int, rows: int = ROWS) -> dict[str, Any]:
    """What a call says of masks; the first key is always seen."""
    draw = functools.partial(torch.rand, generator=torch.Generator().manual_seed(1))
    hidden, each = draw(queries, keys) < 0.4, draw(rows * HEADS, queries, keys) < 0.4
    padding = draw(rows, keys) < 0.4
    for mask in (hidden, each, padding):
        mask[..., 0] = False
    return {
        "none": {},
        "causal": {"attn_mask": torch.ones(queries, keys).triu(1).bool(), "is_causal": True},
        "hidden": {"attn_mask": hidden},
        "for each head": {"attn_mask": each},
        "numbers": {"attn_mask": draw(queries, keys).double()},
        "padding": {"key_padding_mask": padding},
        "padding and causal": {
            "attn_mask": torch.ones(queries, keys).triu(1).bool(),
            "is_causal": True,
            "key_padding_mask": padding,
        },
        "padding for each head": {"attn_mask": each, "key_padding_mask": padding},
    }[kind]


MASKS = (
    *("none", "causal", "hidden", "for each head", "numbers"),
    *("padding", "padding and causal", "padding for each head"),
)
SHAPES: dict[str, dict[str, Any]] = {
    "rows first": {"batch_first": True},
    "length first": {},
    "without bias": {"bias": False},
    "keys of other sizes": {"kdim": 6, "vdim": 2},
}


def check_parts(module: nn.MultiheadAttention, inputs: Any, ways: int = 2, **call: Any) -> None:
    """What ranks compute adds up to what torch's module computes, and their weights are its own."""
    expected, expected_weights = module(*inputs, **call)
    found, weights = zip(*(part(module, ways, rank)(*inputs, **call) for rank in range(ways)), strict=True)
    total = sum(found) if module.out_proj.bias is None else sum(found) + module.out_proj.bias
    assert torch.allclose(total, expected, atol=1e-12)
    if expected_weights is None:
        assert weights == (None,) * ways
    else:
        every = torch.cat(weights, 1)
        assert torch.allclose(every.mean(1).view(expected_weights.shape), expected_weights, atol=1e-12)


@pytest.mark.usefixtures("own_weights")
@pytest.mark.parametrize("call", [{"need_weights": False}, {}], ids=str)
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("mask", MASKS)
def test_what_ranks_compute_adds_up_to_torch_s_attention(mask: str, shape: str, call: dict[str, Any]):
    torch.manual_seed(0)
    how = SHAPES[shape]
    module = nn.MultiheadAttention(WIDTH, HEADS, **how).double()
    keys = LENGTH if "kdim" not in how else KEYS
    query = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    key = query if keys == LENGTH else torch.randn(ROWS, keys, how["kdim"], dtype=torch.float64)
    value = query if keys == LENGTH else torch.randn(ROWS, keys, how["vdim"], dtype=torch.float64)
    if not how.get("batch_first"):
        same = key is query
        query = query.transpose(0, 1)
        key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
    check_parts(module, (query, key, value), **masks(mask, LENGTH, keys), **call)


@pytest.mark.usefixtures("own_weights")
@pytest.mark.parametrize("call", [{"need_weights": False}, {}], ids=str)
def test_without_rows_and_with_keys_and_values_that_differ(call: dict[str, Any]):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS).double()
    query = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, KEYS, WIDTH, dtype=torch.float64)
    padding = {"key_padding_mask": torch.tensor([False, True, False, False, True])}
    check_parts(module, (query, key, value), 4, **padding, **call)
    check_parts(module, (query, key, key), **masks("for each head", LENGTH, KEYS, rows=1), **call)


def test_a_hint_without_its_mask_is_refused_as_torch_does():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    x = torch.randn(LENGTH, WIDTH)
    for one in (module, part(module, 2, 0)):
        with pytest.raises(RuntimeError, match="attn_mask"):
            one(x, x, x, is_causal=True)


@pytest.mark.usefixtures("own_weights")
def test_dropout_is_within_attention_and_only_in_training():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5).double()
    x = torch.randn(LENGTH, ROWS, WIDTH, dtype=torch.float64)
    mine = part(module, 2, 0)
    for weigh in (True, False):
        first, second = (mine.train()(x, x, x, need_weights=weigh)[0] for _ in range(2))
        assert not torch.equal(first, second)
    check_parts(module.eval(), (x, x, x))


# -- queries, keys and values as one ---------------------------------------------------------------------------


def three(ways: int = 2, rank: int = 1) -> tuple[torch.Tensor, FusedQKV, list[torch.Tensor]]:
    """(The whole, as a rank has it, and the parts that are this rank's)."""
    whole = torch.randn(ROWS, LENGTH, 3 * WIDTH, generator=torch.Generator().manual_seed(2))
    parts = [third.chunk(ways, -1)[rank] for third in whole.chunk(3, -1)]
    made = make_fused_qkv(torch.cat(parts, -1), alone(ways, rank))
    assert isinstance(made, FusedQKV)
    return whole, made, parts


TAKEN_APART: dict[str, Callable[[Any], Any]] = {
    "split": lambda x: x.split(WIDTH, dim=2),
    "split by sizes": lambda x: x.split([WIDTH, WIDTH, WIDTH], -1),
    "torch.split": lambda x: torch.split(x, split_size_or_sections=WIDTH, dim=-1),
    "chunk": lambda x: x.chunk(3, dim=-1),
    "torch.chunk": lambda x: torch.chunk(x.contiguous(), 3, 2),
    "view": lambda x: x.view(*x.shape[:2], 3, WIDTH).unbind(2),
    "reshape": lambda x: [t.flatten(-2) for t in x.reshape(x.size(0), -1, 3, HEADS, WIDTH // HEADS).unbind(2)],
    "unflatten": lambda x: [t.flatten(-2) for t in x.unflatten(-1, (3, HEADS, -1)).unbind(-3)],
}


@pytest.mark.parametrize("how", list(TAKEN_APART))
def test_parts_are_taken_by_owner_without_the_other_ranks(how: str):
    whole, made, parts = three()
    assert (made.shape, made.dim(), made.dtype, made.device) == (whole.shape, 3, whole.dtype, whole.device)
    for found, mine, expected in zip(TAKEN_APART[how](made), parts, TAKEN_APART[how](whole), strict=True):
        assert isinstance(found, DTensor)
        assert found.shape == expected.shape
        assert found.placements == (Shard(2),)
        assert torch.equal(found.to_local(), mine)


@pytest.mark.parametrize(
    "otherwise",
    [
        lambda x: x + 1,
        lambda x: x.split(WIDTH // 2, -1),
        lambda x: x.chunk(3, 1),
        lambda x: x.chunk(6, -1),
        lambda x: x[..., :WIDTH],
        lambda x: x.view(ROWS, LENGTH, HEADS, 3 * WIDTH // HEADS),
        lambda x: x.transpose(0, 1),
    ],
)
def test_anything_else_is_done_with_the_whole(otherwise: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch):
    """Put together from all ranks: here, where there are none, by hand."""
    whole, made, _ = three()
    with pytest.raises(AttributeError, match="_dim_group"):
        otherwise(made)
    asked: list[Any] = []

    def gathered(tensor: DTensor, mesh: Any, placements: Any) -> torch.Tensor:
        asked.append(placements)
        assert tensor.shape == (ROWS, LENGTH, 3, WIDTH)
        return whole.view(tensor.shape)

    monkeypatch.setattr(DTensor, "redistribute", gathered)
    found, expected = otherwise(made), otherwise(whole)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert asked == [[Replicate()]]


# -- a user's forward ------------------------------------------------------------------------------------------


class Variant(Attention):
    """Another way to take queries, keys and values apart."""

    def __init__(self, take: Callable[..., Any], norm: int = 0) -> None:
        super().__init__()
        self.take = take
        self.norm = nn.LayerNorm(norm) if norm else nn.Identity()

    def parts(self, x: torch.Tensor) -> Any:
        return self.take(self, self.c_attn(x))


class Guided(Attention):
    def forward(self, x: torch.Tensor, guide: torch.Tensor) -> torch.Tensor:
        return super().forward(x + guide)


class Lost(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_attn(x)


def normed(module: Any, made: torch.Tensor) -> Any:
    q, k, v = made.split(WIDTH, -1)
    return module.norm(q.view(*q.shape[:2], HEADS, -1)).view(q.shape), k, v


@pytest.mark.parametrize(
    ("module", "why_not"),
    [
        (Attention(), ""),
        (Attention(flash=False, dropout=0.5), ""),
        (Attention().bfloat16(), ""),
        (Variant(lambda _, made: made.chunk(3, -1)), ""),
        (Variant(lambda _, made: made.view(*made.shape[:2], 3, WIDTH).unbind(2)), ""),
        (
            Variant(lambda _, made: (made[..., :WIDTH], made[..., WIDTH:-WIDTH], made[..., -WIDTH:])),
            "heads meet before",
        ),
        # Each head has its queries, keys and values together, as in GPT-NeoX.
        (
            Variant(lambda _, made: (t.flatten(2) for t in made.reshape(3, 2, HEADS, 6).chunk(3, -1))),
            "heads meet before",
        ),
        (Variant(lambda _, made: (t.flip(-1) for t in made.chunk(3, -1))), "heads meet before"),
        (Variant(normed, WIDTH // HEADS), r"norm.weight, norm.bias would have a part of its gradient only"),
        (Guided(), "can't be tried in slices .*guide"),
        (Lost(), "does not come to c_proj"),
        (Attention().to("meta"), "no numbers"),
    ],
)
def test_a_forward_is_tried_before_it_is_cut(module: nn.Module, why_not: str):
    found = explain_unsplittable(module, "c_attn", "c_proj", 2)
    assert bool(found) == bool(why_not)
    import re

    assert re.search(why_not, found)


def test_a_trial_leaves_the_module_and_random_numbers_as_they_are():
    module = Block("fused", dropout=0.5)
    before, drawn = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    assert explain_unsplittable(module, "c_attn", "proj", 4) == ""
    assert module.training
    assert isinstance(module.c_attn, nn.Linear)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_heads_that_do_not_divide_are_no_parts():
    """Seen without being told how many heads there are."""
    assert "slices" in explain_unsplittable(Attention(), "c_attn", "c_proj", 8)
