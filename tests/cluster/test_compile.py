"""Compiled models on engines, by the real compiler."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support import small
from tests.support.gan import Gan, make_optimizers, make_points, train_gan
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

ROWS, STEPS = 28, 6
COMPILE_LIMIT_S = 300  # two ranks compile two passes, with a core each at best
COMPILER = """#!/bin/sh
for _ in $(seq 1200); do [ -e {go} ] && exec g++ "$@"; sleep 0.1; done
exit 1
"""


class Own(nn.Module):
    """A class of the user's, with a module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def make_sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 4, generator=generator).double(), torch.randint(3, (ROWS,), generator=generator)


def count_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File without which the engines' C++ compiler waits."""
    compiler, go = tmp_path / "c++", tmp_path / "go"
    compiler.write_text(COMPILER.format(go=go))
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return go


@pytest.fixture
def fresh(go: Path) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(2, threads=1) as cluster:
        yield cluster


def train(cluster: dtkit.Cluster, model: nn.Module, mode: bool | str = True, **options: Any) -> dtkit.Run:  # noqa: FBT001, FBT002 - the option's type
    strategy = dtkit.DataParallel(compile=mode)
    return small.train(cluster, model, make_rows(), strategy=strategy, steps=STEPS, batch_size=7, **options)


@pytest.mark.parametrize(("make", "mode"), [(make_sequential, True), (Own, True), (Own, "reduce-overhead")])
def test_compiled_model_trains_as_in_one_process(fresh: dtkit.Cluster, go: Path, make: Any, mode: bool | str):  # noqa: FBT001 - the option's type
    go.touch()
    run = train(fresh, make(), mode, shuffle=None)
    run.wait(COMPILE_LIMIT_S)
    assert min(fresh.run(count_graphs)) >= 1
    expected, (x, y) = make(), make_rows()
    optimizer = small.sgd(expected.parameters())
    for step in range(STEPS):
        rows = [(step * 7 + k) % ROWS for k in range(7)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x[rows]), y[rows]).backward()
        optimizer.step()
    for (name, p), q in zip(run.model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == q[0]
        assert (p - q[1]).abs().max() < 1e-12, name


def test_run_reports_the_compiler_and_no_stall(fresh: dtkit.Cluster, go: Path):
    run = train(fresh, make_sequential())

    def list_messages() -> list[str]:
        return [event.text for event in run.history.events]

    wait_until(lambda: any("compile the model, for" in message for message in list_messages()), 90)
    go.touch()
    run.wait(COMPILE_LIMIT_S)
    about_stalls = [m for m in list_messages() if "stuck" in m or "no rank has moved" in m or "have waited" in m]
    assert not about_stalls
    assert [m for m in list_messages() if "the model was compiled in" in m]


def test_step_that_calls_only_parts_of_the_model_is_refused(cluster2: dtkit.Cluster):
    run = cluster2.train(
        Gan(),
        make_points(),
        training_step=train_gan,
        optimizer=make_optimizers,
        batch_size=16,
        steps=2,
        strategy=dtkit.DataParallel(compile=True),
    )
    with pytest.raises(dtkit.errors.EngineError, match="training_step calls only parts or methods of the model"):
        run.wait(60)
    small.check_usable(cluster2)
