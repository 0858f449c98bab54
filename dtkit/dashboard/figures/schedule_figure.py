"""The picture of a schedule: when each rank does what, if stages are equal and backward takes twice a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.figures import timeline_figure as house
from dtkit.history.timeline import convert_simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtkit.schedules.schedule import Schedule
    from dtkit.schedules.simulator import Simulation


def draw_schedule(schedule: Schedule) -> Figure:
    """A strip per rank, in units of a forward pass."""
    played = schedule.simulate()
    spans = convert_simulation(played)
    figure, ax = house.create_strip_figure(schedule.ranks)
    house.draw_strips(ax, spans, 0.0, 1.0)
    house.draw_legend(figure, ax, [*house.make_legend_patches(spans), house.make_idle_patch("waiting")])
    house.format_axes(ax, schedule.ranks, "forward passes of a stage (backward takes two)")
    house.draw_titles(
        ax, f"{schedule.name}: {schedule.micro_batches} micro-batches, planned", _describe_schedule(played)
    )
    return figure


def _describe_schedule(simulation: Simulation) -> str:
    known = simulation.schedule.get_bubble_formula()
    formula = f" = {known[0]}" if known else ""
    *most, last = map(str, simulation.peak_micro_batches)
    held = f"{', '.join(most)} and {last}" if most else last
    unit = "micro-batches" if simulation.schedule.stages == simulation.schedule.ranks else "micro-batches of a stage"
    return (
        f"time {simulation.makespan:g} · bubble {simulation.bubble:.1%}{formula} · the nodes hold {held} {unit} at most"
    )
