"""Plans and benchmarks as text, as HTML and as figures. They are read only, and never measured here."""

from __future__ import annotations

import html
import math
import textwrap
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.planning.cost_model import Benchmark, Plan, PlanRow

MEMORY_PARTS = (
    # (field of a row, heading, colour of its bar)
    ("sent_model", "as sent", "#b9b9b9"),
    ("parameters", "parameters", "#0072B2"),
    ("gradients", "gradients", "#56B4E9"),
    ("optimizer", "optimiser", "#CC79A7"),
    ("activations", "activations", "#E69F00"),
    ("overhead", "overhead", "#F3D9A4"),
)
_ALT_TEXT = "the same as a figure"
_COMPUTE_COLOR, _COMMUNICATION_COLOR, _LIMIT_COLOR = "#009E73", "#D55E00", "#1a1a1a"
_MAX_SHOWN_RANKS = 8  # of more, only the rank that has least to spare is listed for each strategy
_MAX_LABELED_RANKS = 10  # ranks whose numbers are written into the heat map
_MAX_NAMES_CHARS, _NAME_WRAP_CHARS, _TITLE_WRAP_CHARS = (
    60,
    36,
    120,
)  # letters: of strategies in a headline; in a line of a strategy, and of a title


# --- a plan -------------------------------------------------------------------------------------------------


def _format_plan_headline(plan: Plan) -> str:
    """What was planned, and what fits."""
    return (
        f"Plan for {formatting.sanitize_text(plan.model, 60)}: {formatting.format_count(plan.batch_size, 'sample')} per update on "
        f"{formatting.format_count(plan.world_size, 'rank')}: {_describe_fit(plan.fitting, plan.strategies)}"
    )


def _describe_fit(fitting: Sequence[str], strategies: Sequence[str]) -> str:
    """Which strategies fit, by name where that is short."""
    if len(fitting) == len(strategies):
        return "all fit"
    names, many = ", ".join(fitting), len(fitting) > 1
    if len(names) > _MAX_NAMES_CHARS:
        return f"{len(fitting)} of {len(strategies)} strategies {'fit' if many else 'fits'}"
    return f"{names or 'none'} fit" if many or not fitting else f"only {names} fits"


def _select_plan_rows(plan: Plan) -> list[PlanRow]:
    if plan.world_size <= _MAX_SHOWN_RANKS:
        return list(plan.rows)
    return [find_tightest_row(plan.get_rows(name)) for name in plan.strategies]


def find_tightest_row(rows: Sequence[PlanRow]) -> PlanRow:
    """The row with least memory to spare."""
    return min(rows, key=lambda row: row.free - row.needed)


def _format_plan_table(plan: Plan) -> list[list[str]]:
    """A header, and a line a row. The answer comes first; what it is made of may scroll out of sight."""
    names = [name for _, name, _ in MEMORY_PARTS]
    times = ["sent/step", "computing", "waiting", "step"]
    head = ["strategy", "rank", "samples", "needed", "free", "fits", *names, *times]
    return [head, *(_format_plan_row(row) for row in _select_plan_rows(plan))]


def _format_plan_row(row: PlanRow) -> list[str]:
    return [
        row.strategy,
        str(row.rank),
        f"{row.rows:,}",
        formatting.format_bytes(row.needed),
        formatting.format_bytes(row.free),
        "yes" if row.fits else "NO",
        *(formatting.format_bytes(getattr(row, field)) for field, _, _ in MEMORY_PARTS),
        formatting.format_bytes(row.sent_bytes),
        *(formatting.format_duration(value) for value in (row.compute_s, row.communication_s, row.step_s)),
    ]


def _format_plan_notes(plan: Plan) -> list[str]:
    more = plan.world_size > _MAX_SHOWN_RANKS
    return [*(["of each strategy, the rank with least to spare"] if more else []), *plan.notes]


def format_plan_text(plan: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join(
        [
            _format_plan_headline(plan),
            *formatting.format_columns(_format_plan_table(plan), left_aligned=(0,)),
            *_format_plan_notes(plan),
        ]
    )


def format_plan_html(plan: Plan) -> str:
    """The plan as HTML: a table and its figure."""
    from dtkit.dashboard.figures.run_figure import format_img_tag

    notes = "".join(f"<p>{html.escape(note)}</p>" for note in _format_plan_notes(plan))
    shown = format_html_table(_format_plan_table(plan)) + notes + format_img_tag(draw_plan(plan), _ALT_TEXT)
    return f"<div><p>{html.escape(_format_plan_headline(plan))}</p>{shown}</div>"


def draw_plan(plan: Plan) -> Figure:
    """Memory of the tightest rank of each strategy against what is free, and the time of its step."""
    rows = [find_tightest_row(plan.get_rows(name)) for name in plan.strategies]
    figure = _create_figure(12.0, 2.1 + 0.42 * len(rows))
    memory, seconds = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_memory(memory, rows)
    _draw_time(seconds, rows)
    names = [textwrap.fill(formatting.sanitize_text(row.strategy, 80), _NAME_WRAP_CHARS) for row in rows]
    memory.set_yticks(range(len(rows)), names, fontsize=8)
    memory.set_ylim(len(rows) - 0.5, -0.5)
    set_figure_title(figure, _format_plan_headline(plan))
    return figure


def _draw_memory(ax: Axes, rows: Sequence[PlanRow]) -> None:
    unit, one = formatting.choose_unit(max(row.needed for row in rows), formatting.BYTE_UNITS)
    left = [0.0] * len(rows)
    for field, name, colour in MEMORY_PARTS:
        part = [getattr(row, field) / one for row in rows]
        ax.barh(range(len(rows)), part, left=left, height=0.62, color=colour, label=name)
        left = [a + b for a, b in zip(left, part, strict=True)]
    shown = max(left)
    for y, row in enumerate(rows):
        free = row.free / one
        if free <= 3 * shown:  # where there is plenty, bars would vanish beside it
            ax.plot([free, free], [y - 0.42, y + 0.42], color=_LIMIT_COLOR, linewidth=2, gid="free")
        else:
            ax.annotate(f"of {formatting.format_bytes(row.free)} free", (left[y], y), xytext=(5, 0), textcoords="offset points",
                        va="center", fontsize=8, color=_LIMIT_COLOR)  # fmt: skip
        if not row.fits:
            ax.annotate("does not fit", (left[y], y), xytext=(5, 0), textcoords="offset points", va="center",
                        fontsize=8, fontweight="bold", color=_COMMUNICATION_COLOR)  # fmt: skip
    ax.set_xlim(0, 1.35 * shown or 1)
    _style_panel(ax, "Memory per rank", f"{unit}, of the rank with least to spare; a black mark: free")
    _format_bar_axis(ax, len(MEMORY_PARTS))


def _draw_time(ax: Axes, rows: Sequence[PlanRow]) -> None:
    longest = max(row.step_s for row in rows)
    unit, one = formatting.choose_unit(longest, formatting.SECOND_UNITS)
    computing = [(row.step_s - row.communication_s) / one for row in rows]
    waiting = [row.communication_s / one for row in rows]
    ax.barh(range(len(rows)), computing, height=0.62, color=_COMPUTE_COLOR, label="computing, slowest rank")
    ax.barh(
        range(len(rows)),
        waiting,
        left=computing,
        height=0.62,
        color=_COMMUNICATION_COLOR,
        label="communication not hidden",
    )
    for y, row in enumerate(rows):
        sent = (
            "what is sent not counted"
            if math.isnan(row.sent_bytes)
            else f"{formatting.format_bytes(row.sent_bytes)} sent"
        )
        text = f"{formatting.format_duration(row.step_s)}, {sent}"
        ax.annotate(text, (row.step_s / one, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_xlim(0, 1.7 * longest / one or 1)
    _style_panel(ax, "Time per step", unit)
    _format_bar_axis(ax, 1)


def _format_bar_axis(ax: Axes, legend_columns: int) -> None:
    """What bars are drawn along: plain numbers on the axis, and what the colours are below it."""
    from matplotlib.ticker import StrMethodFormatter

    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=legend_columns, fontsize=7, frameon=False)


# --- a benchmark --------------------------------------------------------------------------------------------


def _format_benchmark_headline(benchmark: Benchmark) -> str:
    rate = f"{sum(benchmark.flops) / 1e9:,.0f} GFLOP/s in {benchmark.dtype} together"
    head = f"Benchmark of {formatting.format_count(benchmark.world_size, 'rank')}, {benchmark.backend}: {rate}"
    if not benchmark.all_reduce_timings:
        return head
    return (
        f"{head}; an all-reduce takes {formatting.format_duration(benchmark.all_reduce_timings[0][1])} at least and moves "
        f"{formatting.format_bytes(benchmark.all_reduce_bytes_s)}/s per rank; {formatting.format_percent(benchmark.overlap)} of it hides "
        "behind computing"
    )


def _format_rank_table(benchmark: Benchmark) -> list[list[str]]:
    head = ["rank", "GFLOP/s", "latency to others", "bandwidth to others"]
    rows = []
    for rank in range(benchmark.world_size):
        latency = [v for v in benchmark.latency_s[rank] if math.isfinite(v)]
        width = [v for v in benchmark.bandwidth[rank] if math.isfinite(v)]
        there = (
            (f"{formatting.format_duration(min(latency))} to {formatting.format_duration(max(latency))}")
            if latency
            else formatting.UNKNOWN
        )
        speed = (
            (f"{formatting.format_bytes(min(width))}/s to {formatting.format_bytes(max(width))}/s")
            if width
            else formatting.UNKNOWN
        )
        rows.append([str(rank), formatting.format_rate(benchmark.flops[rank] / 1e9), there, speed])
    return [head, *rows]


def _format_size_table(benchmark: Benchmark) -> list[list[str]]:
    return [
        ["all-reduce of", *(formatting.format_bytes(size) for size, _ in benchmark.all_reduce_timings)],
        ["takes", *(formatting.format_duration(seconds) for _, seconds in benchmark.all_reduce_timings)],
    ]


def format_benchmark_text(benchmark: Benchmark) -> str:
    """The benchmark as lines of text."""
    lines = [
        _format_benchmark_headline(benchmark),
        *formatting.format_columns(_format_rank_table(benchmark), left_aligned=(0,)),
    ]
    return "\n".join(
        lines
        + (
            formatting.format_columns(_format_size_table(benchmark), left_aligned=(0,))
            if benchmark.all_reduce_timings
            else []
        )
    )


def format_benchmark_html(benchmark: Benchmark) -> str:
    """The benchmark as HTML: tables and the heat maps."""
    from dtkit.dashboard.figures.run_figure import format_img_tag

    sizes = format_html_table(_format_size_table(benchmark)) if benchmark.all_reduce_timings else ""
    head = f"<p>{html.escape(_format_benchmark_headline(benchmark))}</p>"
    return f"<div>{head}{format_html_table(_format_rank_table(benchmark))}{sizes}{format_img_tag(draw_benchmark(benchmark), _ALT_TEXT)}</div>"


def draw_benchmark(benchmark: Benchmark) -> Figure:
    """Heat maps from rank to rank, latency and bandwidth, and the matrix rate of each rank."""
    figure = _create_figure(11.0, 3.6)
    latency, width, rate = figure.subplots(1, 3)
    micro = [[1e6 * value for value in row] for row in benchmark.latency_s]
    mega = [[value / 1e6 for value in row] for row in benchmark.bandwidth]
    _draw_heat_map(latency, micro, "Latency", "µs, one way", "Oranges")
    _draw_heat_map(width, mega, "Bandwidth", "MB/s", "Blues")
    rate.bar(range(benchmark.world_size), [flops / 1e9 for flops in benchmark.flops], color=_COMPUTE_COLOR, width=0.62)
    rate.set_xlabel("rank", fontsize=8)
    rate.set_xticks(range(benchmark.world_size))
    _style_panel(rate, "Matrix rate", f"GFLOP/s, {benchmark.dtype}")
    set_figure_title(
        figure, f"Benchmark of {formatting.format_count(benchmark.world_size, 'rank')}, {benchmark.backend}"
    )
    return figure


def _draw_heat_map(ax: Axes, values: list[list[float]], name: str, unit: str, colormap: str) -> None:
    """From rank (row) to rank (column); the diagonal is empty."""
    finite = [value for row in values for value in row if math.isfinite(value)]
    ax.set_xticks(range(len(values)))
    ax.set_yticks(range(len(values)))
    _style_panel(ax, name, unit)
    ax.grid(visible=False)
    if not finite:
        ax.text(0.5, 0.5, "one rank has no links", transform=ax.transAxes, ha="center", va="center", fontsize=9)
        return
    top = max(finite)
    ax.imshow(values, cmap=colormap, vmin=0, vmax=1.15 * top, interpolation="nearest")
    ax.set(xlabel="to rank", ylabel="from rank")
    if len(values) <= _MAX_LABELED_RANKS:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                text = formatting.format_rate(value) if math.isfinite(value) else ""
                ax.text(
                    x, y, text, ha="center", va="center", fontsize=8, color="white" if value > 0.7 * top else "black"
                )


# --- shared -------------------------------------------------------------------------------------------------


def _create_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_figure_title(figure: Figure, text: str) -> None:
    """A headline of any length above a figure."""
    from dtkit.dashboard.figures.style import TEXT_COLOR

    text = textwrap.fill(text, _TITLE_WRAP_CHARS)
    figure.suptitle(text, x=0.012, ha="left", fontsize=11, fontweight="bold", color=TEXT_COLOR, parse_math=False)


def _style_panel(ax: Axes, name: str, unit: str) -> None:
    """Light axes with a name on the left and a unit on the right."""
    from dtkit.dashboard.figures.style import MUTED_COLOR, TEXT_COLOR, style_axes

    style_axes(ax, "x" if name.endswith(("rank", "step")) else "y", TEXT_COLOR)
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR)
    ax.set_title(unit, loc="right", fontsize=8, color=MUTED_COLOR)


def format_html_table(rows: list[list[str]]) -> str:
    """The first column to the left, numbers to the right and never cut from their units."""
    head, *body = (_format_html_cells(row) for row in rows)
    lines = "".join("<tr>" + "".join(f"<td {cell}</td>" for cell in row) + "</tr>" for row in body)
    top = "".join(f"<th {cell}</th>" for cell in head)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def _format_html_cells(row: list[str]) -> list[str]:
    """The style and text of each cell. A long name may be broken, but not before `_NAME_WRAP_CHARS` letters."""
    name = f'style="text-align: left; min-width: {min(len(row[0]), _NAME_WRAP_CHARS)}ch">{html.escape(row[0])}'
    return [name, *(f'style="text-align: right; white-space: nowrap">{html.escape(cell)}' for cell in row[1:])]
