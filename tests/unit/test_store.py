"""A client's own ledger: what is charged stays charged, the budget holds, and what cannot be is said."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import dpfed.store
from dpfed.__main__ import main
from dpfed.errors import InputError
from dpfed.ledger import Event, epsilon, upwards
from dpfed.store import AlreadyChargedError, Charge, Store
from tests.unit.test_record import full_disk, ordinary_user

EVENT = Event("poisson", 16, 1000, 1.0)
ROUND = Counter({EVENT: 10})
FITTING = 96  # rounds of 10 steps in epsilon = 3, see tests/stats


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "client 7?.db", 3.0, 1e-5)


def test_what_is_charged_is_read_back(store: Store) -> None:
    charges = [
        Charge("a", 0, ROUND),
        Charge("b", 0, Counter({EVENT: 3, Event("poisson", 8, 1000, 2.0): 1})),
        Charge("a", 1, ROUND),
    ]
    for run, t, events in charges:
        store.charge(run, t, events)
    again = Store(store.path)
    assert again.charges() == charges
    assert (again.epsilon, again.delta) == (3.0, 1e-5)
    total = charges[0].events + charges[1].events + charges[2].events
    assert again.ledger().events(0) == total
    assert again.ledger().epsilon(1e-5) == epsilon(total, 1e-5)


def test_at_rest_it_is_one_file(store: Store) -> None:
    store.charge("a", 0, ROUND)
    assert store.charges()
    assert os.listdir(store.path.parent) == [store.path.name]


def test_a_round_is_charged_once_also_with_other_events(store: Store) -> None:
    store.charge("a", 0, ROUND)
    for events in (ROUND, Counter({EVENT: 1})):
        with pytest.raises(AlreadyChargedError, match=r"round 0 of run 'a' .* Skip"):
            store.charge("a", 0, events)
    assert store.charges() == [Charge("a", 0, ROUND)]


def test_the_budget_holds_whatever_the_server_calls_its_rounds(store: Store) -> None:
    store.charge("long", 0, Counter({EVENT: 10 * (FITTING - 2)}))
    store.charge("other", 0, ROUND)
    store.charge("yet another", 2**62, ROUND)
    before = store.charges()
    for run in ("long", "new"):
        with pytest.raises(InputError, match=r"epsilon to 3\.0\d+ at delta = 1e-05; the budget is 3\. Nothing was charged"):
            store.charge(run, 1, ROUND)
    with pytest.raises(InputError, match="epsilon to inf"):
        store.charge("bare", 0, Counter({Event("poisson", 16, 1000, 0.0): 1}))
    assert store.charges() == before
    assert store.ledger().epsilon(1e-5) <= 3
    store.charge("long", 1, Counter({Event("poisson", 16, 1000, 50.0): 1}))  # what fits is still welcome


@pytest.mark.parametrize(
    ("run", "t", "events", "said"),
    [
        ("a", -1, ROUND, "t: must be a whole number"),
        ("a", 2**70, ROUND, "too large"),
        ("\ud800", 0, ROUND, "surrogates"),
        ("a", 0, Counter(), "nothing would be charged"),
        ("a", 0, Counter({EVENT: 0}), "nothing would be charged"),
        ("a", 0, Counter({EVENT: -1}), "count: must be a whole number"),
        ("a", 0, Counter({Event("fixed", 16, 1000, 9.0): 1}), "different neighbours"),
        ("a", 0, Counter({Event("poisson", 5, 10, 9.0, unit="client"): 1}), "no client can vouch"),
    ],
)
def test_an_impossible_charge_is_refused(store: Store, run: str, t: int, events: Counter[Event], said: str) -> None:
    store.charge("before", 0, ROUND)
    with pytest.raises(InputError, match=said):
        store.charge(run, t, events)
    assert store.charges() == [Charge("before", 0, ROUND)]


@pytest.mark.parametrize(("epsilon", "delta", "said"), [(0, 1e-5, "epsilon"), (float("inf"), 1e-5, "epsilon"), (1, 0, "delta")])
def test_an_impossible_budget_is_refused(tmp_path: Path, epsilon: float, delta: float, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}: must"):
        Store.create(tmp_path / "a.db", epsilon, delta)
    assert not list(tmp_path.iterdir())


# Several processes


def in_children(number: int, work: Callable[[int], None]) -> None:
    children: list[int] = []
    for i in range(number):
        child = os.fork()
        if child == 0:
            try:
                work(i)
                os._exit(0)
            except BaseException:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * number


@pytest.mark.parametrize("same_run", [True, False])
def test_racing_processes_take_no_more_than_there_is(store: Store, same_run: bool) -> None:
    store.charge("before", 0, Counter({EVENT: 10 * (FITTING - 5)}))

    def work(i: int) -> None:
        for t in range(6):
            try:
                Store(store.path).charge("race" if same_run else f"race {i}", t, ROUND)
            except AlreadyChargedError:
                pass
            except InputError as error:
                assert "the budget is 3" in str(error)  # noqa: PT017

    in_children(4, work)
    assert len(store.charges()) == 6, "all five that fit, and the one before"
    assert store.ledger().epsilon(1e-5) <= 3


def test_racing_to_make_the_file_makes_it_once(tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "a.db"

    def work(i: int) -> None:
        try:
            Store.create(path, 1.0 + i, 1e-5)
        except InputError as error:
            assert "exists already" in str(error)  # noqa: PT017
        else:
            made.open("a").write(f"{i}\n")

    in_children(4, work)
    assert [Store(path).epsilon] == [1.0 + int(line) for line in made.read_text().split()]


def test_one_writer_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpfed.store, "PATIENCE", 0.05)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(InputError, match="Another process is writing"):
        store.charge("a", 0, ROUND)
    assert store.charges() == [], "reading goes on"
    other.execute("ROLLBACK")
    store.charge("a", 0, ROUND)
    other.close()


# The disk


TRACE = """
import os, sys
from dpfed.store import Event, Store
for t in range(3):
    Store(sys.argv[1]).charge("a", t, {Event("poisson", 9, 9, 9.0): 1})
    os.write(2, b"released")
"""


@pytest.mark.slow
def test_a_charge_is_forced_to_the_disk_before_anything_is_released(store: Store, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    strace = shutil.which("strace")
    words = [strace or "strace", "--seccomp-bpf", "-fye", "trace=write,pwrite64,fsync,fdatasync", "-o", str(trace)]
    if strace is None or subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace is not there, or not allowed to look")
    subprocess.run([*words, sys.executable, "-c", TRACE, str(store.path)], check=True, capture_output=True)
    rounds = trace.read_text().split('"released"')[:-1]
    assert len(rounds) == 3
    for calls in rounds:
        log = [line.partition("(")[0].split()[-1] for line in calls.splitlines() if "db-wal>" in line]
        assert "pwrite64" in log
        assert log[-1] in ("fsync", "fdatasync"), "the last thing that happens to the log"


def test_a_full_disk_charges_nothing_and_loses_nothing(store: Store) -> None:
    store.charge("a", 0, ROUND)
    size = store.path.stat().st_size
    for num_bytes in (0, 100, size - 1, size):
        with full_disk(num_bytes), pytest.raises(InputError, match="Nothing was charged"):
            store.charge("a", 1, ROUND)
        assert Store(store.path).charges() == [Charge("a", 0, ROUND)]
    store.charge("a", 1, ROUND)


def test_what_is_read_only_can_be_read_and_not_charged() -> None:
    folder = Path(tempfile.mkdtemp())  # not pytest's, which an ordinary user may not enter
    store = Store.create(folder / "client.db", 100, 1e-5)
    store.charge("a", 0, ROUND)
    store.path.chmod(0o444)
    folder.chmod(0o555)
    try:
        with ordinary_user():
            assert Store(store.path).charges() == [Charge("a", 0, ROUND)]
            with pytest.raises(InputError, match=r"[Aa]llow writing"):
                store.charge("a", 1, ROUND)
            with pytest.raises(InputError, match="allow writing"):
                Store.create(folder / "new.db", 1, 1e-5)
        assert Store(store.path).charges() == [Charge("a", 0, ROUND)]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign, text, empty = tmp_path / "other.db", tmp_path / "text", tmp_path / "empty"
    other = sqlite3.connect(foreign)
    other.execute("CREATE TABLE charges (run, t, events)")
    other.commit()
    other.close()
    text.write_text("This is a text, and long enough to be taken for something. " * 20)
    empty.touch()
    for path in (foreign, text, empty):
        before = path.read_bytes()
        with pytest.raises(InputError, match="no ledger store"):
            Store(path)
        if path != empty:
            with pytest.raises(InputError, match=r"exists already|no ledger store"):
                Store.create(path, 1, 1e-5)
        assert path.read_bytes() == before
    assert Store.create(empty, 1, 1e-5).charges() == [], "what a killed create left behind"
    with pytest.raises(InputError, match="there is no ledger store here"):
        Store(tmp_path / "nowhere")
    with pytest.raises(InputError, match="in a folder that exists"):
        Store.create(tmp_path / "nowhere" / "a.db", 1, 1e-5)


def test_a_newer_version_is_not_guessed_at(store: Store) -> None:
    other = sqlite3.connect(store.path)
    other.execute("PRAGMA user_version = 2")
    other.close()
    for act in (lambda: Store(store.path), lambda: store.charge("a", 0, ROUND), store.charges):
        with pytest.raises(InputError, match=r"another version \(2\)"):
            act()


def test_damage_is_refused_and_never_trained_on(store: Store) -> None:
    for t in range(40):
        store.charge("a", t, Counter({Event("poisson", 9, 900, 90.0 + t): 1}))
    whole = store.path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:100], whole[:4096] + b"\xff" * 4096 + whole[8192:]):
        store.path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"put the file back|no ledger store"):
            Store(store.path).charge("b", 0, ROUND)
    store.path.write_bytes(whole)
    assert len(store.charges()) == 40


@pytest.mark.parametrize("text", ["", "[", "3", "[3]", "{}", json.dumps([[EVENT.to_json() | {"sigma": -1}, 1]]), '[["x", 1]]'])
def test_a_charge_that_says_nothing_is_refused(store: Store, text: str) -> None:
    other = sqlite3.connect(store.path)
    other.execute("INSERT INTO charges VALUES ('a', 0, ?)", (text,))
    other.commit()
    other.close()
    for act in (store.charges, lambda: store.charge("a", 1, ROUND)):
        with pytest.raises(InputError, match="this is no charge"):
            act()


# The command line


def test_the_command_ledger_reads_a_store(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for run, t in (("first", 0), ("first", 1), ("second", 0)):
        store.charge(run, t, ROUND)
    main(("ledger", str(store.path)))
    said = " ".join(capsys.readouterr().out.split())
    total = Counter({EVENT: 30})
    for part in (
        upwards(epsilon(total, 1e-5)),
        upwards(epsilon({EVENT: 20}, 1e-5)),
        "first",
        "second",
        "add or remove one record",
    ):
        assert part in said
    assert "Budget: epsilon = 3 at delta = 1e-05" in said


def test_the_command_ledger_refuses_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no")
    with pytest.raises(SystemExit):
        main(("ledger", str(tmp_path / "text")))
    assert "no ledger store" in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-examples 1000 --batch-size 16 --steps 2000", "sigma = 1.23"),
        ("--num-examples 1000 --batch-size 16 --sigma 1 --find steps --local-steps 10", "steps = 960 (960 steps of 16"),
        ("--num-examples 1000 400 --sigma 1 --steps 2000 --find batch-size", "Of 1000 records alone: batch-size = 11"),
        (
            "--num-examples 1000 --batch-size 16 --sigma 1 --steps 2000 --local-steps 10 --find participation",
            "participation = 0.4",
        ),
        ("--num-examples 1000 --steps 200 --sampling fixed --accountant rdp", "fixed sampling: epsilon = 2.99"),
    ],
)
def test_the_command_calibrate_finds_what_is_asked_for(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(("calibrate", "--epsilon", "3", *words.split()))
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-examples 1000 --steps 10 --sigma 1", "--sigma: was given, but is to be found"),
        ("--num-examples 1000", "--steps: is missing"),
        ("--num-examples 1000 --steps 15 --local-steps 10", "whole rounds of 10"),
        ("--num-examples --steps 10", "--num-examples: name at least one"),
        ("--num-examples 9 --steps 10 --sigma 0.1 --find batch-size", "not even the least batch-size"),
    ],
)
def test_the_command_calibrate_refuses(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("calibrate", *words.split()))
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
