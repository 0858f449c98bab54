"""Lost engines and interrupts: the run continues from the survivors' state, to the same result."""

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
import torch.distributed as dist
from torch import nn

import dtkit
from dtkit.cluster import cluster_file
from dtkit.training.snapshot_tracker import SnapshotTracker
from tests.support.marks import slow
from tests.support.nets import make_net
from tests.support.oracle import (
    BATCH,
    BOUND,
    CLASSES,
    FEATURES,
    SEED,
    data,
    get_global_rows,
    max_difference,
    mean_loss,
    mlp,
    momentum,
    train_in_one_process,
)
from tests.support.recovery import list_loss_events, wait_for_step
from tests.support.small import check_usable
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[dtkit.Cluster]:
    """Two engines and a spare."""
    with dtkit.Cluster(2, threads=1, spares=1) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: dtkit.Cluster) -> dict[str, Any]:
    """Final parameters of an undisturbed run."""
    run = start(cluster)
    run.wait(60)
    return run.model.state_dict()  # type: ignore[no-any-return]


def start(cluster: dtkit.Cluster, model: nn.Module | None = None, **options: Any) -> dtkit.Run:
    arguments: dict[str, Any] = {"optimizer": momentum, "batch_size": BATCH, "steps": STEPS, "seed": SEED}
    return cluster.train(
        mlp() if model is None else model, data(), **{"loss": mean_loss, "shuffle": "global", **arguments, **options}
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
def test_killed_engine_is_replaced_and_training_is_unchanged(
    cluster: dtkit.Cluster, undisturbed: dict[str, Any], strategy: Any, options: dict[str, Any]
):
    expected = undisturbed
    if strategy != dtkit.DataParallel():  # other sums round differently, which 600 steps amplify
        reference = start(cluster, strategy=strategy)
        reference.wait(60)
        expected = reference.model.state_dict()
    run = start(cluster, strategy=strategy, **options)
    wait_for_step(run, 120)
    os.kill(cluster.nodes[1].pid, signal.SIGKILL)
    run.wait(120)
    assert list_loss_events(run) == ["lost", "repair"]
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    assert sorted(set(run.history.totals()["step"])) == list(range(STEPS))
    if not options:  # a survivor has the whole model
        assert "no step lost" in next(e.text for e in run.history.events if e.kind == "repair")
    check_usable(cluster)


@pytest.mark.slow
def test_the_slow_first_validation_of_a_replaced_engine_is_no_stall(cluster: dtkit.Cluster, tmp_path: Path):
    """It was marked as stuck, for good, after five seconds."""
    flag, known = tmp_path / "go on", {node.pid for node in cluster.nodes}

    def patient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        while torch.distributed.is_initialized() and os.getpid() not in known and not flag.exists():
            # sleeps: on an engine, which has nothing else to wait for
            time.sleep(0.02)
        return (output.argmax(1) == target).float().mean()

    run = start(cluster, validation=data(), metrics={"patient": patient}, steps=60, start=False)
    run.step(20)
    os.kill(cluster.nodes[1].pid, signal.SIGKILL)
    run.resume()
    try:
        wait_until(lambda: re.search(r"validating for ([89]|\d\d) s$", repr(run.status)), timeout=60)
    finally:
        flag.touch()
    run.wait(60)
    assert list_loss_events(run) == ["lost", "repair"]
    assert not [event for event in run.history.events if event.kind == "stuck"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replaced_rank_draws_the_numbers_of_the_lost_one(cluster: dtkit.Cluster, rank: int):
    """Its generator's state was lost with it, so dropout follows from the step."""
    layers = list(mlp().children())
    net = nn.Sequential(*layers[:2], nn.Dropout(0.3), *layers[2:])
    undisturbed = start(cluster, net, steps=60)
    undisturbed.wait(60)
    run = start(cluster, net, steps=60, start=False)
    run.step(25)
    os.kill(cluster.nodes[rank].pid, signal.SIGKILL)
    run.resume()
    run.wait(60)
    assert list_loss_events(run) == ["lost", "repair"]
    assert max_difference(run.model.state_dict(), undisturbed.model.state_dict()) <= BOUND


def die_once(path: Path) -> None:
    """Remove the file and end this process, if the file exists."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class DeadlyRows(torch.utils.data.Dataset[Any]):
    """Validation data that ends the process which reads a row while the file exists."""

    def __init__(self, flag: Path) -> None:
        self.rows, self.flag = data(), flag

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        die_once(self.flag)
        return self.rows[0][index], self.rows[1][index]


class DeadlyPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Halves the learning rate after each epoch but the first; rank 1 then ends if the file exists."""

    def __init__(self, optimizer: Any, flag: Path) -> None:
        super().__init__(optimizer, factor=0.5, patience=0, threshold=0.99)
        self.flag = flag

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "flag"}

    def step(self, metrics: Any, epoch: Any = None) -> None:
        super().step(metrics, epoch)
        if torch.distributed.get_rank() == 1:
            die_once(self.flag)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [(dtkit.DataParallel(), {}), slow(dtkit.Pipeline(2, micro_batches=2), {"snapshot_every": 4})],
    ids=["replicas", "pipeline"],
)
@pytest.mark.parametrize(("moment", "epoch"), [("during", 2), slow("after", 2), slow("during", 4)])
def test_evaluation_interrupted_by_a_lost_engine_is_repeated_and_counted_once(
    cluster: dtkit.Cluster, tmp_path: Path, strategy: Any, options: dict[str, Any], moment: str, epoch: int
):
    """`after`: another rank has used the loss already. Epoch 4 is the last; callbacks see all four epochs."""
    during, after, seen = tmp_path / "during", tmp_path / "after", []

    def begin() -> dtkit.Run:
        return start(
            cluster,
            strategy=strategy,
            steps=24,
            validation=DeadlyRows(during),
            lr_scheduler=lambda optimizer: DeadlyPlateau(optimizer, after),
            lr_scheduler_every="epoch",
            callbacks=[lambda run: seen.append([e.step for e in run.history.evaluations])],
            start=False,
            **options,
        )

    undisturbed_run = begin()
    undisturbed_run.resume()
    undisturbed_run.wait(60)
    assert undisturbed_run.history.rows()["lr"][-1] == 0.025
    expected, expected_seen = undisturbed_run.model.state_dict(), list(seen)
    seen.clear()
    run = begin()
    run.step(6 * epoch - 2)
    (tmp_path / moment).touch()
    run.resume()
    run.wait(60)
    assert list_loss_events(run) == ["lost", "repair"]
    assert seen == expected_seen == [[6], [6, 12], [6, 12, 18], [6, 12, 18, 24]]
    assert run.history.rows()["lr"][-1] == 0.025
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    losses, expected_losses = ([e.values["loss"] for e in r.history.evaluations] for r in (run, undisturbed_run))
    assert losses == pytest.approx(expected_losses, abs=BOUND)


class DeadlyLoss(nn.Module):
    """Mean loss that ends rank 1 in its 400th step while the file exists."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag, self.num_calls = flag, 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        if self.num_calls == 400 and torch.distributed.get_rank() == 1:
            die_once(self.flag)
        return mean_loss(output, target)


def test_evaluations_that_engines_made_before_a_loss_are_recorded(cluster: dtkit.Cluster, tmp_path: Path):
    """A message has many steps with evaluations between them. Those of the message with the loss were left out."""

    def train(flag: Path) -> dtkit.Run:
        run = start(cluster, loss=DeadlyLoss(flag), validation=data(), validation_every=1)
        run.wait(120)
        return run

    undisturbed_run = train(tmp_path / "missing")
    (tmp_path / "flag").touch()
    run = train(tmp_path / "flag")
    assert list_loss_events(run) == ["lost", "repair"]
    expected = {e.step: e.values["loss"] for e in undisturbed_run.history.evaluations}
    assert {e.step: e.values["loss"] for e in run.history.evaluations} == pytest.approx(expected, abs=BOUND)
    assert not any("evaluations found" in event.text for event in run.history.events)


def test_an_engine_that_ends_after_its_run_is_reported_until_it_is_replaced():
    with dtkit.Cluster(2, spares=0) as cluster:
        run = start(cluster)
        run.wait(60)
        assert run.ended_engines == {}
        os.kill(run.nodes[1].pid, signal.SIGKILL)
        wait_until(lambda: run.ended_engines, 30)
        (reason,) = run.ended_engines.values()
        assert list(run.ended_engines) == [1]
        assert "has ended (killed by signal 9, SIGKILL, " in reason
        assert "cluster.repair() starts another one" in reason
        assert run.status.state is dtkit.types.State.COMPLETED
        assert run.exception is None
        assert cluster.repair() == [1]
        assert run.ended_engines == {}
    assert run.ended_engines is None


@pytest.mark.slow
def test_second_lost_engine_is_replaced_by_the_next_spare(cluster: dtkit.Cluster):
    """The next spare is ready sooner than an engine that is started after the loss."""
    transport: Any = cluster._engine_group.transport
    wait_until(lambda: transport.spare_ids, 60)
    spare = transport.spare_ids[0]
    cluster._engine_group.transport.kill([1])
    assert cluster.repair() == [1]
    assert transport.engine_ids[1] == spare
    cluster._engine_group.transport.kill([0])
    assert cluster.repair() == [0]
    assert transport.engine_ids[0] == spare + 1  # ids are given in the order of registration
    check_usable(cluster)
    wait_until(lambda: transport.spare_ids == [spare + 2], 30)


@pytest.mark.slow
def test_later_spare_is_shown_and_recorded_in_the_cluster_file(cluster: dtkit.Cluster):
    transport: Any = cluster._engine_group.transport
    wait_until(lambda: transport.spare_ids, 60)
    assert repr(cluster).startswith("Cluster of 2 engines and 1 spare, gloo\n")
    spare = transport.spare_ids[0]
    transport._use_spare(1)  # without `replace`, which writes the cluster file, too
    transport._refill_spares()
    assert cluster_file.read_cluster_file(cluster.folder).spare_ids == (spare + 1,)
    cluster._engine_group.membership.form_process_group(ranks_changed=True)
    check_usable(cluster)


@pytest.mark.slow
def test_learning_rate_survives_recovery_from_an_older_snapshot(cluster: dtkit.Cluster):
    run = start(cluster, strategy=dtkit.Pipeline(2, micro_batches=2), snapshot_every=10, steps=40, start=False)
    run.step(14)
    run.set(lr=0.025)
    run.step(2)
    cluster._engine_group.transport.kill([1])
    run.resume()
    run.wait(60)
    (text,) = (event.text for event in run.history.events if event.kind == "repair")
    assert "6 steps lost" in text
    repeated = run.history.rows()[-2 * 30 :]
    assert set(repeated["step"]) == set(range(10, 40))
    assert set(repeated["lr"]) == {0.025}  # not the rate at the time of the snapshot


@pytest.fixture(scope="module")
def cluster4() -> Iterator[dtkit.Cluster]:
    """Four engines and a spare."""
    with dtkit.Cluster(4, threads=1, spares=1) as started:
        yield started


@pytest.mark.parametrize("strategy", [slow(dtkit.DataParallel()), slow(dtkit.Sharded(replicas=2))], ids=repr)
def test_three_survivors_lose_at_most_one_step(cluster4: dtkit.Cluster, strategy: Any):
    """Some survivors may have completed a step and others not; together they hold the whole model."""
    steps = 200  # a new DDP sums four gradients in another order, and STEPS steps would amplify that above BOUND
    reference = start(cluster4, strategy=strategy, steps=steps)
    reference.wait(60)
    expected = reference.model.state_dict()
    before = [node.pid for node in cluster4.nodes]
    run = start(cluster4, strategy=strategy, steps=steps)
    wait_for_step(run, 30)
    os.kill(before[1], signal.SIGKILL)
    run.wait(60)
    assert list_loss_events(run) == ["lost", "repair"]
    (text,) = (event.text for event in run.history.events if event.kind == "repair")
    assert re.search(r" (no|1) step lost$", text), text
    assert [node.rank for node in cluster4.nodes if node.pid not in before] == [1]
    assert sorted(set(run.history.totals()["step"])) == list(range(steps))
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    check_usable(cluster4)


@pytest.mark.parametrize("kind", ["encoder", slow("gpt")])
@pytest.mark.slow
def test_attention_heads_of_a_lost_engine_come_from_the_other_replica(cluster4: dtkit.Cluster, kind: str):
    """Survivors hold parts of queries, keys and values, which are one parameter."""
    steps, strategy = 40, dtkit.TensorParallel(2, replicas=2)
    reference = start(cluster4, make_net(kind), strategy=strategy, steps=steps)
    reference.wait(60)
    expected = reference.model.state_dict()
    run = start(cluster4, make_net(kind), strategy=strategy, steps=steps, start=False)
    run.step(10)
    os.kill(cluster4.nodes[1].pid, signal.SIGKILL)
    run.resume()
    run.wait(60)
    assert list_loss_events(run) == ["lost", "repair"]
    assert sorted(set(run.history.totals()["step"])) == list(range(steps))
    assert max_difference(run.model.state_dict(), expected) <= 1e-10
    check_usable(cluster4)


def test_run_shrinks_and_continues_after_a_loss():
    with dtkit.Cluster(2, threads=1) as cluster:
        run = start(cluster, on_failure="shrink", steps=60, start=False)
        run.step(20)
        cluster._engine_group.transport.kill([0])
        run.resume()
        run.wait(120)
        assert (cluster.world_size, run.spec.world_size) == (1, 1)
        assert max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows, steps=60)) <= BOUND
        check_usable(cluster)


class RecordingStep:
    """Training step that records its rows by their first numbers, which are unique."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        with (self.folder / str(os.getpid())).open("a") as file:
            file.writelines(f"{number!r}\n" for number in inputs[:, 0].tolist())
        return mean_loss(model(inputs), targets)


@pytest.mark.parametrize(("shuffle", "at"), [slow("global", 20), ("shard", 18)], ids=["within", "between epochs"])
@pytest.mark.slow
def test_three_of_four_engines_continue_and_skip_no_row(tmp_path: Path, shuffle: str, at: int):
    """The rows are divided into new shards; only shuffle="global" continues exactly within an epoch."""
    with dtkit.Cluster(4, threads=1) as cluster:
        recording: dict[str, Any] = {"loss": None, "training_step": RecordingStep(tmp_path)}
        run = start(cluster, on_failure="shrink", shuffle=shuffle, steps=60, start=False, **recording)
        run.step(at)
        cluster._engine_group.transport.kill([1])
        run.resume()
        run.wait(60)
        assert (cluster.world_size, run.spec.world_size, list_loss_events(run)) == (3, 3, ["lost", "repair"])
        assert run.history.totals()["ranks"].tolist() == [4] * at + [3] * (60 - at)
        expected = collections.Counter(dict.fromkeys(data()[0][:, 0].tolist(), 10))
        of_engines = [path for path in tmp_path.iterdir() if path.name != str(os.getpid())]  # without the trial here
        seen = collections.Counter(float(line) for path in of_engines for line in path.read_text().splitlines())
        assert expected <= seen
        assert (seen - expected).total() <= BATCH  # the survivors repeat at most one step
        if shuffle == "global":
            assert (
                max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows, steps=60)) <= BOUND
            )
        check_usable(cluster)


@pytest.mark.slow
def test_run_with_on_failure_pause_waits_for_a_repair(cluster: dtkit.Cluster, undisturbed: dict[str, Any]):
    run = start(cluster, on_failure="pause")
    wait_for_step(run, 120)
    cluster._engine_group.transport.kill([1])
    with pytest.raises(dtkit.errors.PausedError, match="rank 1 is gone"):
        run.wait(60)
    assert run.status.state is dtkit.types.State.PAUSED
    assert cluster.repair() == [1]
    run.resume()
    run.wait(120)
    assert max_difference(run.model.state_dict(), undisturbed) <= BOUND


@pytest.mark.slow
def test_completed_run_is_repaired_saved_and_extended(
    cluster: dtkit.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A part of the model is only in a snapshot of an earlier step, since the last one was not saved."""
    monkeypatch.setattr(SnapshotTracker, "is_missing", lambda *_, **__: False)
    options: dict[str, Any] = {"strategy": dtkit.Pipeline(2, micro_batches=2), "snapshot_every": 50}
    reference = start(cluster, steps=140, **options)
    reference.wait(60)
    expected = reference.model.state_dict()
    run = start(cluster, steps=120, **options)
    run.wait(60)
    cluster._engine_group.transport.kill([1])
    run.repair()
    assert (run.status.state, run.status.step, run.lr) == (dtkit.types.State.COMPLETED, 100, 0.1)
    assert "all go on from step 100" in next(e.text for e in run.history.events if e.kind == "repair")
    assert run.save(tmp_path / "saved").step == 100
    run.extend(steps=40)
    assert run.spec.steps == 140
    run.wait(60)
    assert sorted(set(run.history.totals()["step"])) == list(range(140))
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    check_usable(cluster)


@pytest.mark.slow
def test_run_fails_after_repeated_losses_at_one_step(cluster: dtkit.Cluster):
    run = start(cluster, loss=crash_on_rank_1, steps=20)
    with pytest.raises(
        dtkit.errors.EngineError, match=r"its process has ended \(exit status 3\)\. This happened 4 times"
    ):
        run.wait(180)
    assert run.status.state is dtkit.types.State.FAILED
    assert list_loss_events(run) == [*["lost", "repair"] * 3, "lost"]
    assert "lost 4 times in a row at step 0" in run.history.events[-2].text + run.history.events[-1].text
    assert cluster.repair() == [1]
    check_usable(cluster)


def crash_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """End the process of rank 1, as a crash in C code does."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    return mean_loss(output, target)


def test_failed_update_logs_the_lost_steps(cluster: dtkit.Cluster):
    """A rank that fails during its update holds a partially updated part, of which there is no other copy."""
    run = start(cluster, strategy=dtkit.Sharded(), optimizer=FailingSGD, snapshot_every=25, start=False)
    run.resume()
    with pytest.raises(dtkit.errors.EngineError, match="no more updates"):
        run.wait(60)
    step = run.status.step
    assert step in (25, 50)
    (text,) = [event.text for event in run.history.events if "go back" in event.text]
    assert text.startswith(f"all go back to step {step}, {60 - step} steps lost")


class FailingSGD(torch.optim.SGD):
    """Optimizer that raises on rank 1 in the update of step 60."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        import torch.distributed as dist

        self.updates += 1
        if self.updates > 60 and dist.get_rank() == 1:
            raise RuntimeError("no more updates")
        return super().step(closure)


@pytest.mark.slow
def test_cluster_is_usable_after_losing_all_engines(cluster: dtkit.Cluster):
    run = start(cluster, steps=100_000)
    wait_for_step(run, 30)
    cluster._engine_group.transport.kill([0, 1])
    with pytest.raises(dtkit.DtkitError):
        run.wait(120)
    cluster.repair()
    check_usable(cluster)


def test_interrupt_of_run_step_pauses_the_run(cluster: dtkit.Cluster):
    run = start(cluster, steps=200_000, start=False)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run.step(100_000)
    assert run.status.state is dtkit.types.State.PAUSED
    assert run.status.step < 100_000
    run.stop()


def test_train_first_replaces_engines_that_were_lost_earlier(cluster: dtkit.Cluster):
    part = cluster.partition(data())
    cluster._engine_group.transport.kill([1])
    run = cluster.train(mlp(), part, loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=3)
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED
    assert "lost" not in list_loss_events(run)


@pytest.mark.slow
def test_idle_cluster_is_repaired_by_hand(cluster: dtkit.Cluster):
    part, model = cluster.partition(data()), cluster.broadcast(mlp())
    completed = cluster.train(model, part, loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=3)
    completed.wait(60)
    cluster._engine_group.transport.kill([0])
    with pytest.raises(dtkit.errors.EngineError, match=r"cluster\.repair\(\) starts another one"):
        cluster.run(os.getpid)
    assert cluster.repair() == [0]
    assert len(set(cluster.run(os.getpid))) == 2
    completed.extend(steps=2)  # its job was rebuilt from a survivor's state
    completed.wait(60)
    # The model and the data were rebuilt, too.
    run = cluster.train(model, part, loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=3)
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


def interrupt_after(event: Callable[[], Any], times: int = 1) -> None:
    """Interrupt this process's main thread, as the notebook's button does, after `event` has returned."""

    def press() -> None:
        event()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_interrupt_pauses_between_two_steps(cluster: dtkit.Cluster, undisturbed: dict[str, Any]):
    run = start(cluster)
    interrupt_after(lambda: wait_for_step(run, 50))
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert run.status.state is dtkit.types.State.PAUSED
    run.resume()
    run.wait(60)
    assert max_difference(run.model.state_dict(), undisturbed) <= BOUND


def sleep_for_long() -> None:
    """Sleep until an interrupt."""
    # sleeps: under test: a rank that sleeps during a step
    time.sleep(600)


def stop_this_process() -> None:
    """Stop this process, which gets signals only after it is continued."""
    os.kill(os.getpid(), signal.SIGSTOP)


class StuckLoss:
    """Loss that gets stuck once, during a step of rank 1."""

    def __init__(self, folder: Path, get_stuck: Callable[[], None]) -> None:
        self.folder, self.get_stuck = folder, get_stuck

    def __call__(self, output: Any, target: Any) -> Any:
        import torch.distributed as dist

        flag = self.folder / "stuck"
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 20 and dist.get_rank() == 1 and not flag.exists():
            flag.touch()
            self.get_stuck()
        return mean_loss(output, target)


def interrupt_twice(flag: Path) -> list[float]:
    """Interrupt this process twice once `flag` exists; the returned list gets the time of the second interrupt."""
    sent_at: list[float] = []

    def interrupt() -> None:
        wait_until(flag.exists, 60)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.3)
        sent_at.append(time.monotonic())

    interrupt_after(interrupt)
    return sent_at


@pytest.mark.parametrize(
    ("get_stuck", "strategy"),
    [
        slow(sleep_for_long, dtkit.DataParallel()),
        (stop_this_process, dtkit.DataParallel()),
        slow(stop_this_process, dtkit.Pipeline(2, 2)),
    ],
    ids=["asleep", "stopped", "stopped in a pipeline"],
)
def test_second_interrupt_aborts_a_stuck_step(
    cluster: dtkit.Cluster, tmp_path: Path, get_stuck: Any, strategy: dtkit.Strategy
):
    reference = start(cluster, strategy=strategy)
    reference.wait(60)
    undisturbed = reference.model.state_dict()
    run = start(cluster, loss=StuckLoss(tmp_path, get_stuck), strategy=strategy)
    engines = [node.pid for node in cluster.nodes]
    sent_at = interrupt_twice(tmp_path / "stuck")
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert time.monotonic() - sent_at[0] < 3
    assert run.status.state is dtkit.types.State.PAUSED
    assert [node.pid for node in cluster.nodes] == engines
    assert [e.text for e in run.history.events if "broken off" in e.text]
    assert cluster.run(os.getpid)  # no rank sleeps any more
    run.resume()
    run.wait(60)
    assert max_difference(run.model.state_dict(), undisturbed) <= BOUND


def run_in_c() -> None:
    """Hold the interpreter in C, without checks for signals."""
    collections.deque(itertools.repeat(None), maxlen=0)


@pytest.mark.slow
def test_second_interrupt_replaces_a_rank_that_ignores_signals(cluster: dtkit.Cluster, tmp_path: Path):
    """Only replacing the rank by the spare releases the others."""
    wait_until(lambda: cluster._engine_group.transport.spare_ids, 60)  # type: ignore[attr-defined]
    run = start(cluster, loss=StuckLoss(tmp_path, run_in_c))
    sent_at = interrupt_twice(tmp_path / "stuck")
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert run._driver.wait(10)
    assert time.monotonic() - sent_at[0] < 5  # two seconds for the detection, and the repair
    assert run.status.state is dtkit.types.State.PAUSED
    assert list_loss_events(run) == ["lost", "repair"]
    run.resume()
    run.wait(60)
    assert run.history.totals()["step"].tolist() == list(range(STEPS))


class EndlessMetric:
    """Metric that does not return; it creates a file when it is called."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, *_: Any) -> float:
        self.flag.touch()
        while True:
            threading.Event().wait(0.01)


def test_interrupted_evaluate_call_ends_on_the_engines(cluster: dtkit.Cluster, tmp_path: Path):
    """The number of interrupts before the engines have ended the call doesn't matter."""
    run = start(cluster, start=False)
    run.step(5)
    engines = [node.pid for node in cluster.nodes]
    for count in (1, 2):
        flag = tmp_path / f"called-{count}"

        def interrupt(flag: Path = flag, count: int = count) -> None:
            wait_until(flag.exists)
            for _ in range(count):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.02)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with contextlib.suppress(KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            run.evaluate(data(), metrics={"endless": EndlessMetric(flag)})
        with contextlib.suppress(KeyboardInterrupt):  # the second interrupt may arrive here
            thread.join(10)
        thread.join(10)
        assert cluster.run(os.getpid) == engines
    assert run.evaluate(data()).samples == len(data()[0])
    run.step(5)
    assert run.status.step == 10
    run.stop()


@pytest.fixture
def interrupted_wait() -> Iterator[Callable[[dtkit.Run], int]]:
    """Function that waits for a run during ten interrupts, and returns how many of them it raised.

    Late interrupts outside `wait` have no effect, as in a notebook between two cells.
    """
    waiting = False

    def handle(*_: object) -> None:
        if waiting:
            raise KeyboardInterrupt

    def wait(run: dtkit.Run) -> int:
        nonlocal waiting
        all_sent, raised = threading.Event(), 0

        def interrupt() -> None:
            for _ in range(10):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.05)
            all_sent.set()

        threading.Thread(target=interrupt, daemon=True).start()
        while not all_sent.is_set():
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
    yield wait
    signal.signal(signal.SIGINT, before)


def test_ten_interrupts_leave_a_working_cluster(
    cluster: dtkit.Cluster, undisturbed: dict[str, Any], interrupted_wait: Callable[[dtkit.Run], int]
):
    run = start(cluster)
    wait_for_step(run, 30)
    assert interrupted_wait(run)
    run.pause()
    run.resume()
    run.wait(60)
    assert max_difference(run.model.state_dict(), undisturbed) <= BOUND
    check_usable(cluster)


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), dtkit.Pipeline(2, 2)], ids=["data", "pipeline"])
def test_ranks_agree_again_on_the_loss_form_after_an_interrupt(cluster: dtkit.Cluster, strategy: dtkit.Strategy):
    """Otherwise the next collectives of the ranks would differ, for which gloo ends a process."""
    engines = [node.pid for node in cluster.nodes]
    cluster.run(interrupt_after_agreement)
    run = start(cluster, strategy=strategy, steps=20)
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED
    assert [node.pid for node in cluster.nodes] == engines
    assert list_loss_events(run) == []


def interrupt_after_agreement() -> None:
    import torch.distributed as dist

    from dtkit.strategies import gradients

    agree = gradients.agree_on_loss_form

    def agree_and_interrupt(*args: Any) -> int:
        agree(*args)
        gradients.agree_on_loss_form = agree
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("SIGINT raised no KeyboardInterrupt")

    if dist.get_rank() == 0:
        gradients.agree_on_loss_form = agree_and_interrupt


def wide() -> nn.Module:
    """Return a model whose halves exchange 6 MB, so that an interrupt can hit a message."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 100_000), nn.Tanh(), nn.Linear(100_000, CLASSES)).double()


@pytest.mark.slow
def test_interrupts_during_large_messages_lose_no_engine(cluster: dtkit.Cluster):
    """gloo raises no error in a rank that has read half of a message."""
    strategy = dtkit.Pipeline(2, 2, split=["1"])
    run = cluster.train(
        wide(), data(), loss=mean_loss, optimizer=momentum, batch_size=BATCH, steps=100_000, strategy=strategy
    )
    engines = [node.pid for node in cluster.nodes]
    moments, pause = random.Random(SEED), threading.Event()
    for _ in range(25):
        pause.wait(moments.random() * 0.2)  # a different moment each time
        run._driver.submit("interrupt").result(30)
        assert run.status.state is dtkit.types.State.PAUSED
        run.resume()
    run.stop()
    assert [node.pid for node in cluster.nodes] == engines
    check_usable(cluster)


def test_interrupts_at_any_moment_lose_no_row(cluster: dtkit.Cluster, undisturbed: dict[str, Any]):
    """Interrupts may also hit an engine that answers, or that is between two calls."""
    run = start(cluster)
    moments, pause = random.Random(SEED), threading.Event()
    for _ in range(25):
        pause.wait(moments.random() * 0.05)  # a different moment each time
        if run.status.state.has_ended:
            break
        run._driver.submit("interrupt").result(30)
        assert run.status.state in (dtkit.types.State.PAUSED, dtkit.types.State.COMPLETED), run.exception
        if run.status.state is dtkit.types.State.PAUSED:
            run.resume()
    run.wait(60)
    assert run.history.totals()["step"].tolist() == list(range(STEPS))
    assert max_difference(run.model.state_dict(), undisturbed) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), dtkit.Pipeline(2, 2)], ids=str)
def test_group_that_cannot_be_formed_again_fails_the_run_with_the_reason(strategy: Any):
    def break_forming() -> None:
        from dtkit.engine.comm.process_group import Group

        def refuse(*_: object, **__: object) -> None:
            raise TypeError("no group here")

        if dist.get_rank() == 1:
            Group.__init__ = refuse

    def fail_on_rank_0() -> None:
        if dist.get_rank() == 0:
            raise ValueError("so that the group is formed again")
        dist.barrier()

    with dtkit.Cluster(2, threads=1) as cluster:
        run = start(cluster, steps=50, strategy=strategy, start=False)
        run.step(2)
        cluster.run(break_forming)
        with pytest.raises(dtkit.errors.EngineError, match="so that the group"):
            cluster.run(fail_on_rank_0)
        run.resume()
        with pytest.raises(dtkit.errors.EngineError, match="TypeError: no group here"):
            run.wait(60)


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics of a batch")
def test_lost_running_statistics_of_batch_norm_are_told(cluster: dtkit.Cluster):
    """Parameters are as in an undisturbed run, and the statistics that `run.model` averages over the ranks aren't."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(data()[0].shape[1], dtype=torch.float64), mlp())
    states = []
    for is_disturbed in (False, True):
        run = start(cluster, model, steps=20, start=False, drop_last=True)
        run.step(10)
        if is_disturbed:
            run.inject_fault("kill", 1)
        run.resume()
        run.wait(60)
        states.append(run.model.state_dict())
    (repair,) = [event.text for event in run.history.events if event.kind == "repair"]
    assert repair.endswith("no step lost; running statistics of BatchNorm there are lost")
    expected, found = states
    for name in expected:
        assert torch.equal(expected[name], found[name]) == (name not in ("0.running_mean", "0.running_var"))
