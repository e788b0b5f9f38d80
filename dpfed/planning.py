"""What fits a budget: noise, rounds, batch size or participation, from a target epsilon.

A plan is what one client is going to spend. Every answer holds for the worst of the clients that are planned for, and was
tried: `epsilon` with it does not exceed the target. Clients that may each have an answer of their own are asked for one by one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module

from dpfed.accountants import Event, Plan, as_plan, check_whole, plan_epsilon, undominated, variance
from dpfed.errors import InputError

Plans = Iterable[Mapping[Event, int]]
ENDLESS = 10**7  # more rounds than that are not looked for


def calibrate(epsilon: float, delta: float, plans: Plans, accountant: str = "pld") -> float:
    """The smallest sigma with which no client spends more than ``epsilon``; at most 0.1 % above the true one.

    The sigma of the plans' events is relative: 1 becomes what is returned.

    >>> round(calibrate(3, 1e-5, [{Event("poisson", 16, 1000, 1.0): 200}]), 3)
    0.769
    """
    worst = _checked(epsilon, plans)
    if any(event.sigma == 0 for plan in worst for event, _ in plan):
        raise InputError("plans: an event has sigma 0, and any multiple of it is 0. Give it a sigma above 0, such as 1.")

    def spent(plan: Plan, sigma: float) -> float:
        return plan_epsilon(_changed(plan, lambda event: replace(event, sigma=event.sigma * sigma)), delta, accountant)

    aim, sigma = epsilon * (1 - 1e-6), 0.0  # a hair below, as others may round sigma otherwise
    for plan in sorted(worst, key=variance, reverse=True):  # most likely the first decides
        if sigma == 0 or spent(plan, sigma) > aim:
            sigma = _smallest_sigma(partial(spent, plan), aim)
    return sigma


def rounds_within(epsilon: float, delta: float, plans: Plans, accountant: str = "pld") -> int:
    """How many rounds, up to ten million, every client can take part in; each costs it its plan. 0 where not even one fits.

    >>> rounds_within(3, 1e-5, [{Event("poisson", 16, 1000, 1.0): 10}])
    96
    """
    worst = _checked(epsilon, plans)
    return _largest(lambda n: max(plan_epsilon(plan, delta, accountant, n) for plan in worst), epsilon, ENDLESS)


def batch_size_within(epsilon: float, delta: float, plans: Plans, accountant: str = "pld") -> int:
    """The largest batch size of every event with which no client spends more; 0 where not even 1 fits.

    With the size of the largest client all batches are whole, and larger ones are no different.
    """

    def sized(plan: Plan, batch_size: int) -> Plan:
        return _changed(plan, lambda event: replace(event, batch_size=batch_size))

    worst = _checked(epsilon, (dict(sized(as_plan(plan), 1)) for plan in plans))
    most = max(event.num_examples for plan in worst for event, _ in plan)
    return _largest(lambda size: max(plan_epsilon(sized(plan, size), delta, accountant) for plan in worst), epsilon, most)


def participation_within(epsilon: float, delta: float, plans: Plans, rounds: int, accountant: str = "pld") -> float:
    """The largest rate, in thousandths, at which clients may join each of the rounds by a coin; a round costs the plan."""
    check_whole("rounds", rounds, at_least=1)
    worst = _checked(epsilon, plans)

    def spent(thousandths: int) -> float:
        return max(plan_epsilon(plan, delta, accountant, rounds, thousandths / 1000) for plan in worst)

    return _largest(spent, epsilon, 1000) / 1000


def _checked(epsilon: float, plans: Plans) -> list[Plan]:
    """The plans that decide."""
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon: must be a finite number above 0, got {epsilon}. 1 is strong, 8 is common.")
    worst = undominated(as_plan(plan) for plan in plans)
    if not any(worst):
        raise InputError("plans: nothing is going to be released, so there is nothing to find. Plan a round at least.")
    return worst


def _changed(plan: Plan, change: Callable[[Event], Event]) -> Plan:
    """With other events; what becomes equal is added up."""
    total: Counter[Event] = Counter()
    for event, count in plan:
        total[change(event)] += count
    return as_plan(total)


def _largest(spent: Callable[[int], float], aim: float, most: int) -> int:
    """The largest number up to ``most`` that spends no more than ``aim``: secants in the logarithms, then bisection."""
    low, high, guess, slope, last = 0, most + 1, min(64, most), 1.0, (0.0, 0.0)
    for tries in itertools.count(1):
        cost = spent(guess)
        low, high = (guess, high) if cost <= aim else (low, guess)
        if high - low == 1:
            break
        if tries <= 10 and 0 < cost < math.inf:
            here = (math.log(guess), math.log(cost / aim))
            slope = (here[1] - last[1]) / (here[0] - last[0]) if tries > 1 else slope
            last = here
            next_guess = math.exp(min(here[0] - here[1] / slope, 40)) if slope > 0.1 else math.inf
        else:
            next_guess = math.sqrt((low + 1) * high)
        guess = min(max(math.floor(next_guess), low + 1), high - 1)
    return low


def _smallest_sigma(spent: Callable[[float], float], aim: float) -> float:
    """A bracket, then a root in the logarithms, where the curve is nearly straight; at last upwards until it holds."""

    def excess(log_sigma: float) -> float:
        return math.log(min(max(spent(math.exp(log_sigma)), 1e-30), 1e30) / aim)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(1e9):
            raise InputError(f"epsilon: {aim:g} is out of reach at this delta; raise one of the two.")
    while low == high or excess(low) < 0:
        low, high = low - math.log(2), low
    root: float = import_module("scipy.optimize").brentq(excess, low, high, xtol=1e-4)
    while excess(root) > 0:
        root += 1e-4
    return math.exp(root)
