"""The driver under any sequence of commands, replies and failures, against fake engines."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dtkit
from dtkit._util import timeouts
from dtkit.errors import EngineError, RefusedError, RunError
from dtkit.testing.fake_transport import FakeTransport
from dtkit.training.states import STATE_TABLE
from dtkit.types import State

if TYPE_CHECKING:
    from concurrent.futures import Future

STEPS = 60
ROWS = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
LIMIT_S = 30.0  # for every answer; a longer wait would never end

COMMANDS = ("pause", "resume", "step", "stop", "lr", "interrupt")
FAULTS = ("interrupted", "refused", "user error", "nonfinite", "ends early", "lost")
ACTIONS = st.sampled_from((*COMMANDS * 2, "resume", "resume", *FAULTS, "hold", "release"))


@pytest.fixture(scope="module", autouse=True)
def short_waits():
    """Shorten the waits for held ranks, so that a sequence takes milliseconds."""
    with contextlib.ExitStack() as patches:
        for name, seconds in (
            ("PAUSE_GRACE_S", 0.01),
            ("MAX_PAUSE_GRACE_S", 0.01),
            ("FAILURE_GRACE_S", 0.1),
            ("GATHER_TIMEOUT_S", 0.1),
        ):
            patches.enter_context(mock.patch.object(timeouts, name, seconds))
        yield


class Sequence:
    """One run and the answers to all of its commands."""

    def __init__(self, cluster: dtkit.Cluster, engines: FakeTransport, validation: Any) -> None:
        self.engines, self.answers = engines, list[tuple[str, "Future[int]"]]()
        self.run = cluster.train(
            nn.Linear(2, 2),
            ROWS,
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD,
            batch_size=16,
            steps=STEPS,
            start=False,
            validation=validation,
        )

    def act(self, action: str) -> None:
        if action in COMMANDS:
            value = {"step": (3, False), "lr": 0.5}.get(action)
            with contextlib.suppress(RunError):  # the run has ended
                self.answers.append((action, self.run._driver.submit(action, value)))
        elif action == "hold":
            self.engines.hold_requests()
        elif action == "release":
            self.engines.release_requests()
        else:
            self._fail(action)

    def _fail(self, fault: str) -> None:
        step = self.run.status.step
        if fault == "lost":
            self.engines.release_requests()  # a recovery asks the survivors
            self.engines.end_engine(1)
        elif fault == "nonfinite":
            self.engines.inject_nonfinite(step + 2, ranks=[0])
        elif fault == "ends early":
            self.engines.end_early_after(1)
        else:
            error = {"interrupted": KeyboardInterrupt(), "refused": RefusedError("another generation")}.get(fault)
            self.engines.inject_failure(1, "advance", error or ValueError("no such row"))

    def finish(self) -> None:
        """Resume until the run has ended; every answer comes within the limit."""
        self.engines.release_requests()
        for _ in range(2 * STEPS):
            for _command, answer in self.answers:
                with contextlib.suppress(RunError):  # "step" while the run is RUNNING
                    answer.result(LIMIT_S)
            self.answers.clear()
            assert self.run._driver.wait(LIMIT_S), self.run.status
            if self.run.done():
                return
            assert not self.run._driver.calls.pending  # a paused run waits for nothing but its user
            self.act("resume")
        raise AssertionError(self.run.status)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(actions=st.lists(ACTIONS, max_size=12), validates=st.booleans())
def test_any_sequence_is_answered_and_loses_no_step(actions, validates):
    engines = FakeTransport(2)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        sequence = Sequence(cluster, engines, ROWS if validates else None)
        for action in actions:
            sequence.act(action)
        sequence.finish()
        run = sequence.run
        assert list(run.history.totals()["step"]) == list(range(run.status.step))
        if run.status.state is State.COMPLETED:
            assert run.status.step == STEPS
            assert run.exception is None
        elif run.status.state is State.STOPPED:
            assert "stop" in actions
        else:
            assert isinstance(run.exception, EngineError), repr(run.exception)
            assert set(actions) & set(FAULTS)


def test_every_state_has_next_states_and_ended_runs_accept_no_command():
    assert set(STATE_TABLE) == set(State)
    for state, rule in STATE_TABLE.items():
        assert rule.next_states
        assert bool(rule.commands) != state.has_ended
    assert STATE_TABLE[State.FAILED].next_states == {State.FAILED}
    assert "step" not in STATE_TABLE[State.RUNNING].commands
