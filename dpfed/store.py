"""A client's own ledger on its own disk: the charge is written before the release, and the budget is its owner's.

One SQLite file holds what the records of one client have cost, over all runs, and what they may cost. A client's round is

    store.charge(run, t, events)      durable when it returns; refuses what would exceed the budget
    release the round                 only now, and only if nothing was raised

Killed anywhere in between, the charge stands and the release may be missing: one round too much, never one too little. The
noise of a deployment is not keyed, so a round done again would be a second release under the first one's name: `charge` raises
`AlreadyChargedError` instead, and the caller skips the round.

Durable means: with the write-ahead log and synchronous=EXTRA (for a log the same as FULL) a commit returns after the log was
fsynced, and the folder with it. A charge is one BEGIN IMMEDIATE transaction that reads, decides and writes, so that processes
that race cannot both take the last of the budget. What a file cannot know is that an older copy was put in its place, and on a
network file system the log does not work: keep it on a local disk, and restore no backup over it.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dpfed.accountants import Event, Plan, as_plan, check_whole, epsilon, plan_epsilon
from dpfed.errors import InputError
from dpfed.ledger import Ledger, Receipt

MARK, VERSION = 0x64706664, 1  # "dpfd", in the header of the file
PATIENCE = 30.0  # seconds to wait for another writer
DURABLE = ("PRAGMA fullfsync = ON", "PRAGMA synchronous = EXTRA")
SCHEMA = (
    "CREATE TABLE budget (epsilon REAL NOT NULL, delta REAL NOT NULL) STRICT",
    "CREATE TABLE charges (run TEXT NOT NULL, t INTEGER NOT NULL, events TEXT NOT NULL, PRIMARY KEY (run, t)) STRICT",
    f"PRAGMA application_id = {MARK}",
    f"PRAGMA user_version = {VERSION}",
)
REMEDIES = {
    sqlite3.SQLITE_BUSY: "Another process is writing. Wait for it, or stop it.",
    sqlite3.SQLITE_FULL: "Nothing was charged. Make room on the disk.",
    sqlite3.SQLITE_IOERR: "Nothing was charged. Make room on the disk, and see that it is sound.",
    sqlite3.SQLITE_READONLY: "Nothing was charged. Allow writing to the file and its folder.",
    sqlite3.SQLITE_CANTOPEN: "Name a file in a folder that exists, and allow writing to both.",
    sqlite3.SQLITE_NOTADB: "It is no ledger store. Name another file.",
    sqlite3.SQLITE_CORRUPT: "Train no more, and put the file back as it was.",
}


class AlreadyChargedError(InputError):
    """The round was charged before, and perhaps released: skip it, never do it again."""


class Charge(NamedTuple):
    """What round ``t`` of a run was charged."""

    run: str
    t: int
    events: Counter[Event]


class Store:
    """The ledger of one client, as a file. Any number of processes may use it; one of them writes at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"{self.path}: there is no ledger store here. Name another file, or make one (Store.create).")
        with self._reading() as file:
            self.epsilon, self.delta = file.execute("SELECT epsilon, delta FROM budget").fetchone()

    @classmethod
    def create(cls, path: str | Path, epsilon: float, delta: float) -> Store:
        """A new file. The budget is for everything that these records will ever be part of, and stays."""
        if not 0 < epsilon < math.inf:
            raise InputError(f"epsilon: must be a finite number above 0, got {epsilon}. 1 is strong, 8 is common.")
        plan_epsilon(as_plan({}), delta)  # refuses an impossible delta
        path = Path(path)
        with _sqlite(path, "rwc") as file:
            for line in (*DURABLE, "BEGIN IMMEDIATE"):
                file.execute(line)
            if file.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise InputError(f"{path}: exists already. Open it with Store(path), or name a new file.")
            for line in SCHEMA:
                file.execute(line)
            file.execute("INSERT INTO budget VALUES (?, ?)", (epsilon, delta))
            file.execute("COMMIT")
            file.execute("PRAGMA journal_mode = WAL")
        return cls(path)

    def charge(self, run: str, t: int, events: Mapping[Event, int]) -> None:
        """Write down what round ``t`` of a run will cost, before any of it is released. All or nothing.

        Raises `AlreadyChargedError` for a round that was charged before, and `InputError` where the budget does not allow it.
        """
        check_whole("t", t, at_least=0)
        new = Counter(dict(as_plan(events)))
        if not new:
            raise InputError("events: nothing would be charged, and whatever is released costs something. Count it first.")
        if any(event.unit == "client" for event in new):
            raise InputError(
                "event.unit: with 'client' the server adds the noise, so no client can vouch for it. Use 'example'."
            )
        with _sqlite(self.path, "rw") as file:
            for line in (*DURABLE, "PRAGMA journal_mode = WAL", "BEGIN IMMEDIATE"):
                file.execute(line)
            _check_ours(self.path, file)
            if file.execute("SELECT 1 FROM charges WHERE run = ? AND t = ?", (run, t)).fetchone():
                raise AlreadyChargedError(f"{self.path}: round {t} of run {run!r} was charged before. Skip it.")
            total = sum((charge.events for charge in self._charges(file)), new)
            if (cost := epsilon(total, self.delta)) > self.epsilon:
                raise InputError(
                    f"{self.path}: round {t} of run {run!r} would bring epsilon to {cost:.4f} at delta = {self.delta:g}; the "
                    f"budget is {self.epsilon:g}. Nothing was charged. Leave the run, or take part with more noise."
                )
            file.execute("INSERT INTO charges VALUES (?, ?, ?)", (run, t, _text(new)))
            file.execute("COMMIT")

    def charges(self) -> list[Charge]:
        """All of them, in the order in which they came."""
        with self._reading() as file:
            return self._charges(file)

    def ledger(self) -> Ledger:
        """The charges of all runs, as those of client 0 in rounds of one long run."""
        ledger = Ledger()
        ledger.post(Receipt(0, t, charge.events) for t, charge in enumerate(self.charges()))
        return ledger

    def _charges(self, file: sqlite3.Connection) -> list[Charge]:
        rows = file.execute("SELECT run, t, events FROM charges ORDER BY rowid").fetchall()
        return [Charge(run, t, _events(self.path, text)) for run, t, text in rows]

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        """Who may write tidies up after those who were killed; where nobody may, SQLite has to be told so."""
        mode = "ro" if Path(f"{self.path}-wal").exists() else "ro&immutable=1"
        if all(os.access(place, os.W_OK, effective_ids=True) for place in (self.path, self.path.parent)):
            mode = "rw"
        with _sqlite(self.path, mode) as file:
            _check_ours(self.path, file)
            yield file


@contextmanager
def _sqlite(path: Path, mode: str) -> Generator[sqlite3.Connection]:
    """A connection that is closed at the end, and without a COMMIT leaves no trace. What SQLite refuses is put into words."""
    try:
        address = f"{path.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(address, uri=True, isolation_level=None, timeout=PATIENCE)) as file:
            yield file
    except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        raise InputError(f"{path}: {error}. {REMEDIES.get(code, 'Nothing was charged.')}") from error


def _check_ours(path: Path, file: sqlite3.Connection) -> None:
    (mark,), (version,) = (file.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version"))
    if (mark, version) != (MARK, VERSION):
        raise InputError(f"{path}: is no ledger store, or one of another version ({version}). Name another file.")


def _text(events: Mapping[Event, int]) -> str:
    return json.dumps([[event.to_json(), count] for event, count in sorted(events.items())])


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Plan:
    pairs: list[tuple[dict[str, Any], int]] = json.loads(text)
    if type(pairs) is not list:
        raise TypeError("not a list")
    return as_plan({Event.from_json(event): count for event, count in pairs})


def _events(path: Path, text: str) -> Counter[Event]:
    try:
        return Counter(dict(_parsed(text)))
    except (ValueError, TypeError, AttributeError, InputError) as error:
        raise InputError(
            f"{path}: this is no charge ({text}: {error}). Train no more, and put the file back as it was."
        ) from error
