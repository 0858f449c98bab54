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

PARTS = (
    # (field of a row, heading, colour of its bar)
    ("sent_model", "as sent", "#b9b9b9"),
    ("parameters", "parameters", "#0072B2"),
    ("gradients", "gradients", "#56B4E9"),
    ("optimizer", "optimiser", "#CC79A7"),
    ("activations", "activations", "#E69F00"),
    ("overhead", "overhead", "#F3D9A4"),
)
_ALT = "the same as a figure"
_COMPUTING, _WAITING, _LIMIT = "#009E73", "#D55E00", "#1a1a1a"
_SHOWN_RANKS = 8  # of more, only the rank that has least to spare is listed for each strategy
_SHOWN_CELLS = 10  # ranks whose numbers are written into the heat map
_NAMED, _BREAK, _TITLE = 60, 36, 120  # letters: of strategies in a headline; in a line of a strategy, and of a title


# --- a plan -------------------------------------------------------------------------------------------------


def _headline(plan: Plan) -> str:
    """What was planned, and what fits."""
    return (
        f"Plan for {formatting.plain(plan.model, 60)}: {formatting.plural(plan.batch_size, 'sample')} per update on "
        f"{formatting.plural(plan.world_size, 'rank')}: {_verdict(plan.fitting, plan.strategies)}"
    )


def _verdict(fitting: Sequence[str], strategies: Sequence[str]) -> str:
    """Which strategies fit, by name where that is short."""
    if len(fitting) == len(strategies):
        return "all fit"
    names, many = ", ".join(fitting), len(fitting) > 1
    if len(names) > _NAMED:
        return f"{len(fitting)} of {len(strategies)} strategies {'fit' if many else 'fits'}"
    return f"{names or 'none'} fit" if many or not fitting else f"only {names} fits"


def _listed(plan: Plan) -> list[PlanRow]:
    if plan.world_size <= _SHOWN_RANKS:
        return list(plan.rows)
    return [tightest(plan.get_rows(name)) for name in plan.strategies]


def tightest(rows: Sequence[PlanRow]) -> PlanRow:
    """The row with least memory to spare."""
    return min(rows, key=lambda row: row.free - row.needed)


def _table(plan: Plan) -> list[list[str]]:
    """A header, and a line a row. The answer comes first; what it is made of may scroll out of sight."""
    names = [name for _, name, _ in PARTS]
    times = ["sent/step", "computing", "waiting", "step"]
    head = ["strategy", "rank", "samples", "needed", "free", "fits", *names, *times]
    return [head, *(_cells(row) for row in _listed(plan))]


def _cells(row: PlanRow) -> list[str]:
    return [
        row.strategy,
        str(row.rank),
        f"{row.rows:,}",
        formatting.size(row.needed),
        formatting.size(row.free),
        "yes" if row.fits else "NO",
        *(formatting.size(getattr(row, field)) for field, _, _ in PARTS),
        formatting.size(row.sent_bytes),
        *(formatting.duration(value) for value in (row.compute_s, row.communication_s, row.step_s)),
    ]


def _notes(plan: Plan) -> list[str]:
    more = plan.world_size > _SHOWN_RANKS
    return [*(["of each strategy, the rank with least to spare"] if more else []), *plan.notes]


def plan_text(plan: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join([_headline(plan), *formatting.columns(_table(plan), left=(0,)), *_notes(plan)])


def plan_page(plan: Plan) -> str:
    """The plan as HTML: a table and its figure."""
    from dtkit.dashboard.figures import image

    notes = "".join(f"<p>{html.escape(note)}</p>" for note in _notes(plan))
    shown = html_table(_table(plan)) + notes + image(plan_figure(plan), _ALT)
    return f"<div><p>{html.escape(_headline(plan))}</p>{shown}</div>"


def plan_figure(plan: Plan) -> Figure:
    """Memory of the tightest rank of each strategy against what is free, and the time of its step."""
    rows = [tightest(plan.get_rows(name)) for name in plan.strategies]
    figure = _new_figure(12.0, 2.1 + 0.42 * len(rows))
    memory, seconds = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_memory(memory, rows)
    _draw_time(seconds, rows)
    names = [textwrap.fill(formatting.plain(row.strategy, 80), _BREAK) for row in rows]
    memory.set_yticks(range(len(rows)), names, fontsize=8)
    memory.set_ylim(len(rows) - 0.5, -0.5)
    entitle(figure, _headline(plan))
    return figure


def _draw_memory(ax: Axes, rows: Sequence[PlanRow]) -> None:
    unit, one = formatting.unit_for(max(row.needed for row in rows), formatting.BYTES)
    left = [0.0] * len(rows)
    for field, name, colour in PARTS:
        part = [getattr(row, field) / one for row in rows]
        ax.barh(range(len(rows)), part, left=left, height=0.62, color=colour, label=name)
        left = [a + b for a, b in zip(left, part, strict=True)]
    shown = max(left)
    for y, row in enumerate(rows):
        free = row.free / one
        if free <= 3 * shown:  # where there is plenty, bars would vanish beside it
            ax.plot([free, free], [y - 0.42, y + 0.42], color=_LIMIT, linewidth=2, gid="free")
        else:
            ax.annotate(f"of {formatting.size(row.free)} free", (left[y], y), xytext=(5, 0), textcoords="offset points",
                        va="center", fontsize=8, color=_LIMIT)  # fmt: skip
        if not row.fits:
            ax.annotate("does not fit", (left[y], y), xytext=(5, 0), textcoords="offset points", va="center",
                        fontsize=8, fontweight="bold", color=_WAITING)  # fmt: skip
    ax.set_xlim(0, 1.35 * shown or 1)
    _panel(ax, "Memory per rank", f"{unit}, of the rank with least to spare; a black mark: free")
    _lengths(ax, len(PARTS))


def _draw_time(ax: Axes, rows: Sequence[PlanRow]) -> None:
    longest = max(row.step_s for row in rows)
    unit, one = formatting.unit_for(longest, formatting.SECONDS)
    computing = [(row.step_s - row.communication_s) / one for row in rows]
    waiting = [row.communication_s / one for row in rows]
    ax.barh(range(len(rows)), computing, height=0.62, color=_COMPUTING, label="computing, slowest rank")
    ax.barh(range(len(rows)), waiting, left=computing, height=0.62, color=_WAITING, label="communication not hidden")
    for y, row in enumerate(rows):
        sent = "what is sent not counted" if math.isnan(row.sent_bytes) else f"{formatting.size(row.sent_bytes)} sent"
        text = f"{formatting.duration(row.step_s)}, {sent}"
        ax.annotate(text, (row.step_s / one, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_xlim(0, 1.7 * longest / one or 1)
    _panel(ax, "Time per step", unit)
    _lengths(ax, 1)


def _lengths(ax: Axes, columns: int) -> None:
    """What bars are drawn along: plain numbers on the axis, and what the colours are below it."""
    from matplotlib.ticker import StrMethodFormatter

    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=columns, fontsize=7, frameon=False)


# --- a benchmark --------------------------------------------------------------------------------------------


def _benchmark_headline(found: Benchmark) -> str:
    rate = f"{sum(found.flops) / 1e9:,.0f} GFLOP/s in {found.dtype} together"
    head = f"Benchmark of {formatting.plural(found.world_size, 'rank')}, {found.backend}: {rate}"
    if not found.all_reduce_timings:
        return head
    return (
        f"{head}; an all-reduce takes {formatting.duration(found.all_reduce_timings[0][1])} at least and moves "
        f"{formatting.size(found.all_reduce_bytes_s)}/s per rank; {formatting.share(found.overlap)} of it hides "
        "behind computing"
    )


def _rank_table(found: Benchmark) -> list[list[str]]:
    head = ["rank", "GFLOP/s", "latency to others", "bandwidth to others"]
    rows = []
    for rank in range(found.world_size):
        latency = [v for v in found.latency_s[rank] if math.isfinite(v)]
        width = [v for v in found.bandwidth[rank] if math.isfinite(v)]
        there = (
            (f"{formatting.duration(min(latency))} to {formatting.duration(max(latency))}")
            if latency
            else formatting.NOTHING
        )
        speed = (f"{formatting.size(min(width))}/s to {formatting.size(max(width))}/s") if width else formatting.NOTHING
        rows.append([str(rank), formatting.rate(found.flops[rank] / 1e9), there, speed])
    return [head, *rows]


def _size_table(found: Benchmark) -> list[list[str]]:
    return [
        ["all-reduce of", *(formatting.size(size) for size, _ in found.all_reduce_timings)],
        ["takes", *(formatting.duration(seconds) for _, seconds in found.all_reduce_timings)],
    ]


def benchmark_text(found: Benchmark) -> str:
    """The benchmark as lines of text."""
    lines = [_benchmark_headline(found), *formatting.columns(_rank_table(found), left=(0,))]
    return "\n".join(lines + (formatting.columns(_size_table(found), left=(0,)) if found.all_reduce_timings else []))


def benchmark_page(found: Benchmark) -> str:
    """The benchmark as HTML: tables and the heat maps."""
    from dtkit.dashboard.figures import image

    sizes = html_table(_size_table(found)) if found.all_reduce_timings else ""
    head = f"<p>{html.escape(_benchmark_headline(found))}</p>"
    return f"<div>{head}{html_table(_rank_table(found))}{sizes}{image(benchmark_figure(found), _ALT)}</div>"


def benchmark_figure(found: Benchmark) -> Figure:
    """Heat maps from rank to rank, latency and bandwidth, and the matrix rate of each rank."""
    figure = _new_figure(11.0, 3.6)
    latency, width, rate = figure.subplots(1, 3)
    micro = [[1e6 * value for value in row] for row in found.latency_s]
    mega = [[value / 1e6 for value in row] for row in found.bandwidth]
    _draw_map(latency, micro, "Latency", "µs, one way", "Oranges")
    _draw_map(width, mega, "Bandwidth", "MB/s", "Blues")
    rate.bar(range(found.world_size), [flops / 1e9 for flops in found.flops], color=_COMPUTING, width=0.62)
    rate.set_xlabel("rank", fontsize=8)
    rate.set_xticks(range(found.world_size))
    _panel(rate, "Matrix rate", f"GFLOP/s, {found.dtype}")
    entitle(figure, f"Benchmark of {formatting.plural(found.world_size, 'rank')}, {found.backend}")
    return figure


def _draw_map(ax: Axes, values: list[list[float]], name: str, unit: str, colours: str) -> None:
    """From rank (row) to rank (column); the diagonal is empty."""
    finite = [value for row in values for value in row if math.isfinite(value)]
    ax.set_xticks(range(len(values)))
    ax.set_yticks(range(len(values)))
    _panel(ax, name, unit)
    ax.grid(visible=False)
    if not finite:
        ax.text(0.5, 0.5, "one rank has no links", transform=ax.transAxes, ha="center", va="center", fontsize=9)
        return
    top = max(finite)
    ax.imshow(values, cmap=colours, vmin=0, vmax=1.15 * top, interpolation="nearest")
    ax.set(xlabel="to rank", ylabel="from rank")
    if len(values) <= _SHOWN_CELLS:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                text = formatting.rate(value) if math.isfinite(value) else ""
                ax.text(
                    x, y, text, ha="center", va="center", fontsize=8, color="white" if value > 0.7 * top else "black"
                )


# --- shared -------------------------------------------------------------------------------------------------


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def entitle(figure: Figure, text: str) -> None:
    """A headline of any length above a figure."""
    from dtkit.dashboard.figures import INK

    text = textwrap.fill(text, _TITLE)
    figure.suptitle(text, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)


def _panel(ax: Axes, name: str, unit: str) -> None:
    """Light axes with a name on the left and a unit on the right."""
    from dtkit.dashboard.axes import INK, MUTED, tidy

    tidy(ax, "x" if name.endswith(("rank", "step")) else "y", INK)
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_title(unit, loc="right", fontsize=8, color=MUTED)


def html_table(rows: list[list[str]]) -> str:
    """The first column to the left, numbers to the right and never cut from their units."""
    head, *body = (_html_cells(row) for row in rows)
    lines = "".join("<tr>" + "".join(f"<td {cell}</td>" for cell in row) + "</tr>" for row in body)
    top = "".join(f"<th {cell}</th>" for cell in head)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def _html_cells(row: list[str]) -> list[str]:
    """The style and text of each cell. A long name may be broken, but not before `_BREAK` letters."""
    name = f'style="text-align: left; min-width: {min(len(row[0]), _BREAK)}ch">{html.escape(row[0])}'
    return [name, *(f'style="text-align: right; white-space: nowrap">{html.escape(cell)}' for cell in row[1:])]
