"""What pandas had."""

from __future__ import annotations

from typing import Any


def append_to_frame(
    self: Any, other: Any, ignore_index: bool = False, verify_integrity: bool = False, sort: bool = False
) -> Any:
    """``DataFrame.append``: a new frame with the rows of ``other``: a frame, a series or dict (one row), or a list."""
    import pandas as pd

    if isinstance(other, pd.Series | dict):
        if isinstance(other, dict):
            if not ignore_index:
                raise TypeError("Can only append a dict if ignore_index=True")
            other = pd.Series(other, dtype=None if other else object)
        if other.name is None and not ignore_index:
            raise TypeError("Can only append a Series if ignore_index=True or if the Series has a name")
        other = other.to_frame().T.infer_objects().rename_axis(self.index.names)
    elif isinstance(other, list) and other and not isinstance(other[0], pd.DataFrame):
        other = pd.DataFrame(other)
        if self.index.name is not None and not ignore_index:
            other.index.name = self.index.name
    parts = [self, *other] if isinstance(other, list | tuple) else [self, other]
    result = pd.concat(parts, ignore_index=ignore_index, verify_integrity=verify_integrity, sort=sort)
    return _without_empty_parts(result, parts).__finalize__(self, method="append")


def _without_empty_parts(result: Any, parts: list[Any]) -> Any:
    """``result`` of concatenating ``parts`` with the dtypes that pandas gave until 2.1.

    Parts without values, such as the empty frame that a loop starts with, did not make a column of floating-point
    numbers or dates one of objects.
    """
    import pandas as pd

    for name in [name for name in result.columns if result[name].ndim == 1 and result[name].dtype == object]:
        columns = [part[name] for part in parts if name in part]
        filled = [column for column in columns if not column.isna().all()]
        dtype = pd.concat(filled).dtype if 0 < len(filled) < len(columns) else result[name].dtype
        if dtype.kind in "fcmM":
            result[name] = result[name].astype(dtype)
    return result


def append_to_series(self: Any, to_append: Any, ignore_index: bool = False, verify_integrity: bool = False) -> Any:
    """``Series.append``: a new series with the values of another, or of a list of others."""
    import pandas as pd

    parts = [self, *to_append] if isinstance(to_append, list | tuple) else [self, to_append]
    filled = [part for part in parts if len(part)]  # empty ones did not count for the dtype
    return pd.concat(filled or parts, ignore_index=ignore_index, verify_integrity=verify_integrity)


def as_matrix(self: Any, columns: Any = None) -> Any:
    """``DataFrame.as_matrix``: the values, of all columns or of ``columns``."""
    return self.values if columns is None else self.reindex(columns=columns).values
