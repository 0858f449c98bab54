"""Explanations of pipeline and sharded steps, made from reports of ranks: numbers, text, figures."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from matplotlib.figure import Figure

from dtkit.dashboard.figures import pipeline_figure
from dtkit.dashboard.text import pipeline_text
from dtkit.explain import explain
from dtkit.explain.data_parallel import StepExplanation
from dtkit.explain.pipeline import PipelineExplanation
from dtkit.explain.sharded import ShardedExplanation
from tests.support.stage_reports import (
    make_base,
    make_collective,
    make_pipeline_reports,
    make_sharded_reports,
    make_transfer,
)


def explained(reports: list[dict[str, Any]], offsets: list[float] | None = None) -> PipelineExplanation:
    found = explain.build_explanation(reports, "Net", offsets)
    assert isinstance(found, PipelineExplanation)
    return found


def test_transfers_are_in_the_order_of_sending():
    found = explained(make_pipeline_reports()[::-1])
    assert [(c.index, c.kind, c.micro_batch, c.sender, c.receiver) for c in found.transfers] == [
        (0, "activation", 0, 0, 1),
        (1, "activation", 1, 0, 1),
        (2, "gradient", 0, 1, 0),
        (3, "gradient", 1, 1, 0),
    ]
    assert found.is_intact
    assert found.is_sum_of_micro_batches
    assert found.loss == 0.75
    assert (found.samples, found.micro_batches) == (8, 2)
    assert found.sent_bytes("activation") == found.sent_bytes("gradient") == 96


def test_clock_offsets_are_subtracted():
    found = explained(make_pipeline_reports(), offsets=[0.0, 3.0])  # rank 1's clock is 3 s ahead
    assert [c.kind for c in found.transfers] == ["gradient", "activation", "gradient", "activation"]


def test_changed_and_missing_transfers_are_named():
    reports = make_pipeline_reports()
    reports[1]["transfers"][0]["digest"] = "other"
    del reports[0]["transfers"][3]
    found = explained(reports)
    assert not found.is_intact
    assert [c.received_digest for c in found.transfers] == ["other", "activation1", "gradient0", None]
    text = repr(found)
    assert "2 of 4 tensors did NOT arrive as they were sent: activation of micro-batch 0 from 0 → 1, gradient" in text
    assert "DIFFERS: other" in text
    assert "nothing" in text


def test_a_gradient_that_is_not_the_sum_of_its_parts_is_named():
    reports = make_pipeline_reports()
    reports[1]["stages"][1]["gap"] = 0.01
    found = explained(reports)
    assert not found.is_sum_of_micro_batches
    assert "The gradient is NOT the sum of its micro-batches' parts in stage 1 on node 1." in repr(found)


def test_a_transfer_within_one_rank_sends_nothing():
    reports = make_pipeline_reports()
    for report in reports:
        for seen in report["transfers"]:
            seen["rank"] = seen["peer"] = 0
    found = explained(reports)
    assert found.is_intact
    assert found.sent_bytes("activation") == 0
    assert "on 0" in repr(found)


def test_text_html_and_data_frame_agree():
    found = explained(make_pipeline_reports())
    text, page = repr(found), found._repr_html_()
    assert text.startswith("Step 4 of Net in 2 stages on 2 nodes, epoch 2: 8 samples in 2 micro-batches")
    for words in ("What arrived is what was sent, bit by bit: all 4 tensors.", "0.5, 1, …", "0.7500"):
        assert words in text
        assert words in page
    assert "data:image/png;base64,iVBOR" in page
    frame = found.to_pandas()
    assert frame["intact"].all()
    assert frame["nbytes"].sum() == 4 * 48


def test_a_step_without_an_update_is_shown():
    reports = make_pipeline_reports()
    for report in reports:
        report["after"] = report["lr"] = None
    assert "No update: the gradients are not finite." in repr(explained(reports))


def test_many_transfers_and_micro_batches_are_shortened():
    reports = make_pipeline_reports()
    many = range(60)
    reports[0]["transfers"] = [make_transfer("sent", "activation", k, float(k)) for k in many]
    reports[1]["transfers"] = [make_transfer("arrived", "activation", k, k + 0.5) for k in many]
    reports[0]["parts"] = [{"stage": 0, "micro_batch": k, "norm": 1.0} for k in many]
    found = explained(reports)
    assert f"and {60 - pipeline_text.MAX_TRANSFERS} more tensors" in repr(found)
    assert "part 59" in repr(found)
    assert "part 20" not in repr(found)
    assert len(found.figure().axes) == 3


def test_norms_of_many_stages_show_both_kinds_of_the_first_pairs():
    transfers = [
        dataclasses.replace(transfer, from_stage=transfer.from_stage + k, to_stage=transfer.to_stage + k)
        for k in range(20)
        for transfer in explained(make_pipeline_reports()).transfers
    ]
    ax = Figure().subplots()
    pipeline_figure._draw_transfer_norms(ax, transfers)
    activations, gradients = (
        {f"activation {k} → {k + 1}" for k in range(8)},
        {f"gradient {k + 1} → {k}" for k in range(8)},
    )
    assert {line.get_gid() for line in ax.lines} == activations | gradients
    assert ax.get_title(loc="right") == "and 12 more pairs"


def copies(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the reports with a second replica on two more ranks."""
    others = copy.deepcopy(reports)
    for report in others:
        report["rank"] += 2
        for seen in report["transfers"]:
            seen["rank"], seen["peer"] = seen["rank"] + 2, seen["peer"] + 2
    return reports + others


def test_all_replicas_are_listed_and_the_first_is_drawn():
    found = explained(copies(make_pipeline_reports()))
    assert len(found.transfers) == 8
    assert found.replicas == ((0, 1), (2, 3))
    assert (found.samples, found.identical) == (16, True)
    arrows = found.figure().axes[0]
    assert [label.get_text() for label in arrows.get_yticklabels()] == ["stage 0, node 0", "stage 1, node 1"]
    assert arrows.get_title(loc="left") == "Transfers between stages: replica 1 of 2"
    text = repr(found)
    assert text.startswith("Step 4 of Net in 2 stages and 2 replicas on 4 nodes")
    senders = [line.split()[6] for line in text.splitlines() if "float32" in line]
    assert senders == ["0", "0", "1", "1", "2", "2", "3", "3"]  # though all was sent at the same times
    assert "All replicas have the same stages, bit by bit." in text


def test_a_replica_without_samples_is_not_drawn():
    reports = copies(make_pipeline_reports())
    for report in reports[:2]:
        report["transfers"], report["parts"] = [], []
    found = explained(reports)
    assert found.replicas == ((0, 1), (2, 3))
    arrows = found.figure().axes[0]
    assert [label.get_text() for label in arrows.get_yticklabels()] == ["stage 0, node 2", "stage 1, node 3"]
    assert arrows.get_title(loc="left").endswith("replica 2 of 2")


def test_a_replica_with_other_parameters_is_named():
    reports = copies(make_pipeline_reports())
    reports[3]["after"] = "c"
    found = explained(reports)
    assert not found.identical
    assert "The replicas do NOT have the same stages." in repr(found)


def test_a_replica_without_samples_is_listed():
    reports = [make_base(0, transfers=[], parts=[], stages={0: {"tensors": 1, "numbers": 3, "norm": 0.0, "gap": 0.0}})]
    found = explained(reports)
    assert "Nothing crossed a border" in repr(found)
    assert found.figure().axes


# -- sharded parameters ---------------------------------------------------------------------------------


def test_collectives_have_expected_bytes_and_compared_digests():
    found = explain.build_explanation(make_sharded_reports(), "Net", None)
    assert isinstance(found, ShardedExplanation)
    assert [(g.operation, g.count, g.expected_bytes) for g in found.groups] == [
        ("all_gather", 1, 100.0),
        ("reduce_scatter", 1, 100.0),
    ]
    assert (found.expected_bytes, found.sent_bytes, found.loss) == (200.0, 300, 1.0)
    assert found.is_agreed
    text = repr(found)
    assert "Sent by a node: 300 B counted, 200 B by the textbook's rings. The difference is what\n" in text
    assert "data:image/png;base64,iVBOR" in found._repr_html_()
    assert len(found.to_pandas()) == 2


def test_direct_sums_send_all_numbers_to_each_other_node():
    reports = [
        report | {"rank": rank, "collectives": [total]}
        for rank, report in enumerate(make_sharded_reports()[:1] * 3)
        for total in [make_collective("all_reduce", "sync", 8, "same") | {"ranks": (0, 1, 2), "is_direct": True}]
    ]
    found = explain.build_explanation(reports, "Net", None)
    assert isinstance(found, ShardedExplanation)
    assert found.expected_bytes == 16
    assert "and 1 direct sum." in " ".join(repr(found).split())


def test_different_results_and_misaligned_ranks_are_shown():
    reports = make_sharded_reports()
    reports[1]["collectives"][0]["digest"] = "y"
    found = ShardedExplanation.from_reports(reports, "Net")  # type: ignore[arg-type]  # made by hand
    assert not found.is_agreed
    assert "Some results that should be the same on all nodes are NOT." in repr(found)
    reports[1]["collectives"].pop()
    found = ShardedExplanation.from_reports(reports, "Net")  # type: ignore[arg-type]  # made by hand
    assert not found.is_aligned
    assert "did NOT make the same collectives" in repr(found)


def sliced(samples: list[int]) -> list[dict[str, Any]]:
    """Reports of two replicas of two slices: ranks 0 and 1, 2 and 3; with samples of their own."""
    found = []
    for rank in range(4):
        replica, piece = divmod(rank, 2)
        mates, twins, own = (2 * replica, 2 * replica + 1), (piece, piece + 2), samples[replica]
        within = make_collective("all_reduce", "forward", 4 * own, f"of {mates}") | {"ranks": mates}
        over = make_collective("all_reduce", "sync", 80, f"of slice {piece}") | {"ranks": twins}
        more = {"sent_bytes": 500, "held_bytes": 100, "whole_bytes": 200, "reports_samples": piece == 0, "samples": own}
        found.append(make_base(rank, collectives=[within, over] if own else [over], **more))
    return found


@pytest.mark.parametrize(("samples", "witness"), [([5, 4], 0), ([1, 0], 0), ([0, 1], 2)])
def test_ranks_are_compared_within_their_group(samples: list[int], witness: int):
    """Replicas with different numbers of samples, or none, may make different collectives."""
    found = ShardedExplanation.from_reports(sliced(samples), "Net")  # type: ignore[arg-type]  # made by hand
    assert found.is_aligned
    assert found.is_agreed
    assert found.samples == sum(samples)
    assert found.recording_rank == witness
    assert [c.ranks for c in found.collectives] == [(witness, witness + 1), (0, 2)]
    assert found.collectives[1].digests == ("of slice 0", "of slice 0")
    text = " ".join(repr(found).split())
    assert f"Collectives of node {witness} by phase:" in text
    assert "The nodes of each group made the same collectives" in text
    labels = [label.get_text() for label in found.figure().axes[0].get_yticklabels()]
    assert labels == [f"forward: all-reduce, nodes {witness}, {witness + 1}", "sync: all-reduce, nodes 0, 2"]


def test_a_difference_in_a_group_that_is_not_shown_is_found():
    reports = sliced([4, 4])
    reports[3]["collectives"][0]["digest"] = "other"
    found = ShardedExplanation.from_reports(reports, "Net")  # type: ignore[arg-type]  # made by hand
    assert (found.is_aligned, found.is_agreed, found.recording_rank) == (True, False, 0)
    del reports[3]["collectives"][0]
    assert not ShardedExplanation.from_reports(reports, "Net").is_aligned  # type: ignore[arg-type]  # made by hand


def test_replica_reports_give_a_step_explanation():
    tensor = {"kind": "parameter", "name": "w", "shape": (2,), "local_norm": 1.0, "contribution": 0.5, "reduced": 1.0}
    tensor |= {"cosine": 1.0, "update": 0.1, "value": 1.0, "checksum": "c"}
    assert isinstance(explain.build_explanation([make_base(0, tensors=[tensor])], "Net", None), StepExplanation)


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_micro_batch_columns_include_the_first_and_the_last(count: int):
    columns = pipeline_text._select_micro_batches(count)
    assert len(columns) <= pipeline_text.MAX_MICRO_BATCHES
    assert columns[0] == 0
    assert columns[-1] == count - 1
