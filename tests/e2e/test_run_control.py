"""A run that plans: budgets, limits, a sigma for each client, secret cohorts, averages, variants of records."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpfed import AsReleased, FedAvg, Gaussian, InputError, Recipe, RunRecord, Simulation, Task, iid, pad_crop_flip, run
from dpfed.__main__ import main
from dpfed.augment import uniform
from dpfed.data import key
from dpfed.flat import FlatModel
from dpfed.keyed import fold
from dpfed.ledger import EVERYBODY, Event
from dpfed.rounds import begin

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(240, 4, generator=RANDOM)
Y = (X[:, 0] > 0).long()


def recipe(mechanism: Any = None, **changes: Any) -> Recipe:
    """Eight clients of 30 records each."""
    torch.manual_seed(0)
    task = Task(nn.Linear(4, 2), iid((X[:200], Y[:200]), num_clients=8, test=(X[200:], Y[200:])))
    mechanism = mechanism or Gaussian(sigma=1.0, batch_size=5)
    whole: dict[str, Any] = {"rounds": 6, "local_steps": 2, "cohort": 3, "engine": Simulation(device="cpu"), **changes}
    return Recipe(task, FedAvg(lr=1.0), mechanism, **whole)


def participations(record: RunRecord) -> Counter[int]:
    return Counter(receipt.client for receipt in record.ledger)


def test_the_budget_ends_the_run_before_it_is_passed(tmp_path: Path) -> None:
    free = run(recipe(), tmp_path / "free")
    prices = [row["epsilon"] for row in free.rows]
    budget = (prices[1] + prices[2]) / 2
    assert prices[1] < prices[2]
    record = run(recipe(budget=budget), tmp_path / "bounded")
    assert [row["epsilon"] for row in record.rows] == prices[:2]
    assert record.ledger.epsilon(1e-5) <= budget, "nothing was charged for the round that did not happen"
    assert f"{prices[2]:.4g}" in record.rows[-1]["ended_by"]
    assert not any("ended_by" in row for row in [*record.rows[:-1], *free.rows])
    assert record.finished
    assert [row | {"seconds": 0} for row in run(recipe(budget=99.0), tmp_path / "rich").rows] == [
        row | {"seconds": 0} for row in free.rows
    ]


def test_a_budget_that_pays_for_nothing_is_refused(tmp_path: Path) -> None:
    for mechanism in (None, AsReleased(batch_size=5)):
        with pytest.raises(InputError, match=r"budget: epsilon 0\.01 does not pay for one round"):
            run(recipe(mechanism, budget=0.01), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_says_that_the_budget_ended_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run fashion/DP-FedAvg --rounds 9 --local-steps 1 --cohort 2 --mechanism.batch-size 8 --mechanism.epsilon None"
    words += " --mechanism.sigma 0.5 --budget 3.2 --mechanism.clipping automatic --average tail --max-participations 8"
    main([*words.split(), "--out", str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().out.split())
    record = RunRecord.open(tmp_path / "run")
    assert f"Ended DP-FedAvg after {len(record.rows)} rounds, by the budget of epsilon 3.2" in said
    assert 0 < len(record.rows) < 9
    main(["resume", str(tmp_path / "run")])
    assert len(RunRecord.open(tmp_path / "run").rows) == len(record.rows)


def test_nobody_takes_part_more_often_than_allowed(tmp_path: Path) -> None:
    """And the noise is calibrated for that: less of it than without a limit."""
    private = Gaussian(epsilon=2.0, batch_size=5)
    limited = run(recipe(private, max_participations=3), tmp_path / "limited")
    free = run(recipe(private), tmp_path / "free")
    assert max(participations(limited).values()) == 3 < max(participations(free).values())
    assert limited.recipe["sigma"] < 0.95 * free.recipe["sigma"]
    assert 1.99 < limited.ledger.epsilon(1e-5) <= 2.0
    with pytest.raises(InputError, match="need 3 of each, and 2 are allowed"):
        run(recipe(private, max_participations=2), tmp_path / "few")


def test_each_client_gets_the_noise_for_one_epsilon(tmp_path: Path) -> None:
    worst = run(recipe(Gaussian(epsilon=2.0, batch_size=5)), tmp_path / "worst")
    each = run(recipe(Gaussian(epsilon=2.0, batch_size=5, calibration="each")), tmp_path / "each")
    assert min(worst.ledger.epsilons(1e-5).values()) < 1.8
    assert all(1.99 < epsilon <= 2.0 for epsilon in each.ledger.epsilons(1e-5).values())
    sigmas = {i: {event.sigma for event in each.ledger.events(i)} for i in each.ledger.clients()}
    assert all(len(own) == 1 for own in sigmas.values())
    often = participations(each)
    assert sorted(sigmas, key=lambda i: (*sigmas[i], i)) == sorted(sigmas, key=lambda i: (often[i], i))
    assert max(max(own) for own in sigmas.values()) == worst.recipe["sigma"] == each.recipe["sigma"]


def test_a_round_without_clients_changes_nothing(tmp_path: Path) -> None:
    """Under Poisson cohorts of records. The ledger knows of the coin all the same."""
    record = run(recipe(cohort=1, rounds=12, cohort_sampling="poisson"), tmp_path / "run")
    empty = [row["t"] for row in record.rows if row["clients"] == 0]
    assert 0 < len(empty) < 12
    for t in empty:
        assert record.rows[t]["bytes_up"] == 0
        if t > 0:
            assert all(record.rows[t][name] == record.rows[t - 1][name] for name in ("loss", "accuracy", "epsilon"))
    assert record.ledger.announced == dict.fromkeys(range(12), 1 / 8)
    assert record.ledger.epsilon(1e-5, "public") <= record.ledger.epsilon(1e-5, "server")


def test_poisson_cohorts_have_the_rate_that_is_charged() -> None:
    """Rate, and variance of the size; 0.9 and 1.1 of it are rejected."""
    federation = iid((X, Y), num_clients=240)

    def fits(size: int, rate: float) -> bool:
        sizes = torch.tensor([float(len(federation.cohort(3, t, size, "poisson"))) for t in range(400)])
        spread = math.sqrt(240 * rate * (1 - rate))
        return abs(float(sizes.mean()) - 240 * rate) < 5 * spread / 20 and 0.7 < float(sizes.std()) / spread < 1.3

    assert fits(60, 0.25)
    assert not fits(54, 0.25)
    assert not fits(66, 0.25)


def test_clients_are_charged_for_every_round_whether_they_came_or_not(tmp_path: Path) -> None:
    for sampling in ("poisson", "fixed"):
        private = Gaussian(epsilon=2.0, unit="client", batch_size=5)
        record = run(recipe(private, cohort_sampling=sampling), tmp_path / sampling)
        event = Event(sampling, 3, 8, record.recipe["sigma"], unit="client")
        assert [(r.client, r.t, r.events) for r in record.ledger] == [(EVERYBODY, t, Counter([event])) for t in range(6)]
        assert 1.99 < record.ledger.epsilon(1e-5) <= 2.0
        assert record.rows[-1]["epsilon"] == record.ledger.epsilon(1e-5)
        assert math.isinf(record.ledger.epsilon(1e-5, "server"))
        assert "one client, with all its records" in record.statement()


@pytest.mark.parametrize("average", ["ema", "tail"])
def test_averages_by_hand(average: Any, tmp_path: Path) -> None:
    """Of the models of shorter runs; what is evaluated and saved is the average, and the rows say so."""
    settings: dict[str, Any] = {"schedule": "constant", "average_decay": 0.5}
    models = [run(recipe(rounds=n, **settings), tmp_path / str(n)).load_model()["weight"].double() for n in (1, 2, 3, 4)]
    record = run(recipe(rounds=4, average=average, **settings), tmp_path / "run")
    weights = {"ema": [1 / 15, 2 / 15, 4 / 15, 8 / 15], "tail": [0, 0, 0.5, 0.5]}[average]
    expected = sum((weight * model for weight, model in zip(weights, models, strict=True)), torch.zeros(2, 4).double())
    torch.testing.assert_close(record.load_model()["weight"].double(), expected, rtol=1e-6, atol=1e-7)
    last = RunRecord.open(tmp_path / "4").rows[-1]
    assert (record.rows[-1]["last_accuracy"], record.rows[-1]["last_loss"]) == (last["accuracy"], last["loss"])
    assert [row["model"] for row in record.rows] == (["ema"] * 4 if average == "ema" else ["last", "last", "tail", "tail"])
    judged = FlatModel(nn.Linear(4, 2)).evaluate(
        torch.cat([record.load_model()[name].flatten() for name in ("weight", "bias")]), {"x": X[200:], "y": Y[200:]}
    )
    assert record.rows[-1]["loss"] == pytest.approx(judged["loss"], rel=1e-6)


def test_variants_are_averaged_before_they_are_clipped(tmp_path: Path) -> None:
    """By hand, record by record: the keys, the variants, the mean of their gradients, the clipping."""
    module = nn.Linear(4, 2)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    x, y = X[:3], Y[:3]

    def augment(example: dict[str, torch.Tensor], own: torch.Tensor) -> dict[str, torch.Tensor]:
        return example | {"x": example["x"] * (0.5 + uniform(own, 1))}

    task = Task(module, iid((x, y), num_clients=1, test=(x, y)), augment=augment)
    mechanism = Gaussian(sigma=0.0, clip=0.6, batch_size=3, augmentations=4)
    settings: dict[str, Any] = {"rounds": 1, "local_steps": 1, "cohort": 1, "engine": Simulation(device="cpu")}
    record = run(Recipe(task, FedAvg(lr=1.0, weight_decay=0.0), mechanism, **settings), tmp_path / "run")
    total = torch.zeros(10)
    for row in range(3):
        own = fold(torch.tensor(key(0, "record", 0, 0, 0, 0)), row)
        mean = torch.zeros(10)
        for j in range(4):
            module.zero_grad()
            example = augment({"x": x[row]}, fold(own, j))
            nn.functional.cross_entropy(module(example["x"][None]), y[row : row + 1]).backward()
            mean += torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]) / 4
        total += mean * min(1.0, 0.6 / float(mean.norm()))
    model = record.load_model()
    torch.testing.assert_close(-torch.cat([model["weight"].flatten(), model["bias"]]), total / 3)
    plain = FlatModel(module).evaluate(torch.zeros(10), {"x": x, "y": y})
    assert FlatModel(module, augment=augment).evaluate(torch.zeros(10), {"x": x, "y": y}) == plain, "never in evaluation"


def test_pictures_are_moved_and_mirrored_within_bounds() -> None:
    """Every variant is one of the 9 x 2 possible ones, each about equally often, mapped or alone."""
    image = torch.arange(20.0).view(1, 4, 5)
    padded = nn.functional.pad(image, (1, 1, 1, 1), mode="reflect")
    crops = [padded[:, i : i + 4, j : j + 5] for i in range(3) for j in range(3)]
    possible = [variant for crop in crops for variant in (crop, crop.flip(-1))]
    augment, keys = pad_crop_flip(1), torch.arange(3600)
    found = torch.func.vmap(lambda own: augment({"x": image, "y": own}, own)["x"])(keys)
    which = torch.stack([(found == variant).flatten(1).all(1) for variant in possible], dim=1)
    assert which.sum(1).eq(1).all()
    assert (which.sum(0) - 200).abs().max() < 5 * math.sqrt(200)
    assert augment({"x": image}, keys[7])["x"].equal(found[7])
    flat = pad_crop_flip(1, shape=(1, 4, 5))({"x": image.flatten()}, keys[7])["x"]
    assert flat.equal(found[7].flatten())


def test_the_released_mechanism_says_what_it_is(tmp_path: Path) -> None:
    record = run(recipe(AsReleased(batch_size=5)), tmp_path / "run")
    assert record.recipe["name"] == "FedAvg (as released)"
    assert math.isinf(record.rows[-1]["epsilon"])
    assert "not private. Batches were clipped instead of records" in record.statement()


def test_the_rows_of_a_stopped_run_can_be_drawn_further(tmp_path: Path) -> None:
    """A budget is known before the first round, so a run that is resumed ends where it would have ended."""
    prices = [row["epsilon"] for row in run(recipe(), tmp_path / "free").rows]
    end = max(t for t in range(1, 6) if prices[t] > prices[t - 1])
    planned = recipe(budget=(prices[end - 1] + prices[end]) / 2, average="tail")
    whole = run(planned, tmp_path / "whole")
    record, rows = begin(planned, tmp_path / "stopped")
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    record.close()
    again = run(planned, tmp_path / "stopped", resume=True)
    assert again.load_model()["weight"].equal(whole.load_model()["weight"])
    assert [row["model"] for row in again.rows] == ["last"] * (end // 2) + ["tail"] * (end - end // 2), (
        "of the rounds that there are"
    )
