"""A cluster as a table: one row per rank. Of many equal ones, it has the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting, resources
from dtkit.dashboard.text.table_page import TablePage
from dtkit.types import NodeList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import NodeInfo

_MAX_ROWS = 10


def make_page(group: EngineGroup, device_note: str, num_spares: int = 0) -> TablePage:
    """Return the page of a cluster, whose choice of devices may need a note."""
    if group.is_closed:
        return TablePage("Cluster(closed)", [])
    backend = group.membership.backend
    shown = select_nodes(group.nodes)
    num_folded = len(group.nodes) - len(shown)
    notes = [f"and {num_folded:,} more like these; cluster.nodes has all"] if num_folded else []
    notes += [device_note] if device_note else []
    if interfaces := sorted(group.membership.list_interfaces() - {resources.find_loopback_interface()}):
        notes.append(f"Tensors travel over {', '.join(interfaces)}, and that traffic is not encrypted.")
    if (clocks := group.membership.clocks) is not None:
        notes += clocks.describe([node.host for node in group.nodes])
    spares = f" and {formatting.format_count(num_spares, 'spare')}" if num_spares else ""
    headline = f"Cluster of {formatting.format_count(group.world_size, 'engine')}{spares}, {backend}"
    return TablePage(headline, [NodeList(shown).make_table()], notes)


def select_nodes(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes with a row of their own: the first of each kind, and as many others as there is room for."""
    if len(nodes) <= _MAX_ROWS + 1:  # a line about a single other one is as long as its row
        return list(nodes)
    first_by_kind = {(n.host, n.device, n.memory_total, n.threads): n.rank for n in reversed(nodes)}
    shown = set(first_by_kind.values())
    shown.update([n.rank for n in nodes if n.rank not in shown][: max(0, _MAX_ROWS - len(shown))])
    return [n for n in nodes if n.rank in shown]
