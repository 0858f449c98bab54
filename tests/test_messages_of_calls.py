"""Messages with several calls: short epochs, and the evaluations between them."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import timeouts
from dtkit.engine.ops.state import EngineState
from dtkit.errors import PausedError
from dtkit.rpc.protocol import JobOperations, make_call
from dtkit.testing.fake_transport import FakeTransport
from dtkit.testing.in_process import InProcessTransport
from dtkit.types import State
from tests.support.small import accuracy, data, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from dtkit.messages import Reply

EPOCHS = 50
STEPS_PER_EPOCH = 4
LIMIT_S = 60.0


class CountingTransport(InProcessTransport):
    """Keeps the operations of each message, and the size of the largest one in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, ...]] = []
        self.largest = 0

    def send(
        self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None
    ) -> Future[Reply[Any]]:
        self.largest = max(self.largest, len(message))
        content = pickle.loads(message)
        self.messages.append(tuple(each.op for each in (content if isinstance(content, tuple) else (content,))))
        return super().send(rank, message, listen)


@pytest.fixture
def transport() -> CountingTransport:
    return CountingTransport()


@pytest.fixture
def cluster(transport: CountingTransport) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(transport, device="cpu") as cluster:
        yield cluster


def run_short_epochs(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    run = train(cluster, epochs=EPOCHS, validation=data(), metrics={"accuracy": accuracy}, **options)
    run.wait(LIMIT_S)
    assert run.history.totals()["step"].tolist() == list(range(EPOCHS * STEPS_PER_EPOCH))
    assert [each.step for each in run.history.evaluations] == [STEPS_PER_EPOCH * k for k in range(1, EPOCHS + 1)]
    return run


def list_results(run: dtkit.Run) -> tuple[list[float], list[dict[str, float]]]:
    return run.history.loss()[1].tolist(), [dict(each.values) for each in run.history.evaluations]


def test_short_epochs_share_messages_with_their_evaluations(cluster: dtkit.Cluster, transport: CountingTransport):
    run = run_short_epochs(cluster)
    sent = [message for message in transport.messages if "advance" in message or "evaluate" in message]
    assert len(sent) < EPOCHS
    assert max(map(len, sent)) >= 8
    assert sent[-1] == ("evaluate",)  # the time of the last one is measured by its reply
    transport.messages.clear()
    apart = run_short_epochs(cluster, callbacks=[lambda _run: None])
    assert max(map(len, transport.messages)) == 2  # an epoch and its evaluation, which the callback may need
    assert list_results(apart) == list_results(run)


def test_the_first_evaluation_has_its_own_message_for_nobody_knows_its_time(
    cluster: dtkit.Cluster, transport: CountingTransport
):
    run_short_epochs(cluster)
    with_evaluation = next(message for message in transport.messages if "evaluate" in message)
    assert with_evaluation == ("evaluate",)


def test_dispatches_of_a_message_that_takes_too_long_end_at_the_same_step(
    cluster: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch
):
    expected = list_results(run_short_epochs(cluster))
    num_asked = 0

    def is_overdue(_state: EngineState) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked % 7 == 0

    monkeypatch.setattr(EngineState, "is_message_overdue", property(is_overdue))
    assert list_results(run_short_epochs(cluster)) == expected
    assert num_asked >= 14


def test_a_message_is_overdue_after_the_longest_time_of_a_dispatch(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("dtkit.engine.ops.state.time.monotonic", lambda: now)
    state = EngineState(message_begun_at=now)
    assert not state.is_message_overdue
    now += timeouts.MAX_DISPATCH_S + 0.1
    assert state.is_message_overdue


def test_a_failed_evaluation_within_a_message_pauses_and_loses_no_step(
    cluster: dtkit.Cluster, transport: CountingTransport, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NUM_CALLS", "0")

    def fail_late(output: Any, target: Any) -> Any:  # a copy is made for each evaluation
        num_calls = int(os.environ["NUM_CALLS"]) + 1
        os.environ["NUM_CALLS"] = str(num_calls)
        if num_calls == 151:
            raise ZeroDivisionError("no positives")
        return accuracy(output, target)

    run = train(cluster, epochs=EPOCHS, validation=data(), metrics={"accuracy": fail_late})
    with pytest.raises(PausedError, match="no positives"):
        run.wait(LIMIT_S)
    assert run.status.state is State.PAUSED
    assert any(message.count("evaluate") > 1 for message in transport.messages)
    assert run.history.totals()["step"].tolist() == list(range(run.status.step))
    run.resume()
    run.wait(LIMIT_S)
    assert run.status.step == EPOCHS * STEPS_PER_EPOCH
    assert run.history.totals()["step"].tolist() == list(range(run.status.step))


def test_a_lost_engine_fails_all_calls_of_its_message():
    engines = FakeTransport(2)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        group = cluster._engine_group
        call = make_call(JobOperations.job_status, job="none")
        engines.hold_requests()
        futures = group.fan_out_together([call, call, call])
        engines.end_engine(1)
        engines.release_requests()
        kinds = [[future.result(LIMIT_S).failure.kind for future in of_call] for of_call in futures]
    assert [of_call[1] for of_call in kinds] == ["lost"] * 3


def test_what_is_done_around_an_evaluation_counts_for_the_length_of_a_message():
    """With short epochs, records and output files take longer than the steps. A fake engine's take a step each."""
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        run = run_short_epochs(cluster)
    assert run._driver.steps.sizer.steps_per_evaluation > 1.3  # 1 is the evaluation alone


def test_arrays_that_a_loss_takes_along_are_sent_in_shared_memory(cluster: dtkit.Cluster, transport: CountingTransport):
    weights = torch.ones(2**19)  # 2 MiB

    def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * weights[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the function takes along
        trained = train(cluster, loss=weighted_loss).result(LIMIT_S)
    assert transport.largest < weights.nbytes / 2
    assert not cluster._engine_group.uploads._payloads  # the file is gone
    expected = train(cluster).result(LIMIT_S)
    torch.testing.assert_close(dict(trained.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)


def test_numbers_that_a_callback_logs_belong_to_the_last_step_of_its_epoch(
    cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    run = train(cluster, epochs=2, callbacks=[lambda run: dtkit.log(seen=run.status.step, half=torch.tensor(0.5))])
    run.wait(LIMIT_S)
    steps, values = run.history.scalar("seen")
    assert steps.tolist() == [STEPS_PER_EPOCH - 1, 2 * STEPS_PER_EPOCH - 1]
    assert values.tolist() == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert run.history.scalar("half")[1].tolist() == [0.5, 0.5]
    assert "seen=" not in capsys.readouterr().out
    dtkit.log(seen=1.0)  # outside of a training
    assert capsys.readouterr().out == "seen=1\n"


def test_a_callback_may_not_log_a_column_that_dtkit_fills(cluster: dtkit.Cluster):
    run = train(cluster, epochs=1, callbacks=[lambda _: dtkit.log(loss=1.0)])
    with pytest.raises(dtkit.errors.CallbackError, match="has a column 'loss' already"):
        run.wait(LIMIT_S)
    run.stop()
