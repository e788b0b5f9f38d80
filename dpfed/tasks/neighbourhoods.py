"""A graph as independent records, so that one node touches a bounded number of them.

A record is a node and up to ``degree`` others that it is linked with. Two bounds, drawn by key:

1. ``draw_lists``: every node names at most ``degree`` of those it is linked with. These lists are the data that is protected.
2. ``bound_readers``: of those who name a node, at most ``degree`` may read it; for the others its place stays empty.

Formal guarantee (the footprint). Strike a node u out: its features, its label, its own list, and its place in the lists of
others, into which nobody moves up. Then u's own record goes; of the other records at most ``degree`` had read u and lose it;
and for every node w that u names, u's leave to read w may fall to one further record: at most ``degree`` more. Nothing else
depends on u, for keys belong to pairs of nodes, and ``bound_readers`` looks at nothing but who names whom. So the footprint is
1 record owned and 2 degree readers. A node that is not trained on names nobody, and touches fewer.

Departs from Daigavane et al. 2021 (arXiv 2111.15521): there a node's links are drawn at a rate that depends on how many it has,
and all are dropped when they are too many, so a hub's removal changes the links of each of its neighbours, which the bound on
the occurrences (K + 1 for one layer) does not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.data import Footprint, key
from dpfed.flat import Records

Pairs = Any
"""int64 [m, 2]: who names whom; each pair once."""


def footprint(degree: int) -> Footprint:
    """Of a node with its links."""
    return Footprint(owned=1, readers=2 * degree)


def linked(edges: Tensor) -> Pairs:
    """Both directions of every link, each once, without those of a node with itself."""
    pairs = edges.numpy().T
    both = np.concatenate([pairs, pairs[:, ::-1]])
    return np.unique(both[both[:, 0] != both[:, 1]], axis=0)


def draw_lists(pairs: Pairs, degree: int, seed: int) -> Pairs:
    """Every node names at most ``degree`` of its pairs: those with the lowest keys."""
    return _lowest(pairs, 0, degree, key(seed, "lists"))


def bound_readers(pairs: Pairs, degree: int, seed: int) -> Pairs:
    """Every node is read by at most ``degree`` of those who name it: those with the lowest keys."""
    return _lowest(pairs, 1, degree, key(seed, "readers"))


def _lowest(pairs: Pairs, side: int, most: int, secret: int) -> Pairs:
    """Of the pairs that share a node on one side, the ``most`` with the lowest keys. A pair's key depends on nothing else."""
    order = np.lexsort((pairs[:, 1 - side], _pair_keys(pairs, secret), pairs[:, side]))
    groups = pairs[order, side]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    place = np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))
    return pairs[np.sort(order[place < most])]


def _pair_keys(pairs: Pairs, secret: int) -> Any:
    """64 bits a pair (the finaliser of SplitMix64, once for each number)."""
    state = np.full(len(pairs), secret, dtype=np.uint64)
    for column in pairs.T.astype(np.uint64):
        state = (state ^ column) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def rooted(x: Tensor, y: Tensor, roots: Tensor, pairs: Pairs, width: int) -> Records:
    """One record a root: its features and label, its neighbours' features padded to ``width``, and which of them are there."""
    row_of = np.full(len(x), -1)
    row_of[roots.numpy()] = np.arange(len(roots))
    mine = pairs[row_of[pairs[:, 0]] >= 0]
    mine = mine[np.argsort(mine[:, 0], kind="stable")]
    starts = np.flatnonzero(np.diff(mine[:, 0], prepend=-1))
    place = np.arange(len(mine)) - np.repeat(starts, np.diff(starts, append=len(mine)))
    rows, columns = torch.from_numpy(row_of[mine[:, 0]]), torch.from_numpy(place)
    neighbours = x.new_zeros(len(roots), width, x.shape[1])
    there = torch.zeros(len(roots), width, dtype=torch.bool)
    neighbours[rows, columns] = x[torch.from_numpy(mine[:, 1].copy())]
    there[rows, columns] = True
    return {"x": x[roots], "neighbours": neighbours, "there": there, "y": y[roots]}
