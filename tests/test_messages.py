"""Messages between stages: the part of a message that was a wait for the other stage."""

from __future__ import annotations

import numpy as np
import pytest

from dtkit.history import comm_time
from dtkit.history.timeline import SPAN_DTYPE


def spans(*rows, step=3, ranks=range(2)):
    """Spans of (rank, phase, micro-batch, begin, end); the stage is the rank, in each replica."""
    return np.array([(step, r, phase, r % len(ranks), m, begin, end) for r, phase, m, begin, end in rows], SPAN_DTYPE)


def list_phases(rows, rank):
    of_rank = rows[rows["rank"] == rank]
    return [(str(s["phase"]), float(s["begin"]), float(s["end"])) for s in of_rank]


def test_a_receiver_waits_until_the_sender_begins():
    split = comm_time.split_message_waits(
        spans((0, "forward", 0, 0, 5), (0, "send forward", 0, 5, 6), (1, "receive forward", 0, 1, 5.5)), 2
    )
    assert list_phases(split, 0) == [("forward", 0, 5), ("send forward", 5, 6)]
    assert list_phases(split, 1) == [("wait", 1, 5), ("receive forward", 5, 5.5)]
    assert split["micro_batch"].tolist() == [0] * 4
    assert split["stage"].tolist() == [0, 0, 1, 1]


def test_a_receiver_does_not_wait_for_a_message_that_was_sent():
    split = comm_time.split_message_waits(spans((0, "send forward", 0, 0, 1), (1, "receive forward", 0, 2, 3)), 2)
    assert list_phases(split, 1) == [("receive forward", 2, 3)]


def test_a_sender_waits_until_the_receiver_posts():
    split = comm_time.split_message_waits(spans((1, "send backward", 7, 0, 9), (0, "receive backward", 7, 8, 9)), 2)
    assert list_phases(split, 1) == [("wait", 0, 8), ("send backward", 8, 9)]
    assert list_phases(split, 0) == [("receive backward", 8, 9)]


def test_a_buffered_message_causes_no_wait():
    split = comm_time.split_message_waits(spans((0, "send forward", 0, 0, 1), (1, "receive forward", 0, 4, 5)), 2)
    assert list_phases(split, 0) == [("send forward", 0, 1)]


def test_posting_a_message_is_not_waiting():
    """Torch's looped schedules post receives long before they need the data."""
    asked = (1, "receive forward", 0, 0, 1), (1, "forward", 5, 1, 4), (1, "receive forward", 0, 4, 8)
    split = comm_time.split_message_waits(spans(*asked, (0, "send forward", 0, 6, 6.5)), 2)
    assert list_phases(split, 1) == [
        ("receive forward", 0, 1), ("forward", 1, 4), ("wait", 4, 6), ("receive forward", 6, 8)
    ]  # fmt: skip


def test_directions_and_micro_batches_are_distinguished():
    other = (0, "send forward", 1, 0, 1), (0, "send forward", 0, 5, 6), (1, "send backward", 0, 7, 8)
    split = comm_time.split_message_waits(
        spans((1, "receive forward", 0, 2, 6), (0, "receive backward", 0, 6, 8), *other), 2
    )
    assert list_phases(split, 1)[:2] == [("wait", 2, 5), ("receive forward", 5, 6)]
    assert list_phases(split, 0)[2:] == [("wait", 6, 7), ("receive backward", 7, 8)]


def test_steps_and_replicas_are_distinguished():
    first = (0, "send forward", 0, 4, 5), (1, "receive forward", 0, 1, 5)
    replica = (2, "send forward", 0, 3, 4), (3, "receive forward", 0, 1, 4)
    later = spans((0, "send forward", 0, 14, 15), (1, "receive forward", 0, 11, 15), step=4)
    split = comm_time.split_message_waits(np.concatenate([spans(*first, *replica), later]), 2)
    waits = split[split["phase"] == "wait"]
    assert [(w["rank"], w["step"], w["end"]) for w in waits] == [(1, 3, 4), (1, 4, 14), (3, 3, 3)]


def test_a_message_with_one_known_end_is_unchanged():
    split = comm_time.split_message_waits(spans((1, "receive forward", 0, 1, 5)), 2)
    assert list_phases(split, 1) == [("receive forward", 1, 5)]


def test_each_message_keeps_both_of_its_ends():
    """A message can seem to arrive before it was sent if the clocks of two hosts differ."""
    split = comm_time.split_message_waits(spans((0, "send forward", 0, 5, 6), (1, "receive forward", 0, 1, 4.9)), 2)
    assert list_phases(split, 1) == [("wait", 1, 4.9), ("receive forward", 4.9, 4.9)]
    assert len(comm_time.pair_messages(split, 2)) == 1


def test_spans_without_messages_are_unchanged():
    alike = np.array([(0, 0, "forward", -1, -1, 0, 1), (0, 0, "sync", -1, -1, 1, 2)], SPAN_DTYPE)
    assert comm_time.split_message_waits(alike, 1) is alike
    assert comm_time.pair_messages(alike, 1) == []


def test_message_waits_use_clock_offsets():
    send, receive = (
        comm_time.MESSAGE_PHASES.index("send forward"),
        comm_time.MESSAGE_PHASES.index("receive forward"),
    )
    parts = [
        np.array([(0, send, 0, 0, 5, 6), (1, send, 0, 0, 15, 16)], comm_time.MESSAGE_DTYPE),
        np.array([(0, receive, 1, 0, 101, 106), (1, receive, 1, 0, 115.5, 116)], comm_time.MESSAGE_DTYPE),
    ]
    split = comm_time.compute_message_waits(parts, [0, 1], 2, [0.0, 100.0])
    assert [part.tolist() for part in split] == [[0, 0.5], [4, 0]]
    assert parts[1]["begin"][0] == 101  # the input is unchanged
    other = comm_time.compute_message_waits(parts, [0, 1], 1, [0.0, 100.0])  # of two replicas
    assert not np.concatenate(other).any()


@pytest.mark.parametrize("ranks", [1, 3])
def test_message_waits_without_messages_are_empty(ranks: int):
    assert [
        len(part)
        for part in comm_time.compute_message_waits([np.empty(0, comm_time.MESSAGE_DTYPE)] * ranks, range(ranks), 1)
    ] == [0] * ranks
