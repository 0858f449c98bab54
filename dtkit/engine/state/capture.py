"""Capture of a job's state, with any strategy on any number of ranks.

Each rank contributes parts of tensors (:class:`~dtkit.engine.state.shards.TensorShard`). Ranks exchange lists of the
parts that they hold. If several ranks hold the same part, only one contributes it, so that all contribute about as many
bytes. Values of one rank (random state, batch statistics, parameters between two averagings) are stored by rank.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit._util.dtensor import is_dtensor
from dtkit.checkpoint.json_values import UnsupportedValueError, encode
from dtkit.checkpoint.safetensors_file import SAFETENSORS_NAMES
from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.dtensor_shards import get_local_tensor, get_num_fused_blocks
from dtkit.engine.state.shards import ShardedState, TensorShard
from dtkit.engine.state.visitor import StateVisitor, drop_aliases, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.state.visitor import StatefulJob

_NON_OPTION_KEYS = ("params", "param_names")


class StateCapture(StateVisitor):
    """Visitor that captures state. It collects the problems, and reports them once all ranks are done."""

    def __init__(self, context: WorkerContext, layout: Mapping[str, Any], *, skip_frozen: bool = False) -> None:
        """With `skip_frozen`, parameters that need no gradient are named but not captured."""
        super().__init__(context, layout)
        self.problems: list[str] = []
        self._skip_frozen = skip_frozen
        self._shards: dict[str, TensorShard] = {}
        self._facts: dict[str, Any] = {"values": {}, "optimizers": {}, "aliases": {}, "extra": {}, "frozen": {}}
        self._per_rank_facts: dict[str, Any] = {"values": {}, "optimizers": {}}

    def visit_value(self, name: str, current: Any) -> Any:
        """See :class:`StateVisitor`."""
        self._facts["values"][name] = self._encode_plain(current, name)
        return current

    def per_rank(self, name: str, current: Any, combine: Callable[[list[Any]], Any]) -> Any:  # noqa: ARG002 - only restoring needs it
        """See :class:`StateVisitor`."""
        self._per_rank_facts["values"][name] = self._encode_plain(current, name)
        return current

    def visit_tensors(self, prefix: str, named_tensors: Mapping[str, torch.Tensor]) -> bool:
        """See :class:`StateVisitor`."""
        unique, aliases = drop_aliases(self._drop_frozen(named_tensors))
        self._facts["aliases"].setdefault(prefix, {}).update(aliases)
        for name, tensor in unique.items():
            self._add_shard(f"{prefix}/{name}", tensor, get_num_fused_blocks(tensor))
        return True

    def per_rank_tensors(
        self,
        prefix: str,
        named_tensors: Mapping[str, torch.Tensor],
        *,
        fraction: float | None = None,  # noqa: ARG002 - only restoring needs it
    ) -> None:
        """See :class:`StateVisitor`."""
        for name, tensor in drop_aliases(self._drop_frozen(named_tensors))[0].items():
            self._add_shard(f"rank{self.rank}/{prefix}/{name}", tensor)

    def _drop_frozen(self, named_tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tensors without frozen parameters, where these are skipped."""
        if not self._skip_frozen:
            return named_tensors
        frozen = {
            name: tensor
            for name, tensor in named_tensors.items()
            if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        }
        self._facts["frozen"] |= {
            name: {"dtype": SAFETENSORS_NAMES.get(tensor.dtype, ""), "shape": list(tensor.shape)}
            for name, tensor in frozen.items()
        }
        return {name: tensor for name, tensor in named_tensors.items() if name not in frozen}

    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """See :class:`StateVisitor`. A collective with a weight. Tensors that are equal everywhere are saved once."""
        named_tensors = self._drop_frozen(named_tensors)
        if self._are_equal_on_all_ranks(named_tensors, weight):
            self.visit_tensors(prefix, named_tensors)
            return
        self.per_rank_tensors(prefix, named_tensors)
        self.visit_tensors(prefix, self._select_for_model(named_tensors, weight))

    def _are_equal_on_all_ranks(self, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> bool:
        group = self.context.group
        if not named_tensors or self.world_size == 1 or (weight is None and self.context.mesh.num_replicas == 1):
            return True
        if group is None or weight is None:
            return False
        checksum = compute_checksum([get_local_tensor(tensor) for tensor in named_tensors.values()])
        return len(set(all_gather_json(group, checksum))) == 1

    def _select_for_model(
        self, named_tensors: Mapping[str, torch.Tensor], weight: float | None
    ) -> Mapping[str, torch.Tensor]:
        """Return the tensors that this rank contributes to the model as a whole."""
        group = self.context.group
        if group is None:  # a survivor, which can't communicate with the other ranks
            return named_tensors
        if weight is None:
            return {} if self.replica else named_tensors
        return self._compute_means(group, named_tensors, weight)

    def _compute_means(
        self, group: Group, named_tensors: Mapping[str, torch.Tensor], weight: float
    ) -> dict[str, torch.Tensor]:
        """Return means over all ranks; rank 0 alone adds tensors that are not floating-point."""
        total = group.all_reduce(torch.tensor([weight], dtype=torch.float64)).item()
        fraction = weight / total if total else 1 / self.world_size
        means = {}
        for name, tensor in named_tensors.items():
            if tensor.is_floating_point():
                means[name] = group.all_reduce(tensor.detach() * fraction)
            elif self.rank == 0:
                means[name] = tensor
        return means

    def visit_optimizer(
        self,
        prefix: str,
        optimizer: torch.optim.Optimizer,
        named_parameters: Mapping[str, torch.Tensor],
        *,
        per_rank: bool = False,
    ) -> None:
        """See :class:`StateVisitor`."""
        names = {p: name for name, p in reversed(list(named_parameters.items()))}
        key_prefix = f"rank{self.rank}/{prefix}" if per_rank else prefix
        facts = self._per_rank_facts if per_rank else self._facts
        facts["optimizers"][prefix] = {
            "class": type(optimizer).__name__,
            "groups": [self._encode_group(prefix, group, names) for group in optimizer.param_groups],
            "state": {
                names[p]: self._capture_parameter_state(f"{key_prefix}/{names[p]}", names[p], p, state)
                for p, state in optimizer.state.items()
            },
        }

    def _encode_group(self, prefix: str, group: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key not in _NON_OPTION_KEYS}
        return {
            "options": {key: self._encode_plain(value, f"{prefix} group {key}") for key, value in options.items()},
            "params": [names[p] for p in group["params"]],
        }

    def _capture_parameter_state(
        self, key_prefix: str, name: str, p: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return {key: plain value, or None for a tensor} for one parameter."""
        entries: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                entries[key] = {"value": self._encode_plain(value, f"the state {key!r} of {name}")}
            elif value.shape == p.shape or not is_dtensor(p):
                entries[key] = None
                self._add_shard(f"{key_prefix}/{key}", value, get_num_fused_blocks(p))
            else:
                self.problems.append(f"the state {key!r} of {name} differs in shape from the parameter, a DTensor")
        return entries

    def visit_stateful(self, name: str, stateful: Any, description: str) -> None:
        """See :class:`StateVisitor`."""
        self._facts["values"][name] = {
            "class": type(stateful).__name__,
            "state": self._encode_plain(stateful.state_dict(), f"{description} ({type(stateful).__name__})"),
        }

    def visit_extra_state(self, model: torch.nn.Module, entries: Mapping[str, Any]) -> None:  # noqa: ARG002 - only restoring needs it
        """See :class:`StateVisitor`."""
        for name, value in entries.items():
            self._facts["extra"][name] = self._encode_plain(value, f"{name} of the model")

    def _encode_plain(self, value: Any, description: str) -> Any:
        try:
            return encode(value, description)
        except UnsupportedValueError as error:
            self.problems.append(str(error))
            return None

    def _add_shard(self, name: str, tensor: torch.Tensor, num_blocks: int = 1) -> None:
        shard = make_shard(tensor, num_blocks)
        if self._check_tensor(name, shard.tensor) and (shard.tensor.numel() or not math.prod(shard.full_shape)):
            self._shards[name] = shard

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the tensor can be saved; else note the problem."""
        if tensor.is_sparse or tensor.dtype not in SAFETENSORS_NAMES:
            self.problems.append(f"{name} is a tensor of {tensor.dtype}, {tensor.layout}")
            return False
        return True

    def build_state(self) -> ShardedState:
        """Return this rank's part, not copied. A collective.

        Raises UnsupportedValueError with the problems of all ranks, on all ranks.
        """
        holdings = sorted(
            (name, shard.offset, shard.tensor.numel() * shard.tensor.element_size())
            for name, shard in self._shards.items()
        )
        reports = all_gather_json(self.context.group, {"problems": self.problems, "holdings": holdings})
        problems = list(dict.fromkeys(problem for report in reports for problem in report["problems"]))
        if problems:
            raise UnsupportedValueError(f"{'; '.join(problems)}: a checkpoint holds tensors, numbers and text only")
        assigned = assign_holders([report["holdings"] for report in reports])[self.rank]
        shards = {name: shard for name, shard in self._shards.items() if name in assigned}
        return ShardedState(shards, self._build_facts(self._per_rank_facts))

    def _build_facts(self, per_rank_facts: dict[str, Any]) -> dict[str, Any]:
        return {**self._facts, "layout": dict(self.layout), "per_rank": {str(self.rank): per_rank_facts}}


class ModelCapture(StateCapture):
    """Visitor that captures a model as a whole, for the notebook: any dtype, any extra state, nothing by rank."""

    def per_rank_tensors(
        self, prefix: str, named_tensors: Mapping[str, torch.Tensor], *, fraction: float | None = None
    ) -> None:
        """Skip tensors of single ranks."""

    def _encode_plain(self, value: Any, description: str) -> Any:  # noqa: ARG002 - only a checkpoint needs it
        return copy.deepcopy(value)

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - only a checkpoint needs it
        return True


def assign_holders(holdings: Sequence[Sequence[Any]]) -> list[set[str]]:
    """Return the names that each rank contributes, from (name, offset, bytes) of all that each rank holds.

    One rank contributes each of several equal parts, and bytes are balanced. All ranks get the same result.
    """
    holders: dict[tuple[str, tuple[int, ...]], tuple[int, list[int]]] = {}
    for rank, rank_holdings in enumerate(holdings):
        for name, offset, size in rank_holdings:
            holders.setdefault((name, tuple(offset)), (size, []))[1].append(rank)
    assigned: list[set[str]] = [set() for _ in holdings]
    load = [0] * len(holdings)
    for (name, _), (size, ranks) in sorted(holders.items(), key=lambda item: (-item[1][0], item[0])):
        rank = min(ranks, key=lambda r: (load[r], r))
        assigned[rank].add(name)
        load[rank] += size
    return assigned


def all_gather_json(group: Group | None, value: Any) -> list[Any]:
    """Return the values of all ranks, sent as JSON through the process group. A collective."""
    if group is None:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(group.world_size, dtype=torch.int64)
    sizes[group.rank] = len(text)
    lengths = group.all_reduce(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(texts, lengths, strict=True)]


def capture_state(job: StatefulJob) -> ShardedState:
    """Return a copy of this rank's part of a job's state, on the CPU, as a checkpoint has it. A collective.

    Raises UnsupportedValueError on all ranks.
    """
    return _copy_to_cpu(view_state(job, skip_frozen=job.checkpoint_trainable_only), torch.contiguous_format)


def view_state(job: StatefulJob, *, skip_frozen: bool = False) -> ShardedState:
    """Return the same without copying: the job still uses the tensors. A collective."""
    capture = StateCapture(job.context, job.layout, skip_frozen=skip_frozen)
    job.visit_state(capture)
    state = capture.build_state()
    state.facts["step"] = job.step
    return state


def capture_model(job: StatefulJob) -> ShardedState:
    """Return a copy of this rank's part of the model, on the CPU. A collective.

    :func:`dtkit.engine.state.shards.join_state_dict` joins the parts of all ranks.
    """
    capture = ModelCapture(job.context, job.layout)
    job.visit_model(capture)
    return _copy_to_cpu(capture.build_state(), torch.preserve_format)


def _copy_to_cpu(state: ShardedState, memory_format: torch.memory_format) -> ShardedState:
    shards = {
        name: dataclasses.replace(shard, tensor=shard.tensor.to("cpu", copy=True, memory_format=memory_format))
        for name, shard in state.shards.items()
    }
    return dataclasses.replace(state, shards=shards)
