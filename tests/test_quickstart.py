"""Notebook 01, executed once as committed: its claims, leftover processes, and memory."""

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
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.notebook

NOTEBOOK = "notebooks/01_quickstart.ipynb"


@pytest.fixture(scope="module")
def done(root: Path) -> ExecutedNotebook:
    return execute_and_watch(root / NOTEBOOK)


def test_the_cluster_is_shown_as_a_table_of_two_nodes(done: ExecutedNotebook):
    *_, head, first, second = done.text("cluster = dtkit.Cluster(2").splitlines()
    assert head.split()[:3] == ["node", "engine", "id"]
    assert (first.split()[0], second.split()[0]) == ("0", "1")
    assert "<table" in done.outputs("cluster = dtkit.Cluster(2")[-1].data["text/html"]


def test_the_shards_hold_all_rows_except_the_held_out_ones(done: ExecutedNotebook):
    shards = re.search(r"Partition\(([\d,]+) rows on 2 nodes, .*, 750 each\)", done.text("cluster.partition("))
    assert shards
    assert int(shards[1].replace(",", "")) == 1797 - 297
    assert "image/png" in done.outputs("cluster.partition(")[-1].data


def test_replicas_are_identical(done: ExecutedNotebook):
    checksums = re.findall(r"node \d+\s+([0-9a-f]{8,})", done.text("cluster.broadcast("))
    assert len(checksums) == 2
    assert len(set(checksums)) == 1


def test_single_steps_take_half_the_batch_from_each_shard(done: ExecutedNotebook):
    rows = [line.split() for line in done.text("run.step(2)").strip().splitlines()[1:]]
    assert [row[1:4] for row in rows] == [[str(s), str(r), "32"] for s in range(3) for r in range(2)]
    losses = [float(row[4]) for row in rows]
    assert all(a != b for a, b in zip(losses[::2], losses[1::2], strict=True))  # "each rank's own loss differs"


def test_the_dashboard_is_stored_as_a_picture(done: ExecutedNotebook):
    (output,) = done.outputs("run.resume()")
    assert set(output.data) == {"text/html", "image/png", "text/plain"}
    assert output.data["image/png"].startswith("iVBOR")  # a PNG, in base64
    assert "completed" in output.data["text/plain"]
    assert re.search(r"step ([\d,]+) of \1, ", output.data["text/plain"])
    assert "widget-view" not in nbformat.writes(done.notebook)


def test_stderr_is_empty(done: ExecutedNotebook):
    assert join_stream(done.notebook, "stderr") == ""


def test_accuracy_is_over_95_percent_on_held_out_rows(done: ExecutedNotebook):
    accuracy = re.search(r"accuracy on (\d+) held-out rows: (\S+)%", done.text("run.evaluate("))
    assert accuracy
    assert accuracy[1] == "297"
    assert float(accuracy[2]) > 95
    correct, total = re.search(r"(\d+) of (\d+) correct", done.text("model = run.model")).groups()
    assert (
        f"{100 * int(correct) / int(total):.1f}" == accuracy[2]
    )  # the model in the notebook is the one on the engines


def test_the_run_equals_training_in_one_process(done: ExecutedNotebook):
    assert re.search(r"^PASS: 20 steps on 2 ranks against one process", done.text("run.verify("), re.MULTILINE)


def test_all_claims_hold(done: ExecutedNotebook):
    check_claims(done, least=3)


def test_the_verdict_on_two_engines_follows_from_all_rounds(done: ExecutedNotebook):
    """One measurement of each, one after the other, called a slowed one process a win of two engines."""
    lines = re.findall(
        r"(\d+) samples per update: ratio (\S+) \(three rounds: (\S+) to (\S+)\), (.+)\n"
        r" +samples/s: (\S+) in one process, (\S+) on 2 engines",
        done.text("comment = "),
    )
    assert [line[0] for line in lines] == ["64", "750"]
    for _, *numbers, comment, one, two in lines:
        ratio, low, high = map(float, numbers)
        assert 0 < low <= ratio <= high
        rate_1, rate_2 = (float(rate.replace(",", "")) for rate in (one, two))
        assert ratio == pytest.approx(rate_2 / rate_1, abs=0.02)
        is_near_a_limit = min(abs(low - 1.1), abs(high - 0.9)) < 0.01  # the printed ratios are rounded
        verdict = "two engines win" if low > 1.1 else "two engines don't pay" if high < 0.9 else "no clear winner"
        assert comment == verdict or is_near_a_limit


def test_no_process_is_left(done: ExecutedNotebook):
    check_nothing_is_left(done)


def test_memory_of_all_processes_fits_binder(done: ExecutedNotebook):
    check_memory(done)
