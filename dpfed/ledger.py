"""What every record has been charged, and what that is worth in epsilon.

The ledger stores events, never an epsilon: that number means nothing without its delta, observer, neighbours and accountant, so
it is computed when somebody asks.

Formal guarantee. One Poisson step of a client, with and without one record, is dominated by the pair
P = (1 - q) N(0, sigma^2) + q N(1, sigma^2), Q = N(0, sigma^2), in both directions; each is composed on its own, and the worse
one counts. With a fixed batch size one record is replaced: the sum moves by up to 2C, so the multiplier is sigma / 2. A batch
without the record turns into one with it when a member is exchanged, and again the sum moves by up to 2C. By advanced joint
convexity (Balle, Barthe, Gaboardi 2018, arXiv 1807.01647; Zhu, Dong, Wang 2022, arXiv 2106.08567) the profile is then bounded
by (P, Q) where epsilon >= 0 and by (Q, P) where epsilon < 0, at sigma / 2. At q = 1 both are the Gaussian mechanism itself.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from dpfed.errors import InputError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

OBSERVERS = ("server",)
FAINT = 0.04  # with a smaller multiplier one step costs hundreds, near the end of floating point: stated as infinite


@dataclass(frozen=True, order=True)
class Event:
    """One noisy release of a sum of clipped gradients: all that an accountant has to know.

    ``sigma`` is the noise over the clipping norm C; 0 means no noise, and epsilon is infinite. ``aggregation="secure"``: it is
    the noise of a sum over a cohort, and only the sum is seen.
    """

    sampling: Literal["poisson", "fixed"]
    batch_size: int
    num_examples: int
    sigma: float
    aggregation: Literal["open", "secure"] = "open"

    def __post_init__(self) -> None:
        if self.sampling not in NEIGHBOURS:
            raise InputError(f"event.sampling: must be 'poisson' or 'fixed', got {self.sampling!r}.")
        if self.aggregation not in OBSERVED:
            raise InputError(f"event.aggregation: must be 'open' or 'secure', got {self.aggregation!r}.")
        _check_whole("event.batch_size", self.batch_size, at_least=1)
        _check_whole("event.num_examples", self.num_examples, at_least=1)
        if not 0 <= self.sigma < math.inf:
            raise InputError(f"event.sigma: must be a finite number, 0 or above, got {self.sigma}.")

    @property
    def rate(self) -> float:
        """The share of its records that a client draws; 1 where it has no more than the batch."""
        return min(1.0, self.batch_size / self.num_examples)

    @property
    def multiplier(self) -> float:
        """The noise over what one record can move: C when it comes or goes, 2C when it is replaced."""
        return self.sigma if self.sampling == "poisson" else self.sigma / 2

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
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Event:
        names = [field.name for field in fields(cls)]
        if set(plain) != set(names):
            raise InputError(f"event: must have exactly the fields {', '.join(names)}; got {', '.join(plain) or 'none'}.")
        return cls(**plain)


Plan = frozenset[tuple[Event, int]]  # what one client spends, in a form that can be looked up
NEIGHBOURS = {
    "poisson": """add or remove one record; it moves the clipped sum by at most C.
  Sampling: Poisson. Every record joins every batch independently, at the rate batch size / records.""",
    "fixed": """replace one record by another; it moves the clipped sum by at most 2C.
  Sampling: fixed size. Every batch is drawn anew, uniformly and without replacement.""",
}
OBSERVED = {
    "open": "the server. It sees every upload and who took part, so drawing the clients amplifies nothing.",
    "secure": """the server, under secure aggregation. It sees who took part, and of their uploads only the sum.
    Assumed, not done by a simulation: nobody sees a single upload, which carries only its client's share of the noise, and no
    more clients tell theirs than was allowed for.""",
}


class Receipt(NamedTuple):
    """What one client spent in round ``t``."""

    client: int
    t: int
    events: Counter[Event]


class Ledger:
    """The receipts of a run. One that is posted again, as after a crash, counts once."""

    def __init__(self) -> None:
        self._receipts: dict[tuple[int, int], Counter[Event]] = {}
        self._plans: dict[int, Plan] = {}

    def post(self, receipts: Iterable[Receipt]) -> None:
        """Take in all of the receipts; where one contradicts another, none."""
        new: dict[tuple[int, int], Counter[Event]] = {}
        for client, t, events in receipts:
            _check_whole("receipt.client", client, at_least=0)
            _check_whole("receipt.t", t, at_least=0)
            events = Counter(dict(_plan(events)))
            known = self._receipts.get((client, t), new.get((client, t), events))
            if known != events:
                raise InputError(
                    f"receipt: client {client} was charged for round {t} before, with other events ({dict(known)}, now "
                    f"{dict(events)}). A round done again must spend the same; another run needs a ledger of its own."
                )
            new[client, t] = events
        for (client, t), events in new.items():
            if (client, t) not in self._receipts:
                self._plans[client] = _plan(self.events(client) + events)
        self._receipts |= new

    def __iter__(self) -> Iterator[Receipt]:
        """The receipts as they came: what has to be stored."""
        return (Receipt(client, t, events.copy()) for (client, t), events in self._receipts.items())

    def clients(self) -> list[int]:
        """Who has taken part."""
        return sorted(self._plans)

    def events(self, client: int) -> Counter[Event]:
        """All that a client has spent; nothing where it never took part."""
        return Counter(dict(self._plans.get(client, Plan())))

    def epsilon(self, delta: float, observer: str = "server", accountant: str = "pld") -> float:
        """Of the worst client, for an observer who sees all uploads and who took part; 0 when nothing was released."""
        if observer not in OBSERVERS:
            raise InputError(f"observer: there is no {observer!r}; choose one of: {', '.join(OBSERVERS)}.")
        worst = _undominated(self._plans.values())
        return max((_epsilon(plan, delta, accountant) for plan in worst), default=_epsilon(Plan(), delta, accountant))

    def epsilons(self, delta: float, accountant: str = "pld") -> dict[int, float]:
        """Of every client that took part."""
        return {client: _epsilon(self._plans[client], delta, accountant) for client in self.clients()}

    def statement(self, delta: float) -> str:
        """The guarantee in words, with all that it rests on."""
        worst = {name: _upwards(self.epsilon(delta, accountant=name)) for name in ACCOUNTANTS}
        if not (events := {event for plan in self._plans.values() for event, _ in plan}):
            return f"epsilon = 0 at delta = {delta:g}: nothing has been released."
        plans = sorted(self._plans.values(), key=_variance)
        median = {name: _upwards(_epsilon(plans[len(plans) // 2], delta, name)) for name in ACCOUNTANTS}
        num_bare = sum(any(event.multiplier < FAINT for event, _ in plan) for plan in plans)
        num_small = sum(any(event.rate == 1 for event, _ in plan) for plan in plans)
        verdict = (
            f"not private. {num_bare} of {len(plans)} clients released something without noise (sigma 0, or nearly)."
            if num_bare
            else f"the price of one record, at delta = {delta:g}, at the worst of {len(plans)} clients."
        )
        return f"""\
epsilon = {worst["pld"]}: {verdict}
  Worst client: {worst["pld"]} by PLD (privacy loss distributions, tight), {worst["rdp"]} by RDP (Renyi, as in the papers).
  Median client, by the variance of its privacy loss: {median["pld"]} by PLD, {median["rdp"]} by RDP.
  Clients: {len(plans)} took part. Each pays for the rounds in which it really did, the run for its worst client.
  Clients smaller than the batch (no more records than it has: rate 1, no amplification): {num_small}.
  Unit: one record of one client. No record belongs to two clients.
  Neighbours: {NEIGHBOURS[min(events).sampling]}
  Observer: {" ".join(OBSERVED[kind] for kind in sorted({event.aggregation for event in events}))}
  Treated as public: the clients' sizes, the batch sizes, the participation.
  Noise: a simulation keys it by the seed, and whoever knows the seed can remove it: for experiments only.
    A deployment draws it from a secure generator."""


def epsilon(events: Mapping[Event, int], delta: float, accountant: str = "pld") -> float:
    """What one client's events cost together; infinite when one has no noise.

    >>> round(epsilon({Event("poisson", 16, 1000, 1.0): 200}, 1e-5), 2)
    1.48
    """
    return _epsilon(_plan(events), delta, accountant)


def calibrate(epsilon: float, delta: float, plans: Iterable[Mapping[Event, int]], accountant: str = "pld") -> float:
    """The smallest sigma with which no client spends more than ``epsilon``; at most 0.1 % above the true one.

    A plan is what one client is going to spend. The sigma of its events is relative: 1 becomes what is returned. The result was
    tried: `epsilon` of the scaled plans does not exceed the target.
    """
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon: must be a finite number above 0, got {epsilon}. 1 is strong, 8 is common.")
    worst = _undominated(_plan(plan) for plan in plans)
    if not any(worst):
        raise InputError("plans: nothing is going to be released, so there is no sigma to find. Plan a round at least.")
    if any(event.sigma == 0 for plan in worst for event, _ in plan):
        raise InputError("plans: an event has sigma 0, and any multiple of it is 0. Give it a sigma above 0, such as 1.")

    def spent(plan: Plan, sigma: float) -> float:
        scaled = Plan((replace(event, sigma=event.sigma * sigma), count) for event, count in plan)
        return _epsilon(scaled, delta, accountant)

    aim, sigma = epsilon * (1 - 1e-6), 0.0  # a hair below, as others may round sigma otherwise
    for plan in worst:
        if sigma == 0 or spent(plan, sigma) > aim:
            sigma = _smallest_sigma(partial(spent, plan), aim)
    return sigma


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


@lru_cache(maxsize=2**14)
def _epsilon(plan: Plan, delta: float, accountant: str) -> float:
    if not 0 < delta < 1:
        raise InputError(f"delta: must lie between 0 and 1, got {delta}. Take well below 1 / records, such as 1e-5.")
    if accountant not in ACCOUNTANTS:
        raise InputError(f"accountant: there is no {accountant!r}; choose one of: {', '.join(ACCOUNTANTS)}.")
    _check_one_relation([plan])
    if any(event.multiplier < FAINT for event, _ in plan):
        return math.inf
    return ACCOUNTANTS[accountant](plan, delta) if plan else 0.0


def _pld_epsilon(plan: Plan, delta: float) -> float:
    """By privacy loss distributions: tight and from above, for every loss is rounded pessimistically to a grid of width h.

    That adds about h^2 / 6 to the variance of a step, so h is a small part of a step's spread; and a power of two, so that who
    spends less never gets a coarser grid. The Fourier transforms err by some 2^-52 a step, which may also be downwards: it is
    taken off delta, and where delta is not far above it, RDP answers instead.
    """
    num_steps = sum(count for _, count in plan)
    noise = num_steps * 2.0**-50
    if noise > delta / 8:
        return _rdp_epsilon(plan, delta)
    log_tail = math.log(delta) - 20  # what lies beyond this mass counts as an infinite loss
    reach = max(_reach(event, log_tail) for event, _ in plan)
    width = max(math.sqrt(_variance(plan) / num_steps) / 16, reach / 2**14, 2**-20)
    total: Any = None
    for event, count in sorted(plan):
        step = _step_loss(event.sampling, event.rate, event.multiplier, 2.0 ** math.floor(math.log2(width)), log_tail)
        total = total.compose(step.self_compose(count)) if total else step.self_compose(count)
    with np.errstate(over="ignore"):  # beyond 700 or so the answer may be infinite
        return float(total.get_epsilon_for_delta(delta - noise))


@lru_cache(maxsize=256)
def _step_loss(sampling: str, rate: float, sigma: float, width: float, log_tail: float) -> Any:
    """The privacy loss distribution of one step."""
    pld = import_module("dp_accounting.pld")
    setting: dict[str, Any] = {"sampling_prob": rate, "log_mass_truncation_bound": log_tail}
    if sampling == "poisson":
        return pld.privacy_loss_distribution.from_gaussian_mechanism(sigma, value_discretization_interval=width, **setting)
    direction, mechanism = pld.privacy_loss_mechanism.AdjacencyType, pld.privacy_loss_mechanism.GaussianPrivacyLoss
    remove, add = (mechanism(sigma, adjacency_type=which, **setting) for which in (direction.REMOVE, direction.ADD))
    top = math.ceil(remove.connect_dots_bounds().epsilon_upper / width)
    grid = width * np.arange(-top, top + 1)
    profile = np.concatenate([add.get_delta_for_epsilon(grid[:top]), remove.get_delta_for_epsilon(grid[top:])])
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, -top, top, profile)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _variance(plan: Plan) -> float:
    """About the variance of the privacy loss: of each step the smaller of two estimates, for much and for little noise."""

    def step(rate: float, inverse: float) -> float:
        return min(rate**2 * math.expm1(inverse), rate * (inverse + (1 - rate) * inverse**2 / 4))

    if any(event.multiplier < FAINT for event, _ in plan):
        return math.inf
    return math.fsum(count * step(event.rate, event.multiplier**-2) for event, count in plan)


def _reach(event: Event, log_tail: float) -> float:
    """About the largest finite loss of one step."""
    quantile = 0.5 / event.multiplier + math.sqrt(-2 * log_tail)
    return math.log1p(event.rate * math.expm1(quantile / event.multiplier))


def _rdp_epsilon(plan: Plan, delta: float) -> float:
    """By Renyi divergences, as in the papers: looser, and from above."""
    rdp = import_module("dp_accounting.rdp")
    curve = sum(count * _step_divergences(event) for event, count in plan)
    return float(rdp.compute_epsilon(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS, curve, delta)[0])


@lru_cache(maxsize=2**14)
def _step_divergences(event: Event) -> Any:
    accounting = import_module("dp_accounting")
    relations = accounting.NeighboringRelation
    relation = relations.ADD_OR_REMOVE_ONE if event.sampling == "poisson" else relations.REPLACE_ONE
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it reports every order that it leaves out, which only makes epsilon larger
    try:
        return accounting.rdp.RdpAccountant(neighboring_relation=relation).compose(event.dp_event()).rdp
    finally:
        log.setLevel(level)


ACCOUNTANTS: dict[str, Callable[[Plan, float], float]] = {"pld": _pld_epsilon, "rdp": _rdp_epsilon}


def _plan(events: Mapping[Event, int]) -> Plan:
    for count in events.values():
        _check_whole("events, count", count, at_least=0)
    return Plan((event, count) for event, count in events.items() if count)


def _undominated(plans: Iterable[Plan]) -> list[Plan]:
    """The plans among which the worst one is: of one kind of event, a higher rate, more steps and less noise cost more."""
    distinct = set(plans)
    _check_one_relation(distinct)
    worst: list[tuple[float, int, float]] = []
    kept = [plan for plan in distinct if len(plan) != 1]
    single = [(-event.rate, -count, event.sigma, plan) for plan in distinct if len(plan) == 1 for event, count in plan]
    for rate, count, sigma, plan in sorted(single, key=lambda entry: entry[:3]):
        if not any(other[0] <= rate and other[1] <= count and other[2] <= sigma for other in worst):
            worst.append((rate, count, sigma))
            kept.append(plan)
    return kept


def _check_one_relation(plans: Iterable[Plan]) -> None:
    if len({event.sampling for plan in plans for event, _ in plan}) > 1:
        raise InputError(
            "events: 'poisson' and 'fixed' sampling are mixed. They have different neighbours (a record more or less; a "
            "record replaced), so no epsilon covers both. Use one sampling, or two ledgers."
        )


def _check_whole(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise InputError(f"{name}: must be a whole number, {at_least} or above, got {value!r}.")


def _upwards(value: float) -> str:
    """Four decimals, never rounded down."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else "inf"
