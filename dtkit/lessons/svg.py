"""Drawings as SVG within HTML. Lines and labels have the page's text color, so they fit light and dark themes."""

from __future__ import annotations

import dataclasses
import html
import math

COLORS = ("#0072B2", "#B35900", "#00805E", "#9C4F83")
"""Fill of the boxes of ranks 0 to 3: dark enough for white text, light enough for a dark page."""
_FONT_SIZE = 14


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A finished drawing, with a description for readers who don't see it."""

    description: str
    width: int
    height: int
    body: str

    def to_svg(self) -> str:
        """Return the drawing as an SVG element."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {self.width} {self.height}" '
            f'style="width:100%;max-width:{self.width}px;height:auto" font-family="sans-serif" '
            f'font-size="{_FONT_SIZE}"><title>{html.escape(self.description)}</title>{self.body}</svg>'
        )

    def __repr__(self) -> str:
        return f"Drawing: {self.description}"

    def _repr_html_(self) -> str:
        return self.to_svg()


class Canvas:
    """Boxes, labels and arrows of a drawing. Coordinates are pixels from the top left corner."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self._size = width, height
        self._description = description
        self._parts: list[str] = []

    def finish(self) -> Drawing:
        """Return the drawing."""
        return Drawing(self._description, *self._size, "".join(self._parts))

    def add_box(self, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
        """Add a filled box with white text in its middle."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{color}"/>')
        self.add_text(x + width / 2, y + height / 2, text, anchor="middle", color="#fff")

    def add_empty_box(self, x: float, y: float, width: float, height: float, text: str = "") -> None:
        """Add a box with a dashed border."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="none" stroke="currentColor" '
            f'stroke-opacity=".5" stroke-dasharray="4 3"/>'
        )
        if text:
            self.add_text(x + width / 2, y + height / 2, text, anchor="middle")

    def add_text(
        self, x: float, y: float, text: str, *, anchor: str = "start", color: str = "currentColor", bold: bool = False
    ) -> None:
        """Add text whose middle is at height `y`."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" dy=".35em" text-anchor="{anchor}" fill="{color}"{weight}>{html.escape(text)}</text>'
        )

    def add_arrow(self, start: tuple[float, float], end: tuple[float, float], *, is_dashed: bool = False) -> None:
        """Add a straight arrow."""
        dashes = ' stroke-dasharray="5 3"' if is_dashed else ""
        (x1, y1), (x2, y2) = start, end
        angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
        self._parts.append(
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="currentColor" stroke-width="1.5" fill="none"{dashes}/>'
            f'<path d="M-7 -4L1 0L-7 4z" fill="currentColor" transform="translate({x2} {y2}) rotate({angle:.0f})"/>'
        )
