"""A client whose process is killed again and again, at random: its store never knows less than was released."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from dpfed.ledger import Event
from dpfed.store import AlreadyChargedError, Store

EVENTS = Counter({Event("poisson", 9, 9, 500.0): 3})


def charged_rounds(path: Path) -> list[int]:
    return [charge.t for charge in Store(path).charges() if charge.run == "run"]


def client(path: Path, released: Path) -> None:
    """Rounds from the last that is charged; a marker stands for the upload."""
    store, log = Store(path), os.open(released, os.O_APPEND | os.O_WRONLY)
    for t in itertools.count(max(charged_rounds(path), default=0)):
        try:
            store.charge("run", t, EVENTS)
        except AlreadyChargedError:
            continue
        os.write(log, f"{t}\n".encode())


@pytest.mark.parametrize("num_kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_points(tmp_path: Path, num_kills: int) -> None:
    path, released, points = tmp_path / "client.db", tmp_path / "released", random.Random(num_kills)
    Store.create(path, 8.0, 1e-5).charge("warm", 0, EVENTS)  # what is imported late is imported before the children part
    released.touch()
    num_lost = 0
    for number in range(num_kills):
        child = os.fork()
        if child == 0:
            try:
                client(path, released)
            finally:
                os._exit(1)
        time.sleep(points.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the client met an error"
        uploads = [int(line) for line in released.read_text().split()]
        charged = charged_rounds(path)
        assert len(uploads) == len(set(uploads)), "a round was released twice"
        assert set(uploads) <= set(charged), "a release was not charged"
        assert charged == list(range(len(charged)))
        lost = len(charged) - len(uploads)
        assert num_lost <= lost <= num_lost + 1, f"kill {number} charged more than one round too much"
        num_lost = lost
    assert 0 < num_lost < num_kills, "the kills fell on both sides"
    assert len(uploads) > 10
