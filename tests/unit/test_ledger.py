"""The ledger as a book: what is posted, what is refused, what can be stored, and what the statement says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.errors import InputError
from dpfed.ledger import EVERYBODY, Event, Ledger, Receipt, calibrate, epsilon

POISSON = Event("poisson", 16, 1000, 1.0)
FIXED = Event("fixed", 16, 1000, 1.0)
NOISELESS = Event("poisson", 16, 1000, 0.0)
CLIENT = Event("poisson", 10, 200, 2.0, unit="client")
DELTA = 1e-5

events = st.builds(
    Event,
    st.sampled_from(["poisson", "fixed"]),
    st.integers(1, 10**6),
    st.integers(1, 10**9),
    st.floats(0, 1e6, allow_nan=False),
) | st.builds(replace, st.just(POISSON), unit=st.sampled_from(["example", "client"]))


def ledger(*receipts: Receipt) -> Ledger:
    book = Ledger()
    book.post(receipts)
    return book


# Events


@given(events)
def test_an_event_survives_a_file(event: Event) -> None:
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_rate_is_the_drawn_share_and_never_above_one() -> None:
    assert POISSON.rate == 0.016
    assert Event("poisson", 16, 16, 1.0).rate == Event("poisson", 16, 3, 1.0).rate == 1


def test_replacing_a_record_moves_the_sum_twice_as_far() -> None:
    assert (POISSON.multiplier, FIXED.multiplier) == (1.0, 0.5)


def test_events_in_the_words_of_dp_accounting() -> None:
    import dp_accounting as accounting

    gaussian, half = accounting.GaussianDpEvent(1.0), accounting.GaussianDpEvent(0.5)
    assert POISSON.dp_event() == accounting.PoissonSampledDpEvent(0.016, gaussian)
    assert FIXED.dp_event() == accounting.SampledWithoutReplacementDpEvent(1000, 16, half)
    assert Event("poisson", 16, 9, 1.0).dp_event() == gaussian
    assert Event("fixed", 16, 9, 1.0).dp_event() == half
    assert NOISELESS.dp_event() == accounting.NonPrivateDpEvent()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampling", "shuffled"),
        ("aggregation", "hidden"),
        ("unit", "household"),
        ("batch_size", 0),
        ("batch_size", 16.0),
        ("batch_size", True),
        ("num_examples", 0),
        ("num_examples", math.nan),
        ("sigma", -1.0),
        ("sigma", math.inf),
        ("sigma", math.nan),
    ],
)
def test_an_impossible_event_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"event\.{field}"):
        Event.from_json(POISSON.to_json() | {field: value})


def test_an_event_of_another_version_is_refused() -> None:
    plain = POISSON.to_json()
    with pytest.raises(InputError, match="exactly the fields"):
        Event.from_json(plain | {"clip": 1.0})
    del plain["sigma"]
    with pytest.raises(InputError, match="exactly the fields"):
        Event.from_json(plain)


def test_an_event_of_an_older_version_has_what_it_did_not_say() -> None:
    plain = {"sampling": "poisson", "batch_size": 16, "num_examples": 1000, "sigma": 1.0}
    assert Event.from_json(plain) == Event.from_json(plain | {"aggregation": "open"}) == POISSON


def test_a_client_as_the_unit_needs_a_server_that_adds_the_noise() -> None:
    with pytest.raises(InputError, match=r"event\.unit"):
        replace(CLIENT, aggregation="secure")


# Posting


def test_the_same_receipt_counts_once() -> None:
    receipt = Receipt(3, 0, Counter({POISSON: 20}))
    book = ledger(receipt, receipt)
    book.post([receipt])
    assert book.events(3) == {POISSON: 20}
    assert list(book) == [receipt]
    book.post([receipt._replace(t=1), receipt._replace(client=4)])
    assert book.events(3) == {POISSON: 40}
    assert book.clients() == [3, 4]


@pytest.mark.parametrize("before", [Counter({POISSON: 20}), Counter[Event]()])
@pytest.mark.parametrize("now", [Counter({POISSON: 19}), Counter({POISSON: 20, NOISELESS: 1}), Counter({FIXED: 20})])
def test_a_contradicting_receipt_is_refused_and_nothing_of_its_post_is_taken(
    before: Counter[Event], now: Counter[Event]
) -> None:
    book = ledger(Receipt(3, 0, before))
    with pytest.raises(InputError, match="client 3 was charged for round 0"):
        book.post([Receipt(7, 0, before), Receipt(3, 0, now)])
    assert list(book) == [Receipt(3, 0, before)]
    with pytest.raises(InputError, match="client 3 was charged"):
        ledger(Receipt(3, 0, before), Receipt(3, 0, now))


@pytest.mark.parametrize(
    "receipt",
    [
        Receipt(-2, 0, Counter({POISSON: 1})),
        Receipt(0, -1, Counter({POISSON: 1})),
        Receipt(0, 0, Counter({POISSON: -1})),
        Receipt(0, 0, Counter({POISSON: 0.5})),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_impossible_receipt_is_refused(receipt: Receipt) -> None:
    with pytest.raises(InputError, match="whole number"):
        ledger(receipt)


def test_what_everybody_pays_has_a_receipt_of_its_own() -> None:
    for wrong in (Receipt(EVERYBODY, 0, Counter({POISSON: 1})), Receipt(3, 0, Counter({CLIENT: 1}))):
        with pytest.raises(InputError, match="paid by all clients, in one receipt a round"):
            ledger(wrong)


def test_a_round_is_announced_once() -> None:
    book = ledger(Receipt(0, 0, Counter({POISSON: 1})))
    book.announce({0: 0.5, 1: 0.5})
    book.announce({1: 0.5, 2: 1.0})
    book.announced.clear()
    assert book.announced == {0: 0.5, 1: 0.5, 2: 1.0}
    for rounds, said in (
        ({3: 0.0}, "above 0"),
        ({3: 1.1}, "at most 1"),
        ({3: 0.5, 1: 0.4}, "announced at 0.5"),
        ({-1: 0.5}, "round: must be a whole number"),
    ):
        with pytest.raises(InputError, match=said):
            book.announce(rounds)
    assert book.announced == {0: 0.5, 1: 0.5, 2: 1.0}


def test_the_coin_of_a_client_level_event_is_never_counted_twice() -> None:
    announced, posted = Ledger(), ledger(Receipt(EVERYBODY, 0, Counter({CLIENT: 1})))
    announced.announce({0: 0.5})
    with pytest.raises(InputError, match="count twice"):
        announced.post([Receipt(EVERYBODY, 0, Counter({CLIENT: 1}))])
    assert not list(announced)
    with pytest.raises(InputError, match="count twice"):
        posted.announce({0: 0.5})
    assert not posted.announced


def test_nobody_can_change_the_book_from_outside() -> None:
    spent = Counter({POISSON: 20})
    book = ledger(Receipt(0, 0, spent))
    spent[POISSON] = 1
    book.events(0)[POISSON] = 1
    for receipt in book:
        receipt.events.clear()
    assert book.events(0) == {POISSON: 20}
    assert list(book) == [Receipt(0, 0, Counter({POISSON: 20}))]


def test_a_ledger_read_back_is_the_same() -> None:
    book = ledger(*(Receipt(i, t, Counter({POISSON: 5 + i})) for t in range(3) for i in range(2)))
    assert list(ledger(*book)) == list(book)
    assert ledger(*book).epsilon(DELTA) == book.epsilon(DELTA) > 0


# Epsilon


def test_what_was_never_released_costs_nothing() -> None:
    assert Ledger().epsilon(DELTA) == epsilon({}, DELTA) == 0
    assert ledger(Receipt(0, 0, Counter())).epsilons(DELTA) == {0: 0}
    assert Ledger().events(5) == {}


def test_a_release_without_noise_costs_everything() -> None:
    book = ledger(Receipt(0, 0, Counter({POISSON: 3})), Receipt(1, 0, Counter({POISSON: 900, NOISELESS: 1})))
    for accountant in ("pld", "rdp"):
        assert book.epsilon(DELTA, accountant=accountant) == math.inf
        assert math.isfinite(book.epsilons(DELTA, accountant)[0])
    assert epsilon({Event("fixed", 1, 9, 1e-200): 1}, DELTA) == math.inf


clients = st.dictionaries(
    st.integers(0, 99),
    st.tuples(st.sampled_from([40, 50, 60]), st.integers(1, 5), st.sampled_from([1.0, 1.5])),
    min_size=1,
)


@settings(max_examples=25)
@given(clients, st.booleans())
def test_the_run_is_its_worst_client(spent: dict[int, tuple[int, int, float]], mixed: bool) -> None:
    book = ledger(*(Receipt(i, 0, Counter({Event("poisson", 4, n, s): steps})) for i, (n, steps, s) in spent.items()))
    if mixed:
        book.post([Receipt(0, 1, Counter({Event("poisson", 8, 50, 1.0): 1}))])
    epsilons = book.epsilons(DELTA)
    assert list(epsilons) == book.clients()
    assert book.epsilon(DELTA) == max(epsilons.values())
    assert epsilons == {i: epsilon(book.events(i), DELTA) for i in book.clients()}


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf])
def test_delta_is_a_probability(delta: float) -> None:
    book = ledger(Receipt(0, 0, Counter({POISSON: 1})))
    for ask in (
        lambda: book.epsilon(delta),
        lambda: book.epsilons(delta),
        lambda: book.statement(delta),
        lambda: Ledger().epsilon(delta),
        lambda: Ledger().statement(delta),
        lambda: epsilon({POISSON: 1}, delta),
        lambda: epsilon({}, delta),
        lambda: calibrate(1.0, delta, [{POISSON: 1}]),
    ):
        with pytest.raises(InputError, match="delta"):
            ask()


def test_only_what_exists_can_be_asked_for() -> None:
    book = ledger(Receipt(0, 0, Counter({POISSON: 1})))
    for ask in (book.epsilon, book.epsilons):
        with pytest.raises(InputError, match="choose one of: server, public"):
            ask(DELTA, observer="neighbour")
    for ask in (
        lambda: book.epsilon(DELTA, accountant="gdp"),
        lambda: Ledger().epsilon(DELTA, accountant="gdp"),
        lambda: epsilon({POISSON: 1}, DELTA, "gdp"),
        lambda: calibrate(1.0, DELTA, [{POISSON: 1}], "gdp"),
    ):
        with pytest.raises(InputError, match="choose one of: pld, rdp"):
            ask()


def test_two_neighbour_relations_are_never_added_up() -> None:
    both = ledger(Receipt(0, 0, Counter({POISSON: 1})), Receipt(1, 0, Counter({FIXED: 1})))
    for ask in (
        lambda: epsilon({POISSON: 1, FIXED: 1}, DELTA),
        lambda: both.epsilon(DELTA),
        lambda: both.statement(DELTA),
        lambda: calibrate(1.0, DELTA, [{POISSON: 1}, {FIXED: 1}]),
    ):
        with pytest.raises(InputError, match="different neighbours"):
            ask()


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_no_sigma_reaches_an_impossible_epsilon(target: float) -> None:
    with pytest.raises(InputError, match="epsilon: must be a finite number above 0"):
        calibrate(target, DELTA, [{POISSON: 1}])


@pytest.mark.parametrize("plans", [[], [{}], [{POISSON: 0}], [{POISSON: 1}, {NOISELESS: 1}], [{POISSON: -1}]])
def test_a_plan_without_an_answer_is_refused(plans: list[dict[Event, int]]) -> None:
    with pytest.raises(InputError, match=r"plans|count"):
        calibrate(1.0, DELTA, plans)


def test_what_would_be_spent_is_what_is_spent_then() -> None:
    book = ledger(Receipt(0, 0, Counter({POISSON: 20})), Receipt(1, 0, Counter({POISSON: 300})))
    before = list(book), book.epsilon(DELTA)
    further = [Receipt(i, 1, Counter({Event("poisson", 16, 300, 1.0): 10})) for i in (0, 2)]
    would = book.would_spend(further, DELTA)
    assert (list(book), book.epsilon(DELTA)) == before
    assert would > book.epsilon(DELTA) == book.would_spend([], DELTA)
    with pytest.raises(InputError, match="client 0 was charged"):
        book.would_spend([Receipt(0, 0, Counter({POISSON: 1}))], DELTA)
    book.post(further)
    assert book.epsilon(DELTA) == would


# Observers


def by_coins(rounds: int, joined: dict[int, list[int]], rate: float, events: Counter[Event]) -> Ledger:
    book = ledger(*(Receipt(i, t, events) for i, own in joined.items() for t in own))
    book.announce(dict.fromkeys(range(rounds), rate))
    return book


TEN = Counter({POISSON: 10})


def test_the_public_price_is_averaged_over_the_coins() -> None:
    book = by_coins(40, {0: list(range(30)), 1: [3], 2: [5, 6]}, 0.2, TEN)
    average = epsilon(TEN, DELTA, rounds=40, rate=0.2)
    server, public = book.epsilons(DELTA), book.epsilons(DELTA, observer="public")
    assert public == {0: average, 1: server[1], 2: server[2]}, "never more than the server's"
    assert server[2] < average < server[0]
    assert book.epsilon(DELTA, "public") == average < book.epsilon(DELTA) == book.epsilon(DELTA, "server")
    assert book.epsilon(DELTA, "public", "rdp") > average


def test_the_public_pays_for_its_worst_client() -> None:
    kinds = [Counter({Event("poisson", 16, n, s): k}) for n in (300, 900) for s in (1.0, 1.5) for k in (5, 10)]
    kinds.append(Counter({POISSON: 3, Event("poisson", 16, 900, 2.0): 3}))
    book = ledger(*(Receipt(i, t, kinds[i % 9]) for i in range(27) for t in range(40) if (i * t) % 11 < 1 + i % 4))
    book.announce(dict.fromkeys(range(40), 0.15))
    public = book.epsilons(DELTA, observer="public")
    assert book.epsilon(DELTA, "public") == max(public.values()) < book.epsilon(DELTA, "server")
    assert public.items() != book.epsilons(DELTA).items()


def test_what_was_spent_before_a_round_is_a_ledger_of_what_came_before() -> None:
    """A run that crashed has paid for rounds that are done again: until then they are in nobody's epsilon."""
    joined = {0: [0, 1, 4], 1: [1, 2, 5], 2: [4, 7]}
    whole = by_coins(8, joined, 0.4, TEN)
    for t in range(9):
        earlier, alone = (
            whole.before(t),
            by_coins(t, {i: [n for n in rounds if n < t] for i, rounds in joined.items()}, 0.4, TEN),
        )
        assert (earlier is whole) == (t == 8)
        assert earlier.announced == alone.announced
        for observer in ("server", "public"):
            assert earlier.epsilons(DELTA, observer=observer) == alone.epsilons(DELTA, observer=observer)
    once = ledger(Receipt(0, 0, TEN), Receipt(0, 3, TEN))
    assert once.before(4) is once
    assert once.before(3).epsilon(DELTA) == ledger(Receipt(0, 0, TEN)).epsilon(DELTA) < once.epsilon(DELTA)
    assert once.epsilon(DELTA) == ledger(Receipt(0, 3, TEN), Receipt(0, 0, TEN)).epsilon(DELTA), "and stays what it was"


def test_a_sure_coin_or_none_makes_public_and_server_one() -> None:
    always = by_coins(5, {0: list(range(5))}, 1.0, TEN)
    drawn = ledger(Receipt(0, 0, TEN), Receipt(0, 3, TEN))
    for book in (always, drawn, Ledger()):
        assert book.epsilon(DELTA, "public") == book.epsilon(DELTA, "server")
        assert book.epsilons(DELTA, observer="public") == book.epsilons(DELTA, observer="server")


def test_a_round_of_another_price_or_drawn_otherwise_ends_the_average() -> None:
    joined = {0: list(range(30)), 1: list(range(30))}
    for spoilt in (Receipt(0, 35, Counter({POISSON: 9})), Receipt(0, 45, TEN)):
        book = by_coins(40, joined, 0.2, TEN)
        book.post([spoilt])
        server, public = book.epsilons(DELTA), book.epsilons(DELTA, observer="public")
        assert public[0] == server[0]
        assert public[1] < server[1]
        assert "Without an average: 1" in book.statement(DELTA)


def test_rounds_that_nobody_announced_count_as_tosses_too() -> None:
    """A gap in the announcements must not make it cheaper."""
    book = ledger(*(Receipt(0, t, TEN) for t in (0, 39)))
    book.announce({0: 0.01, 39: 0.01})
    assert epsilon(TEN, DELTA, rounds=40, rate=0.01) < book.epsilon(DELTA, "server")
    assert book.epsilon(DELTA, "public") == epsilon(TEN, DELTA, rounds=40, rate=0.01)


def test_a_trusted_server_is_no_one_that_the_noise_holds_off() -> None:
    book = ledger(*(Receipt(EVERYBODY, t, Counter({CLIENT: 1})) for t in range(50)))
    assert book.epsilon(DELTA) == book.epsilon(DELTA, "public") == epsilon({replace(CLIENT, unit="example"): 50}, DELTA)
    assert book.epsilon(DELTA, "server") == math.inf
    assert book.epsilons(DELTA, observer="server") == {EVERYBODY: math.inf}
    with pytest.raises(InputError, match="'example' and 'client' are mixed"):
        ledger(*book, Receipt(0, 0, TEN)).epsilon(DELTA)


# The statement


def test_the_statement_says_what_is_promised_and_to_whom() -> None:
    spent = {10: 2, 400: 30, 1000: 20, 2000: 10}
    receipts = (Receipt(n, 0, Counter({Event("poisson", 16, n, 2.0): steps})) for n, steps in spent.items())
    book = ledger(*receipts)
    text = book.statement(DELTA)
    worst, _, median, _ = sorted(book.epsilons(DELTA).values(), reverse=True)
    assert worst == book.epsilons(DELTA)[10]
    for value in (worst, book.epsilon(DELTA, accountant="rdp")):
        assert f"{math.ceil(value * 1e4) / 1e4:.4f}" in text  # never rounded down
    assert f"{math.ceil(sorted(book.epsilons(DELTA).values())[2] * 1e4) / 1e4:.4f} by PLD" in text
    assert median < worst
    for fact in (
        "delta = 1e-05",
        "PLD",
        "RDP",
        "4 took part",
        "rate 1, no amplification): 1.",
        "one record of one client",
        "add or remove one record",
        "Poisson",
        "Observer: the server",
        "public: the clients' sizes, the batch sizes, the participation",
        "keys it by the seed",
        "experiments only",
        "secure generator",
    ):
        assert fact in text
    assert "inf" not in text
    assert "replace" not in text


def test_the_statement_names_the_other_neighbours() -> None:
    text = ledger(Receipt(0, 0, Counter({FIXED: 20}))).statement(DELTA)
    assert "replace one record" in text
    assert "2C" in text
    assert "without replacement" in text
    assert "add or remove" not in text
    assert "Poisson" not in text


def test_the_statement_does_not_hide_a_release_without_noise() -> None:
    book = ledger(Receipt(0, 0, Counter({POISSON: 1})), Receipt(1, 0, Counter({NOISELESS: 1})))
    text = book.statement(DELTA)
    assert text.startswith("epsilon = inf: not private. 1 of 2 clients released something without noise")
    assert Ledger().statement(DELTA).startswith("epsilon = 0")


def test_the_statement_warns_of_a_delta_that_would_allow_to_publish_a_record() -> None:
    book = ledger(Receipt(0, 0, TEN), Receipt(1, 0, Counter({Event("poisson", 16, 5000, 1.0): 1})))
    assert "Warning: delta is not below 1 / 5000. Who published one of the 5000 records" in book.statement(2e-4)
    assert "Warning" not in book.statement(1.9e-4)
    everybody = ledger(Receipt(EVERYBODY, 0, Counter({CLIENT: 1})))
    assert "one of 200 clients" in everybody.statement(0.01)


def test_the_statement_shows_how_the_clients_are_spread() -> None:
    book = ledger(*(Receipt(i, 0, Counter({POISSON: 10 * (i + 1)})) for i in range(30)))
    text = book.statement(DELTA)
    assert text.count("█") == 30
    assert "By PLD, 30 clients:" in text
    least, most = min(book.epsilons(DELTA).values()), max(book.epsilons(DELTA).values())
    assert re.search(rf"{math.ceil(least * 1e4) / 1e4:.4f} to \d", text)
    assert re.search(rf"to {math.ceil(most * 1e4) / 1e4:.4f}  █", text)
    many = ledger(*(Receipt(i, 0, Counter({POISSON: 1 + i})) for i in range(100)), Receipt(100, 0, Counter({NOISELESS: 1})))
    assert "By PLD, 34 of the 101 clients:" in many.statement(DELTA)
    assert re.search(r"inf  1$", many.statement(DELTA), re.MULTILINE)
    assert "█" not in ledger(*(Receipt(i, 0, TEN) for i in range(30))).statement(DELTA)


def test_the_statement_names_the_public_where_coins_were_tossed() -> None:
    book = by_coins(40, {0: list(range(30)), 1: [3]}, 0.2, TEN)
    text = book.statement(DELTA)
    assert text.startswith(f"epsilon = {math.ceil(book.epsilon(DELTA) * 1e4) / 1e4:.4f}: the price of one record")
    assert f"models: {math.ceil(book.epsilon(DELTA, 'public') * 1e4) / 1e4:.4f} by PLD" in text
    for fact in ("each of 40 rounds by an independent coin", "not amplified", "Without an average: 0"):
        assert fact in text


def test_the_statement_of_a_client_as_the_unit() -> None:
    text = ledger(*(Receipt(EVERYBODY, t, Counter({CLIENT: 1})) for t in range(50))).statement(DELTA)
    for fact in (
        "the price of one client, at delta",
        "add or remove one client",
        "Clients: 200.",
        "drawn or not",
        "Observer: the public",
    ):
        assert fact in text
    for other in ("record of one client", "Observer: the server", "median", "took part, so"):
        assert other not in text
    assert "Against the server epsilon is inf" in text
    replaced = ledger(Receipt(EVERYBODY, 0, Counter({replace(CLIENT, sampling="fixed"): 1}))).statement(DELTA)
    assert "replace one client by another" in replaced
    bare = ledger(Receipt(EVERYBODY, 0, Counter({replace(CLIENT, sigma=0.0): 1}))).statement(DELTA)
    assert bare.startswith("epsilon = inf: not private. The server released something without noise")


def test_importing_the_ledger_does_not_import_the_accountants() -> None:
    check = "import sys, dpfed.ledger; sys.exit('dp_accounting' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
