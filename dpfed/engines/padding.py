"""Batches of random size as chunks of fixed shape: the shapes with which the least is computed in vain. Nothing is cut off."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dpfed.data import Sampling

CALL = (
    0.25  # what one further chunk costs whatever is in it, in expected batches of all clients; measured (benchmarks/NOTES.md)
)


class Shape(NamedTuple):
    """The first chunk has ``first`` columns for every client, each further one ``further`` columns for ``rows`` clients."""

    first: int
    further: int = 0
    rows: int = 0


@lru_cache(maxsize=256)
def shape_of(batch_size: int, num_clients: int, sampling: Sampling, largest: int) -> Shape:
    """For clients of up to ``largest`` records. The size of a Poisson batch is taken to be a Poisson number.

    >>> shape_of(16, 5, "fixed", 1000), shape_of(16, 5, "poisson", 12)
    (Shape(first=16, further=0, rows=0), Shape(first=12, further=0, rows=0))
    """
    if sampling == "fixed" or largest <= batch_size:
        return Shape(min(batch_size, largest))
    spread = math.sqrt(batch_size)
    end = min(largest, math.ceil(batch_size + 8 * spread + 8))
    sizes = np.arange(end + 1)
    chances = np.exp(sizes * math.log(batch_size) - batch_size - np.array([math.lgamma(size + 1) for size in sizes]))
    more = np.append(np.cumsum(chances[::-1])[::-1][1:], 0.0)  # P(size > w)
    widths = {min(end, math.ceil(batch_size + spread * part / 4)) for part in range(17)}
    shapes = itertools.product(
        sorted(widths),
        sorted({math.ceil(spread * part / 2) for part in range(1, 5)}),
        sorted({math.ceil(num_clients / part) for part in (1, 2, 4, 8)}),
    )

    def cost(shape: Shape) -> float:
        """The expected number of records that are computed, over all clients, and what the calls cost besides."""
        calls = sum(_calls(num_clients, float(more[w]), shape.rows) for w in range(shape.first, len(more), shape.further))
        return num_clients * shape.first + calls * (shape.rows * shape.further + CALL * num_clients * batch_size)

    return min(itertools.starmap(Shape, shapes), key=cost)


@lru_cache(maxsize=4096)
def _calls(num_clients: int, chance: float, rows: int) -> float:
    """How many chunks of so many rows are needed for those clients, each by its own coin, that have more."""
    if chance < 1e-12:
        return 0.0
    counts = np.arange(num_clients + 1)
    logs = [math.lgamma(num_clients + 1) - math.lgamma(c + 1) - math.lgamma(num_clients - c + 1) for c in counts]
    chances = np.exp(np.array(logs) + counts * math.log(chance) + (num_clients - counts) * math.log1p(-chance))
    return float((chances * np.ceil(counts / rows)).sum())
