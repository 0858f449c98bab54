"""Items of a history as lines of JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from dtkit.history.scalars import ScalarRecord
from dtkit.history.undone_steps import UndoneSteps
from dtkit.types import Evaluation, Event, StepRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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


def encode_head(copies: int, position: tuple[int, float], directions: Mapping[str, bool]) -> str:
    """Return the first line: ranks per replica, (steps, seconds) of the run, and whether a higher metric is better."""
    steps, elapsed_s = position
    head = {"copies": copies, "steps": steps, "elapsed_s": elapsed_s, "directions": dict(directions)}
    return json.dumps({"type": "head", **head}) + "\n"


def encode_line(item: HistoryItem) -> str:
    """Return an item as a line of JSON. :func:`decode_fields` restores it."""
    kind = next(kind for kind, item_class in _ITEM_CLASSES.items() if type(item) is item_class)
    return json.dumps({"type": kind, **dataclasses.asdict(item)}) + "\n"


def decode_fields(fields: dict[str, Any]) -> HistoryItem:
    """Restore an item from the fields of a line. Raises KeyError or TypeError if they are no item's."""
    return _ITEM_CLASSES[fields.pop("type")](**fields)


def read_lines(path: Path) -> tuple[dict[str, Any], list[StepRecord], list[LogItem]]:
    """Return the head, rows and other items of a file of lines. Raises ValueError for a line of another kind."""
    head: dict[str, Any] = {}
    rows: list[StepRecord] = []
    items: list[LogItem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(line)
            if "copies" in fields:
                head = fields
                continue
            item = decode_fields(fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {str(path)!r} is not a record of a history; history.to_jsonl(path) writes them"
            ) from error
        if isinstance(item, StepRecord):
            rows.append(item)
        else:
            items.append(item)
    return head, rows, items
