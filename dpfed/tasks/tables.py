"""One's own records in a csv, tsv or jsonl file: numbers as columns, or texts to be tokenised."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.flat import Records
from dpfed.tasks.folders import read_text
from dpfed.tasks.text import Texts

SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Table(NamedTuple):
    """The columns of a file, as texts (csv, tsv) or as the values that stand there (jsonl)."""

    path: Path
    columns: dict[str, list[Any]]
    lines: list[int]  # where each record stands in the file, for complaints

    def column(self, name: str) -> list[Any]:
        if name not in self.columns:
            raise InputError(f"{self.path}: has no column {name!r}; it has {', '.join(self.columns)}. Name one of these.")
        return self.columns[name]

    def numbers(self, names: Sequence[str]) -> Tensor:
        """Columns as float32 ``[records, columns]``; refused where a cell is no finite number."""
        arrays = [np.array([self._number(row, name, value) for row, value in enumerate(self.column(name))]) for name in names]
        return torch.from_numpy(np.stack(arrays, axis=1).astype(np.float32))

    def labels(self, name: str, classes: Sequence[Any] | None = None) -> tuple[Tensor, list[Any]]:
        """A column as classes 0, 1, ... and what they are called: by number where all are whole numbers, else by name; or in
        the order of ``classes`` (hand those of the training file to the test file)."""
        values = self.column(name)
        if any(not isinstance(value, (str, int, bool)) or value == "" for value in values):
            row = next(r for r, value in enumerate(values) if not isinstance(value, (str, int, bool)) or value == "")
            raise InputError(
                f"{self._place(row)}: {name!r} is {values[row]!r:.60}, which is no label. Correct or drop the record."
            )
        whole = all(re.fullmatch("-?[0-9]{1,18}", str(value)) for value in values)
        order = sorted(set(values), key=lambda value: (int(value), "") if whole else (0, str(value)))
        number = {value: c for c, value in enumerate(order if classes is None else classes)}
        for row, value in enumerate(values):
            if value not in number:
                known = f"the classes {list(number)[:10]}"
                raise InputError(f"{self._place(row)}: {name!r} is {value!r:.60}, none of {known}. Correct or drop the record.")
        return torch.tensor([number[value] for value in values]), list(number)

    def texts(self, names: Sequence[str], target: str, classes: Sequence[Any] | None = None) -> Texts:
        """One or two columns as texts, for `dpfed.tasks.text.tokenise`."""
        if len(names) not in (1, 2):
            raise InputError(f"{self.path}: a text is one column or two, got {len(names)}. Name one or two.")
        for name in names:
            for row, value in enumerate(self.column(name)):
                if not isinstance(value, str):
                    raise InputError(f"{self._place(row)}: {name!r} is {value!r:.60}, not a text. Correct or drop the record.")
        return Texts(
            self.columns[names[0]], self.columns[names[1]] if len(names) > 1 else None, self.labels(target, classes)[0]
        )

    def _number(self, row: int, name: str, value: Any) -> float:
        try:
            number = float(value) if isinstance(value, (str, int, float)) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or abs(number) > 3e38:
            raise InputError(f"{self._place(row)}: {name!r} is {value!r:.60}, not a finite number. Correct or drop the record.")
        return number

    def _place(self, row: int) -> str:
        return f"{self.path}, line {self.lines[row]}"


def read_table(path: str | Path) -> Table:
    """The columns of a csv or tsv file (first line: their names; quotes as in RFC 4180) or of a jsonl file."""
    path = Path(path)
    suffix = path.name.removesuffix(".gz")[len(path.name.removesuffix(".gz").split(".")[0]) :].lower()
    if suffix not in (*SEPARATORS, ".jsonl"):
        raise InputError(f"{path}: must end in .csv, .tsv or .jsonl (or these and .gz). Save it as one of them.")
    text = read_text(path)
    table = _json_lines(path, text) if suffix == ".jsonl" else _separated(path, text, SEPARATORS[suffix])
    if not table.lines:
        raise InputError(f"{path}: holds no records. Put one a line, below the names of the columns.")
    return table


def read_numbers(path: str | Path, target: str, features: Sequence[str] | None = None, without: Sequence[str] = ()) -> Records:
    """``x`` float32 ``[n, features]`` and classes ``y``. The features: those named, or all but the target and ``without``."""
    table = read_table(path)
    names = [name for name in table.columns if name not in (target, *without)] if features is None else list(features)
    if not names or target in names:
        raise InputError(f"{path}: no columns are left as features, or the target {target!r} is one of them. Name others.")
    return {"x": table.numbers(names), "y": table.labels(target)[0]}


def _separated(path: Path, text: str, separator: str) -> Table:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names: list[str] = []
    cells: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in rows:
            if not row:
                continue
            if not names:
                names = _unique(path, row)
            elif len(row) != len(names):
                raise InputError(
                    f"{path}, line {rows.line_num}: has {len(row)} cells, the first line {len(names)}. Quote cells that hold "
                    f"a {separator!r} or a line break, or correct the line."
                )
            else:
                cells.append(row)
                lines.append(rows.line_num)
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.line_num}: {error}. Correct the quotes in this line or before it.") from error
    return Table(path, {name: list(column) for name, column in zip(names, zip(*cells, strict=True), strict=False)}, lines)


def _json_lines(path: Path, text: str) -> Table:
    names: list[str] = []
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    for at, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=lambda pairs: _object(path, at, pairs))  # noqa: B023
        except (json.JSONDecodeError, RecursionError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}, line {at}: is not a JSON object ({error}). Correct the line.") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {at}: is a {type(record).__name__}, not an object. Write one object a line.")
        names = names or _unique(path, list(cast(dict[str, Any], record)))
        if set(cast(dict[str, Any], record)) != set(names):
            differing = ", ".join(sorted(set(cast(dict[str, Any], record)) ^ set(names))[:5])
            raise InputError(f"{path}, line {at}: differs from the first record in the names {differing}. Give all the same.")
        records.append(cast(dict[str, Any], record))
        lines.append(at)
    return Table(path, {name: [record[name] for record in records] for name in names}, lines)


def _object(path: Path, line: int, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InputError(f"{path}, line {line}: names a field twice. Remove one.")
    return found


def _unique(path: Path, names: list[str]) -> list[str]:
    if len(set(names)) != len(names) or "" in names or any(name != name.strip() for name in names):
        raise InputError(
            f"{path}: its columns {names[:10]} do not all have a name of their own, without spaces around. Correct the names."
        )
    return names
