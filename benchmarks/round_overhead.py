"""What a round costs besides the arithmetic: a tiny model, one local step, dpfed beside pfl-research and Flower's simulation.

    python -m benchmarks.round_overhead --install peers    makes an environment in the folder "peers" (1.5 GB), and uses it
    python -m benchmarks.round_overhead --peers peers      everybody, in about five minutes
    python -m benchmarks.round_overhead                    dpfed alone

Every contestant is a process of its own (contestants.py) that trains so many rounds when it is told to; they take turns, so
that whatever else the machine does hits all of them alike. Flower works in several processes, so the wall clock is the one to
compare; the CPU clock is that of the contestant's own process. dpfed writes the charge of every round to the disk and waits for
it (fsync) before anything is released, which the others do not; that wait is in the wall clock and not in the CPU clock.

What is compared is a round of a long run: everybody has trained some rounds before the first turn, dpfed so many that what is
called 500 times was called so often and is a trace by then. What a round cost until then, the trace included, stands beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import tyro

from benchmarks.cohort_step import processor

HERE = Path(__file__).resolve().parent
PACKAGES = ("pfl==0.6.0", "flwr[simulation]==1.41.0")
DPFED, PFL, FLOWER = "dpfed", "pfl", "flower"
WARM = {DPFED: 1300, PFL: 100, FLOWER: 2}  # rounds; every second batch of one client needs a call more, to be traced, too
FIELD = (
    (DPFED, "plain"),
    (DPFED, "records private"),
    (DPFED, "clients private"),
    (PFL, "plain"),
    (PFL, "clients private"),
    (FLOWER, "plain"),
)


class Contestant(NamedTuple):
    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, python: Path, library: str, mechanism: str, num_clients: int, cohort: int) -> Contestant:
        words = [str(python), str(HERE / "contestants.py"), library, mechanism, str(num_clients), str(cohort)]
        setting = {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(HERE.parent) if library == DPFED else ""}
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | setting
        )
        return cls(f"{library}, {mechanism}", process)

    def milliseconds(self, num_rounds: int) -> tuple[float, float]:
        """Of one round, by the wall clock and by the CPU clock, as the mean of some."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(num_rounds, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} has ended: run benchmarks/contestants.py by hand to see why.")
        wall, cpu = json.loads(answer)
        return 1000 * wall / num_rounds, 1000 * cpu / num_rounds

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)


def make_environment(folder: Path) -> None:
    """A scratch environment with the peers; nothing else on the machine is touched."""
    venv.create(folder, with_pip=True, clear=True)
    for packages in ([f"torch=={torch.__version__.partition('+')[0]}"], list(PACKAGES)):
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)


def compare(peers: Path | None, num_clients: int, cohort: int, turns: int) -> None:
    theirs = None if peers is None else peers / "bin" / "python"
    pythons = {DPFED: Path(sys.executable), PFL: theirs, FLOWER: theirs}
    field = [(python, library, mechanism) for library, mechanism in FIELD if (python := pythons[library]) is not None]
    contestants = [Contestant.start(*who, num_clients, cohort) for who in field]
    rounds = [2 if library == FLOWER else max(10, 2000 // (20 + cohort)) for _, library, _ in field]
    first = [who.milliseconds(WARM[library])[1] for who, (_, library, _) in zip(contestants, field, strict=True)]
    taken = [[who.milliseconds(num) for who, num in zip(contestants, rounds, strict=True)] for _ in range(turns)]
    for who in contestants:
        who.stop()
    print(f"\n{cohort} of {num_clients} clients a round\n")
    print(f"| {'one round':24} | {'ms':>8} | {'CPU ms':>8} | {'before':>8} | {'x plain dpfed':>13} | {'by the CPU':>10} |")
    print(f"|{'-' * 26}|{'-' * 10}|{'-' * 10}|{'-' * 10}|{'-' * 15}|{'-' * 12}|")
    for place, who in enumerate(contestants):
        wall, cpu = (median(turn[place][clock] for turn in taken) for clock in (0, 1))
        ratio, by_cpu = (median(turn[place][clock] / turn[0][clock] for turn in taken) for clock in (0, 1))
        numbers = f"{wall:8.2f} | {cpu:8.2f} | {first[place]:8.2f} | {ratio:13.2f} | {by_cpu:10.2f}"
        print(f"| {who.name:24} | {numbers} |", flush=True)


def main(
    peers: Path | None = None,
    install: Path | None = None,
    cohorts: tuple[int, ...] = (1, 10, 100),
    turns: int = 7,
) -> None:
    """Time rounds of a tiny model.

    Args:
        peers: an environment with pfl and flwr[simulation]; without it, dpfed is timed alone.
        install: make that environment in this folder first, and use it.
        cohorts: clients in a round; one number for every table. There are twice as many to draw from.
        turns: how often everybody's turn comes.
    """
    if install is not None:
        make_environment(install)
        peers = install
    print(f"{processor()}; torch {torch.__version__}; a thread each; medians of {turns} turns")
    for cohort in cohorts:
        compare(peers, 2 * cohort, cohort, turns)


if __name__ == "__main__":
    tyro.cli(main)
