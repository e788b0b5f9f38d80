"""Clients of a deployment: every one a stranger with its own records, its own store, and noise that is drawn once.

They stand in the place of the engine of `tests/e2e/test_loopback.py`: the server sees bytes, and the round loop is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from dpfed import algorithms, data
from dpfed.algorithm import Round, Tree, leaves, like, weighted_sum
from dpfed.algorithms import FedAdamW, FedAvg, FedSAM, Scaffold
from dpfed.client import answer
from dpfed.data import Federation
from dpfed.engines.simulation import Job, client_weights, train_clients
from dpfed.errors import InputError
from dpfed.flat import FlatModel
from dpfed.forecast import dry_round, planned_events
from dpfed.ledger import Event, Receipt, rounds_within
from dpfed.mechanism import AsReleased, Gaussian, Plain
from dpfed.store import AlreadyChargedError, Store
from tests.e2e.test_loopback import ONE_STEP, to_bytes
from tests.paper.world import COHORT, NUM_ROUNDS, PRIVATE, SEED, job, trained


def own_job(work: Job, i: int) -> Job:
    """What client ``i`` knows: its own records, and no seed."""
    rows = work.federation.clients[i]
    records = {name: column[rows] for name, column in work.federation.records.items()}
    return work._replace(federation=Federation(records, (torch.arange(len(rows)),)), seed=None)


class Deployment:
    """Strangers: each has a job, a store and a memory of its own, hears the state in bytes, and answers in bytes."""

    def __init__(self, work: Job, folder: Path) -> None:
        self.job, numbers = work, range(len(work.federation.clients))
        self.jobs = [own_job(work, i) for i in numbers]
        self.stores = [Store.create(folder / f"{i}.db", 1e4, 1e-5) for i in numbers]
        self.memory = dict[int, Tree]()

    def train(self, t: Round, s: Tree, cohort: list[int]) -> tuple[Tree, list[Receipt]]:
        message, uploads = to_bytes(s), list[Tree]()
        for i in cohort:
            heard = like(s, load(message))
            upload, self.memory[i] = answer(self.jobs[i], self.stores[i], "run", t, heard, self.memory.get(i))
            uploads.append(like(upload, load(to_bytes(upload))))
        mean = weighted_sum(zip(client_weights(self.job, cohort), uploads, strict=True))
        return mean, [Receipt(i, t.index, self.stores[i].charges()[-1].events) for i in cohort]


@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_runs_and_every_release_was_charged(name: str, tmp_path: Path) -> None:
    work = job(getattr(algorithms, name)())
    num_steps = 1 if name in ONE_STEP else 4
    running = Deployment(work, tmp_path)
    states = trained(work, num_steps, engine=lambda _: running)
    assert all(bool(vector.isfinite().all()) for _, vector in leaves(states[-1]))
    dry, cohorts = dry_round(work.algorithm, num_steps), [work.federation.cohort(SEED, t, COHORT) for t in range(NUM_ROUNDS)]
    for i, (store, size) in enumerate(zip(running.stores, work.federation.sizes, strict=True)):
        rounds = [t for t, cohort in enumerate(cohorts) if i in cohort]
        assert [(charge.run, charge.t) for charge in store.charges()] == [("run", t) for t in rounds]
        assert all(charge.events == planned_events(work.mechanism, size, dry) for charge in store.charges())


# Nothing is keyed.


def of_output(output: Tensor, target: Tensor) -> Tensor:
    """A loss without a gradient: all that is released is noise."""
    return output.sum() * 0


def silent(num_records: int = 40, **changes: Any) -> Job:
    model = FlatModel(nn.Linear(100, 100, bias=False), criterion=of_output)
    records = {"x": torch.zeros(num_records, 100), "y": torch.zeros(num_records, dtype=torch.long)}
    setting: dict[str, Any] = {"algorithm": FedAvg(lr=1.0, weight_decay=0.0), "seed": None}
    setting |= {"mechanism": Gaussian(sigma=2.0, clip=0.5, batch_size=10)}
    return Job(model, Federation(records, (torch.arange(num_records),)), **setting)._replace(**changes)


def one_round(work: Job, t: int = 0, **changes: Any) -> tuple[Round, Tree]:
    return Round(t, 1.0, 1, work.model.layout, **changes), work.algorithm.server_init(work.model.theta0(), work.model.layout)


def released(work: Job, store: Store, t: int = 0, **changes: Any) -> Tensor:
    return answer(work, store, "run", *one_round(work, t, **changes))[0].delta


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "client.db", 100.0, 1e-5)


def has_scale(noise: Tensor, std: float) -> bool:
    return abs(float((noise / std).square().mean()) - 1) < 6 * (2 / noise.numel()) ** 0.5


def test_the_noise_is_that_which_was_charged(store: Store) -> None:
    noise = torch.stack([released(silent(), store, t) for t in range(5)])
    assert has_scale(noise, 2.0 * 0.5 / 10)
    for wrong in (0.9, 1.1):
        assert not has_scale(noise * wrong, 2.0 * 0.5 / 10)
    assert float(torch.corrcoef(noise).fill_diagonal_(0).abs().max()) < 6.5 / 100


def test_no_key_draws_the_noise_again(store: Store) -> None:
    """Whatever seeds are set, nothing that comes from one is in the release; and no generator moves."""
    work = silent()
    torch.manual_seed(0)
    np.random.seed(0)
    before, other = torch.get_rng_state(), np.random.random()
    np.random.seed(0)
    first = released(work, store)
    assert before.equal(torch.get_rng_state())
    assert other == np.random.random()
    torch.manual_seed(0)
    again = released(work, store, 1)
    assert int((first == again).sum()) < 10, "of 10,000 numbers with 24 digits"
    drawn = [again, torch.randn(len(first), generator=torch.Generator().manual_seed(0))]
    for seed in range(10):
        keyed = silent(seed=seed)
        [upload], _, _ = train_clients(keyed, *one_round(keyed), [0], {})
        [twice], _, _ = train_clients(keyed, *one_round(keyed), [0], {})
        assert upload.delta.equal(twice.delta), "this is what keyed noise looks like"
        drawn.append(upload.delta)
    assert float(torch.corrcoef(torch.stack([first, *drawn]))[0, 1:].abs().max()) < 6.5 / 100


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_batches_are_as_secret_as_noise(sampling: data.Sampling) -> None:
    def draws(seed: int | None) -> list[list[int]]:
        return [data.batch(seed, 0, 0, 0, num_examples=50, batch_size=20, sampling=sampling).tolist() for _ in range(400)]

    assert len({tuple(draw) for draw in draws(7)}) == 1
    secret = draws(None)
    assert len({tuple(draw) for draw in secret}) == 400
    assert all(draw == sorted(set(draw)) for draw in secret)
    counts = np.bincount(list(chain.from_iterable(secret)), minlength=50)
    assert np.abs(counts - 160).max() < 6 * (400 * 0.24) ** 0.5
    sizes = np.array([len(draw) for draw in secret])
    assert set(sizes.tolist()) == {20} if sampling == "fixed" else abs(sizes.var() - 12) < 6 * 12 * (2 / 400) ** 0.5
    with pytest.raises(InputError, match="deployment has none"):
        data.generator(None, "noise")


def test_nothing_is_kept_that_could_show_the_noise(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """No file but the store, and in it no number of the release; not a word in a log; the job is as it was."""
    work = silent()
    before = repr(work), set(vars(work.model))
    numbers = released(work, store).numpy()[:200]
    assert set(os.listdir(tmp_path)) == {"client.db"}
    content = store.path.read_bytes()
    assert not [value for value in numbers if value.tobytes() in content or repr(float(value)).encode() in content]
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")
    assert (repr(work), set(vars(work.model))) == before
    for other in (Scaffold(), FedAdamW(), FedSAM()):
        own = own_job(job(other), 2)
        t, s = one_round(own)
        upload, memory = answer(own, store, type(other).__name__, t, s)
        assert {name for name, _ in leaves(memory)} == {name for name, _ in leaves(dry_round(other, 1).memory)}
        assert all(vector.grad_fn is None for _, vector in leaves(upload))


# The charge comes first.


@dataclass(frozen=True)
class Breaking(FedAvg):
    """Breaks where it sees real parameters, after everything was planned on tiny ones."""

    def client_init(self, s: Any, memory: Any, t: Round) -> Any:
        if len(s.theta) > 8:
            raise RuntimeError("power cut")
        return super().client_init(s, memory, t)


@dataclass(frozen=True)
class Greedy(FedAvg):
    """Takes a second gradient where nobody counts on it."""

    def local_step(self, x: Any, s: Any, grad: Any, t: Round, k: int) -> Any:
        if s.theta.shape[-1] > 8:
            grad(x.theta)
        return super().local_step(x, s, grad, t, k)


def test_what_breaks_is_charged_and_never_done_again(store: Store) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        released(silent(algorithm=Breaking()), store)
    assert [charge.t for charge in store.charges()] == [0]
    with pytest.raises(AlreadyChargedError):
        released(silent(), store)
    assert released(silent(), store, 1).shape == (10_000,)


def test_what_was_not_paid_for_is_not_released(store: Store) -> None:
    with pytest.raises(RuntimeError, match="nothing of it is released"):
        released(silent(algorithm=Greedy()), store)
    assert len(store.charges()) == 1


def test_past_the_budget_nothing_is_even_computed(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "small.db", 3.0, 1e-5)
    event = Event("poisson", 10, 40, 2.0)
    store.charge("earlier", 0, {event: rounds_within(3.0, 1e-5, [{event: 1}]) - 2})
    for t in range(2):
        released(silent(), store, t)
    for work in (silent(), silent(algorithm=Breaking())):
        with pytest.raises(InputError, match="the budget is 3"):
            released(work, store, 2)
    assert len(store.charges()) == 3


# What is refused


def unsound() -> Iterator[tuple[Job, str]]:
    yield silent(seed=0), "whoever knows it can draw the noise"
    yield silent(federation=job(FedAvg()).federation), "holds 5 clients"
    yield silent(factors=(0.5,)), "its own"
    yield silent(mechanism=Gaussian(sigma=1.0, unit="client")), "no client can vouch"
    yield silent(mechanism=AsReleased()), "no client can vouch"
    yield silent(mechanism=Gaussian(sigma=1.0, noise="distributed")), "secure aggregation"
    yield silent(mechanism=Plain()), "would bring epsilon to inf"
    yield silent(mechanism=Gaussian(sigma=0.0)), "would bring epsilon to inf"
    yield silent(mechanism=Gaussian(epsilon=3.0)), "not calibrated"


@pytest.mark.parametrize(("work", "said"), list(unsound()))
def test_what_no_client_can_vouch_for_is_refused_before_it_costs(work: Job, said: str, store: Store) -> None:
    with pytest.raises(InputError, match=said):
        released(work, store)
    assert store.charges() == []


@pytest.mark.parametrize("clip", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_threshold_that_protects_nobody_is_refused(clip: float, store: Store) -> None:
    """Whatever the server says: with adaptive clipping it announces the norm to clip to."""
    for clipping in ("flat", "adaptive"):
        mechanism: Any = replace(PRIVATE, clipping=clipping)
        with pytest.raises(InputError, match="clip"):
            released(silent(mechanism=mechanism), store, clip=clip)
    assert store.charges() == []
