"""What checkpoints cost: how long training stands still for one, and how many steps it takes meanwhile.

Saved are parameters and momentum, each rank writing its half. *Beside* is what a run does (``checkpoint_every=``, and
``run.save`` while it runs): the state is copied, and a thread writes the copy. *Standing still* is the same save of a
paused run, which goes on when all of it is on the disk. Seconds of a training are until its last checkpoint is, too.
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
"""Steps from one save to the next, and how often each way is taken."""
_LIMIT_S = 600.0


def saving() -> bool:
    """Stands against writes. And steps per second, which are told, since they follow from how many cores are free: with
    saves beside the training, standing still for them, without any.
    """
    met = True
    for name in (SAVED_50, SAVED_200):
        with dtkit.Cluster(2, threads=1) as cluster, tempfile.TemporaryDirectory() as folder:
            one = _Training(cluster, WORKS[name], Path(folder))
            met &= one.stands(name)
            one.steps(name)
    return met


@dataclasses.dataclass(frozen=True)
class _Training:
    cluster: dtkit.Cluster
    work: Work
    folder: Path

    def stands(self, name: str) -> bool:
        """How long training stands still for a save."""
        run = self._run(steps=1_000_000)
        run.step(self.work.warm)
        beside, still = alternate(lambda: self._beside(run), lambda: self._still(run), TIMES)
        run.stop()
        print(f"  {name}: training stands for {beside} s beside a save, for {still} s until it is written")
        return report(
            f"{name}: standing still beside a save, of standing until it is written", ratios(beside, still), most=0.5
        )

    def _beside(self, run: dtkit.Run) -> float:
        run.resume()
        saved = run.save(self.folder, keep_last=1)
        run.pause()
        return saved.blocked_s

    def _still(self, run: dtkit.Run) -> float:
        begun = time.perf_counter()
        run.save(self.folder, keep_last=1)
        return time.perf_counter() - begun

    def steps(self, name: str) -> None:
        """Steps per second."""
        ways = {"none": self._plain, "beside": self._saved, "still": self._stopped}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for k in range(TIMES):
            order = list(ways) if k % 2 == 0 else list(reversed(ways))
            for way in order:
                rates[way].append(self.work.steps / ways[way]())
            print("  steps/s:", *(f"{way} {found[-1]:.2f}" for way, found in rates.items()), flush=True)
        for way, found in rates.items():
            print(f"  {name}, {way}: {Sample(found)} steps/s")
        none, beside, still = (Sample(found) for found in rates.values())
        print(f"  {name}: steps/s with saves beside, of those standing still for them: {ratios(beside, still)}")
        print(f"  {name}: steps/s with saves beside, of those without any: {ratios(beside, none)}", flush=True)

    def _plain(self) -> float:
        return _seconds(self._run(), self.work.warm)

    def _saved(self) -> float:
        return _seconds(self._run(checkpoint_every=EVERY, checkpoint_dir=self.folder, keep=1), self.work.warm)

    def _stopped(self) -> float:
        run = self._run()
        run.step(self.work.warm)
        begun = time.perf_counter()
        while run.status.step < self.work.steps + self.work.warm:
            run.step(EVERY)
            run.save(self.folder, keep_last=1)
        return time.perf_counter() - begun

    def _run(self, **options: Any) -> dtkit.Run:
        """It stands before its first step."""
        how = {"steps": self.work.steps + self.work.warm} | options
        how |= {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": self.work.batch}
        return self.cluster.train(self.work.model(), self.work.data(), start=False, **how)


def _seconds(run: dtkit.Run, warm: int) -> float:
    """Of all steps but those to warm up, until all that is to be saved is on the disk."""
    run.step(warm)
    run._driver.actions.checkpoint.manager.join()
    begun = time.perf_counter()
    run.resume()
    run.wait(_LIMIT_S)
    return time.perf_counter() - begun
