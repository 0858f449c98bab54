"""A training that has learned nothing: found after updates that were too large, and never where a loss may be level."""

import math

import numpy as np
import pytest

import dtkit
from dtkit.dashboard import kept_picture, report
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.activity import name_state
from dtkit.dashboard.summary.verdict import find_shown_verdict
from dtkit.dashboard.text import run_text
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.no_learning import MIN_STEPS, find_no_learning
from dtkit.history.undone_steps import UndoneSteps
from dtkit.types import Evaluation, State
from tests.support.fake_source import FakeSource
from tests.support.rows_read import count_rows_read

EVERY = 20
EPOCH = 24
OVERSHOT = [2.32, 2.27, 2.22, 2.02, 1.99, 4.84, 12.55, 19.3, 13.2, 8.5, *np.geomspace(8, 2.5, 20)]
"""The first losses of a training with a learning rate of 2: it falls, explodes and comes back."""


def make_history(losses, validation=None, lr=2.0, first=0, samples=64) -> History:
    rows = np.zeros(len(losses), ROW_DTYPE)
    rows["step"], rows["loss"], rows["lr"] = first + np.arange(len(losses)), losses, lr
    rows["samples"], rows["weight"], rows["epoch"] = samples, samples, rows["step"] // EPOCH
    history = History()
    history.append(rows)
    for step in range(EVERY, len(losses) + 1, EVERY) if validation is not None else ():
        history.add(Evaluation(step, 100, {"loss": float(validation[step - 1])}))
    return history


def make_overshot(steps: int = 240, level: float = 2.37, seed: int = 0) -> np.ndarray:
    noise = 0.04 * np.random.default_rng(seed).normal(size=steps - len(OVERSHOT))
    return np.concatenate([OVERSHOT, level + noise])


def make_run() -> FakeSource:
    losses = make_overshot()
    source = FakeSource(ranks=2, steps=len(losses), name="lr 2")
    source.lr = 2.0
    for step, loss in enumerate(losses, 1):
        source.advance(1, loss=loss)
        if step % EVERY == 0:
            source.history.add(Evaluation(step, 100, {"loss": 2.41, "accuracy": 0.1}))
    source.state = State.COMPLETED
    return source


def test_a_loss_that_came_back_to_its_start_is_told_in_every_view(tmp_path):
    source = make_run()
    found = find_no_learning(source.history)
    assert found is not None
    text = (
        f"the model has learned nothing so far: the loss ({found.now:.2f}, mean of 40 steps) is not below that of the "
        "first step (2.32), and rose to 19.3 at step 8. Train again with a lower learning rate than 2, such as 0.2"
    )
    assert found.text == text
    assert f"▲ {text}" in run_text.format_run(source)
    assert name_state(source) == "completed, learned nothing"  # a green "✓ completed" contradicted it
    assert ">▲ completed, learned nothing</strong>" in kept_picture.draw_kept_picture(source).page
    assert MessageBuilder(source).build_snapshot().content["status"]["end"] == "learned nothing"
    assert MessageBuilder(source).build_snapshot().content["notices"][0] == {"kind": "unlearned", "text": text}
    report.write_report(source, tmp_path / "run.html")
    assert f'<p class="notice">{text}</p>' in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("state", [State.RUNNING, State.COMPLETED])
def test_the_verdict_on_a_run_that_learned_nothing_is_not_about_its_speed(state: State):
    source = make_run()
    source.state = state
    verdict, found = find_shown_verdict(source), find_no_learning(source.history)
    assert verdict is not None
    assert found is not None
    assert verdict.cause == "learned nothing"
    remedy = "train again with a lower learning rate than 2, such as 0.2"
    assert verdict.text == f"the model has learned nothing so far: {remedy}"  # no number changes with each step
    assert verdict.arithmetic == (
        "loss of the first step: 2.32", f"mean of the last 40 steps: {found.now:.2f}", "highest loss: 19.3, at step 8",
    )  # fmt: skip


def test_a_comparison_names_the_run_that_learned_nothing():
    good, other, bad = FakeSource(ranks=2, name="good"), FakeSource(ranks=2, name="other"), make_run()
    for run in (good, other):
        run.advance(240)
        run.state = State.COMPLETED
    comparison = dtkit.compare(good, other, bad)
    assert [row.competes for row in comparison.rows] == [True, True, False]
    loss = find_no_learning(bad.history).now
    line = f"{comparison.labels[2]} learned nothing: loss {loss:.2f}, that of the first step 2.32"
    line += ": train again with a lower learning rate than 2, such as 0.2"
    assert line in repr(comparison).splitlines()


@pytest.mark.parametrize("level", [2.31, 2.37, 2.9])
@pytest.mark.parametrize("seed", range(5))
def test_the_finding_stays_from_soon_after_the_loss_is_level(level: float, seed: int):
    losses = make_overshot(level=level, seed=seed)
    found = [n for n in range(MIN_STEPS, 241) if find_no_learning(make_history(losses[:n], np.full(240, level)))]
    assert found[0] < 120
    assert len(found) > 0.9 * (241 - found[0])


def test_the_learning_rate_at_the_peak_is_named_whatever_a_schedule_did_since():
    lr = np.linspace(0.5, 0, 240)
    found = find_no_learning(make_history(make_overshot(), make_overshot(), lr=lr))
    assert found.lr == pytest.approx(lr[7])
    assert found.peak_step == 7


def test_validation_decides_where_there_is_one():
    losses = make_overshot()
    assert find_no_learning(make_history(losses, losses)) is not None
    assert find_no_learning(make_history(losses, np.geomspace(2.3, 0.4, 240))) is None


def test_without_validation_only_a_very_high_peak_counts():
    losses = make_overshot()
    assert find_no_learning(make_history(losses)) is None
    losses[5:10] *= 10
    assert find_no_learning(make_history(losses)) is not None


def make_dead(steps: int = 300, highest: float = 8.2, level: float = 2.32, noise: float = 0.02) -> np.ndarray:
    """Return the losses of a training with a learning rate of 3, whose units died in a single high step."""
    losses = level + noise * np.random.default_rng(0).normal(size=steps)
    losses[[0, 31]] = 2.33, highest
    return losses


def test_evaluations_at_the_start_show_a_dead_model_after_a_single_high_step():
    losses = make_dead()
    validation = np.maximum(make_dead(highest=2.4), 2.31)
    found = find_no_learning(make_history(losses, validation, lr=3.0))
    assert (
        ", and rose to 8.20 at step 31. The lowest of the last 10 validation losses is 2.31. Train again" in found.text
    )
    assert found.text.endswith("with a lower learning rate than 3, such as 0.3")
    assert find_no_learning(make_history(losses)) is None
    assert find_no_learning(make_history(losses[:99], validation)) is None  # four evaluations
    validation[3 * EVERY - 1] = 2.0
    assert find_no_learning(make_history(losses, validation)) is not None  # what it had learned is lost
    validation[13 * EVERY - 1] = 2.0
    assert find_no_learning(make_history(losses, validation)) is None


def test_evaluations_above_the_start_show_a_model_that_survived_a_divergence():
    losses = make_dead(highest=1e4, level=6.0, noise=1.2)
    found = find_no_learning(make_history(losses, losses.clip(3), lr=30.0))
    assert found.text.endswith("with a lower learning rate than 30, such as 3")


def test_a_level_training_gets_possible_causes_only_after_many_evaluations():
    losses = make_dead(highest=2.33)
    found = find_no_learning(make_history(losses, np.maximum(losses, 2.3), lr=1e-4))
    assert "rose" not in found.text
    assert "The learning rate (0.0001) may be too low or too high, the labels may not belong to the rows" in found.text
    assert find_no_learning(make_history(losses[: 9 * EVERY], np.maximum(losses, 2.3))) is None


@pytest.mark.parametrize("fall", [0.003, 0.015])
def test_a_slow_but_steady_fall_of_validation_losses_is_learning(fall: float):
    losses, slow = make_dead(highest=2.33), np.linspace(2.33, 2.33 * (1 - fall), 300)
    assert find_no_learning(make_history(losses, slow)) is None
    assert find_no_learning(make_history(losses, np.full(300, 2.33))) is not None


def test_a_training_that_made_both_losses_worse_has_learned_nothing():
    random = np.random.default_rng(0)
    losses = np.concatenate([np.linspace(0.5, 0.9, 50), 0.9 + 0.01 * random.normal(size=100)])
    assert "is not below that of the first step (0.500)" in find_no_learning(make_history(losses, losses)).text
    assert find_no_learning(make_history(losses)) is None
    assert find_no_learning(make_history(losses, np.full(150, 0.45))) is None


@pytest.mark.parametrize(
    ("first", "losses"),
    [
        (0, make_overshot()[: MIN_STEPS - 1]),
        (500, make_overshot()),  # resumed: the first loss is that of a trained model
        (0, make_overshot() - 2.5),  # negative at times: a reward
        (0, [math.nan] * 240),
    ],
    ids=["short", "resumed", "negative", "unknown"],
)
def test_a_run_that_has_no_scale_is_not_judged(first, losses):
    assert find_no_learning(make_history(losses, losses, first=first)) is None


def make_curves(random: np.random.Generator, steps: int = 300) -> dict[str, np.ndarray]:
    """Losses of trainings that learn, or of which nobody can say."""
    noise, time = random.normal(size=steps), np.arange(steps)
    return {
        "a fine-tuning that starts low": 0.3 * (1 + 0.2 * noise),
        "a start that was low by luck": np.concatenate([[0.4], (0.65 * np.exp(-time / 60) + 0.35) * (1 + 0.2 * noise)]),
        "heavy tails": np.exp(noise),
        "single spikes": np.linspace(2, 0.1, steps) * (1 + 0.2 * np.abs(noise)) + 300 * (random.random(steps) < 0.05),
        "batches that are mostly right": (random.random((steps, 64)) < 0.05).mean(1) * 3 + 0.01,
        "samples that are mostly right": np.where(random.random(steps) < 0.1, 3.0, 1e-4),
        "a generator": (0.7 + 1.5 * (1 - np.exp(-time / 30))) * np.abs(1 + 0.3 * noise),
        "a generator that catches up": np.abs(0.7 + 2.5 * np.exp(-(((time - 60) / 25) ** 2)) + 0.2 * noise),
        "a critic": 0.5 + 0.05 * time * np.abs(1 + 0.3 * noise),
        "one that learns late": np.concatenate([np.full(150, 2.3), np.linspace(2.3, 0.3, steps - 150)]) + 0.02 * noise,
        "a warm-up with a hump": np.concatenate([[2.3] * 60, np.geomspace(2.3, 15, 30), np.geomspace(15, 0.5, 210)]),
        "squared errors": noise**2,
    }


_PLAYS_AGAINST_ANOTHER = "a generator that catches up"  # `train` refuses validation for such steps


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", make_curves(np.random.default_rng(0)))
def test_other_losses_are_no_false_alarm(name: str, seed: int):
    losses = make_curves(np.random.default_rng(seed))[name]
    noisy = losses * (1 + 0.05 * np.random.default_rng(seed).normal(size=len(losses)))
    for validation in (None,) if name == _PLAYS_AGAINST_ANOTHER else (None, noisy):
        found = [find_no_learning(make_history(losses[:n], validation)) for n in range(MIN_STEPS, len(losses) + 1, 11)]
        assert not any(found)


def test_steps_that_were_undone_have_no_peak():
    source = make_run()
    assert find_no_learning(source.history) is not None
    source.history.add(UndoneSteps(3))
    source.step = 3
    source.advance(200, loss=2.32)
    assert find_no_learning(source.history) is None


def test_a_look_at_a_long_history_reads_its_first_last_and_new_rows(monkeypatch: pytest.MonkeyPatch):
    history = make_history(make_overshot(20_000))
    find_no_learning(history)
    num_read = count_rows_read(monkeypatch)
    history.append(make_history(make_overshot(20_010)).rows(20_000))
    num_read.clear()
    find_no_learning(history)
    assert 0 < sum(num_read) < 1_000


@pytest.mark.parametrize("infinite", [slice(0, 1), slice(3, 5), slice(-3, None), slice(60, None)])
def test_infinite_losses_print_no_warnings_of_numpy(infinite):
    """Warnings are errors here. A user read four of them below the next cell."""
    losses = make_overshot()
    losses[infinite] = math.inf
    assert find_no_learning(make_history(losses)) is None
