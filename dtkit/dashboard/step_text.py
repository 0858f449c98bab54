"""A step taken apart, as text and as HTML: three chapters, a sentence and a table each.

What comes from the user (names of the model and of its parameters) loses its control characters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard import chapters
from dtkit.dashboard.chapters import Chapter, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dtkit.explain.data_parallel import LayerRecord, RankRecord, StepExplanation

MAX_COLUMNS = 8
"""Ranks with a column of their own; more are shown as the lowest and the highest."""
MAX_RANKS = 16
"""Ranks with a line of their own."""
_ROWS, _TERMS, _NAME = 8, 8, 44
_TIMES = "\N{MULTIPLICATION SIGN}"

_COSINE = (
    "The cosine says how far a rank's own gradient points the way of the sum: 1 the same way, 0 across it, "
    "-1 the opposite way. Where ranks disagree, parts cancel and the sum is shorter than the gradients it is made of."
)


def text(explanation: StepExplanation) -> str:
    """The step in a page of text."""
    return chapters.text(headline(explanation), _chapters(explanation))


def page(explanation: StepExplanation) -> str:
    """The same as HTML."""
    return chapters.page(headline(explanation), _chapters(explanation))


def headline(explanation: StepExplanation) -> str:
    """What was taken apart: ``Step 7 of Net on 3 ranks, epoch 2: 20 samples``."""
    where = f"Step {explanation.step:,} of {formatting.plain(explanation.model, 60)}"
    ranks = formatting.plural(len(explanation.ranks), "rank")
    return f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {formatting.plural(explanation.samples, 'sample')}"


def number(value: float | None) -> str:
    """Four significant digits: enough to check a sum by hand. None is a dash."""
    if value is None:
        return formatting.NOTHING
    if not value or not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    return f"{value:#.4g}".rstrip(".")


def cosine(value: float | None) -> str:
    """Two decimals tell what a direction has to tell."""
    return formatting.NOTHING if value is None else f"{value:.2f}"


def span(values: Iterable[float | None], show: Callable[[float | None], str] = number) -> str:
    """The one number that all ranks have, or the lowest and the highest: ``0.1211 to 0.1402``."""
    low, high = map(show, _ends(values))
    return low if low == high else f"{low} to {high}"


def _ends(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """The lowest and the highest value that is there."""
    found = [value for value in values if value is not None]
    return (min(found), max(found)) if found else (None, None)


def shown_name(name: str, limit: int = _NAME) -> str:
    """A parameter's name, safe to show; of a long one the end, which tells it from its neighbours."""
    clean = formatting.plain(name)
    return clean if len(clean) <= limit else "…" + clean[1 - limit :]


def shape(layer: LayerRecord) -> str:
    """Lengths with a times sign between them, ``scalar``, or how many tensors a group stands for."""
    if layer.shape is None:
        return formatting.plural(layer.tensors, "tensor")
    return _TIMES.join(map(str, layer.shape)) or "scalar"


def weight(explanation: StepExplanation, rank: RankRecord) -> str:
    """What a rank's loss is multiplied by in the mean: ``7/20`` where it is a fraction of whole weights."""
    total = explanation.weight
    whole = rank.weight.is_integer() and total.is_integer() and total > 0
    if whole and rank.share and math.isclose(rank.share, rank.weight / total, rel_tol=1e-6):
        return f"{rank.weight:.0f}/{total:.0f}"
    return number(rank.share)


def sentence(explanation: StepExplanation) -> str:
    """The mean over all samples, written out so that it can be checked by hand."""
    terms = [f"{weight(explanation, r)} {_TIMES} {number(r.loss)}" for r in explanation.ranks if r.loss is not None]
    if not terms:
        return "no rank had a sample in this step"
    if len(terms) > _TERMS:
        terms = [*terms[: _TERMS - 2], "…", terms[-1]]
    return f"loss of the step = {' + '.join(terms)} = {number(explanation.loss)}"


def verdict(explanation: StepExplanation) -> str:
    """Whether all ranks hold the same parameters, and if not, where they differ."""
    ranks = len(explanation.ranks)
    if ranks == 1:
        return "One rank: there is nothing to compare."
    if explanation.identical:
        return f"{'Both' if ranks == 2 else f'All {ranks:,}'} ranks hold identical parameters, bit by bit."
    names = [shown_name(layer.name) for layer in explanation.layers if not layer.identical]
    where = f", in {', '.join(names[:3])}{' and others' * (len(names) > 3)}" if names else ""
    return f"The ranks hold DIFFERENT parameters{where}."


# -- the three chapters ----------------------------------------------------------------------------------------------


def _chapters(explanation: StepExplanation) -> tuple[Chapter, Chapter, Chapter]:
    return _losses(explanation), _gradients(explanation), _update(explanation)


def _losses(explanation: StepExplanation) -> Chapter:
    body = [_loss_row(explanation, rank) for rank in explanation.ranks[:MAX_RANKS]]
    table = Table(("rank", "samples", "loss", "weight in the mean", "rows"), body, frozenset({"rows"}))
    return Chapter(
        "Each rank takes rows of its own and computes the mean loss over them.",
        table,
        [*_more(explanation), sentence(explanation)],
    )


def _loss_row(explanation: StepExplanation, rank: RankRecord) -> list[str]:
    fraction, share = weight(explanation, rank), number(rank.share)
    shown = share if fraction == share else f"{fraction} = {share}"
    return [str(rank.rank), f"{rank.samples:,}", number(rank.loss), shown, rows_text(rank)]


def rows_text(rank: RankRecord) -> str:
    """The numbers of a rank's rows in the order taken; of many the first."""
    if not rank.samples:
        return "no sample in this step"
    if rank.rows is None:
        return "of a stream, without numbers"
    rows = rank.rows.tolist()
    if len(rows) > 2 and rows == list(range(rows[0], rows[0] + len(rows))):
        return f"{rows[0]} to {rows[-1]}"
    return ", ".join(map(str, rows[:_ROWS])) + ", …" * (len(rows) > _ROWS)


def _gradients(explanation: StepExplanation) -> Chapter:
    layers, total = explanation.group_layers(), explanation.all_layers
    own = _own_columns(explanation)
    body = [_layer_row(explanation, layer) for layer in (*layers, total)]
    cosines = ["cosine with the sum", "", *_own_cells(explanation, total.cosine, cosine), "", "", "", ""]
    head = ("layer", "shape", *own, "all-reduced", "cosine", "update", "checksum after")
    table = Table(head, [*body, cosines], frozenset({"layer", "shape", "checksum after"}))
    return Chapter(
        "Each rank computes the gradient of its own loss. The all-reduce adds these up, each times its weight, and "
        "leaves the sum on every rank. Norms:",
        table,
        [_COSINE, *_clipping(explanation)],
    )


def _own_columns(explanation: StepExplanation) -> list[str]:
    ranks = explanation.ranks
    return [f"rank {r.rank}" for r in ranks] if len(ranks) <= MAX_COLUMNS else ["smallest own", "largest own"]


def _own_cells(
    explanation: StepExplanation, values: Sequence[float | None], show: Callable[[float | None], str] = number
) -> list[str]:
    return [show(value) for value in (values if len(explanation.ranks) <= MAX_COLUMNS else _ends(values))]


def _layer_row(explanation: StepExplanation, layer: LayerRecord) -> list[str]:
    own = _own_cells(explanation, layer.own)
    sums = (span(layer.reduced), span(layer.cosine, cosine), span(layer.update))
    return [shown_name(layer.name), shape(layer), *own, *sums, checksum(explanation, layer)]


def checksum(explanation: StepExplanation, layer: LayerRecord) -> str:
    """A layer's checksum where ranks agree; a group has none of its own."""
    if not explanation.updated:
        return formatting.NOTHING
    if not layer.identical:
        return "DIFFERS"
    return layer.checksums[0] or "identical"


def _clipping(explanation: StepExplanation) -> list[str]:
    clip, norm = explanation.clip, explanation.all_layers.reduced[0]
    if clip is None or not explanation.updated:
        return []
    if clip >= 1:
        return ["Clipping: the norm over all layers is within the limit, so the gradient stays as it is."]
    return [f"Clipping: the norm over all layers, {number(norm)}, is over the limit: all is multiplied by {clip:.4g}."]


def _update(explanation: StepExplanation) -> Chapter:
    body = [
        [str(rank.rank), rank.before, formatting.NOTHING if rank.after is None else rank.after]
        for rank in explanation.ranks[:MAX_RANKS]
    ]
    table = Table(("rank", "before", "after"), body, frozenset({"before", "after"}))
    notes = [*_more(explanation), verdict(explanation), *_buffers(explanation)]
    if not explanation.updated:
        return Chapter("No update: the gradients are not finite. Checksums of all parameters:", table, notes)
    title = f"Every rank takes the same update (learning rate {explanation.lr:g}). Checksums of all parameters:"
    return Chapter(title, table, notes)


def _buffers(explanation: StepExplanation) -> list[str]:
    if len({rank.buffers for rank in explanation.ranks}) == 1:
        return []
    return ["Buffers (batch statistics) differ between ranks: each rank's are of its own samples."]


def _more(explanation: StepExplanation) -> list[str]:
    rest = len(explanation.ranks) - MAX_RANKS
    return [f"and {formatting.plural(rest, 'more rank')}"] if rest > 0 else []
