"""Parameter averaging: ranks train by themselves for some steps, and then take the mean of their parameters.

Also called local SGD (Stich, ICLR 2019) or federated averaging (McMahan et al., AISTATS 2017). The mean is weighted by
the samples that each rank has seen since the last one. It sends the parameters once in `every` steps, where data
parallelism sends as many gradients in each. With `every=1` and plain SGD both are the same up to rounding.

With an outer optimiser it is DiLoCo (Douillard et al., 2023): the way from the parameters after the last averaging to
the new mean counts as minus a gradient, and the outer optimiser makes a step along it. Each rank keeps the state of its
own (inner) optimiser throughout.

Between two averagings ranks are not equal, and only each rank knows whether its own gradients are finite. One that is
not stands still until the next averaging, where all ranks hear of it and stop together, before they average.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from dtkit.planning.cost_model import Cost, ring_bytes
from dtkit.strategies import gradients
from dtkit.strategies.base import SHOWN, Forward, Outcome, Setting, Strategy, Worker, make_optimizer
from dtkit.strategies.options import check_count, check_flag, check_positive, check_rate
from dtkit.strategies.replicated import Replica, Tally, evaluating, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import Microscope
    from dtkit.engine.state.capture import Archive
    from dtkit.planning.cost_model import Benchmark, Facts
    from dtkit.strategies.loss import Objective
    from dtkit.types import Fingerprint


@dataclasses.dataclass(frozen=True)
class OuterSGD:
    """The outer optimiser of DiLoCo; its paper recommends these defaults. ``OuterSGD(1.0, 0.0)`` is plain averaging."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Refuse what torch would refuse on the engines."""
        check_rate("lr", self.lr, usual=0.7)
        check_flag("nesterov", self.nesterov)
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float):
            raise TypeError(f"momentum={self.momentum!r}; it must be a number, such as momentum=0.9")
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum={self.momentum}; it must be at least 0 and less than 1. Usual is momentum=0.9; 0 is for none"
            )

    def make(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """An optimiser over these parameters."""
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=nesterov)


@dataclasses.dataclass(frozen=True, repr=False)
class ParameterAveraging(Strategy):
    """Each rank trains on its own samples; parameters are averaged over ranks after every `every` steps.

    Parameters
    ----------
    every
        Steps from one averaging to the next.
    outer
        ``dtkit.OuterSGD(lr, momentum, nesterov)`` for DiLoCo; plain averages without.
    clip_norm
        Largest norm of a rank's own gradient.

    """

    every: int = dataclasses.field(default=8, metadata=SHOWN)
    outer: OuterSGD | None = None
    clip_norm: float | None = None

    explains = False  # no gradients are all-reduced

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_count("every", self.every)
        check_positive("clip_norm", self.clip_norm)
        if self.outer is not None and not isinstance(self.outer, OuterSGD):
            raise TypeError(f"outer={self.outer!r}; it must be a dtkit.OuterSGD, or left out for plain averages")

    def cost(self, facts: Facts, benchmark: Benchmark) -> Cost:
        """An all-reduce of the parameters once in `every` steps, for which a flat copy of them is made.

        (Such a large one doesn't fit into the pieces of memory that freed activations leave, so it comes on top.) An
        outer optimiser keeps the parameters of the last averaging and its momentum, and for a moment the way from them.
        """
        kept = 0 if self.outer is None else facts.gradients * (1 + (self.outer.momentum > 0))
        passing = 1 + (self.outer is not None)
        return Cost.of_replica(
            facts,
            state=facts.state + kept,
            temporaries=max(facts.update, round(facts.activations.at(facts.rows)) + passing * facts.gradients),
            sent_bytes=ring_bytes(facts.gradients, benchmark.world_size) / self.every,
            exposed_s=benchmark.all_reduce_s(facts.gradients) / self.every,
        )

    def setup(
        self, model: torch.nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting
    ) -> Worker:
        """A replica on this rank; or, alone, one for each shard. The parameters must be equal on all ranks already."""
        model = model.to(setting.device)
        if setting.group is None and len(setting.shards) > 1:
            return _Simulated(self, model, objective, optimizer, setting)
        return _Local(self, model, objective, make_optimizer(optimizer, model), setting)


class _Local(Replica):
    """One rank's copy of the model, on its own between two averagings."""

    def __init__(
        self,
        strategy: ParameterAveraging,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        setting: Setting,
    ) -> None:
        super().__init__(model, objective, optimizer, setting, clip_norm=strategy.clip_norm)
        self._every, self._steps = strategy.every, 0
        self._weight = 0.0  # what this rank's parameters count for in the next mean
        self._broken = False  # a gradient was not finite since the last averaging
        self._broken_mean: torch.Tensor | None = None  # and this was the loss then
        self._asked = False  # for a fingerprint, which the next averaging takes
        self._print: Fingerprint | None = None
        self._outer = _Outer(strategy.outer, self._parameters) if strategy.outer is not None else None

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], _microscope: Microscope | None = None
    ) -> Outcome:
        """A step of this rank's own; the last of every `every` ends with the mean of all ranks' parameters."""
        tally = self._differentiate(batches, sum(counts[s] for s in self._setting.shards))
        averaging = (self._steps + 1) % self._every == 0
        norm = self._norm()
        healthy = (math.isfinite(norm) or self._all_finite()) and not self._broken
        if averaging and self._group is not None:
            self._phases.enter("sync")
            healthy = not self._group.any(not healthy)
        if averaging and not healthy:
            mean = self._broken_mean if self._broken else tally.mean
            self._broken = False
            return Outcome(mean, tally.weight, finite=False, norm=norm)
        if not (healthy or self._broken):
            self._broken_mean = tally.mean
        self._broken = not healthy
        if healthy and batches:
            self._update()
        self._weight += float(tally.weight)
        self._steps += 1
        self.outcome = self._outcome(tally, counts, finite=True, norm=norm)
        if averaging:
            self._average()
        return self.outcome

    def _differentiate(self, batches: Sequence[tuple[int, Any]], samples: int) -> Tally:
        """Gradients of the mean over this rank's own samples."""
        self._clear()
        tally = Tally(samples)
        for count, batch in batches:
            self._phases.enter("forward")
            loss = tally.add(*self._loss(self._model, batch), count)
            self._phases.enter("backward")
            self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        if isinstance(tally.weight, torch.Tensor) and float(tally.weight):
            gradients.scale(self._gradients(), 1 / tally.weight)
        return tally

    @torch.no_grad()
    def _average(self) -> None:
        """Give every rank the mean of all ranks' parameters, in one flat all-reduce; or the outer optimiser's step."""
        flat = torch.cat([self._parameters[0].new_tensor([self._weight]), *(p.reshape(-1) for p in self._parameters)])
        mean = flat[1:]
        if self._group is not None:
            self._phases.enter("sync")
            mean.mul_(self._weight)
            self._group.all_reduce(flat)  # the weight travels along as one number more
            if flat[0]:
                mean.div_(flat[0])
            else:  # no sample anywhere: all are as they were
                mean = self.flat
        self._phases.enter("update")
        self.take_mean(mean)
        if self._asked:
            self._print, self._asked = super().fingerprint(), False

    @torch.no_grad()
    def take_mean(self, flat: torch.Tensor) -> None:
        """Go on from this mean of all ranks' parameters, one after the other in a flat tensor."""
        parts = torch.split(flat, [p.numel() for p in self._parameters])
        means = [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]
        if self._outer is not None:
            means = self._outer.step(means)
        for p, mean in zip(self._parameters, means, strict=True):
            p.copy_(mean)
        self._weight = 0.0

    def exchange(self, archive: Archive) -> None:
        """A replica's state, with how far it is to the next averaging, and the outer optimiser's."""
        super().exchange(archive)
        self._steps = archive.value("averaging steps", self._steps)
        self._weight = archive.own("averaging weight", self._weight, lambda each: sum(each) / archive.world_size)
        if self._outer is not None:
            names = [name for name, p in self._model.named_parameters() if p.requires_grad]
            self._outer.exchange(archive, names, self._parameters)

    def _exchange_parameters(self, archive: Archive) -> None:
        """Each rank has its own; on another number of ranks all go on from their mean."""
        named = self._named()
        archive.differing("model", named, self._weight)
        archive.optimizer("optimizer", self.optimizer, named, own=True)

    @property
    def weight(self) -> float:
        """What this rank's parameters count for in the next mean."""
        return self._weight

    @property
    def flat(self) -> torch.Tensor:
        """This rank's parameters, one after the other."""
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])

    @contextlib.contextmanager
    def whole(self) -> Iterator[torch.nn.Module]:
        """The mean of all ranks' models as they stand, while it lasts."""
        with super().whole() as model, self._averaged(self._parameters, self._weight):
            yield model

    def fingerprint(self) -> Fingerprint | None:
        """Parameters are equal just after an averaging only: now, or as they were at one since this was asked first."""
        if self._steps % self._every == 0:
            return super().fingerprint()
        found, self._print, self._asked = self._print, None, True
        return found


class _Outer:
    """The outer optimiser and the parameters that it holds: those after the last averaging."""

    def __init__(self, how: OuterSGD, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        self._optimizer = how.make(self._parameters)

    @torch.no_grad()
    def exchange(self, archive: Archive, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Its state; where none was saved, it begins at these parameters."""
        named = dict(zip(names, self._parameters, strict=True))
        if archive.tensors("outer", named):
            archive.optimizer("outer optimizer", self._optimizer, named)
        else:
            for mine, p in zip(self._parameters, parameters, strict=True):
                mine.copy_(p)

    def step(self, means: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The way from the old parameters to the mean is minus a gradient; returns the parameters after the step."""
        for p, mean in zip(self._parameters, means, strict=True):
            p.grad = p.detach() - mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [p.detach() for p in self._parameters]


class _Simulated(Worker):
    """All ranks in one process, a model each: what `verify` compares with."""

    by_shard = True

    def __init__(
        self,
        strategy: ParameterAveraging,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: Callable[..., Any],
        setting: Setting,
    ) -> None:
        self.model = self._model = model
        self._every, self._steps, self._objective = strategy.every, 0, objective
        self._ranks = []
        for shard in setting.shards:
            own = copy.deepcopy(model)
            alone = dataclasses.replace(setting, shards=[shard])
            lonely = dataclasses.replace(strategy, every=2**62)  # the mean is taken here
            self._ranks.append(_Local(lonely, own, objective, make_optimizer(optimizer, own), alone))
        self.optimizer = self._ranks[0].optimizer

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], _microscope: Microscope | None = None
    ) -> Outcome:
        """A step of each rank, on one batch for each shard (None where it has no sample)."""
        outcomes = []
        for rank, (count, batch) in zip(self._ranks, batches, strict=True):
            for mine, first in zip(rank.optimizer.param_groups, self.optimizer.param_groups, strict=True):
                mine.update(
                    {name: value for name, value in first.items() if name != "params"}
                )  # as a scheduler left it
            outcomes.append(rank.step([(count, batch)] if count else [], counts))
        self._steps += 1
        if self._steps % self._every == 0:
            mean = self._mean()
            for rank in self._ranks:
                rank.take_mean(mean)
        weight = sum(float(o.weight) for o in outcomes)
        losses = [o.loss * (float(o.weight) / weight) for o in outcomes if o.loss is not None]
        loss = torch.stack(losses).sum() if losses else None
        return Outcome(loss, weight, all(o.finite for o in outcomes), float("nan"))

    def _mean(self) -> torch.Tensor:
        total = sum(rank.weight for rank in self._ranks)
        return torch.stack([rank.flat * (rank.weight / total) for rank in self._ranks]).sum(0)

    def regroup(self, group: Group) -> None:
        """It has no group."""

    def pieces(self) -> dict[str, Any]:
        """The mean of the models."""
        self._take_mean()
        return {name: kept(value) for name, value in self._model.state_dict().items()}

    @contextlib.contextmanager
    def forwards(self) -> Iterator[Forward]:
        """Of the mean of the models."""
        self._take_mean()
        with evaluating(self._model):
            yield lambda batch: self._objective.predict(self._model, batch)

    @torch.no_grad()
    def _take_mean(self) -> None:
        mean = self._mean() if any(r.weight for r in self._ranks) else self._ranks[0].flat
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        for p, part in zip(trainable, torch.split(mean, [p.numel() for p in trainable]), strict=True):
            p.copy_(part.view_as(p))
