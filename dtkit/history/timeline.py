"""Timelines: spans of all ranks in the last steps of a run, on one clock, and the bubble of a pipeline.

The *bubble* is the ranks' idle share of the time from the first micro-batch's begin to the last one's end. For p ranks
and m micro-batches of equal cost it is (p - 1) / (m + p - 1) (Huang et al., NeurIPS 2019). With v stages on each rank
it is (p - 1) / (v m + p - 1) (Narayanan et al., SC 2021). Where no formula is known, the schedule is simulated with a
backward that takes twice as long as forward.

Between its passes a rank sends, receives, or waits for another stage (:mod:`dtkit.history.comm_time`).

The *planned* timeline is the schedule simulated with the measured durations and with free sending. The difference from
the measured bubble is the time for sending, and for waiting on a busy machine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import views
from dtkit._util.arguments import check_path, explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.suffixes import CHROME_TRACE, check_suffix
from dtkit.history.chrome_trace import build_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit._util.views import Figure
    from dtkit.schedules.action import Action
    from dtkit.schedules.schedule import Schedule
    from dtkit.schedules.simulator import Simulation

SPAN_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("rank", "i4"),
        ("phase", "U16"),  # a message's phase names its pass: "send forward"
        ("stage", "i4"),  # -1 outside of a pipeline, like micro_batch
        ("micro_batch", "i4"),
        ("begin", "f8"),
        ("end", "f8"),
    ]
)
"""Span of one rank, in seconds on a clock that all ranks share."""

ACTION_KINDS = {"forward": "F", "backward": "B", "backward input": "I", "backward weight": "W"}
"""Compute phases, and their kinds of action in a schedule."""
COMPUTE_PHASES = tuple(ACTION_KINDS)


@suggest_attributes("timeline")
@explain_arguments
class Timeline:
    """Spans of all ranks in the last steps. :meth:`figure` draws it, :meth:`export_chrome_trace` writes it."""

    def __init__(self, spans: np.ndarray, *, schedule: Schedule | None = None, title: str = "") -> None:
        self.spans, self.schedule, self.title = spans, schedule, title

    @property
    def steps(self) -> list[int]:
        """Steps that have spans."""
        return [int(step) for step in np.unique(self.spans["step"])]

    @property
    def ranks(self) -> list[int]:
        """Ranks that have spans."""
        return [int(rank) for rank in np.unique(self.spans["rank"])]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a step; 0 without a pipeline."""
        return int(self.spans["micro_batch"].max(initial=-1)) + 1

    @property
    def is_pipelined(self) -> bool:
        """Whether micro-batches went through stages."""
        return self.num_micro_batches > 0

    def select_spans(self, step: int, rank: int | None = None) -> np.ndarray:
        """Return the spans of a step, of one rank or of all."""
        mask = self.spans["step"] == step
        selected: np.ndarray = self.spans[mask if rank is None else mask & (self.spans["rank"] == rank)]
        return selected

    def measure_bubble(self, step: int | None = None) -> float:
        """Return the measured share of idle time in a step's pipeline, over all ranks (default: the last step)."""
        work = self._select_compute_spans(step)
        total_s = self.measure_duration_s(step) * len(np.unique(work["rank"]))
        return 1 - float((work["end"] - work["begin"]).sum()) / total_s

    def measure_duration_s(self, step: int | None = None) -> float:
        """Return the time from the begin of the first micro-batch to the end of the last one."""
        work = self._select_compute_spans(step)
        return float(work["end"].max() - work["begin"].min())

    def _select_compute_spans(self, step: int | None) -> np.ndarray:
        spans = self.select_spans(self.steps[-1] if step is None and self.steps else step or 0)
        work: np.ndarray = spans[np.isin(spans["phase"], COMPUTE_PHASES) & (spans["stage"] >= 0)]
        if not len(work):
            raise ValueError("this timeline has no pipeline, so it has no bubble; train with dtkit.Pipeline")
        return work

    @property
    def ideal_bubble_formula(self) -> tuple[str, float]:
        """Formula and value of the bubble for stages of equal cost and free sending."""
        if self.schedule is not None:
            return self.schedule.get_bubble_formula() or ("equal stages", self.schedule.simulate().bubble)
        ranks = len(np.unique(self.spans["rank"][self.spans["stage"] >= 0]))
        return "(p-1)/(m+p-1)", (ranks - 1) / (self.num_micro_batches + ranks - 1)

    @property
    def ideal_bubble_source(self) -> str:
        """Source of the ideal bubble: "formula" or "simulation"."""
        return "formula" if self.ideal_bubble_formula[0].startswith("(") else "simulation"

    def get_ideal_bubble(self) -> float:
        """Return the bubble for stages of equal cost and free sending, by formula or simulation."""
        return self.ideal_bubble_formula[1]

    def simulate_schedule(self, step: int | None = None) -> Timeline:
        """Return the planned timeline: the schedule with the measured durations and free sending."""
        work = self._select_compute_spans(step)
        if self.schedule is None:
            return Timeline(np.empty(0, SPAN_DTYPE))
        ranks = self.schedule.ranks
        replicas = [work[work["rank"] // ranks == k] for k in np.unique(work["rank"] // ranks)]
        planned = [_simulate_spans(spans, self.schedule) for spans in replicas]
        return Timeline(np.concatenate(planned), schedule=self.schedule)

    def measure_peak_micro_batches(self, rank: int, step: int | None = None) -> int:
        """Return the most micro-batches with activations on a rank: forward has begun, backward has not ended.

        Each stage of the rank counts.
        """
        spans = self.select_spans(self.steps[-1] if step is None else step, rank)
        spans = spans[spans["micro_batch"] >= 0]
        begun: dict[tuple[int, int], float] = {}  # the loss is a second forward span of the same pass
        for s in spans[spans["phase"] == "forward"]:
            begun.setdefault((int(s["stage"]), int(s["micro_batch"])), float(s["begin"]))
        changes = [(begin, 1) for begin in begun.values()]
        changes += [(float(s["end"]), -1) for s in spans if s["phase"] in {"backward", "backward weight"}]
        return int(np.max(np.cumsum([change for _, change in sorted(changes)]), initial=0))

    def measure_peak_activations(self, step: int | None = None) -> float:
        """Return the largest amount on any rank, in activations of one micro-batch of the whole model."""
        work = self._select_compute_spans(step)
        return max(self.measure_peak_micro_batches(int(rank), step) for rank in np.unique(work["rank"])) / (
            int(work["stage"].max()) + 1
        )

    def compare_with(self, other: Timeline) -> ScheduleComparison:
        """Compare this schedule with another one on the same model, such as 1F1B."""
        names = [each.schedule.name if each.schedule is not None else "other" for each in (self, other)]
        durations = [float(np.median([each.measure_duration_s(step) for step in each.steps])) for each in (self, other)]
        peaks = [each.measure_peak_activations() for each in (self, other)]
        return ScheduleComparison(names[0], names[1], durations[0], durations[1], peaks[0], peaks[1])

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a Chrome trace: a row for each rank, and an arrow for each message."""
        check_path(path)
        check_suffix("export_chrome_trace(", path, CHROME_TRACE)
        noun = "step" if len(self.steps) == 1 else "steps"
        title = f"{noun} {', '.join(map(str, self.steps))}{self.title}"
        ranks_per_pipeline = len(self.ranks) if self.schedule is None else self.schedule.ranks
        Path(path).write_text(json.dumps(build_trace(self.spans, ranks_per_pipeline, title)), encoding="utf-8")

    def figure(self) -> Figure:
        """Return a figure of the last step: a strip for each rank."""
        return views.draw(self)

    def _repr_png_(self) -> bytes:
        return views.render_png(self)

    def __repr__(self) -> str:
        if not len(self.spans):
            return "Timeline(empty)"
        steps = f"steps {self.steps[0]} to {self.steps[-1]}, {len(self.ranks)} ranks"
        if not self.is_pipelined:
            return f"Timeline({steps})"
        source = "the formula" if self.ideal_bubble_source == "formula" else self.ideal_bubble_source
        measured, ideal = 100 * self.measure_bubble(), 100 * self.get_ideal_bubble()
        bubbles = f"bubble {measured:.1f} % measured, {ideal:.1f} % by {source}"
        return f"Timeline({steps}, {bubbles})"


@dataclasses.dataclass(frozen=True)
class ScheduleComparison:
    """Time and memory of a schedule, relative to another one. Ratios below 1 are better."""

    schedule_name: str
    other_name: str
    duration_s: float
    """Median over the steps, from the first begin to the last end."""
    other_duration_s: float
    peak_activations: float
    """Largest amount on any rank, in activations of one micro-batch of the whole model."""
    other_peak_activations: float

    @property
    def time_ratio(self) -> float:
        """Time of this schedule, divided by the other's."""
        return self.duration_s / self.other_duration_s

    @property
    def memory_ratio(self) -> float:
        """Activation memory of this schedule, divided by the other's."""
        return self.peak_activations / self.other_peak_activations

    def __repr__(self) -> str:
        times = f"{1e3 * self.duration_s:.0f} and {1e3 * self.other_duration_s:.0f} ms"
        peaks = f"{self.peak_activations:g} and {self.other_peak_activations:g} micro-batches of the whole model"
        return (
            f"{self.schedule_name} against {self.other_name}: time {self.time_ratio:.2f} ({times}), "
            f"memory {self.memory_ratio:.2f} ({peaks})"
        )


def _simulate_spans(spans: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Return the planned spans of one pipeline in one step, from its measured ones."""
    durations: dict[tuple[str, int, int], float] = {}
    for span in spans:
        key = ACTION_KINDS[str(span["phase"])], int(span["stage"]), int(span["micro_batch"])
        durations[key] = durations.get(key, 0.0) + float(span["end"] - span["begin"])
    simulation = schedule.simulate_with(lambda a: durations.get((a.kind, a.stage, a.micro_batch), 0.0))
    first_rank = schedule.ranks * int(spans["rank"][0] // schedule.ranks)
    planned = convert_simulation(simulation, int(spans["step"][0]), first_rank)
    start = float(spans["begin"].min())
    planned["begin"] += start
    planned["end"] += start
    return planned


def convert_simulation(simulation: Simulation, step: int = 0, first_rank: int = 0) -> np.ndarray:
    """Return the spans of a simulation, which begin at time 0."""
    phases = {kind: phase for phase, kind in ACTION_KINDS.items()}
    stage_ranks = simulation.schedule.stage_ranks

    def make_row(action: Action) -> tuple[object, ...]:
        place = action.stage, action.micro_batch
        return step, first_rank + stage_ranks[action.stage], phases[action.kind], *place, *simulation.intervals[action]

    return np.array([make_row(action) for action in simulation.intervals], SPAN_DTYPE)


def merge_spans(spans_by_rank: Sequence[np.ndarray], clock_offsets: Sequence[float] | None) -> np.ndarray:
    """Return the spans of all ranks on the clock of rank 0."""
    shifted = []
    for rank, spans in enumerate(spans_by_rank):
        rank_spans = spans.copy()
        if clock_offsets is not None:
            rank_spans["begin"] -= clock_offsets[rank]
            rank_spans["end"] -= clock_offsets[rank]
        shifted.append(rank_spans)
    return np.concatenate(shifted) if shifted else np.empty(0, SPAN_DTYPE)
