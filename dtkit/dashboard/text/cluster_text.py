"""A cluster as a table: one row per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting, resources
from dtkit._util.table import Table
from dtkit.dashboard.text.table_page import TablePage

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup

_HEADER = ["node", "engine id", "host", "pid", "device", "memory free", "threads"]


def make_page(group: EngineGroup, device_note: str, num_spares: int = 0) -> TablePage:
    """Return the page of a cluster, whose choice of devices may need a note."""
    if group.is_closed:
        return TablePage("Cluster(closed)", [])
    backend = group.membership.backend
    rows = [
        [
            str(node.rank),
            str(node.engine_id),
            node.host,
            str(node.pid),
            node.device,
            f"{formatting.format_bytes(node.memory_free)} of {formatting.format_bytes(node.memory_total)}",
            str(node.threads),
        ]
        for node in group.nodes
    ]
    notes = [device_note] if device_note else []
    if interfaces := sorted(group.membership.list_interfaces() - {resources.find_loopback_interface()}):
        notes.append(f"Tensors travel over {', '.join(interfaces)}, and that traffic is not encrypted.")
    if (clocks := group.membership.clocks) is not None:
        notes += clocks.describe([node.host for node in group.nodes])
    spares = f" and {formatting.format_count(num_spares, 'spare')}" if num_spares else ""
    headline = f"Cluster of {formatting.format_count(group.world_size, 'engine')}{spares}, {backend}"
    return TablePage(headline, [Table(_HEADER, rows, {"host", "device"})], notes)
