"""The ledger as a book: what is posted, what is refused, what can be stored, and what the statement says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.errors import InputError
from dpfed.ledger import Event, Ledger, Receipt, calibrate, epsilon

POISSON = Event("poisson", 16, 1000, 1.0)
FIXED = Event("fixed", 16, 1000, 1.0)
NOISELESS = Event("poisson", 16, 1000, 0.0)
DELTA = 1e-5

events = st.builds(
    Event,
    st.sampled_from(["poisson", "fixed"]),
    st.integers(1, 10**6),
    st.integers(1, 10**9),
    st.floats(0, 1e6, allow_nan=False),
)


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
    with pytest.raises(InputError, match="choose one of: server"):
        book.epsilon(DELTA, observer="public")
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


def test_importing_the_ledger_does_not_import_the_accountants() -> None:
    check = "import sys, dpfed.ledger; sys.exit('dp_accounting' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
