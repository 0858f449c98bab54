"""An explained step of data-parallel training, as text and as HTML.

Names of the user's model and parameters lose their control characters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text import sections
from dtkit.dashboard.text.numbers import (
    MAX_RANKS,
    TIMES_SIGN,
    describe_clipping,
    describe_remaining,
    format_number,
    shorten_name,
)
from dtkit.dashboard.text.numbers import format_shape as format_tensor_shape
from dtkit.dashboard.text.sections import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dtkit.explain.data_parallel import LayerRecord, RankRecord, StepExplanation

MAX_RANK_COLUMNS = 8
"""Ranks with a column of their own. Of more ranks, the smallest and the largest value are shown."""
_MAX_ROW_NUMBERS, _MAX_TERMS = 8, 8

_COSINE_NOTE = (
    "The cosine compares a node's own gradient with the sum: 1 the same direction, 0 at right angles, -1 the opposite "
    "direction. Where nodes disagree, parts cancel and the sum is shorter than the gradients it is made of."
)


def format_text(explanation: StepExplanation) -> str:
    """Return the step as a page of text."""
    return sections.format_text(format_headline(explanation), _make_sections(explanation))


def format_html(explanation: StepExplanation) -> str:
    """Return the step as HTML."""
    return sections.format_html(format_headline(explanation), _make_sections(explanation))


def format_headline(explanation: StepExplanation) -> str:
    """Return a headline such as ``Step 7 of Net on 3 ranks, epoch 2: 20 samples``."""
    where = f"Step {explanation.step:,} of {formatting.sanitize_text(explanation.model, 60)}"
    ranks = formatting.format_count(len(explanation.ranks), "node")
    return (
        f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {formatting.format_count(explanation.samples, 'sample')}"
    )


def format_cosine(value: float | None) -> str:
    """Return two decimals, which are enough for a direction."""
    return formatting.UNKNOWN if value is None else f"{value:.2f}"


def format_range(values: Iterable[float | None], format_value: Callable[[float | None], str] = format_number) -> str:
    """Return the one number that all ranks have, or a range such as ``0.1211 to 0.1402``."""
    low, high = map(format_value, _find_range(values))
    return low if low == high else f"{low} to {high}"


def _find_range(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return the smallest and the largest value, leaving out None."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else (None, None)


def format_shape(layer: LayerRecord) -> str:
    """Return the shape of a layer, or the number of tensors of a group."""
    if layer.shape is None:
        return formatting.format_count(layer.tensors, "tensor")
    return format_tensor_shape(layer.shape)


def format_weight(explanation: StepExplanation, rank: RankRecord) -> str:
    """Return a rank's share in the mean loss, as ``7/20`` where weights are whole numbers."""
    total = explanation.weight
    is_fraction = rank.weight.is_integer() and total.is_integer() and total > 0
    if is_fraction and rank.share and math.isclose(rank.share, rank.weight / total, rel_tol=1e-6):
        return f"{rank.weight:.0f}/{total:.0f}"
    return format_number(rank.share)


def describe_loss(explanation: StepExplanation) -> str:
    """Return the mean over all samples as a sum that can be checked by hand."""
    terms = [
        f"{format_weight(explanation, rank)} {TIMES_SIGN} {format_number(rank.loss)}"
        for rank in explanation.ranks
        if rank.loss is not None
    ]
    if not terms:
        return "no node had a sample in this step"
    if len(terms) > _MAX_TERMS:
        terms = [*terms[: _MAX_TERMS - 2], "…", terms[-1]]
    return f"loss of the step = {' + '.join(terms)} = {format_number(explanation.loss)}"


def describe_agreement(explanation: StepExplanation) -> str:
    """Return whether all ranks hold the same parameters, and if not, where they differ."""
    ranks = len(explanation.ranks)
    if ranks == 1:
        return "One node: there is nothing to compare."
    if explanation.identical:
        return f"{'Both' if ranks == 2 else f'All {ranks:,}'} nodes hold identical parameters, bit by bit."
    names = [shorten_name(layer.name) for layer in explanation.layers if not layer.identical]
    where = f", in {', '.join(names[:3])}{' and others' * (len(names) > 3)}" if names else ""
    return f"The nodes hold DIFFERENT parameters{where}."


# -- sections --------------------------------------------------------------------------------------------------------


def _make_sections(explanation: StepExplanation) -> tuple[Section, Section, Section]:
    return _make_losses_section(explanation), _make_gradients_section(explanation), _make_update_section(explanation)


def _make_losses_section(explanation: StepExplanation) -> Section:
    body = [_format_loss_row(explanation, rank) for rank in explanation.ranks[:MAX_RANKS]]
    table = Table(("node", "samples", "loss", "weight in the mean", "rows"), body, {"rows"})
    return Section(
        "Each node takes rows of its own and computes the mean loss over them.",
        table,
        [*describe_remaining(len(explanation.ranks), "node"), describe_loss(explanation)],
    )


def _format_loss_row(explanation: StepExplanation, rank: RankRecord) -> list[str]:
    fraction, share = format_weight(explanation, rank), format_number(rank.share)
    shown = share if fraction == share else f"{fraction} = {share}"
    return [str(rank.rank), f"{rank.samples:,}", format_number(rank.loss), shown, format_row_numbers(rank)]


def format_row_numbers(rank: RankRecord) -> str:
    """Return the numbers of a rank's first rows, in the order taken."""
    if not rank.samples:
        return "no sample in this step"
    if rank.rows is None:
        return "of a stream, without numbers"
    rows = rank.rows.tolist()
    if len(rows) > 2 and rows == list(range(rows[0], rows[0] + len(rows))):
        return f"{rows[0]} to {rows[-1]}"
    return ", ".join(map(str, rows[:_MAX_ROW_NUMBERS])) + ", …" * (len(rows) > _MAX_ROW_NUMBERS)


def _make_gradients_section(explanation: StepExplanation) -> Section:
    layers, total = explanation.group_layers(), explanation.all_layers
    rank_columns = _name_rank_columns(explanation)
    body = [_format_layer_row(explanation, layer) for layer in (*layers, total)]
    cosines = ["cosine with the sum", "", *_format_rank_cells(explanation, total.cosine, format_cosine), "", "", "", ""]
    head = ("layer", "shape", *rank_columns, "all-reduced", "cosine", "update", "checksum after")
    table = Table(head, [*body, cosines], {"layer", "shape", "checksum after"})
    return Section(
        "Each node computes the gradient of its own loss. The all-reduce sums these gradients, each times its weight, "
        "and leaves the sum on every node. Norms:",
        table,
        [
            _COSINE_NOTE,
            *describe_clipping(explanation.clip, _name_clipped_norm(explanation), updated=explanation.updated),
        ],
    )


def _name_rank_columns(explanation: StepExplanation) -> list[str]:
    ranks = explanation.ranks
    return [f"node {r.rank}" for r in ranks] if len(ranks) <= MAX_RANK_COLUMNS else ["smallest own", "largest own"]


def _format_rank_cells(
    explanation: StepExplanation,
    values: Sequence[float | None],
    format_value: Callable[[float | None], str] = format_number,
) -> list[str]:
    return [
        format_value(value) for value in (values if len(explanation.ranks) <= MAX_RANK_COLUMNS else _find_range(values))
    ]


def _format_layer_row(explanation: StepExplanation, layer: LayerRecord) -> list[str]:
    rank_cells = _format_rank_cells(explanation, layer.local_norm)
    sums = (format_range(layer.reduced), format_range(layer.cosine, format_cosine), format_range(layer.update))
    return [shorten_name(layer.name), format_shape(layer), *rank_cells, *sums, format_checksum(explanation, layer)]


def format_checksum(explanation: StepExplanation, layer: LayerRecord) -> str:
    """Return a layer's checksum if all ranks have the same. A group has no checksum of its own."""
    if not explanation.updated:
        return formatting.UNKNOWN
    if not layer.identical:
        return "DIFFERS"
    return layer.checksums[0] or "identical"


def _name_clipped_norm(explanation: StepExplanation) -> str:
    norm = explanation.all_layers.reduced[0]
    is_clipped = explanation.clip is not None and explanation.clip < 1
    return f"the norm over all layers, {format_number(norm)}," if is_clipped else "the norm over all layers"


def _make_update_section(explanation: StepExplanation) -> Section:
    body = [
        [str(rank.rank), rank.before, formatting.UNKNOWN if rank.after is None else rank.after]
        for rank in explanation.ranks[:MAX_RANKS]
    ]
    table = Table(("node", "before", "after"), body, {"before", "after"})
    notes = [
        *describe_remaining(len(explanation.ranks), "node"),
        describe_agreement(explanation),
        *_describe_buffers(explanation),
    ]
    if not explanation.updated:
        return Section("No update: the gradients are not finite. Checksums of all parameters:", table, notes)
    lr = formatting.format_learning_rate(explanation.lr)
    title = f"Every node takes the same update (learning rate {lr}). Checksums of all parameters:"
    return Section(title, table, notes)


def _describe_buffers(explanation: StepExplanation) -> list[str]:
    if len({rank.buffers for rank in explanation.ranks}) == 1:
        return []
    return ["Buffers (batch statistics) differ between nodes: each node's are of its own samples."]
