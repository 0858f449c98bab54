"""Conversion of tables to arrays.

A table (a DataFrame, parquet files) becomes two arrays: the features, with the table's columns, and the target. Columns
that are not numbers are refused by name, because no encoding is right for every model. The only exception is a
categorical *target*: its classes are numbered in the order of its categories, also in validation data.

Feature columns with one common dtype keep it. Mixed columns, booleans and float64 (pandas' default) become torch's
default dtype. A target of integers or classes becomes int64, as torch's losses need it, and any other target torch's
default dtype.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

_MAX_SHOWN_NAMES = 8  # columns named in a message


@dataclasses.dataclass(frozen=True)
class ColumnSelection:
    """How samples become a batch: feature and target columns, and their collation. :meth:`resolve` needs a table."""

    target: Hashable | tuple[Hashable, ...] | None = None
    """One name for a target of shape (rows,), several for (rows, columns), None if not given, () for no target."""
    features: tuple[Hashable, ...] | None = None
    """None for all columns except the target."""
    float_dtype: str = "float32"
    """Dtype of converted floating-point columns."""
    classes: tuple[Any, ...] | None = None
    """Classes of a categorical target, in the order of their numbers."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Function from samples to a batch; None for torch's default collation."""

    @classmethod
    def from_arguments(
        cls, target: Any = None, features: Any = None, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> ColumnSelection:
        """Return the selection for a user's arguments: names or lists of names, and a function."""
        torch = sys.modules.get("torch")  # if it was never imported, its default is unchanged
        floating = str(torch.get_default_dtype()).removeprefix("torch.") if torch else "float32"
        target = tuple(target) if isinstance(target, list) else target
        if isinstance(features, (str, bytes)) or not isinstance(features, Iterable | None):
            raise TypeError(f"columns={features!r}; it must be a list of names, as in columns=[{features!r}]")
        return cls(target, None if features is None else tuple(features), floating, collate_fn=collate_fn)

    @property
    def is_given(self) -> bool:
        """Whether the user named columns."""
        return self.target is not None or self.features is not None

    @property
    def target_names(self) -> tuple[Hashable, ...]:
        """Names of the target columns."""
        if self.target is None:
            return ()
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def resolve(self, names: Iterable[Hashable]) -> ColumnSelection:
        """Return the selection for a table with these names, with explicit features. Raises ValueError."""
        ordered = list(names)
        known = set(ordered)
        if len(known) != len(ordered):
            repeated = [name for name in known if ordered.count(name) > 1]
            raise ValueError(
                f"{_format_names(repeated)} in the table more than once; give each column a name of its own"
            )
        if self.target in known:  # a tuple may itself be the name of a column
            targets: tuple[Hashable, ...] = (self.target,)
        else:
            targets = self.target_names
        features = self.features
        if features is None:
            features = tuple(name for name in ordered if name not in targets)
        unknown = [name for name in (*targets, *features) if name not in known]
        if unknown:
            raise ValueError(
                f"the table has no {_format_names(unknown)}. It has {_format_names(ordered)}: choose from these"
            )
        if shared := set(targets) & set(features):
            raise ValueError(f"{_format_names(shared)} can't be feature and target together; remove it from columns=")
        if not features:
            raise ValueError(f"the table has no column besides the target {self.target!r}; a model needs at least one")
        return dataclasses.replace(self, features=features)

    def split_batch(self, batch: Any) -> Any:
        """Return a batch {column: values} as (inputs..., target), or unchanged if no columns were named."""
        if not self.is_given or not isinstance(batch, dict):
            return batch
        chosen = self.resolve(batch)
        return tuple(batch[name] for name in (*(chosen.features or ()), *chosen.target_names))


def select_arrays(data: Any, columns: ColumnSelection) -> Any:
    """Return (inputs..., target) of a dict of arrays if columns were named; any other data as they are."""
    return columns.split_batch(data) if isinstance(data, dict) else data


def is_sample_list(data: Any) -> bool:
    """Return whether this is a list of samples, each of which is a dict or a tuple, instead of arrays."""
    return isinstance(data, list) and bool(data) and isinstance(data[0], (dict, tuple))


def require_target(columns: ColumnSelection, names: Iterable[Hashable]) -> ColumnSelection:
    """Return `columns` resolved for a table with these names. Raises ValueError without a target."""
    if columns.target is None:
        raise ValueError(
            f"a table needs target=, the column to predict. It has {_format_names(names)}; or say "
            "target=[] for data without one"
        )
    return columns.resolve(names)


def is_pandas(data: Any, kind: str = "DataFrame") -> bool:
    """Return whether this is a DataFrame (or, by `kind`, a Series), without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, getattr(pandas, kind))


def convert_frame(frame: Any, columns: ColumnSelection) -> tuple[tuple[np.ndarray, ...], ColumnSelection]:
    """Return ((features, target), resolved columns). Raises ValueError or TypeError with the names of columns."""
    chosen = require_target(columns, frame.columns)
    features, names = list(chosen.features or ()), list(chosen.target_names)
    _check_numbers(frame, features, names)
    _check_no_missing(frame, [*features, *names])
    x = stack_columns([_to_numpy(frame[name]) for name in features], chosen.float_dtype)
    if not names:
        return (x,), chosen
    parts, classes = [], chosen.classes
    for name in names:
        codes, classes = _encode_classes(frame[name], chosen.classes)
        parts.append(convert_target(codes, chosen.float_dtype))
    target = parts[0] if chosen.target == names[0] else stack_columns(parts, chosen.float_dtype)
    return (x, target), dataclasses.replace(chosen, classes=classes)


def convert_pandas_parts(parts: Sequence[Any], float_dtype: str) -> tuple[Any, ...]:
    """Return ``(X, y)`` with each DataFrame or Series as an array; the last one is the target."""
    last = len(parts) - 1
    return tuple(
        _convert_part(part, float_dtype, is_target=last > 0 and k == last)
        if is_pandas(part) or is_pandas(part, "Series")
        else part
        for k, part in enumerate(parts)
    )


def _convert_part(part: Any, float_dtype: str, *, is_target: bool) -> np.ndarray:
    """Convert a DataFrame or Series to one array."""
    frame = part if is_pandas(part) else part.to_frame(name="values" if part.name is None else part.name)
    names = list(frame.columns)
    columns = ColumnSelection(float_dtype=float_dtype).resolve(names)
    _check_numbers(frame, [] if is_target else names, names if is_target else [])
    _check_no_missing(frame, columns.features or ())
    arrays = [_encode_classes(frame[name], None)[0] if is_target else _to_numpy(frame[name]) for name in names]
    if is_pandas(part):
        return stack_columns([convert_target(a, float_dtype) for a in arrays] if is_target else arrays, float_dtype)
    return (
        convert_target(arrays[0], float_dtype)
        if is_target
        else np.asarray(arrays[0], infer_feature_dtype([arrays[0].dtype], float_dtype))
    )


def describe_arrays(arrays: Sequence[Any], columns: ColumnSelection) -> str:
    """Describe converted arrays: ``3 columns as float32, target 'label' as int64 (0=cat, 1=dog)``."""
    words = f"{len(columns.features or ())} columns as {_format_dtype(arrays[0])}"
    if len(arrays) == 1:
        return words
    named = ", ".join(map(repr, columns.target_names))
    words += f", target {named} as {_format_dtype(arrays[1])}"
    if columns.classes is not None:
        shown = ", ".join(f"{code}={name}" for code, name in enumerate(columns.classes[:_MAX_SHOWN_NAMES]))
        words += f" ({shown}{', ...' if len(columns.classes) > _MAX_SHOWN_NAMES else ''})"
    return words


def _format_dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


# --- dtypes and classes -------------------------------------------------------------------------------------


def infer_feature_dtype(dtypes: Iterable[np.dtype], float_dtype: str) -> np.dtype:
    """Return the dtype of all features together; the module's docstring has the rules."""
    distinct = set(dtypes)
    common = distinct.pop() if len(distinct) == 1 else None
    if common is None or common.kind == "b" or common == np.float64:
        return np.dtype(float_dtype) if float_dtype != "bfloat16" else np.dtype("float32")
    return common


def stack_columns(columns: Sequence[np.ndarray], float_dtype: str) -> np.ndarray:
    """Return columns of equal length as one array (rows, columns), contiguous by row for fast batches."""
    dtype = infer_feature_dtype([column.dtype for column in columns], float_dtype)
    table = np.empty((len(columns[0]), len(columns)), dtype)
    for k, column in enumerate(columns):
        table[:, k] = column
    return table


def convert_target(column: np.ndarray, float_dtype: str) -> np.ndarray:
    """Return a target in the type that torch's losses need: int64 for integers and classes, else floating point."""
    return column.astype(np.int64 if column.dtype.kind in "iub" else infer_feature_dtype([np.dtype("f8")], float_dtype))


def _to_numpy(series: Any) -> np.ndarray:
    """Return a column of numbers. pandas' nullable dtypes have a numpy dtype of the same name."""
    dtype = series.dtype
    plain = getattr(dtype, "numpy_dtype", dtype)
    array: np.ndarray = series.to_numpy(dtype=plain)
    return array


def _encode_classes(series: Any, known_classes: tuple[Any, ...] | None) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """Return (numbers, classes) of a target column. A categorical one is encoded by `known_classes` if given."""
    if not _is_categorical(series):
        return _to_numpy(series), known_classes
    names = tuple(series.cat.categories) if known_classes is None else known_classes
    if strange := sorted(set(map(str, series.unique())) - set(map(str, names))):
        raise ValueError(
            f"the target {series.name!r} has the classes {', '.join(strange[:_MAX_SHOWN_NAMES])}, which the "
            f"training data did not have ({', '.join(map(str, names[:_MAX_SHOWN_NAMES]))}). Drop these rows, or "
            "train on data that has them"
        )
    return np.asarray(series.cat.set_categories(list(names)).cat.codes), names


def _is_categorical(series: Any) -> bool:
    return hasattr(series.dtype, "categories")


def _is_number(series: Any) -> bool:
    dtype = getattr(series.dtype, "numpy_dtype", series.dtype)
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"


def _check_numbers(frame: Any, features: Sequence[Any], targets: Sequence[Any]) -> None:
    """Refuse columns that are not numbers, all of them in one message."""
    wrong = [name for name in features if not _is_number(frame[name])]
    if wrong:
        refuse_non_numeric({name: str(frame[name].dtype) for name in wrong})
    for name in targets:
        if not (_is_number(frame[name]) or _is_categorical(frame[name])):
            raise TypeError(
                f"the target {name!r} has dtype {frame[name].dtype}; tensors hold numbers only. Encode its classes, as "
                f"in df[{name!r}] = df[{name!r}].astype('category')"
            )


def refuse_non_numeric(columns: Mapping[Any, str]) -> None:
    """Raise TypeError for columns ({name: dtype}) that are not numbers."""
    named = ", ".join(f"{name!r} ({dtype})" for name, dtype in list(columns.items())[:_MAX_SHOWN_NAMES])
    more = f" and {len(columns) - _MAX_SHOWN_NAMES} more" if len(columns) > _MAX_SHOWN_NAMES else ""
    names = list(columns)[:_MAX_SHOWN_NAMES]
    raise TypeError(
        f"columns {named}{more} are not numbers, and tensors hold numbers only. Encode them, as in "
        f"pandas.get_dummies(df, columns={names}), or choose others with columns=[...]"
    )


def _check_no_missing(frame: Any, names: Sequence[Any]) -> None:
    """Refuse missing values, because a single NaN makes every parameter NaN in one step."""
    missing = frame[list(names)].isna().sum()
    if counts := {name: int(count) for name, count in missing.items() if count}:
        refuse_missing(counts)


def refuse_missing(counts: Mapping[Any, int]) -> None:
    """Raise ValueError for the numbers of missing values by column."""
    named = ", ".join(f"{name!r} ({count:,})" for name, count in list(counts.items())[:_MAX_SHOWN_NAMES])
    raise ValueError(
        f"values are missing (NaN) in the columns {named}; one of them would make every parameter NaN. Drop the rows "
        "(df.dropna()) or fill them (df.fillna(...))"
    )


def _format_names(names: Iterable[Any]) -> str:
    """Return ``column 'a'``, or ``columns 'a', 'b', ... (12 in all)``."""
    listed = list(names)
    shown = ", ".join(map(repr, listed[:_MAX_SHOWN_NAMES]))
    rest = f", ... ({len(listed)} in all)" if len(listed) > _MAX_SHOWN_NAMES else ""
    return f"column{'' if len(listed) == 1 else 's'} {shown}{rest}"
