"""Events in, epsilon out: what the noisy releases of one client are worth, to a stated accountant.

Formal guarantee. One Poisson step of a client, with and without one record, is dominated by the pair
P = (1 - q) N(0, sigma^2) + q N(1, sigma^2), Q = N(0, sigma^2), in both directions; each is composed on its own, and the worse
one counts. With a fixed batch size one record is replaced: the sum moves by up to 2C, so the multiplier is sigma / 2. A batch
without the record turns into one with it when a member is exchanged, and again the sum moves by up to 2C. By advanced joint
convexity (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647; Zhu, Dong, Wang 2022, arXiv 2106.08567) the profile is then bounded
by (P, Q) where epsilon >= 0 and by (Q, P) where epsilon < 0, at sigma / 2. At q = 1 both are the Gaussian mechanism itself.
Where several records depend on the protected unit, `dpfed.mixture` says what a step costs.

Rounds by a coin. Let a client join each of T rounds by an independent coin of rate p, and let the K steps of one round be
dominated by (P_K, Q_K). They share the coin, so its rate must not be multiplied with q. Nor does the coin hide the client:
with it go its other records and its noise, and whoever knows these sees how the coin fell. So neighbours are
(1 - p) R + p P_K against (1 - p) R + p Q_K with an R that lies apart. That pair dominates for every R, by joint convexity:
a loss of 0 with probability 1 - p, else the loss of the K steps; T times. The tempting pair (1 - p) Q_K + p P_K against Q_K
says far less, and would be right only if an absent client looked like one that is there and lacks the record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpfed import mixture
from dpfed.errors import InputError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

FAINT = 0.04  # with a smaller multiplier one step costs hundreds, near the end of floating point: stated as infinite
CHOICES = {"sampling": ("poisson", "fixed"), "aggregation": ("open", "secure"), "unit": ("example", "client", "batch")}


@dataclass(frozen=True, order=True)
class Event:
    """One noisy release of a sum of clipped contributions: all that an accountant has to know.

    ``sigma`` is the noise over the clipping norm C; 0 means no noise, and epsilon is infinite. ``aggregation="secure"``: it is
    the noise of a sum over a cohort, and only the sum is seen. ``unit="client"``: what is clipped is a client's whole upload;
    read clients for examples, and the expected cohort for the batch size. ``unit="batch"``: what is clipped is the
    gradient of a whole batch, which protects nobody. Otherwise the unit owns up to ``owned`` records of a client, and up to
    ``readers`` others read it.
    """

    sampling: Literal["poisson", "fixed"]
    batch_size: int
    num_examples: int
    sigma: float
    aggregation: Literal["open", "secure"] = "open"
    unit: Literal["example", "client", "batch"] = "example"
    owned: int = 1
    readers: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"event.{name}: must be {' or '.join(map(repr, choices))}, got {value!r}.")
        if self.unit == "client" and self.aggregation == "secure":
            raise InputError("event.unit: 'client' needs a server that clips and adds the noise, not aggregation='secure'.")
        if self.unit == "batch" and self.sigma:
            raise InputError(f"event.sigma: must be 0 with unit='batch', which protects nobody, got {self.sigma}.")
        check_whole("event.batch_size", self.batch_size, at_least=1)
        check_whole("event.num_examples", self.num_examples, at_least=1)
        check_whole("event.owned", self.owned, at_least=0)
        check_whole("event.readers", self.readers, at_least=0 if self.owned else 1)
        if self.unit == "client" and self.grouped:
            raise InputError(
                f"event.owned, event.readers: a client is the whole unit, so 1 and 0; got {self.owned}, {self.readers}."
            )
        if not 0 <= self.sigma < math.inf:
            raise InputError(f"event.sigma: must be a finite number, 0 or above, got {self.sigma}.")

    @property
    def rate(self) -> float:
        """The share of the records that is drawn; 1 where there are no more than the batch."""
        return min(1.0, self.batch_size / self.num_examples)

    @property
    def multiplier(self) -> float:
        """The noise over what one unit can move: C for what comes or goes, 2C for what is replaced or changes."""
        return self.sigma / ((1 if self.sampling == "poisson" else 2) * self.owned + 2 * self.readers)

    @property
    def grouped(self) -> bool:
        """Whether several records depend on the unit."""
        return (self.owned, self.readers) != (1, 0)

    @property
    def mixed(self) -> bool:
        """Whether a batch may hold some of them and not all."""
        return self.grouped and self.rate < 1

    @property
    def moves(self) -> mixture.Moves:
        """By how many C a batch moves with the unit, and how probably."""
        return mixture.moves(self.sampling, self.batch_size, self.num_examples, self.owned, self.readers)

    def dp_event(self) -> DpEvent:
        """The same in the words of `dp_accounting`; the multiplier has the factor 2 of replace-one already."""
        accounting = import_module("dp_accounting")
        if self.sigma == 0:
            return accounting.NonPrivateDpEvent()
        gaussian = accounting.GaussianDpEvent(self.multiplier)
        if self.rate == 1:
            return gaussian
        if self.sampling == "poisson":
            return accounting.PoissonSampledDpEvent(self.rate, gaussian)
        return accounting.SampledWithoutReplacementDpEvent(self.num_examples, self.batch_size, gaussian)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Event:
        """The inverse; what an older version did not write has the value that it had then."""
        names, needed = [f.name for f in fields(cls)], [f.name for f in fields(cls) if f.default is MISSING]
        if not set(needed) <= set(plain) <= set(names):
            raise InputError(f"event: must have exactly the fields {', '.join(names)}; got {', '.join(plain) or 'none'}.")
        return cls(**plain)


Plan = frozenset[tuple[Event, int]]  # what one client spends, in a form that can be looked up


def epsilon(events: Mapping[Event, int], delta: float, accountant: str = "pld", *, rounds: int = 1, rate: float = 1.0) -> float:
    """What one client's events cost together; infinite when one has no noise.

    With ``rounds``, the events are what one round costs a client that joins each of them by a coin of this rate; how the
    coins fall is then part of delta.

    >>> round(epsilon({Event("poisson", 16, 1000, 1.0): 200}, 1e-5), 2)
    1.48
    >>> round(epsilon({Event("poisson", 16, 1000, 1.0): 10}, 1e-5, rounds=100, rate=0.1), 2)
    1.19
    """
    check_whole("rounds", rounds, at_least=0)
    if not 0 <= rate <= 1:
        raise InputError(f"rate: must lie between 0 and 1, got {rate}.")
    return plan_epsilon(as_plan(events), delta, accountant, rounds, rate)


def plan_epsilon(plan: Plan, delta: float, accountant: str = "pld", rounds: int = 1, rate: float = 1.0) -> float:
    """`epsilon`, of what was checked already."""
    if rate == 1:  # one way to say the same, so that it is looked up
        plan, rounds = Plan((event, count * rounds) for event, count in plan if rounds), 1
    return _epsilon(plan, delta, accountant, rounds, rate)


@lru_cache(maxsize=2**14)
def _epsilon(plan: Plan, delta: float, accountant: str, rounds: int, rate: float) -> float:
    if not 0 < delta < 1:
        raise InputError(f"delta: must lie between 0 and 1, got {delta}. Take well below 1 / records, such as 1e-5.")
    if accountant not in ACCOUNTANTS:
        raise InputError(f"accountant: there is no {accountant!r}; choose one of: {', '.join(ACCOUNTANTS)}.")
    check_one_relation([plan])
    if not plan or rounds * rate == 0:
        return 0.0
    if any(event.multiplier < FAINT for event, _ in plan):
        return math.inf
    return ACCOUNTANTS[accountant](plan, delta, rounds, rate)


def _pld_epsilon(plan: Plan, delta: float, rounds: int, rate: float) -> float:
    """By privacy loss distributions: tight and from above, for every loss is rounded pessimistically to a grid of width h.

    That adds about h^2 / 6 to the variance of a step, so h is a small part of a step's spread; and a power of two, so that who
    spends less never gets a coarser grid. The Fourier transforms err by some 2^-52 a step, which may also be downwards: it is
    taken off delta, and where delta is not far above it, RDP answers instead.
    """
    noise = _rounding(plan, rounds, rate)
    if noise > delta / 8:
        return _rdp_epsilon(plan, delta, rounds, rate)
    total = _loss(plan, math.log(delta) - 20, rounds, rate)  # what lies beyond this mass counts as an infinite loss
    with np.errstate(over="ignore"):  # beyond 700 or so the answer may be infinite
        return float(total.get_epsilon_for_delta(delta - noise))


def deltas(events: Mapping[Event, int], epsilons: Any) -> Any:
    """The whole profile: the delta of each epsilon, from above, by PLD.

    >>> deltas({Event("poisson", 1, 1, 1.0): 1}, [0.0, 1.0]).round(4).tolist()
    [0.3829, 0.1269]
    """
    plan = as_plan(events)
    check_one_relation([plan])
    if not plan or any(event.multiplier < FAINT for event, _ in plan):
        return np.full(np.shape(epsilons), 1.0 if plan else 0.0)
    profile = _loss(plan, -40.0, 1, 1.0).get_delta_for_epsilon(np.asarray(epsilons, dtype=float))
    return np.minimum(profile + _rounding(plan, 1, 1.0), 1.0)


def _rounding(plan: Plan, rounds: int, rate: float) -> float:
    """What the Fourier transforms of a composition may err by."""
    return rounds * (sum(count for _, count in plan) + (rate < 1)) * 2.0**-50


def _loss(plan: Plan, log_tail: float, rounds: int, rate: float) -> Any:
    """The privacy loss distribution of a plan; mass beyond e^log_tail counts as an infinite loss."""
    reach = max(_reach(event, log_tail) for event, _ in plan)
    spread = math.sqrt(variance(plan) / sum(count for _, count in plan))
    width = 2.0 ** math.floor(math.log2(max(spread / 16, reach / 2**14, 2**-20)))
    total: Any = None
    for event, count in sorted(plan):
        step = _step_loss(event, width, log_tail)
        total = total.compose(step.self_compose(count)) if total else step.self_compose(count)
    if rate < 1:
        nothing = import_module("dp_accounting.pld").privacy_loss_distribution.identity(width)
        total = total.compute_mixture(nothing, rate).self_compose(rounds)
    return total


@lru_cache(maxsize=256)
def _step_loss(event: Event, width: float, log_tail: float) -> Any:
    """The privacy loss distribution of one step."""
    if event.mixed:
        symmetric = event.sampling == "fixed" or event.readers > 0
        return mixture.mixture_loss(event.moves, event.sigma, symmetric=symmetric, width=width, log_tail=log_tail)
    pld, rate, sigma = import_module("dp_accounting.pld"), event.rate, event.multiplier
    setting: dict[str, Any] = {"sampling_prob": rate, "log_mass_truncation_bound": log_tail}
    if event.sampling == "poisson":
        return pld.privacy_loss_distribution.from_gaussian_mechanism(sigma, value_discretization_interval=width, **setting)
    direction, mechanism = pld.privacy_loss_mechanism.AdjacencyType, pld.privacy_loss_mechanism.GaussianPrivacyLoss
    remove, add = (mechanism(sigma, adjacency_type=which, **setting) for which in (direction.REMOVE, direction.ADD))
    top = math.ceil(remove.connect_dots_bounds().epsilon_upper / width)
    grid = width * np.arange(-top, top + 1)
    profile = np.concatenate([add.get_delta_for_epsilon(grid[:top]), remove.get_delta_for_epsilon(grid[top:])])
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, -top, top, profile)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def variance(plan: Plan) -> float:
    """About the variance of the privacy loss: of each step the smaller of two estimates, for much and for little noise."""

    def step(event: Event) -> float:
        if event.mixed:
            return mixture.mixture_variance(event.moves, event.sigma)
        rate, inverse = event.rate, event.multiplier**-2
        return min(rate**2 * math.expm1(inverse), rate * (inverse + (1 - rate) * inverse**2 / 4))

    if any(event.multiplier < FAINT for event, _ in plan):
        return math.inf
    return math.fsum(count * step(event) for event, count in plan)


def _reach(event: Event, log_tail: float) -> float:
    """About the largest finite loss of one step."""
    if event.mixed:
        return mixture.mixture_reach(event.moves, event.sigma, log_tail)
    quantile = 0.5 / event.multiplier + math.sqrt(-2 * log_tail)
    return math.log1p(event.rate * math.expm1(quantile / event.multiplier))


def _rdp_epsilon(plan: Plan, delta: float, rounds: int, rate: float) -> float:
    """By Renyi divergences, as in the papers: looser, and from above."""
    rdp = import_module("dp_accounting.rdp")
    orders: Any = np.asarray(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    curve = sum(count * _step_divergences(event) for event, count in plan)
    if rate < 1:  # E (P/Q)^order is 1 with probability 1 - rate
        curve = rounds * np.logaddexp(math.log1p(-rate), math.log(rate) + (orders - 1) * curve) / (orders - 1)
    return float(rdp.compute_epsilon(orders, curve, delta)[0])


@lru_cache(maxsize=2**14)
def _step_divergences(event: Event) -> Any:
    accounting = import_module("dp_accounting")
    if event.mixed:
        return mixture.mixture_divergences(event.moves, event.sigma, accounting.rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    relations = accounting.NeighboringRelation
    relation = relations.ADD_OR_REMOVE_ONE if event.sampling == "poisson" else relations.REPLACE_ONE
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it reports every order that it leaves out, which only makes epsilon larger
    try:
        return accounting.rdp.RdpAccountant(neighboring_relation=relation).compose(event.dp_event()).rdp
    finally:
        log.setLevel(level)


ACCOUNTANTS: dict[str, Callable[[Plan, float, int, float], float]] = {"pld": _pld_epsilon, "rdp": _rdp_epsilon}


def as_plan(events: Mapping[Event, int]) -> Plan:
    for count in events.values():
        check_whole("events, count", count, at_least=0)
    return Plan((event, count) for event, count in events.items() if count)


def undominated(plans: Iterable[Plan]) -> list[Plan]:
    """The plans among which the worst one is: of one kind of event, a higher rate, more steps and less noise cost more."""
    distinct = set(plans)
    check_one_relation(distinct)
    worst: list[tuple[float, int, float]] = []
    kept = [plan for plan in distinct if len(plan) != 1 or any(e.mixed and e.sampling == "fixed" for e, _ in plan)]
    rest = distinct.difference(kept)
    single = [(-event.rate, -count, event.sigma, plan) for plan in rest for event, count in plan]
    for rate, count, sigma, plan in sorted(single, key=lambda entry: entry[:3]):
        if not any(other[0] <= rate and other[1] <= count and other[2] <= sigma for other in worst):
            worst.append((rate, count, sigma))
            kept.append(plan)
    return kept


def check_one_relation(plans: Iterable[Plan]) -> None:
    events = {event for plan in plans for event, _ in plan}
    if len({event.unit for event in events}) > 1:
        raise InputError("events: the units 'example' and 'client' are mixed, and no epsilon covers both. Use two ledgers.")
    if len({(event.owned, event.readers) for event in events}) > 1:
        raise InputError(
            "events: units of several sizes are mixed (owned, readers), and no epsilon covers all. Use two ledgers."
        )
    if len({event.sampling for event in events}) > 1:
        raise InputError(
            "events: 'poisson' and 'fixed' sampling are mixed. They have different neighbours (a record more or less; a "
            "record replaced), so no epsilon covers both. Use one sampling, or two ledgers."
        )


def check_whole(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise InputError(f"{name}: must be a whole number, {at_least} or above, got {value!r}.")
