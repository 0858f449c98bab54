"""Restoring a job's state from any :class:`~dtkit.engine.state.shards.StateReader`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.dtensor import is_dtensor
from dtkit.checkpoint.json_values import decode
from dtkit.engine.state.dtensor_shards import get_local_tensor, get_num_fused_blocks, wrap_local_shard
from dtkit.engine.state.visitor import StateVisitor, drop_aliases, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.state.shards import StateReader, TensorShard
    from dtkit.engine.state.visitor import StatefulJob


class StateRestore(StateVisitor):
    """Visitor that fills in saved state, in place where it can."""

    is_saving = False

    def __init__(self, context: WorkerContext, layout: Mapping[str, Any], reader: StateReader) -> None:
        super().__init__(context, layout)
        self._reader, self._facts = reader, reader.facts
        self._same_layout = self._facts["layout"] == layout
        self._facts_by_rank: dict[str, Any] = self._facts["per_rank"]
        self.overruled: dict[str, tuple[Any, Any]] = {}
        """{option of an optimizer: (saved value, given value)} where the two differ; the saved value is used."""

    def visit_value(self, name: str, current: Any) -> Any:
        """See :class:`StateVisitor`."""
        values = self._facts["values"]
        return decode(values[name], self.context.device) if name in values else current

    def per_rank(self, name: str, current: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """See :class:`StateVisitor`."""
        values = {
            int(rank): decode(facts["values"][name])
            for rank, facts in self._facts_by_rank.items()
            if name in facts["values"]
        }
        if self._same_layout and self.rank in values:
            return values[self.rank]
        return combine([values[rank] for rank in sorted(values)]) if values else current

    @torch.no_grad()
    def visit_tensors(self, prefix: str, named_tensors: Mapping[str, torch.Tensor]) -> bool:
        """See :class:`StateVisitor`."""
        aliases = self._facts["aliases"].get(prefix, {})
        any_saved = False
        for name, tensor in drop_aliases(named_tensors)[0].items():
            key = f"{prefix}/{aliases.get(name, name)}"
            if self._reader.get_shape(key) is not None:
                get_local_tensor(tensor).copy_(self._read_like(tensor, [key]))
                any_saved = True
        return any_saved

    @torch.no_grad()
    def per_rank_tensors(
        self, prefix: str, named_tensors: Mapping[str, torch.Tensor], *, fraction: float | None = None
    ) -> None:
        """See :class:`StateVisitor`."""
        for name, tensor in drop_aliases(named_tensors)[0].items():
            keys = [f"rank{rank}/{prefix}/{name}" for rank in sorted(map(int, self._facts_by_rank))]
            saved_keys = [key for key in keys if self._reader.get_shape(key) is not None]
            own_key = f"rank{self.rank}/{prefix}/{name}"
            if self._same_layout and own_key in saved_keys:
                get_local_tensor(tensor).copy_(self._read_like(tensor, [own_key]))
            elif fraction is not None and saved_keys and not self._same_layout:
                get_local_tensor(tensor).copy_(self._read_like(tensor, saved_keys) * (len(saved_keys) * fraction))

    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:  # noqa: ARG002 - only capturing needs it
        """See :class:`StateVisitor`."""
        self.visit_tensors(prefix, named_tensors)
        self.per_rank_tensors(prefix, named_tensors)

    def _read_like(self, like: torch.Tensor, keys: Sequence[str]) -> torch.Tensor:
        """Return this rank's part of a saved tensor that is sharded like `like`; of several tensors, of their mean."""
        shard = make_shard(like, get_num_fused_blocks(like))
        parts = [self._read_shard(key, shard) for key in keys]
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part.double() for part in parts]).mean(0).to(parts[0].dtype)

    def _read_shard(self, key: str, shard: TensorShard) -> torch.Tensor:
        parts = [self._reader.read_slice(key, begin, size) for begin, size, _ in shard.split_blocks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, shard.fused_dim)

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
                f"the checkpoint was made with {saved['class']}, and optimizer= returns {type(optimizer).__name__}, "
                "whose state differs. Use the same optimizer, or load the weights only: "
                "dtkit.Checkpoint(path).load_into(model)"
            )
        names = {p: name for name, p in reversed(list(named_parameters.items()))}
        self._restore_groups(optimizer, names, saved)
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._restore_parameter_state(prefix, optimizer, names[p], p, sources)

    def _find_sources(self, prefix: str, *, per_rank: bool) -> dict[str, Any]:
        """Return {prefix of tensors: saved optimizer}: that of all ranks, of this rank, or of each rank for a mean."""
        shared_state = self._facts["optimizers"].get(prefix)
        each = {
            f"rank{rank}/": facts["optimizers"][prefix]
            for rank, facts in self._facts_by_rank.items()
            if prefix in facts["optimizers"]
        }
        prefix_here = f"rank{self.rank}/"
        if per_rank and self._same_layout and prefix_here in each:
            return {prefix_here: each[prefix_here]}
        return each if shared_state is None else {"": shared_state}

    def _restore_groups(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], saved: Mapping[str, Any]
    ) -> None:
        options = {name: group["options"] for group in saved["groups"] for name in group["params"]}
        missing = [names[p] for group in optimizer.param_groups for p in group["params"] if names[p] not in options]
        if missing:
            raise ValueError(
                f"the optimizer has {', '.join(missing)}, which the checkpoint's optimizer did not have: they were "
                "frozen or left out. Give the optimizer the same parameters"
            )
        for group in optimizer.param_groups:
            group_options = [options[names[p]] for p in group["params"]]
            if any(other != group_options[0] for other in group_options):
                raise ValueError(
                    f"the optimizer has {', '.join(names[p] for p in group['params'])} in one group, and the "
                    "checkpoint has them in groups with different options. Make the same groups"
                )
            if group_options:
                self._restore_options(group, decode(group_options[0], self.context.device))

    def _restore_options(self, group: dict[str, Any], saved_options: Mapping[str, Any]) -> None:
        for key, saved in saved_options.items():
            user_value = group.get(key)
            if key in group and key not in _list_scheduled_options(group):
                self._record_overruled(key, saved, user_value)
            if isinstance(user_value, torch.Tensor):
                user_value.fill_(saved)
            else:
                group[key] = saved

    def _record_overruled(self, key: str, saved: Any, user_value: Any) -> None:
        saved, user_value = (
            v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for v in (saved, user_value)
        )
        is_plain = all(isinstance(value, int | float | tuple | list | type(None)) for value in (saved, user_value))
        if is_plain and saved != user_value:
            self.overruled.setdefault(key, (saved, user_value))

    def _restore_parameter_state(
        self,
        optimizer_prefix: str,
        optimizer: torch.optim.Optimizer,
        name: str,
        p: torch.Tensor,
        sources: Mapping[str, Any],
    ) -> None:
        states = {prefix: source["state"][name] for prefix, source in sources.items() if name in source["state"]}
        optimizer.state.pop(p, None)
        if not states:
            return
        state: dict[str, Any] = {}
        for key, value in next(iter(states.values())).items():
            if value is not None:
                state[key] = decode(value["value"], p.device)
            else:
                keys = [f"{prefix}{optimizer_prefix}/{name}/{key}" for prefix in states]
                state[key] = self._read_state_tensor(keys, f"the state {key!r} of {name}", p)
        optimizer.state[p] = state

    def _read_state_tensor(self, keys: Sequence[str], description: str, p: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a parameter's state, sharded like the parameter if it has the same shape."""
        shape = self._reader.get_shape(keys[0])
        assert shape is not None
        if not is_dtensor(p):
            return self._read_like(p if shape == tuple(p.shape) else torch.empty(shape, device="meta"), keys).to(
                p.device
            )
        if shape == tuple(p.shape):
            return wrap_local_shard(self._read_like(p, keys).to(p.device), p)
        raise ValueError(
            f"{description} has shape {shape}, the parameter {tuple(p.shape)}: a strategy that shards parameters can't "
            "use such an optimizer. Continue with DataParallel()"
        )

    def visit_stateful(self, name: str, stateful: Any, description: str) -> None:
        """See :class:`StateVisitor`."""
        saved = self._facts["values"].get(name)
        if saved is None:
            return
        if saved["class"] != type(stateful).__name__:
            raise ValueError(
                f"the checkpoint was made with {saved['class']} as {description}, and this run has "
                f"{type(stateful).__name__}. Use the same class"
            )
        stateful.load_state_dict(decode(saved["state"], self.context.device))

    def visit_extra_state(self, model: torch.nn.Module, entries: Mapping[str, Any]) -> None:
        """See :class:`StateVisitor`."""
        for name in entries.keys() & self._facts["extra"].keys():
            module = model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(decode(self._facts["extra"][name]))


class WeightsRestore(StateRestore):
    """Visitor that puts earlier weights back during a training: the optimizer's options, such as its learning rate,
    stay as they are.
    """

    def _restore_groups(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], saved: Mapping[str, Any]
    ) -> None:
        pass


def _list_scheduled_options(group: Mapping[str, Any]) -> set[str]:
    """Return the options of a parameter group that a scheduler has set, by the values that it left there."""
    options = {"lr"} if "initial_lr" in group else set()
    return options | {"momentum", "betas"} if "max_momentum" in group else options


def restore_state(job: StatefulJob, reader: StateReader) -> dict[str, tuple[Any, Any]]:
    """Restore a job's state. Return :attr:`StateRestore.overruled`. Raises ValueError if the state doesn't fit."""
    restore = StateRestore(job.context, job.layout, reader)
    job.visit_state(restore)
    return restore.overruled


def restore_weights(job: StatefulJob, reader: StateReader) -> None:
    """Restore a job's weights and the state of its optimizer. Step, learning rate and random state stay.

    What a strategy needs to compute the same model from them is restored, too, such as the weights of averages.
    """
    job.visit_worker(WeightsRestore(job.context, job.layout, reader))
