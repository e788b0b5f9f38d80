"""Every number of docs/privacy.md, computed; and a number there that is computed here nowhere is an error."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dpfed import secure
from dpfed.ledger import Event, calibrate, epsilon, upwards

PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
DELTA = 1e-5


def rows(first: str) -> list[list[str]]:
    """The body of the table whose first column is called so, as words."""
    lines = PAGE.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    return [[word.strip() for word in line.strip("|").split("|")] for line in lines[start:end]]


def step(num_examples: int = 1000, sigma: float = 1.0, sampling: str = "poisson", owned: int = 1) -> Event:
    return Event(sampling, 16, num_examples, sigma, owned=owned)  # type: ignore[arg-type]


def price(event: Event, num: int = 200, accountant: str = "pld") -> str:
    return upwards(epsilon({event: num}, DELTA, accountant))


def percent(share: float) -> str:
    return f"{upwards(100 * min(share, 1.0), digits=1)} %"


KNOWN = Event("poisson", 9, 9, 1.0)  # a batch of which everybody knows that the record is in it

SENTENCES = [
    f"where one record costs {price(step())} (200 steps, batches of 16, sigma 1), that person pays {price(step(owned=5))}.",
    f"would cost a record in its batch {price(KNOWN, 1)}, and four {price(KNOWN, 4)}, where all 200 together are stated as "
    f"{price(step())}.",
    f"are another mechanism with other neighbours, and cost {price(step(sampling='fixed'))}.",
    f"Ten runs of 200 steps cost what one of 2000 does: {price(step(), 2000)} instead of {price(step())}.",
    f"a client of 100 records pays {price(step(100))}, one of 10000 pays {price(step(10_000))}.",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentences_say_what_is_computed(sentence: str) -> None:
    assert sentence in TEXT


def test_what_an_attacker_can_guess() -> None:
    found = rows("epsilon")
    assert len(found) == 5
    for said, right, accused in found:
        factor = math.exp(float(said))
        assert right == percent((factor + DELTA) / (1 + factor))
        assert accused == percent(0.01 * factor + DELTA)


def test_the_prices_of_the_appendix() -> None:
    found = rows("batches of 16 out of 1000, delta 1e-5")
    assert len(found) == 6
    for kind, sigma, pld, rdp in found:
        num, sampling = int(kind.split()[0]), "fixed" if "fixed" in kind else "poisson"
        event = step(sigma=float(sigma), sampling=sampling)
        assert (pld, rdp) == (price(event, num), price(event, num, "rdp"))
        if "for epsilon" in kind:
            target = float(kind.split()[-1])
            assert sigma == upwards(calibrate(target, DELTA, [{step(): num}]))
            assert epsilon({event: num}, DELTA) <= target


def test_what_floating_point_adds() -> None:
    """Sums of n terms are off by n^2 u C at the very worst, of each of two neighbours; a norm by 2^-16 in float32."""
    single, double = (list(secure.SLACK.values())[i] for i in (0, 1))
    assert upwards(100 * single, digits=1) == "0.1"
    assert (single, double) == (2.0**-10, 2.0**-30)
    assert single > 2 * 80**2 * 2.0**-24 + 2.0**-15
    assert double > 2 * 2000**2 * 2.0**-53 + 2.0**-40
    for fact in ("with 0.1 % more noise in float32", "In batches above 80 records", "proven up to 2000"):
        assert fact in TEXT


def test_no_other_number_stands_there() -> None:
    computed = set(re.findall(r"\d+\.\d+", " ".join([*SENTENCES, "0.1 % 1.5 sqrt(d)"])))
    for table in ("epsilon", "batches of 16 out of 1000, delta 1e-5"):
        computed |= {number for row in rows(table) for word in row for number in re.findall(r"\d+\.\d+", word)}
    assert set(re.findall(r"(?<!arXiv )\b\d+\.\d+", TEXT)) == computed


def test_it_names_what_is_not_promised_and_is_linked() -> None:
    for fact in (
        "keyed by the seed",
        "secure aggregation**, which is assumed and not built",
        "Clocks",
        "Tune on public data",
        "pretrained model",
        "Batches have to be secret and independent",
    ):
        assert fact in TEXT
    for page in ("README.md", "docs/tour.md"):
        assert "privacy.md" in (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / link).is_file()
