"""A run as text: units, the summary, and progress on a terminal and in a log."""

import dataclasses
import io
import itertools
import re

import pytest

import dtkit
from dtkit._util import formatting
from dtkit.dashboard.summary.notices import ALERT_KINDS, collect_notices
from dtkit.dashboard.text import cluster_text, run_text
from dtkit.errors import EngineError
from dtkit.testing.fake_transport import FakeTransport
from dtkit.types import Evaluation, Failure, NodeInfo, ReplicaCheckResult, State, Status
from tests.support.fake_source import FakeSource
from tests.support.timers import Timers
from tests.support.verification import make_verification


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.00886, 2.7e-5], ["0.00886", "0.000027"]),
        ([0.5, 1.23e-6, None], ["0.500", "0.0000012", "—"]),
        ([3.4e-5, 2.7e-5, float("nan")], ["3.4e-5", "2.7e-5", "NaN"]),
        ([0.5, 2e-9, 2e29], ["0.500", "2e-9", "2e29"]),
    ],
)
def test_losses_of_one_column_have_one_form(values: list[float | None], texts: list[str]):
    assert formatting.format_losses(values) == texts


@pytest.mark.parametrize(
    ("function", "value", "said"),
    [
        (formatting.format_rate, 4258.3, "4,258"),
        (formatting.format_rate, 12.345, "12.3"),
        (formatting.format_rate, 0.3123, "0.312"),
        (formatting.format_rate, float("nan"), "—"),
        (formatting.format_rate, 0.0, "0.00"),
        (formatting.format_loss, 0.50349, "0.503"),
        (formatting.format_loss, 12.3456, "12.3"),
        (formatting.format_loss, 1.23e-5, "1.2e-5"),
        (formatting.format_loss, float("nan"), "NaN"),
        (formatting.format_loss, float("-inf"), "-inf"),
        (formatting.format_loss, None, "—"),
        (formatting.format_learning_rate, 0.1, "0.1"),
        (formatting.format_learning_rate, 5e-5, "0.00005"),
        (formatting.format_learning_rate, 10_000.0, "10,000"),
        (formatting.format_learning_rate, 1.4612e-6, "1.461e-6"),
        (formatting.format_learning_rate, 1 / 3, "0.3333"),
        (formatting.format_learning_rate, 5e19, "5e19"),
        (formatting.format_learning_rate, 0.0, "0"),
        (formatting.format_learning_rate, float("nan"), "nan"),
        (formatting.format_duration, 0.119, "119 ms"),
        (formatting.format_duration, 0.0015, "1.5 ms"),
        (formatting.format_duration, 0.00035, "350 µs"),
        (formatting.format_duration, 1.239, "1.24 s"),
        (formatting.format_duration, 43.2, "43 s"),
        (formatting.format_duration, 59.9, "1 min 0 s"),
        (formatting.format_duration, 3780, "1 h 3 min"),
        (formatting.format_elapsed, 0.05, "0 s"),
        (formatting.format_elapsed, 1.29, "1.2 s"),
        (formatting.format_elapsed, 9.99, "9.9 s"),
        (formatting.format_elapsed, 59.9, "59 s"),
        (formatting.format_elapsed, None, "—"),
        (formatting.format_clock, 0.9, "0 s"),
        (formatting.format_clock, 125, "2 min 5 s"),
        (formatting.format_percent, 0.337, "34 %"),
        (formatting.format_percent, 0.0042, "0.4 %"),
        (formatting.format_percent, 0.00001, "0 %"),
        (formatting.format_percent, 0.0, "0 %"),
        (formatting.format_percent, None, "—"),
        (formatting.format_bytes, 315e6, "315 MB"),
        (formatting.format_bytes, 1.24e9, "1.24 GB"),
        (formatting.format_bytes, 1.2e9, "1.2 GB"),
        (formatting.format_bytes, 4.63e6, "4.63 MB"),
        (formatting.format_bytes, 37.04e6, "37 MB"),
        (formatting.format_bytes, 46.36e6, "46.4 MB"),
        (formatting.format_bytes, 512, "512 B"),
        (formatting.format_bytes, 999.4, "999 B"),
        (formatting.format_bytes, 999.6, "1 kB"),
        (formatting.format_bytes, 3e12, "3 TB"),
        (formatting.format_bytes, 4e15, "4,000 TB"),
        (formatting.format_bytes, 0, "0 B"),
        (formatting.format_bytes, 0.00001, "0 B"),
        (formatting.format_bytes, float("nan"), "—"),
    ],
)
def test_values_are_formatted_with_units(function, value, said):
    assert function(value) == said


@pytest.mark.parametrize(
    ("largest", "ladder", "name"),
    [
        (0, formatting.BYTE_UNITS, "kB"),
        (999, formatting.BYTE_UNITS, "kB"),
        (999e3, formatting.BYTE_UNITS, "kB"),
        (1e6, formatting.BYTE_UNITS, "MB"),
        (490e9, formatting.BYTE_UNITS, "GB"),
        (7e15, formatting.BYTE_UNITS, "TB"),
        (2e-7, formatting.SECOND_UNITS, "µs"),
        (0.344, formatting.SECOND_UNITS, "ms"),
        (166, formatting.SECOND_UNITS, "s"),
        (float("nan"), formatting.SECOND_UNITS, "µs"),
    ],
)
def test_the_unit_of_an_axis_follows_the_size(largest, ladder, name):
    assert formatting.choose_unit(largest, ladder) == (name, ladder[name])


def test_columns_align_text_left_and_numbers_right():
    rows = [["layer", "size", "note"], ["a", "1,024", ""], ["embedding", "8", "tied"]]
    assert formatting.format_columns(rows, left_aligned=(0, 2)) == [
        "layer       size  note",
        "a          1,024",
        "embedding      8  tied",
    ]


def test_sanitize_text_removes_control_characters():
    assert formatting.sanitize_text("a\x1b[2Jb\r\nc\x00") == "a [2Jb  c"
    assert formatting.sanitize_text("x" * 1000, 10) == "x" * 9 + "…"


def test_the_summary_has_state_metrics_and_a_line_for_each_node():
    source = FakeSource(ranks=4, name="Net")
    source.advance(101)
    source.advance(50, loss=0.5)
    head, where, now, verdict, note, *nodes = run_text.format_run(source).splitlines()
    assert verdict.startswith("→ computing is ")
    assert head == "Net · DataParallel() · running"
    assert where == "step 151 of 400, epoch 1 of 2, 15 s elapsed, 12 s left"
    assert now.startswith("loss 0.500 (mean of 20 steps); last 50 steps: ")
    assert "samples/s" in now
    assert note == "  each node: loss of the last step, samples/s without waiting (last 50 steps), memory"
    assert [line.split()[:4] for line in nodes] == [["node", str(k), "loss", "0.500"] for k in range(4)]
    assert nodes[3].endswith("318 MB  host0 cpu")


def test_the_summary_has_the_tags_of_a_run():
    source = FakeSource(name="Net")
    source.spec = dataclasses.replace(source.spec, tags=("baseline", "wide"))
    assert run_text.format_run(source).splitlines()[0] == "Net · DataParallel() · running · baseline · wide"


def test_the_summary_has_delays_stragglers_and_agreement():
    source = FakeSource(ranks=4)
    source.slowness, source.delay_factors, source.consistency = {1: 2.0}, {1: 2.0}, ReplicaCheckResult(40, (), None)
    source.advance(40)
    _, _, now, *said = run_text.format_run(source).splitlines()
    assert re.search(r", waiting 3\d %$", now)
    assert said[:2] == ["✓ parameters identical on 4 nodes, checked at step 40", "▼ node 1 slowed 2x on purpose"]
    assert re.fullmatch(r"▲ node 1 keeps the others waiting: \d\d % of node [023]'s step", said[2])
    assert said[3].startswith("→ without the straggler (node 1) 1.8 times as fast")
    assert said[5].startswith("  node 0")
    source.consistency = ReplicaCheckResult(50, (2,), 40)
    progress = run_text.TextProgress(source, io.StringIO(), is_tty=False)
    assert "  ✕ node 2 differs since step 40: parameters are no longer equal" in progress.format_block()


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        (2, "parameters identical between 2 replicas"),
        (1, "parameters that are not split identical on 4 nodes"),
    ],
)
def test_the_notice_on_agreement_names_what_was_compared(copies: int, words: str):
    source = FakeSource(ranks=4)
    source.consistency = ReplicaCheckResult(40, (), None, copies)
    source.advance(40)
    assert f"✓ {words}, checked at step 40" in run_text.format_run(source).splitlines()


def test_a_passed_verification_is_a_notice():
    source = FakeSource(ranks=2)
    source.advance(40)
    source.verification = make_verification()
    line = "✓ verified: equal to one process over 20 steps (largest difference 3e-8)"
    assert line in run_text.format_run(source).splitlines()
    assert line not in "\n".join(run_text.TextProgress(source, io.StringIO(), is_tty=False).format_block())


def test_a_verification_that_passed_in_float64_says_so():
    source = FakeSource(ranks=2)
    source.verification = dataclasses.replace(make_verification(), max_difference=0.1, float64_difference=1.2e-15)
    (notice,) = collect_notices(source)
    assert notice.text == "verified: equal to one process in float64 over 20 steps (largest difference 1.2e-15)"


def test_a_failed_verification_is_an_alert():
    source = FakeSource(ranks=2)
    source.verification = dataclasses.replace(make_verification(), verdict="FAIL", max_difference=0.3)
    (notice,) = collect_notices(source)
    assert notice.kind in ALERT_KINDS
    assert notice.text == "verification FAILED over 20 steps: largest difference 0.3, tolerance 1e-05"


def test_a_training_that_one_process_cannot_repeat_has_no_notice():
    source = FakeSource(ranks=2)
    source.verification = dataclasses.replace(make_verification(), verdict="NOT COMPARABLE")
    assert collect_notices(source) == []


def test_the_summary_has_stuck_and_left_out_nodes():
    source = FakeSource(ranks=4)
    source.advance(40)
    source.stick(1)
    progress = run_text.TextProgress(source, io.StringIO(), is_tty=False)
    said = (
        "⊘ node 1 stuck: forward, 12 s. It is at train.py:12 in step. cluster.stacks() shows the position of all nodes"
    )
    assert progress.format_block()[2:] == [f"  {said}"]  # the stall is shown once
    source.stall_report = None
    source.shrink(3)
    source.advance(40)
    lines = run_text.format_run(source).splitlines()
    assert lines[3] == "○ 3 nodes: 1 of 4 was lost and left out"
    assert [line.split()[:2] for line in lines[6:]] == [["node", str(k)] for k in range(3)]


@pytest.mark.parametrize(
    ("slowed", "said"),
    [
        ({}, []),
        ({1: 1.0}, []),
        ({2: 1.5, 0: 1.5, 3: 4.0}, ["nodes 0 and 2 slowed 1.5x on purpose", "node 3 slowed 4x on purpose"]),
    ],
)
def test_nodes_with_the_same_delay_are_named_together(slowed, said):
    source = FakeSource()
    source.delay_factors = slowed
    assert [notice.text for notice in collect_notices(source)] == said


def test_a_single_node_has_no_notice_on_agreement():
    source = FakeSource(ranks=1)
    source.consistency = ReplicaCheckResult(40, (), None)
    assert collect_notices(source) == []


def test_summary_of_many_nodes_is_shortened():
    source = FakeSource(ranks=256)
    source.advance(1)
    lines = run_text.format_run(source).splitlines()
    assert lines[-1] == "  and 241 more nodes"
    assert len(lines) == 4 + 16


def test_a_stage_without_a_loss_has_a_dash_and_a_nan_loss_is_shown():
    source = FakeSource(ranks=4, stages=2)
    source.advance(1, loss=0.5)
    _, _, now, _, *nodes = run_text.format_run(source).splitlines()
    assert now.startswith("loss 0.500 (mean of 1 step); last step: ")
    assert [line.split()[3] for line in nodes] == ["—", "0.500", "—", "0.500"]
    source.advance(1, loss=float("nan"))
    notice, *_ = lines = run_text.format_run(source).splitlines()[3:]
    assert notice == "✕ the training diverged: the loss is NaN since step 2"
    assert [line.split()[3] for line in lines[-4:]] == ["—", "NaN", "—", "NaN"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_summary_before_the_first_step_reports_that_there_is_none(ranks):
    source = FakeSource(ranks=ranks)
    source.state = State.PENDING
    assert "first step, 0 s" in run_text.format_run(source)
    assert "no step yet" in run_text.format_run(source)


def test_the_summary_names_the_error():
    source = FakeSource()
    source.exception = ValueError("bad\x1b[31m rows")
    assert run_text.format_run(source).splitlines()[-1] == "ValueError: bad [31m rows"


def test_the_summary_shows_an_error_of_engines_in_lines_that_name_nodes_alone():
    source, frame = FakeSource(ranks=2), ("/home/me/train.py", 12, "weigh", "raise ValueError('bad rank 3')")
    failures = [Failure(0, "gpu1", "ValueError", "bad rank 3", "Traceback", 8, user_frames=(frame,))]
    source.exception = EngineError([*failures, Failure(1, "gpu1", "PeerLost", "", "", 8, victim=True)])
    lines = run_text.format_run(source).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("EngineError"))
    assert lines[start] == "EngineError: node 0 on gpu1, step 8: ValueError: bad rank 3"
    assert lines[start + 1].startswith("  ")
    assert "node 1 only lost its peer." in lines


def read_screen(text: str, columns: int = 100) -> list[str]:
    """Return the lines that a terminal shows after this output: text, colors, cursor up, and clearing of lines."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b"):
            count, kind = part[2:-1], part[-1]
            row = max(0, row - int(count or 1)) if kind == "A" else row
            lines[row] = "" if kind == "K" else lines[row]
        elif part != "\r":
            lines[row] += part
            assert len(lines[row]) <= columns
    return [line.rstrip() for line in lines]


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 100 columns with colors."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_terminal_shows_one_block_with_the_log_above_it(screen):
    source = FakeSource(ranks=2)
    progress = run_text.TextProgress(source, screen)
    source.advance(1)
    progress.update()
    source.advance(1)
    source.event("print", "hello", rank=1)
    source.history.add(Evaluation(2, 100, {"loss": 0.5, "accuracy": 0.75}))
    source.event("evaluation", "validation loss 0.500, accuracy 0.750")
    progress.update()
    progress.close()
    shown = [line for line in read_screen(screen.getvalue()) if line]
    assert shown[0].endswith("[1] hello")
    assert shown[1] == "ConvNet: running, 0 %, step 2 of 400, epoch 1 of 2, 0.2 s elapsed, 12 s left"
    numbers = r"  loss \S+ \(mean of 2 steps\); validation: loss 0.500, accuracy 0.750; \S+ samples/s \(last step\)"
    assert re.fullmatch(numbers, shown[2])
    assert len(shown) == 3
    live = read_screen(screen.getvalue().rpartition("\x1b[?25h")[0])
    bar = r"running +\S+ +step 2 of 400, epoch 1 of 2, 0.2 s elapsed, 12 s left"
    assert any(re.fullmatch(bar, line) for line in live)
    assert "\x1b[1;32mrunning" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back


def test_the_last_lines_in_a_terminal_wrap_instead_of_losing_their_end(screen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    source = FakeSource(ranks=2)
    progress = run_text.TextProgress(source, screen)
    source.advance(20)
    progress.update()
    source.end()
    progress.close()
    shown = " ".join(line for line in read_screen(screen.getvalue(), columns=40) if line)
    assert "…" not in shown
    assert shown.endswith("(all steps but the first)")


def test_progress_of_a_run_without_trouble_is_two_lines():
    source = FakeSource(ranks=4)
    source.slowness, source.consistency = {1: 1.1}, ReplicaCheckResult(40, (), None)
    source.advance(40)
    source.history.add(Evaluation(30, 100, {"loss": 0.5}))
    source.end()
    head, numbers = run_text.TextProgress(source, io.StringIO(), is_tty=False).format_block()
    assert head == "ConvNet: completed, step 40 of 400, epoch 1 of 2, 4.0 s elapsed"
    assert "; validation at step 30: loss 0.500; " in numbers


def test_progress_has_a_line_on_each_trouble():
    source = FakeSource(ranks=4)
    source.slowness, source.delay_factors = {1: 2.0}, {1: 2.0}
    source.elapsed_s = 100.0
    source.advance(40)
    source.lose(3)
    lines = run_text.TextProgress(source, io.StringIO(), is_tty=False).format_block()
    assert lines[2:] == [
        "  ✕ node 3 was lost at step 40; 3 nodes of 4 left",
        "  ▼ node 1 slowed 2x on purpose",
    ]
    assert len(run_text.format_run(source).splitlines()) > len(lines)


def test_progress_has_a_verdict_that_would_save_time():
    source = FakeSource(ranks=4)
    source.slowness, source.remaining_s = {1: 2.0}, None
    source.advance(40)
    progress = run_text.TextProgress(source, io.StringIO(), is_tty=False)
    assert "verdict" not in "".join(progress.format_block())
    assert len(progress.format_block()) == 2  # of 4 s
    source.remaining_s = 600.0
    assert "without the straggler (node 1)" in progress.format_block()[2]
    source.advance(10, loss=float("nan"))
    source.remaining_s = None
    assert "the loss is NaN" in progress.format_block()[2]
    assert "Look at what the loss computes" in progress.format_block()[3]  # the remedy, however short the run was


def test_a_log_repeats_advice_only_for_another_cause_and_at_the_end():
    source, stream = FakeSource(ranks=4), io.StringIO()
    source.slowness, source.remaining_s = {1: 2.0}, 600.0
    progress = run_text.TextProgress(source, stream, is_tty=False)
    for _ in range(4):
        source.advance(40)
        progress.update()
    assert stream.getvalue().count("ConvNet: running") == 4
    assert stream.getvalue().count("→ without the straggler (node 1)") == 1
    source.stick(1)
    for _ in range(2):
        source.advance(1)
        progress.update()
    assert stream.getvalue().count("⊘ node 1 stuck") == 2  # an alert
    source.stall_report, source.slowness = None, {0: 2.0}
    source.delay_factors = {0: 2.0}
    for _ in range(2):
        source.advance(60)
        progress.update()
    assert stream.getvalue().count("▼ node 0 slowed 2x on purpose") == 1
    source.elapsed_s = 900.0
    source.end()
    progress.close()
    assert "▼ node 0 slowed 2x on purpose" in stream.getvalue().rpartition("ConvNet: completed")[2]
    assert "→ " in stream.getvalue().rpartition("ConvNet: completed")[2]


def test_nothing_is_written_where_nothing_changed(screen):
    source = FakeSource(ranks=2)
    progress = run_text.TextProgress(source, screen)
    source.advance(1)
    progress.update()
    written = screen.getvalue()
    progress.update()
    assert screen.getvalue() == written


def test_lines_are_cut_to_the_terminal(screen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "4")
    source = FakeSource(ranks=8)
    source.advance(1)
    run_text.TextProgress(source, screen).update()
    shown = [line for line in read_screen(screen.getvalue(), columns=30) if line]
    assert len(shown) <= 4


def test_a_log_gets_plain_lines_every_few_seconds():
    source, stream, timers = FakeSource(ranks=2), io.StringIO(), Timers()
    stop = run_text.start_text_progress(source, stream, clock=timers.clock, call_later=timers.later)
    times = []
    for _ in range(4):
        source.advance(1)
        times += timers.run()
    source.end()
    stop()
    said = stream.getvalue()
    assert "\x1b" not in said
    assert all(b - a >= 5 for a, b in itertools.pairwise(times))
    blocks = [line for line in said.splitlines() if line.startswith("ConvNet: ")]
    assert len(blocks) == 4  # none at once
    assert blocks[-1].startswith("ConvNet: completed, step 4 of 400")
    assert said.count("  loss ") == 4
    assert source.subscribers == 0


def test_a_log_of_a_short_run_has_one_block():
    source, stream, timers = FakeSource(ranks=2), io.StringIO(), Timers()
    source.event("start", "start at step 0")
    source.event("note", "restored")
    stop = run_text.start_text_progress(source, stream, clock=timers.clock, call_later=timers.later)
    source.advance(4)
    timers.run()
    assert [line[10:] for line in stream.getvalue().splitlines()] == ["restored"]
    source.end()
    stop()
    assert len(stream.getvalue().splitlines()) == 3
    assert stream.getvalue().count("ConvNet: completed") == 1


def test_progress_of_a_resumed_run_leaves_out_the_events_of_the_earlier_one():
    source, stream, timers = FakeSource(ranks=2), io.StringIO(), Timers()
    source.event("save", "saved step-00000007")
    source.history.num_inherited_events = len(source.history.events)
    source.event("note", "goes on from step-00000007")
    stop = run_text.start_text_progress(source, stream, clock=timers.clock, call_later=timers.later)
    stop()
    assert [line[10:] for line in stream.getvalue().splitlines() if line[:2].isdigit()] == [
        "goes on from step-00000007"
    ]


def test_progress_shown_again_prints_only_new_events():
    source, timers = FakeSource(ranks=2), Timers()
    source.event("print", "before anybody looked")
    said = []
    for word in ("first", "second"):
        stream = io.StringIO()
        stop = run_text.start_text_progress(source, stream, clock=timers.clock, call_later=timers.later)
        source.event("print", f"{word} time")
        stop()
        said.append([line[10:] for line in stream.getvalue().splitlines() if line[:2].isdigit()])
        source.event("print", f"after the {word}")
    assert said == [["before anybody looked", "first time"], ["after the first", "second time"]]


def test_log_names_nodes_and_leaves_the_words_of_the_user_alone():
    assert formatting.name_nodes("rank 1 keeps ranks 0 and 2 waiting on all ranks") == (
        "node 1 keeps nodes 0 and 2 waiting on all nodes"
    )
    text = "ranks 0 and 1 on here, step 3: ValueError: a tensor of rank 2\nmore"
    assert formatting.name_nodes_at_start(text) == "nodes 0 and 1 on here, step 3: ValueError: a tensor of rank 2"


def test_a_log_has_no_block_before_the_first_step_except_for_its_time():
    source, stream = FakeSource(ranks=2), io.StringIO()
    source.event("note", "restored")
    progress = run_text.TextProgress(source, stream, is_tty=False)
    progress.update()
    assert [line[10:] for line in stream.getvalue().splitlines()] == ["restored"]
    source.event("print", "a slow first step")
    progress.update()
    (_, event, head) = stream.getvalue().splitlines()
    assert event.endswith("a slow first step")
    assert head.startswith("ConvNet: running, 0 %, step 0 of 400")
    source.advance(1)
    progress.update()
    assert "loss" in stream.getvalue()


def test_a_log_shows_a_run_that_fails_before_its_first_step():
    source, stream = FakeSource(ranks=2), io.StringIO()
    source.state = State.FAILED
    run_text.TextProgress(source, stream, is_tty=False).update()
    assert stream.getvalue().startswith("ConvNet: failed, step 0 of 400")


def test_a_status_prints_as_a_line_of_the_log_does():
    status = Status(State.STOPPED, 1031, 4000, 2, 101.49048789, 12.7)
    assert str(status) == repr(status) == "stopped, step 1,031 of 4,000, epoch 2, 1 min 41 s elapsed"
    running = dataclasses.replace(status, state=State.RUNNING, message="waiting for node 1")
    assert str(running) == f"running{str(status).removeprefix('stopped')}, 12 s left: waiting for node 1"


def test_a_large_cluster_folds_the_rows_of_engines_that_are_alike():
    with dtkit.Cluster.from_transport(FakeTransport(50), device="cpu") as cluster:
        text, page = repr(cluster), cluster._repr_html_()
    assert text.startswith("Cluster of 50 engines")
    assert text.count(" cpu ") == page.count("<tr>") - 1 == 10
    assert "and 40 more like these" in text
    assert "and 40 more like these" in page


def test_a_folded_cluster_shows_an_engine_that_differs():
    nodes = [NodeInfo(r, r, "a", 1000 + r, "cpu", 8, 4, 1) for r in range(30)]
    nodes[20] = dataclasses.replace(nodes[20], threads=4)
    nodes[29] = dataclasses.replace(nodes[29], host="b")
    assert [node.rank for node in cluster_text.select_nodes(nodes)] == [*range(8), 20, 29]
    assert len(cluster_text.select_nodes(nodes[:11])) == 11


def test_a_printed_run_names_an_engine_that_has_ended_since_with_the_remedy():
    run = FakeSource(ranks=2)
    run.advance(50)
    run.end()
    run.ended_engines = {1: "the engine of rank 1 is gone: its process has ended. cluster.repair() starts another one"}
    assert "✕ the engine of node 1 is gone: its process has ended. cluster.repair() starts" in run_text.format_run(run)
    run.ended_engines = None  # the cluster was closed
    assert "gone" not in run_text.format_run(run)
