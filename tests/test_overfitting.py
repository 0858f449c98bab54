"""Overfitting: found where the validation loss rises by more than its noise, and never on a falling curve."""

import io

import numpy as np
import pytest

from dtkit.dashboard import report
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.text import run_text
from dtkit.history import overfitting
from dtkit.history.overfitting import MIN_LATER, find_overfitting, has_risen
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource


def make_run(validation: np.ndarray, training: np.ndarray | None = None) -> FakeSource:
    """A run with an evaluation after each 10 steps, and the training losses of these steps."""
    source = FakeSource(ranks=2, steps=10 * len(validation))
    training = np.geomspace(1.0, 0.0004, len(validation)) if training is None else training
    for loss, value in zip(training, validation, strict=True):
        source.advance(10, loss=loss)
        source.history.add(Evaluation(source.step, 100, {"loss": float(value), "accuracy": 0.9}))
    return source


FALL_AND_RISE = np.concatenate([np.geomspace(2.0, 0.22, 8), np.linspace(0.24, 0.55, 12)])


def test_a_risen_validation_loss_is_told_with_its_best_and_the_remedy(tmp_path):
    source = make_run(FALL_AND_RISE)
    found = find_overfitting(source.history)
    assert found is not None
    assert (found.step, found.best) == (80, pytest.approx(0.22))
    text = (
        "overfitting since step 80: the validation loss rose from 0.220, its best, to 0.522, and the training loss "
        "fell from 0.0560 to 0.0004. callbacks=[dtkit.EarlyStopping(restore_best=True)] would end with the best weights"
    )
    assert found.text == text
    assert f"▲ {text}" in run_text.format_run(source)
    assert f"  ▲ {text}" in run_text.TextProgress(source, io.StringIO(), is_tty=False).format_block()
    notices = MessageBuilder(source).build_snapshot().content["notices"]
    assert {"kind": "overfits", "text": text} in notices
    report.write_report(source, tmp_path / "report.html")
    assert "overfitting since step 80" in (tmp_path / "report.html").read_text()


def test_a_falling_curve_with_noise_never_overfits():
    random = np.random.default_rng(0)
    for _ in range(400):
        count = int(random.integers(10, 120))
        times = np.arange(count) / count
        noise = 10 ** random.uniform(-4, -0.5)
        curve = 0.3 + random.uniform(0.2, 3) * np.exp(-times / random.uniform(0.1, 2))
        shrinking = curve / curve[0] if random.random() < 0.5 else 1.0
        values = curve + noise * shrinking * random.standard_normal(count)
        assert not any(has_risen(values[:k]) for k in range(2, count + 1)), (count, noise)


def test_a_level_curve_with_noise_hardly_ever_overfits():
    random = np.random.default_rng(1)
    curves = 1.0 + 0.1 * random.standard_normal((400, 60))
    assert sum(any(has_risen(curve[:k]) for k in range(2, 61)) for curve in curves) <= 2


def test_a_rise_of_some_times_the_noise_is_found():
    random = np.random.default_rng(2)
    found = [has_risen(FALL_AND_RISE + 0.01 * random.standard_normal(20)) for _ in range(200)]
    assert np.mean(found) > 0.95


def test_a_rise_that_has_just_begun_or_is_small_is_none():
    assert not has_risen(FALL_AND_RISE[: 8 + MIN_LATER - 1])
    assert has_risen(FALL_AND_RISE[: 8 + MIN_LATER])
    assert not has_risen(np.concatenate([np.geomspace(2.0, 0.22, 8), np.linspace(0.221, 0.235, 12)]))


def test_a_training_whose_own_loss_rises_does_not_overfit():
    assert find_overfitting(make_run(FALL_AND_RISE, 1.1 * FALL_AND_RISE).history) is None


def test_a_run_with_its_best_weights_back_has_no_notice():
    source = make_run(FALL_AND_RISE)
    source.event("restore", "the weights of epoch 8, the best, are back: loss 0.22")
    assert find_overfitting(source.history) is None


@pytest.mark.parametrize("values", [[], [0.5], [float("nan")] * 30])
def test_few_or_unknown_evaluations_are_no_overfitting(values: list[float]):
    assert find_overfitting(make_run(np.array(values)).history) is None


def test_many_evaluations_are_read_in_little_memory():
    assert has_risen(np.concatenate([[0.2], np.linspace(0.21, 0.6, 5000)]))


def test_messages_between_two_evaluations_compute_nothing_again(monkeypatch: pytest.MonkeyPatch):
    source, calls = make_run(FALL_AND_RISE[:-1]), []
    monkeypatch.setattr(overfitting, "has_risen", lambda values: calls.append(len(values)) or has_risen(values))
    for _ in range(3):
        source.advance(10, loss=0.0003)
        assert find_overfitting(source.history).now == pytest.approx(np.median(FALL_AND_RISE[-4:-1]))
    assert calls == [19]
    source.history.add(Evaluation(source.step, 100, {"loss": 0.6}))
    assert find_overfitting(source.history).now == pytest.approx(FALL_AND_RISE[-2])
    assert calls == [19, 20]
    source.event("restore", "the weights of epoch 8, the best, are back: loss 0.22")
    assert find_overfitting(source.history) is None


def test_the_training_loss_of_an_evaluation_may_arrive_after_it():
    source = make_run(FALL_AND_RISE[:-1])
    source.history.add(Evaluation(source.step + 10, 100, {"loss": 0.55}))
    before = find_overfitting(source.history).training_now
    source.advance(10, loss=0.0002)
    assert find_overfitting(source.history).training_now == pytest.approx(0.0002) != before
