"""Saving and resuming on real engines: the same parameters as without a break, on any layout."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit._util.deadline import wait_until
from tests.support import oracle, small
from tests.support.marks import slow
from tests.support.oracle import BOUND, max_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.cluster.conftest import SharedCluster

pytestmark = pytest.mark.cluster

BREAK, STEPS = 11, 25  # an epoch has 6 steps: a break within one


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def make_dropout_net() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Linear(oracle.FEATURES, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(16, oracle.CLASSES)).double()


OPTIONS: dict[str, Any] = {
    "loss": oracle.mean_loss,
    "optimizer": adamw,
    "batch_size": oracle.BATCH,
    "seed": oracle.SEED,
    "lr_scheduler": cosine,
    "shuffle": "global",
}


def train(cluster: dtkit.Cluster, model: nn.Module | None = None, **options: Any) -> dtkit.Run:
    run = cluster.train(
        oracle.mlp() if model is None else model, oracle.data(), **(OPTIONS | {"steps": STEPS} | options)
    )
    run.wait(60)
    return run


def weights(run: dtkit.Run) -> Mapping[str, torch.Tensor]:
    return run.model.state_dict()


@pytest.fixture(scope="module")
def cluster4() -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def uninterrupted(shared: SharedCluster) -> dict[str, torch.Tensor]:
    """Final parameters of an uninterrupted run; equal on all layouts, since the rows of a step are."""
    return dict(weights(train(shared.get(2))))


@pytest.fixture(scope="module")
def saved(shared: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints at BREAK on two engines, by each strategy that trains as one process does."""
    paths = {}
    for name, strategy in make_strategies(2).items():
        run = train(shared.get(2), steps=BREAK, strategy=strategy)
        paths[name] = run.save(tmp_path_factory.mktemp(name)).path
    return paths


def make_strategies(world: int) -> dict[str, Any]:
    return {
        "data": dtkit.DataParallel(),
        "sharded": dtkit.Sharded(replicas=world // 2),
        "pipeline": dtkit.Pipeline(stages=2, micro_batches=3, replicas=world // 2),
        "tensor": dtkit.TensorParallel(tp_size=2, replicas=world // 2),
    }


# -- the same training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [("data", "data"), ("data", "sharded"), ("sharded", "pipeline"), ("pipeline", "tensor"), ("tensor", "data")],
)
def test_resume_under_another_strategy_equals_an_uninterrupted_run(
    cluster2: dtkit.Cluster, saved: dict[str, Path], uninterrupted: Any, before: str, after: str
):
    run = train(cluster2, strategy=make_strategies(2)[after], resume_from=saved[before])
    assert max_difference(weights(run), uninterrupted) <= BOUND
    assert run.history.num_steps == STEPS
    assert [row.step for row in run.history if row.rank == 0] == list(range(STEPS))


def test_a_resumed_run_counts_the_time_before_its_checkpoint(cluster2: dtkit.Cluster, tmp_path: Path):
    first = train(cluster2, steps=BREAK)
    resumed = train(cluster2, resume_from=first.save(tmp_path).path)
    assert resumed.status.elapsed_s > first.status.elapsed_s
    (row,) = dtkit.compare([resumed]).rows
    assert row.seconds >= row.steps_s


@pytest.mark.parametrize(
    ("before", "after"), [slow("data", "pipeline"), ("pipeline", "sharded"), slow("sharded", "tensor")]
)
def test_resume_on_another_number_of_engines_equals_an_uninterrupted_run(
    cluster2: dtkit.Cluster,
    cluster4: dtkit.Cluster,
    saved: dict[str, Path],
    uninterrupted: Any,
    tmp_path: Path,
    before: str,
    after: str,
):
    run = train(cluster4, steps=BREAK + 5, strategy=make_strategies(4)[after], resume_from=saved[before])
    assert "on 2 nodes" in run.history.events[-3].text
    assert "on 2 nodes" in run.history.events[run.history.num_inherited_events].text  # the earlier ones were printed
    second = run.save(tmp_path)
    assert (
        max_difference(
            weights(train(cluster2, strategy=make_strategies(2)[before], resume_from=second.path)), uninterrupted
        )
        <= BOUND
    )


@pytest.mark.parametrize(
    "strategy",
    [
        dtkit.DataParallel(accumulate=2, clip_grad_norm=0.5),
        dtkit.ParameterAveraging(every=4),
        slow(dtkit.ParameterAveraging(every=4, outer=dtkit.OuterSGD())),
        dtkit.Sharded(),
    ],
    ids=repr,
)
def test_resume_keeps_random_numbers_and_batch_statistics(cluster2: dtkit.Cluster, tmp_path: Path, strategy: Any):
    """Between two averagings each rank has its own parameters, momenta, statistics and random numbers."""
    options = {"strategy": strategy, "shuffle": "shard", "optimizer": oracle.momentum, "batch_size": 22}
    with pytest.warns(UserWarning, match="BatchNorm"):
        expected = weights(train(cluster2, make_dropout_net(), **options))
    with pytest.warns(UserWarning, match="BatchNorm"):
        path = train(cluster2, make_dropout_net(), steps=BREAK, **options).save(tmp_path).path
    with pytest.warns(UserWarning, match="BatchNorm"):
        resumed = weights(train(cluster2, make_dropout_net(), resume_from=path, **options))
    assert max_difference(dict(resumed), dict(expected)) <= BOUND


def test_resume_keeps_the_residual_of_compressed_gradients(cluster2: dtkit.Cluster, tmp_path: Path):
    options = {"strategy": dtkit.DataParallel(compress="powersgd"), "optimizer": oracle.momentum}
    expected = weights(train(cluster2, **options))
    path = train(cluster2, steps=BREAK, **options).save(tmp_path).path
    assert max_difference(weights(train(cluster2, resume_from=path, **options)), expected) <= BOUND


def test_resume_of_averaging_on_more_engines_starts_from_the_mean(
    cluster2: dtkit.Cluster, cluster4: dtkit.Cluster, tmp_path: Path
):
    run = train(cluster2, steps=BREAK, strategy=dtkit.ParameterAveraging(every=4))
    path, mean = run.save(tmp_path).path, weights(run)
    resumed = cluster4.train(oracle.mlp(), oracle.data(), **OPTIONS, steps=STEPS, resume_from=path, start=False)
    assert max_difference(weights(resumed), mean) <= BOUND
    assert "became their mean" in resumed.history.events[-1].text
    resumed.step()


def test_resume_keeps_plateau_schedule_and_early_stopping(cluster2: dtkit.Cluster, tmp_path: Path):
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)

    options = {"lr_scheduler": plateau, "validation": oracle.data(), "optimizer": oracle.momentum}
    expected = train(cluster2, callbacks=[stopping := dtkit.EarlyStopping(patience=9)], **options)
    train(
        cluster2,
        callbacks=[dtkit.EarlyStopping(patience=9)],
        checkpoint_every=6,
        checkpoint_dir=tmp_path,
        steps=12,
        **options,
    )
    run = train(
        cluster2, callbacks=[resumed_stopping := dtkit.EarlyStopping(patience=9)], resume_from=tmp_path, **options
    )
    assert run.lr == expected.lr < 0.1
    assert (resumed_stopping.best, resumed_stopping.best_epoch) == (stopping.best, stopping.best_epoch)
    assert math.isfinite(resumed_stopping.best)
    assert max_difference(weights(run), weights(expected)) <= BOUND


def test_resume_skips_the_samples_of_a_stream_that_were_used(cluster2: dtkit.Cluster, tmp_path: Path):
    def stream() -> Any:
        yield from zip(*oracle.data(), strict=True)

    options = {**OPTIONS, "shuffle": None}
    expected = cluster2.train(oracle.mlp(), stream, **options, steps=5)
    expected.wait(60)
    expected_weights = weights(expected)
    first = cluster2.train(oracle.mlp(), stream, **options, steps=2)
    first.wait(60)
    path = first.save(tmp_path).path
    run = cluster2.train(oracle.mlp(), stream, **options, steps=5, resume_from=path)
    run.wait(60)
    assert max_difference(weights(run), expected_weights) <= BOUND


# -- saving ------------------------------------------------------------------------------------------------


def test_periodic_checkpoints_keep_the_last_ones(cluster2: dtkit.Cluster, tmp_path: Path):
    run = small.train(cluster2, steps=20, checkpoint_every=6, checkpoint_dir=tmp_path, keep_last=2)
    run.wait(60)
    assert dtkit.Checkpoint(tmp_path).step == 20
    run.save(keep_last=2)
    checkpoints = dtkit.list_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [20, 20]
    assert not checkpoints.broken
    assert checkpoints[-1].verify_files() == []
    saved = [(event.step, event.kind) for event in run.history.events if event.text.startswith("saved")]
    assert saved == [(6, "checkpoint"), (12, "checkpoint"), (18, "checkpoint"), (20, "checkpoint"), (20, "save")]
    assert max_difference(checkpoints[-1].state_dict(), weights(run)) == 0
    assert max_difference(checkpoints[-1].load_into(small.net()).state_dict(), weights(run)) == 0


def test_save_works_while_running_and_while_paused(cluster2: dtkit.Cluster, tmp_path: Path):
    run = small.train(cluster2, steps=100_000)
    first = run.save(tmp_path)
    run.pause()
    second = run.save(tmp_path)
    assert first.step <= second.step == run.status.step
    assert run.status.state is dtkit.types.State.PAUSED
    assert f"step {second.step}" in repr(second)
    run.stop()
    assert run.save(tmp_path).step == second.step


@pytest.fixture
def small_files(cluster2: dtkit.Cluster) -> Iterator[None]:
    """Limit rank 1 to 100 bytes per file, as on a full disk."""

    def limit(size: int) -> None:
        if torch.distributed.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    cluster2.run(limit, 100)
    yield
    cluster2.run(limit, resource.RLIM_INFINITY)


def test_write_error_on_one_rank_fails_the_save_and_not_the_run(
    cluster2: dtkit.Cluster, tmp_path: Path, small_files: None
):
    run = small.train(cluster2, steps=20, checkpoint_every=10, checkpoint_dir=tmp_path)
    run.wait(60)
    with pytest.raises(dtkit.errors.CheckpointError, match=r"rank 1 on .*File too large"):
        run.save()
    assert run.status.state is dtkit.types.State.COMPLETED
    errors = [event for event in run.history.events if event.kind == "error"]
    assert [event.step for event in errors] == [10, 20, 20]
    assert list(tmp_path.iterdir()) == []
    small.check_usable(cluster2)


def test_impossible_folder_fails_the_save_and_not_the_run(cluster2: dtkit.Cluster, tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    run = small.train(cluster2, steps=10, checkpoint_every=5, checkpoint_dir=tmp_path / "file")
    run.wait(60)
    with pytest.raises(dtkit.errors.CheckpointError, match=r"File exists|Not a directory"):
        run.save()
    assert run.status.state is dtkit.types.State.COMPLETED
    assert sum(event.kind == "error" for event in run.history.events) == 3


def test_full_disk_fails_the_save_and_not_the_run(cluster2: dtkit.Cluster, small_disk: Path):
    run = small.train(cluster2, steps=60, start=False)
    run.step(20)
    run.save(small_disk)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(2**20))
    assert shutil.disk_usage(small_disk).free == 0
    run.step()
    with pytest.raises(dtkit.errors.CheckpointError, match="No space left"):
        run.save(small_disk)
    assert any(event.kind == "error" and "No space left" in event.text for event in run.history.events)
    run.step(9)  # the training continues
    assert dtkit.Checkpoint(small_disk).step == 20
    assert small.train(cluster2, steps=60, resume_from=small_disk, start=False).status.step == 20
    filler.unlink()
    resumed = cluster2.current_run
    assert resumed is not None
    resumed.step()
    resumed.save(small_disk)
    assert dtkit.Checkpoint(small_disk).step == 21


def test_nearly_full_disk_fails_the_save_with_the_reason(cluster2: dtkit.Cluster, small_disk: Path):
    """The disk may be full at a rank's tensors or at its report. No rank waits for a missing report."""
    run = small.train(cluster2, steps=60, start=False)
    run.step(2)
    filler, saved_steps = small_disk / "filler", []
    for free_blocks in range(1, 40, 3):
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2**20))
        os.truncate(filler, filler.stat().st_size - free_blocks * 4096)
        try:
            saved_steps.append(run.save(small_disk / "saved").step)
        except dtkit.errors.CheckpointError:
            saved_steps.append(None)
        shutil.rmtree(small_disk / "saved", ignore_errors=True)
    assert None in saved_steps
    assert 2 in saved_steps
    errors = [event for event in run.history.events if event.kind == "error"]
    assert len(errors) == saved_steps.count(None)
    assert all("No space left" in event.text for event in errors)
    assert max(later.time - earlier.time for earlier, later in itertools.pairwise(errors)) < 60


@pytest.mark.slow
def test_full_disk_under_the_cluster_folder_does_not_disturb_the_run(small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(small_disk))
    with dtkit.Cluster(2, threads=1) as cluster:
        run = small.train(cluster, steps=2000, start=False)
        run.step(2)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2**20))
        run.step(200)
        run.resume()
        run.pause()
        filler.unlink()
        run.resume()
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED
        assert len(run.history) == 2 * 2000
        texts = [event.text for event in run.history.events]
        assert sum("No space left on device" in text for text in texts) == 1
        assert "the history is on disk again" in texts


def test_unsupported_optimizer_state_fails_the_save_and_not_the_run(cluster2: dtkit.Cluster, tmp_path: Path):
    class OddStateSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["odd"] = os.getpid
            return super().step(closure)

    run = small.train(cluster2, steps=50, optimizer=lambda parameters: OddStateSGD(parameters, lr=0.1), start=False)
    run.step()
    with pytest.raises(dtkit.errors.CheckpointError, match=r"the state 'odd' of 0.weight is a builtin"):
        run.save(tmp_path)
    run.resume()
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


# -- checkpoints that don't match -----------------------------------------------------------------------------


def test_checkpoint_that_does_not_match_is_refused_before_any_change(
    cluster2: dtkit.Cluster, saved: dict[str, Path], tmp_path: Path
):
    run = small.train(cluster2, steps=2)
    run.wait(60)
    with pytest.raises(
        dtkit.errors.CheckpointError, match=r"0.weight has shape \(16, 6\) in it and \(8, 4\) in the model"
    ):
        small.train(cluster2, resume_from=saved["data"])
    with pytest.raises(ValueError, match="more than 11"):
        train(cluster2, steps=BREAK, resume_from=saved["data"])
    with pytest.raises(dtkit.errors.CheckpointError, match="does not exist"):
        small.train(cluster2, resume_from=tmp_path / "nothing")
    assert cluster2.current_run is run
    with pytest.raises(dtkit.errors.EngineError, match="made with AdamW, and optimizer= returns SGD"):
        train(cluster2, optimizer=oracle.momentum, resume_from=saved["data"])
    small.check_usable(cluster2)


def test_save_keeps_a_learning_rate_set_just_before(cluster2: dtkit.Cluster, tmp_path: Path):
    """No step needs to be taken with the new rate before the save."""
    run = small.train(cluster2, start=False)
    run.step(4)
    run.set(lr=0.025)
    saved = run.save(tmp_path)
    assert saved.step == run.status.step == 4
    run.stop()
    resumed = small.train(cluster2, resume_from=saved.path, start=False)
    assert resumed.lr == 0.025
    resumed.stop()


def test_callback_whose_state_fails_fails_the_save_and_not_the_run(cluster2: dtkit.Cluster, tmp_path: Path):
    class FailingState:
        def __call__(self, _run: dtkit.Run) -> None: ...

        def load_state_dict(self, state: dict[str, int]) -> None: ...

        def state_dict(self) -> dict[str, int]:
            return {"per epoch": 1 // 0}

    run = small.train(cluster2, callbacks=[FailingState()], start=False)
    run.step(2)
    with pytest.raises(dtkit.errors.CheckpointError, match="was not written: ZeroDivisionError"):
        run.save(tmp_path)
    assert wait_until(lambda: not list(tmp_path.iterdir()), timeout=10)  # a rank may still be writing
    run.resume()
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


def test_resume_reports_options_that_the_checkpoint_overrides(cluster2: dtkit.Cluster, tmp_path: Path):
    small.train(cluster2, steps=4, checkpoint_every=4, checkpoint_dir=tmp_path).wait(60)

    def make_other_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0)

    run = small.train(cluster2, steps=8, resume_from=tmp_path, optimizer=make_other_sgd, start=False)
    text = run.history.events[-1].text
    assert "the optimizer goes on with the checkpoint's lr=0.1 (0.5 was given), momentum=0.9 (0.5 was given)" in text
    assert "weight_decay" not in text
    assert "run.set(lr=...)" in text
    run.set(lr=0.5)
    run.resume()
    run.wait(60)
    assert run.history.rows()["lr"][-1] == 0.5


def get_resume_text(cluster: dtkit.Cluster, path: Path, **options: Any) -> str:
    """Return the log entry of a run resumed from `path`, without the checkpoint's name."""
    rows = options.pop("rows", oracle.data())
    run = cluster.train(
        oracle.mlp(), rows, **(OPTIONS | {"steps": STEPS, "resume_from": path, "start": False} | options)
    )
    head, _, rest = run.history.events[-1].text.partition("; ")
    assert head == f"goes on from {path.name}"
    return rest


@pytest.fixture(scope="module")
def sharded_checkpoint(shared: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a run with shuffle="shard" on two engines."""
    run = train(shared.get(2), steps=BREAK, shuffle="shard")
    return run.save(tmp_path_factory.mktemp("shards")).path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"shuffle": "global"}, "rows come in another order (shuffle='global' was 'shard')"),
        (
            {"rows": tuple(column[:100] for column in oracle.data()), "shuffle": None},
            "rows come in another order (samples=100 was 121, shuffle='in order' was 'shard')",
        ),
        ({"batch_size": 20, "seed": 7}, "rows come in another order (batch_size=20 was 24, seed=7 was 5)"),
        ({"loss": nn.CrossEntropyLoss()}, "loss=CrossEntropyLoss was mean_loss"),
    ],
    ids=["unchanged", "shuffle", "rows", "batch", "loss"],
)
def test_resume_reports_changes_that_make_steps_differ(
    cluster2: dtkit.Cluster, sharded_checkpoint: Path, options: dict[str, Any], text: str
):
    assert get_resume_text(cluster2, sharded_checkpoint, **{"shuffle": "shard"} | options) == text


OTHER_ROWS = "each node has other rows now, so the rows of a step differ from here on"
OTHER_NUMBERS = "replicas that there were not draw random numbers of their own (dropout)"


def test_resume_reports_what_another_number_of_engines_changes(
    cluster2: dtkit.Cluster, cluster4: dtkit.Cluster, saved: dict[str, Path], sharded_checkpoint: Path, tmp_path: Path
):
    more = "made by DataParallel() on 2 nodes, now DataParallel() on 4 nodes: the state is the same"
    assert get_resume_text(cluster4, sharded_checkpoint, shuffle="shard") == f"{more}; {OTHER_ROWS}; {OTHER_NUMBERS}"
    assert get_resume_text(cluster4, saved["data"]) == f"{more}; {OTHER_NUMBERS}"
    both = get_resume_text(cluster4, sharded_checkpoint)
    assert both == f"{more}; rows come in another order (shuffle='global' was 'shard'); {OTHER_NUMBERS}"
    path = train(cluster4, steps=BREAK, shuffle="shard").save(tmp_path).path
    fewer = "made by DataParallel() on 4 nodes, now DataParallel() on 2 nodes: the state is the same"
    assert get_resume_text(cluster2, path, shuffle="shard") == f"{fewer}; {OTHER_ROWS}"


def test_resume_with_more_replicas_keeps_rows_and_changes_random_numbers(cluster2: dtkit.Cluster, tmp_path: Path):
    path = train(cluster2, steps=BREAK, strategy=make_strategies(2)["pipeline"], shuffle="shard").save(tmp_path).path
    change = (
        "made by Pipeline(stages=2, micro_batches=3) on 2 nodes, now DataParallel() on 2 nodes: the state is the same"
    )
    assert get_resume_text(cluster2, path, shuffle="shard") == f"{change}; {OTHER_NUMBERS}"
    resumed = weights(train(cluster2, shuffle="shard", resume_from=path))
    assert max_difference(resumed, weights(train(cluster2, shuffle="shard"))) <= BOUND


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)


@pytest.mark.parametrize(
    "options", [{}, {"lr_scheduler": one_cycle}], ids=["learning rate", "learning rate and momentum"]
)
def test_resume_does_not_report_options_set_by_a_scheduler(
    cluster2: dtkit.Cluster, tmp_path: Path, options: dict[str, Any]
):
    train(cluster2, steps=4, checkpoint_every=4, checkpoint_dir=tmp_path, **options)
    run = train(cluster2, steps=8, resume_from=tmp_path, **options)
    assert not [event for event in run.history.events if "was given" in event.text]
