"""Records from what people have, as compact columns: one tensor per input, never one Python object per record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from dpfed.errors import InputError
from dpfed.flat import Records

Source = Any  # (x, y), a dict of columns, a map-style data set of (x, y) pairs, or a Hugging Face data set

HUGGING_FACE = {"label": "y", "labels": "y", "img": "x", "image": "x"}  # what is called otherwise there


def as_records(field: str, source: Source) -> Records:
    """Columns from a pair (x, y), a dict of columns with ``y``, a data set of (x, y) pairs, or a Hugging Face data set.

    >>> as_records("train", (torch.zeros(3, 2), torch.tensor([0, 1, 0])))["y"]
    tensor([0, 1, 0])
    """
    if isinstance(source, dict):
        columns = cast(dict[str, Any], source)
    elif isinstance(source, (tuple, list)) and len(cast(Sequence[Any], source)) == 2 and hasattr(source[0], "shape"):
        columns = {"x": source[0], "y": source[1]}
    elif hasattr(source, "column_names") and hasattr(source, "with_format"):
        columns = _from_hugging_face(field, source)
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        columns = _from_pairs(field, source)
    else:
        raise InputError(f"{field}: expected (x, y), a dict of columns or a data set of pairs, got {type(source).__name__}.")
    if "y" not in columns:
        raise InputError(f"{field}: has no column 'y' (the target); it has {sorted(columns)}. Name the target 'y'.")
    return {str(name): _tensor(field, str(name), column) for name, column in columns.items()}


def check_columns(field: str, records: Records) -> int:
    """How many records there are: as many as every column has entries, none of which is NaN or Inf."""
    lengths = {name: len(column) if column.dim() else -1 for name, column in records.items()}
    if len(set(lengths.values())) != 1 or min(lengths.values()) < 1:
        raise InputError(f"{field}: all columns need one entry per record and at least one record, got lengths {lengths}.")
    for name, column in records.items():
        if column.is_floating_point() and not bool(column.isfinite().all()):
            row = int((~column.isfinite()).flatten(1 if column.dim() > 1 else 0).reshape(len(column), -1).any(1).nonzero()[0])
            raise InputError(f"{field}: column '{name}' holds NaN or Inf, first in record {row}. Clean or drop that record.")
    return lengths["y"]


def _tensor(field: str, name: str, column: Any) -> Tensor:
    try:
        return torch.as_tensor(column)
    except (ValueError, TypeError, RuntimeError) as error:
        kind = type(column[0]).__name__ if isinstance(column, list) and column else type(column).__name__
        raise InputError(
            f"{field}: column '{name}' ({kind}) is not an array of numbers of one shape. Leave it out; texts become numbers "
            "with dpfed.tasks.text.tokenise."
        ) from error


def _from_pairs(field: str, source: Any) -> dict[str, Any]:
    """A data set of pairs: at once where it holds tensors, else record by record into columns made once."""
    if isinstance(source, Subset):
        rows = torch.as_tensor(source.indices)
        return {name: column[rows] for name, column in _from_pairs(field, source.dataset).items()}
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        return dict(zip(("x", "y"), source.tensors, strict=True))
    columns: dict[str, Tensor] = {}
    for row in range(len(source)):
        record = source[row]
        if not isinstance(record, (tuple, list)) or len(cast(Sequence[Any], record)) != 2:
            raise InputError(f"{field}: its record {row} is not a pair (x, y) but a {type(record).__name__}. Give pairs.")
        for name, value in zip(("x", "y"), cast(Sequence[Any], record), strict=True):
            entry = _tensor(field, name, np.asarray(value) if not isinstance(value, Tensor) else value)
            if row == 0:
                columns[name] = entry.new_empty((len(source), *entry.shape))
            if entry.shape != columns[name].shape[1:] or entry.dtype != columns[name].dtype:
                raise InputError(
                    f"{field}: '{name}' of record {row} has shape {tuple(entry.shape)} ({entry.dtype}), that of record 0 "
                    f"{tuple(columns[name].shape[1:])} ({columns[name].dtype}). Bring all records to one shape."
                )
            columns[name][row] = entry
    if not columns:
        raise InputError(f"{field}: the data set is empty. Leave it out, or give it records.")
    return columns


def _from_hugging_face(field: str, source: Any) -> dict[str, Any]:
    """The columns of a ``datasets.Dataset``: ``label`` becomes y, ``image`` becomes x, others keep their names."""
    if not len(source):
        raise InputError(f"{field}: the data set is empty. Leave it out, or give it records.")
    names = {name: HUGGING_FACE.get(name, name) for name in cast(list[str], source.column_names)}
    if len(set(names.values())) != len(names):
        raise InputError(f"{field}: two of its columns {sorted(names)} mean the same. Remove one (Dataset.remove_columns).")
    columns = cast(dict[str, Any], source.with_format("torch")[:])
    return {names[name]: column for name, column in columns.items()}
