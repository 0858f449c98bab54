"""What only one rank held is lost with it, and its peer has a copy: the run goes back to it, and needs no disk."""

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
from tests.support.oracle import BATCH, BOUND, CLASSES, FEATURES, SEED, data, difference, mean_loss, momentum
from tests.support.recovery import at_step, kinds
from tests.support.small import check_usable
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

STEPS, EVERY = 120, 20
SHM = Path("/dev/shm")


def net() -> nn.Module:
    """A chain of which four ranks may hold a part each, whichever way it is cut."""
    torch.manual_seed(2)
    layers = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES)).double()


def start(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    how: dict[str, Any] = {"optimizer": momentum, "batch_size": BATCH, "steps": STEPS, "seed": SEED, "loss": mean_loss}
    more = {"shuffle": "global", "snapshot_every": EVERY, "strategy": dtkit.Sharded()}
    return cluster.train(net(), data(), **(how | more | options))


@pytest.fixture(scope="module")
def two() -> Iterator[dtkit.Cluster]:
    """Two engines, and one that waits."""
    with dtkit.Cluster(2, threads=1, spares=1) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[dtkit.Cluster]:
    """Four engines, and one that waits."""
    with dtkit.Cluster(4, threads=1, spares=1) as started:
        yield started


def undisturbed(cluster: dtkit.Cluster, **options: Any) -> dict[str, Any]:
    """What the same run makes of the model when nobody disturbs it."""
    run = start(cluster, **options)
    run.wait(60)
    assert kinds(run) == []
    return run.model.state_dict()  # type: ignore[no-any-return]


def kill(cluster: dtkit.Cluster, *ranks: int) -> None:
    for rank in ranks:
        os.kill(cluster.nodes[rank].pid, signal.SIGKILL)


def repairs(run: dtkit.Run) -> list[str]:
    return [event.text for event in run.history.events if event.kind == "repair"]


def check_went_back(run: dtkit.Run, where: str) -> int:
    """To a snapshot, from there, and at most as far as it is from one to the next. The step."""
    (told,) = repairs(run)
    found = re.search(
        rf"all go on from step (\d+) \(the last snapshot, from {where}\) after .* s, (\d+|no) steps? lost$", told
    )
    assert found is not None, told
    step, lost = int(found[1]), 0 if found[2] == "no" else int(found[2])  # none where it came right after a snapshot
    assert step % EVERY == 0
    assert 0 <= lost <= EVERY
    return step


CUT = [dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)]
CUT4 = [dtkit.Sharded(), dtkit.TensorParallel(4), dtkit.Pipeline(4, 4)]


@pytest.mark.parametrize(
    ("engines", "strategy"),
    [("two", CUT[0]), *(slow("two", cut) for cut in CUT[1:]), *(slow("four", cut) for cut in CUT4)],
    ids=str,
)
def test_what_one_rank_held_is_in_its_peers_memory(
    request: pytest.FixtureRequest, engines: str, strategy: dtkit.Strategy
):
    cluster: dtkit.Cluster = request.getfixturevalue(engines)
    expected = undisturbed(cluster, strategy=strategy)
    dice = random.Random(f"{SEED} {engines} {strategy!r}")
    rank = dice.randrange(cluster.world_size)
    run = start(cluster, strategy=strategy)
    at_step(run, dice.randrange(EVERY + 1, STEPS - 3 * EVERY))
    kill(cluster, rank)
    run.wait(60)
    check_went_back(run, f"node {(rank + 1) % cluster.world_size}'s memory")
    assert difference(run.model.state_dict(), expected) <= BOUND
    assert sorted(set(run.history.totals()["step"])) == list(range(STEPS))
    check_usable(cluster)


@pytest.mark.slow
def test_two_that_keep_no_copies_of_each_other_may_be_lost_at_once(four: dtkit.Cluster):
    expected = undisturbed(four)
    run = start(four)
    at_step(run, 50)
    kill(four, 1, 3)
    run.wait(60)
    assert difference(run.model.state_dict(), expected) <= BOUND
    assert all("memory" in told for told in repairs(run))
    check_usable(four)


@pytest.mark.slow
def test_a_part_that_is_lost_with_its_copy_is_on_disk(four: dtkit.Cluster):
    expected = undisturbed(four)
    run = start(four, start=False)
    run.step(50)
    until(lambda: saved(run) == 2 * EVERY)
    kill(four, 1, 2)
    run.resume()
    run.wait(60)
    assert check_went_back(run, "disk") == 2 * EVERY
    assert difference(run.model.state_dict(), expected) <= BOUND
    check_usable(four)


def saved(run: dtkit.Run) -> int:
    """The step of the last snapshot on disk."""
    with contextlib.suppress(CheckpointError):
        return dtkit.Checkpoint(run._driver.snapshot_folder).step
    return 0


def test_it_needs_no_disk_neither_the_first_time_nor_the_next(two: dtkit.Cluster, small_disk: Path):
    """What a run went back to is kept in memory at once, so that the next one who is lost costs no more."""
    expected = undisturbed(two)
    snapshots = two.make_snapshot_folder("any").parent
    shutil.rmtree(snapshots)
    snapshots.symlink_to(small_disk)
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(2**20))
    try:
        run = start(two, start=False)
        run.step(2 * EVERY + 5)
        assert [event.kind for event in run.history.events if "No space left" in event.text] == ["error"] * 2
        kill(two, 0)
        run.step(1)
        assert check_went_back(run, "node 1's memory") == 2 * EVERY
        run.step(3)
        kill(two, 1)
        run.resume()
        run.wait(60)
    finally:
        snapshots.unlink()
    _, second = repairs(run)
    assert f"step {2 * EVERY} (the last snapshot, from node 0's memory)" in second
    assert difference(run.model.state_dict(), expected) <= BOUND
    check_usable(two)


def wide() -> nn.Module:
    """40 MB, so that a copy of a part of it takes a while on its way."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 500_000), nn.Tanh(), nn.Linear(500_000, CLASSES)).double()


def test_who_dies_amid_an_exchange_leaves_the_snapshot_before(two: dtkit.Cluster):
    """Its message is half on its way, of which gloo tells nobody."""
    two.run(die_amid_an_exchange, 1, 3)
    how: dict[str, Any] = {"loss": mean_loss, "batch_size": BATCH, "steps": 12, "snapshot_every": 2}
    plain = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-5), "shuffle": "global"}
    run = two.train(wide(), data(), strategy=dtkit.Sharded(), **how, **plain)
    run.wait(120)
    (told,) = repairs(run)
    assert "all go on from step 4 (the last snapshot, from node 0's memory)" in told
    assert told.endswith(" 2 steps lost")
    state = run.model.state_dict()
    whole = two.train(wide(), data(), strategy=dtkit.Sharded(), **(how | plain | {"snapshot_every": None}))
    whole.wait(120)
    assert difference(state, whole.model.state_dict()) <= BOUND
    check_usable(two)


def die_amid_an_exchange(rank: int, which: int) -> None:
    import torch.distributed as dist

    from dtkit.engine.state import peer_snapshots

    exchange, calls = peer_snapshots._exchange_blocks, 0

    def die(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == which:
            _, (mine, target), *_ = args
            dist.isend(mine, target)
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(*args)

    if dist.get_rank() == rank:
        peer_snapshots._exchange_blocks = die


def held() -> tuple[list[int], int]:
    """(steps of copies, their bytes) on an engine."""
    from dtkit.engine.session import _session

    copies = [one for found in _session._snapshots.values() for one in found]
    return [one.step for one in copies], sum(one.nbytes for one in copies)


def test_copies_end_with_the_run(two: dtkit.Cluster):
    run = start(two, start=False)
    run.step(EVERY + 1)
    assert [steps for steps, _ in two.run(held)] == [[EVERY]] * 2
    assert [row.snapshots for row in run.memory().rows] == [size for _, size in two.run(held)]
    run.step(EVERY)
    assert [steps for steps, _ in two.run(held)] == [[2 * EVERY]] * 2
    run.release()
    assert two.run(held) == [([], 0)] * 2


def test_nothing_stays_in_shared_memory():
    with dtkit.Cluster(2, threads=1) as cluster:
        mark = f"dtkit-*-{cluster._file_owner.pid}-*"
        how = {"optimizer": torch.optim.SGD, "strategy": dtkit.Sharded(), "steps": 6, "snapshot_every": 2}
        run = cluster.train(wide(), data(), loss=mean_loss, batch_size=BATCH, start=False, **how)
        run.step(3)
        before = set(SHM.glob(mark))
        assert before  # the model, which engines map
        kill(cluster, 1)
        run.resume()
        run.wait(60)
        assert "memory" in repairs(run)[0]
        assert set(SHM.glob(mark)) == before  # what came back of the copies has passed through it
    assert not set(SHM.glob(mark))


def test_a_run_that_goes_on_from_a_checkpoint_goes_back_to_that_at_worst(two: dtkit.Cluster, tmp_path: Path):
    expected = undisturbed(two, steps=40)
    run = start(two, steps=11)
    run.wait(60)
    path = run.save(tmp_path).path
    again = start(two, steps=40, resume_from=path, start=False)
    again.step(3)
    kill(two, 0)
    again.resume()
    again.wait(60)
    (told,) = repairs(again)
    assert re.search(r"from step 11 \(the last snapshot, from node 1's memory\) after .* s, 3 steps lost", told), told
    assert difference(again.model.state_dict(), expected) <= BOUND


@pytest.mark.slow
def test_fewer_go_on_from_the_copies_of_more():
    with dtkit.Cluster(4, threads=1) as cluster:
        run = start(cluster, on_failure="shrink", start=False)
        run.step(50)
        shutil.rmtree(run._driver.snapshot_folder)
        cluster.kill([2])
        run.resume()
        run.wait(60)
        assert cluster.world_size == 3
        assert check_went_back(run, "node 3's memory") == 2 * EVERY
        rows = oracle.global_rows
        assert difference(run.model.state_dict(), oracle.one_process(net(), rows, steps=STEPS)) <= BOUND
        check_usable(cluster)


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)


def test_a_training_close_to_its_limit_of_memory_keeps_none_and_says_so():
    """Steps of this one leave some 110 to 140 MB, and snapshots would take 160 while one takes another's place."""
    with dtkit.Cluster(2, threads=1, memory_limit="280MB") as cluster:
        how = {"optimizer": with_momentum, "strategy": dtkit.Sharded(), "snapshot_every": 2}
        run = cluster.train(wide(), data(), loss=mean_loss, batch_size=4, steps=7, **how)
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED
        (said,) = [event for event in run.history.events if "in memory" in event.text]
        number = r"[\d.]+ MB"
        assert re.fullmatch(
            "no snapshot is kept in memory, only on disk: "
            rf"rank 0 would need {number} of the {number} that training leaves; rank 1 would need .*",
            said.text,
        ), said.text
        assert cluster.run(held) == [([], 0)] * 2
        assert saved(run) > 0


class Odd(torch.optim.lr_scheduler.StepLR):
    """Raises on rank 1 where a snapshot asks for its state, once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, step_size=1000)
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        import torch.distributed as dist

        self.asked += 1
        if self.asked == 1 and dist.get_rank() == 1:
            raise RuntimeError("no state")
        return super().state_dict()


def test_a_snapshot_that_fails_fails_no_training(two: dtkit.Cluster):
    run = start(two, lr_scheduler=Odd, start=False)
    run.step(EVERY + 1)
    (said,) = [event.text for event in run.history.events if event.kind == "error"]
    assert "the snapshot in memory failed" in said
    assert "no state" in said
    run.step(EVERY)
    assert [steps for steps, _ in two.run(held)] == [[2 * EVERY]] * 2
    run.resume()
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


@pytest.mark.parametrize("strategy", [CUT[0], *map(slow, CUT[1:])], ids=str)
def test_a_run_at_rest_loses_nothing(two: dtkit.Cluster, strategy: dtkit.Strategy):
    """Paused, or done: it may stand there for long, and steps that would bring the next snapshot don't come."""
    expected = undisturbed(two, strategy=strategy)
    run = start(two, strategy=strategy, start=False, snapshot_every=None)

    def until_paused() -> None:
        at_step(run, 7)
        run.pause()

    for rank, comes_to_rest in enumerate((until_paused, lambda: run.wait(60))):
        run.resume()
        comes_to_rest()
        stands = run.status.step
        kill(two, rank)
        until(two.find_lost_ranks)
        assert two.repair() == [rank]
        assert run.status.step == stands
        assert repairs(run)[-1].endswith("no step lost")
    assert run.status.state is dtkit.types.State.COMPLETED
    assert difference(run.model.state_dict(), expected) <= BOUND
