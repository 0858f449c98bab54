"""Snapshots in memory: intervals, packing, placement of copies, and choice of copies in a recovery."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import dtkit
from dtkit._util.process import ProcessId
from dtkit.checkpoint.manager import CheckpointManager, CheckpointPolicy
from dtkit.engine.state.packing import PackedLayout, unpack_state
from dtkit.engine.state.peer_snapshots import choose_peer_distance
from dtkit.engine.state.shards import ShardedState, TensorShard
from dtkit.history import run_log
from dtkit.history.history import History
from dtkit.messages import JobPosition
from dtkit.rpc import pickling
from dtkit.rpc.payload import make_payload
from dtkit.training import launch, recovered_state, recovery
from dtkit.training.boundary_actions import BoundaryActions
from dtkit.training.config import SnapshotInterval, TrainConfig
from dtkit.training.snapshot_tracker import SnapshotTracker


def answers(error: str | None = None, seconds: float = 0.0) -> list[dict[str, Any]]:
    return [{"error": error, "seconds": seconds}] * 2


# -- intervals -----------------------------------------------------------------------------------------------


def test_snapshot_of_the_step_where_a_run_pauses_is_taken_once():
    found = SnapshotTracker(SnapshotInterval(every_seconds=100.0))
    assert [found.is_missing(step) for step in (0, 3)] == [False, True]
    found.on_sent(3)
    assert [found.is_missing(step) for step in (3, 4)] == [False, True]
    assert not SnapshotTracker().is_missing(3)  # other ranks hold the whole state


def test_between_single_steps_snapshots_take_little_of_the_time():
    found = SnapshotTracker(SnapshotInterval(every_seconds=100.0))
    assert found.is_missing(1, is_brief=True)
    found.on_sent(1)
    found.on_result(answers(seconds=0.1))
    assert found.is_missing(2)
    assert not found.is_missing(2, is_brief=True)
    found.on_result(answers(seconds=0.0))
    assert found.is_missing(2, is_brief=True)


def test_snapshots_are_due_at_step_intervals():
    found = SnapshotTracker(SnapshotInterval(every_steps=5))
    assert [step for step in range(12) if found.is_due(step)] == [5, 10]
    assert (found.steps_until_due(0), found.steps_until_due(7)) == (5, 3)
    found.on_sent(5)
    assert not found.is_due(5)
    found.on_cancel()
    assert found.is_due(5)


def test_timed_snapshots_take_at_most_one_percent_of_the_time():
    found = SnapshotTracker(SnapshotInterval(every_seconds=0.0))
    assert not found.is_due(0)
    assert found.is_due(1)
    found.on_sent(1)
    assert found.on_result(answers(seconds=1000.0)) is None
    assert not found.is_due(2)
    assert found._min_interval_s == 30.0  # by then there is a snapshot on disk
    assert found.on_result(answers(seconds=0.2)) is None
    assert found._min_interval_s == pytest.approx(20.0)
    assert not SnapshotTracker(SnapshotInterval(every_seconds=1000.0)).is_due(1)


def test_first_snapshots_follow_at_doubled_times(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found, taken = SnapshotTracker(SnapshotInterval(every_seconds=10.0)), []
    for step in range(1, 42):
        now += 1.0
        if found.is_due(step):
            found.on_sent(step)
            taken.append(step)
    assert taken == [1, 2, 4, 8, 16, 26, 36]


def test_snapshot_is_due_at_once_at_the_step_from_which_a_run_continues():
    """A loss before the next snapshot would otherwise take the run back further, or to its beginning."""
    found = SnapshotTracker(SnapshotInterval(every_steps=50))
    found.reset_to(20)
    assert found.is_due(20)
    found.on_sent(20)
    assert not found.is_due(20)
    found.reset_to(0)
    assert not found.is_due(0)


@pytest.mark.parametrize("is_requested", [True, False])
def test_only_a_checkpoint_that_nobody_waits_for_is_written_from_a_snapshot(*, is_requested: bool):
    performed: list[tuple[str, Any]] = []
    manager = SimpleNamespace(has_requests=is_requested)
    snapshot = SimpleNamespace(is_due=lambda _: True, perform=lambda _: performed.append(("snapshot", None)))
    checkpoint = SimpleNamespace(
        manager=manager,
        is_due=lambda _: True,
        perform=lambda _, from_snapshot: performed.append(("checkpoint", from_snapshot)),
    )
    parts: Any = (None, None, None, snapshot, checkpoint)
    BoundaryActions(*parts).save_if_due(4, lambda: None)
    assert performed == ([("checkpoint", False)] if is_requested else [("snapshot", None), ("checkpoint", True)])


def test_no_snapshot_is_due_if_snapshots_are_disabled():
    found = SnapshotTracker()
    found.reset_to(20)
    assert not any(found.is_due(step) for step in range(20, 200))


def test_snapshot_error_is_reported_once():
    found = SnapshotTracker(SnapshotInterval(every_steps=5))
    said = [found.on_result(answers(error)) for error in (None, "2 MB short", "3 MB short", None, "2 MB short")]
    assert said == [None, "no snapshot is kept in memory, only on disk: 2 MB short", None, None, None]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        (dtkit.DataParallel(), {}, SnapshotInterval()),
        (dtkit.DataParallel(), {"snapshot_every": 5}, SnapshotInterval()),  # any survivor has the whole state
        (dtkit.Sharded(replicas=2), {}, SnapshotInterval()),
        (dtkit.Sharded(), {}, SnapshotInterval(every_seconds=10.0)),
        (dtkit.Sharded(), {"on_failure": "pause"}, SnapshotInterval(every_seconds=10.0)),
        (dtkit.TensorParallel(4), {"snapshot_every": 5}, SnapshotInterval(every_steps=5)),
        (dtkit.Pipeline(2, 2, replicas=2), {}, SnapshotInterval()),
    ],
    ids=repr,
)
def test_snapshots_are_enabled_only_for_state_that_no_other_rank_holds(
    strategy: Any, options: dict[str, Any], expected: SnapshotInterval
):
    asked = TrainConfig(optimizer=torch.optim.SGD, batch_size=8, **options)
    assert launch._make_snapshot_interval(asked, strategy, 4) == expected


def test_automatic_checkpoint_is_skipped_while_another_one_is_written(tmp_path: Path):
    saver, written = CheckpointManager(History(), lambda: None), threading.Event()
    saver.snapshot_policy = CheckpointPolicy(5, folder=tmp_path, quiet=True, skip_while_writing=True)
    writing = threading.Thread(target=written.wait, args=(60,))
    saver._threads = [writing]
    writing.start()
    assert not saver.is_due(5, 100)
    saver.policy = CheckpointPolicy(5, folder=tmp_path / "asked")
    assert saver.is_due(5, 100)  # what the user asked for is written
    saver.policy = CheckpointPolicy()
    written.set()
    writing.join(60)
    assert saver.is_due(5, 100)


# -- packing -------------------------------------------------------------------------------------------------


def packed(captured: ShardedState) -> torch.Tensor:
    packing = PackedLayout(captured)
    block = torch.empty(packing.nbytes, dtype=torch.uint8)
    packing.pack_into(block)
    return block


def test_packed_state_is_unpacked_unchanged():
    tensors = {
        "odd": torch.tensor([True, False, True]),
        "float": torch.randn(3, 5, dtype=torch.float64),
        "half": torch.randn(7).to(torch.bfloat16),
        "turned": torch.arange(12, dtype=torch.int32).view(3, 4).T,
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "complex": torch.tensor([1 + 2j]),
    }
    shards = {name: TensorShard(tensor, (9, *tensor.shape[1:]), (1,), len(name), 1) for name, tensor in tensors.items()}
    facts = {"per_rank": {"1": {"values": {"random": "abc"}}}, "step": 7}
    block = packed(ShardedState(shards, facts))
    assert {name: t.tolist() for name, t in safetensors.torch.load(block.numpy().tobytes()).items()} == {
        name: t.tolist() for name, t in tensors.items()
    }
    found = unpack_state(block.clone())
    assert found.facts == facts
    assert list(found.shards) == list(tensors)
    for name, shard in found.shards.items():
        assert shard.tensor.dtype == tensors[name].dtype
        assert torch.equal(shard.tensor, tensors[name])
        assert (shard.full_shape, shard.offset) == ((9, *tensors[name].shape[1:]), (1,))
        assert (shard.fused_blocks, shard.fused_dim) == (len(name), 1)
        assert shard.tensor.is_contiguous()


def test_packed_state_is_a_copy():
    weights = torch.ones(4)
    block = packed(ShardedState({"w": TensorShard(weights, (4,), (0,))}, {}))
    weights.zero_()
    assert unpack_state(block).shards["w"].tensor.tolist() == [1.0] * 4


# -- placement of copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aa", 1), ("ab", 1), ("aaaa", 1), ("abab", 1), ("aabb", 2), ("aabbcc", 2), ("aaabbb", 3), ("aaab", 1)],
)
def test_snapshot_copy_is_stored_on_another_host(hosts: str, expected: int):
    assert choose_peer_distance(hosts) == expected


# -- choice of copies in a recovery ---------------------------------------------------------------------------

RING = {0: (0, 3), 1: (1, 0), 2: (2, 1), 3: (3, 2)}  # ranks whose parts each of four ranks holds


def survivors(*ranks: int, steps: dict[int, tuple[int, ...]] | None = None) -> dict[int, JobPosition]:
    """Survivors of four ranks, each with copies of the snapshots at these steps, or at step 20."""
    had = steps or dict.fromkeys(ranks, (20,))
    return {rank: JobPosition(27, True, 0.1, dict.fromkeys(had[rank], RING[rank])) for rank in ranks}


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        (survivors(0, 2, 3), (20, {0: [0], 2: [1, 2], 3: [3]})),
        (survivors(0, 2), (20, {0: [0, 3], 2: [1, 2]})),  # each lost rank has a copy on a survivor
        (survivors(0, 1, 2, 3), (20, {0: [0], 1: [1], 2: [2], 3: [3]})),  # none is lost: an update is incomplete
        (survivors(0, 3), None),  # the part of 1 is lost with its copy on 2
        (survivors(2), None),
        ({}, None),
        # A rank was lost during a snapshot: the previous one is complete, and perhaps the new one too.
        (survivors(0, 2, 3, steps={0: (20, 25), 2: (20,), 3: (20, 25)}), (20, {0: [0], 2: [1, 2], 3: [3]})),
        (survivors(0, 2, 3, steps={0: (25,), 2: (20, 25), 3: (20, 25)}), (25, {0: [0], 2: [1, 2], 3: [3]})),
        (survivors(0, 2, 3, steps={0: (25,), 2: (20,), 3: (20,)}), None),
    ],
)
def test_recovery_chooses_the_latest_complete_snapshot(standings: dict[int, JobPosition], expected: Any):
    assert recovery.choose_snapshot_sources(standings, 4) == expected


class Giving:
    """Survivors that are asked for copies; those in `gone` were lost meanwhile."""

    def __init__(self, *gone: int) -> None:
        self.gone, self.asked, self.discarded = set(gone), [], 0

    def call_independently(self, calls: Any, ranks: Any) -> dict[int, Any]:
        self.asked.append({rank: call.args["ranks"] for rank, call in zip(ranks, calls, strict=True)})
        return {rank: self for rank in ranks if rank not in self.gone}

    def discard(self) -> None:
        self.discarded += 1


def test_recovery_continues_without_a_rank_lost_while_sending_copies():
    giving: Any = Giving(1)
    found = recovery.fetch_snapshot_state(giving, "job", survivors(0, 1, 2), 4, after_step=0)
    assert giving.asked == [{0: [0, 3], 1: [1], 2: [2]}, {0: [0, 3], 2: [1, 2]}]
    assert found is not None
    assert (found.step, len(found.payloads), giving.discarded) == (20, 2, 2)
    assert found.source == "the last snapshot, from the memory of nodes 0 and 2"


def test_snapshot_is_used_only_if_the_disk_has_an_earlier_step():
    giving: Any = Giving()
    assert recovery.fetch_snapshot_state(giving, "job", survivors(0, 2, 3), 4, after_step=20) is None
    found = recovery.fetch_snapshot_state(giving, "job", survivors(0, 2, 3), 4, after_step=19)
    assert found is not None
    assert found.source == "the last snapshot, from node 2's memory"


@pytest.mark.parametrize(("disk_step", "source"), [(19, "memory"), (20, "memory"), (21, "disk"), (None, "memory")])
def test_recovery_takes_the_later_snapshot_of_memory_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_step: int | None, source: str
):
    group: Any = Giving()
    group.world_size, group.folder = 4, tmp_path
    disk = None if disk_step is None else SimpleNamespace(step=disk_step)
    options = SimpleNamespace(strategy=SimpleNamespace(model_shard_id=lambda _, rank: rank))
    plan: Any = SimpleNamespace(job="job", options=options)
    monkeypatch.setattr(recovery.Recovery, "_find_disk_snapshot", lambda _: disk)
    state, snapshot = recovery.Recovery(group, plan, tmp_path)._find_state(survivors(0, 2, 3))
    assert (state is None) == (source == "disk")
    assert snapshot is disk


def test_recovery_removes_unread_results_only_after_they_were_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A notebook that is killed in between has left them to the next one."""
    group: Any = SimpleNamespace(
        world_size=2, folder=tmp_path, is_superseded=False, check_owned=bool, call_independently=lambda *_: {}
    )
    state = recovered_state.RecoveredState(7, ())
    spec = SimpleNamespace(rebuild=lambda *_: (state.step, 0.1))
    plan: Any = SimpleNamespace(job="job", options=SimpleNamespace(on_failure="repair"), job_spec=spec)
    monkeypatch.setattr(recovery.Recovery, "_find_state", lambda *_: (state, None))
    monkeypatch.setattr(recovery, "replace_lost_ranks", lambda *_, rebuild, **__: rebuild())
    monkeypatch.setattr(recovery.engine_outbox, "remove_all", lambda *_: recorded.append("removed"))
    recorded: list[Any] = []
    result = recovery.Recovery(group, plan, tmp_path, recorded.append)([])
    assert recorded == [7, "removed"]
    assert result.step == 7


@pytest.mark.parametrize(
    ("standings", "why"),
    [
        (
            {0: JobPosition(7, is_intact=True), 1: JobPosition(6, is_intact=True), 2: JobPosition(7, is_intact=True)},
            "ranks 0 and 2 had made the update of step 6, and others were broken off before theirs",
        ),
        (
            {0: JobPosition(6, is_intact=True), 1: JobPosition(6, is_intact=False)},
            "an update had begun on a rank and not ended",
        ),
        (
            {0: JobPosition(7, is_intact=True), 1: JobPosition(6, is_intact=False)},
            "an update had begun on a rank and not ended",
        ),
    ],
)
def test_error_explains_why_ranks_are_out_of_sync(standings: dict[int, JobPosition], why: str):
    assert recovery.is_out_of_sync(standings)
    assert recovery.explain_out_of_sync(standings).startswith(why)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "another notebook's by now"])
def test_failed_recovery_frees_its_state_unless_another_notebook_owns_it(tmp_path: Path, *, ours: bool):
    sent = make_payload(pickling.pack_object(torch.zeros(9)), ProcessId.from_pid(), max_inline_bytes=0)
    assert sent.shared_buffer is not None
    run_log.RunLog(tmp_path / run_log.RUNS_FOLDER / "job")
    given = recovered_state.RecoveredState(3, (sent,), "node 1's memory")

    def fails() -> None:
        with given.keep_during_recovery(tmp_path, "job", is_owned=lambda: ours):
            assert recovered_state.load_interrupted(tmp_path, "job") == given
            assert recovered_state.list_jobs(tmp_path) == ["job"]
            raise dtkit.errors.ClusterError("no memory for it")

    with pytest.raises(dtkit.errors.ClusterError, match="no memory"):
        fails()
    assert recovered_state.load_interrupted(tmp_path, "job") == (None if ours else given)
    assert Path(sent.shared_buffer.path).exists() != ours
    given.discard(tmp_path, "job")
    assert not Path(sent.shared_buffer.path).exists()
    assert recovered_state.list_jobs(tmp_path) == []


def test_recovered_state_is_not_stored_for_a_run_that_no_notebook_can_take_over(tmp_path: Path):
    with recovered_state.RecoveredState(3, ()).keep_during_recovery(tmp_path, "job", is_owned=lambda: True):
        assert list(tmp_path.iterdir()) == []
