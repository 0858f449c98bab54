"""Plans for tensor parallelism, found in common structures of models.

The plan that a model of Hugging Face has in ``config.base_model_tp_plan`` goes first. The structures are pairs of
Linear layers and attention. Attention is nn.MultiheadAttention, or modules with queries, keys and values in separate
layers or in one. One layer is sharded by heads only if a trial of the module's forward succeeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dtkit._util.torch_private import get_module_dict
from dtkit.strategies.tensor.attention_check import explain_unsplittable
from dtkit.strategies.tensor.config_plan import find_config_groups
from dtkit.strategies.tensor.linear import count_features, is_linear
from dtkit.strategies.tensor.plan import (
    NUM_HEADS_ATTRIBUTES,
    TensorPlan,
    build_rows,
    describe_heads_per_rank,
    find_problems,
    find_shared_parameters,
    find_uneven_heads,
    join_name,
    read_int_attribute,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.strategies.tensor.plan import Style


# Elementwise layers without parameters.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip


# Common names: (layers with sharded outputs, the layer with sharded inputs), the longer lists first.
_MLP_NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("linear1",), "linear2"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
    (("lin1",), "lin2"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
)


_QKV_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("W_query", "W_key", "W_value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
)


_FUSED_QKV_NAMES = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "to_qkv")


_OUTPUT_PROJECTION_NAMES = (
    "out_proj",
    "o_proj",
    "c_proj",
    "proj",
    "dense",
    "to_out",
    "wo",
    "out",
    "o",
    "out_lin",
    "output.dense",
)


def find_plan(model: nn.Module, tp_size: int) -> TensorPlan:
    """Return a plan for the pairs of layers and the attention in `model`.

    Raises ValueError if there are none.
    """
    styles: dict[str, Style] = {}
    notes: dict[str, str] = {}
    for group in find_config_groups(model, tp_size):
        _add_group(model, tp_size, group, "", styles, notes)
    for name, module in model.named_modules():
        for group, note in _find_candidate_groups(module, tp_size):
            full_names = {join_name(name, child): style for child, style in group.items()}
            _add_group(model, tp_size, full_names, note, styles, notes)
    if not styles:
        reasons = "".join(f"\n  {name or '(itself)'}: {note}" for name, note in notes.items())
        explanation = (
            f"these layers don't divide by {tp_size}, or can't be sharded otherwise:{reasons}\nUse another tp_size"
            if reasons
            else "it looks for two Linear layers with only an activation between them, for nn.MultiheadAttention, and "
            "for attention with q, k, v and an output layer. Use another strategy"
        )
        raise ValueError(
            f"TensorParallel({tp_size}) finds nothing to shard in {type(model).__name__}: {explanation}, or name the "
            "layers, as in plan={'fc1': 'colwise', 'fc2': 'rowwise'}"
        )
    return TensorPlan(type(model).__name__, tp_size, styles, build_rows(model, tp_size, styles, notes))


def _add_group(
    model: nn.Module, tp_size: int, group: dict[str, str], note: str, styles: dict[str, Style], notes: dict[str, str]
) -> None:
    """Add a group of layers to the plan with a note, or note the reason why not."""
    if any(name in styles for name in group):
        return
    reasons = [r for name, style in group.items() for r in find_problems(model.get_submodule(name), style, tp_size)]
    reasons += [reason for _, reason in find_shared_parameters(model, group)]
    if reasons:
        notes.update(dict.fromkeys(group, reasons[0]))
    else:
        styles.update(group)
        if note:
            notes.update(dict.fromkeys(group, note))


def _find_candidate_groups(module: nn.Module, tp_size: int) -> Iterator[tuple[dict[str, str], str]]:
    """Yield groups of one module's layers to shard together: ({child, or "" for itself: style}, a note)."""
    if isinstance(module, nn.Sequential):
        yield from ((pair, "") for pair in _find_linear_pairs(list(module.named_children())))
        return
    if isinstance(module, nn.MultiheadAttention):
        yield {"": "heads", "out_proj": "rowwise"}, describe_heads_per_rank(module.num_heads, tp_size)
        return
    for outputs, inputs in _MLP_NAMES:
        if _is_matching_group(module, outputs, inputs):
            yield {**dict.fromkeys(outputs, "colwise"), inputs: "rowwise"}, ""
            break
    projection = next((n for n in _OUTPUT_PROJECTION_NAMES if is_linear(_find_child(module, n))), None)
    if projection is not None:
        yield from _find_attention_groups(module, projection, tp_size)


def _find_child(module: nn.Module, name: str) -> nn.Module | None:
    """Return a module's child by its name, or a child of a child; None without."""
    first, _, rest = name.partition(".")
    child = get_module_dict(module).get(first)
    return child if child is None or not rest else _find_child(child, rest)


def _find_attention_groups(module: nn.Module, projection: str, tp_size: int) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the layers of queries, keys and values, separate or as one, with the output layer."""
    for names in _QKV_NAMES:
        if all(isinstance(_find_child(module, n), nn.Linear) for n in names):
            owner = module.get_submodule(names[0].rpartition(".")[0])
            heads = read_int_attribute(owner, NUM_HEADS_ATTRIBUTES)
            why = next(
                find_uneven_heads(owner, tp_size), "" if heads else "it has no attribute for its number of heads"
            )
            first, last = ("gathered", "scattered") if why else ("heads", "rowwise")
            biases = {} if why else dict.fromkeys(_find_head_biases(module, heads), "heads")
            yield {**dict.fromkeys(names, first), **biases, projection: last}, _describe_attention(heads, tp_size, why)
            return
    for name in _FUSED_QKV_NAMES:
        if is_linear(_find_child(module, name)):
            heads = read_int_attribute(module, NUM_HEADS_ATTRIBUTES)
            why = next(find_uneven_heads(module, tp_size), "") or _explain_unsplittable_qkv(
                module, name, projection, tp_size
            )
            first, last = ("gathered", "scattered") if why else ("fused", "rowwise")
            yield {name: first, projection: last}, _describe_attention(heads, tp_size, why)
            return


def _find_head_biases(module: nn.Module, heads: int | None) -> Iterator[str]:
    """Yield embeddings of an attention with one feature per head, such as T5's biases for relative positions."""
    for name, child in module.named_children():
        if isinstance(child, nn.Embedding) and child.embedding_dim == heads:
            yield name


def _describe_attention(heads: int | None, tp_size: int, why_not: str) -> str:
    if why_not:
        return f"each rank computes the whole attention: {why_not}"
    return describe_heads_per_rank(heads, tp_size) if heads else "sharded by heads"


def _explain_unsplittable_qkv(module: nn.Module, qkv_layer: str, output_layer: str, tp_size: int) -> str:
    """Return why a layer can't be sharded as fused queries, keys and values; empty if it can."""
    num_outputs = count_features(module.get_submodule(qkv_layer))[1]
    num_inputs = count_features(module.get_submodule(output_layer))[0]
    if num_outputs != 3 * num_inputs:
        return f"{qkv_layer} has {num_outputs} outputs, not 3 x {num_inputs} inputs of {output_layer}"
    if num_inputs % tp_size:
        return f"{num_inputs} features of all heads can't be cut into {tp_size} equal parts"
    return explain_unsplittable(module, qkv_layer, output_layer, tp_size)


def _is_matching_group(module: nn.Module, outputs: Sequence[str], inputs: str) -> bool:
    """Return whether these layers exist and their sizes match."""
    last, first = _find_child(module, inputs), [_find_child(module, name) for name in outputs]
    return (
        last is not None
        and is_linear(last)
        and all(f is not None and is_linear(f) and count_features(f)[1] == count_features(last)[0] for f in first)
    )


def _find_linear_pairs(children: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, str]]:
    """Yield pairs of Linear layers with only elementwise layers between them."""
    first: tuple[str, nn.Linear] | None = None
    for name, child in children:
        if isinstance(child, nn.Linear):
            if first is not None and first[1].out_features == child.in_features:
                yield {first[0]: "colwise", name: "rowwise"}
                first = None
            else:
                first = name, child
        elif not isinstance(child, _ELEMENTWISE):
            first = None
