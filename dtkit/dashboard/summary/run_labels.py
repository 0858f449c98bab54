"""Labels of runs in a comparison: settings that tell runs of one name apart, such as "lr 0.1"."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.summary.spec_differences import list_differences, list_rate_differences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.history.history import History
    from dtkit.types import RunSpec

_MAX_CHARS = 28
_SHORT_NAMES = {
    "batch_size": "batch",
    "first learning rate": "lr",
    "learning rate": "lr",
    "num_workers": "workers",
    "world_size": "nodes",
}
_SELF_EVIDENT = ("loss", "optimizer", "strategy")
"""Settings whose values name themselves."""
_FOLLOWING = ("parameters", "samples", "steps", "seed")
"""Settings that follow from others, or are seldom the point: other settings are preferred."""


def label_by_settings(names: Sequence[str], specs: Sequence[RunSpec | None], histories: Sequence[History]) -> list[str]:
    """Return the names; equal ones get the setting, or the two, that tell most of their runs apart, if these are short.

    Where all names are equal, the settings alone are the label.
    """
    labels = list(names)
    for name in dict.fromkeys(names):
        places = [k for k, own in enumerate(names) if own == name]
        texts = _tell_apart([specs[k] for k in places], [histories[k] for k in places])
        for k, text in zip(places, texts, strict=False):  # without texts, the names stay
            labels[k] = text if len(places) == len(names) else f"{name}, {text}"
    return labels


def _tell_apart(specs: Sequence[RunSpec | None], histories: Sequence[History]) -> tuple[str, ...]:
    """Return a text for each run, as many different ones as possible; nothing where all would be equal or long."""
    if len(specs) < 2 or any(spec is None for spec in specs):
        return ()
    rates = list_rate_differences(specs, histories)
    if any(formatting.UNKNOWN in row for row in rates):  # some runs have no step yet
        rates = list_rate_differences(specs, [])
    rows = [*list_differences(specs), *rates]
    texts = max(_list_candidates(rows), key=lambda texts: len(set(texts)), default=())  # of equal ones, the first
    return texts if len(set(texts)) > 1 else ()


def _list_candidates(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each setting, then of each two, if they are short; those that users vary come first."""
    by_name = {name: [_format_setting(name, value) for value in values] for name, *values in rows}
    ordered = sorted(by_name, key=lambda name: (name in _FOLLOWING, _SHORT_NAMES.get(name) != "lr"))
    for count in (1, 2):
        for chosen in itertools.combinations(ordered, count):
            columns = [texts for name, texts in by_name.items() if name in chosen]  # in the order of the table
            labels = tuple(", ".join(texts) for texts in zip(*columns, strict=True))
            if max(map(len, labels)) <= _MAX_CHARS:
                yield labels


def _format_setting(name: str, value: str) -> str:
    return value if name in _SELF_EVIDENT else f"{_SHORT_NAMES.get(name, name)} {value}"
