"""Engines that are lost, and interrupts: the run goes on from where survivors stand, as if nothing had been."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit.cluster import cluster_file
from dtkit.training.boundary_actions import SnapshotTracker
from tests.support.marks import slow
from tests.support.nets import net
from tests.support.oracle import (
    BATCH,
    BOUND,
    CLASSES,
    FEATURES,
    SEED,
    data,
    difference,
    global_rows,
    mean_loss,
    mlp,
    momentum,
    one_process,
)
from tests.support.recovery import at_step, kinds
from tests.support.small import check_usable
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[dtkit.Cluster]:
    """Two engines, and one that waits."""
    with dtkit.Cluster(2, threads=1, spares=1) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: dtkit.Cluster) -> dict[str, Any]:
    """What the same run makes of the model when nobody disturbs it."""
    run = start(cluster)
    run.wait(60)
    return run.model.state_dict()  # type: ignore[no-any-return]


def start(cluster: dtkit.Cluster, model: nn.Module | None = None, **options: Any) -> dtkit.Run:
    how: dict[str, Any] = {"optimizer": momentum, "batch_size": BATCH, "steps": STEPS, "seed": SEED}
    return cluster.train(
        mlp() if model is None else model, data(), **{"loss": mean_loss, "shuffle": "global", **how, **options}
    )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (dtkit.DataParallel(), {}),
        slow(dtkit.Sharded(), {"snapshot_every": 50}),
        slow(dtkit.Pipeline(2, micro_batches=2), {"snapshot_every": 50}),
    ],
    ids=repr,
)
def test_a_killed_engine_is_replaced_and_training_is_as_undisturbed(
    cluster: dtkit.Cluster, undisturbed: dict[str, Any], strategy: Any, options: dict[str, Any]
):
    expected = undisturbed
    if strategy != dtkit.DataParallel():  # sums are rounded otherwise, and 600 steps make that larger
        alone = start(cluster, strategy=strategy)
        alone.wait(60)
        expected = alone.model.state_dict()
    run = start(cluster, strategy=strategy, **options)
    at_step(run, 120)
    os.kill(cluster.nodes[1].pid, signal.SIGKILL)
    run.wait(120)
    assert kinds(run) == ["lost", "repair"]
    assert difference(run.model.state_dict(), expected) <= BOUND
    assert sorted(set(run.history.totals()["step"])) == list(range(STEPS))
    if not options:  # a survivor had it all
        assert "no step lost" in next(e.text for e in run.history.events if e.kind == "repair")
    check_usable(cluster)


def once(path: Path) -> None:
    """End this process, if there is this file; then there is none any more."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class DeadlyRows(torch.utils.data.Dataset[Any]):
    """Held-out data. Who reads a row of it where there is the file, ends."""

    def __init__(self, deadly: Path) -> None:
        self.rows, self.deadly = data(), deadly

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        once(self.deadly)
        return self.rows[0][index], self.rows[1][index]


class DeadlyPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Halves the learning rate after every epoch but the first. Rank 1 then ends, where there is the file."""

    def __init__(self, optimizer: Any, deadly: Path) -> None:
        super().__init__(optimizer, factor=0.5, patience=0, threshold=0.99)
        self.deadly = deadly

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "deadly"}

    def step(self, metrics: Any, epoch: Any = None) -> None:
        super().step(metrics, epoch)
        if torch.distributed.get_rank() == 1:
            once(self.deadly)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(dtkit.DataParallel(), {}), (dtkit.Pipeline(2, micro_batches=2), {"snapshot_every": 4})],
    ids=["replicas", "pipeline"],
)
@pytest.mark.parametrize(("moment", "epoch"), [("amid", 2), slow("behind", 2), slow("amid", 4)])
def test_an_evaluation_in_which_an_engine_is_lost_is_made_again_and_taken_once(
    cluster: dtkit.Cluster, tmp_path: Path, strategy: Any, options: dict[str, Any], moment: str, epoch: int
):
    """`behind`: another rank had taken its loss. `epoch` 4 is the last one; callbacks see all four in any case."""
    amid, behind, seen = tmp_path / "amid", tmp_path / "behind", []

    def begin() -> dtkit.Run:
        return start(
            cluster,
            strategy=strategy,
            steps=24,
            validation=DeadlyRows(amid),
            lr_scheduler=lambda optimizer: DeadlyPlateau(optimizer, behind),
            lr_scheduler_every="epoch",
            callbacks=[lambda run: seen.append([e.step for e in run.history.evaluations])],
            start=False,
            **options,
        )

    straight = begin()
    straight.resume()
    straight.wait(60)
    assert straight.history.rows()["lr"][-1] == 0.025
    expected, told = straight.model.state_dict(), list(seen)
    seen.clear()
    run = begin()
    run.step(6 * epoch - 2)
    (tmp_path / moment).touch()
    run.resume()
    run.wait(60)
    assert kinds(run) == ["lost", "repair"]
    assert seen == told == [[6], [6, 12], [6, 12, 18], [6, 12, 18, 24]]
    assert run.history.rows()["lr"][-1] == 0.025
    assert difference(run.model.state_dict(), expected) <= BOUND
    ours, theirs = ([e.values["loss"] for e in one.history.evaluations] for one in (run, straight))
    assert ours == pytest.approx(theirs, abs=BOUND)


def test_a_second_loss_is_given_the_engine_that_was_to_be_the_next_spare(cluster: dtkit.Cluster):
    """It comes sooner than one that is started when that has come."""
    transport: Any = cluster._transport
    until(lambda: transport.spare_ids, 60)
    spare = transport.spare_ids[0]
    cluster.kill([1])
    assert cluster.repair() == [1]
    assert transport.engine_ids[1] == spare
    cluster.kill([0])
    assert cluster.repair() == [0]
    assert transport.engine_ids[0] == spare + 1  # engines are numbered as they come
    check_usable(cluster)
    until(lambda: transport.spare_ids == [spare + 2], 30)


def test_a_spare_that_was_started_later_is_where_a_takeover_finds_it(cluster: dtkit.Cluster):
    transport: Any = cluster._transport
    until(lambda: transport.spare_ids, 60)
    spare = transport.spare_ids[0]
    transport._use_spare(1)  # and no replacing after it, which would sign, too
    transport._refill_spares()
    assert cluster_file.read_cluster_file(cluster.folder).spare_ids == (spare + 1,)
    cluster.form_process_group(ranks_changed=True)
    check_usable(cluster)


def test_a_learning_rate_outlives_a_snapshot_that_is_older(cluster: dtkit.Cluster):
    run = start(cluster, strategy=dtkit.Pipeline(2, micro_batches=2), snapshot_every=10, steps=40, start=False)
    run.step(14)
    run.set(lr=0.025)
    run.step(2)
    cluster.kill([1])
    run.resume()
    run.wait(60)
    (told,) = (event.text for event in run.history.events if event.kind == "repair")
    assert "6 steps lost" in told
    again = run.history.rows()[-2 * 30 :]
    assert set(again["step"]) == set(range(10, 40))
    assert set(again["lr"]) == {0.025}  # none is taken with a rate that nobody wants any more


@pytest.fixture(scope="module")
def cluster4() -> Iterator[dtkit.Cluster]:
    """Four engines, and one that waits."""
    with dtkit.Cluster(4, threads=1, spares=1) as started:
        yield started


@pytest.mark.parametrize("strategy", [slow(dtkit.DataParallel()), slow(dtkit.Sharded(replicas=2))], ids=repr)
def test_three_that_survive_the_fourth_lose_one_step_at_most(cluster4: dtkit.Cluster, strategy: Any):
    """Some may have had all that they needed for a step, and others not; what three hold makes a whole."""
    steps = 200  # DDP made anew sums four gradients in another order: 1e-14 by then, and 3e-12 after STEPS
    alone = start(cluster4, strategy=strategy, steps=steps)
    alone.wait(60)
    expected = alone.model.state_dict()
    before = [node.pid for node in cluster4.nodes]
    run = start(cluster4, strategy=strategy, steps=steps)
    at_step(run, 30)
    os.kill(before[1], signal.SIGKILL)
    run.wait(60)
    assert kinds(run) == ["lost", "repair"]
    (told,) = (event.text for event in run.history.events if event.kind == "repair")
    assert re.search(r" (no|1) step lost$", told), told
    assert [node.rank for node in cluster4.nodes if node.pid not in before] == [1]
    assert sorted(set(run.history.totals()["step"])) == list(range(steps))
    assert difference(run.model.state_dict(), expected) <= BOUND
    check_usable(cluster4)


@pytest.mark.parametrize("kind", ["encoder", slow("gpt")])
@pytest.mark.slow
def test_the_heads_of_a_lost_engine_come_from_the_other_replica(cluster4: dtkit.Cluster, kind: str):
    """Of queries, keys and values in one parameter, survivors have parts of each."""
    steps, strategy = 40, dtkit.TensorParallel(2, replicas=2)
    alone = start(cluster4, net(kind), strategy=strategy, steps=steps)
    alone.wait(60)
    expected = alone.model.state_dict()
    run = start(cluster4, net(kind), strategy=strategy, steps=steps, start=False)
    run.step(10)
    os.kill(cluster4.nodes[1].pid, signal.SIGKILL)
    run.resume()
    run.wait(60)
    assert kinds(run) == ["lost", "repair"]
    assert sorted(set(run.history.totals()["step"])) == list(range(steps))
    assert difference(run.model.state_dict(), expected) <= 1e-10
    check_usable(cluster4)


def test_a_run_goes_on_with_fewer():
    with dtkit.Cluster(2, threads=1) as cluster:
        run = start(cluster, on_failure="shrink", steps=60, start=False)
        run.step(20)
        cluster.kill([0])
        run.resume()
        run.wait(120)
        assert (cluster.world_size, run.spec.world_size) == (1, 1)
        assert difference(run.model.state_dict(), one_process(mlp(), global_rows, steps=60)) <= BOUND
        check_usable(cluster)


class Noting:
    """A step that writes down which rows it was given: their first numbers, of which no two are equal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        with (self.folder / str(os.getpid())).open("a") as file:
            file.writelines(f"{number!r}\n" for number in inputs[:, 0].tolist())
        return mean_loss(model(inputs), targets)


@pytest.mark.parametrize(("shuffle", "at"), [slow("global", 20), ("shard", 18)], ids=["within", "between epochs"])
@pytest.mark.slow
def test_three_of_four_go_on_and_miss_no_row(tmp_path: Path, shuffle: str, at: int):
    """Shards are dealt anew: within an epoch only one order of all rows goes on as if there had been as many ever."""
    with dtkit.Cluster(4, threads=1) as cluster:
        noting: dict[str, Any] = {"loss": None, "training_step": Noting(tmp_path)}
        run = start(cluster, on_failure="shrink", shuffle=shuffle, steps=60, start=False, **noting)
        run.step(at)
        cluster.kill([1])
        run.resume()
        run.wait(60)
        assert (cluster.world_size, run.spec.world_size, kinds(run)) == (3, 3, ["lost", "repair"])
        assert run.history.totals()["ranks"].tolist() == [4] * at + [3] * (60 - at)
        wanted = collections.Counter(dict.fromkeys(data()[0][:, 0].tolist(), 10))
        seen = collections.Counter(float(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines())
        assert wanted <= seen
        assert (seen - wanted).total() <= BATCH  # of a step that survivors had begun, and took again
        if shuffle == "global":
            assert difference(run.model.state_dict(), one_process(mlp(), global_rows, steps=60)) <= BOUND
        check_usable(cluster)


def test_a_run_waits_to_be_repaired(cluster: dtkit.Cluster, undisturbed: dict[str, Any]):
    run = start(cluster, on_failure="pause")
    at_step(run, 120)
    cluster.kill([1])
    with pytest.raises(dtkit.errors.PausedError, match="rank 1 is gone"):
        run.wait(60)
    assert run.status.state is dtkit.types.State.PAUSED
    assert cluster.repair() == [1]
    run.resume()
    run.wait(120)
    assert difference(run.model.state_dict(), undisturbed) <= BOUND


def test_an_ended_run_is_repaired_saved_and_extended_from_where_it_stands(
    cluster: dtkit.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A part of it is nowhere but in a snapshot, of an earlier step: of the last one, say, there was no copy."""
    monkeypatch.setattr(SnapshotTracker, "is_missing", lambda *_: False)
    options: dict[str, Any] = {"strategy": dtkit.Pipeline(2, micro_batches=2), "snapshot_every": 50}
    alone = start(cluster, steps=140, **options)
    alone.wait(60)
    expected = alone.model.state_dict()
    run = start(cluster, steps=120, **options)
    run.wait(60)
    cluster.kill([1])
    run.repair()
    assert (run.status.state, run.status.step, run.lr) == (dtkit.types.State.COMPLETED, 100, 0.1)
    assert "all go on from step 100" in next(e.text for e in run.history.events if e.kind == "repair")
    assert run.save(tmp_path / "saved").step == 100
    run.extend(steps=40)
    assert run.spec.steps == 140
    run.wait(60)
    assert sorted(set(run.history.totals()["step"])) == list(range(140))
    assert difference(run.model.state_dict(), expected) <= BOUND
    check_usable(cluster)


@pytest.mark.slow
def test_engines_that_are_lost_at_one_step_again_and_again_end_the_run(cluster: dtkit.Cluster):
    run = start(cluster, loss=leaving, steps=20)
    with pytest.raises(dtkit.errors.EngineError, match="its process has ended"):
        run.wait(180)
    assert run.status.state is dtkit.types.State.FAILED
    assert kinds(run) == [*["lost", "repair"] * 3, "lost"]
    assert "lost 4 times in a row at step 0" in run.history.events[-2].text + run.history.events[-1].text
    assert cluster.repair() == [1]
    check_usable(cluster)


def leaving(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As C code that crashes on one rank's samples."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    return mean_loss(output, target)


def test_what_an_update_that_fails_costs_is_told(cluster: dtkit.Cluster):
    """A rank that fails amid its update has its part of the model torn, and there is no other copy of it."""
    run = start(cluster, strategy=dtkit.Sharded(), optimizer=Failing, snapshot_every=25, start=False)
    run.resume()
    with pytest.raises(dtkit.errors.EngineError, match="no more updates"):
        run.wait(60)
    at = run.status.step
    assert at in (25, 50)
    (told,) = [event.text for event in run.history.events if "go back" in event.text]
    assert told.startswith(f"all go back to step {at}, {60 - at} steps lost")


class Failing(torch.optim.SGD):
    """Raises on rank 1 in its update of step 60."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        import torch.distributed as dist

        self.updates += 1
        if self.updates > 60 and dist.get_rank() == 1:
            raise RuntimeError("no more updates")
        return super().step(closure)


def test_after_all_engines_were_lost_one_trains_anew(cluster: dtkit.Cluster):
    run = start(cluster, steps=100_000)
    at_step(run, 30)
    cluster.kill([0, 1])
    with pytest.raises(dtkit.DtkitError):
        run.wait(120)
    cluster.repair()
    check_usable(cluster)


def test_an_interrupt_of_some_steps_pauses_them(cluster: dtkit.Cluster):
    run = start(cluster, steps=200_000, start=False)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run.step(100_000)
    assert run.status.state is dtkit.types.State.PAUSED
    assert run.status.step < 100_000
    run.stop()


def test_a_training_replaces_first_what_was_lost_before_it(cluster: dtkit.Cluster):
    part = cluster.partition(data())
    cluster.kill([1])
    run = cluster.train(mlp(), part, loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=3)
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED
    assert "lost" not in kinds(run)


def test_an_idle_cluster_is_repaired_by_hand(cluster: dtkit.Cluster):
    part, copies = cluster.partition(data()), cluster.broadcast(mlp())
    done = cluster.train(copies, part, loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=3)
    done.wait(60)
    cluster.kill([0])
    with pytest.raises(dtkit.errors.EngineError, match=r"cluster\.repair\(\) starts another one"):
        cluster.run(os.getpid)
    assert cluster.repair() == [0]
    assert len(set(cluster.run(os.getpid))) == 2
    done.extend(steps=2)  # its job was made anew, with a survivor's state
    done.wait(60)
    run = cluster.train(copies, part, loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=3)  # so were these
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


def interrupted(after: Callable[[], Any], times: int = 1) -> None:
    """Interrupt this process's main thread, as the notebook's button does, once `after` has returned."""

    def press() -> None:
        after()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_an_interrupt_pauses_between_two_steps(cluster: dtkit.Cluster, undisturbed: dict[str, Any]):
    run = start(cluster)
    interrupted(lambda: at_step(run, 50))
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert run.status.state is dtkit.types.State.PAUSED
    run.resume()
    run.wait(60)
    assert difference(run.model.state_dict(), undisturbed) <= BOUND


def sleep_for_long() -> None:
    """What an interrupt ends."""
    # sleeps: under test: a rank that sleeps during a step
    time.sleep(600)


def stop_this_process() -> None:
    """It hears of no interrupt, unless somebody has it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Stuck:
    """A loss that does not return, once, in the midst of a step of one rank."""

    def __init__(self, folder: Path, how: Callable[[], None]) -> None:
        self.folder, self.how = folder, how

    def __call__(self, output: Any, target: Any) -> Any:
        import torch.distributed as dist

        flag = self.folder / "stuck"
        seen = self.calls = getattr(self, "calls", 0) + 1
        if seen > 20 and dist.get_rank() == 1 and not flag.exists():
            flag.touch()
            self.how()
        return mean_loss(output, target)


def press_twice(stuck: Path) -> list[float]:
    """Interrupt this process once a rank is stuck, and once more; the list gets the time of the second interrupt."""
    pressed: list[float] = []

    def twice() -> None:
        until(stuck.exists, 60)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.3)
        pressed.append(time.monotonic())

    interrupted(twice)
    return pressed


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        (sleep_for_long, dtkit.DataParallel()),
        (stop_this_process, dtkit.DataParallel()),
        slow(stop_this_process, dtkit.Pipeline(2, 2)),
    ],
    ids=["asleep", "stopped", "stopped in a pipeline"],
)
def test_a_second_interrupt_breaks_off_what_is_stuck(
    cluster: dtkit.Cluster, tmp_path: Path, how: Any, strategy: dtkit.Strategy
):
    straight = start(cluster, strategy=strategy)
    straight.wait(60)
    undisturbed = straight.model.state_dict()
    run = start(cluster, loss=Stuck(tmp_path, how), strategy=strategy)
    engines = [node.pid for node in cluster.nodes]
    pressed = press_twice(tmp_path / "stuck")
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert time.monotonic() - pressed[0] < 3
    assert run.status.state is dtkit.types.State.PAUSED
    assert [node.pid for node in cluster.nodes] == engines
    assert [e.text for e in run.history.events if "broken off" in e.text]
    assert cluster.run(os.getpid)  # at once: nobody sleeps any more
    run.resume()
    run.wait(60)
    assert difference(run.model.state_dict(), undisturbed) <= BOUND


def run_in_c() -> None:
    """It holds the interpreter, and looks for no signal."""
    collections.deque(itertools.repeat(None), maxlen=0)


def test_a_second_interrupt_gives_up_a_rank_that_lets_none_in(cluster: dtkit.Cluster, tmp_path: Path):
    """It is ended, and the spare takes its place: nothing else gets the others out."""
    until(lambda: cluster._transport.spare_ids, 60)  # type: ignore[attr-defined]
    run = start(cluster, loss=Stuck(tmp_path, run_in_c))
    pressed = press_twice(tmp_path / "stuck")
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert run._driver.wait(10)
    assert time.monotonic() - pressed[0] < 5  # two in which it is found out, and what a repair takes
    assert run.status.state is dtkit.types.State.PAUSED
    assert kinds(run) == ["lost", "repair"]
    run.resume()
    run.wait(60)
    assert run.history.totals()["step"].tolist() == list(range(STEPS))


class Endless:
    """A metric that does not return. It says when it was begun."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def __call__(self, *_: Any) -> float:
        self.begun.touch()
        while True:
            threading.Event().wait(0.01)


def test_an_evaluation_by_hand_that_is_interrupted_ends_on_the_engines_too(cluster: dtkit.Cluster, tmp_path: Path):
    """Whether or not a second interrupt comes before they have ended it."""
    run = start(cluster, start=False)
    run.step(5)
    engines = [node.pid for node in cluster.nodes]
    for presses in (1, 2):
        begun = tmp_path / f"begun-{presses}"

        def press(begun: Path = begun, presses: int = presses) -> None:
            until(begun.exists)
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.02)

        presser = threading.Thread(target=press, daemon=True)
        presser.start()
        with contextlib.suppress(KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            run.evaluate(data(), metrics={"endless": Endless(begun)})
        with contextlib.suppress(KeyboardInterrupt):  # the second may come as late as here
            presser.join(10)
        presser.join(10)
        assert cluster.run(os.getpid) == engines
    assert run.evaluate(data()).samples == len(data()[0])
    run.step(5)
    assert run.status.step == 10
    run.stop()


@pytest.fixture
def waits() -> Iterator[Callable[[dtkit.Run], int]]:
    """Waits for a run again and again, with ten interrupts meanwhile; how many of them it raised.

    Interrupts may come late: outside of `wait` they are nobody's, as in a notebook between two cells.
    """
    waiting = False

    def handle(*_: object) -> None:
        if waiting:
            raise KeyboardInterrupt

    def waits(run: dtkit.Run) -> int:
        nonlocal waiting
        pressed, raised = threading.Event(), 0

        def press() -> None:
            for _ in range(10):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.05)
            pressed.set()

        threading.Thread(target=press, daemon=True).start()
        while not pressed.is_set():
            try:
                waiting = True
                run.wait(1)
            except KeyboardInterrupt:
                raised += 1
            except TimeoutError:
                pass
            finally:
                waiting = False
        return raised

    before = signal.signal(signal.SIGINT, handle)
    yield waits
    signal.signal(signal.SIGINT, before)


def test_ten_interrupts_leave_a_working_cluster(
    cluster: dtkit.Cluster, undisturbed: dict[str, Any], waits: Callable[[dtkit.Run], int]
):
    run = start(cluster)
    at_step(run, 30)
    assert waits(run)
    run.pause()
    run.resume()
    run.wait(60)
    assert difference(run.model.state_dict(), undisturbed) <= BOUND
    check_usable(cluster)


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), dtkit.Pipeline(2, 2)], ids=["data", "pipeline"])
def test_ranks_agree_anew_where_one_was_interrupted_as_they_had_agreed(
    cluster: dtkit.Cluster, strategy: dtkit.Strategy
):
    """The other knows the loss's form, so that its next collective would be another one: gloo ends a process for it."""
    engines = [node.pid for node in cluster.nodes]
    cluster.run(interrupt_once_agreed)
    run = start(cluster, strategy=strategy, steps=20)
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED
    assert [node.pid for node in cluster.nodes] == engines
    assert kinds(run) == []


def interrupt_once_agreed() -> None:
    import torch.distributed as dist

    from dtkit.strategies import gradients

    agree = gradients.agree_on_loss_form

    def agree_and_be_interrupted(*args: Any) -> int:
        agree(*args)
        gradients.agree_on_loss_form = agree
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("nothing was interrupted")

    if dist.get_rank() == 0:
        gradients.agree_on_loss_form = agree_and_be_interrupted


def wide() -> nn.Module:
    """Between whose halves 6 MB travel: long enough that a message is half way when it is broken off."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 100_000), nn.Tanh(), nn.Linear(100_000, CLASSES)).double()


@pytest.mark.slow
def test_interrupts_amid_large_messages_cost_no_engine(cluster: dtkit.Cluster):
    """gloo does not tell who waits for a message that is half read: it took the time limit, and then the engine."""
    strategy = dtkit.Pipeline(2, 2, split=["1"])
    run = cluster.train(
        wide(), data(), loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=100_000, strategy=strategy
    )
    engines = [node.pid for node in cluster.nodes]
    moments, pause = random.Random(SEED), threading.Event()
    for _ in range(25):
        pause.wait(moments.random() * 0.2)  # as above
        run._driver.submit("break").result(30)
        assert run.status.state is dtkit.types.State.PAUSED
        run.resume()
    run.stop()
    assert [node.pid for node in cluster.nodes] == engines
    check_usable(cluster)


def test_interrupts_at_any_moment_lose_no_row(cluster: dtkit.Cluster, undisturbed: dict[str, Any]):
    """Also where one comes as an engine answers, or between two of its calls."""
    run = start(cluster)
    moments, pause = random.Random(SEED), threading.Event()
    for _ in range(25):
        pause.wait(moments.random() * 0.05)  # not for anything to happen: to come at another moment each time
        if run.status.state.has_ended:
            break
        run._driver.submit("break").result(30)
        assert run.status.state in (dtkit.types.State.PAUSED, dtkit.types.State.COMPLETED), run.exception
        if run.status.state is dtkit.types.State.PAUSED:
            run.resume()
    run.wait(60)
    assert run.history.totals()["step"].tolist() == list(range(STEPS))
    assert difference(run.model.state_dict(), undisturbed) <= BOUND
