"""Functions of one name with different sources: each one's text gets the lines that only it has, or a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_LINES, _MAX_LINE_CHARS = 3, 80


def tell_sources_apart(texts: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return each run's text of a setting; equal texts whose `sources` differ get what tells them apart.

    Comments and blank lines don't count. A run without a source has an empty one, and keeps its text.
    """
    lines = [_list_lines(source) for source in sources]
    return [_tell_apart(k, texts, lines) for k in range(len(texts))]


def _list_lines(source: str) -> tuple[str, ...]:
    stripped = (line.strip() for line in source.splitlines())
    return tuple(line for line in stripped if line and not line.startswith("#"))


def _tell_apart(k: int, texts: Sequence[str], lines: Sequence[tuple[str, ...]]) -> str:
    rivals = list(dict.fromkeys(own for text, own in zip(texts, lines, strict=True) if own and text == texts[k]))
    if not lines[k] or len(rivals) < 2:
        return texts[k]
    common = set.intersection(*map(set, rivals))
    differing = [[line for line in rival if line not in common] for rival in rivals]
    place = rivals.index(lines[k])
    if not differing[place] or differing.count(differing[place]) > 1:  # lines that others lack, in another order
        return f"{texts[k]} ({place + 1})"
    shown = [formatting.sanitize_text(line, _MAX_LINE_CHARS) for line in differing[place][:_MAX_LINES]]
    more = len(differing[place]) - len(shown)
    rest = [f"and {formatting.format_count(more, 'more line')}"] if more else []
    return f"{texts[k]}: {'; '.join([*shown, *rest])}"
