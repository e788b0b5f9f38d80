"""Many short runs one after the other in one process, so that they share their compiled programs.

Every contestant's learning rate is searched on the first seed alone: from a centre to neighbours a factor away, and on as long
as the best one lies at an end of what was tried. Then the best, by the accuracy on the test records, runs with the other seeds.
So the first seed's column is a little flattered, and every contestant is flattered alike. The search goes by waves, one run for
everybody and then the next, and has to wait for the other seeds after three quarters of the time: what is cut off leaves a
table with everybody in it.

A line is written to ``--results`` after every run, and what is there is not run again: killed, or out of time, start it again.
A run that ends by an error that nobody foresaw is a line with the error; the others go on, and another start tries it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpfed import InputError, Recipe, Simulation
from dpfed.rounds import begin

SHARE = 0.75  # of the time is for the search, the rest for the other seeds

Line = dict[str, Any]
Known = dict[tuple[str, float, int], Line]


class Contestant(NamedTuple):
    """``run(lr, seed)``: what is to be known of a run, as its accuracy. ``like``: whose rate it takes, without a search."""

    name: str
    centre: float
    run: Callable[[float, int], Line]
    like: str = ""


def rounded(lr: float) -> float:
    """The same number, however it was come by."""
    return float(f"{lr:.4g}")


def next_rate(found: dict[int, float], most: int) -> int | None:
    """The next exponent of the factor: the centre, on from whichever end the best one lies at; None where it lies between.

    >>> tried = {}, {1: 0.2}, {0: 0.3}, {0: 0.3, 1: 0.2}, {-1: 0.1, 0: 0.3, 1: 0.2}, {0: 0.3, 1: 0.4}
    >>> [next_rate(found, 5) for found in tried]
    [0, 0, 1, -1, None, 2]
    """
    if 0 not in found:
        return 0
    best, low, high = max(found, key=found.__getitem__), min(found), max(found)
    if len(found) >= most or low < best < high:
        return None
    return high + 1 if best == high else low - 1


def searched(known: Known, name: str) -> dict[float, float]:
    """The accuracy by learning rate on the first seed; below everything where the run did not end."""
    mine = {lr: line["accuracy"] for (whose, lr, seed), line in known.items() if (whose, seed) == (name, 0)}
    return {lr: -1.0 if accuracy is None else accuracy for lr, accuracy in sorted(mine.items())}


def best(known: Known, name: str) -> float | None:
    """The learning rate that did best on the first seed."""
    ended = {lr: accuracy for lr, accuracy in searched(known, name).items() if accuracy >= 0}
    return max(ended, key=ended.__getitem__) if ended else None


def missing(
    contestants: Sequence[Contestant], known: Known, chosen: argparse.Namespace, until: float
) -> Iterator[tuple[Contestant, float, int]]:
    """What is to be run, as it follows from what is known: the caller adds to it before drawing the next.

    First the search until then, and the other seeds; then what is left of both. Where rates are given, those alone.
    """
    if chosen.rates:
        asked = product(map(rounded, chosen.rates), range(chosen.seeds), contestants)
        yield from ((at, lr, seed) for lr, seed, at in asked if (at.name, lr, seed) not in known)
        return

    def rates(at: Contestant) -> list[float]:
        return [rounded(at.centre * chosen.factor**exponent) for exponent in range(-chosen.most, chosen.most + 1)]

    def following(at: Contestant) -> float | None:
        if any("crash" in line for (name, _, _), line in known.items() if name == at.name):
            return None
        found, tried = searched(known, at.name), rates(at)
        place = next_rate({n - chosen.most: found[lr] for n, lr in enumerate(tried) if lr in found}, chosen.most)
        return None if place is None else tried[place + chosen.most]

    for end in (until, math.inf):
        while wave := [(at, lr) for at in contestants if not at.like and (lr := following(at)) is not None]:
            for at, lr in wave:
                if time.monotonic() < end:
                    yield at, lr, 0
            if time.monotonic() >= end:
                break
        for seed in range(chosen.seeds):
            for at in contestants:
                lr = best(known, at.like or at.name)
                if lr is not None and (at.name, lr, seed) not in known:
                    yield at, lr, seed


def tried(recipe: Recipe, chosen: argparse.Namespace) -> Line:
    """One run, in a folder that is thrown away. Where it takes too long, diverges or does not fit, the line says why.

    ``startup`` seconds went into programs, which later runs of the process share; they do not count as too long.
    """
    began, startup, why, notes = time.monotonic(), 0.0, "", list[str]()
    with tempfile.TemporaryDirectory() as folder:
        record, rows = begin(recipe, Path(folder) / "run", engine=lambda job: recipe.engine.open(job, chosen.backend))
        try:
            for row in rows:
                startup += row.get("startup_seconds", 0.0)
                notes += row.get("notes", [])
                if time.monotonic() - began - startup > chosen.limit:
                    why = f"more than {chosen.limit:g} seconds"
                    break
        except (InputError, torch.OutOfMemoryError) as error:
            why = str(error).partition(". Lower it")[0][:200]
        rows.close()
        summary = record.summary()
        sigma = record.recipe["sigma"]
    gc.collect()
    torch.cuda.empty_cache()  # what a CUDA graph held is not given back, not even to the next one, before this
    found = {"rounds": summary["rounds"], "seconds": round(time.monotonic() - began, 1), "startup": round(startup, 1)}
    found |= {"notes": notes} if notes else {}
    if why:
        return {"accuracy": None, "why": why} | found
    epsilon = None if math.isinf(summary["epsilon"]) else round(summary["epsilon"], 4)
    return {"accuracy": summary["final_accuracy"], "epsilon": epsilon, "sigma": round(sigma, 4)} | found


def engine(chosen: argparse.Namespace) -> Simulation:
    return Simulation(chosen.device, chosen.memory, precision=chosen.precision, compile=chosen.compile)


def ended(at: Contestant, lr: float, seed: int) -> Line:
    """What came of a run; an error that nobody foresaw is written down, so that the other runs still have their turn."""
    try:
        return at.run(lr, seed)
    except Exception:
        return {"accuracy": None, "crash": traceback.format_exc()[-800:]}


def run_all(contestants: Sequence[Contestant], chosen: argparse.Namespace) -> Known:
    """Run what is missing, as far as the time goes, and say what is known then."""
    known: Known = {}
    for path in [*chosen.known, *([chosen.results] if chosen.results.exists() else [])]:
        for line in map(json.loads, path.read_text().splitlines()):
            if "crash" not in line:
                known[line["name"], rounded(line["lr"]), line["seed"]] = line
    began, complete = time.monotonic(), True
    mine = [at for at in contestants if any(fnmatch(at.name, pattern) for pattern in chosen.only)]
    with chosen.results.open("a") as file:
        for at, lr, seed in missing(mine, known, chosen, began + SHARE * chosen.budget):
            if time.monotonic() - began >= chosen.budget:
                complete = False
                break
            line = {"name": at.name, "lr": lr, "seed": seed} | ended(at, lr, seed)
            known[at.name, lr, seed] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(line, flush=True)
    print(f"{len(known)} runs, {time.monotonic() - began:.0f} s now{'' if complete else '; not all: start it again'}\n")
    return known


def scores(known: Known, at: Contestant, seeds: int) -> tuple[str, str]:
    """In percent, one number a seed; and the learning rate that was taken, with those tried besides in brackets."""
    lr = best(known, at.like or at.name)
    if lr is None:
        return "-", "-"
    found = [known.get((at.name, lr, seed), {}).get("accuracy") for seed in range(seeds)]
    others = [f"{other:.2g}" for other in searched(known, at.like or at.name) if other != lr]
    texts = ["-" if accuracy is None else f"{100 * accuracy:.1f}" for accuracy in found]
    return ", ".join(texts), f"{lr:.2g} ({', '.join(others)})"


def words(description: str | None) -> argparse.ArgumentParser:
    """The words of the command line that every table has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, required=True, help="a file of lines, one a run; what is in it is not run again")
    made.add_argument("--seeds", type=int, default=2)
    made.add_argument("--factor", type=float, default=4.0, help="between neighbouring learning rates")
    made.add_argument("--most", type=int, default=5, help="learning rates that are tried at most")
    made.add_argument("--limit", type=float, default=120.0, help="seconds for one run, its programs not counted")
    made.add_argument(
        "--budget", type=float, default=math.inf, help="seconds for all; the last run may end later; 0: only print"
    )
    made.add_argument("--known", type=Path, nargs="*", default=[], help="files of results that are read, too")
    made.add_argument("--only", nargs="*", default=["*"], help="contestants whose names match, such as 'Fed*'")
    made.add_argument("--rates", type=float, nargs="*", help="these learning rates on every seed, instead of a search")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--memory", type=float, help="GiB in flight")
    made.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--compile", default="no", choices=("auto", "yes", "no"), help="yes pays on a GPU")
    made.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager tries everything but the kernels")
    return made
