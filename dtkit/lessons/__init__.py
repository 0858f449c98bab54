"""Helpers for the notebooks' lessons: claims with guesses and a score, and drawings of ranks at work."""

from dtkit._util.attributes import suggest_names
from dtkit.lessons.drawings import (
    draw_data_parallel,
    draw_fsdp,
    draw_pipeline,
    draw_ring_all_reduce,
    draw_tensor_parallel,
)
from dtkit.lessons.figures import adapt_to_themes
from dtkit.lessons.lesson import Lesson
from dtkit.lessons.waiting import wait_until

__all__ = [
    "Lesson",
    "adapt_to_themes",
    "draw_data_parallel",
    "draw_fsdp",
    "draw_pipeline",
    "draw_ring_all_reduce",
    "draw_tensor_parallel",
    "wait_until",
]

__getattr__ = suggest_names("dtkit.lessons", __all__)
