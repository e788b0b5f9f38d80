"""Federations: disjoint, deterministic, independent of process and of the order of drawing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpfed.data import Federation, as_records, batch, by_user, dirichlet, from_clients, iid, key, shards

X, Y = torch.arange(240.0).view(120, 2), torch.arange(120) % 6


def assert_partition(federation: Federation, num_records: int = 120) -> None:
    assert torch.cat(federation.clients).sort().values.equal(torch.arange(num_records))


@given(st.sampled_from([0.01, 0.1, 1.0, 100.0, 1e9]), st.integers(1, 40), st.integers(0, 1000))
def test_dirichlet_gives_every_record_to_one_client_at_every_alpha(alpha: float, num_clients: int, seed: int) -> None:
    federation = dirichlet((X, Y), num_clients, alpha=alpha, seed=seed)
    assert_partition(federation)
    assert max(federation.sizes) - min(federation.sizes) <= 1


def test_alpha_decides_how_unlike_clients_are() -> None:
    def unlike(alpha: float) -> float:
        federation = dirichlet((torch.zeros(6000, 1), torch.arange(6000) % 6), 30, alpha=alpha)
        labels = [np.bincount(federation.records["y"][rows], minlength=6) / len(rows) for rows in federation.clients]
        return float(np.std(labels, axis=0).mean())

    spread = [unlike(alpha) for alpha in (0.01, 0.1, 1.0, 10.0, 1e9)]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 0.25
    assert spread[-1] < 0.05


@pytest.mark.parametrize("make", [iid, shards, lambda source, n: dirichlet(source, n, alpha=0.5)])
def test_partitions_are_disjoint_and_complete(make: Any) -> None:
    assert_partition(make((X, Y), 7))


def test_by_user_keeps_an_owners_records_together() -> None:
    users = ["ada", "bob", "ada", "cyn"] * 30
    federation = by_user((X, Y), users)
    assert_partition(federation)
    assert [{users[row] for row in rows.tolist()} for rows in federation.clients] == [{"ada"}, {"bob"}, {"cyn"}]


def test_from_clients_pools_what_each_has() -> None:
    federation = from_clients([(X[:50], Y[:50]), {"x": X[50:60], "y": Y[50:60]}], test=(X[:3], Y[:3]))
    assert federation.sizes == [50, 10]
    assert federation.records["x"][federation.clients[1]].equal(X[50:60])
    twice = from_clients([(X[:5], Y[:5]), (X[:5], Y[:5])], equal_records=True)
    assert twice.sizes == [5, 5]


def test_a_data_set_of_pairs_becomes_columns() -> None:
    pairs = [(X[i], int(Y[i])) for i in range(10)]
    records = as_records("records", pairs)
    assert records["x"].equal(X[:10])
    assert records["y"].equal(Y[:10])


def test_draws_depend_on_their_key_alone() -> None:
    """Not on the process, and not on what was drawn before."""
    facts: Any = {"num_examples": 100, "batch_size": 10, "sampling": "poisson"}
    here = batch(5, 2, 3, 1, **facts).tolist()
    torch.manual_seed(0)
    batch(5, 9, 9, 9, **facts)
    assert batch(5, 2, 3, 1, **facts).tolist() == here
    program = f"from dpfed.data import batch; print(batch(5, 2, 3, 1, **{facts!r}).tolist())"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert eval(there) == here
    assert len({key(0, "batch", t, i, k) for t in range(9) for i in range(9) for k in range(9)}) == 729


def test_fixed_batches_have_their_size_and_no_record_twice() -> None:
    for k in range(20):
        rows = batch(0, 0, 0, k, num_examples=30, batch_size=12, sampling="fixed")
        assert len(rows.unique()) == 12
    assert len(batch(0, 0, 0, 0, num_examples=5, batch_size=12, sampling="fixed")) == 5
    assert len(batch(0, 0, 0, 0, num_examples=5, batch_size=12, sampling="poisson")) == 5


def test_cohorts_are_sorted_drawn_without_replacement_and_fair() -> None:
    federation = iid((X, Y), 12)
    cohorts = [federation.cohort(0, t, 4) for t in range(600)]
    assert all(sorted(set(cohort)) == cohort and len(cohort) == 4 for cohort in cohorts)
    times = np.bincount(np.concatenate(cohorts), minlength=12)
    assert abs(times - 200).max() < 5 * np.sqrt(600 * (1 / 3) * (2 / 3))
