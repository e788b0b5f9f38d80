"""What every client has been charged, and what that means.

The ledger stores events, never an epsilon: that number means nothing without its delta, observer, neighbours and accountant, so
it is computed when somebody asks.

Observers. The ``server`` sees every upload (under secure aggregation their sum) and who took part: each client pays for the
rounds in which it did, and drawing the clients amplifies nothing. The ``public`` sees the published models only. Where each
client joined each round by an independent coin, its price may be averaged over the coins; that it is not amplified is
explained in `dpfed.accountants`. Any other drawing, and public and server are one. With ``unit="client"`` the server adds the
noise and is trusted: only the public is held off, and the coin that draws a client is the sampling of the event itself.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from dpfed.accountants import (
    ACCOUNTANTS,
    FAINT,
    Event,
    Plan,
    as_plan,
    check_one_relation,
    check_whole,
    epsilon,
    plan_epsilon,
    undominated,
    variance,
)
from dpfed.errors import InputError
from dpfed.planning import batch_size_within, calibrate, participation_within, rounds_within

__all__ = [
    "EVERYBODY",
    "OBSERVERS",
    "Event",
    "Ledger",
    "Receipt",
    "batch_size_within",
    "calibrate",
    "epsilon",
    "participation_within",
    "rounds_within",
]

OBSERVERS = ("server", "public")
EVERYBODY = -1  # the client of a receipt that all clients pay, whether they were drawn or not
NEIGHBOURS = {
    ("example", "poisson"): (
        "add or remove one record; it moves the clipped sum by at most C.",
        "Poisson. Every record joins every batch independently, at the rate batch size / records.",
    ),
    ("example", "fixed"): (
        "replace one record by another; it moves the clipped sum by at most 2C.",
        "fixed size. Every batch is drawn anew, uniformly and without replacement.",
    ),
    ("client", "poisson"): (
        "add or remove one client with all its records; it moves the clipped sum by at most C.",
        "Poisson. Every client joins every cohort independently, at the rate cohort / clients; who did stays secret.",
    ),
    ("client", "fixed"): (
        "replace one client by another; it moves the clipped sum by at most 2C.",
        "fixed size. Every cohort is drawn anew, uniformly and without replacement; who is in it stays secret.",
    ),
}
NEIGHBOURS["batch", "fixed"] = (
    "none. What is clipped is the gradient of a whole batch, tensor by tensor: one record can turn it around,\n    which moves "
    "each of L tensors by 2C, against noise of sigma C / batch size.",
    NEIGHBOURS["example", "fixed"][1],
)
OBSERVED = {
    "open": "the server. It sees every upload and who took part, so drawing the clients amplifies nothing.",
    "secure": """the server, under secure aggregation. It sees who took part, and of their uploads only the sum.
    Assumed, not done by a simulation: nobody sees a single upload, which carries only its client's share of the noise, and no
    more clients tell theirs than was allowed for.""",
    "client": """the public, who sees the published models. Against the server epsilon is inf: it is trusted to clip the
    uploads, to add the noise, and to keep to itself what it sees and who took part.""",
}


class Receipt(NamedTuple):
    """What one client spent in round ``t``."""

    client: int
    t: int
    events: Counter[Event]


class Bill(NamedTuple):
    """What each of several clients spent in round ``t``. Clients stand in rising order."""

    t: int
    clients: tuple[int, ...]
    plan: Plan

    def receipts(self) -> list[Receipt]:
        """One for each client. They share their events."""
        events = Counter(dict(self.plan))
        return [Receipt(client, self.t, events) for client in self.clients]


def bills(receipts: Iterable[Receipt]) -> list[Bill]:
    """The receipts by round and price; one that is there twice counts once."""
    receipts = list(receipts)  # all of them exist at once, so no two Counters have the same address
    alike: dict[tuple[int, int], list[int]] = {}
    prices = {id(events): events for _, _, events in receipts}
    for client, t, events in receipts:
        if type(client) is not int or type(t) is not int or client < EVERYBODY or t < 0:
            check_whole("receipt.client", client, at_least=EVERYBODY)
            check_whole("receipt.t", t, at_least=0)
        if (clients := alike.get((t, id(events)))) is None:
            clients = alike[t, id(events)] = []
        clients.append(client)
    found: dict[tuple[int, Plan], set[int]] = {}
    for (t, price), clients in alike.items():
        found.setdefault((t, as_plan(prices[price])), set()).update(clients)
    return sorted((Bill(t, tuple(sorted(clients)), plan) for (t, plan), clients in found.items()), key=lambda bill: bill[:2])


@lru_cache(maxsize=2**10)
def _together(plan: Plan, more: Plan) -> Plan:
    return as_plan(Counter(dict(plan)) + Counter(dict(more)))


class Ledger:
    """The receipts of a run. One that is posted again, as after a crash, counts once.

    There may be millions, of clients that are mostly alike: they are kept by bill, and priced by what is distinct.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, list[Bill]] = {}
        self._plans: dict[int, Plan] = {}
        self._distinct: Counter[Plan] = Counter()  # how many clients have each plan
        self._announced: dict[int, float] = {}

    def post(self, receipts: Iterable[Receipt]) -> list[Bill]:
        """Take in all of the receipts, and give those that are new; where one contradicts another, none."""
        fresh, charged = list[Bill](), dict[int, dict[int, Plan]]()
        for t, clients, plan in bills(receipts):
            if t not in charged:
                charged[t] = {client: bill.plan for bill in self._rounds.get(t, ()) for client in bill.clients}
            known, events = charged[t], dict(plan)
            for client in (clients[0], clients[-1]):  # in rising order, and EVERYBODY is below all others
                if any((event.unit == "client") != (client == EVERYBODY) for event in events):
                    raise InputError(
                        f"receipt: client {client} has events {events}. Those with unit='client' are paid by all clients, in "
                        f"one receipt a round, of client {EVERYBODY} (EVERYBODY); those with unit='example' by one client each."
                    )
            for client in clients if known else ():
                if known.get(client, plan) != plan:
                    raise InputError(
                        f"receipt: client {client} was charged for round {t} before, with other events ({dict(known[client])}, "
                        f"now {events}). A round done again must spend the same; another run needs a ledger of its own."
                    )
            if new := tuple(client for client in clients if client not in known):
                known.update(dict.fromkeys(new, plan))
                fresh.append(Bill(t, new, plan))
        self._check_coins(self._announced, {bill.clients[0] for bill in fresh})
        for bill in fresh:
            self._rounds[bill.t] = [*self._rounds.get(bill.t, ()), bill]
            self._add(bill.clients, bill.plan)
        return fresh

    def _add(self, clients: tuple[int, ...], more: Plan) -> None:
        """To what these clients have spent: by those who had spent the same."""
        before = Counter(map(self._plans.get, clients))
        after = {plan: _together(plan or Plan(), more) for plan in before}
        for client in clients:
            self._plans[client] = after[self._plans.get(client)]
        for plan, count in before.items():
            self._distinct[after[plan]] += count
        for plan, count in before.items():
            if plan is not None:
                self._distinct[plan] -= count
        for plan in before:
            if plan is not None and not self._distinct[plan]:
                del self._distinct[plan]

    def announce(self, rounds: Mapping[int, float]) -> None:
        """Say of rounds that every client joined them by an independent coin of this rate, also where nobody did."""
        for t, rate in rounds.items():
            check_whole("round", t, at_least=0)
            if not 0 < rate <= 1:
                raise InputError(f"rate: must be above 0 and at most 1, got {rate} for round {t}.")
            if self._announced.get(t, rate) != rate:
                raise InputError(f"rate: round {t} was announced at {self._announced[t]}, and now at {rate}. Say it once.")
        self._check_coins(rounds, self._plans)
        self._announced |= rounds

    @property
    def announced(self) -> dict[int, float]:
        """The rounds that were joined by a coin, and its rate."""
        return self._announced.copy()

    def before(self, t: int) -> Ledger:
        """What had been spent before round ``t``: where that is all, the ledger itself."""
        if t > max(chain(self._rounds, self._announced), default=-1):
            return self
        earlier = Ledger()
        earlier.announce({index: rate for index, rate in self._announced.items() if index < t})
        earlier.post(receipt for receipt in self if receipt.t < t)
        return earlier

    def __iter__(self) -> Iterator[Receipt]:
        """The receipts as they came: what has to be stored."""
        return (receipt for bills in self._rounds.values() for bill in bills for receipt in bill.receipts())

    def clients(self) -> list[int]:
        """Who has paid."""
        return sorted(self._plans)

    def distinct(self) -> set[Plan]:
        """What there is, without saying who has spent it."""
        return set(self._distinct)

    def events(self, client: int) -> Counter[Event]:
        """All that a client has spent; nothing where it never took part."""
        return Counter(dict(self._plans.get(client, Plan())))

    def epsilon(self, delta: float, observer: str | None = None, accountant: str = "pld") -> float:
        """Of the worst client; 0 when nothing was released. The observer is by default the one that the noise holds off."""
        observer = self._observer(observer)
        check_one_relation(self._distinct)
        alike: dict[object, dict[Plan, Plan]] = {0: {Plan(): Plan()}}  # who is worse in one price is in the other
        usual, priced = self._usual(observer), {(plan, Plan()) for plan in self._distinct}
        if usual:
            priced = {(plan, usual.get(client, Plan())) for client, plan in self._plans.items()}
        for plan, once in priced:
            alike.setdefault(max(once)[1] if len(once) == 1 else once, {})[plan] = once
        worst = ((plan, group[plan]) for group in alike.values() for plan in undominated(group))
        return max(self._price(plan, once, delta, observer, accountant) for plan, once in worst)

    def epsilons(self, delta: float, accountant: str = "pld", observer: str | None = None) -> dict[int, float]:
        """Of every client that has paid."""
        observer = self._observer(observer)
        usual = self._usual(observer)
        plans = ((i, self._plans[i], usual.get(i, Plan())) for i in self.clients())
        return {i: self._price(plan, once, delta, observer, accountant) for i, plan, once in plans}

    def would_spend(
        self, receipts: Iterable[Receipt], delta: float, observer: str | None = None, accountant: str = "pld"
    ) -> float:
        """What `epsilon` would be after these receipts; nothing is posted."""
        after = copy.copy(self)
        after._rounds, after._plans, after._distinct = self._rounds.copy(), self._plans.copy(), self._distinct.copy()
        after.post(receipts)
        return after.epsilon(delta, observer, accountant)

    def _price(self, plan: Plan, once: Plan, delta: float, observer: str, accountant: str) -> float:
        price = plan_epsilon(plan, delta, accountant)
        if observer == "server" and any(event.unit == "client" for event, _ in plan):
            return math.inf  # it saw the uploads before it added the noise
        if not once:
            return price
        rounds, rate = 1 + max(self._announced), max(self._announced.values())
        return min(price, plan_epsilon(once, delta, accountant, rounds, rate))

    def _observer(self, name: str | None) -> str:
        if name is not None and name not in OBSERVERS:
            raise InputError(f"observer: there is no {name!r}; choose one of: {', '.join(OBSERVERS)}.")
        return name or ("public" if EVERYBODY in self._plans else "server")

    def _check_coins(self, rounds: Iterable[int], clients: Iterable[int]) -> None:
        if EVERYBODY in clients and (t := next(iter(rounds), None)) is not None:
            raise InputError(
                f"round {t}: was announced as joined by a coin, but events with unit='client' have that coin as their own "
                "sampling, and it would count twice. Announce nothing there."
            )

    def _usual(self, observer: str = "public") -> dict[int, Plan]:
        """What every round costs a client that paid the same in all of them, and joined them by a coin: what it would have
        paid, too, in the rounds that it did not join. To the public: its price may be averaged."""
        usual: dict[int, Plan] = {}
        for bill in (bill for bills in self._rounds.values() for bill in bills) if observer == "public" else ():
            for client in bill.clients:
                same = bill.t in self._announced and usual.setdefault(client, bill.plan) == bill.plan
                usual[client] = bill.plan if same else Plan()
        return {client: plan for client, plan in usual.items() if plan}

    def statement(self, delta: float) -> str:
        """The guarantee in words, with all that it rests on."""
        worst = self._both(delta)
        if not (events := {event for plan in self._distinct for event, _ in plan}):
            return f"epsilon = 0 at delta = {delta:g}: nothing has been released."
        plans = [plan for plan in sorted(self._distinct, key=variance) for _ in range(self._distinct[plan])]
        first = min(events)
        num_bare = sum(any(event.multiplier < FAINT for event, _ in plan) for plan in plans)
        who = "The server" if first.unit == "client" else f"{num_bare} of {len(plans)} clients"
        what = "one client" if first.unit == "client" else "one unit" if first.grouped else "one record"
        where = "" if first.unit == "client" else f", at the worst of {len(plans)} clients"
        verdict = f"the price of {what}, at delta = {delta:g}{where}."
        if num_bare:
            verdict = f"not private. {who} released something without noise (sigma 0, or nearly)."
        if first.unit == "batch":
            verdict = "not private. Batches were clipped instead of records, as in the released code of DP-FedAdamW."
        neighbours, sampling = NEIGHBOURS[first.unit, first.sampling]
        if first.grouped:
            most, verb = round(first.sigma / first.multiplier), "add or remove" if first.sampling == "poisson" else "replace"
            neighbours = f"{verb} one unit; it moves the clipped sum by at most {most}C."
        return "\n  ".join(
            [
                f"epsilon = {worst['pld']}: {verdict}",
                f"Worst client: {worst['pld']} by PLD (privacy loss distributions, tight), {worst['rdp']} by RDP (Renyi, as in "
                "the papers).",
                *(self._all_alike(first) if first.unit == "client" else self._one_by_one(delta, plans)),
                f"Neighbours: {neighbours}",
                f"Sampling: {sampling}",
                *("Observer: " + text for text in self._observers(delta, events)),
                *_large_delta(delta, events),
                "Noise: a simulation keys it by the seed, and whoever knows the seed can remove it: for experiments only.",
                "  A deployment draws it from a secure generator.",
            ]
        )

    def _both(self, delta: float, observer: str | None = None) -> dict[str, str]:
        return {name: upwards(self.epsilon(delta, observer, name)) for name in ACCOUNTANTS}

    def _one_by_one(self, delta: float, plans: list[Plan]) -> list[str]:
        """Of a ledger of records; the plans stand in the order of their price, nearly."""
        median = {name: upwards(plan_epsilon(plans[len(plans) // 2], delta, name)) for name in ACCOUNTANTS}
        shown = plans[:: -math.ceil(len(plans) / 40)]  # the dearest among them
        num_small = sum(any(event.rate == 1 for event, _ in plan) for plan in plans)
        return [
            f"Median client, by the variance of its privacy loss: {median['pld']} by PLD, {median['rdp']} by RDP.",
            *_histogram([plan_epsilon(plan, delta) for plan in shown], len(plans)),
            f"Clients: {len(plans)} took part. Each pays for the rounds in which it really did, the run for its worst client.",
            f"Clients smaller than the batch (no more records than it has: rate 1, no amplification): {num_small}.",
            "Unit: " + _unit(next(event for plan in plans for event, _ in plan)),
            "Treated as public: the clients' sizes, the batch sizes, the participation.",
        ]

    def _all_alike(self, event: Event) -> list[str]:
        return [
            f"Clients: {event.num_examples}. All pay for every round, drawn or not.",
            "Unit: one client, with all its records. No client is there twice.",
            "Treated as public: the number of clients, the expected cohort.",
        ]

    def _observers(self, delta: float, events: set[Event]) -> Iterator[str]:
        kinds = {"client" if event.unit == "client" else event.aggregation for event in events}
        yield from (OBSERVED[kind] for kind in sorted(kinds))
        if not self._announced:
            return
        public, num_other = self._both(delta, "public"), len(self._plans) - len(self._usual())
        yield (
            f"the public, who sees only the published models: {public['pld']} by PLD, {public['rdp']} by RDP.\n    Every "
            f"client joined each of {1 + max(self._announced)} rounds by an independent coin. Its price is averaged over the "
            "coins, whose luck is part of delta,\n    or is the one above, if that is less. It is not amplified: a model "
            f"may well show who took part. Without an average: {num_other}\n    clients, whose rounds differ in price or "
            "were joined otherwise."
        )


def _unit(event: Event) -> str:
    if not event.grouped:
        return "one record of one client. No record belongs to two clients."
    return (
        f"an owner of at most {event.owned} of a client's records who is read by at most {event.readers} others, such as a "
        "node\n    of a graph and its links. What it owns comes or goes with it; what reads it stays and changes, by up to 2C."
    )


def _large_delta(delta: float, events: set[Event]) -> Iterator[str]:
    """Where delta alone would allow to publish somebody."""
    most, what = max((event.num_examples, event.unit == "client") for event in events)
    if delta * most >= 1:
        among = f"{most} clients" if what else f"the {most} records of a client"
        yield (
            f"Warning: delta is not below 1 / {most}. Who published one of {among}, drawn at random, would keep\n    such a "
            "promise. Read it at a smaller delta."
        )


def _histogram(prices: list[float], num_clients: int) -> list[str]:
    """One mark a client."""
    finite = [price for price in prices if price < math.inf]
    low, width = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) / 5
    if width < 1e-4:
        return []
    counts = Counter(min(4, int((price - low) / width)) for price in finite)
    edges = [f"{upwards(low + width * i)} to {upwards(low + width * (i + 1))}" for i in range(5)]
    rows = [f"  {edges[i]:>24}  {'█' * counts[i]} {counts[i]}" for i in range(5)]
    endless = [f"  {'inf':>24}  {len(prices) - len(finite)}"] if len(finite) < len(prices) else []
    shown = f"{len(prices)} of the " if len(prices) < num_clients else ""
    return [f"By PLD, {shown}{num_clients} clients:", *rows, *endless]


def upwards(value: float, digits: int = 4) -> str:
    """An epsilon as it is shown: never rounded down.

    >>> upwards(1.00001), upwards(2.0, digits=2), upwards(math.inf)
    ('1.0001', '2.00', 'inf')
    """
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}" if math.isfinite(value) else "inf"
