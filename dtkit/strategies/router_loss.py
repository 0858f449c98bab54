"""The routers' loss of a mixture of experts, for the tokens of all ranks.

It balances the experts (Fedus et al., Switch Transformers, JMLR 2022): for each expert, the share of the tokens that it
gets times the mean of its probabilities. So it is a product of means over tokens. The mean of the ranks' losses is
another number than the loss of the whole batch.

Models of Hugging Face's transformers compute it by a function of their module, which dtkit replaces during a step.
Ranks add up the sums behind the means, and all get the loss of the whole batch. Backward adds up the gradients of these
sums, since each rank differentiates its share of the loss.

A rank without samples runs no user code. In such a step ranks first agree on whether another sum follows, and a rank
without samples adds zeros.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext

FUNCTION_NAME = "load_balancing_loss_func"
_TOLERANCE = 1e-4

_Namespace = dict[str, Any]


class RouterLosses:
    """The routers' losses of one model, whose sums all ranks add up."""

    def __init__(
        self,
        namespaces: Sequence[_Namespace],
        context: WorkerContext,
        group: Group,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """`process_group` has the ranks with different samples; without, all ranks have."""
        self._namespaces, self._context = namespaces, context
        self._group, self._process_group = group, process_group
        self._is_counted = True
        self._has_empty_ranks = False

    @contextlib.contextmanager
    def add_up(self) -> Iterator[None]:
        """Within the context, the model computes the loss of all ranks' tokens. A collective, backward also."""
        with _replace(self._namespaces, lambda original: functools.partial(self._compute, original)):
            yield

    @contextlib.contextmanager
    def ignore_tokens(self) -> Iterator[None]:
        """Within the context, this rank's tokens don't count."""
        self._is_counted = False
        try:
            yield
        finally:
            self._is_counted = True

    @contextlib.contextmanager
    def answer_empty_ranks(self, counts: Sequence[int]) -> Iterator[None]:
        """Within the context, ranks compute their gradients; a rank without samples takes part in the sums.

        `counts` are the samples of each shard.
        """
        self._has_empty_ranks = not all(counts)
        try:
            yield
            if self._has_empty_ranks and any(counts[shard] for shard in self._context.shards):
                self._agree_on_length(0)
            elif self._has_empty_ranks:
                while length := self._agree_on_length(None):
                    self._all_reduce(torch.zeros(length, dtype=torch.float64, device=self._context.device))
        finally:
            self._has_empty_ranks = False

    def _compute(
        self,
        original: Callable[..., Any],
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of all ranks' tokens. It has the parameters of transformers' function."""
        if not isinstance(gate_logits, tuple) or num_experts is None or any(part.dim() != 2 for part in gate_logits):
            return original(gate_logits, num_experts, top_k, attention_mask)
        sums = _compute_sums(gate_logits, num_experts, top_k, attention_mask)
        if not self._is_counted:
            sums = sums * 0
        return _compute_loss(_SumOverRanks.apply(sums, self._add_up), num_experts)  # type: ignore[no-untyped-call]

    def _add_up(self, sums: torch.Tensor) -> torch.Tensor:
        if self._has_empty_ranks:
            self._agree_on_length(len(sums))
        return self._all_reduce(sums.to(self._context.device, copy=True)).to(sums.device)

    def _agree_on_length(self, length: int | None) -> int:
        """Return the length of the next sum, or 0 at the end. A rank without samples passes None. A collective."""
        votes = [0, 0] if length is None else [1, length]
        num_voters, total = self._all_reduce(
            torch.tensor(votes, dtype=torch.float64, device=self._context.device)
        ).tolist()
        return round(float(total) / float(num_voters))

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        phases = self._context.phases
        phases.begin_collective()
        self._group.all_reduce(tensor, self._process_group)
        phases.end_collective()
        return tensor


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, add_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.add_up = add_up
        return add_up(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.add_up(gradients[0]), None


def find_namespaces(model: torch.nn.Module, training_step: Any = None) -> list[_Namespace]:
    """Return the namespaces in which a model or a training step finds a known function of the routers' loss."""
    modules = {base.__module__ for kind in {type(m) for m in model.modules()} for base in kind.__mro__}
    namespaces = [vars(sys.modules[name]) for name in sorted(modules) if name in sys.modules]
    own = getattr(training_step, "__globals__", None)
    if own is not None and all(own is not namespace for namespace in namespaces):
        namespaces.append(own)
    return [n for n in namespaces if callable(n.get(FUNCTION_NAME)) and _is_known(n[FUNCTION_NAME])]


def is_in_model(model: torch.nn.Module) -> bool:
    """Return whether a model of transformers adds the routers' loss to its own."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, "output_router_logits", False) is True for config in configs)


PART_NOTE = (
    "the routers' loss of the mixture of experts is that of each rank's part of a batch, or of each micro-batch: "
    "training differs from one process. DataParallel(), Sharded() and TensorParallel() without accumulate compute it "
    "together"
)


@contextlib.contextmanager
def leave_out(model: torch.nn.Module, training_step: Any = None) -> Iterator[None]:
    """Within the context, known functions of the routers' loss return 0."""

    def make_zero(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs) * 0

    with _replace(find_namespaces(model, training_step), make_zero):
        yield


@contextlib.contextmanager
def _replace(
    namespaces: Sequence[_Namespace], make_replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    originals = [namespace[FUNCTION_NAME] for namespace in namespaces]
    for namespace, original in zip(namespaces, originals, strict=True):
        namespace[FUNCTION_NAME] = make_replacement(original)
    try:
        yield
    finally:
        for namespace, original in zip(namespaces, originals, strict=True):
            namespace[FUNCTION_NAME] = original


def _compute_sums(
    gate_logits: Sequence[torch.Tensor], num_experts: int, top_k: int, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the tokens of each expert, the sum of its probabilities, and the number of tokens, over all layers."""
    device = gate_logits[0].device
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    totals = []
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(-1)
        chosen = probabilities.topk(top_k).indices
        weights = torch.ones(len(probabilities), device=device) if mask is None else mask
        counts = torch.zeros(num_experts, dtype=torch.float64, device=device)
        counts.scatter_add_(0, chosen.reshape(-1), weights.double().repeat_interleave(top_k))
        sums = (probabilities.float() * weights.unsqueeze(-1)).sum(0, dtype=torch.float64)
        totals.append(torch.cat([counts, sums, weights.sum(dtype=torch.float64).reshape(1)]))
    return torch.stack(totals).sum(0)


def _compute_loss(sums: torch.Tensor, num_experts: int) -> torch.Tensor:
    counts, probabilities, num_tokens = torch.split(sums, [num_experts, num_experts, 1])
    loss: torch.Tensor = num_experts * (counts / num_tokens * (probabilities / num_tokens)).sum()
    return loss.float()


def _is_known(function: Callable[..., Any]) -> bool:
    """Return whether a function computes the loss that this module computes, by a trial with and without a mask."""

    def try_both() -> bool:
        logits = torch.arange(24.0).sin().reshape(2, 6, 2).flip(-1).reshape(2, 4, 3)
        gates, masks = tuple(logits.unbind()), (None, torch.tensor([[1, 1], [1, 0]]))
        return all(
            abs(float(function(gates, 3, 2, mask)) - float(_compute_loss(_compute_sums(gates, 3, 2, mask), 3)))
            <= _TOLERANCE
            for mask in masks
        )

    # silent: a function with other parameters is another one
    return run_guarded(try_both, lambda _: False)
