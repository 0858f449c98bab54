"""Cores, memory and GPUs of this machine, and how many engines fit. Reads files, without torch.

In a container, /proc shows the host's cores and memory. Control groups have the container's limits. Version 2 keeps
`cpu.max` and `memory.max` in one tree; version 1 has a tree for each. Limits of parent groups apply too, so every level
up to the root is read. A group's usage includes the file cache, which the kernel releases on demand, so inactive file
pages count as free.

`root` is the folder with /proc, /sys and /dev; tests use their own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROOT = Path("/")

ENGINE_BYTES = 120_000_000
"""Memory that an engine on a CPU adds when it has trained a small model. Its libraries are the fork server's.

Eight engines and their nannies add 60 MB each to 300 MB of the fork server, as measured. The rest is for data.
"""

NOTEBOOK_BYTES = 800_000_000
"""Memory of Jupyter's server, a kernel with torch, the controller, the fork server, and the notebook's own data."""

MAX_DEFAULT_ENGINES = 4
"""Engines that are started by default: enough for every collective, few enough for a readable display."""

MAX_BINDER_ENGINES = 2
"""Engines on Binder, which has up to two cores and 1 to 2 GB."""


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Total and free bytes available to this container or host."""

    total: int
    free: int


def count_cores(root: Path = _ROOT) -> int:
    """Return the number of cores that this process may use, by its affinity and its cgroup quota; at least 1."""
    quotas = (_read_cpu_quota(group) for group in _list_cgroups(root, "cpu"))
    return max(1, min([_count_affinity(), *(int(quota) for quota in quotas if quota is not None)]))


def name_processor(root: Path = _ROOT) -> str:
    """Return the processor's name as the kernel gives it; empty if it is unknown."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _read_text(root / "proc/cpuinfo"), re.MULTILINE)
    return names[0].strip() if names else platform.processor()


def read_memory(root: Path = _ROOT) -> HostMemory:
    """Return the memory of the host, or of the tightest control group of this process."""
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
    """Return the free bytes of the host's swap space."""
    return int(psutil.swap_memory().free)


def trim_malloc() -> None:
    """Return freed memory to the system. Only glibc's malloc, which keeps it, needs this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def count_gpus(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of CUDA devices that an engine's torch could use.

    Asks torch if it is already loaded. Otherwise counts device files that CUDA_VISIBLE_DEVICES doesn't hide; none if
    the installed torch is a build without CUDA.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # missing while another thread imports torch
    if cuda is not None and root == _ROOT and environ is os.environ:
        return int(cuda.device_count())
    devices = [entry for entry in _list_folder(root / "dev") if re.fullmatch(r"nvidia\d+", entry.name)]
    if not devices or not _torch_has_cuda():
        return 0
    return _count_visible(len(devices), environ.get("CUDA_VISIBLE_DEVICES"))


def compute_max_engines(root: Path = _ROOT) -> int:
    """Return how many engines fit into the memory next to a notebook."""
    return max(0, read_memory(root).free - NOTEBOOK_BYTES) // ENGINE_BYTES


def compute_default_engines(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Return the default number of engines: one per GPU, else as many as cores and memory allow; at least 1."""
    devices = count_gpus(root, environ)
    if devices:
        return devices
    wanted = MAX_BINDER_ENGINES if is_on_binder(environ) else min(count_cores(root), MAX_DEFAULT_ENGINES)
    return max(1, min(wanted, compute_max_engines(root)))


def is_on_binder(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is a Binder session."""
    return "BINDER_SERVICE_HOST" in environ or "BINDER_REPO_URL" in environ


def find_loopback_interface() -> str:
    """Return the name of this host's loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return "lo" if (_ROOT / "proc").exists() else "lo0"


def _count_affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def _list_cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups for `controller`, from its own up to the root."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Some containers show the host's paths but lack the folder. Their own group is the base folder.
        group = base / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _read_cpu_quota(cgroup: Path) -> float | None:
    """Return the number of cores that the group may use; None without a limit."""
    fields = _read_text(cgroup / "cpu.max").split()
    if not fields:
        fields = [_read_text(cgroup / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = fields
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None  # "max" in version 2, -1 in version 1, no file in the root group
    return int(quota) / int(period)


def _read_reclaimable_bytes(cgroup: Path) -> int:
    """Return the bytes of file cache that the kernel takes back from the group on demand."""
    lines = _read_text(cgroup / "memory.stat").splitlines()
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _read_number(*files: Path) -> int | None:
    """Return the first integer in `files`; None if there is no limit."""
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
    """Count the entries of CUDA_VISIBLE_DEVICES, which CUDA reads up to the first one that isn't a device."""
    if visible_devices is None:
        return num_devices
    seen: list[str] = []
    for entry in visible_devices.split(","):
        name = entry.strip()
        is_device = name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < num_devices)
        if not is_device:
            break
        if name in seen:  # CUDA refuses a list that has an index twice
            return 0
        seen.append(name)
    return len(seen)


@functools.cache
def _torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA, by its files."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version.endswith("+cpu"):
        return False
    spec = importlib.util.find_spec("torch")  # without importing it
    origin = Path(spec.origin) if spec and spec.origin else None
    text = _read_text(origin.with_name("version.py")) if origin else ""
    return re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE) is None
