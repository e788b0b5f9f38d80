"""How records are dealt to clients: arithmetic on labels and sizes, with a random generator that is handed in.

Every function gives, for every client, the rows that become its own; each row goes to one client only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Rows = list[np.ndarray]


def pools_of(labels: np.ndarray, random: np.random.Generator) -> Rows:
    """The rows of every label, shuffled."""
    classes, label_of = np.unique(labels, return_inverse=True)
    return [random.permutation(np.flatnonzero(label_of == c)) for c in range(len(classes))]


def equal_dirichlet(labels: np.ndarray, num_clients: int, alpha: float, random: np.random.Generator) -> Rows:
    """Clients of equal size, each with label proportions of its own draw from Dirichlet(alpha).

    When a label has run out, a client takes its other labels instead, in the proportions it wanted.
    """
    pools = pools_of(labels, random)
    left = np.array([len(pool) for pool in pools])
    rows: Rows = []
    for size in (len(part) for part in np.array_split(np.arange(len(labels)), num_clients)):
        wanted = random.dirichlet(np.full(len(pools), alpha)) if alpha < 1e6 else np.full(len(pools), 1.0)
        take = np.zeros(len(pools), dtype=int)
        while (missing := size - take.sum()) > 0:
            room = left - take
            weights = np.where(room > 0, wanted, 0.0)
            weights = weights if weights.sum() > 1e-12 else room.astype(float)
            take += np.minimum(random.multinomial(missing, weights / weights.sum()), room)
        rows.append(np.sort(np.concatenate([pool[n - k : n] for pool, n, k in zip(pools, left, take, strict=True)])))
        left = left - take
    return rows


def natural_dirichlet(labels: np.ndarray, num_clients: int, alpha: float, smallest: int, random: np.random.Generator) -> Rows:
    """Every label is split between the clients by its own draw from Dirichlet(alpha), so sizes differ, too.

    A client below the smallest size is given records of the label of which the largest client has most.
    """
    pools = pools_of(labels, random)
    share = np.full(num_clients, 1 / num_clients)
    shares = [random.dirichlet(np.full(num_clients, alpha)) if alpha < 1e6 else share for _ in pools]
    counts = np.stack([random.multinomial(len(pool), p) for pool, p in zip(pools, shares, strict=True)], axis=1)
    while (sizes := counts.sum(1)).min() < smallest:
        poor, rich = sizes.argmin(), sizes.argmax()
        label = counts[rich].argmax()
        moved = min(smallest - sizes[poor], counts[rich, label], max((sizes[rich] - sizes[poor]) // 2, 1))
        counts[rich, label] -= moved
        counts[poor, label] += moved
    ends = counts.cumsum(0)
    return [
        np.sort(np.concatenate([pool[end - k : end] for pool, end, k in zip(pools, ends[i], counts[i], strict=True)]))
        for i in range(num_clients)
    ]


def sizes_like(weights: np.ndarray, num_records: int, smallest: int) -> np.ndarray:
    """Whole numbers that sum to num_records: the smallest size for everyone, and the rest in proportion to the weights.

    >>> sizes_like(np.array([4.0, 2.0, 1.0]), 73, smallest=1).tolist()
    [41, 21, 11]
    """
    exact = smallest + weights / weights.sum() * (num_records - smallest * len(weights))
    sizes = np.floor(exact + 1e-9).astype(int)
    sizes[np.argsort(sizes - exact, kind="stable")[: num_records - sizes.sum()]] += 1
    return sizes


def matching_labels(
    labels: np.ndarray, clients: Sequence[np.ndarray], test_labels: np.ndarray, random: np.random.Generator
) -> Rows:
    """Test rows for every client: each label in the proportions in which the clients hold it, to within one record."""
    owner = np.empty_like(test_labels)
    for label in np.unique(test_labels):
        found = random.permutation(np.flatnonzero(test_labels == label))
        held = np.cumsum([np.count_nonzero(own == label) for own in (labels[rows] for rows in clients)])
        places = (np.arange(len(found)) + random.random()) / len(found) * held[-1]
        owner[found] = np.searchsorted(held, places, side="right") if held[-1] else -1
    return [np.flatnonzero(owner == i) for i in range(len(clients))]
