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

_SHOWN = 8  # columns named in a message


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which columns of a table a model gets, and what it is to predict. Resolved by :meth:`of`."""

    target: Hashable | tuple[Hashable, ...] | None = None
    """One name: a target of shape (rows,). Several: (rows, columns). None: not said. (): there is none."""
    features: tuple[Hashable, ...] | None = None
    """None: all columns but the target."""
    floating: str = "float32"
    """The dtype of what becomes floating point."""
    classes: tuple[Any, ...] | None = None
    """What the numbers of a categorical target stand for."""

    @classmethod
    def asked(cls, target: Any = None, features: Any = None) -> Columns:
        """From a user's own arguments: a name or a list of names each."""
        torch = sys.modules.get("torch")  # where it was never imported, nobody changed its default
        floating = str(torch.get_default_dtype()).removeprefix("torch.") if torch else "float32"
        target = tuple(target) if isinstance(target, list) else target
        if isinstance(features, (str, bytes)):
            raise TypeError(f"columns={features!r}; it must be a list of names, as in columns=[{features!r}]")
        return cls(target, None if features is None else tuple(features), floating)

    @property
    def given(self) -> bool:
        """Whether anything was said."""
        return self.target is not None or self.features is not None

    @property
    def targets(self) -> tuple[Hashable, ...]:
        """The names of the target's columns."""
        if self.target is None:
            return ()
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def of(self, names: Iterable[Hashable]) -> Columns:
        """These columns of a table that has `names`, with the features spelt out. ValueError for unknown ones."""
        there = list(names)
        known = set(there)
        if len(known) != len(there):
            twice = [name for name in known if there.count(name) > 1]
            raise ValueError(f"{_listed(twice)} in the table more than once; give each column a name of its own")
        if self.target in known:  # a tuple may itself be the name of a column
            targets: tuple[Hashable, ...] = (self.target,)
        else:
            targets = self.targets
        features = self.features
        if features is None:
            features = tuple(name for name in there if name not in targets)
        unknown = [name for name in (*targets, *features) if name not in known]
        if unknown:
            raise ValueError(f"the table has no {_listed(unknown)}. It has {_listed(there)}: choose from these")
        if shared := set(targets) & set(features):
            raise ValueError(f"{_listed(shared)} can't be feature and target at once; take it out of columns=")
        if not features:
            raise ValueError(
                f"the table has no column besides the target {self.target!r}; a model needs some to work on"
            )
        return dataclasses.replace(self, features=features)

    def split(self, batch: Any) -> Any:
        """A batch that came as {column: values} in the form (inputs..., target); as it is where nothing was said."""
        if not self.given or not isinstance(batch, dict):
            return batch
        chosen = self.of(batch)
        return tuple(batch[name] for name in (*(chosen.features or ()), *chosen.targets))


def require_target(columns: Columns, names: Iterable[Hashable]) -> Columns:
    """`columns` of a table with these names, which must say what the target is."""
    if columns.target is None:
        raise ValueError(
            f"a table needs target=, the column to predict. Its columns are {_listed(names)}; or say target=[] for "
            "data that has none"
        )
    return columns.of(names)


def is_pandas(data: Any, kind: str = "DataFrame") -> bool:
    """Whether this is a DataFrame (or, as `kind`, a Series), without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, getattr(pandas, kind))


def from_frame(frame: Any, columns: Columns) -> tuple[tuple[np.ndarray, ...], Columns]:
    """((features, target), the columns as they were used). Raises ValueError or TypeError, naming the columns."""
    chosen = require_target(columns, frame.columns)
    features, names = list(chosen.features or ()), list(chosen.targets)
    _check_numbers(frame, features, names)
    _check_whole(frame, [*features, *names])
    x = stacked([_numpy(frame[name]) for name in features], chosen.floating)
    if not names:
        return (x,), chosen
    parts, classes = [], chosen.classes
    for name in names:
        codes, classes = _classes(frame[name], chosen.classes)
        parts.append(as_target(codes, chosen.floating))
    target = parts[0] if chosen.target == names[0] else stacked(parts, chosen.floating)
    return (x, target), dataclasses.replace(chosen, classes=classes)


def without_pandas(parts: Sequence[Any], floating: str) -> tuple[Any, ...]:
    """``(X, y)`` with each DataFrame or Series in it as an array; the last one is the target."""
    last = len(parts) - 1
    return tuple(
        _from_part(part, floating, last=last > 0 and k == last)
        if is_pandas(part) or is_pandas(part, "Series")
        else part
        for k, part in enumerate(parts)
    )


def _from_part(part: Any, floating: str, *, last: bool) -> np.ndarray:
    """A DataFrame or Series that stands for one array."""
    frame = part if is_pandas(part) else part.to_frame(name="values" if part.name is None else part.name)
    names = list(frame.columns)
    columns = Columns(floating=floating).of(names)
    _check_numbers(frame, [] if last else names, names if last else [])
    _check_whole(frame, columns.features or ())
    arrays = [_classes(frame[name], None)[0] if last else _numpy(frame[name]) for name in names]
    if is_pandas(part):
        return stacked([as_target(a, floating) for a in arrays] if last else arrays, floating)
    return as_target(arrays[0], floating) if last else np.asarray(arrays[0], feature_dtype([arrays[0].dtype], floating))


def described(arrays: Sequence[Any], columns: Columns) -> str:
    """What a table became, in a few words: ``3 columns as float32, target 'label' as int64 (0=cat, 1=dog)``."""
    words = f"{len(columns.features or ())} columns as {_dtype(arrays[0])}"
    if len(arrays) == 1:
        return words
    named = ", ".join(map(repr, columns.targets))
    words += f", target {named} as {_dtype(arrays[1])}"
    if columns.classes is not None:
        shown = ", ".join(f"{code}={name}" for code, name in enumerate(columns.classes[:_SHOWN]))
        words += f" ({shown}{', ...' if len(columns.classes) > _SHOWN else ''})"
    return words


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


# --- which numbers columns become ---------------------------------------------------------------------------


def feature_dtype(dtypes: Iterable[np.dtype], floating: str) -> np.dtype:
    """The one dtype of all features: see the module's docstring."""
    kinds = set(dtypes)
    only = kinds.pop() if len(kinds) == 1 else None
    if only is None or only.kind == "b" or only == np.float64:
        return np.dtype(floating) if floating != "bfloat16" else np.dtype("float32")
    return only


def stacked(columns: Sequence[np.ndarray], floating: str) -> np.ndarray:
    """Columns of equal length as one array (rows, columns), contiguous by row: a row is what a batch takes."""
    dtype = feature_dtype([column.dtype for column in columns], floating)
    table = np.empty((len(columns[0]), len(columns)), dtype)
    for k, column in enumerate(columns):
        table[:, k] = column
    return table


def as_target(column: np.ndarray, floating: str) -> np.ndarray:
    """A target as torch's losses take it: int64 for what is counted or classed, else floating point."""
    return column.astype(np.int64 if column.dtype.kind in "iub" else feature_dtype([np.dtype("f8")], floating))


def _numpy(series: Any) -> np.ndarray:
    """A column of numbers without missing ones; pandas' nullable dtypes have a numpy dtype of the same name."""
    dtype = series.dtype
    plain = getattr(dtype, "numpy_dtype", dtype)
    array: np.ndarray = series.to_numpy(dtype=plain)
    return array


def _classes(series: Any, known: tuple[Any, ...] | None) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """(numbers, classes) of a target's column; of a categorical one its codes, by the classes already known."""
    if not _is_categorical(series):
        return _numpy(series), known
    names = tuple(series.cat.categories) if known is None else known
    if strange := sorted(set(map(str, series.unique())) - set(map(str, names))):
        raise ValueError(
            f"the target {series.name!r} has the classes {', '.join(strange[:_SHOWN])}, which the training data had "
            f"not ({', '.join(map(str, names[:_SHOWN]))}). Drop these rows, or train on data that has them"
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
        refuse({name: str(frame[name].dtype) for name in wrong})
    for name in targets:
        if not (_is_number(frame[name]) or _is_categorical(frame[name])):
            raise TypeError(
                f"the target {name!r} has dtype {frame[name].dtype}; tensors hold numbers only. Number its classes, as "
                f"in df[{name!r}] = df[{name!r}].astype('category')"
            )


def refuse(columns: Mapping[Any, str]) -> None:
    """Raise TypeError: these columns ({name: dtype}) hold no numbers."""
    named = ", ".join(f"{name!r} ({dtype})" for name, dtype in list(columns.items())[:_SHOWN])
    more = f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
    names = list(columns)[:_SHOWN]
    raise TypeError(
        f"columns {named}{more} hold no numbers, and tensors hold nothing else. Encode them, as in "
        f"pandas.get_dummies(df, columns={names}), or choose others with columns=[...]"
    )


def _check_whole(frame: Any, names: Sequence[Any]) -> None:
    """Refuse missing values: a single NaN makes every parameter NaN in one step."""
    missing = frame[list(names)].isna().sum()
    if found := {name: int(count) for name, count in missing.items() if count}:
        refuse_missing(found)


def refuse_missing(counts: Mapping[Any, int]) -> None:
    """Raise ValueError: so many values are missing in these columns."""
    named = ", ".join(f"{name!r} ({count:,})" for name, count in list(counts.items())[:_SHOWN])
    raise ValueError(
        f"values are missing (NaN) in the columns {named}; one of them would make every parameter NaN. Drop the rows "
        "(df.dropna()) or fill them (df.fillna(...))"
    )


def _listed(names: Iterable[Any]) -> str:
    """``column 'a'``, ``columns 'a', 'b', ... (12 in all)``."""
    found = list(names)
    shown = ", ".join(map(repr, found[:_SHOWN]))
    rest = f", ... ({len(found)} in all)" if len(found) > _SHOWN else ""
    return f"column{'' if len(found) == 1 else 's'} {shown}{rest}"
