"""Notebook 01 as it is committed, executed once: what it claims, what it leaves, and the memory that it takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.notebook import Done, check_memory, check_nothing_is_left, printed, watched

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.notebook

NOTEBOOK = "notebooks/01_quickstart.ipynb"


@pytest.fixture(scope="module")
def done(root: Path) -> Done:
    return watched(root / NOTEBOOK)


def test_the_cluster_is_a_table_of_two_ranks(done: Done):
    *_, head, first, second = done.text("cluster = dtkit.Cluster(2").splitlines()
    assert head.split()[:3] == ["rank", "engine", "id"]
    assert (first.split()[0], second.split()[0]) == ("0", "1")
    assert "<table>" in done.outputs("cluster = dtkit.Cluster(2")[-1].data["text/html"]


def test_the_shards_are_the_rows_that_were_not_held_out(done: Done):
    shards = re.search(r"sizes=\((\d+), (\d+)\)", done.text("cluster.partition("))
    assert shards
    assert sum(map(int, shards.groups())) == 1797 - 297
    assert "image/png" in done.outputs("cluster.partition(")[-1].data


def test_the_copies_are_identical(done: Done):
    checksums = re.findall(r"rank \d+\s+([0-9a-f]{8,})", done.text("cluster.broadcast("))
    assert len(checksums) == 2
    assert len(set(checksums)) == 1


def test_single_steps_take_half_the_batch_from_each_shard(done: Done):
    rows = [line.split() for line in done.text("run.step(2)").strip().splitlines()[1:]]
    assert [row[1:4] for row in rows] == [[str(s), str(r), "32"] for s in range(3) for r in range(2)]
    losses = [float(row[4]) for row in rows]
    assert all(a != b for a, b in zip(losses[::2], losses[1::2], strict=True))  # "each rank's own loss differs"


def test_the_dashboard_has_become_a_picture(done: Done):
    (kept,) = done.outputs("run.resume()")
    assert set(kept.data) == {"image/png", "text/plain"}
    assert kept.data["image/png"].startswith("iVBOR")  # a PNG, in base64
    assert "completed" in kept.data["text/plain"]
    assert re.search(r"step ([\d,]+) of \1, ", kept.data["text/plain"])
    assert "widget-view" not in nbformat.writes(done.notebook)


def test_nothing_was_said_on_stderr(done: Done):
    assert printed(done.notebook, "stderr") == ""


def test_accuracy_is_over_95_percent_on_held_out_rows(done: Done):
    found = re.search(r"accuracy on (\d+) rows that it never saw: (\S+)%", done.text("run.evaluate("))
    assert found
    assert found[1] == "297"
    assert float(found[2]) > 95
    right, of = re.search(r"(\d+) of (\d+) right", done.text("model = run.model")).groups()
    assert f"{100 * int(right) / int(of):.1f}" == found[2]  # the model in the notebook is the one on the engines


def test_it_equals_training_in_one_process(done: Done):
    assert done.text("run.verify(").startswith("PASS: 20 steps on 2 ranks against one process")


def test_throughput_of_one_and_two_engines_is_told_honestly(done: Done):
    said = re.findall(
        r"(\d+) samples per update: 1 engine (\S+) samples/s, 2 engines (\S+) samples/s, ratio (\S+)",
        done.text("def samples_per_second"),
    )
    assert [line[0] for line in said] == ["64", "500"]
    for line in said:
        one, two, ratio = (float(number.replace(",", "")) for number in line[1:])
        assert one > 0
        assert two > 0
        assert ratio == pytest.approx(two / one, abs=0.02)
    conclusion = done.text("better =")
    if abs(float(said[1][3]) - float(said[0][3])) > 0.02:  # the printed ratios are rounded
        assert ("closer to the number of engines" in conclusion) == (float(said[1][3]) > float(said[0][3]))


def test_no_process_is_left(done: Done):
    check_nothing_is_left(done)


def test_all_processes_together_stay_under_what_binder_gives(done: Done):
    check_memory(done)
