"""Calls of user functions, with engines that answer on demand: state, rows, and views."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import re
import threading
import types
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit._util import timeouts
from dtkit._util.process import ProcessId
from dtkit.dashboard import call_display
from dtkit.dashboard.live.call_widget import CallMessageBuilder
from dtkit.dashboard.text import call_text
from dtkit.engine.observe.call_output import CallOutput, activate_output, log
from dtkit.errors import ClusterClosedError, ClusterError, EngineError
from dtkit.messages import Reply
from dtkit.rpc import pickling
from dtkit.rpc.engine_group import EngineGroup
from dtkit.rpc.membership import Membership
from dtkit.rpc.payload import Payload, make_payload
from dtkit.training import task
from dtkit.training.script_task import submit_script
from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from dtkit.rpc.protocol import Call


def result(value: Any, *, small: int = 2**20) -> Payload:
    return make_payload(pickling.pack_object(value), ProcessId.from_pid(), small)


def broke(rank: int, kind: str = "error", message: str = "no") -> Failure:
    return Failure(rank, "host", "ValueError", message, "", kind=kind)


class FakeCluster:
    """The parts of a cluster that a task uses. Engines answer through `answer` and send output through `listen`."""

    world_size = 2
    is_closed = False
    is_formed = True
    nodes = ()
    gather_replies = EngineGroup.gather_replies
    _name_host = EngineGroup._name_host
    unwrap = EngineGroup.unwrap
    reform_if_broken = Membership.reform_if_broken

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.interrupted: list[list[int]] = []
        self.discarded: list[Payload] = []
        self.formed = 0
        self.futures: list[Future[Reply]] = []
        self.on_interrupt: Callable[[], None] = lambda: None
        self.listen: Any = None
        self.torchrun_attempts = itertools.count()
        self.membership = self.uploads = self

    def check_open(self) -> None:
        if self.is_closed:
            raise ClusterClosedError("this cluster was closed; start another one")

    def pack(self, obj: Any, name: str | None = None) -> pickling.PackedObject:
        return pickling.pack_object(obj, name=name)

    def upload(self, packed: pickling.PackedObject) -> Payload:
        return make_payload(packed, None)

    def discard(self, payload: Payload) -> None:
        self.discarded.append(payload)

    def ensure_formed(self) -> None:
        """The group is formed."""

    def form_process_group(self) -> None:
        self.formed += 1

    def fan_out(self, call: Call[Any], *, listen: Any = None, ranks: Sequence[int] | None = None) -> list[Any]:
        self.sent.append((call.operation, {"ranks": ranks, **call.args}))
        if call.operation == "open_torchrun_store":
            store: Future[Reply] = Future()
            store.set_result(Reply(4321))
            return [store]
        self.listen, self.futures = listen, [Future() for _ in range(self.world_size)]
        return self.futures

    def interrupt(self, ranks: Sequence[int]) -> None:
        self.interrupted.append(list(ranks))
        self.on_interrupt()

    def answer(self, rank: int, value: Any = None, items: Sequence[Any] = (), failure: Failure | None = None) -> None:
        payload = None if failure else value if isinstance(value, Payload) else result(value)
        self.futures[rank].set_result(Reply((payload, list(items)), failure))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def start(cluster: Any, fn: Any = len, *args: Any) -> task.Task:
    return task.submit(cluster, fn, args, {})


def row(**values: Any) -> tuple[str, dict[str, Any]]:
    return "row", values


# -- the call ------------------------------------------------------------------------------------------------


def test_results_are_in_rank_order_regardless_of_the_order_of_answers(cluster):
    call = start(cluster)
    assert (call.state, call.done()) == ("running", False)
    cluster.answer(1, "b")
    with pytest.raises(TimeoutError, match=r"len still runs after 0\.01 s; wait again, or end it with cancel"):
        call.result(0.01)
    cluster.answer(0, "a")
    assert call.result(10) == ["a", "b"]
    assert (call.state, call.done()) == ("done", True)
    assert len(cluster.discarded) == 1


@pytest.mark.parametrize("fn", [3, None, "main"])
def test_object_that_is_not_callable_is_refused_before_anything_is_sent(cluster, fn):
    with pytest.raises(TypeError, match=r"can't be called; give a function, as in cluster\.run\(main, x\)"):
        start(cluster, fn)
    assert cluster.sent == []


def test_closed_cluster_is_reported_before_other_errors(cluster):
    cluster.is_closed = True
    with pytest.raises(ClusterClosedError):
        start(cluster, 3)


def test_closing_the_cluster_during_a_call_ends_the_wait(cluster):
    call = start(cluster)
    cluster.is_closed = True
    with pytest.raises(ClusterClosedError, match="closed during the call"):
        call.result(10)
    assert call.state == "failed"


def test_failure_of_a_rank_is_raised_after_the_group_is_formed_again(cluster):
    call = start(cluster)
    cluster.answer(0, failure=dataclasses.replace(broke(0), victim=True))
    cluster.answer(1, failure=broke(1, message="mine"))
    with pytest.raises(EngineError, match="rank 1 on host: ValueError: mine"):
        call.result(10)
    assert (call.state, cluster.formed) == ("failed", 1)


def test_rows_and_output_before_a_failure_are_kept(cluster):
    call = start(cluster)
    cluster.answer(0, items=[row(loss=1.0), ("text", "last words")], failure=broke(0))
    cluster.answer(1)
    with pytest.raises(EngineError):
        call.result(10)
    assert call.rows == [{"rank": 0, "index": 0, "loss": 1.0}]
    assert call.output == [(0, "last words")]


def test_a_lost_engine_ends_the_call(cluster):
    call = start(cluster)
    lost = Reply(failure=broke(0, "lost", "gone"))
    cluster.futures[0].set_result(lost)
    cluster.futures[1].set_result(lost)
    with pytest.raises(EngineError, match="gone"):
        call.result(10)
    assert cluster.formed == 0


@pytest.mark.parametrize("fails", [False, True])
def test_no_result_stays_in_shared_memory(cluster, fails):
    payload = result(np.zeros(125), small=0)
    assert payload.shared_buffer is not None
    assert os.path.exists(payload.shared_buffer.path)  # noqa: PTH110 - a path as text
    call = start(cluster)
    cluster.answer(0, payload)
    cluster.answer(1, failure=broke(1) if fails else None)
    if fails:
        with pytest.raises(EngineError):
            call.result(10)
    else:
        assert len(call.result(10)[0]) == 125
    assert not os.path.exists(payload.shared_buffer.path)  # noqa: PTH110


def test_only_ranks_that_still_run_are_interrupted(cluster):
    call = start(cluster)
    cluster.answer(0)
    cluster.on_interrupt = lambda: cluster.answer(1)
    call.cancel()
    assert cluster.interrupted == [[1]]
    call.result(10)
    call.cancel()
    assert cluster.interrupted == [[1]]


def test_cancel_succeeds_where_a_model_is_lost_with_the_engines(
    cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The repair has started other engines, but no engine is left with the model of a run."""

    def kill(ranks: Sequence[int]) -> None:
        for rank in ranks:
            cluster.answer(rank, failure=broke(rank, "lost", "gone"))

    def repair() -> None:
        raise ClusterError("no engine is left that holds the model")

    for name in ("CANCEL_INTERRUPT_TIMEOUT_S", "CANCEL_AGAIN_TIMEOUT_S"):
        monkeypatch.setattr(timeouts, name, 0.01)
    cluster.transport = types.SimpleNamespace(kill=kill)
    call = task.submit(cluster, len, (), {}, repair)
    call.cancel()
    assert call.cancelled()
    assert "len was cancelled: no engine is left that holds the model" in capsys.readouterr().out


def test_cancel_returns_although_replacing_engines_takes_longer(
    cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Replacing goes on, and its end is not waited for."""
    may_end, has_ended = threading.Event(), threading.Event()

    def repair() -> None:
        assert may_end.wait(30)
        has_ended.set()

    for name in ("CANCEL_INTERRUPT_TIMEOUT_S", "CANCEL_AGAIN_TIMEOUT_S"):
        monkeypatch.setattr(timeouts, name, 0.01)
    monkeypatch.setattr(timeouts, "CANCEL_TIMEOUT_S", 0.1)
    cluster.transport = types.SimpleNamespace(
        kill=lambda ranks: [cluster.answer(rank, failure=broke(rank, "lost", "gone")) for rank in ranks]
    )
    call = task.submit(cluster, len, (), {}, repair)
    call.cancel()
    assert not has_ended.is_set()
    assert "len was cancelled; its engines are still being replaced. cluster.repair() waits" in capsys.readouterr().out
    may_end.set()
    assert has_ended.wait(30)


def test_the_thread_ends_with_the_call(cluster):
    call = start(cluster)
    thread = next(t for t in threading.enumerate() if t.name == "dtkit-len")
    cluster.answer(0)
    cluster.answer(1)
    call.result(10)
    thread.join(10)
    assert not thread.is_alive()


def test_script_gets_a_store_and_a_new_attempt(cluster):
    for attempt in range(2):
        call = submit_script(cluster, len, (), {})
        (opened, to), (op, args) = cluster.sent[-2:]
        assert (opened, to["ranks"], op, args["port"], args["restart_count"]) == (
            "open_torchrun_store",
            [0],
            "run_script",
            4321,
            attempt,
        )
        cluster.answer(0)
        cluster.answer(1)
        call.result(10)
    assert cluster.formed == 0


@pytest.mark.parametrize(
    ("main", "args", "kwargs", "error"),
    [
        (4, (), {}, "function is an int, which can't be called"),
        ("missing.py", (), {}, r"missing\.py is not a file; give the path of a script, '-m' and a module"),
        ("-m", (), {}, "'-m' without a module"),
        ("missing.py", (), {"epochs": 3}, "epochs: a script takes command-line arguments only"),
    ],
)
def test_script_that_does_not_exist_is_refused_at_once(cluster, main, args, kwargs, error):
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=error):
        submit_script(cluster, main, args, kwargs)
    assert cluster.sent == []


# -- output of ranks -----------------------------------------------------------------------------------------


def test_final_answer_fills_gaps_in_each_rank_s_order_without_duplicates(cluster):
    call = start(cluster)
    items = [row(k=float(k)) for k in range(6)]
    cluster.listen(0, 0, items[:2])
    cluster.listen(0, 4, items[4:])  # 2 and 3 were lost
    cluster.listen(0, 1, items[1:3])  # a known row and a new one
    assert [r["k"] for r in call.rows] == [0, 1, 2]
    cluster.answer(1, items=items[:1])
    cluster.answer(0, items=items)
    call.result(10)
    assert [(r["index"], r["k"]) for r in call.rows if r["rank"] == 0] == [(k, k) for k in range(6)]
    assert [(r["index"], r["k"]) for r in call.rows if r["rank"] == 1] == [(0, 0)]


def test_nan_and_infinity_in_live_rows_arrive_as_numbers(cluster):
    sent: list[Any] = []
    arrived = threading.Event()

    def publish(first: int, items: list[Any]) -> None:
        sent.append((first, items))
        arrived.set()

    channel = CallOutput(publish)
    with activate_output(channel):
        log(loss=math.nan, big=-math.inf, fine=1)
        assert arrived.wait(10)
    assert sent == [(0, [("row", {"loss": "nan", "big": "-inf", "fine": 1.0})])]
    call = start(cluster)
    cluster.listen(1, *sent[0])
    assert math.isnan(call.rows[0]["loss"])
    assert (call.rows[0]["big"], call.rows[0]["fine"]) == (-math.inf, 1.0)
    assert "[1] loss=nan big=-inf fine=1" in repr(call)


@pytest.mark.parametrize("name", ["rank", "index"])
def test_log_refuses_the_names_of_reserved_columns(name):
    with pytest.raises(ValueError, match=rf"dtkit\.log\({name}=\.\.\.\): dtkit fills the columns rank and index"):
        log(**{name: 1})


def test_to_pandas_has_a_column_per_name(cluster):
    call = start(cluster)
    cluster.listen(0, 0, [row(loss=0.5), row(accuracy=1.0)])
    frame = call.to_pandas()
    assert list(frame.columns) == ["rank", "index", "loss", "accuracy"]
    assert frame["loss"].isna().tolist() == [False, True]


# -- views ---------------------------------------------------------------------------------------------------


def test_text_shows_the_latest_value_of_each_name_and_sanitized_lines(cluster):
    call = start(cluster)
    cluster.listen(0, 0, [row(loss=0.5), row(accuracy=1.0), ("text", "\x1b[31mred")])
    assert repr(call) == "len on 2 nodes: running\n  [0] loss=0.5 accuracy=1\n[0] [31mred"


def test_line_without_its_end_is_shown_until_the_end_arrives(cluster):
    call = start(cluster)
    cluster.listen(0, 0, [("text", "begin"), ("progress", "10%"), ("progress", "20%")])
    assert repr(call).splitlines()[1:] == ["[0] begin", "[0] 20%"]
    assert "[0] 20%" in call_text.format_html(call)
    cluster.listen(0, 3, [("text", "100%"), ("progress", "  ")])
    assert repr(call).splitlines()[1:] == ["[0] begin", "[0] 100%"]
    assert call.output == [(0, "begin"), (0, "100%")]


@pytest.mark.parametrize(
    ("line", "shown"), [("  File", "  File"), ("\tx = 1", " " * 8 + "x = 1"), (" \x1bred ", " red")]
)
def test_printed_lines_keep_their_indentation(cluster, line, shown):
    call = start(cluster)
    cluster.listen(0, 0, [("text", line)])
    assert repr(call).splitlines()[1:] == [f"[0] {shown}"]
    assert f"[0] {shown}" in call_text.format_html(call)


def test_html_escapes_engine_output_and_shows_only_the_last_lines(cluster):
    call = start(cluster)
    cluster.listen(0, 0, [("text", f"<b>{k}</b>") for k in range(40)])
    cluster.listen(1, 0, [row(**{"<i>": 1.0})])
    page = call_text.format_html(call)
    assert "<b>" not in page
    assert "<i>" not in page
    assert "(10 earlier lines are in .output)" in page
    assert "[0] &lt;b&gt;9&lt;" not in page
    assert "[0] &lt;b&gt;10&lt;" in page
    assert re.findall(r"<td[^>]*>([^<]*)</td>", page) == ["1", "1", "1.00"]


def test_log_summary_reads_each_row_once():
    class Rows(list[Any]):
        looked_at = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            self.looked_at += len(found)
            return found

    rows = Rows({"rank": 0, "index": k, "loss": float(k)} for k in range(100))
    digest = call_text.LogSummary().update(rows)
    rows.append({"rank": 0, "index": 100, "loss": 7.0})
    digest.update(rows)
    assert rows.looked_at == 101
    assert (digest.row_counts, digest.latest_values, list(digest.names)) == ({0: 101}, {0: {"loss": 7.0}}, ["loss"])


def drawn(figure: Figure) -> dict[str, dict[str, list[float]]]:
    return {
        ax.get_title(loc="left"): {str(line.get_label()): list(line.get_ydata()) for line in ax.get_lines()}
        for ax in figure.axes
    }


def test_the_figure_has_axes_per_name_and_a_line_per_rank(cluster):
    call = start(cluster)
    cluster.listen(0, 0, [row(loss=2.0), row(loss=1.0), row(**{"$a": 3.0})])
    cluster.listen(1, 0, [row(loss=4.0)])
    figure = call.figure()
    figure.canvas.draw()
    assert drawn(figure) == {"loss": {"node 0": [2, 1], "node 1": [4]}, "$a": {"node 0": [3]}}


def test_figure_of_a_call_without_rows_reports_that_nothing_was_logged(cluster):
    figure = start(cluster).figure()
    figure.canvas.draw()
    assert figure.axes == []
    assert "nothing logged yet" in [text.get_text() for text in figure.texts]


def test_live_display_prints_every_line_and_the_last_row(cluster):
    stream = io.StringIO()
    call = start(cluster)
    with call_display.display_until_done(call, stream):
        cluster.listen(0, 0, [row(loss=1.0, samples=64.0), ("text", "a"), row(loss=0.5, samples=64.0), ("text", "b")])
    assert stream.getvalue().splitlines() == ["[0] a", "[0] b", "[0] loss=0.5 samples=64"]


def test_line_that_arrives_while_the_view_writes_is_not_lost(cluster):
    call = start(cluster)
    items = [("text", str(k)) for k in range(3)]

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            if "0" in text:
                cluster.listen(0, 1, items[1:2])
            return super().write(text)

    stream = Slow()
    view = call_display._StreamView(call, stream)
    cluster.listen(0, 0, items[:1])
    view.update()
    cluster.listen(0, 2, items[2:])
    view.update()
    assert stream.getvalue() == "[0] 0\n[0] 1\n[0] 2\n"


def test_failing_view_does_not_affect_the_call(cluster, caplog: pytest.LogCaptureFixture):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("gone")

    call = start(cluster)
    call.subscribe(lambda: 1 / 0)
    with call_display.display_until_done(call, Closed()):
        cluster.listen(0, 0, [("text", "a")])
        cluster.answer(0, 1, [("text", "a")])
        cluster.answer(1, 2)
        assert call.result(10) == [1, 2]
    assert "BrokenPipeError: gone" in caplog.text
    assert "a view of len failed" in caplog.text


def test_failing_last_update_is_logged(cluster, caplog: pytest.LogCaptureFixture):
    class View:
        def update(self) -> None:
            raise BrokenPipeError("gone")

    call_display._update_logging_errors(View())
    assert "a view failed; the call goes on: BrokenPipeError: gone" in caplog.text


def test_a_notebook_updates_one_display(cluster, monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append("display")
        return Handle()

    monkeypatch.setattr(call_display, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    call = start(cluster)
    with call_display.display_until_done(call):
        for k in range(100):
            cluster.listen(0, k, [("text", str(k))])
    assert shown.count("display") == 1
    assert len(shown) < 10
    assert shown[-1].endswith("[0] 99") or len(shown) == 1


# -- live display and interrupts -----------------------------------------------------------------------------


def pressing(times: int, call: task.Task) -> None:
    """Make the call's wait raise KeyboardInterrupt this many times, as a signal would."""
    wait, left = call._wait, iter(range(times))

    def interrupted(timeout: float | None = None) -> bool:
        if next(left, None) is not None:
            raise KeyboardInterrupt
        return wait(timeout)

    call._wait = interrupted


def test_an_interrupt_reaches_the_engines_and_is_raised_once_they_have_answered(cluster):
    call = start(cluster)

    def end() -> None:
        for rank in range(2):
            cluster.answer(rank, failure=broke(rank, "interrupted"))

    cluster.on_interrupt = end
    pressing(1, call)
    with pytest.raises(KeyboardInterrupt):
        call.display_and_wait()
    assert (cluster.interrupted, cluster.formed, call.state) == ([[0, 1]], 1, "interrupted")
    with pytest.raises(EngineError):
        call.result(10)


def test_an_interrupt_names_where_each_rank_was(cluster):
    call = start(cluster)
    cluster.answer(1, "returned")

    def end() -> None:
        frames = (("train.py", 3, "main", "dist.barrier()"),)
        cluster.answer(0, failure=dataclasses.replace(broke(0, "interrupted"), user_frames=frames))

    cluster.on_interrupt = end
    pressing(1, call)
    with pytest.raises(KeyboardInterrupt) as caught:
        call.display_and_wait()
    line = "len was interrupted: rank 0 was in main, File train.py, line 3: dist.barrier(); rank 1 had returned"
    assert str(caught.value) == line
    assert caught.value._render_traceback_() == [line]


def test_script_says_that_processes_are_starting_until_they_print(cluster, tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    stream = io.StringIO()
    call = submit_script(cluster, script, (), {})
    with call_display.display_until_done(call, stream):
        assert "running, starting a fresh Python process for each rank" in call_text.format_text(call)
        cluster.listen(0, 0, [("text", "a")])
        assert "fresh" not in call_text.format_text(call)
    assert stream.getvalue().splitlines() == [f"train.py: {call.note}", "[0] a"]


def test_messages_of_a_call_have_all_curves_every_time(cluster):
    call = start(cluster)
    cluster.listen(0, 0, [row(d_loss=float(k), g_loss=1.0) for k in range(50)])
    cluster.listen(1, 0, [row(d_loss=float(k + 2)) for k in range(50)])
    builder = CallMessageBuilder(call)
    for _ in range(2):
        head, *series = builder.build_messages()
        assert head.content["status"] == {"state": "running", "step": 50}
        lines = {one["name"]: one["lines"] for message in series for one in message.content["series"]}
        assert lines == {"d_loss": 3, "g_loss": 3}
    values = np.frombuffer(series[0].buffers[0], "<f4")[: 50 * 4].reshape(50, 4)
    assert values[1].tolist() == [1, 1, 3, 2]  # step, both ranks, mean


def test_a_second_interrupt_does_not_wait_for_engines_that_do_not_answer(cluster):
    call = start(cluster)
    pressing(2, call)
    with pytest.raises(KeyboardInterrupt):
        call.display_and_wait()
    assert cluster.interrupted == [[0, 1]]
    assert call.state == "running"
    cluster.answer(0)
    cluster.answer(1)
    call.result(10)


def test_interrupt_after_the_cluster_was_closed_raises_keyboard_interrupt(cluster):
    call = start(cluster)

    def closed() -> None:
        cluster.is_closed = True
        raise ClusterClosedError("closed")

    cluster.on_interrupt = closed
    pressing(1, call)
    with pytest.raises(KeyboardInterrupt):
        call.display_and_wait()
