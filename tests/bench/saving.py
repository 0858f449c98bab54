"""Costs of checkpoints: how long training pauses for one, and how many steps it takes meanwhile.

Each rank writes its half of parameters and momentum. *Background* saves are those of a running run: the state is
copied, and a thread writes the copy. *Blocking* saves are those of a paused run, which continues when everything is on
disk. The time of a training includes its last checkpoint.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import dtkit
from tests.bench.pairs import Sample, alternate, ratios, report
from tests.bench.work import SAVED_50, SAVED_200, WORKS, optimizer

if TYPE_CHECKING:
    from tests.bench.work import Work

EVERY, TIMES = 20, 5
"""Steps between saves, and number of measurements of each kind."""
_LIMIT_S = 600.0


def saving() -> bool:
    """Measure pauses against writes, and print the steps per second, which depend on the number of free cores."""
    met = True
    for name in (SAVED_50, SAVED_200):
        with dtkit.Cluster(2, threads=1) as cluster, tempfile.TemporaryDirectory() as folder:
            training = _Training(cluster, WORKS[name], Path(folder))
            met &= training.measure_pauses(name)
            training.print_speeds(name)
    return met


@dataclasses.dataclass(frozen=True)
class _Training:
    cluster: dtkit.Cluster
    work: Work
    folder: Path

    def measure_pauses(self, name: str) -> bool:
        """Measure how long training pauses for a save."""
        run = self._run(steps=1_000_000)
        run.step(self.work.warm)
        background, blocking = alternate(lambda: self._save_in_background(run), lambda: self._save_blocking(run), TIMES)
        run.stop()
        print(f"  {name}: training pauses for {background} s with background saves, {blocking} s with blocking saves")
        return report(
            f"{name}: pause of background saves against blocking ones", ratios(background, blocking), most=0.5
        )

    def _save_in_background(self, run: dtkit.Run) -> float:
        run.resume()
        saved = run.save(self.folder, keep_last=1)
        run.pause()
        return saved.blocked_s

    def _save_blocking(self, run: dtkit.Run) -> float:
        start = time.perf_counter()
        run.save(self.folder, keep_last=1)
        return time.perf_counter() - start

    def print_speeds(self, name: str) -> None:
        """Print the steps per second without saves and with both kinds."""
        ways = {
            "none": self._time_without_saves,
            "background": self._time_background_saves,
            "blocking": self._time_blocking_saves,
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for k in range(TIMES):
            order = list(ways) if k % 2 == 0 else list(reversed(ways))
            for way in order:
                rates[way].append(self.work.steps / ways[way]())
            print("  steps/s:", *(f"{way} {values[-1]:.2f}" for way, values in rates.items()), flush=True)
        for way, values in rates.items():
            print(f"  {name}, {way}: {Sample(values)} steps/s")
        none, background, blocking = (Sample(values) for values in rates.values())
        print(f"  {name}: steps/s with background saves against blocking ones: {ratios(background, blocking)}")
        print(f"  {name}: steps/s with background saves against none: {ratios(background, none)}", flush=True)

    def _time_without_saves(self) -> float:
        return _time_steps(self._run(), self.work.warm)

    def _time_background_saves(self) -> float:
        return _time_steps(self._run(checkpoint_every=EVERY, checkpoint_dir=self.folder, keep_last=1), self.work.warm)

    def _time_blocking_saves(self) -> float:
        run = self._run()
        run.step(self.work.warm)
        start = time.perf_counter()
        while run.status.step < self.work.steps + self.work.warm:
            run.step(EVERY)
            run.save(self.folder, keep_last=1)
        return time.perf_counter() - start

    def _run(self, **options: Any) -> dtkit.Run:
        """Create a run that has not begun."""
        arguments = {"steps": self.work.steps + self.work.warm} | options
        arguments |= {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": self.work.batch}
        return self.cluster.train(self.work.model(), self.work.data(), start=False, **arguments)


def _time_steps(run: dtkit.Run, warm: int) -> float:
    """Return the seconds of all steps after the warm-up, until the last checkpoint is on disk."""
    run.step(warm)
    run._driver.actions.checkpoint.manager.join()
    start = time.perf_counter()
    run.resume()
    run.wait(_LIMIT_S)
    return time.perf_counter() - start
