"""A training's operations per sample, and their rate as a share of the devices' peak (MFU).

Model FLOPs utilization (Chowdhery et al., PaLM, 2022) counts the model's own forward and backward.
Operations that activation checkpointing repeats don't count.
"""

from __future__ import annotations

import dataclasses

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes

EFFICIENCY_STEPS = 20
"""Last steps whose speed counts, as for the throughput in views."""

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense bf16 operations per second of tensor cores by the datasheets (fp16 for V100 and T4), the longest name first."""


def find_peak_flops(device_name: str) -> float | None:
    """Return the peak of a GPU by its name, such as "NVIDIA H200"; None for a device outside the table."""
    words = device_name.replace("-", " ").split()
    for name, peak in PEAK_FLOPS.items():
        if all(word in words for word in name.split()):
            return peak
    return None


@dataclasses.dataclass(frozen=True)
class Workload:
    """Operations and tokens of one sample, and the device of rank 0."""

    flops_per_sample: float
    """Of forward and backward; 0 if unknown."""
    tokens_per_sample: int
    """Length of a sample that is a sequence of token ids; 0 for other samples."""
    device_name: str
    note: str = ""
    """Reason why the operations are unknown."""


@suggest_attributes("efficiency")
@explain_arguments
@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A workload at a speed. `mfu` is None if the peak of the device or the operations are unknown."""

    workload: Workload
    samples_per_s: float
    num_devices: int

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second on all devices; None if a sample is not a sequence of token ids."""
        return self.workload.tokens_per_sample * self.samples_per_s or None

    @property
    def flops_per_s(self) -> float | None:
        """Operations per second on all devices."""
        return self.workload.flops_per_sample * self.samples_per_s or None

    @property
    def mfu(self) -> float | None:
        """Share of the peak of all devices."""
        peak = find_peak_flops(self.workload.device_name)
        if peak is None or self.flops_per_s is None:
            return None
        return self.flops_per_s / (peak * self.num_devices)

    @property
    def mfu_note(self) -> str:
        """Return a text on the peak, or why there is no MFU."""
        if self.workload.note:
            return self.workload.note
        peak = find_peak_flops(self.workload.device_name)
        if peak is None:
            return f"no MFU: the peak of {self.workload.device_name} is not known; cluster.benchmark() measures it"
        return f"of {self.num_devices} x {peak / 1e12:,.0f} TFLOP/s ({self.workload.device_name}, dense bf16)"

    def __repr__(self) -> str:
        parts = [f"{formatting.format_rate(self.samples_per_s)} samples/s"]
        if self.tokens_per_s is not None:
            parts.append(f"{formatting.format_rate(self.tokens_per_s)} tokens/s")
        if self.flops_per_s is not None:
            parts.append(f"{format_flops(self.flops_per_s)}/s, {format_flops(self.workload.flops_per_sample)} a sample")
        mfu = "" if self.mfu is None else f"MFU {formatting.format_percent(self.mfu)} "
        return f"{', '.join(parts)}; {mfu}{self.mfu_note}"


def format_flops(count: float) -> str:
    """Return operations with a unit: ``48 FLOP``, ``1.2 GFLOP``, ``35 TFLOP``."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}FLOP"
    return f"{count:.3g} FLOP"
