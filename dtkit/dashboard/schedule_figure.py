"""The picture of a schedule: when each rank does what, if stages are equal and backward takes twice a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard import timeline_figure as house
from dtkit.history.timeline import convert_simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtkit.schedules.schedule import Schedule
    from dtkit.schedules.simulator import Simulation


def draw(schedule: Schedule) -> Figure:
    """A strip per rank, in units of a forward pass."""
    played = schedule.simulate()
    spans = convert_simulation(played)
    figure, ax = house.sheet(schedule.ranks)
    house.strips(ax, spans, 0.0, 1.0)
    house.legend(figure, ax, [*house.used(spans), house.idle("waiting")])
    house.axes(ax, schedule.ranks, "forward passes of a stage (backward takes two)")
    house.titles(ax, f"{schedule.name}: {schedule.micro_batches} micro-batches, planned", _note(played))
    return figure


def _note(played: Simulation) -> str:
    known = played.schedule.get_bubble_formula()
    formula = f" = {known[0]}" if known else ""
    *most, last = map(str, played.peak_micro_batches)
    held = f"{', '.join(most)} and {last}" if most else last
    unit = "micro-batches" if played.schedule.stages == played.schedule.ranks else "micro-batches of a stage"
    return f"time {played.makespan:g} · bubble {played.bubble:.1%}{formula} · the nodes hold {held} {unit} at most"
