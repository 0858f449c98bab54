"""What this machine can carry: cores, memory, GPUs, and so how many engines. Reads files, imports no torch.

In a container the host's numbers mislead: /proc shows 64 cores and 256 GB, two cores and 2 GB are granted.
The grant is a control group's: version 2 keeps `cpu.max` and `memory.max` in one tree, version 1 has a tree
for cpu and one for memory. A limit on any group above the process's own binds too, so every level up to the
root is read. What a group has used includes the file cache, which the kernel gives back when asked: inactive
file pages count as free.

`root` is the folder that holds /proc, /sys and /dev; tests give their own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROOT = Path("/")

ENGINE_BYTES = 350_000_000
"""One engine that has trained a small model, and its nanny: 315 and 29 MiB were measured (as proportional set
size, which divides shared pages among those who share them)."""

NOTEBOOK_BYTES = 500_000_000
"""What there is besides engines: Jupyter's server 113 MiB, a kernel with torch 200, the controller 81; and
room for the notebook's own data."""

MAX_DEFAULT_ENGINES = 4
"""Engines that are started unasked, at most: enough to see every collective at work, few enough to read."""

MAX_BINDER_ENGINES = 2
"""Two cores and 2 GB at most, 1 GB promised: two engines and all the rest took 1.09 GB."""


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Bytes that processes of this container or host may use, and those still free."""

    total: int
    free: int


def count_cores(root: Path = _ROOT) -> int:
    """Processors that this process may keep busy: the smaller of affinity and cgroup quota, at least 1."""
    quotas = (_read_cpu_quota(group) for group in _list_cgroups(root, "cpu"))
    return max(1, min([_count_affinity(), *(int(quota) for quota in quotas if quota is not None)]))


def read_memory(root: Path = _ROOT) -> HostMemory:
    """Memory of the host, or of the tightest control group that holds this process."""
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    for group in _list_cgroups(root, "memory"):
        limit = _read_number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _read_number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            total = min(total, limit)
            free = min(free, limit - used + _read_reclaimable_bytes(group))
    return HostMemory(total, max(0, free))


def read_free_swap() -> int:
    """Free bytes of the host's swap space."""
    return int(psutil.swap_memory().free)


def trim_malloc() -> None:
    """Have malloc give back to the system what this process has freed: glibc keeps it, others have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def count_gpus(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """CUDA devices that an engine's torch could use.

    torch answers if it is loaded already; else the device files do, less what CUDA_VISIBLE_DEVICES hides, and
    none where the installed torch is a build without CUDA.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # none yet while another thread imports it
    if cuda is not None and root == _ROOT and environ is os.environ:
        return int(cuda.device_count())
    found = [entry for entry in _list_folder(root / "dev") if re.fullmatch(r"nvidia\d+", entry.name)]
    if not found or not _torch_has_cuda():
        return 0
    return _count_visible(len(found), environ.get("CUDA_VISIBLE_DEVICES"))


def compute_max_engines(root: Path = _ROOT) -> int:
    """Engines that memory carries beside a notebook; 0 where it is too small for one."""
    return max(0, read_memory(root).free - NOTEBOOK_BYTES) // ENGINE_BYTES


def compute_default_engines(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Engines to start when nobody says how many: one per GPU, else what cores and memory carry; never 0."""
    devices = count_gpus(root, environ)
    if devices:
        return devices
    wanted = MAX_BINDER_ENGINES if is_on_binder(environ) else min(count_cores(root), MAX_DEFAULT_ENGINES)
    return max(1, min(wanted, compute_max_engines(root)))


def is_on_binder(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a Binder session."""
    return "BINDER_SERVICE_HOST" in environ or "BINDER_REPO_URL" in environ


def _count_affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def _list_cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups for `controller`, from its own up to the root."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # A container that doesn't hide the host's paths has no such folder; there the base is its own group.
        group = base / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _read_cpu_quota(cgroup: Path) -> float | None:
    """Processors' worth of time that the group may use; None without a limit."""
    fields = _read_text(cgroup / "cpu.max").split()
    if not fields:
        fields = [_read_text(cgroup / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = fields
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max" in version 2, -1 in version 1, no file in the root group
    return int(quota) / int(period)


def _read_reclaimable_bytes(cgroup: Path) -> int:
    """File cache of the group that the kernel takes back when memory is asked for."""
    lines = _read_text(cgroup / "memory.stat").splitlines()
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _read_number(*files: Path) -> int | None:
    """The integer in the first of `files` that holds one; "max" is none, and version 1 has a huge number."""
    for file in files:
        text = _read_text(file).strip()
        if text.isdigit():
            return int(text)
    return None


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _count_visible(num_devices: int, visible_devices: str | None) -> int:
    """Devices left by CUDA_VISIBLE_DEVICES: CUDA reads the list up to its first entry that isn't a device."""
    if visible_devices is None:
        return num_devices
    seen: list[str] = []
    for entry in visible_devices.split(","):
        name = entry.strip()
        is_device = name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < num_devices)
        if not is_device:
            break
        if name in seen:  # an index given twice makes CUDA refuse them all
            return 0
        seen.append(name)
    return len(seen)


@functools.cache
def _torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, told from its files."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version.endswith("+cpu"):
        return False
    spec = importlib.util.find_spec("torch")  # finds it without running it
    origin = Path(spec.origin) if spec and spec.origin else None
    text = _read_text(origin.with_name("version.py")) if origin else ""
    return re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE) is None
