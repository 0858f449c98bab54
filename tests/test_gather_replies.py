"""The wait for all ranks' replies: its time limit, its grace periods, and the interrupt between them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import dtkit
from dtkit.messages import Reply
from dtkit.testing.fake_transport import FakeTransport
from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.rpc.engine_group import EngineGroup

FAR_S, SHORT_S, TEST_LIMIT_S = 600.0, 0.05, 20.0


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport(2)


@pytest.fixture
def group(transport: FakeTransport) -> Iterator[EngineGroup]:
    cluster = dtkit.Cluster.from_transport(transport, device="cpu")
    yield cluster._engine_group
    cluster.close()


def gather(group: EngineGroup, futures: list[Future[Reply[Any]]], timeout: float, **options: Any) -> list[Reply[Any]]:
    """Gather in another thread, so that a wait without end fails the test."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(group.gather_replies, futures, timeout, **{"grace_s": SHORT_S, **options})
        try:
            return pending.result(TEST_LIMIT_S)
        except TimeoutError:
            group.is_closed = True  # ends the wait, and so the thread
            raise


def make_failure(rank: int) -> Failure:
    return Failure(rank, "host", "ValueError", "bad row", "")


def test_ranks_that_never_reply_are_interrupted_once_and_reported_as_stuck(
    group: EngineGroup, transport: FakeTransport
):
    first, second = gather(group, [Future(), Future()], SHORT_S)
    assert transport.interrupted_ranks == [0, 1]
    assert (first.failure.kind, second.failure.kind) == ("stuck", "stuck")
    assert "close this cluster" in first.failure.message


def test_failure_of_one_rank_shortens_the_wait_for_the_others(group: EngineGroup, transport: FakeTransport):
    failed: Future[Reply[Any]] = Future()
    failed.set_result(Reply(failure=make_failure(0)))
    first, second = gather(group, [failed, Future()], FAR_S)
    assert transport.interrupted_ranks == [1]
    assert (first.failure.message, second.failure.kind) == ("bad row", "stuck")


def test_first_grace_may_be_shorter_than_the_one_after_the_interrupt(group: EngineGroup, transport: FakeTransport):
    failed: Future[Reply[Any]] = Future()
    failed.set_result(Reply(failure=make_failure(0)))
    interrupted: Future[Reply[Any]] = Future()
    transport.interrupt = lambda _ranks: interrupted.set_result(Reply(failure=make_failure(1)))
    replies = gather(group, [failed, interrupted], FAR_S, grace_s=FAR_S, first_grace_s=SHORT_S)
    assert [reply.failure.rank for reply in replies] == [0, 1]


def test_success_of_one_rank_shortens_the_wait_only_on_request(group: EngineGroup, transport: FakeTransport):
    done: Future[Reply[Any]] = Future()
    done.set_result(Reply(7))
    first, second = gather(group, [done, Future()], FAR_S, grace_from_first_reply=True)
    assert (first.value, second.failure.kind) == (7, "stuck")
    assert transport.interrupted_ranks == [1]
