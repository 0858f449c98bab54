"""Attention sharded by heads, if one layer computes queries, keys and values.

Heads are independent between that layer and the output layer, so each rank computes some of them. Of the first layer's
rows it has the queries, the keys and the values of its heads. The output layer is rowwise, so there is one sum over
ranks forward and one backward (Shoeybi et al., Megatron-LM, 2019).

- ``nn.MultiheadAttention`` computes this rank's heads (:class:`ShardedMultiheadAttention`).
- A user's attention runs unchanged. Its layer returns a :class:`FusedQKV`, which has the shape of all queries, keys and
  values. Split into them, it gives DTensors sharded by heads. Any other operation first gathers it from all ranks,
  which is slower but correct.

All ranks draw equal random numbers: dropout within attention drops the same positions in each rank's heads.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dtkit._util.torch_private import apply_style, cpu_attention, cpu_attention_backward, tree_map
from dtkit.engine.state.dtensor_shards import set_num_fused_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

NUM_QKV = 3
"""Number of matrices in a fused layer: queries, keys and values."""
_PACKED_PROJECTIONS = ("in_proj_weight", "in_proj_bias")
_SEPARATE_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


# --- nn.MultiheadAttention ----------------------------------------------------------------------------------


class MultiheadAttentionParallel(ParallelStyle):
    """Style for an ``nn.MultiheadAttention`` that computes this rank's heads; its `out_proj` must be rowwise."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in (*_PACKED_PROJECTIONS, *_SEPARATE_PROJECTIONS):
            p = getattr(module, name)
            if p is not None:
                shard = distribute_tensor(p, device_mesh, [Shard(0)], src_data_rank=None)
                parameter = nn.Parameter(shard, p.requires_grad)
                if name in _PACKED_PROJECTIONS:
                    set_num_fused_blocks(parameter, NUM_QKV)
                module.register_parameter(name, parameter)
        module.__class__ = ShardedMultiheadAttention
        module.heads_mesh = device_mesh  # type: ignore[assignment]  # a module's attributes may be anything
        return module


class ShardedMultiheadAttention(nn.MultiheadAttention):
    """torch's module with this rank's heads; `num_heads` and `embed_dim` still count all heads."""

    heads_mesh: DeviceMesh

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002 - torch's
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002 - torch's
        is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute as torch's module does. Attention weights need collectives: ``need_weights=False`` avoids them."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is a hint about attn_mask, which is missing: pass both")
        batched = query.dim() > 2
        swapped = batched and not self.batch_first
        heads = [
            self._split_heads(x, batched=batched, transposed=swapped) for x in self._project_qkv(query, key, value)
        ]
        bias = None
        if not is_causal or need_weights or key_padding_mask is not None:
            bias, is_causal = self._build_attn_bias(attn_mask, key_padding_mask, heads[0]), False
        dropout = self.dropout if self.training else 0.0
        head_outputs, weights = compute_attention(heads, bias, dropout, causal=is_causal, need_weights=need_weights)
        out = self.out_proj(head_outputs.transpose(1, 2).flatten(2))
        out = out.transpose(0, 1) if swapped else out if batched else out.squeeze(0)
        return out, None if weights is None else self._gather_attn_weights(
            weights, average=average_attn_weights, batched=batched
        )

    def _project_qkv(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return this rank's queries, keys and values. Backward sums each distinct input's gradient once."""
        mesh = self.heads_mesh
        inputs = {id(x): copy_to_parallel_region(x, mesh) for x in (query, key, value)}
        bias = None if self.in_proj_bias is None else _to_local(self.in_proj_bias)
        if self._qkv_same_embed_dim and len(inputs) == 1:
            return functional.linear(inputs[id(query)], _to_local(self.in_proj_weight), bias).chunk(NUM_QKV, -1)
        if self._qkv_same_embed_dim:
            weights: Sequence[torch.Tensor] = _to_local(self.in_proj_weight).chunk(NUM_QKV)
        else:
            weights = [_to_local(getattr(self, name)) for name in _SEPARATE_PROJECTIONS]
        biases: Sequence[torch.Tensor | None] = [None] * NUM_QKV if bias is None else bias.chunk(NUM_QKV)
        sources = zip((query, key, value), weights, biases, strict=True)
        return [functional.linear(inputs[id(x)], w, b) for x, w, b in sources]

    def _split_heads(self, x: torch.Tensor, *, batched: bool, transposed: bool) -> torch.Tensor:
        """Return the shape (rows, local heads, length, head size)."""
        rows = x.transpose(0, 1) if transposed else x if batched else x.unsqueeze(0)
        return rows.reshape(*rows.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _build_attn_bias(
        self, attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the masks as a sum for scores, broadcastable to (rows, local heads, length, keys)."""
        bias = None if attn_mask is None else _to_additive_mask(attn_mask, queries.dtype)
        if bias is not None and bias.dim() > 2:  # (rows x all heads, length, keys)
            coordinate, local_heads = self.heads_mesh.get_coordinate(), queries.shape[1]
            assert coordinate is not None
            first = coordinate[0] * local_heads
            bias = bias.reshape(-1, self.num_heads, *bias.shape[1:]).narrow(1, first, local_heads)
        if key_padding_mask is None:
            return bias
        padding = _to_additive_mask(key_padding_mask, queries.dtype)[..., None, None, :]
        return padding if bias is None else bias + padding

    def _gather_attn_weights(self, weights: torch.Tensor, *, average: bool, batched: bool) -> torch.Tensor:
        """Return the weights of all heads as a plain tensor, since the user may do anything with it."""
        mesh = self.heads_mesh
        sharded: Any = DTensor.from_local(weights, mesh, [Shard(1)], run_check=False)
        sharded = sharded.mean(1) if average else sharded
        whole: torch.Tensor = sharded.redistribute(mesh, [Replicate()]).to_local()
        return whole if batched else whole.squeeze(0)


def compute_attention(
    heads: Sequence[torch.Tensor], attn_bias: torch.Tensor | None, dropout: float, *, causal: bool, need_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention and, if needed, its weights; queries, keys, values are (rows, heads, length, head size)."""
    q, k, v = heads
    if not need_weights:
        return functional.scaled_dot_product_attention(q, k, v, attn_bias, dropout, causal), None
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    weights = (scores if attn_bias is None else scores + attn_bias).softmax(-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def copy_to_parallel_region(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a replicated tensor as this rank's copy, whose gradient is the sum over ranks."""
    whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def _to_local(p: torch.Tensor) -> torch.Tensor:
    assert isinstance(p, DTensor)
    return p.to_local()


def _to_additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as values to add: True forbids a position."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


# --- one layer for queries, keys and values in a user's attention -------------------------------------------


class FusedQKVParallel(ParallelStyle):
    """Style for a layer that computes queries, keys and values in this order: a rank computes those of its heads."""

    def __init__(self, colwise: ParallelStyle) -> None:
        """`colwise` shards the layer's outputs and returns this rank's as a plain tensor."""
        self._colwise = colwise

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharded = apply_style(self._colwise, module, device_mesh)
        for p in sharded.parameters(recurse=False):
            set_num_fused_blocks(p, NUM_QKV)
        sharded.register_forward_hook(lambda _module, _inputs, local_qkv: make_fused_qkv(local_qkv, device_mesh))
        return sharded


def make_fused_qkv(local_qkv: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return all ranks' queries, keys and values as one tensor, given this rank's: (..., 3 x local size)."""
    parts = local_qkv.reshape(*local_qkv.shape[:-1], NUM_QKV, -1)
    return FusedQKV.from_qkv(DTensor.from_local(parts, mesh, [Shard(parts.dim() - 1)], run_check=False))


class FusedQKV(torch.Tensor):
    """Queries, keys and values as one tensor of the whole shape, with its values in `qkv`."""

    qkv: DTensor
    """DTensor of shape (..., 3, features), sharded by features."""

    @classmethod
    def from_qkv(cls, qkv: DTensor) -> FusedQKV:
        """Return `qkv` with its last two dimensions flattened."""
        shape = (*qkv.shape[:-2], NUM_QKV * qkv.shape[-1])
        fused = qkv.to_local().detach().new_empty(1).expand(shape).as_subclass(cls)
        fused.qkv = qkv
        return fused

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Split the tensor into queries, keys and values, return metadata, or gather it for any other function."""
        kwargs = kwargs or {}
        if func in _METADATA_FUNCTIONS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        split = _try_unfuse(func, *args, **kwargs) if func in _UNFUSING_FUNCTIONS and isinstance(args[0], cls) else None
        if split is not None:
            return split
        return func(*tree_map(_gather_fused, args), **tree_map(_gather_fused, kwargs))


_T = torch.Tensor
_METADATA_FUNCTIONS = {
    *(_T.size, _T.dim, _T.numel, _T.ndimension, _T.is_floating_point, _T.is_complex, _T.element_size, _T.__len__),
    *(getattr(_T, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse")),
}
_SPLIT_FUNCTIONS, _CHUNK_FUNCTIONS = (_T.split, torch.split), (_T.chunk, torch.chunk)
_VIEW_FUNCTIONS = (_T.view, _T.reshape, torch.reshape, _T.unflatten)
_UNFUSING_FUNCTIONS = {*_SPLIT_FUNCTIONS, *_CHUNK_FUNCTIONS, *_VIEW_FUNCTIONS, _T.contiguous}


def _try_unfuse(func: Any, tensor: FusedQKV, *args: Any, **kwargs: Any) -> Any:
    """Return queries, keys and values, split or as a dimension; None for any other split or view."""
    qkv = tensor.qkv
    if func == _T.contiguous:
        return tensor
    if func in _SPLIT_FUNCTIONS or func in _CHUNK_FUNCTIONS:
        names = {_ARGUMENT_ALIASES.get(k, k): v for k, v in kwargs.items()}
        arguments = {"dim": 0} | dict(zip(("size", "dim"), args, strict=False)) | names
        size, last = qkv.shape[-1], arguments["dim"] in (-1, tensor.dim() - 1)
        thirds = (NUM_QKV,) if func in _CHUNK_FUNCTIONS else (size, [size] * NUM_QKV, (size,) * NUM_QKV)
        return qkv.unbind(-2) if last and arguments["size"] in thirds else None
    shape = _infer_view_shape(func, tensor, args, kwargs)
    return qkv.view(shape) if shape is not None and _keeps_qkv_dim(shape, qkv.shape) else None


_ARGUMENT_ALIASES = {"split_size": "size", "split_size_or_sections": "size", "chunks": "size"}


def _infer_view_shape(func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the shape of a view with its -1 resolved; None for other kinds of views."""
    if kwargs or not args:
        return None
    if func == _T.unflatten:
        dim, sizes = args
        if dim not in (-1, tensor.dim() - 1):
            return None
        shape = [*tensor.shape[:-1], *sizes]
    else:
        shape = list(args[0]) if isinstance(args[0], (tuple, list)) else list(args)
    if not all(isinstance(n, int) for n in shape):
        return None
    known = math.prod(n for n in shape if n != -1)
    return tuple(tensor.numel() // known if n == -1 and known else n for n in shape)


def _keeps_qkv_dim(shape: Sequence[int], qkv_shape: Sequence[int]) -> bool:
    """Return whether a view has queries, keys and values as a dimension, with the same dimensions before it."""
    before, features = math.prod(qkv_shape[:-2]), qkv_shape[-1]
    return any(
        n == NUM_QKV and math.prod(shape[:k]) == before and math.prod(shape[k + 1 :]) == features
        for k, n in enumerate(shape)
    )


def _gather_fused(value: Any) -> Any:
    """Return a fused tensor gathered from all ranks (a collective), and other values unchanged."""
    if not isinstance(value, FusedQKV):
        return value
    return value.qkv.redistribute(value.qkv.device_mesh, [Replicate()]).flatten(-2)


class HeadMaskSharding(TorchFunctionMode):
    """Gives each rank's attention its heads of a mask that has heads, as T5's has, within the context.

    DTensor shards a plain mask for a GPU's attention, but not for a CPU's, which takes it as a keyword.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Shard the mask of an attention by heads like its queries, and leave other functions as they are."""
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and isinstance(args[0], DTensor):
            mask = kwargs.get("attn_mask")
            if isinstance(mask, torch.Tensor) and not isinstance(mask, DTensor) and mask.dim() == 4:
                kwargs["attn_mask"] = _shard_mask(mask, args[0])
        return func(*args, **kwargs)


def _shard_mask(mask: torch.Tensor, queries: DTensor) -> DTensor:
    """Return a mask with the queries' placements, or replicated if it has one head for all; without communication."""
    mesh = queries.device_mesh
    whole = DTensor.from_local(mask, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, queries.placements) if mask.shape[1] > 1 else whole


# --- torch's attention on DTensors --------------------------------------------------------------------------


@functools.cache
def register_attention_sharding() -> None:
    """Register with DTensor that attention on a CPU can be sharded by heads: torch does so for GPUs only."""
    if cpu_attention is None or cpu_attention_backward is None:
        return
    placements = (Replicate(), Shard(1))

    def place_mask(mask: Any, placement: Any) -> list[Any]:
        """Shard a mask that has heads."""
        if mask is None:
            return []
        return [placement if len(mask.shape) == 4 and mask.shape[1] > 1 else Replicate()]

    def place_forward(*args: Any, attn_mask: Any = None, **_kwargs: Any) -> Any:
        scalars = [None] * (len(args) - 3)
        return [([x, x], [x, x, x, *scalars, *place_mask(attn_mask, x)]) for x in placements]

    def place_backward(*_args: Any, attn_mask: Any = None, **_kwargs: Any) -> Any:
        return [([x] * 3, [x] * 6 + [None, None] + place_mask(attn_mask, x)) for x in placements]

    register_sharding(cpu_attention.default)(place_forward)
    register_sharding(cpu_attention_backward.default)(place_backward)
