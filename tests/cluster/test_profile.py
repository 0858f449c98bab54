"""Profiles of steps on real engines: under each strategy, paused and running, without a change to the training."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support.small import LONG, train

pytestmark = pytest.mark.cluster


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_profile_of_a_paused_run_leaves_the_training_as_it_was(cluster2, tmp_path):
    plain = train(cluster2, steps=12)
    plain.wait(60)
    expected = plain.model.state_dict()
    run = train(cluster2, steps=12, start=False)
    run.step(4)
    profile = run.profile(3)
    assert (profile.first_step, profile.num_steps, run.status.step) == (4, 3, 7)
    assert run.status.state is dtkit.types.State.PAUSED
    run.resume()
    run.wait(60)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, expected[name])
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(path)
    check_trace(json.loads(path.read_text())["traceEvents"], steps=3)
    assert "aten::addmm" in repr(profile)
    names = [line.split()[0] for line in repr(profile).splitlines()]
    assert names.count("AddmmBackward0") == 1
    assert {row.name for row in profile.operators} >= {"aten::addmm", "aten::mm"}
    assert "node 1" in profile._repr_html_()


def check_trace(events: list[dict[str, Any]], steps: int) -> None:
    """Check that each rank is a process, with its phases, on one clock."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    forward = {rank: [] for rank in (0, 1)}
    for event in events:
        if event["name"] == "phase forward" and event.get("cat") == "user_annotation":
            forward[int(names[event["pid"]].split()[1].rstrip(","))].append(event)
    assert [len(part) for part in forward.values()] == [steps, steps]
    for first, second in zip(forward[0], forward[1], strict=True):  # ranks take a step together
        assert abs(first["ts"] - second["ts"]) < 5e6
    assert all(event["ts"] >= 0 for event in events)


def test_a_profile_of_a_running_run_goes_on(cluster2):
    run = train(cluster2, steps=LONG)
    profile = run.profile(2)
    assert profile.num_steps == 2
    assert run.status.state is dtkit.types.State.RUNNING
    run.stop()


@pytest.mark.parametrize(
    "strategy",
    [dtkit.Pipeline(2, 2), pytest.param(dtkit.Sharded(), marks=pytest.mark.slow), dtkit.TensorParallel(2)],
    ids=["Pipeline", "Sharded", "TensorParallel"],
)
def test_each_strategy_has_operators_on_all_ranks(cluster2, strategy):
    run = train(cluster2, mlp(), steps=6, strategy=strategy, start=False)
    profile = run.profile(2)
    assert all(rank.operators for rank in profile.ranks)
    run.resume()
    run.wait(60)


def test_an_error_in_a_profiled_step_ends_the_profile(cluster2):
    def fail_at_step_2(model: nn.Module, batch: Any) -> torch.Tensor:
        fail_at_step_2.calls = getattr(fail_at_step_2, "calls", 0) + 1
        if fail_at_step_2.calls > 4:
            raise ValueError("planted")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = train(cluster2, loss=None, training_step=fail_at_step_2, start=False)
    with pytest.raises(dtkit.errors.EngineError, match="planted"):
        run.profile(10)
    again = train(cluster2, steps=4, start=False)
    assert again.profile(1).num_steps == 1
    again.stop()


def test_efficiency_counts_the_whole_model_under_any_strategy(cluster2):
    for strategy in (dtkit.DataParallel(), dtkit.Pipeline(2, 2)):
        run = train(cluster2, mlp(), steps=6, strategy=strategy, start=False)
        run.step(2)
        assert run.efficiency().workload.flops_per_sample == 2 * (2 * 4 * 8 + 3 * 8 * 8 + 3 * 8 * 3)
        run.resume()
        run.wait(60)
