"""Partitions: the rows of each rank, and how many of them each step takes."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtkit.data import partition_view, sharding
from dtkit.data.partition import Partition, as_labels
from dtkit.data.sharding import partition_rows
from dtkit.data.step_counts import count_cumulative_samples

sizes_of_shards = st.lists(st.integers(0, 40) | st.just(1), min_size=1, max_size=9).filter(any)
huge_sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=90)


def by_definition(sizes: list[int]) -> np.ndarray:
    """All keys of all shards sorted, as exact fractions; row T counts each shard's among the first T."""
    keys = sorted((Fraction(2 * j + 1, 2 * size), i) for i, size in enumerate(sizes) for j in range(size))
    taken = np.zeros((len(keys) + 1, len(sizes)), dtype=np.int64)
    for t, (_, shard) in enumerate(keys):
        taken[t + 1] = taken[t]
        taken[t + 1, shard] += 1
    return taken


# --- counts -------------------------------------------------------------------------------------------------


@given(sizes_of_shards)
@settings(max_examples=150, deadline=None)
def test_cumulative_counts_follow_the_order_of_keys(sizes: list[int]) -> None:
    assert np.array_equal(count_cumulative_samples(sizes, np.arange(sum(sizes) + 1)), by_definition(sizes))


def count_samples_per_step(sizes: list[int], batch_size: int, first: int, last: int) -> np.ndarray:
    """The samples of each shard in steps `first` to `last` - 1; 0 after the last step."""
    ends = np.minimum(np.arange(first, last + 1) * batch_size, sum(sizes))
    return np.diff(count_cumulative_samples(sizes, ends), axis=0)


@given(sizes_of_shards, st.integers(1, 80))
@settings(max_examples=150, deadline=None)
def test_every_step_is_full_and_all_shards_end_together(sizes: list[int], batch_size: int) -> None:
    n = sum(sizes)
    steps = -(-n // batch_size)
    taken = count_samples_per_step(sizes, batch_size, 0, steps)
    assert taken.shape == (steps, len(sizes))
    assert taken.dtype == np.int64
    assert taken.min() >= 0
    assert taken.sum(axis=1).tolist() == [min(batch_size, n - s * batch_size) for s in range(steps)]
    assert taken.sum(axis=0).tolist() == sizes
    assert not count_samples_per_step(sizes, batch_size, steps, steps + 3).any()


@given(sizes_of_shards, st.integers(1, 30), st.data())
@settings(max_examples=80, deadline=None)
def test_counts_of_a_step_do_not_depend_on_other_steps(sizes: list[int], batch_size: int, data: st.DataObject) -> None:
    steps = -(-sum(sizes) // batch_size)
    first = data.draw(st.integers(0, steps))
    last = data.draw(st.integers(first, steps))
    whole = count_samples_per_step(sizes, batch_size, 0, steps)
    assert np.array_equal(count_samples_per_step(sizes, batch_size, first, last), whole[first:last])


@given(huge_sizes, st.lists(st.floats(0, 1), min_size=1, max_size=30))
@settings(max_examples=80, deadline=None)
def test_cumulative_counts_stay_close_to_proportional(sizes: list[int], moments: list[float]) -> None:
    n = sum(sizes)
    taken = np.array(sorted(int(moment * n) for moment in moments))
    held = count_cumulative_samples(sizes, taken)
    assert held.sum(axis=1).tolist() == taken.tolist()
    assert (np.diff(held, axis=0) >= 0).all()
    assert (held <= np.array(sizes)).all()
    # The threshold that cuts the order lies within R / 2n of taken / n, and rounds each shard by at most 1/2.
    for row, total in zip(held.tolist(), taken.tolist(), strict=True):
        for count, size in zip(row, sizes, strict=True):
            assert abs(count - Fraction(total * size, n)) <= Fraction(1, 2) + Fraction(len(sizes) * size, 2 * n)


def test_counts_of_a_billion_rows_are_exact() -> None:
    # Keys that differ in the eighteenth digit: floating point can't tell them apart.
    sizes = [333_333_333, 333_333_334, 333_333_332, 1]
    taken = np.array([0, 1, 2, 500_000_000, 999_999_998, 999_999_999, 10**9])
    held = count_cumulative_samples(sizes, taken)
    assert held.sum(axis=1).tolist() == taken.tolist()
    assert held[0].tolist() == [0, 0, 0, 0]
    assert held[1].tolist() == [0, 1, 0, 0]
    assert held[2].tolist() == [1, 1, 0, 0]
    # Just before the end the largest keys are missing: those of the largest shards.
    assert held[-2].tolist() == [333_333_333, 333_333_333, 333_333_332, 1]
    assert held[-3].tolist() == [333_333_332, 333_333_333, 333_333_332, 1]
    assert held[-1].tolist() == sizes


def test_counts_are_exact_for_one_large_shard_among_many_small_ones() -> None:
    sizes = [10**6, *([1] * 255)]
    held = count_cumulative_samples(sizes, np.arange(500_000, 500_400))
    assert held.sum(axis=1).tolist() == list(range(500_000, 500_400))
    # All 255 small shards have the key 1/2, in the order of their index, after the first half of the large one.
    expected = np.clip(np.arange(500_000, 500_400)[:, None] - 500_000 - np.arange(255), 0, 1)
    assert np.array_equal(held[:, 1:], expected)


# --- cut ----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 200),
    st.integers(1, 12),
    st.sampled_from(sharding.PARTITION_METHODS),
    st.none() | st.integers(0, 9),
    st.none() | st.lists(st.floats(0.01, 100), min_size=12, max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_shards_are_disjoint_complete_and_reproducible(
    n: int, ranks: int, by: str, seed: int | None, weights: list[float] | None
) -> None:
    ranks = min(n, ranks)
    labels = np.arange(n) * 7 % 5
    options = {"by": by, "seed": seed, "labels": labels, "weights": weights and weights[:ranks]}
    shards = partition_rows(n, ranks, **options)
    assert len(shards) == ranks
    assert all(shard.dtype == np.int64 for shard in shards)
    assert sorted(np.concatenate(shards).tolist()) == list(range(n))
    again = partition_rows(n, ranks, **options)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))
    sizes = [len(shard) for shard in shards]
    if weights is None:
        assert max(sizes) - min(sizes) <= 1
    else:
        assert min(sizes) >= 1


@given(st.lists(st.integers(0, 6), min_size=8, max_size=120), st.integers(1, 8), st.none() | st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_stratified_spreads_every_class_evenly(labels: list[int], ranks: int, seed: int | None) -> None:
    part = Partition(len(labels), ranks, by="stratified", labels=labels, seed=seed)
    assert part.class_counts is not None
    assert (np.ptp(part.class_counts, axis=0) <= 1).all()
    assert max(part.sizes) - min(part.sizes) <= 1


def test_each_method_returns_the_expected_rows() -> None:
    assert [s.tolist() for s in partition_rows(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [s.tolist() for s in partition_rows(7, 3, by="strided")] == [[0, 3, 6], [1, 4], [2, 5]]
    labels = ["a", "a", "b", "b", "a", "b"]
    assert [s.tolist() for s in partition_rows(6, 2, by="stratified", labels=labels)] == [[0, 3, 4], [1, 2, 5]]


def test_a_seed_permutes_rows_and_keeps_sizes() -> None:
    # Written down: a change here breaks everybody's runs.
    assert [s.tolist() for s in partition_rows(8, 2, seed=0)] == [[2, 4, 3, 6], [5, 0, 1, 7]]
    assert not np.array_equal(partition_rows(100, 2, seed=0)[0], partition_rows(100, 2, seed=1)[0])


@pytest.mark.parametrize(
    ("n", "weights", "sizes"),
    [
        (10, [1, 1, 2], [3, 2, 5]),  # 2.5, 2.5, 5: the first of equal remainders
        (100, [0.1, 0.2, 0.7], [10, 20, 70]),
        (10, [1, 1000], [1, 9]),  # never nothing
        (3, [1e-300, 1e300, 1e-300], [1, 1, 1]),
    ],
)
def test_sizes_are_proportional_to_weights(n: int, weights: list[float], sizes: list[int]) -> None:
    for by in ("contiguous", "strided"):
        assert [len(shard) for shard in partition_rows(n, len(weights), by=by, weights=weights)] == sizes


def test_weighted_strided_rows_are_spread_evenly() -> None:
    slow, fast = partition_rows(12, 2, by="strided", weights=[1, 2])
    assert slow.tolist() == [1, 4, 7, 10]
    assert len(fast) == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_rows(3, 4), r"3 samples .* 4 ranks.* at most 3 engines"),
        (lambda: partition_rows(3, 0), r"0 ranks"),
        (lambda: partition_rows(2**31, 2), r"2147483648 rows .*2\*\*30"),
        (lambda: partition_rows(9, 2, by="random"), r"by='random' .*'contiguous', 'strided', 'stratified'"),
        (lambda: partition_rows(9, 2, weights=[1]), r"1 weights for 2 ranks.*Give 2 weights"),
        (lambda: partition_rows(9, 2, weights=[1, 0]), r"weights\[1\]=0\.0 .*above 0"),
        (lambda: partition_rows(9, 2, weights=[-1, 1]), r"weights\[0\]=-1\.0"),
        (lambda: partition_rows(9, 2, weights=[1, float("nan")]), r"weights\[1\]=nan"),
        (lambda: partition_rows(9, 2, weights=[1, float("inf")]), r"weights\[1\]=inf"),
        (lambda: partition_rows(9, 2, by="stratified"), r"needs labels.*Give labels="),
        (lambda: partition_rows(9, 2, by="stratified", labels=[1, 2]), r"labels of shape \(2,\) .* 9 rows"),
        (lambda: Partition(9, 2, labels=np.ones((9, 2))), r"labels of shape \(9, 2\)"),
        (lambda: partition_rows(9, 2, seed=-1), r"seed=-1 .*Use seed=0"),
        (lambda: partition_rows(9, 2, seed=True), r"seed=True"),
        (lambda: partition_rows(9, 2, seed=0.5), r"seed=0\.5"),
        (lambda: Partition(9, 2).indices(2), r"rank=2 .* 0 to 1"),
        (lambda: Partition(9, 2).indices(-1), r"rank=-1 .* 0 to 1"),
    ],
)
def test_an_invalid_argument_is_refused_with_rule_and_remedy(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- Partition ----------------------------------------------------------------------------------------------


def test_a_partition_has_the_rows_of_partition_rows() -> None:
    part = Partition(1797, 4, seed=3, weights=[1, 2, 3, 4], source="handle")
    assert (part.n, part.world_size, part.by, part.seed, part.source) == (1797, 4, "contiguous", 3, "handle")
    assert part.weights == (1.0, 2.0, 3.0, 4.0)
    assert part.labels is None
    assert part.class_counts is None
    assert part.classes is None
    assert part.format_headline() == "1,797 rows on 4 nodes, shuffled (seed=3)"
    for rank, rows in enumerate(partition_rows(1797, 4, seed=3, weights=[1, 2, 3, 4])):
        assert np.array_equal(part.indices(rank), rows)
        assert part.sizes[rank] == len(rows)
    spec = json.loads(part.to_json())
    assert spec["sizes"] == list(part.sizes)
    assert spec["by"] == "contiguous"
    copy = pickle.loads(pickle.dumps(part))
    assert np.array_equal(copy.indices(2), part.indices(2))


def test_changing_returned_indices_leaves_the_partition_unchanged() -> None:
    for options in ({}, {"seed": 0}, {"by": "stratified", "labels": np.arange(10) % 2}):
        part = Partition(10, 2, **options)
        before = part.indices(0).copy()
        part.indices(0)[:] = -1
        assert np.array_equal(part.indices(0), before)


def test_shards_are_ranges_or_32_bit_integers() -> None:
    assert len(pickle.dumps(Partition(2**30, 8))) < 2000
    assert len(pickle.dumps(Partition(2**30, 8, by="strided"))) < 2000
    assert len(pickle.dumps(Partition(100_000, 8, seed=0))) < 410_000


@pytest.mark.parametrize("by", sharding.PARTITION_METHODS)
def test_a_partition_is_shown_as_text_html_and_png(by: str) -> None:
    labels = np.arange(300) % 3
    part = Partition(300, 40, by=by, labels=labels)
    assert repr(part) == f"Partition(300 rows on 40 nodes, {by}, 7 or 8 each)"
    page = part._repr_html_()
    assert ">39</td>" in page
    assert "class 2" in page
    assert 'src="data:image/png;base64,' in page
    assert part._repr_png_().startswith(b"\x89PNG")


def test_a_partition_of_many_nodes_shows_the_first_and_the_last_ones() -> None:
    page = Partition(4000, 40, by="stratified", labels=np.arange(4000) % 3)._repr_html_()
    rows, classes = [re.findall(r"<tr>(.*?)</tr>", table) for table in page.split("<table")[1:]]
    assert [len(rows), len(classes)] == [12, 12]  # a head, five, one for those between, five
    assert "…" in rows[6]
    assert "…" in classes[6]
    assert "node 34" not in page
    assert "node 35" in page


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seed": 0}, "Partition(60,000 rows on 2 nodes, shuffled (seed=0), 30,000 each)"),
        ({"weights": (1, 3), "by": "strided"}, "Partition(60,000 rows on 2 nodes, strided, 15,000 + 45,000)"),
        ({"weights": (1, 2, 3, 4, 5)}, "Partition(60,000 rows on 5 nodes, contiguous, 4,000 to 20,000 each)"),
    ],
)
def test_the_text_of_a_partition_fits_a_line(options: dict[str, Any], line: str) -> None:
    part = Partition(60_000, len(options.get("weights", (1, 1))), **options)
    assert repr(part) == line
    part.note = "24 columns as float32, target 'kind' as int64 (" + ", ".join(f"{k}=class{k}" for k in range(12)) + ")"
    first, *note = repr(part).splitlines()
    assert first == line
    assert " ".join(text.strip() for text in note) == part.note
    assert max(map(len, [first, *note])) <= 88


@pytest.mark.parametrize(("world_size", "num_classes"), [(2, 10), (10, 2), (3, 4)])
def test_tables_of_a_partition_are_narrow(world_size: int, num_classes: int) -> None:
    part = Partition(300, world_size, by="stratified", labels=np.arange(300) % num_classes)
    page = part._repr_html_()
    heads = [head.count("<th ") for head in re.findall("<thead>(.*?)</thead>", page)]
    assert heads == [3, 1 + min(world_size, num_classes)]
    assert page.count(f">{300 // world_size // num_classes}</td>") >= world_size * num_classes
    (narrowest,) = re.findall(r"min-width: (\d+)px", page)
    assert int(narrowest) <= 460  # the width of a cell in a window of 600 px


def test_the_figure_shows_rows_and_the_balance_of_classes() -> None:
    figure = Partition(20, 2, by="strided", labels=np.arange(20) // 10).figure()
    rows, classes = figure.axes
    strip = np.asarray(rows.images[0].get_array())
    assert strip.tolist() == [[1.0, 0.0] * 10, [0.0, 1.0] * 10]
    assert [bar.get_width() for bar in classes.patches] == [0.5] * 4
    assert len(Partition(20, 2).figure().axes) == 1


@pytest.mark.parametrize("by", ["contiguous", "strided"])
@pytest.mark.parametrize("seed", [None, 0])
def test_densities_of_all_ranks_add_up_to_one(by: str, seed: int | None) -> None:
    part = Partition(12_345, 7, by=by, seed=seed)
    strip = np.stack([partition_view.compute_density(shard, part.n, 111) for shard in part._shards])
    assert np.allclose(strip.sum(axis=0), 1)


def test_only_the_table_of_classes_is_folded():
    page = Partition(40, 2, labels=np.arange(40) % 4)._repr_html_()
    shown, folded = page.split("<details>")
    assert shown.count("<table") == 1
    assert folded.split("</details>")[0].count("class 3") == 1


def test_a_label_cannot_inject_html() -> None:
    page = Partition(4, 2, labels=["<script>", "b", "<script>", "b"])._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_partition_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from dtkit.data.partition import Partition; Partition(9, 2, seed=0, labels=[0] * 9)\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_figure_does_not_import_pyplot() -> None:
    code = (
        "import sys; from dtkit.data.partition import Partition; Partition(9, 2)._repr_png_()\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the warning about unequal classes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "ranks", "classes"),
    [(40, 2, 2), (100, 4, 10), (1000, 8, 2), (1000, 4, 31), (1797, 4, 10), (50_000, 256, 10)],
)
def test_sorted_labels_cause_a_warning_with_the_remedy(n: int, ranks: int, classes: int) -> None:
    labels = np.sort(np.arange(n) % classes)
    with pytest.warns(UserWarning, match=r"sorted.*seed=0 or by='stratified'") as caught:
        Partition(n, ranks, labels=labels)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Partition(n, ranks, labels=labels, seed=0)
        Partition(n, ranks, labels=labels, by="stratified")


def test_random_shards_cause_no_warning() -> None:
    generator = np.random.default_rng(0)
    for _ in range(1000):
        n = int(generator.integers(50, 3000))
        classes = int(generator.integers(1, 15))
        shares = generator.dirichlet(np.ones(classes) * generator.choice([0.3, 1, 10]))
        labels = generator.choice(classes, n, p=shares)
        ranks = int(generator.integers(1, 9))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Partition(n, ranks, labels=labels)


def test_labels_that_are_not_classes_are_ignored() -> None:
    for labels in (np.linspace(0, 1, 100), np.arange(100), np.array([object()] * 100)):
        assert as_labels(labels) is None
        assert Partition(100, 2, labels=labels).class_counts is None
    assert as_labels(np.zeros((100, 2), dtype=int)) is None
    for labels in ([True, False] * 50, ["a", "b"] * 50, np.array(["a", "b"] * 50, dtype=object)):
        assert as_labels(labels) is not None
        assert Partition(100, 2, labels=labels).class_counts.tolist() == [[25, 25], [25, 25]]


def test_labels_may_be_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    part = Partition(6, 2, by="stratified", labels=torch.tensor([0, 0, 0, 0, 1, 1]))
    assert part.class_counts.tolist() == [[2, 1], [2, 1]]
