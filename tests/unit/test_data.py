"""Federations: disjoint, deterministic, independent of process and of the order of drawing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpfed import InputError, federation_figure
from dpfed.columns import as_records
from dpfed.data import Federation, batch, by_user, dirichlet, from_clients, iid, key, quantity_skew, shards

X, Y = torch.arange(240.0).view(120, 2), torch.arange(120) % 6


def assert_partition(federation: Federation, num_records: int = 120) -> None:
    assert federation.shares.rows.sort().values.equal(torch.arange(num_records))


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


def test_shuffled_batches_use_every_record_once_in_a_pass() -> None:
    """Whatever steps a round has; in another order in every pass, for every client and for a further batch of a step."""
    size, steps, passes = 30, 7, 5

    def drawn(batch_size: int, num_steps: int, client: int = 0, draw: int = 0) -> list[torch.Tensor]:
        facts: Any = {"num_examples": size, "batch_size": batch_size, "sampling": "shuffled", "num_steps": num_steps}
        places = (divmod(step, num_steps) for step in range(passes * (size // batch_size)))
        return [batch(3, t, client, k, draw=draw, **facts) for t, k in places]

    def by_pass(batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.stack(batches).view(passes, -1))

    assert all(seen.sort().values.equal(torch.arange(size)) for seen in by_pass(drawn(5, steps)))
    left = [set(range(size)) - set(seen.tolist()) for seen in by_pass(drawn(4, steps))]
    assert {len(rest) for rest in left} == {2}
    assert len(set(map(frozenset, left))) > 1
    assert all(torch.stack(drawn(4, steps)).diff().gt(0).flatten().tolist()), "in rising order"
    assert all(torch.stack(drawn(5, steps)).equal(torch.stack(drawn(5, other))) for other in (1, 2, 35))
    kinds = [*by_pass(drawn(5, 7)), *by_pass(drawn(5, 7, client=1)), *by_pass(drawn(5, 7, draw=1))]
    assert len({tuple(seen.tolist()) for seen in kinds}) == 3 * passes
    assert [rows.tolist() for rows in drawn(size, 2)] == [list(range(size))] * passes


def test_shuffled_batches_are_even_over_places() -> None:
    """Which records come together, and which are left over, is random: each pair as often as any other."""
    facts: Any = {"num_examples": 7, "batch_size": 3, "sampling": "shuffled", "num_steps": 2}
    seen = torch.zeros(2, 7, 7, dtype=torch.long)
    for t in range(3000):
        for k in range(2):
            rows = batch(0, t, 0, k, **facts)
            seen[k, rows.unsqueeze(1), rows] += 1
    alone, pairs = seen.diagonal(dim1=1, dim2=2), seen[:, *torch.triu_indices(7, 7, 1)]
    for counts, chance in ((alone, 3 / 7), (pairs, 1 / 7)):
        assert (counts - 3000 * chance).abs().max() < 4.5 * (3000 * chance * (1 - chance)) ** 0.5


def test_without_a_seed_nothing_is_shuffled() -> None:
    facts: Any = {"num_examples": 30, "batch_size": 5, "sampling": "shuffled"}
    with pytest.raises(InputError, match=r"mechanism.sampling: 'shuffled' needs a seed.*Take 'fixed'"):
        batch(None, 0, 0, 0, **facts)


def test_cohorts_are_sorted_drawn_without_replacement_and_fair() -> None:
    federation = iid((X, Y), 12)
    cohorts = [federation.cohort(0, t, 4) for t in range(600)]
    assert all(sorted(set(cohort)) == cohort and len(cohort) == 4 for cohort in cohorts)
    times = np.bincount(np.concatenate(cohorts), minlength=12)
    assert abs(times - 200).max() < 5 * np.sqrt(600 * (1 / 3) * (2 / 3))


def labelled(num_records: int = 6000, num_labels: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_records, 1), torch.arange(num_records) % num_labels


@given(st.sampled_from([0.01, 0.1, 1.0, 1e9]), st.integers(1, 40), st.integers(0, 100), st.sampled_from([1, 2, 3]))
def test_natural_sizes_are_a_partition_with_a_smallest_client(alpha: float, num: int, seed: int, smallest: int) -> None:
    federation = dirichlet((X, Y), num, alpha=alpha, seed=seed, sizes="natural", smallest=smallest)
    assert_partition(federation)
    assert min(federation.sizes) >= smallest


def test_natural_sizes_are_uneven_and_even_out_with_alpha() -> None:
    spread = [np.std(dirichlet(labelled(), 30, alpha=alpha, sizes="natural").sizes) for alpha in (0.05, 0.5, 5.0, 1e9)]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 100
    assert spread[-1] < 25


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 4), st.sampled_from([("alpha", 0.3), ("power", 1.5)]))
def test_uneven_amounts_are_a_partition(num: int, seed: int, smallest: int, law: tuple[str, float]) -> None:
    federation = quantity_skew((X, Y), num, seed=seed, smallest=smallest, **{law[0]: law[1]})
    assert_partition(federation)
    assert min(federation.sizes) >= smallest
    if law[0] == "power":
        assert federation.sizes == sorted(federation.sizes, reverse=True)


def test_amounts_follow_their_law() -> None:
    sizes = quantity_skew(labelled(), 10, power=1.0).sizes
    wanted = (6000 - 10) / sum(1 / rank for rank in range(1, 11))
    assert all(abs(size - 1 - wanted / rank) <= 1 for rank, size in enumerate(sizes, 1))
    assert np.std(quantity_skew(labelled(), 10, alpha=0.3).sizes) > np.std(quantity_skew(labelled(), 10, alpha=30.0).sizes)


def test_every_client_gets_test_records_of_the_labels_it_holds() -> None:
    test = (torch.zeros(1200, 1), torch.arange(1200) % 6)
    federation = dirichlet(labelled(), 20, alpha=0.2, test=test).deal_test(3)
    assert federation.test_clients is not None
    assert torch.cat([*federation.test_clients]).sort().values.equal(torch.arange(1200)), "each to one client"
    held = federation.label_counts()
    assert held is not None
    dealt = torch.stack([torch.bincount(test[1][rows], minlength=6) for rows in federation.test_clients])
    assert (dealt - 1200 / 6000 * held).abs().max() <= 1
    again = dirichlet(labelled(), 20, alpha=0.2, test=test).deal_test(3).test_clients
    assert again is not None
    assert all(a.equal(b) for a, b in zip(federation.test_clients, again, strict=True))


def test_test_labels_that_nobody_holds_are_dealt_to_nobody() -> None:
    federation = iid((X, Y), 4, test=(X[:6], torch.tensor([0, 1, 2, 9, 9, 9]))).deal_test()
    assert federation.test_clients is not None
    assert torch.cat([*federation.test_clients]).sort().values.tolist() == [0, 1, 2]


def test_owners_bring_their_own_test() -> None:
    federation = by_user((X, Y), ["b", "a", "c"] * 40, test=(X[:4], Y[:4]), test_users=["c", "a", "z", "a"])
    assert federation.test_clients is not None
    assert [rows.tolist() for rows in federation.test_clients] == [[1, 3], [], [0]]
    federation = from_clients([(X[:5], Y[:5]), (X[5:9], Y[5:9])], client_tests=[(X[:2], Y[:2]), (X[:3], Y[:3])])
    assert federation.test_clients is not None
    assert federation.test is not None
    assert [rows.tolist() for rows in federation.test_clients] == [[0, 1], [2, 3, 4]]
    assert federation.test["x"].equal(torch.cat([X[:2], X[:3]]))
    assert federation.to("cpu").test_clients is federation.test_clients


EVERY_KIND = """
import hashlib, torch
from dpfed import dirichlet, iid, quantity_skew, shards
x, y = torch.zeros(500, 1), torch.arange(500) % 7
test = (x[:70], y[:70])
made = [iid((x, y), 9, test=test), shards((x, y), 9, test=test), dirichlet((x, y), 9, alpha=0.3, test=test),
        dirichlet((x, y), 9, alpha=0.3, sizes="natural", smallest=3, test=test), quantity_skew((x, y), 9, alpha=0.5, test=test)]
rows = [row.tolist() for f in made for row in (*f.clients, *f.deal_test().test_clients)]
digest = hashlib.sha256(repr(rows).encode()).hexdigest()
"""


def test_federations_do_not_depend_on_the_process() -> None:
    here: dict[str, Any] = {}
    torch.manual_seed(1)
    np.random.seed(1)
    exec(EVERY_KIND, here)
    environment = os.environ | {"PYTHONHASHSEED": "4321"}
    there = subprocess.run(
        [sys.executable, "-c", EVERY_KIND + "print(digest)"], capture_output=True, text=True, check=True, env=environment
    )
    assert there.stdout.strip() == here["digest"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dirichlet((X, Y), 4, alpha=1.0, sizes="naturel"), ["sizes", "naturel"]),
        (lambda: dirichlet((X, Y), 4, alpha=1.0, sizes="natural", smallest=31), ["smallest", "124"]),
        (lambda: dirichlet((X, X), 4, alpha=1.0), ["one label per record"]),
        (lambda: quantity_skew((X, Y), 4), ["alpha", "power"]),
        (lambda: quantity_skew((X, Y), 4, alpha=1.0, power=1.0), ["one of the two"]),
        (lambda: quantity_skew((X, Y), 4, power=-1.0), ["-1.0"]),
        (lambda: iid((X, Y), 4).deal_test(), ["test"]),
        (lambda: iid((X, X), 4, test=(X, X)).deal_test(), ["label"]),
        (lambda: by_user((X, Y), [1] * 120, test_users=[1]), ["test_users"]),
        (lambda: from_clients([(X, Y)], client_tests=[]), ["client_tests"]),
        (lambda: from_clients([(X, Y)], (X, Y), client_tests=[(X, Y)]), ["no test beside"]),
        (lambda: replace(iid((X, Y), 2, test=(X, Y)), test_clients=(torch.tensor([0]),)), ["test_clients", "2 clients"]),
        (lambda: replace(iid((X, Y), 1, test=(X, Y)), test_clients=(torch.tensor([120]),)), ["120 test records"]),
        (lambda: replace(iid((X, Y), 1), test_clients=(torch.tensor([0]),)), ["test_clients"]),
    ],
)
def test_what_cannot_be_dealt_is_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as refusal:
        make()
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_the_table_says_who_holds_what() -> None:
    federation = Federation({"x": X, "y": Y + 3}, (torch.tensor([0, 6, 12, 1]), torch.arange(20, 50)), {"x": X, "y": Y + 3})
    lines = federation.table().splitlines()
    assert lines[2].split() == ["0", "4", "-", "2", "3:", "75%", "4:", "25%"]
    assert lines[-1] == "2 clients, 34 records: 4 to 30 each, median 17; 6 labels; 120 test records"
    assert "and 35 more" in iid((X, Y), 40).table(at_most=5)
    assert "100 %" not in iid((X, X), 3).table(), "targets that are no labels have none to show"
    assert iid((X, X), 3).table().splitlines()[-1] == "3 clients, 120 records: 40 to 40 each, median 40"


def test_the_picture_is_drawn_and_is_the_same_each_time(tmp_path: Path) -> None:
    federation = dirichlet(labelled(), 50, alpha=0.1)
    for ending in ("png", "svg"):
        first = federation_figure(federation, tmp_path / f"a.{ending}").read_bytes()
        assert first == federation_figure(federation, tmp_path / f"b.{ending}").read_bytes()
        assert len(first) > 5000
    assert federation_figure(iid((X, Y), 1), tmp_path / "one.png").stat().st_size > 1000
    assert federation_figure(iid((X, X), 3), tmp_path / "no_labels.png").stat().st_size > 1000
    for name, made in (("a.gif", federation), ("no/a.png", federation)):
        with pytest.raises(InputError):
            federation_figure(made, tmp_path / name)
    with pytest.raises(InputError, match="too many"):
        federation_figure(iid(labelled(60_000, 20_000), 4), tmp_path / "d.png")
