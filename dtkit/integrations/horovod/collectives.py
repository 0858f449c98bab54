"""Collectives as objects: the signature that all ranks must agree on, and the communication.

Every collective except a sum begins with a *header*: a checksum of the signature, and the number of rows. If headers
differ, all ranks raise the same error. A sum begins at once, because training waits for sums; `HOROVOD_CHECK=1` checks
them too.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dtkit.integrations.horovod import reductions
from dtkit.integrations.horovod.exceptions import HorovodInternalError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.horovod.communicator import Communicator

JOIN = "join"
_NO_DIMENSION = "a {} of a tensor without dimensions has no rows; use tensor.reshape(1)"


class Collective(ABC):
    """One operation of this rank, which sends `tensors`."""

    kind: ClassVar[str]

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]

    def make_signature(self) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks, as JSON values."""
        return {"operation": self.kind, **self._describe(), "device": [t.device.type for t in self.tensors]}

    def _describe(self) -> dict[str, Any]:
        """Return types and shapes, without the first dimension for operations that accept any number of rows."""
        return _describe_tensors(self.tensors, skipped_dimensions=0)

    @abstractmethod
    def run(self, communicator: Communicator) -> Any:
        """Communicate, and return the result."""

    def exchange_header(self, communicator: Communicator, *numbers: int) -> list[list[int]]:
        """Return the numbers of each rank, after a check that all ranks run the same operation."""
        signature = self.make_signature()
        checksum = zlib.crc32(json.dumps(signature).encode()) + 1
        rows = communicator.all_gather_numbers([checksum, *numbers])
        joined = [rank for rank, row in zip(communicator.ranks, rows, strict=True) if row[0] == 0]
        if joined:
            raise HorovodInternalError(f"{self.kind} is not supported with join, which rank {joined[0]} has called")
        if any(row[0] != checksum for row in rows):
            check_signatures(communicator.all_gather_json(signature), communicator.ranks, self.kind)
        return [row[1:] for row in rows]


class AllReduce(Collective):
    """A reduction of each tensor over all ranks, into `outputs`, which may be the inputs."""

    kind = "allreduce"

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        op: int,
        prescale: float,
        postscale: float,
    ) -> None:
        super().__init__(tensors)
        self.outputs, self._op, self._prescale, self._postscale = list(outputs), op, prescale, postscale

    def _describe(self) -> dict[str, Any]:
        return super()._describe() | _describe_reduction(self._op, self._prescale, self._postscale)

    def run(self, communicator: Communicator) -> list[torch.Tensor]:
        """Reduce tensors of the same type and device together."""
        if self._op not in (reductions.Average, reductions.Sum):
            self.exchange_header(communicator)
        batches: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for k, tensor in enumerate(self.tensors):
            batches.setdefault((tensor.dtype, tensor.device), []).append(k)
        for positions in batches.values():
            self._run_batch(communicator, [self.tensors[k] for k in positions], [self.outputs[k] for k in positions])
        return self.outputs

    def _run_batch(
        self, communicator: Communicator, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        targets = [output.detach() for output in outputs]
        if len(targets) == 1 and targets[0].is_contiguous():
            buffer = targets[0]
            if buffer.data_ptr() != tensors[0].data_ptr():
                buffer.copy_(tensors[0])
        else:
            buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        reductions.scale(buffer, self._prescale)
        communicator.all_reduce(buffer, reductions.get_torch_op(self._op))
        reductions.finish(buffer, self._op, communicator.size, self._postscale)
        if buffer is not targets[0]:
            parts = torch.split(buffer, [target.numel() for target in targets])
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part.view(target.shape))


class AllGather(Collective):
    """Concatenation along the first dimension, which may differ between ranks."""

    kind = "allgather"

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        _check_dimensions(self.kind, self.tensors)

    def _describe(self) -> dict[str, Any]:
        return _describe_tensors(self.tensors, skipped_dimensions=1)

    def run(self, communicator: Communicator) -> list[torch.Tensor]:
        """Return one tensor for each input."""
        lengths = self.exchange_header(communicator, *(len(tensor) for tensor in self.tensors))
        return [
            communicator.all_gather_rows(tensor, [row[k] for row in lengths]) for k, tensor in enumerate(self.tensors)
        ]


class Broadcast(Collective):
    """Copy of rank `root`'s tensor into `output`, which may be the input."""

    kind = "broadcast"

    def __init__(self, tensor: torch.Tensor, output: torch.Tensor, root: int) -> None:
        super().__init__([tensor])
        self._output, self._root = output, root

    def _describe(self) -> dict[str, Any]:
        return super()._describe() | {"root rank": self._root}

    def run(self, communicator: Communicator) -> list[torch.Tensor]:
        """Return [output]."""
        self.exchange_header(communicator)
        if self._root not in communicator.ranks:
            raise HorovodInternalError(f"root rank {self._root} is not one of the ranks {communicator.ranks}")
        target = self._output.detach()
        buffer = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if communicator.ranks[communicator.index] == self._root:
            buffer.copy_(self.tensors[0])
        communicator.broadcast(buffer, self._root)
        if buffer is not target:
            target.copy_(buffer)
        return [self._output]


class AllToAll(Collective):
    """Exchange of rows: the first ``splits[0]`` go to the first rank, and so on."""

    kind = "alltoall"

    def __init__(self, tensor: torch.Tensor, splits: Sequence[int]) -> None:
        super().__init__([tensor])
        self._splits = list(splits)

    def _describe(self) -> dict[str, Any]:
        return _describe_tensors(self.tensors, skipped_dimensions=1)

    def run(self, communicator: Communicator) -> tuple[torch.Tensor, list[int]]:
        """Return the rows in rank order, and the number of rows from each rank."""
        splits = self.exchange_header(communicator, *self._splits)
        received = [row[communicator.index] for row in splits]
        return communicator.exchange_rows(self.tensors[0], self._splits, received), received


class ReduceScatter(Collective):
    """Reduction after which each rank keeps its part of the rows. The first ranks keep one more if the number doesn't
    divide.
    """

    kind = "reducescatter"

    def __init__(self, tensors: Sequence[torch.Tensor], op: int, prescale: float, postscale: float) -> None:
        super().__init__(tensors)
        _check_dimensions(self.kind, self.tensors)
        self._op, self._prescale, self._postscale = op, prescale, postscale

    def _describe(self) -> dict[str, Any]:
        return super()._describe() | _describe_reduction(self._op, self._prescale, self._postscale)

    def run(self, communicator: Communicator) -> list[torch.Tensor]:
        """Return one tensor for each input."""
        self.exchange_header(communicator)
        return [self._run_one(communicator, tensor) for tensor in self.tensors]

    def _run_one(self, communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
        base, extra = divmod(len(tensor), communicator.size)
        counts = [base + (k < extra) for k in range(communicator.size)]
        kept = counts[communicator.index]
        scaled = tensor.clone()
        reductions.scale(scaled, self._prescale)
        rows = communicator.exchange_rows(scaled, counts, [kept] * communicator.size)
        result = reductions.reduce_parts(self._op, torch.split(rows, kept) if kept else [rows]).clone()
        reductions.finish(result, self._op, communicator.size, self._postscale)
        return result


class BarrierOperation(Collective):
    """A wait for all ranks."""

    kind = "barrier"

    def __init__(self) -> None:
        super().__init__([])

    def run(self, communicator: Communicator) -> None:
        """Return when all ranks have arrived."""
        communicator.all_gather_numbers([0])


class Join(Collective):
    """The end of this rank's data; its worker takes part in the other ranks' sums from then on."""

    kind = JOIN

    def __init__(self) -> None:
        super().__init__([])

    def run(self, communicator: Communicator) -> None:
        """Raise: workers handle it."""
        del communicator
        raise AssertionError("a worker handles join")


def mirror(signature: dict[str, Any], communicator: Communicator) -> None:
    """Take part in an operation of the other ranks, with zeros, after this rank has joined."""
    operation = signature["operation"]
    if operation == BarrierOperation.kind:
        BarrierOperation().run(communicator)
    elif operation == AllReduce.kind and signature["op"] in ("Average", "Sum"):
        tensors = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype, device in zip(signature["shape"], signature["dtype"], signature["device"], strict=True)
        ]
        AllReduce(tensors, tensors, reductions.Sum, 1.0, 1.0).run(communicator)
    else:
        communicator.all_gather_numbers([0] * (1 + _count_header_numbers(signature, communicator.size)))


def _count_header_numbers(signature: dict[str, Any], size: int) -> int:
    if signature["operation"] == AllGather.kind:
        return len(signature["dtype"])
    return size if signature["operation"] == AllToAll.kind else 0


def check_signatures(signatures: Sequence[dict[str, Any]], ranks: Sequence[int], name: str) -> None:
    """Raise MismatchError unless all signatures are equal. The error is the same on every rank."""
    first = signatures[0]
    for rank, signature in zip(ranks[1:], signatures[1:], strict=True):
        for key in sorted(first.keys() | signature.keys(), key=lambda key: key != "operation"):
            if first.get(key) != signature.get(key):
                raise MismatchError(
                    f"Mismatched {key} of {name}: rank {ranks[0]} has {first.get(key)}, rank {rank} has "
                    f"{signature.get(key)}; all ranks must give the same"
                )


def _describe_tensors(tensors: Sequence[torch.Tensor], skipped_dimensions: int) -> dict[str, Any]:
    return {
        "dtype": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shape": [list(tensor.shape[skipped_dimensions:]) for tensor in tensors],
    }


def _describe_reduction(op: int, prescale: float, postscale: float) -> dict[str, Any]:
    return {"op": reductions.get_name(op), "prescale factor": prescale, "postscale factor": postscale}


def _check_dimensions(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(_NO_DIMENSION.format(kind))
