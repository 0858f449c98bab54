"""Arithmetic of load balancing by the ranks' speeds, and of checksums compared across ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dtkit._util import timeouts
from dtkit.data.sharding import divide_proportionally
from dtkit.engine.state.checksum import compute_checksum
from dtkit.history.history import ROW_DTYPE
from dtkit.training.load_balancing import MIN_STEPS, LoadBalancer, _summarize_steps
from dtkit.training.replica_check import MAX_TIME_FRACTION, ReplicaChecker
from dtkit.types import ReplicaCheckResult


def rows(samples, seconds, steps=MIN_STEPS):
    found = np.zeros(steps, ROW_DTYPE)
    found["samples"], found["forward_s"] = samples, seconds
    return found


def landed(balancer, costs, fixed=0.0, batch=64):
    """One dispatch in which rank r takes costs[r] seconds a sample and `intercept` a step."""
    counts = divide_proportionally(batch, balancer.shares)
    return balancer.on_result([rows(n, n * cost + fixed) for n, cost in zip(counts, costs, strict=True)])


def balanced(costs, fixed=0.0, rounds=12):
    balancer = LoadBalancer([10] * len(costs))
    for _ in range(rounds):
        landed(balancer, costs, fixed)
    return balancer.shares


def test_the_smaller_last_step_of_an_epoch_is_no_measure_of_speed():
    assert _summarize_steps([(48, 0.1), (48, 0.1), (48, 0.1), (10, 0.02)]) == (48, pytest.approx(0.1))


def test_shares_converge_in_proportion_to_speed():
    assert balanced([1.0, 2.0]) == pytest.approx([2 / 3, 1 / 3])
    assert balanced([1.0, 1.0, 4.0]) == pytest.approx([4 / 9, 4 / 9, 1 / 9])


def test_step_times_become_equal_despite_a_fixed_cost_per_step():
    shares = balanced([1.0, 2.0], fixed=8.0)
    times = [share * 64 * cost + 8.0 for share, cost in zip(shares, [1.0, 2.0], strict=True)]
    assert times[0] == pytest.approx(times[1], rel=0.06)


def test_the_first_dispatch_does_not_change_the_shares():
    balancer = LoadBalancer([10, 10])
    assert not landed(balancer, [1.0, 5.0])
    assert balancer.shares == (0.5, 0.5)
    assert landed(balancer, [1.0, 5.0])


def test_noise_does_not_change_the_shares():
    balancer = LoadBalancer([10, 10])
    landed(balancer, [1.0, 1.0])
    assert not landed(balancer, [1.0, 1.03])
    assert balancer.shares == (0.5, 0.5)


def test_delays_in_some_steps_do_not_change_the_shares():
    balancer = LoadBalancer([10, 10])
    landed(balancer, [1.0, 1.0])
    disturbed = rows(32, 32.0, 8)
    disturbed["forward_s"][::2] *= 10
    assert not balancer.on_result([disturbed, rows(32, 32.0, 8)])


def test_initial_shares_follow_the_shard_sizes():
    assert LoadBalancer([30, 10]).shares == (0.75, 0.25)


def test_every_rank_gets_a_sample_if_there_are_enough():
    assert divide_proportionally(10, (0.98, 0.01, 0.01)) == (8, 1, 1)
    assert divide_proportionally(2, (0.98, 0.01, 0.01)) == (1, 1, 0)
    assert sum(divide_proportionally(101, (0.5, 0.3, 0.2))) == 101


# -- checksums ------------------------------------------------------------------------------------------------


def whole(*values: int) -> list[dict[tuple[int, ...], int]]:
    """Checksums of ranks each of which holds the whole model."""
    return [{(): value} for value in values]


def cut(*rows: tuple[int, int]) -> list[dict[tuple[int, ...], int]]:
    """Checksums of replicas, each of two ranks with another part of the model."""
    return [{(part,): value} for row in rows for part, value in enumerate(row)]


def test_equal_checksums_are_reported_as_identical_parameters():
    watch = ReplicaChecker()
    assert watch.is_due(0.0)
    assert watch.on_result(0.0, 5, whole(7, 7, 7), 0.0)
    assert watch.result is not None
    assert watch.result == ReplicaCheckResult(5, (), None)
    assert not watch.on_result(2.0, 9, whole(8, 8, 8), 0.0)  # nothing new to report
    assert watch.result.step == 9


def test_a_differing_rank_is_reported_with_its_first_differing_step():
    watch = ReplicaChecker()
    watch.on_result(0.0, 5, whole(7, 7, 7), 0.0)
    assert watch.on_result(2.0, 8, whole(7, 9, 7), 0.0)
    assert (watch.result.differing_ranks, watch.result.differing_since) == ((1,), 8)
    assert not watch.on_result(4.0, 11, whole(1, 9, 1), 0.0)
    assert (watch.result.step, watch.result.differing_since) == (11, 8)
    assert watch.on_result(6.0, 13, whole(1, 1, 1), 0.0)
    assert (watch.result.differing_ranks, watch.result.differing_since) == ((), None)


def test_all_ranks_are_reported_as_differing_without_a_majority():
    watch = ReplicaChecker()
    watch.on_result(0.0, 5, whole(7, 9), 0.0)
    assert watch.result.differing_ranks == (0, 1)


def test_costly_checksums_are_requested_rarely():
    watch = ReplicaChecker()
    watch.on_result(10.0, 5, whole(7, 7), 0.1)
    assert not watch.is_due(10.0 + 0.99 * 0.1 / MAX_TIME_FRACTION)
    assert watch.is_due(10.0 + 0.1 / MAX_TIME_FRACTION)
    cheap = ReplicaChecker()
    cheap.on_result(10.0, 5, whole(7, 7), 1e-6)
    assert not cheap.is_due(10.0 + 0.99 * timeouts.REPLICA_CHECK_INTERVAL_S)


def test_a_check_is_due_again_if_ranks_return_no_checksums():
    watch = ReplicaChecker()
    assert not watch.on_result(0.0, 5, [None, None], 0.0)
    assert watch.result is None
    assert watch.is_due(0.0)


def test_a_part_is_compared_with_the_same_part_of_other_replicas():
    watch = ReplicaChecker()
    assert watch.on_result(0.0, 5, cut((7, 8), (7, 8)), 0.0)
    assert watch.result == ReplicaCheckResult(5, (), None, num_holders=2)
    assert watch.on_result(2.0, 8, cut((7, 8), (7, 9)), 0.0)
    assert watch.result == ReplicaCheckResult(8, (1, 3), 8, num_holders=2)  # two replicas have no majority
    assert not watch.on_result(4.0, 9, cut((7, 8), (7, 9)), 0.0)
    assert watch.result == ReplicaCheckResult(9, (1, 3), 8, num_holders=2)
    assert not watch.on_result(6.0, 10, cut((8, 8), (8, 9)), 0.0)  # equal checksums of different parts mean nothing
    three = ReplicaChecker()
    three.on_result(0.0, 5, cut((7, 8), (7, 9), (7, 8)), 0.0)
    assert three.result == ReplicaCheckResult(5, (3,), 5, num_holders=3)


def test_unsharded_parameters_are_compared_across_all_ranks():
    sums = [found | {(): 1} for found in cut((7, 8), (7, 8))]
    watch = ReplicaChecker()
    watch.on_result(0.0, 5, sums, 0.0)
    assert watch.result == ReplicaCheckResult(5, (), None, num_holders=2)
    watch.on_result(2.0, 6, [*sums[:3], sums[3] | {(): 2}], 0.0)
    assert watch.result == ReplicaCheckResult(6, (3,), 6, num_holders=2)
    alone = ReplicaChecker()
    alone.on_result(0.0, 5, sums[:2], 0.0)
    assert alone.result == ReplicaCheckResult(5, (), None, num_holders=1)


def test_a_model_without_replicas_has_no_result_and_is_checked_rarely():
    watch = ReplicaChecker()
    assert not watch.on_result(10.0, 5, cut((7, 8)), 1e-6)
    assert watch.result is None
    assert not watch.is_due(9.9 + timeouts.UNSHARED_REPLICA_CHECK_INTERVAL_S)
    assert watch.is_due(10.0 + timeouts.UNSHARED_REPLICA_CHECK_INTERVAL_S)
    assert watch.on_result(100.0, 6, cut((7, 8), (7, 8)), 0.0)
    assert not watch.on_result(102.0, 7, cut((7, 8)), 0.0)  # the other replica is gone, and so is its result
    assert watch.result is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_checksum_changes_with_a_single_bit(dtype, offset):
    tensor = torch.arange(1 + offset, 100 + offset).to(dtype)[offset:]  # a view may be unaligned
    before = compute_checksum([tensor])
    assert compute_checksum([tensor.clone()]) == before
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    assert compute_checksum([changed]) != before
    assert compute_checksum([]) == 0


def test_balancing_steps_of_mostly_fixed_cost_makes_none_slower():
    """One rank is twice as slow, but fixed costs outweigh samples: no share helps much, and none diverges."""
    balancer = LoadBalancer([10, 10])
    for _ in range(20):
        counts = divide_proportionally(64, balancer.shares)
        balancer.on_result([rows(n, slow * (100.0 + n)) for n, slow in zip(counts, (2.0, 1.0), strict=True)])
    counts = divide_proportionally(64, balancer.shares)
    assert min(counts) >= 1
    before = [2 * (100 + 32), 100 + 32]
    after = [2 * (100 + counts[0]), 100 + counts[1]]
    assert max(after) <= max(before)
