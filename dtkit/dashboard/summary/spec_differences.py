"""Settings in which runs differ, and those that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.summary.function_text import read_function, read_optimizer
from dtkit.dashboard.summary.source_differences import tell_sources_apart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.history.history import History
    from dtkit.types import RunSpec

_MAX_SHOWN_CHANGES = 3
_UNSET = dict.fromkeys(
    (
        *("callbacks", "checkpoint_dir", "checkpoint_every", "lr_scheduler", "metrics", "on_engine", "resume_from"),
        *("sampler", "validation"),
    ),
    "none",
)
"""Settings whose default is to have none."""
_FIELDS = ("strategy", "world_size", "batch_size", "optimizer", "loss", "shuffle", "seed", "num_workers", "samples")


def list_differences(specs: Sequence[RunSpec | None]) -> list[tuple[str, ...]]:
    """Return (setting, its text in each run) of the settings that differ; a dash where a run has none."""
    settings = [None if spec is None else _collect(spec) for spec in specs]
    names = dict.fromkeys(name for values in settings if values is not None for name in values)
    rows = [(name, *(_get_setting(values, name) for values in settings)) for name in names]
    known = [k for k, values in enumerate(settings, 1) if values is not None]
    sources = [{} if spec is None else _collect_sources(spec) for spec in specs]
    shown = []
    for row in rows:
        differing = _shorten_functions(row, known) if len({row[k] for k in known}) > 1 else row
        texts = tell_sources_apart(differing[1:], [each.get(row[0], "") for each in sources])
        if len({texts[k - 1] for k in known}) > 1:
            shown.append((row[0], *texts))
    return shown


def list_common(specs: Sequence[RunSpec | None]) -> list[tuple[str, str]]:
    """Return (setting, its text) of the settings that are the same in all runs. A history without a run has none."""
    if not specs or any(spec is None for spec in specs):
        return []
    differing = {row[0] for row in list_differences(specs)}
    settings = [_collect(spec) for spec in specs if spec is not None]
    return [(name, text) for name, text in settings[0].items() if name not in differing]


def _get_setting(values: Mapping[str, str] | None, name: str) -> str:
    return formatting.UNKNOWN if values is None else values.get(name, _UNSET.get(name, "default"))


def _collect_sources(spec: RunSpec) -> dict[str, str]:
    """Return the sources of functions. An optimizer that is known by its options and its rate needs none."""
    sources, is_read = dict(spec.sources), read_optimizer(spec.optimizer).name != spec.optimizer
    return {name: source for name, source in sources.items() if name != "optimizer" or not is_read}


def _shorten_functions(row: tuple[str, ...], known: Sequence[int]) -> tuple[str, ...]:
    """Return what the lambdas of a row call, with its options, where that tells the runs apart as well."""
    short = (row[0], *map(read_function, row[1:]))
    return short if len({short[k] for k in known}) == len({row[k] for k in known}) else row


def list_rate_differences(specs: Sequence[RunSpec | None], histories: Sequence[History]) -> list[tuple[str, ...]]:
    """Return ("first learning rate", its text in each run) if runs differ in it; a dash for a run without a step.

    Without a step, and where a schedule lets all runs begin with the same rate, it is the rate that users typed.
    """
    if first := _list_first_rate_differences(histories):
        return first
    rates = [formatting.UNKNOWN if spec is None else _format_typed_rate(spec.optimizer) for spec in specs]
    return [("learning rate", *rates)] if all(rates) and len(set(rates) - {formatting.UNKNOWN}) > 1 else []


def _format_typed_rate(optimizer: str) -> str:
    """Return the rate that a user typed, such as ``12.0``, in the form that the rate of a step has: ``12``."""
    rate = read_optimizer(optimizer).rate
    try:
        return formatting.format_learning_rate(float(rate))
    except ValueError:
        return rate


def _list_first_rate_differences(histories: Sequence[History]) -> list[tuple[str, ...]]:
    rates = [
        formatting.UNKNOWN if not len(history) else formatting.format_learning_rate(history[0].lr)
        for history in histories
    ]
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
    return fields | dict(spec.settings) | {"optimizer": read_optimizer(spec.optimizer).name}
