"""A step taken apart, as text and as HTML: three chapters, a sentence and a table each.

What comes from the user (names of the model and of its parameters) loses its control characters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.text import sections
from dtkit.dashboard.text.sections import Section, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dtkit.explain.data_parallel import LayerRecord, RankRecord, StepExplanation

MAX_RANK_COLUMNS = 8
"""Ranks with a column of their own; more are shown as the lowest and the highest."""
MAX_RANKS = 16
"""Ranks with a line of their own."""
_MAX_ROW_NUMBERS, _MAX_TERMS, _MAX_NAME_CHARS = 8, 8, 44
_TIMES_SIGN = "\N{MULTIPLICATION SIGN}"

_COSINE_NOTE = (
    "The cosine says how far a rank's own gradient points the way of the sum: 1 the same way, 0 across it, "
    "-1 the opposite way. Where ranks disagree, parts cancel and the sum is shorter than the gradients it is made of."
)


def format_text(explanation: StepExplanation) -> str:
    """The step in a page of text."""
    return sections.format_text(format_headline(explanation), _make_sections(explanation))


def format_html(explanation: StepExplanation) -> str:
    """The same as HTML."""
    return sections.format_html(format_headline(explanation), _make_sections(explanation))


def format_headline(explanation: StepExplanation) -> str:
    """What was taken apart: ``Step 7 of Net on 3 ranks, epoch 2: 20 samples``."""
    where = f"Step {explanation.step:,} of {formatting.sanitize_text(explanation.model, 60)}"
    ranks = formatting.format_count(len(explanation.ranks), "rank")
    return (
        f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {formatting.format_count(explanation.samples, 'sample')}"
    )


def format_number(value: float | None) -> str:
    """Four significant digits: enough to check a sum by hand. None is a dash."""
    if value is None:
        return formatting.UNKNOWN
    if not value or not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    return f"{value:#.4g}".rstrip(".")


def format_cosine(value: float | None) -> str:
    """Two decimals tell what a direction has to tell."""
    return formatting.UNKNOWN if value is None else f"{value:.2f}"


def format_range(values: Iterable[float | None], format_value: Callable[[float | None], str] = format_number) -> str:
    """The one number that all ranks have, or the lowest and the highest: ``0.1211 to 0.1402``."""
    low, high = map(format_value, _find_range(values))
    return low if low == high else f"{low} to {high}"


def _find_range(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """The lowest and the highest value that is there."""
    found = [value for value in values if value is not None]
    return (min(found), max(found)) if found else (None, None)


def shorten_name(name: str, limit: int = _MAX_NAME_CHARS) -> str:
    """A parameter's name, safe to show; of a long one the end, which tells it from its neighbours."""
    clean = formatting.sanitize_text(name)
    return clean if len(clean) <= limit else "…" + clean[1 - limit :]


def format_shape(layer: LayerRecord) -> str:
    """Lengths with a times sign between them, ``scalar``, or how many tensors a group stands for."""
    if layer.shape is None:
        return formatting.format_count(layer.tensors, "tensor")
    return _TIMES_SIGN.join(map(str, layer.shape)) or "scalar"


def format_weight(explanation: StepExplanation, rank: RankRecord) -> str:
    """What a rank's loss is multiplied by in the mean: ``7/20`` where it is a fraction of whole weights."""
    total = explanation.weight
    whole = rank.weight.is_integer() and total.is_integer() and total > 0
    if whole and rank.share and math.isclose(rank.share, rank.weight / total, rel_tol=1e-6):
        return f"{rank.weight:.0f}/{total:.0f}"
    return format_number(rank.share)


def describe_loss(explanation: StepExplanation) -> str:
    """The mean over all samples, written out so that it can be checked by hand."""
    terms = [
        f"{format_weight(explanation, r)} {_TIMES_SIGN} {format_number(r.loss)}"
        for r in explanation.ranks
        if r.loss is not None
    ]
    if not terms:
        return "no rank had a sample in this step"
    if len(terms) > _MAX_TERMS:
        terms = [*terms[: _MAX_TERMS - 2], "…", terms[-1]]
    return f"loss of the step = {' + '.join(terms)} = {format_number(explanation.loss)}"


def describe_agreement(explanation: StepExplanation) -> str:
    """Whether all ranks hold the same parameters, and if not, where they differ."""
    ranks = len(explanation.ranks)
    if ranks == 1:
        return "One rank: there is nothing to compare."
    if explanation.identical:
        return f"{'Both' if ranks == 2 else f'All {ranks:,}'} ranks hold identical parameters, bit by bit."
    names = [shorten_name(layer.name) for layer in explanation.layers if not layer.identical]
    where = f", in {', '.join(names[:3])}{' and others' * (len(names) > 3)}" if names else ""
    return f"The ranks hold DIFFERENT parameters{where}."


# -- the three chapters ----------------------------------------------------------------------------------------------


def _make_sections(explanation: StepExplanation) -> tuple[Section, Section, Section]:
    return _make_losses_section(explanation), _make_gradients_section(explanation), _make_update_section(explanation)


def _make_losses_section(explanation: StepExplanation) -> Section:
    body = [_format_loss_row(explanation, rank) for rank in explanation.ranks[:MAX_RANKS]]
    table = Table(("rank", "samples", "loss", "weight in the mean", "rows"), body, frozenset({"rows"}))
    return Section(
        "Each rank takes rows of its own and computes the mean loss over them.",
        table,
        [*_format_remaining(explanation), describe_loss(explanation)],
    )


def _format_loss_row(explanation: StepExplanation, rank: RankRecord) -> list[str]:
    fraction, share = format_weight(explanation, rank), format_number(rank.share)
    shown = share if fraction == share else f"{fraction} = {share}"
    return [str(rank.rank), f"{rank.samples:,}", format_number(rank.loss), shown, format_row_numbers(rank)]


def format_row_numbers(rank: RankRecord) -> str:
    """The numbers of a rank's rows in the order taken; of many the first."""
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
    own = _name_rank_columns(explanation)
    body = [_format_layer_row(explanation, layer) for layer in (*layers, total)]
    cosines = ["cosine with the sum", "", *_format_rank_cells(explanation, total.cosine, format_cosine), "", "", "", ""]
    head = ("layer", "shape", *own, "all-reduced", "cosine", "update", "checksum after")
    table = Table(head, [*body, cosines], frozenset({"layer", "shape", "checksum after"}))
    return Section(
        "Each rank computes the gradient of its own loss. The all-reduce adds these up, each times its weight, and "
        "leaves the sum on every rank. Norms:",
        table,
        [_COSINE_NOTE, *_describe_clipping(explanation)],
    )


def _name_rank_columns(explanation: StepExplanation) -> list[str]:
    ranks = explanation.ranks
    return [f"rank {r.rank}" for r in ranks] if len(ranks) <= MAX_RANK_COLUMNS else ["smallest own", "largest own"]


def _format_rank_cells(
    explanation: StepExplanation,
    values: Sequence[float | None],
    format_value: Callable[[float | None], str] = format_number,
) -> list[str]:
    return [
        format_value(value) for value in (values if len(explanation.ranks) <= MAX_RANK_COLUMNS else _find_range(values))
    ]


def _format_layer_row(explanation: StepExplanation, layer: LayerRecord) -> list[str]:
    own = _format_rank_cells(explanation, layer.own)
    sums = (format_range(layer.reduced), format_range(layer.cosine, format_cosine), format_range(layer.update))
    return [shorten_name(layer.name), format_shape(layer), *own, *sums, format_checksum(explanation, layer)]


def format_checksum(explanation: StepExplanation, layer: LayerRecord) -> str:
    """A layer's checksum where ranks agree; a group has none of its own."""
    if not explanation.updated:
        return formatting.UNKNOWN
    if not layer.identical:
        return "DIFFERS"
    return layer.checksums[0] or "identical"


def _describe_clipping(explanation: StepExplanation) -> list[str]:
    clip, norm = explanation.clip, explanation.all_layers.reduced[0]
    if clip is None or not explanation.updated:
        return []
    if clip >= 1:
        return ["Clipping: the norm over all layers is within the limit, so the gradient stays as it is."]
    return [
        f"Clipping: the norm over all layers, {format_number(norm)}, is over the limit: all is multiplied by {clip:.4g}."
    ]


def _make_update_section(explanation: StepExplanation) -> Section:
    body = [
        [str(rank.rank), rank.before, formatting.UNKNOWN if rank.after is None else rank.after]
        for rank in explanation.ranks[:MAX_RANKS]
    ]
    table = Table(("rank", "before", "after"), body, frozenset({"before", "after"}))
    notes = [*_format_remaining(explanation), describe_agreement(explanation), *_describe_buffers(explanation)]
    if not explanation.updated:
        return Section("No update: the gradients are not finite. Checksums of all parameters:", table, notes)
    title = f"Every rank takes the same update (learning rate {explanation.lr:g}). Checksums of all parameters:"
    return Section(title, table, notes)


def _describe_buffers(explanation: StepExplanation) -> list[str]:
    if len({rank.buffers for rank in explanation.ranks}) == 1:
        return []
    return ["Buffers (batch statistics) differ between ranks: each rank's are of its own samples."]


def _format_remaining(explanation: StepExplanation) -> list[str]:
    rest = len(explanation.ranks) - MAX_RANKS
    return [f"and {formatting.format_count(rest, 'more rank')}"] if rest > 0 else []
