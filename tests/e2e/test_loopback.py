"""The seam of deployments: state and uploads travel as bytes, replies come in any order, and nothing changes, to the bit.

The simulation beside it takes one client at a time: a matrix product of another height may round otherwise, in the last bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from dpfed import Simulation, algorithms
from dpfed.algorithm import Round, Tree, leaves, like, weighted_sum
from dpfed.engines.simulation import Job, client_weights, train_clients
from dpfed.ledger import Event, Receipt
from tests.paper.world import MECHANISMS, job, trained


def to_bytes(tree: Tree) -> bytes:
    return save({name: vector.contiguous() for name, vector in leaves(tree)})


class Loopback:
    """Every client a stranger: it has the job and its own memory, and hears and answers in bytes."""

    def __init__(self, work: Job) -> None:
        self.job, self.memory = work, dict[int, Tree]()

    def train(self, t: Round, s: Tree, cohort: list[int]) -> tuple[Tree, list[Receipt]]:
        message = to_bytes(s)
        replies = {i: self.answer(t, s, message, i, cohort) for i in reversed(cohort)}
        uploads = [like(replies[i][0], load(replies[i][1])) for i in cohort]
        receipts = [
            Receipt(i, t.index, type(replies[i][2].events)({Event.from_json(e): n for e, n in plain}))
            for i, plain in ((i, [(e.to_json(), n) for e, n in replies[i][2].events.items()]) for i in cohort)
        ]
        return weighted_sum(zip(client_weights(self.job, cohort), uploads, strict=True)), receipts

    def answer(self, t: Round, structure: Tree, message: bytes, i: int, cohort: list[int]) -> tuple[Tree, bytes, Receipt]:
        uploads, memory, receipts = train_clients(self.job, t, like(structure, load(message)), [i], self.memory, cohort)
        self.memory |= memory
        return uploads[0], to_bytes(uploads[0]), receipts[0]


ONE_STEP = {"SGD", "Adam", "AdamBC", "AdamW", "AdamWBC", "MicroAdam"}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_loopback_equals_the_simulation_bit_for_bit(name: str, mechanism: str) -> None:
    work = job(getattr(algorithms, name)(), MECHANISMS[mechanism])
    num_steps = 1 if name in ONE_STEP else 4
    simulated: list[Any] = trained(work, num_steps, engine=Simulation(device="cpu", clients_at_once=1).open)
    as_matrix: list[Any] = trained(work, num_steps)
    travelled: list[Any] = trained(work, num_steps, engine=Loopback)
    for here, together, there in zip(simulated, as_matrix, travelled, strict=True):
        assert {n: v.numpy().tobytes() for n, v in leaves(here)} == {n: v.numpy().tobytes() for n, v in leaves(there)}
        for (_, a), (_, b) in zip(leaves(together), leaves(there), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
