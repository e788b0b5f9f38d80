"""How records are dealt to clients: arithmetic on labels and sizes, with a random generator that is handed in.

Every function gives the owner of every row, so each row goes to one client only.
"""

from __future__ import annotations

import heapq

import numpy as np


def in_turn(order: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The rows in this order, so many for each client: first those of client 0.

    >>> in_turn(np.array([2, 0, 3, 1]), np.array([1, 3])).tolist()
    [1, 1, 0, 1]
    """
    owner = np.empty_like(order)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def even_sizes(num_records: int, num_clients: int) -> np.ndarray:
    """Sizes as equal as possible, the larger ones first.

    >>> even_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    share, rest = divmod(num_records, num_clients)
    return np.full(num_clients, share) + (np.arange(num_clients) < rest)


def pools_of(labels: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """The rows of every label, shuffled."""
    classes, label_of = np.unique(labels, return_inverse=True)
    return [random.permutation(np.flatnonzero(label_of == c)) for c in range(len(classes))]


def equal_dirichlet(labels: np.ndarray, num_clients: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    """Clients of equal size, each with label proportions of its own draw from Dirichlet(alpha).

    When a label has run out, a client takes its other labels instead, in the proportions it wanted.
    """
    pools = pools_of(labels, random)
    left, taken = np.array([len(pool) for pool in pools]), np.zeros((num_clients, len(pools)), dtype=int)
    concentration, even = np.full(len(pools), alpha), np.full(len(pools), 1.0)
    for i, size in enumerate(even_sizes(len(labels), num_clients).tolist()):
        wanted, take = random.dirichlet(concentration) if alpha < 1e6 else even, taken[i]
        while (missing := size - take.sum()) > 0:
            room = left - take
            weights = np.where(room > 0, wanted, 0.0)
            weights = weights if weights.sum() > 1e-12 else room.astype(float)
            take += np.minimum(random.multinomial(missing, weights / weights.sum()), room)
        left -= take
    return in_turn(np.concatenate([pool[::-1] for pool in pools]), taken.T.ravel()) % num_clients


def natural_dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, smallest: int, random: np.random.Generator
) -> np.ndarray:
    """Every label is split between the clients by its own draw from Dirichlet(alpha), so sizes differ, too.

    A client below the smallest size is given records of the label of which the largest client has most.
    """
    pools = pools_of(labels, random)
    share = np.full(num_clients, 1 / num_clients)
    shares = [random.dirichlet(np.full(num_clients, alpha)) if alpha < 1e6 else share for _ in pools]
    counts = np.stack([random.multinomial(len(pool), p) for pool, p in zip(pools, shares, strict=True)], axis=1)
    sizes = counts.sum(1).tolist()
    low, high = [(size, i) for i, size in enumerate(sizes)], [(-size, i) for i, size in enumerate(sizes)]
    heapq.heapify(low)
    heapq.heapify(high)
    while low[0][0] < smallest:
        (least, poor), (most, rich) = low[0], high[0]
        if least != sizes[poor] or -most != sizes[rich]:  # an older size of a client that has moved since
            heapq.heappop(low if least != sizes[poor] else high)
            continue
        label = counts[rich].argmax()
        moved = min(smallest - least, int(counts[rich, label]), max((-most - least) // 2, 1))
        for i, change in ((rich, -moved), (poor, moved)):
            counts[i, label] += change
            sizes[i] += change
            heapq.heappush(low, (sizes[i], i))
            heapq.heappush(high, (-sizes[i], i))
    return in_turn(np.concatenate(pools), counts.T.ravel()) % num_clients


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
    labels: np.ndarray, owner: np.ndarray, num_clients: int, test_labels: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Clients of the test records: each label in the proportions in which they hold it, to within one record; -1 for nobody."""
    dealt = np.full(len(test_labels), -1)
    for label in np.unique(test_labels):
        found = random.permutation(np.flatnonzero(test_labels == label))
        held = np.bincount(owner[(labels == label) & (owner >= 0)], minlength=num_clients).cumsum()
        places = (np.arange(len(found)) + random.random()) / len(found) * held[-1]
        if held[-1]:
            dealt[found] = np.searchsorted(held, places, side="right")
    return dealt
