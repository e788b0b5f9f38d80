"""A client whose process is killed again and again: its store never knows less than was released.

Killed at random times, from outside; at random instructions of SQLite, of which a charge takes some hundred; and at the two
places that matter most, between charge and release and right after the release. Only the first kind depends on the machine.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfed.ledger import Event
from dpfed.store import AlreadyChargedError, Store

EVENTS = Counter({Event("poisson", 9, 9, 500.0): 3})


def charged_rounds(path: Path) -> list[int]:
    return [charge.t for charge in Store(path).charges() if charge.run == "run"]


class Fuse:
    """Counts down at one kind of point, and at the last one ends the process as kill -9 does."""

    def __init__(self, kind: str, num: int) -> None:
        self.kind, self.left = kind, num

    def __call__(self, kind: str) -> None:
        self.left -= kind == self.kind
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(self, connect: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
        """The same, with the fuse at every instruction of SQLite."""

        def burning(*words: Any, **named: Any) -> sqlite3.Connection:
            file = connect(*words, **named)
            file.set_progress_handler(lambda: self("instruction"), 1)
            return file

        return burning


def client(path: Path, released: Path, fuse: Fuse) -> None:
    """Rounds from the last that is charged; a marker stands for the upload."""
    store, log = Store(path), os.open(released, os.O_APPEND | os.O_WRONLY)
    sqlite3.connect = fuse.connect(sqlite3.connect)  # in this process, which does not live long
    for t in itertools.count(max(charged_rounds(path), default=0)):
        try:
            store.charge("run", t, EVENTS)
        except AlreadyChargedError:
            continue
        fuse("charged")
        os.write(log, f"{t}\n".encode())
        fuse("released")


def killed(work: Callable[[], None], after: float | None) -> None:
    """The work in a process of its own, which ends by kill -9: its own, or one from here after so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the client met an error"


def test_killed_at_200_points(tmp_path: Path) -> None:
    path, released, points = tmp_path / "client.db", tmp_path / "released", random.Random(200)
    Store.create(path, 8.0, 1e-5).charge("warm", 0, EVENTS)  # what is imported late is imported before the children part
    released.touch()
    kinds = ["time"] * 50 + ["instruction"] * 110 + ["charged"] * 20 + ["released"] * 20
    points.shuffle(kinds)
    num_lost, lost_by, uploads = 0, Counter[str](), list[int]()
    for kind in kinds:
        fuse = Fuse(kind, points.randrange(1000 if kind == "instruction" else 3))
        killed(lambda fuse=fuse: client(path, released, fuse), points.uniform(0, 0.06) if kind == "time" else None)
        uploads = [int(line) for line in released.read_text().split()]
        charged = charged_rounds(path)
        assert len(uploads) == len(set(uploads)), "a round was released twice"
        assert set(uploads) <= set(charged), "a release was not charged"
        assert charged == list(range(len(charged)))
        lost = len(charged) - len(uploads)
        assert num_lost <= lost <= num_lost + 1, f"a kill by {kind} charged more than one round too much"
        lost_by[kind] += lost - num_lost
        num_lost = lost
    assert lost_by["charged"] == kinds.count("charged"), "between charge and release: charged, and never released"
    assert lost_by["released"] == 0
    assert lost_by["instruction"] < kinds.count("instruction"), "most fall before the charge stands, and nothing is lost"
    assert len(uploads) >= kinds.count("released"), "at the least, however slow the machine"
