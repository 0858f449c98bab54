"""A benchmark of engines as text and as HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text.table_page import TablePage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.planning.cost_model import Benchmark


def format_text(benchmark: Benchmark) -> str:
    """Return the benchmark as text."""
    return _make_page(benchmark).to_text()


def format_html(benchmark: Benchmark) -> str:
    """Return the benchmark as HTML."""
    return _make_page(benchmark).to_html()


def format_headline(benchmark: Benchmark) -> str:
    """Return how many ranks were measured, with which backend."""
    return f"Benchmark of {formatting.format_count(benchmark.world_size, 'node')}, {benchmark.backend}"


def _make_page(benchmark: Benchmark) -> TablePage:
    rate = f"{sum(benchmark.flops) / 1e9:,.0f} GFLOP/s in {benchmark.dtype} together"
    headline = f"{format_headline(benchmark)}: {rate}{_describe_all_reduce(benchmark)}"
    sizes = [_make_size_table(benchmark)] if benchmark.all_reduce_timings else []
    return TablePage(headline, [_make_rank_table(benchmark), *sizes])


def _describe_all_reduce(benchmark: Benchmark) -> str:
    if not benchmark.all_reduce_timings:
        return ""
    shortest = formatting.format_duration(benchmark.all_reduce_timings[0][1])
    bandwidth = formatting.format_bytes(benchmark.all_reduce_bytes_s)
    overlap = formatting.format_percent(benchmark.overlap)
    return (
        f"; an all-reduce takes {shortest} at least and moves {bandwidth}/s per node; {overlap} of it hides behind "
        "computing"
    )


def _make_rank_table(benchmark: Benchmark) -> Table:
    rows = [
        [
            str(rank),
            formatting.format_rate(flops / 1e9),
            _format_range(benchmark.latency_s[rank], formatting.format_duration),
            _format_range(benchmark.bandwidth[rank], lambda value: f"{formatting.format_bytes(value)}/s"),
        ]
        for rank, flops in enumerate(benchmark.flops)
    ]
    return Table(["node", "GFLOP/s", "latency to others", "bandwidth to others"], rows, {"node"})


def _format_range(values: Sequence[float], format_value: Callable[[float], str]) -> str:
    """Return the smallest and the largest finite value."""
    finite = [value for value in values if math.isfinite(value)]
    return f"{format_value(min(finite))} to {format_value(max(finite))}" if finite else formatting.UNKNOWN


def _make_size_table(benchmark: Benchmark) -> Table:
    timings = benchmark.all_reduce_timings
    header = ["all-reduce of", *(formatting.format_bytes(size) for size, _ in timings)]
    rows = [["takes", *(formatting.format_duration(seconds) for _, seconds in timings)]]
    if benchmark.direct_sum_timings:
        direct = dict(benchmark.direct_sum_timings)
        sums = (
            formatting.format_duration(direct[size]) if size in direct else formatting.UNKNOWN for size, _ in timings
        )
        rows.append(["directly on one host", *sums])
    return Table(header, rows, header[:1])
