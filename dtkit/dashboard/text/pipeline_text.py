"""A step of a pipeline taken apart, as text and as HTML: what crossed borders, what stages made of it, the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.text import sections
from dtkit.dashboard.text.data_parallel_text import format_number
from dtkit.dashboard.text.sections import Section, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.explain.pipeline import PipelineExplanation, StageRank, StageRecord, StageTransfer

MAX_TRANSFERS = 40
"""Crossings with a line of their own."""
MAX_RANKS = 16
"""Ranks, and stages, with a line of their own."""
MAX_MICRO_BATCHES = 8
"""Micro-batches with a column of their own; of more the first and the last few."""
_TIMES_SIGN = "\N{MULTIPLICATION SIGN}"


def format_text(explanation: PipelineExplanation) -> str:
    """The step in a page of text."""
    return sections.format_text(format_headline(explanation), _make_sections(explanation))


def format_html(explanation: PipelineExplanation) -> str:
    """The same as HTML."""
    return sections.format_html(format_headline(explanation), _make_sections(explanation))


def format_headline(explanation: PipelineExplanation) -> str:
    """``Step 7 of Net in 4 stages on 2 ranks, epoch 2: 64 samples in 8 micro-batches``."""
    stages = formatting.format_count(len({stage.stage for stage in explanation.stages}), "stage")
    several = f" and {len(explanation.replicas):,} replicas" if len(explanation.replicas) > 1 else ""
    where = f"Step {explanation.step:,} of {formatting.sanitize_text(explanation.model, 60)} in {stages}{several}"
    ranks, samples = (
        formatting.format_count(len(explanation.ranks), "rank"),
        formatting.format_count(explanation.samples, "sample"),
    )
    micro = formatting.format_count(explanation.micro_batches, "micro-batch").replace("batchs", "batches")
    return f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {samples} in {micro}"


def describe_integrity(explanation: PipelineExplanation) -> str:
    """Whether all that was sent arrived as it was."""
    wrong = [crossing for crossing in explanation.transfers if not crossing.is_intact]
    count = len(explanation.transfers)
    if not count:
        return "Nothing crossed a border: no replica had a sample."
    if not wrong:
        return f"What arrived is what was sent, bit by bit: all {formatting.format_count(count, 'tensor')}."
    names = ", ".join(f"{c.kind} of micro-batch {c.micro_batch} from {_format_stages(c)}" for c in wrong[:3])
    return f"{len(wrong)} of {count} tensors did NOT arrive as they were sent: {names}{', …' * (len(wrong) > 3)}"


def describe_gradient_sums(explanation: PipelineExplanation) -> str:
    """Whether stages' gradients are the sums of their parts."""
    wrong = [
        f"stage {stage.stage} on rank {stage.rank}" for stage in explanation.stages if not stage.is_sum_of_micro_batches
    ]
    if wrong:
        return f"The gradient is NOT the sum of its micro-batches' parts in {', '.join(wrong[:3])}."
    return "Each stage's gradient is the sum of its micro-batches' parts, up to rounding."


# -- the three chapters ----------------------------------------------------------------------------------------------


def _make_sections(explanation: PipelineExplanation) -> tuple[Section, Section, Section]:
    return _make_transfers_section(explanation), _make_gradients_section(explanation), _make_update_section(explanation)


def _make_transfers_section(explanation: PipelineExplanation) -> Section:
    shown = [crossing for _, crossing in sort_by_replica(explanation)[:MAX_TRANSFERS]]
    several = any(crossing.tensor for crossing in explanation.transfers)
    body = [_format_transfer_row(crossing, show_tensor_number=several) for crossing in shown]
    head = ("", "micro-batch", "what", "stages", "ranks", "shape", "bytes", "norm", "first numbers", "sent", "arrived")
    rest = len(explanation.transfers) - len(shown)
    down, up = (formatting.format_bytes(explanation.sent_bytes(kind)) for kind in ("activation", "gradient"))
    order = "Replica by replica, in" if len(explanation.replicas) > 1 else "In"
    return Section(
        "Activations go down through the stages, gradients with respect to them come back up. "
        f"{order} the order of sending:",
        Table(head, body, frozenset({"what", "stages", "ranks", "shape", "first numbers", "sent", "arrived"})),
        [
            *([f"and {formatting.format_count(rest, 'more tensor')}"] if rest > 0 else []),
            f"{describe_integrity(explanation)} From rank to rank went {down} of activations and {up} of gradients.",
        ],
    )


def sort_by_replica(explanation: PipelineExplanation) -> list[tuple[int, StageTransfer]]:
    """(the how-manieth replica, what crossed in it), each replica's in the order of sending."""
    places = {rank: place for place, ranks in enumerate(explanation.replicas) for rank in ranks}
    return sorted(((places[c.sender], c) for c in explanation.transfers), key=lambda pair: (pair[0], pair[1].index))


def _format_transfer_row(transfer: StageTransfer, *, show_tensor_number: bool) -> list[str]:
    return [
        str(transfer.index + 1),
        str(transfer.micro_batch) + (f" ({transfer.tensor + 1})" if show_tensor_number else ""),
        transfer.kind,
        _format_stages(transfer),
        f"{transfer.sender} → {transfer.receiver}" if transfer.sender != transfer.receiver else f"on {transfer.sender}",
        f"{_TIMES_SIGN.join(map(str, transfer.shape)) or 'scalar'} {transfer.dtype}",
        f"{transfer.nbytes:,}",
        format_number(transfer.norm),
        ", ".join(f"{value:.3g}" for value in transfer.first_values) + ", …",
        transfer.sent_digest,
        "nothing"
        if transfer.received_digest is None
        else "the same"
        if transfer.is_intact
        else f"DIFFERS: {transfer.received_digest}",
    ]


def _format_stages(transfer: StageTransfer) -> str:
    return f"{transfer.from_stage} → {transfer.to_stage}"


def _make_gradients_section(explanation: PipelineExplanation) -> Section:
    columns = _select_micro_batches(explanation.micro_batches)
    names = [f"part {k}" if k is not None else "…" for k in columns]
    body = [_format_stage_row(stage, columns) for stage in explanation.stages[:MAX_RANKS]]
    head = ("stage", "rank", "parameters", *names, "their sum", "differs by")
    return Section(
        "Each stage adds up what its micro-batches give to its gradient. Norms:",
        Table(head, body, frozenset()),
        [
            *_format_remaining(len(explanation.stages), "stage"),
            describe_gradient_sums(explanation),
            *_describe_replica_sum(explanation),
        ],
    )


def _describe_replica_sum(explanation: PipelineExplanation) -> list[str]:
    count = len(explanation.replicas)
    return [f"Then each stage's gradient is added up over the {count:,} replicas."] if count > 1 else []


def _select_micro_batches(num_micro_batches: int) -> Sequence[int | None]:
    """Numbers of the micro-batches that are shown; None stands for those between."""
    if num_micro_batches <= MAX_MICRO_BATCHES:
        return range(num_micro_batches)
    return [*range(MAX_MICRO_BATCHES - 2), None, num_micro_batches - 1]


def _format_stage_row(stage: StageRecord, micro_batches: Sequence[int | None]) -> list[str]:
    parts = [
        "…"
        if k is None
        else format_number(stage.micro_batch_norms[k])
        if k < len(stage.micro_batch_norms)
        else formatting.UNKNOWN
        for k in micro_batches
    ]
    return [
        str(stage.stage),
        str(stage.rank),
        f"{stage.numbers:,}",
        *parts,
        format_number(stage.norm),
        f"{stage.gap:.1e}",
    ]


def _make_update_section(explanation: PipelineExplanation) -> Section:
    body = [_format_rank_row(rank) for rank in explanation.ranks[:MAX_RANKS]]
    head = ("rank", "stages", "samples", "loss", "before", "after")
    table = Table(head, body, frozenset({"stages", "before", "after"}))
    notes = [
        *_format_remaining(len(explanation.ranks), "rank"),
        *_describe_clipping(explanation),
        *_describe_replica_equality(explanation),
    ]
    notes.append(f"loss of the step: {format_number(explanation.loss)}, known to the last stage alone")
    if not explanation.updated:
        return Section("No update: the gradients are not finite. Checksums of each rank's parameters:", table, notes)
    lr = explanation.ranks[0].lr
    title = f"Each rank updates its own stages (learning rate {lr:g}). Checksums of its parameters:"
    return Section(title, table, notes)


def _format_rank_row(rank: StageRank) -> list[str]:
    stages = ", ".join(map(str, rank.stages))
    after = formatting.UNKNOWN if rank.after is None else rank.after
    return [str(rank.rank), stages, f"{rank.samples:,}", format_number(rank.loss), rank.before, after]


def _describe_replica_equality(explanation: PipelineExplanation) -> list[str]:
    if len(explanation.replicas) < 2:
        return []
    if explanation.identical:
        return ["All replicas have the same stages, bit by bit."]
    return ["The replicas do NOT have the same stages."]


def _describe_clipping(explanation: PipelineExplanation) -> list[str]:
    clip = explanation.ranks[0].clip
    if clip is None or not explanation.updated:
        return []
    if clip >= 1:
        return ["Clipping: the norm over all stages is within the limit, so the gradient stays as it is."]
    return [f"Clipping: the norm over all stages is over the limit: all is multiplied by {clip:.4g}."]


def _format_remaining(count: int, noun: str) -> list[str]:
    rest = count - MAX_RANKS
    return [f"and {formatting.format_count(rest, f'more {noun}')}"] if rest > 0 else []
