"""Which layers are cut among ranks, and how: plans for tensor parallelism, made for common shapes and checked.

A plan names modules and gives each a style:

=========== ===================================================================================================
colwise     a Linear's outputs (an Embedding's features) are cut; what follows gets this rank's part of them
rowwise     a Linear's inputs (an Embedding's rows) are cut: takes a colwise layer's part, and adds up over ranks
gathered    as colwise, and what follows gets all outputs
scattered   as rowwise, and takes all inputs
heads       as colwise, for queries, keys and values: what follows sees the whole tensor, cut by heads;
            an nn.MultiheadAttention computes this rank's heads (and its out_proj is rowwise)
fused       as heads, for one Linear that makes queries, keys and values, one after another
sequence    a LayerNorm or RMSNorm works on this rank's part of the sequence (the second dimension)
loss        as colwise for the last Linear: the loss is computed from cut outputs (cross entropy alone can)
=========== ===================================================================================================

A colwise layer, anything that works on each number by itself, and a rowwise layer make a pair with one sum over ranks
in forward and one in backward (Shoeybi et al., Megatron-LM, 2019). Attention is such a pair, too: what lies between is
done for each head by itself. `auto` looks for both, for attention as nn.MultiheadAttention, with queries, keys and
values in layers of their own, or in one layer where the module's own forward, tried here, can be cut by heads. What
else a model has, every rank keeps whole.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STYLES = ("colwise", "rowwise", "gathered", "scattered", "heads", "fused", "sequence", "loss")
_OUTPUT_STYLES, _INPUT_STYLES = ("colwise", "gathered", "heads", "fused", "loss"), ("rowwise", "scattered")


NUM_HEADS_ATTRIBUTES = ("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead", "heads")
_NUM_KV_HEADS_ATTRIBUTES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")

Style = str | ParallelStyle


@dataclasses.dataclass(frozen=True)
class TensorPlanRow:
    """One module with parameters of its own."""

    name: str
    module_type: str
    style: str
    """A style's name, or "whole"."""
    parameters: int
    local_parameters: int
    """Of these, on each rank."""
    note: str


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A plan for one model. Shows itself as a table."""

    model: str
    tp_size: int
    styles: Mapping[str, Style]
    """By the module's full name."""
    rows: tuple[TensorPlanRow, ...]

    def __repr__(self) -> str:
        return format_plan(self)


def format_plan(plan: TensorPlan) -> str:
    """A plan as a table: each module with parameters, how it is cut, and what of it each rank holds."""
    head = ("module", "what", "style", "parameters", "each rank", "")
    rows = [
        (r.name or "(itself)", r.module_type, r.style, f"{r.parameters:,}", f"{r.local_parameters:,}", r.note)
        for r in plan.rows
    ]
    total, here = sum(r.parameters for r in plan.rows), sum(r.local_parameters for r in plan.rows)
    share = here / total if total else 1.0
    rows.append(("in all", "", "", f"{total:,}", f"{here:,}", f"{share:.0%} of the parameters on each rank"))
    return "\n".join(
        [f"{plan.model} in {plan.tp_size} slices", *formatting.format_columns([head, *rows], left_aligned=(0, 1, 2, 5))]
    )


# --- a user's own plan --------------------------------------------------------------------------------------


def validate_plan(model: nn.Module, tp_size: int, requested: Mapping[str, Style]) -> TensorPlan:
    """The plan that a user gave, its patterns (``layers.*.linear1``) made into names.

    Raises ValueError with everything that is wrong with it.
    """
    modules = dict(model.named_modules())
    styles: dict[str, Style] = {}
    wrong: list[str] = []
    for pattern, style in requested.items():
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            wrong.append(f"{pattern!r}: no such module{_suggest_names(pattern, modules)}")
        styles.update(dict.fromkeys(found, style))
    for name in [name for name, style in styles.items() if _is_attention(modules[name], style)]:
        styles.setdefault(join_name(name, "out_proj"), "rowwise")
    for name, style in styles.items():
        wrong += [f"{name!r}: {problem}" for problem in find_problems(modules[name], style, tp_size)]
        if style in ("heads", "fused") and isinstance(modules[name], nn.Linear):
            wrong += [f"{name!r}: {uneven}" for uneven in find_uneven_heads(modules[name.rpartition(".")[0]], tp_size)]
    wrong += [f"{name!r}: {problem}" for name, problem in find_shared_parameters(model, styles)]
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise ValueError(
            f"TensorParallel({tp_size}) can't follow its plan for {type(model).__name__}:\n{listed}\n"
            "Name modules as model.named_modules() does (* stands for any one part of a name), or use plan='auto'"
        )
    notes = {
        n: describe_heads_per_rank(modules[n].num_heads, tp_size)
        for n, style in styles.items()
        if _is_attention(modules[n], style)
    }
    return TensorPlan(type(model).__name__, tp_size, styles, build_rows(model, tp_size, styles, notes))


def join_name(name: str, child: str) -> str:
    return f"{name}.{child}" if name and child else name or child


def _is_attention(module: nn.Module, style: Style) -> bool:
    return style == "heads" and isinstance(module, nn.MultiheadAttention)


def _matches(name: str, pattern: str) -> bool:
    atoms, wanted = name.split("."), pattern.split(".")
    return len(atoms) == len(wanted) and all(map(fnmatch.fnmatchcase, atoms, wanted))


def _suggest_names(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    near = difflib.get_close_matches(pattern, [name for name in modules if name], 1)
    return f" (there is {near[0]!r})" if near else f"; there are {', '.join(list(filter(None, modules))[:8])}"


def find_problems(module: nn.Module, style: Style, tp_size: int) -> Iterator[str]:
    """What keeps a module from being cut in this style."""
    if isinstance(style, ParallelStyle):
        return
    kind = type(module).__name__
    if style not in STYLES:
        yield f"style {style!r} is none of {', '.join(STYLES)}, nor a torch ParallelStyle"
    elif style == "sequence":
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            yield f"sequence is for a LayerNorm or RMSNorm, and this is a {kind}"
    elif style == "heads" and isinstance(module, nn.MultiheadAttention):
        yield from _find_attention_problems(module, tp_size)
    elif not isinstance(module, (nn.Linear, nn.Embedding)):
        yield f"{style} is for a Linear or an Embedding, and this is a {kind}"
    elif isinstance(module, nn.Embedding) and style in ("heads", "fused", "loss"):
        yield f"{style} is for a Linear, and this is an Embedding"
    elif style == "fused" and module.out_features % 3:  # type: ignore[operator]  # a Linear, by now
        yield f"{module.out_features} outputs are no queries, keys and values of one size (fused)"
    else:
        size, noun = _get_sharded_size(module, style)
        if size % tp_size:
            yield f"{size} {noun} can't be cut into {tp_size} equal parts ({style})"


def _find_attention_problems(module: nn.MultiheadAttention, tp_size: int) -> Iterator[str]:
    """What keeps a module of torch's from computing some of its heads on each rank."""
    if type(module) is not nn.MultiheadAttention:
        yield f"heads is for nn.MultiheadAttention itself, and this is a {type(module).__name__}, made of it"
    if module.bias_k is not None or module.add_zero_attn:
        yield "add_bias_kv and add_zero_attn can't be cut by heads"
    if module.num_heads % tp_size:
        yield _describe_indivisible_heads(module.num_heads, tp_size)


def _describe_indivisible_heads(heads: int, tp_size: int) -> str:
    return f"{heads} heads can't be cut into {tp_size} equal parts (heads)"


def describe_heads_per_rank(heads: int, tp_size: int) -> str:
    return f"{heads} heads, {heads // tp_size} on each rank"


def _get_sharded_size(module: nn.Linear | nn.Embedding, style: str) -> tuple[int, str]:
    """(the size of the dimension that a style cuts, what it is)."""
    if isinstance(module, nn.Linear) and style == "fused":
        return module.out_features // 3, "queries (and as many keys and values)"
    if isinstance(module, nn.Embedding):
        by_outputs = style in _OUTPUT_STYLES
        return (module.embedding_dim, "features") if by_outputs else (module.num_embeddings, "rows")
    return (module.out_features, "outputs") if style in _OUTPUT_STYLES else (module.in_features, "inputs")


def find_shared_parameters(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, str]]:
    """Modules to be cut that share a parameter with another module: cutting one would untie them."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), []).append(name)
    for name in styles:
        for p in model.get_submodule(name).parameters(recurse=False):
            others = [other for other in owners[id(p)] if other != name]
            if others:
                yield name, f"shares a parameter with {', '.join(map(repr, others))}, and cutting it would untie them"
                break


# --- a plan made for common shapes --------------------------------------------------------------------------


















def find_uneven_heads(module: nn.Module, tp_size: int) -> Iterator[str]:
    """What an attention says of its heads that keeps them from being cut."""
    for heads in (
        read_int_attribute(module, NUM_HEADS_ATTRIBUTES),
        read_int_attribute(module, _NUM_KV_HEADS_ATTRIBUTES),
    ):
        if heads is not None and heads % tp_size:
            yield _describe_indivisible_heads(heads, tp_size)


def read_int_attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    found: Any = next((getattr(module, n) for n in names if isinstance(getattr(module, n, None), int)), None)
    return None if found is None else int(found)


# --- what comes of it ---------------------------------------------------------------------------------------


def build_rows(
    model: nn.Module, tp_size: int, styles: Mapping[str, Style], notes: Mapping[str, str]
) -> tuple[TensorPlanRow, ...]:
    rows: list[TensorPlanRow] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        if not own:
            continue
        style = styles.get(name)
        total = sum(p.numel() for p in own)
        here = sum(p.numel() // (tp_size if _is_sharded(p.dim(), style) else 1) for p in own)
        title = "whole" if style is None else style if isinstance(style, str) else type(style).__name__
        rows.append(TensorPlanRow(name, _describe_module(module), title, total, here, notes.get(name, "")))
    return tuple(rows)


def _is_sharded(dim: int, style: Style | None) -> bool:
    """Whether a parameter of so many dimensions is cut: of a rowwise layer, the bias is not."""
    if isinstance(style, ParallelStyle):
        style = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise"}.get(type(style).__name__, "")
    return style in _OUTPUT_STYLES or (style in _INPUT_STYLES and dim > 1)


def _describe_module(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return f"{kind} {module.in_features} -> {module.out_features}"
    if isinstance(module, nn.Embedding):
        return f"{kind} {module.num_embeddings} x {module.embedding_dim}"
    return kind
