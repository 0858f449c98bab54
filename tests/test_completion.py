"""Names that the Tab key offers behind dtkit's objects."""

from __future__ import annotations

import dataclasses

import pytest

import dtkit
from dtkit._util.completion import hide_from_completion
from dtkit.testing.fake_transport import FakeTransport
from tests.support import small


def list_shown(obj: object) -> list[str]:
    return [name for name in dir(obj) if not name.startswith("_")]


def test_launchers_and_strategies_offer_their_options_and_what_users_call():
    assert list_shown(dtkit.SSH(["a:2"])) == ["count_agents", "hosts", "python", "script", "ssh_options"]
    for strategy, others in ((dtkit.DataParallel(), []), (dtkit.TensorParallel(2), ["plan_for"])):
        fields = [field.name for field in dataclasses.fields(strategy)]
        assert list_shown(strategy) == sorted(fields + others)


def test_run_and_history_offer_nothing_that_only_dtkit_calls():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        run = small.train(cluster, start=False)
        offered = [list_shown(each) for each in (cluster, run, run.history)]
        run.stop()
    for names, users, internal in zip(
        offered,
        (["train", "partition"], ["pause", "verify"], ["to_pandas", "scalar"]),
        (["refresh_nodes", "from_transport"], ["lifecycle", "post", "subscribe", "note"], ["append", "close_run_log"]),
        strict=True,
    ):
        assert set(users) <= set(names)
        assert not set(internal) & set(names)


def test_a_name_to_hide_must_exist():
    with pytest.raises(AssertionError, match="Any has no gone"):

        @hide_from_completion("gone")
        class Any:
            pass


def test_earlier_runs_show_what_is_left_of_them():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        assert repr(cluster.earlier_runs) == "EarlierRuns(no paused run was replaced, 0 runs kept for verify())"
        first = small.train(cluster, start=False)
        first.step()
        small.train(cluster, start=False).stop()
        assert repr(cluster.earlier_runs) == "EarlierRuns(replaced=Sequential, 1 run kept for verify())"
