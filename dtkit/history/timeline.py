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

    from dtkit.schedules.schedule import Action, Schedule
    from dtkit.schedules.simulator import Simulation

SPAN = np.dtype(
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

KINDS = {"forward": "F", "backward": "B", "backward input": "I", "backward weight": "W"}
"""Phases of computing, and what they are called in a schedule."""
COMPUTING = tuple(KINDS)


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
    def micro_batches(self) -> int:
        """Micro-batches in a step; 0 where there is no pipeline."""
        return int(self.spans["micro_batch"].max(initial=-1)) + 1

    @property
    def piped(self) -> bool:
        """Whether micro-batches went through stages."""
        return self.micro_batches > 0

    def of(self, step: int, rank: int | None = None) -> np.ndarray:
        """The spans of a step, of one rank or of all."""
        chosen = self.spans["step"] == step
        found: np.ndarray = self.spans[chosen if rank is None else chosen & (self.spans["rank"] == rank)]
        return found

    def bubble(self, step: int | None = None) -> float:
        """The share of idle time in a step's pipeline as measured, over all ranks; the last step's unless told."""
        work = self._work(step)
        whole = self.seconds(step) * len(np.unique(work["rank"]))
        return 1 - float((work["end"] - work["begin"]).sum()) / whole

    def seconds(self, step: int | None = None) -> float:
        """From the first micro-batch's begin to the last one's end, in a step's pipeline."""
        work = self._work(step)
        return float(work["end"].max() - work["begin"].min())

    def _work(self, step: int | None) -> np.ndarray:
        spans = self.of(self.steps[-1] if step is None and self.steps else step or 0)
        work: np.ndarray = spans[np.isin(spans["phase"], COMPUTING) & (spans["stage"] >= 0)]
        if not len(work):
            raise ValueError("there is no pipeline in this timeline, so no bubble")
        return work

    @property
    def formula(self) -> tuple[str, float]:
        """(formula, value) of the bubble, for stages of equal cost and no cost of sending."""
        if self.schedule is not None:
            return self.schedule.get_bubble_formula() or ("equal stages", self.schedule.simulate().bubble)
        ranks = len(np.unique(self.spans["rank"][self.spans["stage"] >= 0]))
        return "(p-1)/(m+p-1)", (ranks - 1) / (self.micro_batches + ranks - 1)

    @property
    def source(self) -> str:
        """Where the ideal bubble is from: "formula" or "simulation"."""
        return "formula" if self.formula[0].startswith("(") else "simulation"

    def ideal_bubble(self) -> float:
        """What formula or simulation says, for stages of equal cost and no cost of sending."""
        return self.formula[1]

    def planned(self, step: int | None = None) -> Timeline:
        """What the schedule makes of the durations that were measured, were sending free: spans as if measured."""
        work = self._work(step)
        if self.schedule is None:
            return Timeline(np.empty(0, SPAN))
        ranks = self.schedule.ranks
        replicas = [work[work["rank"] // ranks == k] for k in np.unique(work["rank"] // ranks)]
        planned = [_planned(spans, self.schedule) for spans in replicas]
        return Timeline(np.concatenate(planned), schedule=self.schedule)

    def held(self, rank: int, step: int | None = None) -> int:
        """The most micro-batches whose activations a rank held at once: forward begun, backward not yet ended.

        With several stages on a rank, each of them counts.
        """
        spans = self.of(self.steps[-1] if step is None else step, rank)
        spans = spans[spans["micro_batch"] >= 0]
        begun: dict[tuple[int, int], float] = {}  # the loss is a span of its own, of the same forward pass
        for s in spans[spans["phase"] == "forward"]:
            begun.setdefault((int(s["stage"]), int(s["micro_batch"])), float(s["begin"]))
        moves = [(begin, 1) for begin in begun.values()]
        moves += [(float(s["end"]), -1) for s in spans if s["phase"] in {"backward", "backward weight"}]
        return int(np.max(np.cumsum([change for _, change in sorted(moves)]), initial=0))

    def memory(self, step: int | None = None) -> float:
        """The most that a rank held, in activations of one micro-batch of the whole model: stages count their part."""
        work = self._work(step)
        return max(self.held(int(rank), step) for rank in np.unique(work["rank"])) / (int(work["stage"].max()) + 1)

    def score(self, other: Timeline) -> Score:
        """How this schedule does against another one's timeline, such as that of 1F1B, on the same model."""
        times = [float(np.median([one.seconds(step) for step in one.steps])) for one in (self, other)]
        names = [one.schedule.name if one.schedule is not None else "other" for one in (self, other)]
        return Score(names[0], names[1], times[0], times[1], self.memory(), other.memory())

    def trace(self, path: str | Path) -> None:
        """Write a Chrome trace: a row per rank, and an arrow per message."""
        start = float(self.spans["begin"].min(initial=np.inf))
        step = "step" if len(self.steps) == 1 else "steps"
        events = _rows(self.ranks, f"{step} {', '.join(map(str, self.steps))}{self.title}")
        events += [_event(span, start) for span in self.spans]
        events += _arrows(self.spans, start, len(self.ranks) if self.schedule is None else self.schedule.ranks)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def figure(self) -> Figure:
        """A strip per rank: what it did when, in the last step."""
        from dtkit.dashboard import timeline_figure

        return timeline_figure.draw(self)

    def _repr_png_(self) -> bytes:
        from dtkit.dashboard import figures

        return figures.png(self.figure())

    def __repr__(self) -> str:
        if not len(self.spans):
            return "Timeline(empty)"
        steps = f"steps {self.steps[0]} to {self.steps[-1]}, {len(self.ranks)} ranks"
        if not self.piped:
            return f"Timeline({steps})"
        how = "the formula" if self.source == "formula" else self.source
        return f"Timeline({steps}, bubble {self.bubble():.1%} measured, {self.ideal_bubble():.1%} by {how})"


@dataclasses.dataclass(frozen=True)
class Score:
    """A schedule against another one: what it takes of the other's time and memory. Below 1 is better."""

    name: str
    other: str
    seconds: float
    """A step's pipeline, from the first begin to the last end; the median of the steps."""
    other_seconds: float
    held: float
    """The most that a rank holds, in activations of one micro-batch of the whole model."""
    other_held: float

    @property
    def time(self) -> float:
        """Of the other's."""
        return self.seconds / self.other_seconds

    @property
    def memory(self) -> float:
        """Of the other's."""
        return self.held / self.other_held

    def __repr__(self) -> str:
        return (
            f"{self.name} against {self.other}: time {self.time:.2f} ({1e3 * self.seconds:.0f} and "
            f"{1e3 * self.other_seconds:.0f} ms), memory {self.memory:.2f} ({self.held:g} and {self.other_held:g} "
            "micro-batches of the whole model)"
        )


def _planned(spans: np.ndarray, schedule: Schedule) -> np.ndarray:
    """The planned spans of one pipeline's ranks, from its measured ones of a step."""
    found: dict[tuple[str, int, int], float] = {}
    for span in spans:
        key = KINDS[str(span["phase"])], int(span["stage"]), int(span["micro_batch"])
        found[key] = found.get(key, 0.0) + float(span["end"] - span["begin"])
    played = schedule.simulate_with(lambda a: found.get((a.kind, a.stage, a.micro_batch), 0.0))
    made = spans_of(played, int(spans["step"][0]), schedule.ranks * int(spans["rank"][0] // schedule.ranks))
    start = float(spans["begin"].min())
    made["begin"] += start
    made["end"] += start
    return made


def spans_of(played: Simulation, step: int = 0, first_rank: int = 0) -> np.ndarray:
    """A simulation as spans, from time 0."""
    phases = {kind: phase for phase, kind in KINDS.items()}
    homes = played.schedule.stage_ranks

    def row(action: Action) -> tuple[object, ...]:
        where = action.stage, action.micro_batch
        return step, first_rank + homes[action.stage], phases[action.kind], *where, *played.intervals[action]

    return np.array([row(action) for action in played.intervals], SPAN)


def _rows(ranks: Sequence[int], title: str) -> list[dict[str, Any]]:
    """Names of the whole and of its rows, and the order of these: by name, rank 10 would come before rank 2."""

    def told(what: str, rank: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "pid": 0, "tid": rank, "name": what, "args": args}

    names = [told("thread_name", rank, name=f"rank {rank}") for rank in ranks]
    order = [told("thread_sort_index", rank, sort_index=rank) for rank in ranks]
    return [told("process_name", 0, name=title), *names, *order] if ranks else []


def _event(span: np.void, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": int(span["rank"]),
        "name": _name(span),
        "cat": message_times.kind(str(span["phase"])),
        "ts": 1e6 * (float(span["begin"]) - start),
        "dur": 1e6 * float(span["end"] - span["begin"]),
        "args": _args(span),
    }


def _args(span: np.void) -> dict[str, int]:
    known = ("step", "stage", "micro_batch") if span["micro_batch"] >= 0 else ("step",)
    return {name: int(span[name]) for name in known}


def _arrows(spans: np.ndarray, start: float, ranks: int) -> list[dict[str, Any]]:
    """From the begin of each message's sending to that of its receiving; within the boxes of these, as is asked for."""
    events: list[dict[str, Any]] = []
    for number, (sent, received) in enumerate(message_times.pairs(spans, ranks)):
        for ph, span in (("s", spans[sent]), ("f", spans[received])):
            arrow = {"ph": ph, "pid": 0, "tid": int(span["rank"]), "name": "message", "cat": "message", "id": number}
            ends = {"bp": "e"} if ph == "f" else {}
            events.append({**arrow, **ends, "ts": 1e6 * (float(span["begin"]) - start), "args": _args(span)})
    return events


def _name(span: np.void) -> str:
    if span["micro_batch"] < 0:
        return str(span["phase"])
    return f"{span['phase']} {span['micro_batch']} of stage {span['stage']}"


def merge(parts: Sequence[np.ndarray], offsets: Sequence[float] | None) -> np.ndarray:
    """All ranks' spans together, on rank 0's clock."""
    moved = []
    for rank, spans in enumerate(parts):
        own = spans.copy()
        if offsets is not None:
            own["begin"] -= offsets[rank]
            own["end"] -= offsets[rank]
        moved.append(own)
    return np.concatenate(moved) if moved else np.empty(0, SPAN)
