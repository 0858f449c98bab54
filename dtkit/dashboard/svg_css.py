"""The rules of the charts of :mod:`dtkit.dashboard.svg_chart`, but for the colors of series."""

CHART_CSS = """
svg.chart { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; overflow: visible; }
.chart text { fill: var(--muted); } .chart .grid { stroke: var(--line); } .chart .axis { stroke: var(--muted); }
.chart .series { fill: none; stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.chart .all { stroke: var(--ink); stroke-width: 1.9; } .chart .series.dashed { stroke-dasharray: 5 3; }
.chart .part { stroke-width: 1; opacity: 0.6; } .chart .kall, .chart .band.all { fill: var(--ink); }
.chart .band { stroke: none; } .chart .dash1 { stroke-dasharray: 7 3; } .chart .dash2 { stroke-dasharray: 2 3; }
.chart .dash3 { stroke-dasharray: 8 3 2 3; } .chart .dot { stroke-dasharray: none; }
.chart .dot { fill: var(--page); stroke-width: 1.4; } .chart .strip > line { stroke: var(--muted); opacity: 0; }
.chart .ring { fill: none; stroke: var(--ink); stroke-width: 1.3; }
.chart .best text { fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
.chart .strip > rect { fill: transparent; } .chart .strip:hover > line { opacity: 1; }
.chart .tip { display: none; pointer-events: none; } .chart .strip:hover .tip { display: inline; }
.chart .tip rect { fill: var(--page); stroke: var(--line); filter: drop-shadow(0 2px 5px rgb(0 0 0 / 0.25)); }
.chart .tip text { fill: var(--ink); font-variant-numeric: tabular-nums; } .chart .tip .head { font-weight: 700; }
.chart .tip .value { font-weight: 600; text-anchor: end; }
.legend { font-size: 12px; color: var(--muted); margin: 2px 0 0; padding: 0; list-style: none; }
.legend li { display: inline-block; margin-right: 14px; } .legend label { cursor: pointer; }
.legend input { position: absolute; opacity: 0; } .legend input:not(:checked) + span { text-decoration: line-through;
  opacity: 0.55; } .legend input:focus-visible + span { outline: 2px solid var(--accent); }
svg.sample { display: inline-block; width: 28px; height: 8px; margin-right: 3px; }
@media (max-width: 700px) { .scroll { --mark-width: 0px; } svg.sample { display: block; } } /* above the name */
.legend svg.chart { display: inline-block; width: 22px; height: 8px; margin-right: 5px; }
"""
