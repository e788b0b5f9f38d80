"""The audit proves what it says: right code is not blamed, and the bounds are not empty."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpfed import (
    SGD,
    AsReleased,
    FedAvg,
    Federation,
    Footprint,
    Gaussian,
    InputError,
    Plain,
    Recipe,
    Scaffold,
    Task,
    algorithms,
    evidence,
)
from dpfed.__main__ import main
from dpfed.audit import Audit, audit, audit_one_run, log_likelihood_ratio
from dpfed.canaries import Alone, Canaries, worst_client
from dpfed.data import Sampling
from dpfed.evidence import at_least, at_most, charged_bound, exact_bound, guessed, judged, one_run_bound, one_run_p_value
from dpfed.ledger import Event, epsilon
from tests.e2e.test_loopback import Loopback
from tests.gallery.test_planted_bugs import recipe

DELTA = 1e-5
CENTRALISED = ("Adam", "AdamBC", "AdamW", "AdamWBC", "MicroAdam", "SGD")


def method(name: str, aim: float = 4.0, **mechanism: Any) -> Recipe:
    """Two rounds of two steps at rate 1/2, or of one step where the server steps."""
    setting = {"epsilon": aim, "batch_size": 8} | mechanism
    steps = 1 if name in CENTRALISED else 2
    return Recipe(Alone(16), getattr(algorithms, name)(), Gaussian(**setting), rounds=2, local_steps=steps, cohort=1)


def one_step(aim: float, **mechanism: Any) -> Recipe:
    return Recipe(Alone(16), SGD(), Gaussian(epsilon=aim, batch_size=16, **mechanism), rounds=1, local_steps=1, cohort=1)


# The statistics


@pytest.mark.parametrize(("num", "rate"), [(20, 0.0), (20, 0.1), (200, 0.5), (500, 0.01)])
def test_clopper_pearson_covers(num: int, rate: float) -> None:
    """The sum over all counts: the bounds are missed with at most the probability that was asked for."""
    counts = np.arange(num + 1)
    chances = np.array([math.comb(num, int(k)) * rate**k * (1 - rate) ** (num - k) for k in counts])
    for level in (0.9, 0.999):
        assert chances[at_most(counts, num, level) < rate].sum() <= 1 - level + 1e-12
        assert chances[at_least(counts, num, level) > rate].sum() <= 1 - level + 1e-12


@pytest.mark.parametrize(("sigma", "steps", "rate"), [(1.0, 1, 1.0), (0.8, 1, 0.25), (2.0, 10, 0.5)])
def test_rates_that_a_mechanism_has_are_possible(sigma: float, steps: int, rate: float) -> None:
    """The true rates of the best test refute nothing, and come near the claim from below; more noise than that does refute."""
    if rate == 1:
        mu = math.sqrt(steps) / sigma
        false = evidence.special.ndtr(-mu / 2 - np.linspace(-1, 1, 3))
        true = evidence.special.ndtr(mu / 2 - np.linspace(-1, 1, 3))
    else:
        rng = np.random.default_rng(0)
        noise = sigma * rng.standard_normal((2, 50_000, steps))
        noise[1] += rng.random((50_000, steps)) < rate
        absent, present = log_likelihood_ratio(torch.from_numpy(noise), rate, sigma).sum(-1).numpy()
        places = np.quantile(absent, np.linspace(0.2, 0.8, 4))
        false = np.array([(absent > place).mean() + 8e-3 for place in places])
        true = np.array([(present > place).mean() - 8e-3 for place in places])
    events = Counter({Event("poisson", round(16 * rate), 16, sigma): steps})
    claimed = epsilon(events, DELTA)
    bounds = [charged_bound(float(f), float(t), events, DELTA) for f, t in zip(false, true, strict=True)]
    assert max(bounds) <= claimed
    assert max(bounds) > (0.97 if rate == 1 else 0.6) * claimed
    assert all(exact_bound(f, t, DELTA) <= claimed for f, t in zip(false, true, strict=True))
    less = Counter({replace(event, sigma=1.4 * event.sigma): count for event, count in events.items()})
    assert max(charged_bound(float(f), float(t), less, DELTA) for f, t in zip(false, true, strict=True)) > epsilon(less, DELTA)


def test_two_equal_samples_are_not_told_apart() -> None:
    """With 16 features to choose from, and no difference, nothing is proved."""
    rng, proved = np.random.default_rng(1), []
    for _ in range(60):
        absent, present = rng.standard_normal((2, 400, 16))
        rates = judged(absent, present, evidence.distance, 0.001)
        proved.append(evidence.distance(rates.false, rates.true) > 0)
    assert sum(proved) == 0


def test_a_normal_mechanism_is_not_refuted_in_200_repetitions() -> None:
    """At the very limit of the claim: unit variance, shift mu, judged at 99 % so that a flaw of the statistics would show."""
    mu, rng, flagged = 1.0, np.random.default_rng(2), 0
    events = Counter({Event("poisson", 1, 1, 1 / mu): 1})
    claimed = epsilon(events, DELTA)
    for _ in range(200):
        absent, present = rng.standard_normal((2, 1000, 1))
        present[:, 0] += mu
        exact = judged(absent, present, lambda f, t: exact_bound(f, t, DELTA), 0.005)
        apart = judged(absent, present, evidence.distance, 0.005)
        flagged += float(exact_bound(exact.false, exact.true, DELTA)) > claimed
        flagged += evidence.distance(apart.false, apart.true) > mu
    assert flagged <= 4  # 2 expected at most; Binomial(200, 0.01) exceeds 7 once in 1,000


def test_the_bound_of_one_run_is_that_of_the_paper() -> None:
    """Without delta it is the binomial tail of randomised response, whose guesses are as good as any may be."""
    assert one_run_p_value(75, 100, 1000, 0.0, 0.0) == pytest.approx(2.818e-7, rel=1e-3)
    assert one_run_bound(100, 100, 100, 0.0, 0.95) == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-3)
    rng, truth = np.random.default_rng(3), 1.5
    false_alarms = 0
    for _ in range(100):
        coins = rng.random(600) < 0.5
        told = np.where(rng.random(600) < math.exp(truth) / (1 + math.exp(truth)), coins, ~coins)
        features = told[:, None] + 0.01 * rng.standard_normal((600, 3))
        false_alarms += guessed(coins, features, 0.0, 0.01)[0] > truth
    assert false_alarms <= 5


# The audit of the running code


def test_the_bound_is_not_empty() -> None:
    """White box, plain DP-SGD at epsilon 4: at least 40 % of what is claimed."""
    found = audit(one_step(4.0), num_trials=4000)
    assert found.claimed == pytest.approx(4.0, rel=2e-3)
    assert 0.4 * found.claimed < found.lower_bound <= found.claimed
    assert found.exact <= found.lower_bound
    assert found.passed


@pytest.mark.parametrize("name", algorithms.__all__)
def test_no_algorithm_is_refuted(name: str) -> None:
    found = audit(method(name), num_trials=120)
    assert found.passed, found.report()
    assert found.claimed == pytest.approx(4.0, rel=2e-3)


MECHANISMS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "block": (one_step(4.0, clipping="block"), {}),
    "automatic": (one_step(4.0, clipping="automatic"), {}),
    "adaptive": (one_step(4.0, clipping="adaptive"), {}),
    "adaptive, at a rate": (method("FedAvg", clipping="adaptive"), {}),
    "fixed": (method("FedAvg", sampling="fixed"), {}),
    "variants": (one_step(4.0, augmentations=3), {}),
    "each": (method("Scaffold", calibration="each"), {}),
    "distributed": (recipe(SGD(), noise="distributed", clients=3), {"num_trials": 120}),
    "colluding": (recipe(SGD(), noise="distributed", clients=3, colluding=0.4), {"num_trials": 120}),
    "clients": (recipe(unit="client", clip=0.01, clients=4, cohort=2, cohort_sampling="poisson"), {"num_trials": 120}),
    "fixed clients": (recipe(Scaffold(), unit="client", clip=0.01, clients=4, cohort=2), {"num_trials": 120}),
    "another engine": (one_step(4.0), {"num_trials": 120, "engine": Loopback}),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_mechanism_is_refuted(name: str) -> None:
    attacked, setting = MECHANISMS[name]
    found = audit(attacked, **{"num_trials": 400} | setting)
    assert found.passed, found.report()


@pytest.mark.parametrize(("owned", "readers", "sampling"), [(3, 0, "poisson"), (1, 2, "poisson"), (2, 0, "fixed")])
def test_a_footprint_is_attacked_with_all_its_records(owned: int, readers: int, sampling: Sampling) -> None:
    """What passes as several records of one unit is refuted as one."""
    pool = {"x": torch.zeros(16, 8, dtype=torch.float64), "y": torch.zeros(16)}
    federation = Federation(pool, (torch.arange(16),), footprint=Footprint(owned, readers))
    task = Task(Canaries(8), federation, lambda output, target: output.mean())
    attacked = Recipe(task, SGD(), Gaussian(sigma=2.0, batch_size=16, sampling=sampling), rounds=1, local_steps=1, cohort=1)
    found = audit(attacked, num_trials=2000)
    assert found.passed, found.report()
    assert found.lower_bound > epsilon(Counter({Event(sampling, 16, 16, 2.0): 1}), DELTA)


def test_one_run() -> None:
    attacked = replace(one_step(8.0), task=Alone(32))
    found = audit_one_run(replace(attacked, mechanism=Gaussian(epsilon=8.0, batch_size=32)), num_canaries=2048)
    assert found.passed
    assert found.lower_bound > 1
    silent = replace(attacked, mechanism=Gaussian(sigma=0.0, batch_size=32))
    assert audit_one_run(silent, num_canaries=2048).lower_bound > 3.5
    for sampling in ("poisson", "fixed"):
        at_a_rate = Gaussian(epsilon=4.0, batch_size=8, sampling=sampling)
        assert audit_one_run(replace(attacked, mechanism=at_a_rate), num_canaries=1024).passed
    with pytest.raises(InputError, match="one run needs local noise"):
        audit_one_run(recipe(SGD(), noise="distributed", clients=2))


def test_what_is_not_private_is_seen_through() -> None:
    """The mechanism of the released code claims nothing; one step shows as much as so many trials can."""
    released, plain = (audit(replace(one_step(1.0), mechanism=m), num_trials=400) for m in (AsReleased(), Plain(batch_size=16)))
    for found in (released, plain):
        assert found.claimed == math.inf
        assert found.passed
        assert found.lower_bound == found.exact > 2


def test_the_worst_client_is_attacked() -> None:
    """Of unequal clients the one with the fewest records; at its own sigma, and as often as it takes part."""
    x, rows = torch.zeros(100, 8, dtype=torch.float64), torch.arange(100).split([60, 24, 16])
    task = Task(Canaries(8), Federation({"x": x, "y": torch.zeros(100)}, rows), lambda output, target: output.mean())
    plan = Recipe(task, FedAvg(), Gaussian(sigma=1.5, batch_size=8), rounds=6, local_steps=2, cohort=3)
    target = worst_client(plan)
    assert (target.num_examples, target.mechanism.batch_size, target.rounds) == (2, 1, 6)
    assert target.rate == 0.5
    once = worst_client(replace(plan, cohort=1, max_participations=2, mechanism=Gaussian(epsilon=2.0, batch_size=8)))
    assert once.rounds == 2


def test_bad_questions_are_refused() -> None:
    for trials in (0, 42):
        with pytest.raises(InputError, match="num_trials"):
            audit(one_step(1.0), num_trials=trials)
    with pytest.raises(InputError, match="confidence"):
        audit(one_step(1.0), confidence=1.0)
    with pytest.raises(InputError, match="no independent trials"):
        audit(recipe(SGD(), noise="distributed", clients=2, clipping="adaptive"))
    with pytest.raises(InputError, match="cannot be"):
        one_run_bound(5, 4, 10, 0.0, 0.9)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["audit", "DP-SGD", "--trials", "400", "--mechanism.epsilon", "2"])
    said = capsys.readouterr().out
    assert "Passed" in said
    assert "Claimed      epsilon = 2.00" in said
    main(["audit", "DP-FedAvg", "--trials", "512", "--one-run"])
    assert "one run of 8 clients" in capsys.readouterr().out
    main(["audit"])
    assert "lower bound" in capsys.readouterr().out
    for words in (["audit", "DP-Nobody"], ["audit", "DP-SGD", "--trials", "many"], ["audit", "DP-SGD", "--nothing", "1"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2


def test_a_refuted_claim_ends_with_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gallery import planted

    planted.gradients(planted.noise_is_divided_twice)(monkeypatch)
    with pytest.raises(SystemExit) as stop:
        main(["audit", "DP-SGD", "--trials", "400"])
    assert stop.value.code == 1
    assert "REFUTED" in capsys.readouterr().out


# The whole, in some minutes: docs/audit.md has the numbers.


def shown(capsys: pytest.CaptureFixture[str], name: str, found: Audit) -> None:
    with capsys.disabled():
        print(f"\n{name}: claimed {found.claimed:.3f}, lower bound {found.lower_bound:.3f}, exact {found.exact:.3f}", end="")


@pytest.mark.slow
@pytest.mark.parametrize("aim", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_at_every_epsilon(name: str, aim: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(method(name, aim), num_trials=2000)
    in_one = audit_one_run(method(name, aim), num_canaries=2048)
    shown(capsys, f"{name} at {aim:g}", found)
    shown(capsys, f"{name} at {aim:g}, one run", in_one)
    assert found.passed, found.report()
    assert in_one.passed, in_one.report()


@pytest.mark.slow
def test_a_right_run_is_not_flagged_in_200_repetitions(capsys: pytest.CaptureFixture[str]) -> None:
    bounds = [audit(replace(one_step(4.0), seed=seed), num_trials=400) for seed in range(200)]
    with capsys.disabled():
        print(f"\n200 repetitions: lower bounds from {min(b.lower_bound for b in bounds):.2f}", end=" ")
        print(f"to {max(b.lower_bound for b in bounds):.2f}", end="")
    assert all(found.passed for found in bounds)


@pytest.mark.slow
@pytest.mark.parametrize("aim", [1.0, 2.0, 4.0, 8.0])
def test_many_trials_show_more(aim: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(one_step(aim), num_trials=12_000)
    shown(capsys, f"DP-SGD at {aim:g}, 12,000 trials", found)
    assert found.passed
    assert aim == 1 or found.lower_bound > 0.4 * aim  # an epsilon of 1 takes more trials
