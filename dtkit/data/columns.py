"""Tables as arrays: which columns are what, and which numbers they become.

A table (a DataFrame, parquet files) becomes two arrays: the features, one row per sample and one column per column,
and the target. Nothing is encoded behind the user's back, since no encoding is right for every model: columns that
hold no numbers are refused by name, with the way to encode them. The one exception is a categorical *target*, whose
classes are numbered in the order of its categories; data to evaluate on gets the same numbers.

Numbers keep their dtype where all feature columns share one. Mixed columns, booleans and float64 (which pandas makes of
every decimal number) become torch's default dtype, float32 unless set otherwise: what a model computes in. A target
becomes int64 where it holds integers or classes, which is what torch's losses take, else that same float dtype.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

_MAX_SHOWN_NAMES = 8  # columns named in a message


@dataclasses.dataclass(frozen=True)
class ColumnSelection:
    """Which columns of a table a model gets, and what it is to predict. Resolved by :meth:`of`."""

    target: Hashable | tuple[Hashable, ...] | None = None
    """One name: a target of shape (rows,). Several: (rows, columns). None: not said. (): there is none."""
    features: tuple[Hashable, ...] | None = None
    """None: all columns but the target."""
    float_dtype: str = "float32"
    """The dtype of what becomes floating point."""
    classes: tuple[Any, ...] | None = None
    """What the numbers of a categorical target stand for."""

    @classmethod
    def from_arguments(cls, target: Any = None, features: Any = None) -> ColumnSelection:
        """From a user's own arguments: a name or a list of names each."""
        torch = sys.modules.get("torch")  # where it was never imported, nobody changed its default
        floating = str(torch.get_default_dtype()).removeprefix("torch.") if torch else "float32"
        target = tuple(target) if isinstance(target, list) else target
        if isinstance(features, (str, bytes)):
            raise TypeError(f"columns={features!r}; it must be a list of names, as in columns=[{features!r}]")
        return cls(target, None if features is None else tuple(features), floating)

    @property
    def is_given(self) -> bool:
        """Whether anything was said."""
        return self.target is not None or self.features is not None

    @property
    def target_names(self) -> tuple[Hashable, ...]:
        """The names of the target's columns."""
        if self.target is None:
            return ()
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def resolve(self, names: Iterable[Hashable]) -> ColumnSelection:
        """These columns of a table that has `names`, with the features spelt out. ValueError for unknown ones."""
        there = list(names)
        known = set(there)
        if len(known) != len(there):
            twice = [name for name in known if there.count(name) > 1]
            raise ValueError(f"{_format_names(twice)} in the table more than once; give each column a name of its own")
        if self.target in known:  # a tuple may itself be the name of a column
            targets: tuple[Hashable, ...] = (self.target,)
        else:
            targets = self.target_names
        features = self.features
        if features is None:
            features = tuple(name for name in there if name not in targets)
        unknown = [name for name in (*targets, *features) if name not in known]
        if unknown:
            raise ValueError(
                f"the table has no {_format_names(unknown)}. It has {_format_names(there)}: choose from these"
            )
        if shared := set(targets) & set(features):
            raise ValueError(f"{_format_names(shared)} can't be feature and target at once; take it out of columns=")
        if not features:
            raise ValueError(
                f"the table has no column besides the target {self.target!r}; a model needs some to work on"
            )
        return dataclasses.replace(self, features=features)

    def split_batch(self, batch: Any) -> Any:
        """A batch that came as {column: values} in the form (inputs..., target); as it is where nothing was said."""
        if not self.is_given or not isinstance(batch, dict):
            return batch
        chosen = self.resolve(batch)
        return tuple(batch[name] for name in (*(chosen.features or ()), *chosen.target_names))


def require_target(columns: ColumnSelection, names: Iterable[Hashable]) -> ColumnSelection:
    """`columns` of a table with these names, which must say what the target is."""
    if columns.target is None:
        raise ValueError(
            f"a table needs target=, the column to predict. Its columns are {_format_names(names)}; or say target=[] for "
            "data that has none"
        )
    return columns.resolve(names)


def is_pandas(data: Any, kind: str = "DataFrame") -> bool:
    """Whether this is a DataFrame (or, as `kind`, a Series), without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, getattr(pandas, kind))


def convert_frame(frame: Any, columns: ColumnSelection) -> tuple[tuple[np.ndarray, ...], ColumnSelection]:
    """((features, target), the columns as they were used). Raises ValueError or TypeError, naming the columns."""
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
    """``(X, y)`` with each DataFrame or Series in it as an array; the last one is the target."""
    last = len(parts) - 1
    return tuple(
        _convert_part(part, float_dtype, is_target=last > 0 and k == last)
        if is_pandas(part) or is_pandas(part, "Series")
        else part
        for k, part in enumerate(parts)
    )


def _convert_part(part: Any, float_dtype: str, *, is_target: bool) -> np.ndarray:
    """A DataFrame or Series that stands for one array."""
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
    """What a table became, in a few words: ``3 columns as float32, target 'label' as int64 (0=cat, 1=dog)``."""
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


# --- which numbers columns become ---------------------------------------------------------------------------


def infer_feature_dtype(dtypes: Iterable[np.dtype], float_dtype: str) -> np.dtype:
    """The one dtype of all features: see the module's docstring."""
    kinds = set(dtypes)
    only = kinds.pop() if len(kinds) == 1 else None
    if only is None or only.kind == "b" or only == np.float64:
        return np.dtype(float_dtype) if float_dtype != "bfloat16" else np.dtype("float32")
    return only


def stack_columns(columns: Sequence[np.ndarray], float_dtype: str) -> np.ndarray:
    """Columns of equal length as one array (rows, columns), contiguous by row: a row is what a batch takes."""
    dtype = infer_feature_dtype([column.dtype for column in columns], float_dtype)
    table = np.empty((len(columns[0]), len(columns)), dtype)
    for k, column in enumerate(columns):
        table[:, k] = column
    return table


def convert_target(column: np.ndarray, float_dtype: str) -> np.ndarray:
    """A target as torch's losses take it: int64 for what is counted or classed, else floating point."""
    return column.astype(np.int64 if column.dtype.kind in "iub" else infer_feature_dtype([np.dtype("f8")], float_dtype))


def _to_numpy(series: Any) -> np.ndarray:
    """A column of numbers without missing ones; pandas' nullable dtypes have a numpy dtype of the same name."""
    dtype = series.dtype
    plain = getattr(dtype, "numpy_dtype", dtype)
    array: np.ndarray = series.to_numpy(dtype=plain)
    return array


def _encode_classes(series: Any, known_classes: tuple[Any, ...] | None) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """(numbers, classes) of a target's column; of a categorical one its codes, by the classes already known."""
    if not _is_categorical(series):
        return _to_numpy(series), known_classes
    names = tuple(series.cat.categories) if known_classes is None else known_classes
    if strange := sorted(set(map(str, series.unique())) - set(map(str, names))):
        raise ValueError(
            f"the target {series.name!r} has the classes {', '.join(strange[:_MAX_SHOWN_NAMES])}, which the training data had "
            f"not ({', '.join(map(str, names[:_MAX_SHOWN_NAMES]))}). Drop these rows, or train on data that has them"
        )
    return np.asarray(series.cat.set_categories(list(names)).cat.codes), names


def _is_categorical(series: Any) -> bool:
    return hasattr(series.dtype, "categories")


def _is_number(series: Any) -> bool:
    dtype = getattr(series.dtype, "numpy_dtype", series.dtype)
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"


def _check_numbers(frame: Any, features: Sequence[Any], targets: Sequence[Any]) -> None:
    """Refuse columns that hold no numbers, all of them in one message."""
    wrong = [name for name in features if not _is_number(frame[name])]
    if wrong:
        refuse_non_numeric({name: str(frame[name].dtype) for name in wrong})
    for name in targets:
        if not (_is_number(frame[name]) or _is_categorical(frame[name])):
            raise TypeError(
                f"the target {name!r} has dtype {frame[name].dtype}; tensors hold numbers only. Number its classes, as "
                f"in df[{name!r}] = df[{name!r}].astype('category')"
            )


def refuse_non_numeric(columns: Mapping[Any, str]) -> None:
    """Raise TypeError: these columns ({name: dtype}) hold no numbers."""
    named = ", ".join(f"{name!r} ({dtype})" for name, dtype in list(columns.items())[:_MAX_SHOWN_NAMES])
    more = f" and {len(columns) - _MAX_SHOWN_NAMES} more" if len(columns) > _MAX_SHOWN_NAMES else ""
    names = list(columns)[:_MAX_SHOWN_NAMES]
    raise TypeError(
        f"columns {named}{more} hold no numbers, and tensors hold nothing else. Encode them, as in "
        f"pandas.get_dummies(df, columns={names}), or choose others with columns=[...]"
    )


def _check_no_missing(frame: Any, names: Sequence[Any]) -> None:
    """Refuse missing values: a single NaN makes every parameter NaN in one step."""
    missing = frame[list(names)].isna().sum()
    if found := {name: int(count) for name, count in missing.items() if count}:
        refuse_missing(found)


def refuse_missing(counts: Mapping[Any, int]) -> None:
    """Raise ValueError: so many values are missing in these columns."""
    named = ", ".join(f"{name!r} ({count:,})" for name, count in list(counts.items())[:_MAX_SHOWN_NAMES])
    raise ValueError(
        f"values are missing (NaN) in the columns {named}; one of them would make every parameter NaN. Drop the rows "
        "(df.dropna()) or fill them (df.fillna(...))"
    )


def _format_names(names: Iterable[Any]) -> str:
    """``column 'a'``, ``columns 'a', 'b', ... (12 in all)``."""
    found = list(names)
    shown = ", ".join(map(repr, found[:_MAX_SHOWN_NAMES]))
    rest = f", ... ({len(found)} in all)" if len(found) > _MAX_SHOWN_NAMES else ""
    return f"column{'' if len(found) == 1 else 's'} {shown}{rest}"
