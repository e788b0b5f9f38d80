"""What a batch costs somebody who owns, or is read by, several records: how many of them it holds is a mixture.

A protected unit (a node of a graph with its links, a person with several sentences) owns up to ``owned`` records of a client,
which come or go with it, and is read by up to ``readers`` others, which stay but change. One that comes or goes moves the
clipped sum by C; one that changes, or is replaced, by 2C, for clip(g) becomes clip(g'). A batch holds some of them: ``moves``
says by how many C the sum then moves, and with what probability.

Formal guarantee, of one step with Gaussian noise sigma C, where the batch holds none with probability 1 - w:

- Poisson sampling, and nobody reads. Without the unit the step is N(0, sigma^2), with it a mixture of N(x_A, sigma^2) with
  |x_A| <= |A|, A the records drawn. That is dominated by the mixture of N(|A|, sigma^2), in both directions (Choquette-Choo
  et al. 2023, arXiv 2310.15526; Charles et al. 2024, arXiv 2407.07737). Tight.
- Otherwise both sides are mixtures over the same A, P of N(x_A) and Q of N(y_A) with |x_A - y_A| <= s_A, and x_0 = y_0 where A
  is empty. Advanced joint convexity splits the empty part off (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647), joint
  convexity pairs the others, and |x_A - x_0| <= s_A as well:  H_{1 + w (a - 1)}(P, Q) <= sum over s > 0 of p_s H_a(N(s), N(0))
  for a >= 1, and the same for (Q, P). With one record this is the ledger's bound for fixed-size batches. The pair (mixture,
  N(0)) would be wrong here: the records that read the unit are in the batch with it and without it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

Moves = tuple[tuple[int, float], ...]
"""Pairs (by how many C the sum moves, with what probability), from 0 upwards."""


@lru_cache(maxsize=2**12)
def moves(sampling: str, batch_size: int, num_examples: int, owned: int, readers: int) -> Moves:
    """How far a batch moves with the unit. No more of its records are counted than there are.

    >>> moves("poisson", 1, 2, owned=1, readers=1)
    ((0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25))
    >>> [(s, round(p, 4)) for s, p in moves("fixed", 2, 4, owned=2, readers=0)]
    [(0, 0.1667), (2, 0.6667), (4, 0.1667)]
    """
    owned = min(owned, num_examples)
    readers = min(readers, num_examples - owned)
    rate = min(1.0, batch_size / num_examples)
    found: defaultdict[int, float] = defaultdict(float)
    if sampling == "fixed":
        total = owned + readers
        for i in range(total + 1):
            found[2 * i] += _hypergeometric(i, total, min(batch_size, num_examples), num_examples)
    else:
        for i in range(owned + 1):
            for j in range(readers + 1):
                found[i + 2 * j] += _binomial(i, owned, rate) * _binomial(j, readers, rate)
    return tuple(sorted((move, chance) for move, chance in found.items() if chance > 0))


def _binomial(i: int, total: int, rate: float) -> float:
    return math.comb(total, i) * rate**i * (1 - rate) ** (total - i)


def _hypergeometric(i: int, total: int, drawn: int, num_examples: int) -> float:
    """Of ``drawn`` out of ``num_examples``, exactly ``i`` are among the ``total``."""
    inside = math.prod((drawn - j) / (num_examples - j) for j in range(i))
    outside = math.prod((num_examples - drawn - j) / (num_examples - i - j) for j in range(total - i))
    return math.comb(total, i) * max(0.0, inside) * max(0.0, outside)


def mixture_loss(moves: Moves, sigma: float, *, symmetric: bool, width: float, log_tail: float) -> Any:
    """The privacy loss distribution of one step, pessimistic on a grid of ``width``; mass beyond e^log_tail counts as infinite.

    ``symmetric``: some records change or are replaced; if not, all come or go.
    """
    pld = import_module("dp_accounting.pld")
    if not symmetric:
        sizes, chances = zip(*moves, strict=True)
        return pld.privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma, sizes, chances, value_discretization_interval=width, log_mass_truncation_bound=log_tail
        )
    top, tail = 1, math.exp(log_tail)
    while changed_profile(moves, sigma, np.array([top * width]))[0] > tail:
        top *= 2
    above = np.arange(top + 1) * width
    profile = changed_profile(moves, sigma, above)
    below = -np.expm1(-above[:0:-1]) + np.exp(-above[:0:-1]) * profile[:0:-1]  # H_a(P, Q) = 1 - a + a H_{1/a}(Q, P)
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, -top, top, np.concatenate([below, profile]))
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def changed_profile(moves: Moves, sigma: float, epsilons: Any) -> Any:
    """delta(epsilon) of one step for epsilon >= 0, where records change: the bound of the module's docstring."""
    log_ndtr = import_module("scipy.special").log_ndtr
    some = [(move, chance) for move, chance in moves if move]
    inner = np.log1p(np.expm1(epsilons) / math.fsum(chance for _, chance in some))
    total = np.zeros_like(epsilons)
    for move, chance in some:
        shift = move / sigma
        total += chance * (np.exp(log_ndtr(shift / 2 - inner / shift)) - np.exp(inner + log_ndtr(-shift / 2 - inner / shift)))
    return np.maximum(total, 0.0)


def mixture_divergences(moves: Moves, sigma: float, orders: Any) -> Any:
    """Renyi divergences as in Daigavane et al. 2021 (arXiv 2111.15521): whom the batch holds counts as told. Looser.

    With the factor 2 of a record that changes: E over the batch of exp(a (a - 1) s^2 / (2 sigma^2)), its logarithm / (a - 1).
    """
    orders = np.asarray(orders, dtype=float)
    sizes, chances = np.array(moves).T[:, :, None]
    logsumexp = import_module("scipy.special").logsumexp
    return logsumexp(orders * (orders - 1) * sizes**2 / (2 * sigma**2), axis=0, b=chances) / (orders - 1)


def mixture_variance(moves: Moves, sigma: float) -> float:
    """About the variance of the privacy loss: of two estimates, for much and for little noise, the smaller one."""
    inverse = sigma**-2
    much = sum(p * q * math.expm1(min(s * t * inverse, 700)) for s, p in moves for t, q in moves)
    return min(much, sum(p * (s**2 * inverse + s**4 * inverse**2 / 4) for s, p in moves))


def mixture_reach(moves: Moves, sigma: float, log_tail: float) -> float:
    """About the largest finite loss of one step."""
    spread = math.sqrt(-2 * log_tail)
    ends = [(p, (0.5 * s / sigma + spread) * s / sigma) for s, p in moves if s and math.log(p) > log_tail]
    return max((end + math.log(p) if end > 700 else math.log1p(p * math.expm1(end)) for p, end in ends), default=0.0)
