"""A gallery of classic mistakes: each is planted, and found by an audit, a test or a refusal that the right code passes.

The table in docs/audit.md has the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfed import SGD, FedAdamW, FedAvg, Federation, FedSAM, Gaussian, InputError, Recipe, Scaffold, Task, from_clients, run
from dpfed.audit import Audit, audit
from dpfed.canaries import Alone
from dpfed.rounds import begin
from tests.gallery import planted
from tests.gallery.planted import RawControls, RawMoments, gradients
from tests.stats.test_noise import D, has_scale, released

ROOT = Path(__file__).parents[2]


def recipe(
    algorithm: Any = None, *, sigma: float = 1.0, rate: float = 1.0, steps: int = 1, size: int = 16, **other: Any
) -> Recipe:
    """One client of 16 records, one round."""
    clients, company = other.pop("clients", 1), {key: other.pop(key) for key in ("cohort", "cohort_sampling") if key in other}
    mechanism = Gaussian(sigma=sigma, batch_size=int(rate * size), **other)
    cohort = {"cohort": clients} | company
    return Recipe(Alone(size, clients), algorithm or FedAvg(), mechanism, rounds=1, local_steps=steps, **cohort)


# What an audit finds: the plant, the recipe, and what is asked of the audit.
FOUND: dict[str, tuple[planted.Plant, Recipe, dict[str, Any]]] = {
    "the batch's mean is clipped": (gradients(planted.batch_mean_is_clipped), recipe(), {}),
    "every tensor is clipped to all of C": (gradients(planted.tensors_are_clipped_to_the_whole_clip), recipe(), {}),
    "noise divided by B twice": (gradients(planted.noise_is_divided_twice), recipe(), {}),
    "the same noise in every step": (gradients(planted.noise_is_the_same_in_every_step), recipe(steps=4, rate=0.25), {}),
    "the same noise for every client": (gradients(planted.noise_is_the_same_for_every_client), recipe(), {}),
    "fixed batches charged as Poisson": (
        planted.fixed_is_charged_as_poisson,
        recipe(steps=8, rate=0.5, sampling="fixed", sigma=2.0),
        {"num_trials": 2000},
    ),
    "both gradients of SAM charged as one": (
        planted.two_gradients_are_charged_as_one,
        recipe(FedSAM(), steps=4),
        {"num_trials": 2000},
    ),
    "clipping at the median norm": (gradients(planted.threshold_is_the_median_norm), recipe(size=1), {}),
    "control variates from raw gradients": (gradients(planted.nothing_wrong), recipe(RawControls()), {}),
    "second moments from raw gradients": (gradients(planted.nothing_wrong), recipe(RawMoments()), {}),
    "error feedback before the noise": (
        gradients(planted.error_is_fed_back_before_the_noise),
        recipe(steps=8, sigma=2.0),
        {"num_trials": 2000},
    ),
    "sigma read as a variance": (gradients(planted.sigma_is_read_as_a_variance), recipe(steps=8, sigma=4.0), {}),
    "one block without noise": (gradients(planted.one_block_has_no_noise), recipe(), {}),
    "variants counted as records": (gradients(planted.variants_count_as_records), recipe(augmentations=4), {}),
    "a gradient that is not finite": (gradients(planted.what_is_not_finite_stays), recipe(), {"loud": float("inf")}),
    "clipped after the noise": (gradients(planted.clipped_after_the_noise), recipe(), {}),
    "shares of noise for clients who stay away": (
        gradients(planted.shares_are_for_a_cohort_of_whom_some_stay_away),
        recipe(SGD(), noise="distributed", clients=2),
        {"num_trials": 400},
    ),
    "the count of adaptive clipping without noise": (gradients(planted.count_has_no_noise), recipe(clipping="adaptive"), {}),
    "the server's noise the same in every round": (
        planted.server_noise_is_the_same_in_every_round,
        recipe(unit="client", clip=0.01, clients=4, cohort=2, cohort_sampling="poisson"),
        {"num_trials": 400},
    ),
    "drawing clients multiplied into the rate": (planted.drawing_the_client_is_multiplied_in, recipe(), {}),
}
RIGHT = {RawControls: Scaffold(), RawMoments: FedAdamW()}


@cache
def of_the_right_code(attacked: Recipe, setting: tuple[tuple[str, Any], ...]) -> Audit:
    return audit(attacked, **{"num_trials": 1000} | dict(setting))


LONG = {name for name, (*_, setting) in FOUND.items() if setting.get("num_trials", 0) > 1000}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in FOUND])
def test_an_audit_refutes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, attacked, setting = FOUND[name]
    algorithm = RIGHT.get(type(attacked.algorithm), attacked.algorithm)
    right = of_the_right_code(replace(attacked, algorithm=algorithm), tuple(setting.items()))
    assert right.passed, right.report()
    plant(monkeypatch)
    found = audit(attacked, **{"num_trials": 1000} | setting)
    assert not found.passed, found.report()


# What a test finds. Each is a check that the right code passes, and that is run again with the bug.


def noise_has_its_scale(folder: Path) -> None:
    """On every coordinate of the mean, and whatever the Poisson batches happened to be."""
    sample = released(Gaussian(sigma=0.7, clip=0.3, batch_size=5), torch.zeros(40, D, dtype=torch.float64), num_steps=1)
    assert has_scale(sample, 0.7 * 0.3 / 5)


def a_resumed_run_is_the_one_that_never_stopped(folder: Path) -> None:
    plan = replace(recipe(), rounds=4, evaluate_every=4)
    _, rows = begin(plan, folder / "stopped")
    next(rows), next(rows)
    rows.close()  # type: ignore[attr-defined]
    planted.KEPT.clear()  # the process has ended
    resumed = run(plan, folder / "stopped", resume=True).restore()
    planted.KEPT.clear()
    whole = run(plan, folder / "whole").restore()
    assert whole is not None
    assert resumed is not None
    assert all(vector.equal(resumed[1][name]) for name, vector in whole[1].items())


def no_client_spends_more_than_was_asked_for(folder: Path) -> None:
    plan = replace(recipe(), mechanism=Gaussian(epsilon=2.0, batch_size=4), rounds=6, evaluate_every=6)
    assert run(plan, folder / "run").ledger.epsilon(plan.delta) <= 2.0


TESTED: dict[str, tuple[planted.Plant, Callable[[Path], None]]] = {
    "noise not divided by B": (gradients(planted.noise_is_not_divided), noise_has_its_scale),
    "the realised batch as divisor": (gradients(planted.divisor_is_the_realised_batch), noise_has_its_scale),
    "the same noise after a resume": (
        gradients(planted.noise_begins_again_with_the_process),
        a_resumed_run_is_the_one_that_never_stopped,
    ),
    "calibrated for fewer rounds than happen": (planted.calibrated_for_one_round, no_client_spends_more_than_was_asked_for),
}


@pytest.mark.parametrize("name", TESTED)
def test_a_test_finds_it(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant, check = TESTED[name]
    check(tmp_path / "right")
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path / "planted")


# What is refused. Each is a piece of a run, with the bug or without.


def normalised(layer: nn.Module) -> Any:
    pool = {"x": torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)), "y": torch.arange(8) % 2}
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 2))
    return Task(module, Federation(pool, tuple(torch.arange(8).split(4)))).build(0)


def owned(*clients: list[int]) -> Any:
    return Federation({"x": torch.zeros(8, 3), "y": torch.zeros(8)}, tuple(map(torch.tensor, clients)))


def pooled(*clients: Tensor) -> Any:
    return from_clients([(rows, torch.zeros(len(rows))) for rows in clients])


def shared_noise(steps: int, tmp_path: Path) -> Any:
    return run(recipe(SGD() if steps == 1 else FedAvg(), steps=steps, noise="distributed", clients=2), tmp_path / str(steps))


ROWS = torch.arange(12.0).view(4, 3)
REFUSED: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], str]] = {
    "BatchNorm": (
        lambda _: normalised(nn.BatchNorm2d(3)),
        lambda _: normalised(nn.GroupNorm(1, 3)),
        "mixes the records of a batch",
    ),
    "a record of two clients": (
        lambda _: owned([0, 1, 2, 3], [3, 4, 5]),
        lambda _: owned([0, 1, 2, 3], [4, 5]),
        "record 3 also belongs to client 0",
    ),
    "a record that stands at two clients": (
        lambda _: pooled(ROWS, ROWS[1:2]),
        lambda _: pooled(ROWS, ROWS[1:2] + 100),
        "its record 0 equals a record of clients",
    ),
    "shares of noise over several steps": (
        lambda folder: shared_noise(2, folder),
        lambda folder: shared_noise(1, folder),
        "'distributed' protects one gradient a round",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, tmp_path: Path) -> None:
    wrong, right, words = REFUSED[name]
    right(tmp_path)
    with pytest.raises(InputError, match=re.escape(words)):
        wrong(tmp_path)


def test_the_page_shows_the_whole_gallery() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| (audit|test|refusal) \|", (ROOT / "docs/audit.md").read_text("utf-8"), re.MULTILINE)
    kinds = {"audit": FOUND, "test": TESTED, "refusal": REFUSED}
    assert sorted(rows) == sorted((name, kind) for kind, gallery in kinds.items() for name in gallery)
