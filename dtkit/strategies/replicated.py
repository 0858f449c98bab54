"""A rank's whole copy of the model, and what every strategy with such copies does alike.

Exactness. With n_i of the B samples of a step on rank i, the gradient of the mean over all B samples is the *sum* over
ranks of  (n_i / B) grad_i : each rank scales its mean loss before backward, and gradients are added up. A loss that
returns (sum, weight) is differentiated as it is; the weights are added up over ranks meanwhile, and gradients divided
by their total. Both are linear, so a rank's samples may as well come in micro-batches.
"""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies import gradients
from dtkit.strategies.base import Forward, Outcome, Setting, Worker, entries
from dtkit.strategies.loss import MEAN, PAIR, Objective

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import Microscope
    from dtkit.engine.state.capture import Archive
    from dtkit.types import Fingerprint

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WORD, _PIECE = 8, 2**20  # bytes


class Tally:
    """Loss and weight of one rank's micro-batches in one step."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._sum: torch.Tensor | None = None
        self.weight: torch.Tensor | float = 0.0
        """What the loss counts for in the global mean; of no samples, 0."""
        self.form: int | None = None
        """MEAN or PAIR; None without a sample."""

    def add(self, loss: torch.Tensor, weight: torch.Tensor | None, count: int) -> torch.Tensor:
        """Take in a micro-batch's loss; returns what to differentiate: its part of the global mean, or of the sum."""
        self.form = MEAN if weight is None else PAIR
        part = loss.detach() if weight is not None else loss.detach() * count
        self._sum = part if self._sum is None else self._sum + part
        self.weight = self.weight + (float(count) if weight is None else weight.detach())
        return loss if weight is not None else loss * (count / self._samples)

    @property
    def mean(self) -> torch.Tensor | None:
        """The mean loss of this rank's samples."""
        return None if self._sum is None else self._sum / self.weight


class Replica(Worker):
    """One rank's copy of the model, with its optimiser. Subclasses say what is synchronised, and when."""

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        setting: Setting,
        *,
        clip_norm: float | None = None,
        precision: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.model = self._model = model
        self._objective, self._setting = objective, setting
        self._group, self._phases = setting.group, setting.phases
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._uniform = len({(p.dtype, p.device) for p in self._parameters}) == 1
        self._clip_norm, self._dtype = clip_norm, PRECISIONS.get(precision or "")
        self._scaler = None
        if precision == "fp16":  # torch's own first factor, 2**16, lets the first updates of small models overflow
            self._scaler = torch.amp.GradScaler(setting.device.type, init_scale=2.0**12)
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=setting.device))  # it must know its factor, even without samples
        self._form: int | None = None  # MEAN or PAIR: agreed upon in the first step of each generation of the group
        self._seen = 0  # samples that this rank's buffers (batch statistics) were made from

    def regroup(self, group: Group) -> None:
        """Go on in a new generation of the process group."""
        self._group = group
        self._form = None  # of a step that was broken off, some ranks may know it and others not

    # -- parts of a step --------------------------------------------------------------------------------------

    def _clear(self) -> None:
        for p in self._parameters:  # the optimiser need not hold all of them
            p.grad = None

    def _loss(self, module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._dtype is None:
            return self._objective(module, batch)
        with torch.autocast(self._setting.device.type, dtype=self._dtype):
            return self._objective(module, batch)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate: in fp16 larger by a factor that keeps small gradients from vanishing."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _announce(self, tally: Tally) -> torch.futures.Future[list[torch.Tensor]] | None:
        """Tell the other ranks this one's weight, where losses are pairs. The future has the total."""
        if self._form is None:
            self._phases.enter("sync")
            self._form = gradients.agree_on_form(tally.form, self._group)
        if self._form == MEAN:
            return None
        total = torch.as_tensor(tally.weight, dtype=torch.float64).to(self._setting.device, copy=True)
        if self._group is None:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result([total])
            return done
        return self._group.start_all_reduce(total)

    def _divide(self, total: torch.futures.Future[list[torch.Tensor]] | None) -> None:
        """Gradients of a sum, made into those of the weighted mean."""
        if total is not None:
            # waits: a collective, limited by the process group's timeout
            gradients.scale(self._gradients(), gradients.per_weight(total.wait()[0]))

    def _gradients(self) -> list[torch.Tensor]:
        """What lies on this rank of the gradients that there are."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def _sum_gradients(self, local: Sequence[torch.Tensor | None]) -> None:
        """Give each parameter the sum of all ranks' gradients."""
        for p, gradient in zip(self._parameters, gradients.summed(self._parameters, local, self._add_up), strict=True):
            p.grad = gradient

    def _add_up(self, flat: torch.Tensor) -> None:
        if self._group is not None:
            self._phases.enter("sync")
            self._group.all_reduce(flat)

    def _local_gradients(self, batches: Sequence[tuple[int, Any]], tally: Tally) -> list[torch.Tensor | None]:
        """This rank's part of the global gradient, past all hooks of the parameters; all None without a sample."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for count, batch in batches:
            self._phases.enter("forward")
            loss = tally.add(*self._loss(self._model, batch), count)
            self._phases.enter("backward")
            new = torch.autograd.grad(self._scaled(loss), self._parameters, allow_unused=True)
            dense = [g.to_dense() if g is not None and g.is_sparse else g for g in new]
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, dense, strict=True)]
        return found

    def _update(self) -> tuple[bool, float]:
        """Clip and update, unless a gradient is not finite. (whether all were, their norm before clipping)."""
        self._phases.enter("update")
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = self._norm()
        # The norm itself may have overflowed although every gradient is finite.
        finite = math.isfinite(norm) or self._all_finite()
        if finite and (factor := gradients.clipping(norm, self._clip_norm)) < 1:
            gradients.scale(self._gradients(), factor)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)  # takes no step where a gradient has overflowed, and lowers the factor
            self._scaler.update()
            finite = finite or self._scaler.get_scale() >= 1
        elif finite:
            self.optimizer.step()
        return finite, norm

    def _norm(self) -> float:
        """Of all gradients together. Asked for in every step, so it must be cheap: fused, and one number read."""
        found = [gradients.values(g) for g in self._gradients()]
        if not found:
            return 0.0
        if self._uniform:
            return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found))))  # noqa: SLF001 - as clip_grad_norm_ does
        return float(torch.nn.utils.get_total_norm(found))

    def _all_finite(self) -> bool:
        return all(bool(gradients.values(g).isfinite().all()) for g in self._gradients())

    def _outcome(self, tally: Tally, counts: Sequence[int], *, finite: bool, norm: float) -> Outcome:
        self._seen += sum(counts[s] for s in self._setting.shards)
        return Outcome(tally.mean, tally.weight, finite, norm)

    def _explained(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], microscope: Microscope | None
    ) -> Outcome:
        """One step in the open: local gradients, one explicit sum, the update. A rank may be without samples in it."""
        tally = Tally(sum(counts))
        local = self._local_gradients(batches, tally)
        total = self._announce(tally)
        self._sum_gradients(local)
        self._divide(total)
        if microscope is not None:
            # waits: a collective, limited by the process group's timeout
            divisor = 1.0 if total is None else float(total.wait()[0])
            self._show(microscope, tally, counts, local, divisor)
        finite, norm = self._update()
        if microscope is not None and finite:
            microscope.after_update(float(self.optimizer.param_groups[0]["lr"]))
        return self._outcome(tally, counts, finite=finite, norm=norm)

    def _show(
        self,
        microscope: Microscope,
        tally: Tally,
        counts: Sequence[int],
        local: Sequence[torch.Tensor | None],
        divisor: float,
    ) -> None:
        """What the step did so far: losses and gradients."""
        weight, scale = float(tally.weight), 1.0 if self._scaler is None else self._scaler.get_scale()
        microscope.loss(tally.mean, weight, weight / (sum(counts) if self._form == MEAN else divisor))
        microscope.local([None if g is None else g / (divisor * scale) for g in local])
        microscope.reduced([None if p.grad is None else p.grad / scale for p in self._parameters])
        if self._clip_norm is not None:
            microscope.clipped(gradients.clipping(self._norm() / scale, self._clip_norm))
        microscope.before_update()

    # -- all state --------------------------------------------------------------------------------------------

    def exchange(self, archive: Archive) -> None:
        """Parameters and optimiser; buffers and the samples that they were made from; the scale of fp16's loss."""
        self._exchange_parameters(archive)
        buffers, extra = entries(self._model)
        archive.differing("model", buffers, float(self._seen))
        archive.plain_entries(self._model, extra)
        self._seen = archive.own("seen", self._seen, lambda seen: sum(seen) // archive.world_size)
        if self._scaler is not None:
            archive.states("scaler", self._scaler, "the loss's scale")

    def _exchange_parameters(self, archive: Archive) -> None:
        """What is equal on all ranks that hold it."""
        named = self._named()
        archive.tensors("model", named)
        archive.optimizer("optimizer", self.optimizer, named)

    def _named(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that lie here, by all of their names."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    # -- the whole model --------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Any]:
        """The whole state dict from rank 0, or from whoever works alone."""
        with self.whole() as model:
            if self._group is not None and self._group.rank != 0:
                return {}
            return {name: kept(value) for name, value in model.state_dict().items()}

    @contextlib.contextmanager
    def forwards(self) -> Iterator[Forward]:
        """Of the model that :meth:`whole` gives."""
        with self.whole() as model, evaluating(model):
            yield lambda batch: self._objective.predict(model, batch)

    @contextlib.contextmanager
    def whole(self) -> Iterator[torch.nn.Module]:
        """This rank's copy, its float buffers (batch statistics) averaged over ranks by samples while it lasts."""
        buffers = [b for b in self._model.buffers() if b.is_floating_point()]
        with self._averaged(buffers, float(self._seen)):
            yield self._model

    @contextlib.contextmanager
    def _averaged(self, tensors: Sequence[torch.Tensor], weight: float) -> Iterator[None]:
        """Have tensors hold their weighted mean over ranks, and then their own values again."""
        own = [t.detach().clone() for t in tensors] if self._group is not None else []
        try:
            if own and self._group is not None:
                total = self._group.all_reduce(torch.tensor([weight], dtype=torch.float64)).item()
                if total:
                    for tensor in tensors:
                        self._group.all_reduce(tensor.detach().mul_(weight / total))
            yield
        finally:
            for tensor, value in zip(tensors, own, strict=False):
                tensor.detach().copy_(value)

    def fingerprint(self) -> Fingerprint | None:
        """A checksum of all trainable parameters' bits, to be equal on all ranks."""
        return {(): bits(self._parameters)}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Have a model make forecasts, and then train on."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def kept(value: Any) -> Any:
    """A copy of an entry of a state dict, on the CPU; a module's extra state may be anything."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def bits(tensors: Sequence[torch.Tensor]) -> int:
    """A number that equal bits have in common: each tensor's bits, added up in words of 64, and those sums' CRC-32.

    It runs at the speed of memory on any device and allocates nothing, where a digest would take ten times as long.
    """
    sums = [total for tensor in tensors for total in _sums(tensor.detach())]
    return zlib.crc32(torch.stack(sums).cpu().numpy().tobytes()) if sums else 0


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of the words, and of the bytes that make no word."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = real.reshape(-1).view(torch.uint8)
    whole = len(raw) - len(raw) % _WORD
    words, rest = raw[:whole], raw[whole:]
    if words.storage_offset() % _WORD == 0:
        yield words.view(torch.int64).sum()
    else:  # words can't be read where it lies: copy it piece by piece
        yield torch.stack([piece.clone().view(torch.int64).sum() for piece in torch.split(words, _PIECE)]).sum()
    yield rest.sum(dtype=torch.int64)
