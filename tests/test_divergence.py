"""The judgment that a training diverged: what it finds, and that noise doesn't cause it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dtkit.dashboard import report
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.divergence import find_divergence
from dtkit.dashboard.summary.verdict import find_shown_verdict
from dtkit.history.history import ROW_DTYPE, History
from tests.support.fake_source import FakeSource


def make_history(losses, samples=64):
    rows = np.zeros(len(losses), ROW_DTYPE)
    rows["step"], rows["loss"], rows["lr"] = np.arange(len(losses)), losses, 0.1
    rows["samples"] = rows["weight"] = samples
    history = History()
    history.append(rows)
    return history


def make_diverged_run() -> FakeSource:
    source = FakeSource(ranks=2)
    source.advance(1, loss=2.0)
    source.advance(20, loss=1e20)
    source.advance(60, loss=6e5)
    return source


def test_a_loss_far_above_its_start_is_the_first_notice_and_the_verdict(tmp_path):
    source = make_diverged_run()
    verdict = find_shown_verdict(source)
    assert verdict is not None
    assert verdict.cause == "diverged"
    assert verdict.text == (
        "the loss is 6e+05, 3e+05 times that of the first step: lower the learning rate (0.1 now), or set "
        "clip_grad_norm="
    )
    assert verdict.arithmetic[-1].startswith("6e+05 / 2.00 = 3e+05, more than 10")
    notices = MessageBuilder(source).build_snapshot().content["notices"]
    text = "the training diverged: the loss is 6e+05, 3e+05 times that of the first step"
    assert notices[0] == {"kind": "diverged", "text": text}
    report.write_report(source, tmp_path / "run.html")
    assert text in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "the loss is NaN"), (math.inf, "the loss is inf")])
def test_a_loss_that_is_not_finite_is_named(loss, text):
    divergence = find_divergence(make_history([2.0, 1.5, loss]))
    assert divergence is not None
    assert divergence.text == text


def test_a_run_that_recovers_has_not_diverged():
    assert find_divergence(make_history([2.0, *[500.0] * 30, *[1.0] * 30])) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "noise",
    [
        lambda r, n: 2 * np.exp(0.5 * r.normal(size=n)),  # a heavy tail
        lambda r, n: np.linspace(2, 0.1, n) * (1 + 0.2 * r.random(n)) + 300 * (r.random(n) < 0.05),  # single spikes
        lambda r, n: 0.02 * r.normal(size=n) + np.linspace(0, 0.5, n),  # may be negative: a reward, or a GAN
    ],
)
def test_ordinary_noise_is_no_divergence(noise, seed):
    losses = noise(np.random.default_rng(seed), 400)
    assert not any(find_divergence(make_history(losses[:n])) for n in range(1, 401, 7))


@pytest.mark.parametrize("seed", range(20))
def test_squared_errors_of_single_samples_are_no_divergence(seed):
    losses = np.random.default_rng(seed).normal(size=400) ** 2
    assert not any(find_divergence(make_history(losses[:n], samples=1)) for n in range(1, 401, 7))


def test_a_pipeline_whose_first_stage_has_no_loss_is_judged_by_its_last_stage():
    source = FakeSource(ranks=2, stages=2)
    source.advance(60)
    assert find_divergence(source.history) is None
