"""Memory of each node against its limit. Of many nodes, those with the most, the median and the least are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.summary.curves import MAX_NODE_LINES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from dtkit.history.history import History
    from dtkit.types import NodeInfo

NEAR_LIMIT = 0.9
"""Share of the limit from which on a bar is an alert."""
_AMPLE_SHARE = 0.5  # of the limit, up to which a line of text is enough, as in the live view


def make_panel(nodes: Sequence[NodeInfo]) -> Callable[[Axes, History], None]:
    """Return the panel of these nodes, whose limits a history doesn't have."""
    limits = _read_limits(nodes)

    def draw(ax: Axes, history: History) -> None:
        style.style_axes(ax)
        style.set_title(ax, "Memory", "of each node, and its limit")
        used = {rank: count for rank, count in _get_latest_bytes(history).items() if rank in limits}
        shown = _select_bars(used, limits)
        ax.set_xticks([])
        ax.spines["left"].set_visible(False)
        ax.spines["bottom"].set_visible(False)
        if not shown:
            style.show_placeholder(ax)
            ax.set_yticks([])
            return
        for row, (_, rank) in enumerate(shown):
            _draw_bar(ax, row, used[rank], limits[rank])
        ax.set_yticks(range(len(shown)), [label for label, _ in shown])
        ax.set(xlim=(0, 1.55), ylim=(len(shown) - 0.45, -0.55))
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)

    return draw


def is_ample(history: History, nodes: Sequence[NodeInfo]) -> bool:
    """Return whether each node uses less than half of its memory, so that bars would be almost empty."""
    used, limits = _get_latest_bytes(history), _read_limits(nodes)
    return all(used[rank] < _AMPLE_SHARE * limits[rank] for rank in used if rank in limits)


def describe(history: History, nodes: Sequence[NodeInfo]) -> str:
    """Return what each node uses of its limit, or three of many; an empty text where that is unknown."""
    limits = _read_limits(nodes)
    used = {rank: count for rank, count in _get_latest_bytes(history).items() if rank in limits}
    return ", ".join(f"{name} {_describe_use(used[rank], limits[rank])}" for name, rank in _select_bars(used, limits))


def _read_limits(nodes: Sequence[NodeInfo]) -> dict[int, int]:
    return {node.rank: node.memory_total for node in nodes if node.memory_total > 0}


def _describe_use(used: int, limit: int) -> str:
    share = formatting.format_percent(used / limit)
    return f"{formatting.format_bytes(used)} of {formatting.format_bytes(limit)} · {share}"


def _get_latest_bytes(history: History) -> dict[int, int]:
    """Return the bytes of each rank in its last step."""
    rows = history.rows(len(history) - 4096)
    return dict(zip(rows["rank"].tolist(), rows["memory_bytes"].tolist(), strict=True))


def _select_bars(used: dict[int, int], limits: dict[int, int]) -> list[tuple[str, int]]:
    """Return (label, rank) of each bar."""
    if len(used) <= MAX_NODE_LINES:
        return [(f"node {rank}", rank) for rank in sorted(used)]
    order = sorted(used, key=lambda rank: used[rank] / limits[rank])
    ranks = {"most": order[-1], "median": order[len(order) // 2], "least": order[0]}
    return [(f"{name}: node {rank}", rank) for name, rank in ranks.items()]


def _draw_bar(ax: Axes, row: int, used: int, limit: int) -> None:
    share, is_tight = used / limit, used >= NEAR_LIMIT * limit
    color = style.ALERT_COLOR if is_tight else style.COLORS[0]
    ax.barh(row, 1.0, 0.5, facecolor="white", edgecolor=style.MUTED_COLOR, linewidth=0.8, gid="limit")
    ax.barh(
        row, np.clip(share, 0, 1), 0.5, facecolor=color, hatch="////" if is_tight else "", edgecolor="white", gid="used"
    )
    warning = "▲ " if is_tight else ""
    text = f"{warning}{_describe_use(used, limit)}"
    ax.text(1.02, row, text, va="center", fontsize=8, color=style.ALERT_COLOR if is_tight else style.MUTED_COLOR)
