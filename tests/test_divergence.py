"""The judgment that a training diverged: what it finds, and that noise doesn't cause it."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import dtkit
from dtkit.dashboard import kept_picture, report
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.summary.activity import name_bad_end, name_state
from dtkit.dashboard.summary.notices import collect_notices, list_error_lines
from dtkit.dashboard.summary.run_end import describe_end
from dtkit.dashboard.summary.verdict import find_shown_verdict
from dtkit.errors import NonFiniteError
from dtkit.history.divergence import find_divergence, find_divergence_step, find_large_loss, find_ruined_step
from dtkit.history.history import ROW_DTYPE, History
from dtkit.training.divergence_watch import DivergenceWatch
from dtkit.types import Event, Failure, State
from tests.support.fake_source import FakeSource


def make_history(losses, samples=64, norm=1.0):
    rows = np.zeros(len(losses), ROW_DTYPE)
    rows["step"], rows["loss"], rows["lr"] = np.arange(len(losses)), losses, 0.1
    rows["samples"] = rows["weight"] = samples
    rows["grad_norm"] = norm
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
        "the loss began to grow at step 2: lower the learning rate (0.1 now), or set the strategy's clip_grad_norm="
    )
    assert verdict.arithmetic[-1].startswith("600,000 / 2.00 = 300,000")
    notices = MessageBuilder(source).build_snapshot().content["notices"]
    text = (
        "the training diverged: the loss grew 300,000 times since step 2, from 2.00 to 600,000 at step 81 "
        "(median of the last 20 steps)"
    )
    assert notices[0] == {"kind": "diverged", "text": text}
    report.write_report(source, tmp_path / "run.html")
    assert f'<p class="notice alert">{text}</p>' in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("losses", "remedy", "large"),
    [
        ([2.0, 1.5, math.inf], "train again with a lower learning rate (0.1 now)", (2, math.inf)),
        ([math.inf, math.inf], "no update came before it, so look for numbers in the data or the model", (0, math.inf)),
        ([2.0, 1e16, math.inf], "train again with a lower learning rate (0.1 now)", (1, 1e16)),
    ],
)
def test_after_an_infinite_loss_only_another_training_helps(losses, remedy, large):
    history = make_history(losses)
    assert find_divergence(history).remedy.startswith(remedy)
    assert find_large_loss(history) == large
    assert find_large_loss(make_history([2.0, 1e6])) is None


@pytest.mark.parametrize(
    ("losses", "norm", "is_alone"),
    [
        ([2.0, 1.5, math.nan, math.nan], 0.3, True),
        ([math.nan, math.nan], 0.3, True),
        ([2.0, 1e4, math.nan], 0.3, False),  # it grew before
        ([2.0, 1.5, math.nan], math.nan, False),  # unknown
        ([2.0, 1.5, math.inf, math.nan], 0.3, False),  # squares of large errors
    ],
)
def test_a_nan_loss_with_finite_gradients_is_not_blamed_on_the_learning_rate(losses, norm, is_alone):
    divergence = find_divergence(make_history(losses, norm=norm))
    assert divergence.has_finite_gradients == is_alone
    assert ("the learning rate is not the cause. Look at what the loss computes" in divergence.remedy) == is_alone
    assert any("norm of the gradients of step" in line for line in divergence.arithmetic) == is_alone


@pytest.mark.parametrize(
    ("loss", "text"), [(math.nan, "the loss is NaN since step 2"), (math.inf, "the loss is inf since step 2")]
)
def test_a_loss_that_is_not_finite_is_named(loss, text):
    divergence = find_divergence(make_history([2.0, 1.5, loss]))
    assert divergence is not None
    assert divergence.text == text


def test_a_loss_that_falls_and_explodes_is_compared_with_its_best_steps():
    falling = np.geomspace(2.0, 0.05, 120)
    history = make_history([*falling, *[2.2] * 30])
    divergence = find_divergence(history)
    assert divergence is not None
    best = falling[-20:].mean()
    assert divergence.short == f"loss grew {2.2 / best:.0f} times since step 120"
    assert (
        divergence.text == f"the {divergence.short}, from {best:.4f} to 2.20 at step 149 (median of the last 20 steps)"
    )
    assert divergence.arithmetic[0] == f"best so far, 20 steps up to step 119: {best:.4f}"


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([*np.geomspace(2.0, 0.05, 120), *[2.2] * 30], 119),
        ([*np.geomspace(2.0, 0.05, 120), *np.geomspace(1, 1e34, 20)], 119),
        ([2.3, 1e5, 1e20], 0),  # at once
        ([2.3, 300.0], None),  # may be noise
        ([2.0, 1.5, math.nan], None),  # data may cause it
        ([-2.0, 1e5], None),
        ([2.0, 1.5, 1.0], None),
        ([], None),
    ],
)
def test_the_step_that_ruined_the_parameters_is_known(losses, step):
    assert find_ruined_step(make_history(losses)) == step


def test_an_explosion_is_found_within_few_steps():
    falling = np.geomspace(2.0, 0.05, 120)
    found = [find_divergence(make_history([*falling, *[1e9] * num])) is not None for num in (4, 5)]
    assert found == [False, True]


def test_the_best_steps_of_a_growing_history_are_found_by_parts():
    falling = np.geomspace(2.0, 0.05, 120)
    losses = np.array([*falling, *[2.2] * 30])
    growing = make_history(losses[:7])
    for first in range(7, len(losses), 13):
        find_divergence(growing)
        growing.append(make_history(losses).rows(first, first + 13))
    assert find_divergence(growing) == find_divergence(make_history(losses))


@pytest.mark.parametrize(
    "losses",
    [
        [*np.geomspace(2, 1e-3, 100), *[0.1] * 30],  # a warm restart: worse than before, far from the start
        [*[2.3] * 60, *np.geomspace(2.3, 15, 30), *np.geomspace(15, 1, 60)],  # a warm-up with a hump
        [2.0, 300.0, *np.geomspace(5, 0.5, 100)],  # a first update that is too large
    ],
)
def test_a_rise_within_what_training_does_is_no_divergence(losses):
    assert not any(find_divergence(make_history(losses[:n])) for n in range(1, len(losses) + 1))


def test_a_divergence_is_logged_once_and_again_after_a_recovery():
    losses = [2.0] * 20 + [500.0] * 30 + [1.0] * 40 + [500.0] * 30
    history, rows = History(), make_history(losses).rows()
    watch = DivergenceWatch(history)
    found = []
    for step in range(len(losses)):
        history.append(rows[step : step + 1])
        found += [(step, divergence.short)] if (divergence := watch.find_new()) else []
    assert [text.partition(" times ")[2] for _, text in found] == ["since step 20", "since step 90"]
    assert 20 < found[0][0] < 50
    assert found[1][0] > 90


def make_run_with_a_high_rate() -> FakeSource:
    """Return a run that diverged with a learning rate of 2, which was lowered again."""
    source = FakeSource(ranks=2)
    source.advance(60, loss=np.repeat(np.geomspace(2.0, 0.015, 60), 2))
    source.lr = 2.0
    source.history.add(Event(61, "lr", "learning rate 2", 0.0))  # the first step with it
    source.advance(3, loss=0.016)
    source.advance(20, loss=3.0)
    source.event("diverged", "the loss grew 200 times")
    source.lr = 0.05
    source.event("lr", "learning rate 0.05")
    source.advance(30, loss=2.5)
    return source


@pytest.mark.parametrize(("last", "word"), [(2.7, "diverged"), (2.4, ""), (1.9, "")])
def test_a_run_that_came_back_to_more_than_its_first_loss_had_diverged(last, word):
    """A loss of 2.7 after one of 2.3 and 20,000 is within twice its best, and its run ended in green."""
    source = FakeSource(ranks=2)
    source.advance(10, loss=2.32)
    source.advance(20, loss=20_000.0)
    source.event("diverged", "the loss grew 9,064 times")
    source.advance(39, loss=last)
    source.state = State.COMPLETED
    assert name_bad_end(source) == word


def test_the_advice_names_the_rate_with_which_the_loss_left():
    source = make_run_with_a_high_rate()
    text = (
        "the loss began to grow at step 64, with the learning rate at 2 (set at step 61); it is 0.05 now: train on, or "
        "go back to a checkpoint"
    )
    assert find_shown_verdict(source).text == text
    source.advance(5, loss=2.4)
    assert find_shown_verdict(source).text == text  # the loss goes on, the place where it left stays
    source.state = State.STOPPED
    assert [notice.kind for notice in collect_notices(source)] == ["diverged"]  # not how to train on from there


def test_all_views_name_one_step_for_a_divergence():
    """The head named the best step, the verdict where the loss left it, and the comparison the edge of its chart."""
    exploded = FakeSource(ranks=2, name="exploded")
    exploded.advance(5, loss=np.repeat([2.3, 300.0, 600.0, 5e3, 1e5], 2))
    exploded.advance(60, loss=1e9)
    exploded.end()
    good = FakeSource(ranks=2, name="good")
    good.advance(65)
    verdict, notice = find_shown_verdict(exploded), collect_notices(exploded)[0]
    left = ComparisonMessageBuilder(dtkit.compare(good, exploded)).build_snapshot().content["head"]["left"]
    steps = [re.findall(r"(?:since|at) step (\d+)", text)[0] for text in (verdict.text, notice.text, left[1])]
    assert steps == [str(find_divergence_step(exploded.history))] * 3
    assert find_divergence(exploded.history).departure.step == find_divergence_step(exploded.history) == 2


def test_a_step_that_was_not_finite_says_since_when_in_one_place():
    """The error named one step, the notice that of the first infinite loss, and the title the last one."""
    run = make_diverged_run()
    assert collect_notices(run)[0].kind == "diverged"
    remedies = ("The loss grew since step 2, so the parameters are ruined already.", "- train again")
    message = "\n".join(("the gradients over all ranks are not finite", *remedies))
    run.state = State.PAUSED
    run.exception = NonFiniteError([Failure(0, "here", "NonFinite", message, "", step=82)])
    assert [notice.kind for notice in collect_notices(run)] == []
    assert list_error_lines(run.exception)[1:] == list(remedies)


def test_a_run_that_was_stopped_on_its_way_back_says_that_it_had_diverged():
    source = make_run_with_a_high_rate()
    source.advance(60, loss=0.4)
    assert not [notice for notice in collect_notices(source) if notice.kind == "diverged"]
    source.state = State.STOPPED
    (notice,) = [notice for notice in collect_notices(source) if notice.kind == "diverged"]
    assert notice.text.startswith("its loss diverged at step 64; best 0.0")
    assert notice.text.endswith(". Train on, or go back to a checkpoint")  # the rate was lowered since
    assert describe_end(source, source.history) == ("diverged", notice.text.replace(". Train", ": train"))
    source.advance(60, loss=0.015)  # back at its best
    assert not [notice for notice in collect_notices(source) if notice.kind == "diverged"]
    assert describe_end(source, source.history).word == ""


def make_survivor() -> FakeSource:
    """Return a run that exploded with a learning rate of 30, survived, and completed far above its start."""
    source = FakeSource(ranks=2)
    source.lr = 30.0
    source.advance(6, loss=np.repeat([2.32, 1e3, 1.75e4, 9e3, 2e3, 900.0], 2))
    source.event("diverged", "the loss grew 400 times")
    source.advance(294, loss=np.repeat(np.random.default_rng(0).normal(6.0, 1.2, 294).clip(3), 2))
    return source


def test_a_run_that_completed_after_a_divergence_names_the_remedy_first(tmp_path):
    source = make_survivor()
    assert find_shown_verdict(source).cause != "diverged"  # it may yet come back
    source.end()
    (notice,) = [notice for notice in collect_notices(source) if notice.kind in ("diverged", "unlearned")]
    remedy = "rain again with a lower learning rate than 30, such as 3"
    assert notice.text == f"its loss diverged at step 2; best 2.32. T{remedy}"
    verdict = find_shown_verdict(source)
    assert verdict.cause == "diverged"
    assert verdict.text == f"the loss diverged at step 2 and is not back at its best (2.32): t{remedy}"
    assert verdict.arithmetic[0] == "best so far: 2.32"
    assert MessageBuilder(source).build_snapshot().content["verdict"]["text"] == verdict.text
    report.write_report(source, tmp_path / "run.html")
    assert verdict.text in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("state", [State.COMPLETED, State.STOPPED])
def test_the_state_of_a_run_that_ended_after_a_divergence_says_so(state: State):
    """A red "✓ completed" contradicted itself."""
    source = make_survivor()
    assert "end" not in MessageBuilder(source).build_snapshot().content["status"]
    source.end(state)
    assert name_state(source) == f"{state.value}, diverged"
    assert MessageBuilder(source).build_snapshot().content["status"]["end"] == "diverged"
    assert f">✕ {state.value}, diverged</strong>" in kept_picture.draw_kept_picture(source).page
    source.advance(60, loss=0.5)
    assert name_state(source) == state.value


def test_a_run_that_completed_back_at_its_best_has_a_verdict_on_its_speed():
    source = make_survivor()
    source.advance(60, loss=0.5)
    source.end()
    assert find_shown_verdict(source).cause != "diverged"


def test_a_view_shows_a_divergence_in_its_head():
    run = make_diverged_run()
    assert MessageBuilder(run).build_snapshot().content["status"]["diverged"] == "loss grew 300,000 times since step 2"
    healthy = FakeSource(ranks=2)
    healthy.advance(50)
    assert MessageBuilder(healthy).build_snapshot().content["status"]["diverged"] is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_losses_of_single_samples_that_are_mostly_tiny_are_no_divergence(seed, share):
    """A network that has nearly fitted its data: a few samples are wrong, the others have no loss."""
    random = np.random.default_rng(seed)
    losses = np.where(random.random(1500) < share, 3 * random.random(1500), 1e-4)
    losses[:40] = 2.3
    assert not any(find_divergence(make_history(losses[:n], samples=1)) for n in range(1, 1501, 7))


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
