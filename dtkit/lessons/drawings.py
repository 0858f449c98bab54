"""Drawings for lessons: ranks that share the data, the gradients and the model."""

from __future__ import annotations

from dtkit._util.arguments import suggest_arguments
from dtkit.lessons.svg import COLORS, Canvas, Drawing

_MIXED_COLOR = "#666666"  # color of parts that belong to all ranks
_MIN_RANKS, _MAX_RANKS = 2, 4
_MAX_MICRO_BATCHES = 8


@suggest_arguments
def draw_data_parallel(ranks: int = 2) -> Drawing:
    """Draw one step of data parallelism: rows to ranks, gradients to a sum, the same update everywhere."""
    _check_ranks(ranks)
    pitch, top = 62, 34
    canvas = Canvas(
        760,
        top + pitch * ranks + 4,
        f"A batch is split over {ranks} nodes. Each node computes the gradients of its own rows with its own replica. "
        "An all-reduce sums the gradients, and every node makes the same update.",
    )
    bottom = top + pitch * ranks - 22
    for x, text in (
        (0, "batch"),
        (124, "each node's rows"),
        (272, "replica"),
        (410, "gradients"),
        (532, "all-reduce"),
        (642, "the update"),
    ):
        canvas.add_text(x, 10, text, bold=True)
    canvas.add_box(532, top, 70, bottom - top, "sum", _MIXED_COLOR)
    for rank in range(ranks):
        y, color = top + pitch * rank, COLORS[rank]
        middle = y + 20
        canvas.add_box(0, y, 64, 40, "rows", color)
        canvas.add_box(124, y, 92, 40, f"node {rank}", color)
        canvas.add_box(272, y, 84, 40, "model", _MIXED_COLOR)
        canvas.add_box(410, y, 72, 40, f"g{'₀₁₂₃'[rank]}", color)
        canvas.add_box(642, y, 118, 40, "w - lr · sum", _MIXED_COLOR)
        for left, right in ((68, 120), (220, 268), (360, 406), (486, 528), (606, 638)):
            canvas.add_arrow((left, middle), (right, middle))
    return canvas.finish()


@suggest_arguments
def draw_ring_all_reduce(ranks: int = 3) -> Drawing:
    """Draw the two rounds of a ring all-reduce: sums travel once around, then results do."""
    _check_ranks(ranks)
    cell, gap, pitch, top = 74, 96, 64, 34
    width = max(ranks * cell, 200)
    left, right = 72, 72 + width + gap
    canvas = Canvas(
        right + width,
        top + pitch * ranks + 8,
        f"Ring all-reduce of {ranks} nodes. The gradients are cut into {ranks} parts. In the first half, each part "
        "travels around the ring and collects a sum. In the second half, the sums travel around the ring. So each "
        f"node sends {ranks - 1} parts twice. The last node sends to node 0.",
    )
    canvas.add_text(left, 10, "1. send a part, and add", bold=True)
    canvas.add_text(right, 10, "2. send a sum, and keep", bold=True)
    for rank in range(ranks):
        y = top + pitch * rank
        canvas.add_text(0, y + 20, f"node {rank}")
        for part in range(ranks):
            canvas.add_box(left + part * cell, y, cell - 4, 40, f"part {part}", COLORS[rank])
            if (part - rank) % ranks == 1:  # after the first half, this rank has the whole sum of this part
                canvas.add_box(right + part * cell, y, cell - 4, 40, f"sum {part}", _MIXED_COLOR)
            else:
                canvas.add_empty_box(right + part * cell, y, cell - 4, 40, f"sum {part}")
        if rank < ranks - 1:
            for start in (left + rank * cell, right + (rank + 1) % ranks * cell):
                canvas.add_arrow((start + cell / 2 - 2, y + 42), (start + cell / 2 - 2, y + pitch - 3))
    end = left + ranks * cell
    middle = top + (pitch * ranks - pitch + 40) / 2
    canvas.add_arrow((end + 14, middle), (right - 14, middle))
    canvas.add_text(
        left, top + pitch * ranks - 6, f"messages in each half: {ranks - 1} a node; the last node sends to node 0"
    )
    return canvas.finish()


@suggest_arguments
def draw_pipeline(stages: int = 2, micro_batches: int = 4) -> Drawing:
    """Draw stages, and when each of them works on which micro-batch of the forward pass."""
    _check_ranks(stages, "stages")
    if not isinstance(micro_batches, int) or not 1 <= micro_batches <= _MAX_MICRO_BATCHES:
        raise ValueError(f"micro_batches={micro_batches!r}; the drawing has room for 1 to {_MAX_MICRO_BATCHES}")
    cell, pitch, top, left = 46, 58, 34, 220
    columns = max(micro_batches + stages - 1, 5)
    width = left + 2 * columns * cell + 20
    canvas = Canvas(
        width,
        top + pitch * stages + 30,
        f"A pipeline of {stages} stages with {micro_batches} micro-batches. Activations travel forward from stage to "
        "stage, and gradients travel back. Nodes idle at the start, in the middle and at the end: the bubble.",
    )
    canvas.add_text(0, 10, "stages", bold=True)
    canvas.add_text(left, 10, "forward: activations go down", bold=True)
    canvas.add_text(left + columns * cell + 20, 10, "backward: gradients go up", bold=True)
    for stage in range(stages):
        y, color = top + pitch * stage, COLORS[stage]
        canvas.add_box(0, y, 160, 40, f"node {stage}: its layers", color)
        if stage < stages - 1:
            canvas.add_arrow((60, y + 42), (60, y + pitch - 2))
            canvas.add_arrow((100, y + pitch - 2), (100, y + 42), is_dashed=True)
        for column in range(columns):
            for start, batch, letter in (
                (left, column - stage, "F"),
                (left + columns * cell + 20, column - (stages - 1 - stage), "B"),
            ):
                if 0 <= batch < micro_batches:
                    canvas.add_box(start + column * cell, y, cell - 4, 40, f"{letter}{batch}", color)
                else:
                    canvas.add_empty_box(start + column * cell, y, cell - 4, 40)
    canvas.add_text(left, top + pitch * stages, "dashed boxes: the node idles (the bubble)")
    return canvas.finish()


@suggest_arguments
def draw_tensor_parallel() -> Drawing:
    """Draw a pair of layers that two ranks split: the first by columns, the second by rows."""
    pitch, top = 62, 34
    canvas = Canvas(
        830,
        top + 2 * pitch + 4,
        "Two nodes split a pair of layers. Each node has the whole input, half of the first layer's outputs and the "
        "matching half of the second layer's inputs. A sum over both nodes gives the pair's output.",
    )
    heads = (
        (0, "whole input"),
        (136, "first layer, half"),
        (330, "half of the middle"),
        (510, "second layer, half"),
        (720, "all-reduce"),
    )
    for x, text in heads:
        canvas.add_text(x, 10, text, bold=True)
    canvas.add_box(720, top, 110, pitch + 40, "y = y₀ + y₁", _MIXED_COLOR)
    for rank in range(2):
        y, color, digit = top + pitch * rank, COLORS[rank], "₀₁"[rank]
        canvas.add_box(0, y, 90, 40, "x", _MIXED_COLOR)
        canvas.add_box(136, y, 150, 40, "half of W₁'s columns", color)
        canvas.add_box(330, y, 136, 40, f"h{digit}", color)
        canvas.add_box(510, y, 150, 40, "half of W₂'s rows", color)
        for left, right in ((94, 131), (290, 325), (470, 505), (664, 715)):
            canvas.add_arrow((left, y + 20), (right, y + 20))
    return canvas.finish()


@suggest_arguments
def draw_fsdp(ranks: int = 2) -> Drawing:
    """Draw how sharded ranks compute one layer: gather its parameters, use them, free them."""
    _check_ranks(ranks)
    part, pitch, top = 36, 60, 52
    whole = ranks * part
    column = whole + 100
    xs = [70 + column * k for k in range(4)]
    canvas = Canvas(
        xs[3] + max(whole, 130),
        top + pitch * ranks,
        f"Sharded training on {ranks} nodes. Each node keeps one part of every layer. It gathers the whole layer for "
        "forward and frees it, and gathers it again for backward. Then each node keeps the summed gradient of its own "
        "part.",
    )
    titles = ("at rest", "all-gather", "all-gather", "reduce-scatter")
    subtitles = ("", "forward, then free", "backward, then free", "sums of gradients")
    for x, title, subtitle in zip(xs, titles, subtitles, strict=True):
        canvas.add_text(x, 10, title, bold=True)
        if subtitle:
            canvas.add_text(x, 32, subtitle)
    for rank in range(ranks):
        y = top + pitch * rank
        canvas.add_text(0, y + 20, f"node {rank}")
        for place, x in enumerate(xs):
            is_gathered = place in (1, 2)
            for shard in range(ranks):
                if is_gathered or shard == rank:
                    name = f"g{'₀₁₂₃'[shard]}" if place == len(xs) - 1 else f"w{'₀₁₂₃'[shard]}"
                    canvas.add_box(x + shard * part, y, part - 3, 40, name, COLORS[shard])
                else:
                    canvas.add_empty_box(x + shard * part, y, part - 3, 40)
            if place:
                canvas.add_arrow((xs[place - 1] + whole + 8, y + 20), (x - 8, y + 20))
    return canvas.finish()


def _check_ranks(count: int, name: str = "ranks") -> None:
    if not isinstance(count, int) or not _MIN_RANKS <= count <= _MAX_RANKS:
        raise ValueError(f"{name}={count!r}; the drawing has room for {_MIN_RANKS} to {_MAX_RANKS}")
