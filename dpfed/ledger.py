"""What every record has been charged, and what that is worth in epsilon.

The ledger stores events and never an epsilon: a number without its delta, observer, neighbours and accountant means nothing,
so it is computed when somebody asks for it, from the public facts alone.

Formal guarantee. For every client and every pair of neighbouring data sets, the joint view of all its releases is
(epsilon, delta)-indistinguishable. A client with ``sampling="poisson"`` is compared with itself plus or minus one record; one step
is the pair  (1 - q) N(0, sigma^2) + q N(1, sigma^2)  against  N(0, sigma^2), in the two directions, each composed on its own.
With ``sampling="fixed"`` one record is replaced by another: the sum moves by up to 2C, so the multiplier is sigma / 2, and
whichever batch is drawn, the record was exchanged with another one of it. By advanced joint convexity (Balle, Barthe, Gaboardi 2018,
arXiv 1807.01647; Zhu, Dong, Wang 2022, arXiv 2106.08567) the profile of the first direction above bounds orders of at least 1, that of
the other one the orders below, both at sigma / 2 and q = B / N. At q = 1 both kinds are the plain Gaussian mechanism, exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from dpfed.errors import InputError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

OBSERVERS = ("server",)
Plan = frozenset[tuple["Event", int]]  # what one client spends, in a form that can be looked up


@dataclass(frozen=True, order=True)
class Event:
    """One noisy release of a sum of clipped gradients: all that an accountant has to know.

    ``sigma`` is the noise of the sum over the clipping norm C; 0 means no noise, and then epsilon is infinite.
    """

    sampling: Literal["poisson", "fixed"]
    batch_size: int
    num_examples: int
    sigma: float

    def __post_init__(self) -> None:
        if self.sampling not in ("poisson", "fixed"):
            raise InputError(f"event.sampling: must be 'poisson' or 'fixed', got {self.sampling!r}.")
        _check_whole("event.batch_size", self.batch_size, at_least=1)
        _check_whole("event.num_examples", self.num_examples, at_least=1)
        if not 0 <= self.sigma < math.inf:
            raise InputError(f"event.sigma: must be a finite number, 0 or above, got {self.sigma}.")

    @property
    def rate(self) -> float:
        """The share of the client's records in a batch; 1 for a client that has no more records than the batch."""
        return min(1.0, self.batch_size / self.num_examples)

    @property
    def multiplier(self) -> float:
        """The noise over what one record can move: C when it comes or goes, 2C when it is replaced."""
        return self.sigma if self.sampling == "poisson" else self.sigma / 2

    def dp_event(self) -> DpEvent:
        """The same in the words of ``dp_accounting``, the multiplier always taken over the sensitivity."""
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
        if sorted(plain) != sorted(names):
            raise InputError(f"event: must have exactly the fields {', '.join(names)}, got {', '.join(sorted(plain)) or 'none'}.")
        return cls(**plain)


class Receipt(NamedTuple):
    """What one client spent in round ``t``."""

    client: int
    t: int
    events: Counter[Event]


class Ledger:
    """All receipts of a run. A receipt may be posted again, as after a crash; it counts once."""

    def __init__(self, receipts: Iterable[Receipt] = ()) -> None:
        self._receipts: dict[tuple[int, int], Counter[Event]] = {}
        self._spent: dict[int, Counter[Event]] = {}
        self.post(receipts)

    def post(self, receipts: Iterable[Receipt]) -> None:
        """Take in all of the receipts, or, when one contradicts an earlier one, none of them."""
        new: dict[tuple[int, int], Counter[Event]] = {}
        for client, t, events in receipts:
            _check_whole("receipt.client", client, at_least=0)
            _check_whole("receipt.t", t, at_least=0)
            events = Counter(dict(_plan(events)))
            known = self._receipts.get((client, t), new.get((client, t), events))
            if known != events:
                raise InputError(
                    f"receipt: client {client} was already charged for round {t}, and with other events. A round that is done "
                    "again must spend the same; if this is another run, give it a ledger of its own."
                )
            if (client, t) not in self._receipts:
                new[client, t] = events
        self._receipts |= new
        for (client, _), events in new.items():
            self._spent.setdefault(client, Counter()).update(events)

    def __iter__(self) -> Iterator[Receipt]:
        """The receipts, in the order in which they came: what has to be stored."""
        return (Receipt(client, t, events.copy()) for (client, t), events in self._receipts.items())

    def clients(self) -> list[int]:
        """Who has taken part."""
        return sorted(self._spent)

    def events(self, client: int) -> Counter[Event]:
        """All that a client has spent; nothing for one that never took part."""
        return self._spent.get(client, Counter[Event]()).copy()

    def epsilon(self, delta: float, observer: str = "server", accountant: str = "pld") -> float:
        """Of the worst client, for an observer who sees every upload and who took part. 0 when nothing was released."""
        if observer not in OBSERVERS:
            raise InputError(f"observer: there is no {observer!r}; choose one of: {', '.join(OBSERVERS)}.")
        _check(delta, accountant)
        plans = {_plan(events) for events in self._spent.values()}
        _one_relation(plans)
        return max((_epsilon(plan, delta, accountant) for plan in _undominated(plans)), default=0.0)

    def epsilons(self, delta: float, accountant: str = "pld") -> dict[int, float]:
        """Of every client that took part."""
        return {client: epsilon(self._spent[client], delta, accountant) for client in self.clients()}

    def statement(self, delta: float) -> str:
        """The guarantee in words, with every assumption that it rests on."""
        _check(delta)
        if not (spent := set[Event]().union(*self._spent.values())):
            return f"epsilon = 0 at delta = {delta:g}: nothing has been released yet."
        sampling = _one_relation([_plan(dict.fromkeys(spent, 1))])
        pld, rdp = self.epsilons(delta), self.epsilons(delta, "rdp")
        exposed = sum(math.isinf(value) for value in pld.values())
        small = sum(any(event.rate == 1 for event in events) for events in self._spent.values())
        if exposed:
            head = [
                f"epsilon = inf: this run is not private. {exposed} of {len(pld)} clients released something without noise "
                "(sigma = 0), and no epsilon can be stated for their records."
            ]
        else:
            head = [f"epsilon = {_upwards(max(pld.values()))} at delta = {delta:g}: the run is differentially private."]
        return "\n".join(
            [
                *head,
                f"  Accountant: PLD (privacy loss distributions, an upper bound) {_side_by_side(pld)};",
                f"    RDP (Renyi divergences, looser, as in the papers) {_side_by_side(rdp)}.",
                f"  Clients: {len(pld)} took part, each is charged for the rounds in which it really did; the run counts as its worst.",
                "  Unit: one record of one client; no record belongs to two clients.",
                f"  Neighbours: {NEIGHBOURS[sampling]}",
                f"  Sampling: {SAMPLING[sampling]}",
                *([f"    {small} of them have no more records than a batch: rate 1, no amplification."] if small else []),
                "  Observer: the server. It sees every upload of every client and who took part; drawing the clients amplifies nothing.",
                "  Public: the clients' sizes, the batch sizes and the participation are treated as known to everybody.",
                "  Noise: in a simulation it is keyed by the seed, so whoever knows the seed can remove it: good for experiments",
                "    only. A deployment draws it from a secure generator.",
            ]
        )


NEIGHBOURS = {
    "poisson": "add or remove one record; it moves the clipped sum by at most C.",
    "fixed": "replace one record by another; it moves the clipped sum by at most 2C.",
}
SAMPLING = {
    "poisson": "Poisson: every record joins every batch independently, at the rate batch size / records.",
    "fixed": "fixed size: every batch is drawn afresh, uniformly and without replacement.",
}


def epsilon(events: Mapping[Event, int], delta: float, accountant: str = "pld") -> float:
    """What the composition of one client's events costs; infinite when one of them has no noise, 0 when there are none."""
    _check(delta, accountant)
    plan = _plan(events)
    _one_relation([plan])
    return _epsilon(plan, delta, accountant)


def calibrate(epsilon: float, delta: float, plans: Iterable[Mapping[Event, int]], accountant: str = "pld") -> float:
    """The smallest sigma with which no client spends more than ``epsilon``, at most 0.1 % above the true one.

    A plan is what one client is going to spend; the sigma of its events is relative, so 1 becomes the returned one, and
    1 / sqrt(2) that over sqrt(2). What is returned was tried: `epsilon` of the scaled plans does not exceed the target.
    """
    _check(delta, accountant)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon: must be a finite number above 0, got {epsilon}. 1 is strong, 8 is common.")
    candidates = _undominated({_plan(plan) for plan in plans})
    _one_relation(candidates)
    if not any(candidates):
        raise InputError("plans: no client is going to release anything, so there is no sigma to find; plan at least one round.")
    if any(event.sigma == 0 for plan in candidates for event, _ in plan):
        raise InputError("plans: an event has sigma 0, and stays without noise whatever it is multiplied by; give it a sigma above 0.")

    def spent(plan: Plan, sigma: float) -> float:
        scaled = frozenset((replace(event, sigma=event.sigma * sigma), count) for event, count in plan)
        return _epsilon(scaled, delta, accountant)

    aim, sigma = epsilon * (1 - 1e-6), 0.0  # a hair below: the run may round sigma otherwise than we do
    for plan in candidates:
        if sigma == 0 or spent(plan, sigma) > aim:
            sigma = _smallest(lambda sigma, plan=plan: spent(plan, sigma), aim)
    return sigma


def _smallest(spent: Callable[[float], float], aim: float) -> float:
    """The smallest sigma with ``spent(sigma) <= aim``, by bracketing and a root in the logarithms, where the curve is nearly straight."""

    def excess(log_sigma: float) -> float:
        return math.log(min(max(spent(math.exp(log_sigma)), 1e-30), 1e30) / aim)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(1e9):
            raise InputError(f"epsilon: {aim:g} cannot be reached at this delta; raise delta, or epsilon.")
    while low == high or excess(low) < 0:
        low, high = low - math.log(2), low
    root: float = import_module("scipy.optimize").brentq(excess, low, high, xtol=2e-4, rtol=1e-12)
    while excess(root) > 0:
        root += 2e-4
    return math.exp(root)


# The accountants


@lru_cache(maxsize=2**14)
def _epsilon(plan: Plan, delta: float, accountant: str) -> float:
    if any(event.sigma == 0 for event, _ in plan):
        return math.inf
    return ACCOUNTANTS[accountant](plan, delta) if plan else 0.0


def _pld_epsilon(plan: Plan, delta: float) -> float:
    """By privacy loss distributions: tight, and from above, as every loss is rounded pessimistically to a grid.

    The grid fits the loss: rounding by h adds about h^2 / 6 to the variance of every step, so h is a small part of a step's
    spread. It is a power of two, so that a plan which costs less never gets a coarser one.
    """
    log_tail = math.log(delta) - 20  # the loss beyond this mass counts as infinite
    num_steps = sum(count for _, count in plan)
    spread = math.sqrt(sum(count * _spread(event) ** 2 for event, count in plan) / num_steps)
    reach = max(_reach(event, log_tail) for event, _ in plan)
    grid = 2.0 ** math.floor(math.log2(max(spread / 16, reach / 2**14)))
    total: Any = None
    for event, count in sorted(plan):
        step = _step_loss(event.sampling, event.rate, event.multiplier, grid, log_tail).self_compose(count)
        total = total.compose(step) if total else step
    return float(total.get_epsilon_for_delta(delta))


def _spread(event: Event) -> float:
    """Roughly the standard deviation of the privacy loss of one step."""
    rate, sigma = event.rate, event.multiplier
    return min(rate * math.sqrt(math.expm1(min(sigma**-2, 50))), math.sqrt(rate) / sigma)


def _reach(event: Event, log_tail: float) -> float:
    """Roughly the largest finite privacy loss of one step."""
    full = (0.5 + math.sqrt(-2 * log_tail) * event.multiplier) / event.multiplier**2
    return math.log1p(event.rate * math.expm1(full)) if full < 500 else full + math.log(event.rate)


@lru_cache(maxsize=256)
def _step_loss(sampling: str, rate: float, sigma: float, grid: float, log_tail: float) -> Any:
    """The privacy loss distribution of one step, on multiples of ``grid``."""
    pld = import_module("dp_accounting.pld")
    if sampling == "poisson":
        return pld.privacy_loss_distribution.from_gaussian_mechanism(
            sigma, value_discretization_interval=grid, log_mass_truncation_bound=log_tail, sampling_prob=rate
        )
    mechanism = pld.privacy_loss_mechanism
    remove, add = (
        mechanism.GaussianPrivacyLoss(
            sigma, log_mass_truncation_bound=log_tail, sampling_prob=rate, adjacency_type=mechanism.AdjacencyType[direction]
        )
        for direction in ("REMOVE", "ADD")
    )
    top = math.ceil(remove.connect_dots_bounds().epsilon_upper / grid)
    below, above = ([grid * step for step in steps] for steps in (range(-top, 0), range(top + 1)))
    deltas = [*add.get_delta_for_epsilon(below), *remove.get_delta_for_epsilon(above)]
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -top, top, deltas)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _rdp_epsilon(plan: Plan, delta: float) -> float:
    """By Renyi divergences, the accountant of the papers: never below PLD."""
    rdp = import_module("dp_accounting.rdp")
    orders = rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    curve = sum(count * _step_divergences(event) for event, count in plan)
    return float(rdp.compute_epsilon(orders, curve, delta)[0])


@lru_cache(maxsize=2**14)
def _step_divergences(event: Event) -> Any:
    """The Renyi divergences of one step. Under replace-one ``dp_accounting`` 0.6 forgets the factor 2: `Event.multiplier` has it."""
    accounting = import_module("dp_accounting")
    relation = accounting.NeighboringRelation
    neighbours = relation.ADD_OR_REMOVE_ONE if event.sampling == "poisson" else relation.REPLACE_ONE
    return accounting.rdp.RdpAccountant(neighboring_relation=neighbours).compose(event.dp_event()).rdp


ACCOUNTANTS: dict[str, Callable[[Plan, float], float]] = {"pld": _pld_epsilon, "rdp": _rdp_epsilon}


# Plans


def _plan(events: Mapping[Event, int]) -> Plan:
    for count in events.values():
        _check_whole("events, count", count, at_least=0)
    return frozenset((event, count) for event, count in events.items() if count)


def _undominated(plans: Iterable[Plan]) -> list[Plan]:
    """The plans among which the worst must be. Of one kind of event, what is sampled more, repeated more and noised less costs more."""
    plans = list(plans)
    kinds = [(event.sampling, -event.rate, -count, event.sigma, plan) for plan in plans if len(plan) == 1 for event, count in plan]
    worst: list[tuple[str, float, int, float, Plan]] = []
    for kind in sorted(kinds, key=lambda kind: kind[:4]):
        if not any(all(a <= b for a, b in zip(other[1:4], kind[1:4], strict=True)) for other in worst if other[0] == kind[0]):
            worst.append(kind)
    return [plan for *_, plan in worst] + [plan for plan in plans if len(plan) != 1]


def _one_relation(plans: Iterable[Plan]) -> str:
    """The sampling of all plans; two kinds are two neighbour relations, and no epsilon speaks of both."""
    kinds = {event.sampling for plan in plans for event, _ in plan}
    if len(kinds) > 1:
        raise InputError(
            "events: 'poisson' and 'fixed' sampling were mixed. They protect against different neighbours (a record more or "
            "less, a record replaced), so no epsilon covers both; use one sampling, or two ledgers."
        )
    return next(iter(kinds), "poisson")


# What people give, and what they read


def _check(delta: float, accountant: str = "pld") -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta: must lie between 0 and 1, got {delta}. Take well below one over the number of records, as 1e-5.")
    if accountant not in ACCOUNTANTS:
        raise InputError(f"accountant: there is no {accountant!r}; choose one of: {', '.join(ACCOUNTANTS)}.")


def _check_whole(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise InputError(f"{name}: must be a whole number, {at_least} or above, got {value!r}.")


def _upwards(value: float) -> str:
    """Four decimals, never rounded down: a guarantee may be said too weakly, not too strongly."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else "inf"


def _side_by_side(epsilons: Mapping[int, float]) -> str:
    return f"{_upwards(max(epsilons.values()))} for the worst client, {_upwards(median(epsilons.values()))} for the median one"
