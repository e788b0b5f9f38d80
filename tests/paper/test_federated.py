"""The federated algorithms beside FedAdamW: each equals its independent float64 loop, and does by hand what its paper says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from dpfed import (
    FAFED,
    FedAdamW,
    FedAvg,
    FedAvgLS,
    FedCM,
    FedLADA,
    FedOpt,
    FedProx,
    FedSAM,
    Gaussian,
    LocalAdam,
    Plain,
    Scaffold,
    Simulation,
    epsilon,
)
from dpfed.algorithm import Algorithm, Round, Tree, client_round, rows, tree_map
from dpfed.flat import Layout, Part
from dpfed.pieces import laplacian_smooth, smooth_tensors
from dpfed.rounds import dry_round, planned_events
from tests.paper import twins
from tests.paper.world import MECHANISMS, NUM_STEPS, assert_equal, job, trained, world

SGD: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.1}
ADAM: dict[str, Any] = {"lr": 0.02, "beta2": 0.9}

CASES: list[tuple[Algorithm, Callable[..., list[np.ndarray]]]] = [
    (FedProx(**SGD, mu=0.7), twins.fed_prox),
    (FedProx(**SGD, mu=0.0), twins.fed_prox),
    (Scaffold(**SGD), twins.scaffold),
    (Scaffold(**SGD, server_lr=0.7), twins.scaffold),
    (Scaffold(**SGD, control="option2"), twins.scaffold),
    (Scaffold(**SGD, warm_start=1), twins.scaffold),
    (Scaffold(**SGD, warm_start=2, control="option2"), twins.scaffold),
    (FedAvgLS(**SGD), twins.fed_avg_ls),
    (FedAvgLS(**SGD, sigma_ls=0.3), twins.fed_avg_ls),
    (FedAvgLS(**SGD, where="client_step"), twins.fed_avg_ls),
    (FedSAM(**SGD), twins.fed_sam),
    (FedSAM(**SGD, rho=0.5), twins.fed_sam),
    (FedSAM(**SGD, same_batch=False), twins.fed_sam),
    (LocalAdam(**ADAM, weight_decay=0.1), twins.local_adam),
    (LocalAdam(**ADAM, beta1=0.5, eps=0.01), twins.local_adam),
    (FedOpt(**SGD), twins.fed_opt),
    (FedOpt(**SGD, server="yogi"), twins.fed_opt),
    (FedOpt(**SGD, server="adagrad"), twins.fed_opt),
    (FedOpt(**SGD, server_lr=0.1, beta1=0.5, beta2=0.7, tau=0.1), twins.fed_opt),
    (FAFED(**ADAM), twins.fafed),
    (FAFED(**ADAM, beta1=0.5, rho=0.1), twins.fafed),
    (FAFED(**ADAM, variant="storm"), twins.fafed),
    (FAFED(**ADAM, variant="storm", a=0.6), twins.fafed),
    (FedLADA(**ADAM), twins.fed_lada),
    (FedLADA(**ADAM, amsgrad=False), twins.fed_lada),
    (FedLADA(**ADAM, a=0.6, beta1=0.5, eps=0.01), twins.fed_lada),
    (FedCM(**SGD), twins.fed_cm),
    (FedCM(**SGD, a=0.6), twins.fed_cm),
]


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize(("algorithm", "twin"), CASES, ids=[repr(algorithm) for algorithm, _ in CASES])
def test_equals_its_twin(algorithm: Any, twin: Callable[..., list[np.ndarray]], mechanism: Any) -> None:
    """Every field of the algorithm is a setting of the twin, under the same name."""
    work, settings = job(algorithm, mechanism), asdict(algorithm)
    if isinstance(algorithm, FedAvgLS):
        settings["tensor_sizes"] = [48, 12, 12, 3]
    small = world(work, new_batch_for_second=not settings.get("same_batch", True))
    assert_equal(trained(work), twin(small, **settings))


@pytest.mark.parametrize(
    ("algorithm", "twin"),
    [
        (FedAvg(**SGD), twins.fed_avg),
        (FAFED(**ADAM, variant="storm"), twins.fafed),
        (FedSAM(**SGD, same_batch=False), twins.fed_sam),
    ],
    ids=["FedAvg", "FAFED", "FedSAM"],
)
def test_equals_its_twin_in_passes_over_the_records(algorithm: Any, twin: Callable[..., list[np.ndarray]]) -> None:
    test_equals_its_twin(algorithm, twin, Plain(batch_size=6, sampling="shuffled"))


# Neutral knobs.


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize("neutral", [FedProx(**SGD, mu=0.0), FedCM(**SGD, a=1.0), FedAvgLS(**SGD, sigma_ls=0.0)], ids=repr)
def test_a_neutral_knob_gives_fed_avg(neutral: Algorithm, mechanism: Any) -> None:
    assert_equal(trained(job(neutral, mechanism)), [s.theta.numpy() for s in trained(job(FedAvg(**SGD), mechanism))])


@pytest.mark.parametrize("name", ["sigma 0", "plain"])
def test_fed_sam_without_a_climb_is_fed_avg_with_one_gradient_more(name: str) -> None:
    fed_sam, fed_avg = job(FedSAM(**SGD, rho=0.0), MECHANISMS[name]), job(FedAvg(**SGD), MECHANISMS[name])
    assert_equal(trained(fed_sam), [s.theta.numpy() for s in trained(fed_avg)], tolerance=1e-15)
    twice, once = (dry_round(work.algorithm, NUM_STEPS).queries for work in (fed_sam, fed_avg))
    assert [sum(step.values()) for step in twice] == [2 * sum(step.values()) for step in once] == [2] * NUM_STEPS


# What the gradients cost.


def spent(algorithm: Algorithm) -> dict[Any, int]:
    """100 rounds of 20 steps with 16 of 1000 records (q = 0.016), sigma = 1."""
    once = planned_events(Gaussian(sigma=1.0, batch_size=16), 1000, dry_round(algorithm, num_steps=20))
    return {event: 100 * count for event, count in once.items()}


@pytest.mark.parametrize(
    ("algorithm", "num_events", "sigma", "cost"),
    [
        (FedAvg(), 2000, 1.0, 4.7939),
        (FedSAM(), 2000, 0.5**0.5, 10.9671),
        (FedSAM(same_batch=False), 4000, 1.0, 6.9350),
        (FAFED(variant="storm"), 2000, 1.0, 4.7939),
        (Scaffold(warm_start=20), 2000, 1.0, 4.7939),
    ],
    ids=repr,
)
def test_what_two_thousand_steps_cost(algorithm: Algorithm, num_events: int, sigma: float, cost: float) -> None:
    """``cost`` is exact up to the grid of orders; dp_accounting is slightly looser between whole orders, and never below."""
    [(event, count)] = spent(algorithm).items()
    assert (event.sigma, count) == (pytest.approx(sigma), num_events)
    assert cost <= epsilon({event: count}, 1e-5, "rdp") <= cost + 0.04


# Laplacian smoothing.


def test_laplacian_smooth_golden() -> None:
    one = torch.eye(5, dtype=torch.float64)[0]
    expected = torch.tensor([5, 2, 1, 1, 2], dtype=torch.float64) / 11
    torch.testing.assert_close(laplacian_smooth(one, 1.0), expected)


@pytest.mark.parametrize("n", [3, 4, 5, 64, 97])
def test_laplacian_smooth_solves_its_equation_and_keeps_the_mean(n: int) -> None:
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    smooth = laplacian_smooth(x, 0.7)
    torch.testing.assert_close(smooth + 0.7 * (2 * smooth - smooth.roll(1, -1) - smooth.roll(-1, -1)), x)
    torch.testing.assert_close(smooth.mean(-1), x.mean(-1))
    assert (smooth.norm(dim=-1) < x.norm(dim=-1)).all()
    torch.testing.assert_close(laplacian_smooth(x, 0.0), x)


def test_small_tensors_stay_and_large_ones_do_not_mix() -> None:
    x = torch.tensor([1.0, -1.0, 5.0, 1.0, 0.0, 0.0, 0.0, 0.0]).double()
    smooth = smooth_tensors(x, [2, 1, 5], 1.0)
    assert smooth[:3].equal(x[:3])
    torch.testing.assert_close(smooth[3:], laplacian_smooth(x[3:], 1.0))


# A world that can be solved by hand: client i pulls theta towards b_i with the strength a_i.


class Pull:
    """The gradient of a_i / 2 |theta - b_i|^2, one row a client."""

    noise_var = torch.zeros(1, dtype=torch.float64)

    def __init__(self, strength: torch.Tensor, goal: torch.Tensor) -> None:
        self.strength, self.goal = strength, goal

    def __call__(self, theta: torch.Tensor, *, draw: int = 0, minus: tuple[float, torch.Tensor] | None = None) -> torch.Tensor:
        return self.strength * (theta - self.goal)


STRENGTH, GOAL = torch.tensor([[1.0], [4.0]]).double(), torch.tensor([[-1.0], [1.0]]).double()
OPTIMUM = (STRENGTH * GOAL).sum() / STRENGTH.sum()


def settled(algorithm: Algorithm, grad: Pull, num_rounds: int) -> list[Tree]:
    """The server's states of a federation in which both clients always take part."""
    layout = Layout((Part("weight", (1,), "weights"),))
    s, memory, states = algorithm.server_init(torch.zeros(1, dtype=torch.float64), layout), None, []
    for t in range(num_rounds):
        now = Round(t, 1.0, 10, layout, 0.5, 1.0)
        upload, memory = client_round(algorithm, s, memory, lambda k: grad, now)
        full = tree_map(lambda *vectors: torch.stack(vectors), *rows(upload, 2))
        s = algorithm.server_step(s, tree_map(lambda vector: vector.mean(0), full), now)
        states.append(s)
    return states


@pytest.mark.parametrize("control", ["mean", "option2"])
def test_scaffold_finds_the_optimum_that_fed_avg_drifts_from(control: Any) -> None:
    """Had the correction the wrong sign, or no effect, this would fail: FedAvg ends elsewhere."""
    drifted = settled(FedAvg(lr=0.05, weight_decay=0.0), Pull(STRENGTH, GOAL), 300)[-1]
    corrected = settled(Scaffold(lr=0.05, weight_decay=0.0, control=control), Pull(STRENGTH, GOAL), 300)[-1]
    assert abs(float(drifted.theta - OPTIMUM)) > 0.1
    assert float(corrected.theta) == pytest.approx(float(OPTIMUM), abs=1e-12)


def test_a_warm_start_gathers_and_stands_still() -> None:
    states = settled(Scaffold(lr=0.05, weight_decay=0.0, warm_start=2), Pull(STRENGTH, GOAL), 3)
    assert [float(s.theta) for s in states[:2]] == [0.0, 0.0]
    assert float(states[1].c) == pytest.approx(float(-(STRENGTH * GOAL).mean()))
    assert float(states[2].theta) != 0.0


@pytest.mark.parametrize("control", ["mean", "option2"])
def test_the_mean_of_the_controls_is_the_servers_control(control: Any) -> None:
    """Invariant while everybody takes part, because then c moves by the mean of what the c_i move by."""
    work = job(Scaffold(**SGD, control=control))
    engine, everybody = Simulation(device="cpu").open(work), list(range(len(work.federation.clients)))
    s = work.algorithm.server_init(work.model.theta0(), work.model.layout)
    for t in range(3):
        now = Round(t, 1.0, NUM_STEPS, work.model.layout, 1 / len(everybody), 1.0)
        s = work.algorithm.server_step(s, engine.train(now, s, everybody)[0], now)
        controls = torch.stack([engine.memory[i].c for i in everybody])
        torch.testing.assert_close(controls.mean(0), s.c, rtol=1e-12, atol=1e-14)
        assert s.c.abs().max() > 1e-3


class Always:
    """A world with the same gradient everywhere."""

    noise_var = torch.zeros(1, dtype=torch.float64)

    def __call__(self, theta: torch.Tensor, *, draw: int = 0, minus: tuple[float, torch.Tensor] | None = None) -> torch.Tensor:
        return torch.full((2, 1), 0.3, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 0.75])
def test_alignment_multiplies_the_step_by_one_over_one_minus_gamma(gamma: float) -> None:
    states = settled(FedAdamW(gamma=gamma, weight_decay=0.0, eps=0.0), Always(), 100)  # type: ignore[arg-type]
    assert float(states[0].direction) == pytest.approx(1.0, rel=1e-12)
    assert float(states[-1].direction) == pytest.approx(1 / (1 - gamma), rel=1e-9)


def test_fed_cm_averages_and_multiplies_nothing() -> None:
    states = settled(FedCM(a=0.1, weight_decay=0.0), Always(), 200)  # type: ignore[arg-type]
    assert float(states[0].direction) == pytest.approx(0.1 * 0.3, rel=1e-12)
    assert float(states[-1].direction) == pytest.approx(0.3, rel=1e-6)


def test_fed_lada_survives_a_dead_coordinate() -> None:
    """No gradient ever: v fades towards zero, and without a floor 0 / sqrt(0) would be NaN."""
    grad = Pull(torch.zeros(2, 1).double(), GOAL)
    states = settled(FedLADA(beta2=0.0, amsgrad=False), grad, 3)
    assert float(states[-1].theta) == 0.0
