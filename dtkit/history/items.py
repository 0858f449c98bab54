"""Items of a history as lines of JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dtkit.history.scalars import ScalarRecord
from dtkit.history.undone_steps import UndoneSteps
from dtkit.types import Evaluation, Event, StepRecord

LogItem = Evaluation | Event | ScalarRecord | UndoneSteps
"""Types of the items that a run log receives besides rows."""
HistoryItem = StepRecord | LogItem
"""Types of the items in a history's JSON lines."""
_ITEM_CLASSES: dict[str, type[HistoryItem]] = {
    "row": StepRecord,
    "evaluation": Evaluation,
    "event": Event,
    "scalars": ScalarRecord,
    "undone": UndoneSteps,
}


def encode_line(item: HistoryItem) -> str:
    """Return an item as a line of JSON. :func:`decode_fields` restores it."""
    kind = next(kind for kind, item_class in _ITEM_CLASSES.items() if type(item) is item_class)
    return json.dumps({"type": kind, **dataclasses.asdict(item)}) + "\n"


def decode_fields(fields: dict[str, Any]) -> HistoryItem:
    """Restore an item from the fields of a line. Raises KeyError or TypeError if they are no item's."""
    return _ITEM_CLASSES[fields.pop("type")](**fields)
