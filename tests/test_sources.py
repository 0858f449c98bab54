"""Data sources: tables, files and Datasets as rows that are taken by index."""

from __future__ import annotations

import collections
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dtkit.data import columns as frames
from dtkit.data.columns import ColumnSelection
from dtkit.engine.data import memmap, parquet
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.loader import LoadedBatches
from dtkit.engine.data.memmap import FileBackedData, MappedFile
from dtkit.engine.data.parquet import ParquetSource
from dtkit.engine.data.paths import describe_files
from dtkit.engine.data.prefetch_loader import SyncLoader
from dtkit.engine.data.sample_seeds import SampleSeeds
from dtkit.engine.data.sources import ArraySource, DatasetSource, HubSource, MappedSource, as_source, load_source
from dtkit.rpc import pickling
from dtkit.rpc.job_plan import JobPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

datasets = pytest.importorskip("datasets")

ROWS = 40


def frame(**columns: Any) -> pd.DataFrame:
    """Two numbers and a label per row, and the given columns."""
    rows = np.arange(ROWS)
    return pd.DataFrame({"a": rows * 0.5, "b": rows, "label": rows % 3, **columns})


def take(source: Any, *rows: int) -> Any:
    return source.take(np.array(rows, dtype=np.int32))


# -- DataFrames ---------------------------------------------------------------------------------------------


def test_a_dataframe_becomes_features_and_a_target():
    (x, y), columns = frames.convert_frame(frame(), ColumnSelection.from_arguments("label"))
    assert (x.dtype, x.shape, y.dtype, y.shape) == (np.float32, (ROWS, 2), np.int64, (ROWS,))
    assert x[3].tolist() == [1.5, 3.0]
    assert y[:4].tolist() == [0, 1, 2, 0]
    assert columns.features == ("a", "b")
    assert frames.describe_arrays((x, y), columns) == "2 columns as float32, target 'label' as int64"


FEATURES = {
    "float64 is what pandas makes of every decimal": ({"a": "f8", "b": "f8"}, "float32"),
    "a narrower float is meant": ({"a": "f2", "b": "f2"}, "float16"),
    "integers stay integers": ({"a": "u1", "b": "u1"}, "uint8"),
    "mixed integers": ({"a": "i4", "b": "i8"}, "float32"),
    "numbers and booleans": ({"a": "f4", "b": "bool"}, "float32"),
    "booleans": ({"a": "bool", "b": "bool"}, "float32"),
    "nullable integers": ({"a": "Int16", "b": "Int16"}, "int16"),
    "nullable floats": ({"a": "Float64", "b": "Float32"}, "float32"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_converted_to_the_expected_dtype(name: str):
    dtypes, expected = FEATURES[name]
    rows = pd.DataFrame({"a": [0, 1, 1], "b": [1, 0, 1], "y": [0.5, 1, 2]}).astype(dtypes)
    (x, y), _ = frames.convert_frame(rows, ColumnSelection.from_arguments("y"))
    assert x.dtype == expected
    assert x.tolist() == [[0, 1], [1, 0], [1, 1]]
    assert y.dtype == np.float32


def test_float_features_are_converted_to_the_default_dtype_of_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    (x, _), _ = frames.convert_frame(frame(), ColumnSelection.from_arguments("label"))
    assert x.dtype == np.float64


@pytest.mark.parametrize(
    ("target", "shape"), [("label", (ROWS,)), (["label"], (ROWS, 1)), (["label", "b"], (ROWS, 2)), ([], None)]
)
def test_a_target_has_the_requested_shape(target: Any, shape: tuple[int, ...] | None):
    arrays, _ = frames.convert_frame(frame(), ColumnSelection.from_arguments(target))
    assert (arrays[1].shape if len(arrays) > 1 else None) == shape


def test_features_follow_the_order_of_the_columns_argument():
    (x, _), _ = frames.convert_frame(frame(city=["x"] * ROWS), ColumnSelection.from_arguments("label", ["b", "a"]))
    assert x[3].tolist() == [3.0, 1.5]


def test_a_categorical_target_is_encoded_the_same_way_in_later_data():
    kinds = pd.Categorical(["dog", "cat", "cow"] * 2, categories=["cow", "dog", "cat"])
    rows = pd.DataFrame({"x": range(6), "kind": kinds})
    arrays, columns = frames.convert_frame(rows, ColumnSelection.from_arguments("kind"))
    assert arrays[1].tolist() == [1, 2, 0, 1, 2, 0]
    assert frames.describe_arrays(arrays, columns).endswith("target 'kind' as int64 (0=cow, 1=dog, 2=cat)")
    later = pd.DataFrame({"kind": pd.Categorical(["cat", "dog"]), "extra": ["?", "!"], "x": [1, 2]})
    (x, y), _ = frames.convert_frame(later, columns)
    assert (x.tolist(), y.tolist()) == ([[1], [2]], [2, 1])
    strange = pd.DataFrame({"kind": pd.Categorical(["cat", "hen"]), "x": [1, 2]})
    with pytest.raises(
        ValueError, match=r"the target 'kind' has the classes hen, which the training data did not have"
    ):
        frames.convert_frame(strange, columns)


BAD_FRAMES: dict[str, tuple[Callable[[], pd.DataFrame], Any, type[Exception], str]] = {
    "objects": (
        lambda: frame(city=pd.Series(["x"] * ROWS, dtype=object), when=pd.Timestamp(0)),
        "label",
        TypeError,
        r"columns 'city' \(object\), 'when' \(datetime64.*\) are not numbers.*get_dummies\(df, columns=\['city', 'when",
    ),
    "strings": (lambda: frame(city=["x"] * ROWS), "label", TypeError, r"columns 'city' \(str.*\) are not numbers"),
    "categories as features": (
        lambda: frame(kind=pd.Categorical(["u"] * ROWS)),
        "label",
        TypeError,
        r"columns 'kind' \(category\) are not numbers",
    ),
    "a target of text": (
        lambda: frame(kind=["u"] * ROWS),
        "kind",
        TypeError,
        r"the target 'kind' has dtype .*df\['kind'\] = df\['kind'\]\.astype\('category'\)",
    ),
    "missing numbers": (
        lambda: frame(c=[float("nan"), None] + [1.0] * (ROWS - 2)),
        "label",
        ValueError,
        r"values are missing \(NaN\) in the columns 'c' \(2\).*df\.dropna\(\)",
    ),
    "missing nullable numbers": (
        lambda: frame(c=pd.array([None] + [1] * (ROWS - 1), "Int64")),
        "label",
        ValueError,
        r"missing \(NaN\) in the columns 'c' \(1\)",
    ),
    "missing classes": (
        lambda: frame(c=pd.Categorical([None] + ["u"] * (ROWS - 1))),
        "c",
        ValueError,
        r"missing \(NaN\) in the columns 'c' \(1\)",
    ),
    "no target": (frame, None, ValueError, r"a table needs target=.*columns 'a', 'b', 'label'; or say target=\[\]"),
    "an unknown target": (frame, "lable", ValueError, r"no column 'lable'. It has columns 'a', 'b', 'label'"),
    "nothing but a target": (lambda: frame()[["a"]], "a", ValueError, "no column besides the target 'a'"),
    "a name twice": (
        lambda: pd.concat([frame(), frame()[["a"]]], axis=1),
        "label",
        ValueError,
        "column 'a' in the table more than once",
    ),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_an_invalid_dataframe_is_refused(name: str):
    make, target, kind, message = BAD_FRAMES[name]
    with pytest.raises(kind, match=message):
        frames.convert_frame(make(), ColumnSelection.from_arguments(target))


def test_columns_must_be_a_list_without_the_target():
    with pytest.raises(TypeError, match=r"columns='a'; it must be a list of names, as in columns=\['a'\]"):
        ColumnSelection.from_arguments("label", "a")
    with pytest.raises(ValueError, match="column 'a' can't be feature and target together"):
        frames.convert_frame(frame(), ColumnSelection.from_arguments("a", ["a", "b"]))


def test_dataframes_and_series_are_accepted_as_arrays():
    source = as_source((frame()[["a", "b"]], frame()["label"]))
    x, y = take(source, 3)
    assert (x.dtype, x.tolist(), y.dtype, y.tolist()) == (torch.float32, [[1.5, 3.0]], torch.int64, [0])
    with pytest.raises(TypeError, match=r"columns 'kind' \(str.*\) are not numbers"):
        as_source((frame(kind="u"), frame()["label"]))


def test_a_function_may_return_a_dataframe():
    source = load_source(frame, ColumnSelection.from_arguments("label"))
    assert isinstance(source, ArraySource)
    assert take(source, 4)[1].tolist() == [1]


# -- arrays in files ----------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Features and a target, saved."""
    np.save(tmp_path / "X.npy", np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4))
    np.save(tmp_path / "y.npy", np.arange(ROWS) % 3)
    return str(tmp_path / "X.npy"), str(tmp_path / "y.npy")


def test_arrays_in_files_are_mapped_instead_of_sent(files: tuple[str, str]):
    found = describe_files(files, ColumnSelection())
    assert len(pickling.pack_object(found).header) < 1000
    assert pickling.pack_object(found).buffers == ()
    source = as_source(found)
    assert isinstance(source, MappedSource)
    assert len(source) == ROWS
    x, y = take(source, 7, 2)
    assert (x.tolist(), y.tolist()) == ([[28, 29, 30, 31], [8, 9, 10, 11]], [1, 2])
    x.zero_()  # a copy: the file's pages can't be written
    assert take(source, 7)[0].sum() > 0


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda a: a,
    "a stretch": lambda a: a[11:30],
    "columns": lambda a: a[:, 1:3],
    "every other row, backwards": lambda a: a[::-2],
    "transposed": lambda a: a.T,
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("offset", [0, 5000])
def test_a_view_of_a_memory_mapped_array_is_sent_as_a_file_reference(tmp_path: Path, name: str, offset: int):
    numbers = np.random.default_rng(0).normal(size=(3000, 4))
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"\0" * offset + numbers.tobytes())
    part = VIEWS[name](np.memmap(path, np.float64, "r", offset, (3000, 4)))
    found = describe_files(part, ColumnSelection())
    assert isinstance(found, MappedFile)
    assert np.array_equal(pickle.loads(pickle.dumps(found)).open(), VIEWS[name](numbers))


def test_copy_on_write_changes_are_sent_with_the_array(tmp_path: Path):
    np.save(tmp_path / "X.npy", np.zeros((4, 2)))
    changed = np.load(tmp_path / "X.npy", mmap_mode="c")
    changed[1] = 7
    assert take(as_source(describe_files(changed, ColumnSelection())), 1)[0].tolist() == [[7, 7]]


def test_a_big_endian_file_is_read_in_native_byte_order(tmp_path: Path):
    np.save(tmp_path / "X.npy", np.arange(6, dtype=">f4").reshape(3, 2))
    assert take(as_source(str(tmp_path / "X.npy")), 1)[0].tolist() == [[2, 3]]


def test_unreadable_files_are_refused(tmp_path: Path, files: tuple[str, str]):
    with pytest.raises(FileNotFoundError, match=r"none\.npy does not exist on .*under the same path"):
        describe_files(str(tmp_path / "none.npy"), ColumnSelection())
    np.save(tmp_path / "objects.npy", np.array(["a", None], object))
    with pytest.raises(TypeError, match=r"objects\.npy can't be mapped as an array"):
        describe_files(tmp_path / "objects.npy", ColumnSelection())
    with pytest.raises(ValueError, match=r"'data\.csv' is not supported"):
        describe_files("data.csv", ColumnSelection())
    found = describe_files(files[0], ColumnSelection())
    np.save(files[0], np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"has 224 bytes on .* and 768 in the notebook: not the same file"):
        found.open()


def test_unpickling_file_backed_data_raises_if_a_file_is_missing(tmp_path: Path):
    path = tmp_path / "data"
    path.touch()
    sent = pickle.dumps(FileBackedData([str(path)], {"rows": 3}))
    assert pickle.loads(sent) == {"rows": 3}
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"data does not exist on .*Engines read files themselves"):
        pickle.loads(sent)


# -- parquet ------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two files of 23 and 17 rows, in row groups of 5."""
    rows = frame()
    for name, part in (("one", rows[:23]), ("two", rows[23:])):
        pq.write_table(pa.Table.from_pandas(part, preserve_index=False), tmp_path / f"{name}.parquet", row_group_size=5)
    return tmp_path


def opened(where: Any, target: Any = "label", cache_bytes: int = parquet.CACHE_BYTES) -> ParquetSource:
    return ParquetSource(parquet.describe_parquet(where, ColumnSelection.from_arguments(target)), cache_bytes)


@pytest.mark.parametrize("where", ["a folder", "files", "one file"])
def test_parquet_files_return_the_rows_of_the_table(table: Path, where: str):
    files = [table / "one.parquet", table / "two.parquet"]
    source = opened({"a folder": table, "files": files, "one file": files[0]}[where])
    assert len(source) == (23 if where == "one file" else ROWS)
    rows = np.random.default_rng(1).permutation(len(source))
    x, y = source.take(rows)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.tolist() == [[row * 0.5, row] for row in rows]
    assert y.tolist() == (rows % 3).tolist()


def test_only_the_needed_row_groups_are_read_and_each_only_once(table: Path):
    source = opened(table)
    take(source, 6, 8, 31, 5)
    take(source, 7, 30, 9)
    assert source.groups_read == {1: 1, 6: 1}  # groups begin at rows 0, 5, 10, 15, 20; 23, 28, 33, 38


def test_the_row_group_cache_stays_within_its_size_limit(table: Path):
    group = 5 * (2 * 4 + 8)
    source = opened(table, cache_bytes=3 * group)
    for row in (0, 5, 10, 15, 0):
        take(source, row)
    assert sum(part.nbytes for kept in source._cached_groups.values() for part in kept) <= 3 * group
    assert source.groups_read == {0: 2, 1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_shuffle_keeps_rows_of_few_groups_together(table: Path, window: int):
    source = opened(table)
    source.groups_per_window = window
    rows = np.arange(ROWS)
    orders = [source.shuffle_rows(rows, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert sorted(orders[0]) == rows.tolist()
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    groups = source._find_groups(orders[0])
    first = {g: int(np.flatnonzero(groups == g)[0]) for g in set(groups.tolist())}
    last = {g: int(np.flatnonzero(groups == g)[-1]) for g in first}
    at_once = max(sum(first[g] <= place <= last[g] for g in first) for place in range(ROWS))
    assert at_once <= window
    assert window == 1 or at_once > 1


@pytest.mark.parametrize("how", ["directly", "by a loader"])
def test_batches_use_the_shuffle_of_their_source(table: Path, how: str):
    source = opened(table)
    source.groups_per_window = 1
    plan, shards = JobPlan(10, 4, "global", 3), Shards(np.arange(ROWS), [ROWS])
    batches = (
        LoadedBatches(source, shards, plan, [0], SyncLoader(source, SampleSeeds(0)))
        if how == "by a loader"
        else ShardedBatches(source, shards, plan, [0])
    )
    order = np.concatenate([batches.get_rows(step) for step in range(4)])
    assert np.array_equal(order, source.shuffle_rows(np.arange(ROWS), np.random.default_rng([3, 0])))


def test_the_parquet_target_can_be_read_alone(table: Path):
    assert opened(table).read_target().tolist() == (np.arange(ROWS) % 3).tolist()


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path / "bad.parquet")
    return path / "bad.parquet"


def test_invalid_parquet_data_is_refused(tmp_path: Path):
    text = write(tmp_path, a=[1.0], city=["x"], label=[1])
    with pytest.raises(TypeError, match=r"columns 'city' \(string\) are not numbers.*choose others with columns="):
        opened(text)
    missing = write(tmp_path, a=[1.0, None], label=[1, 2])
    with pytest.raises(ValueError, match=r"values are missing \(NaN\) in the columns 'a' \(1\)"):
        opened(missing)
    strange = write(tmp_path, a=[1.0, float("nan")], label=[1, 2])
    with pytest.raises(ValueError, match="column 'a' is NaN in row 1, which would make every parameter NaN"):
        take(opened(strange), 0)
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.parquet is not a parquet file"):
        opened(tmp_path / "text.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no file named \*\.parquet"):
        opened(tmp_path / "empty")
    pq.write_table(pa.table({"a": [1], "label": [1]}), tmp_path / "ok.parquet")
    with pytest.raises(ValueError, match="differs in columns or types"):
        opened([tmp_path / "ok.parquet", missing])


def test_nulls_without_statistics_are_detected_during_reading(tmp_path: Path):
    columns = {"a": [1.0, None], "b": [True, None], "label": [1, 2]}
    pq.write_table(pa.table(columns), tmp_path / "bare.parquet", write_statistics=False)
    with pytest.raises(ValueError, match="column 'a' is NaN in row 1"):
        take(opened(tmp_path / "bare.parquet"), 0)
    source = ParquetSource(
        parquet.describe_parquet(tmp_path / "bare.parquet", ColumnSelection.from_arguments("label", ["b"]))
    )
    with pytest.raises(ValueError, match=r"values are missing \(NaN\) in the columns 'b' \(1\)"):
        take(source, 0)


# -- Hugging Face's datasets --------------------------------------------------------------------------------


def hub(**columns: Any) -> Any:
    rows = np.arange(ROWS)
    return datasets.Dataset.from_dict({"x": np.stack([rows, rows * 0.5], 1), "label": rows % 3, **columns})


def test_a_hub_dataset_gives_tensors_by_column():
    source = as_source(hub())
    assert isinstance(source, HubSource)
    batch = take(source, 3, 1)
    assert {name: value.dtype for name, value in batch.items()} == {"x": torch.float32, "label": torch.int64}
    assert batch["x"].tolist() == [[3, 1.5], [1, 0.5]]


def test_a_hub_dataset_with_a_target_gives_inputs_and_target():
    x, y = take(as_source(hub(text=["u"] * ROWS), ColumnSelection.from_arguments("label", ["x"])), 3, 1)
    assert (x.tolist(), y.tolist()) == ([[3, 1.5], [1, 0.5]], [0, 1])


def test_a_user_defined_transform_is_kept():
    def transform(batch: dict) -> dict:
        return {"length": [torch.tensor(len(text)) for text in batch["text"]]}

    source = as_source(hub(text=["u" * k for k in range(ROWS)]).with_transform(transform))
    assert take(source, 3, 1)["length"].tolist() == [3, 1]
    assert not source.is_thread_safe


def test_a_shuffled_selection_of_a_hub_dataset_returns_its_own_rows():
    data = hub().shuffle(seed=1).select(range(10))
    assert take(as_source(data), 4)["label"].tolist() == [data[4]["label"]]


def test_an_invalid_hub_dataset_is_refused():
    text = hub(text=["u"] * ROWS, words=[["u"]] * ROWS)
    with pytest.raises(TypeError, match=r"columns 'text' \(string\), 'words' .*remove_columns\(\['text', 'words'\]\)"):
        as_source(text)
    ragged = hub(tokens=[[0] * (1 + k % 2) for k in range(ROWS)])
    with pytest.raises(ValueError, match=r"'tokens' differs in shape .*\(\(1,\) in row 2, \(2,\) in row 3\)"):
        take(as_source(ragged), 2, 3)
    with pytest.raises(ValueError, match="the table has no column 'lable'"):
        as_source(hub(), ColumnSelection.from_arguments("lable"))


def test_a_hub_dataset_on_disk_is_sent_as_a_file_reference(tmp_path: Path):
    hub().save_to_disk(tmp_path / "saved")
    packed = pickling.pack_object(datasets.load_from_disk(tmp_path / "saved"))
    assert len(packed.header) < 5000
    assert packed.buffers == ()
    in_memory = pickling.pack_object(hub())
    assert sum(in_memory.sizes) >= ROWS * (2 + 1) * 8  # by shared memory, not through the controller


# -- Datasets -----------------------------------------------------------------------------------------------


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        if row == 13:
            raise KeyError("unlucky")
        return {"x": torch.tensor([row]), "y": row * row}


def test_an_error_in_a_dataset_names_the_failed_row():
    source = as_source(Squares())
    assert isinstance(source, DatasetSource)
    with pytest.raises(KeyError) as caught:
        take(source, 12, 13)
    assert caught.value.__notes__ == ["the Dataset raised this for row 13"]


def test_target_selects_a_key_of_dict_samples():
    x, y = take(as_source(Squares(), ColumnSelection.from_arguments("y")), 3, 2)
    assert (x.tolist(), y.tolist()) == ([[3], [2]], [9, 4])


def test_mapped_arrays_are_read_only(files: tuple[str, str]):
    array = describe_files(files[0], ColumnSelection()).open()
    assert not array.flags.writeable
    assert memmap.load_npy(files[0]).mode == "r"


def test_micro_batches_taken_together_contain_the_requested_rows():
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    pieces = [np.array([7, 1, 3]), np.array([2]), np.array([9, 0])]
    source = ArraySource([x, y])
    for taken, rows in zip(source.take_micro_batches(pieces), pieces, strict=True):
        for found, expected in zip(taken, source.take(rows), strict=True):
            assert torch.equal(found, expected)


# -- batches of samples ----------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of different lengths."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.arange(row + 1), "label": torch.tensor(row)}


def pad(samples: list[dict[str, torch.Tensor]]) -> collections.UserDict[str, torch.Tensor]:
    """Return a padded batch in a class of its own, as Hugging Face's tokenizers do."""
    tokens = torch.nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    return collections.UserDict({"tokens": tokens, "label": torch.stack([sample["label"] for sample in samples])})


def test_batches_are_built_by_the_users_collate_fn():
    batch = as_source(Tokens(), ColumnSelection(collate_fn=pad)).take(np.array([0, 2]))
    assert type(batch) is dict
    assert batch["tokens"].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert batch["label"].tolist() == [0, 2]
    selection = ColumnSelection.from_arguments("label", collate_fn=pad)
    inputs, target = as_source(Tokens(), selection).take(np.array([1, 2]))
    assert (inputs.shape, target.tolist()) == ((2, 3), [1, 2])


def test_ragged_samples_raise_with_both_shapes_and_the_remedy():
    with pytest.raises(
        ValueError, match=r"different shapes \(\(1,\) and \(3,\), in samples 0 and 1 of .* give collate_fn="
    ):
        as_source(Tokens()).take(np.array([0, 2]))


def test_images_of_a_dataset_raise_with_the_remedy():
    images = pytest.importorskip("PIL.Image")
    samples = [(images.new("L", (2, 2)), 0)] * 3
    with pytest.raises(TypeError, match="default_collate") as caught:
        as_source(samples).take(np.array([0, 2]))
    assert "transform=torchvision.transforms.ToTensor()" in caught.value.__notes__[0]


class Doubled(torch.utils.data.TensorDataset):
    """A Dataset of torch with samples of its own."""

    def __getitem__(self, row: int) -> Any:
        (x,) = super().__getitem__(row)
        return (2 * x,)


def test_samples_of_a_changed_tensor_dataset_are_its_own():
    (batch,) = as_source(Doubled(torch.arange(4.0))).take(np.array([1, 3]))
    assert batch.tolist() == [2.0, 6.0]


@pytest.mark.parametrize("sample", [{"x": torch.ones(2), "label": 1}, (torch.ones(2), 1)], ids=["dicts", "tuples"])
def test_a_list_of_samples_is_treated_as_a_dataset(sample: Any):
    source = as_source([sample] * 5)
    assert isinstance(source, DatasetSource)
    assert len(source) == 5
    batch = source.take(np.arange(3))
    assert [part.shape[0] for part in (batch.values() if isinstance(batch, dict) else batch)] == [3, 3]
    assert isinstance(as_source([torch.ones(5, 2), torch.ones(5)]), ArraySource)
