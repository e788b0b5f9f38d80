"""How many clients and records are in flight at once: from what one of them needs, and what there is. Pure arithmetic.

Per record: the gradients of its small tensors, the two factors of those of large ones, and what the forward pass keeps. Per
client: its parameters, its sum, its noise and its algorithm's state. Whatever the plan, the sums are the same.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from dpfed.flat import Layout
from dpfed.privacy import Survey, num_in_factors

STATES = 12  # vectors of theta's length a client has at once: parameters, moments, sum, noise, and what lies between
CACHE = 2**25  # bytes in flight at once that a CPU likes best; measured (benchmarks/NOTES.md)
WORTHWHILE = 32  # records in a call, below which what it costs whatever is in it weighs more than caches; measured, too
MOST = 2**30  # bytes for those


class Demand(NamedTuple):
    """Bytes in flight for every client, and for every record of one."""

    per_client: int
    per_record: int
    num_tensors: int = 0
    num_factored: int = 0


class Plan(NamedTuple):
    clients: int
    records: int
    num_bytes: int
    text: str


def demand(layout: Layout, survey: Survey, dtype: torch.dtype, num_variants: int = 1) -> Demand:
    """What a model needs whose forward and backward pass have this precision."""
    uses = survey.uses if num_variants == 1 else {}
    numbers = sum(num_in_factors(uses[part.name], part.shape) if part.name in uses else part.size for part in layout.parts)
    own = layout.num_coordinates * (STATES * max(4, dtype.itemsize) + dtype.itemsize)
    return Demand(own, 2 * numbers * dtype.itemsize + num_variants * survey.num_saved, len(layout.parts), len(uses))


def cache(need: Demand) -> float:
    """Bytes of records in flight that suit a CPU: what its caches hold, or more where a call would be of few records only.

    >>> [cache(Demand(per_client=0, per_record=num)) // num for num in (2**16, 2**22, 2**27)]
    [512, 32, 8]
    """
    return max(CACHE, min(WORTHWHILE * need.per_record, MOST))


@lru_cache(maxsize=256)
def plan(
    need: Demand,
    num_clients: int,
    width: int,
    budget: float = math.inf,
    cache: float = math.inf,
    clients_at_once: int | None = None,
) -> Plan:
    """As many clients at once as fit with all their ``width`` records; where not even one does, some of its records.

    ``budget``: for everything. ``cache``: for what belongs to records alone. ``clients_at_once``: where that is settled.

    >>> plan(Demand(per_client=100, per_record=10), num_clients=5, width=16, budget=1000).text
    '3 of 5 clients x 16 of 16 records at once, about 0.0 GiB'
    >>> plan(Demand(per_client=100, per_record=10), num_clients=5, width=16, budget=200)[:2]
    (1, 8)
    """
    clients = min(budget / (need.per_client + width * need.per_record), cache / (width * need.per_record), num_clients)
    clients = _even(num_clients, clients) if clients_at_once is None else clients_at_once
    records = min((budget / clients - need.per_client) / need.per_record, cache / clients / need.per_record, width)
    records = _even(width, records)
    num_bytes = clients * (need.per_client + records * need.per_record)
    text = f"{clients} of {num_clients} clients x {records} of {width} records at once, about {num_bytes / 2**30:.1f} GiB"
    if need.num_factored:
        text += f"; gradients of {need.num_factored} of {need.num_tensors} tensors by their factors"
    return Plan(clients, records, num_bytes, text)


def _even(whole: int, most: float) -> int:
    """The size of equal parts, as few as possible, of at most so many."""
    return math.ceil(whole / math.ceil(whole / max(1, int(most))))
