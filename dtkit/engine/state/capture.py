"""All of a job's state, taken apart and put together again, whatever strategy holds it on however many ranks.

State is *canonical*: tensors have the model's own names and their whole logical shapes, and each rank gives the part
that lies on it (a :class:`TensorShard`). What several ranks hold alike, one of them gives: the ranks tell each other
what they hold, and share out the giving by bytes. What a rank has for itself (random state, batch statistics, between
two averagings its parameters) is kept by rank.

Workers describe their state once, in `visit_state(archive)`, and that serves both ways: :class:`StateCapture` takes
what it is shown, :class:`StateRestore` fills it in. On the same layout (kind of strategy and mesh) each rank gets back
what was its own; on another one it gets what stands for that: a mean over the saved ranks, a sum dealt out, a fresh
random state.

Files are not known here: `capture_state` gives slabs and facts, `restore_state` takes any :class:`StateReader`.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtkit.checkpoint.index import intersect, shift_slice
from dtkit.checkpoint.json_values import UnsupportedValueError, decode, encode
from dtkit.checkpoint.safetensors_file import SAFETENSORS_NAMES
from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.dtensor_shards import (
    count_shards,
    get_local_tensor,
    get_num_fused_blocks,
    get_shard_position,
    wrap_local_shard,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.job import Job


@dataclasses.dataclass(frozen=True)
class TensorShard:
    """A part of a tensor: what lies here, the whole's shape, and where in the whole it begins.

    With `fused_blocks`, the whole is so many equal blocks of rows, and here lies the same part of each, one after
    another.
    """

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    fused_blocks: int = 1

    def split_blocks(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Of each block: (where in the whole its part begins, that part's shape, its first row in `tensor`)."""
        if self.fused_blocks == 1:
            return [(self.offset, tuple(self.tensor.shape), 0)]
        rows, apart = len(self.tensor) // self.fused_blocks, self.full_shape[0] // self.fused_blocks
        size = (rows, *self.tensor.shape[1:])
        return [((self.offset[0] + k * apart, *self.offset[1:]), size, k * rows) for k in range(self.fused_blocks)]


@dataclasses.dataclass(frozen=True)
class ShardedState:
    """What one rank gives. `shards` may be in use, unless they were copied; `facts` are JSON, to be merged over the
    ranks.
    """

    shards: dict[str, TensorShard]
    facts: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Of all slabs."""
        return sum(slab.tensor.nbytes for slab in self.shards.values())


class StateReader(Protocol):
    """Where state comes from: files, or another process's memory."""

    facts: Mapping[str, Any]
    """Those of all ranks, merged: see :func:`dtkit.checkpoint.index.merge_facts`."""

    def get_shape(self, name: str) -> tuple[int, ...] | None:
        """Of the whole tensor; None where there is none of this name."""

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The part of a tensor that begins at `offset`, of this shape, on the CPU."""


class MemoryReader:
    """Slabs in memory: of one rank, or of all."""

    def __init__(self, parts: Iterable[Mapping[str, TensorShard]], facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self._shards_by_name: dict[str, list[TensorShard]] = {}
        for part in parts:
            for name, slab in part.items():
                self._shards_by_name.setdefault(name, []).append(slab)

    def get_shape(self, name: str) -> tuple[int, ...] | None:
        """See :class:`StateReader`."""
        found = self._shards_by_name.get(name)
        return None if found is None else found[0].full_shape

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """See :class:`StateReader`."""
        slabs = self._shards_by_name[name]
        found = torch.empty(tuple(shape), dtype=slabs[0].tensor.dtype)
        for slab in slabs:
            for begin, size, first in slab.split_blocks():
                common = intersect(begin, size, offset, shape)
                if common is not None:
                    theirs, mine = common
                    found[mine] = slab.tensor[shift_slice(theirs, first)]
        return found


# -- both ways -----------------------------------------------------------------------------------------------


class StateVisitor(abc.ABC):
    """What workers show their state to."""

    is_saving = True
    """Whether state is taken, and not filled in."""

    def __init__(self, context: WorkerContext, layout: Mapping[str, Any]) -> None:
        group = context.group
        self.rank, self.world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self.context, self.layout = context, layout
        self.replica = context.shards[0]
        """This rank's place among the replicas."""

    @abc.abstractmethod
    def visit_value(self, name: str, current: Any) -> Any:
        """A plain value that is equal on all ranks. What it is from here on: `now` where nothing was saved."""

    @abc.abstractmethod
    def per_rank(self, name: str, current: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """A plain value of this rank's. On another layout: what `elsewhere` makes of all saved ranks' values."""

    @abc.abstractmethod
    def visit_tensors(self, prefix: str, named_tensors: Mapping[str, torch.Tensor]) -> bool:
        """Tensors (or slices) that are equal wherever they lie, filled in place. Whether any were saved."""

    @abc.abstractmethod
    def per_rank_tensors(
        self, prefix: str, named_tensors: Mapping[str, torch.Tensor], *, fraction: float | None = None
    ) -> None:
        """Tensors of this rank's, filled in place.

        On another layout they stay as they are; with `share` they become that part of the sum over all saved ranks.
        (On the same one, of a rank that was lost, they stay: the others keep what was theirs.)
        """

    @abc.abstractmethod
    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """Tensors that may be others on each replica, filled in place.

        What stands for all is their mean, each rank's counting for `weight`; None: what the first replica has.
        """

    @abc.abstractmethod
    def visit_optimizer(
        self,
        prefix: str,
        optimizer: torch.optim.Optimizer,
        named_parameters: Mapping[str, torch.Tensor],
        *,
        per_rank: bool = False,
    ) -> None:
        """An optimiser over parameters of these names; `own` where ranks have made different steps with theirs."""

    @abc.abstractmethod
    def visit_extra_state(self, model: torch.nn.Module, entries: Mapping[str, Any]) -> None:
        """What modules put into their state dict by ``get_extra_state``: plain values, by name."""

    @abc.abstractmethod
    def visit_stateful(self, name: str, stateful: Any, description: str) -> None:
        """Something with `state_dict` and `load_state_dict` of plain values, equal on all ranks."""


def drop_aliases(named_tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors under the first of their names, {further name: first one}): tied weights are one tensor."""
    seen: dict[Any, str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases = {}
    for name, tensor in named_tensors.items():
        here = get_local_tensor(tensor)
        key = (here.data_ptr(), here.shape, here.stride()) if here.numel() else name
        if key in seen:
            aliases[name] = seen[key]
        else:
            seen[key], kept[name] = name, tensor
    return kept, aliases


def make_shard(tensor: torch.Tensor, num_blocks: int = 1) -> TensorShard:
    """What lies here of a tensor, as a part of the whole; of each of so many blocks of its rows."""
    here, offset = get_local_tensor(tensor.detach()), [0] * tensor.dim()
    cut = get_shard_position(tensor) if isinstance(tensor, DTensor) else None
    if cut is None:
        return TensorShard(here, tuple(tensor.shape), tuple(offset))
    dim, place = cut
    length = tensor.shape[dim] // num_blocks
    offset[dim] = min(place * -(-length // count_shards(tensor)), length)  # as torch.chunk cuts
    return TensorShard(here, tuple(tensor.shape), tuple(offset), num_blocks)


# -- out -----------------------------------------------------------------------------------------------------


class StateCapture(StateVisitor):
    """Takes what it is shown. What can't be saved is noted, and told once all ranks are done."""

    def __init__(self, context: WorkerContext, layout: Mapping[str, Any]) -> None:
        super().__init__(context, layout)
        self.problems: list[str] = []
        self._shards: dict[str, TensorShard] = {}
        self._facts: dict[str, Any] = {"values": {}, "optimizers": {}, "aliases": {}, "extra": {}}
        self._per_rank_facts: dict[str, Any] = {"values": {}, "optimizers": {}}

    def visit_value(self, name: str, current: Any) -> Any:
        """See :class:`StateVisitor`."""
        self._facts["values"][name] = self._encode_plain(current, name)
        return current

    def per_rank(self, name: str, current: Any, combine: Callable[[list[Any]], Any]) -> Any:  # noqa: ARG002 - both ways
        """See :class:`StateVisitor`."""
        self._per_rank_facts["values"][name] = self._encode_plain(current, name)
        return current

    def visit_tensors(self, prefix: str, named_tensors: Mapping[str, torch.Tensor]) -> bool:
        """See :class:`StateVisitor`."""
        kept, aliases = drop_aliases(named_tensors)
        self._facts["aliases"].setdefault(prefix, {}).update(aliases)
        for name, tensor in kept.items():
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
        for name, tensor in drop_aliases(named_tensors)[0].items():
            self._add_shard(f"rank{self.rank}/{prefix}/{name}", tensor)

    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """See :class:`StateVisitor`. A collective, with a weight. Where all are equal they are saved once."""
        group = self.context.group
        if not named_tensors or self.world_size == 1 or (weight is None and self.context.mesh.num_replicas == 1):
            self.visit_tensors(prefix, named_tensors)
        elif group is None:  # nobody can be asked: what this rank has stands for all as well
            self.per_rank_tensors(prefix, named_tensors)
            self.visit_tensors(prefix, named_tensors)
        elif weight is None:
            self.per_rank_tensors(prefix, named_tensors)
            self.visit_tensors(prefix, {} if self.replica else named_tensors)
        elif (
            len(set(all_gather_json(group, compute_checksum([get_local_tensor(t) for t in named_tensors.values()]))))
            == 1
        ):
            self.visit_tensors(prefix, named_tensors)
        else:
            self.per_rank_tensors(prefix, named_tensors)
            self.visit_tensors(prefix, self._compute_means(group, named_tensors, weight))

    def _compute_means(
        self, group: Group, named_tensors: Mapping[str, torch.Tensor], weight: float
    ) -> dict[str, torch.Tensor]:
        """Means over all ranks; of what are no floating-point numbers, rank 0 gives its own."""
        total = group.all_reduce(torch.tensor([weight], dtype=torch.float64)).item()
        share = weight / total if total else 1 / self.world_size
        found = {}
        for name, tensor in named_tensors.items():
            if tensor.is_floating_point():
                found[name] = group.all_reduce(tensor.detach() * share)
            elif self.rank == 0:
                found[name] = tensor
        return found

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
        states = {
            names[p]: self._capture_parameter_state(prefix, names[p], p, s, per_rank=per_rank)
            for p, s in optimizer.state.items()
        }
        groups = [
            {
                "options": {
                    k: self._encode_plain(v, f"{prefix} group {k}")
                    for k, v in group.items()
                    if k not in _NON_OPTION_KEYS
                },
                "params": [names[p] for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        found = {"class": type(optimizer).__name__, "groups": groups, "state": states}
        (self._per_rank_facts if per_rank else self._facts)["optimizers"][prefix] = found

    def _capture_parameter_state(
        self, prefix: str, name: str, p: torch.Tensor, state: Mapping[str, Any], *, per_rank: bool
    ) -> dict[str, Any]:
        """Of one parameter: {key: plain value, or None for a tensor}."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                found[key] = {"value": self._encode_plain(value, f"the state {key!r} of {name}")}
            elif value.shape == p.shape or not isinstance(p, DTensor):
                found[key] = None
                self._add_shard(
                    (f"rank{self.rank}/" if per_rank else "") + f"{prefix}/{name}/{key}", value, get_num_fused_blocks(p)
                )
            else:
                self.problems.append(f"the state {key!r} of {name} has another shape than the parameter, which is cut")
        return found

    def visit_stateful(self, name: str, stateful: Any, description: str) -> None:
        """See :class:`StateVisitor`."""
        self._facts["values"][name] = {
            "class": type(stateful).__name__,
            "state": self._encode_plain(stateful.state_dict(), f"{description} ({type(stateful).__name__})"),
        }

    def visit_extra_state(self, model: torch.nn.Module, entries: Mapping[str, Any]) -> None:  # noqa: ARG002 - both ways
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
        slab = make_shard(tensor, num_blocks)
        if slab.tensor.is_sparse or slab.tensor.dtype not in SAFETENSORS_NAMES:
            self.problems.append(f"{name} is a tensor of {slab.tensor.dtype}, {slab.tensor.layout}")
        elif slab.tensor.numel() or not math.prod(slab.full_shape):
            self._shards[name] = slab

    def build_state(self) -> ShardedState:
        """This rank's share of what was shown, not copied. A collective. Raises Unsavable, on all ranks, with all
        problems.
        """
        holdings = sorted((name, slab.offset, slab.tensor.nbytes) for name, slab in self._shards.items())
        told = all_gather_json(self.context.group, {"problems": self.problems, "holds": holdings})
        problems = list(dict.fromkeys(problem for one in told for problem in one["problems"]))
        if problems:
            raise UnsupportedValueError(f"{'; '.join(problems)}: a checkpoint holds tensors, numbers and text only")
        mine = assign_holders([one["holds"] for one in told])[self.rank]
        slabs = {name: slab for name, slab in self._shards.items() if name in mine}
        return ShardedState(slabs, {**self._facts, "own": {str(self.rank): self._per_rank_facts}})


_NON_OPTION_KEYS = ("params", "param_names")


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def assign_holders(holdings: Sequence[Sequence[Any]]) -> list[set[str]]:
    """Which names each rank gives, of (name, offset, bytes) that each rank holds: of equal parts one, bytes balanced.

    The same on all ranks, which hold the same lists.
    """
    holders: dict[tuple[str, tuple[int, ...]], tuple[int, list[int]]] = {}
    for rank, held in enumerate(holdings):
        for name, offset, size in held:
            holders.setdefault((name, tuple(offset)), (size, []))[1].append(rank)
    given: list[set[str]] = [set() for _ in holdings]
    load = [0] * len(holdings)
    for (name, _), (size, ranks) in sorted(holders.items(), key=lambda item: (-item[1][0], item[0])):
        rank = min(ranks, key=lambda r: (load[r], r))
        given[rank].add(name)
        load[rank] += size
    return given


def all_gather_json(group: Group | None, value: Any) -> list[Any]:
    """What every rank says, as JSON over the data plane. A collective."""
    if group is None:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(group.world_size, dtype=torch.int64)
    sizes[group.rank] = len(text)
    lengths = group.all_reduce(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded)
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(every, lengths, strict=True)]


# -- in ------------------------------------------------------------------------------------------------------


class StateRestore(StateVisitor):
    """Fills in what it is shown."""

    is_saving = False

    def __init__(self, context: WorkerContext, layout: Mapping[str, Any], reader: StateReader) -> None:
        super().__init__(context, layout)
        self._reader, self._facts = reader, reader.facts
        self.same_layout = self._facts["layout"] == layout
        self._facts_by_rank: dict[str, Any] = self._facts["own"]
        self.overruled: dict[str, tuple[Any, Any]] = {}
        """Options of an optimiser that were given otherwise: {name: (now, given)}."""

    def visit_value(self, name: str, current: Any) -> Any:
        """See :class:`StateVisitor`."""
        values = self._facts["values"]
        return decode(values[name], self.context.device) if name in values else current

    def per_rank(self, name: str, current: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """See :class:`StateVisitor`."""
        found = {
            int(rank): decode(own["values"][name]) for rank, own in self._facts_by_rank.items() if name in own["values"]
        }
        if self.same_layout and self.rank in found:
            return found[self.rank]
        return combine([found[rank] for rank in sorted(found)]) if found else current

    @torch.no_grad()
    def visit_tensors(self, prefix: str, named_tensors: Mapping[str, torch.Tensor]) -> bool:
        """See :class:`StateVisitor`."""
        aliases = self._facts["aliases"].get(prefix, {})
        found = False
        for name, tensor in drop_aliases(named_tensors)[0].items():
            key = f"{prefix}/{aliases.get(name, name)}"
            if self._reader.get_shape(key) is not None:
                get_local_tensor(tensor).copy_(self._read_part([key], tensor))
                found = True
        return found

    @torch.no_grad()
    def per_rank_tensors(
        self,
        prefix: str,
        named_tensors: Mapping[str, torch.Tensor],
        *,
        fraction: float | None = None,
    ) -> None:
        """See :class:`StateVisitor`."""
        for name, tensor in drop_aliases(named_tensors)[0].items():
            keys = [f"rank{rank}/{prefix}/{name}" for rank in sorted(map(int, self._facts_by_rank))]
            there = [key for key in keys if self._reader.get_shape(key) is not None]
            mine = f"rank{self.rank}/{prefix}/{name}"
            if self.same_layout and mine in there:
                get_local_tensor(tensor).copy_(self._read_part([mine], tensor))
            elif fraction is not None and there and not self.same_layout:
                get_local_tensor(tensor).copy_(self._read_part(there, tensor) * (len(there) * fraction))

    @torch.no_grad()
    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:  # noqa: ARG002 - both ways
        """See :class:`StateVisitor`."""
        self.visit_tensors(prefix, named_tensors)
        self.per_rank_tensors(prefix, named_tensors)

    def _read_part(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
        """What belongs here of a saved tensor, or of the mean of several, laid out as `like` is."""
        blocks = make_shard(like, get_num_fused_blocks(like)).split_blocks()
        found = [
            _join_blocks([self._reader.read_slice(key, begin, size) for begin, size, _ in blocks]) for key in names
        ]
        if len(found) == 1:
            return found[0]
        return torch.stack([part.double() for part in found]).mean(0).to(found[0].dtype)

    def visit_optimizer(
        self,
        prefix: str,
        optimizer: torch.optim.Optimizer,
        named_parameters: Mapping[str, torch.Tensor],
        *,
        per_rank: bool = False,
    ) -> None:
        """See :class:`StateVisitor`."""
        sources = self._find_sources(prefix, per_rank=per_rank)
        if not sources:
            return
        saved = next(iter(sources.values()))
        if saved["class"] != type(optimizer).__name__:
            raise ValueError(
                f"the checkpoint was made with {saved['class']}, and optimizer= makes a {type(optimizer).__name__}: "
                "their states don't fit. Give the same optimiser, or load only the weights: "
                "dtkit.Checkpoint(path).model_into(model)"
            )
        names = {p: name for name, p in reversed(list(named_parameters.items()))}
        self._restore_groups(optimizer, names, saved)
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._restore_parameter_state(prefix, optimizer, names[p], p, sources)

    def _find_sources(self, prefix: str, *, per_rank: bool) -> dict[str, Any]:
        """{prefix of tensors: what was saved}: of all ranks together, of this one, or of each to take the mean of."""
        common = self._facts["optimizers"].get(prefix)
        each = {
            f"rank{r}/": o["optimizers"][prefix] for r, o in self._facts_by_rank.items() if prefix in o["optimizers"]
        }
        mine = f"rank{self.rank}/"
        if per_rank and self.same_layout and mine in each:
            return {mine: each[mine]}
        return each if common is None else {"": common}

    def _restore_groups(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], saved: Mapping[str, Any]
    ) -> None:
        options = {name: group["options"] for group in saved["groups"] for name in group["params"]}
        missing = [names[p] for group in optimizer.param_groups for p in group["params"] if names[p] not in options]
        if missing:
            raise ValueError(
                f"the optimiser holds {', '.join(missing)}, and in the checkpoint it did not: those were frozen, or "
                "left out. Give the optimiser the same parameters as then"
            )
        for group in optimizer.param_groups:
            wanted = [options[names[p]] for p in group["params"]]
            if any(one != wanted[0] for one in wanted):
                told = ", ".join(names[p] for p in group["params"])
                raise ValueError(
                    f"the optimiser has {told} in one group, and in the checkpoint their groups had different options. "
                    "Make the same groups as then"
                )
            for key, value in decode(wanted[0], self.context.device).items() if wanted else ():
                now = group.get(key)
                if key in group and key not in _list_scheduled_options(group):
                    self._record_overruled(key, value, now)
                if isinstance(now, torch.Tensor):
                    now.fill_(value)
                else:
                    group[key] = value

    def _record_overruled(self, key: str, saved: Any, given: Any) -> None:
        there, here = (v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for v in (saved, given))
        plain = all(isinstance(v, int | float | tuple | list | type(None)) for v in (there, here))
        if plain and there != here:
            self.overruled.setdefault(key, (there, here))

    def _restore_parameter_state(
        self,
        optimizer_prefix: str,
        optimizer: torch.optim.Optimizer,
        name: str,
        p: torch.Tensor,
        sources: Mapping[str, Any],
    ) -> None:
        states = {prefix: one["state"][name] for prefix, one in sources.items() if name in one["state"]}
        optimizer.state.pop(p, None)
        if not states:
            return
        saved = next(iter(states.values()))
        filled: dict[str, Any] = {}
        for key, value in saved.items():
            if value is not None:
                filled[key] = decode(value["value"], p.device)
            else:
                filled[key] = self._read_state_tensor(
                    [f"{prefix}{optimizer_prefix}/{name}/{key}" for prefix in states], name, key, p
                )
        optimizer.state[p] = filled

    def _read_state_tensor(
        self, names: Sequence[str], parameter_name: str, state_key: str, p: torch.Tensor
    ) -> torch.Tensor:
        """A tensor of a parameter's state, laid out as the parameter is."""
        shape = self._reader.get_shape(names[0])
        assert shape is not None
        sliced = isinstance(p, DTensor)
        if shape == tuple(p.shape):
            part = self._read_part(names, p).to(p.device)
            return wrap_local_shard(part, p) if isinstance(p, DTensor) else part
        if sliced:
            raise ValueError(
                f"the state {state_key!r} of {parameter_name} has shape {shape}, the parameter {tuple(p.shape)}: "
                "a strategy that cuts "
                "parameters can't take over such an optimiser. Go on under DataParallel()"
            )
        return self._read_part(names, torch.empty(shape, device="meta")).to(p.device)

    def visit_stateful(self, name: str, stateful: Any, description: str) -> None:
        """See :class:`StateVisitor`."""
        saved = self._facts["values"].get(name)
        if saved is None:
            return
        if saved["class"] != type(stateful).__name__:
            raise ValueError(
                f"the checkpoint was made with a {saved['class']} as {description}, and now it is a "
                f"{type(stateful).__name__}. "
                "Give the same as then"
            )
        stateful.load_state_dict(decode(saved["state"], self.context.device))

    def visit_extra_state(self, model: torch.nn.Module, entries: Mapping[str, Any]) -> None:
        """See :class:`StateVisitor`."""
        for name in entries.keys() & self._facts["extra"].keys():
            module = model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(decode(self._facts["extra"][name]))


def _join_blocks(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def _list_scheduled_options(group: Mapping[str, Any]) -> set[str]:
    """The options of a group of parameters that a scheduler sets: it has left its own there."""
    found = {"lr"} if "initial_lr" in group else set()
    return found | {"momentum", "betas"} if "max_momentum" in group else found


# -- a job ---------------------------------------------------------------------------------------------------


def capture_state(job: Job) -> ShardedState:
    """A copy of this rank's part of a job's state, on the CPU. A collective. Raises Unsavable, on all ranks alike."""
    found = view_state(job)
    slabs = {name: dataclasses.replace(s, tensor=_copy_to_cpu(s.tensor)) for name, s in found.shards.items()}
    return dataclasses.replace(found, shards=slabs)


def view_state(job: Job) -> ShardedState:
    """This rank's part of a job's state as it lies here, in use. A collective. Raises Unsavable, on all alike."""
    archive = StateCapture(job.context, job.layout)
    job.visit_state(archive)
    found = archive.build_state()
    found.facts.update(layout=dict(job.layout), step=job.step)
    return found


def restore_state(job: Job, reader: StateReader) -> dict[str, tuple[Any, Any]]:
    """Put saved state into a job. Raises ValueError where they don't fit.

    Returns options of its optimisers that are now other ones than were given: {name: (now, given)}.
    """
    archive = StateRestore(job.context, job.layout, reader)
    job.visit_state(archive)
    return archive.overruled
