"""GPT-2 (124 M parameters, bf16) on one GPU: tokens per second and MFU next to a plain PyTorch loop.

Both processes keep their model on the device, and take windows of steps in turn. Without a GPU the model is tiny: that
proves that the part runs, not how fast it is. ``python -m tests.bench.gpu`` needs no package of the other parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import dtkit
from tests.bench.gpt import GPTS, optimizer
from tests.bench.pairs import PAIRS, Sample, alternate, ratios, report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.bench.gpt import Gpt

MIN_RATIO = 0.98
GPU_WINDOW_S, CPU_WINDOW_S, WARM_STEPS, MAX_STEPS = 3.0, 0.3, 12, 1_000_000
_LIMIT_S = 280.0
_PEAK_FLOPS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}  # dense bf16, from NVIDIA's data sheets
_HEADER = ("", "bare ms", "dtkit ms", "bare tokens/s", "dtkit tokens/s", "bare MFU", "dtkit MFU", "first step")


@dataclasses.dataclass(frozen=True)
class _Result:
    """Seconds of a step, by window."""

    mode: str
    measured: Sample
    bare: Sample
    first_step_s: float


def gpu() -> bool:
    """Compare the model as it is, and compiled."""
    name = "gpt2" if torch.cuda.is_available() else "tiny"
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU: a tiny model on the CPU"
    print(f"{device}, torch {torch.__version__}", flush=True)
    with dtkit.Cluster(1) as cluster:
        results = [_against_bare(cluster, name, mode) for mode in ("eager", "compiled")]
    _print_table(results, GPTS[name], _find_peak(device))
    rates = [(each.mode, _invert(each.measured), _invert(each.bare)) for each in results]
    met = [
        report(f"steps per second against a bare loop, {name}, {mode}", ratios(rate, bare), least=MIN_RATIO)
        for mode, rate, bare in rates
    ]
    return all(met)


def _against_bare(cluster: dtkit.Cluster, name: str, mode: str) -> _Result:
    print(f"{name}, {mode}", flush=True)
    with _start_bare(name, mode) as take_bare_window:
        begun = time.perf_counter()
        run = _start_run(cluster, GPTS[name], is_compiled=mode == "compiled")
        run.step(timeout=_LIMIT_S)
        first_step_s = time.perf_counter() - begun
        run.step(WARM_STEPS, timeout=_LIMIT_S)
        take_bare_window(WARM_STEPS)
        window_s = GPU_WINDOW_S if torch.cuda.is_available() else CPU_WINDOW_S
        steps = max(5, round(window_s * 5 / take_bare_window(5)))
        run.step(steps, timeout=_LIMIT_S)  # lets dispatches grow to their full length

        def take_window() -> float:
            start = time.perf_counter()
            run.step(steps, timeout=_LIMIT_S)
            return (time.perf_counter() - start) / steps

        measured, bare = alternate(take_window, lambda: take_bare_window(steps) / steps, PAIRS)
        run.stop()
    return _Result(mode, measured, bare, first_step_s)


def _start_run(cluster: dtkit.Cluster, gpt: Gpt, *, is_compiled: bool) -> dtkit.Run:
    tokens = gpt.tokens()
    options: dict[str, Any] = {"optimizer": optimizer, "batch_size": gpt.batch, "steps": MAX_STEPS, "start": False}
    strategy = dtkit.DataParallel(precision="bf16", compile=is_compiled)
    return cluster.train(gpt.model(), {"input_ids": tokens, "labels": tokens.clone()}, strategy=strategy, **options)


@contextlib.contextmanager
def _start_bare(name: str, mode: str) -> Iterator[Callable[[int], float]]:
    """Start the bare loop, and return a function that takes a number of steps and returns their seconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    if not torch.cuda.is_available():
        environment["OMP_NUM_THREADS"] = str(os.cpu_count())  # as dtkit sets it for one engine
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bare_gpt", name, mode],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

        def take_window(steps: int) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                errors.seek(0)
                raise RuntimeError(f"the reference failed:\n{errors.read()[-3000:]}")
            return float(answer)

        with process:  # it ends with its input
            yield take_window


def _invert(sample: Sample) -> Sample:
    return Sample([1 / value for value in sample.values])


def _find_peak(device: str) -> float | None:
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device), None)


def _print_table(results: list[_Result], gpt: Gpt, peak: float | None) -> None:
    flops = gpt.count_flops_per_token()
    rows: list[tuple[str, ...]] = [_HEADER]
    for each in results:
        medians = each.bare.median, each.measured.median
        rates = [gpt.tokens_per_step / seconds for seconds in medians]
        shares = ["-" if peak is None else f"{rate * flops / peak:.1%}" for rate in rates]
        cells = [*(f"{1000 * s:.2f}" for s in medians), *(f"{rate:,.0f}" for rate in rates), *shares]
        rows.append((each.mode, *cells, f"{each.first_step_s:.1f} s"))
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADER))]
    for row in rows:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


if __name__ == "__main__":
    sys.exit(0 if gpu() else 1)
