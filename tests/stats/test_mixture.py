"""What a batch costs a unit of several records: beside the ordinary event, beside exact mixtures, beside a simulation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binom, hypergeom, norm

import dpfed
from dpfed.data import Footprint
from dpfed.errors import InputError
from dpfed.ledger import Event, Ledger, Receipt, calibrate, epsilon
from dpfed.mixture import Moves, changed_profile, mixture_divergences, mixture_loss, moves

DELTA, TAIL = 1e-5, -40.0
Sampling = Literal["poisson", "fixed"]


def unit(owned: int, readers: int, sigma: float, sampling: Sampling = "poisson", batch: int = 16, total: int = 1000) -> Event:
    return Event(sampling, batch, total, sigma, owned=owned, readers=readers)


# The law of the moves


def test_moves_of_a_poisson_batch_are_binomial() -> None:
    assert dict(moves("poisson", 30, 100, 5, 0)) == pytest.approx(dict(enumerate(binom.pmf(range(6), 5, 0.3))))
    both = np.convolve(binom.pmf(range(3), 2, 0.3), np.insert(binom.pmf(range(4), 3, 0.3), [1, 2, 3], 0))
    assert [p for _, p in moves("poisson", 30, 100, 2, 3)] == pytest.approx(both)


def test_moves_of_a_fixed_batch_are_hypergeometric_and_twice_as_long() -> None:
    for owned, readers in ((4, 0), (1, 3)):
        found = moves("fixed", 30, 100, owned, readers)
        assert [s for s, _ in found] == [0, 2, 4, 6, 8]
        assert [p for _, p in found] == pytest.approx(hypergeom.pmf(range(5), 100, 4, 30))


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_moves_never_count_more_records_than_there_are(sampling: Sampling) -> None:
    for batch, owned, readers in itertools.product((1, 4, 5, 9), (0, 1, 7), (0, 1, 7)):
        found = moves(sampling, batch, 5, owned, readers)
        assert math.fsum(p for _, p in found) == pytest.approx(1, abs=1e-12)
        assert found[-1][0] <= 10


# Limits


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_one_record_is_the_ordinary_event(sampling: Sampling) -> None:
    """The mixture of one record, which the ledger never asks for, is the step that it knows."""
    event, width = unit(1, 0, 1.0, sampling), 2.0**-10
    loss = mixture_loss(event.moves, event.sigma, symmetric=sampling == "fixed", width=width, log_tail=TAIL)
    assert loss.self_compose(200).get_epsilon_for_delta(DELTA) == pytest.approx(epsilon({event: 200}, DELTA), rel=1e-3)


@pytest.mark.parametrize(("owned", "readers", "most"), [(3, 0, 3), (1, 2, 5), (0, 2, 4)])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_everybody_in_every_batch_is_the_gaussian_mechanism(owned: int, readers: int, most: int, accountant: str) -> None:
    whole = unit(owned, readers, 1.0 * most, batch=10, total=10)
    assert epsilon({whole: 5}, DELTA, accountant) == epsilon({Event("poisson", 10, 10, 1.0): 5}, DELTA, accountant)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_records_cost_more_and_more_noise_costs_less(sampling: Sampling, accountant: str) -> None:
    def cost(owned: int, readers: int, sigma: float = 6.0, batch: int = 16) -> float:
        return epsilon({unit(owned, readers, sigma, sampling, batch): 100}, DELTA, accountant)

    chain = [cost(1, 0), cost(2, 0), cost(4, 0), cost(4, 1), cost(4, 4), cost(4, 4, batch=32), cost(4, 4, sigma=4.0, batch=32)]
    assert chain == sorted(chain)
    assert len(set(chain)) == len(chain)
    assert cost(2, 0) < cost(1, 1) or sampling == "fixed", "a record that changes moves the sum by twice the clip"


def test_a_group_costs_no_more_than_its_records_one_after_the_other() -> None:
    """And with little noise over many records, far less: the batch seldom holds several."""
    for size in (2, 5):
        assert epsilon({unit(size, 0, size * 1.0): 200}, DELTA) < epsilon({unit(1, 0, 1.0): 200}, DELTA)


# The mechanism itself, integrated number by number

GRID = np.linspace(-45, 45, 18001)
STEP = GRID[1] - GRID[0]


def both_sides(owned: int, inside: list[float], outside: list[float], rate: float, sigma: float) -> tuple[Any, Any, Moves]:
    """The densities of one step with and without the unit, and how far it may move."""
    with_it, without, chances = np.zeros_like(GRID), np.zeros_like(GRID), dict[int, float]()
    for batch in itertools.product((0, 1), repeat=len(inside)):
        chance = math.prod(rate if drawn else 1 - rate for drawn in batch)
        with_it += chance * norm.pdf(GRID, np.dot(batch, inside), sigma)
        without += chance * norm.pdf(GRID, np.dot(batch, outside), sigma)
        move = sum(batch[:owned]) + 2 * sum(batch[owned:])
        chances[move] = chances.get(move, 0) + chance
    return with_it, without, tuple(sorted(chances.items()))


def hockey_stick(p: Any, q: Any, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * STEP)


def test_no_pair_of_sums_exceeds_the_profile_and_one_attains_it() -> None:
    """Every way in which clipped gradients can change, also against each other."""
    random, closest = np.random.default_rng(0), 0.0
    for _ in range(60):
        owned, readers = int(random.integers(0, 2)), int(random.integers(1, 4))
        rate, sigma = random.uniform(0.02, 0.9), random.uniform(0.5, 4)
        inside = [1.0] * owned + random.choice([1, 1, -1, 0.3], readers).tolist()
        outside = [0.0] * owned + random.choice([-1, -1, 0, 1], readers).tolist()
        p, q, law = both_sides(owned, inside, outside, rate, sigma)
        for eps, bound in zip(grid := [0.0, 0.1, 0.5, 1.0, 3.0], changed_profile(law, sigma, np.array(grid)), strict=True):
            worst = max(hockey_stick(p, q, eps), hockey_stick(q, p, eps))
            assert worst <= bound + 1e-9
            closest = max(closest, worst / bound)
    assert closest > 0.99, "the bound is not looser than it has to be"


def test_the_tempting_pair_is_too_optimistic() -> None:
    """Mixture against one Gaussian, as if those who read the unit left the batch with it: two readers refute it."""
    p, q, law = both_sides(0, [1.0, 1.0], [-1.0, -1.0], rate=0.65, sigma=1.13)
    mixed = sum(chance * norm.pdf(GRID, move, 1.13) for move, chance in law)
    alone = norm.pdf(GRID, 0, 1.13)
    tempting = max(hockey_stick(mixed, alone, 0.5), hockey_stick(alone, mixed, 0.5))
    assert hockey_stick(p, q, 0.5) > tempting * (1 + 1e-5)
    assert hockey_stick(p, q, 0.5) <= changed_profile(law, 1.13, np.array([0.5]))[0]


def test_the_loss_distribution_is_that_of_its_profile() -> None:
    law = moves("poisson", 100, 1000, 1, 4)
    loss = mixture_loss(law, 6.0, symmetric=True, width=2.0**-9, log_tail=TAIL)
    for eps in (0.0, 0.25, 1.0):
        exact = changed_profile(law, 6.0, np.array([eps]))[0]
        assert exact <= loss.get_delta_for_epsilon(eps) * (1 + 1e-9)
        assert loss.get_delta_for_epsilon(eps) <= exact * 1.01 + 1e-12


# A simulation


def simulated_delta(event: Event, num_steps: int, eps: float, num_runs: int) -> tuple[float, float]:
    """E[1 - exp(eps - L)]+ over runs of the mechanism with an owner of parallel gradients, and its standard error."""
    random, sizes = np.random.default_rng(1), np.arange(event.owned + 1)
    weights = binom.pmf(sizes, event.owned, event.rate)
    held = random.binomial(event.owned, event.rate, (num_runs, num_steps))
    seen = held + event.sigma * random.standard_normal((num_runs, num_steps))
    ratio = np.exp((2 * seen[..., None] * sizes - sizes**2) / (2 * event.sigma**2)) @ weights
    value = np.maximum(0, -np.expm1(eps - np.log(ratio).sum(1)))
    return float(value.mean()), float(value.std() / math.sqrt(num_runs))


def test_a_simulated_owner_agrees_and_a_wrong_number_of_records_is_rejected() -> None:
    def delta(owned: int) -> float:
        event = unit(owned, 0, 3.0, batch=100)
        one = mixture_loss(event.moves, event.sigma, symmetric=False, width=2.0**-8, log_tail=TAIL)
        return one.self_compose(20).get_delta_for_epsilon(1.0)

    found, error = simulated_delta(unit(4, 0, 3.0, batch=100), 20, 1.0, num_runs=40_000)
    assert abs(found - delta(4)) < 4 * error + 0.01 * found
    assert abs(found - delta(3)) > 10 * error
    assert abs(found - delta(5)) > 10 * error


def test_the_renyi_column_is_above_the_mixture_itself() -> None:
    """Orders 2 and 5, integrated; and it is the formula of the paper, with the factor 2 of a record that changes."""
    event = unit(3, 0, 2.0, batch=200)
    near = GRID[abs(GRID) < 25]
    mixed = sum(chance * norm.pdf(near, move, 2.0) for move, chance in event.moves)
    alone = norm.pdf(near, 0, 2.0)
    for order, bound in zip((2, 5), mixture_divergences(event.moves, 2.0, [2, 5]), strict=True):
        exact = math.log(float((mixed**order * alone ** (1 - order)).sum() * STEP)) / (order - 1)
        assert exact < bound
    told = math.log(sum(p * math.exp(2 * 1 * (2 * j) ** 2 / (2 * 4.0)) for j, p in enumerate(binom.pmf(range(3), 2, 0.2))))
    assert mixture_divergences(moves("poisson", 200, 1000, 0, 2), 2.0, [2])[0] == pytest.approx(told)


# In the ledger


def test_calibration_reaches_its_target_for_units() -> None:
    for event in (unit(3, 0, 1.0), unit(1, 4, 1.0), unit(1, 4, 1.0, "fixed")):
        sigma = calibrate(2.0, DELTA, [{event: 100}])
        enough, less = replace(event, sigma=sigma), replace(event, sigma=sigma / 1.01)
        assert epsilon({enough: 100}, DELTA) <= 2.0 < epsilon({less: 100}, DELTA)


def test_the_worst_client_is_found_among_units_and_units_are_not_mixed() -> None:
    def ledger(*events: Event) -> Ledger:
        made = Ledger()
        made.post([Receipt(i, 0, Counter({event: 50})) for i, event in enumerate(events)])
        return made

    for sampling in ("poisson", "fixed"):
        clients = [
            unit(1, 2, 6.0, sampling, batch, total) for batch, total in ((16, 100), (16, 1000), (4, 90), (1, 2), (32, 700))
        ]
        assert ledger(*clients).epsilon(DELTA) == max(epsilon({event: 50}, DELTA) for event in clients)
    with pytest.raises(InputError, match="several sizes"):
        ledger(unit(1, 2, 6.0), unit(2, 1, 6.0)).epsilon(DELTA)


def test_the_statement_says_what_the_unit_is() -> None:
    ledger = Ledger()
    ledger.post([Receipt(0, 0, Counter({unit(1, 4, 5.0): 3}))])
    text = ledger.statement(DELTA)
    assert "owner of at most 1 of a client's records" in text
    assert "read by at most 4 others" in text
    assert "at most 9C" in text
    assert "one record of one client" not in text


@pytest.mark.parametrize(("owned", "readers"), [(0, 0), (-1, 2), (1, -1), (1.5, 0)])
def test_impossible_units_are_refused(owned: Any, readers: Any) -> None:
    with pytest.raises(InputError, match=r"event\.(owned|readers)"):
        unit(owned, readers, 1.0)
    with pytest.raises(InputError, match="client is the whole unit"):
        Event("poisson", 16, 1000, 1.0, unit="client", owned=2)


def test_the_library_of_the_mixture_agrees_with_the_ordinary_gaussian() -> None:
    """A referee for dp_accounting itself: a mixture that always moves by 3 is a Gaussian of a third of the noise."""
    loss = mixture_loss(((3, 1.0),), 3.0, symmetric=False, width=1e-3, log_tail=TAIL)
    known = privacy_loss_distribution.from_gaussian_mechanism(1.0, value_discretization_interval=1e-3)
    assert loss.get_epsilon_for_delta(DELTA) == pytest.approx(known.get_epsilon_for_delta(DELTA), rel=1e-3)


# In a federation


def test_a_run_is_charged_for_the_footprint_of_its_federation(tmp_path: Path) -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    federation = dpfed.iid((x, y), num_clients=2)
    people = replace(federation, footprint=Footprint(owned=3))
    assert people.to("cpu").footprint == Footprint(owned=3, readers=0)
    mechanism = dpfed.Gaussian(sigma=2.0, batch_size=6)
    records = {
        name: dpfed.run(
            dpfed.Recipe(dpfed.Task(torch.nn.Linear(4, 3), held), dpfed.FedAvg(), mechanism, 2, 2, 2), tmp_path / name
        )
        for name, held in (("one", federation), ("three", people))
    }
    for name, owned in (("one", 1), ("three", 3)):
        assert records[name].ledger.events(0) == {Event("poisson", 6, 30, 2.0, owned=owned): 4}
    assert records["three"].ledger.epsilon(DELTA) > 2 * records["one"].ledger.epsilon(DELTA)


@pytest.mark.parametrize("wrong", [Footprint(0, 0), Footprint(-1, 3), Footprint(1, -1)])
def test_a_footprint_of_nothing_is_refused(wrong: Footprint) -> None:
    federation = dpfed.iid((torch.zeros(4, 1), torch.zeros(4)), num_clients=2)
    with pytest.raises(InputError, match="footprint"):
        replace(federation, footprint=wrong)
