"""Every algorithm, with every one of its switches, sits the same exam.

The candidates are found: a new name in ``dpfed.algorithms`` and a new switch in a file are examined without a line being
written here. A cohort is always mixed: some of its clients took part before, and one never did.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from dpfed import FedAvg, Federation, Gaussian, InputError, Plain, Recipe, Scaffold, Simulation, Task, algorithms
from dpfed.algorithm import Algorithm, Delta, Gradient, Round, Tree, Weights, client_round, leaves, tree_map, weighted_sum
from dpfed.catalogue import named_recipe
from dpfed.engines.simulation import Job, train_clients
from dpfed.flat import FlatModel, Layout, Part
from dpfed.forecast import DryGradient
from dpfed.ledger import Receipt
from dpfed.recipe import from_json, to_json
from dpfed.record import RunRecord
from dpfed.rounds import begin, dry_round, planned_events, run

LR = 0.05
PRIVATE = Gaussian(sigma=0.8, clip=0.5, batch_size=5)
EVERYBODY = [0, 1, 2, 3]


def choices(hint: Any) -> tuple[Any, ...]:
    """The values of a field of this type, where they can be listed."""
    if hint is bool:
        return (True, False)
    if hint is NoneType:
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(value for part in get_args(hint) for value in choices(part))
    return ()


def candidates() -> Iterator[Any]:
    """Every algorithm as it comes, and with each of its switches turned to each other position."""
    for name in algorithms.__all__:
        default = getattr(algorithms, name)(lr=LR)
        yield default
        for field, hint in get_type_hints(type(default)).items():
            others = [value for value in choices(hint) if value != getattr(default, field)]
            yield from (replace(default, **{field: value}) for value in others)
    yield Scaffold(lr=LR, warm_start=1)


def turned(algorithm: Any) -> str:
    """The name, and what differs from the defaults."""
    differing = [(f.name, getattr(algorithm, f.name)) for f in fields(algorithm) if getattr(algorithm, f.name) != f.default]
    return " ".join([type(algorithm).__name__, *(f"{name}={value}" for name, value in differing if name != "lr")])


CANDIDATES = list(candidates())
every_candidate = pytest.mark.parametrize("algorithm", CANDIDATES, ids=turned)


def test_the_exam_finds_its_candidates() -> None:
    names = {turned(algorithm) for algorithm in CANDIDATES}
    assert {"FedAvg", "Scaffold control=option2", "FedSAM same_batch=False", "FedAdamW blocks=none"} <= names
    assert set(algorithms.__all__) <= names
    assert len(names) == len(CANDIDATES)


# The hall: four clients of unequal size, one with fewer records than a batch, and two classes that a line divides.


def task(dtype: torch.dtype = torch.float64) -> Task:
    random = torch.Generator().manual_seed(5)
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=random, dtype=dtype) * 0.5 + (2 * y - 1).unsqueeze(1) * torch.tensor([1.0, -0.5, 1.0])
    module = nn.Linear(3, 2, dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1, generator=random)
    return Task(module, Federation({"x": x.to(dtype), "y": y}, torch.arange(40).split([3, 9, 12, 16])))


def job(algorithm: Algorithm, mechanism: Gaussian | Plain = PRIVATE, dtype: torch.dtype = torch.float64) -> Job:
    ours = task(dtype)
    return Job(FlatModel(ours.model), ours.federation, algorithm, mechanism, seed=11)


@cache
def num_steps(algorithm: Algorithm) -> int:
    """Three, where the algorithm takes more than one."""
    try:
        dry_round(algorithm, 3)
    except InputError as refusal:
        if "local_steps: must be 1" not in str(refusal):
            raise
        return 1
    return 3


def round_number(index: int, work: Job) -> Round:
    return Round(index, 0.7, num_steps(work.algorithm), work.model.layout, 0.5, 0.5)


def mean(uploads: list[Tree]) -> Tree:
    return weighted_sum((1 / len(uploads), upload) for upload in uploads)


def played(work: Job, cohorts: list[list[int]]) -> tuple[Tree, dict[int, Tree]]:
    """The server's state and the clients' memories after a round of each cohort."""
    s, memory = work.algorithm.server_init(work.model.theta0(), work.model.layout), dict[int, Tree]()
    for index, cohort in enumerate(cohorts):
        t = round_number(index, work)
        uploads, kept, _ = train_clients(work, t, s, cohort, memory)
        memory |= kept
        s = work.algorithm.server_step(s, mean(uploads), t)
    return s, memory


@cache
def midway(algorithm: Algorithm) -> tuple[Job, Round, Tree, dict[int, Tree]]:
    """After two rounds in which client 3 had no part."""
    work = job(algorithm)
    return work, round_number(2, work), *played(work, [[0, 1], [1, 2]])


def assert_same(one: Tree, other: Tree, tolerance: float = 0.0) -> None:
    """The same names, and the same numbers: bit for bit, or up to the tolerance."""
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for name, vector in ours.items():
        torch.testing.assert_close(vector, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


# The laws.


@every_candidate
def test_inputs_are_not_written_to(algorithm: Algorithm) -> None:
    work, t, s, memory = midway(algorithm)
    before = tree_map(torch.clone, s), {i: tree_map(torch.clone, kept) for i, kept in memory.items()}
    uploads, _, _ = train_clients(work, t, s, EVERYBODY, memory)
    upload = mean(uploads)
    sent = tree_map(torch.clone, upload)
    algorithm.server_step(s, upload, t)
    assert_same(s, before[0])
    assert_same(upload, sent)
    assert memory.keys() == before[1].keys()
    for i in memory:
        assert_same(memory[i], before[1][i])


@every_candidate
def test_the_order_of_the_clients_does_not_matter(algorithm: Algorithm) -> None:
    work, t, s, memory = midway(algorithm)
    uploads, kept, receipts = train_clients(work, t, s, EVERYBODY, memory)
    order = [2, 0, 3, 1]
    shuffled, kept_too, receipts_too = train_clients(work, t, s, order, memory)
    for upload, i in zip(shuffled, order, strict=True):
        assert_same(upload, uploads[i])
        assert_same(kept_too.get(i), kept.get(i))
    assert sorted(receipts_too) == sorted(receipts)


@every_candidate
def test_a_cohort_is_its_clients_one_by_one(algorithm: Algorithm) -> None:
    """Up to the last bits: a matrix product of another height may add in another order."""
    work, t, s, memory = midway(algorithm)
    uploads, kept, receipts = train_clients(work, t, s, EVERYBODY, memory)
    for i in EVERYBODY:
        [upload], own, [receipt] = train_clients(work, t, s, [i], memory)
        assert_same(upload, uploads[i], tolerance=1e-12)
        assert_same(own.get(i), kept.get(i), tolerance=1e-12)
        assert receipt == receipts[i]


@pytest.mark.parametrize("clip", [float("inf"), 1e9])
@every_candidate
def test_without_clip_and_noise_it_is_the_plain_method(algorithm: Algorithm, clip: float) -> None:
    silent = Gaussian(sigma=0.0, clip=clip, batch_size=5, sampling="fixed")
    cohorts = [[0, 1], [1, 2], EVERYBODY]
    (s, memory), (plain, plain_memory) = (played(job(algorithm, m), cohorts) for m in (silent, Plain(batch_size=5)))
    assert_same(s, plain, tolerance=1e-12)
    assert memory.keys() == plain_memory.keys()
    for i in memory:
        assert_same(memory[i], plain_memory[i], tolerance=1e-12)


@every_candidate
def test_what_it_asks_for_is_what_was_planned(algorithm: Algorithm) -> None:
    work, t, s, memory = midway(algorithm)
    _, _, receipts = train_clients(work, t, s, EVERYBODY, memory)
    dry, sizes = dry_round(algorithm, t.num_steps), work.federation.sizes
    assert receipts == [Receipt(i, t.index, planned_events(PRIVATE, sizes[i], dry)) for i in EVERYBODY]
    assert sum(receipts[0].events.values()) >= t.num_steps


@every_candidate
def test_resuming_equals_not_stopping(algorithm: Algorithm, tmp_path: Path) -> None:
    recipe = Recipe(task(), algorithm, PRIVATE, rounds=4, local_steps=num_steps(algorithm), cohort=3, evaluate_every=4)
    recipe = replace(recipe, engine=Simulation(device="cpu"))
    whole = run(recipe, tmp_path / "whole")
    stopped, rows = begin(recipe, tmp_path / "stopped")
    next(rows), next(rows)
    rows.close()  # type: ignore[attr-defined]
    stopped.close()
    [first, _] = stopped_at(stopped)
    assert 1 <= first <= 2
    resumed = run(recipe, tmp_path / "stopped", resume=True)
    [last, tensors], [last_too, tensors_too] = stopped_at(whole), stopped_at(resumed)
    assert last == last_too == 4
    assert tensors.keys() == tensors_too.keys()
    assert all(tensors[name].equal(tensors_too[name]) for name in tensors)
    assert [row | {"seconds": 0} for row in whole.rows] == [row | {"seconds": 0} for row in resumed.rows]
    assert list(whole.ledger) == list(resumed.ledger)
    kept = [{file.name: file.read_bytes() for file in record.path.glob("memory/*")} for record in (whole, resumed)]
    assert kept[0] == kept[1]
    assert bool(kept[0]) == (dry_round(algorithm, recipe.local_steps).memory is not None)


def stopped_at(record: RunRecord) -> tuple[int, dict[str, torch.Tensor]]:
    found = RunRecord.open(record.path).restore()
    assert found is not None
    return found


@every_candidate
def test_the_memory_stays_with_the_client(algorithm: Algorithm) -> None:
    work, t, s, memory = midway(algorithm)
    uploads, kept, _ = train_clients(work, t, s, EVERYBODY, memory)
    assert kept.keys() in (set(), set(EVERYBODY))
    for i, own in kept.items():
        assert not {type(own)} & {type(node) for tree in (uploads[i], s) for node in nodes(tree)}
        if i in memory:  # a first upload may tell the change since nothing
            assert not [path for path, vector in leaves(uploads[i]) for _, mine in leaves(own) if vector.equal(mine)]


def nodes(tree: Tree) -> Iterator[Any]:
    yield tree
    if isinstance(tree, tuple):
        for field in tree:
            yield from nodes(field)


@every_candidate
def test_states_are_vectors_of_one_shape(algorithm: Algorithm) -> None:
    work, t, s, memory = midway(algorithm)
    uploads, kept, _ = train_clients(work, t, s, EVERYBODY, memory)
    states = [work.algorithm.server_init(work.model.theta0(), work.model.layout), s, algorithm.server_step(s, mean(uploads), t)]
    for trees in (states, uploads, list(kept.values())):
        shapes = [{path: (vector.shape, vector.dtype) for path, vector in leaves(tree)} for tree in trees]
        assert all(found == shapes[0] for found in shapes)
    assert all(vector.dim() == 1 for upload in uploads for _, vector in leaves(upload))
    assert s.theta.shape == (work.model.layout.num_coordinates,)


@every_candidate
def test_single_precision_stays_single(algorithm: Algorithm) -> None:
    s, memory = played(job(algorithm, dtype=torch.float32), [[0, 1], EVERYBODY])
    found = {vector.dtype for tree in (s, *memory.values()) for _, vector in leaves(tree)}
    assert torch.float64 not in found
    assert s.theta.dtype == torch.float32


@every_candidate
def test_plain_json_brings_it_back(algorithm: Algorithm) -> None:
    copy = from_json(json.loads(json.dumps(to_json(algorithm))))
    assert copy == algorithm
    assert repr(copy) == repr(algorithm)


@every_candidate
def test_the_loss_falls_on_an_easy_problem(algorithm: Algorithm) -> None:
    work = job(algorithm, Plain(batch_size=100))
    records = work.federation.records
    before = work.model.evaluate(work.model.theta0(), records)["loss"]
    s, _ = played(work, [EVERYBODY] * (18 // num_steps(algorithm)))
    assert work.model.evaluate(s.theta, records)["loss"] < 0.98 * before


@pytest.mark.parametrize("algorithm", [one for one in CANDIDATES if hasattr(one, "weight_decay")], ids=turned)
def test_weight_decay_shrinks(algorithm: Any) -> None:
    """Without a gradient every parameter moves towards zero, and none beyond it. The papers print the sign that grows."""
    decaying = replace(algorithm, weight_decay=0.1)
    layout, theta = Layout((Part("one", (4,), "weights"), Part("two", (2,), "weights"))), torch.full((6,), -2.0).double()
    t, silence = Round(1, 1.0, num_steps(algorithm), layout), DryGradient(torch.zeros(6).double())
    s = decaying.server_init(theta, layout)
    u, _ = client_round(decaying, s, None, lambda k: silence, t)
    after = decaying.server_step(s, u, t).theta
    assert bool((after > theta).all())
    assert bool((after < 0).all())


@pytest.mark.parametrize("name", algorithms.__all__)
def test_there_is_a_recipe_for_it(name: str) -> None:
    assert type(named_recipe(f"fashion/DP-{name}").algorithm) is getattr(algorithms, name)


# The exam is put to the test: each of these cheats, and is caught.


class WritesInPlace(FedAvg):
    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        return Weights(s.theta.add_(u.delta))


class CountsItsNeighbours(FedAvg):
    def upload(self, x: Weights, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta((x.theta - s.theta) / len(x.theta)), None


class LooksWhoStandsFirst(FedAvg):
    def upload(self, x: Weights, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - x.theta[:1]), None


class AsksForMoreLater(FedAvg):
    def local_step(self, x: Weights, s: Weights, grad: Gradient, t: Round, k: int) -> Weights:
        return super().local_step(x, s, grad, t, k) if t.index < 2 else Weights(grad(x.theta) + grad(x.theta))


class SendsItsMemory(FedAvg):
    def upload(self, x: Weights, s: Weights, memory: Delta | None, t: Round) -> tuple[Delta, Delta]:
        return Delta(x.theta - s.theta), Delta(x.theta - s.theta)


class RemembersOnTheSide(FedAvg):
    rounds: ClassVar[list[int]] = []

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        self.rounds.append(t.index)
        return Weights(s.theta + u.delta / len(self.rounds))


@pytest.mark.parametrize(
    ("cheat", "law"),
    [
        (WritesInPlace, test_inputs_are_not_written_to),
        (CountsItsNeighbours, test_a_cohort_is_its_clients_one_by_one),
        (LooksWhoStandsFirst, test_the_order_of_the_clients_does_not_matter),
        (AsksForMoreLater, test_what_it_asks_for_is_what_was_planned),
        (SendsItsMemory, test_the_memory_stays_with_the_client),
    ],
)
def test_a_cheat_is_caught(cheat: type[FedAvg], law: Callable[[Algorithm], None]) -> None:
    with pytest.raises(AssertionError):
        law(cheat(lr=LR))


def test_a_state_on_the_side_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        test_resuming_equals_not_stopping(RemembersOnTheSide(lr=LR), tmp_path)
