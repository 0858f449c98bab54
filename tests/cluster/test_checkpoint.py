"""Saving and going on, on real engines: the same parameters as without a break, on any layout."""

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
from tests.support import oracle, small
from tests.support.marks import slow
from tests.support.oracle import BOUND, difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.cluster.conftest import Shared

pytestmark = pytest.mark.cluster

BREAK, STEPS = 11, 25  # an epoch has 6 steps: a break within one


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def dropping() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Linear(oracle.FEATURES, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(16, oracle.CLASSES)).double()


HOW: dict[str, Any] = {
    "loss": oracle.mean_loss,
    "optimizer": adamw,
    "batch_size": oracle.BATCH,
    "seed": oracle.SEED,
    "lr_scheduler": cosine,
    "shuffle": "global",
}


def train(cluster: dtkit.Cluster, model: nn.Module | None = None, **options: Any) -> dtkit.Run:
    run = cluster.train(oracle.mlp() if model is None else model, oracle.data(), **(HOW | {"steps": STEPS} | options))
    run.wait(60)
    return run


def weights(run: dtkit.Run) -> Mapping[str, torch.Tensor]:
    return run.model.state_dict()


@pytest.fixture(scope="module")
def cluster4() -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(shared: Shared) -> dict[str, torch.Tensor]:
    """What an uninterrupted run comes to: the same on any layout, since the rows of a step are."""
    return dict(weights(train(shared.of(2))))


@pytest.fixture(scope="module")
def saved(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints at BREAK, by each strategy that trains as one process does, on two engines."""
    found = {}
    for name, strategy in strategies(2).items():
        run = train(shared.of(2), steps=BREAK, strategy=strategy)
        found[name] = run.save(tmp_path_factory.mktemp(name)).path
    return found


def strategies(world: int) -> dict[str, Any]:
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
def test_goes_on_under_any_strategy(
    cluster2: dtkit.Cluster, saved: dict[str, Path], whole: Any, before: str, after: str
):
    run = train(cluster2, strategy=strategies(2)[after], resume_from=saved[before])
    assert difference(weights(run), whole) <= BOUND
    assert run.history.num_steps == STEPS
    assert [row.step for row in run.history if row.rank == 0] == list(range(STEPS))


@pytest.mark.parametrize(
    ("before", "after"), [slow("data", "pipeline"), ("pipeline", "sharded"), slow("sharded", "tensor")]
)
def test_goes_on_on_more_engines_and_on_fewer(
    cluster2: dtkit.Cluster,
    cluster4: dtkit.Cluster,
    saved: dict[str, Path],
    whole: Any,
    tmp_path: Path,
    before: str,
    after: str,
):
    run = train(cluster4, steps=BREAK + 5, strategy=strategies(4)[after], resume_from=saved[before])
    assert "on 2 ranks" in run.history.events[-3].text
    back = run.save(tmp_path)
    assert difference(weights(train(cluster2, strategy=strategies(2)[before], resume_from=back.path)), whole) <= BOUND


@pytest.mark.parametrize(
    "strategy",
    [
        dtkit.DataParallel(accumulate=2, clip_grad_norm=0.5),
        dtkit.ParameterAveraging(every=4),
        dtkit.ParameterAveraging(every=4, outer=dtkit.OuterSGD()),
        dtkit.Sharded(),
    ],
    ids=repr,
)
def test_a_break_leaves_no_trace_in_random_numbers_and_batch_statistics(
    cluster2: dtkit.Cluster, tmp_path: Path, strategy: Any
):
    """Between two averagings every rank has parameters, momenta, statistics and random numbers of its own."""
    how = {"strategy": strategy, "shuffle": "shard", "optimizer": oracle.momentum, "batch_size": 22}
    with pytest.warns(UserWarning, match="BatchNorm"):
        expected = weights(train(cluster2, dropping(), **how))
    with pytest.warns(UserWarning, match="BatchNorm"):
        path = train(cluster2, dropping(), steps=BREAK, **how).save(tmp_path).path
    with pytest.warns(UserWarning, match="BatchNorm"):
        found = weights(train(cluster2, dropping(), resume_from=path, **how))
    assert difference(dict(found), dict(expected)) <= BOUND


def test_compressed_gradients_keep_what_they_left_out(cluster2: dtkit.Cluster, tmp_path: Path):
    how = {"strategy": dtkit.DataParallel(compress="powersgd"), "optimizer": oracle.momentum}
    expected = weights(train(cluster2, **how))
    path = train(cluster2, steps=BREAK, **how).save(tmp_path).path
    assert difference(weights(train(cluster2, resume_from=path, **how)), expected) <= BOUND


def test_averaged_parameters_go_on_from_their_mean_elsewhere(
    cluster2: dtkit.Cluster, cluster4: dtkit.Cluster, tmp_path: Path
):
    run = train(cluster2, steps=BREAK, strategy=dtkit.ParameterAveraging(every=4))
    path, mean = run.save(tmp_path).path, weights(run)
    there = cluster4.train(oracle.mlp(), oracle.data(), **HOW, steps=STEPS, resume_from=path, start=False)
    assert difference(weights(there), mean) <= BOUND
    assert "became their mean" in there.history.events[-1].text
    there.step()


def test_a_schedule_that_wants_a_loss_and_early_stopping_go_on(cluster2: dtkit.Cluster, tmp_path: Path):
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)

    how = {"lr_scheduler": plateau, "validation": oracle.data(), "optimizer": oracle.momentum}
    expected = train(cluster2, callbacks=[one := dtkit.EarlyStopping(patience=9)], **how)
    train(
        cluster2,
        callbacks=[dtkit.EarlyStopping(patience=9)],
        checkpoint_every=6,
        checkpoint_dir=tmp_path,
        steps=12,
        **how,
    )
    run = train(cluster2, callbacks=[two := dtkit.EarlyStopping(patience=9)], resume_from=tmp_path, **how)
    assert run.lr == expected.lr < 0.1
    assert (two.best, two.best_epoch) == (one.best, one.best_epoch)
    assert math.isfinite(two.best)
    assert difference(weights(run), weights(expected)) <= BOUND


def test_a_stream_is_read_again_up_to_where_it_stood(cluster2: dtkit.Cluster, tmp_path: Path):
    def stream() -> Any:
        yield from zip(*oracle.data(), strict=True)

    how = {**HOW, "shuffle": None}
    expected = cluster2.train(oracle.mlp(), stream, **how, steps=5)
    expected.wait(60)
    wanted = weights(expected)
    part = cluster2.train(oracle.mlp(), stream, **how, steps=2)
    part.wait(60)
    path = part.save(tmp_path).path
    run = cluster2.train(oracle.mlp(), stream, **how, steps=5, resume_from=path)
    run.wait(60)
    assert difference(weights(run), wanted) <= BOUND


# -- saving ------------------------------------------------------------------------------------------------


def test_saves_by_themselves_keep_the_last_ones(cluster2: dtkit.Cluster, tmp_path: Path):
    run = small.train(cluster2, steps=20, checkpoint_every=6, checkpoint_dir=tmp_path, keep_last=2)
    run.wait(60)
    assert dtkit.Checkpoint(tmp_path).step == 20
    run.save(keep_last=2)
    found = dtkit.list_checkpoints(tmp_path)
    assert [one.step for one in found] == [20, 20]
    assert not found.broken
    assert found[-1].verify_files() == []
    saved = [event.step for event in run.history.events if event.text.startswith("saved")]
    assert saved == [6, 12, 18, 20, 20]
    assert difference(found[-1].state_dict(), weights(run)) == 0
    assert difference(found[-1].load_into(small.net()).state_dict(), weights(run)) == 0


def test_saves_while_it_runs_and_while_it_is_paused(cluster2: dtkit.Cluster, tmp_path: Path):
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
    """Rank 1's process can't write more than 100 bytes into a file, as on a disk that is full."""

    def limit(size: int) -> None:
        if torch.distributed.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    cluster2.run(limit, 100)
    yield
    cluster2.run(limit, resource.RLIM_INFINITY)


def test_a_disk_that_takes_no_more_fails_the_save_and_not_the_run(
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


def test_a_folder_that_can_t_be_made_fails_the_save_and_not_the_run(cluster2: dtkit.Cluster, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    run = small.train(cluster2, steps=10, checkpoint_every=5, checkpoint_dir=tmp_path / "file")
    run.wait(60)
    with pytest.raises(dtkit.errors.CheckpointError, match=r"File exists|Not a directory"):
        run.save()
    assert run.status.state is dtkit.types.State.COMPLETED
    assert sum(event.kind == "error" for event in run.history.events) == 3


def test_a_disk_that_is_full_costs_the_checkpoint_and_nothing_else(cluster2: dtkit.Cluster, small_disk: Path):
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
    run.step(9)  # the training goes on
    assert dtkit.Checkpoint(small_disk).step == 20
    assert small.train(cluster2, steps=60, resume_from=small_disk, start=False).status.step == 20
    filler.unlink()
    again = cluster2.current_run
    assert again is not None
    again.step()
    again.save(small_disk)
    assert dtkit.Checkpoint(small_disk).step == 21


def test_a_disk_that_takes_some_of_a_checkpoint_names_what_it_lacks(cluster2: dtkit.Cluster, small_disk: Path):
    """Wherever it ends: at a rank's tensors, or at the word of what came of them. Nobody waits for what never comes."""
    run = small.train(cluster2, steps=60, start=False)
    run.step(2)
    filler, came = small_disk / "filler", []
    for left in range(1, 40, 3):  # blocks
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2**20))
        os.truncate(filler, filler.stat().st_size - left * 4096)
        try:
            came.append(run.save(small_disk / "saved").step)
        except dtkit.errors.CheckpointError:
            came.append(None)
        shutil.rmtree(small_disk / "saved", ignore_errors=True)
    assert None in came
    assert 2 in came
    errors = [event for event in run.history.events if event.kind == "error"]
    assert len(errors) == came.count(None)
    assert all("No space left" in event.text for event in errors)
    assert max(later.time - earlier.time for earlier, later in itertools.pairwise(errors)) < 60


@pytest.mark.slow
def test_a_disk_that_is_full_below_the_cluster_itself_costs_the_run_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
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
        said = [event.text for event in run.history.events]
        assert sum("No space left on device" in text for text in said) == 1
        assert "the history is on disk again" in said


def test_state_that_is_no_plain_data_is_refused_and_the_run_goes_on(cluster2: dtkit.Cluster, tmp_path: Path):
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["odd"] = os.getpid
            return super().step(closure)

    run = small.train(cluster2, steps=50, optimizer=lambda parameters: Odd(parameters, lr=0.1), start=False)
    run.step()
    with pytest.raises(dtkit.errors.CheckpointError, match=r"the state 'odd' of 0.weight is a builtin"):
        run.save(tmp_path)
    run.resume()
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


# -- going on from what can't be -----------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_changes(
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
    with pytest.raises(dtkit.errors.EngineError, match="made with AdamW, and optimizer= makes a SGD"):
        train(cluster2, optimizer=oracle.momentum, resume_from=saved["data"])
    small.check_usable(cluster2)


def test_a_learning_rate_that_was_set_before_a_save_is_saved(cluster2: dtkit.Cluster, tmp_path: Path):
    """Also where no step was taken with it yet."""
    run = small.train(cluster2, start=False)
    run.step(4)
    run.set(lr=0.025)
    saved = run.save(tmp_path)
    assert saved.step == run.status.step == 4
    run.stop()
    again = small.train(cluster2, resume_from=saved.path, start=False)
    assert again.lr == 0.025
    again.stop()


def test_a_callback_that_can_t_be_saved_fails_the_save_and_not_the_run(cluster2: dtkit.Cluster, tmp_path: Path):
    class Counts:
        def __call__(self, _run: dtkit.Run) -> None: ...

        def load_state_dict(self, state: dict[str, int]) -> None: ...

        def state_dict(self) -> dict[str, int]:
            return {"per epoch": 1 // 0}

    run = small.train(cluster2, callbacks=[Counts()], start=False)
    run.step(2)
    with pytest.raises(dtkit.errors.CheckpointError, match="was not written: ZeroDivisionError"):
        run.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run.resume()
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


def test_options_that_the_checkpoint_overrules_are_said(cluster2: dtkit.Cluster, tmp_path: Path):
    small.train(cluster2, steps=4, checkpoint_every=4, checkpoint_dir=tmp_path).wait(60)

    def other(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0)

    run = small.train(cluster2, steps=8, resume_from=tmp_path, optimizer=other, start=False)
    said = run.history.events[-1].text
    assert "the optimizer goes on with the checkpoint's lr=0.1 (0.5 was given), momentum=0.9 (0.5 was given)" in said
    assert "weight_decay" not in said
    assert "run.set(lr=...)" in said
    run.set(lr=0.5)
    run.resume()
    run.wait(60)
    assert run.history.rows()["lr"][-1] == 0.5


def said(cluster: dtkit.Cluster, path: Path, **options: Any) -> str:
    """What the log says of a run that is to go on from there, after the checkpoint's name."""
    rows = options.pop("rows", oracle.data())
    run = cluster.train(oracle.mlp(), rows, **(HOW | {"steps": STEPS, "resume_from": path, "start": False} | options))
    head, _, rest = run.history.events[-1].text.partition("; ")
    assert head == f"goes on from {path.name}"
    return rest


@pytest.fixture(scope="module")
def of_shards(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run on two engines that each took rows of a shard of their own."""
    run = train(shared.of(2), steps=BREAK, shuffle="shard")
    return run.save(tmp_path_factory.mktemp("shards")).path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"shuffle": "global"}, "rows come in another order (shuffle='global' was 'shard')"),
        (
            {"rows": tuple(column[:100] for column in oracle.data()), "shuffle": None},
            "rows come in another order (samples=100 was 121, shuffle=None was 'shard')",
        ),
        ({"batch_size": 20, "seed": 7}, "rows come in another order (batch_size=20 was 24, seed=7 was 5)"),
        ({"loss": nn.CrossEntropyLoss()}, "loss=CrossEntropyLoss was mean_loss"),
    ],
    ids=["as before", "shuffle", "rows", "batch", "loss"],
)
def test_what_else_makes_steps_differ_is_said(
    cluster2: dtkit.Cluster, of_shards: Path, options: dict[str, Any], text: str
):
    assert said(cluster2, of_shards, **{"shuffle": "shard"} | options) == text


OTHER_ROWS = "each rank has other rows now, so the rows of a step differ from here on"
OTHER_NUMBERS = "replicas that there were not draw random numbers of their own (dropout)"


def test_what_another_number_of_engines_changes_is_said(
    cluster2: dtkit.Cluster, cluster4: dtkit.Cluster, saved: dict[str, Path], of_shards: Path, tmp_path: Path
):
    more = "made by DataParallel() on 2 ranks, now DataParallel() on 4 ranks: the state is the same"
    assert said(cluster4, of_shards, shuffle="shard") == f"{more}; {OTHER_ROWS}; {OTHER_NUMBERS}"
    assert said(cluster4, saved["data"]) == f"{more}; {OTHER_NUMBERS}"
    both = said(cluster4, of_shards)
    assert both == f"{more}; rows come in another order (shuffle='global' was 'shard'); {OTHER_NUMBERS}"
    path = train(cluster4, steps=BREAK, shuffle="shard").save(tmp_path).path
    fewer = "made by DataParallel() on 4 ranks, now DataParallel() on 2 ranks: the state is the same"
    assert said(cluster2, path, shuffle="shard") == f"{fewer}; {OTHER_ROWS}"


def test_more_replicas_draw_other_random_numbers_and_take_the_same_rows(cluster2: dtkit.Cluster, tmp_path: Path):
    path = train(cluster2, steps=BREAK, strategy=strategies(2)["pipeline"], shuffle="shard").save(tmp_path).path
    made = (
        "made by Pipeline(stages=2, micro_batches=3) on 2 ranks, now DataParallel() on 2 ranks: the state is the same"
    )
    assert said(cluster2, path, shuffle="shard") == f"{made}; {OTHER_NUMBERS}"
    found = weights(train(cluster2, shuffle="shard", resume_from=path))
    assert difference(found, weights(train(cluster2, shuffle="shard"))) <= BOUND


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)


@pytest.mark.parametrize("options", [{}, {"lr_scheduler": one_cycle}], ids=["as the others", "of the momentum too"])
def test_what_a_scheduler_sets_is_no_option_that_was_overruled(
    cluster2: dtkit.Cluster, tmp_path: Path, options: dict[str, Any]
):
    train(cluster2, steps=4, checkpoint_every=4, checkpoint_dir=tmp_path, **options)
    run = train(cluster2, steps=8, resume_from=tmp_path, **options)
    assert not [event for event in run.history.events if "was given" in event.text]
