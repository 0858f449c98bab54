"""Registration of the views of all results; :mod:`dtkit._util.views` imports this when the first result is shown.

Figures are imported when they are drawn, because text must not load matplotlib.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, TypeVar

from dtkit._util import views
from dtkit.dashboard.text import (
    benchmark_text,
    data_parallel_text,
    memory_text,
    pipeline_text,
    plan_text,
    profile_text,
    sharded_text,
)
from dtkit.data import partition_view
from dtkit.data.partition import Partition
from dtkit.explain.data_parallel import StepExplanation
from dtkit.explain.pipeline import PipelineExplanation
from dtkit.explain.sharded import ShardedExplanation
from dtkit.history.profile import Profile
from dtkit.history.timeline import Timeline
from dtkit.planning.cost_model import Benchmark
from dtkit.planning.memory_report import Memory
from dtkit.planning.plan import Plan
from dtkit.schedules.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

_Shown = TypeVar("_Shown")


def _register(
    shown_class: type[_Shown],
    draw: Callable[[_Shown], Figure],
    format_text: Callable[[_Shown], str] = repr,
    format_html: Callable[[_Shown], str] | None = None,
    alt: str = "the same as a figure",
) -> None:
    """Register the views of a class. Its HTML is `format_html` above the figure, which doesn't repeat its headline."""

    def format_page(shown: _Shown) -> str:
        from dtkit.dashboard.figures.render import format_img_tag

        text, figure = "" if format_html is None else format_html(shown), draw(shown)
        if html.escape(" ".join(figure.get_suptitle().split())) in text:
            figure.suptitle("")
        return f"<div>{text}{format_img_tag(figure, alt)}</div>"

    def render_png(shown: _Shown) -> bytes:
        from dtkit.dashboard.figures.render import render_notebook_png

        return render_notebook_png(draw(shown))

    views.register(shown_class, views.View(format_text, format_page, draw, render_png))


def _draw_step(explanation: StepExplanation) -> Figure:
    from dtkit.dashboard.figures.data_parallel_figure import draw_step

    return draw_step(explanation)


def _draw_pipeline_step(explanation: PipelineExplanation) -> Figure:
    from dtkit.dashboard.figures.pipeline_figure import draw_pipeline_step

    return draw_pipeline_step(explanation)


def _draw_sharded_step(explanation: ShardedExplanation) -> Figure:
    from dtkit.dashboard.figures.sharded_figure import draw_sharded_step

    return draw_sharded_step(explanation)


def _draw_plan(plan: Plan) -> Figure:
    from dtkit.dashboard.figures.plan_figure import draw_plan

    return draw_plan(plan)


def _draw_benchmark(benchmark: Benchmark) -> Figure:
    from dtkit.dashboard.figures.benchmark_figure import draw_benchmark

    return draw_benchmark(benchmark)


def _draw_memory(memory: Memory) -> Figure:
    from dtkit.dashboard.figures.memory_figure import draw_memory

    return draw_memory(memory)


def _draw_profile(profile: Profile) -> Figure:
    from dtkit.dashboard.figures.profile_figure import draw_profile

    return draw_profile(profile)


def _draw_timeline(timeline: Timeline) -> Figure:
    from dtkit.dashboard.figures.timeline_figure import draw_timeline

    return draw_timeline(timeline)


def _draw_schedule(schedule: Schedule) -> Figure:
    from dtkit.dashboard.figures.schedule_figure import draw_schedule

    return draw_schedule(schedule)


_STEP_ALT = "the step as a figure"
_register(StepExplanation, _draw_step, data_parallel_text.format_text, data_parallel_text.format_html, _STEP_ALT)
_register(PipelineExplanation, _draw_pipeline_step, pipeline_text.format_text, pipeline_text.format_html, _STEP_ALT)
_register(ShardedExplanation, _draw_sharded_step, sharded_text.format_text, sharded_text.format_html, _STEP_ALT)
_register(Plan, _draw_plan, plan_text.format_text, plan_text.format_html)
_register(Benchmark, _draw_benchmark, benchmark_text.format_text, benchmark_text.format_html)
_register(Memory, _draw_memory, memory_text.format_text, memory_text.format_html)
_register(Profile, _draw_profile, profile_text.format_text, profile_text.format_html)
_register(
    Partition,
    partition_view.draw_partition,
    format_html=partition_view.format_html,
    alt="rows and classes of each node",
)
_register(Timeline, _draw_timeline)
_register(Schedule, _draw_schedule)
