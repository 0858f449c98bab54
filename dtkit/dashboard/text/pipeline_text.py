"""An explained step of a pipeline, as text and as HTML: transfers, gradients of stages, and the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text import sections
from dtkit.dashboard.text.numbers import MAX_RANKS, describe_clipping, describe_remaining, format_number, format_shape
from dtkit.dashboard.text.sections import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.explain.pipeline import PipelineExplanation, StageRank, StageRecord, StageTransfer

_DIGEST_CHARS = 8  # enough to tell digests apart
MAX_TRANSFERS = 40
"""Transfers with a line of their own."""
MAX_MICRO_BATCHES = 6
"""Micro-batches with a column of their own. Of more, the first ones and the last one are shown."""


def format_text(explanation: PipelineExplanation) -> str:
    """Return the step as a page of text."""
    return sections.format_text(format_headline(explanation), _make_sections(explanation))


def format_html(explanation: PipelineExplanation) -> str:
    """Return the step as HTML."""
    return sections.format_html(format_headline(explanation), _make_sections(explanation))


def format_headline(explanation: PipelineExplanation) -> str:
    """Return a headline such as ``Step 7 of Net in 4 stages on 2 ranks, epoch 2: 64 samples in 8 micro-batches``."""
    stages = formatting.format_count(len({stage.stage for stage in explanation.stages}), "stage")
    replicas = f" and {len(explanation.replicas):,} replicas" if len(explanation.replicas) > 1 else ""
    where = f"Step {explanation.step:,} of {formatting.sanitize_text(explanation.model, 60)} in {stages}{replicas}"
    ranks, samples = (
        formatting.format_count(len(explanation.ranks), "node"),
        formatting.format_count(explanation.samples, "sample"),
    )
    micro = formatting.format_count(explanation.micro_batches, "micro-batch").replace("batchs", "batches")
    return f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {samples} in {micro}"


def describe_integrity(explanation: PipelineExplanation) -> str:
    """Return whether all tensors arrived as they were sent."""
    wrong = [transfer for transfer in explanation.transfers if not transfer.is_intact]
    count = len(explanation.transfers)
    if not count:
        return "Nothing crossed a border: no replica had a sample."
    if not wrong:
        return f"What arrived is what was sent, bit by bit: all {formatting.format_count(count, 'tensor')}."
    names = ", ".join(
        f"{transfer.kind} of micro-batch {transfer.micro_batch} from {_format_stages(transfer)}"
        for transfer in wrong[:3]
    )
    return f"{len(wrong)} of {count} tensors did NOT arrive as they were sent: {names}{', …' * (len(wrong) > 3)}"


def describe_gradient_sums(explanation: PipelineExplanation) -> str:
    """Return whether the gradient of each stage is the sum of its micro-batches' parts."""
    wrong = [
        f"stage {stage.stage} on node {stage.rank}" for stage in explanation.stages if not stage.is_sum_of_micro_batches
    ]
    if wrong:
        return f"The gradient is NOT the sum of its micro-batches' parts in {', '.join(wrong[:3])}."
    return "Each stage's gradient is the sum of its micro-batches' parts, up to rounding."


# -- sections --------------------------------------------------------------------------------------------------------


def _make_sections(explanation: PipelineExplanation) -> tuple[Section, Section, Section]:
    return _make_transfers_section(explanation), _make_gradients_section(explanation), _make_update_section(explanation)


def _make_transfers_section(explanation: PipelineExplanation) -> Section:
    shown = [transfer for _, transfer in sort_by_replica(explanation)[:MAX_TRANSFERS]]
    has_tuples = any(transfer.tensor for transfer in explanation.transfers)
    rows = [_format_transfer_row(transfer, show_tensor_number=has_tuples) for transfer in shown]
    head = ("", "micro-batch", "what", "stages", "nodes", "shape", "bytes", "norm", "first numbers", "sent", "arrived")
    down, up = (formatting.format_bytes(explanation.sent_bytes(kind)) for kind in ("activation", "gradient"))
    order = "Replica by replica, in" if len(explanation.replicas) > 1 else "In"
    return Section(
        f"Activations go down through the stages, and their gradients come back up. {order} the order of sending:",
        Table(head, rows, {"what", "stages", "nodes", "shape", "first numbers", "sent", "arrived"}),
        [
            *describe_remaining(len(explanation.transfers), "tensor", MAX_TRANSFERS),
            f"{describe_integrity(explanation)} From node to node went {down} of activations and {up} of gradients.",
        ],
    )


def sort_by_replica(explanation: PipelineExplanation) -> list[tuple[int, StageTransfer]]:
    """Return (number of the replica, transfer), sorted by replica and by the order of sending."""
    places = {rank: place for place, ranks in enumerate(explanation.replicas) for rank in ranks}
    pairs = [(places[transfer.sender], transfer) for transfer in explanation.transfers]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].index))


def _format_transfer_row(transfer: StageTransfer, *, show_tensor_number: bool) -> list[str]:
    return [
        str(transfer.index + 1),
        str(transfer.micro_batch) + (f" ({transfer.tensor + 1})" if show_tensor_number else ""),
        transfer.kind,
        _format_stages(transfer),
        f"{transfer.sender} → {transfer.receiver}" if transfer.sender != transfer.receiver else f"on {transfer.sender}",
        f"{format_shape(transfer.shape)} {transfer.dtype}",
        f"{transfer.nbytes:,}",
        format_number(transfer.norm),
        ", ".join(f"{value:.3g}" for value in transfer.first_values[:2]) + ", …",
        transfer.sent_digest[:_DIGEST_CHARS],
        "nothing"
        if transfer.received_digest is None
        else "the same"
        if transfer.is_intact
        else f"DIFFERS: {transfer.received_digest[:_DIGEST_CHARS]}",
    ]


def _format_stages(transfer: StageTransfer) -> str:
    return f"{transfer.from_stage} → {transfer.to_stage}"


def _make_gradients_section(explanation: PipelineExplanation) -> Section:
    columns = _select_micro_batches(explanation.micro_batches)
    names = [f"part {k}" if k is not None else "…" for k in columns]
    body = [_format_stage_row(stage, columns) for stage in explanation.stages[:MAX_RANKS]]
    head = ("stage", "node", "parameters", *names, "their sum", "differs by")
    return Section(
        "Each stage sums the gradients of its micro-batches. Norms:",
        Table(head, body),
        [
            *describe_remaining(len(explanation.stages), "stage"),
            describe_gradient_sums(explanation),
            *_describe_replica_sum(explanation),
        ],
    )


def _describe_replica_sum(explanation: PipelineExplanation) -> list[str]:
    count = len(explanation.replicas)
    return [f"Then each stage's gradient is added up over the {count:,} replicas."] if count > 1 else []


def _select_micro_batches(num_micro_batches: int) -> Sequence[int | None]:
    """Return the numbers of the micro-batches to show; None stands for the ones left out."""
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
    head = ("node", "stages", "samples", "loss", "before", "after")
    table = Table(head, body, {"stages", "before", "after"})
    notes = [
        *describe_remaining(len(explanation.ranks), "node"),
        *describe_clipping(explanation.ranks[0].clip, "the norm over all stages", updated=explanation.updated),
        *_describe_replica_equality(explanation),
    ]
    notes.append(f"loss of the step: {format_number(explanation.loss)}, known to the last stage only")
    if not explanation.updated:
        return Section("No update: the gradients are not finite. Checksums of each node's parameters:", table, notes)
    lr = formatting.format_learning_rate(explanation.ranks[0].lr)
    title = f"Each node updates its own stages (learning rate {lr}). Checksums of its parameters:"
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
