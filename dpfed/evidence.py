"""What an attack proves: from what it saw to a lower bound on epsilon, with exact confidence.

Two samples of the same experiment, one with a canary and one without, are told apart by a score and a threshold. Both are
learnt from one half of the trials; only the other half, which was never looked at, is counted. The two counts are binomial, and
get one-sided Clopper-Pearson bounds: FPR from above, TPR from below. What they prove is said in two ways:

- **exact** assumes nothing about the mechanism. If it is (epsilon, delta)-DP, every test has  TPR <= e^epsilon FPR + delta  and
  1 - FPR <= e^epsilon (1 - TPR) + delta. With n counted trials of either kind this never shows more than about log(n / 8).
- **charged** takes the charged events at their word, except for their noise: what is the most noise with which they could have
  had these rates? It states the epsilon of that noise (for one event at rate 1: of the mu of Gaussian DP, Nasr et al. 2023,
  arXiv 2302.07956). The claim is refuted exactly where the rates are impossible under the charged events at some
  (epsilon, delta) of their profile. That is as rigorous as the first; as a number it is a bound among mechanisms of that kind.

Each way has half of the error probability, each of its two bounds half of that (Bonferroni: nothing need be independent), so
all that is stated holds together. It is the probability of blaming a correct mechanism, whose trials are independent by its own
noise and coins; a wrong one may well make them dependent, which can only help to find it out.

``one_run_bound`` is the bound of Steinke, Nasr and Jagielski (NeurIPS 2023, arXiv 2305.08846) for many canaries in one run. It
holds for every mechanism, however the canaries influence one another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

from dpfed.accountants import deltas
from dpfed.errors import InputError
from dpfed.ledger import Event, epsilon

Array = np.ndarray[Any, np.dtype[Any]]
Worth = Callable[[Any, Any], Any]
EPSILONS = np.concatenate([np.linspace(0, 10, 201), np.linspace(10.25, 40, 120)])
LEAST = 1e-300


class Rates(NamedTuple):
    """Of trials that were not learnt from: the false alarms bounded from above, the true ones from below."""

    false: float
    true: float
    words: str


# Of two samples


def exact_bound(false: Any, true: Any, delta: float) -> Any:
    """The least epsilon with which a test may have these rates, for the canary put in and for the canary taken out."""
    put_in = np.log(np.maximum(np.subtract(true, delta), LEAST)) - np.log(np.maximum(false, LEAST))
    taken_out = np.log(np.maximum(1 - np.add(false, delta), LEAST)) - np.log(np.maximum(np.subtract(1, true), LEAST))
    return np.maximum(np.maximum(put_in, taken_out), 0.0)


def charged_bound(false: float, true: float, events: Counter[Event], delta: float) -> float:
    """Epsilon of the charged events at the most noise with which they could have had these rates, to 1 % of the noise."""

    def scaled(factor: float) -> Counter[Event]:
        return Counter({replace(event, sigma=event.sigma * factor): count for event, count in events.items()})

    def impossible(factor: float) -> bool:
        put_in, taken_out = true - np.exp(EPSILONS) * false, (1 - false) - np.exp(EPSILONS) * (1 - true)
        return bool((np.maximum(put_in, taken_out) > deltas(scaled(factor), EPSILONS)).any())

    refuted = impossible(1.0)
    low, high = (0.5, 1.0) if refuted else (1.0, 2.0)  # at `high` the rates are impossible, at `low` they are not
    while refuted and impossible(low):
        low, high = low / 2, low
    while not refuted and not impossible(high):
        low, high = high, 2 * high
        if high > 100:
            return 0.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if impossible(middle) else (middle, high)
    return epsilon(scaled(high), delta)


def distance(false: Any, true: Any) -> Any:
    """How far apart two normal distributions are that give these rates: mu of Gaussian differential privacy."""
    return special.ndtri(true) - special.ndtri(false)


def judged(absent: Array, present: Array, worth: Worth, error: float) -> Rates:
    """``[trials, features]`` of either kind: learn what tells them apart, and count that on trials not learnt from.

    A discriminant is fitted to one quarter and has to prove itself on another, so that it is not chosen for its memory.

    Each of the two rates is wrong with at most half of the ``error`` probability.
    """
    half, level = len(absent) // 2, 1 - error / 2
    fit, choose, learn, judge = slice(0, half // 2), slice(half // 2, half), slice(0, half), slice(half, None)
    num = len(absent) - half

    def best(score: Array, rows: slice) -> tuple[float, float]:
        """What the score would prove of these trials, and at which threshold."""
        below, above = np.sort(absent[rows] @ score), np.sort(present[rows] @ score)
        places = np.unique(np.quantile(np.concatenate([below, above]), np.linspace(0, 1, 401)))
        false, true = (len(ordered) - np.searchsorted(ordered, places, side="right") for ordered in (below, above))
        found = np.nan_to_num(worth(at_most(false, len(below), level), at_least(true, len(above), level)), nan=-math.inf)
        return float(found.max()), float(places[found.argmax()])

    score = max(scores(absent[fit], present[fit]), key=lambda candidate: best(candidate, choose)[0])
    threshold = best(score, learn)[1]
    false, true = (int((sample[judge] @ score > threshold).sum()) for sample in (absent, present))
    words = f"{false} of {num} false alarms and {true} of {num} true ones"
    return Rates(float(at_most(false, num, level)), float(at_least(true, num, level)), words)


def scores(absent: Array, present: Array) -> Iterator[Array]:
    """Fisher's linear discriminant of all features, and every feature by itself, up and down."""
    num_features = absent.shape[1]
    scale = np.concatenate([absent, present]).std(axis=0)
    scale[scale == 0] = 1
    spread = np.cov(((absent - absent.mean(0)) / scale).T) + np.cov(((present - present.mean(0)) / scale).T)
    step = (present.mean(0) - absent.mean(0)) / scale
    yield np.linalg.solve(np.atleast_2d(spread) + 1e-6 * np.eye(num_features), step) / scale
    for direction in np.eye(num_features):
        yield direction
        yield -direction


def at_most(count: Any, num: Any, level: float) -> Any:
    """Clopper-Pearson from above: the rate is at most this, with probability ``level`` or more."""
    tail = special.betaincinv(np.add(count, 1), np.maximum(np.subtract(num, count), 1), level)
    return np.where(np.less(count, num), tail, 1.0)


def at_least(count: Any, num: Any, level: float) -> Any:
    """Clopper-Pearson from below.

    >>> round(float(at_least(0, 10, 0.95)), 4), round(float(at_least(10, 10, 0.95)), 4)
    (0.0, 0.7411)
    """
    return 1 - at_most(np.subtract(num, count), num, level)


# Of one run


def guessed(coins: Array, features: Array, delta: float, error: float) -> tuple[float, str]:
    """``[canaries]`` and ``[canaries, features]``: the bound that guesses about one half of the canaries prove.

    The coins of the other half are known to the attacker, who learns from them which score to use and how many guesses to make.
    To the judged half they are just data; so the theorem holds, and there is one test only.
    """
    half = len(coins) // 2
    known, unknown = slice(0, half), slice(half, None)
    each = np.unique([max(1, half // share) for share in (100, 40, 20, 10, 5, 3, 2)])
    best, score, num_each = -1.0, np.zeros(features.shape[1]), 1
    for candidate in scores(features[known][~coins[known]], features[known][coins[known]]):
        ordered = coins[known][(features[known] @ candidate).argsort(kind="stable")]
        right = np.cumsum(~ordered)[each - 1] + np.cumsum(ordered[::-1])[each - 1]
        sure = at_least(right, 2 * each, 1 - error)
        if sure.max() > best:
            best, score, num_each = float(sure.max()), candidate, int(each[sure.argmax()])
    ordered = coins[unknown][(features[unknown] @ score).argsort(kind="stable")]
    right = int((~ordered[:num_each]).sum() + ordered[-num_each:].sum())
    words = f"{right} of {2 * num_each} guesses right, about {len(ordered)} canaries of one run"
    return one_run_bound(right, 2 * num_each, len(ordered), delta, 1 - error), words


def one_run_p_value(num_correct: int, num_guesses: int, num_canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the mechanism is (epsilon, delta)-DP: Theorem 5.2 of the paper.

    With delta = 0 nobody guesses better than randomised response does: Binomial(r, e^epsilon / (1 + e^epsilon)). Delta adds
    2 m delta times the steepest climb of that distribution below the count, max_i P[v > Binomial >= v - i] / i.
    """
    binomial: Any = stats.binom(num_guesses, special.expit(epsilon))
    below = np.cumsum(binomial.pmf(np.arange(num_correct - 1, -1, -1)))
    climb = float((below / np.arange(1, num_correct + 1)).max(initial=0.0))
    return min(1.0, float(binomial.sf(num_correct - 1)) + 2 * num_canaries * delta * climb)


def one_run_bound(num_correct: int, num_guesses: int, num_canaries: int, delta: float, confidence: float) -> float:
    """The least epsilon at which so many right guesses are not too unlikely.

    >>> round(one_run_bound(75, 100, 1000, 1e-4, 0.95), 3)
    0.673
    """
    if not 0 <= num_correct <= num_guesses <= num_canaries:
        raise InputError(f"num_correct: {num_correct} of {num_guesses} guesses about {num_canaries} canaries cannot be.")

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(num_correct, num_guesses, num_canaries, epsilon, delta) < 1 - confidence

    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
