"""A small federation, trained twice: by the library, and by a referee that shares only the keys of the random draws.

The referee computes gradients record by record with plain autograd in float64, clips and sums them in numpy, and adds noise
from the same keys; so a difference in a batch, in the clipping, in the noise, in its scale or in the divisor shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from dpfed import data
from dpfed.algorithm import Algorithm, Round
from dpfed.data import Federation
from dpfed.engines.simulation import Engine, Job, Simulation, client_weights
from dpfed.flat import FlatModel
from dpfed.pieces import schedule_scale
from dpfed.privacy import Gaussian, Plain
from tests.paper.twins import World

NUM_ROUNDS, NUM_STEPS, COHORT, SEED = 3, 4, 3, 7
PRIVATE = Gaussian(sigma=0.8, clip=0.5, batch_size=6)
MECHANISMS = {"private": PRIVATE, "sigma 0": replace(PRIVATE, sigma=0.0), "plain": Plain(batch_size=6)}


class Attention(nn.Module):
    """Small, with a fused qkv of two heads, so that the block rule has something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(4, 12)
        self.proj = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, 2, 2).unbind(1)
        return self.proj((torch.softmax(q @ k.mT, -1) @ v).flatten(1))


def job(algorithm: Algorithm, mechanism: Gaussian | Plain = PRIVATE) -> Job:
    """Five clients of unequal size, one smaller than the batch."""
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(60, 4, generator=random, dtype=torch.float64), torch.arange(60) % 3
    ends = [0, 4, 14, 27, 43, 60]
    clients = tuple(torch.arange(start, end) for start, end in pairwise(ends))
    module = Attention().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return Job(FlatModel(module), Federation({"x": x, "y": y}, clients), algorithm, mechanism, SEED)


def trained(work: Job, num_steps: int = NUM_STEPS, engine: Callable[[Job], Engine] | None = None) -> list[Any]:
    """The server's state after every round, by the library."""
    s = work.algorithm.server_init(work.model.theta0(), work.model.layout)
    running, states = (engine or Simulation(device="cpu").open)(work), []
    for t in range(NUM_ROUNDS):
        cohort = work.federation.cohort(work.seed, t, COHORT)
        shrinkage = sum(weight**2 for weight in client_weights(work, cohort))
        scale, participation = schedule_scale("cosine", t, NUM_ROUNDS), COHORT / len(work.federation.clients)
        now = Round(t, scale, num_steps, work.model.layout, shrinkage, participation)
        u, _ = running.train(now, s, cohort)
        s = work.algorithm.server_step(s, u, now)
        states.append(s)
    return states


def world(work: Job, num_steps: int = NUM_STEPS, new_batch_for_second: bool = False) -> World:
    """The same federation for a twin. ``new_batch_for_second``: the second gradient of a step takes a further batch."""
    federation, mechanism = work.federation, work.mechanism
    columns, theta0 = federation.records, work.model.theta0().numpy()

    def size(i: int) -> int:
        return min(mechanism.batch_size, len(federation.clients[i]))

    def gradients_at(theta: np.ndarray) -> Callable[[int], np.ndarray]:
        module = Attention().double()
        nn.utils.vector_to_parameters(torch.from_numpy(theta), module.parameters())

        def of_record(row: int) -> np.ndarray:
            loss = nn.functional.cross_entropy(module(columns["x"][row : row + 1]), columns["y"][row : row + 1])
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, module.parameters())]).numpy()

        return of_record

    def release(t: int, i: int, k: int, query: int, of_record: Callable[[int], np.ndarray]) -> np.ndarray:
        draw, query = (query, 0) if new_batch_for_second else (0, query)
        facts = {"num_examples": len(federation.clients[i]), "batch_size": mechanism.batch_size, "draw": draw}
        facts |= {"num_steps": num_steps}
        chosen = data.batch(work.seed, t, i, k, sampling=mechanism.sampling, **facts)
        total = np.zeros_like(theta0)
        for row in federation.clients[i][chosen].tolist():
            g = of_record(row)
            total += g * min(1.0, mechanism.clip / np.linalg.norm(g))
        if mechanism.sigma:
            random = data.generator(work.seed, "noise", t, i, k, draw, query)
            total += mechanism.sigma * mechanism.clip * torch.randn(len(theta0), generator=random, dtype=torch.float64).numpy()
        return total / size(i)

    def gradient(t: int, i: int, k: int, query: int, theta: np.ndarray) -> np.ndarray:
        return release(t, i, k, query, gradients_at(theta))

    def difference(t: int, i: int, k: int, now: np.ndarray, c: float, before: np.ndarray) -> np.ndarray:
        here, there = gradients_at(now), gradients_at(before)
        return release(t, i, k, 0, lambda row: here(row) - c * there(row))

    def noise_var(i: int) -> float:
        return (mechanism.sigma * mechanism.clip / size(i)) ** 2 if mechanism.sigma else 0.0

    return World(
        theta0=theta0,
        cohorts=[federation.cohort(work.seed, t, COHORT) for t in range(NUM_ROUNDS)],
        num_clients=len(federation.clients),
        num_steps=num_steps,
        scales=[schedule_scale("cosine", t, NUM_ROUNDS) for t in range(NUM_ROUNDS)],
        gradient=gradient,
        gradient_difference=difference,
        noise_var=noise_var,
    )


def assert_equal(states: list[Any], thetas: list[np.ndarray], tolerance: float = 1e-12) -> None:
    """Every round's parameters, to 1e-12 of their size."""
    assert len(states) == len(thetas) == NUM_ROUNDS
    for t, (state, theta) in enumerate(zip(states, thetas, strict=True)):
        error = np.abs(state.theta.numpy() - theta).max() / np.abs(theta).max()
        assert error < tolerance, f"round {t}: relative error {error:.2e}"
    assert np.abs(thetas[-1] - thetas[0]).max() > 1e-6, "nothing was trained"
