"""A step of a pipeline taken apart, as text and as HTML: what crossed borders, what stages made of it, the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard import chapters
from dtkit.dashboard.chapters import Chapter, Table
from dtkit.dashboard.step_text import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.explain.pipeline import PipelineExplanation, StageRank, StageRecord, StageTransfer

MAX_CROSSINGS = 40
"""Crossings with a line of their own."""
MAX_RANKS = 16
"""Ranks, and stages, with a line of their own."""
MAX_PARTS = 8
"""Micro-batches with a column of their own; of more the first and the last few."""
_TIMES = "\N{MULTIPLICATION SIGN}"


def text(explanation: PipelineExplanation) -> str:
    """The step in a page of text."""
    return chapters.text(headline(explanation), _chapters(explanation))


def page(explanation: PipelineExplanation) -> str:
    """The same as HTML."""
    return chapters.page(headline(explanation), _chapters(explanation))


def headline(explanation: PipelineExplanation) -> str:
    """``Step 7 of Net in 4 stages on 2 ranks, epoch 2: 64 samples in 8 micro-batches``."""
    stages = formatting.plural(len({stage.stage for stage in explanation.stages}), "stage")
    several = f" and {len(explanation.replicas):,} replicas" if len(explanation.replicas) > 1 else ""
    where = f"Step {explanation.step:,} of {formatting.plain(explanation.model, 60)} in {stages}{several}"
    ranks, samples = formatting.plural(len(explanation.ranks), "rank"), formatting.plural(explanation.samples, "sample")
    micro = formatting.plural(explanation.micro_batches, "micro-batch").replace("batchs", "batches")
    return f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {samples} in {micro}"


def verdict(explanation: PipelineExplanation) -> str:
    """Whether all that was sent arrived as it was."""
    wrong = [crossing for crossing in explanation.transfers if not crossing.is_intact]
    count = len(explanation.transfers)
    if not count:
        return "Nothing crossed a border: no replica had a sample."
    if not wrong:
        return f"What arrived is what was sent, bit by bit: all {formatting.plural(count, 'tensor')}."
    names = ", ".join(f"{c.kind} of micro-batch {c.micro_batch} from {_way(c)}" for c in wrong[:3])
    return f"{len(wrong)} of {count} tensors did NOT arrive as they were sent: {names}{', …' * (len(wrong) > 3)}"


def sums(explanation: PipelineExplanation) -> str:
    """Whether stages' gradients are the sums of their parts."""
    wrong = [
        f"stage {stage.stage} on rank {stage.rank}" for stage in explanation.stages if not stage.is_sum_of_micro_batches
    ]
    if wrong:
        return f"The gradient is NOT the sum of its micro-batches' parts in {', '.join(wrong[:3])}."
    return "Each stage's gradient is the sum of its micro-batches' parts, up to rounding."


# -- the three chapters ----------------------------------------------------------------------------------------------


def _chapters(explanation: PipelineExplanation) -> tuple[Chapter, Chapter, Chapter]:
    return _borders(explanation), _gradients(explanation), _update(explanation)


def _borders(explanation: PipelineExplanation) -> Chapter:
    shown = [crossing for _, crossing in by_replica(explanation)[:MAX_CROSSINGS]]
    several = any(crossing.tensor for crossing in explanation.transfers)
    body = [_crossing_row(crossing, several=several) for crossing in shown]
    head = ("", "micro-batch", "what", "stages", "ranks", "shape", "bytes", "norm", "first numbers", "sent", "arrived")
    rest = len(explanation.transfers) - len(shown)
    down, up = (formatting.size(explanation.sent_bytes(kind)) for kind in ("activation", "gradient"))
    order = "Replica by replica, in" if len(explanation.replicas) > 1 else "In"
    return Chapter(
        "Activations go down through the stages, gradients with respect to them come back up. "
        f"{order} the order of sending:",
        Table(head, body, frozenset({"what", "stages", "ranks", "shape", "first numbers", "sent", "arrived"})),
        [
            *([f"and {formatting.plural(rest, 'more tensor')}"] if rest > 0 else []),
            f"{verdict(explanation)} From rank to rank went {down} of activations and {up} of gradients.",
        ],
    )


def by_replica(explanation: PipelineExplanation) -> list[tuple[int, StageTransfer]]:
    """(the how-manieth replica, what crossed in it), each replica's in the order of sending."""
    places = {rank: place for place, ranks in enumerate(explanation.replicas) for rank in ranks}
    return sorted(((places[c.sender], c) for c in explanation.transfers), key=lambda pair: (pair[0], pair[1].index))


def _crossing_row(crossing: StageTransfer, *, several: bool) -> list[str]:
    return [
        str(crossing.index + 1),
        str(crossing.micro_batch) + (f" ({crossing.tensor + 1})" if several else ""),
        crossing.kind,
        _way(crossing),
        f"{crossing.sender} → {crossing.receiver}" if crossing.sender != crossing.receiver else f"on {crossing.sender}",
        f"{_TIMES.join(map(str, crossing.shape)) or 'scalar'} {crossing.dtype}",
        f"{crossing.nbytes:,}",
        number(crossing.norm),
        ", ".join(f"{value:.3g}" for value in crossing.first_values) + ", …",
        crossing.sent_digest,
        "nothing"
        if crossing.received_digest is None
        else "the same"
        if crossing.is_intact
        else f"DIFFERS: {crossing.received_digest}",
    ]


def _way(crossing: StageTransfer) -> str:
    return f"{crossing.from_stage} → {crossing.to_stage}"


def _gradients(explanation: PipelineExplanation) -> Chapter:
    columns = _columns(explanation.micro_batches)
    names = [f"part {k}" if k is not None else "…" for k in columns]
    body = [_stage_row(stage, columns) for stage in explanation.stages[:MAX_RANKS]]
    head = ("stage", "rank", "parameters", *names, "their sum", "differs by")
    return Chapter(
        "Each stage adds up what its micro-batches give to its gradient. Norms:",
        Table(head, body, frozenset()),
        [*_more(len(explanation.stages), "stage"), sums(explanation), *_over_replicas(explanation)],
    )


def _over_replicas(explanation: PipelineExplanation) -> list[str]:
    count = len(explanation.replicas)
    return [f"Then each stage's gradient is added up over the {count:,} replicas."] if count > 1 else []


def _columns(count: int) -> Sequence[int | None]:
    """Numbers of the micro-batches that are shown; None stands for those between."""
    if count <= MAX_PARTS:
        return range(count)
    return [*range(MAX_PARTS - 2), None, count - 1]


def _stage_row(stage: StageRecord, columns: Sequence[int | None]) -> list[str]:
    parts = [
        "…"
        if k is None
        else number(stage.micro_batch_norms[k])
        if k < len(stage.micro_batch_norms)
        else formatting.NOTHING
        for k in columns
    ]
    return [str(stage.stage), str(stage.rank), f"{stage.numbers:,}", *parts, number(stage.norm), f"{stage.gap:.1e}"]


def _update(explanation: PipelineExplanation) -> Chapter:
    body = [_rank_row(rank) for rank in explanation.ranks[:MAX_RANKS]]
    head = ("rank", "stages", "samples", "loss", "before", "after")
    table = Table(head, body, frozenset({"stages", "before", "after"}))
    notes = [*_more(len(explanation.ranks), "rank"), *_clipping(explanation), *_equal(explanation)]
    notes.append(f"loss of the step: {number(explanation.loss)}, known to the last stage alone")
    if not explanation.updated:
        return Chapter("No update: the gradients are not finite. Checksums of each rank's parameters:", table, notes)
    lr = explanation.ranks[0].lr
    title = f"Each rank updates its own stages (learning rate {lr:g}). Checksums of its parameters:"
    return Chapter(title, table, notes)


def _rank_row(rank: StageRank) -> list[str]:
    stages = ", ".join(map(str, rank.stages))
    after = formatting.NOTHING if rank.after is None else rank.after
    return [str(rank.rank), stages, f"{rank.samples:,}", number(rank.loss), rank.before, after]


def _equal(explanation: PipelineExplanation) -> list[str]:
    if len(explanation.replicas) < 2:
        return []
    if explanation.identical:
        return ["All replicas have the same stages, bit by bit."]
    return ["The replicas do NOT have the same stages."]


def _clipping(explanation: PipelineExplanation) -> list[str]:
    clip = explanation.ranks[0].clip
    if clip is None or not explanation.updated:
        return []
    if clip >= 1:
        return ["Clipping: the norm over all stages is within the limit, so the gradient stays as it is."]
    return [f"Clipping: the norm over all stages is over the limit: all is multiplied by {clip:.4g}."]


def _more(count: int, noun: str) -> list[str]:
    rest = count - MAX_RANKS
    return [f"and {formatting.plural(rest, f'more {noun}')}"] if rest > 0 else []
