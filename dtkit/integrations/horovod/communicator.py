"""Collectives over a process group, for tensors of any type and device, rows of any length, and JSON.

gloo lacks collectives for some types and devices. Collectives that only move bytes send them as ``uint8``. Where gloo
can't take a CUDA tensor, they send a copy in host memory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit.integrations.horovod.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDER_TYPES = {torch.int16: torch.int32}


class Communicator:
    """Collectives over the ranks of a process set. `ranks` are those of the whole group."""

    def __init__(self, ranks: Sequence[int], rank: int, process_group: dist.ProcessGroup | None, backend: str) -> None:
        """`process_group` is None for the group of all ranks, which then ends when nothing else uses it."""
        self.ranks, self.size = list(ranks), len(ranks)
        self.index = self.ranks.index(rank)
        """This rank's place among `ranks`."""
        self._group = process_group
        self._has_nccl = "nccl" in backend

    def _to_transport(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._has_nccl or tensor.device.type == "cpu" else tensor.cpu()

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a contiguous tensor in place."""
        if tensor.is_complex():
            if op != dist.ReduceOp.SUM:
                raise HorovodInternalError(
                    f"{tensor.dtype} has no order; complex tensors can be summed or averaged only"
                )
            self.all_reduce(torch.view_as_real(tensor), op)
            return
        buffer = self._to_transport(tensor)
        wider = _WIDER_TYPES.get(tensor.dtype)
        buffer = buffer if wider is None else buffer.to(wider)
        dist.all_reduce(buffer, op=op, group=self._group)
        if buffer is not tensor:
            tensor.copy_(buffer)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite a contiguous tensor with that of rank `root` of the whole group."""
        if tensor.numel() == 0:
            return
        flat = _as_bytes(tensor)
        buffer = self._to_transport(flat)
        dist.broadcast(buffer, src=root, group=self._group)
        if buffer is not flat:
            flat.copy_(buffer)

    def all_gather_rows(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the ranks' tensors, concatenated; `lengths` are their first dimensions."""
        tensor = tensor.contiguous()
        row = _count_row_bytes(tensor)
        longest = max(lengths) * row
        if not longest:
            return tensor.new_empty((sum(lengths), *tensor.shape[1:]))
        flat = self._to_transport(_as_bytes(tensor))
        padded = flat.new_zeros(longest)
        padded[: flat.numel()] = flat
        parts = [torch.empty_like(padded) for _ in self.ranks]
        dist.all_gather(parts, padded, group=self._group)
        joined = torch.cat([part[: length * row] for part, length in zip(parts, lengths, strict=True)])
        return _from_bytes(joined, tensor, sum(lengths))

    def exchange_rows(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send the first ``sent[0]`` rows to the first rank, and so on; return the rows that this rank receives."""
        tensor = tensor.contiguous()
        row = _count_row_bytes(tensor)
        flat = self._to_transport(_as_bytes(tensor[: sum(sent)]))
        result = flat.new_empty(sum(received) * row)
        dist.all_to_all_single(
            result, flat, [count * row for count in received], [count * row for count in sent], group=self._group
        )
        return _from_bytes(result, tensor, sum(received))

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the integers of each rank. All ranks pass equally many."""
        local = self._to_meeting_point(torch.tensor(numbers, dtype=torch.int64))
        parts = [torch.empty_like(local) for _ in self.ranks]
        dist.all_gather(parts, local, group=self._group)
        return [part.tolist() for part in parts]

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return each rank's value, which must be JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [length for (length,) in self.all_gather_numbers([len(data)])]
        joined = self.all_gather_rows(self._to_meeting_point(data), lengths).cpu().numpy().tobytes()
        starts = [sum(lengths[:k]) for k in range(self.size)]
        return [json.loads(joined[start : start + length]) for start, length in zip(starts, lengths, strict=True)]

    def _to_meeting_point(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to a device that the group supports."""
        return tensor.cuda() if dist.get_backend(self._group) == "nccl" else tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as ``uint8``."""
    if not tensor.numel():
        return tensor.new_empty(0, dtype=torch.uint8)  # numpy's empty arrays have strides that torch can't view
    return tensor.detach().view(-1).view(torch.uint8)


def _count_row_bytes(tensor: torch.Tensor) -> int:
    return int(torch.Size(tensor.shape[1:]).numel() * tensor.element_size())


def _from_bytes(data: torch.Tensor, like: torch.Tensor, num_rows: int) -> torch.Tensor:
    return data.to(like.device).view(like.dtype).view(num_rows, *like.shape[1:])
