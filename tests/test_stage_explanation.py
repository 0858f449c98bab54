"""A step of a pipeline, and one of sharded training, from what ranks report: numbers, text, pictures."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dtkit import explaining
from dtkit.dashboard import stages_figure, stages_text
from dtkit.explanation import StepExplanation
from dtkit.slice_explanation import SliceExplanation
from dtkit.stage_explanation import PipelineExplanation


def base(rank: int, **more: Any) -> dict[str, Any]:
    """The part of a report that all kinds have."""
    found = {"model": "M", "rank": rank, "step": 4, "epoch": 1, "rows": None, "samples": 8, "loss": None, "weight": 0.0}
    return found | {"share": 0.0, "clip": None, "lr": 0.1, "before": "a", "after": "b", "buffers": None} | more


def sighting(way: str, kind: str, micro_batch: int, at: float, **changes: Any) -> dict[str, Any]:
    """Of two stages: 0 on rank 0, 1 on rank 1."""
    border = (0, 1) if kind == "activation" else (1, 0)
    rank, peer = border if way == "sent" else border[::-1]
    found = {"way": way, "kind": kind, "border": border, "which": (micro_batch, 0), "rank": rank, "peer": peer}
    what = {"shape": (4, 3), "dtype": "float32", "nbytes": 48, "norm": 2.0, "first": (0.5, 1.0, 1.5)}
    return found | what | {"at": at, "digest": f"{kind}{micro_batch}"} | changes


def piped() -> list[dict[str, Any]]:
    """Reports of two ranks: two micro-batches down, and their gradients up."""
    first = [sighting("sent", "activation", k, 1.0 + k) for k in (0, 1)]
    first += [sighting("arrived", "gradient", k, 4.0 + k) for k in (0, 1)]
    second = [sighting("arrived", "activation", k, 1.5 + k) for k in (0, 1)]
    second += [sighting("sent", "gradient", k, 3.5 + k) for k in (0, 1)]
    parts = [{"stage": s, "micro_batch": k, "norm": 1.0 + k} for s in (0, 1) for k in (0, 1)]
    stage = {"tensors": 2, "numbers": 15, "norm": 2.5, "gap": 1e-8}
    return [
        base(0, sightings=first, parts=parts[:2], stages={0: dict(stage)}),
        base(1, sightings=second, parts=parts[2:], stages={1: dict(stage)}, loss=0.75, weight=8.0),
    ]


def explained(reports: list[dict[str, Any]], offsets: list[float] | None = None) -> PipelineExplanation:
    found = explaining.explanation(reports, "Net", offsets)
    assert isinstance(found, PipelineExplanation)
    return found


def test_each_tensor_is_a_crossing_in_the_order_of_sending():
    found = explained(piped()[::-1])
    assert [(c.order, c.kind, c.micro_batch, c.sender, c.receiver) for c in found.crossings] == [
        (0, "activation", 0, 0, 1),
        (1, "activation", 1, 0, 1),
        (2, "gradient", 0, 1, 0),
        (3, "gradient", 1, 1, 0),
    ]
    assert found.intact
    assert found.adds_up
    assert found.loss == 0.75
    assert (found.samples, found.micro_batches) == (8, 2)
    assert found.sent_bytes("activation") == found.sent_bytes("gradient") == 96


def test_clocks_of_other_hosts_are_set_right():
    found = explained(piped(), offsets=[0.0, 3.0])  # rank 1's clock is 3 s ahead
    assert [c.kind for c in found.crossings] == ["gradient", "activation", "gradient", "activation"]


def test_what_arrived_otherwise_or_not_at_all_is_named():
    reports = piped()
    reports[1]["sightings"][0]["digest"] = "other"
    del reports[0]["sightings"][3]
    found = explained(reports)
    assert not found.intact
    assert [c.arrived for c in found.crossings] == ["other", "activation1", "gradient0", None]
    text = repr(found)
    assert "2 of 4 tensors did NOT arrive as they were sent: activation of micro-batch 0 from 0 → 1, gradient" in text
    assert "DIFFERS: other" in text
    assert "nothing" in text


def test_a_gradient_that_is_not_the_sum_of_its_parts_is_named():
    reports = piped()
    reports[1]["stages"][1]["gap"] = 0.01
    found = explained(reports)
    assert not found.adds_up
    assert "The gradient is NOT the sum of its micro-batches' parts in stage 1 on rank 1." in repr(found)


def test_a_hand_over_on_one_rank_sends_nothing():
    reports = piped()
    for report in reports:
        for seen in report["sightings"]:
            seen["rank"] = seen["peer"] = 0
    found = explained(reports)
    assert found.intact
    assert found.sent_bytes("activation") == 0
    assert "on 0" in repr(found)


def test_text_page_and_table_tell_the_same():
    found = explained(piped())
    text, page = repr(found), found._repr_html_()
    assert text.startswith("Step 4 of Net in 2 stages on 2 ranks, epoch 2: 8 samples in 2 micro-batches")
    for words in ("What arrived is what was sent, bit by bit: all 4 tensors.", "0.5, 1, 1.5, …", "0.7500"):
        assert words in text
        assert words in page
    assert "data:image/png;base64,iVBOR" in page
    frame = found.to_pandas()
    assert frame["intact"].all()
    assert frame["nbytes"].sum() == 4 * 48


def test_no_update_is_told():
    reports = piped()
    for report in reports:
        report["after"] = report["lr"] = None
    assert "No update: the gradients are not finite." in repr(explained(reports))


def test_many_crossings_and_micro_batches_are_cut_short():
    reports = piped()
    many = range(60)
    reports[0]["sightings"] = [sighting("sent", "activation", k, float(k)) for k in many]
    reports[1]["sightings"] = [sighting("arrived", "activation", k, k + 0.5) for k in many]
    reports[0]["parts"] = [{"stage": 0, "micro_batch": k, "norm": 1.0} for k in many]
    found = explained(reports)
    assert f"and {60 - stages_text.MAX_CROSSINGS} more tensors" in repr(found)
    assert "part 59" in repr(found)
    assert "part 20" not in repr(found)
    assert len(found.figure().axes) == 3


def test_the_figure_draws_the_first_replica():
    reports = piped()
    others = copy.deepcopy(reports)
    for report in others:
        report["rank"] += 2
        for seen in report["sightings"]:
            seen["rank"], seen["peer"] = seen["rank"] + 2, seen["peer"] + 2
    found = explained(reports + others)
    assert len(found.crossings) == 8
    assert stages_figure._replica(found) == {0, 1}
    arrows = found.figure().axes[0]
    assert [label.get_text() for label in arrows.get_yticklabels()] == ["stage 0, rank 0", "stage 1, rank 1"]
    assert arrows.get_title(loc="right") == "of the replica with rank 0"


def test_an_empty_replica_is_told():
    reports = [base(0, sightings=[], parts=[], stages={0: {"tensors": 1, "numbers": 3, "norm": 0.0, "gap": 0.0}})]
    found = explained(reports)
    assert "Nothing crossed a border" in repr(found)
    assert found.figure().axes


# -- where parameters are cut ---------------------------------------------------------------------------------


def collective(what: str, phase: str, nbytes: int, digest: str | None) -> dict[str, Any]:
    shape = {"shape": (nbytes // 4,), "dtype": "float32", "nbytes": nbytes, "ranks": 2}
    return {"what": what, "phase": phase, "digest": digest} | shape


def cut(sent: int = 300) -> list[dict[str, Any]]:
    found = [collective("all_gather", "forward", 200, "x"), collective("reduce_scatter", "backward", 200, None)]
    more = {"sent_bytes": sent, "held_bytes": 100, "whole_bytes": 200, "weight": 8.0}
    return [base(r, collectives=copy.deepcopy(found), loss=0.5 + r, **more) for r in (0, 1)]


def test_collectives_are_counted_by_the_textbook_and_compared():
    found = explaining.explanation(cut(), "Net", None)
    assert isinstance(found, SliceExplanation)
    assert [(g.what, g.count, g.textbook_bytes) for g in found.groups] == [
        ("all_gather", 1, 100.0),
        ("reduce_scatter", 1, 100.0),
    ]
    assert (found.textbook_bytes, found.sent_bytes, found.loss) == (200.0, 300, 1.0)
    assert found.agreed
    text = repr(found)
    assert "Sent by a rank: 300 B counted, 200 B by the textbook's rings. The difference is what\n" in text
    assert "data:image/png;base64,iVBOR" in found._repr_html_()
    assert len(found.to_pandas()) == 2


def test_results_that_differ_and_ranks_out_of_step_are_told():
    reports = cut()
    reports[1]["collectives"][0]["digest"] = "y"
    found = SliceExplanation.from_reports(reports, "Net")  # type: ignore[arg-type]  # made by hand
    assert not found.agreed
    assert "Some results that should be the same on all ranks are NOT." in repr(found)
    reports[1]["collectives"].pop()
    found = SliceExplanation.from_reports(reports, "Net")  # type: ignore[arg-type]  # made by hand
    assert not found.aligned
    assert "did NOT make the same collectives" in repr(found)


def test_replicas_get_the_explanation_of_replicas():
    tensor = {"kind": "parameter", "name": "w", "shape": (2,), "own": 1.0, "contribution": 0.5, "reduced": 1.0}
    tensor |= {"cosine": 1.0, "update": 0.1, "value": 1.0, "checksum": "c"}
    assert isinstance(explaining.explanation([base(0, tensors=[tensor])], "Net", None), StepExplanation)


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_columns_of_micro_batches(count: int):
    columns = stages_text._columns(count)
    assert len(columns) <= stages_text.MAX_PARTS
    assert columns[0] == 0
    assert columns[-1] == count - 1
