"""What every rank did when, in the last steps of a run: spans of time on one clock, and what they say of a pipeline.

The *bubble* is the share of the ranks' time, from the first micro-batch's begin to the last one's end, in which they
compute nothing. For p ranks and m micro-batches of equal cost it is (p - 1) / (m + p - 1) of the whole (Huang et al.,
NeurIPS 2019), and with v parts of the model on each rank (p - 1) / (v m + p - 1) (Narayanan et al., SC 2021). Where no
formula is known, the schedule is played through with backward twice as long as forward: that is "by simulation".

What a rank does between its passes is to "send" (its own messages), to "receive" (a message that the other stage has
sent), and to "wait" for a stage that has not come so far (:mod:`dtkit.history.message_times`).

What was *planned* is the schedule played through with the durations that were measured, and with sending free: what
the measured bubble has more than that went into sending, and into waiting for a busy machine.

Traces are in the JSON format of Chrome's tracing, which https://ui.perfetto.dev opens; an arrow leads from where a
message is sent to where it is received.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.history import message_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from dtkit.schedules.action import Action
    from dtkit.schedules.schedule import Schedule
    from dtkit.schedules.simulator import Simulation

SPAN_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("rank", "i4"),
        ("phase", "U16"),  # those of messages say which pass they belong to: "send forward"
        ("stage", "i4"),  # -1 outside of a pipeline, as is the micro-batch
        ("micro_batch", "i4"),
        ("begin", "f8"),
        ("end", "f8"),
    ]
)
"""One span of one rank; seconds on a clock that all ranks share."""

ACTION_KINDS = {"forward": "F", "backward": "B", "backward input": "I", "backward weight": "W"}
"""Phases of computing, and what they are called in a schedule."""
COMPUTE_PHASES = tuple(ACTION_KINDS)


class Timeline:
    """Spans of the last steps, of all ranks. Shows itself as a picture; :meth:`trace` writes it for Perfetto."""

    def __init__(self, spans: np.ndarray, *, schedule: Schedule | None = None, title: str = "") -> None:
        self.spans, self.schedule, self.title = spans, schedule, title

    @property
    def steps(self) -> list[int]:
        """The steps that there are spans of."""
        return [int(step) for step in np.unique(self.spans["step"])]

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are spans of."""
        return [int(rank) for rank in np.unique(self.spans["rank"])]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a step; 0 where there is no pipeline."""
        return int(self.spans["micro_batch"].max(initial=-1)) + 1

    @property
    def is_pipelined(self) -> bool:
        """Whether micro-batches went through stages."""
        return self.num_micro_batches > 0

    def select(self, step: int, rank: int | None = None) -> np.ndarray:
        """The spans of a step, of one rank or of all."""
        chosen = self.spans["step"] == step
        found: np.ndarray = self.spans[chosen if rank is None else chosen & (self.spans["rank"] == rank)]
        return found

    def measure_bubble(self, step: int | None = None) -> float:
        """The share of idle time in a step's pipeline as measured, over all ranks; the last step's unless told."""
        work = self._select_compute_spans(step)
        whole = self.measure_duration_s(step) * len(np.unique(work["rank"]))
        return 1 - float((work["end"] - work["begin"]).sum()) / whole

    def measure_duration_s(self, step: int | None = None) -> float:
        """From the first micro-batch's begin to the last one's end, in a step's pipeline."""
        work = self._select_compute_spans(step)
        return float(work["end"].max() - work["begin"].min())

    def _select_compute_spans(self, step: int | None) -> np.ndarray:
        spans = self.select(self.steps[-1] if step is None and self.steps else step or 0)
        work: np.ndarray = spans[np.isin(spans["phase"], COMPUTE_PHASES) & (spans["stage"] >= 0)]
        if not len(work):
            raise ValueError("there is no pipeline in this timeline, so no bubble")
        return work

    @property
    def ideal_bubble_formula(self) -> tuple[str, float]:
        """(formula, value) of the bubble, for stages of equal cost and no cost of sending."""
        if self.schedule is not None:
            return self.schedule.get_bubble_formula() or ("equal stages", self.schedule.simulate().bubble)
        ranks = len(np.unique(self.spans["rank"][self.spans["stage"] >= 0]))
        return "(p-1)/(m+p-1)", (ranks - 1) / (self.num_micro_batches + ranks - 1)

    @property
    def ideal_bubble_source(self) -> str:
        """Where the ideal bubble is from: "formula" or "simulation"."""
        return "formula" if self.ideal_bubble_formula[0].startswith("(") else "simulation"

    def get_ideal_bubble(self) -> float:
        """What formula or simulation says, for stages of equal cost and no cost of sending."""
        return self.ideal_bubble_formula[1]

    def simulate_schedule(self, step: int | None = None) -> Timeline:
        """What the schedule makes of the durations that were measured, were sending free: spans as if measured."""
        work = self._select_compute_spans(step)
        if self.schedule is None:
            return Timeline(np.empty(0, SPAN_DTYPE))
        ranks = self.schedule.ranks
        replicas = [work[work["rank"] // ranks == k] for k in np.unique(work["rank"] // ranks)]
        planned = [_simulate_spans(spans, self.schedule) for spans in replicas]
        return Timeline(np.concatenate(planned), schedule=self.schedule)

    def measure_peak_micro_batches(self, rank: int, step: int | None = None) -> int:
        """The most micro-batches whose activations a rank held at once: forward begun, backward not yet ended.

        With several stages on a rank, each of them counts.
        """
        spans = self.select(self.steps[-1] if step is None else step, rank)
        spans = spans[spans["micro_batch"] >= 0]
        begun: dict[tuple[int, int], float] = {}  # the loss is a span of its own, of the same forward pass
        for s in spans[spans["phase"] == "forward"]:
            begun.setdefault((int(s["stage"]), int(s["micro_batch"])), float(s["begin"]))
        moves = [(begin, 1) for begin in begun.values()]
        moves += [(float(s["end"]), -1) for s in spans if s["phase"] in {"backward", "backward weight"}]
        return int(np.max(np.cumsum([change for _, change in sorted(moves)]), initial=0))

    def measure_peak_activations(self, step: int | None = None) -> float:
        """The most that a rank held, in activations of one micro-batch of the whole model: stages count their part."""
        work = self._select_compute_spans(step)
        return max(self.measure_peak_micro_batches(int(rank), step) for rank in np.unique(work["rank"])) / (
            int(work["stage"].max()) + 1
        )

    def compare_with(self, other: Timeline) -> ScheduleComparison:
        """How this schedule does against another one's timeline, such as that of 1F1B, on the same model."""
        times = [float(np.median([one.measure_duration_s(step) for step in one.steps])) for one in (self, other)]
        names = [one.schedule.name if one.schedule is not None else "other" for one in (self, other)]
        return ScheduleComparison(
            names[0], names[1], times[0], times[1], self.measure_peak_activations(), other.measure_peak_activations()
        )

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a Chrome trace: a row per rank, and an arrow per message."""
        start = float(self.spans["begin"].min(initial=np.inf))
        step = "step" if len(self.steps) == 1 else "steps"
        events = _make_metadata_events(self.ranks, f"{step} {', '.join(map(str, self.steps))}{self.title}")
        events += [_make_span_event(span, start) for span in self.spans]
        events += _make_arrow_events(
            self.spans, start, len(self.ranks) if self.schedule is None else self.schedule.ranks
        )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def figure(self) -> Figure:
        """A strip per rank: what it did when, in the last step."""
        from dtkit.dashboard.figures import timeline_figure

        return timeline_figure.draw_timeline(self)

    def _repr_png_(self) -> bytes:
        from dtkit.dashboard.figures import run_figure

        return run_figure.render_png(self.figure())

    def __repr__(self) -> str:
        if not len(self.spans):
            return "Timeline(empty)"
        steps = f"steps {self.steps[0]} to {self.steps[-1]}, {len(self.ranks)} ranks"
        if not self.is_pipelined:
            return f"Timeline({steps})"
        how = "the formula" if self.ideal_bubble_source == "formula" else self.ideal_bubble_source
        return f"Timeline({steps}, bubble {self.measure_bubble():.1%} measured, {self.get_ideal_bubble():.1%} by {how})"


@dataclasses.dataclass(frozen=True)
class ScheduleComparison:
    """A schedule against another one: what it takes of the other's time and memory. Below 1 is better."""

    schedule_name: str
    other_name: str
    duration_s: float
    """A step's pipeline, from the first begin to the last end; the median of the steps."""
    other_duration_s: float
    peak_activations: float
    """The most that a rank holds, in activations of one micro-batch of the whole model."""
    other_peak_activations: float

    @property
    def time_ratio(self) -> float:
        """Of the other's."""
        return self.duration_s / self.other_duration_s

    @property
    def memory_ratio(self) -> float:
        """Of the other's."""
        return self.peak_activations / self.other_peak_activations

    def __repr__(self) -> str:
        return (
            f"{self.schedule_name} against {self.other_name}: time {self.time_ratio:.2f} ({1e3 * self.duration_s:.0f} and "
            f"{1e3 * self.other_duration_s:.0f} ms), memory {self.memory_ratio:.2f} ({self.peak_activations:g} and {self.other_peak_activations:g} "
            "micro-batches of the whole model)"
        )


def _simulate_spans(spans: np.ndarray, schedule: Schedule) -> np.ndarray:
    """The planned spans of one pipeline's ranks, from its measured ones of a step."""
    found: dict[tuple[str, int, int], float] = {}
    for span in spans:
        key = ACTION_KINDS[str(span["phase"])], int(span["stage"]), int(span["micro_batch"])
        found[key] = found.get(key, 0.0) + float(span["end"] - span["begin"])
    played = schedule.simulate_with(lambda a: found.get((a.kind, a.stage, a.micro_batch), 0.0))
    made = convert_simulation(played, int(spans["step"][0]), schedule.ranks * int(spans["rank"][0] // schedule.ranks))
    start = float(spans["begin"].min())
    made["begin"] += start
    made["end"] += start
    return made


def convert_simulation(simulation: Simulation, step: int = 0, first_rank: int = 0) -> np.ndarray:
    """A simulation as spans, from time 0."""
    phases = {kind: phase for phase, kind in ACTION_KINDS.items()}
    homes = simulation.schedule.stage_ranks

    def row(action: Action) -> tuple[object, ...]:
        where = action.stage, action.micro_batch
        return step, first_rank + homes[action.stage], phases[action.kind], *where, *simulation.intervals[action]

    return np.array([row(action) for action in simulation.intervals], SPAN_DTYPE)


def _make_metadata_events(ranks: Sequence[int], title: str) -> list[dict[str, Any]]:
    """Names of the whole and of its rows, and the order of these: by name, rank 10 would come before rank 2."""

    def told(what: str, rank: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "pid": 0, "tid": rank, "name": what, "args": args}

    names = [told("thread_name", rank, name=f"rank {rank}") for rank in ranks]
    order = [told("thread_sort_index", rank, sort_index=rank) for rank in ranks]
    return [told("process_name", 0, name=title), *names, *order] if ranks else []


def _make_span_event(span: np.void, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": int(span["rank"]),
        "name": _format_span_name(span),
        "cat": message_times.get_phase_kind(str(span["phase"])),
        "ts": 1e6 * (float(span["begin"]) - start),
        "dur": 1e6 * float(span["end"] - span["begin"]),
        "args": _make_event_args(span),
    }


def _make_event_args(span: np.void) -> dict[str, int]:
    known = ("step", "stage", "micro_batch") if span["micro_batch"] >= 0 else ("step",)
    return {name: int(span[name]) for name in known}


def _make_arrow_events(spans: np.ndarray, start: float, ranks_per_pipeline: int) -> list[dict[str, Any]]:
    """From the begin of each message's sending to that of its receiving; within the boxes of these, as is asked for."""
    events: list[dict[str, Any]] = []
    for number, (sent, received) in enumerate(message_times.pair_messages(spans, ranks_per_pipeline)):
        for ph, span in (("s", spans[sent]), ("f", spans[received])):
            arrow = {"ph": ph, "pid": 0, "tid": int(span["rank"]), "name": "message", "cat": "message", "id": number}
            ends = {"bp": "e"} if ph == "f" else {}
            events.append({**arrow, **ends, "ts": 1e6 * (float(span["begin"]) - start), "args": _make_event_args(span)})
    return events


def _format_span_name(span: np.void) -> str:
    if span["micro_batch"] < 0:
        return str(span["phase"])
    return f"{span['phase']} {span['micro_batch']} of stage {span['stage']}"


def merge_spans(spans_by_rank: Sequence[np.ndarray], clock_offsets: Sequence[float] | None) -> np.ndarray:
    """All ranks' spans together, on rank 0's clock."""
    moved = []
    for rank, spans in enumerate(spans_by_rank):
        own = spans.copy()
        if clock_offsets is not None:
            own["begin"] -= clock_offsets[rank]
            own["end"] -= clock_offsets[rank]
        moved.append(own)
    return np.concatenate(moved) if moved else np.empty(0, SPAN_DTYPE)
