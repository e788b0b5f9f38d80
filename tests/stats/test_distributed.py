"""Distributed noise: only the sum is protected, by the noise of those who took part, and what is charged is what is there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfed import (
    SGD,
    AdamW,
    AdamWBC,
    FedAdamW,
    FedAvg,
    FedSAM,
    Gaussian,
    InputError,
    LocalAdamW,
    Recipe,
    Scaffold,
    Simulation,
    Task,
    iid,
    run,
)
from dpfed.algorithm import Round
from dpfed.engines.simulation import Job, client_weights, protections, train_clients
from dpfed.flat import FlatModel
from dpfed.privacy import protection
from tests.stats.test_noise import D, Linear, federation, has_scale, of_output

SHARED = Gaussian(sigma=0.8, clip=0.5, batch_size=5, noise="distributed")


def one_round(mechanism: Gaussian, num_clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What single clients release, and what the cohort's mean is, without a signal."""
    model = FlatModel(Linear(D), of_output)
    records = torch.zeros(10 * num_clients, D, dtype=torch.float64)
    job = Job(model, federation(records, num_clients), SGD(), mechanism, seed=4)
    s, cohort = job.algorithm.server_init(model.theta0(), model.layout), list(range(num_clients))
    t = Round(0, 1.0, 1, model.layout, 1 / num_clients, 1.0)
    uploads, _, _ = train_clients(job, t, s, cohort, {})
    mean, _ = Simulation(device="cpu", memory_gib=1e-6).open(job).train(t, s, cohort)
    return torch.stack([upload.gradient for upload in uploads]), mean.gradient


@pytest.mark.parametrize("num_clients", [4, 9])
def test_every_client_adds_its_share_and_the_sum_has_all_of_sigma(num_clients: int) -> None:
    single, mean = one_round(SHARED, num_clients)
    whole = 0.8 * 0.5
    assert has_scale(single, whole / math.sqrt(num_clients) / 5)
    for_sum = mean * 5 * num_clients
    assert abs(float(for_sum.square().mean()) / whole**2 - 1) < 5 * math.sqrt(2 / D) < 0.19
    for wrong in (0.9, 1.1):
        assert not has_scale(one_round(replace(SHARED, sigma=0.8 * wrong), num_clients)[0], whole / math.sqrt(num_clients) / 5)


def test_unequal_clients_are_protected_as_computed_by_hand() -> None:
    """Two clients, batches 10 and 5, equal weights: noise sqrt(.05^2 + .1^2) / sqrt 2, sensitivities .05 and .1."""
    noise = math.sqrt((0.05**2 + 0.1**2) / 2)
    assert protection(SHARED, [(0.5, 10), (0.5, 5)]) == pytest.approx([noise / 0.05, noise / 0.1])
    assert protection(replace(SHARED, colluding=0.5), [(0.5, 10), (0.5, 5)]) == pytest.approx([math.sqrt(0.5)] * 2)
    assert protection(replace(SHARED, noise="local"), [(0.5, 10), (0.5, 5)]) == [1.0, 1.0]


def test_charged_for_those_who_took_part() -> None:
    """The receipts carry what was left of sigma; a smaller cohort of equals has all of it, a colluding one less."""
    model = FlatModel(Linear(3), of_output)
    work = Job(model, federation(torch.zeros(40, 3, dtype=torch.float64), 4), SGD(), replace(SHARED, colluding=0.25), seed=0)
    assert protections(work, [0, 1, 2, 3]) == pytest.approx(dict.fromkeys(range(4), math.sqrt(3 / 4)))
    assert protections(work, [0, 2]) == pytest.approx(dict.fromkeys([0, 2], 1.0)), "a quarter of two is nobody"
    s = work.algorithm.server_init(model.theta0(), model.layout)
    _, _, receipts = train_clients(work, Round(0, 1.0, 1, model.layout), s, [1, 2], {}, [0, 1, 2, 3])
    assert [event.sigma for receipt in receipts for event in receipt.events] == pytest.approx([0.8 * math.sqrt(0.75)] * 2)
    assert client_weights(work, [0, 1]) == [0.5, 0.5]


def recipe(algorithm: Any, local_steps: int = 1, mechanism: Gaussian = SHARED) -> Recipe:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=random)
    task = Task(torch.nn.Linear(4, 2), iid((x, (x[:, 0] > 0).long()), num_clients=4))
    return Recipe(task, algorithm, mechanism, rounds=3, local_steps=local_steps, cohort=3)


@pytest.mark.parametrize("algorithm", [FedAdamW(), LocalAdamW(), Scaffold(), FedSAM()], ids=lambda a: type(a).__name__)
def test_refused_where_the_upload_is_more_than_a_sum(algorithm: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mechanism\.noise: 'distributed' protects"):
        run(recipe(algorithm), tmp_path / "run")


def test_refused_for_more_than_one_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="local_steps=2"):
        run(recipe(FedAvg(), local_steps=2), tmp_path / "run")


@pytest.mark.parametrize("algorithm", [FedAvg(), SGD(), AdamW(), AdamWBC()], ids=lambda a: type(a).__name__)
def test_runs_and_says_what_it_assumes(algorithm: Any, tmp_path: Path) -> None:
    record = run(recipe(algorithm, mechanism=Gaussian(epsilon=2.0, batch_size=8, noise="distributed")), tmp_path / "run")
    assert 1.9 < record.ledger.epsilon(1e-5) <= 2
    assert "secure aggregation" in record.statement()
    assert (
        "secure aggregation" not in run(recipe(algorithm, mechanism=replace(SHARED, noise="local")), tmp_path / "b").statement()
    )
