"""Every switch of the mechanism and of the run sits the exam of the algorithms: the switches are found, too.

The algorithms are those with the most to lose: one with moments and a direction, one with a memory, one with two gradients a
step, one that differs them, and one whose server steps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from dpfed import FAFED, SGD, FedAdamW, FedSAM, InputError, Recipe, Scaffold, Simulation
from dpfed.algorithm import Algorithm, Round
from dpfed.engines.simulation import Job, train_clients
from dpfed.flat import FlatModel, Records
from dpfed.forecast import forecast, planned, planned_receipts, public_fields
from dpfed.ledger import EVERYBODY
from dpfed.mechanism import AsReleased, Plain
from dpfed.recipe import from_json, to_json
from dpfed.record import RunRecord
from dpfed.rounds import begin, run
from tests.laws.test_laws import EVERYBODY as COHORT
from tests.laws.test_laws import LR, PRIVATE, assert_same, choices, stopped_at, task

ALGORITHMS: list[Any] = [FedAdamW(lr=LR), Scaffold(lr=LR), FedSAM(lr=LR), FAFED(lr=LR, variant="storm"), SGD(lr=LR)]
ONE_STEP = (SGD,)


def switched(value: Any) -> Iterator[Any]:
    """A value with each of its switches turned to each other position, where that is allowed by itself."""
    for field, hint in get_type_hints(type(value)).items():
        for other in choices(hint):
            if other != getattr(value, field) and other is not None:
                with suppress(InputError):
                    yield replace(value, **{field: other})


MECHANISMS: list[Any] = [
    *switched(PRIVATE),
    replace(PRIVATE, clipping="adaptive", unit="client"),
    replace(PRIVATE, sigma=None, epsilon=3.0, calibration="each"),
    replace(PRIVATE, augmentations=3),
    AsReleased(batch_size=5),
    Plain(batch_size=5, sampling="shuffled"),
]


class Varied:
    """The exam's task, with a model that draws random numbers for every record."""

    def build(self, seed: int) -> tuple[FlatModel, Any]:
        ours = task()

        def augment(example: Records, key: torch.Tensor) -> Records:
            return example | {"x": example["x"] * (1 + key % 5 / 10)}

        return FlatModel(ours.model, augment=augment), ours.federation


def plain_recipe(algorithm: Any, mechanism: Any = PRIVATE) -> Recipe:
    steps = 1 if isinstance(algorithm, ONE_STEP) or mechanism.noise == "distributed" else 2
    recipe = Recipe(Varied(), algorithm, mechanism, rounds=4, local_steps=steps, cohort=3, evaluate_every=4)
    return replace(recipe, engine=Simulation(device="cpu"))


RECIPES: list[Recipe] = [
    *(recipe for recipe in switched(plain_recipe(ALGORITHMS[0])) if recipe.schedule == "cosine"),
    replace(plain_recipe(ALGORITHMS[0]), max_participations=3),
    replace(plain_recipe(ALGORITHMS[0]), budget=30.0),
    replace(plain_recipe(ALGORITHMS[1], replace(PRIVATE, unit="client")), cohort_sampling="poisson", cohort=1),
]


def turned(value: Any) -> str:
    mechanism = getattr(value, "mechanism", value)
    standard = plain_recipe(ALGORITHMS[0]) if isinstance(value, Recipe) else PRIVATE
    words = [f"{name}={getattr(value, name)}" for name in get_type_hints(type(standard)) if hasattr(value, name)]
    known = [f"{name}={getattr(standard, name)}" for name in get_type_hints(type(standard))]
    return " ".join([type(mechanism).__name__, *(word for word in words if word not in known and "task" not in word)])


def test_the_exam_finds_its_candidates() -> None:
    names = {turned(value) for value in MECHANISMS + RECIPES}
    wanted = ["clipping=block", "clipping=automatic", "clipping=adaptive", "unit=client", "noise=distributed", "sampling=fixed"]
    wanted += ["cohort_sampling=poisson", "average=ema", "average=tail", "weighting=examples"]
    assert {f"Gaussian {word}" for word in wanted} <= names


def allowed() -> Iterator[Any]:
    for mechanism in MECHANISMS:
        for algorithm in ALGORITHMS:
            if mechanism.noise == "local" or isinstance(algorithm, ONE_STEP):
                yield pytest.param(algorithm, mechanism, id=f"{type(algorithm).__name__} {turned(mechanism)}")


@pytest.mark.parametrize(("algorithm", "mechanism"), list(allowed()))
def test_a_cohort_is_its_clients_one_by_one(algorithm: Algorithm, mechanism: Any) -> None:
    """And what was asked for is what was planned; and it does not matter who stands where."""
    recipe = plain_recipe(algorithm, mechanism)
    work = forecast(recipe, *recipe.task.build(0)).job
    s = algorithm.server_init(work.model.theta0(), work.model.layout)
    t = Round(1, 0.7, recipe.local_steps, work.model.layout, 0.5, 0.5, 0.4 if mechanism.clipping == "adaptive" else None)
    t = replace(t, public=public_fields(algorithm, t)) if mechanism.unit == "client" else t
    uploads, kept, receipts = train_clients(work, t, s, COHORT, {})
    shuffled, _, _ = train_clients(work, t, s, COHORT[::-1], {}, COHORT)
    for i in COHORT:
        [upload], own, [receipt] = train_clients(work, t, s, [i], {}, COHORT, records_at_once=2)
        assert_same(upload, uploads[i], tolerance=1e-12)
        assert_same(shuffled[-1 - i], uploads[i])
        assert_same(own.get(i), kept.get(i), tolerance=1e-12)
        assert receipt == receipts[i]


def resumed(recipe: Recipe, folder: Path, after: int = 2) -> tuple[RunRecord, RunRecord]:
    """The same run, once whole and once stopped and resumed; equal to the last bit."""
    whole = run(recipe, folder / "whole")
    stopped, rows = begin(recipe, folder / "stopped")
    for _ in range(after):
        next(rows)
    rows.close()  # type: ignore[attr-defined]
    stopped.close()
    again = run(recipe, folder / "stopped", resume=True)
    (last, tensors), (last_too, tensors_too) = stopped_at(whole), stopped_at(again)
    assert last == last_too == len(whole.rows)
    assert tensors.keys() == tensors_too.keys()
    assert all(tensors[name].equal(tensors_too[name]) for name in tensors)
    assert [row | {"seconds": 0} for row in whole.rows] == [row | {"seconds": 0} for row in again.rows]
    assert list(whole.ledger) == list(again.ledger)
    assert whole.ledger.announced == again.ledger.announced
    models = [record.load_model() for record in (whole, again)]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    return whole, again


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=turned)
def test_resuming_equals_not_stopping(mechanism: Any, tmp_path: Path) -> None:
    recipe = plain_recipe(ALGORITHMS[4] if mechanism.noise == "distributed" else ALGORITHMS[1], mechanism)
    whole, _ = resumed(recipe, tmp_path)
    spent_as_planned(recipe, whole)


@pytest.mark.parametrize("recipe", RECIPES, ids=turned)
def test_resuming_equals_not_stopping_in_other_runs(recipe: Recipe, tmp_path: Path) -> None:
    whole, _ = resumed(recipe, tmp_path, after=1)
    spent_as_planned(recipe, whole)


def spent_as_planned(recipe: Recipe, record: RunRecord) -> None:
    plan = forecast(recipe, *recipe.task.build(recipe.seed))
    ledger = planned(recipe, plan.job, plan.cohorts[: plan.num_rounds], plan.dry)
    assert {i: ledger.events(i) for i in ledger.clients()} == {i: record.ledger.events(i) for i in record.ledger.clients()}
    rounds = enumerate(plan.cohorts[: plan.num_rounds])
    one_by_one = [receipt for t, cohort in rounds for receipt in planned_receipts(recipe, plan.job, t, cohort, plan.dry)]
    assert sorted(one_by_one) == sorted(record.ledger)
    assert ledger.announced == record.ledger.announced
    counted = Counter(i for cohort in plan.cohorts[: plan.num_rounds] for i in cohort)
    assert record.ledger.clients() == ([EVERYBODY] if plan.job.mechanism.unit == "client" else sorted(counted))
    assert [row["clients"] for row in record.rows] == [len(cohort) for cohort in plan.cohorts[: plan.num_rounds]]


@pytest.mark.parametrize("value", MECHANISMS + RECIPES, ids=turned)
def test_plain_json_brings_it_back(value: Any) -> None:
    value = getattr(value, "mechanism", value)
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=turned)
def test_variants_belong_to_the_record_the_step_and_the_client(mechanism: Any) -> None:
    """Nobody's augmentation depends on who else is there: a record's key is its own."""
    recipe = plain_recipe(ALGORITHMS[4], mechanism)
    work: Job = forecast(recipe, *recipe.task.build(0)).job
    plain = work._replace(model=FlatModel(task().model))
    s = work.algorithm.server_init(work.model.theta0(), work.model.layout)
    clip = 0.4 if mechanism.clipping == "adaptive" else None
    draws = [train_clients(work, Round(t, 0.7, 1, work.model.layout, clip=clip), s, [2], {})[0][0] for t in (0, 0, 1)]
    assert_same(draws[0], draws[1])
    with pytest.raises(AssertionError):
        assert_same(draws[0], draws[2])
    if mechanism.augmentations == 1:
        with pytest.raises(AssertionError):
            assert_same(draws[0], train_clients(plain, Round(0, 0.7, 1, work.model.layout, clip=clip), s, [2], {})[0][0])
