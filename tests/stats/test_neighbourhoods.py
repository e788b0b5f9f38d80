"""A node touches no more records than its footprint says, and moves the clipped sum by no more, whatever the graph."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpfed.data import Footprint
from dpfed.flat import FlatModel, Records
from dpfed.privacy import Sums
from dpfed.tasks.citation import Citation, GraphConvolution
from dpfed.tasks.graphs import Graph, read_graph
from dpfed.tasks.neighbourhoods import Pairs, bound_readers, draw_lists, footprint, linked, rooted

SHARED = Path(os.environ.get("DPFED_SHARED", Path(__file__).parents[3] / "shared")) / "data"


def hub(n: int) -> list[tuple[int, int]]:
    return [(0, i) for i in range(1, n)]


def stars_of_stars(n: int) -> list[tuple[int, int]]:
    return hub(n) + [(i, (i * 7) % n) for i in range(1, n)]


def everybody_knows_some(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(4) if i != j]


def random_graph(n: int, seed: int) -> list[tuple[int, int]]:
    """Heavy tails: who has links gets more."""
    random = np.random.default_rng(seed)
    popularity = random.pareto(0.8, n) + 0.05
    ends = random.choice(n, (4 * n, 2), p=popularity / popularity.sum())
    return [(int(a), int(b)) for a, b in ends if a != b]


GRAPHS = [hub(40), stars_of_stars(40), everybody_knows_some(30), *(random_graph(40, seed) for seed in range(6))]
each_graph = pytest.mark.parametrize("links", GRAPHS, ids=range(len(GRAPHS)))


def lists_of(links: list[tuple[int, int]], degree: int, seed: int = 0) -> Pairs:
    return draw_lists(linked(torch.tensor(links).T), degree, seed)


def struck(lists: Pairs, node: int) -> Pairs:
    return lists[(lists != node).all(1)]


def neighbours(read: Pairs, n: int) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(n)]
    for root, other in read.tolist():
        found[root].add(other)
    return found


@each_graph
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_lists_and_readers_are_bounded(links: list[tuple[int, int]], degree: int) -> None:
    lists = lists_of(links, degree)
    read = bound_readers(lists, degree, 0)
    assert np.bincount(lists[:, 0]).max() <= degree
    assert np.bincount(read[:, 1]).max() <= degree
    everything, said = ({tuple(pair) for pair in pairs.tolist()} for pairs in (lists, read))
    assert said <= everything <= {(a, b) for a, b in links} | {(b, a) for a, b in links}
    full = np.bincount(lists[:, 1], minlength=40).clip(max=degree)
    assert np.bincount(read[:, 1], minlength=40).tolist() == full.tolist(), "nobody is refused who could be served"


@each_graph
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_striking_a_node_out_changes_no_more_records_than_the_footprint_says(links: list[tuple[int, int]], degree: int) -> None:
    n, lists = 40, lists_of(links, degree)
    before = neighbours(bound_readers(lists, degree, 0), n)
    for node in range(n):
        after = neighbours(bound_readers(struck(lists, node), degree, 0), n)
        changed = [root for root in range(n) if root != node and before[root] != after[root]]
        assert len(changed) <= footprint(degree).readers
        assert sum(node in before[root] for root in changed) <= degree


def test_the_footprint_is_not_larger_than_it_has_to_be() -> None:
    """With lists of one: whom u named is now read by another, and who read u reads nobody. Both at once do happen."""
    most = 0
    for seed in range(40):
        lists = lists_of(random_graph(40, seed), 1, seed)
        before = neighbours(bound_readers(lists, 1, seed), 40)
        for node in range(40):
            after = neighbours(bound_readers(struck(lists, node), 1, seed), 40)
            most = max(most, sum(before[root] != after[root] for root in range(40) if root != node))
    assert most == footprint(1).readers == 2


def test_bounds_with_all_links_at_stake_would_not_hold() -> None:
    """Why lists are what is protected: where the links behind them are struck out, too, others move up, and no bound holds."""
    links, changed = everybody_knows_some(30), 0
    before = neighbours(bound_readers(lists_of(links, 2), 2, 0), 30)
    for node in range(30):
        rest = [link for link in links if node not in link]
        after = neighbours(bound_readers(lists_of(rest, 2), 2, 0), 30)
        changed = max(changed, sum(before[root] != after[root] for root in range(30) if root != node))
    assert changed > footprint(2).readers


@pytest.mark.skipif(not (SHARED / "planetoid" / "pubmed.npz").is_file(), reason="the real graph is not here")
def test_on_pubmed_hubs_stay_within_the_footprint_in_the_lists_but_not_in_the_links() -> None:
    """The numbers of docs/graphs.md, of the 20 training papers with most links."""
    graph = read_graph("pubmed", SHARED)
    links = linked(graph.edges)
    links = links[~np.isin(links, torch.cat([graph.val, graph.test]).numpy()).any(1)]
    n, lists = len(graph.x), draw_lists(links, 2, 0)
    before, in_lists, in_links = neighbours(bound_readers(lists, 2, 0), n), 0, 0
    for node in np.argsort(-np.bincount(links[:, 0]), kind="stable")[:20]:
        changed = [
            sum(a != b for root, (a, b) in enumerate(zip(before, after, strict=True)) if root != node)
            for rest in (struck(lists, node), draw_lists(struck(links, node), 2, 0))
            for after in [neighbours(bound_readers(rest, 2, 0), n)]
        ]
        in_lists, in_links = max(in_lists, changed[0]), max(in_links, changed[1])
    assert in_lists == footprint(2).readers == 4
    assert in_links == 34


def records_of(x: Tensor, y: Tensor, lists: Pairs, roots: list[int], degree: int) -> Records:
    return rooted(x, y, torch.tensor(roots), bound_readers(lists, degree, 0), degree)


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from(range(len(GRAPHS))), st.integers(1, 2), st.sampled_from([1e-3, 1.0, 1e3]))
def test_striking_a_node_out_moves_the_clipped_sum_by_at_most_its_largest_move(
    seed: int, which: int, degree: int, scale: float
) -> None:
    """Real gradients of the real model, for every node of a graph: the hub, its neighbours, and the quiet ones."""
    n, clip, random = 40, 0.7, torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, 3, generator=random, dtype=torch.float64)
    y = torch.randint(0, 2, (n,), generator=random)
    model = FlatModel(GraphConvolution(3, 2, hidden=4).double())
    theta = torch.randn(1, model.num_parameters, generator=random, dtype=torch.float64)
    lists = lists_of(GRAPHS[which], degree, seed)

    def total(lists: Pairs, roots: list[int]) -> Tensor:
        columns = {name: column.unsqueeze(0) for name, column in records_of(x, y, lists, roots, degree).items()}
        return Sums(model).clipped([(1.0, theta)], columns, torch.ones(1, len(roots), dtype=torch.bool), clip)[0]

    whole = total(lists, list(range(n)))
    for node in (0, 1, 7, n - 1):
        rest = total(struck(lists, node), [root for root in range(n) if root != node])
        assert float((whole - rest).norm()) <= clip * (1 + 2 * footprint(degree).readers) * (1 + 1e-9)


def test_a_node_can_move_the_sum_by_more_than_one_record_may() -> None:
    """So a bound of C, or of C for each of its readers, would be wrong: gradients that a hub turns round."""
    degree, n, clip = 2, 30, 1.0
    lists = np.array([[root, 0] for root in range(1, n)])
    x = torch.full((n, 1), -0.2, dtype=torch.float64)
    x[0] = 50.0

    class Sign(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor, neighbours: Tensor, there: Tensor) -> Tensor:
            return 100 * self.weight * (x + (neighbours * there.unsqueeze(-1)).sum(1))

    model = FlatModel(Sign(), lambda output, target: output.mean())
    sums = []
    for roots, pairs in ((list(range(n)), lists), (list(range(1, n)), struck(lists, 0))):
        columns = records_of(x, torch.zeros(n, dtype=torch.long), pairs, roots, degree)
        columns = {name: column.unsqueeze(0) for name, column in columns.items()}
        theta, ones = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, len(roots), dtype=torch.bool)
        sums.append(Sums(model).clipped([(1.0, theta)], columns, ones, clip)[0])
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(1 + 2 * degree)


# Clients


def small_graph(seed: int = 0, n: int = 200) -> Graph:
    random = torch.Generator().manual_seed(seed)
    links, order = torch.tensor(random_graph(n, seed)).T, torch.randperm(n, generator=random)
    x = torch.randn(n, 5, generator=random)
    return Graph(x, torch.randint(0, 3, (n,), generator=random), links, order[:20], order[20:60], order[60:100])


@pytest.mark.parametrize("alpha", [math.inf, 0.5])
def test_no_record_reads_a_node_of_another_client_nor_one_that_is_judged_on(alpha: float) -> None:
    graph = small_graph()
    _, federation = Citation("cora", num_clients=4, alpha=alpha, degree=3).records(graph, seed=1)
    records, owners = federation.records, {}
    for i, rows in enumerate(federation.clients):
        owners |= {tuple(x): i for x in records["x"][rows].tolist()}
    for i, rows in enumerate(federation.clients):
        seen = records["neighbours"][rows][records["there"][rows]]
        assert len(seen)
        assert {owners[tuple(x)] for x in seen.tolist()} == {i}
    judged = {tuple(x) for x in graph.x[torch.cat([graph.test, graph.val])].tolist()}
    assert not judged & set(owners)
    assert federation.footprint == Footprint(owned=1, readers=6)
    assert not bool(records["neighbours"][~records["there"]].any())


def test_without_neighbours_a_node_is_a_record() -> None:
    _, federation = Citation("cora", degree=0).records(small_graph(), seed=1)
    assert federation.footprint == Footprint()
    assert set(federation.records) == {"x", "y"}
    assert len(federation.records["y"]) == 120
    _, public = Citation("cora", train_on="public", judge="val").records(small_graph(), seed=1)
    assert len(public.records["y"]) == 20
    assert public.test is not None
    assert len(public.test["y"]) == 40
