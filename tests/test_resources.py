"""Cores, memory and GPUs of a machine, read from file trees like those in containers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from dtkit._util import resources

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def big_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * GB, available=200 * GB))


V2 = {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
    "sys/fs/cgroup/pod/box/memory.current": "1000000000\n",
    "sys/fs/cgroup/pod/memory.max": "2000000000\n",
    "sys/fs/cgroup/pod/memory.current": "1500000000\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 900000000\ninactive_file 400000000\n",
}

V1 = {
    "proc/self/cgroup": "12:pids:/a\n5:memory:/a/b\n4:cpu,cpuacct:/a/b\n0::/\n",
    "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "390000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "100\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000000000\n",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "3000000000\n",
    "sys/fs/cgroup/memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 500000000\n",
}


@pytest.mark.usefixtures("big_host")
@pytest.mark.parametrize(
    ("files", "cores", "total", "free"),
    [
        (V2, 2, 2_000_000_000, 900_000_000),
        (V1, 3, 4_000_000_000, 1_500_000_000),
        ({}, 64, 256 * GB, 200 * GB),
        # A container whose path is the host's: the folder it sees is its own.
        (
            {
                "proc/self/cgroup": "0::/docker/0123\n",
                "sys/fs/cgroup/cpu.max": "50000 100000",
                "sys/fs/cgroup/memory.max": "1000000000",
                "sys/fs/cgroup/memory.current": "300000000",
            },
            1,
            1_000_000_000,
            700_000_000,
        ),
    ],
    ids=["v2", "v1", "no cgroup", "host's path"],
)
def test_the_tightest_limit_of_all_parent_cgroups_counts(
    tmp_path: Path, files: dict[str, str], cores: int, total: int, free: int
) -> None:
    root = tree(tmp_path, files)
    assert resources.count_cores(root) == cores
    assert resources.read_memory(root) == resources.HostMemory(total, free)


def test_cpu_affinity_limits_the_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert resources.count_cores(tree(tmp_path, V2)) == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert resources.count_cores(tmp_path / "nothing here") == 8


def test_free_memory_is_never_more_than_the_host_has_nor_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, V2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=GB, available=GB // 10))
    assert resources.read_memory(root) == resources.HostMemory(GB, GB // 10)
    (root / "sys/fs/cgroup/pod/memory.current").write_text("9000000000")
    assert resources.read_memory(root).free == 0


def test_this_machine_has_plausible_cores_and_memory() -> None:
    found = resources.read_memory()
    assert 1 <= resources.count_cores() <= (os.cpu_count() or 1)
    assert 0 < found.free <= found.total <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0,2", 2),
        ("1,-1,2", 1),
        ("0,7", 1),
        ("0,0", 0),
        ("GPU-abc,MIG-def", 2),
    ],
)
def test_gpus_are_counted_from_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    names = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
    root = tree(tmp_path, {f"dev/{name}": "" for name in names})
    monkeypatch.setattr(resources, "_torch_has_cuda", lambda: True)
    assert resources.count_gpus(root, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count
    monkeypatch.setattr(resources, "_torch_has_cuda", lambda: False)
    assert resources.count_gpus(root, {}) == 0


@pytest.mark.parametrize(
    ("version", "source", "expected"),
    [
        ("2.13.0+cpu", "cuda = '13.0'", False),
        ("2.13.0", "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip = None", False),
        ("2.13.0", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", True),
    ],
)
def test_cuda_support_of_torch_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, source: str, *, expected: bool
) -> None:
    tree(tmp_path, {"torch/version.py": source, "torch/__init__.py": ""})
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert resources._torch_has_cuda.__wrapped__() is expected


@pytest.mark.parametrize(
    ("free", "cores", "environ", "engines"),
    [
        (100 * GB, 64, {}, resources.MAX_DEFAULT_ENGINES),
        (100 * GB, 2, {}, 2),
        (100 * GB, 64, {"BINDER_SERVICE_HOST": "x"}, 2),
        (100 * GB, 1, {"BINDER_REPO_URL": "x"}, 2),
        (resources.NOTEBOOK_BYTES + 2 * resources.ENGINE_BYTES, 64, {}, 2),
        (resources.NOTEBOOK_BYTES + 2 * resources.ENGINE_BYTES - 1, 64, {"BINDER_REPO_URL": "x"}, 1),
        (0, 64, {}, 1),
    ],
)
def test_default_engines_follow_memory_cores_binder_and_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    cores: int,
    environ: dict[str, str],
    engines: int,
) -> None:
    monkeypatch.setattr(resources, "read_memory", lambda _: resources.HostMemory(256 * GB, free))
    monkeypatch.setattr(resources, "count_cores", lambda _: cores)
    assert resources.compute_default_engines(tmp_path, environ) == engines
    monkeypatch.setattr(resources, "count_gpus", lambda *_: 8)
    assert resources.compute_default_engines(tmp_path, environ) == 8


def test_max_engines_leaves_room_for_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "read_memory", lambda _: resources.HostMemory(4 * GB, 2 * GB))
    assert resources.compute_max_engines(tmp_path) == (2 * GB - resources.NOTEBOOK_BYTES) // resources.ENGINE_BYTES
    monkeypatch.setattr(resources, "read_memory", lambda _: resources.HostMemory(4 * GB, 1))
    assert resources.compute_max_engines(tmp_path) == 0


def test_reading_host_resources_does_not_import_torch() -> None:
    code = (
        "import sys; from dtkit._util import resources; resources.compute_default_engines(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_processor_is_named_by_the_kernel_or_by_python(tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel name\t: Example CPU 3 GHz\nflags\t: a b\n\nmodel name\t: Example CPU 3 GHz\n"
    assert resources.name_processor(tree(tmp_path / "named", {"proc/cpuinfo": text})) == "Example CPU 3 GHz"
    assert resources.name_processor(tmp_path / "without") == platform.processor()
