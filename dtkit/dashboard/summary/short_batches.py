"""Batches of few rows, such as the last one of an epoch: what charts of several runs draw for them.

The mean loss of three rows is mostly noise, and their samples per second are few, as each step has fixed costs. One
such point in each epoch would set the limits of an axis. So a short batch is drawn together with those before it.
Tables and histories keep the values of single batches.
"""

from __future__ import annotations

import numpy as np

_SHORT_SHARE = 0.5  # of the rows of the batch before
SHORT_BATCH_NOTE = (
    "the last batch of an epoch has few rows: its loss and speed are drawn with those of the batches before"
)


def find_short_batches(totals: np.ndarray) -> np.ndarray:
    """Return which steps have a short batch. The first one has none, nor has one whose number of rows is unknown."""
    samples = totals["samples"]
    is_short = np.zeros(len(samples), bool)
    is_short[1:] = (samples[1:] > 0) & (samples[1:] < _SHORT_SHARE * samples[:-1])
    return is_short


def compute_drawn_losses(totals: np.ndarray) -> np.ndarray:
    """Return the loss of each step; for a short batch, the mean by weight with the batch before it."""
    short = np.flatnonzero(find_short_batches(totals))
    losses, before, after = totals["loss"].copy(), totals[short - 1], totals[short]
    weights = before["weight"] + after["weight"]
    is_known = np.isfinite(before["loss"]) & (before["weight"] > 0) & (after["weight"] > 0)
    sums = before["loss"] * before["weight"] + after["loss"] * after["weight"]
    losses[short] = np.divide(sums, weights, out=after["loss"].copy(), where=is_known)
    return losses


def join_short_batches(totals: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (steps, samples, seconds) of all steps but those of short batches.

    Their samples and seconds are divided among the steps since the short batch before, which are those of an epoch.
    Among fewer steps, there would be a dip in each epoch.
    """
    is_short = find_short_batches(totals)
    samples, seconds = totals["samples"].astype("f8"), np.nan_to_num(totals["step_s"].astype("f8"))
    short = np.flatnonzero(is_short)
    if len(short):
        others = np.diff(short, prepend=-1) - 1  # steps between a short batch and the one before
        for values in (samples, seconds):
            values[: short[-1]] += np.repeat(values[short] / others, others + 1)[:-1]
    return totals["step"][~is_short], samples[~is_short], seconds[~is_short]
