"""Plans for tensor parallelism: which layers are sharded, and how.

A plan gives modules a style by name:

=========== ===================================================================================================
colwise     sharded outputs of a Linear (features of an Embedding): the next layer gets this rank's part
rowwise     sharded inputs of a Linear (rows of an Embedding): takes a colwise layer's part, and sums over ranks
gathered    as colwise, but the next layer gets all outputs
scattered   as rowwise, but takes all inputs
heads       as colwise, for queries, keys and values: the attention sees a whole tensor, sharded by heads;
            an nn.MultiheadAttention computes this rank's heads (and its out_proj is rowwise);
            an Embedding of one bias per head, as for T5's relative positions, gives this rank's heads theirs
fused       as heads, for one layer that computes queries, keys and values in this order
sequence    a LayerNorm or RMSNorm works on this rank's part of the sequence (the second dimension)
loss        as colwise for the last Linear: the loss works on sharded outputs (only cross entropy can)
=========== ===================================================================================================

A colwise layer, elementwise operations and a rowwise layer form a pair (Shoeybi et al., Megatron-LM, 2019). It has one
sum over ranks in forward and one in backward. Attention is such a pair as well, since its heads are independent. All
ranks hold the rest of the model whole.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtkit._util import formatting
from dtkit.strategies.tensor.linear import count_features, is_linear

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STYLES = ("colwise", "rowwise", "gathered", "scattered", "heads", "fused", "sequence", "loss")
_OUTPUT_STYLES, _INPUT_STYLES = ("colwise", "gathered", "heads", "fused", "loss"), ("rowwise", "scattered")


NUM_HEADS_ATTRIBUTES = ("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead", "heads")
_NUM_KV_HEADS_ATTRIBUTES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")

Style = str | ParallelStyle


@dataclasses.dataclass(frozen=True)
class TensorPlanRow:
    """A module that owns parameters."""

    name: str
    module_type: str
    style: str
    """A style's name, or "whole"."""
    parameters: int
    local_parameters: int
    """Parameters on each rank."""
    note: str


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A plan for one model. Its `repr` is a table."""

    model: str
    tp_size: int
    styles: Mapping[str, Style]
    """Styles by the modules' full names."""
    rows: tuple[TensorPlanRow, ...]

    def __repr__(self) -> str:
        return format_plan(self)


def format_plan(plan: TensorPlan) -> str:
    """Return a plan as a table: each module's style, and its parameters on each rank."""
    head = ("module", "type", "style", "parameters", "each rank", "")
    rows = [
        (r.name or "(itself)", r.module_type, r.style, f"{r.parameters:,}", f"{r.local_parameters:,}", r.note)
        for r in plan.rows
    ]
    total, local = sum(r.parameters for r in plan.rows), sum(r.local_parameters for r in plan.rows)
    share = local / total if total else 1.0
    rows.append(("total", "", "", f"{total:,}", f"{local:,}", f"{100 * share:.0f} % of the parameters on each rank"))
    return "\n".join(
        [f"{plan.model} in {plan.tp_size} slices", *formatting.format_columns([head, *rows], left_aligned=(0, 1, 2, 5))]
    )


# --- a user's plan ------------------------------------------------------------------------------------------


def validate_plan(model: nn.Module, tp_size: int, requested: Mapping[str, Style]) -> TensorPlan:
    """Return a user's plan, with names instead of patterns (``layers.*.linear1``).

    Raises ValueError with all of its problems.
    """
    modules = dict(model.named_modules())
    styles: dict[str, Style] = {}
    problems: list[str] = []
    for pattern, style in requested.items():
        matches = [name for name in modules if matches_pattern(name, pattern)]
        if not matches:
            problems.append(f"{pattern!r}: no such module{_suggest_names(pattern, modules)}")
        styles.update(dict.fromkeys(matches, style))
    for name in [name for name, style in styles.items() if _is_attention(modules[name], style)]:
        styles.setdefault(join_name(name, "out_proj"), "rowwise")
    for name, style in styles.items():
        problems += [f"{name!r}: {problem}" for problem in find_problems(modules[name], style, tp_size)]
        if style in ("heads", "fused") and is_linear(modules[name]):
            attention = modules[name.rpartition(".")[0]]
            problems += [f"{name!r}: {problem}" for problem in find_uneven_heads(attention, tp_size)]
    problems += [f"{name!r}: {problem}" for name, problem in find_shared_parameters(model, styles)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            f"TensorParallel({tp_size}) can't follow its plan for {type(model).__name__}:\n{lines}\n"
            "Name modules as model.named_modules() does (* matches any one part of a name), or use plan='auto'"
        )
    notes = {
        n: describe_heads_per_rank(modules[n].num_heads, tp_size)
        for n, style in styles.items()
        if _is_attention(modules[n], style)
    }
    return TensorPlan(type(model).__name__, tp_size, styles, build_rows(model, tp_size, styles, notes))


def join_name(name: str, child: str) -> str:
    """Return the full name of a child module."""
    return f"{name}.{child}" if name and child else name or child


def _is_attention(module: nn.Module, style: Style) -> bool:
    return style == "heads" and isinstance(module, nn.MultiheadAttention)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern, in which ``*`` stands for any one part."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _suggest_names(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    near = difflib.get_close_matches(pattern, [name for name in modules if name], 1)
    return f" (there is {near[0]!r})" if near else f"; there are {', '.join(list(filter(None, modules))[:8])}"


def find_problems(module: nn.Module, style: Style, tp_size: int) -> Iterator[str]:
    """Yield the reasons why a module can't be sharded in this style."""
    if isinstance(style, ParallelStyle):
        return
    kind = type(module).__name__
    if style not in STYLES:
        yield f"style {style!r}; it must be one of {', '.join(STYLES)}, or a torch ParallelStyle"
    elif style == "sequence":
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            yield f"sequence is for a LayerNorm or RMSNorm, and this is a {kind}"
    elif style == "heads" and isinstance(module, nn.MultiheadAttention):
        yield from _find_attention_problems(module, tp_size)
    elif not (is_linear(module) or isinstance(module, nn.Embedding)):
        yield f"{style} is for a Linear or an Embedding, and this is a {kind}"
    elif not _is_allowed_by_type(module, style):
        yield f"{style} is for a Linear, and this is {'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    elif style == "fused" and count_features(module)[1] % 3:
        yield f"{count_features(module)[1]} outputs can't be queries, keys and values of one size (fused)"
    else:
        size, noun = _get_sharded_size(module, style)
        if size % tp_size:
            yield f"{size} {noun} can't be cut into {tp_size} equal parts ({style})"


def _is_allowed_by_type(module: nn.Module, style: str) -> bool:
    """Return whether a linear layer or an embedding can have this style."""
    if style == "fused":
        return is_linear(module)
    return isinstance(module, nn.Linear) or style != "loss"


def _find_attention_problems(module: nn.MultiheadAttention, tp_size: int) -> Iterator[str]:
    """Yield the reasons why torch's module can't be sharded by heads."""
    if type(module) is not nn.MultiheadAttention:
        yield f"heads is for nn.MultiheadAttention itself, and this is its subclass {type(module).__name__}"
    if module.bias_k is not None or module.add_zero_attn:
        yield "add_bias_kv and add_zero_attn can't be cut by heads"
    if module.num_heads % tp_size:
        yield _describe_indivisible_heads(module.num_heads, tp_size)


def _describe_indivisible_heads(heads: int, tp_size: int) -> str:
    return f"{heads} heads can't be cut into {tp_size} equal parts (heads)"


def describe_heads_per_rank(heads: int, tp_size: int) -> str:
    """Return a note on the number of heads."""
    return f"{heads} heads, {heads // tp_size} on each rank"


def _get_sharded_size(module: nn.Module, style: str) -> tuple[int, str]:
    """Return (the size of the dimension that a style shards, its name)."""
    if isinstance(module, nn.Embedding):
        by_outputs = style in _OUTPUT_STYLES
        return (module.embedding_dim, "features") if by_outputs else (module.num_embeddings, "rows")
    inputs, outputs = count_features(module)
    if style == "fused":
        return outputs // 3, "queries (and as many keys and values)"
    return (outputs, "outputs") if style in _OUTPUT_STYLES else (inputs, "inputs")


def find_shared_parameters(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, str]]:
    """Yield modules of a plan that share a parameter with another module, which sharding would untie."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), []).append(name)
    for name in styles:
        for p in model.get_submodule(name).parameters(recurse=False):
            others = [other for other in owners[id(p)] if other != name]
            if others:
                yield name, f"shares a parameter with {', '.join(map(repr, others))}, and sharding it would untie them"
                break


# --- attributes of an attention -----------------------------------------------------------------------------


def find_uneven_heads(module: nn.Module, tp_size: int) -> Iterator[str]:
    """Yield the numbers of heads of an attention that can't be divided."""
    for heads in (
        read_int_attribute(module, NUM_HEADS_ATTRIBUTES),
        read_int_attribute(module, _NUM_KV_HEADS_ATTRIBUTES),
    ):
        if heads is not None and heads % tp_size:
            yield _describe_indivisible_heads(heads, tp_size)


def read_int_attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first of these attributes, of the module or of its `config`, that is an integer."""
    owners = (module, getattr(module, "config", None))
    values = (getattr(owner, name, None) for owner in owners for name in names)
    value: Any = next((value for value in values if isinstance(value, int)), None)
    return None if value is None else int(value)


# --- rows of a plan -----------------------------------------------------------------------------------------


def build_rows(
    model: nn.Module, tp_size: int, styles: Mapping[str, Style], notes: Mapping[str, str]
) -> tuple[TensorPlanRow, ...]:
    """Return a row for each module with parameters."""
    rows: list[TensorPlanRow] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        parameters = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, parameters))
        if not parameters:
            continue
        style = styles.get(name)
        total = sum(p.numel() for p in parameters)
        local = sum(p.numel() // (tp_size if _is_sharded(p.dim(), style) else 1) for p in parameters)
        title = "whole" if style is None else style if isinstance(style, str) else type(style).__name__
        rows.append(TensorPlanRow(name, _describe_module(module), title, total, local, notes.get(name, "")))
    return tuple(rows)


def _is_sharded(dim: int, style: Style | None) -> bool:
    """Return whether a parameter with `dim` dimensions is sharded: a rowwise layer's bias is not."""
    if isinstance(style, ParallelStyle):
        style = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise"}.get(type(style).__name__, "")
    return style in _OUTPUT_STYLES or (style in _INPUT_STYLES and dim > 1)


def _describe_module(module: nn.Module) -> str:
    kind = type(module).__name__
    if is_linear(module):
        return f"{kind} {' -> '.join(map(str, count_features(module)))}"
    if isinstance(module, nn.Embedding):
        return f"{kind} {module.num_embeddings} x {module.embedding_dim}"
    return kind
