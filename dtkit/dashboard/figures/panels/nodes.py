"""The table of nodes, as in the live view: the machine of each, and its current numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.figures.text_table import draw_table
from dtkit.dashboard.summary.metrics import compute_run_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History

_MAX_ROWS = 16
_HEADER = ("node", "engine", "host", "pid", "device", "threads", "memory", "loss", "samples/s")


def make_panel(run: RunView) -> Callable[[Axes, History], None]:
    """Return the panel of a run's nodes."""
    rows, num_hidden = _make_rows(run), max(0, len(run.nodes) - _MAX_ROWS)
    hosts = formatting.format_count(len({node.host for node in run.nodes}), "host")
    note = f"{len(run.nodes):,} on {hosts} · loss of the last step, samples/s without waiting"

    def draw(ax: Axes, _history: History) -> None:
        more = [f"and {formatting.format_count(num_hidden, 'node')} more, in run.nodes"] if num_hidden else []
        draw_table(ax, "Nodes", note, Table(_HEADER, rows, {"host", "device"}), more)

    return draw


def count_lines(run: RunView) -> int:
    """Return the lines of the table, with its header."""
    return 1 + min(len(run.nodes), _MAX_ROWS) + (len(run.nodes) > _MAX_ROWS)


def _make_rows(run: RunView) -> list[Sequence[str]]:
    metrics = compute_run_metrics(run.history, run.spec.world_size)
    straggler = metrics.timing.straggler
    rows: list[Sequence[str]] = []
    for node in run.nodes[:_MAX_ROWS]:
        known = node.rank < len(metrics.by_rank)
        loss, rate, memory = metrics.by_rank[node.rank] if known else (None, None, None)
        has_loss = known and not metrics.ranks_without_loss[node.rank]
        sign = "✕ " if node.rank in metrics.lost_nodes else "▲ " if straggler and node.rank in straggler.ranks else ""
        rows.append(
            (
                f"{sign}{node.rank}", f"{node.engine_id}", formatting.sanitize_text(node.host, 14), f"{node.pid}",
                formatting.sanitize_text(node.device, 10), f"{node.threads}", formatting.format_bytes(memory),
                formatting.format_loss(loss) if has_loss else formatting.UNKNOWN, formatting.format_rate(rate),
            )
        )  # fmt: skip
    return rows
