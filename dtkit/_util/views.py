"""Views of results by their class: text, HTML, and a figure.

The dashboard draws results, so its layer is above their classes. It registers a view for each class in
:mod:`dtkit.dashboard.views`, which is imported when the first result is shown. Classes import only this module.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import matplotlib.figure

Figure: TypeAlias = "matplotlib.figure.Figure"
"""matplotlib's figure. Classes of results name it here, so that they never import matplotlib."""
_Shown = TypeVar("_Shown")

_VIEWS_MODULE = "dtkit.dashboard.views"
"""The module that registers all views. It is named as text because nothing here may import the dashboard."""


@dataclasses.dataclass(frozen=True)
class View(Generic[_Shown]):
    """Functions that show one class."""

    format_text: Callable[[_Shown], str]
    format_html: Callable[[_Shown], str]
    draw: Callable[[_Shown], Figure]
    render_png: Callable[[_Shown], bytes]


_views: dict[type, View[Any]] = {}


def register(shown_class: type[_Shown], view: View[_Shown]) -> None:
    """Register the view of a class and of its subclasses."""
    _views[shown_class] = view


def format_text(shown: object) -> str:
    """Return the text of a result."""
    return _find_view(shown).format_text(shown)


def format_html(shown: object) -> str:
    """Return the HTML of a result, with its figure."""
    return _find_view(shown).format_html(shown)


def draw(shown: object) -> Figure:
    """Return the figure of a result."""
    return _find_view(shown).draw(shown)


def render_png(shown: object) -> bytes:
    """Return the figure of a result as a PNG."""
    return _find_view(shown).render_png(shown)


def _find_view(shown: object) -> View[Any]:
    importlib.import_module(_VIEWS_MODULE)
    for parent in type(shown).__mro__:
        if parent in _views:
            return _views[parent]
    raise TypeError(f"no view is registered for {type(shown).__name__}; register it in {_VIEWS_MODULE}")
