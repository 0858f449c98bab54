"""The headline numbers of a run: the live view's tiles, and the last validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.text_table import LEFT, RIGHT, prepare_axes, write
from dtkit.dashboard.summary.metrics import Tile, build_metric_tile, build_tiles, compute_run_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History

TILES_PER_ROW = 3
"""Number of tiles in a row."""
_MAX_METRICS = 4
_FULL_SIZE_CHARS = 29  # of a note, which has to end before the next tile


def make_panel(run: RunView) -> Callable[[Axes, History], None]:
    """Return the panel with the tiles of a run."""
    tiles = list_tiles(run)

    def draw(ax: Axes, _history: History) -> None:
        prepare_axes(ax, -(-len(tiles) // TILES_PER_ROW))
        for place, tile in enumerate(tiles):
            row, column = divmod(place, TILES_PER_ROW)
            x = LEFT + (RIGHT - LEFT) * column / TILES_PER_ROW
            write(ax, x, row + 0.14, tile.label, style.MUTED_COLOR, gid="tile")
            write(ax, x, row + 0.43, tile.value, style.TEXT_COLOR, fontsize=12, fontweight="bold", gid="tile")
            color = style.ALERT_COLOR if tile.alert else style.MUTED_COLOR
            size = style.SMALL_FONT_SIZE * min(1.0, _FULL_SIZE_CHARS / max(1, len(tile.note)))
            write(ax, x, row + 0.72, tile.note, color, fontsize=size, gid="tile")

    return draw


def list_tiles(run: RunView) -> list[Tile]:
    """Return the tiles of the live view, those of validation metrics with their range, and for more metrics."""
    tiles = {tile.label: tile for tile in build_tiles(run, compute_run_metrics(run.history, run.spec.world_size))}
    return [*(tiles | {tile.label: tile for tile in _build_metric_tiles(run)}).values()]


def _build_metric_tiles(run: RunView) -> Iterator[Tile]:
    evaluations = run.history.evaluations
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.values if name != "loss")
    for name in list(names)[:_MAX_METRICS]:
        values = [value for e in evaluations if (value := e.values.get(name)) is not None and np.isfinite(value)]
        if values and name in run.history.scalar_names:
            yield build_metric_tile(run.history, name, values[-1])
        elif values:
            low, high = formatting.format_loss(min(values)), formatting.format_loss(max(values))
            yield Tile(formatting.sanitize_text(name, 24), formatting.format_loss(values[-1]), f"from {low} to {high}")
