"""Killed with SIGKILL at ten random points and resumed: the same bits as without a stop, and no charge forgotten."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfed import FedAdamW, Gaussian, Recipe, RunRecord, Scaffold, Task, iid, run
from dpfed.rounds import begin

NUM_ROUNDS = 60


def recipe(algorithm: Any) -> Recipe:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8, generator=random)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    module = torch.nn.Linear(8, 3)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return Recipe(
        Task(module, iid((x, y), num_clients=10, test=(x, y))),
        algorithm,
        Gaussian(sigma=1.0, batch_size=10),
        rounds=NUM_ROUNDS,
        local_steps=3,
        cohort=4,
    )


def in_child(folder: Path, algorithm: Any) -> int:
    """Train, or go on training, in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            _, rows = begin(recipe(algorithm), folder, resume=(folder / "ledger.jsonl").exists())
            for _ in rows:
                pass
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def charges(folder: Path) -> set[tuple[int, int]]:
    """What is on the disk, read without the library."""
    text = (folder / "ledger.jsonl").read_text() if (folder / "ledger.jsonl").exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {(client, line["t"]) for line in lines for client in line.get("clients", ())}


@pytest.mark.parametrize("algorithm", [FedAdamW(lr=0.01), Scaffold(lr=0.1)], ids=lambda a: type(a).__name__)
def test_killed_at_ten_random_points(tmp_path: Path, algorithm: Any) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    run(replace(recipe(algorithm), rounds=1), tmp_path / "warm")  # what is imported late is imported before the children part
    began = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(in_child(whole, algorithm), 0)[1]) == 0
    length = time.monotonic() - began
    points, kills, seen = random.Random(7), 0, set[tuple[int, int]]()
    while kills < 10:
        child = in_child(torn, algorithm)
        time.sleep(points.uniform(0, length / 4))
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            kills += 1
        now = charges(torn)
        assert seen <= now, "a charge was forgotten"
        rows = (torn / "rows.jsonl").read_text().splitlines(keepends=True) if (torn / "rows.jsonl").exists() else []
        released = {json.loads(row)["t"] for row in rows if row.endswith("\n")}
        assert released <= {t for _, t in now}, "a round was released that nobody was charged for"
        seen = now
    assert os.waitstatus_to_exitcode(os.waitpid(in_child(torn, algorithm), 0)[1]) == 0
    one, other = RunRecord.open(whole), RunRecord.open(torn)
    assert (whole / "model.safetensors").read_bytes() == (torn / "model.safetensors").read_bytes()
    assert [without_time(row) for row in one.rows] == [without_time(row) for row in other.rows]
    assert len(one.rows) == NUM_ROUNDS
    assert sorted(one.ledger) == sorted(other.ledger)


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "seconds"}
