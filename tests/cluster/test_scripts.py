"""Scripts in fresh processes, as torchrun starts them: files, modules and functions, errors, interrupts, leftovers."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtkit
from dtkit._util import timeouts
from tests.support.marks import slow
from tests.support.small import check_usable, train

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.training.task import Task

pytestmark = pytest.mark.cluster


TORCHRUN = """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME
ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID
TORCHELASTIC_USE_AGENT_STORE"""


def script() -> tuple[float, dict[str, str]]:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    environment = {name: os.environ[name] for name in TORCHRUN.split()}
    dist.destroy_process_group()
    return total.item(), environment


def test_torchrun_script_runs_unchanged_and_repeatedly(cluster2):
    attempts = []
    for _ in range(2):
        results = cluster2.torchrun(script)
        assert [total for total, _ in results] == [2.0, 2.0]
        environments = [environment for _, environment in results]
        assert [e["RANK"] for e in environments] == [e["LOCAL_RANK"] for e in environments] == ["0", "1"]
        assert {e["WORLD_SIZE"] for e in environments} == {e["LOCAL_WORLD_SIZE"] for e in environments} == {"2"}
        attempts.append(environments[0]["TORCHELASTIC_RESTART_COUNT"])
        check_usable(cluster2)
    assert attempts[0] != attempts[1]
    assert cluster2.run(lambda: "MASTER_ADDR" in os.environ) == [False, False]


@pytest.mark.slow
def test_accelerate_does_not_train_the_ranks_apart_without_a_gpu(cluster2):
    def count_processes() -> tuple[int, str]:
        from accelerate import Accelerator

        accelerator = Accelerator()
        return accelerator.num_processes, type(accelerator.prepare(nn.Linear(2, 1))).__name__

    pytest.importorskip("accelerate")
    assert cluster2.torchrun(count_processes) == [(2, "DistributedDataParallel")] * 2


@pytest.mark.slow
def test_failing_script_leaves_the_cluster_usable(cluster2):
    def bad_script() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("in main")
        dist.barrier()

    with pytest.raises(dtkit.errors.EngineError, match="ValueError: in main"):
        cluster2.torchrun(bad_script)
    check_usable(cluster2)
    assert cluster2.torchrun(script)[0][0] == 2.0


@pytest.mark.slow
def test_run_continues_after_a_script(cluster2):
    run = train(cluster2, steps=1_000_000)
    assert [total for total, _ in cluster2.torchrun(script)] == [2.0, 2.0]
    moved = threading.Event()
    step = run.status.step
    run.subscribe(lambda: run.status.step > step + 10 and moved.set())
    assert moved.wait(30)
    run.stop()
    assert run.exception is None


# -- files and modules -----------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import dtkit, helper

dist.init_process_group("gloo")
total = torch.tensor([float(helper.SCALE)])
dist.all_reduce(total)
dtkit.log(total=total, nothing=float("nan"))
print("arguments", *sys.argv[1:], "in", os.getcwd(), "total", total.item())
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a script and its helper; the working directory is another one."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("SCALE = 2")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "scripts"


def run_to_end(cluster: dtkit.Cluster, *command: Any) -> Task:
    task = cluster.submit(*command)
    task.wait(60)
    return task


def test_file_runs_with_its_arguments_and_helpers_in_the_working_directory(cluster2: dtkit.Cluster, folder: Path):
    task = run_to_end(cluster2, "scripts/train.py", "--epochs", 3)
    assert task.result() == [0, 0]
    assert sorted(task.output) == [(rank, f"arguments --epochs 3 in {folder.parent} total 4.0") for rank in (0, 1)]
    assert [(row["rank"], row["total"]) for row in sorted(task.rows, key=lambda row: row["rank"])] == [(0, 4), (1, 4)]
    (folder / "helper.py").write_text("SCALE = 5")
    assert "total 10.0" in run_to_end(cluster2, folder / "train.py").output[0][1]
    assert cluster2.run(lambda: "helper" in __import__("sys").modules) == [False, False]


def test_progress_bar_of_a_script_is_visible_before_its_line_ends(cluster2: dtkit.Cluster, folder: Path):
    (folder / "t.py").write_text(
        "import pathlib, sys, threading\n"
        "for k in range(3):\n"
        "    print(f'\\r{k} of 3', end='', flush=True)\n"
        "while not pathlib.Path('go').exists():\n"
        "    threading.Event().wait(0.05)\n"
        "print('\\r3 of 3')\n"
    )
    task, seen = cluster2.submit(folder / "t.py"), threading.Event()
    task.subscribe(lambda: task.progress == {0: "2 of 3", 1: "2 of 3"} and seen.set())
    assert seen.wait(30) or task.progress == {0: "2 of 3", 1: "2 of 3"}
    assert "[1] 2 of 3" in repr(task)
    (folder.parent / "go").touch()
    assert task.result(30) == [0, 0]
    assert sorted(task.output) == [(0, "3 of 3"), (1, "3 of 3")]


def test_module_runs_as_with_python_m(cluster2: dtkit.Cluster, folder: Path):
    (folder / "__init__.py").touch()
    (folder / "main.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])")
    task = run_to_end(cluster2, "-m", "scripts.main", "x")
    assert [line for _, line in task.output] == ["__main__ scripts ['x']"] * 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        slow("sys.exit(3)", "t.py ended with exit code 3"),
        slow("sys.exit('no data')", "t.py ended with exit code 1"),
        ("raise ValueError('broken')", "t.py ended with exit code 1: ValueError: broken"),
        slow("os.kill(os.getpid(), 9)", "t.py ended with the signal SIGKILL"),
    ],
)
def test_failing_rank_ends_the_others_at_once(
    cluster2: dtkit.Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
):
    """The other rank would wait for a day, and ranks of other calls for an hour."""
    monkeypatch.setattr(timeouts, "FAILURE_GRACE_S", 3600.0)
    (folder / "t.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1':\n    print('before')\n    {code}\ntime.sleep(86400)"
    )
    with pytest.raises(dtkit.errors.EngineError) as caught:
        run_to_end(cluster2, folder / "t.py")
    assert (caught.value.cause.rank, caught.value.cause.message) == (1, message)
    assert "before" in caught.value.cause.traceback or "ValueError" in caught.value.cause.traceback
    assert list_scripts("/t.py") == []
    check_usable(cluster2)


@pytest.mark.slow
def test_exit_with_0_is_a_success(cluster2: dtkit.Cluster, folder: Path):
    (folder / "t.py").write_text("import sys; sys.exit(0)")
    assert cluster2.torchrun(folder / "t.py") == [0, 0]
    assert cluster2.torchrun(exit_with_0) == [None, None]


def exit_with_0() -> None:
    raise SystemExit(0)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(86400)  # stubborn child"])
print("ready", flush=True)
time.sleep(86400)
"""


def start_stubborn(cluster: dtkit.Cluster, folder: Path) -> Task:
    (folder / "stubborn.py").write_text(STUBBORN)
    task, ready = cluster.submit(folder / "stubborn.py"), threading.Event()
    task.subscribe(lambda: len(task.output) == 2 and ready.set())
    assert ready.wait(30) or len(task.output) == 2
    return task


def list_scripts(name: str) -> list[psutil.Process]:
    """Return the processes whose command line has this name."""
    processes = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in processes if any(name in part for part in p.cmdline())]


def test_cancel_ends_whatever_the_script_does_within_five_seconds(cluster2: dtkit.Cluster, folder: Path):
    task = start_stubborn(cluster2, folder)
    assert len(list_scripts("stubborn")) == 4
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(dtkit.errors.EngineError, match="KeyboardInterrupt"):
        task.result(20)
    assert time.monotonic() - begun < 5
    assert task.cancelled()
    assert list_scripts("stubborn") == []
    check_usable(cluster2)


LOOPING = """
import threading
def train():
    print("ready", flush=True)
    while True:
        threading.Event().wait(0.05)
train()
"""


def test_interrupted_script_says_where_it_was_without_tracebacks(cluster2: dtkit.Cluster, folder: Path, capfd: Any):
    (folder / "looping.py").write_text(LOOPING)
    task, ready = cluster2.submit(folder / "looping.py"), threading.Event()
    task.subscribe(lambda: len(task.output) == 2 and ready.set())
    pressing = threading.Thread(target=lambda: ready.wait(30) and os.kill(os.getpid(), signal.SIGINT))
    pressing.start()  # a process of a script takes longer to start than the wait below
    with pytest.raises(KeyboardInterrupt) as caught:
        task.display_and_wait()
    pressing.join(30)
    position = f"was in train, File {folder / 'looping.py'}, line 6: threading.Event().wait(0.05)"
    assert str(caught.value) == f"looping.py was interrupted: rank 0 {position}; rank 1 {position}"
    assert task.state == "interrupted"
    assert sorted(task.output) == [(0, "ready"), (1, "ready")]
    assert "Traceback" not in capfd.readouterr().out
    assert "KeyboardInterrupt" in str(task.exception.failures[0].traceback)
    check_usable(cluster2)


@pytest.mark.slow
def test_script_ends_with_its_engine(folder: Path):
    with dtkit.Cluster(2, threads=1) as cluster:
        task = start_stubborn(cluster, folder)
        scripts = [p for p in list_scripts("stubborn.py") if p.parent().pid == cluster.nodes[1].pid]
        os.kill(cluster.nodes[1].pid, signal.SIGKILL)
        assert psutil.wait_procs(scripts, timeout=10)[1] == []
        with pytest.raises(dtkit.errors.EngineError):
            task.result(30)
    assert list_scripts("stubborn.py") == []


@pytest.mark.slow
def test_models_of_the_engines_stay(cluster2: dtkit.Cluster, folder: Path):
    run = train(cluster2, steps=4)
    run.wait(60)
    cluster2.torchrun(folder / "train.py")
    run.extend(steps=4)
    run.wait(60)
    assert run.status.step == 8


# -- other libraries -------------------------------------------------------------------------------------------


def accelerate_script() -> tuple[int, list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(3, 2) * accelerator.process_index).mean())
    optimizer.step()
    return accelerator.num_processes, accelerator.unwrap_model(model).weight.flatten().tolist()


def fabric_script() -> tuple[int, list[float]]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(wrapped(torch.ones(3, 2) * fabric.global_rank).mean())
    optimizer.step()
    return fabric.world_size, wrapped.module.weight.flatten().tolist()


@pytest.mark.slow
def test_group_that_a_script_leaves_is_destroyed_after_the_environments_own_startup(
    cluster2: dtkit.Cluster, folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "sitecustomize.py").write_text("print('own startup')")
    (folder / "t.py").write_text(
        "import os, subprocess, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.destroy_process_group = lambda: print('destroyed', flush=True)\n"
        "path = os.environ['PYTHONPATH'] + os.pathsep + sys.path[0]\n"
        "subprocess.run([sys.executable, '-c', 'pass'], env={**os.environ, 'PYTHONPATH': path}, check=True)\n"
    )
    assert cluster2.torchrun(folder / "t.py") == [0, 0]
    output = capsys.readouterr().out
    assert output.count("destroyed") == output.count("own startup") == 2


def test_crash_after_the_function_returned_keeps_its_result(
    cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    def crash_at_exit() -> int:
        import atexit

        atexit.register(os.abort)
        return int(os.environ["RANK"])

    assert cluster2.torchrun(crash_at_exit) == [0, 1]
    assert "crash_at_exit returned, and its process then ended with the signal SIGABRT" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("main", [accelerate_script, fabric_script])
def test_scripts_of_other_libraries_run_and_average_gradients(cluster2, main):
    torch.manual_seed(0)
    expected = nn.Linear(2, 1)
    with torch.no_grad():
        expected.weight -= 0.1 * 0.5  # the mean over ranks of the inputs 0 and 1
    results = cluster2.torchrun(main)
    for world, weight in results:
        assert world == 2
        assert weight == pytest.approx(expected.weight.flatten().tolist(), abs=1e-6)
    check_usable(cluster2)
