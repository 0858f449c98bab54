"""An explained step of sharded or tensor-parallel training, as text and as HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text import sections
from dtkit.dashboard.text.numbers import MAX_RANKS, describe_remaining, format_number
from dtkit.dashboard.text.sections import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.explain.sharded import CollectiveGroup, ShardedExplanation

_MAX_LISTED_RANKS = 4  # a larger group of ranks is shown by its size


def format_text(explanation: ShardedExplanation) -> str:
    """Return the step as a page of text."""
    return sections.format_text(format_headline(explanation), _make_sections(explanation))


def format_html(explanation: ShardedExplanation) -> str:
    """Return the step as HTML."""
    return sections.format_html(format_headline(explanation), _make_sections(explanation))


def format_headline(explanation: ShardedExplanation) -> str:
    """Return a headline such as ``Step 7 of Net on 2 ranks, epoch 2: 27 collectives``."""
    model = formatting.sanitize_text(explanation.model, 60)
    ranks = formatting.format_count(len(explanation.ranks), "node")
    count = formatting.format_count(len(explanation.collectives), "collective")
    return f"Step {explanation.step:,} of {model} on {ranks}, epoch {explanation.epoch + 1:,}: {count}"


def describe_agreement(explanation: ShardedExplanation) -> str:
    """Return whether ranks made the same collectives, and got equal results where they should."""
    if not explanation.is_aligned:
        return "The nodes did NOT make the same collectives in the same order."
    if not explanation.is_agreed:
        return "Some results that should be the same on all nodes are NOT."
    ranks = "All nodes" if is_among_all_ranks(explanation) else "The nodes of each group"
    return f"{ranks} made the same collectives, and got the same results where they should, bit by bit."


def is_among_all_ranks(explanation: ShardedExplanation) -> bool:
    """Return whether every collective includes all ranks. With replicas, some collectives include a part of them."""
    return all(len(collective.ranks) == len(explanation.ranks) for collective in explanation.collectives)


def describe_traffic(explanation: ShardedExplanation) -> str:
    """Return the bytes that a rank sent: by the ring algorithms and direct sums, and as counted."""
    expected, counted = explanation.expected_bytes, explanation.sent_bytes
    num_direct = sum(collective.is_direct for collective in explanation.collectives)
    sums = f" and {formatting.format_count(num_direct, 'direct sum')}" if num_direct else ""
    text = (
        f"Sent by a node: {formatting.format_bytes(counted)} counted, {formatting.format_bytes(expected)} by the "
        f"textbook's rings{sums}."
    )
    if num_direct:
        text += " In a direct sum, each node sends all numbers to each other one, by a socket of the host."
    scatters = sum(group.expected_bytes for group in explanation.groups if group.operation == "reduce_scatter")
    if scatters and math.isclose(counted, expected + scatters, rel_tol=0.05):
        return f"{text} The difference is what reduce-scatter should send: this backend makes an all-reduce of it."
    return text


def format_collective_name(collective: str) -> str:
    """Return a name such as ``all-reduce``."""
    return collective.replace("_", "-")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of a group such as ``0, 2``, or the number of ranks in a large group."""
    return ", ".join(map(str, ranks)) if len(ranks) <= _MAX_LISTED_RANKS else f"{len(ranks):,} nodes"


# -- sections --------------------------------------------------------------------------------------------------------


def _make_sections(explanation: ShardedExplanation) -> tuple[Section, Section, Section]:
    return _make_ranks_section(explanation), _make_collectives_section(explanation), _make_update_section(explanation)


def _make_ranks_section(explanation: ShardedExplanation) -> Section:
    rows = [
        [
            str(rank.rank),
            f"{rank.samples:,}",
            format_number(rank.loss),
            f"{rank.held_bytes:,}",
            formatting.format_percent(rank.held_bytes / rank.whole_bytes),
        ]
        for rank in explanation.ranks[:MAX_RANKS]
    ]
    notes = [
        *describe_remaining(len(explanation.ranks), "node"),
        *_describe_shared_samples(explanation),
        f"loss of the step: {format_number(explanation.loss)}",
    ]
    header = ("node", "samples", "loss", "bytes of parameters", "of all")
    return Section("Each node holds a part of the parameters.", Table(header, rows), notes)


def _describe_shared_samples(explanation: ShardedExplanation) -> list[str]:
    """Return a note that ranks of one replica take the same samples, where there are such ranks."""
    if all(rank.reports_samples for rank in explanation.ranks):
        return []
    samples = formatting.format_count(explanation.samples, "sample")
    return [f"Nodes that share a replica take the same samples: {samples} in all."]


def _make_collectives_section(explanation: ShardedExplanation) -> Section:
    header = ("phase", "collective", "nodes", "count", "bytes", "sent by a node")
    rows = [_format_group_row(group) for group in explanation.groups]
    which = "Collectives" if is_among_all_ranks(explanation) else f"Collectives of node {explanation.recording_rank}"
    return Section(
        f"Nodes gather the parameters that they need and sum the gradients while they compute. {which} by phase:",
        Table(header, rows, {"phase", "collective", "nodes"}),
        [describe_traffic(explanation), describe_agreement(explanation)],
    )


def _format_group_row(group: CollectiveGroup) -> list[str]:
    return [
        group.phase,
        format_collective_name(group.operation),
        format_ranks(group.ranks),
        f"{group.count:,}",
        f"{group.nbytes:,}",
        f"{group.expected_bytes:,.0f}",
    ]


def _make_update_section(explanation: ShardedExplanation) -> Section:
    ranks = explanation.ranks
    rows = [
        [str(rank.rank), rank.before, formatting.UNKNOWN if rank.after is None else rank.after]
        for rank in ranks[:MAX_RANKS]
    ]
    table = Table(("node", "before", "after"), rows, {"before", "after"})
    if not explanation.updated:
        return Section("No update: the gradients are not finite. Checksums of each node's parts:", table, [])
    lr = formatting.format_learning_rate(ranks[0].lr)
    title = f"Each node updates its own parts (learning rate {lr}). Checksums of these:"
    return Section(title, table, describe_remaining(len(ranks), "node"))
