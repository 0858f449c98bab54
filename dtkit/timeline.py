"""What every rank did when, in the last steps of a run: spans of time on one clock, and what they say of a pipeline.

The *bubble* is the share of the ranks' time, from the first micro-batch's begin to the last one's end, in which they
compute nothing. For p ranks and m micro-batches of equal cost it is (p - 1) / (m + p - 1) of the whole (Huang et al.,
NeurIPS 2019), and with v parts of the model on each rank (p - 1) / (v m + p - 1) (Narayanan et al., SC 2021).

Traces are in the JSON format of Chrome's tracing, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

SPAN = np.dtype(
    [
        ("step", "i4"),
        ("rank", "i4"),
        ("phase", "U16"),
        ("stage", "i4"),  # -1 outside of a pipeline, as is the micro-batch
        ("micro_batch", "i4"),
        ("begin", "f8"),
        ("end", "f8"),
    ]
)
"""One span of one rank; seconds on a clock that all ranks share."""

COMPUTING = ("forward", "backward", "backward input", "backward weight")


class Timeline:
    """Spans of the last steps, of all ranks. Shows itself as a picture; :meth:`trace` writes it for Perfetto."""

    def __init__(self, spans: np.ndarray, *, parts_per_rank: int = 1, title: str = "") -> None:
        self.spans = spans
        self.parts_per_rank, self.title = parts_per_rank, title

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
        spans = self.of(self.steps[-1] if step is None else step)
        work = spans[np.isin(spans["phase"], COMPUTING) & (spans["stage"] >= 0)]
        if not len(work):
            raise ValueError("there is no pipeline in this timeline, so no bubble")
        whole = float(work["end"].max() - work["begin"].min()) * len(np.unique(work["rank"]))
        return 1 - float((work["end"] - work["begin"]).sum()) / whole

    def ideal_bubble(self) -> float:
        """What the formula says, for stages of equal cost and no cost of sending."""
        ranks = len(np.unique(self.spans["rank"][self.spans["stage"] >= 0]))
        return (ranks - 1) / (self.parts_per_rank * self.micro_batches + ranks - 1)

    def held(self, rank: int, step: int | None = None) -> int:
        """The most micro-batches whose activations a rank held at once: forward begun, backward not yet ended."""
        spans = self.of(self.steps[-1] if step is None else step, rank)
        moves = [(s["begin"], 1) for s in spans if s["phase"] == "forward" and s["micro_batch"] >= 0]
        last = {"backward", "backward weight"}
        moves += [(s["end"], -1) for s in spans if s["phase"] in last and s["micro_batch"] >= 0]
        return int(np.max(np.cumsum([change for _, change in sorted(moves)]), initial=0))

    def trace(self, path: str | Path) -> None:
        """Write a Chrome trace: a row per rank."""
        start = float(self.spans["begin"].min(initial=np.inf))
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
            for rank in self.ranks
        ]
        events += [_event(span, start) for span in self.spans]
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
        return f"Timeline({steps}, bubble {self.bubble():.1%} measured, {self.ideal_bubble():.1%} by the formula)"


def _event(span: np.void, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": int(span["rank"]),
        "name": _name(span),
        "cat": str(span["phase"]),
        "ts": 1e6 * (float(span["begin"]) - start),
        "dur": 1e6 * float(span["end"] - span["begin"]),
        "args": {"step": int(span["step"])},
    }


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
