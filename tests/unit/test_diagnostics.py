"""Diagnostics: equal to a direct computation from what every single client sent, and without a trace in the run."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpfed import AdamWBC, FedAdamW, FedAvg, Gaussian, InputError, LocalAdamW, Plain, Recipe, Task, algorithms, iid, run
from dpfed.__main__ import main
from dpfed.algorithm import Round, weighted_sum
from dpfed.diagnostics import EDGES, Observed, columns, diagnostics_figure, own_upload
from dpfed.engines.simulation import Job, train_clients
from dpfed.flat import FlatModel
from dpfed.record import RunRecord

PRIVATE = Gaussian(sigma=0.8, clip=0.5, batch_size=5)
COHORT = [0, 2, 3]
PHI = (0.8 * 0.5 / 5) ** 2


def task(dtype: torch.dtype = torch.float64, num_records: int = 60) -> Task:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(num_records, 6, generator=random, dtype=dtype)
    module = nn.Sequential(nn.Linear(6, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 3, dtype=dtype))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=random)
    return Task(module, iid((x, torch.arange(num_records) % 3), num_clients=5))


def one_round(algorithm: Any, num_steps: int = 4) -> tuple[list[Any], dict[str, Any], Any, Round]:
    """What the clients sent without being observed, the columns of the same round observed, the server after it, the round."""
    ours = task()
    model = FlatModel(ours.model)
    job = Job(model, ours.federation, algorithm, PRIVATE, seed=3)
    s, t = algorithm.server_init(model.theta0(), model.layout), Round(0, 0.7, num_steps, model.layout, 1 / 3, 3 / 5)
    plain, _, _ = train_clients(job, t, s, COHORT, {})
    seen, _, _ = train_clients(job._replace(algorithm=Observed(algorithm)), t, s, COHORT, {})
    mean = weighted_sum((1 / 3, upload) for upload in seen)
    after = algorithm.server_step(s, own_upload(mean), t)
    return plain, columns(algorithm, after, mean, t, PHI), after, t


def test_columns_equal_a_direct_computation() -> None:
    """With both moments sent, coordinate by coordinate, all can be computed from what the server sees."""
    algorithm = FedAdamW(lr=0.02, aggregate="mv", blocks="none", floor_rel=0.4, beta2=0.9)
    uploads, found, _, t = one_round(algorithm)
    deltas = np.stack([u.delta.numpy() for u in uploads])
    v = np.stack([(u.v.value / u.v.weight).numpy() for u in uploads])
    m = np.stack([(u.m.value / u.m.weight).numpy() for u in uploads])
    root2 = np.maximum(v - PHI, 0.4 * PHI)
    pairs = list(itertools.permutations(range(3), 2))
    products = np.mean([deltas[i] @ deltas[j] for i, j in pairs]) / np.mean((deltas**2).sum(1))
    assert found["drift"] == pytest.approx(((deltas - deltas.mean(0)) ** 2).sum(1).mean(), rel=1e-5)
    assert found["cosine"] == pytest.approx(products, rel=1e-5)
    assert found["v_variance"] == pytest.approx(v.var(axis=0).mean(), rel=1e-5)
    assert found["noise_std"] == pytest.approx(math.sqrt(PHI), rel=1e-5)
    clamped = v - PHI <= 0.4 * PHI
    assert 0.1 < clamped.mean() < 0.9
    assert found["clamped"] == pytest.approx(clamped.mean(), rel=1e-5)
    assert found["clamped_by_block"] == pytest.approx([clamped[:, :28].mean(), clamped[:, 28:].mean()], rel=1e-5)
    assert found["snr_by_block"] == pytest.approx([v[:, :28].mean() / PHI - 1, v[:, 28:].mean() / PHI - 1], rel=1e-4)
    geometric = np.exp(np.log(np.sqrt(root2) + 1e-8).mean())
    assert found["effective_lr"] == pytest.approx(0.02 * t.scale / geometric, rel=1e-5)
    for name, values in (("sqrt_v", np.sqrt(v)), ("m", np.abs(m))):
        counts, _ = np.histogram(values, bins=EDGES)
        assert found[name] == pytest.approx((counts / values.size).tolist(), rel=1e-5)
        assert sum(found[name]) == pytest.approx(1, rel=1e-4)


def test_moments_that_stay_with_the_clients_are_seen_alike() -> None:
    """LocalAdamW sends no moments. Without the server's they are those of a FedAdamW that sends its own."""
    _, sent, _, _ = one_round(FedAdamW(lr=0.02, aggregate="mv", blocks="none", bias_correction=False, gamma=0.0))
    _, kept, _, _ = one_round(LocalAdamW(lr=0.02))
    assert kept == sent


def test_the_servers_moments_are_described_where_the_server_steps() -> None:
    algorithm = AdamWBC(lr=0.02, floor=1e-3, beta2=0.9)
    uploads, found, s, t = one_round(algorithm, num_steps=1)
    gradients = np.stack([u.gradient.numpy() for u in uploads])
    vhat, phi = (s.v.value / s.v.weight).numpy(), PHI / 3
    assert found["drift"] == pytest.approx(((gradients - gradients.mean(0)) ** 2).sum(1).mean(), rel=1e-5)
    assert found["noise_std"] == pytest.approx(math.sqrt(phi), rel=1e-5)
    assert found["clamped"] == pytest.approx((vhat - phi <= 1e-3).mean(), rel=1e-5)
    assert found["snr_by_block"] == pytest.approx([vhat[:28].mean() / phi - 1, vhat[28:].mean() / phi - 1], rel=1e-4)
    geometric = np.exp(np.log(np.sqrt(np.maximum(vhat - phi, 1e-3))).mean())
    assert found["effective_lr"] == pytest.approx(0.02 * t.scale / geometric, rel=1e-5)
    assert "v_variance" not in found


def recipe(algorithm: Any, mechanism: Any = PRIVATE, num_steps: int = 2) -> Recipe:
    return Recipe(task(torch.float32), algorithm, mechanism, rounds=3, local_steps=num_steps, cohort=3, evaluate_every=3)


@pytest.mark.parametrize("mechanism", [PRIVATE, Plain(batch_size=5)], ids=["private", "plain"])
@pytest.mark.parametrize("name", algorithms.__all__)
def test_they_change_no_bit_of_the_run(name: str, mechanism: Any, tmp_path: Path) -> None:
    algorithm = getattr(algorithms, name)(lr=0.02)
    num_steps = 1 if name in ("SGD", "Adam", "AdamBC", "AdamW", "AdamWBC", "MicroAdam") else 2
    without = run(recipe(algorithm, mechanism, num_steps), tmp_path / "without")
    observed = run(replace(recipe(algorithm, mechanism, num_steps), diagnostics=True), tmp_path / "with")
    (last, tensors), (last_too, tensors_too) = ended(without), ended(observed)
    assert last == last_too
    assert tensors.keys() == tensors_too.keys()
    assert all(tensors[key].equal(tensors_too[key]) for key in tensors)
    assert list(without.ledger) == list(observed.ledger)
    for row, row_too in zip(without.rows, observed.rows, strict=True):
        found = row_too["diagnostics"]
        assert row | {"seconds": 0} == {key: value for key, value in row_too.items() if key != "diagnostics"} | {"seconds": 0}
        flat = [number for value in found.values() for number in (value if isinstance(value, list) else [value])]
        assert found["drift"] > 0
        assert all(math.isfinite(number) for number in flat)


def ended(record: RunRecord) -> tuple[int, dict[str, torch.Tensor]]:
    found = record.restore()
    assert found is not None
    return found


def test_under_distributed_noise_no_single_upload_is_described(tmp_path: Path) -> None:
    secure = Gaussian(sigma=0.8, clip=0.5, batch_size=5, noise="distributed")
    record = run(replace(recipe(AdamWBC(lr=0.02), secure, 1), diagnostics=True), tmp_path)
    [found, *_] = [row["diagnostics"] for row in record.rows]
    assert {"drift", "cosine", "v_variance"}.isdisjoint(found)
    assert {"sqrt_v", "clamped", "snr_by_block"} <= found.keys()
    assert found["noise_std"] == pytest.approx(math.sqrt(PHI) / 3, rel=1e-5)  # of the mean: shares of 1/3, averaged over 3


def test_noise_alone_has_no_signal(tmp_path: Path) -> None:
    """Records of zeros and no bias: vhat is Phi, and a Phi that were wrong by a tenth would show; most lie on the floor."""
    module = nn.Linear(40, 250, bias=False)
    silent = Task(module, iid((torch.zeros(60, 40), torch.arange(60) % 3), num_clients=5))
    settings = replace(recipe(LocalAdamW(lr=1e-3), PRIVATE, 8), task=silent, diagnostics=True)
    [snr] = run(settings, tmp_path / "local").rows[-1]["diagnostics"]["snr_by_block"]
    assert abs(snr) < 5 * math.sqrt(2 / (10_000 * 3 * 8))
    assert 5 * math.sqrt(2 / (10_000 * 3 * 8)) < 0.1
    full = replace(settings, algorithm=FedAdamW(lr=1e-3), rounds=1)
    found = run(full, tmp_path / "full").rows[-1]["diagnostics"]
    assert 0.5 < found["clamped"] < 0.7
    root = math.sqrt(PHI * 0.05)  # where the floor prevails, the root is between it and sqrt(Phi)
    assert 1e-3 / math.sqrt(PHI) < found["effective_lr"] < 1e-3 / root


def test_the_figure_and_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for algorithm in (FedAdamW(lr=0.02), FedAvg(lr=0.1)):
        for seed in (0, 1):
            name = f"{type(algorithm).__name__}-{seed}"
            run(replace(recipe(algorithm), diagnostics=True, seed=seed), tmp_path / "runs" / name)
    main(["report", str(tmp_path / "runs"), "--diagnostics"])
    assert "diagnostics.png" in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "runs" / "diagnostics.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_them_are_refused_in_words(tmp_path: Path) -> None:
    record = run(recipe(FedAvg(lr=0.1)), tmp_path / "run")
    with pytest.raises(InputError, match=r"Run again with --diagnostics"):
        diagnostics_figure([record], tmp_path / "figure.png")
    record = run(replace(recipe(FedAvg(lr=0.1)), diagnostics=True), tmp_path / "other")
    with pytest.raises(InputError, match=r"Name a \.png"):
        diagnostics_figure([record], tmp_path / "figure.txt")
