"""A run is a folder, and the folder is the truth: whatever is killed, whenever, it can be read and resumed.

    recipe.json              the recipe, written once          environment.json     what it ran on, and when it began
    rows.jsonl               one line a round                  ledger.jsonl         delta, then the charges and the coins
    checkpoint.safetensors   the state before round t          model.safetensors    the final weights; ends the run
    memory/                  what clients keep (`memories.py`)
    lock                     held by the one process that writes; the system frees it when that process dies

Round t is `charge(receipts)`, then the release (the server steps), then `append(row)`, then `checkpoint(state, t + 1)`.
A charge is on the disk before `charge` returns, rows before the checkpoint that follows them, and a checkpoint before it takes
the place of the last. A resumed run does `restore()`, then `rewind(t)`. So a SIGKILL can only fall

- into `create`: the ledger is written last and makes the folder a run; without it nothing was charged, create it anew.
- before or into `charge`: nothing of round t was released. Whole lines count, a torn last one does not. Round t is done
  again from the same keys, and the receipts that are there already are not charged twice.
- after `charge`, before or into `append`: the charge stands, round t is done again, the same receipts count once.
- after `append`, before or into `checkpoint`: the old checkpoint is whole, `rewind` drops the row, t is done again.
- into `rewind`: rows.jsonl is the old one or the new one, and the next `rewind` does what is left to do.
- after the last `checkpoint`, before or into `save_model`: no round is left to do, only the model is saved again.

With a checkpoint every few rounds, the same holds for every round since. A crash may count too much, never too little:
the ledger is never cut back, and a checkpoint that saw more charges than the ledger holds is refused. What a killed
process left in the system's memory is forced to the disk before the next one builds on it.

One duty is the caller's: a round done again must draw the same batches and the same noise. Where noise is not keyed (a
deployment), a second release spends a second time, under the name of the first, and would count once: there, a round
that is charged already is skipped, never repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from dpfed.disk import PART, disk, read, read_tensors, replace_file, sync, tensors_as_bytes
from dpfed.errors import InputError
from dpfed.ledger import Bill, Event, Ledger, Receipt
from dpfed.report import table_text

RECIPE, ENVIRONMENT, ROWS, LEDGER = "recipe.json", "environment.json", "rows.jsonl", "ledger.jsonl"
CHECKPOINT, MODEL, LOCK = "checkpoint.safetensors", "model.safetensors", "lock"
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a reader of the numbers wants to know about the machine behind them."""
    return {
        **{name: importlib.metadata.version(name) for name in ("dpfed", "torch", "numpy", "dp-accounting")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class RunRecord:
    """One run on disk. Anyone may read it while it runs; the first write takes a lock, `close` or the end frees it."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.ledger, self.rows, self.delta = Path(path), Ledger(), list[dict[str, Any]](), math.nan
        self._num_charges, self._due = 0, list[Bill]()  # in the file; in the ledger, but not in the file yet
        self._announced, self._ends = set[int](), dict[str, int]()
        self._release: weakref.finalize[..., RunRecord] | None = None
        self._remedy = f"Make room, or allow writing, and go on with `dpfed resume {self.path}`."
        if not (self.path / LEDGER).is_file():
            raise InputError(f"{self.path}: there is no run here ({LEDGER} is missing). Name the folder of a run.")
        self.recipe, self.environment = (_parse(read(self.path / name), self.path / name) for name in (RECIPE, ENVIRONMENT))
        for where, row in self._lines(ROWS):
            self.rows.append(self._checked(row, where))
        charged_rounds = set[int]()
        for where, line in self._lines(LEDGER):
            try:
                if math.isnan(self.delta):
                    self.delta = float(line["delta"])
                    continue
                if "round" in line:
                    self.ledger.announce({line["round"]: line["rate"]})
                    self._announced.add(line["round"])
                    continue
                events = Counter({Event.from_json(event): count for event, count in line["events"]})
                charged = self.ledger.post(Receipt(client, line["t"], events) for client in line["clients"])
                self._num_charges += sum(len(bill.clients) for bill in charged)
                charged_rounds.add(line["t"])
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{where}: this is no charge ({error}). Put the file back as it was.") from error
        if math.isnan(self.delta):
            raise InputError(f"{self.path / LEDGER}: its first line, the delta, is missing. Put the file back as it was.")
        for row in self.rows:
            if row.get("clients") and row["t"] not in charged_rounds:  # what was released was charged before
                raise InputError(
                    f"{self.path / LEDGER}: holds no charge for round {row['t']}, which {ROWS} says was trained. Put the file "
                    "back as it was."
                )

    @classmethod
    def open(cls, path: str | Path) -> RunRecord:
        """Read a run. It may be running elsewhere, and its folder may be read-only."""
        return cls(path)

    @classmethod
    def create(cls, path: str | Path, recipe: Mapping[str, Any], environment: Mapping[str, Any], delta: float) -> RunRecord:
        """Begin a run in a new or an empty folder. Where that cannot be done, nothing is left behind."""
        path, texts = Path(path), {RECIPE: _dump(recipe, RECIPE, 2), ENVIRONMENT: _dump(environment, ENVIRONMENT, 2)}
        texts[LEDGER] = _dump({"delta": delta}, LEDGER)  # the last one: it makes the folder a run
        with disk(path, "Name a folder you may write to, on a disk with free space."), ExitStack() as undo:
            _check_free(path, texts)
            new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
            for folder in reversed(new_folders):
                folder.mkdir()
                undo.callback(folder.rmdir)
                sync(folder.parent)
            lock = _lock(path)
            if new_folders:
                undo.callback((path / LOCK).unlink)
            undo.callback(os.close, lock)
            _check_free(path, texts)  # again: another process may have been faster
            for name, data in texts.items():
                undo.callback((path / name).unlink, missing_ok=True)
                replace_file(path / name, data)
            record = cls(path)
            record._release = weakref.finalize(record, os.close, lock)
            undo.pop_all()
        return record

    def close(self) -> None:
        """Let somebody else write. The record can still be read; its next write takes the lock again."""
        if self._release is not None:
            self._release()

    def charge(self, receipts: Iterable[Receipt], announced: Mapping[int, float] | None = None) -> None:
        """Write down what a round spends, before any of it is released. What is there already is not written again.

        ``announced``: the rounds that every client joined by an independent coin, and its rate (`Ledger.announce`).
        """
        announced = announced or {}
        self._own()
        self._due += self.ledger.post(receipts)  # when the disk then fails, the ledger is ahead of the file, never behind
        self.ledger.announce(announced)
        rounds = {t: rate for t, rate in announced.items() if t not in self._announced}
        lines: list[dict[str, Any]] = [
            {"t": t, "clients": clients, "events": [[event.to_json(), count] for event, count in sorted(plan)]}
            for t, clients, plan in self._due
        ]
        self._append(LEDGER, lines + [{"round": t, "rate": rate} for t, rate in rounds.items()])
        self._num_charges += sum(len(bill.clients) for bill in self._due)
        self._due.clear()
        self._announced.update(rounds)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row of one round; durable with the next checkpoint, without which the round is done again."""
        self._own()
        checked = self._checked(dict(row), f"{self.path}/{ROWS}, new row")
        self._append(ROWS, [checked], durable=False)
        self.rows.append(checked)

    def rewind(self, t: int) -> None:
        """Drop the rows from round t on: these rounds will be done again. Charges are never dropped."""
        kept = [row for row in self.rows if row["t"] < t]
        if len(kept) == len(self.rows):
            return
        if self.finished:
            raise InputError(f"{self.path}: the run is finished. To do rounds again, first move {MODEL} away.")
        self._own()
        data = b"".join(_dump(row, ROWS) for row in kept)
        self._put(ROWS, data)
        self.rows, self._ends[ROWS] = kept, len(data)

    def checkpoint(self, tensors: Mapping[str, Tensor], t: int) -> None:
        """Save the state before round t in place of the last one, whole or not at all."""
        self._save(CHECKPOINT, tensors, {"t": t, "num_charges": self._num_charges})

    def restore(self) -> tuple[int, dict[str, Tensor]] | None:
        """The next round and the state before it, on the CPU; None when there is no checkpoint yet."""
        if not (self.path / CHECKPOINT).exists():
            return None
        metadata, tensors = self._load(CHECKPOINT, "Delete it to start again from round 0; the ledger keeps every charge.")
        expected, found = metadata["num_charges"], self._num_charges
        if expected > found:
            raise InputError(
                f"{self.path / LEDGER}: holds {found} charges, but {CHECKPOINT} was written after {expected}. Put the "
                "file back as it was; if the run is going on just now, wait for it and open it again."
            )
        return metadata["t"], tensors

    def save_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Save the final weights. This ends the run."""
        self._save(MODEL, tensors, {})

    def load_model(self) -> dict[str, Tensor]:
        """The final weights, on the CPU."""
        if not self.finished:
            raise InputError(f"{self.path / MODEL}: not there yet. Finish the run with `dpfed resume {self.path}`.")
        return self._load(MODEL, f"Delete it, and have it saved again with `dpfed resume {self.path}`.")[1]

    @property
    def finished(self) -> bool:
        return (self.path / MODEL).exists()

    def summary(self) -> dict[str, Any]:
        """The run in one row. Epsilon comes from the ledger, never from the rows; bytes are means over the rounds."""

        def column(key: str) -> list[float]:
            return [row[key] for row in self.rows if row.get(key) is not None]

        return {
            "name": self.recipe["name"],
            "final_accuracy": next(reversed(column("accuracy")), None),
            "best_accuracy": max(column("accuracy"), default=None),
            "epsilon": self.ledger.epsilon(self.delta),
            "rounds": self.rows[-1]["t"] + 1 if self.rows else 0,
            "seconds": sum(column("seconds")),
            **{key: fmean(column(key)) if column(key) else None for key in ("bytes_up", "bytes_down")},
        }

    def statement(self) -> str:
        """The privacy guarantee of the run, in words."""
        return self.ledger.statement(self.delta)

    def table(self) -> str:
        """The run as a table of one line; `dpfed.report.table_text` compares several."""
        return table_text([self])

    def _own(self) -> None:
        """Take the lock, make durable what a killed process left in memory; refuse if somebody wrote since we read."""
        if self._release is not None and self._release.alive:
            return
        with self._disk(LOCK):
            self._release = weakref.finalize(self, os.close, _lock(self.path))
            for path in (self.path, *(self.path / name for name, end in self._ends.items() if end)):
                sync(path)
        if any(len(_whole_lines(self.path / name)) != end for name, end in self._ends.items()):
            self.close()
            raise InputError(f"{self.path}: somebody has written to this run since it was read. Open it again.")

    def _lines(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """The whole lines of a file, each with its place. A torn last one was never acknowledged and does not count."""
        whole = _whole_lines(self.path / name)
        self._ends[name] = len(whole)
        lines = [(f"{self.path / name}, line {number}", line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]
        return [(where, _parse(line, where)) for where, line in lines]

    def _append(self, name: str, values: list[dict[str, Any]], durable: bool = True) -> None:
        """Add lines behind the last whole one, so that what a crash or a full disk tore is written over."""
        data, end, path = b"".join(_dump(value, name) for value in values), self._ends[name], self.path / name
        with disk(path, self._remedy), os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size < end:
                raise InputError(f"{path}: became shorter while in use. Put the file back as it was.")
            if size > end:
                file.truncate(end)
            file.seek(end)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        self._ends[name] = end + len(data)

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        last = self.rows[-1]["t"] if self.rows else -1
        if type(row.get("t")) is not int or row["t"] <= last:
            raise InputError(f"{where}: t must be a whole number above {last}, the last row's; got {row.get('t')!r}.")
        return row

    def _save(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, Any]) -> None:
        self._own()
        with self._disk(ROWS):
            if self.rows:
                sync(self.path / ROWS)
        self._put(name, tensors_as_bytes(tensors, {"file": name, "recipe": self.fingerprint(), **metadata}))

    def _load(self, name: str, remedy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        metadata, tensors = read_tensors(self.path / name, remedy)
        if (metadata["file"], metadata["recipe"]) != (name, self.fingerprint()):
            raise InputError(f"{self.path / name}: comes from a run of another recipe, or was renamed. {remedy}")
        return metadata, tensors

    def _put(self, name: str, data: bytes) -> None:
        with self._disk(name):
            replace_file(self.path / name, data)

    def _disk(self, name: str) -> AbstractContextManager[None]:
        return disk(self.path / name, self._remedy)

    def fingerprint(self) -> str:
        """Of the recipe, which stands in every file of tensors."""
        return hashlib.blake2b(_dump(self.recipe, RECIPE), digest_size=16).hexdigest()


def _check_free(path: Path, ours: Iterable[str]) -> None:
    """Only an empty folder, or what a killed `create` left behind, may become a run."""
    names = {child.name for child in path.iterdir()} if path.exists() else set[str]()
    if LEDGER in names:
        raise InputError(f"{path}: holds a run already. Go on with `dpfed resume {path}`, or name another folder.")
    if foreign := names - {LOCK, *ours, *(name + PART for name in ours)}:
        raise InputError(f"{path}: holds other files ({min(foreign)}). Name a new or an empty folder.")


def _lock(folder: Path) -> int:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise InputError(f"{folder}: somebody else is writing this run. Wait for them, or stop them.") from error
        raise
    return lock


def _whole_lines(path: Path) -> bytes:
    data = read(path) if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _parse(text: bytes, where: str | Path) -> dict[str, Any]:
    try:
        value = json.loads(text.decode())
    except ValueError as error:
        raise InputError(f"{where}: this is not JSON ({error}). Put the file back as it was.") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: this is not a JSON object. Put the file back as it was.")
    return _leaves(value, lambda leaf: NON_FINITE.get(leaf, leaf) if isinstance(leaf, str) else leaf)


def _dump(value: Mapping[str, Any], where: str, indent: int | None = None) -> bytes:
    """One object and a newline. JSON has no infinity: it is written as the text "inf", and read back as the number."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, str) and leaf in NON_FINITE:
            raise InputError(f"{where}: the text {leaf!r} would be read back as a number. Use another word.")
        return str(float(leaf)) if isinstance(leaf, float) and not math.isfinite(leaf) else leaf

    try:
        return json.dumps(_leaves(dict(value), plain), indent=indent, allow_nan=False).encode() + b"\n"
    except TypeError as error:
        raise InputError(f"{where}: {error}. Give plain numbers, texts, lists and dicts.") from error


def _leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {str(key): _leaves(item, change) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_leaves(item, change) for item in cast(list[Any], value)]
    return change(value)
