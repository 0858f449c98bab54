"""Step report of a rank: every number against its definition, in one process and in two ranks."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.engine.observe.step_probe import StepProbe
from dtkit.engine.observe.tensor_values import compute_digest
from dtkit.engine.ops.data import compute_model_checksum
from dtkit.explain.data_parallel import StepExplanation

if TYPE_CHECKING:
    from pathlib import Path

LR = 0.1


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 4, generator=generator, dtype=torch.float64), torch.arange(20) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def parts(counts: tuple[int, ...]) -> list[np.ndarray]:
    """Rows of each rank."""
    return np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])


def summed(local: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """What an all-reduce leaves; None for what no rank used."""
    columns = [[g for g in column if g is not None] for column in zip(*local, strict=True)]
    return [sum(column) if column else None for column in columns]  # type: ignore[misc]


def look(scope: StepProbe, model: nn.Module, rows: np.ndarray, total: int) -> list[torch.Tensor | None]:
    """The part of the step before the all-reduce; returns what goes into it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    scope.record_rows(rows, len(rows))
    gradients: list[torch.Tensor | None] = [None] * len(parameters)
    if len(rows):
        inputs, targets = data()
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        scope.record_loss(loss, len(rows), len(rows) / total)
        gradients = list(torch.autograd.grad(loss * len(rows) / total, parameters, allow_unused=True))
    else:
        scope.record_loss(None, 0, 0)
    scope.record_local_gradients(gradients)
    return gradients


def finish(scope: StepProbe, model: nn.Module, gradients: list[torch.Tensor | None]) -> dict[str, Any]:
    """The part of the step after the all-reduce; returns the report."""
    scope.record_reduced_gradients(gradients)
    scope.save_parameters()
    for p, gradient in zip([p for p in model.parameters() if p.requires_grad], gradients, strict=True):
        p.grad = gradient
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR).step()
    scope.record_parameter_updates(LR)
    return dict(scope.build_report())


def step(counts: tuple[int, ...], make: Any = net) -> list[dict[str, Any]]:
    """A step of as many ranks as there are counts, all played by this process."""
    models = [make() for _ in counts]
    scopes = [StepProbe(model, rank=k, step=5, epoch=2) for k, model in enumerate(models)]
    local = [look(*each, sum(counts)) for each in zip(scopes, models, parts(counts), strict=True)]
    total = summed(local)
    return [
        finish(scope, model, [None if g is None else g.clone() for g in total])
        for scope, model in zip(scopes, models, strict=True)
    ]


def gradient(rows: np.ndarray) -> list[torch.Tensor]:
    """Gradient of the mean loss of these rows, in one process."""
    model, (inputs, targets) = net(), data()
    return list(torch.autograd.grad(F.cross_entropy(model(inputs[rows]), targets[rows]), list(model.parameters())))


def check(reports: list[dict[str, Any]], counts: tuple[int, ...]) -> None:
    """Every number of the reports against one process."""
    whole, total = gradient(np.arange(sum(counts))), sum(counts)
    after = net()
    with torch.no_grad():
        for p, g in zip(after.parameters(), whole, strict=True):
            p.sub_(LR * g)
    for report, rows in zip(reports, parts(counts), strict=True):
        own = gradient(rows) if len(rows) else [None] * len(whole)
        assert report["rows"].tolist() == rows.tolist()
        assert report["rows"].dtype == np.int64
        assert (report["samples"], report["weight"]) == (len(rows), len(rows))
        assert report["share"] == pytest.approx(len(rows) / total)
        assert report["before"] == compute_model_checksum(net())
        for tensor, g, mean, p in zip(report["tensors"], own, whole, after.parameters(), strict=True):
            close(tensor["reduced"], mean.norm())
            close(tensor["update"], LR * mean.norm())
            close(tensor["value"], p.detach().norm())
            if g is None:
                assert tensor["local_norm"] is tensor["contribution"] is tensor["cosine"] is None
            else:
                close(tensor["local_norm"], g.norm())
                close(tensor["contribution"], g.norm() * len(rows) / total)
                close(tensor["cosine"], F.cosine_similarity(g.reshape(1, -1), mean.reshape(1, -1))[0])


def close(found: float, expected: Any) -> None:
    assert found == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("counts", [(20,), (12, 8), (7, 5, 0), (0, 20)])
def test_every_number_equals_that_of_one_process(counts):
    reports = step(counts)
    check(reports, counts)
    explanation = StepExplanation.from_reports(reports)
    inputs, targets = data()
    close(explanation.loss, F.cross_entropy(net()(inputs[: sum(counts)]), targets[: sum(counts)]).detach())
    assert explanation.identical
    assert (explanation.step, explanation.epoch, explanation.lr, explanation.clip) == (5, 2, LR, None)
    close(explanation.all_layers.reduced[0], math.hypot(*(float(g.norm()) for g in gradient(np.arange(sum(counts))))))


def in_group(rank: int, store: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """One rank of a real group; its all-reduce changes the recorded tensors in place."""
    from dtkit._util.resources import find_loopback_interface
    from dtkit.engine.comm.process_group import Group
    from dtkit.messages import GroupSpec

    torch.set_num_threads(1)
    group = Group(GroupSpec(rank, len(counts), 0, "gloo", "cpu", store, find_loopback_interface(), 1, 60.0))
    try:
        model = net()
        scope = StepProbe(model, rank=rank, step=5, epoch=2)
        local = look(scope, model, parts(counts)[rank], sum(counts))
        sums = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), local, strict=True)]
        for tensor in sums:
            group.all_reduce(tensor)
        return finish(scope, model, sums)
    finally:
        group.close()


def test_a_real_group_of_two_ranks_reports_the_numbers_of_one_process(tmp_path: Path):
    counts = (11, 6)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(in_group, rank, str(tmp_path / "store"), counts) for rank in range(2)]
        reports = [call.result(120) for call in calls]
    check(reports, counts)
    explanation = StepExplanation.from_reports(reports)
    assert explanation.identical
    assert all(layer.identical and len(set(layer.reduced)) == 1 for layer in explanation.layers)


def test_a_report_has_only_plain_types():
    report = step((3, 2))[0]
    found = pickle.dumps(report)
    assert b"torch" not in found
    values = itertools.chain(report.values(), *(tensor.values() for tensor in report["tensors"]))
    assert {type(value) for value in values} <= {int, float, str, tuple, list, np.ndarray, type(None)}


# -- checksums -------------------------------------------------------------------------------------------------------


def test_checksum_without_buffers_equals_that_of_the_session():
    tied = net()
    tied.add_module("again", tied[0])
    empty = net()
    empty.nothing = nn.Parameter(torch.empty(0, 3))
    for model in (net(), tied, net().bfloat16(), empty):
        assert StepProbe(model, rank=0, step=0, epoch=0).build_report()["before"] == compute_model_checksum(model)
    assert compute_digest(net().state_dict().items()) == compute_model_checksum(net())


def test_different_batch_statistics_do_not_count_as_different_parameters():
    def normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()

    first, second = step((8, 12), normed)
    assert first["after"] == second["after"] != first["before"]
    assert first["buffers"] != second["buffers"]
    assert "Buffers (batch statistics) differ between nodes" in repr(StepExplanation.from_reports([first, second]))


def test_a_rank_with_different_parameters_is_detected():
    reports = []
    for rank, by in enumerate((0.0, 1e-15)):
        model = net()
        scope = StepProbe(model, rank=rank, step=5, epoch=2)
        look(scope, model, np.arange(20), 20)
        with torch.no_grad():
            model[2].bias[0] *= 1 + by
        reports.append(finish(scope, model, gradient(np.arange(20))))
    explanation = StepExplanation.from_reports(reports)
    assert not explanation.identical
    assert [layer.name for layer in explanation.layers if not layer.identical] == ["2.bias"]


# -- odd tensors -----------------------------------------------------------------------------------------------------


def test_frozen_parameters_have_no_record_but_count_in_the_checksum():
    def frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    report = step((4, 4), frozen)[0]
    assert [tensor["name"] for tensor in report["tensors"]] == ["2.weight", "2.bias"]
    assert report["before"] == compute_model_checksum(net())


class Spare(nn.Module):
    """Uses its second layer only for many samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare, self.never = (nn.Linear(4, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + (self.spare(x) if len(x) > 5 else 0)


def test_gradients_of_unused_parameters_are_none_and_not_zero():
    few, many = ({t["name"]: t for t in report["tensors"]} for report in step((4, 8), Spare))
    assert few["spare.weight"]["local_norm"] is few["spare.weight"]["cosine"] is None
    assert few["spare.weight"]["reduced"] == many["spare.weight"]["contribution"]
    close(many["spare.weight"]["cosine"], 1)
    for tensors in (few, many):
        assert tensors["never.bias"]["local_norm"] is tensors["never.bias"]["reduced"] is None
        assert tensors["never.bias"]["update"] == 0


@pytest.mark.parametrize("kind", ["sparse", "complex", "bf16", "scalar"])
def test_gradients_of_every_kind_have_norms(kind):
    model = nn.Embedding(5, 2, sparse=True) if kind == "sparse" else nn.Module()
    if kind != "sparse":
        value = {"complex": torch.tensor([3 + 4j, 1j]), "bf16": torch.full((4,), 2.0).bfloat16()}
        model.p = nn.Parameter(value.get(kind, torch.tensor(5.0)))
    (p,) = model.parameters()
    loss = model(torch.tensor([1, 1, 3])).sum() if kind == "sparse" else (p.abs() ** 2).sum()
    (found,) = torch.autograd.grad(loss / 2, [p])
    dense = found.to_dense() if kind == "sparse" else found
    scope = StepProbe(model, rank=0, step=0, epoch=0)
    scope.record_loss(loss, 3, 0.5)
    scope.record_local_gradients([found])
    scope.record_reduced_gradients([dense])
    (tensor,) = scope.build_report()["tensors"]
    expected = math.sqrt(float((dense.abs().double() ** 2).sum()))
    assert expected > 0
    assert tensor["reduced"] == tensor["contribution"] == pytest.approx(expected)
    assert tensor["local_norm"] == pytest.approx(2 * expected)
    close(tensor["cosine"], 1)


def test_samples_without_weight_have_a_loss_but_no_own_gradient():
    model = net()
    scope = StepProbe(model, rank=0, step=0, epoch=0)
    scope.record_rows(np.arange(3, dtype=np.int32), 3)
    scope.record_loss(torch.tensor(2.0), 0.0, 0.0)
    scope.record_local_gradients([torch.zeros_like(p) for p in model.parameters()])
    scope.record_reduced_gradients([torch.ones_like(p) for p in model.parameters()])
    report = scope.build_report()
    assert (report["loss"], report["share"]) == (2.0, 0.0)
    assert [(t["local_norm"], t["contribution"], t["cosine"]) for t in report["tensors"]] == [(None, 0.0, None)] * 4


def test_nonfinite_gradients_are_reported_without_an_update():
    model = net()
    scope = StepProbe(model, rank=0, step=0, epoch=0)
    look(scope, model, np.arange(4), 4)
    scope.record_reduced_gradients([torch.full_like(p, math.nan) for p in model.parameters()])
    scope.save_parameters()
    report = scope.build_report()
    assert report["after"] is report["lr"] is None
    assert all(
        math.isnan(t["reduced"]) and t["cosine"] is t["update"] is t["checksum"] is None for t in report["tensors"]
    )
    explanation = StepExplanation.from_reports([report])
    assert not explanation.updated
    assert "3. No update: the gradients are not finite." in repr(explanation)


def test_a_stream_has_no_row_numbers_and_the_clip_factor_is_reported():
    scope = StepProbe(net(), rank=0, step=0, epoch=0)
    scope.record_rows(None, 7)
    scope.record_clipping(0.25)
    report = scope.build_report()
    assert (report["rows"], report["samples"], report["clip"]) == (None, 7, 0.25)


def test_the_step_probe_does_not_change_training():
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    scope = StepProbe(model, rank=0, step=0, epoch=0)
    found = look(scope, model, np.arange(4), 4)
    kept = [g.clone() for g in found]
    scope.record_reduced_gradients(found)
    scope.save_parameters()
    scope.record_parameter_updates(LR)
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [t["update"] for t in scope.build_report()["tensors"]] == [0.0] * 4
