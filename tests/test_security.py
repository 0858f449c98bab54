"""Security rules: no unlimited waits, no evaluated text, no unpickled files, no open ports, no access for other users.

The first part reads the code. An exception carries a comment that gives its reason, such as ``# waits: ...``; a stale
comment fails too. The cluster's side, ports and keys, is in ``tests/cluster/test_security.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import os
import re
import stat
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import ipyparallel
import pytest
from torch import nn

import dtkit
from dtkit._util.process import ProcessId
from dtkit.cluster import cluster_file, launched_transport
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.devices import plan_devices
from dtkit.cluster.forkserver.client import ForkServerClient
from dtkit.dashboard import report
from dtkit.dashboard.summary.verdict import Verdict
from dtkit.dashboard.text import call_text
from dtkit.dashboard.written_report import WrittenReport
from dtkit.data.partition import Partition
from dtkit.engine import server
from dtkit.engine.entrypoint import Entrypoint
from dtkit.explain import explain
from dtkit.health import stacks
from dtkit.health.diagnosis import RankObservation
from dtkit.health.frames import Frame
from dtkit.health.status import EngineStatus
from dtkit.history.profile import OperatorTime, Profile, RankProfile
from dtkit.integrations.search import SearchResult, TrialRecord
from dtkit.lessons.claims import Claim, Limit
from dtkit.lessons.lesson import Score
from dtkit.lessons.svg import Canvas, Drawing
from dtkit.planning.memory_report import Memory
from dtkit.rpc import shared_memory
from dtkit.rpc.shared_memory import SharedBuffer, map_buffers
from dtkit.testing.fake_transport import FakeTransport
from dtkit.types import LayerSummary, ModelSummary, NodeInfo, NodeList, RunSpec
from tests.support import checkpoints, comparison_sources, memory_reports, plans, stage_reports, step_reports
from tests.support.fake_source import FakeSource
from tests.support.report_page import remove_own_scripts
from tests.support.syntax import find_marker_errors, iterate_nodes
from tests.support.verification import verify_changed_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dtkit.checkpoint.checkpoint import Checkpoints

# -- forbidden calls in the code ---------------------------------------------------------------------------

_ENDLESS = {"wait", "result", "exception", "join", "get", "acquire", "communicate", "shutdown", "barrier"}
_SUBPROCESS = {"run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}


def _called(node: ast.AST) -> tuple[str, str]:
    """The full name that a node calls, and its last part; both empty if it is no call."""
    if not isinstance(node, ast.Call):
        return "", ""
    full = ast.unparse(node.func)
    return full, full.rsplit(".", 1)[-1]


def _limited(call: ast.Call) -> bool:
    """Whether an argument by name limits the wait: one that may be None doesn't."""
    given = {k.arg: k.value for k in call.keywords}
    limits = [given[name] for name in ("timeout", "wait", "block", "blocking") if name in given]
    return any(not _may_be(limit, None) and not _may_be(limit, True) for limit in limits)


def _may_be(value: ast.expr, what: object) -> bool:
    if isinstance(value, ast.IfExp):
        return _may_be(value.body, what) or _may_be(value.orelse, what)
    return isinstance(value, ast.Constant) and value.value is what


def _waits(node: ast.AST) -> bool:
    """Whether this call may wait for ever, as far as its form tells."""
    full, name = _called(node)
    if not isinstance(node, ast.Call) or _limited(node):
        return False
    if name in _ENDLESS:
        return "." in full and not node.args
    if name in {"lockf", "flock"}:
        return "LOCK_NB" not in ast.unparse(node)
    unlimited = {"wait_for": 2, "select": 4, "create_connection": 2, "urlopen": 3}
    return (
        len(node.args) < unlimited.get(name, 0)
        or name in {"recv", "recv_into", "recvfrom", "recvmsg", "accept", "as_completed", "DataLoader"}
        or (full.startswith("subprocess.") and name in _SUBPROCESS)
        or re.fullmatch(r"(re)?(start|stop|connect)_\w+_sync", name) is not None
    )


def _locks(node: ast.AST) -> bool:
    """Whether this makes a lock: ``with lock`` waits for whoever has it."""
    return _called(node)[1] in {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"}


def _opens(node: ast.AST) -> bool:
    """Whether this opens something to connect to."""
    full, name = _called(node)
    servers = {"create_server", "start_server", "TCPStore", "HTTPServer", "ThreadingHTTPServer", "TCPServer"}
    return name in servers | {"init_rpc", "socketpair", "bind_to_random_port"} or (name == "bind" and "sock" in full)


_UNPICKLE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "np", "numpy", "shelve", "torch", "pickling", "yaml"}


def _dangerous(node: ast.AST) -> bool:
    """Whether this runs text, a shell or a pickle, or ends processes by name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.search(r"\b(pkill|killall)\b", node.value) is not None
    full, name = _called(node)
    if not isinstance(node, ast.Call):
        return False
    if full in {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}:
        return True
    if any(k.arg == "shell" and not _may_be(k.value, False) for k in node.keywords):
        return True
    if re.fullmatch(r"(\w+_)?loads?(_all)?|open", name) and full.split(".")[0] in _UNPICKLE and "." in full:
        return "allow_pickle=False" not in ast.unparse(node)
    is_own = name in {"pack_object", "unpack_object"}  # the marker is inside unpack_object
    return name in {"Unpickler", "unpickle", "read_pickle", "mktemp"} or (
        name.endswith(("_object_list", "_object")) and not is_own
    )


@pytest.mark.parametrize(
    ("sees", "marker"),
    [(_waits, "waits"), (_locks, "locks"), (_opens, "port"), (_dangerous, "unpickles")],
    ids=["waits", "locks", "ports", "dangers"],
)
def test_every_exception_to_a_rule_gives_its_reason(root: Path, sees: Callable[[ast.AST], bool], marker: str):
    assert find_marker_errors(root / "dtkit", sees, marker) == []


@pytest.mark.parametrize(
    ("sees", "code"),
    [
        *((_waits, f"x.{name}()") for name in ("wait", "result", "join", "get", "acquire", "exception", "communicate")),
        (_waits, "q.get(timeout=None)"),
        (_waits, "q.get(timeout=5 if busy else None)"),
        (_waits, "q.get(block=True)"),
        (_waits, "c.wait_for(ready)"),
        (_waits, "subprocess.run(command, check=True)"),
        (_waits, "select.select(r, w, x)"),
        (_waits, "fcntl.flock(f, fcntl.LOCK_EX)"),
        (_waits, "cluster.start_engines_sync(2)"),
        (_locks, "threading.RLock()"),
        (_opens, "socketserver.TCPServer(address, handler)"),
        (_opens, "sock.bind(('', 0))"),
        (_dangerous, "torch.load(path, weights_only=True)"),
        (_dangerous, "pickle.load(file)"),
        (_dangerous, "np.load(path, allow_pickle=True)"),
        (_dangerous, "yaml.safe_load(text)"),
        (_dangerous, "eval(text)"),
        (_dangerous, "subprocess.run(text, shell=True, timeout=1)"),
        (_dangerous, "subprocess.run(['pkill', '-f', name], timeout=1)"),
        (_dangerous, "dist.broadcast_object_list(things)"),
    ],
)
def test_the_scan_finds_each_forbidden_form(sees: Callable[[ast.AST], bool], code: str):
    assert any(map(sees, ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    ("sees", "code"),
    [
        (_waits, "x.wait(3); x.result(timeout=t); d.get('k'); ', '.join(a); subprocess.run(c, timeout=1)"),
        (
            _waits,
            "q.get(timeout=5 if busy else 9); lock.acquire(blocking=False); q.get_nowait(); pool.shutdown(wait=False)",
        ),
        (_dangerous, "json.loads(t); self.load(3); np.load(p, allow_pickle=False); model.eval(); torch.compile(f)"),
    ],
)
def test_the_scan_permits_limited_and_safe_calls(sees: Callable[[ast.AST], bool], code: str):
    assert not any(map(sees, ast.walk(ast.parse(code))))


# -- engine output is text, not HTML ---------------------------------------------------------------------------

HOSTILE = """<script>alert("1")</script><img src=x onerror='a()'>&amp;"""


def _cluster() -> dtkit.Cluster:
    cluster = dtkit.Cluster.from_transport(FakeTransport(2), device="cpu", interface=HOSTILE)
    cluster._engine_group.membership._nodes = [
        dataclasses.replace(node, host=HOSTILE, device=HOSTILE) for node in cluster.nodes
    ]
    cluster._device_note = HOSTILE
    return cluster


def _replicas(monkeypatch: pytest.MonkeyPatch) -> Any:
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        found = cluster.broadcast(nn.Linear(2, 2))
    monkeypatch.setattr(found, "name", HOSTILE)
    monkeypatch.setattr(found, "checksums", (HOSTILE, HOSTILE))
    return found


def _stacks() -> stacks.Stacks:
    frame = Frame(HOSTILE, 3, HOSTILE, "user")
    status = EngineStatus(0, 1, 0, HOSTILE, 7, 1.0, 50.0, "advance", HOSTILE, 44.0, 6.0, False, None)
    status = dataclasses.replace(status, stack=(frame,), threads={HOSTILE: (frame,)})
    return stacks.Stacks([RankObservation(0, HOSTILE, 7, HOSTILE, 0.1, status)])


def _checkpoints(folder: Path) -> Checkpoints:
    """One complete and one damaged checkpoint, with hostile text in every field that can have it."""
    made = folder / HOSTILE.replace("/", "|")
    whole = checkpoints.write_checkpoint(made).future.result(20).path
    broken = checkpoints.write_checkpoint(made, step=6).future.result(20).path
    (broken / "checkpoint.json").write_text(HOSTILE)

    def spoil(head: dict[str, Any]) -> None:
        head["spec"] |= {"name": HOSTILE, "strategy": HOSTILE, "optimizer": HOSTILE}

    checkpoints.rewrite_metadata(whole, spoil)
    return dtkit.list_checkpoints(made)


def _piped() -> Any:
    reports = stage_reports.make_pipeline_reports()
    for one in reports:
        for crossing in one["transfers"]:
            crossing["dtype"] = HOSTILE
    return explain.build_explanation(reports, HOSTILE, None)


def _cut() -> Any:
    reports = stage_reports.make_sharded_reports()
    for one in reports:
        for collective in one["collectives"]:
            collective |= {"phase": HOSTILE, "dtype": HOSTILE}
        one |= {"before": HOSTILE, "after": HOSTILE}
    return explain.build_explanation(reports, HOSTILE, None)


def _layers() -> ModelSummary:
    return ModelSummary(1, 1, (LayerSummary(HOSTILE, HOSTILE, 1),))


def _arguments() -> RunSpec:
    return RunSpec(*(HOSTILE,) * 2, 2, 64, 16, 20, 4, HOSTILE, 0, *(HOSTILE,) * 2, settings=((HOSTILE,) * 2,))


def _nodes() -> NodeList:
    return NodeList([NodeInfo(0, 0, HOSTILE, 1, HOSTILE, 1, 1, 1)])


def _labels() -> Partition:
    return Partition(4, 2, labels=[HOSTILE, "b", HOSTILE, "b"])


def _found() -> SearchResult:
    found = SearchResult(HOSTILE, "minimize", None)
    found.trials = [TrialRecord(0, 0, HOSTILE, 1.0, {HOSTILE: HOSTILE, "lr": 0.1}, {0: 2.0})]
    return found


def _measurements() -> tuple[Claim, Limit]:
    claim = Claim(HOSTILE, 1.0, 2.0, HOSTILE, formula=HOSTILE, expected=1.0)
    return claim, Limit(HOSTILE, 1.0, 2.0, HOSTILE, limit=3.0)


def _profile() -> Profile:
    return Profile(HOSTILE, 1, 1, [RankProfile((OperatorTime(HOSTILE, 1, 1.0, 0.0),), b"", 0.0)])


def _drawing() -> Drawing:
    canvas = Canvas(10, 10, HOSTILE)
    canvas.add_empty_box(0, 0, 5, 5, HOSTILE)
    canvas.add_text(0, 0, HOSTILE)
    return canvas.finish()


PAGES: dict[str, Any] = {  # a class that shows itself as HTML -> one that is full of hostile text
    "Benchmark": lambda *_: dataclasses.replace(plans.make_benchmark(), dtype=HOSTILE, backend=HOSTILE),
    "Checkpoint": lambda folder, _: _checkpoints(folder)[0],
    "Checkpoints": lambda folder, _: _checkpoints(folder),
    "Cluster": lambda *_: _cluster(),
    "Claim": lambda *_: _measurements()[0],
    "Comparison": lambda *_: dtkit.compare(
        [comparison_sources.make_source(), comparison_sources.make_source(HOSTILE, name=HOSTILE)]
    ),
    "Drawing": lambda *_: _drawing(),
    "Limit": lambda *_: _measurements()[1],
    "Memory": lambda *_: Memory.from_reports(HOSTILE, HOSTILE, 3, [memory_reports.make_usage()]),
    "ModelSummary": lambda *_: _layers(),
    "NodeList": lambda *_: _nodes(),
    "Partition": lambda *_: _labels(),
    "PipelineExplanation": lambda *_: _piped(),
    "Plan": lambda *_: dataclasses.replace(plans.make_plan(model=HOSTILE), notes=(HOSTILE,)),
    "ModelHandle": lambda _, monkeypatch: _replicas(monkeypatch),
    "Profile": lambda *_: _profile(),
    "RunSpec": lambda *_: _arguments(),
    "Score": lambda *_: Score(_measurements()),
    "SearchResult": lambda *_: _found(),
    "ShardedExplanation": lambda *_: _cut(),
    "Stacks": lambda *_: _stacks(),
    "StepExplanation": lambda *_: step_reports.make_explanation(step_reports.RANKS[:1], (HOSTILE,), model=HOSTILE),
    "VerdictExplanation": lambda *_: Verdict("cores", HOSTILE, 0.5, (HOSTILE,)).explain(),
    "Verification": lambda *_: dataclasses.replace(verify_changed_state(modules=(HOSTILE,)), verdict=HOSTILE),
    "WrittenReport": lambda folder, _: WrittenReport(HOSTILE, f"{folder}/{HOSTILE}.html", [(HOSTILE,) * 3]),
}


def test_every_class_with_an_html_view_is_in_pages(root: Path):
    classes = [node for node in iterate_nodes(root / "dtkit") if isinstance(node, ast.ClassDef)]
    own = {c.name for c in classes if any(getattr(part, "name", "") == "_repr_html_" for part in c.body)}
    heirs = {c.name: base.id for c in classes for base in c.bases if isinstance(base, ast.Name) and base.id in own}
    found = own - set(heirs.values()) | heirs.keys()
    assert found == set(PAGES)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", PAGES)
def test_hostile_text_is_escaped_in_every_html_view(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = PAGES[name](tmp_path, monkeypatch)
    assert type(shown).__name__ == name
    try:
        _assert_harmless(shown._repr_html_())
    finally:
        if isinstance(shown, dtkit.Cluster):
            shown.close()


def test_a_call_and_a_report_escape_printed_and_raised_text(tmp_path: Path):
    source = FakeSource(ranks=2, name=HOSTILE)
    source.advance(5)
    source.event("print", HOSTILE, rank=1)
    source.exception = RuntimeError(HOSTILE)
    report.write_report(source, tmp_path / "run.html")
    _assert_harmless(remove_own_scripts((tmp_path / "run.html").read_text(encoding="utf-8")))
    engines = FakeTransport(2)
    engines.queue_output(0, ("text", HOSTILE), ("row", {HOSTILE: 1.0}))
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        task = cluster.submit(len, [1])
        task.result(20)
        _assert_harmless(call_text.format_html(task))


class _Tags(HTMLParser):
    """The tags and texts that a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        acts = any(name.startswith("on") for name in given)
        loads = not (given.get("src") or "data:").startswith("data:")
        if tag in {"script", "iframe", "object", "embed", "link"} or acts or loads:
            self.bad.append(self.get_starttag_text() or tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _assert_harmless(page: str) -> None:
    """Assert that the hostile text is in the page as text, not as tags or attributes."""
    tags = _Tags()
    tags.feed(page)
    assert tags.bad == []
    assert "<script>alert" in "".join(tags.texts)


def test_browser_views_set_text_and_never_html(root: Path):
    """The live dashboard: names and lines reach the page as text nodes. ``tests/browser`` tries it."""
    parses = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function")
    scripts = sorted((root / "dtkit").rglob("*.js"))
    assert scripts
    assert [path.name for path in scripts if parses.search(path.read_text(encoding="utf-8"))] == []


# -- files are private, and only the user's own are trusted ----------------------------------------------------


def test_shared_memory_refuses_to_write_through_an_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"untouched")
    planted = tmp_path / "dtkit-planted"
    monkeypatch.setattr(shared_memory, "_make_filename", lambda _: planted.name)
    for plant in (lambda: planted.symlink_to(theirs), lambda: planted.write_bytes(b"")):
        plant()
        with pytest.raises(OSError, match="File exists"):
            shared_memory.write_buffers([b"secret"], directories=[str(tmp_path)])
        planted.unlink()
    assert theirs.read_bytes() == b"untouched"
    handle = shared_memory.write_buffers([b"secret"], directories=[str(tmp_path)])
    assert stat.S_IMODE(planted.stat().st_mode) == 0o600
    shared_memory.remove_file(handle)


def test_links_and_files_of_other_users_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    handle = shared_memory.write_buffers([b"secret"], directories=[str(tmp_path)])
    link = tmp_path / "link"
    link.symlink_to(handle.path)
    with pytest.raises(OSError, match="symbolic links") as found:
        map_buffers(SharedBuffer(str(link), handle.spans))
    assert found.value.errno == errno.ELOOP
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a file of this user; refusing to map it"):
        map_buffers(handle)


def test_a_cluster_folder_is_trusted_only_if_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Attaching to a cluster unpickles files of its folder."""
    me = ProcessId.from_pid()
    folder = tmp_path / "dtkit-mine"
    folder.mkdir(mode=0o700)
    cluster_file.ClusterInfo(folder, 1, me, me, (0,), (), 0.0, {}).write()
    assert [found.name for found in cluster_file.find_running(tmp_path)] == ["dtkit-mine"]
    (tmp_path / "dtkit-link").symlink_to(folder)
    assert len(cluster_file.find_running(tmp_path)) == 1
    for mode in (0o770, 0o702, 0o750):
        folder.chmod(mode)
        assert cluster_file.find_running(tmp_path) == []
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cluster_file.find_running(tmp_path) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_checkpoint_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int):
    """The user's umask alone decides who can read a checkpoint; dtkit neither adds nor removes permissions."""
    before = os.umask(umask)
    try:
        whole = checkpoints.write_checkpoint(tmp_path / "saved").future.result(20).path
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in whole.iterdir()} == {mode}
    assert stat.S_IMODE(whole.stat().st_mode) == mode | (mode & 0o444) >> 2


# -- traffic beyond loopback -----------------------------------------------------------------------------------------


def test_traffic_beyond_loopback_must_be_requested_and_is_reported(monkeypatch: pytest.MonkeyPatch):
    plain = "Tensors travel over eth7, and that traffic is not encrypted."
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu", interface="eth7") as cluster:
        assert repr(cluster).endswith(plain)
        assert f"<p>{plain}</p>" in cluster._repr_html_()
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        assert "encrypted" not in repr(cluster)
    elsewhere = FakeTransport(2)
    elsewhere.handshake_overrides[1]["host"] = "another"
    with pytest.raises(
        dtkit.errors.ClusterError,
        match=r"uses the loopback interface by default.*Tensor traffic on it is not encrypted",
    ):
        dtkit.Cluster.from_transport(elsewhere, device="cpu")


@pytest.mark.parametrize(("launcher", "address"), [("local", "127.0.0.1"), ("ssh", "")])
def test_the_controller_requires_a_key_on_every_address(
    launcher: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {}

    def start(**how: Any) -> None:
        asked.update(how)
        raise InterruptedError("that is enough")

    monkeypatch.setattr(ipyparallel, "Cluster", start)
    monkeypatch.setattr(ForkServerClient, "start", lambda _: None)
    config = LaunchConfig(launcher, plan_devices(1, "cpu", 1), 1.0)
    with pytest.raises(InterruptedError):
        launched_transport._get_launcher_class(config)(config, tmp_path).start_controller()
    assert asked["controller_ip"] == address  # "": the launcher's own choice
    assert "--IPController.enable_curve=True" in asked["controller_args"]


def test_engines_delete_the_key_after_they_connect(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPP_CONNECTION_INFO", "secret")
    monkeypatch.setattr(server, "handle_request", lambda message, _: message + str(dict(os.environ)).encode())
    assert b"secret" not in Entrypoint()(b"")[0]


# -- the security guide ----------------------------------------------------------------------------------------


def test_the_security_guide_explains_who_is_trusted(root: Path):
    page = (root / "docs" / "guides" / "security.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 40
    for word in ("unpickles", "CurveZMQ", "unencrypted", "loopback", "shared host", "interface=", "umask", "escaped"):
        assert word in page
