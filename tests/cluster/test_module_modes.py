"""Modules in evaluation while the rest of the model trains, and embeddings that change their rows in forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support import small
from tests.support.marks import slow
from tests.support.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    data,
    get_global_rows,
    max_difference,
    momentum,
    train,
    train_in_one_process,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.cluster
STEPS = 8


class Blocks(nn.Module):
    """Chain of blocks with dropout, which a pipeline cuts by a trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
        self.blocks, self.head = nn.ModuleList(blocks).double(), nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_frozen() -> nn.Module:
    """Return a model whose dropout the user has switched off."""
    model = Blocks()
    for block in model.blocks:
        block.eval()
    return model


@pytest.mark.parametrize(
    "strategy",
    [dtkit.DataParallel(), dtkit.Pipeline(2, 2), slow(dtkit.Sharded()), slow(dtkit.NaiveDataParallel())],
    ids=str,
)
def test_module_in_evaluation_stays_there(cluster2: dtkit.Cluster, strategy: Any):
    """With validation, after which the model trains again."""
    options: dict[str, Any] = {"shuffle": "global", "steps": STEPS, "strategy": strategy, "validation": data()}
    run = train(cluster2, make_frozen(), data(), **options)
    expected = train_in_one_process(make_frozen(), get_global_rows, steps=STEPS)
    assert max_difference(run.model.state_dict(), expected) < BOUND


@pytest.mark.slow
def test_model_in_evaluation_as_a_whole_trains_with_dropout(cluster2: dtkit.Cluster):
    runs = [train(cluster2, model, data(), shuffle="global", steps=2) for model in (Blocks(), Blocks().eval())]
    assert max_difference(*(run.model.state_dict() for run in runs)) == 0.0


class WithTeacher(nn.Module):
    """Student that also hears a frozen teacher, which follows the student in each forward of a training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = (nn.Linear(FEATURES, CLASSES).double() for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                teacher.data.lerp_(student.data, 0.1)
        return self.student(x) + 0.5 * self.teacher(x)


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), slow(dtkit.NaiveDataParallel())], ids=str)
def test_frozen_parameters_that_a_step_writes_stay_equal_on_a_rank_without_samples(
    cluster2: dtkit.Cluster, strategy: Any
):
    """Each epoch ends with a batch of one sample, for which one of two ranks has nothing to do."""
    run = train(cluster2, WithTeacher(), data(), shuffle="global", steps=20, strategy=strategy)
    expected = train_in_one_process(WithTeacher(), get_global_rows, steps=20)
    assert max_difference(run.model.state_dict(), expected) < BOUND


def test_sharded_refuses_frozen_parameters_that_a_step_writes(cluster2: dtkit.Cluster):
    """FSDP writes to a gathered copy, which it frees."""
    run = train(cluster2, WithTeacher(), data(), strategy=dtkit.Sharded(), start=False)
    run.resume()
    with pytest.raises(dtkit.errors.EngineError, match="the forward of WithTeacher writes to frozen parameters"):
        run.wait(60)
    small.check_usable(cluster2)


class WithLateTeacher(WithTeacher):
    """The teacher follows from the fourth forward on, by one of the ways to write."""

    def __init__(self, write: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        self.write, self.num_forwards = write, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        if self.training and self.num_forwards > 3:
            self.write(self.teacher, self.student)
        return self.student(x) + 0.5 * self.teacher(x)


@torch.no_grad()
def write_in_place(teacher: nn.Linear, student: nn.Linear) -> None:
    teacher.weight.lerp_(student.weight, 0.1)


def write_data(teacher: nn.Linear, student: nn.Linear) -> None:
    teacher.weight.data.lerp_(student.weight.data, 0.1)


def set_data(teacher: nn.Linear, student: nn.Linear) -> None:
    teacher.weight.data = teacher.weight.data.lerp(student.weight.data, 0.1)


def replace_parameter(teacher: nn.Linear, student: nn.Linear) -> None:
    teacher.weight = nn.Parameter(teacher.weight.lerp(student.weight, 0.1), requires_grad=False)


@pytest.mark.parametrize("write", [write_in_place, slow(write_data), slow(set_data), slow(replace_parameter)])
def test_sharded_refuses_writes_to_frozen_parameters_that_begin_late(
    cluster2: dtkit.Cluster, write: Callable[[nn.Linear, nn.Linear], None]
):
    run = train(cluster2, WithLateTeacher(write), data(), strategy=dtkit.Sharded(), steps=20, start=False)
    run.resume()
    with pytest.raises(dtkit.errors.EngineError, match="the forward of WithLateTeacher writes to frozen parameters"):
        run.wait(60)
    assert len(run.history) // 2 in {3, 16}
    small.check_usable(cluster2)


@pytest.mark.parametrize("strategy", [dtkit.Sharded(), slow(dtkit.DataParallel()), slow(dtkit.Pipeline(2, 2))], ids=str)
def test_frozen_parameters_stay_as_they_are_on_a_rank_without_samples(cluster2: dtkit.Cluster, strategy: Any):
    def make() -> nn.Module:
        model = make_frozen()
        model.blocks.requires_grad_(False)
        return model

    run = train(cluster2, make(), data(), shuffle="global", steps=STEPS, strategy=strategy)
    expected = train_in_one_process(make(), get_global_rows, steps=STEPS)
    assert max_difference(run.model.state_dict(), expected) < BOUND


class Counter(nn.Module):
    """Linear layer whose weight changes with the number of its forwards in training, which a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        return self.linear(x) * (1 + 0.1 * self.forwards)


class Cooling(nn.Module):
    """Linear layer divided by a temperature, which each forward in training replaces by a lower one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature = self.temperature * 0.97
        return self.linear(x) / self.temperature


class Warming(nn.Module):
    """Linear layer whose factor grows with its forwards in training, which plain attributes count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, CLASSES).double()
        self.num_forwards, self.scale, self.mean = 0, 1.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_forwards += 1
            self.scale *= 1.03
            self.mean = float(x.mean())  # of this rank's samples, which says nothing of other ranks'
        return self.linear(x) * (self.scale + 0.1 * self.num_forwards)


REPLICAS = [dtkit.DataParallel(), slow(dtkit.NaiveDataParallel()), slow(dtkit.Sharded())]


@pytest.mark.parametrize("make", [Counter, Cooling, Warming])
@pytest.mark.parametrize("strategy", REPLICAS, ids=str)
def test_counts_stay_equal_on_a_rank_without_samples(
    cluster2: dtkit.Cluster, strategy: Any, make: Callable[[], nn.Module]
):
    """Each epoch ends with a batch of one sample, for which one of two ranks has nothing to do."""
    check_counts(cluster2, make, strategy)


def check_counts(cluster: dtkit.Cluster, make: Callable[[], nn.Module], strategy: Any) -> None:
    run = train(cluster, make(), data(), shuffle="global", steps=20, strategy=strategy)
    expected = train_in_one_process(make(), get_global_rows, steps=20)
    assert float(expected.get("forwards", 20)) == 20
    assert max_difference(run.model.state_dict(), expected) < BOUND


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), slow(dtkit.Sharded())], ids=str)
def test_plain_numbers_of_modules_are_part_of_checkpoints(cluster2: dtkit.Cluster, strategy: Any, tmp_path: Path):
    options: dict[str, Any] = {"shuffle": "global", "strategy": strategy}
    train(cluster2, Warming(), data(), steps=8, checkpoint_dir=tmp_path, checkpoint_every=8, **options)
    run = train(cluster2, Warming(), data(), steps=20, resume_from=tmp_path, **options)
    expected = train_in_one_process(Warming(), get_global_rows, steps=20)
    assert max_difference(run.model.state_dict(), expected) < BOUND


def make_chain_with_a_counter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES).double(), nn.Tanh(), Counter())


def make_chain_with_a_temperature() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES).double(), nn.Tanh(), Cooling())


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize("make", [make_chain_with_a_counter, make_chain_with_a_temperature])
@pytest.mark.parametrize(
    "strategy",
    [dtkit.Pipeline(2, 1, "GPipe", replicas=2), dtkit.TensorParallel(2, plan={"0": "gathered"}, replicas=2)],
    ids=str,
)
def test_buffer_that_counts_stays_equal_in_a_replica_without_samples(
    cluster: dtkit.Cluster, strategy: Any, make: Callable[[], nn.Module]
):
    check_counts(cluster, make, strategy)


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(accumulate=3), slow(dtkit.Sharded(accumulate=3))], ids=str)
def test_temperature_stays_equal_on_a_rank_with_fewer_micro_batches(cluster2: dtkit.Cluster, strategy: Any):
    """Of five samples, one rank has three micro-batches, and the other two."""
    run = train(cluster2, Cooling(), data(), shuffle="global", batch_size=5, steps=8, strategy=strategy)
    assert float(run.model.temperature) == pytest.approx(0.97 ** (3 * 8), abs=1e-12)


def log_forwards(model: nn.Module, batch: Any) -> torch.Tensor:
    dtkit.log(forwards=float(model.forwards))
    return F.cross_entropy(model(batch[0]), batch[1])


def test_averaging_makes_counters_equal_again(cluster2: dtkit.Cluster):
    """Rank 1 has no sample in the sixth step, and ranks average after the eighth."""
    options: dict[str, Any] = {"shuffle": "global", "steps": 20, "strategy": dtkit.ParameterAveraging(every=4)}
    run = train(cluster2, Counter(), data(), loss=None, training_step=log_forwards, **options)
    steps, counts = (values.tolist() for values in run.history.scalar("forwards", rank=1))
    assert dict(zip(steps, counts, strict=True))[7] == 6
    assert dict(zip(steps, counts, strict=True))[8] == 8
    verification = run.verify(20)
    assert verification.part_difference is not None
    assert verification.part_difference < verification.tolerance


class Lookup(nn.Module):
    """Embedding that rescales the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), slow(dtkit.Sharded())], ids=str)
def test_embedding_that_copies_would_change_differently_is_refused(cluster2: dtkit.Cluster, strategy: Any):
    rows = torch.arange(small.ROWS) % 7, small.data()[1]
    with pytest.raises(dtkit.errors.EngineError, match=r"table has max_norm=0\.5"):
        small.train(cluster2, Lookup(), rows, strategy=strategy)
    frozen = Lookup()
    frozen.table.requires_grad_(False)
    small.train(cluster2, frozen, rows, strategy=dtkit.DataParallel(), optimizer=momentum, steps=2).wait(60)


def damp_first_gradient(model: nn.Module) -> torch.optim.Optimizer:
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.1)
    return momentum(model.parameters())


def test_hook_that_the_optimizers_function_registers_acts_on_every_rank(cluster2: dtkit.Cluster):
    run = train(cluster2, make_frozen(), data(), optimizer=damp_first_gradient, shuffle="global", steps=STEPS)
    model = make_frozen()
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.1)
    assert max_difference(run.model.state_dict(), train_in_one_process(model, get_global_rows, steps=STEPS)) < BOUND
