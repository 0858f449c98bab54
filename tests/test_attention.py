"""Attention sharded by heads, without other ranks: its results, and which user-defined forwards can be sharded."""

from __future__ import annotations

import functools
import re
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
from tests.support.nets import HEADS, WIDTH, Attention, Block

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, LENGTH, KEYS = 3, 4, 5


def single_process_mesh(tp_size: int, rank: int) -> DeviceMesh:
    """Return a mesh in which this process simulates one rank."""
    return DeviceMesh("cpu", torch.arange(tp_size), mesh_dim_names=(f"r{rank}",), _init_backend=False, _rank=rank)


# -- nn.MultiheadAttention -------------------------------------------------------------------------------------


@pytest.fixture
def local_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep each rank's attention weights local, since there are no other ranks to gather from."""
    monkeypatch.setattr(ShardedMultiheadAttention, "_gather_attn_weights", lambda _self, weights, **_: weights)


class Part(nn.Module):
    """A rowwise layer without its sum over ranks."""

    def __init__(self, whole: nn.Linear, tp_size: int, rank: int) -> None:
        super().__init__()
        self.weight = whole.weight.chunk(tp_size, 1)[rank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def part(whole: nn.MultiheadAttention, tp_size: int, rank: int) -> nn.Module:
    """Return one rank's shards of the module."""
    sharded = copy_to_meta(whole)
    MultiheadAttentionParallel()._apply(sharded, single_process_mesh(tp_size, rank))
    load_shards(whole, sharded, torch.device("cpu"))
    sharded.out_proj = Part(whole.out_proj, tp_size, rank)
    return sharded.train(whole.training)


def masks(kind: str, queries: int, keys: int, rows: int = ROWS) -> dict[str, Any]:
    """Return the mask arguments of a call; no mask hides the first key."""
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


def check_parts(module: nn.MultiheadAttention, inputs: Any, tp_size: int = 2, **call: Any) -> None:
    """Assert that the ranks' results sum up to those of torch's module, with the same attention weights."""
    expected, expected_weights = module(*inputs, **call)
    outputs, weights = zip(*(part(module, tp_size, rank)(*inputs, **call) for rank in range(tp_size)), strict=True)
    total = sum(outputs) if module.out_proj.bias is None else sum(outputs) + module.out_proj.bias
    assert torch.allclose(total, expected, atol=1e-12)
    if expected_weights is None:
        assert weights == (None,) * tp_size
    else:
        all_heads = torch.cat(weights, 1)
        assert torch.allclose(all_heads.mean(1).view(expected_weights.shape), expected_weights, atol=1e-12)


@pytest.mark.usefixtures("local_weights")
@pytest.mark.parametrize("call", [{"need_weights": False}, {}], ids=str)
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("mask", MASKS)
def test_attention_shards_sum_to_the_result_of_torch_attention(mask: str, shape: str, call: dict[str, Any]):
    torch.manual_seed(0)
    options = SHAPES[shape]
    module = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    keys = LENGTH if "kdim" not in options else KEYS
    query = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    key = query if keys == LENGTH else torch.randn(ROWS, keys, options["kdim"], dtype=torch.float64)
    value = query if keys == LENGTH else torch.randn(ROWS, keys, options["vdim"], dtype=torch.float64)
    if not options.get("batch_first"):
        same = key is query
        query = query.transpose(0, 1)
        key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
    check_parts(module, (query, key, value), **masks(mask, LENGTH, keys), **call)


@pytest.mark.usefixtures("local_weights")
@pytest.mark.parametrize("call", [{"need_weights": False}, {}], ids=str)
def test_unbatched_attention_shards_match_torch_with_separate_keys_and_values(call: dict[str, Any]):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS).double()
    query = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, KEYS, WIDTH, dtype=torch.float64)
    padding = {"key_padding_mask": torch.tensor([False, True, False, False, True])}
    check_parts(module, (query, key, value), 4, **padding, **call)
    check_parts(module, (query, key, key), **masks("for each head", LENGTH, KEYS, rows=1), **call)


def test_is_causal_without_a_mask_raises_as_in_torch():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    x = torch.randn(LENGTH, WIDTH)
    for attention in (module, part(module, 2, 0)):
        with pytest.raises(RuntimeError, match="attn_mask"):
            attention(x, x, x, is_causal=True)


@pytest.mark.usefixtures("local_weights")
def test_dropout_applies_within_attention_and_only_in_training():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5).double()
    x = torch.randn(LENGTH, ROWS, WIDTH, dtype=torch.float64)
    sharded = part(module, 2, 0)
    for need_weights in (True, False):
        first, second = (sharded.train()(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(first, second)
    check_parts(module.eval(), (x, x, x))


# -- queries, keys and values as one ---------------------------------------------------------------------------


def make_qkv(tp_size: int = 2, rank: int = 1) -> tuple[torch.Tensor, FusedQKV, list[torch.Tensor]]:
    """Return (the whole tensor, the fused tensor of a rank, this rank's queries, keys and values)."""
    whole = torch.randn(ROWS, LENGTH, 3 * WIDTH, generator=torch.Generator().manual_seed(2))
    parts = [third.chunk(tp_size, -1)[rank] for third in whole.chunk(3, -1)]
    fused = make_fused_qkv(torch.cat(parts, -1), single_process_mesh(tp_size, rank))
    assert isinstance(fused, FusedQKV)
    return whole, fused, parts


SPLITS: dict[str, Callable[[Any], Any]] = {
    "split": lambda x: x.split(WIDTH, dim=2),
    "split by sizes": lambda x: x.split([WIDTH, WIDTH, WIDTH], -1),
    "torch.split": lambda x: torch.split(x, split_size_or_sections=WIDTH, dim=-1),
    "chunk": lambda x: x.chunk(3, dim=-1),
    "torch.chunk": lambda x: torch.chunk(x.contiguous(), 3, 2),
    "view": lambda x: x.view(*x.shape[:2], 3, WIDTH).unbind(2),
    "reshape": lambda x: [t.flatten(-2) for t in x.reshape(x.size(0), -1, 3, HEADS, WIDTH // HEADS).unbind(2)],
    "unflatten": lambda x: [t.flatten(-2) for t in x.unflatten(-1, (3, HEADS, -1)).unbind(-3)],
}


@pytest.mark.parametrize("split", list(SPLITS))
def test_fused_qkv_splits_without_other_ranks(split: str):
    whole, fused, parts = make_qkv()
    assert (fused.shape, fused.dim(), fused.dtype, fused.device) == (whole.shape, 3, whole.dtype, whole.device)
    for actual, local, expected in zip(SPLITS[split](fused), parts, SPLITS[split](whole), strict=True):
        assert isinstance(actual, DTensor)
        assert actual.shape == expected.shape
        assert actual.placements == (Shard(2),)
        assert torch.equal(actual.to_local(), local)


@pytest.mark.parametrize(
    "operation",
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
def test_other_operations_gather_the_whole_fused_qkv(operation: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch):
    """The test replaces the gathering from all ranks."""
    whole, fused, _ = make_qkv()
    with pytest.raises(AttributeError, match="_dim_group"):
        operation(fused)
    gathered: list[Any] = []

    def redistribute(tensor: DTensor, mesh: Any, placements: Any) -> torch.Tensor:
        gathered.append(placements)
        assert tensor.shape == (ROWS, LENGTH, 3, WIDTH)
        return whole.view(tensor.shape)

    monkeypatch.setattr(DTensor, "redistribute", redistribute)
    actual, expected = operation(fused), operation(whole)
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert gathered == [[Replicate()]]


# -- a user's forward ------------------------------------------------------------------------------------------


class Variant(Attention):
    """Attention with another way to split queries, keys and values."""

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


def normed(module: Any, qkv: torch.Tensor) -> Any:
    q, k, v = qkv.split(WIDTH, -1)
    return module.norm(q.view(*q.shape[:2], HEADS, -1)).view(q.shape), k, v


@pytest.mark.parametrize(
    ("module", "why_not"),
    [
        (Attention(), ""),
        (Attention(flash=False, dropout=0.5), ""),
        (Attention().bfloat16(), ""),
        (Variant(lambda _, qkv: qkv.chunk(3, -1)), ""),
        (Variant(lambda _, qkv: qkv.view(*qkv.shape[:2], 3, WIDTH).unbind(2)), ""),
        (
            Variant(lambda _, qkv: (qkv[..., :WIDTH], qkv[..., WIDTH:-WIDTH], qkv[..., -WIDTH:])),
            "heads are not independent before",
        ),
        # Each head has its queries, keys and values together, as in GPT-NeoX.
        (
            Variant(lambda _, qkv: (t.flatten(2) for t in qkv.reshape(3, 2, HEADS, 6).chunk(3, -1))),
            "heads are not independent before",
        ),
        (Variant(lambda _, qkv: (t.flip(-1) for t in qkv.chunk(3, -1))), "heads are not independent before"),
        (Variant(normed, WIDTH // HEADS), r"norm.weight, norm.bias would get only a part of its gradient"),
        (Guided(), "its forward fails with shards .*guide"),
        (Lost(), "does not reach c_proj"),
        (Attention().to("meta"), "no values"),
    ],
)
def test_explain_unsplittable_runs_the_forward(module: nn.Module, why_not: str):
    reason = explain_unsplittable(module, "c_attn", "c_proj", 2)
    assert bool(reason) == bool(why_not)
    assert re.search(why_not, reason)


def test_explain_unsplittable_changes_neither_module_nor_rng():
    module = Block("fused", dropout=0.5)
    before, drawn = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    assert explain_unsplittable(module, "c_attn", "proj", 4) == ""
    assert module.training
    assert isinstance(module.c_attn, nn.Linear)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_explain_unsplittable_refuses_heads_that_do_not_divide():
    """The module doesn't need to know its number of heads."""
    assert "shards" in explain_unsplittable(Attention(), "c_attn", "c_proj", 8)
