"""Settings in which runs differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History
    from dtkit.types import RunSpec

_MAX_SHOWN_CHANGES = 3
_FIELDS = ("strategy", "world_size", "batch_size", "optimizer", "loss", "shuffle", "seed", "num_workers", "samples")


def list_differences(specs: Sequence[RunSpec | None]) -> list[tuple[str, ...]]:
    """Return (setting, its text in each run) of the settings that differ; a dash where a run has none."""
    settings = [None if spec is None else _collect(spec) for spec in specs]
    names = dict.fromkeys(name for values in settings if values is not None for name in values)
    rows = [
        (name, *(formatting.UNKNOWN if values is None else values.get(name, "default") for values in settings))
        for name in names
    ]
    known = [k for k, values in enumerate(settings, 1) if values is not None]
    return [row for row in rows if len({row[k] for k in known}) > 1]


def list_first_rate_differences(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """Return ("first learning rate", its text in each run) if runs differ in it; a dash for a run without a step."""
    rates = [formatting.UNKNOWN if not len(history) else f"{history[0].lr:g}" for history in histories]
    return [("first learning rate", *rates)] if len(set(rates) - {formatting.UNKNOWN}) > 1 else []


def list_event_differences(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """Return what users changed while some of the runs took steps: learning rates set by hand."""
    changes = [_describe_rate_changes(history) for history in histories]
    return [("learning rate set by hand", *changes)] if set(changes) != {formatting.UNKNOWN} else []


def _describe_rate_changes(history: History) -> str:
    changes = [event for event in history.events if event.kind == "lr"]
    shown = [f"{event.text.rpartition(' ')[2]} from step {event.step:,}" for event in changes[-_MAX_SHOWN_CHANGES:]]
    more = len(changes) - len(shown)
    return ", ".join([*([f"{more} more"] if more else []), *shown]) or formatting.UNKNOWN


def _collect(spec: RunSpec) -> dict[str, str]:
    fields = {name: str(getattr(spec, name)) for name in _FIELDS}
    epochs = f"{spec.epochs:,.0f}" if spec.epochs.is_integer() else f"{spec.epochs:,.2f}"
    fields |= {"epochs": epochs, "steps": f"{spec.steps:,}"}
    if spec.model is not None:
        fields["parameters"] = f"{spec.model.parameters:,}"
    return fields | dict(spec.settings)
