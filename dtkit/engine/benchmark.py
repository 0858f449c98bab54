"""Measurements on the engines: their speed, the links between them, and a user's model.

:func:`measure_links` is a short collective. It measures matrix products, all-reduces of growing size, messages between
each pair of ranks, and an all-reduce during matrix products. To measure step times, all ranks train at the same time
without synchronization: processes that share cores and memory slow each other down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded
from dtkit._util.torch_private import FakeTensorMode
from dtkit.engine import dry_run, memory
from dtkit.engine.observe.clock import take_fast_quartile, time_call, time_repeatedly
from dtkit.engine.trial_training import BUCKET_BYTES, MIN_ROWS, TrialTraining, make_autocast, take_batch
from dtkit.planning.cost_model import LinkSpeeds, ModelSizes, StepTimings
from dtkit.planning.layer_chain import LayerChain
from dtkit.rpc import pickling
from dtkit.strategies.activation_checkpointing import checkpoint_blocks
from dtkit.strategies.meta_copy import count_bytes
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.cut import find_layer_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.engine.comm.host_messages import HostMessages
    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import RowSource
    from dtkit.planning.cost_model import ActivationPeak
    from dtkit.strategies.loss import Loss

ALL_REDUCE_BYTES = (8, 64 * 1024, 1024**2, 8 * 1024**2, BUCKET_BYTES)
PAIR_BYTES, NUM_PAIR_TRIPS = 1024**2, 3
NUM_PINGS = 20
_SAMPLE_ROWS = 3  # rows of a batch of which only the shapes are used


@dataclasses.dataclass(frozen=True)
class BenchmarkContext:
    """This engine's group and device, and its models and data by name."""

    group: Group
    device: torch.device
    models: Mapping[str, torch.nn.Module]
    data: Mapping[str, tuple[RowSource, Shards]]


# -- speed and links ----------------------------------------------------------------------------------------


def measure_links(context: BenchmarkContext, dtype: str) -> LinkSpeeds:
    """Measure the speed of this engine and of its links. A collective."""
    kind = getattr(torch, dtype)
    # waits: a collective, limited by the process group's timeout
    context.group.barrier()
    flops, multiply = _measure_matmul_flops(context, kind)
    if context.group.world_size == 1:
        return LinkSpeeds(flops, [], {}, 1.0)
    timings = _time_growing_sums(context, _time_all_reduce)
    return LinkSpeeds(
        flops,
        timings,
        _measure_pairs(context),
        _measure_overlap(context, multiply, timings[-1][0]),
        _time_direct_sums(context),
    )


def _measure_matmul_flops(context: BenchmarkContext, dtype: torch.dtype) -> tuple[float, Callable[[], Any]]:
    """Return (operations per second, a function that multiplies matrices)."""
    n = 8192 if context.device.type == "cuda" else 768
    a, b = (torch.ones(n, n, device=context.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    seconds = time_repeatedly(context.device, multiply, timeouts.MATMUL_BUDGET_S)
    return 2 * n**3 / take_fast_quartile(seconds), multiply


def _time_growing_sums(
    context: BenchmarkContext, time_sum: Callable[[BenchmarkContext, torch.Tensor], float]
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of growing sums, until one takes too long on any rank."""
    timings: list[tuple[int, float]] = []
    for size in ALL_REDUCE_BYTES:
        tensor = torch.zeros(size // 4, device=context.device)
        seconds = [time_sum(context, tensor) for _ in range(NUM_PINGS if size < 1024**2 else 6)]
        timings.append((size, statistics.median(seconds[1:])))
        if context.group.all_reduce_any(timings[-1][1] > timeouts.MAX_ALL_REDUCE_S):
            break
    return timings


def _time_direct_sums(context: BenchmarkContext) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of sums by sockets and memory of one host; empty if there are none."""
    if not context.group.can_sum_directly(torch.zeros(1, device=context.device)):
        return []
    return _time_growing_sums(context, _time_direct_sum)


def _time_direct_sum(context: BenchmarkContext, tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    context.group.all_reduce(tensor)
    return time.perf_counter() - start


def _time_all_reduce(context: BenchmarkContext, tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    dist.all_reduce(tensor)
    _synchronize(context)
    return time.perf_counter() - start


def _synchronize(context: BenchmarkContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def _measure_pairs(context: BenchmarkContext) -> dict[int, tuple[float, float]]:
    """Return (latency, bandwidth) to each higher rank. Pairs take turns, and the other ranks wait."""
    group = context.group
    device = context.device if "nccl" in group.backend else torch.device("cpu")  # gloo sends on the CPU only
    messages = group.open_messages() if context.device.type == "cpu" else None
    results = {}
    for low in range(group.world_size):
        for high in range(low + 1, group.world_size):
            if group.rank == low:
                results[high] = _measure_pair(context, high, device, messages)
            elif group.rank == high:
                _measure_pair(context, low, device, messages)
    return results


def _measure_pair(
    context: BenchmarkContext, peer: int, device: torch.device, messages: HostMessages | None
) -> tuple[float, float]:
    """Return (seconds for 8 bytes in one direction, bytes per second), as a pipeline's stages send them."""
    moves: list[Callable[[torch.Tensor, int], object]] = [dist.send, dist.recv]
    if messages is not None:
        moves = [messages.send, lambda tensor, rank: messages.start_receive(tensor, rank)()]
    if context.group.rank > peer:
        moves.reverse()
    small, large = torch.zeros(2, device=device), torch.zeros(PAIR_BYTES // 4, device=device)
    _time_moves(context, moves, small, peer)
    _time_moves(context, moves, large, peer)
    ping = statistics.median(_time_moves(context, moves, small, peer) for _ in range(NUM_PINGS)) / 2
    bulk = statistics.median(_time_moves(context, moves, large, peer) for _ in range(NUM_PAIR_TRIPS)) / 2
    return ping, PAIR_BYTES / bulk


def _time_moves(
    context: BenchmarkContext, moves: list[Callable[[torch.Tensor, int], object]], tensor: torch.Tensor, peer: int
) -> float:
    """Return the seconds of a message and its reply; the lower rank sends first."""
    start = time.perf_counter()
    for move in moves:
        move(tensor, peer)
    _synchronize(context)
    return time.perf_counter() - start


def _measure_overlap(context: BenchmarkContext, multiply: Callable[[], Any], nbytes: int) -> float:
    """Return the fraction of an all-reduce that is hidden by a computation of about the same length."""
    tensor = torch.zeros(nbytes // 4, device=context.device)
    fractions = []
    for _ in range(5):
        # waits: a collective, limited by the process group's timeout
        context.group.barrier()
        all_reduce_s = _time_all_reduce(context, tensor)
        num_calls = max(1, round(all_reduce_s / time_call(context.device, multiply)))
        # waits: a collective, limited by the process group's timeout
        context.group.barrier()
        computing_s = time_call(context.device, functools.partial(_call_repeatedly, multiply, num_calls))
        # waits: a collective, limited by the process group's timeout
        context.group.barrier()
        start = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        _call_repeatedly(multiply, num_calls)
        # waits: a collective, limited by the process group's timeout
        work.wait()
        _synchronize(context)
        both_s = time.perf_counter() - start
        fractions.append((all_reduce_s + computing_s - both_s) / min(all_reduce_s, computing_s))
    return min(1.0, max(0.0, statistics.median(fractions)))


def _call_repeatedly(work: Callable[[], Any], num_calls: int) -> None:
    for _ in range(num_calls):
        work()


# -- a model ------------------------------------------------------------------------------------------------


def measure_model_sizes(context: BenchmarkContext, program: bytes, model: str | None) -> ModelSizes:
    """Measure a model's memory, except activations.

    `program` has (a model without values, or None; the loss; the optimizer's factory).
    """
    module, _, factory, _ = load_program(context, program, model)
    (state_bytes, update_peak), reason = _try_or_explain(
        lambda: dry_run.estimate_optimizer_bytes(module, factory, context.device), (None, 0)
    )
    dense = dry_run.find_dense_gradient_parameters(module)
    return ModelSizes(
        parameters=count_bytes([*module.parameters(), *module.buffers()]),
        gradients=count_bytes(dense),
        shapes=tuple(tuple(p.shape) for p in dense),
        optimizer_state=state_bytes,
        update_peak=update_peak,
        reason=reason,
    )


def measure_activation_peaks(
    context: BenchmarkContext,
    program: bytes,
    model: str | None,
    data: str,
    rows: tuple[int, ...],
    precision: str | None = None,
) -> tuple[list[ActivationPeak], str]:
    """Measure forward and backward on tensors without memory; without a result, the text gives the reason."""
    module, loss_fn, _, _ = load_program(context, program, model)
    batch = take_batch(context.data[data][0], _SAMPLE_ROWS, torch.device("cpu"))
    autocast = functools.partial(make_autocast, context.device, precision)
    peaks, reason = _try_or_explain(
        lambda: dry_run.estimate_peaks(module, loss_fn, batch, rows, context.device, autocast), []
    )
    if any(peak.has_hidden_workspace for peak in peaks):
        return [], "it has recurrent layers, whose workspace isn't visible"
    return peaks, reason


def measure_layers(
    context: BenchmarkContext, program: bytes, model: str | None, data: str, rows: int, *, timed: bool
) -> tuple[LayerChain | None, str]:
    """Measure the layers of a model's chain; without a result, the text gives the reason.

    `timed` takes real steps on `rows`; the model must have values here. No collective.
    """
    module, loss_fn, _, _ = load_program(context, program, model)
    batch = take_batch(context.data[data][0], rows, context.device)
    return _try_or_explain(lambda: _measure_chain(module, loss_fn, batch, context.device if timed else None), None)


def _measure_chain(
    module: torch.nn.Module, loss_fn: Loss, batch: Any, device: torch.device | None
) -> LayerChain | None:
    names = tuple(name for name, _ in find_layer_chain(module))
    if not names:
        return None
    inputs, target = loss_fn.split_batch(batch)
    costs, output_bytes = layer_costs.measure_sizes(module, inputs)
    seconds = None
    if device is not None:
        seconds = layer_costs.measure_seconds(
            module, inputs, device, lambda output: loss_fn.evaluate_output(output, target).loss
        )
    return LayerChain(names, costs, seconds, tuple(nbytes / len(inputs.values[0]) for nbytes in output_bytes))


def load_program(
    context: BenchmarkContext, program: bytes, model: str | None, *, checkpoint: bool = True
) -> tuple[Any, Loss, Any, bool]:
    """Return (the model, the loss, the optimizer's factory, whether activations are computed again in backward).

    `model` names one on this engine. Without `checkpoint`, its blocks stay as they are.
    """
    # unpickles: sent by the notebook in a call
    empty_model, loss_fn, factory, activation_checkpointing = pickling.loads(program)
    module = empty_model if model is None else context.models[model]
    if activation_checkpointing and checkpoint:
        module = checkpoint_blocks(module, activation_checkpointing)
    return module, loss_fn, factory, bool(activation_checkpointing)


def _try_or_explain(work: Callable[[], Any], fallback: Any) -> tuple[Any, str]:
    """Return (the result of `work`, "") or, if it fails, (the fallback, the reason)."""

    def explain_error(error: Exception) -> tuple[Any, str]:
        if type(error).__module__ == FakeTensorMode.__module__:  # torch's message names only its own operation
            return fallback, "what it computes depends on the values of tensors, as with .item() or x[mask]"
        first_line = (str(error).strip().splitlines() or [""])[0]
        return fallback, f"{type(error).__name__}: {first_line}"[:200]

    return run_guarded(lambda: (work(), ""), explain_error)


def measure_step_times(
    context: BenchmarkContext,
    program: bytes,
    model: str,
    data: str,
    rows: int,
    precision: str | None = None,
    *,
    track_allocations: bool = False,
) -> StepTimings:
    """Take real steps on all ranks at the same time, on `rows` or fewer if steps are slow. A collective."""
    module, loss_fn, factory, _ = load_program(context, program, model)
    start_trial = functools.partial(
        TrialTraining, context.device, module, loss_fn, factory, context.data[data][0], precision
    )
    # waits: a collective, limited by the process group's timeout
    context.group.barrier()
    try:
        with torch.random.fork_rng(devices=[] if context.device.type == "cpu" else [context.device]):
            return _run_trial(context.device, start_trial, rows, track_allocations=track_allocations)
    finally:
        memory.release_unused_memory()


def _run_trial(
    device: torch.device, start_trial: Callable[[], TrialTraining], rows: int, *, track_allocations: bool
) -> StepTimings:
    max_rows = _find_affordable_rows(start_trial, rows)
    memory.release_unused_memory()  # steps of several sizes fragment the heap, unlike training
    bytes_before = memory.reset_peak(device)
    with contextlib.closing(start_trial()) as trial:
        trial.run_warmup_steps(max_rows)
        growth = None if bytes_before is None else memory.read_peak(device) - bytes_before
        row_counts = (max_rows, 2 * max_rows) if max_rows < 2 * MIN_ROWS else (max_rows // 2, max_rows)
        points = [(count, *trial.measure_step_seconds(count)) for count in row_counts]
        peaks = [trial.measure_activation_peak(count) for count in row_counts] if track_allocations else []
        return StepTimings(
            points, trial.measure_update_seconds(), trial.count_optimizer_bytes(), max_rows, growth, peaks
        )


def _find_affordable_rows(start_trial: Callable[[], TrialTraining], rows: int) -> int:
    """Return the rows for the next trial. A function of its own, so that this trial's memory is freed."""
    with contextlib.closing(start_trial()) as trial:
        return trial.find_affordable_rows(rows)
