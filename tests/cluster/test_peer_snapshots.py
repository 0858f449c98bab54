"""Parts that only one rank held are restored from the snapshot in its peer's memory, without a disk."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit.errors import CheckpointError
from tests.support import oracle
from tests.support.marks import slow
from tests.support.oracle import BATCH, BOUND, CLASSES, FEATURES, SEED, data, max_difference, mean_loss, momentum
from tests.support.recovery import list_loss_events, wait_for_step
from tests.support.small import check_usable
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

STEPS, EVERY = 120, 20
SHM = Path("/dev/shm")


def net() -> nn.Module:
    """Return a chain that every strategy can divide among cluster4_with_spare ranks."""
    torch.manual_seed(2)
    layers = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES)).double()


def start(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    arguments: dict[str, Any] = {"optimizer": momentum, "batch_size": BATCH, "steps": STEPS, "seed": SEED}
    arguments |= {"loss": mean_loss, "shuffle": "global", "snapshot_every": EVERY, "strategy": dtkit.Sharded()}
    return cluster.train(net(), data(), **(arguments | options))


@pytest.fixture(scope="module")
def cluster_with_spare() -> Iterator[dtkit.Cluster]:
    """Two engines and a spare."""
    with dtkit.Cluster(2, threads=1, spares=1) as started:
        yield started


@pytest.fixture(scope="module")
def cluster4_with_spare() -> Iterator[dtkit.Cluster]:
    """Four engines and a spare."""
    with dtkit.Cluster(4, threads=1, spares=1) as started:
        yield started


def train_undisturbed(cluster: dtkit.Cluster, **options: Any) -> dict[str, Any]:
    """Return the final parameters of an undisturbed run."""
    run = start(cluster, **options)
    run.wait(60)
    assert list_loss_events(run) == []
    return run.model.state_dict()  # type: ignore[no-any-return]


def kill(cluster: dtkit.Cluster, *ranks: int) -> None:
    for rank in ranks:
        os.kill(cluster.nodes[rank].pid, signal.SIGKILL)


def list_repairs(run: dtkit.Run) -> list[str]:
    return [event.text for event in run.history.events if event.kind == "repair"]


def check_restored(run: dtkit.Run, source: str) -> int:
    """Check that the run continued from its last snapshot, read from `source`, and return that step."""
    (text,) = list_repairs(run)
    match = re.search(
        rf"all go on from step (\d+) \(the last snapshot, from {source}\) .* s after the loss, (\d+|no) steps? lost$",
        text,
    )
    assert match is not None, text
    step, lost = int(match[1]), 0 if match[2] == "no" else int(match[2])  # 0 right after a snapshot
    assert step % EVERY == 0
    assert 0 <= lost <= EVERY
    return step


SHARDING = [dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)]
SHARDING4 = [dtkit.Sharded(), dtkit.TensorParallel(4), dtkit.Pipeline(4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "strategy"),
    [
        ("cluster_with_spare", SHARDING[0]),
        *(slow("cluster_with_spare", strategy) for strategy in SHARDING[1:]),
        *(slow("cluster4_with_spare", strategy) for strategy in SHARDING4),
    ],
    ids=str,
)
def test_lost_part_is_restored_from_the_peers_memory(
    request: pytest.FixtureRequest, fixture: str, strategy: dtkit.Strategy
):
    cluster: dtkit.Cluster = request.getfixturevalue(fixture)
    expected = train_undisturbed(cluster, strategy=strategy)
    generator = random.Random(f"{SEED} {fixture} {strategy!r}")
    rank = generator.randrange(cluster.world_size)
    run = start(cluster, strategy=strategy)
    wait_for_step(run, generator.randrange(EVERY + 1, STEPS - 3 * EVERY))
    kill(cluster, rank)
    run.wait(60)
    check_restored(run, f"node {(rank + 1) % cluster.world_size}'s memory")
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    assert sorted(set(run.history.totals()["step"])) == list(range(STEPS))
    check_usable(cluster)


@pytest.mark.slow
def test_evaluation_of_an_undone_step_is_gone_at_once(cluster_with_spare: dtkit.Cluster):
    killed_at: list[int] = []
    ahead: list[tuple[int, int]] = []

    def kill_beyond_a_snapshot(run: dtkit.Run) -> None:
        if not killed_at and run.status.step > EVERY and run.status.step % EVERY:
            killed_at.append(run.status.step)
            kill(cluster_with_spare, 1)

    run = start(cluster_with_spare, start=False, validation=data(), callbacks=[kill_beyond_a_snapshot])

    def look() -> None:
        step, evaluations = run.status.step, run.history.evaluations
        if list_repairs(run) and evaluations and evaluations[-1].step > step:
            ahead.append((step, evaluations[-1].step))

    unsubscribe = run.subscribe(look)
    run.resume()
    run.wait(60)
    unsubscribe()
    assert check_restored(run, "node 0's memory") < killed_at[0]
    assert ahead == []
    steps = [evaluation.step for evaluation in run.history.evaluations]
    assert killed_at[0] in steps
    assert steps == sorted({*range(steps[0], STEPS, steps[0]), STEPS})


@pytest.mark.slow
def test_two_ranks_that_are_not_peers_may_be_lost_at_once(cluster4_with_spare: dtkit.Cluster):
    expected = train_undisturbed(cluster4_with_spare)
    run = start(cluster4_with_spare)
    wait_for_step(run, 50)
    kill(cluster4_with_spare, 1, 3)
    run.wait(60)
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    assert all("memory" in text for text in list_repairs(run))
    check_usable(cluster4_with_spare)


@pytest.mark.slow
def test_part_lost_with_its_peer_snapshot_is_restored_from_disk(cluster4_with_spare: dtkit.Cluster):
    expected = train_undisturbed(cluster4_with_spare)
    run = start(cluster4_with_spare, start=False)
    run.step(EVERY)
    wait_until(lambda: get_saved_step(run) == EVERY)
    run.step(3)
    kill(cluster4_with_spare, 1, 2)
    run.resume()
    run.wait(60)
    assert check_restored(run, "disk") == EVERY
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    check_usable(cluster4_with_spare)


def get_saved_step(run: dtkit.Run) -> int:
    """Return the step of the last snapshot on disk."""
    with contextlib.suppress(CheckpointError):
        return dtkit.Checkpoint(run._driver.snapshot_folder).step
    return 0


def count_disk_errors(run: dtkit.Run) -> int:
    return sum(event.kind == "error" and "No space left" in event.text for event in run.history.events)


@pytest.mark.slow
def test_repeated_recovery_needs_no_disk(cluster_with_spare: dtkit.Cluster, small_disk: Path):
    """The restored state is a snapshot in memory at once, so that the next loss needs no disk either."""
    expected = train_undisturbed(cluster_with_spare)
    snapshots = cluster_with_spare._engine_group.cluster_folder.make_snapshot_folder("any").parent
    shutil.rmtree(snapshots)
    snapshots.symlink_to(small_disk)
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(2**20))
    try:
        run = start(cluster_with_spare, start=False)
        run.step(2 * EVERY)
        wait_until(lambda: count_disk_errors(run))
        kill(cluster_with_spare, 0)
        run.step(1)
        assert check_restored(run, "node 1's memory") == 2 * EVERY
        run.step(3)
        kill(cluster_with_spare, 1)
        run.resume()
        run.wait(60)
    finally:
        snapshots.unlink()
    _, second = list_repairs(run)
    assert re.search(r"step 4\d \(the last snapshot, from node 0's memory\)", second), second
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    check_usable(cluster_with_spare)


def test_steps_that_a_user_asked_for_are_not_lost_with_an_engine(cluster_with_spare: dtkit.Cluster):
    expected = train_undisturbed(cluster_with_spare)
    run = start(cluster_with_spare, start=False, snapshot_every=STEPS)  # none among these steps, however slow they are
    run.step(EVERY + 1)
    kill(cluster_with_spare, 1)
    run.resume()
    run.wait(60)
    (text,) = list_repairs(run)
    assert f"all go on from step {EVERY + 1} " in text
    assert max_difference(run.model.state_dict(), expected) <= BOUND


def wide() -> nn.Module:
    """Return a model of 40 MB, so that sending a snapshot takes a while."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 500_000), nn.Tanh(), nn.Linear(500_000, CLASSES)).double()


@pytest.mark.slow
def test_death_during_an_exchange_keeps_the_previous_snapshot(cluster_with_spare: dtkit.Cluster):
    """The peer has received half of the message, and gloo reports no error."""
    cluster_with_spare.run(die_during_exchange, 1, 3)
    options: dict[str, Any] = {"loss": mean_loss, "batch_size": BATCH, "steps": 12, "snapshot_every": 2}
    more = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-5), "shuffle": "global"}
    run = cluster_with_spare.train(wide(), data(), strategy=dtkit.Sharded(), **options, **more)
    run.wait(120)
    (text,) = list_repairs(run)
    assert "all go on from step 4 (the last snapshot, from node 0's memory)" in text
    assert text.endswith(" 2 steps lost")
    state = run.model.state_dict()
    undisturbed = cluster_with_spare.train(
        wide(), data(), strategy=dtkit.Sharded(), **(options | more | {"snapshot_every": None})
    )
    undisturbed.wait(120)
    assert max_difference(state, undisturbed.model.state_dict()) <= BOUND
    check_usable(cluster_with_spare)


def die_during_exchange(rank: int, call: int) -> None:
    import torch.distributed as dist

    from dtkit.engine.state import peer_snapshots

    exchange, calls = peer_snapshots._exchange_blocks, 0

    def die(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            _, (block, target), *_ = args
            dist.isend(block, target)
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(*args)

    if dist.get_rank() == rank:
        peer_snapshots._exchange_blocks = die


def list_snapshots() -> tuple[list[int], int]:
    """Return the steps of this engine's snapshots, and their bytes together."""
    from dtkit.engine.session import get_session

    snapshots = [snapshot for by_job in get_session().state.snapshots.values() for snapshot in by_job]
    return [snapshot.step for snapshot in snapshots], sum(snapshot.nbytes for snapshot in snapshots)


def test_snapshots_are_removed_with_the_run(cluster_with_spare: dtkit.Cluster):
    run = start(cluster_with_spare, start=False)
    run.step(EVERY + 1)
    assert [steps for steps, _ in cluster_with_spare.run(list_snapshots)] == [[EVERY]] * 2
    assert [row.snapshots for row in run.memory().rows] == [size for _, size in cluster_with_spare.run(list_snapshots)]
    run.step(EVERY)
    assert [steps for steps, _ in cluster_with_spare.run(list_snapshots)] == [[2 * EVERY]] * 2
    run.release()
    assert cluster_with_spare.run(list_snapshots) == [([], 0)] * 2


@pytest.mark.slow
def test_recovery_leaves_nothing_in_shared_memory():
    with dtkit.Cluster(2, threads=1) as cluster:
        pattern = f"dtkit-*-{cluster._engine_group.membership.config.file_owner.pid}-*"
        options = {"optimizer": torch.optim.SGD, "strategy": dtkit.Sharded(), "steps": 6, "snapshot_every": 2}
        run = cluster.train(wide(), data(), loss=mean_loss, batch_size=BATCH, start=False, **options)
        run.step(3)
        before = set(SHM.glob(pattern))
        assert before  # the model, which engines map
        kill(cluster, 1)
        run.resume()
        run.wait(60)
        assert "memory" in list_repairs(run)[0]
        assert set(SHM.glob(pattern)) == before  # the restored snapshots passed through it
    assert not set(SHM.glob(pattern))


@pytest.mark.slow
def test_resumed_run_falls_back_to_its_checkpoint_at_worst(cluster_with_spare: dtkit.Cluster, tmp_path: Path):
    expected = train_undisturbed(cluster_with_spare, steps=40)
    run = start(cluster_with_spare, steps=11)
    run.wait(60)
    path = run.save(tmp_path).path
    resumed = start(cluster_with_spare, steps=40, resume_from=path, start=False)
    resumed.step(3)
    kill(cluster_with_spare, 0)
    resumed.resume()
    resumed.wait(60)
    (text,) = list_repairs(resumed)
    assert re.search(
        r"from step 11 \(the last snapshot, from node 1's memory\) .* s after the loss, 3 steps lost", text
    ), text
    assert max_difference(resumed.model.state_dict(), expected) <= BOUND


@pytest.mark.slow
def test_shrunken_run_continues_from_snapshots_of_more_ranks():
    with dtkit.Cluster(4, threads=1) as cluster:
        run = start(cluster, on_failure="shrink", start=False)
        run.step(50)
        shutil.rmtree(run._driver.snapshot_folder)
        cluster._engine_group.transport.kill([2])
        run.resume()
        run.wait(60)
        assert cluster.world_size == 3
        assert check_restored(run, "node 3's memory") == 2 * EVERY
        rows = oracle.get_global_rows
        assert max_difference(run.model.state_dict(), oracle.train_in_one_process(net(), rows, steps=STEPS)) <= BOUND
        check_usable(cluster)


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)


@pytest.mark.slow
def test_run_close_to_its_memory_limit_keeps_no_snapshot_in_memory():
    """Steps leave about 110 to 140 MB; replacing one snapshot by the next would take 160 MB."""
    with dtkit.Cluster(2, threads=1, memory_limit="280MB") as cluster:
        options = {"optimizer": with_momentum, "strategy": dtkit.Sharded(), "snapshot_every": 2}
        run = cluster.train(wide(), data(), loss=mean_loss, batch_size=4, steps=7, **options)
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED
        (entry,) = [event for event in run.history.events if "in memory" in event.text]
        number = r"[\d.]+ MB"
        assert re.fullmatch(
            "no snapshot is kept in memory, only on disk: "
            rf"node 0 would need {number} of the {number} that training leaves; node 1 would need .*",
            entry.text,
        ), entry.text
        assert cluster.run(list_snapshots) == [([], 0)] * 2
        assert get_saved_step(run) > 0


class FailingScheduler(torch.optim.lr_scheduler.StepLR):
    """Scheduler whose state raises once, on rank 1."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, step_size=1000)
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        import torch.distributed as dist

        self.calls += 1
        if self.calls == 1 and dist.get_rank() == 1:
            raise RuntimeError("no state")
        return super().state_dict()


@pytest.mark.slow
def test_failed_snapshot_does_not_fail_the_run(cluster_with_spare: dtkit.Cluster):
    run = start(cluster_with_spare, lr_scheduler=FailingScheduler, start=False)
    run.step(EVERY + 1)
    (text,) = [event.text for event in run.history.events if event.kind == "error"]
    assert "the snapshot in memory failed" in text
    assert "no state" in text
    run.step(EVERY)
    assert [steps for steps, _ in cluster_with_spare.run(list_snapshots)] == [[2 * EVERY]] * 2
    run.resume()
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


@pytest.mark.parametrize("strategy", [SHARDING[0], *map(slow, SHARDING[1:])], ids=str)
@pytest.mark.slow
def test_engine_lost_while_paused_or_completed_costs_no_step(
    cluster_with_spare: dtkit.Cluster, strategy: dtkit.Strategy
):
    """A paused or completed run needs a current snapshot, since no further step triggers one."""
    expected = train_undisturbed(cluster_with_spare, strategy=strategy)
    run = start(cluster_with_spare, strategy=strategy, start=False, snapshot_every=None)

    def pause_at_step_7() -> None:
        wait_for_step(run, 7)
        run.pause()

    for rank, come_to_rest in enumerate((pause_at_step_7, lambda: run.wait(60))):
        run.resume()
        come_to_rest()
        step = run.status.step
        kill(cluster_with_spare, rank)
        wait_until(cluster_with_spare._engine_group.membership.find_lost_ranks)
        assert cluster_with_spare.repair() == [rank]
        assert run.status.step == step
        assert list_repairs(run)[-1].endswith("no step lost")
    assert run.status.state is dtkit.types.State.COMPLETED
    assert max_difference(run.model.state_dict(), expected) <= BOUND
