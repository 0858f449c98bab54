"""Notebook 02, executed once as committed: every claim passes, and its pictures are there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.support.notebook import (
    ExecutedNotebook,
    check_claims,
    check_memory,
    check_nothing_is_left,
    execute_and_watch,
    join_stream,
    list_code_cells,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.notebook, pytest.mark.slow]

NOTEBOOK = "notebooks/02_data_parallel.ipynb"


@pytest.fixture(scope="module")
def done(root: Path) -> ExecutedNotebook:
    return execute_and_watch(root / NOTEBOOK)


# -- executed -------------------------------------------------------------------------------------------------


def test_every_claim_holds(done: ExecutedNotebook):
    check_claims(done, least=20)


def test_only_the_skewed_partition_warns(done: ExecutedNotebook):
    text = join_stream(done.notebook, "stderr")
    assert text.count("Warning") == 1
    assert "UserWarning: the classes of rank 1's rows differ" in text
    printed = join_stream(done.notebook, "stdout")
    assert "takes its place" not in printed
    assert "there is none" not in printed  # a metric without data for it


def test_partitions_and_the_explained_step_have_tables_and_pictures(done: ExecutedNotebook):
    for source in ("\npartition = cluster.partition(", "skewed = cluster.partition("):
        shown = done.outputs(source)[-1].data
        assert "image/png" in shown
        assert "748 or 749 each" in shown["text/plain"]
    page = done.outputs("explanation = run.explain_step()")[-1].data["text/html"]
    assert "Both nodes hold identical parameters, bit by bit." in page
    assert "data:image/png;base64,iVBOR" in page


def test_verify_passes(done: ExecutedNotebook):
    shown = done.text("run.verify(")  # below a line on the progress, where that takes long
    assert re.search("^PASS: 48 steps on 2 ranks against one process, float64", shown, re.MULTILINE)


def test_plain_means_lead_to_different_parameters(done: ExecutedNotebook):
    (difference,) = re.findall(
        r"plain means: the parameters differ by (\S+) after 20 steps", done.text("plain_difference = ")
    )
    assert float(difference) > 1e-3


def test_the_comparison_shows_every_run(done: ExecutedNotebook):
    (shown,) = done.outputs("dtkit.compare(")
    page = shown.data["text/html"]
    assert "data:image/png;base64,iVBOR" in page
    for label in ("gradients", "averaging, every 8", "DiLoCo, every 8", "fp16", "PowerSGD"):
        assert f">{label}<" in page
    (figure,) = done.outputs("comparison.figure()")
    assert "image/png" in figure.data  # with the loss against bytes, of which the text speaks


def accuracies(text: str) -> dict[str, float]:
    lines = re.findall(r"^(\S+)% of the held-out images right: (.+)$", text, re.MULTILINE)
    return {name: float(percent) for percent, name in lines}


def test_all_strategies_learn_and_skewed_shards_hurt_only_averaging(done: ExecutedNotebook):
    runs = accuracies(done.text("strategies = {"))
    assert len(runs) == 5
    assert min(runs.values()) > 90
    cut = accuracies(done.text('train("gradients, cut by digit"'))
    assert cut["gradients, cut by digit"] > 90
    assert cut["averaging every 48, cut by digit"] < 85


def test_the_straggler_is_named_and_balancing_reduces_waiting(done: ExecutedNotebook):
    (equal,), (balanced,) = done.outputs("equal = train_costly("), done.outputs("balanced = train_costly(")
    for output in (equal, balanced):
        assert set(output.data) == {"text/html", "image/png", "text/plain"}  # the dashboard has become a picture
        assert "completed" in output.data["text/plain"]
        assert "node 1 slowed 2x on purpose" in output.data["text/plain"]
    assert "node 1 keeps the others waiting" in equal.data["text/plain"]
    waiting = [int(re.search(r"waiting (\d+) %", output.data["text/plain"])[1]) for output in (equal, balanced)]
    assert waiting[1] < 0.7 * waiting[0]  # a declared cost of ms, next to which a busy machine's noise is small
    assert "widget-view" not in nbformat.writes(done.notebook)


def test_the_naive_version_fits_on_a_blackboard(done: ExecutedNotebook):
    (cell,) = [cell for cell in list_code_cells(done.notebook) if "def train_naively" in cell.source]
    assert len(cell.source.splitlines()) <= 15
    assert "torch.distributed.all_reduce(" in cell.source


def test_drawings_are_shown(done: ExecutedNotebook):
    for source in ("draw_data_parallel(", "draw_ring_all_reduce("):
        assert 'role="img"' in done.outputs(source)[-1].data["text/html"]


def test_the_times_of_both_versions_are_reported(done: ExecutedNotebook):
    lines = re.findall(r"^(fast|naive) +a step: (\S+) ms, of which (\S+) ms", done.text("blocked_s = "), re.MULTILINE)
    assert [line[0] for line in lines] == ["fast", "naive"]
    assert all(0 < float(blocked) < float(step) for _, step, blocked in lines)


def test_plans_show_which_strategies_fit(done: ExecutedNotebook):
    everything, huge = done.outputs("plan = cluster.plan(")[-1], done.outputs("huge = cluster.plan(")[-1]
    assert "all fit" in everything.data["text/plain"]
    assert "only DataParallel(accumulate=100000000) fits" in huge.data["text/plain"]
    for shown in (everything, huge):
        assert "data:image/png;base64,iVBOR" in shown.data["text/html"]


def test_no_process_is_left(done: ExecutedNotebook):
    check_nothing_is_left(done)


def test_memory_of_all_processes_fits_binder(done: ExecutedNotebook):
    check_memory(done)
