"""Messages with the user's numbers and the machines' use."""

import numpy as np
import pytest

from dtkit.dashboard.live import series_feed
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.history.scalars import ScalarRecord
from dtkit.history.undone_steps import UndoneSteps
from tests.support.fake_source import FakeSource


def make_history(ranks=2, steps=40):
    source = FakeSource(ranks=ranks)
    source.advance(steps)
    for rank in range(ranks):
        rows = [(step, float(step + rank), 1.0) for step in range(1, steps + 1)]
        source.history.add(ScalarRecord(rank, {"kl": rows, "system/CPU (cores)": rows[::10]}))
    return source.history


def test_lines_end_where_numbers_went_with_an_engine():
    source = FakeSource(ranks=2)
    source.advance(10)
    source.lose(1)
    source.advance(5)  # without rows of node 1
    source.event("repair", "node 1 replaced")
    source.advance(10)
    logged = [[*range(1, 26)], [*range(1, 11), *range(16, 26)]]
    for rank, steps in enumerate(logged):
        rows = [(step, float(step), 1.0) for step in steps]
        rare = [row for row in rows if row[0] % 8 == 1]
        source.history.add(
            ScalarRecord(rank, {"kl": rows, "system/CPU (cores)": rare if rank else rare[:2] + rare[3:]})
        )
    series = unpack(SeriesFeed(source.history, clock=iter(range(100)).__next__).build_message())
    kl, system = series["kl"], series["system/CPU (cores)"]
    assert np.flatnonzero(np.isinf(kl[:, 2])).tolist() == [10, 11, 12, 13, 14]
    assert np.isfinite(kl[:, [1, 3]]).all()  # of the other node, and over all nodes
    assert system[:, 0].tolist() == [1, 9, 13, 17, 25]  # no sample was due in between
    assert np.isinf(system[2, 2])
    assert np.isnan(system[2, [1, 3]]).all()


def unpack(message):
    """Return {name: rows of (step, values)} of a message."""
    values = np.frombuffer(message.buffers[0], "<f4")
    return {
        one["name"]: values[one["first"] :][: one["points"] * (one["lines"] + 1)].reshape(one["points"], -1)
        for one in message.content["series"]
    }


def test_the_last_value_is_exact_though_the_last_point_is_a_mean():
    message = SeriesFeed(make_history(steps=400), clock=iter(range(100)).__next__).build_message()
    kl = next(one for one in message.content["series"] if one["name"] == "kl")
    assert kl["last"] == 400.5
    assert unpack(message)["kl"][-1, -1] < 400


def test_each_name_has_lines_of_nodes_and_a_mean():
    feed = SeriesFeed(make_history(), clock=iter(range(100)).__next__)
    message = feed.build_message()
    series = {one["name"]: one for one in message.content["series"]}
    system = series["system/CPU (cores)"]
    assert (system["title"], system["unit"], system["system"], system["lines"]) == ("CPU", "cores", True, 3)
    assert unpack(message)["kl"][:2].tolist() == [[1, 1, 2, 1.5], [2, 2, 3, 2.5]]
    assert len(unpack(message)["system/CPU (cores)"]) == 4


def test_only_what_grew_is_sent_again():
    history = make_history()
    times = iter(range(0, 100_000, 1000))
    feed = SeriesFeed(history, clock=times.__next__)
    assert feed.is_outdated
    feed.build_message()
    assert not feed.is_outdated
    feed._next_at = 0
    assert feed.build_message() is None
    history.add(ScalarRecord(0, {"kl": [(41, 1.0, 1.0)]}))
    feed._next_at = 0
    assert list(unpack(feed.build_message())) == ["kl"]
    feed.reset()
    assert len(unpack(feed.build_message())) == 2


def test_last_message_is_not_delayed_by_a_slow_reading():
    history = make_history()
    feed = SeriesFeed(history, clock=lambda: 0.0, cpu_clock=iter(range(100)).__next__)
    feed.build_message()
    history.add(ScalarRecord(0, {"kl": [(41, 1.0, 1.0)]}))
    assert feed.build_message() is None
    assert list(unpack(feed.build_message(is_last=True))) == ["kl"]


def test_time_of_other_processes_delays_no_message():
    """A reading that waits for a core takes longer, but costs the training nothing more."""
    history = make_history()
    feed = SeriesFeed(history, clock=iter(range(0, 100_000, 1000)).__next__, cpu_clock=lambda: 0.0)
    feed.build_message()
    history.add(ScalarRecord(0, {"kl": [(41, 1.0, 1.0)]}))
    assert feed._next_at == 1000  # the time at which the first one was ready
    assert list(unpack(feed.build_message())) == ["kl"]


def test_long_series_are_thinned_and_keep_their_range():
    history = make_history(ranks=1, steps=5000)
    rows = unpack(SeriesFeed(history).build_message())["kl"]
    assert len(rows) <= series_feed.MAX_POINTS
    assert rows[0, 1] == pytest.approx(rows[0, 0])
    assert 4900 < rows[-1, 0] <= 5000  # a point beyond the last step would be out of sight


def test_many_names_come_in_several_messages(monkeypatch):
    monkeypatch.setattr(series_feed, "MAX_BYTES", 10)
    feed = SeriesFeed(make_history(), clock=lambda: 0.0, cpu_clock=lambda: 0.0)
    assert [list(unpack(feed.build_message())) for _ in range(2)] == [["kl"], ["system/CPU (cores)"]]


class ArrivingHistory:
    """A real history, to which rows of a later step arrive after each read."""

    def __init__(self, history):
        self._history = history

    def __getattr__(self, name):
        return getattr(self._history, name)

    def scalar(self, name, rank=None):
        read = self._history.scalar(name, rank)
        for of in self._history.ranks:
            self._history.add(ScalarRecord(of, {name: [(len(self._history.scalar(name, of)[0]) + 1, 1.0, 1.0)]}))
        return read


@pytest.mark.parametrize("steps", [40, series_feed.MAX_POINTS, 200])
def test_rows_that_arrive_during_a_read_are_left_for_the_next_message(steps):
    history = make_history(steps=steps)
    feed = SeriesFeed(ArrivingHistory(history), clock=iter(range(100)).__next__)
    points = unpack(feed.build_message())["kl"]
    width = -(-steps // series_feed.MAX_POINTS)
    assert points[-1, 0] == min(steps, points[-2, 0] + width)
    assert np.isfinite(points).all()
    np.testing.assert_allclose(points[:, 1:3].mean(axis=1), points[:, 3])  # all lines are of the same rows
    assert feed.is_outdated


def test_numbers_that_were_all_undone_are_taken_back():
    history = make_history()
    feed = SeriesFeed(history, clock=iter(range(100)).__next__)
    assert unpack(feed.build_message())["kl"].shape == (40, 4)
    history.add(UndoneSteps(1))
    message = feed.build_message()
    assert {one["name"]: one["points"] for one in message.content["series"]} == {"kl": 0, "system/CPU (cores)": 0}
    assert feed.build_message() is None
