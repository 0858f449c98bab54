"""The figure of a schedule with equal stages, where backward takes twice as long as forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.figures import timeline_figure
from dtkit.history.timeline import convert_simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtkit.schedules.schedule import Schedule
    from dtkit.schedules.simulator import Simulation


def draw_schedule(schedule: Schedule) -> Figure:
    """Draw a strip for each rank, in units of a forward pass."""
    simulation = schedule.simulate()
    spans = convert_simulation(simulation)
    figure, ax = timeline_figure.create_strip_figure(schedule.ranks)
    timeline_figure.draw_strips(ax, spans, 0.0, 1.0)
    patches = [*timeline_figure.make_legend_patches(spans), timeline_figure.make_idle_patch("waiting")]
    timeline_figure.draw_legend(figure, ax, patches)
    timeline_figure.format_axes(ax, schedule.ranks, "forward passes of a stage (backward takes two)")
    title = f"{schedule.name}: {schedule.micro_batches} micro-batches, planned"
    timeline_figure.draw_titles(ax, title, _describe_simulation(simulation))
    return figure


def _describe_simulation(simulation: Simulation) -> str:
    schedule = simulation.schedule
    known_formula = schedule.get_bubble_formula()
    formula = f" = {known_formula[0]}" if known_formula else ""
    *peaks, last_peak = map(str, simulation.peak_micro_batches)
    held = f"{', '.join(peaks)} and {last_peak}" if peaks else last_peak
    unit = "micro-batches" if schedule.stages == schedule.ranks else "micro-batches of a stage"
    return (
        f"time {simulation.makespan:g} · bubble {100 * simulation.bubble:.1f} %{formula} · "
        f"the nodes hold {held} {unit} at most"
    )
