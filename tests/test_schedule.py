"""Schedules as tables: parsing, rules, simulation, and a comparison of the built-in ones with torch."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from torch.distributed import pipelining

import dtkit
from dtkit.schedules.action import Action
from dtkit.schedules.builtin import BUILTIN_SCHEDULES
from dtkit.schedules.schedule import Schedule
from dtkit.strategies.pipeline.stage import SCHEDULE_CLASSES

ONE = "F0 F1 B0 B1\nF0 B0 F1 B1"
V_SHAPED = "0F0 3F0 0F1 3B0 3F1 0B0 3B1 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
HALVES = "F0 F1 I0 F2 I1 W0 I2 W1 W2\nF0 I0 F1 I1 W0 F2 I2 W1 W2"


def test_text_lines_and_cells_give_the_same_schedule():
    cells = [["F0", "F1", "B0", "B1"], ["F0", Action("B", 1, 0), "f1", "b1"]]
    forms = (ONE, ONE.splitlines(), cells, "\n\n" + ONE.replace(" ", ",  "))
    first, *others = [Schedule(form) for form in forms]
    assert all(other == first and hash(other) == hash(first) for other in others)
    assert first.rows[1] == (Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1))
    assert (first.ranks, first.stages, first.micro_batches) == (2, 2, 2)
    assert first == dtkit.Schedule(ONE)


def test_idle_cells_are_kept_without_effect():
    idle = Schedule([["F0", "F1", None, "B0", ".", "B1"], ["", "F0", "B0", "F1", "-", "B1"]])
    assert idle.rows[0][2] is None
    assert idle.simulate().intervals == Schedule(ONE).simulate().intervals
    assert str(idle).splitlines() == ["F0 F1 .  B0 .  B1", ".  F0 B0 F1 .  B1"]


@pytest.mark.parametrize("text", [ONE, V_SHAPED, HALVES])
def test_schedule_text_parses_to_the_same_schedule(text: str):
    table = Schedule(text)
    assert Schedule(str(table)) == table
    assert pickle.loads(pickle.dumps(table)) == table


def test_stage_ranks_follow_the_table():
    table = Schedule(V_SHAPED)
    assert table.stage_ranks == (0, 1, 1, 0)
    assert [table.get_stages(rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert repr(table) == "Schedule('custom', 2 ranks, 4 stages, 2 micro-batches)"
    uneven = Schedule("0F0 0B0\n1F0 2F0 2B0 1B0")
    assert uneven.get_stages(1) == [1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "the schedule is empty; it needs a row for each rank"),
        ("F0 X1\nF0 B0", "rank 0, cell 1: 'X1' is not an action. Write F2 for the forward pass of micro-batch 2"),
        ("F0 . B0\n. .", "rank 1 has no actions"),
        (
            "F0 1F0 B0\nF0 B0",
            r"rank 1, cell 0: 1F0 is of stage 1, which is on rank 0 \(cell 1\). A stage's parameters are on one rank",
        ),
        ("F0 B0\n2F0 2B0", "rank 1, cell 0: there is a stage 2, but no stage 1. Stages are numbered from 0"),
        ("F0 F1 B0 B1\nF0 B0 F1 . F1 B1", r"rank 1, cell 4: 1F1 is already in cell 2. .* make it idle"),
        (
            "F0 F1 B0 B1\nF0 B0 F1",
            r"rank 1: 1B1 is missing in its 3 cells. The schedule has 2 micro-batches \(0 to 1\)",
        ),
        ("F0 I0\nF0 B0", "rank 0: 0W0 is missing in its 2 cells"),
        ("F0 W0\nF0 B0", "rank 0: 0I0 is missing"),
        ("F1 B1\nF1 B1", r"rank 0: 0F0 is missing .* remove micro-batch 0 from all rows"),
        ("F0 B0 W0\nF0 B0", "rank 0, cell 1: 0B0 is a whole backward pass, and cell 2 has a half of it, 0W0"),
        ("F0 B0\nB0 F0", r"rank 1, cell 0: 1B0 is before 1F0 \(cell 1\).* swap the two"),
        ("F0 W0 I0\nF0 B0", r"rank 0, cell 1: 0W0 is before 0I0 \(cell 2\)"),
    ],
)
def test_invalid_schedules_raise_with_cell_and_remedy(given: str, message: str):
    with pytest.raises(ValueError, match=message):
        Schedule(given)


def test_deadlock_error_names_the_waiting_actions():
    with pytest.raises(ValueError, match="a deadlock: after 2 of 8 actions no rank can continue") as error:
        Schedule("F0 B0 F1 B1\nF0 F1 B0 B1")
    assert "rank 0, cell 1: 0B0 needs 1B0 of rank 1 (cell 2)" in str(error.value)
    assert "rank 1, cell 1: 1F1 needs 0F1 of rank 0 (cell 2)" in str(error.value)
    remedies = (
        "As a first step, put 0F1 before 0B0 in the row of rank 0 (cell 1)",
        "As a first step, put 1B0 before 1F1 in the row of rank 1 (cell 1)",
    )
    assert str(error.value).endswith(remedies)
    Schedule("F0 F1 B0 B1\nF0 F1 B0 B1")  # the first remedy
    Schedule("F0 B0 F1 B1\nF0 B0 F1 B1")  # the second


def torch_rows(name: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """Return the rows of torch's class of that name, which only needs the stages' positions."""
    per_rank = BUILTIN_SCHEDULES[name].stages_per_rank
    stages = [
        SimpleNamespace(
            stage_index=k * ranks,
            num_stages=per_rank * ranks,
            group_size=ranks,
            group_rank=0,
            is_last=False,
            submod=None,
        )
        for k in range(per_rank)
    ]
    given = stages[0] if issubclass(SCHEDULE_CLASSES[name], pipelining.schedules.PipelineScheduleSingle) else stages
    made = SCHEDULE_CLASSES[name](given, micro_batches, loss_fn=lambda *_: None)
    return [[str(a) for a in made.pipeline_order[rank] if a and a.is_compute_op] for rank in range(ranks)]


@pytest.mark.parametrize("name", BUILTIN_SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_built_in_schedules_equal_those_of_torch(name: str, ranks: int):
    made = 0
    for micro_batches in range(1, 13):
        try:
            schedule = Schedule.from_name(name, ranks, micro_batches)
        except ValueError:
            continue
        made += 1
        rows, expected = [[str(a) for a in row] for row in schedule.rows], torch_rows(name, ranks, micro_batches)
        if name == "1F1B":  # torch's list, not its run, numbers the last rank's forwards from 1
            expected[-1] = [f"{ranks - 1}{kind}{m}" for m in range(micro_batches) for kind in "FB"]
        assert rows == expected, (name, ranks, micro_batches)
    assert made >= 5
    assert set(BUILTIN_SCHEDULES) == set(SCHEDULE_CLASSES)


@pytest.mark.parametrize("name", BUILTIN_SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_bubble_formulas_equal_simulations(name: str, ranks: int, backward: float):
    for micro_batches in (ranks, 2 * ranks, 4 * ranks):
        table = Schedule.from_name(name, ranks, micro_batches)
        formula = table.get_bubble_formula()
        simulation = table.simulate(1.0, backward)
        if formula is None:
            assert 0 < simulation.bubble < Schedule.from_name("1F1B", ranks, micro_batches).simulate().bubble
        else:
            assert simulation.bubble == pytest.approx(formula[1])
            v = BUILTIN_SCHEDULES[name].stages_per_rank
            assert formula[1] == pytest.approx((ranks - 1) / (v * micro_batches + ranks - 1))


def test_from_name_refuses_names_and_numbers_that_do_not_fit():
    with pytest.raises(ValueError, match="schedule='2F2B'; it must be one of 'GPipe', '1F1B'"):
        Schedule.from_name("2F2B", 2, 4)
    with pytest.raises(ValueError, match=r"Interleaved1F1B takes them in 2 equal rounds\. Use micro_batches=4 or 6"):
        Schedule.from_name("Interleaved1F1B", 2, 5)
    with pytest.raises(ValueError, match=r"1F1B at least as many.*of 4 ranks, use .* or schedule='GPipe'"):
        Schedule.from_name("1F1B", 4, 2)
    assert Schedule.from_name("GPipe", 4, 2).micro_batches == 2


def test_built_in_name_with_another_table_raises():
    with pytest.raises(ValueError, match="name='1F1B' is a built-in schedule, but the table differs from it"):
        Schedule("F0 F1 B0 B1\nF0 F1 B0 B1", name="1F1B")
    assert Schedule(ONE, name="1F1B") == Schedule.from_name("1F1B", 2, 2)


def test_simulation_counts_peak_micro_batches():
    """GPipe holds all micro-batches, 1F1B at most one per following rank and its own."""
    assert Schedule.from_name("GPipe", 4, 8).simulate().peak_micro_batches == (8, 8, 8, 8)
    assert Schedule.from_name("1F1B", 4, 8).simulate().peak_micro_batches == (4, 3, 2, 1)
    assert Schedule.from_name("1F1B", 4, 8).simulate().peak_activations == 1
    assert Schedule.from_name("Interleaved1F1B", 2, 4).simulate().peak_micro_batches == (5, 3)
    assert Schedule.from_name("Interleaved1F1B", 2, 4).simulate().peak_activations == 5 / 4
    heavy = Schedule.from_name("GPipe", 2, 4).simulate(1.0, 2.0, weights=[1, 3])
    assert heavy.makespan == 1 + 4 * 3 + 4 * 6 + 2  # the second rank never waits after its start
    with pytest.raises(ValueError, match=r"weights=\[1\]; there must be one for each of the 2 stages"):
        Schedule.from_name("GPipe", 2, 4).simulate(weights=[1])
    assert Schedule(HALVES).simulate().peak_micro_batches == (3, 2)  # activations are held until W


def test_split_backward_passes_fill_idle_time():
    """The second rank's weights come last: 13 instead of 15, with as many activations as 1F1B."""
    table = Schedule("F0 F1 B0 F2 B1 F3 B2 B3\nF0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3")
    simulation, usual = table.simulate(), Schedule.from_name("1F1B", 2, 4).simulate()
    assert (simulation.makespan, usual.makespan) == (13, 15)
    assert simulation.bubble == pytest.approx(1 - 24 / 26)
    assert simulation.peak_micro_batches == (2, 2)
    assert simulation.peak_activations == usual.peak_activations == 1


def test_simulation_uses_the_duration_of_each_action():
    simulation = Schedule(ONE).simulate_with(lambda action: 5.0 if action == Action("F", 1, 0) else 1.0)
    assert simulation.intervals[Action("F", 1, 0)] == (1, 6)
    assert simulation.intervals[Action("B", 0, 0)] == (7, 8)
    assert simulation.makespan == 10
    assert simulation.bubble == pytest.approx(1 - 12 / 20)


def test_the_weight_half_takes_the_whole_backward_time_on_the_first_stage():
    times = Schedule(HALVES).simulate().intervals
    assert times[Action("I", 0, 0)][0] == times[Action("I", 0, 0)][1]
    assert times[Action("W", 0, 0)][1] - times[Action("W", 0, 0)][0] == 2
    assert times[Action("W", 1, 0)][1] - times[Action("W", 1, 0)][0] == 1


def test_schedule_figures_show_actions_stages_and_a_note():
    (ax,) = Schedule(ONE).figure().axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["node 0", "node 1"]
    assert sorted(t.get_text() for t in ax.texts if t.get_gid() is None) == sorted(["F0", "F1", "B0", "B1"] * 2)
    (note,) = [t.get_text() for t in ax.texts if t.get_gid() == "note"]
    assert note == "time 9 · bubble 33.3 % · the nodes hold 2 and 1 micro-batches at most"
    (ax,) = Schedule(V_SHAPED).figure().axes
    assert {t.get_text() for t in ax.texts if t.get_gid() == "stage"} == {"st 0", "st 1", "st 2", "st 3"}
    assert len(Schedule.from_name("1F1B", 4, 8)._repr_png_()) > 1000


# -- schedules of a strategy ----------------------------------------------------------------------------------


def test_pipeline_accepts_schedules_in_any_form():
    for given in (ONE, ONE.splitlines(), Schedule(ONE)):
        strategy = dtkit.Pipeline(2, schedule=given)
        assert strategy.micro_batches == strategy.num_micro_batches == 2
        assert strategy.pipeline_schedule == strategy.schedule == Schedule(ONE)
        assert repr(strategy) == (
            "Pipeline(stages=2, micro_batches=2, schedule=Schedule('custom', 2 ranks, 2 micro-batches))"
        )
    assert dtkit.Pipeline(2, micro_batches=2, schedule=ONE) == dtkit.Pipeline(2, schedule=ONE)
    assert dtkit.Pipeline(2, 4).pipeline_schedule == Schedule.from_name("1F1B", 2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 3, "schedule": ONE}, r"stages=3, and the schedule has 2 rows.* Use stages=2, or write 3 rows"),
        ({"stages": 2, "micro_batches": 4, "schedule": ONE}, "micro_batches=4, and the schedule has 2. Leave"),
        ({"stages": 2, "schedule": "F0 F1\nF0 B0"}, "is missing"),
        ({"stages": 2}, "needs the number of micro-batches of a step, such as micro_batches=8"),
        ({"stages": 2, "micro_batches": 5, "schedule": "Interleaved1F1B"}, "in 2 equal rounds"),
    ],
)
def test_pipeline_refuses_schedules_that_do_not_fit(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dtkit.Pipeline(**options)


@pytest.mark.parametrize("name", BUILTIN_SCHEDULES)
def test_a_schedule_is_found_whatever_the_case_of_its_name(name):
    for typed in (name.lower(), name.upper()):
        strategy = dtkit.Pipeline(2, 4, schedule=typed)
        assert strategy.schedule == name  # as the engines and the views know it
        assert Schedule.from_name(typed, 2, 4).name == name
